"""Names of classes, labels or predicted numbers: given beside the labels, in their place, or in a text file.

N vertices, C classes or columns of labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mggcn.errors import GraphError
from mggcn.files import read_bytes, reason
from mggcn.graph.csr import Array, Graph, Task
from mggcn.graph.vertex_data import as_array

LONGEST = 200
"""Characters of a name."""
MOST_BYTES = 64 << 20
"""Of a file of names."""
SHOWN = 3
"""Names that a message lists."""
EXPECTED = "expected a list of names, one for each class in the order of their numbers"


def as_class_names(names: Any) -> tuple[str, ...]:
    """Return names as the graph stores them: distinct lines of text, none empty. Raises: GraphError."""
    if isinstance(names, str | bytes | Mapping | Set) or not isinstance(names, Iterable):
        raise GraphError(f"class_names: {EXPECTED}, got {type(names).__name__}")
    found, seen = tuple(names), set[str]()
    for number, name in enumerate(found):
        if not isinstance(name, str):
            raise GraphError(f"class_names: {EXPECTED}, but number {number} is {type(name).__name__}; give strings")
        if not name.strip() or len(name) > LONGEST or any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
            raise GraphError(
                f"class_names: number {number} is {name!r:.80}, expected one line of 1 to {LONGEST} characters; rename it"
            )
        if name in seen:
            raise GraphError(f"class_names: {name!r} stands for two classes; give each a name of its own")
        seen.add(name)
    return tuple(map(str, found))


def given_names(names: Any) -> tuple[str, ...]:
    """Return the names that a caller gives as a list, the path of a text file, or None. Raises: GraphError."""
    if isinstance(names, str | Path):
        return read_class_names(Path(names))
    return () if names is None else as_class_names(names)


def numbered_labels(labels: Any, names: Sequence[str], task: Task | None = None) -> tuple[Any, Sequence[str]]:
    """Replace labels that are names by class numbers (N,); return them and the names. Other labels stay as they are.

    names: in the order of classes; without any, those that occur, ascending. Empty strings, None and NaN are unlabelled.
    Cost: a sort of N strings. Raises: GraphError for a name that `names` do not have, or names and numbers together.
    """
    array = None if labels is None else as_array(labels, "labels", missing=True)
    if array is not None and array.shape[1:] == (1,):
        array = array[:, 0]
    if array is None or array.ndim != 1 or array.dtype.kind not in "OU":
        return labels, names
    if task not in (None, "classes"):
        raise GraphError(f"labels are names, which stand for classes, but the task is {task}; leave task (--task) out")
    if array.dtype.kind == "O" or isinstance(labels, list | tuple):
        array = _strings(np.asarray(labels, object).reshape(-1))  # NumPy takes a number among names for a name
    found, rows = np.unique(array, return_inverse=True)
    known = list(names) or [str(name) for name in found if name]
    number = {name: n for n, name in enumerate(known)} | {"": -1}
    if unknown := [str(name) for name in found if str(name) not in number]:
        more = ", ..." if unknown[SHOWN:] else ""
        raise GraphError(
            f"labels name {', '.join(map(repr, unknown[:SHOWN]))}{more}, which class_names do not have; add "
            f"{'them' if unknown[1:] else 'it'}, or leave class_names out"
        )
    numbers: Array = np.array([number[str(name)] for name in found], np.int64)[rows]
    return numbers, as_class_names(known)


def _strings(values: Array) -> Array:
    """Return objects that are strings, None or NaN as strings. Raises: GraphError for others among strings."""
    named = [value if isinstance(value, str) else "" if _is_missing(value) else None for value in values.tolist()]
    if None in named:
        odd = values[named.index(None)]
        raise GraphError(
            f"labels must be all numbers or all names, the label of vertex {named.index(None)} is {type(odd).__name__}; "
            "convert them, with None for unlabelled"
        )
    return np.array(named, np.str_)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def check_count(names: Sequence[str], num_classes: int) -> None:
    """Raise GraphError unless there is one name for each class."""
    if names and len(names) != num_classes:
        raise GraphError(
            f"class_names has {len(names)} names, but the labels have {num_classes} classes or columns; "
            "give each a name, in the order of their numbers"
        )


def read_class_names(path: Path) -> tuple[str, ...]:
    """Return the lines of a text file, the names of classes 0, 1, ... Raises: GraphError."""
    try:
        text = read_bytes(path, MOST_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else reason(error)
        raise GraphError(f"cannot read {path}: {why}; write a line for each class, in the order of numbers") from error
    lines = [line.strip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    try:
        return as_class_names(lines)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error


def with_class_names(graph: Graph, names: Any) -> Graph:
    """Return the graph with these names of classes, () for none; None: the graph as it is. Raises: GraphError."""
    if names is None:
        return graph
    known = given_names(names)
    check_count(known, graph.num_classes)
    return replace(graph, class_names=known)


def recorded_names(content: Any, num_classes: int) -> tuple[str, ...]:
    """Return the names of classes in a run's file; () unless there is one for each class."""
    try:
        names = as_class_names(content if isinstance(content, list) else ())
    except GraphError:
        return ()
    return names if len(names) == num_classes else ()


def joined_names(graphs: Sequence[Graph]) -> tuple[str, ...]:
    """Return the names of classes of several graphs, in which equal numbers mean the same class.

    Raises: GraphError if a number has two names.
    """
    named = [(number, graph.class_names) for number, graph in enumerate(graphs, start=1) if graph.class_names]
    longest = max((names for _, names in named), key=len, default=())
    for number, names in named:
        for index, (mine, other) in enumerate(zip(names, longest, strict=False)):
            if mine != other:
                raise GraphError(
                    f"graphs to be joined must number classes alike: class {index} is {mine!r} in graph {number} and "
                    f"{other!r} in another; load all of them with the same class_names"
                )
    return longest if len(longest) == max(graph.num_classes for graph in graphs) else ()
