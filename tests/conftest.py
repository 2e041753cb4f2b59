"""Fixtures that every room uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of the real graphs: $MGGCN_DATA, or shared/data beside the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("MGGCN_DATA", default))
    if not (root / "cora" / "meta.json").is_file():
        reason = f"no real graphs in {root}; set MGGCN_DATA to a folder that holds cora/, amazon_photo/, ..."
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return root
