"""Memory of batches whose edges are drawn by the owners of their vertices. Needs no torch.

N vertices, P ranks, T targets, E edges of a hop.
"""

from __future__ import annotations

from mggcn.blocks.block import Stack
from mggcn.blocks.drawn_rows import numbering_slots, row_slots
from mggcn.blocks.letters import WORD, lead, num_stages
from mggcn.blocks.macrobatch import Macrobatches
from mggcn.config import Config
from mggcn.memory.arena import ITEM_BYTES
from mggcn.memory.device import REAL
from mggcn.planning.batches import answer_plan, bound_stack, draws_of, steps_of
from mggcn.planning.shape import GraphShape


def edge_rooms(config: Config, shape: GraphShape, stack: Stack) -> tuple[int, ...]:
    """Return the most edges that a step may have in each hop on a rank, from the seeds on, where owners draw them.

    What fan-outs allow; where they allow any number, twice as many as a batch is planned to have: more is refused.
    """
    bound, draws = bound_stack(config, shape), draws_of(config.sample, shape.num_relations)
    sizes = zip(reversed(bound.capacities), reversed(stack.capacities), strict=True)
    return tuple(
        most.edges if draws.most(hop) is not None else min(most.edges, 2 * planned.edges)
        for hop, (most, planned) in enumerate(sizes)
    )


def vertex_room(config: Config, shape: GraphShape) -> int:
    """Return the most vertices that a step may have on a rank."""
    bound = bound_stack(config, shape)
    return bound.capacities[0].sources


def steps_bytes(config: Config, shape: GraphShape, stack: Stack) -> int:
    """Return the bytes of a rank for the edges of all steps that are ready or on their way."""
    sample, answers = config.sample, answer_plan(config, shape)
    hops = _hops(config, shape, stack)
    step = WORD * (vertex_room(config, shape) + 1) + sum(answers.held_bytes(*hop) for hop in hops)
    macros = Macrobatches(steps_of(config, shape), sample.macro)
    held = macros.at_once(max(sample.ahead, 0) + lead(num_stages(len(hops)), sample.ahead))
    return macros.batches * held * step


def _hops(config: Config, shape: GraphShape, stack: Stack) -> list[tuple[int, int]]:
    """Return the most targets and edges of each hop, from the seeds on."""
    targets = (size.targets for size in reversed(bound_stack(config, shape).capacities))
    return list(zip(targets, edge_rooms(config, shape, stack), strict=True))


def edge_bytes(config: Config, shape: GraphShape, stack: Stack, owned: int) -> int:
    """Return the bytes of a rank for edges that owners draw: those of steps on their way, letters, and to draw and number.

    Letters of a stage are being made, announced or sent at a time, and received: what this rank asks for, and what others
    ask of the vertices that it owns.
    """
    sample, answers, ranks = config.sample, answer_plan(config, shape), config.run.ranks
    macros, hops, letters = Macrobatches(steps_of(config, shape), sample.macro), _hops(config, shape, stack), 0
    for targets, edges in hops:
        others = min(ranks - 1, owned / max(targets, 1) * (ranks - 1))
        letters += int((1 + others) * answers.held_bytes(targets, edges))
    draws, size = draws_of(sample, shape.num_relations), shape.num_vertices
    drawing = row_slots(draws, size, places=shape.weighted or config.model.typed).nbytes
    numbering = numbering_slots(size, vertex_room(config, shape)).nbytes
    at_a_time = 3 if sample.ahead else 1
    scales = ITEM_BYTES[REAL[config.run.precision]] * size
    waiting = steps_bytes(config, shape, stack) + macros.batches * at_a_time * letters
    return waiting + drawing + numbering + scales
