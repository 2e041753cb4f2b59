"""What an op is and what it runs on; forward.py and backward.py hold the ops themselves.

Shapes: V rows of this rank, D input width, E output width, C classes. A_hat = S_r A^T S_c; activations are stored scaled,
H' = S_c H. Buffers are named: h1 .. hL activations (hL the logits), t/u forward and b/c backward products; where operands
of the graph have a type of their own, r: H rounded, g: gradients rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from mggcn.aggregate.base import Aggregation
from mggcn.backend.base import Dropout, Epilogue, Gradient, KernelBackend, Sparse, keep_scale

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a rank's ops read besides buffers and weights; device tensors.

    row_scale, col_scale (V,) or None: S_r, S_c; row_ids int64 (V,): original ids; labels int32, mask uint8 (V,);
    owned int64: rows that are no copies of another rank's, None if all.
    dense (V, D): X or A_hat X; sparse, sparse_t: the same as CSR and its transpose; dropped and dropped_t share their
    structure with values of their own, rewritten each epoch under input dropout; position int32 (nnz,): entry of
    `sparse` for each entry of `sparse_t`.
    """

    row_scale: Tensor | None
    col_scale: Tensor | None
    row_ids: Tensor
    labels: Tensor
    mask: Tensor
    inv_count: float
    owned: Tensor | None = None
    dense: Tensor | None = None
    sparse: Sparse | None = None
    sparse_t: Sparse | None = None
    dropped: Sparse | None = None
    dropped_t: Sparse | None = None
    position: Tensor | None = None


class Runtime(Protocol):
    """What ops run on: the named buffers of one rank and everything constant."""

    backend: KernelBackend
    inputs: Inputs
    clock: Tensor
    """Seed and epoch, int64 (2,) on the device."""

    @property
    def aggregation(self) -> Aggregation: ...

    def buffer(self, name: str) -> Tensor: ...

    def weight(self, layer: int) -> Tensor: ...

    def bias(self, layer: int) -> Tensor: ...

    def weight_grad(self, layer: int) -> Tensor: ...

    def bias_grad(self, layer: int) -> Tensor: ...

    @property
    def loss(self) -> Tensor: ...

    @property
    def counts(self) -> Tensor: ...


class Op(Protocol):
    """One step of a program."""

    @property
    def label(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def writes(self) -> tuple[str, ...]: ...

    def run(self, rt: Runtime) -> None: ...


@dataclass(frozen=True, slots=True)
class EpilogueSpec:
    """What follows a product, by name: out_scale * drop(relu(row_scale * z + bias))."""

    layer: int
    row_scale: bool = False
    bias: bool = False
    relu: bool = False
    dropout: float = 0.0
    out_scale: bool = False

    def epilogue(self, rt: Runtime) -> Epilogue | None:
        """Return the epilogue on the rank's vectors, None if it does nothing."""
        if self == EpilogueSpec(self.layer):
            return None
        return Epilogue(
            rt.inputs.row_scale if self.row_scale else None,
            rt.bias(self.layer) if self.bias else None,
            self.relu,
            Dropout(self.dropout, rt.clock, self.layer) if self.dropout else None,
            rt.inputs.row_ids,
            rt.inputs.col_scale if self.out_scale else None,
        )


T = TypeVar("T")


def require(value: T | None) -> T:
    """Return an input that the lowering promised; raises KeyError if it was never loaded."""
    if value is None:
        raise KeyError("an op reads an input that was never loaded")
    return value


def partials_of(rt: Runtime, name: str) -> Tensor | None:
    """Return the room for the partial sums of a bias gradient, None without a bias."""
    if not name:
        return None
    padded = rt.buffer(name)
    # The kernels take adjacent rows without padding.
    return padded.as_strided(padded.shape, (padded.shape[1], 1))


def product_of_rows(
    rt: Runtime, a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue | None, first_row: int, rounded: str
) -> None:
    """Out = epilogue(a @ b) for rows first_row, ...; rounded: room for them if out has another type, or ""."""
    if not rounded or rt.backend.fuses_products:
        rt.backend.matmul(a, b, out, epilogue=epilogue, first_row=first_row)
        return
    block = rt.buffer(rounded)[: out.shape[0]]
    rt.backend.matmul(a, b, block)
    rt.backend.finish(block, out, epilogue if epilogue is not None else Epilogue(), first_row)


def finished_product(
    rt: Runtime, a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue | None, block_rows: int, rounded: str = ""
) -> None:
    """Out = epilogue(a @ b): at once, or by blocks of rows that are finished, and rounded, while they lie in the cache."""
    whole = (epilogue is None and not rounded) or rt.backend.fuses_products
    step = max(1, out.shape[0] if whole else block_rows)
    for first in range(0, out.shape[0], step):
        some = slice(first, first + step)
        product_of_rows(rt, a[some], b, out[some], epilogue, first, rounded)


def dropped_block(rt: Runtime, name: str, dropped: EpilogueSpec, first: int, rows: int) -> Tensor:
    """Fill the first `rows` rows of a buffer with S_c drop(X) of rows first, ... and return them."""
    block = rt.buffer(name)[:rows]
    source = require(rt.inputs.dense)[first : first + rows]
    epilogue = dropped.epilogue(rt)
    rt.backend.finish(source, block, epilogue if epilogue is not None else Epilogue(), first)
    return block


@dataclass(frozen=True, slots=True)
class ActivationBackward:
    """How a gradient passes the activation of a layer, in place of its output h or, rounded, beside it."""

    layer: int
    masked: bool
    dropout: float
    col_scale: bool
    row_scale: bool

    def run(self, rt: Runtime, g: Tensor, h: Tensor, partials: Tensor | None, out: Tensor | None) -> None:
        """H, or out if given, = out_scale * (h != 0) * keep * S_c * g."""
        rt.backend.activation_grad(
            g,
            h,
            masked=self.masked,
            keep_scale=keep_scale(self.dropout),
            h_scale=rt.inputs.col_scale if self.col_scale else None,
            out_scale=rt.inputs.row_scale if self.row_scale else None,
            partials=partials,
            out=out,
        )

    def run_product(
        self,
        rt: Runtime,
        a: Tensor,
        b: Tensor,
        h: Tensor,
        block: Tensor,
        partials: Tensor | None,
        out: Tensor | None,
    ) -> None:
        """As `run` with g = a @ b, of which a few rows at a time exist, in `block` if anywhere."""
        scales = rt.inputs.col_scale if self.col_scale else None, rt.inputs.row_scale if self.row_scale else None
        gradient = Gradient(self.masked, keep_scale(self.dropout), *scales, partials)
        rt.backend.product_grad(a, b, h, block, gradient, out)
