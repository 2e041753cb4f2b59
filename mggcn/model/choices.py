"""Choices made before a graph of values is rewritten: how the input is kept, and the order of each layer's products.

V rows of this rank, D input width, E output width; work is counted in multiply-adds, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mggcn.blocks.block import Capacity
from mggcn.config import ModelConfig
from mggcn.errors import PlanError
from mggcn.memory.arena import ITEM_BYTES, BufferSpec
from mggcn.memory.device import REAL, STORAGE
from mggcn.model.kinds.ends import input_name

SPARSE_PENALTY = 5.0
"""Number of multiply-adds that a GEMM does in the time of one multiply-add of an SpMM whose operand fits the cache."""
SPARSE_READERS = "debug.features sparse needs a model in which only dense layers read X; use auto or dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUse:
    """A dense layer of the model: its number from 1, its widths, what it reads and what follows it.

    aggregated: whether a sum over neighbours alone reads its result. normalised: how many A_hat, as model.norm says, follow
    each other there, each the only one to read the one before.
    first: whether it alone reads the input; shares: whether it does so beside other dense layers, and nothing else.
    block: the size of the block that sums its result, None for the whole graph; rows: those that it has at most in a batch.
    """

    layer: int
    d_in: int
    d_out: int
    aggregated: bool
    normalised: int
    first: bool
    shares: bool = False
    block: Capacity | None = None
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShape:
    """The input's sizes on one rank: V rows, D features; nonzeros of X, of A's rows and of A_hat X."""

    rows: int
    cols: int
    nnz: int | None
    """None: the features are dense."""
    adj_nnz: int
    aggregated_nnz: int
    """Estimate for A_hat X; ignored for dense features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChoice:
    """How the input is stored: dense or sparse, as A_hat^K X, K = `aggregated`, in `nbytes`, and why."""

    sparse: bool = False
    aggregated: int = 0
    nbytes: int
    reason: str = ""


def _dense_bytes(shape: InputShape, precision: str) -> int:
    return BufferSpec("", shape.rows, shape.cols, STORAGE[precision]).nbytes


def sparse_bytes(shape: InputShape, nnz: int, precision: str, dropped: bool, transposed: bool = True) -> int:
    """Return the bytes of a sparse input in CSR and CSC; under dropout, of a second set of values and the positions.

    transposed: whether gradients read it, else it is in CSR alone.
    """
    item = ITEM_BYTES[REAL[precision]]
    entry = 4 + item
    if not transposed:
        return nnz * entry + 8 * (shape.rows + 1)
    extra = item + 4 if dropped else 0
    return 2 * nnz * entry + nnz * extra + 8 * (shape.rows + shape.cols + 2)


def choose_input(
    model: ModelConfig,
    layers: Sequence[LayerUse],
    shape: InputShape,
    setting: str,
    precision: str,
    *,
    gathered: bool = False,
    dense_rows: str = "",
    learned: bool = False,
) -> InputChoice:
    """Choose the form in which the input of a model with these layers is stored.

    setting: debug.features (auto, dense, sparse). Dense X without input dropout is kept as A_hat X, under K sums one after
    the other as A_hat^K X: layer 1 then needs no SpMM in either direction. Sparse X stays in CSR and CSC as X or as A_hat
    X, or becomes dense, whichever does least work per epoch. gathered: whether each step reads rows of X for its batch;
    dense_rows: why these are dense whatever X is, "" if they need not be. learned: whether each step moves X, which
    is then dense, too. Raises: PlanError for sparse where others than dense layers read X.
    """
    dense = _dense_bytes(shape, precision)
    if learned:
        return InputChoice(nbytes=dense, reason="X is learned: every step moves its rows")
    if gathered:
        readers = [layer for layer in layers if layer.first or layer.shares]
        return _gathered_input(readers, shape, setting, precision, dense_rows)
    use = next((layer for layer in layers if layer.first), None)
    if use is None:
        return _shared_input(model, [layer for layer in layers if layer.shares], shape, setting, precision)
    if shape.nnz is None or setting == "dense":
        if not use.normalised:
            reason = f"X is kept dense: {_no_graph(model)}"
            return InputChoice(nbytes=dense, reason=reason)
        if not model.input_dropout:
            name = input_name(use.normalised)
            reason = f"{name} is computed once and kept instead of X: layer 1 needs no SpMM in either direction"
            return InputChoice(aggregated=use.normalised, nbytes=dense, reason=reason)
        return InputChoice(nbytes=dense, reason="X is kept dense: input dropout changes it every epoch")
    return _least_work(_sparse_options(model, use, shape, precision), setting)


def _shared_input(
    model: ModelConfig, layers: Sequence[LayerUse], shape: InputShape, setting: str, precision: str
) -> InputChoice:
    """Choose between X sparse and X dense for dense layers that share it, such as a convolution and its residual."""
    dense = _dense_bytes(shape, precision)
    if not layers:
        if setting == "sparse":
            raise PlanError(SPARSE_READERS)
        return InputChoice(nbytes=dense, reason="X is kept dense: layers other than dense ones read it")
    if shape.nnz is None or setting == "dense":
        return InputChoice(nbytes=dense, reason=f"X is kept dense: {len(layers)} layers read it")
    width = sum(layer.d_out for layer in layers)
    x_bytes = sparse_bytes(shape, shape.nnz, precision, model.input_dropout > 0)
    options = [
        (SPARSE_PENALTY * 2 * shape.nnz * width, InputChoice(sparse=True, nbytes=x_bytes)),
        (2.0 * shape.rows * shape.cols * width, InputChoice(nbytes=dense)),
    ]
    return _least_work(options, setting)


def _gathered_input(
    layers: Sequence[LayerUse], shape: InputShape, setting: str, precision: str, dense_rows: str
) -> InputChoice:
    """Choose between sparse and dense rows of X for a batch, which these dense layers alone read, if there are any.

    Rows of a batch count as the graph's average. An evaluation over the whole graph keeps X alike.
    """
    dense = InputChoice(nbytes=_dense_bytes(shape, precision), reason="X is gathered for each batch")
    if shape.nnz is None or setting == "dense":
        return dense
    if dense_rows:
        return replace(dense, reason=f"{dense.reason} as dense rows: {dense_rows}")
    if not layers:
        if setting == "sparse":
            raise PlanError(SPARSE_READERS)
        return replace(dense, reason=f"{dense.reason} as dense rows: layers other than dense ones read it")
    sparse = InputChoice(sparse=True, nbytes=sparse_bytes(shape, shape.nnz, precision, dropped=False, transposed=False))
    length = shape.nnz / max(shape.rows, 1)
    options = [
        (2 * sum(_sparse_work(use, length) for use in layers), sparse),
        (2 * sum(_dense_work(use) for use in layers), dense),
    ]
    options = options[:1] if setting == "sparse" else options
    work, best = min(options, key=lambda o: o[0])
    others = [f"; otherwise: {_name(one)} {w / 1e6:.1f} M" for w, one in options if one is not best]
    reason = (
        f"{_name(best)} is gathered for each batch: layer 1 takes about {work / 1e6:.1f} M multiply-adds of a dense "
        f"product a step{''.join(others)}"
    )
    return replace(best, reason=reason)


def _sparse_work(use: LayerUse, length: float) -> float:
    """Return the work of a layer's product with sparse rows of so many nonzeros, and of the sum after it."""
    edges = 0 if use.block is None else use.block.edges
    return SPARSE_PENALTY * (use.rows * length + edges) * use.d_out


def _dense_work(use: LayerUse) -> float:
    """Return the work of a layer's product with dense rows, and of a sum before or after it."""
    if use.block is None:
        return use.rows * use.d_in * use.d_out
    return min(_block_work(use, use.block))


def _least_work(options: Sequence[tuple[float, InputChoice]], setting: str) -> InputChoice:
    """Return the choice of least work, with its reason; setting: debug.features."""
    if setting == "sparse":
        options = [o for o in options if o[1].sparse]
    work, best = min(options, key=lambda o: o[0])
    rest = "; ".join(
        f"{_name(choice)} {w / 1e6:.1f} M, {choice.nbytes / 2**20:.1f} MiB"
        for w, choice in options
        if choice is not best
    )
    reason = (
        f"{_name(best)} is kept: layer 1 takes about {work / 1e6:.1f} M multiply-adds of a dense product an epoch, and "
        f"{best.nbytes / 2**20:.1f} MiB" + (f"; otherwise: {rest}" if rest else "")
    )
    return replace(best, reason=reason)


def _no_graph(model: ModelConfig) -> str:
    if not model.aggregates:
        return "the model has no graph"
    return "no normalised sum over neighbours alone reads its product"


def _name(choice: InputChoice) -> str:
    return f"{'sparse' if choice.sparse else 'dense'} {input_name(choice.aggregated)}"


def _sparse_options(
    model: ModelConfig, use: LayerUse, shape: InputShape, precision: str
) -> list[tuple[float, InputChoice]]:
    """Work per epoch and choice for each way to keep a sparse X."""
    graph, dropped, width = use.aggregated, model.input_dropout > 0, use.d_out
    nnz = shape.nnz or 0
    spmm = 2 * shape.adj_nnz * width if graph else 0
    hops = max(use.normalised, 1)
    x_bytes, dense = sparse_bytes(shape, nnz, precision, dropped), _dense_bytes(shape, precision)
    options = [(SPARSE_PENALTY * (2 * nnz * width + hops * spmm), InputChoice(sparse=True, nbytes=x_bytes))]
    gemm = 2 * shape.rows * shape.cols * width
    if dropped or not use.normalised:
        options.append((gemm + SPARSE_PENALTY * hops * spmm, InputChoice(nbytes=dense)))
    else:
        ax_bytes = sparse_bytes(shape, shape.aggregated_nnz, precision, False)
        work = SPARSE_PENALTY * (2 * shape.aggregated_nnz * width + (hops - 1) * spmm)
        options.append((work, InputChoice(sparse=True, aggregated=1, nbytes=ax_bytes)))
        options.append((float(gemm), InputChoice(aggregated=use.normalised, nbytes=dense)))
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """One layer: its number from 1, widths, and the order of its products with the reason.

    products: "precomputed" (A_hat^K X W), "gemm-first" A_hat (H W), "aggregate-first" (A_hat H) W, or "dense" (no
    aggregation follows).
    """

    layer: int
    d_in: int
    d_out: int
    products: str
    reason: str


def _block_work(use: LayerUse, block: Capacity) -> tuple[float, float]:
    """Return the work of a layer with its product over all sources before the sum, and over the targets after it."""
    product, edges = use.d_in * use.d_out, SPARSE_PENALTY * block.edges
    return block.sources * product + edges * use.d_out, block.targets * product + edges * use.d_in


def choose_layer(model: ModelConfig, use: LayerUse, choice: InputChoice, products: str) -> LayerChoice:
    """Choose the order of products of a dense layer and the aggregation after it; `products` is debug.products.

    MG-GCN's rule (section 4.3): the narrower side goes through the graph, so GEMM first if and only if E <= D. Over a
    block of fewer targets than sources the product with W has fewer rows after the sum: the order of less work.
    """
    d_in, d_out = use.d_in, use.d_out
    if not use.aggregated:
        kind = "dense"
        reason = "no sum over neighbours alone reads its result" if model.aggregates else "the model has no graph"
    elif use.first and choice.aggregated:
        kind, reason = "precomputed", f"{input_name(choice.aggregated)} is constant: no SpMM"
    elif (use.first or use.shares) and choice.sparse:
        kind, reason = "gemm-first", f"X is sparse: SpMM at width {d_out} of X W"
    elif products != "auto":
        kind, reason = products, "as set by debug.products"
    elif use.block is not None and use.block.targets < use.block.sources:
        first, after = _block_work(use, use.block)
        kind = "gemm-first" if first <= after else "aggregate-first"
        reason = f"{first / 1e6:.3g} M multiply-adds with the product first, {after / 1e6:.3g} M with the sum first"
    elif d_out <= d_in:
        kind, reason = "gemm-first", f"{d_out} <= {d_in}: the narrower side goes through the graph"
    else:
        kind, reason = "aggregate-first", f"{d_in} < {d_out}: the narrower side goes through the graph, A H is kept"
    return LayerChoice(layer=use.layer, d_in=d_in, d_out=d_out, products=kind, reason=reason)
