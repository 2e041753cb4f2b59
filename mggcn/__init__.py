"""mggcn: whole-graph training of graph neural networks, exact and planned, on one to P ranks.

The public names below load on first use, so that `import mggcn` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mggcn import forks
from mggcn.version import __version__

if TYPE_CHECKING:
    from mggcn.api import APPNP, GAT, GCN, GIN, MLP, RGCN, SAGE, SGC, GATv2, load, save
    from mggcn.config import Config
    from mggcn.errors import MggcnError
    from mggcn.graph.csr import Graph
    from mggcn.graph.facts import describe
    from mggcn.graph.options import GraphOptions
    from mggcn.model.weights import from_dgl, from_pyg, to_pyg
    from mggcn.sweeps import sweep
    from mggcn.trainer import Trainer

_PUBLIC = {
    "APPNP": "api",
    "GAT": "api",
    "GATv2": "api",
    "GCN": "api",
    "GIN": "api",
    "MLP": "api",
    "RGCN": "api",
    "SAGE": "api",
    "SGC": "api",
    "Trainer": "trainer",
    "load": "api",
    "save": "api",
    "sweep": "sweeps",
    "Config": "config",
    "Graph": "graph.csr",
    "GraphOptions": "graph.structure",
    "MggcnError": "errors",
    "describe": "graph.facts",
    "from_dgl": "model.weights",
    "from_pyg": "model.weights",
    "to_pyg": "model.weights",
}
__all__ = [
    "APPNP",
    "GAT",
    "GCN",
    "GIN",
    "MLP",
    "RGCN",
    "SAGE",
    "SGC",
    "Config",
    "GATv2",
    "Graph",
    "GraphOptions",
    "MggcnError",
    "Trainer",
    "__version__",
    "describe",
    "from_dgl",
    "from_pyg",
    "load",
    "save",
    "sweep",
    "to_pyg",
]


def __dir__() -> list[str]:
    """List the names that are loaded and the public names that load on first use."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load a public name."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mggcn' has no attribute {name!r}; public are {', '.join(__all__)}")
    return getattr(importlib.import_module(f"mggcn.{_PUBLIC[name]}"), name)


# The one thing that is done at import: a fork may come before anything else of mggcn is loaded, behind torch's own threads.
forks.watch()
