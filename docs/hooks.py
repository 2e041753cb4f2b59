"""MkDocs hooks: a list of all notes, the tests of features on a page of their own, and copies of files outside docs/.

In features.md a feature and its tests stand in one row, so that a change sees both; on the site they would fill the page.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[)#])")


NOTES = """# Notes

Decisions, each with its status, its context, the alternatives that were rejected, and how one would notice that it was
wrong. The derivations and measurements behind some of them are in [bench/notes](../../bench/notes).

"""


TESTS = """# Tests of the features

What holds each row of [What mggcn can do](features.md), by its first column.

"""


def on_files(files: Files, config: Any) -> Files:
    """Add the list of notes: a new one needs no entry anywhere."""
    notes = sorted((ROOT / "docs" / "notes").glob("[0-9]*.md"))
    entries = [f"- [{note.read_text().splitlines()[0].lstrip('# ')}]({note.name})\n" for note in notes]
    files.append(File.generated(config, "notes/index.md", content=NOTES + "".join(entries)))
    tests = split_tests((ROOT / "docs" / "features.md").read_text())[1]
    files.append(File.generated(config, "feature-tests.md", content=TESTS + tests))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to folders at their lists, and those that leave docs/ at copies of their files, as text.

    Raises: PluginError if a file does not exist.
    """

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[0]))
        if target.startswith("docs/"):
            return posixpath.join(link[0], "index.md") if (ROOT / target).is_dir() else link[0]
        if not (ROOT / target).exists():
            raise PluginError(f"{page.file.src_uri} links to {target}, which does not exist")
        copy = _copied(target, config, files)
        return os.path.relpath(copy, posixpath.dirname(page.file.src_uri) or ".")

    return _LINK.sub(moved, split_tests(markdown)[0] if page.file.src_uri == "features.md" else markdown)


def split_tests(markdown: str) -> tuple[str, str]:
    """Take the last column of tables whose head is `| | | tests |` away; return the page without, and a page of them."""
    kept, tests, heading, inside = [], [], "", False
    for line in markdown.splitlines():
        if line.startswith("## "):
            heading = line
        starts = line.replace(" ", "") == "|||tests|"
        inside = starts or (inside and line.startswith("|"))
        if not inside:
            kept.append(line)
            continue
        if starts:
            tests += ["", heading, "", "| | tests |", "|---|---|"]
        row, _, last = line.rstrip().removesuffix("|").rstrip().rpartition("|")
        kept.append(f"{row}|")
        if not starts and not set(line) <= set("|- "):
            tests.append(f"| {row.split(' | ')[0].strip('| ')} | {last.strip()} |")
    return "\n".join(kept) + "\n", "\n".join(tests) + "\n"


def _copied(target: str, config: Any, files: Files) -> str:
    """Return where the site has the text of a file of the repository; of a folder, the list of what is in it."""
    path, copy = ROOT / target, f"source/{target}.txt"
    if files.get_file_from_path(copy) is None:
        text = path.read_text() if path.is_file() else "\n".join(sorted(p.name for p in path.iterdir())) + "\n"
        files.append(File.generated(config, copy, content=text))
    return copy
