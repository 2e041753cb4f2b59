"""Products with the matrices of several relations at a time: the kernels of R-GCN on devices where a launch costs time.

n rows of a group, D input width, E output width, R relations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from mggcn.backend.sparse import RelationGroup

if TYPE_CHECKING:
    from torch import Tensor


class RelationKernels(Protocol):
    """Kernels of one device for one storage type. Outputs are written in place; results repeat bit for bit."""

    def multiply(self, rows: Tensor, weights: Tensor, group: RelationGroup, out: Tensor, *, transposed: bool) -> None:
        """Out (n, E) = rows (n, D) @ W_r, or if transposed rows (n, E) @ W_r^T = out (n, D), r being a row's relation.

        weights (R, D E): W_r in row r.
        """
        ...

    def add_products(self, a: Tensor, b: Tensor, group: RelationGroup, gradients: Tensor) -> None:
        """Add a^T @ b of the rows of each relation r, a (n, D) and b (n, E), to row r of gradients (R, D E)."""
        ...

    def scatter_add(self, source: Tensor, index: Tensor, group: RelationGroup, out: Tensor) -> None:
        """out[index[i]] += source[i] in the order of i; index int32, of which `group.chain` says what repeats."""
        ...


def chain_of(rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return for each place in a list the next one of the same row, or 0; its complement where a place is not the first.

    Cost: a stable sort.
    """
    order = np.argsort(rows, kind="stable")
    repeats = rows[order][1:] == rows[order][:-1]
    after, later = order[:-1][repeats], order[1:][repeats]
    chain = np.zeros(rows.size, np.int32)
    chain[after] = later
    chain[later] = ~chain[later]
    return chain
