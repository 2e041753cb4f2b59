"""Stand-ins for the NVIDIA driver and its management library: a machine whose GPUs CUDA shows in an order of its own."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mggcn.backend.cuda.driver import Gpu, visible_gpus


@dataclass(frozen=True)
class Card:
    """A GPU as the libraries know it. kind: GPU, or MIG for an instance of one."""

    number: int
    free: int
    kind: str = "GPU"

    @property
    def uuid(self) -> str:
        return str(uuid.UUID(int=0xABCD << 64 | self.number))

    @property
    def pci(self) -> str:
        return f"0000:{self.number:02X}:00.0"


@dataclass
class Machine:
    """shown: the cards in CUDA's order. hidden: those that the management library knows besides, before the others.

    absent: libraries that are not there; failing: a function that returns 15. context_bytes: what a context takes.
    """

    shown: Sequence[Card]
    hidden: Sequence[Card] = ()
    absent: frozenset[str] = frozenset()
    failing: str = ""
    context_bytes: int = 0
    open: int = 0
    contexts: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """Cards whose memory the management library told."""

    def load(self, name: str) -> Any:
        if name in self.absent:
            raise OSError(f"{name}: cannot open shared object file")
        return _Library(self, {"libcuda.so.1": self.driver, "libnvidia-ml.so.1": self.management}[name])

    def visible(self) -> list[Gpu]:
        return visible_gpus(self.load)

    def driver(self, name: str, *args: Any) -> int:
        if name == "cuInit":
            return 0 if self.shown else 100
        if name == "cuDeviceGetCount":
            args[0]._obj.value = len(self.shown)
        elif name == "cuDeviceGet":
            args[0]._obj.value = args[1].value
        elif name == "cuDeviceGetUuid_v2":
            ctypes.memmove(args[0]._obj, uuid.UUID(self.shown[args[1].value].uuid).bytes, 16)
        elif name == "cuDeviceGetPCIBusId":
            args[0].value = self.shown[args[2].value].pci.encode()
        elif name == "cuDevicePrimaryCtxRetain":
            self.contexts.append(args[1].value)
            args[0]._obj.value = args[1].value + 1
        elif name == "cuMemGetInfo_v2":
            args[0]._obj.value = self.shown[self.contexts[-1]].free - self.context_bytes
        elif name == "cuDevicePrimaryCtxRelease_v2":
            self.contexts.remove(args[0].value)
        return 0

    def management(self, name: str, *args: Any) -> int:
        cards = [*self.hidden, *sorted(self.shown, key=lambda card: card.number)]
        if name == "nvmlInit_v2":
            self.open += 1
        elif name == "nvmlShutdown":
            self.open -= 1
        elif name == "nvmlDeviceGetHandleByUUID":
            found = [place for place, card in enumerate(cards, 1) if f"{card.kind}-{card.uuid}".encode() == args[0]]
            if not found:
                return 6
            args[1]._obj.value = found[0]
        elif name == "nvmlDeviceGetMemoryInfo":
            card = cards[args[0].value - 1]
            self.asked.append(card.number)
            args[1]._obj.free = card.free
        return 0


class _Library:
    def __init__(self, machine: Machine, answer: Callable[..., int]) -> None:
        self._machine = machine
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 15 if name == self._machine.failing else self._answer(name, *args)
