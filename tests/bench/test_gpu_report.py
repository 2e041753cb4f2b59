"""The ratios of the report, from rows made by hand, and the predictions, from extents."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from bench.gpu import predict as gpu_predict
from bench.gpu import report as gpu_report
from bench.gpu import report_products
from bench.gpu.graphs import CASES, LAYERS
from bench.gpu.predict import epoch_work, from_ceilings, plan_case, total
from bench.gpu.tasks import ORDER, Task, digest
from bench.peers.attention import EDGE_ROWS, HEADS, MODELS, SCATTER
from mggcn.cost.machine import find_machine
from mggcn.planning.op_cost import training_cost

Rows = list[dict[str, Any]]


def product(contender: str, width: int, seconds: float, dtype: str = "float32") -> dict[str, Any]:
    row = {"kind": "spmm", "contender": contender, "width": width, "type": dtype, "median": seconds, "how": "captured"}
    return row | {"gb_per_s": 1 / seconds, "lanes": 8, "pieces": 1, "unroll": 4}


PRODUCTS = [
    product("own", 16, 1.0),
    product("cuSPARSE ALG2", 16, 2.0),
    product("cuSPARSE ALG3", 16, 1.8),
    product("torch CSR", 16, 0.1),
    product("own", 64, 1.0),
    product("cuSPARSE ALG2", 64, 0.8),
    product("own", 64, 0.5, "bfloat16"),
    product("own", 16, 0.1, "bfloat16"),
]


def test_ratios_are_against_the_better_algorithm() -> None:
    """Fails if the slower one, torch's or another type counts, or bf16 below width 64."""
    over_cusparse, over_fp32 = report_products.ratios({"a": PRODUCTS})
    assert over_cusparse == {("a", 16): 1.8, ("a", 64): 0.8}
    assert over_fp32 == {("a", 64): 2.0}
    assert judged(report_products.product_verdicts({"a": PRODUCTS})) == [
        ("1.20", False),
        ("0.80", True),
        ("2.00", False),
    ]


def judged(text: str) -> list[tuple[str, bool]]:
    """The figures that have a goal, and whether it was missed."""
    lines = [line for line in text.splitlines() if ", goal " in line]
    return [(line.rsplit(": ", 1)[1].split(" (")[0], "MISSED" in line) for line in lines]


def test_ceiling_of_a_width_is_that_of_the_next_wider_row() -> None:
    rows = [
        {"kind": "gather", "row_bytes": r, "footprint": place, "median": 1.0, "gb_per_s": speed + r}
        for place, speed in (("a quarter of L2", 5000), ("4 L2", 3000), ("2 GiB", 2000))
        for r in (64, 256)
    ]
    assert report_products.ceiling(rows, 164, 1000) == 5256
    assert report_products.ceiling(rows, 64, 1_000_000) == 3064
    assert report_products.ceiling(rows, 2048, 1_000_000) == 2256
    assert report_products.ceiling([], 64, 10) is None


def epoch(contender: str, seconds: float, gib: float, loss: float = 2.0, **more: Any) -> dict[str, Any]:
    row = {"kind": "epoch", "contender": contender, "precision": "fp32", "mode": "captured", "losses": [loss]}
    row |= {"pyg": contender[4:]} if contender.startswith("PyG") else {}
    return row | {"median": seconds, "min": seconds, "max": seconds, "memory": {"allocated": gib * 2**30}} | more


def test_epochs_are_judged_against_the_fastest_way() -> None:
    """Fails if a slower way of PyG counts, a goal is turned round, or different losses pass."""
    rows = [epoch("mggcn", 1e-3, 0.5), epoch("PyG csr", 9e-3, 9.0), epoch("PyG fused", 2e-3, 2.0, loss=2.1)]
    text = gpu_report.epoch_verdicts("arxiv-like 3x256", rows, {"fp32": 7e-4})
    assert judged(text) == [("2.00", False), ("0.25", False)]
    assert "PyG as shipped: 9.00" in text
    assert "NOT THE SAME NETWORK" in text
    assert "predicted 0.700 ms" in text
    bf16 = [epoch("mggcn", 1e-3, 0.5, precision="bf16", mode="refused: no"), epoch("PyG scaled", 4e-3, 2.0)]
    assert judged(gpu_report.epoch_verdicts("arxiv-like 3x256", bf16, {})) == [("4.00", True), ("0.25", False)]
    assert "goal at least 3" in gpu_report.epoch_verdicts("reddit-like 2x16", bf16, {})
    assert "goal at least 5" in gpu_report.epoch_verdicts("reddit-like 2x512", bf16, {})
    cora = gpu_report.epoch_verdicts("cora 2x16", [epoch("mggcn", 1e-4, 0.5), epoch("PyG csr", 4e-4, 0.7)], {})
    assert judged(cora) == [("100.00", False)]
    assert "no PyG" in gpu_report.epoch_verdicts("cora 2x16", rows[:1], {})


def test_a_part_beside_other_programs_is_marked() -> None:
    """Fails if figures that others disturbed look like those of a quiet machine, or those of quiet ones are marked."""
    start = {"kind": "start", "settings": {"scale": 1.0, "quick": False}, "digest": digest()}
    parts = {
        name: [start, {"kind": "end", "stopped": "", "taken_by_others": share}]
        for name, share in (("ceilings", 0.3), ("epoch cora 2x16", 0.02))
    }
    text = gpu_report.how_it_went(parts)
    assert "- ceilings: other programs took 30% of the cores: measure it again\n" in text
    assert "- epoch cora" not in text


def test_overlap_and_shapes() -> None:
    """Fails if a share below the goal passes, or the chosen shape is compared with another than the fastest."""
    shares = [{"kind": "timeline", "shares": {"0": 0.85, "1": 0.75}}]
    assert judged(gpu_report.overlap(shares)) == [("0.85", False), ("0.75", True)]
    tuned = [product("own shape", 16, seconds) for seconds in (0.9, 0.8)]
    row = report_products.shapes({"variants a": tuned, "spmm a": PRODUCTS}).splitlines()[2]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[4:8] == ["8 x 1 x 4: 800.000 ms", "8 x 1 x 4: 900.000 ms", "", "8 x 1 x 4: 1.25"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_epoch_is_predicted_as_its_plan_is(case: str, precision: str) -> None:
    """Fails if the benchmark has a model of its own, or its sparse products are not those of the plan."""
    plan = plan_case(*CASES[case], precision)
    device = gpu_predict.h200()
    works = epoch_work(plan, device)
    predicted = training_cost(plan, find_machine("hgx-h200"))
    assert total(works, device) == pytest.approx(predicted.seconds, rel=1e-12)
    gathered = [of for label, of in works if label.startswith("aggregate")]
    assert len(gathered) == plan.ranks[0].num_spmm
    assert all(work.rows == plan.ranks[0].nnz for of in gathered for work in of)


def test_products_like_moves_what_the_note_says() -> None:
    """126 million rows of 256 floats each way, and of 47, padded to 48."""
    plan = plan_case(*CASES["products-like 3x256"], "fp32")
    nnz = plan.ranks[0].nnz
    assert nnz == 2 * 61_859_140 + 2_449_029

    def gathered(works: gpu_predict.Works) -> int:
        return sum(work.rows * work.row_bytes for _, of in works for work in of)

    assert gathered(epoch_work(plan, gpu_predict.h200())) == nnz * 4 * 2 * (256 + 48)
    assert gathered(gpu_predict.pyg_work(plan)) == nnz * 4 * 2 * (256 + 256 + 47)


def test_both_notes_hold_the_same_predictions() -> None:
    """Fails if a table is not what bench/gpu/predict.py prints, or a product takes other seconds alone than in an epoch."""
    for name, found in gpu_predict.tables().items():
        note = (gpu_predict.NOTES / name).read_text()
        for table in found:
            assert table in note, f"{name} is not up to date; run python -m bench.gpu.predict --write"
            old = note.replace("| 4 |", "| 5 |")
            assert gpu_predict.replaced(old, table).count(table) == 1
    _, rows, nnz = next(graph for graph in gpu_predict.graphs() if graph[0] == "products-like")
    device = gpu_predict.h200()
    alone = gpu_predict.seconds([gpu_predict.product_work(rows, nnz, 256, "fp32")], device)
    works = dict(epoch_work(plan_case(*CASES["products-like 3x256"], "fp32"), device))
    assert gpu_predict.seconds(works["aggregate 2"], device) == alone
    assert f"{1e3 * alone:.3g} / " in gpu_predict.products_table(device)
    assert f"| aggregate 2 | 134.735 | 0.0 | {1e3 * alone:.3f} |" in gpu_predict.ops_table(device)


def test_measured_ceilings_replace_assumed_ones() -> None:
    """Fails if a ceiling is not heeded, or rows of the measured widths would not take what was measured."""
    rows: Rows = [
        {"kind": "copy", "gb_per_s": 2500.0, "median": 1.0},
        {"kind": "gather", "footprint": "2 GiB", "row_bytes": 1024, "gb_per_s": 2100.0},
        {"kind": "gather", "footprint": "2 GiB", "row_bytes": 64, "gb_per_s": 1000.0},
        {"kind": "gather", "footprint": "a quarter of L2", "row_bytes": 1024, "gb_per_s": 5000.0},
        {"kind": "gemm", "precision": "tf32", "tflop_per_s": 300.0, "gb_per_s": 1.0},
        {"kind": "fused", "product": gpu_predict.FUSED[0], "precision": "fp32", "tflop_per_s": 90.0},
        {"kind": "fused", "product": gpu_predict.FUSED[1], "precision": "bf16", "tflop_per_s": 170.0},
        {"kind": "launch", "median": 3e-6},
    ]
    base = gpu_predict.h200()
    device = from_ceilings(rows, {"l2_bytes": 40e6})
    assert (device.copy.points[-1][1], device.call_s, device.gather.points[0]) == (2.5e12, 3e-6, (40e6, 5e12))
    far = 1e18
    for row_bytes, rate in ((64, 1e12), (1024, 2.1e12)):
        assert device.gather.row_s(row_bytes, far) == pytest.approx(row_bytes / rate)
    assert dict(device.gemm) == dict(base.gemm) | {"tf32": 300e12}
    assert dict(device.fused) == dict(base.fused) | {"fp32": 90e12}
    assert dict(device.fused_grad) == dict(base.fused_grad) | {"bf16": 170e12}
    assert from_ceilings([], {}) == base.unfused  # as of a GPU that ran no such kernel


def test_goals_are_predicted() -> None:
    """Fails if a goal is another one than the report's, is of a case that is not measured or has no prediction, or if
    others are predicted to be missed than docs/gpu.md says.
    """
    text, missed, goals = gpu_predict.terms_table(gpu_predict.h200()), list[str](), set[tuple[str, str]]()
    for name, precision, goal in gpu_predict.GOALS:
        layers = precision in gpu_predict.PEERS
        case = f"{name} {precision} 3x256" if layers else name
        graph = LAYERS[case][0] if layers else CASES[case][0]
        assert Task("epoch", case, graph) in ORDER
        goals.add((case, "fp32" if layers else precision))
        assert gpu_report.goal_of(case, "fp32" if layers else precision) == goal
        told = re.search(rf"\| {name}, {precision} \| +\| all \|.* (\S+) times as fast, goal {goal:g}(: MISSED)?", text)
        assert told
        assert (float(told[1]) < goal) == bool(told[2])
        missed += [f"{name}, {precision}"] * bool(told[2])
    assert missed == ["arxiv-like 3x256, fp32", "arxiv-like 3x256, mixed"]
    every = {(case, precision) for case in (*CASES, *LAYERS) for precision in ("fp32", "mixed", "bf16", "tf32")}
    assert goals == {one for one in every if gpu_report.goal_of(*one) and not one[0].startswith("arxiv-ordered")}


def test_terms_name_the_rates_that_they_rest_on() -> None:
    """Fails if a rate of the machine's file changes and the table still names the old one."""
    device, works = (
        gpu_predict.h200(),
        dict(epoch_work(plan_case("arxiv-like", (256, 256), "bf16"), gpu_predict.h200())),
    )
    text = gpu_predict.terms_table(device)
    assert f"{device.gemm['fp32'] / 1e12:g} TFLOP/s by cuBLAS in fp32, own {device.fused['fp32'] / 1e12:g}" in text
    dense = [work for of in works.values() for work in of if work.kind == "dense"]
    other = dataclasses.replace(device, gemm={"bf16": 7e12}, fused={"bf16": 5e12}, fused_grad={"bf16": 3e12})
    assert gpu_predict.rests_on(dense, other, own=True) == "7 TFLOP/s by cuBLAS in bf16, own 5 and 3 with what follows"
    assert gpu_predict.rests_on(dense, other, own=False) == "7 TFLOP/s by cuBLAS in bf16"


@pytest.mark.parametrize(
    ("kind", "rows", "widths"),
    [("gat", 14, (256, 256, HEADS * 40)), ("sage-max", 18, (128, 256, 256))],
)
def test_peers_layers_move_rows_of_edges(kind: str, rows: int, widths: tuple[int, ...]) -> None:
    """Fails if PyG's layers are taken to move less than their edges' rows, or other layers are planned than measured."""
    plan = gpu_predict.layers_plan("arxiv-hubs", kind)
    moved = sum(gpu_predict.moved(of) for _, of in gpu_predict.PEERS[kind](plan))
    assert rows < moved / (plan.ranks[0].nnz * 4 * sum(widths)) < 1.5 * rows
    assert gpu_predict.MODELS[kind] == MODELS[kind]
    assert gpu_predict.EDGE_ROWS[kind] == EDGE_ROWS[kind, SCATTER]


def test_hub_epochs_are_predicted_beside_measured_ones() -> None:
    """Fails if the report has no prediction beside a measured epoch of layers on a graph with hubs."""
    rows: Rows = [{"kind": "start", "settings": {"scale": 1.0}}]
    found = gpu_report.predictions("one-hub sage-max 3x256", rows, {"ceilings": [{"kind": "start", "device": {}}]})
    assert list(found) == ["fp32"]
    assert found["fp32"] > 0
