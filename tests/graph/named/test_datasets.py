"""Data sets by name: a server of the test's own plays the download."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import mggcn
from mggcn.cli.entry import main
from mggcn.errors import GraphError
from mggcn.graph.named import datasets
from mggcn.graph.named.catalogue import DATASETS, Dataset, dataset_named
from mggcn.graph.named.datasets import obtain
from mggcn.graph.store import open_store
from tests.graph.named.test_planetoid import made
from tests.graph.sources.test_ogb import EDGES, SPLIT, N, text_layout, write_table
from tests.planted import plant

SMALL = {"vertices": N, "edges": EDGES.shape[1], "features": 3, "classes": 3}


def archive(folder: Path) -> bytes:
    """Return the zip file of a small data set in OGB's text layout, as if it were ogbn-arxiv's."""
    text_layout(folder / "arxiv")
    for name, ids in SPLIT.items():
        write_table(folder / "arxiv" / "split" / "time" / f"{name}.csv.gz", ids)
    return Path(shutil.make_archive(str(folder / "arxiv"), "zip", folder, "arxiv")).read_bytes()


def heterophilous(**more: Any) -> bytes:
    """Return a small .npz with the keys of the heterophilous graphs."""
    masks = {f"{part}_masks": np.arange(6)[None] % 3 == number for number, part in enumerate(("train", "val", "test"))}
    features, file = np.eye(6, 3, dtype=np.float32), io.BytesIO()
    edges = np.array([[0, 1], [1, 2], [4, 5]])
    np.savez(file, edges=edges, node_features=features, node_labels=np.arange(6) % 2, **masks, **more)
    return file.getvalue()


class Server:
    """Answers a request with the file of that name, else with `content`; announces `announced` bytes; counts requests."""

    def __init__(self) -> None:
        self.content, self.announced, self.status, self.requests = b"", 0, 200, 0
        self.files: dict[str, bytes] = {}
        self.piece, self.slow, self.gone = 0, "", threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests += 1
                content = server.files.get(self.path[1:], server.content)
                self.send_response(server.status)
                if server.announced >= 0:
                    self.send_header("Content-Length", str(server.announced or len(content)))
                self.wait("headers")
                self.end_headers()
                for at in range(0, len(content), server.piece or len(content) or 1):
                    self.wfile.write(content[at : at + (server.piece or len(content))])
                    self.wait("content")

            def wait(self, what: str) -> None:
                """Send nothing for a while, but for headers, of which one follows the other."""
                for _ in range(1000 if server.slow == what == "headers" else 1 if server.slow == what else 0):
                    if server.gone.wait(0.02):
                        raise ConnectionError
                    if what == "headers":
                        self.send_header("X", "y")
                        self.flush_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing is printed."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/{name}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.thread.start()
    yield made
    made.gone.set()
    made.http.shutdown()
    made.thread.join()
    made.http.server_close()


def like(name: str, **changes: Any) -> Dataset:
    """A data set with a published one's name, and files of our own."""
    return replace(DATASETS[name], **{"sha256": (), **changes})


def arxiv(server: Server) -> Dataset:
    return like("ogbn-arxiv", url=server.url("arxiv.zip"), **SMALL)


def minesweeper(server: Server) -> Dataset:
    small = {"vertices": 6, "edges": 3, "features": 3, "classes": 2}
    return like("minesweeper", url=server.url("minesweeper.npz"), **small)


def test_an_archive_becomes_a_store_once(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a download or the text is read twice, something is left beside the store, or the score's name is lost."""
    server.content = archive(tmp_path / "made")
    folder = tmp_path / "data"
    store = obtain(arxiv(server), folder)
    assert obtain(arxiv(server), folder) == store == folder / "ogbn-arxiv"
    assert server.requests == 1
    assert sorted(path.name for path in folder.iterdir()) == ["ogbn-arxiv", "ogbn_arxiv"]
    graph = open_store(store, verify=True)
    assert graph.symmetric
    assert graph.meta["metric"] == "accuracy"
    assert "ODC-BY" in graph.meta["licence"]
    assert len(capsys.readouterr().out.splitlines()) == 2
    shutil.rmtree(store)
    obtain(arxiv(server), folder)  # from the files
    assert server.requests == 1


def test_commands_and_ranks_that_want_the_same_data_set_make_it_once(server: Server, tmp_path: Path) -> None:
    """Fails if two that begin at once download twice, remove each other's files, or one of them ends in an error."""
    server.content = archive(tmp_path / "made")
    other_is_here, told = threading.Event(), list[str]()

    def first(line: str) -> None:
        told.append(line)
        other_is_here.wait(5)

    def second(line: str) -> None:
        told.append(line)
        other_is_here.set()

    folder = tmp_path / "data"
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(obtain, arxiv(server), folder, first)
        while not told:
            time.sleep(0.001)
        two = pool.submit(obtain, arxiv(server), folder, second)
        assert one.result() == two.result() == folder / "ogbn-arxiv"
    assert server.requests == 1
    assert [line.partition(": ")[2].split()[0] for line in told] == ["downloading", "waiting", "making"]
    assert sorted(path.name for path in folder.iterdir()) == ["ogbn-arxiv", "ogbn_arxiv"]


def test_a_single_file(server: Server, tmp_path: Path) -> None:
    """Fails if what is no archive is unpacked, others may not read it, or masks of several splits are mixed up."""
    server.content = heterophilous()
    graph = open_store(obtain(minesweeper(server), tmp_path, lambda _: None))
    (tmp_path / "as the umask says").touch()
    assert (tmp_path / "minesweeper.npz").stat().st_mode == (tmp_path / "as the umask says").stat().st_mode
    assert graph.meta["metric"] == "roc_auc"
    assert np.flatnonzero(graph.splits["val"].read(0, 1)[0]).tolist() == [1, 4]


def test_planetoids_files(server: Server, tmp_path: Path) -> None:
    """Fails if cora is not what its eight files hold."""
    (tmp_path / "made").mkdir()
    made(tmp_path / "made")
    server.files = {f"ind.cora.{path.name[10:]}": path.read_bytes() for path in (tmp_path / "made").iterdir()}
    cora = like("cora", url=server.url(""), vertices=14, edges=8, features=5, classes=3)
    graph = open_store(obtain(cora, tmp_path / "data", lambda _: None))
    assert graph.symmetric
    assert server.requests == 8
    server.status = 404
    with pytest.raises(GraphError, match=r"cannot be downloaded.*ind\.cora\.ty, .*into the folder .*cora_raw"):
        obtain(cora, tmp_path / "other", lambda _: None)
    assert list((tmp_path / "other").iterdir()) == []


def saint(folder: Path, classes: dict[str, Any]) -> bytes:
    """Return the zip file of a small graph in GraphSAINT's files, which lie at its top."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "saint.zip", "w") as made:
        file = io.BytesIO()
        sp.save_npz(file, sp.csr_array(([1.0, 1.0, 1.0], ([0, 1, 4], [1, 0, 2])), shape=(5, 5)))
        made.writestr("adj_full.npz", file.getvalue())
        np.save(file := io.BytesIO(), np.eye(5, 3))
        made.writestr("feats.npy", file.getvalue())
        made.writestr("class_map.json", json.dumps(classes))
        made.writestr("role.json", json.dumps({"tr": [3, 0], "va": [1], "te": [4]}))
    return (folder / "saint.zip").read_bytes()


@pytest.mark.parametrize("name", ["flickr", "yelp"])
def test_graphs_of_graphsaint(server: Server, tmp_path: Path, name: str) -> None:
    """Fails if a class goes to another vertex, an unlisted vertex gets one, or a split takes another's vertices."""
    classes = {"3": 1, "0": 0, "1": 2, "4": 1}
    several = {vertex: [int(label == known) for label in range(3)] for vertex, known in classes.items()}
    server.content = saint(tmp_path / "made", classes if name == "flickr" else several)
    small = {"vertices": 5, "edges": 3, "features": 3, "classes": 3}
    graph = open_store(obtain(like(name, url=server.url("saint.zip"), **small), tmp_path / "data", lambda _: None))
    assert graph.labels is not None
    labels = graph.labels.read(0, 5)
    if name == "yelp":
        assert labels[2].tolist() == [-1, -1, -1]
        labels = np.where(labels[:, 0] < 0, -1, labels.argmax(1))
    assert labels.tolist() == [0, 2, -1, 1, 1]
    assert {part: np.flatnonzero(rows.read(0, 1)[0]).tolist() for part, rows in graph.splits.items()} == {
        "train": [0, 3],
        "val": [1],
        "test": [4],
    }
    assert graph.meta["metric"] == DATASETS[name].metric


def tissues(folder: Path) -> bytes:
    """Return the zip file of three small graphs of 4, 3 and 2 vertices in PPI's files."""
    folder.mkdir()
    listed = {"train": (4, [(0, 1), (1, 0), (2, 3), (2, 2)]), "valid": (3, [(0, 2)]), "test": (2, [(1, 0)])}
    with zipfile.ZipFile(folder / "ppi.zip", "w") as made:
        for name, (count, links) in listed.items():
            graph = {"nodes": [{"id": v} for v in range(count)], "links": [dict(source=u, target=v) for u, v in links]}
            made.writestr(f"{name}_graph.json", json.dumps(graph))
            for what, table in (("feats", np.full((count, 2), count)), ("labels", np.eye(count, 3))):
                np.save(file := io.BytesIO(), table)
                made.writestr(f"{name}_{what}.npy", file.getvalue())
    return (folder / "ppi.zip").read_bytes()


def test_tissues_are_parts_of_one_graph(server: Server, tmp_path: Path) -> None:
    """Fails if an edge crosses from one tissue to another, is counted twice, or features or labels are another's."""
    server.content = tissues(tmp_path / "made")
    small = {"vertices": 9, "edges": 4, "features": 2, "classes": 3}
    dataset = like("ppi", url=server.url("ppi.zip"), **small)
    graph = open_store(obtain(dataset, tmp_path / "data", lambda _: None))
    assert graph.labels is not None
    assert graph.labels.read(0, 9).tolist() == np.concatenate([np.eye(n, 3) for n in (4, 3, 2)]).tolist()
    pointers, neighbours = graph.adj.indptr.read(0, 10), graph.adj.indices.read(0, 8)
    pairs = {(row, int(v)) for row in range(9) for v in neighbours[pointers[row] : pointers[row + 1]]}
    assert pairs == {(0, 1), (1, 0), (2, 3), (3, 2), (4, 6), (6, 4), (7, 8), (8, 7)}
    assert {part: np.flatnonzero(rows.read(0, 1)[0]).tolist() for part, rows in graph.splits.items()} == {
        "train": [0, 1, 2, 3],
        "val": [4, 5, 6],
        "test": [7, 8],
    }


def test_tissues_that_link_others_vertices(server: Server, tmp_path: Path) -> None:
    """Fails if a damaged link joins two tissues in silence."""
    server.content = tissues(tmp_path / "made")
    dataset = like("ppi", url=server.url("ppi.zip"))
    with pytest.raises(GraphError, match="has 56944, 793632, 50 and 121"):
        obtain(dataset, tmp_path / "data", lambda _: None)
    with zipfile.ZipFile(io.BytesIO(server.content)) as archive:
        archive.extractall(tmp_path / "data" / "ppi_raw")
    file = tmp_path / "data" / "ppi_raw" / "test_graph.json"
    file.write_text(json.dumps({"links": [{"source": 0, "target": 5}]}))
    with pytest.raises(GraphError, match=r"does not hold ppi: test_graph\.json links vertices 0 to 5 of 2"):
        obtain(dataset, tmp_path / "data", lambda _: None)


def test_damaged_files_of_graphsaint(server: Server, tmp_path: Path) -> None:
    """Fails if files of another form end in a traceback."""
    server.content = saint(tmp_path / "made", {"0": [1], "1": 2, "9": 0})
    dataset = like("flickr", url=server.url("saint.zip"))
    with pytest.raises(GraphError, match="does not hold flickr"):
        obtain(dataset, tmp_path / "data", lambda _: None)
    assert list((tmp_path / "data").iterdir()) == [], "what was downloaded is refused, and gone"


@pytest.mark.parametrize("name", ["class_map.json", "role.json", "feats.npy", "adj_full.npz"])
@pytest.mark.parametrize("damage", ["FIFO", "device", "folder", "deep", "a list", "not UTF-8"])
def test_files_put_there_by_hand_are_refused_and_stay(tmp_path: Path, name: str, damage: str) -> None:
    """Fails if one of them is waited for, is read without end or ends in a traceback, or is removed."""
    raw = tmp_path / "flickr_raw"
    with zipfile.ZipFile(io.BytesIO(saint(tmp_path / "made", {"0": 1, "1": 2, "9": 0}))) as archive:
        archive.extractall(raw)
    plant(raw / name, damage)
    with pytest.raises(GraphError, match=r"does not hold flickr.*delete .*flickr_raw, and it is downloaded again"):
        obtain(like("flickr", url="http://127.0.0.1:1/"), tmp_path, lambda _: None)
    assert os.path.lexists(raw / name)


@pytest.mark.parametrize("name", ["ogbn-arxiv", "minesweeper", "cora"])
def test_other_bytes_than_the_published(server: Server, tmp_path: Path, name: str) -> None:
    """Fails if files that can be read, but are not those that were published, are trained on."""
    if name == "cora":
        (tmp_path / "made").mkdir()
        made(tmp_path / "made")
        server.files = {f"ind.cora.{path.name[10:]}": path.read_bytes() for path in (tmp_path / "made").iterdir()}
        dataset = like(name, url=server.url(""), vertices=14, edges=8, features=5, classes=3)
        sums = tuple(hashlib.sha256(server.files[part]).hexdigest() for part in dataset.parts)
    else:
        server.content = heterophilous() if name == "minesweeper" else archive(tmp_path / "made")
        dataset = minesweeper(server) if name == "minesweeper" else arxiv(server)
        sums = (hashlib.sha256(server.content).hexdigest(),)
    assert obtain(replace(dataset, sha256=sums), tmp_path / "right", lambda _: None).is_dir()
    wrong = replace(dataset, sha256=(*sums[:-1], "0" * 64))
    with pytest.raises(GraphError, match=f"{name}.*does not match the known hash: expected 0000.* but got {sums[-1]}"):
        obtain(wrong, tmp_path / "wrong", lambda _: None)
    assert list((tmp_path / "wrong").iterdir()) == []
    assert obtain(replace(dataset, sha256=sums), tmp_path / "wrong", lambda _: None).is_dir()
    if name != "ogbn-arxiv":
        shutil.rmtree(tmp_path / "right" / name)
        with pytest.raises(GraphError, match=f"has the SHA-256 {sums[-1]}, the published file 0000.* delete .*{name}"):
            obtain(wrong, tmp_path / "right", lambda _: None)
        assert len(list((tmp_path / "right").iterdir())) == 1, "what lay there stays"


def test_sums_are_of_every_file() -> None:
    """Fails if a data set lost its sums, or has them for some of its files."""
    counts = {name: len(dataset.sha256) for name, dataset in DATASETS.items()}
    assert {name for name, count in counts.items() if not count} == {"ogbn-papers100M", "flickr", "yelp"}
    assert all(counts[name] in (0, max(len(dataset.parts), 1)) for name, dataset in DATASETS.items())
    every = [text for dataset in DATASETS.values() for text in dataset.sha256]
    assert len(set(every)) == len(every)
    assert all(len(text) == 64 and set(text) <= set("0123456789abcdef") for text in every)


@pytest.mark.parametrize("answer", ["cut", "announced more", "no zip", "other folder", "404"])
def test_half_an_answer_is_none(server: Server, tmp_path: Path, answer: str) -> None:
    """Fails if something stays of a download that broke off, or a second try does not begin anew."""
    whole = server.content = archive(tmp_path / "made")
    if answer == "cut":
        server.content = whole[:-40]
    elif answer == "announced more":
        server.announced = len(whole) + 10
    elif answer == "no zip":
        server.content = b"<html>moved</html>"
    elif answer == "other folder":
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as other:
            other.writestr("elsewhere/x", "")
        server.content = file.getvalue()
    else:
        server.status = 404
    folder = tmp_path / "data"
    with pytest.raises(
        GraphError, match=r"cannot be downloaded.*unpack it so that its arxiv is the folder .*ogbn_arxiv"
    ):
        obtain(arxiv(server), folder)
    assert list(folder.iterdir()) == []
    server.content, server.announced, server.status = whole, 0, 200
    assert obtain(arxiv(server), folder).is_dir()


def test_another_graph_is_refused(server: Server, tmp_path: Path) -> None:
    """Fails if the wrong file is taken for the data set."""
    server.content = archive(tmp_path / "made")
    with pytest.raises(
        GraphError, match=r"holds 9 vertices, 6 edges, 3 features and 3 classes, but ogbn-arxiv has 169343"
    ):
        obtain(like("ogbn-arxiv", url=server.url("arxiv.zip")), tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("name", ["ogbn-arxiv", "minesweeper"])
def test_an_answer_without_a_length_has_a_bound(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Fails if a server fills the disk, or an archive that unpacks to more than a data set has is unpacked."""
    monkeypatch.setattr(datasets, "_most_bytes", lambda _: 1 << 20)
    dataset = minesweeper(server) if name == "minesweeper" else arxiv(server)
    if name == "minesweeper":
        server.content, server.announced = bytes(3 << 20), -1
    else:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bomb:
            bomb.writestr("arxiv/raw/edge.csv.gz", bytes(3 << 20))
        server.content = file.getvalue()
    with pytest.raises(GraphError, match=r"sends more than 1048576 bytes|unpacks to 3145728 bytes, expected at most"):
        obtain(dataset, tmp_path / "data", lambda _: None)
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "FIFO"])
@pytest.mark.parametrize("name", [".minesweeper.npz.part", ".minesweeper.lock"])
def test_what_lies_in_wait_of_a_download_is_not_written(server: Server, tmp_path: Path, name: str, kind: str) -> None:
    """Fails if a download follows a link, or waits for a FIFO, at a name that was known before."""
    (victim := tmp_path / "victim").write_text("precious")
    (folder := tmp_path / "data").mkdir()
    plant(folder / name, f"link to {victim}" if kind == "link" else kind)
    server.content = heterophilous()
    assert obtain(minesweeper(server), folder, lambda _: None).is_dir()
    assert victim.read_text() == "precious"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("slow", ["content", "content without length", "headers"])
@pytest.mark.parametrize("name", ["ogbn-arxiv", "minesweeper"])
def test_a_server_that_sends_a_byte_now_and_then_is_given_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, slow: str
) -> None:
    """Fails if a transfer has no end because every single read has one."""
    monkeypatch.setattr(datasets, "SLOW_S", 0.3)
    server.content, server.piece, server.slow = bytes(1 << 16), 1, slow.split()[0]
    server.announced = -1 if "without" in slow else 0
    began = time.monotonic()
    with pytest.raises(GraphError, match=r"the server sent \d+ bytes in 0.3 s, expected at least 65536.*elsewhere"):
        obtain(minesweeper(server) if name == "minesweeper" else arxiv(server), tmp_path / "data", lambda _: None)
    assert time.monotonic() - began < 5.0
    assert list((tmp_path / "data").iterdir()) == []


def test_a_slow_server_that_sends_enough_is_waited_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a transfer is given up that takes many times the period, but makes progress in each."""
    monkeypatch.setattr(datasets, "SLOW_S", 0.15)
    monkeypatch.setattr(datasets, "SLOW_BYTES", 20)
    server.content, server.slow = heterophilous(nothing=np.zeros(30 * datasets.CHUNK, np.int8)), "content"
    server.piece = max(1, len(server.content) // 30)
    assert obtain(minesweeper(server), tmp_path / "data", lambda _: None).is_dir()


def test_every_data_set_fits_its_bound() -> None:
    """Fails if a published file is larger than what is taken from a server: numbers of features as text."""
    for dataset in DATASETS.values():
        assert datasets._most_bytes(dataset) > 12 * dataset.vertices * dataset.features + 16 * dataset.edges


def test_the_command_offline_then_with_the_files(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the line that a user without a network gets does not lead to a run."""
    monkeypatch.setenv("MGGCN_DATA", str(tmp_path))
    monkeypatch.setattr(datasets, "TIMEOUT_S", 1.0)
    server.content = heterophilous()
    offline = replace(minesweeper(server), url="http://127.0.0.1:9/minesweeper.npz")
    monkeypatch.setitem(DATASETS, "minesweeper", offline)
    command = ["train", "minesweeper", "--epochs", "2", "--threads", "1", "--out", str(tmp_path / "run")]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    place = told.split("put it as ")[1].strip()
    Path(place).write_bytes(server.content)
    assert main(command) == 0
    assert "roc_auc" in capsys.readouterr().out
    assert main(["datasets"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in DATASETS)
    assert next(line for line in listed.splitlines() if "minesweeper" in line).endswith("store")
    assert main(["datasets", "no-such"]) == 2


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Cora", "cora"),
        ("CiteSeer", "citeseer"),
        ("PubMed", "pubmed"),
        ("ogbn_arxiv", "ogbn-arxiv"),
        ("ogbn-papers100m", "ogbn-papers100M"),
        ("Roman-empire", "roman_empire"),
        ("Amazon-ratings", "amazon_ratings"),
        ("Reddit", "reddit"),
        ("PPI", "ppi"),
        ("cora_ml", None),
        ("reddit2", None),
        ("", None),
    ],
)
def test_names_as_others_spell_them(name: str, known: str | None) -> None:
    """Fails if a spelling of PyG's or OGB's finds no data set, or another one."""
    dataset = dataset_named(name)
    assert (None if dataset is None else dataset.name) == known


def test_no_two_data_sets_share_a_spelling() -> None:
    """Fails if a data set hides another whose name differs by case, hyphen or underscore alone."""
    assert [dataset_named(name) for name in DATASETS] == list(DATASETS.values())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("Computers", 'Amazon(root, "Computers")'),
        ("Amazon-Photo", 'Amazon(root, "Photo")'),
        ("coauthor_cs", 'Coauthor(root, "CS")'),
        ("Texas", 'WebKB(root, "Texas")'),
        ("WikiCS", "WikiCS(root)"),
    ],
)
def test_a_data_set_of_pyg_alone_is_named(
    name: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the message does not say how PyG loads what has no name here."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GraphError, match=re.escape(f"mggcn.load(torch_geometric.datasets.{call}[0])")):
        mggcn.load(name)
    kind, *arguments = call.removesuffix(")").split("(")
    made = getattr(pytest.importorskip("torch_geometric.datasets"), kind)
    assert ("name" in inspect.signature(made).parameters) == ('"' in arguments[0])


def test_a_store_is_found_by_another_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if mggcn.load("Cora") does not open the store of cora, or goes before a path of that name."""
    monkeypatch.chdir(tmp_path)
    mggcn.save(mggcn.load(EDGES), tmp_path / "data" / "cora")
    assert mggcn.load("Cora", root="data").num_edges == mggcn.load("data/cora").num_edges
    mggcn.save(mggcn.load(EDGES[:, :1]), tmp_path / "Cora")
    assert mggcn.load("Cora", root="data").num_edges == 1
