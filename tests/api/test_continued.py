"""Runs that go on in Python: extended, interrupted, begun with weights of others; and what notebooks show of them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mggcn
from mggcn.errors import ConfigError, RunError, StoreError
from mggcn.graph.csr import Graph
from tests.graphs import make_graph, pattern

N, D, C = 60, 5, 3
SETTINGS: dict[str, Any] = {"threads": 1, "lr": 0.05, "seed": 8111}


def small(seed: int = 5, **settings: Any) -> mggcn.Trainer:
    return mggcn.Trainer(graph_of(seed), mggcn.GCN(8, dropout=0.3), **(SETTINGS | settings))


def graph_of(seed: int = 5) -> Graph:
    return make_graph(pattern("random", N, seed), num_features=D, num_classes=C, seed=seed)


def rows(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in history]


def same_weights(a: mggcn.Trainer, b: mggcn.Trainer) -> bool:
    return all(
        torch.equal(a.state_dict(weights)[name], tensor)
        for weights in ("best", "last")
        for name, tensor in b.state_dict(weights).items()
    )


@pytest.mark.parametrize("ranks", [{}, {"ranks": 2, "transport": "threads"}], ids=["one", "two"])
def test_a_complete_run_goes_on_as_if_it_had_never_stopped(ranks: dict[str, Any]) -> None:
    """Fails if resume differs from a longer fit by a bit, starts again, or a run without more epochs trains some."""
    whole, parts = small(**ranks), small(**ranks)
    expected = whole.fit(epochs=7)
    first = parts.fit(epochs=3)
    assert rows(parts.resume()) == rows(first)
    assert rows(parts.resume(epochs=7)) == rows(expected)
    assert same_weights(parts, whole)
    assert (parts.result()["best"], parts.config) == (whole.result()["best"], whole.config)
    np.testing.assert_array_equal(parts.predict(), whole.predict())
    rates = [row["lr"] for row in parts.resume(epochs=9, lr=0.25, schedule="cosine")]
    assert rates[6:] == [0.05, 0.25, 0.125]
    with pytest.raises(ConfigError, match=r"keeps its settings, got seed"):
        parts.resume(epochs=12, seed=3)
    with pytest.raises(RunError, match=r"no run to resume; call fit\(\) first"):
        small().resume()


@pytest.mark.parametrize(
    "settings", [{"schedule": "plateau", "schedule_patience": 0, "lr": 0.3}, {"patience": 2, "lr": 0.3}, {"lr": 0.3}]
)
def test_the_evaluation_at_an_end_leaves_no_trace_in_what_follows(settings: dict[str, Any]) -> None:
    """Fails if an evaluation that only the end of a run makes due counts for the schedule, patience or the best epoch."""
    whole, parts = small(eval_every=3, **settings), small(eval_every=3, **settings)
    expected = whole.fit(epochs=20)
    first = parts.fit(epochs=7)
    assert first[-1]["val"] is not None
    extended = parts.resume(epochs=20)
    assert [row["loss"] for row in extended] == [row["loss"] for row in expected]
    assert [row["lr"] for row in extended] == [row["lr"] for row in expected]
    assert parts.result()["best"] == whole.result()["best"]
    assert same_weights(parts, whole)


@pytest.mark.parametrize("settings", [{"patience": 2}, {"schedule": "plateau"}])
def test_validation_without_a_score_is_refused_where_it_decides(settings: dict[str, Any]) -> None:
    """Fails if patience or the schedule waits in silence for a score that validation vertices of one class never have."""
    ring = np.stack([np.arange(N), np.roll(np.arange(N), 1)])
    edges = np.concatenate([ring, ring[::-1]], axis=1)
    train, val = np.arange(N) < 30, np.arange(N) >= 40
    labels = np.where(val, 0, np.arange(N) % 2)
    features = np.random.default_rng(4409).random((N, D), dtype=np.float32)
    graph = mggcn.load(edges, features=features, labels=labels, splits={"train": train, "val": val})
    with pytest.raises(ConfigError, match="need a validation score, and roc_auc has none"):
        mggcn.Trainer(graph, mggcn.GCN(4), metric="roc_auc", **settings, **SETTINGS).fit(epochs=3)


def test_an_interrupted_run_is_opened_and_continued(tmp_path: Path) -> None:
    """Fails if a run folder loses what it needs to go on in another process, or takes another graph."""

    def crash(row: dict[str, Any]) -> None:
        if row["epoch"] == 4:
            raise ZeroDivisionError

    whole = small()
    expected = whole.fit(epochs=6)
    with pytest.raises(ZeroDivisionError):
        small(out=tmp_path / "run", checkpoint_every=2, epochs=6).fit(on_epoch=crash)
    with pytest.raises(ConfigError, match=r"was in memory; give it: Trainer.from_run\(folder, graph\)"):
        mggcn.Trainer.from_run(tmp_path / "run")
    with pytest.raises(RunError, match="is not the graph that the run"):
        mggcn.Trainer.from_run(tmp_path / "run", graph_of(6))
    again = mggcn.Trainer.from_run(tmp_path / "run", graph_of())
    assert "not complete: 2 epochs are saved" in repr(again)
    with pytest.raises(RunError, match=r"or resume\(\) where a run was interrupted"):
        again.evaluate()
    assert rows(again.resume()) == rows(expected)
    assert same_weights(again, whole)


def test_a_run_of_a_store_opens_without_its_graph(tmp_path: Path) -> None:
    """Fails if scores or predictions of an opened run are not those of the run, or a lost store is not named."""
    graph = mggcn.save(graph_of(), tmp_path / "store")
    trainer = mggcn.Trainer(graph, mggcn.GCN(8), out=tmp_path / "run", ranks=2, transport="threads", **SETTINGS)
    trainer.fit(epochs=3)
    opened = mggcn.Trainer.from_run(str(tmp_path / "run"))
    np.testing.assert_array_equal(opened.predict(), trainer.predict())
    assert opened.evaluate("val") == trainer.evaluate("val")
    (tmp_path / "store").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"store, which no longer exists; give it: Trainer.from_run\(folder, graph\)"):
        mggcn.Trainer.from_run(tmp_path / "run")
    assert mggcn.Trainer.from_run(tmp_path / "run", tmp_path / "moved").evaluate("val") == trainer.evaluate("val")


def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    """Fails if a warm start is cold, takes the last weights for the best, is lost by a repeat, or takes any shape."""
    first = small(out=tmp_path / "first")
    first.fit(epochs=5)
    best = first.predict()
    for start in (tmp_path / "first", str(tmp_path / "first"), first.state_dict()):
        still = small(start_from=start, **{"lr": 0.0, "repeat": 2})
        still.fit(epochs=1)
        np.testing.assert_array_equal(still.predict(weights="last"), best)
    wide = mggcn.Trainer(graph_of(), mggcn.GCN(9), **SETTINGS)
    wide.fit(epochs=1)
    with pytest.raises(ConfigError, match=r"layers.1.bias is \(9,\), the model's \(8,\)"):
        small(start_from=wide.state_dict())
    with pytest.raises(ConfigError, match=r"layers\.1\.weight is absent"):
        small(start_from={})
    with pytest.raises(RunError, match="there is no run folder"):
        small(start_from=tmp_path / "nothing")


def test_a_graph_is_saved_from_python(tmp_path: Path) -> None:
    """Fails if a saved graph trains otherwise than the one in memory, or replaces one that is there unasked."""
    edges = np.array([[0, 1, 2, 3], [1, 2, 3, 0]])
    assert mggcn.save(edges, tmp_path / "ring").num_edges == 4
    trainer = small()
    stored = trainer.save_store(tmp_path / "store")
    assert rows(mggcn.Trainer(stored, mggcn.GCN(8, dropout=0.3), **SETTINGS).fit(2)) == rows(trainer.fit(2))
    with pytest.raises(StoreError, match="exists already"):
        mggcn.save(edges, tmp_path / "store")
    assert mggcn.save(edges, tmp_path / "store", overwrite=True).num_vertices == 4


def test_what_notebooks_show(tmp_path: Path) -> None:
    """Fails if a graph, plan or trainer shows as an address or as all of its arrays, or its name as markup."""
    named = mggcn.load(np.array([[0, 1], [1, 0]]), features=np.eye(2, dtype=np.float32), name="<b>")
    assert "<caption>Graph &lt;b&gt;</caption>" in named._repr_html_()
    trainer = small()
    assert repr(trainer).startswith("<Trainer of gcn 5 -> 8 -> 3, fp32, 1 rank on cpu")
    assert repr(trainer).endswith("; not trained yet>")
    trainer.fit(epochs=2)
    assert "; 2 epochs trained, best accuracy: train " in repr(trainer)
    assert repr(trainer.plan).startswith("<Plan of gcn 5 -> 8 -> 3")
    assert "predicted peak" in repr(trainer.plan)
    assert "\n" not in repr(trainer.plan) + repr(trainer)
    for shown in (trainer._repr_html_(), trainer.plan._repr_html_()):
        assert "<th>predicted peak</th>" in shown
        assert "gcn 5 -&gt; 8 -&gt; 3" in shown
    assert "buffers of a training epoch" in trainer.plan._repr_html_()


@pytest.mark.full
def test_processes_find_a_graph_in_memory_again(tmp_path: Path) -> None:
    """Fails if ranks of a resumed run look for the temporary store of the trainer that began it."""
    whole = small(ranks=2, transport="threads")
    expected = whole.fit(epochs=4)
    trainer = small(ranks=2, out=tmp_path / "run")
    trainer.fit(epochs=2)
    del trainer
    gc.collect()
    again = mggcn.Trainer.from_run(tmp_path / "run", graph_of())
    assert rows(again.resume(epochs=4)) == rows(expected)
