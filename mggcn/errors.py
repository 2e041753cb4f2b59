"""Error classes: every message says what was expected, what came and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MggcnError(Exception):
    """Base of all errors that mggcn raises on purpose."""

    exit_code = 1


class ConfigError(MggcnError):
    """A setting is unknown, out of range or contradicts another."""

    exit_code = 2


class GraphError(MggcnError):
    """A graph, its features, labels or splits are malformed."""

    exit_code = 2


class GraphWarning(UserWarning):
    """A graph is valid but may not be what the user intended."""


class StoreError(MggcnError):
    """A folder is not a graph store, is damaged, or cannot be written."""

    exit_code = 2


class PlanError(MggcnError):
    """The planned memory does not fit."""

    exit_code = 2


class RunError(MggcnError):
    """A run folder cannot be used: missing, incomplete or already taken."""

    exit_code = 2


class TrainError(MggcnError):
    """Training cannot continue."""


class DivergedError(TrainError):
    """The loss or a gradient is not finite. All ranks raise it alike; the message names the rank on which it began."""


class CommError(MggcnError):
    """Another rank failed, did not arrive in time, or the transport broke."""


class BackendError(MggcnError):
    """A device, library or kernel that the run needs is missing."""


LONGEST = 2000
"""Characters of an error that are printed."""


def printable(name: object) -> str:
    """Return a name or path that is safe for a terminal: control and bidirectional characters are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(name))


def shown(text: object) -> str:
    """Return text of several lines, each made safe for a terminal by `printable`."""
    return "\n".join(map(printable, str(text).split("\n")))


def one_line(text: str) -> str:
    """Return the text of an error as one line that is safe for a terminal, since it may quote a file."""
    line = printable(" ".join(text.splitlines()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


SYNONYMS = {
    "gpu": "cuda",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "bfloat16": "bf16",
    "fp16": "bf16",
    "half": "bf16",
    "graphsage": "sage",
    "mpi": "gloo",
}
"""Names that other libraries use for values of settings."""


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean X?" for the known word most similar to `word`, "" if none is similar."""
    word = SYNONYMS.get(word.lower(), word)
    words = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(words), n=1)
    return f"; did you mean {prefix}{words[found[0]]}?" if found else ""
