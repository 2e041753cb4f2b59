"""The examples in docstrings of the public API run and return what they show."""

from __future__ import annotations

import doctest
from pathlib import Path

import numpy as np
import pytest
import torch

import mggcn
import mggcn.nn

PUBLIC = {name: getattr(module, name) for module in (mggcn, mggcn.nn) for name in module.__all__}
EXAMPLES = [
    example
    for name, thing in PUBLIC.items()
    for example in doctest.DocTestFinder(recurse=False).find(
        thing, name, globs={"mggcn": mggcn, "np": np, "torch": torch}
    )
    if example.examples
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_of_docstrings(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an example breaks or returns something else than it shows."""
    if "torch_geometric" in (example.docstring or ""):
        pytest.importorskip("torch_geometric", reason="the example converts its layers")
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})  # one thread a rank: cores may be shared
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=failures.append)
    assert failures == []


def test_the_main_entries_have_examples() -> None:
    """Fails if an entry that most users start from loses its example."""
    main = {"load", "GraphOptions", "Trainer", "GCN", "describe", "from_pyg"}
    main |= {"run", "aggregate", "reduce_edges", "DeviceGraph"}
    assert main <= {example.name for example in EXAMPLES}
