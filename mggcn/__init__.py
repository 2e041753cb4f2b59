"""mggcn: whole-graph training of graph neural networks, exact and planned, on one to P ranks.

The public names below load on first use, so that `import mggcn` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mggcn.version import __version__

if TYPE_CHECKING:
    from mggcn.api import GCN, MLP, SAGE, load, save
    from mggcn.config import Config
    from mggcn.errors import MggcnError
    from mggcn.graph.csr import Graph
    from mggcn.graph.facts import describe
    from mggcn.graph.structure import GraphOptions
    from mggcn.model.weights import from_pyg, to_pyg
    from mggcn.trainer import Trainer

_PUBLIC = {
    "GCN": "api",
    "MLP": "api",
    "SAGE": "api",
    "Trainer": "trainer",
    "load": "api",
    "save": "api",
    "Config": "config",
    "Graph": "graph.csr",
    "GraphOptions": "graph.structure",
    "MggcnError": "errors",
    "describe": "graph.facts",
    "from_pyg": "model.weights",
    "to_pyg": "model.weights",
}
__all__ = [
    "GCN",
    "MLP",
    "SAGE",
    "Config",
    "Graph",
    "GraphOptions",
    "MggcnError",
    "Trainer",
    "__version__",
    "describe",
    "from_pyg",
    "load",
    "save",
    "to_pyg",
]


def __dir__() -> list[str]:
    """List what is loaded and what would be."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load a public name."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mggcn' has no attribute {name!r}; public are {', '.join(__all__)}")
    return getattr(importlib.import_module(f"mggcn.{_PUBLIC[name]}"), name)
