"""What a stranger does: an edge list and arrays of his own, through prepare, train and predict."""

from __future__ import annotations

import gzip
import io
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import mggcn
from mggcn.api.load import load_source
from mggcn.cli import building
from mggcn.errors import GraphError
from mggcn.graph.build.room import BuildPlan, beside
from mggcn.graph.build.staging import HEADER_BYTES, InFolder
from mggcn.graph.csr import CSR, Graph
from mggcn.graph.sources import edge_list
from tests.cli.runs import losses, refused, result, run_main

SETTINGS = ["--threads", "1", "--seed", "733", "--epochs", "6", "--set", "model.hidden=16"]


@dataclass(frozen=True)
class Files:
    """A graph as a stranger holds it, and the order in which it was shuffled: new id -> cora's."""

    edges: Path
    arguments: list[str]
    labels: np.ndarray
    test: np.ndarray
    order: np.ndarray


def rows_of(csr: CSR) -> Any:
    n = csr.indptr.shape[0]
    indptr = csr.indptr.read(0, n)
    values = np.ones(indptr[-1], np.float32) if csr.values is None else csr.values.read(0, indptr[-1])
    return sp.csr_array((values, csr.indices.read(0, indptr[-1]), indptr), shape=(n - 1, csr.num_cols))


def write_files(graph: Graph, folder: Path) -> Files:
    """Shuffle a store's vertices and write edges as text, features dense, and masks or lists of ids."""
    rng = np.random.default_rng(1999)
    n = graph.num_vertices
    order = rng.permutation(n)
    new_id = np.empty(n, np.int64)
    new_id[order] = np.arange(n)
    coo = rows_of(graph.adj).tocoo()
    edges = np.stack([new_id[coo.row], new_id[coo.col]], 1)
    path = folder / "edges.txt"
    np.savetxt(path, edges[rng.permutation(len(edges))], fmt="%d", header="source target")
    assert isinstance(graph.features, CSR)
    assert graph.labels is not None
    labels = graph.labels.read(0, n)[order]
    masks = {name: graph.splits[name].read(0, 1)[0][order] for name in ("train", "val", "test")}
    arrays = {
        "features": rows_of(graph.features).toarray()[order],
        "labels": labels,
        "train": masks["train"],
        "val": rng.permutation(np.flatnonzero(masks["val"])),
        "test": masks["test"],
    }
    arguments = []
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
        arguments += [f"--{name}", str(folder / f"{name}.npy")]
    return Files(path, arguments, labels, masks["test"], order)


@pytest.mark.parametrize("transport", ["threads", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_strangers_graph(data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str) -> None:
    """Fails if an edge, a feature or a mask is lost on the way, or scores leave in another order than they came."""
    files = write_files(load_source(data_root / "cora"), tmp_path)
    store, three, one = tmp_path / "store", tmp_path / "three", tmp_path / "one"
    assert run_main("prepare", files.edges, store, *files.arguments) == 0
    said = capsys.readouterr().out
    assert "2,708 vertices, 10,556 stored edges, symmetric, 1,433 sparse features, 7 classes, splits" in said
    assert run_main("train", store, *SETTINGS, "--ranks", 3, "--transport", transport, "--out", three, "--quiet") == 0
    assert run_main("train", store, *SETTINGS, "--out", one, "--quiet") == 0
    np.testing.assert_allclose(losses(three), losses(one), rtol=1e-5)
    assert run_main("predict", three, "--out", tmp_path / "scores.npy") == 0
    assert run_main("predict", one) == 0
    got, expected = np.load(tmp_path / "scores.npy"), np.load(one / "scores.npy")
    assert got.dtype == np.float32
    assert got.shape == (2708, 7)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    margin = np.diff(np.sort(expected, 1)[:, -2:])[:, 0]
    clear = margin > 2e-4 * np.abs(expected).max()
    assert clear.mean() > 0.99
    assert (got.argmax(1) == expected.argmax(1))[clear].all()
    accuracy = (got.argmax(1) == files.labels)[files.test].mean()
    assert accuracy == pytest.approx(result(three)["best"]["test"], abs=2e-3)
    assert accuracy > 0.4

    original = tmp_path / "original"
    assert run_main("train", data_root / "cora", *SETTINGS, "--out", original, "--quiet") == 0
    assert run_main("predict", original, "--weights", "best") == 0
    scores = np.load(original / "scores.npy")[files.order]
    np.testing.assert_allclose(expected, scores, rtol=1e-4, atol=1e-4 * np.abs(scores).max())


def test_what_prepare_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a header, repeats or ids from 1 pass without a note, or checksums are praised that nothing has."""
    edges, store = tmp_path / "edges.csv", tmp_path / "store"
    edges.write_text("from,to\n1,2\n2,3\n1,2\n")
    summary = "4 vertices, 2 stored edges, directed, no features, 0 classes, splits none; "
    notes = [
        "note: a header was skipped: 'from,to'",
        "note: 1 repeated edge merged into the first of its kind",
        "note: 1 vertex without any edge",
        "note: vertex 0 has no edge: if ids start at 1, subtract 1, as row 0 of features and labels is its own",
    ]
    assert run_main("prepare", edges, "--verify") == 0
    unchecked = f"{edges}: {summary}the content was checked, there are no checksums to compare"
    assert capsys.readouterr().out.splitlines() == [unchecked, *notes]
    assert run_main("prepare", edges, store) == 0
    assert capsys.readouterr().out.splitlines() == [f"{store}: {summary}checksums hold", *notes]
    assert run_main("prepare", store, "--verify") == 0
    assert capsys.readouterr().out.splitlines() == [f"{store}: {summary}checksums hold", *notes]
    (tmp_path / "plain.txt").write_text("0 1\n1 0\n")
    assert run_main("prepare", tmp_path / "plain.txt", tmp_path / "plain") == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert run_main("prepare", tmp_path / "store", tmp_path / "again", "--verify", "--symmetrize") == 0
    assert "checksums hold" in capsys.readouterr().out


def test_a_graph_is_named_as_its_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a graph keeps the name of the file it was read from, a copy loses its own, or --name is not heeded."""
    edges = tmp_path / "edges.csv"
    edges.write_text("0,1\n1,2\n2,0\n")
    np.save(tmp_path / "y.npy", np.array([3.0, 7.0, 2.0]))
    given = ("--labels", tmp_path / "y.npy", "--task", "numbers", "--features", "degree")
    assert run_main("prepare", edges, tmp_path / "articles", *given) == 0
    assert run_main("prepare", tmp_path / "articles", tmp_path / "copy") == 0
    assert run_main("prepare", tmp_path / "articles", tmp_path / "other", "--name", "mine") == 0
    mggcn.save(mggcn.load(edges), tmp_path / "saved")
    mggcn.save(mggcn.load(edges, name="mine"), tmp_path / "named")
    names = [load_source(tmp_path / store).name for store in ("articles", "copy", "other", "saved", "named")]
    assert names == ["articles", "articles", "mine", "saved", "mine"]
    labels = load_source(tmp_path / "articles").labels
    assert labels is not None
    assert labels.array().ravel().tolist() == [3, 7, 2]


def test_labels_of_a_store_for_another_task(tmp_path: Path) -> None:
    """Fails if -1, which classes have for an unknown label, or a name becomes a number to predict, or a number is lost."""
    edges = np.array([[0, 1, 2], [1, 2, 0]])
    mggcn.save(mggcn.load(edges, labels=[0, 2, 1]), tmp_path / "known")
    mggcn.save(mggcn.load(edges, labels=[0, -1, 1]), tmp_path / "unknown")
    mggcn.save(mggcn.load(edges, labels=["a", "b", "a"]), tmp_path / "named")
    labels = mggcn.load(tmp_path / "known", task="numbers").labels
    assert labels is not None
    assert labels.array().ravel().tolist() == [0, 2, 1]
    for store, words in (("unknown", "-1 is an unknown label"), ("named", "names of classes")):
        with pytest.raises(GraphError, match=rf"{words}.*from its source with task='numbers'"):
            mggcn.load(tmp_path / store, task="numbers")
        assert mggcn.load(tmp_path / store, task="classes").task == "classes"


@pytest.mark.parametrize("more", [(), ("--ids", "edges")])
def test_a_header_of_column_numbers_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """Fails if the header that pandas writes by default becomes an edge without a word, or any edge 0 -> 1 is suspected."""
    names = ("ann", "bob") if more else (7, 9)
    texts = {
        "0,1\n{},{}\n": True,
        "0,1,2\n{},{},1\n": True,
        "source,target\n{},{}\n0,1\n": False,
        "0 1\n{} {}\n": False,
        "0,2\n{},{}\n0,1\n": False,
    }
    for text, noted in texts.items():
        (tmp_path / "e.csv").write_text(text.format(*names))
        assert run_main("prepare", tmp_path / "e.csv", tmp_path / "store", "--force", *more) == 0
        said = capsys.readouterr().out
        note = f"note: the first line, {text.split()[0]!r}, was read as an edge: if it is the header that pandas writes"
        assert (note in said) == noted == ("header=False" in said)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A list of weighted edges, and windows and buffers so small that it is built in files."""
    for module in ("graph.build.build", "graph.edges"):
        monkeypatch.setattr(f"mggcn.{module}.WINDOW", 100)
    monkeypatch.setattr("mggcn.graph.sources.edge_list.BLOCK_BYTES", 500)
    monkeypatch.setattr("mggcn.graph.sources.edge_list.SAVE_EVERY", 4)
    monkeypatch.setattr("mggcn.graph.build.build.SAVE_EVERY", 4)
    monkeypatch.setattr("mggcn.graph.build.room.WINDOWS_BYTES", 0)
    monkeypatch.setattr("mggcn.cli.settings.LEAST_MEMORY", 0)
    edges = np.random.default_rng(19).integers(0, 60, (2, 900))
    lines = [f"{u},{v},{(u + v) % 5}" for u, v in edges.T.tolist()]
    (tmp_path / "edges.csv").write_text("\n".join(["source,target,weight", *lines]))
    return tmp_path / "edges.csv"


def test_a_small_memory_gives_the_same_store(large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a store built in files differs from one built in memory by a byte, or files stay, or no plan is said."""
    for options in (["--duplicates", "sum"], ["--symmetrize", "--self-loops", "add"]):
        for memory, place in (("1GiB", "a"), ("6000", "b")):
            arguments = ("prepare", large, tmp_path / place, "--name", "g", "--force", "--memory", memory, *options)
            assert run_main(*arguments) == 0
            said = capsys.readouterr().err
            assert ("900 edges are sorted in parts: planned peak memory" in said) == (place == "b")
            assert ("edges.csv is parsed to files: about 21.1" in said) == (place == "b")
        assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")
    assert not list(tmp_path.glob(".*"))


def test_an_interrupted_prepare_goes_on(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if SIGINT leaves a store or says nothing, or the same command afterwards makes another one."""
    arguments = ("--name", "g", "--memory", "6000")
    assert run_main("prepare", large, tmp_path / "whole", *arguments) == 0
    save, saves = InFolder.save, 0

    def interrupted(self: InFolder, state: Any) -> None:
        nonlocal saves
        saves += 1
        if saves % 5 == 0:
            raise KeyboardInterrupt
        save(self, state)

    monkeypatch.setattr(InFolder, "save", interrupted)
    stops = 0
    capsys.readouterr()
    while (code := run_main("prepare", large, tmp_path / "parts", *arguments)) == 130:
        assert ".parts.prepare stays: run the same command to continue" in capsys.readouterr().err
        assert not (tmp_path / "parts").exists()
        stops += 1
    assert code == 0
    assert stops > 2
    assert folder_bytes(tmp_path / "parts") == folder_bytes(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("free", "what", "absent"), [(10_000, "parsing", "list"), (25_000, "preparing 900", "build")])
def test_a_disk_too_small_is_refused_first(
    large: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free: int,
    what: str,
    absent: str,
) -> None:
    """Fails if a list is parsed, or edges are sorted, before the disk is found to be too small."""
    monkeypatch.setattr("mggcn.graph.build.room.free_bytes", lambda _: free)
    assert run_main("prepare", large, tmp_path / "store", "--memory", "6000") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"mggcn: {what}")
    assert "free some space" in said
    assert not (tmp_path / ".store.prepare" / absent).exists()


def test_the_plan_counts_what_was_parsed(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the folder grows beyond the disk that was planned, as it does if the columns of a text are left out."""
    plans, sizes, columns, save = list[BuildPlan](), list[int](), list[int](), InFolder.save

    def measured(self: InFolder, state: Any) -> None:
        save(self, state)
        sizes.append(sum(file.stat().st_size for file in (tmp_path / ".store.prepare").rglob("*.npy")))

    monkeypatch.setattr(InFolder, "save", measured)
    monkeypatch.setattr("mggcn.cli.building._announce", plans.append)
    monkeypatch.setattr("mggcn.cli.building._announce_columns", lambda _, nbytes: columns.append(nbytes))
    assert run_main("prepare", large, tmp_path / "store", "--memory", "6000") == 0
    assert columns == [pytest.approx(900 * 3 * 8, rel=0.01)]
    assert 0.8 * plans[0].disk < max(sizes) <= plans[0].disk + 16 * HEADER_BYTES


def stopping_at(number: int) -> Callable[[InFolder, Any], None]:
    """Return an `InFolder.save` that is interrupted when it is called so many times."""
    save, calls = InFolder.save, itertools.count(1)

    def interrupted(self: InFolder, state: Any) -> None:
        if next(calls) == number:
            raise KeyboardInterrupt
        save(self, state)

    return interrupted


@pytest.mark.parametrize("change", ["ids in another order", "no ids", "another graph of a part"])
def test_nothing_of_another_job_is_taken_up(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Fails if edges that were sorted with other ids, or of another file of a part, end in the store."""
    rng = np.random.default_rng(20)
    pairs, ids = rng.integers(0, 60, (2, 900, 2), np.int32), rng.permutation(60)
    pairs[0].tofile(tmp_path / "e.i32")
    np.save(tmp_path / "ids.npy", ids)
    np.savez(tmp_path / "a.npz", edge_index=pairs[0].T, y=np.arange(60))
    np.savez(tmp_path / "b.npz", edge_index=pairs[1].T, y=np.arange(60))
    source, more = tmp_path / "e.i32", ["--name", "g", "--memory", "6000", "--ids", tmp_path / "ids.npy"]
    if change == "another graph of a part":
        source, more[4:] = f"train={tmp_path / 'a.npz'}", ["--join", f"test={tmp_path / 'b.npz'}"]
    with monkeypatch.context() as patched:
        patched.setattr(InFolder, "save", stopping_at(4))
        assert run_main("prepare", source, tmp_path / "store", *more) == 130
    if change == "ids in another order":
        np.save(tmp_path / "ids.npy", ids[::-1])
    elif change == "no ids":
        del more[4:]
    else:
        np.savez(tmp_path / "a.npz", edge_index=pairs[1].T, y=np.arange(60))
    for store in ("store", "whole"):
        assert run_main("prepare", source, tmp_path / store, *more) == 0
    assert folder_bytes(tmp_path / "store") == folder_bytes(tmp_path / "whole")


def test_a_mistake_leaves_the_work_of_an_interrupted_prepare(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a typo or a bad file throws away what the right command would go on from, or leaves a folder itself."""
    (tmp_path / "bad.csv").write_text("0,1\n1,x\n")
    store, work = tmp_path / "new" / "store", tmp_path / "new" / ".store.prepare"
    mistakes = ((tmp_path / "larg.csv", "there is no"), (tmp_path / "bad.csv", "line 2"))
    for source, message in mistakes:
        assert message in refused(capsys, "prepare", source, store, "--memory", "6000")
        assert not store.parent.exists()
    with monkeypatch.context() as patched:
        patched.setattr(InFolder, "save", stopping_at(4))
        assert run_main("prepare", large, store, "--memory", "6000") == 130
    left = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    assert work / "list" / "manifest.json" in left
    for source, message in mistakes:
        assert message in refused(capsys, "prepare", source, store)
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == left
    assert run_main("prepare", large, store, "--memory", "6000") == 0
    assert not work.exists()


def test_commands_prepare_a_store_one_at_a_time(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a command works in, or removes, the folder in which another one builds the same store."""
    with beside(tmp_path / "store") as folder:
        (folder / "arrays").mkdir()
        assert "is in use: another process prepares" in refused(capsys, "prepare", large, tmp_path / "store")
        assert "is in use" in refused(capsys, "prepare", tmp_path / "none.txt", tmp_path / "store")
        assert (folder / "arrays").exists()
    assert run_main("prepare", large, tmp_path / "store") == 0


@pytest.mark.parametrize(("change", "goes_on"), [(".trusted.json", True), ("tuned.json", True), ("meta.json", False)])
def test_what_readers_write_into_a_store_is_no_change(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, goes_on: bool
) -> None:
    """Fails if a copy of a store begins anew because reading it left a record there, or goes on with another graph."""
    source, more = tmp_path / "source", ["--symmetrize", "--memory", "6000"]
    assert run_main("prepare", large, source) == 0
    with monkeypatch.context() as patched:
        patched.setattr(InFolder, "save", stopping_at(4))
        assert run_main("prepare", source, tmp_path / "store", *more) == 130
    (source / change).touch()
    load, states = InFolder.load, list[dict[str, Any]]()

    def noted(self: InFolder) -> dict[str, Any]:
        states.append(load(self))
        return states[-1]

    monkeypatch.setattr(InFolder, "load", noted)
    assert run_main("prepare", source, tmp_path / "store", *more) == 0
    assert [bool(state) for state in states] == [goes_on]


@pytest.mark.parametrize("part", ["", "build", "list"])
@pytest.mark.parametrize("target", ["folder", "file", "nothing"])
def test_a_link_in_place_of_the_folder_for_building_is_refused(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, target: str
) -> None:
    """Fails if `prepare` builds where a link leads, leaves something there or removes what lies there."""
    elsewhere, precious = tmp_path / "elsewhere", tmp_path / "elsewhere" / "x"
    if target == "folder":
        elsewhere.mkdir()
        precious.write_text("precious")
    elif target == "file":
        elsewhere.write_text("precious")
    link = tmp_path / f".store.prepare/{part}".rstrip("/")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere)
    assert run_main("prepare", large, tmp_path / "store", "--memory", "6000") == 2
    assert f"mggcn: cannot write {link}: it is a link, expected a folder" in capsys.readouterr().err
    assert (precious if target == "folder" else elsewhere).exists() == (target != "nothing")
    assert not elsewhere.is_dir() or list(elsewhere.iterdir()) == [precious]
    assert not (tmp_path / "store").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz", "x.mtx", "x.mtx.gz", "names.csv"])
def test_reading_a_long_text_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, terminal: bool
) -> None:
    """Fails if a text that takes long is read without a word."""
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(building, "LINE_S", 0.0)
    monkeypatch.setattr("sys.stderr", said := Terminal() if terminal else io.StringIO())
    text = "a b\n" if name == "names.csv" else "1 2\n"
    head = "%%MatrixMarket matrix coordinate pattern general\n2 2 1\n" if ".mtx" in name else ""
    content = (head + text + "\n" * 60_000).encode()
    (path := tmp_path / name).write_bytes(gzip.compress(content, 0) if name.endswith(".gz") else content)
    more = ["--ids", "edges"] if name == "names.csv" else []
    assert run_main("prepare", path, tmp_path / "store", *more) == 0
    assert re.search(rf"(?m)^{'.*' if terminal else ''}reading {re.escape(name)} \d+ %", said.getvalue())
