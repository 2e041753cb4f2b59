"""DistGNN's tables and figures: its own epoch and memory as the paper counts them, and mggcn's vertex cuts and delays.

N vertices, V rows of a partition, L leaves of it, D and E widths of a layer's input and output, P sockets.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from bench.contest import Case
from bench.cpu import libra, ways
from bench.graphs import available, find_data, store_of
from bench.papers.drawn import FANOUT, PRODUCTS, drawn_sizes, named_or_like
from bench.papers.items import Item, Ours, Paper
from bench.papers.trained import points
from bench.peers import epochs
from bench.peers.libraries import find_peers
from bench.report import GIB, bars, lines, spread, table
from mggcn.aggregate.steps import Await, Send
from mggcn.assemble.plan import plan_shape
from mggcn.config import from_tables
from mggcn.cost.analysis import aggregation_work
from mggcn.cost.epoch import Cost, predict
from mggcn.cost.machine import Machine, find_machine
from mggcn.cost.work import Item as Step
from mggcn.cost.work import Sum, Work
from mggcn.graph.store import open_store
from mggcn.partition.locality.reuse import estimate_reuse, near_share
from mggcn.partition.order import whole_graph
from mggcn.planning.op_cost import epoch_cost
from mggcn.planning.shape import GraphShape

FLOAT, EDGE, GB = 4, 8, 1e9
DELAYS: dict[str, int | None] = {"cd-0": 0, "cd-5": 5, "0c": None}
ENDS = 4
"""Buffers of a message: leaves and roots, at either end; under a delay all are held until it has come."""
HIDDEN = {"reddit": (16,)}
THREE_OF_256 = (256, 256)
BLOCKS = {"reddit": 16}
"""Blocks of an operand: table 3 has 16 for Reddit, and the text one for products."""
CLUSTER = "xeon-cluster"
SOCKET_CACHE = 38_500_000
"""Bytes of the last cache of a Xeon 8280, on which table 3 was made."""
GRAPHS, ORDERED = ("Reddit", "Products", "Proteins", "Papers"), "graphs in the order cd-0, cd-5, 0c"
LIKE = {"Reddit": "reddit-like", "Products": "products-like"}
NAMED = {"Reddit": "reddit", "Products": "ogbn-products"}
BATCH = 2_000


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """DistGNN's epoch on one of P equal partitions, as its section 5 and its code have it.

    Each layer sums over neighbours first, then adds the vertex itself, divides and multiplies with W. The first layer has
    no gradient of its input, and the code sends no gradients of sums. replication: partitions of a vertex; delay: epochs,
    None for 0c.
    """

    shape: GraphShape
    hidden: tuple[int, ...]
    sockets: int
    replication: float = 1.0
    delay: int | None = 0
    blocks: int = 1

    @property
    def rows(self) -> int:
        return round(self.shape.num_vertices * self.replication / self.sockets)

    @property
    def leaves(self) -> int:
        """Leaves of a partition, and roots once a leaf, on average."""
        return round(self.shape.num_vertices * (self.replication - 1) / self.sockets)

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.shape.num_features, *self.hidden, self.shape.num_classes)

    def items(self) -> list[Step]:
        """Return the work and messages of a socket."""
        found, sent, layers = list[Step](), 0, [*enumerate(pairwise(self.widths), start=1)]
        for layer, (d, e) in layers:
            exchange, messages = self._exchange(d, sent)
            found += [self._sum(d), *exchange, self._pass(3 * d), self._dense(d, e)]
            found += [self._pass(2 * e)] * (layer < len(layers))
            sent += messages
        found.append(self._pass(4 * self.widths[-1]))
        for layer, (d, e) in reversed(layers):
            found += [self._pass(3 * e)] * (layer < len(layers))
            found += [self._dense(d, e)] * (1 + (layer > 1))
            found += [self._pass(2 * d), self._sum(d)] * (layer > 1)
            found += [Sum(FLOAT * d * e)] * (self.sockets > 1)
        return found

    def _sum(self, d: int) -> Work:
        """The aggregation primitive, block after block of the operand, each of which reads and writes all results."""
        row, nnz = FLOAT * d, self.shape.num_edges // self.sockets
        streamed = nnz * EDGE + 2 * self.blocks * self.rows * row
        footprint = self.rows * row // self.blocks
        return Work(kind="sparse", rows=nnz, row_bytes=row, footprint=footprint, streamed=streamed, calls=self.blocks)

    def _exchange(self, d: int, sent: int) -> tuple[list[Step], int]:
        """Leaves to roots, totals back; under a delay a bin of them, which nobody waits for."""
        if self.delay is None or self.sockets == 1:
            return [], 0
        count = self.leaves // max(self.delay, 1)
        send = Send("all_to_all", FLOAT * d * count, FLOAT * d * count)
        copy = self._copy(count, d)
        waits = [Await(sent), Await(sent + 1)] if self.delay == 0 else []
        up, down = ([wait] for wait in waits) if waits else ([], [])
        return [copy, send, *up, copy, copy, send, *down, copy], 2

    def _copy(self, count: int, d: int) -> Work:
        row = FLOAT * d
        return Work(
            kind="elementwise", rows=count, row_bytes=row, footprint=self.rows * row, streamed=count * (EDGE + row)
        )

    def _dense(self, d: int, e: int) -> Work:
        return Work(kind="dense", streamed=FLOAT * self.rows * (d + e), flop=2 * self.rows * d * e)

    def _pass(self, numbers: int) -> Work:
        return Work(kind="elementwise", streamed=FLOAT * self.rows * numbers)

    def cost(self) -> Cost:
        return predict(find_machine(CLUSTER), "gloo", [self.items()] * self.sockets)

    def memory(self) -> float:
        """Return the bytes of a partition, as section 6.3 lists them: inputs, sums and layers with gradients, buffers.

        cd-0's buffers serve one layer after the other; those of a delay are held for all of them.
        """
        sums, outputs = self.widths[:-1], self.widths[1:]
        values = sum(sums) + sum(outputs)
        gradients = values - sums[0]
        base = FLOAT * self.rows * (sums[0] + values + gradients) + self.shape.num_edges // self.sockets * EDGE
        if self.delay is None:
            return base
        held = ENDS * sum(sums) if self.delay else ENDS // 2 * max(sums)
        return base + FLOAT * self.leaves * held

    @property
    def gathered(self) -> int:
        """Bytes of rows that an epoch's sums over neighbours read."""
        sums = self.widths[:-1]
        return FLOAT * (sum(sums) + sum(sums[1:])) * self.shape.num_edges // self.sockets


def replication(paper: Paper, graph: str, sockets: int) -> float:
    """Return table 4's replication."""
    return 1.0 if sockets == 1 else float(paper.item("table-4").published[f"{graph.title()}, {sockets}"])


def epoch_of(paper: Paper, graph: str, sockets: int, delay: int | None) -> Epoch:
    return Epoch(
        shape=paper.shape(graph),
        hidden=HIDDEN.get(graph, THREE_OF_256),
        sockets=sockets,
        replication=replication(paper, graph, sockets),
        delay=delay,
        blocks=BLOCKS.get(graph, 1),
    )


def own_plan(paper: Paper, graph: str, sockets: int, delay: int | None) -> Any:
    """Plan mggcn's GraphSAGE on a graph's extents, with the same cut and delay."""
    run: dict[str, Any] = {"ranks": sockets}
    if sockets > 1:
        run |= {"strategy": "delayed", "delay": "none" if delay is None else str(delay)}
    tables = {"model": {"kind": "sage", "hidden": list(HIDDEN.get(graph, THREE_OF_256))}, "run": run}
    machine = find_machine(CLUSTER)
    return plan_shape(from_tables(tables), paper.shape(graph), replication(paper, graph, sockets), machine)


def table_8(paper: Paper, _item: Item, _args: Any) -> Ours:
    """DistGNN's count of operations."""
    of, values = paper.graphs["products"], {}
    for sockets, name in ((1, "1 socket"), (16, "16 sockets")):
        times = 596_499 * 16 / of["vertices"] if sockets == 16 else 1.0
        work = aggregation_work(of["vertices"], of["edges"], (100, 256, 256), sockets, times)
        first, second, _ = work.hops
        values |= {f"{name}, hop 2": first / 1e9, f"{name}, hop 1": second / 1e9, name: work.total / 1e9}
    return Ours(values=values, text="16 sockets: 596,499 vertices a partition, as printed, a replication of 3.897.\n")


def table_7(paper: Paper, item: Item, args: Any) -> Ours:
    """The printed hops multiplied out, and hops that are drawn."""
    hops = [item.published[f"hop {hop}, vertices"] for hop in range(3)]
    batch = sum(n * fan * width for n, fan, width in zip(hops, FANOUT, (256, 256, 100), strict=True)) / 1e9
    names = ("a batch, of printed hops", "1 socket, of printed hops", "16 sockets, of printed hops")
    values = dict(zip(names, (batch, 99 * batch, 7 * batch), strict=True))
    name, graph = named_or_like("ogbn-products", PRODUCTS, args)
    sizes = drawn_sizes(graph, BATCH, FANOUT)
    if name == "ogbn-products":
        values |= {f"hop {hop}, vertices": size for hop, size in enumerate(sizes[:3])}
    drawn = ", ".join(f"{size:,.0f}" for size in sizes)
    return Ours(
        values=values,
        text=f"Vertices of a hop of {BATCH:,} seeds on {name} ({graph.num_vertices:,} vertices), means: {drawn}.\n",
        reason=f"Hops drawn on {name}: {drawn}.",
    )


def table_4(_paper: Paper, item: Item, args: Any) -> Ours:
    """Replication of Libra's cuts, of the named graphs that are here, and of graphs like them."""
    values, rows, points = dict[str, float](), [], dict[str, list[tuple[float, float]]]()
    data = find_data(args.data)
    for title, like in LIKE.items():
        named = NAMED[title]
        graph = named if available(named, data) else like
        for parts in (2, 4, 8, 16):
            found = libra.measure(store_of(graph, args), parts, "shuffled", 1)
            points.setdefault(graph, []).append((parts, found["replication"]))
            if graph == named:
                values[f"{title}, {parts}"] = found["replication"]
            rows.append([graph, parts, f"{found['replication']:.3f}", f"{found['edge_balance']:.4f}"])
    for title in ("Reddit", "Products", "Proteins", "Papers"):
        cells = [cell for cell in item.published if cell.startswith(title)]
        points[f"{title}, published"] = [(int(cell.split(", ")[1]), item.published[cell]) for cell in cells]
    plot = lines("Replication of Libra's cuts", "average parts of a vertex", "parts", points)
    text = table(["graph", "parts", "replication", "edge balance"], rows)
    absent = [] if values else ["the graphs of table 4; generated ones have a replication of their own"]
    return Ours(values=values, text=text, plots=plot, absent=absent)


def table_3_figure_3(_paper: Paper, _item: Item, args: Any) -> Ours:
    """The fastest number of blocks, and the reuse of an LRU cache, on graphs like Reddit and products."""
    values, rows, results = {}, [], []
    for title, like in LIKE.items():
        store = store_of(like, args)
        found = ways.measure(store, "none", 256, "fp32", args)
        results.append({"graph": like, **found})
        times = {count: spread(found["seconds"][f"{count} blocks"])["median"] for count in ways.COUNTS}
        values[title] = min(times, key=times.__getitem__)
        graph = open_store(store)
        shares = estimate_reuse(graph, whole_graph(graph.num_vertices), args.threads).own
        near = near_share(shares, SOCKET_CACHE // (FLOAT * 256))
        reuse = f"{1 / (1 - near):.1f}" if near < 1 else "all fits"
        rows.append([like, *(f"{1e3 * s:.1f}" for s in times.values()), reuse])
    head = ["graph, ms by blocks", *map(str, ways.COUNTS), "LRU reuse of one block"]
    text = f"Products of 256 columns, ids at random; a cache of {SOCKET_CACHE / 1e6:.1f} MB.\n\n{table(head, rows)}"
    reason = f"Milliseconds by blocks: {'; '.join(' '.join(map(str, row[:-1])) for row in rows)}."
    return Ours(values=values, text=text, plots=ways.plots_of(results), reason=reason)


def _switched(parts: list[str], args: Any) -> dict[str, dict[str, Any]]:
    """Compare epochs on graphs like Reddit and products."""
    peers, told = find_peers(args.peers), SimpleNamespace(**{**vars(args), "malloc": "tuned"})
    hidden = {"Reddit": (16,), "Products": THREE_OF_256}
    return {title: epochs.measure(Case(like, hidden[title]), parts, peers, told)[0] for title, like in LIKE.items()}


def figure_2(_paper: Paper, item: Item, args: Any) -> Ours:
    """Epochs beside DGL, if it is here."""
    if "dgl" not in find_peers(args.peers):
        return Ours(values={})
    found = {title: of["seconds"] for title, of in _switched(["peers"], args).items()}
    values = {title: of["DGL"]["median"] / of["mggcn"]["median"] for title, of in found.items() if "DGL" in of}
    plot = bars("Epochs beside DGL", "times as fast", {"DGL over mggcn": values, "published": dict(item.published)})
    return Ours(values=values, plots=plot)


def figure_4(_paper: Paper, _item: Item, args: Any) -> Ours:
    """Each of mggcn's switches off alone."""
    values, cells = {}, {}
    for title, found in _switched(["switches"], args).items():
        times = {name: of["median"] for name, of in found["seconds"].items()}
        base = times["all switches on"]
        cells[title] = {name: s / base for name, s in times.items() if name in epochs.SWITCHES and s != base}
        values |= {f"{title}, {name}": ratio for name, ratio in cells[title].items()}
    plot = bars("Each switch off alone", "time of an epoch over that with all switches on", cells)
    return Ours(values=values, plots=plot, reason="With every switch off an epoch was not slower: see the cells.")


def figure_5_6(paper: Paper, item: Item, _args: Any) -> Ours:
    """Epochs of DistGNN's own steps on its described cluster, beside its published seconds and mggcn's plan."""
    values, rows, points = {}, [], dict[str, list[tuple[float, float]]]()
    for cell, published in item.published.items():
        if cell == ORDERED:
            continue
        graph, sockets, delay = [*cell.split(", "), "cd-0"][:3]
        own = epoch_of(paper, graph.lower(), int(sockets), DELAYS[delay])
        cost = own.cost()
        values[cell] = cost.seconds
        planned = epoch_cost(own_plan(paper, graph.lower(), int(sockets), DELAYS[delay]), find_machine(CLUSTER)).train
        cells = [f"{cost.parts[kind]:.3f}" for kind in ("sparse", "dense", "elementwise", "messages")]
        rate = own.gathered / published / 1e9
        rows.append([cell, *cells, f"{planned.seconds:.3f}", f"{rate:.0f}"])
    for graph in ("products", "proteins", "papers", "reddit"):
        counts = [int(c.split(", ")[1]) for c in paper.item("table-4").published if c.startswith(graph.title())]
        for delay, epochs_late in DELAYS.items():
            found = [(p, epoch_of(paper, graph, p, epochs_late).cost().seconds) for p in counts]
            points[f"{graph}, {delay}"] = found
    values[ORDERED] = float(sum(_is_ordered(values, graph) for graph in GRAPHS))
    rates = {row[0]: row[-1] for row in rows}
    reason = (
        f"By its own seconds a socket alone reads rows of products at {rates['Products, 1']} GB/s, proteins at "
        f"{rates['Proteins, 1']} and papers at {rates['Papers, 1']}, where its memory carries 282 and random rows reach "
        "0.55 of that elsewhere; the text says that papers ran on another machine of several memory nodes. 0c sends "
        f"nothing, and on 64 sockets each reads rows of products at {rates['Products, 64, 0c']} GB/s: what is "
        "not predicted is neither the sums' bytes nor messages."
    )
    head = ["", "sparse s", "dense s", "passes s", "waiting s", "mggcn's plan, s", "published: GB/s of rows"]
    plot = lines("DistGNN's epochs by sockets, predicted", "seconds", "sockets", points)
    return Ours(values=values, text=table(head, rows), plots=plot, reason=reason)


def _is_ordered(values: dict[str, float], graph: str) -> bool:
    """Whether a graph's epochs are longest with cd-0 and shortest with 0c, on its most sockets."""
    found = [next(s for cell, s in values.items() if cell.startswith(graph) and cell.endswith(name)) for name in DELAYS]
    return found == sorted(found, reverse=True)


def table_5(_paper: Paper, _item: Item, args: Any) -> Ours:
    """Test accuracy by delay on four ranks."""
    found, text = points("delayed", ("P = 1", "cd-0", "cd-5 discard", "0c"), 200, args)
    if not found:
        return Ours(values={}, absent=["a folder of real graphs"])
    cells = {"cd-0": "points, cd-0", "cd-5 discard": "points, cd-5", "0c": "points, 0c"}
    values = {cell: statistics.fmean(found[label]) for label, cell in cells.items()}
    reason = f"Points from one rank: {', '.join(f'{k} {min(v):+.2f} .. {max(v):+.2f}' for k, v in found.items())}."
    return Ours(values=values, text=text, reason=reason)


def table_6(paper: Paper, _item: Item, _args: Any) -> Ours:
    """Memory of a partition as the paper counts it, and mggcn's plan by region."""
    values, rows = {}, []
    for sockets in (32, 64, 128):
        for name, delay in DELAYS.items():
            values[f"{sockets}, {name}"] = epoch_of(paper, "papers", sockets, delay).memory() / GB
            rank = own_plan(paper, "papers", sockets, delay).largest
            flying = rank.regions.get("messages and sums in flight", 0)
            cells = [f"{of / GIB:.0f}" for of in (rank.total_bytes, rank.regions.get("arena", 0), flying)]
            rows.append([f"{sockets}, {name}", f"{values[f'{sockets}, {name}']:.0f}", *cells])
    for name in ("cd-5", "0c"):
        values[f"{name} over cd-0, 32"] = values[f"32, {name}"] / values["32, cd-0"]
    text = (
        "As section 6.3 lists it, every sum and layer has a buffer and a gradient of its own, beside which messages are a "
        "part; mggcn's arena takes fewer for the same network, and it exchanges gradients too, so that messages are more "
        "of its plan.\n\n"
    )
    head = [
        "",
        "counted as section 6.3 does, GB",
        "mggcn's plan, GiB",
        "of it the arena",
        "messages and sums in flight",
    ]
    return Ours(values=values, text=text + table(head, rows), reason=f"{text}{table(head, rows)}")


def table_9(paper: Paper, _item: Item, _args: Any) -> Ours:
    """A full epoch of DistGNN's own steps and a sampled one of mggcn's, on the described cluster."""
    machine, values = find_machine(CLUSTER), {}
    for sockets in (1, 16):
        values[f"{sockets}, DistGNN cd-5"] = epoch_of(paper, "products", sockets, 5).cost().seconds
        values[f"{sockets}, DistDGL"] = sampled_epoch_s(paper.shape("products"), sockets, machine)
    text = "DistDGL's: an epoch of mggcn's GraphSAGE on batches as large as fan-outs allow, more than products' are.\n"
    return Ours(values=values, text=text)


def sampled_epoch_s(
    shape: GraphShape,
    sockets: int,
    machine: Machine,
    batch: int = BATCH,
    hidden: Sequence[int] = THREE_OF_256,
    fanout: Sequence[int] = FANOUT,
) -> float:
    """Predict an epoch of GraphSAGE on batches of so many seeds a socket, within the bounds of fan-outs."""
    tables = {
        "model": {"kind": "sage", "aggregator": "mean", "hidden": [*hidden]},
        "sample": {"batch": batch * sockets, "fanout": [*fanout], "plan": "bound"},
        "run": {"ranks": sockets, "threads": machine.device.cores},
    }
    plan = plan_shape(from_tables(tables), shape, machine=machine)
    return plan.steps * epoch_cost(plan, machine).step_s


RUNS = {
    "table-8": table_8,
    "table-7": table_7,
    "table-4": table_4,
    "table-3-figure-3": table_3_figure_3,
    "figure-2": figure_2,
    "figure-4": figure_4,
    "figure-5-6": figure_5_6,
    "table-5": table_5,
    "table-6": table_6,
    "table-9": table_9,
}
