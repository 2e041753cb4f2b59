"""What an epoch of each acceptance case should cost on a GPU: bytes, FLOP and launches by op, and seconds from ceilings.

`python bench/gpu_predict.py` prints the tables of docs/notes/0005-gpu-epoch.md; bench/gpu.py puts the same prediction, from
the ceilings that it measured, beside each epoch. Nothing here is a measurement. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import table
from gpu_cases import CASES
from gpu_graphs import SYNTHETIC

from mggcn.assemble import plan_shape
from mggcn.config import from_tables
from mggcn.model import backward as bwd
from mggcn.model import forward as fwd
from mggcn.model.ops import Finish, Op
from mggcn.plan.memory import ITEM_BYTES
from mggcn.train.runplan import RankPlan
from mggcn.train.shape import GraphShape

CORA_NNZ, CORA_AGGREGATED = 49_216, 160_000
"""Nonzeros of Cora's features, and about those of A_hat X."""
AFTER = 1
"""Launches of an epoch beside its ops: weights, history, signals and clock in one kernel."""


@dataclass(frozen=True)
class Rates:
    """What a device does in a second. The defaults are assumptions about an H100."""

    copy: float = 3.0e12
    l2: float = 5.5e12
    gather: float = 2.4e12
    """Rows of 128 bytes and more, at random, beyond the cache."""
    l2_bytes: float = 50e6
    gemm: tuple[tuple[str, float], ...] = (("fp32", 50e12), ("tf32", 400e12), ("bf16", 800e12))
    launch_s: float = 1.5e-6
    """A kernel as a node of a CUDA graph, beyond its work."""
    sparse_share: float = 0.85
    """What our sparse kernel gets of the gather ceiling."""


@dataclass(frozen=True)
class Work:
    """An op: bytes gathered by rows from an operand of `footprint` bytes, streamed, and passed on in the cache; FLOP."""

    label: str
    gathered: int = 0
    footprint: int = 1
    streamed: int = 0
    cached: int = 0
    flop: int = 0
    launches: int = 1

    @property
    def nbytes(self) -> int:
        return self.gathered + self.streamed

    def seconds(self, rates: Rates, precision: str) -> float:
        """The longer of moving and computing, and what launching costs; half of the cache keeps rows of the operand."""
        hit = min(1.0, 0.5 * rates.l2_bytes / self.footprint)
        gathering = self.gathered * (hit / rates.l2 + (1 - hit) / rates.gather) / rates.sparse_share
        moving = gathering + self.streamed / rates.copy + self.cached / rates.l2
        return max(moving, self.flop / dict(rates.gemm)[precision]) + self.launches * rates.launch_s


def plan_case(graph: str, hidden: tuple[int, ...], precision: str) -> RankPlan:
    """The plan of a case from its extents alone."""
    work = SYNTHETIC[graph]
    sparse = (CORA_NNZ, CORA_AGGREGATED) if graph == "cora" else (None, 0)
    shape = GraphShape(
        work.name, work.vertices, 2 * work.edges, work.features, work.classes, True, False, sparse[0], sparse[1]
    )
    settings = {"model": {"hidden": hidden}, "run": {"device": "cuda", "precision": precision}}
    return plan_shape(from_tables(settings), shape).ranks[0]


def epoch_work(plan: RankPlan) -> list[Work]:
    """Every op of a training epoch, and what follows them."""
    return [_work(op, plan) for op in plan.train.ops] + [Work("optimiser and history", launches=AFTER)]


def _work(op: Op, plan: RankPlan) -> Work:
    rows, item = plan.model.rows, ITEM_BYTES[plan.model.dtype]
    blocks = -(-rows // plan.model.block_rows)
    widths = {choice.layer: (choice.d_in, choice.d_out) for choice in plan.model.layers}

    def dense(cols: int) -> int:
        return rows * cols * item

    def product(nnz: int, cols: int, entry: int, inner: int = rows, out_rows: int = rows) -> Work:
        moved = nnz * entry + out_rows * (8 + cols * item)
        return Work(op.label, nnz * cols * item, inner * cols * item, moved, flop=2 * nnz * cols, launches=2)

    match op:
        case fwd.Aggregate():
            return product(plan.nnz, plan.train.arena[op.dst].spec.cols, 4)
        case fwd.SparseLinear():
            return product(CORA_NNZ, widths[op.layer][1], 8, inner=widths[op.layer][0])
        case bwd.SparseWeightGrad():
            return product(CORA_NNZ, widths[op.layer][1], 8, out_rows=widths[op.layer][0])
        case bwd.Loss():
            return Work(op.label, streamed=2 * dense(widths[op.layer][1]), launches=2)
        case bwd.InputGrad() | fwd.Linear() | bwd.ProductGrad():
            d, e = widths[op.layer]
            finished = isinstance(op, bwd.InputGrad) or op.finish != Finish(op.layer)
            streamed = dense(d + e) + (dense(d) if isinstance(op, bwd.InputGrad) else 0)
            cached = 2 * dense(d if not isinstance(op, fwd.Linear) else e) if finished else 0
            count = (2 * blocks if finished else 1) + isinstance(op, bwd.InputGrad)
            return Work(op.label, streamed=streamed, cached=cached, flop=2 * rows * d * e, launches=count)
        case bwd.WeightGrad():
            d, e = widths[op.layer]
            return Work(op.label, streamed=dense(d + e), flop=2 * rows * d * e, launches=2)
        case bwd.ActivationGrad():
            return Work(op.label, streamed=3 * dense(widths[op.layer][0]), launches=2)
    raise ValueError(f"no acceptance case has the op {op.label}")


def pyg_work(plan: RankPlan) -> list[Work]:
    """PyG's `fused` kind in float32: weighted products in both directions of all layers, elementwise passes unfused."""
    rows, found = plan.model.rows, []

    def dense(cols: int) -> int:
        return 4 * rows * cols

    for choice in plan.model.layers:
        d, e = choice.d_in, choice.d_out
        hidden = choice.layer < len(plan.model.layers)
        product = Work(f"sparse {choice.layer}", plan.nnz * 4 * e, dense(e), plan.nnz * 8 + dense(e), launches=3)
        gemm = Work(f"dense {choice.layer}", streamed=dense(d + e), flop=2 * rows * d * e, launches=2)
        found += [product, product, gemm, gemm]
        if choice.layer > 1:
            found.append(gemm)
        # bias, its gradient; ReLU and its mask
        found.append(Work(f"passes {choice.layer}", streamed=dense(e) * (3 + 5 * hidden), launches=4 + 3 * hidden))
    return [*found, Work("loss, Adam", launches=25)]


def total(works: Iterable[Work], rates: Rates, precision: str) -> float:
    return sum(work.seconds(rates, precision) for work in works)


def pyg_rates(rates: Rates, share: float = 0.65) -> Rates:
    """CuSPARSE gets 0.85 / 1.3 of the ceiling, if ours gets 0.85 and is 1.3 times as fast."""
    return dataclasses.replace(rates, sparse_share=share)


def from_ceilings(rows: list[dict[str, Any]], device: dict[str, Any]) -> Rates:
    """Rates as bench/gpu.py measured them; what it did not measure stays assumed."""
    base = Rates()

    def best(key: str, unit: float, default: float, **wanted: Any) -> float:
        found = [row[key] * unit for row in rows if key in row and wanted.items() <= row.items()]
        return max(found, default=default)

    def gathered(place: str, default: float) -> float:
        found = (
            best("gb_per_s", 1e9, 0.0, kind="gather", footprint=place, row_bytes=n) for n in (256, 512, 1024, 2048)
        )
        return max(found) or default

    return dataclasses.replace(
        base,
        copy=best("gb_per_s", 1e9, base.copy, kind="copy"),
        l2=gathered("a quarter of L2", base.l2),
        gather=gathered("2 GiB", base.gather),
        l2_bytes=float(device.get("l2_bytes", base.l2_bytes)),
        gemm=tuple((name, best("tflop_per_s", 1e12, rate, kind="gemm", precision=name)) for name, rate in base.gemm),
        launch_s=best("median", 1.0, base.launch_s, kind="launch"),
    )


def cells_of(work: Work, rates: Rates) -> list[str]:
    return [
        work.label,
        f"{work.nbytes / 1e9:.3f}",
        f"{work.flop / 1e9:.1f}",
        f"{1e3 * work.seconds(rates, 'fp32'):.3f}",
    ]


def tables(rates: Rates) -> str:
    """Both tables of the note: sums of each case, and the ops of each case in float32."""
    sums, ops = [], []
    for name, (graph, hidden) in CASES.items():
        peer = total(pyg_work(plan_case(graph, hidden, "fp32")), pyg_rates(rates), "fp32")
        for precision, _ in rates.gemm:
            plan = plan_case(graph, hidden, precision)
            works = epoch_work(plan)
            seconds = total(works, rates, precision)
            nbytes, flop = sum(w.nbytes for w in works), sum(w.flop for w in works)
            counts = [plan.num_spmm, sum(w.launches for w in works)]
            cells = [f"{nbytes / 1e9:.2f}", f"{flop / 1e9:.0f}", *counts, f"{1e3 * seconds:.3f}", f"{1e3 * peer:.3f}"]
            sums.append([name, precision, *cells, f"{peer / seconds:.1f}"])
            if precision == "fp32":
                ops += [[name, *cells_of(work, rates)] for work in works]
    head = ["case", "precision", "GB", "GFLOP", "products", "launches", "ms", "PyG fp32 ms", "ratio"]
    return table(head, sums) + "\n" + table(["case", "op", "GB", "GFLOP", "ms"], ops)


if __name__ == "__main__":
    print(tables(Rates()))
