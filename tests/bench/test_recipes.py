"""Which rows of trained recipes count."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench import recipes

RECIPE = "chameleon_filtered-gat"


@pytest.mark.parametrize(
    ("row", "counts"),
    [
        ({"epochs": 200, "settings": recipes.digest_of(RECIPE)}, True),
        ({"epochs": 2, "settings": recipes.digest_of(RECIPE)}, False),
        ({"epochs": 200, "settings": "of another file"}, False),
    ],
)
def test_rows_of_other_settings_do_not_count(row: dict[str, Any], counts: bool, tmp_path: Path) -> None:
    """Fails if a short trial, or a recipe that has changed since, passes for a published protocol."""
    args, run = Namespace(rows=tmp_path, threads=1, epochs=0), recipes.runs_of(RECIPE)[0]
    file = recipes.row_file(tmp_path, RECIPE, run, False)
    assert recipes.row_of(RECIPE, run, args) is None
    file.parent.mkdir()
    file.write_text(json.dumps(row))
    assert (recipes.row_of(RECIPE, run, args) is not None) == counts
    assert len(recipes.found_rows([RECIPE], args)[RECIPE]) == counts
