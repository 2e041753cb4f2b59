"""Every part of bench/gpu.py from its graph to its Markdown, on emulated kernels at toy sizes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gpu_part
import gpu_report
import gpu_spmm
import pytest
import torch
from common import make_store
from gpu_graphs import find_store, workload
from gpu_lab import Lab, Settings
from gpu_tasks import ORDER, digest, finished, read_rows

from mggcn.backend.cuda_shape import LONG_ROW

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # PyG, on every CSR tensor
TASKS = {task.name: task for task in ORDER}
Rows = list[dict[str, Any]]


def measured(name: str, toy: Settings, folder: Path) -> Rows:
    """Run a task in this process and return its rows."""
    task = TASKS[name]
    if task.graph:
        make_store(workload(task.graph, toy.scale), Path(toy.cache))
    job = {"part": task.part, "case": task.case, "file": str(task.file(folder)), "digest": digest()}
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
    assert {row["kind"] for row in rows} == {"start", "copy", "read", "gather", "gemm", "launch", "end"}
    for row in of_kind(rows, "gather") + of_kind(rows, "copy") + of_kind(rows, "gemm"):
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median"] / 1e9)
    assert len({row["row_bytes"] for row in of_kind(rows, "gather")}) == 6


def test_sparse_products(toy: Settings, tmp_path: Path) -> None:
    """Fails if a contender computes something else than float64 does, or is not there."""
    rows = of_kind(measured("spmm arxiv-like", toy, tmp_path), "spmm")
    own = {"own", "own simple", "own groups"}
    assert {r["contender"] for r in rows if r["type"] == "bfloat16"} == own
    assert {r["contender"] for r in rows if r["type"] == "float32"} == own | {
        "own weighted",
        "torch CSR",
        "PyG EdgeIndex",
    }


def test_limits_of_long_rows_are_contenders(toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the benchmark cannot tell whether long rows begin too early, or a limit changes nothing or the result."""
    make_store(workload("reddit-like", toy.scale), Path(toy.cache))
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
    assert found["mggcn", "bf16"]["losses"] == pytest.approx(peer["losses"], rel=1e-2)
    # Two layers in both directions; ours has none in the first.
    assert (own["products"], peer["products"]) == (2, 4)


def test_accuracy(toy: Settings, tmp_path: Path) -> None:
    """Fails if masks differ between CPU and emulated kernels, or a run does not repeat."""
    rows = measured("accuracy cora", toy, tmp_path)
    assert of_kind(rows, "curve")[0]["apart"] < 2e-5
    assert of_kind(rows, "repeat")[0] == {"kind": "repeat", "losses": True, "weights": True}
    assert {row["device"] for row in of_kind(rows, "scores")} == {"cuda", "cpu"}


def test_shapes(toy: Settings, tmp_path: Path) -> None:
    """Fails if a shape of the kernel is refused or wrong."""
    rows = of_kind(measured("tune arxiv-like", toy, tmp_path), "spmm")
    assert {row["type"] for row in rows} == {"float32", "bfloat16"}


def test_compiled_peers_are_timed(toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a kind of PyG's layers is left out under torch.compile."""
    monkeypatch.setattr("torch.compile", lambda net: net)
    rows = of_kind(measured("compile cora 2x16", toy, tmp_path), "epoch")
    assert [row["contender"] for row in rows] == ["PyG fused", "PyG scaled", "PyG csr", "PyG scatter"]
    losses = [row["losses"] for row in rows]
    assert all(other == pytest.approx(losses[0], rel=1e-5) for other in losses)


def test_overlap(toy: Settings, tmp_path: Path) -> None:
    """Fails if a rank's messages are not recorded, or waiting at once changes what is computed."""
    rows = measured("overlap products-like", toy, tmp_path)
    assert [row["rank"] for row in of_kind(rows, "share")] == [0, 1, 2, 3]
    runs = of_kind(rows, "run")
    assert [row["messages"] for row in runs] == ["overlapped", "waited for at once"]
    assert runs[0]["losses"] == runs[1]["losses"]


def test_report_of_what_is_there(toy: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if one part alone makes no report, or a dry run passes for a measurement."""
    rows = tmp_path / "rows"
    rows.mkdir()
    measured("spmm arxiv-like", toy, rows)
    gpu_report.report(rows, tmp_path)
    text = next(tmp_path.glob("gpu_emulated-gpu_*.md")).read_text()
    assert "spmm arxiv-like: no measurement: scale 0.0001" in text
    assert "| own simple |" in text
    assert "not measured: ceilings, " in text
    record = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert list(record["parts"]) == ["spmm arxiv-like"]
    assert "written:" in capsys.readouterr().out
