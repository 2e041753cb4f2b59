"""Links on the command line: prepare --links, train on the whole graph and on batches, resume, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mggcn
from mggcn.graph.csr import Graph
from mggcn.graph.generate import community
from tests.cli.runs import history, refused, result, run_main

SETTINGS = ["--threads", "1", "--quiet", "--set", "model.hidden=8", "--set", "links.embedding=8"]
BATCHES = ["--batch", "150", "--fanout", "4,3"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("links")
    mggcn.save(community(200, 1500, 8, 3, seed=5), folder / "source")
    assert run_main("prepare", folder / "source", folder / "store", "--links", "0.8,0.1,0.1", "--negatives", "6") == 0
    return folder / "store"


def test_prepare_splits_links(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if what prepare was told of links is not what the store has, or the store does not say so."""
    graph = mggcn.load(store)
    assert graph.task == "links"
    assert graph.links["val"].shape[1] == 8
    assert graph.meta["links"] == {"shares": [0.8, 0.1, 0.1], "negatives": 6, "seed": 1}
    assert run_main("store", "info", store, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["links"] == {name: rows.shape[0] for name, rows in graph.links.items()}
    assert answer["task"] == "links"
    assert run_main("plan", store, *BATCHES, "--set", "model.hidden=8", "--set", "links.decoder=4") == 0
    text = capsys.readouterr().out
    assert "training links on all ranks" in text
    assert "pairs and their scores" in text
    assert "test links are scored in" in text
    for more in ([], BATCHES):
        assert run_main("plan", store, "--json", "--set", "model.hidden=8", *more) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["graph"]["num_scored"], found["graph"]["num_scored_pairs"]) == (150, 300 * 7)
        assert found["predicted"]["links"]["score_seconds"] > 0
        assert (found["predicted"]["links"]["pair_seconds"] > 0) == (not more)  # a batch's own are part of drawing it


def test_links_are_exported(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if another program ranks other pairs, or pairs are left out of a file without a word."""
    graph = mggcn.load(store)
    assert run_main("store", "export", store, tmp_path / "links.pt") == 0
    assert "note" not in capsys.readouterr().out
    data = torch.load(tmp_path / "links.pt", weights_only=False)
    for name, rows in graph.links.items():
        found = [data[f"{name}_edge_label_index"].T, *([data[f"{name}_negatives"]] if name != "train" else [])]
        np.testing.assert_array_equal(np.concatenate(found, 1), rows.array())
    assert run_main("store", "export", store, tmp_path / "links.csv") == 0
    assert "note: validation and test links, and their negatives, are left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more", [[], BATCHES, ["--ranks", "2", "--transport", "threads"]], ids=["whole", "batch", "ranks"]
)
def test_runs_on_links_resume_with_the_same_bits(more: list[str], store: Path, tmp_path: Path) -> None:
    """Fails if a run that goes on draws other pairs, or a score is missing."""
    settings = [
        *SETTINGS,
        *more,
        "--set",
        "train.patience=50",
        "--set",
        "links.decoder=5",
        "--set",
        "model.dropout=0.2",
    ]
    assert run_main("train", store, *settings, "--epochs", "4", "--out", tmp_path / "whole") == 0
    assert run_main("train", store, *settings, "--epochs", "2", "--out", tmp_path / "parts") == 0
    assert run_main("train", "--resume", tmp_path / "parts", "--epochs", "4", "--quiet") == 0
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    found = result(tmp_path / "whole")
    assert found["metric"] == "roc_auc"
    assert found["links"].keys() == {"val", "test"}
    assert found["links"]["test"].keys() == {"roc_auc", "mrr", *(f"hits@{k}" for k in (1, 3, 5, 10, 20, 50, 100))}
    assert found["links"]["val"]["roc_auc"] == pytest.approx(found["best"]["val"], rel=1e-12)
    assert all(row["train"] is None for row in history(tmp_path / "whole"))
    assert run_main("report", tmp_path / "whole") == 0
    page = (tmp_path / "whole" / "report" / "index.html").read_text()
    assert f"{found['links']['test']['hits@100']:.4f}" in page.partition("Scores of links")[2]


def test_a_run_says_that_batches_are_of_links(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the lines that begin a run on links speak of training vertices."""
    settings = ["--threads", "1", *SETTINGS[3:], *BATCHES, "--epochs", "1"]
    assert run_main("train", store, *settings, "--out", tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "batches of 150 training links and 4, 3 drawn in-neighbours" in said
    assert "training vertices" not in said


def plain() -> Graph:
    return community(60, 300, 4, 2, seed=1, train=0.3)


REFUSED: dict[str, tuple[list[Any], str]] = {
    "shares": (["prepare", "SOURCE", "OUT", "--links", "0.8,0.1"], "three shares that add up to 1"),
    "no numbers": (["prepare", "SOURCE", "OUT", "--links", "most"], "such as 0.8,0.1,0.1"),
    "negatives alone": (["prepare", "SOURCE", "OUT", "--negatives", "3"], "belong to --links"),
    "no negatives": (["prepare", "SOURCE", "OUT", "--links", "0.8,0.1,0.1", "--negatives", "0"], "negatives must be"),
    "twice": (["prepare", "STORE", "OUT", "--links", "0.8,0.1,0.1"], "split into links already"),
    "reverses": (["prepare", "STORE", "OUT", "--self-loops", "add"], "split into links; change them first"),
    "joined": (["prepare", "STORE", "OUT", "--join", "STORE"], "cannot be joined"),
    "a setting without links": (
        ["train", "SOURCE", "--out", "OUT", "--set", "links.negatives=2"],
        "links.negatives is for",
    ),
    "another metric": (["train", "STORE", "--out", "OUT", "--set", "train.metric=accuracy"], "roc_auc, mrr, hits@1"),
    "a metric of links": (
        ["train", "SOURCE", "--out", "OUT", "--set", "train.metric=mrr"],
        "train.metric mrr does not fit",
    ),
    "classes": (
        ["train", "STORE", "--out", "OUT", "--set", "train.label_smoothing=0.1"],
        "belongs to classes, but community_200_1500 is split into links",
    ),
    "bf16": (["train", "STORE", "--out", "OUT", "--precision", "bf16"], "choose fp32, or mixed"),
    "a loss": (["train", "STORE", "--out", "OUT", "--set", "train.loss=mse"], "which is split into links; choose bce"),
    "dealt without batches": (
        ["train", "STORE", "--out", "OUT", "--set", "sample.deal=ranges"],
        "nothing is dealt out",
    ),
    "shared without batches": (
        ["train", "STORE", "--out", "OUT", "--ranks", "2", "--set", "run.batches=cooperative"],
        "the whole graph is one step",
    ),
    "another split": (["train", "STORE", "--out", "OUT", "--split", "1"], "one split of its links"),
    "shared": (
        [
            "train",
            "STORE",
            "--out",
            "OUT",
            "--set",
            "model.hidden=8",
            *BATCHES,
            "--ranks",
            "2",
            "--set",
            "run.batches=cooperative",
        ],
        "both ends on theirs",
    ),
    "from A X": (
        ["train", "STORE", "--out", "OUT", "--set", "model.hidden=8", *BATCHES, "--set", "sample.first=full"],
        "own links too",
    ),
    "dealt": (
        ["train", "STORE", "--out", "OUT", "--set", "model.hidden=8", *BATCHES, "--set", "sample.deal=ranges"],
        "drawn from all",
    ),
    "compared": (
        ["train", "STORE", "--out", "OUT", "--set", "model.hidden=8", *BATCHES, "--compare-gradient", "1"],
        "leaves no links out",
    ),
    "memory": (["train", "STORE", "--out", "OUT", "--memory-limit", "1MiB"], "may be used"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(name: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if what cannot be is begun, or refused in more than a line."""
    mggcn.save(plain(), tmp_path / "source")
    places = {"SOURCE": tmp_path / "source", "STORE": store, "OUT": tmp_path / "out"}
    arguments, words = REFUSED[name]
    assert words in refused(capsys, *(places.get(a, a) for a in arguments))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("shares", "more"),
    [
        ((0.5, 0.25, 0.25), ["--ranks", "3"]),
        ((0.5, 0.25, 0.25), ["--batch", "9", "--fanout", "all,all", "--ranks", "3"]),
        ((1.0, 0.0, 0.0), []),
        ((1.0, 0.0, 0.0), ["--batch", "1", "--fanout", "2,2"]),
    ],
)
def test_a_handful_of_links_trains(shares: tuple[float, ...], more: list[str], tmp_path: Path) -> None:
    """Fails if a rank or a split without links ends a run."""
    edges = np.array([[0, 1, 2, 3], [1, 2, 3, 4]])
    path = mggcn.load(edges, features="degree", options=mggcn.GraphOptions(symmetrize=True))
    mggcn.save(mggcn.split_links(path, shares, negatives=1), tmp_path / "store")
    transport = ["--transport", "threads"] if "--ranks" in more else []
    settings = [*SETTINGS, *more, *transport, "--epochs", "2", "--out", tmp_path / "run"]
    assert run_main("train", tmp_path / "store", *settings) == 0
    assert len(history(tmp_path / "run")) == 2
