"""How the input is kept and in which order the products run."""

from __future__ import annotations

import dataclasses

import pytest

from mggcn.blocks.block import Block, Capacity, RowSet
from mggcn.config import ModelConfig
from mggcn.errors import PlanError
from mggcn.model.builder import Builder
from mggcn.model.choices import InputChoice, InputShape, LayerChoice, LayerUse, choose_input, sparse_bytes
from mggcn.model.kinds.ends import Input
from mggcn.model.network import NETWORKS, Choices, make_values
from mggcn.model.values import Value

DENSE = InputShape(rows=1000, cols=50, nnz=None, adj_nnz=8000, aggregated_nnz=0)
SPARSE = InputShape(rows=1000, cols=500, nnz=9000, adj_nnz=8000, aggregated_nnz=60_000)


def chosen(shape: InputShape, setting: str = "auto", **model: object) -> tuple[bool, bool]:
    config = ModelConfig(**model)  # type: ignore[arg-type]
    use = LayerUse(
        layer=1, d_in=shape.cols, d_out=16, aggregated=config.aggregates, normalised=config.aggregates, first=True
    )
    choice = choose_input(config, [use], shape, setting, "fp32")
    assert choice.reason
    return choice.sparse, choice.aggregated


def test_dense_inputs() -> None:
    """Fails if A X is kept where dropout changes X every epoch, or layer 1 pays for an SpMM that a constant saves."""
    assert chosen(DENSE) == (False, True)
    assert chosen(DENSE, input_dropout=0.1) == (False, False)
    assert chosen(DENSE, kind="mlp") == (False, False)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["gcn", "mlp"])
def test_sparse_inputs(dropout: float, kind: str) -> None:
    """Fails if a forced kind of features is not obeyed, or A X is kept under dropout or without a graph."""
    assert not chosen(SPARSE, "dense", input_dropout=dropout, kind=kind)[0]
    sparse, aggregated = chosen(SPARSE, "sparse", input_dropout=dropout, kind=kind)
    assert sparse
    assert not (aggregated and (dropout or kind == "mlp"))
    assert chosen(SPARSE, "auto", input_dropout=dropout, kind=kind)[0]
    # Nearly full rows: a dense product does the same work faster.
    full = dataclasses.replace(SPARSE, nnz=450_000, aggregated_nnz=500_000)
    assert not chosen(full, "auto", input_dropout=dropout, kind=kind)[0]


def test_sparse_bytes() -> None:
    """Fails if an order, the second set of values or the positions are forgotten."""
    pointers = 8 * (1000 + 500 + 2)
    assert sparse_bytes(SPARSE, 9000, "fp32", False) == 2 * 9000 * 8 + pointers
    assert sparse_bytes(SPARSE, 9000, "fp64", False) == 2 * 9000 * 12 + pointers
    # X in CSR, its dropped values in both orders, columns of both orders, positions.
    assert sparse_bytes(SPARSE, 9000, "fp32", True) == 9000 * (3 * 4 + 2 * 4 + 4) + pointers


def layers_of(config: ModelConfig, features: int, products: str, shape: InputShape = DENSE) -> tuple[LayerChoice, ...]:
    """The layers of a model of 7 classes whose X stays sparse if it is."""
    kept = "auto" if shape.nnz is None else "sparse"
    choices = Choices(
        shape=dataclasses.replace(shape, cols=features), features=kept, products=products, precision="fp32"
    )
    return make_values(NETWORKS[config.kind], config, features, 7, choices).layers


def test_the_narrower_side_goes_through_the_graph() -> None:
    """Fails if GEMM first is not chosen exactly where E <= D (MG-GCN 4.3), or a setting is not obeyed."""
    config = ModelConfig(hidden=(16, 16, 40))
    kept = layers_of(config, 100, "auto")
    assert [c.products for c in kept] == ["precomputed", "gemm-first", "aggregate-first", "gemm-first"]
    assert [(c.d_in, c.d_out) for c in kept] == [(100, 16), (16, 16), (16, 40), (40, 7)]
    sparse = dataclasses.replace(SPARSE, nnz=10)
    found = layers_of(config, 4, "aggregate-first", sparse)
    assert [c.products for c in found] == ["gemm-first", *["aggregate-first"] * 3]
    bare = layers_of(ModelConfig(hidden=(5,), kind="mlp"), 4, "gemm-first")
    assert [c.products for c in bare] == ["dense", "dense"]


def test_layers_that_share_a_sparse_input() -> None:
    """Fails if a second dense layer on X, such as a residual, makes it dense at a cost, or draws masks twice."""

    def network(b: Builder, x: Value, model: ModelConfig) -> Value:
        return b.bias(b.add(b.aggregate(b.linear(x, b.num_classes)), b.linear(x, b.num_classes)))

    shape = InputShape(rows=1000, cols=500, nnz=2000, adj_nnz=5000, aggregated_nnz=20_000)
    for dropout in (0.0, 0.5):
        for setting, sparse in (("auto", True), ("sparse", True), ("dense", False)):
            choices = Choices(shape=shape, features=setting, products="auto", precision="fp32")
            values = make_values(network, ModelConfig(input_dropout=dropout), 500, 4, choices)
            assert values.input.sparse is sparse
            kinds = [type(value.kind).__name__ for value in values.training.values()]
            assert kinds.count("SparseLinear") == 2 * sparse
            assert kinds.count("DroppedValues") == (sparse and dropout > 0)
    wide = Choices(shape=shape, features="sparse", products="aggregate-first", precision="fp32")
    kept = make_values(NETWORKS["sage"], ModelConfig(kind="sage", aggregator="mean", hidden=(600,)), 500, 4, wide)
    assert kept.sparse_layers == {1, 2}
    full = InputShape(rows=1000, cols=500, nnz=490_000, adj_nnz=5000, aggregated_nnz=500_000)
    choices = Choices(shape=full, features="auto", products="auto", precision="fp32")
    assert not make_values(network, ModelConfig(), 500, 4, choices).input.sparse


SIZE = Capacity(targets=100, sources=400, edges=900)
BELOW = Block("below", RowSet("middle"), RowSet("input"))


def gathered(setting: str = "auto", nnz: int | None = 9000, dense_rows: str = "", **given: object) -> InputChoice:
    """The choice for a batch of 400 rows, of which 100 are targets, and two layers that read both."""
    shape = dataclasses.replace(SPARSE, nnz=nnz)
    shared: dict[str, object] = {"d_in": 500, "d_out": 16, "normalised": 0, "first": False, "shares": True} | given
    uses = [
        LayerUse(layer=1, aggregated=True, block=SIZE, rows=400, **shared),  # type: ignore[arg-type]
        LayerUse(layer=2, aggregated=False, rows=100, **shared),  # type: ignore[arg-type]
    ]
    return choose_input(ModelConfig(), uses, shape, setting, "fp32", gathered=True, dense_rows=dense_rows)


def test_rows_of_a_batch_are_of_the_form_of_less_work() -> None:
    """Fails if a batch's choice counts the whole graph's rows, one layer alone, or not the sums after sparse products."""
    choice = gathered()
    # 400 and 100 rows of 9 nonzeros, 900 edges, at width 16, forth and back.
    assert "layer 1 takes about 0.9 M multiply-adds" in choice.reason
    assert 2 * 5 * (500 * 9 + 900) * 16 == 864_000
    # The sum comes before the dense product: 100 rows, and 900 edges at width 500; then 100 own rows.
    assert 2 * (100 * 500 * 16 + 5 * 900 * 500 + 100 * 500 * 16) == 7_700_000
    assert "otherwise: dense X 7.7 M" in choice.reason
    assert choice.sparse
    assert not choice.aggregated
    assert not gathered(nnz=120_000).sparse
    assert gathered("sparse", nnz=120_000).sparse
    assert not gathered("dense").sparse
    assert not gathered(nnz=None).sparse
    kept = gathered("sparse", dense_rows="ranks share a batch")
    assert not kept.sparse
    assert kept.reason == "X is gathered for each batch as dense rows: ranks share a batch"
    assert "layers other than dense ones read it" in gathered(shares=False).reason
    with pytest.raises(PlanError, match="only dense layers read X"):
        gathered("sparse", shares=False)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("kind", "sets"), [("gcn", {"input"}), ("sage", {"input", "middle"}), ("gatv2", {"input", "middle"})]
)
def test_products_read_sparse_rows_of_their_own_row_set(kind: str, sets: set[str], dropout: float) -> None:
    """Fails if a product of targets reads all rows of the input, a mask is drawn for each layer, or X is left dense in the
    evaluation, or in the exact gradient.
    """
    above = Block("above", RowSet("seeds"), RowSet("middle"))
    of = {"aggregator": "mean"} if kind == "sage" else {"heads": 2} if kind == "gatv2" else {}
    config = ModelConfig(kind=kind, hidden=(8,), input_dropout=dropout, **of)  # type: ignore[arg-type]
    choices = Choices(
        shape=SPARSE,
        features="sparse",
        products="auto",
        precision="fp32",
        blocks=(BELOW, above),
        capacities=(SIZE, Capacity(20, 100, 150)),
        compared=True,
    )
    values = make_values(NETWORKS[kind], config, 500, 7, choices)
    assert {one.name for one in values.sparse_sets} == sets
    assert values.trains_whole
    kinds = [type(value.kind).__name__ for value in values.training.values()]
    assert kinds.count("SparseLinear") == kinds.count("SparseWeightGrad") == len(sets)
    assert kinds.count("DroppedValues") == len(sets) * (dropout > 0)
    for graph in (values.evaluation, values.exact):
        assert graph is not None
        assert all(value.kind.sparse for value in graph.values() if isinstance(value.kind, Input))
    alone = make_values(NETWORKS[kind], config, 500, 7, dataclasses.replace(choices, compared=False))
    assert not alone.trains_whole


def test_a_sparse_input_that_is_only_scored_has_no_transpose() -> None:
    """Fails if a run on batches plans, beside an evaluation's matrix, what gradients would read."""
    assert sparse_bytes(SPARSE, 9000, "fp32", True, transposed=False) == 9000 * 8 + 8 * 1001
