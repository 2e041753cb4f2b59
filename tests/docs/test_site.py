"""docs/hooks.py and mkdocs.yml: a site that is whole when opened from the disk; features and tests have a page each."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_tests_of_features_have_a_page_of_their_own() -> None:
    """Fails if a row is lost, a test stays on the page of features, or another table loses a column."""
    pytest.importorskip("mkdocs", reason="the hooks are MkDocs'")
    text = (DOCS / "features.md").read_text()
    page, tests = runpy.run_path(str(DOCS / "hooks.py"))["split_tests"](text)
    rows = re.findall(r"^\| ([^|]+) \|.* \| (`tests.*) \|$", text, re.MULTILINE)
    assert len(rows) > 40
    assert [row for row in rows if f"| {row[0]} | {row[1]} |" not in tests] == []
    assert "`tests/" not in re.sub(r"^[^|].*$", "", page, flags=re.MULTILINE)
    assert len(page.splitlines()) == len(text.splitlines())
    other = "| a | b | c |\n|---|---|---|\n| 1 | 2 | 3 |\n"
    assert runpy.run_path(str(DOCS / "hooks.py"))["split_tests"](other) == (other, "\n")


def test_the_site_needs_no_network() -> None:
    """Fails if a page would load a script or a font from elsewhere, or the search has no worker on the disk."""
    settings = (DOCS.parent / "mkdocs.yml").read_text()
    assert "://" not in settings
    assert re.search(r"^  font: false", settings, re.MULTILINE)
    assert re.search(r"^  polyfills: \[iframe-worker\.js\]", settings, re.MULTILINE)
    named = re.findall(r"(?:logo|favicon): (\S+)|\[(site\.css|iframe-worker\.js)\]", settings)
    assert len(named) == 4
    assert all((DOCS / (one or other)).is_file() for one, other in named)
    assert "http" not in (DOCS / "logo.svg").read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
