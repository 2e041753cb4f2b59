"""Hundreds of bad inputs, by what they are given to: each ends with exit code 2 in one line, and writes nothing.

Each takes at most 1 GiB beyond what the process held before, and at most ten seconds.

Stores with files of others, files of settings and of edges, arrays, archives, run folders, arguments. A case is
a command and what is done to sound inputs before; the fast suite draws a tenth of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.cli import entry as cli
from tests.graphs import make_graph, pattern

N = 40
Case = tuple[list[str], Callable[[Path], None]]
"""Arguments, in which {here} is the folder of the inputs, and what is done to the inputs before."""


def nothing(_: Path) -> None:
    pass


def saved(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), version=version)
    return file.getvalue()


def headed(header: str, data: bytes = b"\0" * 320) -> bytes:
    """An .npy file with the text of a header."""
    padded = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + data


HEADERS = {
    "bomb": headed("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,)}"),
    "overflow": headed("{'descr': '<i8', 'fortran_order': False, 'shape': (2305843009213694052,)}"),
    "negative": headed("{'descr': '<i8', 'fortran_order': False, 'shape': (-40,)}"),
    "power": headed("{'descr': '<i8', 'fortran_order': False, 'shape': (10**9999999,)}"),
    "call": headed("{'descr': exit(), 'fortran_order': False, 'shape': (40,)}"),
    "type": headed("{'descr': '<q9', 'fortran_order': False, 'shape': (40,)}"),
    "long": headed("{'descr': '<i8', 'fortran_order': False, 'shape': (40,)}" + "\n" * 60_000),
    "no key": headed("{'descr': '<i8', 'shape': (40,)}"),
    "Python 2": headed("{'descr': '<i8', 'fortran_order': False, 'shape': (41L,)}"),
    "nested": headed("(" * 2000 + ")" * 2000),
    "no text": b"\x93NUMPY\x01\x00\x40\x00" + bytes(range(128, 192)),
    "magic alone": b"\x93NUMPY",
    "third version": b"\x93NUMPY\x03" + saved(np.zeros(40))[7:],
    "empty": b"",
    "text": b"0 1\n1 2\n",
    "cut": saved(np.zeros(40))[:-3],
    "more": saved(np.zeros(40)) + b"\0",
    "pickled": b"\x93NUMPY\x01\x00" + saved(np.array([{}], object))[8:],
    "structured": saved(np.zeros(40, dtype=[("a", "i4")])),
    "by columns": saved(np.asfortranarray(np.ones((40, 3)))),
    "scalar": saved(3.0),
    "text array": saved(np.array(["a"] * 40)),
    "complex": saved(np.zeros(40, complex)),
    "dates": saved(np.zeros(40, "M8[s]")),
    "big endian": saved(np.zeros(40, ">i8")),
    "cube": saved(np.zeros((40, 2, 2))),
}
"""Arrays that nothing takes, for any file of a store or companion of a source; the number of vertices is 40."""
OWN_ARRAYS = ("indptr", "indices", "features", "labels", "train", "val")
NOT_WRONG = {("labels", "scalar")}


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda here: void((here / name).write_bytes(content))


def void(_: object) -> None:
    pass


def store_cases() -> Iterator[tuple[str, Case]]:
    """Every header in place of every array of a store with checksums, and of one that somebody else made."""
    train = ["train", "{here}/graph", "--epochs", "1"]
    for name in OWN_ARRAYS:
        for kind, content in HEADERS.items():
            yield f"store {name} {kind}", (train, write(f"graph/{name}.npy", content))
        yield f"store {name} missing", (train, lambda here, name=name: (here / f"graph/{name}.npy").unlink())
        yield (
            f"store {name} is a folder",
            (train, lambda here, name=name: replace_by_folder(here / f"graph/{name}.npy")),
        )
        yield f"store {name} is a FIFO", (train, lambda here, name=name: replace_by_fifo(here / f"graph/{name}.npy"))
        yield f"store {name} is endless", (train, lambda here, name=name: replace_by_zero(here / f"graph/{name}.npy"))
    for kind, content in HEADERS.items():
        for name in ("indptr", "indices", "labels"):
            if (name, kind) not in NOT_WRONG:
                verify = ["store", "verify", "{here}/foreign"]
                yield f"foreign {name} {kind}", (verify, write(f"foreign/{name}.npy", content))
    for kind, edit in META.items():
        yield f"meta.json {kind}", (train, edit)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_zero(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def edited(**changes: Any) -> Callable[[Path], None]:
    """Change entries of meta.json as somebody does who knows of its digest."""

    def edit(here: Path) -> None:
        path = here / "graph" / "meta.json"
        meta = json.loads(path.read_text()) | changes
        del meta["meta_sha256"]
        path.write_text(json.dumps(meta))

    return edit


def meta_text(content: bytes) -> Callable[[Path], None]:
    return write("graph/meta.json", content)


META: dict[str, Callable[[Path], None]] = {
    "missing": lambda here: (here / "graph/meta.json").unlink(),
    "folder": lambda here: replace_by_folder(here / "graph/meta.json"),
    "FIFO": lambda here: replace_by_fifo(here / "graph/meta.json"),
    "endless": lambda here: replace_by_zero(here / "graph/meta.json"),
    "empty": meta_text(b""),
    "list": meta_text(b"[]"),
    "number": meta_text(b"7"),
    "deep": meta_text(b"[" * 100_000),
    "no text": meta_text(b"\xff\xfe\xfd"),
    "cut": meta_text(b'{"format_version": 1, "sha256": {'),
    "newer": edited(format_version=2),
    "version as text": edited(format_version="1"),
    "no digests": edited(sha256=None),
    "digests as list": edited(sha256=["indptr.npy", "indices.npy"]),
    "short digests": edited(sha256={"indptr.npy": "00", "indices.npy": "11"}),
    "digests that are numbers": edited(sha256={"indptr.npy": 1, "indices.npy": 2}),
    "path as name": edited(sha256={"indptr.npy": "0" * 64, "../../etc/x.npy": "0" * 64}),
    "directed": edited(symmetric=False),
    "other count": edited(num_edges=9),
    "classes as text": edited(num_classes="three"),
    "negative classes": edited(num_classes=-1),
    "too few classes": edited(num_classes=1),
    "width as text": edited(num_vertices="forty"),
    "blocks as text": edited(blocks="x"),
    "blocks as list": edited(blocks=[1]),
    "other task": edited(task="numbers"),
    "changed": lambda here: void(
        (here / "graph/meta.json").write_text((here / "graph/meta.json").read_text().replace("licence", "license"))
    ),
}

TOML: dict[str, bytes] = {
    "empty key": b"=1",
    "no text": b"\xff\xfe",
    "NUL": b"[train]\nlr = 0.1\0",
    "unknown table": b"[trian]\nlr = 1",
    "unknown key": b"[train]\nlrr = 1",
    "table as value": b"train = 3",
    "value as table": b"[train.lr]\na = 1",
    "twice": b"[train]\nlr = 1\nlr = 2",
    "deep list": b"x = " + b"[" * 5000 + b"]" * 5000,
    "deep table": b"x = " + b"{a = " * 5000 + b"}" * 5000,
    "long": b"#" * (2 << 20),
    "text as number": b'[train]\nlr = "fast"',
    "infinite": b"[train]\nlr = inf",
    "not a number": b"[train]\nlr = nan",
    "negative": b"[train]\nepochs = -1",
    "half": b"[train]\nepochs = 1.5",
    "truth": b"[train]\nepochs = true",
    "date": b"[train]\nlr = 2026-01-01",
    "list as number": b"[train]\nlr = [0.1]",
    "text as widths": b'[model]\nhidden = ["a"]',
    "zero width": b"[model]\nhidden = [0]",
    "huge width": b"[model]\nhidden = [100000000000000000000000]",
    "many layers": b"[model]\nhidden = [" + b"16," * 100_000 + b"]",
    "many dense layers": b"[model]\ndense_after = [" + b"16," * 600 + b"]",
    "many hops": b'[model]\nkind = "sgc"\nhops = 1000000000',
    "many bases": b'[model]\nkind = "rgcn"\nbases = 1000000000',
    "number as kind": b"[model]\nkind = 3",
    "other kind": b'[model]\nkind = "gnc"',
    "huge integer": b"[train]\nepochs = 99999999999999999999999999999999999999",
    "huge seed": b"[train]\nseed = 99999999999999999999999999999999999999",
    "ranks": b"[run]\nranks = 1000000",
    "negative threads": b"[run]\nthreads = -1",
    "memory as text": b'[run]\nmemory_limit = "lots"',
    "negative memory": b"[run]\nmemory_limit = -5",
    "split as text": b'[data]\nsplit = "first"',
    "splits that are none": b'[data]\nsplits = "nope"',
}


def settings_cases() -> Iterator[tuple[str, Case]]:
    train = ["train", "{here}/graph", "--config", "{here}/odd.toml"]
    for kind, content in TOML.items():
        yield f"settings {kind}", (train, write("odd.toml", content))
    yield "settings endless", (["train", "{here}/graph", "--config", "/dev/zero"], nothing)
    yield "settings FIFO", (train, lambda here: os.mkfifo(here / "odd.toml"))
    yield "settings folder", (train, lambda here: (here / "odd.toml").mkdir())
    for value in ("-1", "0x", "nan", "inf", "1e999", "[]", "{}", "true", "none", "9" * 400, "\x1b[2J", "1;2", "1 2"):
        for setting in ("train.lr", "train.epochs", "model.hidden", "run.ranks", "model.dropout"):
            yield f"--set {setting}={value!r:.20}", (["train", "{here}/graph", "--set", f"{setting}={value}"], nothing)


EDGES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"\n\n\n",
    "comment alone": b"# u v\n",
    "header alone": b"source,target\n",
    "one column": b"0\n1\n",
    "five columns": b"0 1 2 3 4\n",
    "ragged": b"0 1\n1 2 3\n",
    "words": b"a b\nc d\ne f\n",
    "negative": b"0 1\n-1 2\n",
    "fraction": b"0 1.5\n1 2\n",
    "huge id": b"0 99999999999999999999999\n",
    "id of 2^31": b"0 2147483648\n",
    "id of 2^63": b"0 9223372036854775807\n",
    "infinite weight": b"0 1 inf\n",
    "weight that is none": b"0 1 nan\n",
    "NUL": b"0 1\n1\0 2\n",
    "no text": bytes(range(128, 256)) * 4,
    "UTF-16": "0 1\n1 2\n".encode("utf-16"),
    "quoted": b'"0","1"\n"1","2"\n',
    "half a line": b"0 1\n1",
    "two headers": b"source target\nsource target\n0 1\n",
    "reversed header": b"target source\n0 1\n",
    "long line": b"0 1 " + b"9" * 100_000 + b"\n",
    "odd separators": b"0;1\n1;2\n",
    "hexadecimal": b"0x1 0x2\n",
    "exponent": b"1e400 1\n",
}
MATRIX_MARKET: dict[str, bytes] = {
    "no header": b"5 5 1\n1 2 0.5\n",
    "header alone": b"%%MatrixMarket matrix coordinate real general\n",
    "dense": b"%%MatrixMarket matrix array real general\n2 2\n1\n2\n3\n4\n",
    "odd field": b"%%MatrixMarket matrix coordinate odd general\n5 5 1\n1 2 0.5\n",
    "id of 0": b"%%MatrixMarket matrix coordinate real general\n5 5 1\n0 2 0.5\n",
    "id too large": b"%%MatrixMarket matrix coordinate real general\n5 5 1\n1 9 0.5\n",
    "too few": b"%%MatrixMarket matrix coordinate real general\n5 5 3\n1 2 0.5\n",
    "too many": b"%%MatrixMarket matrix coordinate real general\n5 5 1\n1 2 0.5\n2 3 0.5\n",
    "not square": b"%%MatrixMarket matrix coordinate real general\n5 6 1\n1 2 0.5\n",
    "negative size": b"%%MatrixMarket matrix coordinate real general\n-5 -5 1\n1 2 0.5\n",
    "words": b"%%MatrixMarket matrix coordinate real general\n5 5 1\na b c\n",
    "complex": b"%%MatrixMarket matrix coordinate complex general\n5 5 1\n1 2 0.5 1\n",
    "not finite": b"%%MatrixMarket matrix coordinate real general\n5 5 1\n1 2 nan\n",
}


def archive(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as found:
        for name, content in members.items():
            found.writestr(f"{name}.npy", content)
    return file.getvalue()


PAIR = np.array([[0, 1], [1, 0]])
NPZ: dict[str, bytes] = {
    "empty": b"",
    "magic alone": b"PK\x03\x04",
    "text": b"0 1\n",
    "no arrays": archive(),
    "unknown keys": archive(a=PAIR, b=PAIR),
    "half": archive(edge_index=PAIR)[:-30],
    "three rows": archive(edge_index=np.zeros((3, 4), int)),
    "fractions": archive(edge_index=PAIR + 0.5),
    "negative": archive(edge_index=PAIR - 1),
    "huge": archive(edge_index=PAIR * 2**40),
    "short features": archive(edge_index=PAIR + 7, x=np.zeros((7, 1))),
    "odd labels": archive(edge_index=PAIR, y=np.array([b"a", b"b"])),
    "weights of others": archive(edge_index=PAIR, edge_weight=np.ones(3)),
    "pickled": archive(edge_index=np.array([{}, {}], object)),
    "bad pointers": archive(indptr=np.array([0, 2, 1]), indices=np.array([0, 1])),
    "pointers too far": archive(indptr=np.array([0, 1, 9]), indices=np.array([0, 1])),
    "column too large": archive(indptr=np.array([0, 1, 2]), indices=np.array([0, 7])),
    "SciPy without shape": archive(format=np.array(b"csr"), data=np.ones(1), shape=np.array([1])),
    **{f"member {kind}": zipped(edge_index=content) for kind, content in HEADERS.items()},
}


def source_cases() -> Iterator[tuple[str, Case]]:
    for suffix, files in ((".txt", EDGES), (".mtx", MATRIX_MARKET), (".npz", NPZ)):
        for kind, content in files.items():
            command = ["prepare", f"{{here}}/odd{suffix}", "{here}/new"]
            yield f"source {suffix} {kind}", (command, write(f"odd{suffix}", content))
    for suffix in (".txt", ".csv", ".txt.gz", ".mtx", ".npz", ".npy", ".docx", ""):
        command = ["prepare", f"{{here}}/odd{suffix}", "{here}/new"]
        yield f"source FIFO {suffix}", (command, lambda here, s=suffix: os.mkfifo(here / f"odd{s}"))
        yield f"source missing {suffix}", (command, nothing)
        yield f"source folder {suffix}", (command, lambda here, s=suffix: (here / f"odd{s}").mkdir())
    for flag in ("--features", "--labels", "--train", "--edge-types"):
        for kind, content in HEADERS.items():
            if flag == "--features" and kind in ("by columns", "big endian", "scalar", "text array", "complex"):
                continue
            if kind in ("big endian", "Python 2", "more") or (flag, kind) in {
                ("--labels", "by columns"),
                ("--labels", "text array"),
            }:
                continue
            command = ["prepare", "{here}/edges.txt", "{here}/new", flag, "{here}/odd.npy"]
            yield f"{flag} {kind}", (command, write("odd.npy", content))
        yield f"{flag} FIFO", (command, lambda here: os.mkfifo(here / "odd.npy"))
        yield f"{flag} endless", ([*command[:-1], "/dev/zero"], nothing)


PATHS = {
    "NUL": "a\0b",
    "long": "x" * 300,
    "long path": "/".join(["x" * 200] * 30),
    "missing": "{here}/none",
    "file": "{here}/edges.txt",
    "below a file": "{here}/edges.txt/x",
    "empty folder": "{here}/void",
    "control characters": "{here}/\x1b[31m\n\r",
    "no text": "{here}/\udcff",
    "loop": "{here}/loop",
    "device": "/dev/null",
}


def argument_cases() -> Iterator[tuple[str, Case]]:
    for kind, path in PATHS.items():
        yield f"train {kind}", (["train", path], nothing)
        yield f"plan {kind}", (["plan", path], nothing)
        yield f"partition {kind}", (["partition", path, "--parts", "2"], nothing)
        yield f"store info {kind}", (["store", "info", path], nothing)
        yield f"predict {kind}", (["predict", path], nothing)
        yield f"report {kind}", (["report", path], nothing)
        yield f"resume {kind}", (["train", "--resume", path], nothing)
        yield f"settings at {kind}", (["train", "{here}/graph", "--config", path], nothing)
        if kind != "file":
            yield f"prepare {kind}", (["prepare", path, "{here}/new"], nothing)
        if kind not in ("missing", "empty folder", "control characters", "no text", "device"):
            yield f"prepare into {kind}", (["prepare", "{here}/edges.txt", path], nothing)
            yield f"export into {kind}", (["store", "export", "{here}/graph", f"{path}/x.csv"], nothing)
    for ranks in ("41", "4096", "4097", "0", "-1", "1e30", "x"):
        yield f"plan of {ranks} ranks", (["plan", "{here}/graph", "--ranks", ranks], nothing)
    for suffix in ("", ".docx", ".npz.gz", ".pt.gz"):
        yield f"export as {suffix}", (["store", "export", "{here}/graph", f"{{here}}/new{suffix}"], nothing)


RUN_FILES: dict[str, list[bytes]] = {
    "config.toml": [b"", b"\xff", b"[train]\nlr = 7", b"train = 3", b"x = " + b"[" * 5000, b'[model]\nkind = "mlp"'],
    "plan.json": [b"", b"[]", b"{}", b"\xff", b"7"],
    "job.json": [b"", b"[]", b"\xff", b"7", b'"x"'],
    "checkpoints/latest": [b"", b"x\n", b"../..\n", b"a\nb\nc\n", b"\xff\xfe", b"x" * 5000],
}


def run_cases() -> Iterator[tuple[str, Case]]:
    for command in (["train", "--resume", "{here}/run", "--epochs", "9"], ["predict", "{here}/run"]):
        for name, contents in RUN_FILES.items():
            for number, content in enumerate(contents):
                if command[0] == "predict" and (name, content) == ("plan.json", b"{}"):
                    continue
                yield f"{command[0]} with {name} {number}", (command, write(f"run/{name}", content))
            if (command[0], name) == ("train", "checkpoints/latest"):
                continue  # such a run starts again
            yield f"{command[0]} without {name}", (command, lambda here, name=name: (here / "run" / name).unlink())


def all_cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for cases in (store_cases, settings_cases, source_cases, argument_cases, run_cases):
        for name, case in cases():
            assert name not in found, name
            found[name] = case
    return found


CASES = all_cases()
PARTS = 12
MOST_BYTES = 1 << 30
MOST_SECONDS = 10.0


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, one without checksums, an edge list, and a run of the store."""
    from mggcn.graph.store_write import write_store

    here = tmp_path_factory.mktemp("sound")
    write_store(
        make_graph(pattern("random", N, 5), num_features=3, num_classes=3, seed=5),
        here / "graph",
    )
    shutil.copytree(here / "graph", here / "foreign")
    (here / "foreign" / "meta.json").write_text("{}")
    (here / "edges.txt").write_text("".join(f"{u} {(u + 1) % N}\n" for u in range(N)))
    (here / "void").mkdir()
    (here / "loop").symlink_to("loop")
    arguments = ["train", str(here / "graph"), "--epochs", "3", "--quiet", "--out", str(here / "run")]
    assert cli.main([*arguments, "--set", "run.threads=1", "--set", "model.hidden=4"]) == 0
    return here


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("part", range(PARTS))
def test_a_bad_input_gets_one_line(
    part: int, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: Any
) -> None:
    """Fails if one is taken, ends in a traceback, another exit code or several lines, or leaves a file."""
    cases, wrong = list(CASES)[part::PARTS], []
    for number, name in enumerate(sample(cases, len(cases) // 10)):
        here = tmp_path / str(number)
        shutil.copytree(sound, here, symlinks=True)
        # The store of the run is the copy that goes with it.
        job = json.loads((here / "run" / "job.json").read_text())
        (here / "run" / "job.json").write_text(json.dumps(job | {"store": str(here / "graph")}))
        problem = tried(name, here, capsys)
        if problem:
            wrong.append(f"{name}: {problem}")
        shutil.rmtree(here)
    assert not wrong, "\n".join(wrong)


def peak_since_last() -> int:
    """Return the most memory the process held since the last call, in bytes; it is then reset to what it holds now."""
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")
    assert peak is not None
    return 1024 * int(peak[1])


def tried(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a case; return what is wrong with how it ended or what it took, "" if nothing is."""
    arguments, spoil = CASES[name]
    spoil(here)
    before = names_in(here)
    peak_since_last()
    held, began = peak_since_last(), time.perf_counter()
    with contextlib.chdir(here):
        try:
            code = cli.main([argument.replace("{here}", str(here)) for argument in arguments])
        except SystemExit as left:
            code = int(left.code or 0)
        except BaseException as error:
            return f"raised {error!r:.300}"
    seconds, taken = time.perf_counter() - began, peak_since_last() - held
    if taken > MOST_BYTES or seconds > MOST_SECONDS:
        return f"took {taken / 2**20:.0f} MiB and {seconds:.1f} s"
    said = capsys.readouterr()
    if code != 2:
        return f"exit code {code}, said {(said.out + said.err)[-300:]!r}"
    if said.err.count("\n") != 1 or not said.err.startswith("mggcn: ") or not said.err[:-1].isprintable():
        return f"said {said.err[-600:]!r}"
    left = names_in(here) - before
    return f"left {sorted(left)[:5]}" if left else ""


def test_there_are_hundreds() -> None:
    """Fails if cases are taken out of the tables."""
    assert len(CASES) >= 400
