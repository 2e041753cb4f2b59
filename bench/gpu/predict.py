"""What sparse products and epochs of the acceptance cases should cost on a GPU: mggcn's plans on its machine's file.

`python -m bench.gpu.predict` prints the tables of bench/notes/0004-spmm-gpu.md and 0005-gpu-epoch.md, `--write` puts them
there. bench.gpu puts the same prediction, from the ceilings that it measured, beside each epoch. Its rates are an
H200's, measured. Needs no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

from bench.gpu.graphs import CASES, LAYERS, ORDERED, PRECISIONS, SYNTHETIC
from bench.report import ROOT, table
from mggcn.assemble.plan import plan_shape
from mggcn.backend.cuda.sizes import H100
from mggcn.backend.cuda.variants import choose, choose_slices
from mggcn.backend.gather_rates import CacheRates
from mggcn.config import from_tables
from mggcn.cost.machine import DeviceRates, RateTable, find_machine
from mggcn.cost.work import KINDS, Work, product, work_seconds
from mggcn.memory.arena import BufferSpec
from mggcn.planning.op_work import items_by_op
from mggcn.planning.run import RunPlan
from mggcn.planning.shape import GraphShape

CORA_NNZ, CORA_AGGREGATED = 49_216, 160_000
"""Nonzeros of Cora's features, and about those of A_hat X."""
WIDTHS = (16, 41, 64, 128, 256, 512)
CUSPARSE = 1.2
"""How many times as fast our sparse products are assumed to be."""
NARROW, WIDE = 64, 1024
"""Bytes of the gathered rows whose ceilings tell what a row costs beside its bytes."""
FUSED = ("h W, 256 x 256, epilogue", "g W^T, 256 x 256, gradient")
"""Own products with what follows them in the same kernel: names of their ceilings."""
DETAILED = ("cora 2x16", "products-like 3x256")
HEADS = 4
MODELS: dict[str, dict[str, Any]] = {
    "gat": {"kind": "gat", "heads": HEADS},
    "sage-max": {"kind": "sage", "aggregator": "max"},
}
EDGE_ROWS = {"gat": 4.5, "sage-max": 8.5}
"""Of GAT and the maximum, as of bench.peers.attention, which needs torch: heads, settings, and how many matrices of a
row for each edge PyG holds."""
GOALS = (
    *(("arxiv-like 3x256", precision, ratio) for precision, ratio in (("fp32", 2.0), ("mixed", 2.8), ("bf16", 4.5))),
    *(("products-like 3x256", precision, ratio) for precision, ratio in (("fp32", 2.0), ("mixed", 2.8), ("bf16", 4.0))),
    *(("reddit-like 2x16", precision, 3.0) for precision in ("fp32", "mixed", "bf16")),
    *(("reddit-like 2x512", precision, 5.0) for precision in ("fp32", "mixed", "bf16")),
    *((graph, kind, 2.0) for graph, _, kind in LAYERS.values()),
)
"""Case and precision, or graph and layers in float32; how many times as fast as PyG an epoch is to be
(bench/gpu/report.py)."""
NOTES = ROOT / "bench" / "notes"

Works = list[tuple[str, list[Work]]]
"""The work of every op, by its label."""


def h200() -> DeviceRates:
    return find_machine("hgx-h200").device


def plan_case(graph: str, hidden: tuple[int, ...], precision: str, **model: Any) -> RunPlan:
    """The plan of a case from its extents alone."""
    work = SYNTHETIC[graph]
    sparse = (CORA_NNZ, CORA_AGGREGATED) if graph == "cora" else (None, 0)
    shape = GraphShape(
        name=graph,
        num_vertices=work.vertices,
        num_edges=2 * work.edges,
        num_features=work.features,
        num_classes=work.classes,
        symmetric=True,
        feature_nnz=sparse[0],
        aggregated_nnz=sparse[1],
    )
    settings = {"model": {"hidden": hidden, **model}, "run": {"device": "cuda", "precision": precision}}
    return plan_shape(from_tables(settings), shape)


def epoch_work(plan: RunPlan, device: DeviceRates) -> Works:
    """Every op of a training epoch of one rank, which sends nothing, and what follows them, by a device's kernels."""
    [rank] = plan.ranks
    by_op = items_by_op(plan, rank, rank.train, device=device)
    return [(label, [item for item in items if isinstance(item, Work)]) for label, items in by_op]


def pyg_work(plan: RunPlan) -> Works:
    """PyG's `fused` kind in float32: weighted products in both directions of all layers, elementwise passes unfused."""
    [rank] = plan.ranks
    rows, found = rank.sizes.owned, []

    def passes(nbytes: int, calls: int) -> Work:
        return Work(kind="elementwise", streamed=rows * nbytes, calls=calls)

    for choice in rank.values.layers:
        d, e = choice.d_in, choice.d_out
        hidden = choice.layer < len(rank.values.layers)
        sparse = dataclasses.replace(product(rows, rows, rank.nnz, 4 * e, 8), calls=3, results=0)
        gemm = Work(kind="dense", streamed=4 * rows * (d + e), flop=2 * rows * d * e, calls=2)
        # Bias, its gradient; ReLU and its mask.
        beside = passes(4 * e * (3 + 5 * hidden), 4 + 3 * hidden)
        found.append((f"layer {choice.layer}", [sparse, sparse, *[gemm] * (2 + (choice.layer > 1)), beside]))
    return [*found, ("loss, Adam", [passes(0, 25)])]


def pyg_device(device: DeviceRates) -> DeviceRates:
    """The device as cuSPARSE's products use it."""
    return dataclasses.replace(device, gather=gather_of(device).scaled(1 / CUSPARSE))


def gather_of(device: DeviceRates) -> CacheRates:
    return cast(CacheRates, device.gather)


def seconds(works: Iterable[Work], device: DeviceRates) -> float:
    return sum(sum(work_seconds(work, device, 1)) for work in works)


def total(works: Works, device: DeviceRates) -> float:
    return sum(seconds(of, device) for _, of in works)


def rests_on(works: Sequence[Work], device: DeviceRates, *, own: bool) -> str:
    """What the seconds of works of one kind rest on: rates of the machine's file, which says where they are from."""
    gather, kind = gather_of(device), works[0].kind
    if kind == "sparse":
        found = f"{gather.cached / 1e12:.3g} TB/s from L2, {gather.missed / 1e12:.3g} from memory"
        return f"rows at random, {found}, {1e12 * gather.missed_row_s:.3g} ps a row"
    if kind == "dense":
        [precision] = dict.fromkeys(work.precision for work in works)
        fused = [rates[precision] for rates in (device.fused, device.fused_grad) if precision in rates and own]
        found = f"{device.gemm[precision] / 1e12:.3g} TFLOP/s by cuBLAS in {precision}"
        return found + (
            f", own {' and '.join(f'{rate / 1e12:.3g}' for rate in fused)} with what follows" if fused else ""
        )
    if kind == "elementwise":
        return f"passes, {device.copy.points[-1][1] / 1e12:.3g} TB/s from memory"
    return f"{1e6 * device.least_s:.3g} us a kernel, {1e6 * device.call_s:.3g} us a node"


def moved(works: Iterable[Work]) -> int:
    """Bytes gathered and streamed, whichever cache they hit."""
    return sum(work.rows * work.row_bytes + work.streamed for work in works)


def from_ceilings(rows: list[dict[str, Any]], facts: dict[str, Any]) -> DeviceRates:
    """Rates as bench.gpu measured them; what it did not measure stays assumed, but for kernels that did not run there."""
    device = h200() if any(row.get("kind") == "fused" for row in rows) else h200().unfused
    base = gather_of(device)

    def best(key: str, unit: float, default: float, **wanted: Any) -> float:
        found = [row[key] * unit for row in rows if key in row and wanted.items() <= row.items()]
        return max(found, default=default)

    def gathered(place: str, row_bytes: int) -> float:
        return best("gb_per_s", 1e9, 0.0, kind="gather", footprint=place, row_bytes=row_bytes)

    held = facts.get("l2_bytes", base.cache_bytes)
    gather = dataclasses.replace(base, cache_bytes=held, cached=gathered("a quarter of L2", WIDE) or base.cached)
    narrow, wide = gathered("2 GiB", NARROW), gathered("2 GiB", WIDE)
    if narrow and wide:
        each = (WIDE / wide - NARROW / narrow) / (WIDE - NARROW)
        gather = dataclasses.replace(gather, missed=1 / each, missed_row_s=max(0.0, NARROW / narrow - NARROW * each))
    copy = best("gb_per_s", 1e9, device.copy.points[-1][1], kind="copy")
    gemm = {name: best("tflop_per_s", 1e12, rate, kind="gemm", precision=name) for name, rate in device.gemm.items()}
    fused, fused_grad = (
        {
            name: best("tflop_per_s", 1e12, rate, kind="fused", product=of, precision=name)
            for name, rate in rates.items()
        }
        for of, rates in zip(FUSED, (device.fused, device.fused_grad), strict=True)
    )
    cached, (far, _) = device.copy.points
    call_s = best("median", 1.0, device.call_s, kind="launch")
    copies = RateTable((cached, (far, copy)))
    found = {"gather": gather, "copy": copies, "gemm": gemm, "fused": fused, "fused_grad": fused_grad, "call_s": call_s}
    return dataclasses.replace(device, **found)


def epochs_table(device: DeviceRates) -> str:
    """Sums of each case."""
    lines = []
    for name, (graph, hidden) in CASES.items():
        if graph == ORDERED:  # its bytes are those of arxiv-like, its cache hits are not
            continue
        peer = total(pyg_work(plan_case(graph, hidden, "fp32")), pyg_device(device))
        for precision in PRECISIONS:
            plan = plan_case(graph, hidden, precision)
            works = epoch_work(plan, device)
            every = [work for _, of in works for work in of]
            found = total(works, device)
            flop, calls = sum(work.flop for work in every), sum(work.calls for work in every)
            cells = [f"{moved(every) / 1e9:.2f}", f"{flop / 1e9:.0f}", plan.ranks[0].num_spmm, calls]
            lines.append([name, precision, *cells, f"{1e3 * found:.3f}", f"{1e3 * peer:.3f}", f"{peer / found:.1f}"])
    return table(["case", "precision", "GB", "GFLOP", "products", "launches", "ms", "PyG fp32 ms", "ratio"], lines)


def ops_table(device: DeviceRates) -> str:
    """The ops of two cases in float32."""
    lines = []
    for name in DETAILED:
        for label, of in epoch_work(plan_case(*CASES[name], "fp32"), device):
            flop, found = sum(work.flop for work in of), seconds(of, device)
            lines.append([name, label, f"{moved(of) / 1e9:.3f}", f"{flop / 1e9:.1f}", f"{1e3 * found:.3f}"])
    return table(["case", "op", "GB", "GFLOP", "ms"], lines)


def layers_plan(graph: str, kind: str) -> RunPlan:
    """The plan of three layers of GAT or of maxima, of 256 columns each, on a graph's extents."""
    return plan_case(graph, (256, 256), "fp32", **MODELS[kind])


def pyg_gat_work(plan: RunPlan) -> Works:
    """PyG's GATConv: a row of every head for each edge is gathered, weighted and added, each pass through memory."""
    [rank] = plan.ranks
    rows, edges, found = rank.sizes.owned, rank.nnz, []
    widths = [plan.shape.num_features, *plan.config.model.hidden, HEADS * plan.shape.num_classes]
    for layer, (d, e) in enumerate(pairwise(widths), start=1):
        # x and g are gathered for the edges, messages and their gradients added to rows; one side of each is a stream.
        moved = product(rows, rows, edges, 4 * e, 4 * e)
        gemm = Work(kind="dense", streamed=4 * rows * (d + e), flop=2 * rows * d * e)
        # Weighting reads and writes a row for each edge, its two gradients four; twelve passes over the weights.
        weighted = Work(kind="elementwise", streamed=edges * 4 * (6 * e + 12 * HEADS), calls=20)
        beside = Work(kind="elementwise", streamed=rows * 4 * e * 8, calls=7)
        found.append((f"layer {layer}", [*[moved] * 4, *[gemm] * (2 + (layer > 1)), weighted, beside]))
    return [*found, ("loss, Adam", [Work(kind="elementwise", calls=25)])]


def pyg_max_work(plan: RunPlan) -> Works:
    """PyG's SAGEConv with aggr="max" behind a projection: rows of every edge are gathered, and reduced by a scatter."""
    [rank] = plan.ranks
    rows, edges, found = rank.sizes.owned, rank.nnz, []
    widths = [plan.shape.num_features, *plan.config.model.hidden, plan.shape.num_classes]
    for layer, (d, e) in enumerate(pairwise(widths), start=1):
        # Rows are gathered and reduced; backwards the maxima are gathered, ties counted, and gradients gathered and added.
        moved = product(rows, rows, edges, 4 * d, 4 * d)
        project, gemm = (
            Work(kind="dense", streamed=4 * rows * (d + cols), flop=2 * rows * d * cols) for cols in (d, e)
        )
        # Rows of edges are compared with the maxima and masked: three rows read and written each.
        masked = Work(kind="elementwise", streamed=edges * 4 * 6 * d, calls=6)
        beside = Work(kind="elementwise", streamed=rows * 4 * (5 * d + 8 * e), calls=9)
        # Forwards, for the weights and, but for the input, for the rows.
        dense = [project, gemm, gemm] * (2 + (layer > 1))
        found.append((f"layer {layer}", [*[moved] * 6, *dense, masked, beside]))
    return [*found, ("loss, Adam", [Work(kind="elementwise", calls=25)])]


PEERS = {"gat": pyg_gat_work, "sage-max": pyg_max_work}
"""PyG's work by layers."""


def peer_gib(plan: RunPlan, kind: str) -> float:
    """GiB of PyG's rows for each edge."""
    return EDGE_ROWS[kind] * 4 * max(plan.config.model.hidden) * plan.ranks[0].nnz / 2**30


def terms_table(device: DeviceRates) -> str:
    """What the goals rest on: an epoch of ours and of PyG's by kind of work, and the rate behind each."""
    lines = []
    for case, precision, ratio in GOALS:
        plan = layers_plan(case, precision) if precision in PEERS else plan_case(*CASES[case], precision)
        peer = PEERS[precision](plan) if precision in PEERS else pyg_work(plan_case(*CASES[case], "fp32"))
        totals = []
        for whose, works, rates in (("mggcn", epoch_work(plan, device), device), ("PyG", peer, pyg_device(device))):
            every = [work for _, of in works for work in of]
            told = whose == "PyG" and precision not in ("fp32", *PEERS)  # PyG's float32, beside each precision
            for kind in () if told else dict.fromkeys(work.kind for work in every):
                of = [work for work in every if work.kind == kind]
                gflop = f"{sum(work.flop for work in of) / 1e9:.0f}"
                source = rests_on(of, rates, own=whose == "mggcn")
                cells = [f"{moved(of) / 1e9:.2f}", gflop, f"{1e3 * seconds(of, rates):.3f}", source]
                lines.append([f"{case}, {precision}", whose, KINDS[kind], *cells])
            totals.append(total(works, rates))
        faster = totals[1] / totals[0]
        said = f"{faster:.2f} times as fast, goal {ratio:g}" + ": MISSED" * (faster < ratio)
        said += f"; PyG's rows of edges: {peer_gib(plan, precision):.0f} GiB" if precision in PEERS else ""
        lines.append(
            [f"{case}, {precision}", "", "all", "", "", f"{1e3 * totals[0]:.3f} of {1e3 * totals[1]:.3f}", said]
        )
    return table(["predicted", "whose", "term", "GB", "GFLOP", "ms", "rests on"], lines)


def graphs() -> Iterator[tuple[str, int, int]]:
    """Name, rows, and nonzeros with self-loops."""
    for name in ("arxiv-like", "products-like", "reddit-like"):
        work = SYNTHETIC[name]
        yield name, work.vertices, 2 * work.edges + work.vertices
    yield "cnr_2000", 325_557, 5_477_938 + 325_557


def product_work(rows: int, nnz: int, width: int, dtype: str) -> Work:
    return product(rows, rows, nnz, BufferSpec("", 1, width, dtype).nbytes, 4)


def products_table(device: DeviceRates) -> str:
    """Milliseconds of a product in float32 and bf16, and the shape that float32 takes."""
    lines = []
    for name, rows, nnz in graphs():
        cells = []
        for width in WIDTHS:
            ms = [1e3 * seconds([product_work(rows, nnz, width, dtype)], device) for dtype in ("fp32", "bf16")]
            panel = choose_slices(rows, nnz, rows, width, 4, H100).panel
            shape = choose(width, 4, True, panel)
            slices = f", {-(-width // panel)} slices" if panel else ""
            sizes = f"{shape.lanes} x {shape.pieces} x {shape.unroll}"
            cells.append(f"{ms[0]:.3g} / {ms[1]:.3g} ({sizes}{slices})")
        lines.append([f"{name} ({rows:,}, {nnz / 1e6:.1f} M)", *cells])
    return table(["graph (rows, nonzeros)", *map(str, WIDTHS)], lines)


def tables() -> dict[str, list[str]]:
    """The tables of each note."""
    device = h200()
    return {
        "0004-spmm-gpu.md": [products_table(device)],
        "0005-gpu-epoch.md": [epochs_table(device), ops_table(device), terms_table(device)],
    }


def replaced(text: str, new: str) -> str:
    """A note with a table in the place of the one that has the same head."""
    head = new.splitlines()[0]
    return re.sub(re.escape(head) + r"\n(\|.*\n)*", lambda _: new, text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into the notes")
    write = parser.parse_args(arguments).write
    for name, found in tables().items():
        print(f"{name}\n\n" + "\n".join(found))
        if write:
            note = NOTES / name
            text = note.read_text()
            for new in found:
                text = replaced(text, new)
            note.write_text(text)


if __name__ == "__main__":
    main()
