"""From a model and the sizes of a shard to a flat list of ops, forward then backward, and the buffers they use.

V rows of this rank, L layers; layer l maps width d(l - 1) to d(l).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mggcn.aggregate.base import AggregationPlan, aggregate_name
from mggcn.config import ModelConfig
from mggcn.memory.arena import ArenaPlan, BufferSpec, place
from mggcn.memory.device import DEVICES, DeviceModel
from mggcn.model import backward as bwd
from mggcn.model import forward as fwd
from mggcn.model.choices import InputChoice, LayerChoice
from mggcn.model.ops import ActivationBackward, EpilogueSpec, Op


@dataclass(frozen=True, slots=True)
class Program:
    """A flat list of ops and the arena that its buffers need."""

    name: str
    ops: tuple[Op, ...]
    arena: ArenaPlan


@dataclass(frozen=True, slots=True)
class Model:
    """What the lowering reads: configuration, choices, rows of this rank, type of activations."""

    config: ModelConfig
    input: InputChoice
    layers: tuple[LayerChoice, ...]
    rows: int
    dtype: str
    scaled_cols: bool
    """Whether S_c is not one (symmetric normalisation)."""
    operand: str
    """Type of what is multiplied with the graph, and so of messages; `dtype`, or narrower."""

    device: DeviceModel = DEVICES["cpu"]

    def block_rows(self, cols: int) -> int:
        """Return the rows of a block of `cols` columns."""
        return max(1, min(self.rows, self.device.block_rows(BufferSpec("", 1, cols, self.dtype).nbytes)))

    @property
    def rounds(self) -> bool:
        """Whether operands of the graph are rounded to a type of their own."""
        return self.operand != self.dtype


@dataclass(slots=True)
class _Builder:
    """Ops and buffers of one program as they are emitted."""

    model: Model
    aggregation: AggregationPlan
    training: bool
    of_layer: Mapping[int, AggregationPlan] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    buffers: dict[str, BufferSpec] = field(default_factory=dict)

    def buffer(self, name: str, cols: int, lifetime: str = "scratch", rows: int = -1, dtype: str = "") -> str:
        spec = BufferSpec(name, self.model.rows if rows < 0 else rows, cols, dtype or self.model.dtype, lifetime)
        self.buffers[name] = spec
        return name

    def block(self, op: str, cols: int) -> str:
        return self.buffer(f"{op}.block", cols, rows=self.model.block_rows(cols))

    def operand(self, name: str, cols: int) -> str:
        """Declare what an aggregation reads and nothing else does."""
        return self.buffer(name, cols, dtype=self.model.operand)

    def rounded_block(self, op: str, dst: str, rows: int) -> str:
        """Declare room for rows of a product before they are rounded to the type of `dst`, "" if they are not."""
        spec = self.buffers[dst]
        return "" if spec.dtype == self.model.dtype else self.buffer(f"{op}.sums", spec.cols, rows=rows)

    def partials(self, op: str, cols: int) -> str:
        return (
            self.buffer(f"{op}.partials", cols, rows=self.model.device.partials, dtype="fp64")
            if self.model.config.bias
            else ""
        )

    def slots(self, op: str, cols: int, layer: int, dtype: str = "") -> tuple[str, ...]:
        specs = self.of_layer.get(layer, self.aggregation).buffers(op, cols, dtype or self.model.operand)
        self.buffers.update({s.name: s for s in specs})
        return tuple(s.name for s in specs)

    def aggregate(self, layer: int, src: str, dst: str, finish: EpilogueSpec, backward: bool = False) -> None:
        slots = self.slots(aggregate_name(layer, backward), self.buffers[dst].cols, layer)
        self.ops.append(fwd.Aggregate(layer, src, dst, slots, finish, backward))

    def finish(self, choice: LayerChoice, row_scale: bool) -> EpilogueSpec:
        """The epilogue that turns the product of a layer into its stored output."""
        config, last = self.model.config, choice.layer == len(self.model.layers)
        if last:
            return EpilogueSpec(choice.layer, row_scale=row_scale, bias=config.bias)
        dropout = config.dropout if self.training else 0.0
        return EpilogueSpec(choice.layer, row_scale, config.bias, True, dropout, self.model.scaled_cols)

    def dropped(self) -> EpilogueSpec:
        """The epilogue that turns rows of the dense X into those of S_c drop(X)."""
        probability = self.model.config.input_dropout if self.training else 0.0
        return EpilogueSpec(0, dropout=probability, out_scale=self.model.scaled_cols)

    def program(self, name: str) -> Program:
        """Place the buffers."""
        return Program(name, tuple(self.ops), place(self.buffers.values(), self.ops))


def _forward(b: _Builder) -> None:
    first = b.model.layers[0]
    _input_layer(b, first)
    for choice in b.model.layers[1:]:
        layer, h = choice.layer, f"h{choice.layer - 1}"
        if choice.products == "aggregate-first":
            u = b.buffer(f"u{layer}", choice.d_in, "kept")
            if b.model.rounds:
                # The gradient takes the place of H, which must be of its type.
                r = b.operand(f"r{layer}", choice.d_in)
                b.ops.append(fwd.Rounded(layer, h, r, "input"))
                h = r
            b.aggregate(layer, h, u, EpilogueSpec(layer, row_scale=True))
            out = b.buffer(f"h{layer}", choice.d_out, "kept")
            b.ops.append(fwd.Linear(layer, u, out, b.finish(choice, False), b.model.block_rows(choice.d_out)))
        elif choice.products == "gemm-first":
            t, block = b.operand(f"t{layer}", choice.d_out), b.model.block_rows(choice.d_out)
            rounded = b.rounded_block(f"linear{layer}", t, block)
            b.ops.append(fwd.Linear(layer, h, t, EpilogueSpec(layer), block, rounded))
            b.aggregate(layer, t, b.buffer(f"h{layer}", choice.d_out, "kept"), b.finish(choice, True))
        else:
            out = b.buffer(f"h{layer}", choice.d_out, "kept")
            b.ops.append(fwd.Linear(layer, h, out, b.finish(choice, False), b.model.block_rows(choice.d_out)))


def _input_layer(b: _Builder, choice: LayerChoice) -> None:
    """Layer 1, whose input is constant: dense or sparse, X or A_hat X, with dropout or without."""
    model, rows = b.model, b.model.block_rows(choice.d_out)
    direct = choice.products in ("precomputed", "dense")
    dropped = b.training and model.config.input_dropout > 0
    if model.input.sparse:
        if dropped:
            b.ops.append(fwd.DroppedValues(1, model.config.input_dropout))
        out = b.buffer("h1", choice.d_out, "kept") if direct else b.operand("t1", choice.d_out)
        b.ops.append(fwd.SparseLinear(1, out, b.finish(choice, False) if direct else EpilogueSpec(1), dropped))
    elif choice.products == "aggregate-first":
        x = b.operand("x1", choice.d_in)
        b.ops.append(fwd.DroppedInput(1, x, b.dropped()))
        u = b.buffer("u1", choice.d_in, "kept")
        b.aggregate(1, x, u, EpilogueSpec(1, row_scale=True))
        b.ops.append(fwd.Linear(1, u, b.buffer("h1", choice.d_out, "kept"), b.finish(choice, False), rows))
        return
    elif b.model.input.aggregated or (choice.products == "dense" and not dropped):
        b.ops.append(fwd.Linear(1, "", b.buffer("h1", choice.d_out, "kept"), b.finish(choice, False), rows))
    else:
        out = b.buffer("h1", choice.d_out, "kept") if direct else b.operand("t1", choice.d_out)
        finish = b.finish(choice, False) if direct else EpilogueSpec(1)
        block_rows = model.block_rows(choice.d_in)
        block, rounded = b.block("linear1", choice.d_in), b.rounded_block("linear1", out, block_rows)
        b.ops.append(fwd.DroppedLinear(1, block, out, finish, b.dropped(), block_rows, rounded))
    if not direct:
        b.aggregate(1, "t1", b.buffer("h1", choice.d_out, "kept"), b.finish(choice, True))


def _backward(b: _Builder) -> None:
    layers = b.model.layers
    last = layers[-1]
    partials = b.partials("loss", last.d_out)
    z = f"h{last.layer}"
    b.ops.append(bwd.Loss(last.layer, z, partials, last.products == "gemm-first"))
    if rounded := _rounded_gradient(b, last):
        b.ops.append(fwd.Rounded(last.layer, z, rounded, "gradient"))
        z = rounded
    for choice in reversed(layers[1:]):
        layer, h = choice.layer, f"h{choice.layer - 1}"
        rounded = _rounded_gradient(b, layers[layer - 2])
        activated = ActivationBackward(
            layer - 1,
            masked=True,
            dropout=b.model.config.dropout,
            col_scale=b.model.scaled_cols,
            row_scale=layers[layer - 2].products == "gemm-first",
        )
        if choice.products == "aggregate-first":
            b.ops.append(bwd.WeightGrad(layer, f"u{layer}", z))
            c, block_rows = b.operand(f"c{layer}", choice.d_in), b.model.block_rows(choice.d_in)
            sums = b.rounded_block(f"product-grad{layer}", c, block_rows)
            b.ops.append(bwd.ProductGrad(layer, z, c, EpilogueSpec(layer, row_scale=True), block_rows, sums))
            # A H has served the weight gradient: its buffer takes the gradient of H.
            b.aggregate(layer, c, f"u{layer}", EpilogueSpec(layer), backward=True)
            partials = b.partials(f"activation-grad{layer - 1}", choice.d_in)
            b.ops.append(bwd.ActivationGrad(layer, f"u{layer}", h, partials, activated, rounded))
            z = rounded or h
            continue
        g = z
        if choice.products == "gemm-first":
            g = b.buffer(f"b{layer}", choice.d_out)
            b.aggregate(layer, z, g, EpilogueSpec(layer), backward=True)
        b.ops.append(bwd.WeightGrad(layer, h, g))
        block, partials = b.block(f"input-grad{layer}", choice.d_in), b.partials(f"input-grad{layer}", choice.d_in)
        b.ops.append(bwd.InputGrad(layer, g, h, block, partials, activated, rounded))
        z = rounded or h
    _input_layer_backward(b, layers[0], z)


def _rounded_gradient(b: _Builder, choice: LayerChoice) -> str:
    """Declare where the gradient of a layer's output goes, rounded, if nothing but an aggregation reads it; else ""."""
    rounds = b.model.rounds and choice.products == "gemm-first"
    return b.operand(f"g{choice.layer}", choice.d_out) if rounds else ""


def _input_layer_backward(b: _Builder, choice: LayerChoice, z: str) -> None:
    """The weight gradient of layer 1 from the gradient z of its output: nothing below it needs one."""
    model = b.model
    dropped = model.config.input_dropout > 0
    g = z
    if choice.products == "gemm-first":
        g = b.buffer("b1", choice.d_out)
        b.aggregate(1, z, g, EpilogueSpec(1), backward=True)
    if model.input.sparse:
        b.ops.append(bwd.SparseWeightGrad(1, g, dropped))
    elif choice.products == "aggregate-first":
        b.ops.append(bwd.WeightGrad(1, "u1", g))
    elif model.input.aggregated or (choice.products == "dense" and not dropped):
        b.ops.append(bwd.WeightGrad(1, "", g))
    else:
        block = b.block("weight-grad1", choice.d_in)
        b.ops.append(bwd.DroppedWeightGrad(1, block, g, b.dropped(), model.block_rows(choice.d_in)))


def lower_training(
    model: Model, aggregation: AggregationPlan, of_layer: Mapping[int, AggregationPlan] | None = None
) -> Program:
    """Lower one training epoch: forward, loss, backward. Weight gradients are local sums, to be added over ranks.

    of_layer: plans of layers that do not aggregate as `aggregation` says.
    """
    builder = _Builder(model, aggregation, training=True, of_layer=of_layer or {})
    _forward(builder)
    _backward(builder)
    return builder.program("train")


def lower_evaluation(model: Model, aggregation: AggregationPlan) -> Program:
    """Lower one forward pass without dropout; the logits stay in buffer h<L> after it."""
    builder = _Builder(model, aggregation, training=False)
    _forward(builder)
    builder.ops.append(fwd.Score(f"h{len(model.layers)}"))
    return builder.program("evaluate")


def lower_setup(model: Model, aggregation: AggregationPlan, width: int) -> Program | None:
    """Lower the computation of A_hat X by panels of `width` columns; None if not needed.

    The panels run through one op each, in order; buffer "panel" holds S_c X of the panel's columns.
    """
    if model.input.sparse or not model.input.aggregated:
        return None
    builder = _Builder(model, aggregation, training=False)
    panel = builder.buffer("panel", width)
    slots = builder.slots("panel", width, 1, model.dtype)  # A X is computed once, and not rounded
    builder.ops.extend(
        fwd.Panel(panel, slots, first, min(width, model.layers[0].d_in - first))
        for first in range(0, model.layers[0].d_in, width)
    )
    return builder.program("setup")


def panel_width(model: Model, aggregation: AggregationPlan, limit: int) -> int:
    """Return the most columns of a panel for which set-up fits an arena of `limit` bytes: all, or a multiple of 16."""
    width = model.layers[0].d_in
    while width > 16:
        program = lower_setup(model, aggregation, width)
        if program is None or program.arena.nbytes <= limit:
            break
        width = max(16, (width // 2 + 15) // 16 * 16)
    return width


def paper_arena_bytes(model: Model, ranks: int, largest_rows: int) -> int:
    """Return the bytes of the paper's L + 3 buffers (MG-GCN 4.2; L + 1 on one rank) for these widths, rows padded alike."""
    widths = [layer.d_out for layer in model.layers]
    buffers = [model.layers[0].d_out] + [max(layer.d_in, layer.d_out) for layer in model.layers[1:]]
    own = sum(BufferSpec("", model.rows, w, model.dtype).nbytes for w in [*buffers, max(widths)])
    slots = 2 * BufferSpec("", largest_rows, max(widths), model.dtype).nbytes if ranks > 1 else 0
    return own + slots


def spmm_ops(ops: Sequence[Op]) -> list[fwd.Aggregate]:
    """Return the aggregations among the ops."""
    return [op for op in ops if isinstance(op, fwd.Aggregate)]
