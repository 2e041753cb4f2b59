"""Data sets by name: their files, downloaded where they are not there, and the store that is made of them.

Everything lies in one folder: archives as published, and a store beside them, made when a name is first used.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import os
import shutil
import ssl
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import final

from mggcn.errors import GraphError, MggcnError, shown
from mggcn.files import open_file, reason
from mggcn.graph.build.room import Room, beside, fingerprint
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import Graph
from mggcn.graph.durable import alone
from mggcn.graph.edges import Edges
from mggcn.graph.named.catalogue import Dataset
from mggcn.graph.options import GraphOptions
from mggcn.graph.store import is_store
from mggcn.graph.store_write import write_store
from mggcn.host import user_cache

CHUNK = 1 << 14
TIMEOUT_S = 30.0
SLOW_S, SLOW_BYTES = 60.0, 1 << 16
"""Seconds of a transfer in which so many bytes must come: a server that sends one now and then meets every timeout."""
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
    lock = folder / f".{dataset.name}.lock"
    with alone(lock, lambda: say(f"{dataset.name}: waiting for another process that makes it")):
        if is_store(store):
            return store
        if fetched := not os.path.lexists(files):
            _download(dataset, files, say)
        say(f"{dataset.name}: making the store {store}, once")
        with beside(store) as work, _gone_if_refused(files if fetched else None):
            room = Room(work, MEMORY, {"files": fingerprint(files)})
            write_store(_read(dataset, files, room, fetched), store)
    return store


@contextlib.contextmanager
def _gone_if_refused(files: Path | None) -> Iterator[None]:
    """Remove files that were just downloaded if they hold another graph: the next command asks for them again."""
    try:
        yield
    except GraphError:
        if files is not None:
            shutil.rmtree(files) if files.is_dir() else files.unlink()
        raise


def _read(dataset: Dataset, files: Path, room: Room, fetched: bool) -> Graph:
    again = "what was downloaded is removed" if fetched else f"delete {files}, and it is downloaded again"
    try:
        if not dataset.url.endswith(".zip"):
            for name, sha256 in zip(dataset.parts or ("",), dataset.sha256, strict=False):
                with open_file(files / name) as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != sha256:
                    raise ValueError(f"{name or files.name} has the SHA-256 {digest}, the published file {sha256}")
        found = dataset.read(files, room)
    except (MggcnError, MemoryError):
        raise
    except Exception as error:  # a hostile header, archive or pickle raises nearly anything
        where = getattr(error, "filename", None)
        why = f"{Path(where).name}: {reason(error)}" if isinstance(where, str) else reason(error)
        raise GraphError(f"{files} does not hold {dataset.name}: {why}; {again}") from error
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
    beginning, most = f".{files.name}.part-", _most_bytes(dataset)
    try:
        files.parent.mkdir(parents=True, exist_ok=True)
        for left in files.parent.glob(f"{glob.escape(beginning)}*"):  # by a command that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=beginning, dir=files.parent, ignore_cleanup_errors=True) as work:
            say(f"{dataset.name}: downloading {dataset.url}")
            (new := Path(work) / "new").mkdir()
            for name, sha256 in itertools.zip_longest(dataset.parts or ("",), dataset.sha256):
                _fetch(dataset.url + name, new / (name or files.name), most, sha256)
            if dataset.url.endswith(".zip"):
                new = _unpack(new / files.name, Path(work) / "unpacked", most) / dataset.inside
            elif not dataset.parts:
                new /= files.name
            new.rename(files)
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise GraphError(
            f"{dataset.name} is not in {files.parent} and cannot be downloaded ({error}); {_by_hand(dataset, files)}"
        ) from error


def _most_bytes(dataset: Dataset) -> int:
    """Return the bytes that no file, or all that an archive unpacks to, can have: 32 for each number, as text or not."""
    numbers = dataset.vertices * (dataset.features + dataset.classes + 16) + 4 * dataset.edges
    return (64 << 20) + 32 * numbers


def _unpack(archive: Path, folder: Path, most: int) -> Path:
    """Unpack a zip file. Raises: OSError if that takes too many bytes; ValueError, BadZipFile for a damaged one."""
    with zipfile.ZipFile(archive) as packed:
        size, free = sum(info.file_size for info in packed.infolist()), shutil.disk_usage(archive.parent).free
        if size > min(most, free):
            raise OSError(f"it unpacks to {size} bytes, expected at most {most}, and {free} are free")
        packed.extractall(folder)  # compares every file's checksum; names cannot lead elsewhere
    return folder


def _by_hand(dataset: Dataset, files: Path) -> str:
    """Return which files to fetch elsewhere, and where to put them."""
    if dataset.parts:
        return f"fetch from {dataset.url} elsewhere {', '.join(dataset.parts)}, and put them into the folder {files}"
    if dataset.url.endswith(".zip"):
        inside = dataset.inside or "files"
        return f"fetch {dataset.url} elsewhere and unpack it so that its {inside} is the folder {files}"
    return f"fetch {dataset.url} elsewhere and put it as {files}"


def _fetch(url: str, path: Path, most: int, sha256: str | None) -> None:
    """Write what a server sends to a new file.

    Raises: OSError if it breaks off, is slow, is more than `most` bytes, does not fit the disk or has another SHA-256.
    """
    import pooch

    pooch.get_logger().setLevel("ERROR")
    bound, received = _Bound(min(most, shutil.disk_usage(path.parent).free)), Future[object]()
    trusted = ssl.get_default_verify_paths()

    def receive() -> None:
        try:
            # Certificates are those that Python trusts by itself, not those that come with requests.
            downloader = pooch.HTTPDownloader(bound, CHUNK, timeout=TIMEOUT_S, verify=trusted.cafile or trusted.capath)
            received.set_result(pooch.retrieve(url, sha256, path.name, path.parent, downloader=downloader))
        except Exception as error:  # whatever ends a transfer, in pooch, requests or urllib3, is its caller's to tell
            received.set_exception(OSError(_root(error)))

    # A thread of its own, which may be left behind: requests has no bound on the whole duration of a transfer.
    threading.Thread(target=receive, daemon=True).start()
    before = 0
    try:
        while not wait([received], SLOW_S).done:
            if bound.got < before + SLOW_BYTES and not bound.complete:
                raise OSError(
                    f"the server sent {bound.got - before} bytes in {SLOW_S:g} s, expected at least {SLOW_BYTES}"
                )
            before = bound.got
        received.result()
    finally:
        bound.most = -1
    path.chmod(path.parent.stat().st_mode & 0o666)  # pooch's own is for its owner alone


def _root(error: BaseException) -> str:
    """Say what an error came from: those above name objects of requests."""
    while deeper := error.__cause__ or error.__context__:
        error = deeper
    return str(error)


@final
class _Bound:
    """Hears of a transfer as a progress bar of pooch's, and ends one of more than `most` bytes."""

    def __init__(self, most: int) -> None:
        self.most, self.got, self.total, self.complete = most, 0, 0, False

    def update(self, nbytes: int) -> None:
        self.got += nbytes
        if max(self.got, self.total) > self.most:
            raise OSError(
                f"the server sends more than {self.most} bytes, the free space or the most that these files can have"
            )

    def reset(self) -> None:
        self.got, self.complete = 0, True

    def close(self) -> None:
        """Nothing is drawn."""
