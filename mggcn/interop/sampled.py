"""A block of a sampled batch as DGL's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mggcn.errors import BackendError

if TYPE_CHECKING:
    from torch import Tensor


def dgl_block(indptr: Tensor, indices: Tensor, num_sources: int, weights: Tensor | None) -> Any:
    """Return a DGLBlock; edata "w" is `weights`, if there are any. Edges keep their order.

    Shapes: indptr int64 (T + 1,), indices int64 (E,), weights (E,). Raises: BackendError without DGL.
    """
    try:
        import dgl
    except ImportError as error:
        raise BackendError(
            "to_dgl needs DGL, which is not installed: install it, or take block.edge_index()"
        ) from error
    ids = indices.new_zeros(0)  # in the order of the entries
    sizes = {"num_src_nodes": num_sources, "num_dst_nodes": indptr.shape[0] - 1}
    block = dgl.create_block(("csc", (indptr, indices, ids)), **sizes)
    if weights is not None:
        block.edata["w"] = weights
    return block
