"""Which rows of a run lie in the host's memory between its passes (run.capacity = host), and what that takes. Needs no
torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace

from mggcn.config import Config
from mggcn.errors import ConfigError
from mggcn.memory.arena import BufferSpec
from mggcn.model.kinds.hosted import ToHost
from mggcn.model.program import Program
from mggcn.model.rewrite.host import most_steps
from mggcn.planning.decisions import RunDecisions


def on_host(common: RunDecisions, need: Callable[[RunDecisions], int], limit: int, steps: int) -> RunDecisions:
    """Return the decisions with rows on the host, on every rank the same.

    need: bytes of the largest rank. limit: those that it may use, for which the fewest steps are taken; 0 for any, and
    every value then goes to the host. steps: as recorded, 0 to choose them. Cost: a logarithm of steps is planned. Raises:
    ConfigError for a run that cannot have rows on the host.
    """
    check_host(common.config)

    def taking(steps: int) -> RunDecisions:
        return replace(common, values=common.values.on_host(steps))

    most = most_steps(common.values.training)
    if not most:
        raise ConfigError(
            f"run.capacity host: the backward pass of this {common.config.model.kind} reads no rows that were made before "
            "the loss; set run.capacity=memory"
        )
    if not steps and limit:
        # A step that needs more than the one before, by the way in which buffers are packed, costs one step too many.
        steps = 1 + bisect.bisect_left(range(1, most), True, key=lambda taken: need(taking(taken)) <= limit)
    return taking(min(steps, most) or most // 2)


def check_host(config: Config) -> None:
    """Raise ConfigError, with what to do, for settings under which no rows can be on the host."""
    if config.run.device != "cuda":
        raise ConfigError("run.capacity host is for GPUs; on CPUs set run.capacity=disk, or memory")
    if config.sample.batch:
        raise ConfigError("run.capacity host is for whole graphs, and batches hold few rows; set run.capacity=memory")


def hosted_rows(program: Program) -> tuple[BufferSpec, ...]:
    """Return what a program keeps on the host, by slot."""
    sent = [op for op in program.ops if isinstance(op.kind, ToHost)]
    return tuple(program.arena[op.operands[0]].spec for op in sent)
