"""Pages name what is there: links, anchors, files, and pictures that are small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *ROOT.glob("*.md"),
    *DOCS.rglob("*.md"),
    ROOT / "bench" / "README.md",
    *(ROOT / "bench" / "notes").glob("*.md"),
]
NAMES = re.compile(r"`((?:mggcn|tests|bench|cpu|cuda|examples|recipes)/[\w/.-]+)`")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Fails on a link to a file, a folder or a heading that is not there."""
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", ["README.md", "docs/features.md", "docs/reliability.md"])
def test_named_files_exist(page: str) -> None:
    """Fails if a feature names a test that was moved or removed."""
    names = NAMES.findall((ROOT / page).read_text())
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_pictures_are_there_and_small() -> None:
    """Fails on a picture that no page shows, and on a large one."""
    named = {name for page in PAGES for name in re.findall(r"\]\([\w/]*images/([\w.-]+)\)", page.read_text())}
    sizes = {path.name: path.stat().st_size for path in (DOCS / "images").iterdir()}
    assert named == set(sizes)
    assert max(sizes.values()) < 120_000


def test_the_readme_is_short() -> None:
    """Fails if the README grows: what it lists belongs into docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("note", sorted((DOCS / "notes").glob("*.md")), ids=lambda note: note.stem)
def test_a_note_says_whether_it_holds(note: Path) -> None:
    """Fails on a decision without its status or a number of its own, and on files that it names and that are gone."""
    text = note.read_text()
    assert len([*note.parent.glob(f"{note.name[:4]}*")]) == 1
    assert text.startswith(f"# {note.name[:4]} ")
    assert "\n**Status.** " in text
    assert [name for name in NAMES.findall(text) if not (ROOT / name).exists()] == []
