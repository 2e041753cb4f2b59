"""Every part of `python -m bench.gpu` from its graph to its Markdown, on emulated kernels at toy sizes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu import ceilings as gpu_ceilings
from bench.gpu import part as gpu_part
from bench.gpu import report as gpu_report
from bench.gpu import spmm as gpu_spmm
from bench.gpu.graphs import LAYERS, SYNTHETIC, find_store, workload
from bench.gpu.lab import AgainError, Lab, Settings, attempt
from bench.gpu.predict import FUSED
from bench.gpu.pyg import Peer
from bench.gpu.tasks import AGAIN, ORDER, digest, finished, origin, read_rows
from bench.graphs import generated
from mggcn.backend.cuda.sizes import LONG_ROW
from mggcn.graph.store import open_store
from mggcn.model.runtime import require
from tests.emulator.device import EmulatedDevice

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # PyG, on every CSR tensor
AT_ONCE = ("arxiv-hubs gat 3x256", "one-hub sage-max 3x256")
"""Of other layers, the cases that CI runs."""
TASKS = {task.name: task for task in ORDER}
Rows = list[dict[str, Any]]


def measured(name: str, toy: Settings, folder: Path) -> Rows:
    """Run a task in this process and return its rows."""
    task = TASKS[name]
    job = {"part": task.part, "case": task.case, "file": str(task.file(folder)), "digest": digest()}
    job |= {"graph": origin(task, toy)}
    assert gpu_part.run(json.loads(json.dumps(job | dataclasses.asdict(toy)))) == 0
    assert finished(task, folder, toy, keep=False)
    rows = read_rows(task.file(folder))
    assert [row for row in rows if "error" in row] == []
    return rows


def of_kind(rows: Rows, kind: str) -> Rows:
    return [row for row in rows if row["kind"] == kind]


def test_ceilings(toy: Settings, tmp_path: Path) -> None:
    """Fails if a ceiling is missing or its rate does not follow from its bytes and seconds."""
    rows = measured("ceilings", toy, tmp_path)
    assert {row["kind"] for row in rows} == {"start", "begun", "copy", "read", "gather", "gemm", "launch", "end"}
    for row in of_kind(rows, "gather") + of_kind(rows, "copy") + of_kind(rows, "gemm"):
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median"] / 1e9)
    assert len({row["row_bytes"] for row in of_kind(rows, "gather")}) == 6
    assert rows[-1]["taken_by_others"] >= 0


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("precision", gpu_ceilings.PRECISIONS)
@pytest.mark.parametrize("name", FUSED)
def test_fused_products_are_timed(name: str, precision: str, toy: Settings, tmp_path: Path) -> None:
    """Fails if a product is not called as its kernel asks, or its rate does not follow from its FLOP and seconds."""
    interpreted = pytest.importorskip("tests.backend.cuda.interpreted", reason="Triton has no wheel for this machine")
    with open(tmp_path / "rows", "w") as log:
        lab = Lab(toy, log)
        lab.device = EmulatedDevice(block_kernels=interpreted.InterpretedKernels())
        found = gpu_ceilings.fused_product(lab, 3, name, precision)
    assert found["flop"] == 2 * 3 * 256**2
    assert found["tflop_per_s"] == pytest.approx(found["flop"] / found["median"] / 1e12)


@pytest.mark.full
def test_sparse_products(toy: Settings, tmp_path: Path) -> None:
    """Fails if a contender computes something else than float64 does, or is not there."""
    rows = of_kind(measured("spmm arxiv-like", toy, tmp_path), "spmm")
    assert {r["contender"] for r in rows if r["type"] == "bfloat16"} == {"own"}
    peers = {"own weighted", "torch CSR", "PyG EdgeIndex"}
    assert {r["contender"] for r in rows if r["type"] == "float32"} == {"own"} | peers
    others = of_kind(measured("variants arxiv-like", toy, tmp_path), "spmm")
    assert {r["contender"] for r in others} == {"own simple", "own groups", "own shape"}
    assert {row["type"] for row in others} == {"float32", "bfloat16"}


def test_limits_of_long_rows_are_contenders(toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the benchmark cannot tell whether long rows begin too early, or a limit changes nothing or the result."""
    with open(tmp_path / "rows", "w") as log:
        lab = Lab(dataclasses.replace(toy, quick=False), log)
        matrix = gpu_spmm.load(lab, find_store("reddit-like", toy.scale, toy.cache, ""))
        trial = gpu_spmm.Trial(lab, matrix, 16, torch.float32, gpu_spmm.sample_rows(matrix.lengths))
        contenders = {name: make for name, make, _ in gpu_spmm.variants(lab, matrix, 16, torch.float32)}
        limits: list[int] = []
        schedule_of = gpu_spmm.make_schedule

        def recorded(*arrays: Any, shortest: int) -> Any:
            limits.append(shortest)
            return schedule_of(*arrays, shortest=shortest)

        monkeypatch.setattr(gpu_spmm, "make_schedule", recorded)
        for limit in gpu_spmm.LONG_ROWS:
            assert trial.one(contenders[f"own, long rows over {limit}"])["relative_error"] < 1e-4
    assert limits == list(gpu_spmm.LONG_ROWS)
    assert LONG_ROW not in limits


def test_epochs(toy: Settings, tmp_path: Path) -> None:
    """Fails if mggcn and PyG train different networks, or run other numbers of products than planned."""
    rows = of_kind(measured("epoch reddit-like 2x16", toy, tmp_path), "epoch")
    found = {(row["contender"], row["precision"]): row for row in rows}
    own, peer = found["mggcn", "fp32"], found["PyG fused", "fp32"]
    assert own["losses"] == pytest.approx(peer["losses"], rel=1e-5)
    assert {row["mode"] for row in rows} == {"emulated"}
    assert found["mggcn", "bf16"]["losses"] == pytest.approx(peer["losses"], rel=1e-2)
    # Two layers in both directions; ours has none in the first.
    assert (own["products"], peer["products"]) == (2, 4)


@pytest.mark.parametrize(
    "case",
    [
        *AT_ONCE,
        *(pytest.param(case, marks=pytest.mark.slow) for case in LAYERS if case not in AT_ONCE),
    ],
)
def test_epochs_of_other_layers(case: str, toy: Settings, tmp_path: Path) -> None:
    """Fails if mggcn's GAT or maximum and PyG's are different networks."""
    rows, kind = of_kind(measured(f"epoch {case}", toy, tmp_path), "epoch"), LAYERS[case][2]
    found = {(row["contender"], row["precision"]): row for row in rows}
    assert set(found) == {(name, precision) for name in ("mggcn", f"PyG {kind}") for precision in ("fp32", "tf32")}
    assert found["mggcn", "fp32"]["losses"] == pytest.approx(found[f"PyG {kind}", "fp32"]["losses"], rel=1e-4)


def test_one_hub_has_as_many_edges_as_it_says() -> None:
    """Fails if the hub lacks edges, has an edge twice or to itself, or another row is long, too."""
    graph = generated(dataclasses.replace(SYNTHETIC["one-hub"], features=1), "one-hub")
    degrees = np.diff(graph.adj.indptr.array())
    assert degrees.max() == 20_000
    assert np.partition(degrees, -2)[-2] < 100
    indices, rows = graph.adj.indices.array(), np.repeat(np.arange(graph.num_vertices), degrees)
    keys, mirrored = rows * graph.num_vertices + indices, indices.astype(np.int64) * graph.num_vertices + rows
    assert np.all(np.diff(keys) > 0)
    assert np.array_equal(keys, np.sort(mirrored))
    assert not np.any(rows == indices)
    assert workload("one-hub", 0.01).hub == 200


def test_rows_of_edges_that_do_not_fit_are_refused(toy: Settings, tmp_path: Path) -> None:
    """Fails if PyG's layers begin an epoch whose rows of edges the card has no room for: the process would end."""
    graph = open_store(find_store("one-hub", toy.scale, toy.cache, toy.data))
    with open(tmp_path / "rows", "w") as log:
        lab = Lab(toy, log)
        lab.free_bytes = lambda: 1  # type: ignore[method-assign]  # a card without memory
        for kind in ("gat", "sage-max"):
            with pytest.raises(ValueError, match="its messages need about"):
                Peer(lab, graph, (256, 256), {}, kind, 0.01)


def test_accuracy(toy: Settings, tmp_path: Path) -> None:
    """Fails if masks differ between CPU and emulated kernels, or a run does not repeat."""
    rows = measured("accuracy cora", toy, tmp_path)
    assert of_kind(rows, "curve")[0]["apart"] < 2e-5
    assert of_kind(rows, "curve")[0]["repeats"] == {"losses": True, "weights": True}
    assert {row["device"] for row in of_kind(rows, "scores")} == {"cuda", "cpu"}


def test_compiled_peers_are_timed(toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a kind of PyG's layers is left out under torch.compile."""
    monkeypatch.setattr("torch.compile", lambda net: net)
    rows = of_kind(measured("compile cora 2x16", toy, tmp_path), "epoch")
    assert [row["contender"] for row in rows] == ["PyG fused", "PyG csr", "PyG scatter", "PyG scaled"]
    losses = [row["losses"] for row in rows]
    assert all(other == pytest.approx(losses[0], rel=1e-5) for other in losses)


@pytest.mark.slow
def test_overlap(toy: Settings, tmp_path: Path) -> None:
    """Fails if a rank's messages are not recorded, or waiting at once changes what is computed."""
    rows = measured("overlap products-like", toy, tmp_path)
    assert list(of_kind(rows, "timeline")[0]["shares"]) == ["0", "1", "2", "3"]
    runs = of_kind(rows, "run")
    assert [row["messages"] for row in runs] == ["overlapped", "waited for at once"]
    assert runs[0]["losses"] == runs[1]["losses"]


def test_report_of_what_is_there(toy: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if one part alone makes no report, or a dry run passes for a measurement."""
    rows = tmp_path / "rows"
    rows.mkdir()
    measured("spmm arxiv-like", toy, rows)
    gpu_report.report(rows, tmp_path, ["spmm cnr_2000"])
    text = next(tmp_path.glob("gpu_emulated-gpu_*.md")).read_text()
    assert "spmm arxiv-like: no measurement: scale 0.0001" in text
    assert "| own weighted |" in text
    assert "data: arxiv-like: synthetic" in text
    assert "left out, their real graphs were not found (MGGCN_DATA): spmm cnr_2000" in text
    assert "not measured: ceilings, " in text
    record = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert list(record["parts"]) == ["spmm arxiv-like"]
    assert "written:" in capsys.readouterr().out


@pytest.mark.full
def test_ranks(toy: Settings, tmp_path: Path) -> None:
    """Fails if a number of ranks is not trained, or the plan's prediction of it is missing."""
    rows = of_kind(measured("ranks products-like 3x256", toy, tmp_path), "ranks")
    assert [row["ranks"] for row in rows] == [1, 2]
    assert all(row["median"] > 0 and row["predicted"] > 0 for row in rows)
    assert rows[1]["bytes_sent_per_epoch"] > 0
    assert "| 2 | broadcast | fp32 |" in gpu_report.ranks(rows)


def test_an_ordered_graph_is_the_same_in_another_order(toy: Settings) -> None:
    """Fails if the order breaks the graph, or neighbours lie no nearer than by chance."""
    stores = []
    for name in ("arxiv-like", "arxiv-ordered"):
        stores.append(open_store(find_store(name, 0.01, toy.cache, "")))
    gaps = []
    for graph in stores:
        indptr, indices = graph.adj_t.indptr.array(), graph.adj_t.indices.array()
        gaps.append(float(np.abs(np.repeat(np.arange(indptr.size - 1), np.diff(indptr)) - indices).mean()))
    plain, ordered = stores
    assert gaps[1] < 0.6 * gaps[0]
    degrees = [np.sort(np.diff(graph.adj_t.indptr.array())) for graph in stores]
    assert np.array_equal(*degrees)
    assert np.array_equal(np.sort(require(plain.labels).array()), require(ordered.labels).array())
    means = [require(graph.features).array()[require(graph.labels).array() == 3].mean(0) for graph in stores]
    np.testing.assert_allclose(*means, rtol=1e-4)


def test_a_part_goes_on_where_it_stopped(toy: Settings, tmp_path: Path) -> None:
    """Fails if a second process measures a row again, loses one, or counts as unfinished what has come to its end."""
    task, file = TASKS["ceilings"], TASKS["ceilings"].file(tmp_path)
    job = {"part": task.part, "case": task.case, "file": str(file), "digest": digest(), "graph": ""}
    rows = measured("ceilings", toy, tmp_path)
    kept = [row for row in rows if row["kind"] != "end"][:-6]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept) + '{"kind": "gem')
    assert not finished(task, tmp_path, toy, keep=False)
    assert gpu_part.run(json.loads(json.dumps(job | dataclasses.asdict(toy)))) == 0
    again = read_rows(file)
    assert again[: len(kept)] == kept
    whats = [
        {k: v for k, v in row.items() if k in ("kind", "footprint", "row_bytes", "product", "precision")}
        for row in again
    ]
    timed = [what for what, row in zip(whats, again, strict=True) if "took_s" in row]
    assert len(timed) == sum("took_s" in row for row in rows)
    assert all(timed.count(what) == 1 for what in timed)
    assert finished(task, tmp_path, toy, keep=False)


def test_a_part_asks_for_another_process(toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a part that wants a fresh process counts as done, or as failed."""

    def measure(lab: Lab, case: str) -> None:
        attempt(lab, {"kind": "a"}, lambda: {"mode": lab.noted("captured")})
        raise AgainError

    monkeypatch.setattr(gpu_ceilings, "measure", measure)
    task = TASKS["ceilings"]
    job = {"part": task.part, "case": "", "file": str(task.file(tmp_path)), "digest": digest(), "graph": ""}
    assert gpu_part.run(json.loads(json.dumps(job | dataclasses.asdict(toy)))) == AGAIN
    assert [row["kind"] for row in read_rows(task.file(tmp_path))] == ["start", "begun", "a"]
    assert not finished(task, tmp_path, toy, keep=False)
