"""MG-GCN's tables and figures: its own epoch as items of the cost model, on the machines that it ran on.

N vertices, V rows of a rank, D and E widths of a layer's input and output, P ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import graphs
from bench.gpu.graphs import CASES
from bench.gpu.predict import plan_case
from bench.graphs import available, find_data, made_store, store_of
from bench.papers.items import Item, Ours, Paper
from bench.process import mggcn
from bench.report import MIB, RESULTS, SEED, bars, lines, table
from mggcn.aggregate.steps import Await, Multiply, Send
from mggcn.cost.analysis import analyse_15d
from mggcn.cost.epoch import Cost, predict
from mggcn.cost.machine import Machine, find_machine
from mggcn.cost.work import KINDS, Sum, Work, product
from mggcn.cost.work import Item as Step
from mggcn.files import read_json
from mggcn.graph.store import open_store
from mggcn.partition.order import assign, part_sizes
from mggcn.partition.statistics import TileStatistics, tile_statistics
from mggcn.planning.op_cost import training_cost
from mggcn.planning.shape import GraphShape
from mggcn.report.busy import breakdown
from mggcn.report.timeline import read_timeline

FLOAT, EDGE = 4, 8
"""Bytes of a number, and of a nonzero: its column and its weight, as cuSPARSE reads them."""
CUSPARSE_CALLS = 2
"""Kernels of a product of cuSPARSE: one that partitions the rows, and one that multiplies (docs: SpMM, CSR, ALG2)."""
WARP, WARPS = 32, "warps"
"""Lanes of a warp; the name of a rate of nonzeros times warps among those of a device's arithmetic."""
GPUS = {"dgx-1": (80, 1.53e9), "dgx-a100": (108, 1.41e9)}
"""Multiprocessors and clock of a V100 and an A100 (NVIDIA's data sheets)."""
ADAM_PASSES = 7
"""Reads and writes of a weight in a step of Adam: it, its gradient and two moments."""
TWO_OF_512 = (512,)
NETWORKS: dict[str, tuple[int, ...]] = {
    "Reddit": (16,),
    "Papers": (208, 208),
    "Products": (256, 256),
    "Proteins": (256, 256),
}
"""Hidden widths of section 6.1, by the names of table 3's columns."""
FACTORS = (1, 2, 4, 8, 16, 32, 64, 128)
NEVER = 2 * FACTORS[-1]
"""Stands for no factor."""
ORDERS = {"original": "none", "permuted": "permute"}
CLUSTERED = "products-like, by community"
CLOCK = re.compile(r"(\d+) MHz, \d+ MHz")
"""Of multiprocessors, before that of the memory, in a record of bench.gpu."""
LARGE = ("proteins", "products", "reddit")
HERE = ("arxiv-like", "reddit-like", "products-like")
"""Graphs like those of figure 5 that are trained here."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """MG-GCN's epoch on one graph. nnz (P, P): nonzeros of the tiles, A^T's; slots: blocks that are received at a time.

    From its section 4: a layer multiplies with W first unless D < E; backwards every product with A has E columns (eq. 9),
    and the first layer has none. Tiles are multiplied in the order of their stages, the own one too, each of which waits
    for a broadcast; with one slot a broadcast waits for the product before it, too.
    """

    counts: tuple[int, ...]
    nnz: npt.NDArray[np.int64]
    widths: tuple[int, ...]
    slots: int = 2

    @property
    def ranks(self) -> int:
        return len(self.counts)

    def aggregation(self, rank: int, width: int, sent: int) -> list[Step]:
        """Return one product with A on a rank, whose first message has the number `sent`."""
        row, rows = FLOAT * width, self.counts[rank]
        tiles = [_sparse(rows, self.counts[j], int(self.nnz[rank, j]), row) for j in range(self.ranks)]
        if self.ranks == 1:
            return list(tiles)
        sends = [self._broadcast(rank, root, row) for root in range(self.ranks)]
        found: list[Step] = list(sends[: self.slots])
        for stage, tile in enumerate(tiles):
            found += [Await(sent + stage), tile, *sends[stage + self.slots : stage + self.slots + 1]]
        return found

    def _broadcast(self, rank: int, root: int, row: int) -> Send:
        nbytes, mine = self.counts[root] * row, root == rank
        return Send("broadcast", nbytes * (self.ranks - 1) if mine else 0, 0 if mine else nbytes, root)

    def items(self, rank: int) -> list[Step]:
        """Return the epoch of a rank: forward, loss, backward, Adam."""
        found, sent, rows = list[Step](), 0, self.counts[rank]
        layers = [*enumerate(pairwise(self.widths), start=1)]

        def aggregate(width: int) -> None:
            nonlocal sent
            found.extend(self.aggregation(rank, width, sent))
            sent += self.ranks if self.ranks > 1 else 0

        for layer, (d, e) in layers:
            steps = [functools.partial(found.append, _dense(rows, d, e)), functools.partial(aggregate, min(d, e))]
            for step in reversed(steps) if d < e else steps:
                step()
            found += [_pass(rows, 2 * e)] * (layer < len(layers))
        found.append(_pass(rows, 4 * self.widths[-1], calls=4))
        for layer, (d, e) in reversed(layers):
            found += [_pass(rows, 3 * e)] * (layer < len(layers))
            if layer > 1:
                aggregate(e)
            found.append(_dense(rows, d, e))
            found += [_dense(rows, d, e)] * (layer > 1)
            if self.ranks > 1:
                found.append(Sum(FLOAT * d * e))
                sent += 1
            found.append(Work(kind="overhead", streamed=ADAM_PASSES * FLOAT * d * e))
        return found

    def cost(self, machine: Machine) -> Cost:
        return predict(machine, "nccl", [self.items(rank) for rank in range(self.ranks)])

    def product_cost(self, machine: Machine, width: int) -> Cost:
        """Predict one product with A alone."""
        return predict(machine, "nccl", [self.aggregation(rank, width, 0) for rank in range(self.ranks)])


def _sparse(rows: int, columns: int, nnz: int, row: int) -> Work:
    # Without the rows of its result it gathers whole rows: slices are ours.
    work = product(rows, columns, nnz, row, EDGE)
    steps = nnz * warps(row // FLOAT)
    return dataclasses.replace(work, calls=CUSPARSE_CALLS, results=0, flop=steps, precision=WARPS)


def _dense(rows: int, d: int, e: int) -> Work:
    return Work(kind="dense", streamed=FLOAT * rows * (d + e), flop=2 * rows * d * e)


def _pass(rows: int, numbers: int, calls: int = 1) -> Work:
    return Work(kind="elementwise", streamed=FLOAT * rows * numbers, calls=calls)


def even(shape: GraphShape, hidden: Sequence[int], ranks: int) -> Epoch:
    """Return the epoch of a graph of which the extents are known: permuted ids make equal tiles."""
    counts = part_sizes(shape.num_vertices, ranks)
    nnz = np.full((ranks, ranks), -(-shape.num_edges // ranks**2), np.int64)
    return Epoch(counts=counts, nnz=nnz, widths=(shape.num_features, *hidden, shape.num_classes))


def counted(tiles: TileStatistics, counts: tuple[int, ...], widths: tuple[int, ...], slots: int = 2) -> Epoch:
    return Epoch(counts=counts, nnz=tiles.nnz, widths=widths, slots=slots)


@functools.cache
def warp_rate() -> tuple[float, str]:
    """Return how many nonzeros, each times the warps that read its row, cuSPARSE takes in a cycle of a multiprocessor.

    Measured on an H200, where it is slower than the rows' bytes: epochs of mggcn with cuSPARSE less what the plan says of
    all but sparse products. And what was measured, in words.
    """
    record, machine = read_json(max(RESULTS.glob("gpu_nvidia-h200_*.json"))), find_machine("hgx-h200")
    machine = dataclasses.replace(machine, device=machine.device.unfused)
    told, rates, words = record["device"], [], []
    cycles = told["sm"] * 1e6 * max(float(mhz) for text in told.values() for mhz in CLOCK.findall(str(text)))
    for case in CASES:
        rows = record["parts"].get(f"epoch {case}", ())
        seconds = [row["median"] for row in rows if row.get("contender") == "mggcn with cuSPARSE" and "median" in row]
        if not seconds or case == "cora 2x16":  # Cora's epoch is launches and nothing else
            continue
        plan = plan_case(*CASES[case], "fp32")
        cost, steps = training_cost(plan, machine), itertools.chain(*plan.ranks[0].steps(plan.ranks[0].train))
        sparse = statistics.median(seconds) - (cost.seconds - cost.parts["sparse"])
        rates.append(sum(s.nnz * warps(s.width) for s in steps if isinstance(s, Multiply)) / sparse / cycles)
        words.append(f"{case}: {1e3 * sparse:.1f} ms, {sparse / cost.parts['sparse']:.2f} of what the rates say")
    return statistics.geometric_mean(rates), "; ".join(words)


def warps(width: int) -> int:
    """Return the warps that read a row: 32 lanes issue one instruction, whether all have a column or not."""
    return -(-width // WARP)


def with_cusparse(name: str) -> Machine:
    """Return a machine as MG-GCN uses it: products by cuSPARSE, kernels launched from the host."""
    machine, (rate, _) = find_machine(name), warp_rate()
    multiprocessors, clock = GPUS[name]
    gemm = {**machine.device.gemm, WARPS: rate * multiprocessors * clock}
    launched = find_machine("dgx-1").device.call_s
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, gemm=gemm, call_s=launched))


def section_5_1(_paper: Paper, _item: Item, _args: Any) -> Ours:
    """The ratio of 1.5D's seconds over 1D's, from the links of each machine."""
    values = {}
    for name, machine in (("DGX-1", "dgx-1"), ("DGX A100", "dgx-a100")):
        found = analyse_15d(find_machine(machine), 8)
        if not isinstance(found, str):
            values[name] = found.time_ratio
    return Ours(values=values)


def section_6_7(paper: Paper, item: Item, _args: Any) -> Ours:
    """Table 2 over table 3, which the text quotes otherwise."""
    best = {"Reddit": 0.60, "Papers": 36.45, "Products": 1.74, "Proteins": 2.63}
    ours = paper.item("table-3").published
    values = {graph: seconds / ours[f"{graph}, 8"] for graph, seconds in best.items()}
    far = ", ".join(f"{k} {v:.1f} and {item.published[k]:g}" for k, v in values.items() if k != "Papers")
    return Ours(values=values, text=f"By the tables and in the text: {far}. Quote the tables.\n")


def table_3(paper: Paper, item: Item, _args: Any) -> Ours:
    """Predicted epochs of MG-GCN's own kernels."""
    machine, values, rows = with_cusparse("dgx-a100"), {}, []
    _, told = warp_rate()
    for cell in item.published:
        graph, _, ranks = cell.partition(", ")
        cost = even(paper.shape(graph.lower()), NETWORKS[graph], int(ranks)).cost(machine)
        values[cell] = cost.seconds
        rows.append([cell, *(f"{1e3 * cost.parts.get(kind, 0.0):.2f}" for kind in KINDS)])
    head = ["ms of the rank that computes longest", *KINDS.values()]
    text = (
        f"cuSPARSE on an H200: {told}. Here its warps or its bytes count, whichever take longer.\n\n{table(head, rows)}"
    )
    return Ours(values=values, text=f"{text}\n{_small(item, values)}", reason="See the parts of each cell.")


def _small(item: Item, values: dict[str, float]) -> str:
    """Say what the broadcasts of the smallest graph would have to take for what is not predicted of it."""
    cell, products = "Reddit, 8", 3
    left, broadcasts = item.published[cell] - values[cell], 8 * products
    return (
        f"Of Reddit on 8 GPUs {1e3 * left:.1f} of the published {1e3 * item.published[cell]:.0f} ms are not predicted. An "
        f"epoch has {broadcasts} broadcasts there: {1e6 * left / broadcasts:.0f} us each, where the machine's file has 20 "
        "of latency. The paper says that this graph gains nothing beyond 4 GPUs.\n"
    )


def figure_5(paper: Paper, _item: Item, args: Any) -> Ours:
    """Shares of SpMM and GeMM, predicted by extents on a V100, and measured here on graphs like them."""
    machine, shares = with_cusparse("dgx-1"), {}
    for graph in paper.graphs:
        if graph != "papers":  # it does not fit one GPU
            cost = even(paper.shape(graph), TWO_OF_512, 1).cost(machine)
            shares[graph] = {kind: cost.parts[kind] / cost.seconds for kind in ("sparse", "dense")}
    values = {}
    for name, kind in (("SpMM", "sparse"), ("GeMM", "dense")):
        of = [shares[graph][kind] for graph in LARGE]
        values |= {f"{name}, least of three": min(of), f"{name}, most of three": max(of)}
    rows = [[graph, "DGX-1, predicted", *(f"{share:.0%}" for share in of.values())] for graph, of in shares.items()]
    rows += [[graph, "here, measured", *timed_shares(graph, args)] for graph in HERE if available(graph, None)]
    text = table(["graph", "where", "SpMM", "GeMM"], rows)
    plot = bars("Shares of an epoch on one V100, predicted", "share, %", _percent(shares))
    told = ", ".join(f"{graph} {shares[graph]['sparse']:.0%}" for graph in LARGE)
    reason = f"Predicted for one V100: {told} SpMM."
    return Ours(values=values, text=text, plots=plot, reason=reason)


def _percent(shares: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {graph: {kind: 100 * share for kind, share in of.items()} for graph, of in shares.items()}


def timed_shares(graph: str, args: Any) -> list[str]:
    """Cells: shares of sparse and dense products in two layers of 512, of an epoch that is trained here."""
    store = store_of(graph, args)
    words = {"model.hidden": "512", "train.eval_every": "0", "run.threads": str(args.threads)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = [word for key, value in words.items() for word in ("--set", f"{key}={value}")]
        mggcn("train", str(store), *settings, "--epochs", "4", "--timeline", "--out", str(out), "--quiet")
        seconds = breakdown(read_timeline(out / "timeline.json"))[0]
    total = sum(seconds.values())
    return [f"{seconds.get(op, 0.0) / total:.0%}" for op in ("spmm", "gemm")]


def clustered(args: Any) -> Path:
    """Return the store of a graph like products that is numbered community by community."""
    made = dataclasses.replace(graphs.GENERATED["products-like"], by_class=True).scaled(args.scale)
    return made_store(CLUSTERED, made, args.cache)


def tiles_of(store: Path, ranks: int) -> dict[str, tuple[TileStatistics, tuple[int, ...]]]:
    """Return the tiles under the graph's own ids and permuted ones, by name of the order."""
    graph, found = open_store(store), {}
    for name, order in ORDERS.items():
        owners = assign(graph.num_vertices, ranks, order, SEED)
        found[name] = tile_statistics(graph, owners, self_loops=True), owners.counts
    return found


def figure_6_8(_paper: Paper, item: Item, args: Any) -> Ours:
    """Milliseconds of a product's stages on four V100s, with counted tiles, by order and slots."""
    machine, found = with_cusparse("dgx-1"), {}
    tiles = tiles_of(clustered(args), 4)
    for order, (of, counts) in tiles.items():
        for slots in (1, 2):
            found[order, slots] = 1e3 * counted(of, counts, (512, 512), slots).product_cost(machine, 512).seconds
    imbalance = {order: of.critical_path_over_ideal for order, (of, _) in tiles.items()}
    values = {
        "original over permuted": found["original", 1] / found["permuted", 1],
        "one slot over two, permuted": found["permuted", 1] / found["permuted", 2],
        "imbalance, original over permuted": imbalance["original"] / imbalance["permuted"],
    }
    cells = {order: {f"{n} slots": found[order, n] for n in (1, 2)} for order in tiles}
    rows = [[order, *(f"{ms:.2f}" for ms in of.values()), f"{imbalance[order]:.2f}"] for order, of in cells.items()]
    text = f"{CLUSTERED}, scale {args.scale:g}, 512 columns, 4 V100s as described.\n\n"
    text += table(["order", "ms, one slot", "ms, two slots", "path over ideal"], rows)
    plot = bars("A product's stages on four V100s, predicted", "ms", cells)
    return Ours(values=values, text=text, plots=plot, reason=_ratios_text(values, item))


def _ratios_text(values: dict[str, float], item: Item) -> str:
    pairs = ", ".join(
        f"{cell} {value:.2f} (published {item.published.get(cell, 0):g})" for cell, value in values.items()
    )
    return f"Counted tiles give {pairs}."


def figure_7(_paper: Paper, item: Item, args: Any) -> Ours:
    """Epochs under the graphs' own ids over permuted ones, by ranks."""
    machine, points, rows = with_cusparse("dgx-1"), {}, []
    data = find_data(args.data)
    stores: dict[str, Callable[[], Path]] = {"products-like": lambda: clustered(args)}
    for name in ("reddit", "ogbn-products", "cnr_2000", "dblp_2010"):
        if available(name, data):
            stores[name] = functools.partial(store_of, name, args)
    for name, store in stores.items():
        points[name] = [(ranks, _order_ratio(store(), ranks, machine)) for ranks in (1, 2, 4, 8)]
        rows.append([name, *(f"{ratio:.2f}" for _, ratio in points[name])])
    values = {name: found[-1][1] for name, found in points.items()}
    text = table(["graph", "P = 1", "2", "4", "8"], rows)
    plot = lines("Epoch in the graph's own order over permuted, predicted on a DGX-1", "ratio", "GPUs", points)
    tiles = tiles_of(clustered(args), 8)["original"][0]
    reason = (
        f"The tiles of the graph like products put {np.trace(tiles.nnz) / tiles.nnz.sum():.0%} of the nonzeros on the "
        f"diagonal of 8 x 8, one of which each stage multiplies: path over ideal {tiles.critical_path_over_ideal:.2f}."
    )
    return Ours(values=values, text=text, plots=plot, reason=reason)


def _order_ratio(store: Path, ranks: int, machine: Machine) -> float:
    graph, found = open_store(store), {}
    for order, (tiles, counts) in tiles_of(store, ranks).items():
        widths = (graph.num_features, *TWO_OF_512, graph.num_classes)
        found[order] = counted(tiles, counts, widths).cost(machine).seconds
    return found["original"] / found["permuted"]


def figure_9(paper: Paper, _item: Item, _args: Any) -> Ours:
    """Speed-ups over one GPU as arxiv's edges grow, by extents alone."""
    machine, points = with_cusparse("dgx-1"), dict[str, list[tuple[float, float]]]()
    for factor in FACTORS:
        shape = paper.shape("arxiv", num_features=512, num_edges=factor * paper.graphs["arxiv"]["edges"])
        seconds = {ranks: even(shape, TWO_OF_512, ranks).cost(machine).seconds for ranks in (1, 2, 4, 8)}
        for ranks in (2, 4, 8):
            points.setdefault(f"{ranks} GPUs", []).append((factor, seconds[1] / seconds[ranks]))
    values = {"growth of the speed-up, 8 GPUs": points["8 GPUs"][-1][1] / points["8 GPUs"][0][1]}
    for name, found in points.items():
        above = [factor for factor, gain in found if gain > int(name.split()[0])]
        values[name] = above[0] if above else NEVER
    rows = [[name, *(f"{gain:.2f}" for _, gain in found)] for name, found in points.items()]
    text = f"Above {FACTORS[-1]} stands for never.\n\n" + table(
        ["speed-up", *(f"{factor}x" for factor in FACTORS)], rows
    )
    never = [name for name in points if values[name] == NEVER]
    tile, held = FLOAT * 512 * paper.graphs["arxiv"]["vertices"] / 8, machine.device.gather.points[0][0]
    reason = (
        f"Never super-linear: {', '.join(never) or 'none'}. A tile's operand of 512 columns has {tile / MIB:.0f} MiB on 8 "
        f"GPUs, of which the described L2 holds {min(1.0, held / tile):.0%}, and of one GPU's "
        f"{min(1.0, held / 8 / tile):.1%}; results are read and written once a stage. Degrees are even in this prediction; "
        "BTER's hubs are not."
    )
    plot = lines(
        "Speed-up by average degree, predicted on a DGX-1", "speed-up over one GPU", "times arxiv's edges", points
    )
    return Ours(values=values, text=text, plots=plot, reason=reason)


RUNS = {
    "section-5.1": section_5_1,
    "section-6.7": section_6_7,
    "table-3": table_3,
    "figure-5": figure_5,
    "figure-6-8": figure_6_8,
    "figure-7": figure_7,
    "figure-9": figure_9,
}
