"""Comparing the gradients of sampled steps with the exact one, and that their mean is the exact one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats

from mggcn.assemble.rank import Rank
from mggcn.config import Config, SampleConfig
from mggcn.errors import ConfigError
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.train.log import RunLog
from tests.feed.test_blocks import graph_of
from tests.feed.test_sampled import ALL, sampled
from tests.graphs import far_from_kinks, on_ranks

COMPARED = ("gradient_cosine", "gradient_ratio")


def settings(config: Config, sample: dict[str, Any] | None = None, **train: Any) -> Config:
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, **train),
        sample=dataclasses.replace(config.sample, **(sample or {})),
    )


def fit(config: Config, folder: Path, stop_at: int = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train to the end, or to the end of an epoch; return history and weights."""
    folder.mkdir(exist_ok=True)

    def body(rank: Rank) -> dict[str, Any]:
        trainer, stop = rank.trainer, rank.trainer._stop

        def look(row: dict[str, Any]) -> None:
            if row["epoch"] == stop_at:
                stop.signal = 15

        own = folder if trainer.rank == 0 else None
        trainer.fit(RunLog(own, True, config.train.epochs), folder, look)
        parts = trainer.weights(best=True) | {"optimizer": trainer.optimizer_state()}
        return {f"{part} {name}": tensor for part, named in parts.items() for name, tensor in named.items()}

    tensors = on_ranks(config, graph_of(), body)[0]
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert all(row.pop("seconds") > 0 for row in rows)
    return rows, tensors


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat"])
def test_all_neighbours_of_all_training_vertices_have_the_exact_gradient(kind: str, ranks: int, tmp_path: Path) -> None:
    """Fails if the exact gradient is that of other weights, another dropout or part of the graph, or signals are mixed."""
    model = {"kind": kind, "hidden": (8,), "dropout": 0.4} | ({"aggregator": "mean"} if kind == "sage" else {})
    config = sampled(ranks, model, batch=1000, fanout=(ALL, 60), compare_gradient=2)
    rows, _ = fit(config, tmp_path / "run")
    assert [row["epoch"] for row in rows if set(COMPARED) <= row.keys()] == [2, 4]
    for row in rows[1::2]:
        assert row["gradient_cosine"] == pytest.approx(1.0, abs=1e-9)
        assert row["gradient_ratio"] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_comparing_changes_nothing_else(norm: str, ranks: int, tmp_path: Path) -> None:
    """Fails if a comparison moves a weight, a running statistic, the optimiser or a loss, or a resumed run lacks one."""
    model = {"kind": "gcn", "dropout": 0.4, "norm_layer": norm}
    plain = settings(sampled(ranks, model), epochs=5, schedule="cosine", warmup=1, eval_every=2)
    compared = settings(plain, {"compare_gradient": 2})
    rows, tensors = fit(compared, tmp_path / "compared")
    expected, same = fit(plain, tmp_path / "plain")
    assert [{name: row[name] for name in row.keys() - set(COMPARED)} for row in rows] == expected
    assert tensors.keys() == same.keys()
    assert all(tensor.equal(same[name]) for name, tensor in tensors.items())
    found = [row["gradient_cosine"] for row in rows if "gradient_cosine" in row]
    assert len(found) == 2
    assert all(-1 < cosine < 0.999 for cosine in found)
    fit(compared, tmp_path / "parts", stop_at=2)
    resumed, again = fit(compared, tmp_path / "parts")
    assert resumed == rows
    assert all(tensor.equal(again[name]) for name, tensor in tensors.items())


def test_the_whole_graph_is_not_compared_with_itself() -> None:
    """Fails if a setting without effect is taken."""
    with pytest.raises(ConfigError, match=r"sample.compare_gradient is 2, and without sample.batch"):
        SampleConfig(compare_gradient=2)


def test_the_plan_has_room_for_the_exact_gradient() -> None:
    """Fails if the program or the bytes of a comparison are not planned, or are planned without one."""
    plans = [
        on_ranks(sampled(1, {"kind": "gcn"}, compare_gradient=every), graph_of(), lambda rank: rank.plan)[0]
        for every in (0, 1)
    ]
    assert [[program.name for program in plan.programs.all] for plan in plans] == [
        ["train", "evaluate"],
        ["train", "evaluate", "exact"],
    ]
    assert plans[0].regions.keys() == plans[1].regions.keys() - {"exact gradient"}
    assert plans[1].regions["exact gradient"] >= plans[1].gradient_bytes
    assert plans[1].arena_bytes >= plans[1].programs.all[2].arena.nbytes


def linear_graph() -> Graph:
    """A graph on which a network with positive weights is linear in them, and its loss in what it returns: no feature is
    negative, so that no ReLU cuts, and labels are far below every result, so that the absolute error has one sign.
    """
    graph = graph_of()
    features = np.abs(np.asarray(graph.features.array()))  # type: ignore[union-attr]
    labels = np.full((graph.num_vertices, 2), -1e6, np.float32)
    return dataclasses.replace(graph, features=ArrayRows(features), labels=ArrayRows(labels), num_classes=2)


def gradients_of(seed: int, count: int, **sample: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Gradients of `count` draws (count, entries), and the exact one (entries,), of a linear network with two layers."""
    config = sampled(1, {"kind": "gcn", "hidden": (3,), "self_loops": True}, **({"fanout": (3, 2)} | sample))
    config = settings(config, {"compare_gradient": 1, "ahead": 0}, loss="mae", seed=seed)

    def body(rank: Rank) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        trainer, grad = rank.trainer, rank.trainer.runtime.weights.grads
        far_from_kinks(rank)

        def flat() -> npt.NDArray[Any]:
            return np.concatenate([grad[name].reshape(-1).numpy() for name in sorted(grad)])

        trainer._epoch.start(seed, 0)
        trainer._epoch.exact_gradients()
        exact = flat().copy()
        draws = np.stack([(trainer.gradients(number), flat().copy())[1] for number in range(count)])
        return draws, exact

    ((draws, exact),) = on_ranks(config, linear_graph(), body)
    return draws, exact


def chance(draws: npt.NDArray[Any], exact: npt.NDArray[Any]) -> float:
    """The chance of a mean as far from `exact` as that of the draws, were it their expectation: Hotelling's test over all
    entries, with their covariance. 0 where what no draw changes is wrong.
    """
    scale = np.abs(exact).max()
    apart = (draws.mean(0) - exact) / scale
    variances, axes = np.linalg.eigh(np.cov(draws / scale, rowvar=False))
    random = variances > 1e-12
    fixed = np.abs(axes.T[~random] @ apart)
    if fixed.size and fixed.max() > 1e-6:
        return 0.0
    score = len(draws) * ((axes.T[random] @ apart) ** 2 / variances[random]).sum()
    return float(scipy.stats.chi2.sf(score, random.sum()))


@pytest.mark.parametrize(
    ("draw", "seed"),
    [
        ("uniform", 1),
        *(pytest.param("uniform", seed, marks=pytest.mark.slow) for seed in (2, 3)),
        *(pytest.param(draw, 1, marks=pytest.mark.full) for draw in ("replace", "labor")),
    ],
)
def test_the_mean_of_sampled_gradients_is_the_exact_gradient(draw: str, seed: int) -> None:
    """Fails if seeds, draws, what edges count or the gradient of a batch are biased by a tenth of a deviation."""
    draws, exact = gradients_of(seed, 800, draw=draw)
    assert chance(draws, exact) > 0.001


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_mean_of_ten_thousand_sampled_gradients(seed: int) -> None:
    """Fails as the test above, for a third of that bias."""
    draws, exact = gradients_of(seed, 10_000)
    assert chance(draws, exact) > 0.001


def test_a_biased_gradient_is_noticed() -> None:
    """The tests above fail for edges that count 1 however few were drawn, and for a bias of a tenth of a deviation."""
    draws, exact = gradients_of(1, 800)
    assert chance(draws + 0.1 * draws.std(0), exact) < 1e-3
    assert chance(*gradients_of(1, 200, weights="block")) < 1e-6
