"""Typical mistakes: each is refused with exit code 2 in one line that has the remedy, before anything is planned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mggcn.backend.cpu.backend import CpuBackend
from mggcn.cli import entry as cli

HERE = "{here}"
"""Stands for the folder of the test's files."""
STORE = "{here}/graph"
SHAPE = ["plan", "--vertices", 10, "--edges", 20, "--features", 3, "--classes"]

MISTAKES: dict[str, tuple[list[object], str]] = {
    # commands and flags
    "command": (["trian", STORE], "did you mean train?"),
    "no command, a flag": (["--quiet"], "COMMAND"),
    "gpu as flag": (["train", STORE, "--gpu"], "use --device cuda;"),
    "gpus as flag": (["sweep", "grid.toml", STORE, "--gpus", 2], "use --device cuda --ranks 2;"),
    "other library's learning rate": (["train", STORE, "--learning-rate", 0.1], "use --set train.lr=0.1;"),
    "other library's widths": (["plan", STORE, "--hidden-channels=64"], "use --set model.hidden=64;"),
    "misspelt flag of an action": (["store", "export", STORE, "x.txt", "--forse"], "did you mean --force?"),
    "setting as flag": (["train", STORE, "--lr", 0.1], "use --set train.lr=0.1"),
    "setting as flag, joined": (["train", STORE, "--dropout=0.5"], "use --set model.dropout=0.5"),
    "ranks of a cut": (["partition", STORE, "--ranks", 4], "use --parts 4"),
    "ranks of a cut, =": (["partition", STORE, "--ranks=3", "--kind", "metis"], "use --parts 3"),
    "METIS's parts": (["partition", STORE, "--nparts", 2], "use --parts 2"),
    "parts by another name": (["partition", STORE, "--num-parts", 8], "use --parts 8"),
    "world size": (["train", STORE, "--world-size", 2], "use --ranks 2"),
    "misspelt flag": (["train", STORE, "--epcohs", 3], "did you mean --epochs?"),
    "misspelt flag of a setting": (["train", STORE, "--hiden", 3], "did you mean --set model.hidden=3?"),
    "no kind of graph": (["generate"], "KIND"),
    "unknown kind of graph": (["generate", "star", "{here}/new"], "invalid choice: 'star'"),
    "unknown choice": (["prepare", "{here}/edges.txt", "{here}/new", "--duplicates", "maybe"], "invalid choice"),
    "nothing to prepare for": (["prepare", "{here}/edges.txt"], "needs a STORE"),
    "nothing to train": (["train"], "needs a STORE"),
    "store and resume": (["train", STORE, "--resume", HERE], "give one of them"),
    "no shape": (["plan"], "--vertices, --edges, --features, --classes missing"),
    "half a shape": (["plan", "--vertices", "1k", "--edges", "9k"], "--features, --classes missing"),
    "shape without classes": ([*SHAPE, 0], "must be 1 or more"),
    "half a class": ([*SHAPE, 2.5], "invalid whole number value: '2.5'"),
    "score of another task": (
        [*SHAPE, 2, "--set", "train.metric=rmse"],
        "train.metric rmse does not fit train.loss auto",
    ),
    "loss of another task": (
        [*SHAPE, 2, "--set", "train.loss=mse", "--set", "train.metric=accuracy"],
        "train.metric accuracy does not fit train.loss mse",
    ),
    "class to ignore": ([*SHAPE, 2, "--set", "train.ignored_labels=2"], "the shape has the classes 0 .. 1"),
    "store and shape": (["plan", STORE, "--vertices", 5], "not both"),
    # settings
    "table left out": (["train", STORE, "--set", "lr=0.1"], "did you mean train.lr=0.1?"),
    "no value": (["train", STORE, "--set", "train.lr"], "expects table.key=value"),
    "misspelt setting": (["train", STORE, "--set", "train.lrr=0.1"], "did you mean train.lr?"),
    "misspelt table": (["train", STORE, "--set", "trian.lr=0.1"], "did you mean train?"),
    "other table": (["train", STORE, "--set", "model.lr=0.1"], "it belongs to [train]: train.lr"),
    "upper case": (["train", STORE, "--set", "model.kind=GCN"], "did you mean gcn?"),
    "gpu": (["train", STORE, "--device", "gpu"], "did you mean cuda?"),
    "type's other name": (["train", STORE, "--precision", "float32"], "did you mean fp32?"),
    "strategy": (["train", STORE, "--strategy", "boardcast"], "did you mean broadcast?"),
    "size": (["train", STORE, "--memory-limit", "lots"], "expects bytes such as 512MiB or 80GiB"),
    "count": (["plan", "--vertices", "111X"], "whole number"),
    "half an epoch": (["train", STORE, "--epochs", "2.5"], "train.epochs expects an integer"),
    "no whole number": (["generate", "rmat", "{here}/new", "--scale", "x"], "invalid whole number value: 'x'"),
    "negative size": (["generate", "community", "{here}/new", "--vertices", -3], "got -3"),
    "huge scale": (["generate", "rmat", "{here}/new", "--scale", 99], "expected 0 <= scale <= 30, got 99"),
    "more edges than pairs": (
        ["generate", "community", "{here}/new", "--vertices", 10, "--edges", 7000],
        "a simple graph of 10 vertices has at most 45; ask for fewer edges",
    ),
    "more than all": (["generate", "community", "{here}/new", "--train", 1.5], "must lie in [0, 1], got 1.5"),
    "too few newest": (
        ["generate", "community", "{here}/new", "--train", 0.5, "--train-by", "community"],
        "ask for a smaller share (--train)",
    ),
    "huge relations": (["generate", "community", "{here}/new", "--relations", 70000], "expected 0 to 65,536 relations"),
    "little memory": (["prepare", "{here}/edges.txt", "{here}/new", "--memory", "1MiB"], "at least 256MiB"),
    "negative rate": (["train", STORE, "--set", "train.lr=-1"], "train.lr"),
    "dropout of one": (["train", STORE, "--set", "model.dropout=1"], "model.dropout must lie in [0, 1)"),
    "settings file": (["train", STORE, "--config", "{here}/none.toml"], "cannot read the configuration"),
    "broken settings file": (["train", STORE, "--config", "{here}/edges.txt"], "not valid TOML"),
    # paths
    "misspelt store": (["train", "{here}/grpah"], "did you mean graph?"),
    "store that a folder lacks": (["train", "nowhere", "--root", HERE], "there is no nowhere, "),
    "array that is not there": (
        ["prepare", "{here}/edges.txt", "{here}/new", "--features", "{here}/none.npy"],
        "cannot load",
    ),
    "file for a store": (["train", "{here}/edges.txt"], "mggcn prepare"),
    "folder of stores": (["train", HERE], "it holds the stores bare, graph, unlabelled"),
    "run that is none": (["predict", STORE], "is not the folder of a run"),
    "run to resume that is none": (["train", "--resume", STORE], "is not the folder of a run"),
    "run to resume that is not there": (["train", "--resume", "{here}/none"], "there is no run folder"),
    "run folder taken": (["train", STORE, "--out", STORE], "name a folder that is new or empty: --out, in Python out="),
    "store taken": (["prepare", "{here}/edges.txt", STORE], "--force"),
    "unknown suffix": (["prepare", "{here}/edges.docx", "{here}/new"], "rename or convert it"),
    # ranks
    "more ranks than vertices": (["train", STORE, "--ranks", 41], "use at most 40 ranks"),
    "no ranks": (["train", STORE, "--ranks", 0], "run.ranks must lie in 1 .."),
    "several ranks on a single": (["train", STORE, "--ranks", 2, "--transport", "single"], "use threads or gloo"),
    "nccl on cpus": (["train", STORE, "--ranks", 2, "--transport", "nccl"], "use --device cuda, or gloo on CPUs"),
    "delay for nothing": (["train", STORE, "--ranks", 2, "--delay", 5], "use --strategy delayed"),
    # ids, masks, labels, features
    "ids from one": (["prepare", "{here}/from_one.txt", "{here}/new", "--vertices", 40], "subtract 1 from each"),
    "no edges": (["prepare", "{here}/empty.txt", "{here}/new"], "give num_vertices (--vertices) or an edge"),
    "edges with two weights": (["prepare", "{here}/repeats.txt", "{here}/new"], "(--duplicates sum)"),
    "edges twice": (["prepare", "{here}/repeats.txt", "{here}/new", "--duplicates", "error"], "(--duplicates)"),
    "features of fewer vertices": (
        ["prepare", "{here}/edges.txt", "{here}/new", "--features", "{here}/short.npy", "--vertices", 40],
        "shape [40, D], got float32 of shape (39, 3)",
    ),
    "bytes as labels": (
        ["prepare", "{here}/edges.txt", "{here}/new", "--labels", "{here}/names.npy"],
        "number the classes from 0",
    ),
    "ids from one in a split": (
        ["prepare", "{here}/edges.txt", "{here}/new", "--labels", "{here}/labels.npy", "--train", "{here}/ids.npy"],
        "expected vertex ids in [0, 40), got 0 to 40",
    ),
    "short features": (["prepare", "{here}/edges.txt", "{here}/new", "--features", "{here}/short.npy"], "give one row"),
    "text for an array": (
        ["prepare", "{here}/edges.txt", "{here}/new", "--labels", "{here}/edges.txt"],
        "numpy.loadtxt(...)) writes a file that is read",
    ),
    "mask of integers": (
        ["prepare", "{here}/edges.txt", "{here}/new", "--train", "{here}/integers.npy"],
        "must be bool",
    ),
    "splits that overlap": (
        [
            *["prepare", "{here}/edges.txt", "{here}/new", "--labels", "{here}/labels.npy"],
            *["--train", "{here}/mask.npy", "--test", "{here}/mask.npy"],
        ],
        "make the splits disjoint",
    ),
    "no features": (["train", "{here}/bare"], "--features FILE, degree or identity"),
    "no labels": (["train", "{here}/unlabelled"], "add labels"),
    "split that is not there": (["train", STORE, "--split", 3], "data.split must be below 1"),
    "several labels": (["prepare", "{here}/edges.txt", "{here}/new", "--labels", "{here}/short.npy"], "label"),
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, sources that are wrong in one way each, and stores without features or labels."""
    folder = tmp_path_factory.mktemp("mistakes")
    ring = np.stack([np.arange(40), np.roll(np.arange(40), 1)], axis=1)
    (folder / "edges.txt").write_text("\n".join(f"{u} {v}" for u, v in ring))
    (folder / "from_one.txt").write_text("\n".join(f"{u + 1} {v + 1}" for u, v in ring))
    (folder / "edges.docx").write_text("0 1\n")
    (folder / "repeats.txt").write_text("0 1 2\n0 1 3\n")
    (folder / "empty.txt").write_text("")
    np.save(folder / "names.npy", np.array([b"a", b"b"] * 20))
    np.save(folder / "ids.npy", np.array([0, 40]))
    np.save(folder / "short.npy", np.ones((39, 3), np.float32))
    np.save(folder / "labels.npy", np.arange(40) % 3)
    np.save(folder / "mask.npy", np.arange(40) < 20)
    np.save(folder / "integers.npy", (np.arange(40) < 20).astype(np.int64))
    np.save(folder / "rest.npy", np.arange(20, 40))
    np.save(folder / "features.npy", np.ones((40, 3), np.float32))
    splits = ["--train", folder / "mask.npy", "--test", folder / "rest.npy"]
    labelled = ["--labels", folder / "labels.npy", *splits]
    for name, more in {
        "graph": ["--features", folder / "features.npy", *labelled],
        "bare": labelled,
        "unlabelled": ["--features", "degree"],
    }.items():
        assert (
            cli.main(["prepare", str(folder / "edges.txt"), str(folder / name), "--symmetrize", *map(str, more)]) == 0
        )
    return folder


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line_and_a_remedy(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a mistake passes, ends in a traceback or in several lines, lacks its remedy, or costs a rank's set-up."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("set up")

    monkeypatch.setattr(CpuBackend, "__init__", never)
    monkeypatch.chdir(here)
    arguments, remedy = MISTAKES[name]
    try:
        code = cli.main([str(argument).replace(HERE, str(here)) for argument in arguments])
    except SystemExit as left:
        code = int(left.code or 0)
    said = capsys.readouterr()
    assert code == 2, said
    assert said.err.startswith("mggcn: ")
    assert said.err.count("\n") == 1
    assert remedy in said.err
    assert not (here / "runs").exists()
    assert not (here / "new").exists()


def test_there_are_forty() -> None:
    """Fails if mistakes are taken out of the table."""
    assert len(MISTAKES) >= 40
