"""Tables of measured ways of sparse products: written, read back, kept apart by host, refused if damaged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mggcn.backend.cpu_choice import SpmmChoice, SpmmKey
from mggcn.backend.cpu_machine import Caches, Host
from mggcn.backend.cpu_table import REMEDY, damage_of, read_choices, write_choices
from mggcn.errors import StoreError

HERE = Host("a processor", "avx2", 2, Caches(2**19, 2**25))
KEY, OTHER = SpmmKey(10, 20, 300, 16, 4, True, "a"), SpmmKey(10, 20, 300, 16, 4, True, "b")
PANELS, AHEAD = SpmmChoice("panels", 32, 1, 32, "measured"), SpmmChoice(ahead=16, reason="measured")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Fails if a table loses a product, keeps an older way of one, or a new one drops the old ones."""
    path = tmp_path / "tuned.json"
    assert read_choices(path, HERE) == {}
    write_choices(path, HERE, {KEY: PANELS})
    assert read_choices(path, HERE) == {KEY: PANELS}
    write_choices(path, HERE, {OTHER: AHEAD})
    assert read_choices(path, HERE) == {KEY: PANELS, OTHER: AHEAD}
    write_choices(path, HERE, {KEY: AHEAD})
    assert read_choices(path, HERE) == {KEY: AHEAD, OTHER: AHEAD}
    assert [p.name for p in tmp_path.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize(
    "change", [{"processor": "another"}, {"kernels": "baseline"}, {"threads": 1}, {"caches": Caches(2**19, 2**24)}]
)
def test_another_host_has_a_table_of_its_own(tmp_path: Path, change: dict[str, object]) -> None:
    """Fails if what was measured elsewhere, or with other threads, is taken here, or is lost when this host writes."""
    path, elsewhere = tmp_path / "tuned.json", dataclasses.replace(HERE, **change)  # type: ignore[arg-type]
    write_choices(path, elsewhere, {KEY: PANELS})
    assert read_choices(path, HERE) == {}
    write_choices(path, HERE, {KEY: AHEAD})
    assert (read_choices(path, elsewhere), read_choices(path, HERE)) == ({KEY: PANELS}, {KEY: AHEAD})


def test_damaged_tables_are_refused(tmp_path: Path) -> None:
    """Fails if a damaged file is a traceback, is silently taken for an empty one, or cannot be replaced."""
    path = tmp_path / "tuned.json"
    write_choices(path, HERE, {KEY: PANELS})
    whole = json.loads(path.read_text())
    wrong_version = whole | {"format_version": 1}
    no_host = whole | {"tables": [{"products": []}]}
    odd_key = json.loads(path.read_text().replace('"rows": 10', '"lines": 10'))
    odd_way = json.loads(path.read_text().replace('"panel"', '"pane"'))
    for text in ("{", "[]", *map(json.dumps, (wrong_version, no_host, odd_key, odd_way))):
        path.write_text(text)
        with pytest.raises(StoreError, match=r"tuned\.json.*measure again with mggcn tune --store, or remove the file"):
            read_choices(path, HERE)
        assert "tuned.json" in damage_of(path, HERE)
        write_choices(path, HERE, {KEY: AHEAD})
        assert read_choices(path, HERE) == {KEY: AHEAD}
        assert damage_of(path, HERE) == ""
    with pytest.raises(StoreError, match="cannot be written"):
        write_choices(tmp_path / "missing" / "tuned.json", HERE, {KEY: PANELS})


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"blocks": 1', '"blocks": 0', "blocks must be a whole number in 1 .. .*, got 0"),
        ('"blocks": 1', '"blocks": 18446744073709551617', "blocks must be"),
        ('"blocks": 1', '"blocks": true', "blocks must be .*, got True"),
        ('"blocks": 1', '"blocks": 4', "panels do not go with panels of 32 columns and 4 blocks"),
        ('"panel": 32', '"panel": -32', "panel must be .*, got -32"),
        ('"panel": 32', '"panel": 0', "panels do not go with panels of 0 columns"),
        ('"ahead": 32', '"ahead": 1.5', "ahead must be .*, got 1.5"),
        ('"way": "panels"', '"way": "colums"', "way must be one of rows, panels, blocks, got 'colums'"),
        ('"way": "panels"', '"way": ["rows"]', r"got \['rows'\]"),
        ('"nnz": 300', '"nnz": "many"', "nnz must be .*, got 'many'"),
        ('"summed": true', '"summed": "yes"', "summed must be true or false"),
    ],
)
def test_ways_that_compute_something_else_are_refused(tmp_path: Path, old: str, new: str, named: str) -> None:
    """Fails if a number that kernels do not check, such as no blocks at all, reaches them, or is a traceback."""
    path = tmp_path / "tuned.json"
    write_choices(path, HERE, {KEY: PANELS})
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(StoreError, match=named) as refused:
        read_choices(path, HERE)
    assert REMEDY in str(refused.value)
