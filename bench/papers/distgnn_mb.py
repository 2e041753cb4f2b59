"""DistGNN-MB's tables and figures: its cache replayed on ids, and predicted steps with what its pushes take.

N vertices, P ranks, K vertices of a halo. Source of the cache: its Algorithms 1 and 2, as aggregate/history.py has them.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.cpu import accuracy
from bench.graphs import store_of
from bench.papers.drawn import FANOUT, PAPERS, PRODUCTS, SAGE, drawn_rows, num_training, papers_store
from bench.papers.items import Item, Ours, Paper
from bench.papers.trained import points
from bench.peers import sampled
from bench.peers.libraries import find_peers
from bench.report import MIB, bars, lines, table
from mggcn.aggregate.history_block import _Ring
from mggcn.aggregate.history_cache import Cache
from mggcn.assemble.plan import partition_graph, plan_shape, resolve
from mggcn.assemble.stack import seeds_of
from mggcn.blocks.sampler import Sampler
from mggcn.blocks.slot import Slot
from mggcn.config import Config, from_tables
from mggcn.cost.batches import ROW_S, Sample
from mggcn.cost.machine import Machine, find_machine
from mggcn.cost.work import Work, ring_bytes, work_seconds
from mggcn.feed.history import RemoteRows
from mggcn.feed.seeds import Step
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store
from mggcn.partition.rows.halo import halo_ids
from mggcn.partition.rows.partition import row_owners
from mggcn.planning.batch_rows import balance
from mggcn.planning.batches import slot_plan, stack_of
from mggcn.planning.op_work import items_by_op
from mggcn.planning.shape import GraphShape, graph_shape

BATCH, LINES, ROWS, LIFE, DELAY = 1_000, 1_000_000, 2_000, 2, 1
"""Seeds of a rank; cs, nc, ls and d of section 4.4."""
PAPERS_VERTICES = 111_059_956
RANKS, EPOCH_STEPS = 64, 19
"""Of papers100M's 1,207,179 training vertices 64 ranks take 19 steps of 1,000."""
FLOAT = 4
SCALED = (4, 8, 16, 32, 64)
CORES = 36


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a replay counted: by layer, int64, rows found, looked up and sent; edges of each step and rank (M, P)."""

    hits: npt.NDArray[np.int64]
    looked: npt.NDArray[np.int64]
    pushed: npt.NDArray[np.int64]
    entries: npt.NDArray[np.int64]

    @property
    def rates(self) -> list[float]:
        return [100 * float(share) for share in self.hits / np.maximum(self.looked, 1)]


def history_tables(ranks: int, batch: int, vertices: int, order: str) -> dict[str, Any]:
    """Settings of a run with the cache: lines in proportion to the vertices, rows to a rank to the seeds."""
    sample = {
        "batch": batch,
        "fanout": FANOUT,
        "plan": "bound",
        "halo": "history",
        "history_lines": max(1, round(LINES * vertices / PAPERS_VERTICES)),
        "history_rows": max(1, round(ROWS * batch / ranks / BATCH)),
        "history_life": LIFE,
        "history_delay": DELAY,
    }
    run = {"ranks": ranks, "threads": 1, "transport": "threads", "order": order}
    return {"model": SAGE, "sample": sample, "run": run}


def replay(graph: Graph, config: Config, steps: int) -> Replayed:
    """Draw the first steps of all ranks with leaves at others' vertices; push and look up each layer's rows by ids."""
    config, ranks = resolve(config, graph), config.run.ranks
    shape, owners = graph_shape(graph, config), row_owners(partition_graph(config, graph))
    owner, stack = owners.owner_of(slice(None)), stack_of(config, shape)
    assert stack is not None
    plan = dataclasses.replace(slot_plan(config, shape, stack, 0), places=False)
    ids = [halo_ids(graph, owners, rank) for rank in range(ranks)]
    sides = [_Rank(graph, config, stack.blocks, ids[rank], owner, rank, plan) for rank in range(ranks)]
    seeds, depth = seeds_of(config, graph, owner), len(stack.blocks)
    counts, entries = np.zeros((3, depth), np.int64), np.zeros((steps, ranks), np.int64)
    flying: list[list[list[npt.NDArray[np.int32]]]] = []
    order_of = seeds.train
    for number in range(steps):
        epoch, at = divmod(number, seeds.num_steps)
        order_of = seeds.order(config.train.seed, epoch) if at == 0 else order_of
        step = Step(config.train.seed, number, seeds.of_step(order_of, at))
        sent = []
        for side in sides:
            entries[number, side.rank] = side.draw(step, seeds.of_rank(step.seeds, side.rank))
            if flying:
                side.receive([of[side.rank] for of in flying], number)
            sent.append(side.pushed())
            counts[0] += [layer[0] for layer in side.found(number)]
            counts[1] += side.looked
            counts[2] += [sum(of.size for of in layer) for layer in zip(*sent[-1], strict=True)]
        flying = sent
    return Replayed(hits=counts[0], looked=counts[1], pushed=counts[2], entries=entries)


class _Rank:
    """One rank of a replay: its sampler, which rows it reads and pushes, and a ring of lines for each layer."""

    def __init__(self, graph: Graph, config: Config, blocks: Any, ids: Any, owner: Any, rank: int, plan: Any) -> None:
        sample = config.sample
        self.rank, self._slot = rank, Slot(plan)
        self._sampler = Sampler(graph.adj_t, plan.draws, owner=owner, rank=rank)
        self._remote = RemoteRows(ids, owner, rank, graph.adj_t.indptr.array(), blocks, sample.history_rows)
        self._blocks, self._memory = blocks, self._remote.memory(plan.capacities[-1].sources)
        received, sent = (tuple(of.size for of in side) for side in (ids.received, ids.sent))
        self._first = np.cumsum([0, *received])[:-1]
        self._rings = [
            _Ring(self._cache(sample, received, sent, constant=layer == 0), plan.capacities[-1 - layer].sources)
            for layer in range(len(blocks))
        ]

    @staticmethod
    def _cache(sample: Any, received: tuple[int, ...], sent: tuple[int, ...], *, constant: bool) -> Cache:
        # Rows of the input never change, so that their age does not matter.
        return Cache(
            received=received,
            sent=sent,
            most_lines=sample.history_lines,
            life=-1 if constant else sample.history_life,
            pushed=sample.history_rows,
            delay=sample.history_delay,
            ends=False,
            rest=True,
            steps=1,
        )

    def draw(self, step: Step, seeds: npt.NDArray[np.int64]) -> int:
        """Draw a batch; return its edges."""
        drawn = self._sampler.draw(self._slot, seeds, step.seed, step.number)
        self._sources = drawn.sizes[:0:-1]
        rows = self._remote.of(drawn.ids, seeds.size, step, self._sources, self._memory)
        self._rows = [rows[block] for block in self._blocks]
        return sum(hop.indices.size for hop in drawn.hops)

    def pushed(self) -> list[list[npt.NDArray[np.int32]]]:
        """Return the numbers of the rows that each rank gets, by layer."""
        return [[rows.pushed[to][1].copy() for rows in self._rows] for to in range(self._first.size)]

    def receive(self, messages: list[list[npt.NDArray[np.int32]]], step: int) -> None:
        """Cache what came of every rank."""
        for sender, layers in enumerate(messages):
            for ring, numbers in zip(self._rings, layers, strict=True):
                if numbers.size:
                    ring.store(numbers, int(self._first[sender]), step)

    def found(self, step: int) -> list[tuple[int, int]]:
        """Return hits and rows looked up of each layer."""
        return [
            (ring.find(rows, sources, step)[1], rows.places.size)
            for ring, rows, sources in zip(self._rings, self._rows, self._sources, strict=True)
        ]

    @property
    def looked(self) -> list[int]:
        return [rows.places.size for rows in self._rows]


@functools.cache
def replayed(store: Path, ranks: int) -> Replayed:
    """Replay an epoch under METIS's even parts; once for all items."""
    graph = open_store(store)
    tables = history_tables(ranks, seeds_of_ranks(graph, ranks), graph.num_vertices, "metis-balanced")
    return replay(graph, from_tables(tables), EPOCH_STEPS)


def seeds_of_ranks(graph: Graph, ranks: int) -> int:
    """Return the batch of all ranks with which an epoch has as many steps as papers100M's on 64."""
    return max(ranks, round(num_training(graph) / EPOCH_STEPS))


def section_4_4(_paper: Paper, _item: Item, args: Any) -> Ours:
    """Hit rates on 64 ranks, imbalance on 4 and 64."""
    store = papers_store(args)
    graph, found = open_store(store), {ranks: replayed(store, ranks) for ranks in (4, RANKS)}
    rates = found[RANKS].rates
    values = {f"L{layer}": rate for layer, rate in enumerate(rates)}
    values |= {f"L{n} less L{n + 1}": a - b for n, (a, b) in enumerate(pairwise(rates))}
    values |= {f"imbalance, {ranks} ranks": 100 * (balance(of.entries) - 1) for ranks, of in found.items()}
    rows = [
        [
            ranks,
            layer,
            f"{of.looked[layer]:,}",
            f"{of.hits[layer]:,}",
            f"{of.rates[layer]:.1f}",
            f"{of.pushed[layer]:,}",
        ]
        for ranks, of in found.items()
        for layer in range(len(of.rates))
    ]
    text = f"{PAPERS}, {graph.num_vertices:,} vertices, an epoch of {EPOCH_STEPS} steps.\n\n"
    text += table(["ranks", "layer", "looked up", "found", "%", "rows pushed"], rows)
    return Ours(values=values, text=text, reason=f"Counted:\n\n{text}")


def on_36_cores() -> Machine:
    """Return the described cluster with the cores of its 8360Y sockets, and their share of its rates of arithmetic."""
    machine = find_machine("xeon-cluster")
    gemm = {name: rate * CORES / machine.device.cores for name, rate in machine.device.gemm.items()}
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, cores=CORES, gemm=gemm))


def step_parts(shape: GraphShape, ranks: int, machine: Machine) -> dict[str, float]:
    """Predict the parts of a step of a rank's 1,000 seeds: drawing, forward, rows of others, backward, sums of gradients.

    Each peer's list of vertices is searched for the rows of every level, as in its Algorithm 2, and up to nc are pushed.
    """
    tables = {
        "model": SAGE,
        "sample": {"batch": BATCH * ranks, "fanout": FANOUT, "plan": "bound"},
        "run": {"ranks": ranks, "threads": CORES},
    }
    plan = plan_shape(from_tables(tables), shape, machine=machine)
    assert plan.stack is not None
    rank, device, capacities = plan.ranks[0], machine.device, plan.stack.capacities
    edges, rows = sum(c.edges for c in capacities), [c.sources for c in capacities]
    parts = {
        "batches": Sample(rows[0], edges, FLOAT * shape.num_features).seconds / CORES,
        "forward": 0.0,
        "backward": 0.0,
    }
    where = "forward"
    for label, items in items_by_op(plan, rank, rank.train, device=device):
        seconds = sum(sum(work_seconds(item, device, 1)) for item in items if isinstance(item, Work))
        parts[where] += seconds
        where = "backward" if label.startswith("loss") else where
    widths = (shape.num_features, *SAGE["hidden"])
    searched = (ranks - 1) * sum(rows) * ROW_S / CORES
    pushed = sum((ranks - 1) * min(ROWS, of) * FLOAT * width for of, width in zip(rows, widths, strict=True))
    parts["rows of others"] = searched + 2 * pushed / device.copy.at(pushed)
    link = machine.link(ranks, "gloo")
    ring_s = (
        ring_bytes(rank.gradient_bytes, ranks) / link.rates["all_reduce"]
        + 2 * (ranks - 1) * link.latency_s["all_reduce"]
    )
    return parts | {"sums": ring_s}


def figure_3_4(paper: Paper, _item: Item, _args: Any) -> Ours:
    """Seconds of an epoch by parts and ranks, papers100M's extents."""
    shape, machine, found = paper.shape("papers"), on_36_cores(), {}
    for ranks in SCALED:
        steps = -(-(shape.num_training or 0) // (BATCH * ranks))
        found[ranks] = {name: steps * s for name, s in step_parts(shape, ranks, machine).items()}
    forward = {ranks: of["forward"] + of["rows of others"] for ranks, of in found.items()}
    totals = {ranks: sum(of.values()) for ranks, of in found.items()}
    first, last = SCALED[0], SCALED[-1]

    def efficiency(of: dict[int, float]) -> float:
        return of[first] / of[last] / (last / first)

    values = {
        "efficiency, forward": efficiency(forward),
        "efficiency, backward": efficiency({ranks: of["backward"] for ranks, of in found.items()}),
        "efficiency, sums": efficiency({ranks: of["sums"] for ranks, of in found.items()}),
        "64 ranks, s": totals[last],
        "64 over 4 ranks": totals[first] / totals[last],
        "growth of the forward pass's share": forward[last] / totals[last] / (forward[first] / totals[first]),
    }
    rows = [[ranks, *(f"{s:.2f}" for s in of.values()), f"{totals[ranks]:.2f}"] for ranks, of in found.items()]
    text = table(["ranks", *found[first], "epoch, s"], rows)
    points = {name: [(float(ranks), found[ranks][name]) for ranks in SCALED] for name in found[first]}
    plot = lines("Parts of an epoch on papers100M, predicted", "seconds", "ranks", points)
    return Ours(values=values, text=text, plots=plot, reason=f"Predicted, in the bounds of fan-outs:\n\n{text}")


def figure_2(_paper: Paper, item: Item, args: Any) -> Ours:
    """Epochs on batches here, drawn beside the step and in turn with it, and beside DGL's fastest way, if it is here."""
    stores, seconds = {"products": store_of(PRODUCTS, args), "papers": papers_store(args)}, {}
    for name, ahead in (("in turn", 0), ("beside the step", 2)):
        sample = {"batch": max(4, round(BATCH * args.scale)), "fanout": FANOUT, "ahead": ahead}
        tables = {"model": SAGE, "train": {"epochs": 2}, "sample": sample, "run": {"threads": args.threads}}
        seconds[name] = accuracy.trained(open_store(stores["products"]), from_tables(tables))["seconds"]
    told = ", ".join(f"{s:.2f} s drawn {name}" for name, s in seconds.items())
    text = f"An epoch on {PRODUCTS}, scale {args.scale:g}: {told}.\n"
    values = {"drawn beside the step, over in turn": seconds["in turn"] / seconds["beside the step"]}
    peers = find_peers(args.peers)
    if "dgl" in peers:
        dgl = dataclasses.replace(peers, versions={"dgl": peers.versions["dgl"]})
        for name, store in stores.items():
            found = sampled.measure("epochs", "sage", name, store, dgl, args)
            text += f"\n{sampled.described(found)}"
            times = {contender: statistics.median(each) for contender, each in found["figures"].items()}
            theirs = [s for contender, s in times.items() if contender != sampled.OWN]
            if theirs:
                values[f"{name}, over DGL"] = min(theirs) / times[sampled.OWN]
    plots = bars("Sampled epochs beside DGL's", "times as fast", {"published": dict(item.published), "mggcn": values})
    return Ours(values=values, text=text, plots=plots)


def figure_5(_paper: Paper, _item: Item, args: Any) -> Ours:
    """Bytes pulled by relays and pushed by the cache, an epoch of 64 ranks."""
    store = papers_store(args)
    graph, found = open_store(store), replayed(store, RANKS)
    batch = seeds_of_ranks(graph, RANKS)
    pulled = drawn_rows(graph, "metis-balanced", {"batch": batch}, RANKS, (1,), EPOCH_STEPS)
    widths = (graph.num_features, *SAGE["hidden"])
    sent = {
        "pulled, batch by batch": float(pulled.bytes_sent(1, FLOAT * graph.num_features)),
        "pushed, all layers": float(sum(FLOAT * w * int(n) for w, n in zip(widths, found.pushed, strict=True))),
        "pushed, the input's": float(FLOAT * widths[0] * int(found.pushed[0])),
    }
    rows = [[name, f"{nbytes / MIB:,.1f}"] for name, nbytes in sent.items()]
    text = f"{PAPERS}, {graph.num_vertices:,} vertices, {EPOCH_STEPS} steps of {RANKS} ranks.\n\n"
    text += table(["rows", "MiB of all ranks"], rows)
    values = {"pulled over pushed, bytes": sent["pulled, batch by batch"] / max(sent["pushed, all layers"], 1.0)}
    plot = bars(
        "Rows of others in an epoch of 64 ranks", "MiB", {"sent": {name: of / MIB for name, of in sent.items()}}
    )
    return Ours(values=values, text=text, plots=plot)


def table_3(_paper: Paper, _item: Item, args: Any) -> Ours:
    """Scores of four ranks whose rows of others are exact, cached, and all but dropped."""
    found, text = points("history", ("exact", "history", "dropped"), 30, args)
    if not found:
        return Ours(values={}, absent=["a folder of real graphs"])
    values = {"points, cache": float(np.mean(found["history"])), "points, dropped": float(np.mean(found["dropped"]))}
    return Ours(values=values, text=text, reason=f"By graph: {found}.")


RUNS = {
    "section-4.4": section_4_4,
    "figure-3-4": figure_3_4,
    "figure-2": figure_2,
    "figure-5": figure_5,
    "table-3": table_3,
}
