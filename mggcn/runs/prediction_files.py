"""Predictions in the form that the suffix of a file names: .npy, or a table with the vertices' ids, .csv or .parquet.

N vertices, C columns of scores.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from mggcn.config import ModelConfig
from mggcn.errors import ConfigError, RunError
from mggcn.files import new_file, reason
from mggcn.graph.csr import Rows, Task

SUFFIXES = (".npy", ".csv", ".parquet")
ROWS = 1 << 17
"""Rows that are written at a time."""
Array = npt.NDArray[np.generic]


class MappedScores:
    """An array (N, C) in an `.npy` file, whole as to its size, which several processes may fill.

    What is written is the page cache's, and the disk's in time: the memory of this process holds the pages of one call.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            self._map = mmap.mmap(file.fileno(), 0)
            self._array: Array = np.ndarray(shape, dtype, self._map, file.tell())

    def write(self, rows: slice | npt.NDArray[np.int64], scores: Array) -> None:
        """Write the scores of some vertices."""
        self._array[rows] = scores
        self._map.madvise(mmap.MADV_DONTNEED)  # of a shared file that leaves changed pages with the page cache

    def flush(self) -> None:
        """Return when all is on the disk. Raises: OSError."""
        self._map.flush()


def check_target(target: Path) -> None:
    """Refuse a file that predictions cannot be written to, before anything runs. Raises: ConfigError."""
    if target.suffix not in SUFFIXES:
        raise ConfigError(f"--out expects a file that ends in {', '.join(SUFFIXES)}, got {target}")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigError(f"--out expects a file such as scores.npy in a folder that exists, got {target}")
    if target.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError('--out .parquet needs pyarrow: pip install ".[parquet]", or choose .csv or .npy')


def check_kind(task: Task, *, classes: bool, probabilities: bool) -> None:
    """Refuse classes or probabilities of a task that has none, and both at once. Raises: ConfigError."""
    if classes and probabilities:
        raise ConfigError("--classes and --probabilities exclude each other; choose one")
    if task == "links" and (classes or probabilities):
        raise ConfigError(
            "the run predicts links, and its vertices have embeddings, without classes or probabilities; leave both out, "
            "or give pairs, which have probabilities"
        )
    if task == "numbers" and (classes or probabilities):
        raise ConfigError("the run predicts numbers, which have neither classes nor probabilities; leave both out")


def check_pairs(task: Task, target: Path | None, alone: Mapping[str, object]) -> None:
    """Refuse pairs of a run that predicts no links, beside what goes with vertices (`alone`, by name), or in a table.

    Raises: ConfigError.
    """
    if task != "links":
        raise ConfigError("pairs are scored by runs that predict links, and this one does not; leave pairs out")
    if given := [name for name, value in alone.items() if value]:
        raise ConfigError(f"pairs have a score each, without {given[0]}; leave one of the two out")
    if target is not None and target.suffix != ".npy":
        raise ConfigError(f"scores of pairs are written as .npy, got --out {target}")


def check_layer(model: ModelConfig, layer: int | None, *, classes: bool, probabilities: bool) -> None:
    """Refuse embeddings of a layer that the model does not have, or classes of embeddings. Raises: ConfigError."""
    if layer is None:
        return
    if classes or probabilities:
        raise ConfigError(
            "layer gives the output of a hidden layer, which has no classes; leave classes and probabilities out"
        )
    if not model.hidden:
        raise ConfigError(f"layer needs a model with hidden layers, and this {model.kind} has none; leave it out")
    if isinstance(layer, bool) or not isinstance(layer, int) or not 1 <= layer <= len(model.hidden):
        raise ConfigError(
            f"layer expects a hidden layer from 1 to {len(model.hidden)}, got {layer!r}; without it the output layer is "
            "given"
        )


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


def write_predictions(
    source: Path,
    target: Path,
    task: Task,
    *,
    classes: bool,
    ids: Rows | None = None,
    name: str = "score",
    class_names: Sequence[str] = (),
) -> None:
    """Write the scores of an .npy file in another format, beside the target, then rename. Raises: RunError.

    Tables have the columns vertex and score_0, ..., or class, or label_0, ...; classes: as of `classes_of`. ids: (N,) of
    the vertices, by default their numbers. name: of columns other than scores. class_names: C, instead of the
    numbers in names of columns, and in a further column, class_name, beside class.
    """
    scores = np.load(source, mmap_mode="r", allow_pickle=False)
    try:
        with new_file(target) as file:
            if target.suffix == ".npy":
                _write_npy(file, scores.shape[0], _parts(scores, task, classes, None))
            else:
                names = _names(class_names or range(scores.shape[1]), task, classes, name)
                called = class_names if classes and task == "classes" else ()
                names += ["class_name"] if called else []
                write = _write_csv if target.suffix == ".csv" else _write_parquet
                write(file, names, _parts(scores, task, classes, ids), called)
    except OSError as error:
        raise RunError(f"the scores cannot be written to {target}: {reason(error)}; choose another --out") from error


def _parts(scores: Array, task: Task, classes: bool, ids: Rows | None) -> Iterator[tuple[Array, Array]]:
    """Yield ids of vertices and what is written of them, (rows,) or (rows, C)."""
    for start in range(0, scores.shape[0], ROWS):
        part = np.asarray(scores[start : start + ROWS])
        stop = start + part.shape[0]
        shown = classes_of(part, task) if classes else part  # type: ignore[arg-type]
        yield np.arange(start, stop) if ids is None else ids.read(start, stop), shown


def _write_npy(file: BinaryIO, num_rows: int, parts: Iterable[tuple[Array, Array]]) -> None:
    """Write parts of one array of `num_rows` rows behind each other."""
    for number, (_, part) in enumerate(parts):
        if number == 0:
            header = np.lib.format.header_data_from_array_1_0(part) | {"shape": (num_rows, *part.shape[1:])}
            np.lib.format.write_array_header_1_0(file, header)
        file.write(np.ascontiguousarray(part).data)


def _names(columns: Iterable[object], task: Task, classes: bool, name: str) -> list[str]:
    if classes and task == "classes":
        return ["vertex", "class"]
    return ["vertex", *(f"{'label' if classes else name}_{column}" for column in columns)]


def _called(part: Array, names: Sequence[str]) -> list[list[str]]:
    """Return the column with the names of classes (rows,), if they have some."""
    return [[names[number] for number in part.tolist()]] if names else []


def _write_csv(
    file: BinaryIO, names: Sequence[str], parts: Iterable[tuple[Array, Array]], called: Sequence[str]
) -> None:
    out = io.TextIOWrapper(file, encoding="utf-8", newline="")
    table = csv.writer(out, lineterminator="\n")
    table.writerow(names)
    for ids, part in parts:
        digits = {"f": "%.17g" if part.dtype == np.float64 else "%.9g"}.get(part.dtype.kind, "%d")
        columns = [[digits % value for value in column] for column in part.reshape(ids.size, -1).T.tolist()]
        table.writerows(zip(ids.tolist(), *columns, *_called(part, called), strict=True))
    out.detach()  # the file is its opener's to flush and to close


def _write_parquet(
    file: BinaryIO, names: Sequence[str], parts: Iterable[tuple[Array, Array]], called: Sequence[str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    try:
        for ids, part in parts:
            columns = np.ascontiguousarray(part.reshape(ids.size, -1).T)
            table = pa.table(dict(zip(names, [ids, *columns, *_called(part, called)], strict=True)))
            writer = writer or pq.ParquetWriter(file, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
