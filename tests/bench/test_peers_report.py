"""What the comparisons with other libraries make of their figures: ratios, bounds, goals, and the parts of run_all.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mggcn.report.bench_plots import read_plots
from tests.bench.conftest import BENCH

import blocks  # isort: skip
import ceilings  # isort: skip
import peers_epoch  # isort: skip
import peers_epoch_report  # isort: skip
import peers_spmm  # isort: skip
import peers_spmm_report  # isort: skip
import peers_switches  # isort: skip
import run_all  # isort: skip
import scaling  # isort: skip
import setup_cost  # isort: skip
from common import GIB, MIB, spread  # isort: skip

DEVICES: dict[str, Any] = {
    "copy": [[4 * MIB, 20e9], [256 * MIB, 10e9]],
    "gather": [[4 * MIB, 100e9], [256 * MIB, 10e9]],
    "gemm": {"torch": 100e9, "NumPy": 200e9},
    "tuned_gemm": {"fp32": 90e9},
}


def test_bounds() -> None:
    """Fails if a footprint gets another's rate, the slower library counts, or the cache's rate is that of memory."""
    work = {"flop": 20e9, "gathers": [[1e9, 256 * MIB], [1e9, MIB]]}
    found = ceilings.bounds(DEVICES, work)
    assert found == pytest.approx({"dense": 0.1, "sparse": 0.11, "total": 0.21, "cached": 0.12})
    assert ceilings.gather_rate(DEVICES, 32 * MIB) == pytest.approx(55e9), "half way in the logarithm"


def run(seconds: float) -> dict[str, float]:
    return {"seconds": seconds, "cpu_seconds": 1.5 * seconds}


def compared(malloc: str = "tuned") -> dict[str, Any]:
    seconds = {"mggcn": 0.5, "DGL": 1.0, "PyG fused": 4.0, "mggcn bf16": 0.25}
    ready = {"imported": {"VmRSS": 100 * MIB}, "memory": {"VmHWM": 450 * MIB}}
    own = {"work": {"flop": 20e9, "gathers": [[1e9, 256 * MIB], [1e9, 256 * MIB]]}}
    kinds = {"mggcn": "fp32", "mggcn bf16": "bf16"}
    return {
        "part": "peers",
        "malloc": malloc,
        "left_out": {"mggcn prune": "no such setting"},
        "prepared": {name: ready | (own | {"precision": kinds[name]} if name in kinds else {}) for name in seconds},
        "epochs": {name: [run(s), run(s)] for name, s in seconds.items()},
        "losses": {name: [2.0] for name in seconds},
        "seconds": {name: spread([s, s]) for name, s in seconds.items()},
        "peak_bytes": {"mggcn": 300 * MIB, "DGL": 600 * MIB, "PyG fused": 500 * MIB, "mggcn bf16": 250 * MIB},
        "loss_error": dict.fromkeys(seconds, 1e-8),
    }


def record_of(comparisons: list[dict[str, Any]]) -> dict[str, Any]:
    case = {"case": "arxiv-like 2x512", "vertices": 10, "nonzeros": 20, "comparisons": comparisons}
    case["lost"] = ["switches, malloc tuned: the worker has died with code -9"]
    case["pilots"] = {"fused": 4.0, "scatter": "its messages need more than the free memory"}
    settings = {"scale": 1.0, "rounds": 2, "warm_up": 1, "threads": 2}
    return {"settings": settings, "ceilings": DEVICES, "measured": [case], "left_out": {"mkl": "absent"}}


def test_epochs_as_text() -> None:
    """Fails if a ratio is upside down, a figure lands in another column, or a goal is judged the wrong way round."""
    text = peers_epoch_report.describe(record_of([compared()]))
    assert (
        "| tuned | DGL | 1000.0 | 1000.0 .. 1000.0 | 0% | 1.50 | 2.00 |  |  | 600 | 100 | 500 | 450 | 0.50 | 0.40 |"
        in text
    )
    assert "| tuned | mggcn | 500.0 | 500.0 .. 500.0 | 0% | 1.50 | 1.00 | 0.60 | 0.24 | 300 | 100 | 200 | 450 |" in text
    assert "| tuned | mggcn bf16 | 250.0 | 250.0 .. 250.0 | 0% | 1.50 | 0.50 |  |  |" in text, "no bound of bf16"
    assert "times faster than DGL: 2.00 (met, goal at least 1.5)" in text
    assert "times faster than PyG fused: 8.00 (met, goal at least 2.5)" in text
    assert "bf16 times faster than DGL's float32: 4.00 (met, goal at least 2.5)" in text
    assert "peak memory over DGL's: 0.50 (met, goal at most 0.6)" in text
    assert "share of the bound: 0.60" in text
    assert "Left out: mggcn prune: no such setting." in text
    assert "Lost: switches, malloc tuned: the worker has died with code -9." in text
    assert "| scatter | its messages need more than the free memory |" in text


def test_what_is_drawn_can_be_drawn(tmp_path: Path) -> None:
    """Fails if a plot is not of the form that mggcn report draws, or shows other ratios than the tables."""
    switched = compared() | {"part": "switches"}
    times = {"mggcn": 0.5, "all switches on": 0.2, "without bf16": 0.4}
    switched["seconds"] = {name: spread([s, s]) for name, s in times.items()}
    plots = peers_epoch_report.plots_of(record_of([compared(), compared("default"), switched]))
    assert [plot["series"] for plot in plots] == [
        {"DGL": [2.0], "PyG's fastest way": [8.0], "mggcn bf16": [0.5]},
        {"DGL": [2.0], "PyG's fastest way": [500 / 300], "mggcn bf16": [250 / 300]},
        {"mggcn": [2.5], "without bf16": [2.0]},
    ]
    sizes = [
        {"by": by, "factor": factor, "nonzeros": 10 * factor, "seconds": {"mggcn": spread([float(factor)])}}
        for by, factor in (("edges", 1), ("edges", 2), ("vertices", 4))
    ]
    plots += (drawn := scaling.plots_of(sizes))
    assert [plot["series"]["mggcn"] for plot in drawn] == [[[10, 1.0], [20, 2.0]], [[10, 1.0], [40, 4.0]]]
    plots += peers_spmm_report.plots_of([product("cnr_2000", 64, {"mggcn": 0.2, "torch CSR": 0.5, "SciPy": 1.0})])
    assert plots[-1]["series"] == {"torch CSR": [2.5]}
    seconds = {blocks.block_name(count): [count / 1000] for count in blocks.COUNTS}
    plots += blocks.plots_of([{"graph": "some", "order": "none", "width": 128, "seconds": seconds}])
    assert plots[-1]["series"]["some, order none"][1] == [2, 2.0]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"plots": plots}))
    assert len(read_plots(path)) == len(plots) == 7


def test_other_losses_are_named() -> None:
    """Fails if a contender that computes something else, or nothing, passes; bf16 may differ by its rounding."""
    found = compared()
    found["loss_error"] = {"mggcn": 0.0, "DGL": 1e-3, "PyG fused": float("nan"), "mggcn bf16": 1e-3}
    faults = peers_epoch.wrong(record_of([found]))
    assert [fault.split(":")[0] for fault in faults] == ["arxiv-like 2x512, DGL", "arxiv-like 2x512, PyG fused"]
    losses = {"a": [2.0, 2.0], "b": [2.0, 2.2], "c": [2.0, float("nan")]}
    epochs = {name: [{"loss": loss} for loss in found] for name, found in losses.items()}
    expected = {"a": 0.0, "b": 0.1, "c": float("nan")}
    assert peers_epoch.loss_errors(epochs) == pytest.approx(expected, nan_ok=True)


def product(graph: str, width: int, seconds: dict[str, float]) -> dict[str, Any]:
    values = {kind: [s] * 3 for kind, s in seconds.items()}
    facts = {kind: {"way": "rows", "order_seconds": None} for kind in seconds}
    found = {"graph": graph, "width": width, "vertices": 1000, "nonzeros": 10_000, "seconds": values}
    base = dict.fromkeys(seconds, seconds["mggcn"])
    return found | {"cpu_seconds": values, "facts": facts, "apart": dict.fromkeys(seconds, 0.0), "base_s": base}


def test_products_as_text() -> None:
    """Fails if the order counts where no goal allows it, DGL's bare kernel is the peer, or the least is not found."""
    fast = {"mggcn": 0.2, "mggcn, order by locality": 0.1, "DGL copy_u + scaling": 0.3, "DGL copy_u alone": 0.01}
    slow = {"mggcn": 0.2, "DGL copy_u + scaling": 0.1, "torch CSR": 0.5, "mggcn bf16": 0.1}
    results = [product("products-like", 128, fast), product("arxiv-like", 128, fast), product("cnr_2000", 64, slow)]
    text = peers_spmm_report.verdicts(results)
    assert "products-like, width 128: over DGL copy_u + scaling: 3.00 (met, goal 1.8)" in text
    assert "arxiv-like, width 128: over DGL copy_u + scaling: 1.50 (met, goal 1.2)" in text
    assert "the least over DGL copy_u + scaling, cnr_2000, width 64: 0.50 (MISSED, goal 0.85)" in text
    assert "cnr_2000, width 64: bf16 over float32: 2.00 (met, goal 1.5)" in text
    assert "torch CSR" not in text, "no goal on this row"
    settings = {"scale": 1.0, "threads": 2, "rounds": 3}
    record = {"measured": results, "settings": settings, "ceilings": DEVICES, "left_out": ["MKL: absent"]}
    described = peers_spmm_report.describe(record)
    assert "| cnr_2000 | 64 | torch CSR | 500.0 | 500.0 .. 500.0 | 0% | 250.0 |" in described
    assert "| 2.50 | 0e+00 |" in described
    assert "Left out: MKL: absent." in described
    small = peers_spmm_report.describe(record | {"settings": settings | {"scale": 0.1}})
    assert "Goals are for graphs at scale 1." in small
    assert "MISSED" not in small


def test_wrong_products_are_named() -> None:
    """Fails if numbers that differ pass, or bf16 is held to float32's tolerance."""
    numbers = {
        "mggcn": [1.0, 10.0],
        "mggcn bf16": [1.05, 10.0],
        "DGL u_mul_e": [1.05, 10.0],
        "SciPy": [1.0, float("nan")],
    }
    found = peers_spmm.apart(numbers)
    assert found["mggcn bf16"] == pytest.approx(0.005)
    faults = peers_spmm.wrong([{"graph": "some", "width": 8, "apart": found}])
    assert [fault.split(", ")[2].split(":")[0] for fault in faults] == ["DGL u_mul_e", "SciPy"]


def test_processes_are_shared_out_to_what_fits() -> None:
    """Fails if a kind is lost or a group too large; each group has mggcn, whose own time its ratios need."""
    kinds = ["mggcn", "a", "b", "c", "d"]
    assert peers_spmm.groups(kinds, 5) == [kinds]
    assert peers_spmm.groups(kinds, 3) == [["mggcn", "a", "b"], ["mggcn", "c", "d"]]
    assert peers_spmm.groups(kinds, 1) == []
    assert peers_spmm.groups(kinds[:1], 1) == [["mggcn"]]
    found: dict[str, Any] = {}
    for group in ({"mggcn": 1.0, "a": 2.0}, {"mggcn": 3.0, "b": 4.0}):
        peers_spmm.merge(found, {"base_s": dict.fromkeys(group, group["mggcn"]), "seconds": group})
    assert found == {
        "base_s": {"mggcn": 1.0, "a": 1.0, "b": 3.0},
        "seconds": {"mggcn": 1.0, "a": 2.0, "b": 4.0},
    }
    assert list(found["seconds"]) == ["mggcn", "a", "b"]


def test_switches_are_off_alone() -> None:
    """Fails if a line turns off something else than it says, or names what this version lacks."""
    here = {"order": True, "ways": True, "prune": True, "bf16": True}
    found = peers_switches.without(here)
    on = {"order": "locality", "prune": "auto", "precision": "bf16"}
    assert found["all switches on"] == ({"run": on}, False)
    assert found["without the order by locality"] == ({"run": on | {"order": "none"}}, False)
    assert found["without panels, blocks and rows ahead"] == ({"run": on}, True)
    assert found["without bf16"] == ({"run": {"order": "locality", "prune": "auto"}}, False)
    assert found["all switches off"] == ({"run": {"order": "none", "prune": "off"}}, True)
    assert peers_switches.base_settings(here) == {"run": {"order": "locality", "prune": "off"}}
    assert peers_switches.base_settings(here | {"prune": False}) == {"run": {"order": "locality"}}
    assert len(peers_switches.without(here | {"bf16": False})) == 5


def test_setup_in_epochs() -> None:
    """Fails if reading and planning that a run without the order needs too count as the order's."""
    parts = {
        "made": {"plan": 1.5, "rank": 0.5},
        "none": {"plan": 0.5, "rank": 0.5},
        "locality": {"plan": 0.6, "rank": 0.5},
    }
    said = {"seconds": 1.0, "epochs": 4.0, "products": 3, "beaten": 2, "unfinished": 1}
    tuning = {"said": said, "plain": [0.5, 0.5], "tuned": [1.0, 0.25], "command_s": 9.0}
    found = parts | {"case": "some", "epochs": {"none": [0.5], "locality": [0.25]}, "tuning": tuning}
    assert setup_cost.summary(found) == pytest.approx(
        {"extra": 1.0, "in_epochs": 8.0, "whole_in_epochs": 8.0, "pays_back": 8.0}
    )
    assert setup_cost.row_of(found)[4:10] == ["1.00", "1.00", "2 + 1", "1.0", "1.2", "9.0"]
    assert setup_cost.row_of(found)[-4:] == ["8.0", "8.0", "8.0", "met"]
    assert len(setup_cost.row_of(found)) == len(setup_cost.HEAD)
    slower = found | {"epochs": {"none": [0.25], "locality": [0.25]}}
    assert setup_cost.row_of(slower)[-3:] == ["never", "8.0", "MISSED"]


def test_scaling_as_text() -> None:
    """Fails if a transport is named for one rank, or what ran alone passes for a comparison."""
    ways = scaling.configurations("1x2,2x1", "threads,gloo")
    assert list(ways) == ["1 x 2", "2 x 1, threads", "2 x 1, gloo"]
    assert ways["1 x 2"] == {"ranks": 1, "threads": 2, "transport": "single", "order": "locality"}
    runs = {name: [{"seconds_per_epoch": s, "measured_peak_bytes": MIB}] for name, s in (("a", 0.4), ("b", 0.2))}
    assert "| b | 200 | 200 .. 200 | 2.00 | 1 |" in scaling.describe_ranks(runs)
    size = {"by": "edges", "factor": 2, "vertices": 10, "nonzeros": 1_000_000, "alone": True}
    size |= {"seconds": {"mggcn": spread([0.1])}, "peak_bytes": {"mggcn": MIB}, "left_out": {"DGL": "does not fit"}}
    text = scaling.describe_sizes([size])
    assert "| edges | 2 | 10 | 1,000,000 | mggcn (alone) | 100 | 100 .. 100 | 100.0 | 1.00 | 1 |" in text
    assert "| edges | 2 | 10 |  | DGL | does not fit |" in text


def test_blocks_as_text() -> None:
    """Fails if a way is compared with another one than the single block."""
    seconds = {"chosen": [0.2], "1 block": [0.4], "4 blocks": [0.1]}
    found = {"graph": "some", "order": "none", "width": 128, "seconds": seconds}
    assert [row[-2:] for row in blocks.rows_of(found)] == [["2.00", "2.00"], ["1.00", "4.00"], ["4.00", "1.00"]]


@pytest.mark.parametrize("quick", [False, True])
def test_every_part_takes_its_arguments(quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if run_all.py calls a script that is not there, or with an argument that it does not know."""
    flags = ["run_all.py", "--out", str(tmp_path), "--data", str(tmp_path), *(["--quick"] if quick else [])]
    monkeypatch.setattr("sys.argv", flags)
    found = run_all.commands(run_all.parse(), tmp_path / "ceilings.json")
    assert set(found) == set(run_all.QUICK if quick else run_all.FULL)
    for _, script, *arguments in found.values():
        assert Path(script).parent == BENCH
        monkeypatch.setattr("sys.argv", [script, *arguments])
        parsed = __import__(Path(script).stem).parse()
        assert parsed.out == tmp_path
    monkeypatch.setattr("sys.argv", [*flags, "--parts", "epochs"])
    with pytest.raises(SystemExit, match="unknown parts epochs"):
        run_all.commands(run_all.parse(), tmp_path)


def test_a_report_of_epochs_is_named_by_its_parts() -> None:
    """Fails if some comparisons overwrite the report of all, or a part that does not exist is measured as one that does."""
    assert peers_epoch.report_name(["peers"]) == peers_epoch.report_name(["peers", "switches"]) == "peers-epoch"
    assert peers_epoch.report_name(["precomputed", "switches"]) == "peers-epoch-precomputed-switches"
    with pytest.raises(SystemExit, match="unknown parts switch; there are peers, precomputed, switches"):
        peers_epoch.report_name(["peers", "switch"])


def test_contenders_run_side_by_side_alone_or_not_at_all() -> None:
    """Fails if processes that do not fit are started together, or one that fits alone is left out."""
    assert scaling.what_fits({"mggcn": 2 * GIB, "DGL": 4 * GIB, "PyG": GIB}, 10 * GIB) == ({}, False)
    assert scaling.what_fits({"mggcn": 2 * GIB, "DGL": 9 * GIB}, 10 * GIB) == ({}, True)
    left_out, alone = scaling.what_fits({"mggcn": 2 * GIB, "DGL": 4 * GIB, "PyG": 20 * GIB}, 10 * GIB)
    assert (left_out, alone) == ({"PyG": "not run: it needs about 20 GiB, 10 are free"}, False)
