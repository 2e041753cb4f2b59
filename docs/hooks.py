"""MkDocs hooks: a list of all notes, and copies in the site of the files outside docs/ that pages link to."""

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

Decisions, with their context, the alternatives that were rejected, and how one would notice that a decision was wrong.

"""


def on_files(files: Files, config: Any) -> Files:
    """Add the list of notes: a new one needs no entry anywhere."""
    notes = sorted((ROOT / "docs" / "notes").glob("[0-9]*.md"))
    entries = [f"- [{note.read_text().splitlines()[0].lstrip('# ')}]({note.name})\n" for note in notes]
    files.append(File.generated(config, "notes/index.md", content=NOTES + "".join(entries)))
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

    return _LINK.sub(moved, markdown)


def _copied(target: str, config: Any, files: Files) -> str:
    """Return where the site has the text of a file of the repository; of a folder, the list of what is in it."""
    path, copy = ROOT / target, f"source/{target}.txt"
    if files.get_file_from_path(copy) is None:
        text = path.read_text() if path.is_file() else "\n".join(sorted(p.name for p in path.iterdir())) + "\n"
        files.append(File.generated(config, copy, content=text))
    return copy
