"""The store on which commands train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runs import run_main


@pytest.fixture(scope="session")
def community(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 300 vertices, which no command changes."""
    store = tmp_path_factory.mktemp("stores") / "community"
    assert run_main("generate", "community", store, "--vertices", 300, "--edges", 1500, "--seed", 71) == 0
    return store
