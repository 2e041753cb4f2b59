"""A PyTorch Geometric `Data` as `torch.save` writes it, read by the unpickler that makes tensors and `Data` alone."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mggcn.errors import GraphError

CLASSES: Mapping[str, tuple[str, ...]] = {
    "torch_geometric.data": ("Data",),
    "torch_geometric.data.data": ("DataEdgeAttr", "DataTensorAttr"),
    "torch_geometric.data.storage": ("BaseStorage", "NodeStorage", "EdgeStorage", "GlobalStorage"),
}


def read_data(path: Path) -> Any:
    """Return the `Data` of a file. Raises: GraphError without PyTorch Geometric, and for files that hold anything else."""
    import torch

    try:
        known = [getattr(importlib.import_module(module), name) for module, names in CLASSES.items() for name in names]
    except ImportError as error:
        raise GraphError(
            f"{path} needs PyTorch Geometric: pip install 'mggcn[pyg]', or save arrays in an .npz"
        ) from error
    try:
        with torch.serialization.safe_globals(known):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile archive or pickle raises nearly anything
        raise GraphError(
            f"{path} is not a file of one PyTorch Geometric Data ({type(error).__name__}); other objects are never "
            "unpickled, as that can execute code: torch.save(dataset[0], path) writes one"
        ) from error
    if not isinstance(found, known[0]):
        raise GraphError(f"{path} holds {type(found).__name__}, expected one PyTorch Geometric Data: save dataset[0]")
    try:
        # Its parts may be anything that the unpickler makes: a Data of its own keeps what it can.
        sound = known[0].from_dict(found.to_dict())
        sound.num_nodes  # noqa: B018 - is inferred from what is there
    except Exception as error:
        raise GraphError(f"{path} holds a damaged PyTorch Geometric Data ({error}); save it again") from error
    return sound
