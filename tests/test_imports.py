"""Every import of the project's own modules resolves, also in scripts that no test runs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN = ("mggcn", "bench", "tests")


def unresolved(file: Path) -> list[str]:
    """Return the names that a file imports from the project and that are not there, wherever in the file."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in OWN:
            continue
        try:
            module = importlib.import_module(node.module or "")
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in OWN:
                found.append(f"{file.name}:{node.lineno}: no module {error.name}")
            continue
        for alias in node.names:
            package = hasattr(module, "__path__")
            if not hasattr(module, alias.name) and not (
                package and importlib.util.find_spec(f"{node.module}.{alias.name}")
            ):
                found.append(f"{file.name}:{node.lineno}: {node.module} has no {alias.name}")
    return found


def test_every_import_of_scripts_resolves() -> None:
    """Fails if a name moves and a benchmark or an example still asks for it where it was."""
    files = [file for folder in ("bench", "examples") for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 40
    assert [problem for file in files for problem in unresolved(file)] == []


def test_a_planted_stale_import_is_seen(tmp_path: Path) -> None:
    """The test itself fails for a module, or a name, that has gone."""
    file = tmp_path / "old.py"
    file.write_text("def f():\n    from mggcn.model.forward import Linear\nfrom mggcn.config import Settings\n")
    assert len(unresolved(file)) == 2
