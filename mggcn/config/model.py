"""Table [model] of the settings: the network."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Final, Literal

from mggcn.config.values import Range
from mggcn.config.values import require as _require
from mggcn.config.values import settle as _settle
from mggcn.errors import ConfigError

MAX_LAYERS = 512
"""Layers, hops and bases of a model: plans take seconds for that many."""
MAX_HEADS = 64
"""Heads of attention: what kernels keep scores for (cpu/attention.h)."""
_LAYERED: Final = ("gcn", "sage", "gin", "gat", "gatv2", "rgcn", "mlp", "appnp")
"""Kinds that are made of layers with an activation."""
_BELONG: Final = {
    ("heads", "concat_heads", "out_heads", "attention_dropout"): ("gat", "gatv2"),
    ("aggregator",): ("sage",),
    ("hops",): ("sgc", "appnp"),
    ("teleport",): ("appnp",),
    ("bases",): ("rgcn",),
    ("hidden", "dropout", "activation", "norm_layer", "dense_before"): _LAYERED,
    ("residual", "jumping", "head", "dense_between", "dense_after"): tuple(set(_LAYERED) - {"appnp"}),
}
"""Settings that not all kinds have, and the kinds that have them."""


def ignored_settings(kind: str) -> set[str]:
    """Return the settings that a kind of model does not have."""
    return {name for names, kinds in _BELONG.items() if kind not in kinds for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Table [model]: the network."""

    kind: Literal["gcn", "sage", "gin", "gat", "gatv2", "sgc", "appnp", "rgcn", "mlp"] = "gcn"
    """Kind of network. gcn: graph convolutions (Kipf & Welling 2017); sage: GraphSAGE, by `aggregator`; gin: the sum
    over neighbours and the vertex itself, weighted by a learnt 1 + eps, through two dense layers (Xu et al. 2019),
    whatever `norm` and `self_loops` say; gat, gatv2: attention over neighbours (Velickovic et al. 2018, Brody et al.
    2022), which reads neither `norm` nor weights of edges; sgc: one matrix and `hops` sums over neighbours (Wu et al.
    2019), without `hidden`; appnp: dense layers, then `hops` steps of personalised PageRank (Klicpera et al. 2019);
    rgcn: R-GCN (Schlichtkrull et al. 2018), whatever `norm` and `self_loops` say, on a graph whose edges have types:
    the mean over the in-neighbours of each relation, and the vertex itself, each times a matrix of its own; mlp:
    dense layers without the graph."""
    hidden: Annotated[tuple[int, ...], Range(1)] = (128, 128)
    """Width of each hidden layer, in features; the output layer has one column per class, or per label or number to
    predict."""
    aggregator: Literal["gcn", "mean", "max"] = "gcn"
    """What sage computes of the neighbours. gcn: (sum of neighbours + self) / (degree + 1) (DistGNN 6.1), whatever
    `norm` says: in a weighted graph the weighted average, where a vertex itself has the weight of its stored
    self-loop, or 1 without one; mean: the average of the neighbours, by edges' weights, beside a weight matrix for
    the vertex itself (Hamilton et al. 2017), with self_loops = false as PyG's SAGEConv; max: the maximum over the
    in-neighbours of a dense layer with ReLU, beside a weight matrix for the vertex itself (eq. 3): no self-loops are
    inserted, and weights of edges are not read."""
    activation: Literal["relu", "elu", "leaky_relu", "gelu"] = "relu"
    """Activation after each hidden layer, with torch.nn.functional's defaults."""
    norm_layer: Literal["none", "layer", "batch"] = "none"
    """Norm of a hidden layer before its activation: layer norm, or batch norm over all vertices of all ranks, whose
    running statistics (momentum 0.1) evaluation reads."""
    residual: Literal["none", "linear", "identity"] = "none"
    """Residual added to a hidden convolution: linear is its input times a matrix plus a bias, identity the input
    itself, where widths agree."""
    jumping: Literal["last", "concat", "max"] = "last"
    """What the linear head reads: the last hidden layer, or all of them side by side, or their maximum (Xu et al.
    2018)."""
    head: Literal["convolution", "linear"] = "convolution"
    """The output layer: a convolution, or a dense layer, which `jumping` and `dense_after` need and therefore set."""
    dense_before: Annotated[tuple[int, ...], Range(1)] = ()
    """Widths of dense layers before the convolutions."""
    dense_between: bool = False
    """Put a dense layer of the same width after each hidden convolution."""
    dense_after: Annotated[tuple[int, ...], Range(1)] = ()
    """Widths of dense layers between the convolutions and a linear head."""
    hops: Annotated[int, Range(0, MAX_LAYERS)] = 0
    """Of sgc and appnp: sums over neighbours, one after the other; 0: 2 of sgc, 10 of appnp."""
    teleport: Annotated[float, Range(above=0, most=1)] = 0.1
    """For appnp: share of the dense layers' result in every step."""
    dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Probability of dropping an activation of a hidden layer."""
    input_dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Probability of dropping an input feature."""
    heads: Annotated[int, Range(1, MAX_HEADS)] = 1
    """Heads of attention (gat, gatv2)."""
    concat_heads: bool = True
    """Join the heads of a hidden layer side by side, whose width is that of all heads together; false: average them, each
    of the layer's width."""
    out_heads: Annotated[int, Range(0, MAX_HEADS)] = 0
    """Heads of the convolution that gives the logits, which are averaged; 0: as many as `heads`."""
    attention_dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Probability of dropping a weight of attention (gat, gatv2)."""
    norm: Literal["symmetric", "mean"] = "symmetric"
    """How the adjacency is normalised. symmetric: in-degree^-1/2 on both sides, as PyG; mean: average over in-neighbours,
    as in MG-GCN, eq. 2."""
    self_loops: bool = True
    """Insert the self-loops that the graph lacks."""
    bias: bool = True
    """Add a bias in each convolution; residuals and dense layers around convolutions have one anyway."""
    init: Literal["glorot", "pyg"] = "glorot"
    """How weights start. glorot: matrices Glorot-uniform (Glorot & Bengio 2010, eq. 16), biases 0; pyg: with the
    distributions of PyG's layers, which published scores were trained from: in sage, gin, sgc, appnp, mlp, residuals and
    dense layers around convolutions matrices and biases are uniform in +-1 / sqrt(inputs), as torch.nn.Linear's, in gatv2
    the biases of its matrices."""
    bases: Annotated[int, Range(1, MAX_LAYERS)] = 8
    """For rgcn: number of basis matrices in each layer; a relation's matrix is a weighted sum of them."""

    def __post_init__(self) -> None:
        _settle(self, "model")
        for name in ("hidden", "dense_before", "dense_after"):
            widths = getattr(self, name)
            _require(
                len(widths) <= MAX_LAYERS, f"model.{name} must hold at most {MAX_LAYERS} widths, got {len(widths)}"
            )
        self._check_heads()
        self._refuse_strangers()
        self._determine()

    def _check_heads(self) -> None:
        if self.attends and self.concat_heads:
            _require(
                all(width % self.heads == 0 for width in self.hidden),
                f"model.hidden must hold multiples of model.heads {self.heads}, the widths of all heads together, got "
                f"{self.hidden}",
            )

    def _refuse_strangers(self) -> None:
        """Refuse settings that the kind would ignore."""
        defaults = {item.name: item.default for item in fields(self)}
        for names, kinds in _BELONG.items():
            # No width is what sgc has, and what its run folders say.
            odd = [n for n in names if getattr(self, n) not in (defaults[n], ()) and self.kind not in kinds]
            if odd:
                one = len(odd) == 1
                raise ConfigError(
                    f"{' and '.join(f'model.{name}' for name in odd)} belong{'s' * one} to {', '.join(sorted(kinds))}, got "
                    f"model.kind {self.kind}; leave {'it' if one else 'them'} out, or choose one of those"
                )

    def _determine(self) -> None:
        """Set what the kind or another setting determines."""
        linear = self.jumping != "last" or bool(self.dense_after)
        mean = self.kind in ("sage", "rgcn")
        bare = self.kind in ("gin", "rgcn") or (self.kind == "sage" and self.aggregator == "max")
        if self.kind == "sage" and self.aggregator == "gcn":
            _require(
                self.self_loops, "model.kind sage adds every vertex to its neighbours; leave model.self_loops true"
            )
        _require(bool(self.hidden) or not linear, "model.jumping and model.dense_after need a layer in model.hidden")
        _require(
            bool(self.hidden) or self.head == "convolution" or self.kind in ("mlp", "sgc"),
            f"model.hidden has no layer, and a linear head would read the features alone; give {self.kind} a hidden layer, "
            "or choose kind mlp",
        )
        bare_of = [] if self.hidden or self.kind == "sgc" else self._of_hidden_layers()
        _require(
            not bare_of,
            f"model.hidden has no layer, and {' and '.join(bare_of)} would do nothing; leave "
            f"{'it' if len(bare_of) == 1 else 'them'} out, or give a hidden layer",
        )
        _require(
            self.jumping != "max" or len(set(self.hidden)) == 1,
            f"model.jumping max compares hidden layers of one width, got {self.hidden}; give equal widths, or concat",
        )
        _require(
            not self.out_heads or not (linear or self.head == "linear"),
            f"model.out_heads {self.out_heads} is for a convolution that gives the logits, and the head is linear; leave "
            "it out",
        )
        for name, value, applies in (
            ("head", "linear", linear),
            ("norm", "mean", mean),
            ("self_loops", False, bare),
            ("hidden", (), self.kind == "sgc"),
            ("hops", 2, self.kind == "sgc" and not self.hops),
            ("hops", 10, self.kind == "appnp" and not self.hops),
        ):
            if applies:
                object.__setattr__(self, name, value)

    def _of_hidden_layers(self) -> list[str]:
        """Return the settings given that only hidden layers read; norm and activation also follow dense_before."""
        names = ["residual", "dense_between", *([] if self.dense_before else ["norm_layer", "activation"])]
        defaults = {item.name: item.default for item in fields(self)}
        return [f"model.{name}" for name in names if getattr(self, name) != defaults[name]]

    def heads_of(self, last: bool) -> int:
        """Return the number of heads of a hidden convolution, or of the one that gives the logits."""
        return (self.out_heads or self.heads) if last else self.heads

    @property
    def typed(self) -> bool:
        """Whether the model reads the types of edges."""
        return self.kind == "rgcn"

    @property
    def attends(self) -> bool:
        """Whether the model has attention over neighbours."""
        return self.kind in ("gat", "gatv2")

    @property
    def aggregates(self) -> bool:
        """Whether the model reads the graph."""
        return self.kind != "mlp"

    @property
    def num_aggregations(self) -> int:
        """Return how many sums over neighbours follow each other, so how far a vertex's neighbourhood reaches."""
        if self.kind in ("sgc", "appnp"):
            return self.hops
        return len(self.hidden) + (self.head == "convolution") if self.aggregates else 0
