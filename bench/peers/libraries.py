"""Which libraries mggcn can be compared with here, and the interpreter that has them. Imports nothing large."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

DISTRIBUTIONS = {
    "torch": "torch",
    "pyg": "torch_geometric",
    "dgl": "dgl",
    "scipy": "scipy",
    "mkl": "mkl",
    "torch-sparse": "torch-sparse",
}
"""Libraries by short name, as setup.sh installs them."""
OPTIONAL = {"mkl", "torch-sparse"}
MODULES = {"torch": "torch", "pyg": "torch_geometric", "scipy": "scipy"}
"""What mggcn's own environment may have: looked for where setup.sh has not been run."""
ADVICE = "run bench/peers/setup.sh first"


@dataclass(frozen=True)
class Peers:
    """An interpreter, the versions of the libraries that work in it, and why others are left out."""

    python: str
    versions: dict[str, str]
    faults: dict[str, str]

    def __contains__(self, library: str) -> bool:
        return library in self.versions


def find_peers(folder: Path) -> Peers:
    """Return the environment that setup.sh made in a folder, or else what this interpreter has."""
    python, told = folder / "bin" / "python", folder / "peers.json"
    if python.exists() and told.exists():
        found = json.loads(told.read_text())
        return Peers(str(python), found["versions"], found["faults"])
    versions = {
        library: metadata.version(DISTRIBUTIONS[library])
        for library, module in MODULES.items()
        if importlib.util.find_spec(module)
    }
    absent = [library for library in DISTRIBUTIONS if library not in versions]
    return Peers(sys.executable, versions, dict.fromkeys(absent, f"not installed: {ADVICE}"))


def missing_text(peers: Peers) -> str:
    """A line for each library that is left out, for a report."""
    return "".join(f"Left out: {library}: {fault}.\n" for library, fault in sorted(peers.faults.items()))
