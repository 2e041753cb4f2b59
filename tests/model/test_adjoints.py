"""Planted faults: for every node and edge operation with an adjoint, and every loss, a wrong gradient is seen."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch

import mggcn.aggregate
import mggcn.model
from mggcn.aggregate import attention, edge_op, maximum, relations
from mggcn.backend.base import ENTRY_LOSSES, KernelBackend, LossTarget
from mggcn.config import CLASS_SETTINGS
from mggcn.errors import PlanError
from mggcn.model import gin, values
from mggcn.model.kinds import aggregate, combine, dense, elementwise, ends, neighbours, norms, pairs
from mggcn.model.kinds.relations import RelationWeights
from mggcn.model.network import make_values
from mggcn.model.runtime import Runtime
from mggcn.model.values import Adjoint, Op, PlainKind, Value
from mggcn.train import targets
from tests.model.stack_cases import Case, case_of, error_of
from tests.train.test_exact import TOLERANCE

Plant = Callable[[pytest.MonkeyPatch], None]
LAST = {maximum.MaximumGrad, attention.AttentionSources, attention.AttentionDestinations}
"""Edge operations of backward passes alone, whose adjoint is an error."""


def differentiable() -> set[type]:
    """The classes of models and aggregations that define an adjoint, but for those in LAST."""
    found = set()
    for package in (mggcn.model, mggcn.aggregate):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            loaded = vars(importlib.import_module(module.name)).values()
            found |= {one for one in loaded if isinstance(one, type) and "adjoint" in vars(one)}
    protocols = {one for one in found if Protocol in one.__bases__}
    return found - protocols - LAST - {PlainKind}


def _changed(kind: Any, name: str, change: Callable[..., Any]) -> Plant:
    """kind.name(...) becomes change(what it is, self, ...)."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        before = vars(kind)[name]
        if isinstance(before, property):
            monkeypatch.setattr(kind, name, property(lambda self: change(before.fget, self)))
        else:
            monkeypatch.setattr(kind, name, lambda self, *given, **named: change(before, self, *given, **named))

    return plant


def _same(kind: Any) -> Plant:
    """The gradient goes back as if the node did nothing to it."""

    def adjoint(before: Any, self: Any, value: Value, gradient: Value) -> Adjoint:
        found = before(self, value, gradient)
        return Adjoint(tuple(gradient for _ in found.operands), found.effects)

    return _changed(kind, "adjoint", adjoint)


def _shrunk(kind: Any) -> Plant:
    """The last operand gets half of its gradient."""

    def adjoint(before: Any, *given: Any) -> Adjoint:
        found = before(*given)
        last = found.operands[-1]
        return Adjoint((*found.operands[:-1], Value(combine.Scaled(0.5), (last,), last.cols)), found.effects)

    return _changed(kind, "adjoint", adjoint)


def _left_out(kind: Any) -> Plant:
    """An op of the backward pass leaves its result as it finds it."""
    return _changed(kind, "run", lambda before, self, rt, op: None)


def _zero(accumulation: Any) -> Plant:
    """An edge operation of the backward pass gives zeros."""
    return _changed(accumulation, "tile", lambda before, self, *given, **named: self._target.out.zero_())


def _no_relu(before: Any, self: elementwise.Elementwise, value: Value, gradient: Value) -> Adjoint:
    spec = dataclasses.replace(self.spec, relu=False)
    return before(dataclasses.replace(self, spec=spec), value, gradient)  # type: ignore[no-any-return]


def _forwards(before: Any, self: aggregate.Aggregate, value: Value, gradient: Value) -> Adjoint:
    (back,) = before(self, value, gradient).operands
    return Adjoint((back.with_kind(dataclasses.replace(back.kind, backward=self.backward)),))


def _one_matrix(before: Any, self: Any, rt: Runtime, op: Op) -> None:
    before(dataclasses.replace(self, added=""), rt, op)


def _first_columns(before: Any, self: combine.Columns, rt: Runtime, op: Op) -> None:
    before(dataclasses.replace(self, first=0), rt, op)


def _whole_heads(before: Any, self: neighbours.HeadMeanGrad, rt: Runtime, op: Op) -> None:
    before(self, rt, op)
    rt.buffer(op.out).mul_(self.heads)


@dataclasses.dataclass(frozen=True, slots=True)
class Unweighted(edge_op.Sum):  # type: ignore[misc]
    """A sum that does not read the weights of edges."""

    def begin(self, backend: KernelBackend, target: edge_op.Target) -> Any:
        return UnweightedSums(backend, target)


class UnweightedSums(edge_op.PartialSums):  # type: ignore[misc]
    def tile(self, matrix: Any, rows: Any, *, last: bool) -> None:
        super().tile(dataclasses.replace(matrix, values=None), rows, last=last)


def _of_first_relation(before: Any, self: relations.RelationSums, part: Any, g: Any) -> None:
    before(self, dataclasses.replace(part, spans=tuple((0, *rows) for _, *rows in part.spans)), g)


def _coefficients(before: Any, self: RelationWeights, rt: Runtime, op: Op) -> None:
    before(self, rt, op)
    rt.gradient(self.coefficients).mul_(1.01)


def _no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a vertex count like vertices."""
    monkeypatch.setattr(norms, "counted_once", lambda rt, once, rows: once.fill_(1))


def _parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vertex cut takes one copy's weights of attention for all."""
    monkeypatch.setattr(attention.Attending, "combine", lambda self, message, index: None)


def _afresh(before: Any, self: attention.Attending, *given: Any) -> None:
    """A tile begins afresh."""
    self._begun = False
    before(self, *given)


def _others(before: Any, self: attention.AttentionHeads, heads: range) -> Any:
    """A rank that has some heads reads what destinations have for the first ones."""
    found = before(self, heads)
    own = tuple(range(len(columns)) for columns in found.local[0])
    return found._replace(local=(own,)) if isinstance(found.op, attention.Attention) else found


def _wrong_target(kind: Any, **changes: Callable[[Any, LossTarget], Any]) -> Plant:
    """The loss stays right, its gradient is that of a target with changes."""

    def loss(
        before: Any, self: Any, backend: Any, z: torch.Tensor, scale: Any, total: torch.Tensor, partials: Any
    ) -> None:
        before(self, backend, z.clone(), scale, total, None if partials is None else partials.clone())
        changed = {name: change(self, self.target) for name, change in changes.items()}
        wrong = dataclasses.replace(self, target=dataclasses.replace(self.target, **changed))
        before(wrong, backend, z, scale, torch.zeros_like(total), partials)

    return _changed(kind, "loss", loss)


def _known(self: Any, target: LossTarget) -> torch.Tensor:
    """Unknown entries count as 0."""
    return torch.nan_to_num(target.labels)


def _everybody(self: Any, target: LossTarget) -> torch.Tensor:
    """Ignored classes count in training."""
    return target.mask | (target.labels == 1).to(torch.uint8)


def _own_count(self: Any, target: LossTarget) -> float:
    """A rank's mean is over its own vertices."""
    return 1 / max(int((target.mask & 1).sum()), 1)


TYPED = {"conv": "rgcn", "typed": True}
GAT = {"conv": "gat", "heads": 3}
MERGED = {"conv": "sage-mean", "residual": "linear"}
FAULTS: list[tuple[type | str, str, Plant, Case]] = [
    (dense.Linear, "gradient of its operand", _shrunk(dense.Linear), case_of()),
    (dense.Linear, "gradient of its weights", _left_out(dense.WeightGrad), case_of()),
    *(
        (
            dense.Linear,
            f"{kind.__name__} of a second matrix",
            _changed(kind, "run", _one_matrix),
            case_of(**{**MERGED, **more}),
        )
        for kind, more in (
            (dense.WeightGrad, {}),
            (dense.LinearGrad, {"norm_layer": "layer"}),
            (dense.InputGrad, {"conv": "mlp"}),
        )
    ),
    (
        dense.SparseLinear,
        "gradient of its weights",
        _left_out(dense.SparseWeightGrad),
        case_of(features="sparse", input_dropout=0.2),
    ),
    (elementwise.Elementwise, "ReLU", _changed(elementwise.Elementwise, "adjoint", _no_relu), case_of()),
    (elementwise.Elementwise, "bias", _left_out(elementwise.BiasGrad), case_of(activation="elu", norm_layer="layer")),
    (elementwise.Add, "half a residual", _shrunk(elementwise.Add), case_of(residual="linear", input_dropout=0.2)),
    (
        aggregate.Aggregate,
        "direction",
        _changed(aggregate.Aggregate, "adjoint", _forwards),
        case_of(pattern="directed"),
    ),
    (
        edge_op.Sum,
        "weights of edges",
        _changed(edge_op.Sum, "adjoint", lambda before, self: Unweighted()),
        case_of(conv="gin", weighted=True),
    ),
    (combine.Blend, "teleport", _same(combine.Blend), case_of(conv="appnp", head="convolution")),
    (combine.Concat, "columns", _changed(combine.Columns, "run", _first_columns), case_of(jumping="concat")),
    (combine.Larger, "maximum of layers", _same(combine.Larger), case_of(jumping="max")),
    *(
        (combine.Activation, name, _same(combine.Activation), case_of(activation=name))
        for name in ("elu", "leaky_relu", "gelu")
    ),
    (norms.LayerNorm, "", _same(norms.LayerNorm), case_of(norm_layer="layer")),
    (norms.BatchNorm, "", _same(norms.BatchNorm), case_of(norm_layer="batch")),
    (norms.BatchNorm, "copies", _no_copies, case_of(norm_layer="batch", conv="sage-mean", strategy="delayed")),
    (gin.SelfWeight, "epsilon", _left_out(gin.SelfWeightGrad), case_of(conv="gin")),
    (gin.SelfWeight, "gradient of its operand", _shrunk(gin.SelfWeight), case_of(conv="gin")),
    (neighbours.Numbered, "", _shrunk(neighbours.Numbered), case_of(conv="sage-max")),
    (neighbours.MaximumRule, "", _shrunk(neighbours.MaximumRule), case_of(conv="sage-max")),
    (maximum.Maximum, "winners", _zero(maximum.Won), case_of(conv="sage-max", strategy="halo")),
    (neighbours.Scores, "", _shrunk(neighbours.Scores), case_of(**GAT)),
    (
        neighbours.HeadMean,
        "",
        _changed(neighbours.HeadMeanGrad, "run", _whole_heads),
        case_of(**GAT, head="convolution"),
    ),
    (neighbours.AttentionRule, "scores of GAT", _left_out(neighbours.ScoresGrad), case_of(**GAT)),
    (neighbours.AttentionRule, "weights of GATv2", _left_out(neighbours.HeadWeightGrad), case_of(conv="gatv2")),
    (neighbours.AttentionRule, "destinations", _zero(attention.DestinationRows), case_of(**GAT)),
    (neighbours.AttentionRule, "destinations of GATv2", _zero(attention.DestinationRows), case_of(conv="gatv2")),
    (attention.Attention, "sources", _zero(attention.SourceRows), case_of(**GAT)),
    (attention.Attention, "copies", _parts, case_of(**GAT, ranks=3, strategy="delayed")),
    (attention.Attention, "tiles", _changed(attention.Attending, "_add", _afresh), case_of(conv="gatv2")),
    (
        attention.Attention,
        "masks of the first heads",
        _changed(
            attention.AttentionSpec,
            "of",
            lambda before, self, heads: dataclasses.replace(before(self, heads), first=0),
        ),
        case_of(**GAT, ranks=3, strategy="slice", attention_dropout=0.3),
    ),
    (
        attention.Attention,
        "destinations of the first heads",
        _changed(attention.AttentionHeads, "share", _others),
        case_of(conv="gatv2", heads=2, strategy="slice", pattern="directed"),
    ),
    (
        relations.Relational,
        "matrix of another relation",
        _changed(relations.RelationSums, "_backward", _of_first_relation),
        case_of(**TYPED),
    ),
    (
        relations.Relational,
        "rows",
        _changed(
            relations.Relational,
            "begin",
            lambda before, self, *on: before(dataclasses.replace(self, of_rows=False), *on),
        ),
        case_of(**TYPED),
    ),
    (RelationWeights, "coefficients", _changed(RelationWeights, "write_gradients", _coefficients), case_of(**TYPED)),
    (
        "class_weights",
        "",
        _wrong_target(targets.ClassTarget, weights=lambda self, target: None),
        case_of(task="weights"),
    ),
    (
        "label_smoothing",
        "",
        _wrong_target(targets.ClassTarget, smoothing=lambda self, target: 0.0),
        case_of(task="smoothing"),
    ),
    ("ignored_labels", "", _wrong_target(targets.ClassTarget, mask=_everybody), case_of(task="ignored")),
    ("cross_entropy", "own count", _wrong_target(targets.ClassTarget, inv_count=_own_count), case_of()),
    *(
        (loss, "unknown entries", _wrong_target(targets.EntryTarget, labels=_known), case_of(task=loss))
        for loss in ENTRY_LOSSES
    ),
    ("mse", "own count", _wrong_target(targets.EntryTarget, inv_count=_own_count), case_of(task="mse")),
]


@pytest.mark.parametrize(
    ("fault", "case"),
    [pytest.param(*fault[2:], id=f"{getattr(fault[0], '__name__', fault[0])}-{fault[1]}") for fault in FAULTS],
)
def test_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch, fault: Plant, case: Case) -> None:
    """The comparison with autograd fails when an adjoint forgets what its node did."""
    assert error_of(case) < TOLERANCE
    make_values.cache_clear()
    fault(monkeypatch)
    try:
        assert error_of(case) > 1e-6
    finally:
        make_values.cache_clear()


def test_every_adjoint_has_a_planted_fault() -> None:
    """Fails for a new node, edge operation or loss that no fault above is planted in."""
    found = differentiable()
    assert values.PlainKind not in found
    assert {dense.Linear, edge_op.Sum, neighbours.MaximumRule, gin.SelfWeight} < found
    named = {fault[0] for fault in FAULTS}
    # Those of rows of blocks are planted in tests/feed/test_blocks.py, those of pairs in tests/train/test_links.py, that of
    # learned rows in tests/train/test_learned.py.
    assert found <= {*named, combine.Own, ends.Input, pairs.Everyone, pairs.PairDot, pairs.PairProduct}
    assert {"cross_entropy", *ENTRY_LOSSES, *CLASS_SETTINGS} <= named


@pytest.mark.parametrize("kind", sorted(LAST, key=lambda kind: kind.__name__))
def test_gradients_of_edge_operations_are_not_differentiated(kind: Any) -> None:
    """Fails if the gradient of a gradient would be something instead of an error."""
    with pytest.raises(PlanError, match="has no derivative"):
        kind.adjoint.fget(None)
