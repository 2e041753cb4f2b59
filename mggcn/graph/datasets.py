"""Data sets by name: their files, downloaded where they are not there, and the store that is made of them.

Everything lies in one folder: archives as published, and a store beside them, made when a name is first used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path

from mggcn.errors import GraphError, shown
from mggcn.graph.catalogue import Dataset
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import Graph
from mggcn.graph.edges import Edges
from mggcn.graph.options import GraphOptions
from mggcn.graph.room import Room, beside, fingerprint
from mggcn.graph.store import is_store
from mggcn.graph.store_write import write_store
from mggcn.host import user_cache

BLOCK = 1 << 20
TIMEOUT_S = 30.0
MEMORY = 1 << 30
"""Bytes for sorting edges, as `mggcn prepare` takes; what goes beyond lies in files beside the store."""
Say = Callable[[str], object]


def _print(text: str) -> None:
    print(shown(text))


def data_folder(root: str | Path | None = None) -> Path:
    """Return the folder of named data sets: `root`, else $MGGCN_DATA, else mggcn in the user's cache."""
    return Path(root or os.environ.get("MGGCN_DATA") or user_cache())


def obtain(dataset: Dataset, folder: Path, say: Say = _print) -> Path:
    """Return the store of a data set in `folder`: made from its files, which are downloaded if they are not there.

    Of several commands, or ranks of torchrun, that want it at once, one makes it and the others wait.
    Cost: a download, once; then as `mggcn prepare` of the files, once. Raises: GraphError for what cannot be downloaded,
    which says what to put where, and for files of another graph, or other bytes, than were published; StoreError for
    an unwritable store.
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
        if not dataset.url.endswith(".zip"):
            for name, sha256 in zip(dataset.parts or ("",), dataset.sha256, strict=False):
                _check_published(files / name, sha256)
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
    if len(found.get("class_names", ())) not in (0, dataset.classes):
        del found["class_names"]
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
                for sha256 in dataset.sha256:
                    _check_published(part, sha256)
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


def _check_published(path: Path, sha256: str) -> None:
    """Read a file once. Raises: ValueError if it is not the one that was published."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path.name.lstrip('.')} has the SHA-256 {found}, the published file {sha256}")


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
