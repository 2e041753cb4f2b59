"""An emulated device that counts what a GPU would be given to do: kernels, copies and fills, each a node of a CUDA graph.

A kernel of ours is one node. An operation of torch is one or none, by the tables below; one that they lack is an error.
A product that sums over rows counts twice: cuBLAS may split it and add the parts in a second kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulator.device import EmulatedDevice

VIEWS = {
    *("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "t", "transpose", "unsqueeze"),
    *("view", "_unsafe_view", "reshape", "_reshape_alias"),
}
"""Operations that look at memory in another way and launch nothing."""
LAUNCHES = {
    *("add", "add_", "addmm_", "copy_", "fill_", "index_copy_", "index_select", "mm", "mul_", "sub_", "zero_"),
    *("_foreach_add_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
}
"""Operations that are one kernel, copy or fill."""
PRODUCTS = {"mm", "addmm_"}


class UncountedError(Exception):
    """An operation of torch of which nobody has said how many nodes it is."""


class CountingDevice:
    """An EmulatedDevice that counts in `nodes`, by name; see mggcn/backend/cuda/base.py.

    work: whether what is counted is also done; if not, buffers keep what they held.
    """

    def __init__(self, seed: int = 0, *, work: bool = True) -> None:
        self._inner = EmulatedDevice(seed=seed)
        self._work = work
        self.counting = False
        self.nodes: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compile(self, path: Path, options: tuple[str, ...]) -> Any:
        return _CountedModule(self, path, options)

    def mixed_matmul(self, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
        if self.counting:
            self.nodes["mm"] += product_nodes(a)
        if self._work:
            # One product of a GPU, several operations of the host.
            counting, self.counting = self.counting, False
            self._inner.mixed_matmul(a, b, out, accumulate=accumulate)
            self.counting = counting

    def count(self, function: Callable[[], object]) -> Counter[str]:
        """Run `function` and return the nodes that a recording of it would have."""
        self.nodes, self.counting = Counter(), True
        try:
            with _Operations(self):
                function()
        finally:
            self.counting = False
        return self.nodes

    def launched(self, name: str) -> bool:
        """Count a kernel of ours; return whether to run it."""
        if self.counting:
            self.nodes[name] += 1
        return self._work


def product_nodes(a: Tensor) -> int:
    """Nodes of a dense product with the left operand `a`: a transposed one is that of a weight gradient."""
    return 1 if a.stride(-1) == 1 and a.stride(0) >= a.shape[1] else 2


class _Operations(TorchDispatchMode):
    """Counts operations of torch for a device."""

    def __init__(self, device: CountingDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in VIEWS or not self._device.counting:
            return func(*args, **kwargs)
        if name not in LAUNCHES:
            raise UncountedError(
                f"{func} is in neither table of tests/emulator/launches.py; say there what it launches"
            )
        left = args[0] if name == "mm" else args[1] if name in PRODUCTS else None
        self._device.nodes[name] += 1 if left is None else product_nodes(left)
        if self._device._work:
            return func(*args, **kwargs)
        return kwargs.get("out", args[0] if isinstance(args[0], Tensor) else None)


class _CountedModule:
    def __init__(self, device: CountingDevice, path: Path, options: tuple[str, ...]) -> None:
        self._device = device
        self._module = device._inner.compile(path, options) if device._work else None

    def get_function(self, name: str) -> Callable[..., None]:
        function = self._module.get_function(name) if self._module is not None else None

        def launch(grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
            if self._device.launched(name) and function is not None:
                function(grid, block, args, shared_mem=shared_mem)

        return launch
