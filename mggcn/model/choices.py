"""What the lowering decides before it lowers: how the input is kept, and the order of each layer's products, with reasons.

V rows of this rank, D input width, E output width; work is counted in multiply-adds, memory in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from mggcn.config import ModelConfig
from mggcn.memory.arena import ITEM_BYTES, BufferSpec
from mggcn.memory.device import REAL, STORAGE

SPARSE_PENALTY = 5.0
"""Multiply-adds of a GEMM in the time of one of an SpMM whose operand fits the cache."""


@dataclass(frozen=True, slots=True)
class InputShape:
    """What is known of the input on one rank: V rows, D features; nonzeros of X, of A's rows and of A_hat X."""

    rows: int
    cols: int
    nnz: int | None
    """None: the features are dense."""
    adj_nnz: int
    aggregated_nnz: int
    """Estimate for A_hat X; ignored for dense features."""


@dataclass(frozen=True, slots=True)
class InputChoice:
    """How the input is kept: dense or sparse, as X or as A_hat X (`aggregated`), in `nbytes`, and why."""

    sparse: bool
    aggregated: bool
    nbytes: int
    reason: str


def _dense_bytes(shape: InputShape, precision: str) -> int:
    return BufferSpec("", shape.rows, shape.cols, STORAGE[precision]).nbytes


def sparse_bytes(shape: InputShape, nnz: int, precision: str, dropped: bool) -> int:
    """Return the bytes of a sparse input in CSR and CSC; under dropout, of a second set of values and the positions."""
    item = ITEM_BYTES[REAL[precision]]
    entry = 4 + item
    extra = item + 4 if dropped else 0
    return 2 * nnz * entry + nnz * extra + 8 * (shape.rows + shape.cols + 2)


def choose_input(model: ModelConfig, shape: InputShape, width: int, setting: str, precision: str) -> InputChoice:
    """Choose how the input is kept; `width` is that of layer 1, `setting` is run.features (auto, dense, sparse).

    Dense X without input dropout is kept as A_hat X: layer 1 then needs no SpMM in either direction. Sparse X stays in
    CSR and CSC as X or as A_hat X, or becomes dense, whichever does the least work per epoch.
    """
    graph = model.aggregates
    constant = not model.input_dropout
    if shape.nnz is None or setting == "dense":
        nbytes = _dense_bytes(shape, precision)
        if not graph:
            return InputChoice(False, False, nbytes, "X is kept dense: the model has no graph")
        if constant:
            return InputChoice(
                False,
                True,
                nbytes,
                "A X is computed once and kept instead of X: layer 1 needs no SpMM in either direction",
            )
        return InputChoice(False, False, nbytes, "X is kept dense: input dropout changes it every epoch")
    options = _sparse_options(model, shape, width, precision)
    if setting == "sparse":
        options = [o for o in options if o[1].sparse]
    work, best = min(options, key=lambda o: o[0])
    rest = "; ".join(
        f"{_name(choice)} {w / 1e6:.1f} M, {choice.nbytes / 2**20:.1f} MiB"
        for w, choice in options
        if choice is not best
    )
    reason = (
        f"{_name(best)} is kept: {work / 1e6:.1f} M weighted multiply-adds an epoch in layer 1, "
        f"{best.nbytes / 2**20:.1f} MiB" + (f" (against {rest})" if rest else "")
    )
    return InputChoice(best.sparse, best.aggregated, best.nbytes, reason)


def _name(choice: InputChoice) -> str:
    return f"{'sparse' if choice.sparse else 'dense'} {'A X' if choice.aggregated else 'X'}"


def _sparse_options(
    model: ModelConfig, shape: InputShape, width: int, precision: str
) -> list[tuple[float, InputChoice]]:
    """Work per epoch and choice for each way to keep a sparse X."""
    graph, dropped = model.aggregates, model.input_dropout > 0
    nnz = shape.nnz or 0
    spmm = 2 * shape.adj_nnz * width if graph else 0
    x_bytes = sparse_bytes(shape, nnz, precision, dropped)
    options = [(SPARSE_PENALTY * (2 * nnz * width + spmm), InputChoice(True, False, x_bytes, ""))]
    gemm = 2 * shape.rows * shape.cols * width
    if dropped or not graph:
        options.append((gemm + SPARSE_PENALTY * spmm, InputChoice(False, False, _dense_bytes(shape, precision), "")))
    else:
        ax_bytes = sparse_bytes(shape, shape.aggregated_nnz, precision, False)
        options.append((SPARSE_PENALTY * 2 * shape.aggregated_nnz * width, InputChoice(True, True, ax_bytes, "")))
        options.append((float(gemm), InputChoice(False, True, _dense_bytes(shape, precision), "")))
    return options


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """One layer: its number from 1, widths, and the order of its products with the reason.

    products: "precomputed" (A_hat X W), "gemm-first" A_hat (H W), "aggregate-first" (A_hat H) W, or "dense" (no graph).
    """

    layer: int
    d_in: int
    d_out: int
    products: str
    reason: str


def choose_layers(
    model: ModelConfig, num_features: int, num_classes: int, choice: InputChoice, products: str
) -> tuple[LayerChoice, ...]:
    """Choose the order of products of every layer; `products` is run.products.

    MG-GCN's rule (section 4.3): the narrower side goes through the graph, so GEMM first if and only if E <= D.
    """
    widths = (num_features, *model.hidden, num_classes)
    layers = []
    for layer, (d_in, d_out) in enumerate(pairwise(widths), start=1):
        if not model.aggregates:
            kind, reason = "dense", "the model has no graph"
        elif layer == 1 and choice.aggregated:
            kind, reason = "precomputed", "A X is constant: no SpMM"
        elif layer == 1 and choice.sparse:
            kind, reason = "gemm-first", f"X is sparse: SpMM at width {d_out} of X W"
        elif products != "auto":
            kind, reason = products, "as set by run.products"
        elif d_out <= d_in:
            kind, reason = "gemm-first", f"{d_out} <= {d_in}: the narrower side goes through the graph"
        else:
            kind, reason = "aggregate-first", f"{d_in} < {d_out}: the narrower side goes through the graph, A H is kept"
        layers.append(LayerChoice(layer, d_in, d_out, kind, reason))
    return tuple(layers)
