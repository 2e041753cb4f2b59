"""Turns a model into the values of its training epochs and evaluations, which all ranks of a run share. Needs no
torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from mggcn.blocks.block import OWNED, WHOLE, Block, Capacity, RowSet
from mggcn.config import ModelConfig
from mggcn.errors import PlanError
from mggcn.memory.device import OPERAND, STORAGE
from mggcn.model.builder import Builder, Network
from mggcn.model.choices import InputChoice, InputShape, LayerChoice, LayerUse, choose_input, choose_layer
from mggcn.model.convolutions import CONVOLUTIONS
from mggcn.model.derive import derive
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.kinds.combine import Own
from mggcn.model.kinds.dense import Linear, SparseLinear
from mggcn.model.kinds.elementwise import EpilogueSpec
from mggcn.model.kinds.ends import DroppedValues, Input, Score, input_name
from mggcn.model.kinds.hosted import ToHost
from mggcn.model.rewrite.first_sums import FirstSums, read_first_sums
from mggcn.model.rewrite.fusion import (
    add_own_rows,
    fuse_bias_gradients,
    fuse_elementwise,
    fuse_epilogues,
    fuse_gradients,
)
from mggcn.model.rewrite.host import keep_on_host
from mggcn.model.rewrite.patterns import Users, does, followed_by, in_a_row, only_user
from mggcn.model.rewrite.products import AGGREGATED_FIRST, keep_sparse, merge_products, order_products, precompute
from mggcn.model.rewrite.scales import push_scales
from mggcn.model.rewrite.storage import (
    make_again,
    prune,
    read_outputs,
    read_stored,
    recompute,
    round_operands,
    spare_gradients,
)
from mggcn.model.runtime import Parameter
from mggcn.model.stack import PairScoring, propagated, stack
from mggcn.model.values import Graph, Value

NETWORKS: Final[Mapping[str, Network]] = MappingProxyType(
    dict.fromkeys((name.partition("-")[0] for name in CONVOLUTIONS), stack)
    | dict.fromkeys(("sgc", "appnp"), propagated)
)
"""The models by model.kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The settings on which a model's choices depend, besides the model itself. features, products, precision, recompute:
    settings of the run.

    blocks: of a step, the input's first; capacities: of those that are not the whole graph; evaluated: the blocks of an
    evaluation. num_relations: of the graph's edges, 0 without types. counted: whether values of edges are numbers of
    parallel ones. compared: whether the exact gradient is wanted beside that of a step's blocks. pairs: how pairs of the
    results are scored, which the loss then compares. first: whether the sums of a step's first block are gathered, so that
    its edges are not read. learned: whether the input is trained. dense_rows: why a step gathers dense rows of X whatever X
    is, "" if it need not. stored: whether a step may read X where it is stored.
    """

    shape: InputShape
    features: str
    products: str
    precision: str
    recompute: bool = False
    num_relations: int = 0
    counted: bool = False
    blocks: tuple[Block, ...] = (WHOLE,)
    capacities: tuple[Capacity, ...] = ()
    evaluated: tuple[Block, ...] = (WHOLE,)
    compared: bool = False
    pairs: PairScoring | None = None
    first: bool = False
    learned: bool = False
    dense_rows: str = ""
    stored: bool = False

    @property
    def rounds(self) -> bool:
        """Whether rows that are multiplied with the graph have a type of their own."""
        return OPERAND[self.precision] != STORAGE[self.precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """A model as values, with the choices made for all ranks.

    training: down to the gradients; evaluation: down to the scores; exact: training over the whole graph, where a step
    runs over other blocks and is compared with it. aggregates: the sites of a training epoch, each with the largest number
    of further ones between it and the loss. explained: what each rewrite did, for `mggcn plan --explain`.
    """

    config: ModelConfig
    num_features: int
    input: InputChoice
    layers: tuple[LayerChoice, ...]
    parameters: Mapping[str, Parameter]
    training: Graph
    evaluation: Graph
    aggregates: tuple[tuple[int, int], ...]
    explained: tuple[str, ...]
    exact: Graph | None = None
    first: FirstSums | None = None
    """What batches read in place of the first block's edges."""
    hosted: int = 0
    """The steps of `keep_on_host` that training took; 0: its rows stay in memory of the device."""

    def on_host(self, steps: int) -> Values:
        """Return the same network, but let training keep rows on the host, in so many steps. Raises: as `keep_on_host`."""
        training = keep_on_host(self.training, steps)
        count = sum(isinstance(value.kind, ToHost) for value in training.values())
        line = f"rows on the host: {count} matrices between the forward and the backward pass"
        return replace(self, training=training, explained=(*self.explained, line), hosted=steps)

    def pruned(self, blocks: Mapping[int, Block]) -> Values:
        """Return the same network, but let the training aggregations named by site run over smaller blocks."""
        few = ", ".join(str(site) for site in sorted(blocks))
        line = (
            f"pruned rows: {f'aggregations {few} compute fewer than all' if few else 'no aggregation leaves any out'}"
        )
        return replace(self, training=prune(self.training, blocks), explained=(*self.explained, line))

    @property
    def learned(self) -> bool:
        """Whether training has gradients of the input."""
        return any(isinstance(value.kind, Input) and value.kind.learned for value in self.training.values())

    @property
    def reads_stored(self) -> bool:
        """Whether training reads X where it is stored, and the edges of its first block name vertices."""
        return any(isinstance(value.kind, Input) and value.kind.everyone for value in self.training.values())

    @property
    def gathers(self) -> bool:
        """Whether a feed gathers rows of X, if they are dense: learned rows come after it, stored ones a step reads."""
        return not self.learned and not self.reads_stored and (self.first is None or self.first.itself)

    @property
    def inputs(self) -> int:
        """Return how many of X and A X a feed gathers."""
        return self.gathers + (self.first is not None)

    @property
    def typed(self) -> bool:
        """Whether the model reads the types of edges."""
        return any(isinstance(value.kind, Aggregate) and value.kind.relations for value in self.evaluation.values())

    @property
    def reads_all(self) -> str:
        """The label of a node whose results depend on all vertices, so that no rows can be left out; "" if there is
        none.
        """
        return next((value.kind.label for value in self.training.values() if value.kind.sums_over_ranks), "")

    @property
    def sparse_layers(self) -> frozenset[int]:
        """Numbers of the dense layers that multiply sparse features."""
        kinds = (value.kind for value in self.evaluation.values())
        return frozenset(kind.layer for kind in kinds if isinstance(kind, SparseLinear))

    @property
    def input_scaled(self) -> bool:
        """Whether sparse features are stored as S_c X."""
        return any(isinstance(value.kind, Input) and value.kind.scaled for value in self.training.values())

    @property
    def sparse_sets(self) -> frozenset[RowSet]:
        """The row sets of a batch whose sparse features products of a training step read."""
        kinds = (value.kind for value in self.training.values())
        return frozenset(kind.of for kind in kinds if isinstance(kind, Input) and kind.sparse and kind.of != OWNED)

    @property
    def trains_whole(self) -> bool:
        """Whether gradients are computed over the whole graph, not only scores."""
        graphs = (graph for graph in (self.training, self.exact) if graph is not None)
        return any(isinstance(v.kind, Input) and v.kind.of == OWNED for graph in graphs for v in graph.values())


@functools.lru_cache(maxsize=64)
def make_values(network: Network, config: ModelConfig, num_features: int, num_classes: int, choices: Choices) -> Values:
    """Build a model, choose, rewrite, and derive its backward pass; the same values for the same arguments.

    Raises: PlanError for a model that cannot be trained.
    """
    sizes = (num_features, num_classes, choices.num_relations)
    blocks = choices.blocks
    written, parameters = _written(
        network,
        config,
        *sizes,
        training=True,
        counted=choices.counted,
        blocks=blocks,
        pairs=choices.pairs,
        learned=choices.learned,
    )
    _check_precision(written, choices.precision)
    over_blocks, first = read_first_sums(written, blocks[0]) if choices.first else (written, None)
    uses = _layer_uses(over_blocks, config, dict(zip(blocks[::-1], choices.capacities[::-1], strict=False)))
    if not uses:
        raise PlanError("the model has no dense layer: there is no weight matrix to train; add b.linear")
    gathered = blocks[0].sources != OWNED
    choice = choose_input(
        config,
        uses,
        choices.shape,
        choices.features,
        choices.precision,
        gathered=gathered,
        dense_rows=choices.dense_rows,
        learned=choices.learned,
    )
    layers = of_graph = tuple(choose_layer(config, use, choice, choices.products) for use in uses)
    if first is not None:
        # Of the whole graph the first layer sums products as ever.
        whole = _layer_uses(written, config)
        of_graph = tuple(choose_layer(config, use, choice, choices.products) for use in whole)
        why = "A X is gathered for each batch: no SpMM"
        layers = tuple(
            replace(one, products="precomputed", reason=why) if one.layer in first.layers else one for one in layers
        )
        choice = replace(choice, reason=f"{'X and A X are' if first.itself else 'A X is'} gathered for each batch")
    log: list[str] = []
    forward, training = _trained(over_blocks, config, choice, layers, choices, log)
    if choices.stored:
        # Last, because it looks at every reader of X that is left.
        stored = _logged(log, "X read where it is stored", training, lambda graph: read_stored(graph, blocks[0]))
        choice = choice if stored == training else replace(choice, reason="X is read for each batch where it is stored")
        training = stored
    exact = None
    if choices.compared:
        over_all, _ = _written(network, config, *sizes, training=True, counted=choices.counted)
        _, exact = _trained(over_all, config, choice, of_graph, choices, [])
    counted, evaluated = choices.counted, choices.evaluated
    logits, _ = _written(network, config, *sizes, training=False, counted=counted, blocks=evaluated)
    scored = _forward(logits, config.norm, choice, of_graph, []).roots[0]
    evaluation = _fused(Graph((Value(Score(choices.pairs is None), (scored,)),)), choices.rounds, [])
    return Values(
        config=config,
        num_features=num_features,
        input=choice,
        layers=layers,
        parameters=MappingProxyType(parameters),
        training=training,
        evaluation=evaluation,
        aggregates=_aggregates(forward),
        explained=tuple(log),
        exact=exact,
        first=first,
    )


def num_aggregations(
    network: Network, config: ModelConfig, num_features: int, num_classes: int, num_relations: int = 0, *, sparse: bool
) -> int:
    """Return the length of the longest chain of aggregations in a training epoch, with sparse or dense features."""
    written, _ = _written(network, config, num_features, num_classes, num_relations, training=True)
    first = next((use for use in _layer_uses(written, config) if use.first), None)
    # A X is computed before the first epoch: as choose_input decides.
    constant = 0 if first is None or sparse or config.input_dropout else first.normalised
    return max((above + 1 for _, above in _aggregates(written)), default=0) - constant


def _written(
    network: Network,
    config: ModelConfig,
    num_features: int,
    num_classes: int,
    num_relations: int,
    *,
    training: bool,
    counted: bool = False,
    blocks: tuple[Block, ...] = (WHOLE,),
    pairs: PairScoring | None = None,
    learned: bool = False,
) -> tuple[Graph, dict[str, Parameter]]:
    """The graph as the model's function writes it."""
    builder = Builder(config, num_classes, training, num_relations, counted, blocks, learned=learned)
    logits = network(builder, builder.input(num_features), config)
    if logits.cols != num_classes:
        raise PlanError(f"the model returns {logits.cols} columns for {num_classes} classes; return one for each class")
    return Graph((logits if pairs is None else pairs(builder, logits),)), builder.parameters


def _check_precision(written: Graph, precision: str) -> None:
    """Refuse results that would be rounded after every relation."""
    kinds = (value.kind for value in written.values())
    if precision == "bf16" and any(isinstance(kind, Aggregate) and kind.relations for kind in kinds):
        raise PlanError(
            "a result is summed relation after relation, and run.precision bf16 would round it after each; choose mixed, "
            "which sums in float32"
        )


def _layer_uses(
    graph: Graph, config: ModelConfig, capacities: Mapping[Block, Capacity] | None = None
) -> list[LayerUse]:
    users, capacities = graph.users(), capacities or {}
    inputs = _inputs(graph, EpilogueSpec(dropout=config.input_dropout))
    readers = {user for value in inputs for user in users[value] if user not in inputs}
    alone = readers if len(readers) == 1 and all(only_user(users, value) for value in inputs) else set()
    shared = readers if all(isinstance(value.kind, Linear) for value in readers) else set()
    rows = {block.sources: size.sources for block, size in capacities.items()}
    rows |= {block.targets: size.targets for block, size in capacities.items()}
    return [
        LayerUse(
            layer=value.kind.layer,
            d_in=value.operands[0].cols,
            d_out=value.cols,
            aggregated=followed_by(users, value) is not None,
            normalised=len(in_a_row(users, value, config.norm)),
            first=value in alone,
            shares=value in shared,
            block=_capacity(users, value, capacities),
            rows=rows.get(value.rows, 0),
        )
        for value in graph.values()
        if isinstance(value.kind, Linear)
    ]


def _inputs(graph: Graph, dropped: EpilogueSpec) -> set[Value]:
    """Return the input, with the model's input dropout or without, and its rows of smaller row sets: to layers all one."""
    found = set[Value]()
    for value in graph.values():
        if isinstance(value.kind, Input):
            found.add(value)
        elif (does(value, dropped) or isinstance(value.kind, Own)) and value.operands[0] in found:
            found.add(value)
    return found


def _capacity(users: Users, linear: Value, capacities: Mapping[Block, Capacity]) -> Capacity | None:
    """Return the size of the block that sums a layer's result, if it is not the whole graph."""
    sums = followed_by(users, linear)
    found = [link.kind.block for link in sums.links if isinstance(link.kind, Aggregate)] if sums else []
    return capacities.get(found[0]) if found else None


def _trained(
    written: Graph,
    config: ModelConfig,
    choice: InputChoice,
    layers: Sequence[LayerChoice],
    choices: Choices,
    log: list[str],
) -> tuple[Graph, Graph]:
    """Return a model's forward pass as rewritten, and with its backward pass."""
    forward = _forward(written, config.norm, choice, layers, log)
    training = _fused(derive(forward.roots[0]), choices.rounds, log)
    if choices.recompute:
        training = _logged(log, "products made again backwards", training, make_again)
    return forward, training


def _forward(graph: Graph, norm: str, choice: InputChoice, layers: Sequence[LayerChoice], log: list[str]) -> Graph:
    """Rewrite a model before its backward pass is derived: what changes here changes there, too."""
    # The order of the products comes first: it looks for whole chains of a product, scales and a sum, which all that
    # follows takes apart.
    graph = order_products(graph, {layer.layer: layer for layer in layers}, norm, choice.aggregated)
    turned = [layer for layer in layers if layer.products in AGGREGATED_FIRST]
    log.append(f"order of products: {len(turned)} of {len(layers)} layers aggregate first")
    # Only now A_hat stands beside X. Before scales move: those of what is computed once stay where they are.
    graph = precompute(graph, choice, norm)
    name = input_name(choice.aggregated)
    log.append(f"constants: {f'{name} is computed once' if choice.aggregated else 'no more than X'}")
    graph = _logged(log, "scales moved into neighbours", graph, push_scales)
    # Behind the scales, which move one by one; before derive, so that the mask of a gradient is read from the one result
    # that is stored.
    graph = _logged(log, "elementwise steps in one pass", graph, fuse_elementwise)
    # By now scale and dropout of X are one step, which a sparse X takes into its values.
    graph = keep_sparse(graph, choice)
    # Products with a sparse X are another kind by now and stay apart.
    graph = _logged(log, "products of the same rows in one", graph, merge_products)
    # Set-up loads one input: every reader must expect it in that form, and only products can read it sparse.
    users = graph.users()
    for value in graph.values():
        kind = value.kind
        gathered = isinstance(kind, Input) and kind.of != OWNED
        if (
            isinstance(kind, Input)
            and not gathered
            and (kind.sparse, kind.aggregated) != (choice.sparse, choice.aggregated)
        ):
            raise PlanError(f"the model reads {kind.label} in a form other than the stored one ({choice.reason})")
        readers = users[value] if isinstance(kind, Input) and kind.sparse else []
        if odd := [
            reader.kind.label for reader in readers if not isinstance(reader.kind, SparseLinear | DroppedValues)
        ]:
            raise PlanError(f"X is kept sparse and {odd[0]} reads it dense; set debug.features = dense")
    return graph


def _fused(graph: Graph, rounds: bool, log: list[str]) -> Graph:
    """Rewrite a whole program: passes become one, and results take the types in which they are read."""
    log.append(f"backward pass: derived, {len(graph.values())} values with it")
    # While the ReLU is still a step of its own, with the sums as its operand.
    graph = _logged(log, "sums of attention read from the ReLU after them", graph, read_outputs)
    # Before gradients are fused: a gradient that its bias sum reads, too, has two readers, and would stay apart.
    graph = _logged(log, "bias gradients summed on the way", graph, fuse_bias_gradients)
    graph = _logged(log, "gradients in one pass", graph, fuse_gradients)
    graph = _logged(log, "own rows added to themselves alone", graph, add_own_rows)
    graph = _logged(log, "epilogues in the product before them", graph, fuse_epilogues)
    graph = _logged(log, "input made again by blocks of rows", graph, recompute)
    if rounds:
        # Behind all fusion: the kernel that makes an operand rounds it, so it must be known which one that is.
        graph = _logged(log, "operands of the graph rounded", graph, round_operands)
    # Last, because it counts the readers that are left.
    return _logged(log, "gradients copied before they are used up", graph, spare_gradients)


def _logged(log: list[str], name: str, graph: Graph, rewrite: Callable[[Graph], Graph]) -> Graph:
    after = rewrite(graph)
    before, now = len(graph.values()), len(after.values())
    done = f"{before} values become {now}" if before != now else f"{before} values, as many as before"
    log.append(f"{name}: {'nowhere' if after == graph else done}")
    return after


def _aggregates(forward: Graph) -> tuple[tuple[int, int], ...]:
    """The aggregations of a model, each with the largest number of others on a path from it to the logits."""
    above = dict.fromkeys(forward.values(), 0)
    for value in reversed(forward.values()):
        further = above[value] + isinstance(value.kind, Aggregate)
        for operand in value.operands:
            above[operand] = max(above[operand], further)
    return tuple((value.kind.site, count) for value, count in above.items() if isinstance(value.kind, Aggregate))
