"""CuPy without a GPU, as far as kernels are compiled and loaded by it: NVRTC that only listens, modules of what it gave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class CompileException(Exception):  # noqa: N818  its name
    """As CuPy's: raised for a source that holds the word `error`."""


class FakeCupy:
    """compiled: source, options and file name of each compilation; loaded: machine code of each module."""

    def __init__(self, version: str = "14.2.0", nvrtc: tuple[int, int] = (12, 9), capability: str = "90") -> None:
        self.__version__ = version
        self.compiled: list[tuple[str, tuple[str, ...], str]] = []
        self.loaded: list[bytes] = []
        self.device = 0
        self.runs_on = 12090
        runtime = SimpleNamespace(
            getDevice=lambda: self.device,
            runtimeGetVersion=lambda: self.runs_on,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            nvrtc=SimpleNamespace(getVersion=lambda: nvrtc),
            Device=lambda: SimpleNamespace(compute_capability=capability),
            compiler=SimpleNamespace(compile_using_nvrtc=self._compile),
            function=SimpleNamespace(Module=lambda: FakeModule(self)),
        )

    def _compile(self, source: str, options: tuple[str, ...] = (), *, filename: str) -> tuple[bytes, Any]:
        if "error" in source:
            raise CompileException("expected a ;")
        self.compiled.append((source, options, filename))
        return f"code {len(self.compiled)} of {filename}".encode(), None


class FakeModule:
    """As cupy.cuda.function.Module."""

    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy = cupy
        self.code = b""

    def load(self, code: bytes) -> None:
        assert type(code) is bytes
        self.cupy.loaded.append(code)
        self.code = code

    def get_function(self, name: str) -> tuple[bytes, str]:
        return self.code, name
