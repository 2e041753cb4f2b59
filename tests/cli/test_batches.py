"""`mggcn train --batch`: what is refused, and the small and odd graphs that train."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import mggcn
from mggcn.blocks.macrobatch import cache_bytes
from mggcn.config import SampleConfig
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.store_write import write_store
from mggcn.memory.units import human
from tests.cli.runs import finish, history, refused, result, run_main, start
from tests.graphs import make_graph, pattern
from tests.model.test_rgcn import typed_graph

N, TRAINING = 40, 12


def graph_of(adj: Any, **kind: Any) -> Graph:
    """A graph of a given adjacency, of which the first vertices train."""
    graph = make_graph(adj, num_features=6, num_classes=3, seed=5, **kind)
    n = graph.num_vertices
    train = np.arange(n) < max(TRAINING * n // N, 1)
    labels = np.random.default_rng(2).integers(0, 3, n)
    splits = {"train": ArrayRows(train[None]), "val": ArrayRows(~train[None])}
    return dataclasses.replace(graph, splits=splits, labels=ArrayRows(labels))


def store(folder: Path, graph: Graph) -> Path:
    write_store(graph, folder / "store")
    return folder / "store"


def isolated(n: int = N) -> Any:
    """All training vertices but the last two have no edges."""
    adj = pattern("random", n, 3)
    adj[: TRAINING - 2] = 0
    adj[:, : TRAINING - 2] = 0
    return adj


SMALL: dict[str, tuple[Callable[[], Graph], list[str]]] = {
    "one vertex": (lambda: graph_of(np.zeros((1, 1), np.float32)), []),
    "no edges": (lambda: graph_of(pattern("empty", N, 1)), []),
    "isolated seeds": (lambda: graph_of(isolated()), []),
    "star": (lambda: graph_of(pattern("star", N, 1)), []),
    "directed": (lambda: graph_of(pattern("directed", N, 1)), []),
    "weighted": (lambda: graph_of(pattern("weighted", N, 1), weighted=True), ["--set", "sample.draw=weight"]),
    "sparse": (lambda: graph_of(pattern("random", N, 1), sparse=True), ["--set", "data.row_normalize=true"]),
    "more ranks than seeds": (lambda: graph_of(pattern("random", N, 1)), ["--batch", "2", "--ranks", "3"]),
    "ranks without seeds and batch norm": (
        lambda: graph_of(pattern("random", N, 1)),
        ["--batch", "2", "--ranks", "3", "--set", "model.norm_layer=batch"],
    ),
    "ranks that share a batch of two": (
        lambda: graph_of(pattern("random", N, 1)),
        ["--batch", "2", "--ranks", "3", "--set", "run.batches=cooperative"],
    ),
    "ranks that share a star": (
        lambda: graph_of(pattern("star", N, 1)),
        ["--ranks", "3", "--set", "run.batches=cooperative", "--set", "sample.plan=run"],
    ),
    "a batch of everything": (lambda: graph_of(pattern("random", N, 1)), ["--batch", "1000", "--fanout", "all,all"]),
    "every choice left open": (
        lambda: graph_of(pattern("random", N, 1)),
        ["--ranks", "2", "--strategy", "auto", "--order", "auto"],
    ),
    "halo of one": (lambda: graph_of(pattern("random", N, 1)), ["--ranks", "2", "--strategy", "halo"]),
    "slices": (lambda: graph_of(pattern("random", N, 1)), ["--ranks", "2", "--strategy", "slice"]),
}
SETTINGS = ["--epochs", "3", "--batch", "5", "--fanout", "3,2", "--threads", "1", "--set", "model.hidden=8"]


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gin"])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.covering(1, rest="slow")
def test_small_and_odd_graphs_train(name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a graph without edges, a vertex without neighbours or a rank without seeds ends a run, or gives no score."""
    make, more = SMALL[name]
    if "weight" in name and kind in ("gat", "gin"):
        more = []
    where = store(tmp_path, make())
    ranks = ["--transport", "threads"] if "--ranks" in more else []
    model = ["--set", f"model.kind={kind}", "--set", "model.dropout=0.3"]
    code = run_main("train", where, *SETTINGS, *model, *more, *ranks, "--out", tmp_path / "run")
    assert code == 0, capsys.readouterr().err
    rows = history(tmp_path / "run")
    assert len(rows) == 3
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert result(tmp_path / "run")["measured_peak_bytes"] > 0


def test_a_batch_larger_than_the_training_set_is_one_and_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the run does not say that its steps are smaller than was asked for, or makes more than one."""
    where = store(tmp_path, graph_of(pattern("random", N, 1)))
    assert run_main("train", where, *SETTINGS, "--batch", 1000, "--out", tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert f"a batch of all {TRAINING} training vertices" in said
    assert "which are fewer than 1,000, one step an epoch: gradients are estimates" in said


@pytest.mark.parametrize("fanout", ["all", "all,all"])
def test_a_batch_of_all_with_all_neighbours_is_the_whole_graph(fanout: str, tmp_path: Path) -> None:
    """Fails if the words that say the whole graph give another run, on the command line or in Python."""
    graph = graph_of(pattern("random", N, 1))
    where, settings = store(tmp_path, graph), ["--epochs", "3", "--threads", "1", "--set", "model.hidden=8"]
    assert run_main("train", where, *settings, "--out", tmp_path / "whole") == 0
    assert run_main("train", where, *settings, "--batch", "all", "--fanout", fanout, "--out", tmp_path / "named") == 0
    assert history(tmp_path / "named") == history(tmp_path / "whole")
    found = [(tmp_path / name / "config.toml").read_text() for name in ("named", "whole")]
    assert found[0] == found[1]
    words: Any = fanout if fanout == "all" else tuple(fanout.split(","))
    trainer = mggcn.Trainer(graph, mggcn.GCN(hidden=8), threads=1, batch="all", fanout=words)
    assert [row["loss"] for row in trainer.fit(epochs=3)] == [row["loss"] for row in history(tmp_path / "whole")]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("run.batches=cooperative", "ranks share a batch: each of its rows is computed once, by the rank that owns it"),
        ("sample.deal=ranges", "batches depend on the 2 ranks: each shuffles a range of the training vertices"),
        ("sample.deal=by-class", "batches of 5 training vertices by weight of class and 3, 2 drawn in-neighbours"),
    ],
)
def test_how_vertices_are_dealt_is_said(
    setting: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a run with other batches than the usual ones does not say so before it starts."""
    where = store(tmp_path, graph_of(pattern("random", N, 1)))
    more = [
        "--set",
        setting,
        "--set",
        "train.class_weights=balanced",
        "--ranks",
        2,
        "--transport",
        "threads",
    ]
    code = run_main("train", where, *SETTINGS, *more, "--out", tmp_path / "run")
    found = capsys.readouterr()
    assert code == 0, found.err
    assert said in found.out


UNREAD: dict[str, tuple[list[str], str]] = {
    **{
        name: (["--set", f"sample.{name}={value}"], f"sample.{name} belongs to batches, and without sample.batch")
        for name, value in {
            "draw": "labor",
            "by_type": "true",
            "weights": "mean",
            "first": "full",
            "drop_last": "true",
            "plan": "run",
        }.items()
    },
    "deal": (["--set", "sample.deal=ranges"], "nothing is dealt out; set sample.batch"),
    "rows": (["--set", "sample.rows=parts"], "sample.rows is parts, and without sample.batch"),
    "macro": (["--set", "sample.macro=4"], "sample.macro is 4, and with sample.rows mapped no row is fetched"),
    "halo": (["--set", "sample.halo=history"], "sample.halo is history, and without sample.batch"),
    "one rank": (["--set", "run.batches=cooperative"], "run.batches is cooperative, and without sample.batch"),
    "rows that are learned": (["--set", "train.row_optimizer=adagrad"], "moves learned rows that a batch reads"),
    "several": (
        ["--set", "sample.draw=replace", "--set", "sample.weights=mean", "--batch", "all", "--fanout", "all"],
        "sample.draw, sample.weights belong to batches, .* one step; set sample.batch, such as 1024, or leave them out",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_settings_of_batches_need_batches(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a run over the whole graph, or a plan of one, takes a setting that it does not read without a word."""
    given, words = UNREAD[name]
    where, out = store(tmp_path, graph_of(pattern("random", N, 1))), tmp_path / "run"
    shape = ["--vertices", 100, "--edges", 900, "--features", 5, "--classes", 3]
    for command in (["train", where, "--out", out], ["plan", where], ["plan", *shape]):
        said = refused(capsys, *command, "--set", "model.hidden=8", *given)
        assert re.search(words, said), said
        assert not out.exists()
    defaults = [
        f"--set=sample.{one.name}={one.default}" for one in dataclasses.fields(SampleConfig) if one.default != ()
    ]
    assert run_main("plan", where, "--set", "model.hidden=8", *defaults, "--set", "run.batches=auto") == 0


def test_a_run_on_batches_lends_its_configuration_to_one_over_the_whole_graph(tmp_path: Path) -> None:
    """Fails if what a run records, and no user has set, is refused where there are no batches."""
    where = store(tmp_path, graph_of(pattern("random", N, 1)))
    for number, words in enumerate((["--set", "model.hidden=8"], ["--config", tmp_path / "0/config.toml"])):
        batches = ["--batch", "16", "--fanout", "3,2"] if number == 0 else ["--batch", "all", "--fanout", "all"]
        given = [*words, *batches, "--epochs", 1, "--out", tmp_path / str(number)]
        assert run_main("train", where, *given) == 0


BAD: dict[str, tuple[list[str], str]] = {
    "a fan-out too many": (["--fanout", "3,2,2"], r"sample.fanout must have 2 numbers, one for each sum .* got 3,2,2"),
    "a fan-out too few": (["--fanout", "3"], r"sample.fanout must have 2 numbers, one for each sum .* got 3"),
    "no fan-out": (["--fanout", ""], "sample.batch is 5, and sample.fanout is not set"),
    "no batch": (["--batch", "all"], "sample.fanout is 3,2, and without sample.batch the whole graph is one step"),
    "a fan-out of nothing": (["--fanout", "0,2"], "sample.fanout must be 1 or more for each layer, or all, got 0,2"),
    "a huge fan-out": (["--fanout", "70000,2"], "70000"),
    "a negative batch": (["--batch", "-3"], "sample.batch"),
    "words": (["--fanout", "many,2"], "sample.fanout"),
    "weights that are not there": (["--set", "sample.draw=weight"], "sample.draw weight needs a graph with weights"),
    "relations": (["--set", "model.kind=rgcn"], "relation"),
    "no neighbours": (["--set", "model.kind=mlp"], "reads no neighbours, so there is nothing to draw"),
    "delays": (["--ranks", "2", "--strategy", "delayed"], "delayed keeps sums of the whole graph's epochs"),
    "classes without weights": (["--set", "sample.deal=by-class"], "draws training vertices by train.class_weights"),
    "a class that weighs too much": (
        ["--set", "sample.deal=by-class", "--set", "train.class_weights=100,1,1"],
        "vertices of class 0, whose weight is 100, more than once in a batch of 5; set sample.batch to at most",
    ),
    "a first layer of attention, in full": (
        ["--set", "sample.first=full", "--set", "model.kind=gat"],
        "sample.first full reads A X, computed once, and .* is no plain sum over neighbours; choose drawn",
    ),
    "a first layer in full that changes": (
        ["--set", "sample.first=full", "--set", "model.input_dropout=0.1"],
        "sample.first full reads A X, computed once, and model.input_dropout changes X in every step; choose drawn",
    ),
    "a first layer in full alone": (
        ["--set", "sample.first=full", "--set", "model.hidden=", "--fanout", "3"],
        "sample.first full leaves nothing to draw",
    ),
    "cuSPARSE": (
        ["--device", "cuda", "--set", "debug.spmm=cusparse"],
        "debug.spmm cusparse prepares a product for one",
    ),
    "parts of a batch norm": (["--set", "model.norm_layer=batch", "--set", "sample.plan=run"], "may cut a step"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_batches_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a batch that cannot be begins to train, or its refusal is not one line that names the setting."""
    given, words = BAD[name]
    where = store(tmp_path, graph_of(pattern("random", N, 1)))
    out = tmp_path / "run"
    for command in (["train", where, "--out", out], ["plan", where]):
        said = refused(capsys, *command, *SETTINGS, *given)
        assert re.search(words, said), said
        assert not out.exists()


def test_a_first_layer_in_full_is_planned_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a plan does not say what A X saves and takes, or --explain has other numbers than BatchGNN's equations."""
    where = store(tmp_path, graph_of(pattern("random", N, 1)))
    full = ["--set", "sample.first=full"]
    assert run_main("plan", where, *SETTINGS, *full, "--explain") == 0
    out = capsys.readouterr().out
    more = re.search(r"hop 2: not drawn, up to ([\d,]+) rows and ([\d,]+) edges fewer: the first layer reads A X", out)
    said = re.search(
        r"of the largest batch, BatchGNN eq. 4, .*: (.*) of rows and edges; .*: \|V\| is ([\d,]+) and ([^\n]*)", out
    )
    assert more is not None
    assert said is not None
    new, edges, inner = (int(one.replace(",", "")) for one in (*more.groups(), said[2]))
    without, cached = cache_bytes(inner, new, edges, 4 * 6)
    assert (said[1], said[3]) == (human(without), f"|N(V)| {new:,}")
    assert f"(sample.first = full): {human(cached)}; it {'pays' if cached < without else 'does not pay'}: " in out
    assert run_main("train", where, *SETTINGS, *full, "--out", tmp_path / "run") == 0
    assert "3 drawn in-neighbours of the seeds, all of the first layer" in capsys.readouterr().out
    assert all(np.isfinite(row["loss"]) for row in history(tmp_path / "run"))


@pytest.mark.parametrize(
    "settings",
    [
        ["--set", "model.kind=sage"],
        pytest.param(["--set", "model.kind=gin", "--precision", "bf16"], marks=pytest.mark.slow),
        pytest.param(["--set", "sample.first=full", "--set", "sample.plan=run"], marks=pytest.mark.slow),
        pytest.param(["--ranks", "2", "--transport", "gloo"], marks=pytest.mark.slow),
        pytest.param(
            ["--ranks", "2", "--transport", "gloo", "--set", "sample.rows=owners", "--set", "sample.macro=0"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--ranks", "2", "--transport", "gloo", "--set", "sample.rows=parts"],
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_the_measured_peak_is_within_the_plan(settings: list[str], tmp_path: Path) -> None:
    """Fails if batches on their way take memory that no plan counts; a large part of it is theirs, so it hides little."""
    where = tmp_path / "store"
    assert run_main("generate", "community", where, "--vertices", 20_000, "--edges", 200_000, "--features", 600) == 0
    given = ["--batch", 2000, "--fanout", "8,5", "--epochs", 2, "--threads", 1, "--set", "sample.ahead=6"]
    given += ["--set", "model.hidden=16"]
    code, _, err = finish(
        start("train", where, *given, *settings, "--out", tmp_path / "run", "--quiet", module=("mggcn",))
    )
    assert code == 0, err
    found, plan = result(tmp_path / "run"), json.loads((tmp_path / "run" / "plan.json").read_text())
    assert found["measured_peak_bytes"] <= found["planned_peak_bytes"]
    assert max(rank["regions"]["batches on their way"] for rank in plan["per_rank"]) > 100 << 20


@pytest.mark.parametrize(
    "settings",
    [
        ["--set", "model.kind=sage", "--set", "model.aggregator=mean", "--set", "model.input_dropout=0.2"],
        pytest.param(["--precision", "fp64", "--set", "sample.plan=run"], marks=pytest.mark.slow),
        pytest.param(["--ranks", "2", "--transport", "gloo"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_memory_of_sparse_rows_is_within_the_plan(settings: list[str], tmp_path: Path) -> None:
    """Fails if sparse features on their way take memory that no plan counts: of six batches more, so that what a process
    holds without batches, of which pages of libraries are a part that varies, is in neither number.
    """
    rng, (n, features) = np.random.default_rng(20721), (20_000, 3_000)
    edges = rng.integers(0, n, (2, 100_000))
    x = sp.random(n, features, 150 / features, "csr", random_state=rng, dtype=np.float32)
    labels = rng.integers(0, 3, n)
    splits = {"train": labels < 2, "val": labels == 2}
    options = mggcn.GraphOptions(symmetrize=True)
    where = tmp_path / "store"
    mggcn.save(mggcn.load(edges, features=x, labels=labels, splits=splits, options=options), where)
    given = ["--batch", 2000, "--fanout", "8,5", "--epochs", 2, "--threads", 1, "--set", "model.hidden=16", *settings]
    measured, planned = list[int](), list[int]()
    for ahead in (0, 6):
        run = tmp_path / f"ahead-{ahead}"
        own = ["--set", f"sample.ahead={ahead}", "--out", run, "--quiet"]
        code, _, err = finish(start("train", where, *given, *own, module=("mggcn",)))
        assert code == 0, err
        found, plan = result(run), json.loads((run / "plan.json").read_text())
        assert "sparse X is gathered for each batch" in plan["reasons"][0]
        measured.append(found["measured_peak_bytes"])
        planned.append(found["planned_peak_bytes"])
    assert planned[1] - planned[0] > 100 << 20
    assert measured[1] - measured[0] <= planned[1] - planned[0]


def test_ranks_over_gloo_have_the_losses_of_one(tmp_path: Path) -> None:
    """Fails if batches of ranks that are processes are not those of one rank, in any of 20 steps."""
    where = tmp_path / "store"
    assert run_main("generate", "community", where, "--vertices", 400, "--edges", 2000, "--features", 8) == 0
    given = ["train", where, "--batch", 1000, "--fanout", "4,3", "--set", "model.hidden=8", "--epochs", 20]  # of a step
    given += [
        "--precision",
        "fp64",
        "--threads",
        1,
        "--set",
        "model.dropout=0.3",
        "--set",
        "train.eval_every=0",
        "--quiet",
    ]
    for name, ranks in (("one", []), ("gloo", ["--ranks", 2, "--transport", "gloo"])):
        code, _, err = finish(start(*given, *ranks, "--out", tmp_path / name))
        assert code == 0, err
    one, gloo = ([row["loss"] for row in history(tmp_path / name)] for name in ("one", "gloo"))
    assert len(one) == 20
    np.testing.assert_allclose(gloo, one, rtol=1e-12)


def test_relations_train_on_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a model with types of edges cannot be trained on batches by the command."""
    where = store(tmp_path, typed_graph("random"))
    assert run_main("train", where, *SETTINGS, "--set", "model.kind=rgcn", "--out", tmp_path / "run") == 0
    assert all(np.isfinite(row["loss"]) for row in history(tmp_path / "run"))


def test_a_run_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the memory of batches on their way is not compared with what there is before anything is written."""
    where = store(tmp_path, graph_of(pattern("random", N, 1)))
    ahead = [["--set", f"sample.ahead={number}"] for number in (0, 64)]
    assert run_main("train", where, *SETTINGS, *ahead[0], "--out", tmp_path / "small") == 0
    limit = ["--memory-limit", result(tmp_path / "small")["planned_peak_bytes"] + 10_000]
    assert run_main("train", where, *SETTINGS, *ahead[0], *limit, "--out", tmp_path / "again") == 0
    refused(capsys, "train", where, *SETTINGS, *ahead[1], *limit, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


BY_RELATION = ["--set", "model.kind=rgcn", "--set", "model.hidden=8", "--batch", "5", "--threads", "1"]


def test_numbers_by_relation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if fan-outs by relation are other ones in a file, on the command line or in Python, or a run that continues
    draws other batches."""
    graph, told = typed_graph("random", 4), ["--fanout", "2:3/0:all/else:1,2", "--epochs", "4"]
    where = store(tmp_path, graph)
    assert run_main("plan", where, *BY_RELATION, *told) == 0
    assert "(0:all/2:3/else:1 in-neighbours of each relation a row, uniform)" in capsys.readouterr().out
    assert run_main("train", where, *BY_RELATION, *told, "--out", tmp_path / "run") == 0
    assert "training vertices and 0:all/2:3/else:1, 2 drawn in-neighbours, " in capsys.readouterr().out
    losses = [row["loss"] for row in history(tmp_path / "run")]

    settings = tmp_path / "settings.toml"
    settings.write_text('[sample]\nfanout = [{0 = "all", else = 1, 2 = 3}, 2]\nbatch = 5\n[train]\nepochs = 4\n')
    more = ["--config", settings, "--set", "model.kind=rgcn", "--set", "model.hidden=8", "--threads", "1"]
    assert run_main("train", where, *more, "--out", tmp_path / "file") == 0
    assert (tmp_path / "file" / "config.toml").read_text() == (tmp_path / "run" / "config.toml").read_text()

    fanout: Any = ({0: "all", 2: 3, "else": 1}, 2)
    trainer = mggcn.Trainer(graph, mggcn.RGCN(hidden=8), threads=1, batch=5, fanout=fanout)
    assert [row["loss"] for row in trainer.fit(epochs=4)] == losses
    assert run_main("train", where, *BY_RELATION, *told, "--epochs", "2", "--out", tmp_path / "half") == 0
    assert run_main("train", "--resume", tmp_path / "half", "--epochs", "4") == 0
    assert [row["loss"] for row in history(tmp_path / "half")] == losses


@pytest.mark.parametrize(
    ("fanout", "words"),
    [
        ("0:3/else:1,2,2", "sample.fanout must have 2 numbers, one for each sum .* got 0:3/else:1,2,2"),
        ("0:3/4:1/else:1,2", "names relation 4, and the graph has relations 0 .. 3"),
        ("0:3/1:1,2", r"names no number for relation 2, and the graph has relations 0 .. 3; name it, or add /else:5"),
        ("0:3/0:1,2", "sample.fanout expects integers .* or by relation, such as .* got '0:3/0:1,2'"),
        ("0:-2/else:1,2", "sample.fanout expects"),
        ("cites:2,2", "sample.fanout expects"),
    ],
)
def test_bad_numbers_by_relation(fanout: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if numbers that do not fit the graph's relations begin to train, or the refusal names no relation."""
    where, out = store(tmp_path, typed_graph("random", 4)), tmp_path / "run"
    for command in (["train", where, "--out", out], ["plan", where]):
        said = refused(capsys, *command, *BY_RELATION, "--fanout", fanout)
        assert re.search(words, said), said
        assert not out.exists()


@pytest.mark.parametrize(
    ("file", "given"),
    [
        ("", ["--set", "sample.compare_gradient=5", "--batch", "5", "--fanout", "3,2"]),
        ("", ["--set", "sample.fanout=3,2", "--batch", "5"]),
        ("", ["--set", "sample.batch=5", "--fanout", "3,2"]),
        ("", ["--compare-gradient", "5", "--set", "sample.batch=5", "--set", "sample.fanout=3,2"]),
        ("[sample]\ncompare_gradient = 5\nfanout = [3, 2]\n", ["--batch", "5"]),
        ("[sample]\ncompare_gradient = 5\nfanout = [3, 2]\n", ["--set", "sample.batch=5"]),
        ("[data]\nrow_normalize = true\ninputs = 'learned:8'\n", ["--set", "data.inputs=stored"]),
        ("[sample]\nbatch = 5\nfanout = [3, 2, 2]\n", ["--fanout", "3,2"]),
        ("[run]\nprecision = 'bf16'\n[data]\ninputs = 'learned:8'\n", ["--precision", "fp32"]),
    ],
)
def test_settings_from_all_places_are_checked_together(
    file: str, given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a setting is refused for lack of another one that a later place gives, or for one that it replaces."""
    where, path = store(tmp_path, graph_of(pattern("random", N, 1))), tmp_path / "settings.toml"
    path.write_text(file)
    said = run_main("plan", where, "--config", path, "--set", "model.hidden=8", *given)
    assert said == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "given", "named"),
    [
        ("[sample]\ncompare_gradient = 5\n", [], True),
        ("[sample]\ncompare_gradient = 5\n", ["--epochs", "3"], True),
        ("[train]\nlr = -1\n", [], True),
        ("[train]\nlr = 'fast'\n", [], True),
        ("[train]\nlr = 0.1\n", ["--set", "sample.compare_gradient=5"], False),
        ("[sample]\nbatch = 5\n", ["--fanout", "3"], False),
    ],
)
def test_the_file_that_is_wrong_is_named(
    file: str, given: list[str], named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a file's own fault is not told with its name, or it is blamed for what a flag says."""
    where, path = store(tmp_path, graph_of(pattern("random", N, 1))), tmp_path / "settings.toml"
    path.write_text(file)
    said = refused(capsys, "plan", where, "--config", path, "--set", "model.hidden=8", *given)
    assert ("settings.toml" in said) == named, said


def test_the_model_and_settings_of_python_are_checked_together() -> None:
    """Fails if a model is refused for settings that the call itself replaces."""
    sampled = mggcn.Config(sample=SampleConfig(batch=5, fanout=(3, 3, 2)))
    graph = graph_of(pattern("random", N, 1))
    trainer = mggcn.Trainer(graph, mggcn.GCN(hidden=8), config=sampled, fanout=(3, 2), threads=1)
    assert trainer.config.sample.fanout == (3, 2)
