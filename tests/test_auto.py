"""`auto` for strategy and order: what is compared, what is taken, and what a run records of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import mggcn
from mggcn.cli import main
from mggcn.config import Config, RunConfig, from_toml
from mggcn.errors import ConfigError, PlanError
from mggcn.graph.store import write_store
from mggcn.jobs.auto import is_auto, settled, settled_shape
from mggcn.plan.description import find_machine
from mggcn.train.shape import GraphShape
from tests.graphs import make_graph, pattern


def graph():  # type: ignore[no-untyped-def]
    return make_graph(pattern("random", 60, 4), num_features=9, num_classes=3, sparse=False, weighted=False, seed=1)


def config_of(ranks: int = 3, **run: object) -> Config:
    return Config(run=RunConfig(ranks=ranks, **({"strategy": "auto", "order": "auto"} | run)))  # type: ignore[arg-type]


def test_every_strategy_and_order_is_compared() -> None:
    """Fails if a strategy is missing, an inexact one could be chosen, or the fastest exact one is not."""
    config, choice = settled(config_of(), graph())
    assert choice is not None
    assert not is_auto(config)
    rows = {(row.candidate.strategy, row.candidate.order): row for row in choice.rows}
    exact = {(name, order) for name in ("broadcast", "halo", "slice") for order in ("random", "none")}
    delayed = {(f"delayed {kind}", "") for kind in ("cd-0", "cd-5", "0c")}
    assert set(rows) == exact | delayed | {("1.5D broadcast", "random")}
    assert not any(rows[key].candidate.exact for key in delayed - {("delayed cd-0", "")})
    assert {rows[key].verdict for key in exact | {("delayed cd-0", "")}} == {"fits"}
    fastest = min((row for row in choice.rows if row.verdict == "fits"), key=lambda row: row.seconds or 0)
    assert choice.chosen is not None
    assert choice.chosen.seconds == fastest.seconds
    assert config.run.strategy in choice.chosen.candidate.strategy


def test_what_is_named_is_kept() -> None:
    """Fails if auto of one setting changes the other, or an inexact strategy that the user named is refused with it."""
    config, choice = settled(config_of(strategy="slice"), graph())
    assert choice is not None
    assert config.run.strategy == "slice"
    assert {row.candidate.strategy for row in choice.rows} == {"slice"}
    config, choice = settled(config_of(order="permute"), graph())
    assert choice is not None
    assert {row.candidate.order for row in choice.rows if row.candidate.strategy == "halo"} == {"permute"}
    plain = config_of(strategy="halo", order="none")
    assert settled(plain, graph())[1] is None
    one, _ = settled(config_of(ranks=1), graph())
    assert (one.run.ranks, one.run.transport) == (1, "single")


def test_memory_decides_first() -> None:
    """Fails if a strategy that does not fit is chosen, or nothing fits and no one says so."""
    shape = GraphShape("shape", 2_000_000, 60_000_000, 100, 40, True)
    machine = find_machine("dgx-h100")
    base = config_of(8, device="cuda", order="random")
    config, choice = settled_shape(base, shape, 0.0, machine, 80 * 2**30)
    assert choice is not None
    needs = {row.candidate.strategy: row.memory_bytes for row in choice.rows if row.verdict == "fits"}
    least = min(needs, key=lambda name: needs[name] or 0)
    config, _ = settled_shape(base, shape, 0.0, machine, needs[least])
    assert config.run.strategy == least
    with pytest.raises(PlanError, match="no exact strategy fits"):
        settled_shape(base, shape, 0.0, machine, 2**20)


def test_a_cut_is_compared_from_its_replication() -> None:
    """Fails if a bare shape's vertex cut is planned without its replication, or not with it."""
    shape = GraphShape("shape", 100_000, 2_000_000, 100, 40, True)
    verdicts = {}
    for replication in (0.0, 1.8):
        _, choice = settled_shape(config_of(4, order="random"), shape, replication)
        assert choice is not None
        verdicts[replication] = {row.candidate.strategy: row for row in choice.rows}
    assert "--replication" in verdicts[0.0]["delayed cd-0"].note
    assert verdicts[1.8]["delayed cd-0"].verdict == "fits"
    assert verdicts[1.8]["delayed cd-5"].bytes_sent < verdicts[1.8]["delayed cd-0"].bytes_sent  # type: ignore[operator]


def test_a_run_records_what_was_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the folder holds `auto`, so that resuming could choose otherwise, or the plan does not print the table."""
    write_store(graph(), tmp_path / "store")
    wanted = ["--strategy", "auto", "--order", "auto", "--ranks", "2", "--transport", "threads"]
    assert main(["plan", str(tmp_path / "store"), *wanted]) == 0
    printed = capsys.readouterr().out
    assert "is chosen:" in printed
    assert "never chosen by auto" in printed
    out = tmp_path / "run"
    assert main(["train", str(tmp_path / "store"), *wanted, "--epochs", "3", "--out", str(out), "--quiet"]) == 0
    config = from_toml(out / "config.toml")
    assert not is_auto(config)
    record = json.loads((out / "plan.json").read_text())
    assert record["strategy"] == config.run.strategy
    chosen = record["choice"]["candidates"][record["choice"]["chosen"]]
    assert config.run.strategy in chosen["strategy"]
    assert main(["predict", str(out)]) == 0
    # The cut that was compared is kept with the store.
    assert [path.name for path in (tmp_path / "store" / "partitions").iterdir()] == ["libra-2-1-shuffled"]


def test_a_shape_that_auto_cannot_plan_is_refused() -> None:
    """Fails if a strategy named without what it needs is planned from invented figures."""
    shape = GraphShape("shape", 1000, 5000, 10, 4, True)
    config = dataclasses.replace(config_of(4), run=RunConfig(ranks=4, strategy="delayed"))
    assert settled_shape(config, shape, 0.0) == (config, None)
    from mggcn.assemble import plan_shape

    with pytest.raises(ConfigError, match="--replication"):
        plan_shape(config, shape)
    with pytest.raises(ConfigError, match="1 to 4 copies"):
        plan_shape(config, shape, 5.0)


def test_the_api_chooses_too() -> None:
    """Fails if a Trainer keeps `auto` or trains something else than it says."""
    trainer = mggcn.Trainer(
        graph(), mggcn.SAGE(hidden=(5,)), ranks=2, transport="threads", strategy="auto", order="auto"
    )
    assert trainer.config.run.strategy != "auto"
    assert len(trainer.fit(epochs=2)) == 2
