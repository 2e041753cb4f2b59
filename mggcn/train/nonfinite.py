"""Where a loss or a gradient that is not finite began: the op and the rank, found by running the epoch once more.

The epoch end has skipped the update: weights are those before the epoch, and the epoch gives the same bits again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mggcn.model.runtime import Runtime
from mggcn.model.values import Op
from mggcn.train.runtime import RankRuntime, Staged


def origin_of_nonfinite(runtime: RankRuntime, found: list[int], rank: int, size: int) -> str:
    """Say what is the first value not finite, and where. Collective. found: `first_place` of each part of a rank's step."""
    names = names_of(runtime)
    place = min((place for place in found if place >= 0), default=-1)
    places = runtime.backend.allocate(8 * size).view(torch.float64)
    places[rank] = place + 1
    runtime.sum_over_ranks(places)
    begun = [(int(value) - 1, r) for r, value in enumerate(places.tolist()) if value]
    if not begun:
        return "it began where the ranks' gradients are summed" if size > 1 else "it did not come again"
    place, rank = min(begun)
    name = names[place]
    if place < len(runtime.weights.grads):
        return f"it began in the weight {name}, on rank {rank}, which an earlier step made too large"
    layer = name.rpartition(" ")[2]
    where = f"layer {layer} ({name})" if layer.isdigit() else name
    return f"it began in {where}, on rank {rank}"


def names_of(runtime: RankRuntime) -> list[str]:
    """Return the names of what may not be finite, in one order on all ranks, which may split a layer in different ways.

    Running statistics are no causes: the forward pass of the bad epoch has moved them.
    """
    program = runtime.programs["train"].program
    return [*runtime.weights.grads, *dict.fromkeys(op.label for op in program.ops)]


def first_place(runtime: RankRuntime) -> int:
    """Run the training program op by op; return the place in `names_of` of what is not finite first, -1 if nothing is.

    Collective where its ops are. Cost: a step, and a look at every result.
    """
    bound, names, weights = runtime.programs["train"], names_of(runtime), runtime.weights
    program = bound.program
    place = next((i for i, name in enumerate(weights.grads) if not _finite(weights.views[name])), -1)
    runtime.weights.grad.zero_()
    runtime.signals.zero_()
    runtime.bound = bound
    if program.name in runtime.stages:
        found = _first_op(runtime, runtime.stages[program.name])
        return place if place >= 0 or not found else len(weights.grads) + names[len(weights.grads) :].index(found)
    for index, op in enumerate(program.ops):
        for placement in program.arena.placements:
            # An op may compute a block of its result: in the rest lies what was there before.
            if placement.first == index and placement.spec.name == op.out:
                runtime.buffer(op.out).zero_()
        op.run(runtime)
        if place < 0 and not all(map(_finite, [*_results(runtime, op), runtime.weights.grad])):
            place = len(weights.grads) + names[len(weights.grads) :].index(op.label)
    return place


def _first_op(runtime: RankRuntime, staged: Staged) -> str:
    """Run a program in stages; return the label of the op whose result is not finite first, "" if there is none."""
    found = list[str]()

    def look(op: Op, part: Runtime, last: bool) -> None:
        # Before a stage's last rows its gradients are not complete.
        gradients = [runtime.weights.grad] if last else []
        if not found and not all(map(_finite, [*_results(part, op), *gradients])):
            found.append(op.label)

    staged.run(runtime, look)
    return found[0] if found else ""


def _results(runtime: Runtime, op: Op) -> list[Tensor]:
    """Return what an op may have written beside gradients: its result, the operands that it replaces, and the loss."""
    replaced = [op.operands[index] for index in op.kind.overwrites]
    views = [runtime.buffer(name) for name in {op.out, *replaced} if name]
    return [*views, runtime.loss]


def _finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(torch.isfinite(values).all())
