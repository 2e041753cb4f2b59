"""Rows that lie in the host's memory between the forward and the backward pass: copies there and back, which run beside
the ops that follow, and the waits for them.

A slot is a place on the host. An event orders every copy: what reads a result, or writes over what was copied, comes
behind an op that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mggcn.model.runtime import Runtime, require
from mggcn.model.values import Op, PlainKind


@dataclass(frozen=True, slots=True)
class ToHost(PlainKind):
    """Begins to copy the operand to its slot."""

    title: ClassVar[str] = "to-host {self.slot}"
    stored = False
    slot: int

    def run(self, rt: Runtime, op: Op) -> None:
        require(rt.host).send(self.slot, rt.buffer(op.operands[0]))


@dataclass(frozen=True, slots=True)
class OnHost(PlainKind):
    """Waits until the operand has been copied: its memory, which lives until then, is free for what follows."""

    title: ClassVar[str] = "on-host {self.slot}"
    stored = False
    slot: int

    def run(self, rt: Runtime, op: Op) -> None:
        require(rt.host).wait(self.slot)


@dataclass(frozen=True, slots=True)
class FromHost(PlainKind):
    """Begins to copy a slot back. Nothing but `Fetched` may read the result."""

    title: ClassVar[str] = "from-host {self.slot}"
    slot: int

    def run(self, rt: Runtime, op: Op) -> None:
        require(rt.host).fetch(self.slot, rt.buffer(op.out))


@dataclass(frozen=True, slots=True)
class Fetched(PlainKind):
    """The operand once its copy has arrived, in the same memory."""

    title: ClassVar[str] = "fetched {self.slot}"
    in_place: ClassVar[tuple[int, ...]] = (0,)
    slot: int

    def run(self, rt: Runtime, op: Op) -> None:
        require(rt.host).wait(self.slot)
