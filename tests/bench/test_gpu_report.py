"""The ratios of the report, from rows made by hand, and the predictions, from extents."""

from __future__ import annotations

from typing import Any

import gpu_epoch_report
import gpu_overlap_report
import gpu_predict
import gpu_spmm_report
import gpu_tune_report
import pytest
from gpu_cases import CASES
from gpu_predict import Rates, Work, epoch_work, from_ceilings, plan_case, total

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
    over_cusparse, over_fp32 = gpu_spmm_report.ratios({"a": PRODUCTS})
    assert over_cusparse == {("a", 16): 1.8, ("a", 64): 0.8}
    assert over_fp32 == {("a", 64): 2.0}
    text = gpu_spmm_report.verdicts({"a": PRODUCTS})
    assert "geometric mean 1.20 (MISSED, goal 1.3), least 0.80 (MISSED, goal 0.9) (a, width 64)" in text
    assert "2.00 (met, goal 1.7)" in text


def test_ceiling_of_a_width_is_that_of_the_next_wider_row() -> None:
    rows = [
        {"kind": "gather", "row_bytes": r, "footprint": place, "median": 1.0, "gb_per_s": speed + r}
        for place, speed in (("a quarter of L2", 5000), ("4 L2", 3000), ("2 GiB", 2000))
        for r in (64, 256)
    ]
    assert gpu_spmm_report.ceiling(rows, 164, 1000) == 5256
    assert gpu_spmm_report.ceiling(rows, 64, 1_000_000) == 3064
    assert gpu_spmm_report.ceiling(rows, 2048, 1_000_000) == 2256
    assert gpu_spmm_report.ceiling([], 64, 10) is None


def epoch(contender: str, seconds: float, gib: float, loss: float = 2.0, **more: Any) -> dict[str, Any]:
    row = {"kind": "epoch", "contender": contender, "precision": "fp32", "mode": "captured", "losses": [loss]}
    return row | {"median": seconds, "min": seconds, "max": seconds, "memory": {"allocated": gib * 2**30}} | more


def test_epochs_are_judged_against_the_fastest_way() -> None:
    """Fails if a slower way of PyG counts, a goal is turned round, or different losses pass."""
    rows = [epoch("mggcn", 1e-3, 0.5), epoch("PyG csr", 9e-3, 9.0), epoch("PyG fused", 2e-3, 2.0, loss=2.1)]
    text = gpu_epoch_report.verdicts("arxiv-like 3x256", rows, {"fp32": 7e-4})
    assert "2.00 times as fast as PyG in fp32 (MISSED, goal 3)" in text
    assert "memory 0.25 of PyG's (met, goal 0.65)" in text
    assert "NOT THE SAME NETWORK" in text
    assert "predicted 0.700 ms" in text
    cora = gpu_epoch_report.verdicts("cora 2x16", [epoch("mggcn", 1e-4, 0.5), epoch("PyG csr", 4e-4, 0.7)], {})
    assert (
        "4.00 times as fast as PyG in fp32 (met, goal 3); memory 0.71 of PyG's; losses 0.0e+00 apart; 100 us (met"
        in cora
    )
    assert "no PyG" in gpu_epoch_report.verdicts("cora 2x16", rows[:1], {})


def test_overlap_and_shapes_as_text() -> None:
    shares = [{"kind": "share", "rank": 0, "share": 0.85}, {"kind": "share", "rank": 1, "share": 0.75}]
    text = gpu_overlap_report.describe(shares)
    assert "| 0 | 85.0% | met |" in text
    assert "| 1 | 75.0% | MISSED |" in text
    tuned = [product("own shape", 16, 0.8), product("own shape", 16, 0.9)]
    text = gpu_tune_report.describe({"tune a": tuned, "spmm a": PRODUCTS})
    assert "| a | 16 | float32 | 8 x 1 x 4: 800.000 ms | 8 x 1 x 4: 900.000 ms | 8 x 1 x 4: 1.25 |" in text.replace(
        "ms |  |", "ms |"
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_case_is_predicted_with_its_products(case: str, precision: str) -> None:
    """Fails if an op of a case is unknown to the prediction, or its sparse products are not those of the plan."""
    plan = plan_case(*CASES[case], precision)
    works = epoch_work(plan)
    gathered = [work for work in works if work.label.startswith("aggregate")]
    assert len(gathered) == plan.num_spmm
    assert 0 < total(works, Rates(), precision) < 1
    for work in gathered:
        assert work.gathered * (2 if precision == "bf16" else 1) % (plan.nnz * 4) == 0


def test_products_like_moves_what_the_note_says() -> None:
    """126 million rows of 256 floats each way, and of 47."""
    plan = plan_case(*CASES["products-like 3x256"], "fp32")
    assert plan.nnz == 2 * 61_859_140 + 2_449_029
    gathered = sum(work.gathered for work in epoch_work(plan))
    assert gathered == plan.nnz * 4 * 2 * (256 + 47)
    peer = sum(work.gathered for work in gpu_predict.pyg_work(plan))
    assert peer == plan.nnz * 4 * 2 * (256 + 256 + 47)


def test_seconds_are_the_longer_of_moving_and_computing() -> None:
    rates = Rates(copy=1e12, l2=2e12, gather=0.5e12, l2_bytes=100, launch_s=1e-3, sparse_share=0.5)
    assert Work("", streamed=10**12).seconds(rates, "fp32") == pytest.approx(1.001)
    assert Work("", streamed=10**9, flop=5 * 10**13).seconds(rates, "fp32") == pytest.approx(1.001)
    # Half of the cache holds a quarter of the operand: rows come at 0.25 / 2e12 + 0.75 / 0.5e12, half as fast as could be.
    assert Work("", gathered=10**12, footprint=200).seconds(rates, "fp32") == pytest.approx(2 * (0.125 + 1.5) + 1e-3)


def test_measured_ceilings_replace_assumed_ones() -> None:
    rows: Rows = [
        {"kind": "copy", "gb_per_s": 2500.0, "median": 1.0},
        {"kind": "gather", "footprint": "2 GiB", "row_bytes": 512, "gb_per_s": 2100.0},
        {"kind": "gather", "footprint": "2 GiB", "row_bytes": 64, "gb_per_s": 9000.0},
        {"kind": "gemm", "precision": "tf32", "tflop_per_s": 300.0, "gb_per_s": 1.0},
        {"kind": "launch", "median": 2e-6},
    ]
    rates = from_ceilings(rows, {"l2_bytes": 40e6})
    assert (rates.copy, rates.gather, rates.l2_bytes, rates.launch_s) == (2.5e12, 2.1e12, 40e6, 2e-6)
    assert dict(rates.gemm) == {"fp32": 50e12, "tf32": 300e12, "bf16": 800e12}
    assert rates.l2 == Rates().l2
