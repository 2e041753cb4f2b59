"""mggcn: training of graph neural networks on the whole graph, exact, or on batches, planned, on one to P ranks.

The public names below load on first use, so that `import mggcn` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mggcn import forks
from mggcn.version import __version__

if TYPE_CHECKING:
    from mggcn.api.graphs import APPNP, GAT, GCN, GIN, MLP, RGCN, SAGE, SGC, GATv2, load, save
    from mggcn.api.sweeps import sweep
    from mggcn.api.trainer import Trainer
    from mggcn.config import Config
    from mggcn.errors import MggcnError
    from mggcn.graph.csr import Graph
    from mggcn.graph.facts import describe
    from mggcn.graph.links import split_links
    from mggcn.graph.options import GraphOptions
    from mggcn.interop.weights import from_dgl, from_pyg, to_pyg

_PUBLIC = {
    "APPNP": "api.graphs",
    "GAT": "api.graphs",
    "GATv2": "api.graphs",
    "GCN": "api.graphs",
    "GIN": "api.graphs",
    "MLP": "api.graphs",
    "RGCN": "api.graphs",
    "SAGE": "api.graphs",
    "SGC": "api.graphs",
    "Trainer": "api.trainer",
    "load": "api.graphs",
    "save": "api.graphs",
    "sweep": "api.sweeps",
    "Config": "config",
    "Graph": "graph.csr",
    "GraphOptions": "graph.structure",
    "MggcnError": "errors",
    "describe": "graph.facts",
    "from_dgl": "interop.weights",
    "from_pyg": "interop.weights",
    "split_links": "graph.links",
    "to_pyg": "interop.weights",
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
    "split_links",
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
