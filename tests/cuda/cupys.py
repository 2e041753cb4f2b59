"""The real CuPy and NVRTC without a GPU: what a process that has them on its paths is asked, and what it answers.

    python -m tests.cuda.cupys KIND ...

KIND: a file of cuda/ and a type, such as spmm.cu:F32. The process compiles what samples() has of it by
mggcn/backend/cuda/compile.py and prints what came of it as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.cuda.nvcc import COMPILERS

FOLDER = COMPILERS.with_name("cupys")
"""Where `make .venv/cupys` puts a CuPy for CUDA 12 and one for CUDA 13 with their libraries (groups `cupy12`, `cupy13`)."""
CUDAS = (12, 13)
CAPABILITY = "90"
USED = (
    *("cuda.Device", "cuda.Stream", "cuda.compiler.compile_using_nvrtc", "cuda.function.Module.load"),
    *("cuda.function.Module.get_function", "cuda.is_available", "cuda.nvrtc.getVersion"),
    *("cuda.runtime.CUDARuntimeError", "cuda.runtime.driverGetVersion", "cuda.runtime.getDevice"),
    *("cuda.runtime.getDeviceProperties", "cuda.runtime.hostRegister", "cuda.runtime.hostUnregister"),
    "cuda.runtime.runtimeGetVersion",
)
"""What mggcn asks CuPy for."""


def find(cuda: int) -> Path | None:
    """Return the folder of CuPy for a CUDA."""
    return FOLDER / str(cuda) if (FOLDER / str(cuda) / "cupy").is_dir() else None


def libraries(folder: Path) -> list[Path]:
    """Return the folders of NVIDIA's libraries beside a CuPy."""
    return sorted({path.parent for path in folder.glob("nvidia/*/lib/*.so*")})


def ask(folder: Path, cache: Path, kinds: list[str]) -> dict[str, Any]:
    """Run this module with a CuPy; return its answer."""
    checkout = str(Path(__file__).resolve().parents[2])
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), checkout]),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries(folder))),
        "CUPY_CACHE_DIR": str(cache),
    }
    command = [sys.executable, "-m", "tests.cuda.cupys", *kinds]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUDA path could not be detected")
        import cupy
    warnings.simplefilter("error")
    from mggcn.backend.cuda.compile import load_kernels
    from mggcn.backend.cuda.device import cupy_stream
    from mggcn.backend.cuda.kernels import parameters
    from tests.cuda.units import all_units, samples

    loaded: list[bytes] = []
    # What asks a driver stands in: the device, its capability, and the module that takes machine code.
    compiler = cupy.cuda.compiler
    compiler._get_arch_for_options_for_nvrtc = lambda *args: (f"-arch=sm_{CAPABILITY}", "cubin")
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 0),
        nvrtc=cupy.cuda.nvrtc,
        compiler=compiler,
        Device=lambda: SimpleNamespace(compute_capability=CAPABILITY),
        function=SimpleNamespace(Module=lambda: SimpleNamespace(load=loaded.append)),
    )
    stand_in = type("CuPy", (), {"__version__": cupy.__version__, "cuda": cuda})
    units = {f"{unit.path.name}:{unit.options[0].removeprefix('-DMGGCN_')}": unit for unit in samples(all_units())}
    kernels = {}
    for kind in sys.argv[1:]:
        load_kernels(stand_in, units[kind].path, units[kind].options)
        code, names = loaded[-1], parameters(units[kind].path.read_text())
        kernels[kind] = code[:4] == b"\x7fELF" and all(f".text.{name}\0".encode() in code for name in names)
    stream = cupy_stream(cupy, 4096, 0)
    answer = {
        "cupy": cupy.__version__,
        "nvrtc": cupy.cuda.nvrtc.getVersion(),
        "missing": [name for name in USED if not _has(cupy, name)],
        "stream": stream.ptr,
        "kernels": kernels,
    }
    print(json.dumps(answer))


def _has(module: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True


if __name__ == "__main__":
    main()
