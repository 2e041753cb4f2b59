"""The builder with which a model is written: every method returns a new value and creates the parameters that it needs.

A model is a function of a builder, its input and a ModelConfig that returns the logits (V, C): stack.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mggcn.aggregate.attention import AttentionSpec
from mggcn.aggregate.edge_op import SUM, EdgeOp
from mggcn.aggregate.maximum import Maximum
from mggcn.aggregate.relations import Relational
from mggcn.blocks.block import WHOLE, Block
from mggcn.config import ModelConfig
from mggcn.errors import PlanError
from mggcn.model.kinds.aggregate import Aggregate, Part
from mggcn.model.kinds.combine import Activation, Blend, Concat, Larger, Own
from mggcn.model.kinds.dense import Linear
from mggcn.model.kinds.elementwise import Add, EpilogueSpec, elementwise
from mggcn.model.kinds.ends import Input
from mggcn.model.kinds.neighbours import AttentionRule, HeadMean, MaximumRule, Numbered, Scores, attend
from mggcn.model.kinds.norms import BatchNorm, LayerNorm, RunningNorm
from mggcn.model.kinds.relations import RelationWeights
from mggcn.model.runtime import Parameter, Start
from mggcn.model.values import Kind, Value

_UNIFORM = ("sage", "gin", "sgc", "appnp", "mlp")
"""Kinds whose layers of PyG start as torch.nn.Linear does; matrices of the others are Glorot-uniform."""


@dataclass(slots=True)
class Builder:
    """Makes the values of one model. training: whether dropout drops.

    num_classes: C; num_relations: R, 0 where edges have no types; counted: whether values of edges are numbers of parallel
    ones, which attention reads. blocks: of a step, the input's first. parameters: those created so far, by name. learned:
    whether the input has a gradient.
    """

    config: ModelConfig
    num_classes: int
    training: bool
    num_relations: int = 0
    counted: bool = False
    blocks: tuple[Block, ...] = (WHOLE,)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    learned: bool = False
    _layers: int = 0
    _aggregates: int = 0
    _masks: int = 0
    _norms: int = 0
    _biases: int = 0
    _own: dict[Value, Value] = field(default_factory=dict)

    def own(self, x: Value) -> Value:
        """Return the rows of x that the next aggregation computes: a block's targets. Over the whole graph x itself."""
        block = self._block(x)
        if block.targets == x.rows:
            return x
        if x not in self._own:
            self._own[x] = Value(Own(block.targets), (x,), x.cols)
        return self._own[x]

    def _block(self, x: Value) -> Block:
        """Return the block whose sources x has. Raises: PlanError after the last one."""
        block = next((block for block in self.blocks if block.sources == x.rows), None)
        if block is None:
            raise PlanError(
                f"the model aggregates more often than the {len(self.blocks)} blocks of a step allow; give it as many "
                "blocks as it has aggregations one after the other"
            )
        return block

    def _alike(self, *values: Value) -> tuple[Value, ...]:
        """Return the rows that all values have: those of the value after most blocks."""
        sets = [self.blocks[0].sources, *(block.targets for block in self.blocks)]
        last = sets[max(len(sets) - 1 - sets[::-1].index(value.rows) for value in values)]
        found = []
        for value in values:
            while value.rows != last:
                value = self.own(value)
            found.append(value)
        return tuple(found)

    @property
    def layer(self) -> int:
        """Return the number of the last linear layer, which names of parameters contain; 0 before the first."""
        return self._layers

    def input(self, num_features: int) -> Value:
        """Return the features X (V, D), dropped as model.input_dropout says."""
        x = Value(Input(of=self.blocks[0].sources, learned=self.learned), (), num_features)
        return elementwise(x, EpilogueSpec(dropout=self.config.input_dropout if self.training else 0.0))

    def linear(self, x: Value, cols: int) -> Value:
        """Return x W with a new weight matrix (x.cols, cols), layers.<l>.weight, which starts as model.init says."""
        kind = self.config.kind
        return self._product(x, cols, uniform=kind in _UNIFORM, biases=kind in (*_UNIFORM, "gatv2"))

    def dense(self, x: Value, cols: int) -> Value:
        """Return x W + b, a dense layer around convolutions: model.bias is not asked."""
        return self._plus(self._product(x, cols, uniform=True, biases=True))

    def _product(self, x: Value, cols: int, *, uniform: bool, biases: bool) -> Value:
        """Return x W. uniform, biases: whether W, and a bias that is added to it, start uniformly in PyG."""
        self._layers += 1
        asked = x.cols if self.config.init == "pyg" else 0
        self._biases = asked if biases else 0
        weight = self.parameter(f"layers.{self._layers}.weight", (x.cols, cols), inputs=asked if uniform else 0)
        return Value(Linear(weight, self._layers), (x,), cols)

    def bias(self, x: Value, name: str = "") -> Value:
        """Return x + b with a new vector b, by default layers.<l>.bias; x itself if model.bias is off."""
        return self._plus(x, name) if self.config.bias else x

    def _plus(self, x: Value, name: str = "") -> Value:
        bias = self.parameter(name or f"layers.{self._layers}.bias", (x.cols,), inputs=0 if name else self._biases)
        return elementwise(x, EpilogueSpec(bias=bias), self._layers)

    def neighbours(self, x: Value, op: EdgeOp = SUM) -> Value:
        """Return A^T x: for every vertex the sum over its in-neighbours, weighted by their edges; or another `op`."""
        self._aggregates += 1
        return Value(Aggregate(self._aggregates, block=self._block(x), op=op), (x,), x.cols)

    def relations(self, x: Value, cols: int) -> Value:
        """Return sum_r D_r^-1 A_r^T x W_r: means over each relation's in-neighbours times W_r (x.cols, cols).

        W_r = sum_b a_rb V_b with model.bases new matrices V_b, layers.<l>.bases (B, x.cols, cols), and
        layers.<l>.coefficients (R, B). Source: Schlichtkrull et al. 2018, eq. 2 and 3.
        Raises: PlanError for a graph without types.
        """
        if not self.num_relations:
            raise PlanError(
                "the model has weights for each relation, and the graph's edges have no types; give edge_types when you "
                "load or prepare it"
            )
        if self.config.self_loops:
            raise PlanError("self-loops that are inserted have no relation; set model.self_loops = false")
        self._aggregates += 1
        bases, count = f"layers.{self._layers}.bases", self.config.bases
        self.parameter(bases, (count, x.cols, cols), "glorot")
        coefficients = self.parameter(f"layers.{self._layers}.coefficients", (self.num_relations, count))
        weights = RelationWeights(bases, coefficients, self.num_relations, count)
        kind = Aggregate(self._aggregates, block=self._block(x), op=Relational(x.cols, cols), relations=weights)
        return Value(kind, (x,), cols)

    def maximum(self, x: Value) -> Value:
        """Return for every vertex the maximum of x over its in-neighbours, column by column; 0 without any."""
        self._aggregates += 1
        numbered = Value(Numbered(self._aggregates), (x,), x.cols + 1)
        kind = Aggregate(self._aggregates, block=self._block(x), op=Maximum(), rule=MaximumRule())
        return Value(kind, (numbered,), x.cols)

    def attend(self, x: Value, heads: int) -> Value:
        """Return GAT's attention (Velickovic et al. 2018, eq. 1 to 4) over the neighbours' x, columns of all heads.

        Weights are dropped as model.attention_dropout says. Parameters: layers.<l>.source and .destination.
        Weights of edges are not read, parallel edges count each.
        Raises: PlanError for a width that is not a multiple of the number of heads.
        """
        spec, cols = self._attention(x, heads, dynamic=False), x.cols // heads
        ends = (f"layers.{self._layers}.{end}" for end in ("source", "destination"))
        source, destination = (self.parameter(name, (heads, cols)) for name in ends)
        scores = Value(Scores(spec, spec.site, source, destination), (x,), spec.forwards)
        t = self.own(Value(Part("t"), (scores,), heads))
        return attend(scores, t, AttentionRule(spec, (source, destination)), self._block(x))

    def attend_dynamic(self, x: Value, y: Value, heads: int) -> Value:
        """Return GATv2's attention (Brody et al. 2022, eq. 7) over the neighbours' x, for destinations that have y.

        As `attend`; its parameter is layers.<l>.attention.
        """
        spec = self._attention(x, heads, dynamic=True)
        name = self.parameter(f"layers.{self._layers}.attention", (heads, x.cols // heads))
        numbered = Value(Numbered(spec.site), (x,), spec.forwards) if spec.dropout else x
        return attend(numbered, y, AttentionRule(spec, (name,)), self._block(x))

    def _attention(self, x: Value, heads: int, *, dynamic: bool) -> AttentionSpec:
        if x.cols % heads:
            raise PlanError(f"attention has {heads} heads, and a layer {x.cols} columns; give it a multiple of {heads}")
        self._aggregates += 1
        dropout = self.config.attention_dropout if self.training else 0.0
        return AttentionSpec(heads, x.cols, dynamic, dropout, self._aggregates, counted=self.counted)

    def head_mean(self, x: Value, heads: int) -> Value:
        """Return the mean of the heads (V, x.cols / heads)."""
        return Value(HeadMean(heads, self._layers), (x,), x.cols // heads)

    def attention_bias(self, x: Value) -> Value:
        """Return x + b after attention, where b is attention.<k>.bias of the k-th aggregation."""
        return self.bias(x, f"attention.{self._aggregates}.bias")

    def aggregate(self, x: Value) -> Value:
        """Return A_hat x = S_r A^T S_c x, normalised as model.norm says."""
        scaled = self.scale(x, "col") if self.config.norm == "symmetric" else x
        return self.scale(self.neighbours(scaled), "row")

    def scale(self, x: Value, by: str) -> Value:
        """Return x with its rows scaled: S_r x for "row", S_c x for "col"."""
        spec = EpilogueSpec(row_scale="row") if by == "row" else EpilogueSpec(out_scale="col")
        return elementwise(x, spec, self._layers)

    def relu(self, x: Value) -> Value:
        """Return max(x, 0)."""
        return elementwise(x, EpilogueSpec(relu=True), self._layers)

    def activation(self, x: Value) -> Value:
        """Return model.activation of x."""
        name = self.config.activation
        return self.relu(x) if name == "relu" else Value(Activation(name, self._layers), (x,), x.cols)

    def norm(self, x: Value) -> Value:
        """Return x normalised as model.norm_layer says, with new vectors norms.<k>.weight and .bias; x itself for none.

        batch: also norms.<k>.running_mean and .running_var, which training writes and evaluation reads.
        """
        if self.config.norm_layer == "none":
            return x
        self._norms += 1
        name, shape = f"norms.{self._norms}", (x.cols,)
        both = self.parameter(f"{name}.weight", shape, "ones"), self.parameter(f"{name}.bias", shape)
        if self.config.norm_layer == "layer":
            return Value(LayerNorm(*both, self._norms), (x,), x.cols)
        mean = self.parameter(f"{name}.running_mean", shape, trained=False)
        variance = self.parameter(f"{name}.running_var", shape, "ones", trained=False)
        if not self.training:
            return Value(RunningNorm(*both, mean, variance, self._norms), (x,), x.cols)
        return Value(BatchNorm(*both, mean, variance, self._norms, x.cols), (x,), x.cols)

    def blend(self, a: Value, b: Value, share: float) -> Value:
        """Return (1 - share) a + share b. Raises: PlanError if their widths differ."""
        self._same_width(a, b)
        return Value(Blend(share), self._alike(a, b), a.cols)

    def concat(self, values: Sequence[Value]) -> Value:
        """Return the values' columns, one after the other."""
        widths = tuple(value.cols for value in values)
        return Value(Concat(widths), self._alike(*values), sum(widths)) if len(values) > 1 else values[0]

    def larger(self, a: Value, b: Value) -> Value:
        """Return max(a, b), element by element. Raises: PlanError if their widths differ."""
        self._same_width(a, b)
        return Value(Larger(), self._alike(a, b), a.cols)

    def dropout(self, x: Value) -> Value:
        """Return x with elements dropped as model.dropout says; outside training x itself."""
        self._masks += 1
        probability = self.config.dropout if self.training else 0.0
        return elementwise(x, EpilogueSpec(dropout=probability, site=self._masks), self._layers)

    def add(self, a: Value, b: Value) -> Value:
        """Return a + b. Raises: PlanError if their widths differ."""
        self._same_width(a, b)
        return Value(Add(self._layers), self._alike(a, b), a.cols)

    @staticmethod
    def _same_width(a: Value, b: Value) -> None:
        if a.cols != b.cols:
            raise PlanError(f"values of {a.cols} and {b.cols} columns cannot be added; give both the same width")

    def node(self, kind: Kind, *operands: Value, cols: int) -> Value:
        """Return the value (V, cols) that a node of any kind computes from others."""
        return Value(kind, operands, cols)

    def parameter(
        self, name: str, shape: tuple[int, ...], start: Start | None = None, *, trained: bool = True, inputs: int = 0
    ) -> str:
        """Make a parameter and return its name.

        start, trained, inputs: as Parameter; by default uniform where a number of inputs is given, else glorot for
        matrices and zeros for vectors.
        """
        if name in self.parameters:
            raise PlanError(f"the model makes the parameter {name} twice; give each its own name")
        start = start or ("uniform" if inputs else "glorot" if len(shape) == 2 else "zeros")
        self.parameters[name] = Parameter(shape, start, trained, inputs)
        return name


Network = Callable[[Builder, Value, ModelConfig], Value]
"""A model: from its input to its logits."""
