"""Predictions in the form that the suffix of a file names: .npy, or a table with the vertex's number, .csv or .parquet.

N vertices, C columns of scores.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mggcn.errors import ConfigError, RunError
from mggcn.graph.csr import Task

SUFFIXES = (".npy", ".csv", ".parquet")
ROWS = 1 << 17
"""Rows that are written at a time."""
Array = npt.NDArray[np.generic]


def check_target(target: Path) -> None:
    """Refuse a file that predictions cannot be written to, before anything runs. Raises: ConfigError."""
    if target.suffix not in SUFFIXES:
        raise ConfigError(f"--out expects a file that ends in {', '.join(SUFFIXES)}, got {target}")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigError(f"--out expects a file such as scores.npy in a folder that exists, got {target}")
    if target.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError('--out .parquet needs pyarrow: pip install ".[parquet]", or choose .csv or .npy')


def check_kind(task: Task, *, classes: bool, probabilities: bool) -> None:
    """Refuse classes or probabilities where there are none, or both. Raises: ConfigError."""
    if classes and probabilities:
        raise ConfigError("--classes and --probabilities exclude each other; choose one")
    if task == "numbers" and (classes or probabilities):
        raise ConfigError("the run predicts numbers, which have neither classes nor probabilities; leave both out")


def probabilities_of(scores: npt.NDArray[np.floating], task: Task) -> npt.NDArray[np.floating]:
    """Return softmax probabilities of classes, or each label's own; both (N, C)."""
    if task == "labels":
        small = np.exp(-np.abs(scores))
        each: npt.NDArray[np.floating] = np.where(scores >= 0, 1, small) / (1 + small)
        return each
    shifted: npt.NDArray[np.floating] = np.exp(scores - scores.max(1, keepdims=True))
    total: npt.NDArray[np.floating] = shifted.sum(1, keepdims=True)
    return shifted / total


def classes_of(scores: npt.NDArray[np.floating], task: Task) -> Array:
    """Return the class of the highest score, int64 (N,); of several labels, int8 (N, C), 1 where the score is above 0."""
    return (scores > 0).astype(np.int8) if task == "labels" else scores.argmax(1)


def write_predictions(source: Path, target: Path, task: Task, *, classes: bool) -> None:
    """Write the scores of an .npy file in another form, beside the target, then rename. Raises: RunError.

    Tables have the columns vertex and score_0, ..., or class, or label_0, ...; classes: as of `classes_of`.
    """
    scores = np.load(source, mmap_mode="r", allow_pickle=False)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        {".npy": _write_npy, ".csv": _write_csv, ".parquet": _write_parquet}[target.suffix](
            temporary, scores, task, classes
        )
        os.replace(temporary, target)
    except OSError as error:
        raise RunError(f"the scores cannot be written to {target}: {error.strerror}; choose another --out") from error
    finally:
        temporary.unlink(missing_ok=True)


def _parts(scores: Array, task: Task, classes: bool) -> Iterator[tuple[npt.NDArray[np.int64], Array]]:
    """Yield numbers of vertices and what is written of them, (rows,) or (rows, C)."""
    for start in range(0, scores.shape[0], ROWS):
        part = np.asarray(scores[start : start + ROWS])
        shown = classes_of(part, task) if classes else part  # type: ignore[arg-type]
        yield np.arange(start, start + part.shape[0]), shown


def _names(part: Array, classes: bool) -> list[str]:
    if part.ndim == 1:
        return ["class"]
    return [f"{'label' if classes else 'score'}_{column}" for column in range(part.shape[1])]


def _write_npy(file: Path, scores: Array, task: Task, classes: bool) -> None:
    with file.open("wb") as out:
        np.save(out, np.concatenate([part for _, part in _parts(scores, task, classes)]), allow_pickle=False)


def _write_csv(file: Path, scores: Array, task: Task, classes: bool) -> None:
    digits = "%.17g" if scores.dtype == np.float64 else "%.9g"
    with file.open("w", encoding="utf-8") as out:
        for ids, part in _parts(scores, task, classes):
            if not ids[0]:
                out.write(",".join(["vertex", *_names(part, classes)]) + "\n")
            columns = part.reshape(ids.size, -1)
            row = ",".join(["%d", *["%d" if classes else digits] * columns.shape[1]])
            out.writelines(row % (vertex, *values) + "\n" for vertex, values in zip(ids, columns.tolist(), strict=True))


def _write_parquet(file: Path, scores: Array, task: Task, classes: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    try:
        for ids, part in _parts(scores, task, classes):
            columns = np.ascontiguousarray(part.reshape(ids.size, -1).T)
            table = pa.table({"vertex": ids, **dict(zip(_names(part, classes), columns, strict=True))})
            writer = writer or pq.ParquetWriter(file, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
