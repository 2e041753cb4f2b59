"""What the comparisons make of their figures: ratios, bounds, goals and plots."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from bench import contest, readme_figure
from bench.cpu import accuracy, ceilings, epochs, predictions, strategies, variants, ways
from bench.peers import epochs as peers_epochs
from bench.peers import products, sampled
from bench.plots import read_plots
from bench.report import GIB, MIB, marked, spread, verdict
from mggcn.backend.cpu.variants import SpmmChoice, ahead_of
from mggcn.config import ModelConfig
from tests.machines import tight

FIGURES: dict[str, Any] = {
    "copy": [[4 * MIB, 20e9], [256 * MIB, 10e9]],
    "gather": [[4 * MIB, 100e9], [256 * MIB, 10e9]],
    "gemm": {"torch": 100e9, "NumPy": 200e9, "mggcn tune fp32": 90e9, "mggcn tune bf16": 900e9},
}


def test_bounds() -> None:
    """Fails if a footprint gets another's rate, the slower library or bf16 counts, or the cache's rate is memory's."""
    work = {"flop": 20e9, "gathers": [[1e9, 256 * MIB], [1e9, MIB]]}
    found = ceilings.bounds(FIGURES, work)
    assert found == pytest.approx({"dense": 0.1, "sparse": 0.11, "total": 0.21, "cached": 0.12})
    assert ceilings.rate_at(FIGURES["gather"], 32 * MIB) == pytest.approx(55e9), "half way in the logarithm"


def compared(**seconds: float) -> dict[str, Any]:
    seconds = seconds or {"mggcn": 0.5, "DGL": 1.0, "PyG fused": 4.0, "mggcn bf16": 0.25}
    own = {"work": {"flop": 20e9, "gathers": [[1e9, 256 * MIB], [1e9, 256 * MIB]]}, "planned_bytes": 320 * MIB}
    own |= {"plan_seconds": 1.0, "rank_seconds": 2.0}
    kinds = {name: "bf16" if "bf16" in name else "fp32" for name in seconds if not name.startswith(("DGL", "PyG"))}
    peaks = {"mggcn": 300 * MIB, "DGL": 600 * MIB, "PyG fused": 500 * MIB, "mggcn bf16": 250 * MIB}
    runs = {name: [{"seconds": s, "cpu_seconds": 1.5 * s} for s in (9 * s, 9 * s, s, s)] for name, s in seconds.items()}
    prepared = {n: {"imported": 100 * MIB} | (own | {"precision": kinds[n]} if n in kinds else {}) for n in seconds}
    return {
        **{
            "case": "arxiv-like 2x512",
            "part": "peers",
            "malloc": "tuned",
            "alone": False,
            "nonzeros": 20,
            "pilots": {},
        },
        "left_out": {"DGL weighted": "died: signal 11"},
        "prepared": prepared,
        "epochs": runs,
        "seconds": {name: spread([s, s]) for name, s in seconds.items()},
        "peak_bytes": {name: peaks.get(name, MIB) for name in seconds},
        "loss_error": dict.fromkeys(seconds, 1e-8),
    }


def test_rows_of_epochs() -> None:
    """Fails if a ratio is upside down, a figure lands in another column, or warm-up counts."""
    rows = {row[0]: dict(zip(contest.HEAD, row, strict=True)) for row in contest.rows_of(compared(), 2, FIGURES)}
    own, dgl = rows["mggcn"], rows["DGL"]
    assert (dgl["ms/epoch (median)"], dgl["CPU ms, least"], dgl["time / first"]) == ("1000.0", "750.0", "2.00")
    assert (dgl["peak MiB"], dgl["without imports"], dgl["first's peak / this"]) == ("600", "500", "0.50")
    assert (own["of the bound"], own["in cache"], own["planned MiB"], own["plan s"]) == ("0.60", "0.24", "320", "1.00")
    assert rows["mggcn bf16"]["of the bound"] == dgl["of the bound"] == dgl["planned MiB"] == "", "no bound of others"
    assert "DGL weighted: died: signal 11" in contest.described(compared(), 2)


def test_goals_of_epochs() -> None:
    """Fails if a goal is judged the wrong way round, against another contender, or under another setting of glibc."""
    case = peers_epochs.CASES["arxiv-like 2x512"]
    text = peers_epochs.verdicts(case, compared(), FIGURES)
    found = [(line.rsplit(": ", 1)[1].split(" (")[0], "MISSED" in line) for line in text.splitlines()]
    assert found == [("0.50", False), ("2.00", False), ("8.00", False), ("4.00", False), ("0.60", False)]
    slow = peers_epochs.verdicts(case, compared(mggcn=2.0, DGL=1.0), FIGURES)
    assert slow.count("MISSED") == 2
    assert peers_epochs.verdicts(case, compared() | {"malloc": "default"}, FIGURES).count("\n") == 1
    assert "MISSED" in verdict("memory", 0.7, 0.6, at_most=True)
    assert "MISSED" not in verdict("speed", 0.7, 0.6)


def test_what_is_drawn_can_be_drawn(tmp_path: Path) -> None:
    """Fails if a plot is not of the form that bench.plots draws, or shows other ratios than the tables."""
    switched = compared(**{"mggcn": 0.5, "all switches on": 0.2, "without bf16": 0.4}) | {"part": "switches"}
    sizes = [compared(mggcn=float(n)) | {"part": "sizes", "nonzeros": 10 * n} for n in (1, 4)]
    plots = peers_epochs.plots_of([compared(), compared() | {"malloc": "default"}, switched, *sizes])
    assert [plot["series"] for plot in plots] == [
        {"DGL": [2.0], "PyG's fastest way": [8.0], "mggcn bf16": [0.5]},
        {"DGL": [2.0], "PyG's fastest way": [500 / 300], "mggcn bf16": [250 / 300]},
        {"mggcn": [2.5], "without bf16": [2.0]},
        {"mggcn": [[10, 1.0], [40, 4.0]]},
    ]
    plots += products.plots_of([product("cnr_2000", 64, {"mggcn": 0.2, "torch CSR": 0.5, "SciPy": 1.0})])
    assert plots[-1]["series"] == {"torch CSR": [2.5]}
    seconds = {f"{count} blocks": [count / 1000] for count in ways.COUNTS}
    plots += ways.plots_of([{"graph": "some", "order": "none", "width": 128, "type": "fp32", "seconds": seconds}])
    assert plots[-1]["series"]["some, order none"][1] == [2, 2.0]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"plots": plots}))
    assert len(read_plots(path)) == len(plots) == 6


def test_other_losses_are_named() -> None:
    """Fails if a contender that computes something else, or nothing, passes; bf16 may differ by its rounding."""
    found = compared()
    found["loss_error"] = {"mggcn": 0.0, "DGL": 1e-3, "PyG fused": float("nan"), "mggcn bf16": 1e-3}
    faults = contest.wrong([found])
    assert [fault.split(":")[0] for fault in faults] == ["arxiv-like 2x512, DGL", "arxiv-like 2x512, PyG fused"]
    losses = {"a": [2.0, 2.0], "b": [2.0, 2.2], "c": [2.0, float("nan")]}
    runs = {name: [{"loss": loss} for loss in of] for name, of in losses.items()}
    assert contest.loss_errors(runs) == pytest.approx({"a": 0.0, "b": 0.1, "c": float("nan")}, nan_ok=True)


def product(graph: str, width: int, seconds: dict[str, float]) -> dict[str, Any]:
    facts = {"way": "rows", "order_seconds": None}
    row = {
        kind: {"seconds": [s] * 3, "cpu_seconds": [s] * 3, "apart": 0.0, "facts": facts} for kind, s in seconds.items()
    }
    for one in row.values():
        one["first_s"] = seconds["mggcn"]
    return {"graph": graph, "width": width, "vertices": 1000, "nonzeros": 10_000, "kinds": row, "left_out": {}}


def test_goals_of_products() -> None:
    """Fails if the order counts where no goal allows it, DGL's bare kernel is the peer, or the least is not found.

    Of each graph the goal against DGL comes first, then those against the fastest peer; then both leasts.
    """
    fast = {"mggcn": 0.2, "mggcn, order by locality": 0.1, "DGL copy_u + scaling": 0.3, "DGL copy_u alone": 0.01}
    slow = {"mggcn": 0.2, "DGL copy_u + scaling": 0.1, "torch CSR": 0.5, "mggcn bf16": 0.1}
    results = [product("products-like", 128, fast), product("arxiv-like", 128, fast), product("cnr_2000", 64, slow)]
    lines = products.verdicts(results).splitlines()
    assert [(line.rsplit(": ", 1)[1].split(" (")[0], "MISSED" in line) for line in lines] == [
        ("3.00", False),
        ("3.00", False),
        ("1.50", False),
        ("1.50", False),
        ("3.00", False),
        ("2.00", False),
        ("0.50", True),
        ("0.50", True),
    ]
    row = dict(zip(products.HEAD, products.rows_of(results[2], FIGURES, 2)[2], strict=True))
    assert (row["product"], row["ms (median)"], row["CPU ms / threads"]) == ("torch CSR", "500.0", "250.0")
    assert row["time / mggcn"] == "2.50"


def test_rows_that_others_disturbed_are_marked() -> None:
    """Fails if a row that was measured beside other programs looks like any other, or a quiet one is marked."""
    assert marked("mggcn", [0.02, 0.04, 0.9]) == "mggcn"
    assert marked("mggcn", [0.02, 0.35, 0.4]) == "mggcn (disturbed: others took 35%)"
    assert marked("mggcn", []) == "mggcn"
    found = product("cnr_2000", 64, {"mggcn": 0.2})
    found["kinds"]["mggcn"]["beside"] = [0.5]
    assert products.rows_of(found, FIGURES, 2)[0][2] == "mggcn (disturbed: others took 50%)"
    case = compared()
    for run in case["epochs"]["DGL"]:
        run["beside"] = 0.25
    assert [row[0] for row in contest.rows_of(case, 2)][:2] == ["mggcn", "DGL (disturbed: others took 25%)"]


def test_wrong_products_are_named() -> None:
    """Fails if numbers that differ pass, or bf16 is held to float32's tolerance."""
    numbers = {"mggcn": [1.0, 10.0], "mggcn bf16": [1.05, 10.0], "DGL u_mul_e": [1.05, 10.0]}
    found = products.apart(numbers | {"SciPy": [1.0, float("nan")]})
    assert found["mggcn bf16"] == pytest.approx(0.005)
    kinds = {kind: {"apart": off} for kind, off in found.items()}
    faults = products.wrong([{"graph": "some", "width": 8, "kinds": kinds}])
    assert [fault.split(", ")[2].split(":")[0] for fault in faults] == ["DGL u_mul_e", "SciPy"]


def test_contenders_run_side_by_side_alone_or_not_at_all() -> None:
    """Fails if processes that do not fit are started together, or one that fits alone is left out."""
    what_fits = peers_epochs.what_fits
    assert what_fits({"mggcn": 2 * GIB, "DGL": 4 * GIB, "PyG": GIB}, 10 * GIB) == ({}, False)
    assert what_fits({"mggcn": 2 * GIB, "DGL": 9 * GIB}, 10 * GIB) == ({}, True)
    left_out, alone = what_fits({"mggcn": 2 * GIB, "DGL": 4 * GIB, "PyG": 20 * GIB}, 10 * GIB)
    assert (left_out, alone) == ({"PyG": "not run: it needs about 20 GiB, 10 are free"}, False)


def test_set_up_in_epochs() -> None:
    """Fails if reading and planning that a run without the order needs too count as the order's."""
    parts = {"no order": (0.5, 0.5), "order made": (1.5, 0.5), "order kept": (0.6, 0.5)}
    prepared = {name: {"plan_seconds": plan, "rank_seconds": rank} for name, (plan, rank) in parts.items()}
    seconds = {"no order": {"median": 0.5}, "order made": {"median": 9.0}, "order kept": {"median": 0.25}}
    found = {"case": "some", "prepared": prepared, "seconds": seconds}
    assert epochs.set_up_cost(found) == pytest.approx({"order_s": 1.0, "in_epochs": 4.0, "pays_back": 4.0})
    assert epochs.set_up_row(found)[-1] == "met"
    slower = found | {"seconds": seconds | {"no order": {"median": 0.25}}}
    assert epochs.set_up_row(slower)[-2:] == ["inf", "MISSED"]


def test_panels_fit_the_cache() -> None:
    """Fails if a panel is swept that products refuse, a possible one is left out, or none fetches ahead."""
    found = ways.ways(128, 1000, tight(128_000))
    assert [name for name in found if "panels" in name] == ["panels of 64 B", "panels of 128 B"]
    assert found["panels of 64 B"] == SpmmChoice("panels", 16, 1, ahead_of(64))
    assert [name for name in ways.ways(32, 1000, tight(10**6)) if "panels" in name] == ["panels of 64 B"]
    assert [(found[f"{n} blocks"].blocks, found[f"{n} blocks"].ahead) for n in ways.COUNTS] == [
        (n, 0) for n in ways.COUNTS
    ]


def test_the_choice_is_held_to_the_best_way() -> None:
    """Fails if a bad choice is lost in a mean, or the best way is taken to be the chosen one."""
    found = [{"seconds": {"chosen": [chosen], "1 blocks": [1.0], "2 blocks": [2.0]}} for chosen in (1.0, 1.44)]
    assert [line.split(": ")[1][:4] for line in ways.goals(found).splitlines()] == ["1.20", "1.44"]
    assert ways.goals(found).count("MISSED") == 2
    assert ways.goals(found[:1]).count("(met") == 2


def test_seconds_until_a_score_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender reaches what lies a point below the best mean, or never; the picture is drawn all the same, of a graph in
    two reports as in the last.
    """
    slow = [{"curve": [[1.0, 0.5], [2.0, 0.895], [3.0, 0.9]]}, {"curve": [[1.0, 0.5], [2.0, 0.5], [3.0, 0.9]]}]
    never = [{"curve": [[1.0, 0.7], [2.0, 0.88]]}]
    found = {"graph": "some", "runs": {"whole graph": slow, "batches": never}}
    wanted, seconds = accuracy.until_reached(found)
    assert wanted == pytest.approx(0.89)
    assert seconds == {"whole graph": [2.0, 3.0], "batches": [math.inf]}
    assert [row[-2:] for row in accuracy.reached(found)] == [["2.50", 0], ["never", 1]]
    (tmp_path / "report.json").write_text(json.dumps({"sizes": [found]}))
    assert readme_figure.draw([tmp_path / "report.json"], tmp_path / "picture.png").stat().st_size
    (tmp_path / "again.json").write_text(
        json.dumps({"batches": [found | {"runs": {"whole graph": never, "batches": never}}]})
    )
    drawn: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(readme_figure, "draw_seconds", lambda shown, picture: drawn.append(shown) or picture)
    readme_figure.draw([tmp_path / "report.json", tmp_path / "again.json"], tmp_path / "picture.png")
    assert [one["runs"]["whole graph"] for one in drawn[0]] == [never]


def test_accuracy_is_compared_seed_by_seed() -> None:
    """Fails if a seed is compared with another one, or a difference beyond the goal passes."""

    def found(mixed: float) -> dict[str, Any]:
        tests = {"fp32": (0.8, 0.9), "mixed": (0.8 + mixed, 0.9 + mixed), "bf16": (0.7, 0.95)}
        runs = {p: [{"best": t, "final": t, "seconds": 0.002} for t in of] for p, of in tests.items()}
        return {"graph": "some", "runs": runs, "sent": {}}

    rows = {row[1]: row for row in accuracy.rows_of(found(0.002))}
    assert rows["mixed"][3:7] == ["85.20 +- 5.00", "85.20 +- 5.00", "+0.20 +- 0.00", "+0.20 .. +0.20"]
    assert rows["bf16"][5:] == ["-2.50 +- 7.50", "-10.00 .. +5.00", "2.00"]
    assert (accuracy.missed([found(0.002)]), accuracy.missed([found(-0.004)])) == ([], ["some"])


def test_pairs_in_the_wrong_order_are_counted() -> None:
    """Fails if a pair within 20 % is judged, or one beyond it is not."""
    measured = {"a": 1.0, "b": 1.1, "c": 2.0}
    assert strategies.agreement(measured, {"a": 3.0, "b": 2.0, "c": 4.0}) == (2, [])
    assert strategies.agreement(measured, {"a": 3.0, "b": 5.0, "c": 4.0}) == (2, ["c is slower than b: 1.82 times"])
    runs = {"halo random": {"bytes_sent": [100.0], "planned_bytes": [100]}}
    assert strategies.bytes_agree({"runs": runs})
    assert not strategies.bytes_agree({"runs": {"halo random": {"bytes_sent": [104.0], "planned_bytes": [100]}}})
    found = strategies.configurations(["halo", "delayed"], ["random", "none"])
    assert list(found) == ["halo random", "halo none", "delayed none", "delayed 0", "delayed 5"]


def test_variants_beside_the_best() -> None:
    """Fails if the first epochs count, or a ratio is upside down."""
    runs = {variants.FIGURES: [[9, 9, 9, 2.0, 2.2, 2.1]], variants.BEST: [[9, 9, 9, 2.0]]}
    text = variants.describe([{"case": "some", "runs": runs}], variants.options([]))
    assert "the worst network: 1.05 (met" in text
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| some")
    ]
    assert [row[4] for row in cells] == ["1.05", "1.00"]


def test_predictions_are_held_to_their_bounds() -> None:
    """Fails if a ratio is upside down, a bound is open to one side, or a run that failed counts."""

    def found(number: int, seconds: float, nbytes: int) -> dict[str, Any]:
        measured = {"seconds": [seconds, 9.0, seconds], "bytes": nbytes}
        return {"number": number, "graph": "g", "settings": "", "measured": measured} | {
            "predicted": {"seconds": 1.0, "bytes": 1000}
        }

    good, slow, fast, large, small = (
        found(number, *of) for number, of in enumerate([(1.2, 1040), (1.3, 1000), (0.8, 1000), (1.0, 1060), (1.0, 940)])
    )
    failed = {"number": 5, "graph": "g", "settings": "", "failed": "gone"}
    marks = [predictions.within(one) for one in (good, slow, fast, large, small, failed)]
    assert marks == [(True, True), (False, True), (False, True), (True, False), (True, False), (False, False)]
    text = predictions.describe([good, slow, fast, large, small, failed], predictions.options([]))
    assert "in seconds: 3.00 (MISSED, goal at least 5.4)" in text
    assert "above the plan: 2" in text
    assert "failed: gone" in text
    assert predictions.numbers_of("3-5") == [3, 4, 5]
    for wrong in ("0-3", "5-3", "x", "1-41"):
        with pytest.raises(SystemExit, match="--rows expects numbers"):
            predictions.numbers_of(wrong)


def test_forty_runs_have_settings() -> None:
    """Fails if a setting is not known, a model or kind of run is missing, or a run is there twice."""
    configs = [predictions.config_of(text, 2) for _, text in predictions.ROWS]
    assert len(set(predictions.ROWS)) == 40
    assert {c.model.kind for c in configs} == set(get_args(get_type_hints(ModelConfig)["kind"]))
    assert {(bool(c.sample.batch), c.run.ranks) for c in configs} == {(b, p) for b in (False, True) for p in (1, 2)}
    assert {c.run.precision for c in configs} >= {"fp32", "bf16", "mixed"}


def test_losses_agree_by_their_spread() -> None:
    """Fails if an error is that of a single run, a peer further off passes, or points are compared as shares."""
    ours, near, far = ([mean + step for step in (-0.01, 0.0, 0.01)] for mean in (0.25, 0.26, 0.27))
    # Pooled deviation 0.01, error of a difference 0.01 (2 / 3) ** 0.5.
    assert "1.2 standard errors (agree: at most 2)" in sampled.agreement("loss", ours, near)
    assert "2.4 standard errors (APART" in sampled.agreement("loss", ours, far)
    assert "(agree: at most 0.3 points)" in sampled.agreement("score", ours, far, points=0.3)

    runs = {name: [[1.0, loss, 0.5 + loss] for loss in of] for name, of in (("mggcn", ours), ("DGL", far))}
    text = sampled.agreements({"results": runs})
    assert text.count("APART") == 2, "0.02 of all are 2 points"
    assert sampled.agreements({"results": {name: of[:1] for name, of in runs.items()}}) == "", "one run has no spread"
