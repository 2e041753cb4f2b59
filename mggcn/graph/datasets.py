"""Data sets by name: what is known of each, where its files come from, and the store that is made of them.

Everything lies in one folder: archives as published, and a store beside them, made when a name is first used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from mggcn.errors import GraphError
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import Graph
from mggcn.graph.edges import Edges
from mggcn.graph.ogb import read_ogb
from mggcn.graph.options import GraphOptions
from mggcn.graph.planetoid import PARTS, read_planetoid
from mggcn.graph.published import read_graphsaint, read_heterophilous, read_ppi, read_reddit
from mggcn.graph.room import Room, beside, fingerprint
from mggcn.graph.store import is_store
from mggcn.graph.store_write import write_store

BLOCK = 1 << 20
TIMEOUT_S = 30.0
MEMORY = 1 << 30
"""Bytes for sorting edges, as `mggcn prepare` takes; what goes beyond lies in files beside the store."""
Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """A published graph. files: its path in the data folder once it is unpacked; inside: in the archive.

    parts: names behind `url` of the files of a folder, where there is no archive.

    vertices, edges, features, classes: as published, edges before they are symmetrised; `metric` is the published score.
    """

    name: str
    url: str
    files: str
    inside: str = ""
    parts: tuple[str, ...] = ()
    vertices: int
    edges: int
    features: int
    classes: int
    metric: str = "accuracy"
    licence: str
    source: str
    read: Callable[[Path, Room], dict[str, Any]]


def _saint(name: str, vertices: int, edges: int, features: int, classes: int, metric: str) -> Dataset:
    return Dataset(
        name=name,
        url=f"https://data.dgl.ai/dataset/{name}.zip",
        files=f"{name}_raw",
        vertices=vertices,
        edges=edges,
        features=features,
        classes=classes,
        metric=metric,
        licence="not stated",
        source="Zeng et al. 2020",
        read=read_graphsaint,
    )


def _ogb(name: str, archive: str, vertices: int, edges: int, features: int, classes: int) -> Dataset:
    return Dataset(
        name=name,
        url=f"https://snap.stanford.edu/ogb/data/nodeproppred/{archive}.zip",
        files=name.replace("-", "_"),
        inside=archive,
        vertices=vertices,
        edges=edges,
        features=features,
        classes=classes,
        licence="Amazon" if name == "ogbn-products" else "ODC-BY",
        source="Hu et al. 2020",
        read=read_ogb,
    )


def _heterophily(
    name: str, vertices: int, edges: int, features: int, classes: int, metric: str = "accuracy"
) -> Dataset:
    commit = "a431395582e929d88271309716bea4fe24ce6318"
    return Dataset(
        name=name,
        url=f"https://raw.githubusercontent.com/yandex-research/heterophilous-graphs/{commit}/data/{name}.npz",
        files=f"{name}.npz",
        vertices=vertices,
        edges=edges,
        features=features,
        classes=classes,
        metric=metric,
        licence="MIT",
        source="Platonov et al. 2023",
        read=read_heterophilous,
    )


def _planetoid(name: str, vertices: int, edges: int, features: int, classes: int) -> Dataset:
    commit = "af6abf468a772cc055bec88c52e4d6f51b7c37e3"
    return Dataset(
        name=name,
        url=f"https://raw.githubusercontent.com/kimiyoung/planetoid/{commit}/data/",
        files=f"{name}_raw",
        parts=tuple(f"ind.{name}.{part}" for part in PARTS),
        vertices=vertices,
        edges=edges,
        features=features,
        classes=classes,
        licence="MIT",
        source="Yang et al. 2016",
        read=lambda folder, _: read_planetoid(folder),
    )


_ALL = (
    _planetoid("cora", 2_708, 10_556, 1_433, 7),
    _planetoid("citeseer", 3_327, 9_104, 3_703, 6),
    _planetoid("pubmed", 19_717, 88_648, 500, 3),
    _ogb("ogbn-arxiv", "arxiv", 169_343, 1_166_243, 128, 40),
    _ogb("ogbn-products", "products", 2_449_029, 61_859_140, 100, 47),
    _ogb("ogbn-papers100M", "papers100M-bin", 111_059_956, 1_615_685_872, 128, 172),
    Dataset(
        name="reddit",
        url="https://data.dgl.ai/dataset/reddit.zip",
        files="reddit_raw",
        vertices=232_965,
        edges=114_615_892,
        features=602,
        classes=41,
        licence="not stated",
        source="Hamilton et al. 2017",
        read=read_reddit,
    ),
    _saint("flickr", 89_250, 899_756, 500, 7, "accuracy"),
    Dataset(
        name="ppi",
        url="https://data.dgl.ai/dataset/ppi.zip",
        files="ppi_raw",
        vertices=56_944,
        edges=793_632,
        features=50,
        classes=121,
        metric="micro_f1",
        licence="not stated",
        source="Zitnik & Leskovec 2017",
        read=read_ppi,
    ),
    _saint("yelp", 716_847, 13_954_819, 300, 100, "micro_f1"),
    _heterophily("roman_empire", 22_662, 32_927, 300, 18),
    _heterophily("amazon_ratings", 24_492, 93_050, 300, 5),
    _heterophily("minesweeper", 10_000, 39_402, 7, 2, "roc_auc"),
    _heterophily("tolokers", 11_758, 519_000, 10, 2, "roc_auc"),
    _heterophily("questions", 48_921, 153_540, 301, 2, "roc_auc"),
)
DATASETS: Final = {dataset.name: dataset for dataset in _ALL}


def data_folder(root: str | Path | None = None) -> Path:
    """Return the folder of named data sets: `root`, else $MGGCN_DATA, else mggcn in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root or os.environ.get("MGGCN_DATA") or Path(cache) / "mggcn")


def obtain(dataset: Dataset, folder: Path, say: Say = print) -> Path:
    """Return the store of a data set in `folder`: made from its files, which are downloaded if they are not there.

    Of several commands, or ranks of torchrun, that want it at once, one makes it and the others wait.
    Cost: a download, once; then as `mggcn prepare` of the files, once. Raises: GraphError for what cannot be downloaded,
    which says what to put where, and for files of another graph than the published one; StoreError for an unwritable store.
    """
    store, files = folder / dataset.name, folder / dataset.files
    if is_store(store):
        return store
    with _alone(folder / f".{dataset.name}.lock", lambda: say(f"{dataset.name}: waiting for another that makes it")):
        if is_store(store):
            return store
        if not files.exists():
            _download(dataset, files, say)
        say(f"{dataset.name}: making the store {store}, once")
        with beside(store) as work:
            room = Room(work, MEMORY, {"files": fingerprint(files)})
            write_store(_read(dataset, files, room), store)
    return store


@contextlib.contextmanager
def _alone(path: Path, waits: Callable[[], object]) -> Iterator[None]:
    """Let one command, or rank of torchrun, in at a time; `path`, the lock, is gone at the end.

    In folders that cannot be written, and on file systems without locks, all go on.
    """
    lock = None
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(path, waits)
    try:
        yield
    finally:
        if lock is not None:
            path.unlink(missing_ok=True)
            os.close(lock)


def _locked(path: Path, waits: Callable[[], object]) -> int:
    """Return the descriptor of a file that is locked and still there. Raises: OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed it, so that it keeps nobody out


def _read(dataset: Dataset, files: Path, room: Room) -> Graph:
    again = f"delete {files}, and it is downloaded again"
    try:
        found = dataset.read(files, room)
    except (
        OSError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        AttributeError,
        zipfile.BadZipFile,
    ) as error:
        raise GraphError(f"{files} does not hold {dataset.name}: {error}; {again}") from error
    edges = found.get("edges")
    listed = edges.count if isinstance(edges, Edges) else int(found["adj"].nnz if edges is None else edges.shape[1])
    meta = {"metric": dataset.metric, "licence": dataset.licence, "source": f"{dataset.source}, {dataset.url}"}
    graph = from_arrays(**found, options=GraphOptions(symmetrize=True), name=dataset.name, meta=meta, room=room)
    came = (graph.num_vertices, listed, graph.num_features, graph.num_classes)
    published = (dataset.vertices, dataset.edges, dataset.features, dataset.classes)
    if came != published:
        raise GraphError(
            f"{files} holds {came[0]} vertices, {came[1]} edges, {came[2]} features and {came[3]} classes, but "
            f"{dataset.name} has {published[0]}, {published[1]}, {published[2]} and {published[3]}; {again}"
        )
    return replace(graph, name=dataset.name)


def _download(dataset: Dataset, files: Path, say: Say) -> None:
    """Fetch and unpack an archive, or all files of a folder, beside its place, then move it there: complete or absent."""
    part = files.with_name(f".{files.name}.part")
    unpacked = files.with_name(f".{files.name}.unpacked")
    try:
        files.parent.mkdir(parents=True, exist_ok=True)
        say(f"{dataset.name}: downloading {dataset.url}")
        shutil.rmtree(unpacked, ignore_errors=True)
        if dataset.parts:
            unpacked.mkdir()
            for name in dataset.parts:
                _fetch(dataset.url + name, unpacked / name)
            unpacked.rename(files)
        else:
            _fetch(dataset.url, part)
            if dataset.url.endswith(".zip"):
                with zipfile.ZipFile(part) as archive:
                    archive.extractall(unpacked)  # compares every file's checksum; names cannot lead elsewhere
                (unpacked / dataset.inside).rename(files)
            else:
                part.rename(files)
    except (OSError, ValueError, HTTPException, zipfile.BadZipFile) as error:
        reason = getattr(error, "reason", None) or error
        raise GraphError(
            f"{dataset.name} is not in {files.parent} and cannot be downloaded ({reason}); {_by_hand(dataset, files)}"
        ) from error
    finally:
        part.unlink(missing_ok=True)
        shutil.rmtree(unpacked, ignore_errors=True)


def _by_hand(dataset: Dataset, files: Path) -> str:
    """Return which files to fetch elsewhere, and where to put them."""
    if dataset.parts:
        return f"fetch from {dataset.url} elsewhere {', '.join(dataset.parts)}, and put them into the folder {files}"
    if dataset.url.endswith(".zip"):
        inside = dataset.inside or "files"
        return f"fetch {dataset.url} elsewhere and unpack it so that its {inside} is the folder {files}"
    return f"fetch {dataset.url} elsewhere and put it as {files}"


def _fetch(url: str, path: Path) -> None:
    """Write what a server sends to a file. Raises: OSError if it breaks off or does not fit the disk."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, path.open("wb") as file:
        size = int(answer.headers.get("Content-Length") or 0)
        free = shutil.disk_usage(path.parent).free
        if size > free:
            raise OSError(f"{size} bytes do not fit the {free} that are free in {path.parent}")
        got = 0
        while block := answer.read(BLOCK):
            file.write(block)
            got += len(block)
    if size and got != size:
        raise OSError(f"the server sent {got} of {size} bytes")
