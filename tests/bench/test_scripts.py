"""Every benchmark of the CPU from its graph to its report, at toy sizes; those of the GPU: test_gpu_parts.py."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import graphs, run_all
from bench.contest import Case
from bench.cpu import batch_ranks, epochs, libra, predictions, ranks, threads, variants
from bench.report import ROOT
from mggcn.cost.machine import MACHINES
from mggcn.graph.generate import community
from mggcn.graph.store_write import write_store

Record = dict[str, Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Record]:
    """Run the main function of a module of bench/ on small graphs and return its report's record."""
    known = torch.get_num_threads()
    figures = {"copy": [[1e6, 1e9]], "gather": [[1e6, 1e9]], "gemm": {"torch": 1e9}}
    (tmp_path / "ceilings.json").write_text(json.dumps(figures))

    def main(module: str, *arguments: str, shared: str = "cache") -> Record:
        places = {
            "cache": tmp_path / "graphs",
            "ceilings": tmp_path / "ceilings.json",
            "peers": tmp_path,
            "data": tmp_path,
        }
        options = [word for name in shared.split() for word in (f"--{name}", str(places[name]))]
        before = set(tmp_path.glob("*.json"))
        importlib.import_module(f"bench.{module}").main([*arguments, *options, "--out", str(tmp_path)])
        torch.set_num_threads(known)
        (record,) = set(tmp_path.glob("*.json")) - before
        assert record.with_suffix(".md").read_text().startswith("# ")
        found: Record = json.loads(record.read_text())
        assert found["surroundings"]["command"]
        return found

    small = {"arxiv-like": graphs.Made(120, 300, 8, 4, train=0.5), "community": graphs.Made(90, 300, 6, 3)}
    monkeypatch.setattr(graphs, "GENERATED", small)
    return main


PEERS = "cache ceilings peers data"


@pytest.mark.full
def test_products(run: Callable[..., Record]) -> None:
    kinds = "mggcn;mggcn, order by locality;SciPy"
    found = run(
        "peers.products", "--graphs", "arxiv-like", "--widths", "5,8", "--kinds", kinds, "--rounds", "1", shared=PEERS
    )
    assert [(row["width"], list(row["kinds"])) for row in found["measured"]] == [
        (5, kinds.split(";")),
        (8, kinds.split(";")),
    ]
    assert all(row["left_out"] == {} for row in found["measured"])


@pytest.mark.slow
def test_epochs_beside_peers(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.peers import epochs as peers_epochs

    monkeypatch.setattr(peers_epochs, "PYG_KINDS", ("fused",))
    found = run("peers.epochs", "--parts", "precomputed", "--cases", "arxiv-like 2x16", "--rounds", "1", shared=PEERS)
    (row,) = found["measured"]
    assert list(row["seconds"]) == ["mggcn", "PyG fused"]
    assert row["left_out"] == {}
    assert row["pilots"]["fused"] > 0
    assert max(row["loss_error"].values()) < 1e-4


@pytest.mark.slow
def test_layers_beside_peers(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a contender is lost, or one that does not fit is started."""
    from bench.peers import attention

    arguments = ("--kinds", "gin", "--graphs", "arxiv-like", "--rounds", "1")
    monkeypatch.setattr(attention, "EDGE_ROWS", {("gin", attention.SCATTER): 1e12})
    (row,) = run("peers.attention", *arguments, shared="cache peers data")["measured"]
    assert list(row["seconds"]) == ["mggcn", "PyG csr"]
    assert row["left_out"]["PyG"].startswith("not run: it needs about")


@pytest.mark.slow
def test_sampled_training_alone(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a part has no figure of mggcn's, its batches have no edges, or it says more stages than a step has."""
    from bench.peers import sampled

    monkeypatch.setattr(sampled, "BATCH", 20)
    arguments = ("--parts", "sampler,memory,shares", "--models", "sage", "--cases", "arxiv-like", "--rounds", "1")
    drawn, memory, shares = run("peers.sampled", *arguments, "--peers", "none", shared="cache data")["measured"]
    assert list(drawn["figures"]) == ["mggcn, 1 thread", "mggcn, 2 threads"]
    assert all(edges > rows > 20 for edges, rows in drawn["results"].values())
    assert memory["bytes"]["mggcn"]["Pss_Anon"] > 0
    (step,), parts = shares["figures"]["mggcn"], shares["results"]["mggcn"]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(step)


@pytest.mark.slow
def test_losses_of_sampled_training(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if two seeds train alike, or losses and accuracy of an epoch are lost."""
    from bench.peers import sampled

    monkeypatch.setattr(sampled, "BATCH", 20)
    arguments = ("--parts", "losses", "--models", "sage", "--cases", "arxiv-like", "--seeds", "2", "--peers", "none")
    (found,) = run("peers.sampled", *arguments, shared="cache data")["measured"]
    first, second = found["results"]["mggcn"]
    assert len(first) == len(second) == sampled.EPOCHS["losses"] + 1
    assert first[0] != second[0]
    assert all(0 <= accuracy <= 1 for *_, accuracy in (first, second))
    assert found["figures"]["mggcn"] == [first[-2], second[-2]]


@pytest.mark.parametrize("what", [pytest.param(what, marks=pytest.mark.slow) for what in ("pruning", "setup")])
def test_epochs_by_settings(what: str, run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {what: ([Case("arxiv-like", (8,))], *rest) for what, (_, *rest) in epochs.EXPERIMENTS.items()}
    monkeypatch.setattr(epochs, "EXPERIMENTS", chosen)
    (row,) = run("cpu.epochs", "--what", what, "--rounds", "1", shared="cache data")["measured"]
    assert list(row["seconds"]) == list(chosen[what][1])


@pytest.mark.slow
def test_variants(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "CASES", {"some": Case("arxiv-like", (8,))})
    found = run("cpu.variants", "--epochs", "5", "--rounds", "1", shared="cache data")
    (row,) = found["measured"]
    assert [len(run) for runs in row["runs"].values() for run in runs] == 2 * [variants.FIRST + 5]


def test_ways(run: Callable[..., Record]) -> None:
    arguments = ("--graphs", "arxiv-like", "--widths", "8", "--orders", "locality", "--rounds", "1")
    (row,) = run("cpu.ways", *arguments, shared="cache data")["measured"]
    assert {"chosen", "1 blocks", "64 blocks"} <= set(row["seconds"])


def test_order_by_locality(run: Callable[..., Record]) -> None:
    (row,) = run("cpu.locality", "--graphs", "arxiv-like", "--rounds", "1", shared="cache data")["results"]
    assert set(row["halo"]) == {"random", "locality"}


@pytest.mark.slow
def test_ranks(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "WAYS", [(2, 1, "threads")])
    monkeypatch.setattr(ranks, "HIDDEN", "4")
    arguments = ("--parts", "threads,lag", "--rounds", "1", "--lag", "0.02", "--lagging", "community")
    found = run("cpu.ranks", *arguments, shared="cache data")
    assert found["threads"]["2 x 1, threads"][0]["seconds_per_epoch"] > 0
    late, prompt = (min(found["lag"][f"cd-0, {lag} s"]) for lag in ("0.02", "0"))
    assert late > prompt + 0.02


@pytest.mark.slow
def test_ranks_on_batches(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run trains on other batches than the others, or cannot be told from one on more cores."""
    monkeypatch.setattr(batch_ranks, "GRAPHS", ("community",))
    monkeypatch.setattr(batch_ranks, "BATCH", 20)
    before = os.sched_getaffinity(0)
    found = run("cpu.batch_ranks", "--rounds", "1")["runs"]["community"]
    assert os.sched_getaffinity(0) == before
    assert list(found) == list(batch_ranks.RUNS)
    scores = [[rows[0]["final"][split] for split in ("train", "val", "test")] for rows in found.values()]
    np.testing.assert_allclose(scores, [scores[0]] * len(scores), atol=0.05)


@pytest.mark.slow
def test_rows_of_other_ranks(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a setting is left out, or a run sends other bytes, or messages, than its dry run counts."""
    monkeypatch.setattr(ranks, "ORDERS", ("random", "none"))
    arguments = ("--parts", "edges,relays", "--drawn", "community", "--lagging", "community", "--lag", "0.02")
    record = run("cpu.ranks", *arguments, shared="cache data")
    assert list(record["relays"]) == list(ranks.RELAYS)
    assert [(row["order"], row["ahead"]) for row in record["edges"]] == [
        (o, a) for o in ("random", "none") for a in (2, 0)
    ]
    for row in record["edges"]:
        assert row["bytes"][0] == row["bytes"][1] > 0
        assert row["messages"][0] == row["messages"][1] > 0


@pytest.mark.slow
def test_delays_of_whole_runs(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "COST", ("community",))
    monkeypatch.setattr(ranks, "DELAYS", {"cd-5 reuse": ("5", "reuse")})
    monkeypatch.setattr(ranks, "RANKS", (2,))
    (row,) = run("cpu.ranks", "--parts", "delays", shared="cache data")["delays"]
    assert row["rank"]["regions"]["messages and sums in flight"] > 0


@pytest.mark.slow
def test_strategies(run: Callable[..., Record]) -> None:
    arguments = ("--graphs", "community", "--ranks", "2", "--strategies", "halo", "--orders", "random", "--rounds", "1")
    (row,) = run("cpu.strategies", *arguments, "--machine", "assumed-cpu", shared="cache data")["results"]
    found = row["runs"]["halo random"]
    assert found["bytes_sent"] == found["planned_bytes"]


def test_accuracy(run: Callable[..., Record], data_root: Path, tmp_path: Path) -> None:
    """Fails if runs of an earlier call are lost, or made anew."""
    kept = tmp_path / "kept.txt"
    some = ("--what", "precisions", "--graphs", "cora", "--seeds", "1", "--epochs", "2", "--data", str(data_root))
    arguments = ("cpu.accuracy", *some, "--kept", str(kept))
    (row,) = run(*arguments, shared="cache")["precisions"]
    assert list(row["runs"]) == ["fp32", "mixed", "bf16"]
    runs = json.loads(kept.read_text())
    assert list(runs.values()) == [one for of in row["runs"].values() for one in of]
    kept.write_text(json.dumps({key: one | {"best": 0.125} for key, one in runs.items()}))
    for report in tmp_path.glob("accuracy*.json"):
        report.unlink()
    (again,) = run(*arguments, shared="cache")["precisions"]
    assert [of[0]["best"] for of in again["runs"].values()] == [0.125] * 3
    assert row["sent"]["halo 128x128"]["mixed"] < row["sent"]["halo 128x128"]["fp32"]


def test_dense_products(run: Callable[..., Record]) -> None:
    found = run("cpu.gemm", "--rows", "64", "--widths", "16x8", "--types", "fp32", "--rounds", "2", shared="")
    assert [row["product"] for row in found["measured"]] == ["h W", "g W^T", "h^T g"]


def test_norms(run: Callable[..., Record]) -> None:
    found = run("cpu.norms", "--shapes", "70x9", "--rounds", "2", shared="")
    assert [row["pass"] for row in found["measured"]] == ["layer norm", "its gradient", "batch norm", "its gradient"]


@pytest.mark.full
def test_libra(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libra, "RMAT_PARTS", (2,))
    arguments = ("--rmat-scale", "6", "--edge-factor", "4", "--rounds", "1")
    monkeypatch.setattr(libra, "INDEPENDENT", {})
    found = run("cpu.libra", *arguments, shared="cache data")["measured"]
    assert [row["edges"] for row in found] == ["shuffled", "stored"]
    assert all(row["replication"] >= 1 for row in found)


@pytest.mark.full
def test_links(run: Callable[..., Record], tmp_path: Path) -> None:
    write_store(community(90, 500, 5, 3, seed=2), tmp_path / "cora")
    found = run("links", "--graphs", "cora", "--seeds", "2", "--epochs", "3", "--threads", "1", shared="data")[
        "results"
    ]
    assert list(found["cora"]) == ["mggcn", "PyG, mggcn's negatives", "PyG"]
    assert all(0 < one["roc_auc"] < 1 for runs in found["cora"].values() for one in runs)


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_every_part_takes_its_arguments(quick: list[str], tmp_path: Path) -> None:
    """Fails if run_all.py calls a module that is not there, or with an argument that it does not know."""
    args = run_all.options(
        [*quick, "--out", str(tmp_path), "--data", str(tmp_path), "--ceilings", str(tmp_path / "c.json")]
    )
    found = run_all.commands(args)
    assert set(found) == set(run_all.QUICK if quick else run_all.FULL)
    for module, *arguments in found.values():
        assert importlib.import_module(module).options(arguments).out == tmp_path
    with pytest.raises(SystemExit, match="there is no epochs"):
        run_all.commands(run_all.options([*quick, "--parts", "epochs"]))


@pytest.mark.full
def test_it_starts_as_a_script_and_as_a_module() -> None:
    for command in (["bench/run_all.py"], ["-m", "bench.gpu"]):
        done = subprocess.run(
            [sys.executable, *command, "--help"], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
def test_predictions(run: Callable[..., Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run is lost, on the whole graph or on batches, or what is planned is not of the run that trains."""
    some = ("model.kind=gcn model.hidden=8", "model.hidden=8 sample.batch=5 sample.fanout=3,2 run.ranks=2")
    monkeypatch.setattr(predictions, "ROWS", (*(("community", text) for text in some), ("absent", "model.kind=gcn")))
    monkeypatch.setattr(predictions, "TIMED_S", 0.01)
    machine = ["--machine", str(MACHINES / "assumed-cpu.toml")]
    before = run("cpu.predictions", "--rows", "2-3", *machine, shared="cache data")["measured"]
    assert [found.get("failed") for found in before] == [None, "the graph is not here"]
    (report,) = tmp_path.glob("predictions*.json")
    record = run(
        "cpu.predictions",
        "--rows",
        "1",
        "--beside",
        str(report.rename(tmp_path / "before.txt")),
        *machine,
        shared="cache data",
    )
    assert [found["number"] for found in record["measured"]] == [1, 2, 3]
    for found in record["measured"][:2]:
        assert len(found["measured"]["seconds"]) >= predictions.LEAST
        assert found["predicted"]["runtime"] < found["predicted"]["bytes"]
    assert record["measured"][1]["predicted"]["steps"] == 2


@pytest.mark.slow
def test_threads(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GRAPHS", ("community",))
    monkeypatch.setattr(threads, "BUSY", 1)
    monkeypatch.setattr(threads, "DOORS", ("command",))
    monkeypatch.setattr(threads, "MODELS", {"gcn": threads.MODELS["gcn"]})
    monkeypatch.setattr(threads, "LARGE", (("arxiv-like", "gcn"),))
    arguments = ("--rounds", "1", "--epochs", "2", "--pairs", "1", "--large-epochs", "2")
    found = run("cpu.threads", *arguments, shared="cache data")
    assert [row["busy"] for row in found["small"]] == [0, 1]
    assert all(len(row["seconds"]) == 4 and min(map(min, row["seconds"].values())) > 0 for row in found["small"])
    assert found["large"][0]["ratios"][0] > 0
