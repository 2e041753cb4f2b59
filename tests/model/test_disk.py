"""Programs cut into stages for values on disk: what runs by rows, by columns and at once, and what crosses from one to
another.
"""

from __future__ import annotations

import pytest

from mggcn.assemble.plan import plan_graph
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.model.disk import RESULT, X, cut_for_disk
from mggcn.model.kinds.ends import StageInput, StageOutput
from tests.graphs import make_graph, pattern


def stages_of(program: str, **model: object) -> list[tuple[str, list[str], list[str], list[str]]]:
    """How each stage of a program runs, its ops, and the labels of what it reads and writes."""
    graph = make_graph(pattern("directed", 43, 6), num_features=40, num_classes=3, seed=8)
    config = Config(model=ModelConfig(**model), train=TrainConfig(seed=5), run=RunConfig())  # type: ignore[arg-type]
    plan = plan_graph(config, graph)[0].ranks[0]
    of = plan.values.training if program == "train" else plan.values.evaluation
    cut = cut_for_disk(of, plan.sizes, plan.training if program == "train" else plan.evaluation)
    found, made = [], {X: "X"}
    for stage in cut.stages:
        ops = [v for v in stage.graph.values() if not isinstance(v.kind, StageInput | StageOutput)]
        outputs = [v for v in stage.graph.roots if isinstance(v.kind, StageOutput)]
        made |= {v.kind.name: v.operands[0].kind.label for v in outputs if isinstance(v.kind, StageOutput)}
        made |= dict.fromkeys(stage.left, "what an op leaves")
        reads, writes = (sorted(made[name] for name in names) for names in (stage.reads, stage.writes))
        found.append((stage.how, [v.kind.label for v in ops], reads, writes))
        for name in stage.writes:
            assert cut.crossings[name].in_memory == (name == RESULT)
    return found


def test_a_gcn() -> None:
    """Fails if a matrix is read or written once more than two layers need, or an op is lost."""
    assert stages_of("train", hidden=(16, 16), dropout=0.5) == [
        ("rows", ["linear 1", "linear 2"], ["X"], ["linear 1", "linear 2"]),
        ("columns", ["aggregate 2"], ["linear 2"], ["aggregate 2"]),
        ("rows", ["linear 3"], ["aggregate 2"], ["linear 3"]),
        ("columns", ["aggregate 3"], ["linear 3"], ["aggregate 3"]),
        ("rows", ["loss"], ["aggregate 3"], ["loss"]),
        ("columns", ["aggregate-grad 3"], ["loss"], ["aggregate-grad 3"]),
        ("rows", ["weight-grad 3", "input-grad 3"], ["aggregate 2", "aggregate-grad 3"], ["input-grad 3"]),
        ("columns", ["aggregate-grad 2"], ["input-grad 3"], ["aggregate-grad 2"]),
        ("rows", ["weight-grad 2", "input-grad 2", "weight-grad 1"], ["X", "aggregate-grad 2", "linear 1"], []),
    ]


@pytest.mark.parametrize("program", ["train", "evaluate"])
def test_a_model_without_neighbours_is_one_sweep(program: str) -> None:
    """Fails if rows that no op over all rows reads are written."""
    (stage,) = stages_of(program, kind="mlp", hidden=(16, 16), dropout=0.5)
    assert stage[0] == "rows"
    assert stage[2] == ["X"]
    assert stage[3] == ([] if program == "train" else ["linear 3"])


def test_attention_has_all_columns() -> None:
    """Fails if an op whose columns depend on each other runs by columns."""
    hows = {label: how for how, labels, *_ in stages_of("train", kind="gat", hidden=(8,), heads=2) for label in labels}
    assert hows["aggregate 1"] == hows["aggregate-grad 1"] == hows["destinations 1"] == "whole"
    assert hows["scores 1"] == hows["scores-grad 1"] == "rows"
