"""Every pair of settings of models, graphs, tasks and runs: gradients are float64 autograd's of the dense formulas."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from mggcn.aggregate import relations
from mggcn.assemble.plan import plan_graph
from mggcn.errors import ConfigError, PlanError
from mggcn.memory.arena import BufferSpec
from mggcn.model.lower import aggregations
from tests.covering import uncovered
from tests.devices import CPU, EMULATED, GPU, Where
from tests.model.stack_cases import (
    CASES,
    EMULATED_TOO,
    FAST,
    LEVELS,
    REFUSED,
    case_of,
    config_of_case,
    error_of,
    graph_of,
    trained,
)
from tests.train.test_exact import TOLERANCE


def _parameters() -> list[Any]:
    numbers, full, on_gpu = range(len(CASES)), pytest.mark.full, pytest.mark.cuda
    found = [pytest.param(CPU, n, id=f"cpu-{n}", marks=[] if n in FAST else full) for n in numbers]
    # Kernels that only these have; in the fast suite one each.
    few = [next(n for n in sorted(EMULATED_TOO) if CASES[n]["conv"] == conv) for conv in ("gatv2", "sage-max", "rgcn")]
    emulated = [(n, [] if n in few else full) for n in sorted(EMULATED_TOO)]
    found += [pytest.param(EMULATED, n, id=f"emulated-{n}", marks=marks) for n, marks in emulated]
    return found + [pytest.param(GPU, n, id=f"cuda-{n}", marks=on_gpu) for n in numbers]


@pytest.mark.parametrize(("where", "number"), _parameters())
def test_gradients_equal_autograd(where: Where, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails on a wrong formula or adjoint, statistics of a rank's own rows, an edge or mask that depends on the partition,
    or storage that is taken over too early.
    """
    # Blocks of a few rows, so that relations have several.
    monkeypatch.setattr(relations, "BLOCK_ROWS", 7)
    assert error_of(CASES[number], where) < TOLERANCE, CASES[number]


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), (3, "halo"), (5, "delayed")])
def test_a_maximum_takes_parallel_edges_once(ranks: int, strategy: str) -> None:
    """Fails if the gradient of a maximum comes back along each parallel edge from its winner, of one part or several."""
    case = case_of(conv="sage-max", typed=True, pattern="directed", ranks=ranks, strategy=strategy)
    assert error_of(case) < TOLERANCE


def test_every_pair_of_settings_occurs() -> None:
    """Fails if a pair that the package takes is in no case."""
    refused = {frozenset((one, other)) for one, other, _ in REFUSED}
    assert {frozenset(pair) for pair in uncovered(CASES, LEVELS)} == refused


@pytest.mark.parametrize(
    ("one", "other", "message"), [pytest.param(*pair, id="-".join(map(str, pair[0] + pair[1]))) for pair in REFUSED]
)
def test_pairs_that_do_not_occur_are_refused(one: tuple[str, Any], other: tuple[str, Any], message: str) -> None:
    """Fails if a pair that no case above has would train all the same."""
    needed = {"typed": True} if ("conv", "rgcn") == one and other[0] != "typed" else {}
    needed |= {"conv": "gat"} if other[0] == "out_heads" and one[0] != "conv" else {}
    head = "convolution" if one[1] in ("sgc", "appnp") else "linear"
    case = case_of(**({"head": head} | needed | dict((one, other))))
    with pytest.raises((ConfigError, PlanError)) as refusal:
        trained(case)
    assert re.search(message, str(refusal.value).replace("belong to", "belongs to"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual": "identity", "widths": "different"}, r"none of \[.*\] do; .*residual linear"),
        ({"head": "linear", "depth": 0}, "a linear head would read the features alone; give gcn a hidden layer"),
    ],
    ids=["identity of no layer", "linear head alone"],
)
def test_settings_without_a_layer_are_refused(changes: dict[str, Any], message: str) -> None:
    """Fails if a model trains whose residuals or convolutions are in no layer."""
    with pytest.raises((ConfigError, PlanError), match=message):
        trained(case_of(**changes))


@pytest.mark.parametrize(("ranks", "strategy", "norm"), [(1, "broadcast", "mean"), (3, "halo", "symmetric")])
def test_sgc_sums_its_constant_features_once(ranks: int, strategy: str, norm: str) -> None:
    """Fails if an epoch computes what no epoch changes, set-up forgets a step, or A^3 X takes more memory than X."""
    settings = {"conv": "sgc", "head": "convolution", "depth": 3, "pattern": "directed"}
    case = case_of(ranks=ranks, strategy=strategy, norm=norm, **settings)
    assert error_of(case) < TOLERANCE
    config, graph = config_of_case(case), graph_of(case)
    plan = plan_graph(config, graph)[0]
    assert "constants: A^3 X is computed once" in plan.ranks[0].values.explained
    for rank in plan.ranks:
        assert rank.input.aggregated == 3
        assert not aggregations((*rank.train.ops, *rank.evaluate.ops))
        assert rank.input.nbytes == BufferSpec("", rank.sizes.owned, 7, rank.sizes.dtype).nbytes
    dropped = dataclasses.replace(config, model=dataclasses.replace(config.model, input_dropout=0.1))
    changing = plan_graph(dropped, graph)[0].ranks[0]
    assert not changing.input.aggregated
    assert len(aggregations(changing.train.ops)) == 6


@pytest.mark.parametrize("strategy", ["halo", "slice", "delayed"])
def test_batch_norm_of_ranks_is_that_of_one_process(strategy: str) -> None:
    """Fails if copies of a vertex cut, or a rank's own rows alone, make the statistics."""
    alone = trained(case_of(conv="sage-mean", norm_layer="batch", ranks=1))[0][0]
    for rank in trained(case_of(conv="sage-mean", norm_layer="batch", ranks=3, strategy=strategy))[0]:
        names = [name for name in alone.weights if "running" in name]
        assert names
        for name in names:
            torch.testing.assert_close(rank.weights[name], alone.weights[name], rtol=1e-10, atol=1e-12)
