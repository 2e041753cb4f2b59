"""The weights of R-GCN's relations: W_r = sum over b of a_rb V_b (Schlichtkrull et al. 2018, eq. 3), and their gradients.

R relations, B bases, D input width, E output width. dV_b = sum_r a_rb dW_r, da_rb = <V_b, dW_r>.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mggcn.aggregate.relations import BLOCK_ROWS, Relational, RelationWork
from mggcn.blocks.block import RowSet
from mggcn.model.runtime import Runtime, Sizes
from mggcn.model.values import Op, Scratch


@dataclass(frozen=True, slots=True)
class RelationWeights:
    """The parameters of one layer by name: bases (B, D, E) and coefficients (R, B)."""

    bases: str
    coefficients: str
    num_relations: int
    num_bases: int

    def scratch(self, op: Relational, sizes: Sizes, rows_of: RowSet) -> Mapping[str, Scratch]:
        """Return the scratch memory for all W_r, a block of rows on both sides and, backwards, the gradients of W_r."""
        rows, every = max(1, min(sizes.rows[rows_of], BLOCK_ROWS)), Scratch(op.d_in * op.d_out, self.num_relations)
        room = {"weights": every, "near": Scratch(op.d_in, rows), "far": Scratch(op.d_out, rows)}
        return room | ({"gradients": every} if op.backward else {})

    def bound(self, edge_op: Relational, rt: Runtime, op: Op) -> Relational:
        """Return the operation on this rank's memory, with W_r composed."""
        weights, near, far = (rt.buffer(op.scratch[name]) for name in ("weights", "near", "far"))
        bases = rt.parameter(self.bases).view(self.num_bases, -1)
        rt.backend.matmul(rt.parameter(self.coefficients), bases, weights)
        gradients = None
        if edge_op.backward:
            gradients = rt.buffer(op.scratch["gradients"])
            gradients.zero_()
        return replace(edge_op, work=RelationWork(weights, near, far, gradients))

    def write_gradients(self, rt: Runtime, op: Op) -> None:
        """Turn the gradients of all W_r into those of the parameters. Cost: two products of R B D E."""
        gradients = rt.buffer(op.scratch["gradients"])
        bases, coefficients = rt.parameter(self.bases).view(self.num_bases, -1), rt.parameter(self.coefficients)
        rt.backend.matmul(gradients, bases.t(), rt.gradient(self.coefficients))
        rt.backend.matmul(coefficients.t(), gradients, rt.gradient(self.bases).view(self.num_bases, -1))
