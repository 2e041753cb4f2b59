"""Scores of pairs, and embeddings, with the weights of a run that predicts links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mggcn
from mggcn.errors import ConfigError
from mggcn.graph.generate import community
from tests.cli.runs import refused, run_main

SETTINGS: dict[str, Any] = {"threads": 1, "epochs": 3, "precision": "fp64", "embedding": 6}


def graph_of() -> mggcn.Graph:
    return mggcn.split_links(community(90, 500, 5, 3, seed=2), (0.8, 0.1, 0.1), negatives=3)


def decoded(z: np.ndarray, pairs: np.ndarray, weights: dict[str, torch.Tensor], decoder: tuple[int, ...]) -> np.ndarray:
    x = torch.from_numpy(z[pairs[:, 0]] * z[pairs[:, 1]])
    if not decoder:
        return x.sum(1).numpy()
    x = torch.relu(x @ weights["layers.3.weight"] + weights["layers.3.bias"])
    return (x @ weights["layers.4.weight"] + weights["layers.4.bias"])[:, 0].numpy()


@pytest.mark.parametrize(("decoder", "ranks"), [((), 1), ((4,), 2)])
def test_pairs_are_scored_from_embeddings(decoder: tuple[int, ...], ranks: int, tmp_path: Path) -> None:
    """Fails if a pair's score is other than its embeddings', in Python, on the command line, or on another graph."""
    graph = graph_of()
    store = mggcn.save(graph, tmp_path / "store")
    run: dict[str, Any] = {"ranks": ranks, "transport": "threads"} if ranks > 1 else {}
    trainer = mggcn.Trainer(store, mggcn.GCN(8), out=tmp_path / "run", decoder=decoder, **SETTINGS, **run)
    trainer.fit()
    pairs = np.random.default_rng(4).integers(0, 90, (30, 2))
    z = trainer.predict()
    assert z.shape == (90, 6)
    weights = trainer.state_dict()
    expected = decoded(z, pairs, weights, decoder)
    np.testing.assert_allclose(trainer.predict(pairs=pairs), expected, atol=1e-10)
    np.testing.assert_allclose(trainer.predict(vertices=pairs[:, 0]), z[pairs[:, 0]], atol=1e-10)
    assert trainer.predict(layer=1).shape == (90, 8)
    np.savetxt(tmp_path / "pairs.txt", pairs, fmt="%d")
    assert run_main("predict", tmp_path / "run", "--pairs", tmp_path / "pairs.txt", "--probabilities") == 0
    found = np.load(tmp_path / "run" / "pairs.npy")
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-expected)), atol=1e-10)
    assert run_main("predict", tmp_path / "run", "--vertices", "3", "--out", tmp_path / "z.csv") == 0
    header = (tmp_path / "z.csv").read_text().splitlines()[0]
    assert header.split(",") == ["vertex", *(f"feature_{column}" for column in range(6))], "no scores of classes"
    # Another graph needs no links, and has other embeddings.
    whole = community(90, 500, 5, 3, seed=2)
    others = trainer.predict(graph=whole)
    assert np.abs(others - z).max() > 1e-3
    np.testing.assert_allclose(
        trainer.predict(graph=whole, pairs=pairs), decoded(others, pairs, weights, decoder), atol=1e-10
    )


def test_what_pairs_and_links_do_not_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a run on links gives classes, or one on classes scores of pairs, or bad pairs end in a traceback."""
    mggcn.save(graph_of(), tmp_path / "store")
    trainer = mggcn.Trainer(tmp_path / "store", mggcn.GCN(8), out=tmp_path / "run", **SETTINGS)
    trainer.fit()
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"classes": True}, "predicts links"),
        ({"pairs": [[0, 1]], "vertices": [0]}, "without vertices"),
        ({"pairs": [0, 1]}, "two ids each"),
        ({"pairs": [[0, 90]]}, "90"),
    )
    for arguments, words in cases:
        with pytest.raises(ConfigError, match=words):
            trainer.predict(**arguments)
    with pytest.raises(ConfigError, match="training links have no fixed negatives"):
        trainer.evaluate("train")
    (tmp_path / "pairs.txt").write_text("0 1\n2\n")
    for arguments_, words in (
        (["--pairs", tmp_path / "pairs.txt"], "two ids a line"),
        (["--pairs", "0,1"], "expects a file of ids"),
        (["--pairs", tmp_path / "absent.npy"], "cannot be read"),
        (["--probabilities"], "predicts links"),
    ):
        assert words in refused(capsys, "predict", tmp_path / "run", *arguments_)
    classes = mggcn.Trainer(community(60, 300, 4, 2, seed=1, train=0.3), mggcn.GCN(4), epochs=1, threads=1)
    classes.fit()
    with pytest.raises(ConfigError, match="runs that predict links"):
        classes.predict(pairs=[[0, 1]])
