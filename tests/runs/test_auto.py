"""`auto` for strategy and order: what is compared, what is taken, and what a run records of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import mggcn
from mggcn.assemble.plan import plan_graph, plan_shape, resolve
from mggcn.backend.gather_rates import CacheRates
from mggcn.cli.entry import main
from mggcn.config import Config, ModelConfig, RunConfig, SampleConfig
from mggcn.config.files import from_toml
from mggcn.cost.machine import Machine, find_machine
from mggcn.errors import ConfigError, PlanError
from mggcn.graph.csr import Graph
from mggcn.graph.generate import community
from mggcn.graph.links import split_links
from mggcn.graph.store import open_store, write_store
from mggcn.partition.cache.cuts import is_kept, kept_in
from mggcn.planning.cost_text import narrow_messages, seconds_text
from mggcn.planning.op_cost import training_cost
from mggcn.planning.select import Row, choice_dict, choice_lines
from mggcn.planning.shape import graph_shape
from mggcn.runs import auto
from mggcn.runs.auto import _count_partition, is_auto, resolve_auto, resolve_auto_shape
from tests.graphs import make_graph, pattern
from tests.shapes import shape_of


def graph():  # type: ignore[no-untyped-def]
    return make_graph(pattern("random", 60, 4), num_features=9, num_classes=3, seed=1)


def config_of(ranks: int = 3, **run: object) -> Config:
    return Config(run=RunConfig(ranks=ranks, **({"strategy": "auto", "order": "auto"} | run)))  # type: ignore[arg-type]


def test_every_strategy_and_order_is_compared() -> None:
    """Fails if a strategy is missing, an inexact one could be chosen, or the fastest exact one is not."""
    config, choice = resolve_auto(config_of(), graph(), find_machine("assumed-cpu"))
    assert choice is not None
    assert not is_auto(config)
    rows = {(row.candidate.strategy, row.candidate.order): row for row in choice.rows}
    exact = {(name, order) for name in ("broadcast", "halo", "slice") for order in ("random", "none", "locality")}
    delayed = {(f"delayed {kind}", "") for kind in ("cd-0", "cd-5", "0c")}
    assert set(rows) == exact | delayed | {("1.5D broadcast", "random")}
    assert not any(rows[key].candidate.exact for key in delayed - {("delayed cd-0", "")})
    assert {rows[key].verdict for key in exact | {("delayed cd-0", "")}} == {"fits"}
    # An order by locality that gains less than 1.03, as on columns at random, is not taken.
    fits = [row for row in choice.rows if row.verdict == "fits"]
    fastest, kept = (
        min(row.seconds or 0 for row in fits if row.candidate.order not in without) for without in ((), ("locality",))
    )
    assert choice.chosen is not None
    assert choice.chosen.seconds == (kept if kept <= 1.03 * fastest else fastest)
    assert config.run.strategy in choice.chosen.candidate.strategy


def test_batches_have_no_delayed_messages() -> None:
    """Fails if auto tries a strategy that batches refuse, or plans its candidates for steps of another size."""
    batches = dataclasses.replace(config_of(), sample=SampleConfig(batch=9, fanout=(3, 3, 3), plan="run"))
    config, choice = resolve_auto(batches, graph(), find_machine("assumed-cpu"))
    assert choice is not None
    assert not is_auto(config)
    assert {row.verdict for row in choice.rows if row.verdict != "analysis"} == {"fits"}
    assert "delayed" not in {row.candidate.strategy.split()[0] for row in choice.rows}
    plan, _ = plan_graph(config, graph())
    chosen = choice.chosen.candidate.plan if choice.chosen else None
    assert plan.stack is not None
    assert chosen is not None
    assert chosen.stack is not None
    for mine, other in zip(plan.stack.capacities, chosen.stack.capacities, strict=True):
        assert abs(mine.edges - other.edges) <= 0.2 * mine.edges
    bare, _ = resolve_auto_shape(batches, shape_of(300, 900, 9, 3), 1.5, find_machine("assumed-cpu"))
    assert bare.run.strategy != "delayed"


def shared_batches(ranks: int = 2, **run: object) -> tuple[Config, Graph]:
    """A run whose ranks may share batches, of wide layers and neighbourhoods that overlap."""
    run = {"strategy": "broadcast", "order": "random", "batches": "auto", "transport": "threads"} | run
    sample, model = SampleConfig(batch=24, fanout=(8, 8), plan="bound"), ModelConfig(hidden=(512,))
    return dataclasses.replace(config_of(ranks, **run), sample=sample, model=model), graph()


def linked(factor: float) -> Machine:
    """A machine whose links carry so many times what assumed ones do, and whose cores are slow."""
    machine = find_machine("assumed-cpu")
    links = tuple(
        dataclasses.replace(
            link,
            rates={kind: factor * rate for kind, rate in link.rates.items()},
            latency_s={kind: seconds / factor for kind, seconds in link.latency_s.items()},
        )
        for link in machine.links
    )
    gemm = {name: rate / 100 for name, rate in machine.device.gemm.items()}
    return dataclasses.replace(machine, links=links, device=dataclasses.replace(machine.device, gemm=gemm))


@pytest.mark.parametrize(("factor", "chosen"), [(0.01, "independent"), (100.0, "cooperative")])
def test_links_decide_whether_ranks_share_batches(factor: float, chosen: str) -> None:
    """Fails if rows are not weighed against messages, a price is not said, or another way is run than the cheaper."""
    asked, small = shared_batches()
    config, choice = resolve_auto(asked, small, linked(factor))
    assert choice is not None
    assert not is_auto(config)
    rows = {row.candidate.batches: row for row in choice.rows if row.verdict == "fits"}
    assert rows.keys() == {"independent", "cooperative"}
    assert config.run.batches == chosen == min(rows, key=lambda way: rows[way].seconds or 0)
    text, content = "\n".join(choice_lines(choice)), choice_dict(choice)
    for way, row in rows.items():
        assert row.price is not None
        assert row.seconds == row.price.epoch_s
        assert f"{way} batches: {row.price.line()}" in text
        assert f"{row.price.overlap:.2f} times the distinct ones" in text
        recorded = next(entry for entry in content["candidates"] if entry.get("batches") == way)
        assert recorded["batch"]["epoch_seconds"] == row.seconds
    assert f"{chosen} batches is chosen" in choice.reason
    # One order is compared with no other, and no step has a broadcast that 1.5D would change.
    assert "of those of order" not in choice.reason
    assert len(choice.rows) == 2


def test_order_and_batches_are_chosen_together() -> None:
    """Fails if a way to take batches is priced in one order alone, or for the vertices of another one."""
    asked, small = shared_batches(3, order="auto")
    config, choice = resolve_auto(asked, small, linked(100.0))
    assert choice is not None
    fits = [row for row in choice.rows if row.verdict == "fits"]
    assert {(row.candidate.order, row.candidate.batches) for row in fits} == {
        (order, way) for order in ("random", "none", "locality") for way in ("independent", "cooperative")
    }
    sent = {row.price.bytes_sent for row in fits if row.price and row.candidate.batches == "cooperative"}
    assert len(sent) > 1
    assert config.run.batches == "cooperative"


def test_what_no_way_but_one_can_do_is_not_compared() -> None:
    """Fails if results depend on a price: one rank, whole graphs, batch norms, and pairs of links."""
    asked, small = shared_batches(1, transport="auto")
    assert resolve_auto(asked, small) == (resolve(asked, small), None)
    assert resolve(asked, small).run.batches == "independent"
    asked, small = shared_batches()
    whole = dataclasses.replace(asked, sample=SampleConfig())
    config, choice = resolve_auto(whole, small)
    assert (config.run.batches, choice) == ("independent", None)
    # Batches of their own would count a vertex once for each rank that draws it.
    normed = dataclasses.replace(asked, model=ModelConfig(hidden=(512,), norm_layer="batch"))
    config, choice = resolve_auto(normed, small, linked(0.01))
    assert choice is not None
    assert config.run.batches == "cooperative"
    assert [row.verdict for row in choice.rows if row.candidate.batches == "independent"] == ["not exact"]
    links = split_links(small, (0.7, 0.1, 0.2))
    config, choice = resolve_auto(asked, links, linked(100.0))
    assert choice is not None
    assert config.run.batches == "independent"
    refused = [row for row in choice.rows if row.candidate.batches == "cooperative"]
    assert [row.verdict for row in refused] == ["not possible"]
    assert "pairs need both ends" in refused[0].note


def test_links_leave_delayed_messages_to_who_asks_for_them() -> None:
    """Fails if an approximation is taken by itself because a graph's edges are its labels."""
    links = split_links(community(300, 2_000, 8, 3, seed=1), (0.7, 0.1, 0.2))
    config, choice = resolve_auto(config_of(2, strategy="auto"), links)
    assert choice is not None
    inexact = {row.candidate.strategy for row in choice.rows if not row.candidate.exact}
    assert {"delayed cd-5", "delayed 0c"} <= inexact
    assert config.run.strategy != "delayed" or config.run.delay == "0"


def test_a_shapes_batches_are_compared() -> None:
    """Fails if a bare shape has one way alone, or bounds of all ranks count for each."""
    asked, _ = shared_batches(4)
    shape = shape_of(100_000, 2_000_000, 50, 9, num_training=50_000)
    # Three hops: rows of two of them are computed, and the outer one's overlap.
    sample, model = SampleConfig(batch=2048, fanout=(10, 10, 10)), ModelConfig(hidden=(512, 512))
    asked = dataclasses.replace(asked, sample=sample, model=model)
    found = {}
    for factor in (0.01, 100.0):
        config, choice = resolve_auto_shape(asked, shape, 0.0, linked(factor), 2**40)
        assert choice is not None
        assert {row.candidate.batches for row in choice.rows if row.price} == {"independent", "cooperative"}
        found[factor] = config.run.batches
    assert found == {0.01: "independent", 100.0: "cooperative"}


def test_shared_batches_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a folder holds `auto`, or ranks run another way than the one that is recorded."""
    write_store(graph(), tmp_path / "store")
    wanted = ["--batch", "24", "--fanout", "4,4,4", "--ranks", "2", "--transport", "threads", "--set"]
    wanted.append("run.batches=auto")
    assert main(["plan", str(tmp_path / "store"), *wanted]) == 0
    printed = capsys.readouterr().out
    assert printed.count("times the distinct ones") == 2
    out = tmp_path / "run"
    assert main(["train", str(tmp_path / "store"), *wanted, "--epochs", "2", "--out", str(out)]) == 0
    config, record = from_toml(out / "config.toml"), json.loads((out / "plan.json").read_text())
    chosen = record["choice"]["candidates"][record["choice"]["chosen"]]
    assert chosen["batches"] == config.run.batches in ("independent", "cooperative")
    assert ("shared_batches" in record) == (config.run.batches == "cooperative")
    assert record["choice"]["reason"] in capsys.readouterr().out
    assert main(["train", "--resume", str(out), "--epochs", "3", "--quiet"]) == 0


def test_an_order_by_locality_is_taken_where_it_pays() -> None:
    """Fails if planted communities under random ids are left in that order, the reason is not said, or nobody is asked."""
    # Large enough that no variant of the random ids' products keeps their operand in a cache.
    planted = community(40000, 400000, 16, 40, seed=11, homophily=0.9, train=0.5)
    base = Config(model=ModelConfig(hidden=(512, 512)), run=RunConfig(ranks=1, order="auto"))
    machine = find_machine("assumed-cpu")
    config, choice = resolve_auto(base, planted, machine)
    assert config.run.order == "locality"
    assert choice is not None
    rows = {row.candidate.order: row for row in choice.rows}
    near = {order: row.near or 0.0 for order, row in rows.items()}
    assert near["locality"] > 0.8
    assert near["random"] == near["none"] < 0.4
    sparse = {order: (row.parts or {})["sparse"] for order, row in rows.items()}
    assert sparse["locality"] < 0.8 * sparse["random"]
    why = (
        f"{near['locality']:.0%} of its gathers find their row among the 4,096 last used ones, {near['random']:.0%} of"
    )
    assert why in choice.reason
    assert rows["locality"].path == 1.0
    text = "\n".join(choice_lines(choice))
    assert f"{near['locality']:.0%}" in text
    assert choice_dict(choice)["candidates"][0]["near_share"] == near["random"]
    # Where the stages of a broadcast wait for each other, that is said too.
    small = community(20000, 200000, 16, 40, seed=11, homophily=0.9, train=0.5)
    _, several = resolve_auto(dataclasses.replace(base, run=RunConfig(ranks=4, order="auto")), small, machine)
    assert several is not None
    paths = {row.candidate.order: row.path for row in several.rows if row.candidate.strategy == "broadcast"}
    assert paths["locality"] > paths["random"] > 1.0  # type: ignore[operator]


@pytest.mark.full
def test_a_gpu_weighs_locality_by_its_own_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if an order is judged by a CPU's caches, taken where a GPU's L2 gains nothing by it, or left where it gains."""
    planted = community(60000, 600000, 16, 40, seed=11, homophily=0.9, train=0.5)
    random = community(60000, 600000, 16, 40, seed=11, homophily=1 / 40, train=0.5)
    h100 = find_machine("dgx-h100")
    base = Config(model=ModelConfig(hidden=(256, 256)), run=RunConfig(order="auto", device="cuda"))

    def rows_of(graph: Graph, machine: Machine) -> tuple[str, dict[str, Row], str]:
        config, choice = resolve_auto(base, graph, machine, 2**40)
        assert choice is not None
        print("\n".join(choice_lines(choice)))
        return config.run.order, {row.candidate.order: row for row in choice.rows}, choice.reason

    order, rows, reason = rows_of(planted, h100)
    assert order == "locality"
    assert "of its gathers find their row among the 16,384 last used ones" in reason
    sparse = {name: (row.parts or {})["sparse"] for name, row in rows.items()}
    assert sparse["locality"] < 0.85 * sparse["random"]
    assert "predicted seconds of an epoch" in capsys.readouterr().out
    order, rows, reason = rows_of(random, h100)
    assert order != "locality"
    if rows["locality"].seconds < rows[order].seconds:  # type: ignore[operator]
        assert "gains too little for an order that the settings do not name" in reason
    # A cache that holds the whole operand gains nothing by any order.
    gather = CacheRates(1e12, *dataclasses.astuple(h100.device.gather)[1:])  # type: ignore[call-overload]
    large = dataclasses.replace(h100, device=dataclasses.replace(h100.device, gather=gather))
    order, rows, _ = rows_of(planted, large)
    assert order != "locality"
    assert all(row.near == pytest.approx(1.0) for row in rows.values())


def test_a_large_graph_is_not_ordered_to_be_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if `auto` spends minutes on an order that nobody asked for, or leaves out one that is kept."""
    monkeypatch.setattr(auto, "ORDER_EDGES", 10)
    write_store(graph(), tmp_path / "store")
    stored = open_store(tmp_path / "store")
    for expected in (False, True):
        _, choice = resolve_auto(config_of(strategy="halo"), stored)
        assert choice is not None
        row = next(row for row in choice.rows if row.candidate.order == "locality")
        assert row.verdict == ("fits" if expected else "not possible")
        assert ("mggcn partition --kind locality --parts 3 --seed 1" in row.note) != expected
        assert main(["partition", str(tmp_path / "store"), "--kind", "locality", "--parts", "3"]) == 0
    # Who names it gets it.
    config, _ = resolve_auto(config_of(ranks=2, order="locality"), stored)
    assert config.run.order == "locality"


def test_what_is_named_is_kept() -> None:
    """Fails if auto of one setting changes the other, or an inexact strategy that the user named is refused with it."""
    config, choice = resolve_auto(config_of(strategy="slice"), graph())
    assert choice is not None
    assert config.run.strategy == "slice"
    assert {row.candidate.strategy for row in choice.rows} == {"slice"}
    config, choice = resolve_auto(config_of(order="permute"), graph())
    assert choice is not None
    assert {row.candidate.order for row in choice.rows if row.candidate.strategy == "halo"} == {"permute"}
    plain = config_of(strategy="halo", order="none")
    assert resolve_auto(plain, graph())[1] is None
    one, _ = resolve_auto(config_of(ranks=1), graph())
    assert (one.run.ranks, one.run.transport) == (1, "single")


def test_memory_decides_first() -> None:
    """Fails if a strategy that does not fit is chosen, or nothing fits and no one says so."""
    shape = shape_of(2_000_000, 60_000_000, 100, 40)
    machine = find_machine("dgx-h100")
    base = config_of(8, device="cuda", order="random")
    config, choice = resolve_auto_shape(base, shape, 0.0, machine, 80 * 2**30)
    assert choice is not None
    needs = {row.candidate.strategy: row.memory_bytes for row in choice.rows if row.verdict == "fits"}
    least = min(needs, key=lambda name: needs[name] or 0)
    config, _ = resolve_auto_shape(base, shape, 0.0, machine, needs[least])
    assert config.run.strategy == least
    with pytest.raises(PlanError, match="no exact strategy fits"):
        resolve_auto_shape(base, shape, 0.0, machine, 2**20)


@pytest.mark.parametrize(
    ("machine", "precision", "strategy"),
    [("dgx-h100", "fp32", "broadcast"), ("dgx-h100", "mixed", "broadcast"), ("hgx-h200", "mixed", "halo")],
)
def test_halo_and_mixed_are_weighed_where_links_bound_an_epoch(machine: str, precision: Any, strategy: str) -> None:
    """Fails if papers100M's extents on eight GPUs take halo where it does not fit, or broadcast where halo fits, or what
    mixed would gain is not said.
    """
    shape = shape_of(111_059_956, 3_231_371_744, 128, 172, num_training=1_207_179)
    on, model = find_machine(machine), ModelConfig(hidden=(208, 208))
    base = Config(model=model, run=RunConfig(ranks=8, strategy="auto", device="cuda", precision=precision))

    def chosen(limit: int) -> tuple[Config, dict[str, Row]]:
        config, choice = resolve_auto_shape(base, shape, 0.0, on, limit)
        assert choice is not None
        return config, {row.candidate.strategy: row for row in choice.rows}

    limit = on.memory_per_rank(8)
    config, rows = chosen(limit)
    assert config.run.strategy == strategy
    assert (rows["halo"].verdict == "fits") == (strategy == "halo")
    halo, broadcast = rows["halo"].seconds, rows["broadcast"].seconds
    assert halo is not None
    assert broadcast is not None
    assert halo < 0.6 * broadcast
    assert (rows["halo"].memory_bytes or 0) > (rows["broadcast"].memory_bytes or 0)
    # With room for it, the same links ask for halo.
    assert chosen(2**40)[0].run.strategy == "halo"
    said = "\n".join(narrow_messages(plan_shape(config, shape, machine=on), on))
    assert ("--precision mixed" in said) == (precision == "fp32")
    if said:
        mixed = dataclasses.replace(config, run=dataclasses.replace(config.run, precision="mixed"))
        seconds = training_cost(plan_shape(mixed, shape, machine=on), on).seconds
        assert seconds < 0.7 * (rows["broadcast"].seconds or 0)
        assert seconds_text(seconds) in said


def test_a_cut_is_compared_from_its_replication() -> None:
    """Fails if a bare shape's vertex cut is planned without its replication, or not with it."""
    shape = shape_of(100_000, 2_000_000, 100, 40)
    verdicts = {}
    for replication in (0.0, 1.8):
        _, choice = resolve_auto_shape(config_of(4, order="random"), shape, replication)
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
    # The cut and the order that were compared are kept.
    assert not (tmp_path / "store" / "partitions").exists()
    assert all(is_kept(open_store(tmp_path / "store"), name) for name in ("libra-2-1-shuffled", "locality-2-1"))


def test_a_shape_that_auto_cannot_plan_is_refused() -> None:
    """Fails if a strategy named without what it needs is planned from invented figures."""
    shape = shape_of(1000, 5000, 10, 4)
    config = dataclasses.replace(config_of(4), run=RunConfig(ranks=4, strategy="delayed"))
    assert resolve_auto_shape(config, shape, 0.0) == (config, None)
    few = dataclasses.replace(shape, num_vertices=3)
    with pytest.raises(PlanError, match="4 ranks cannot share the 3 vertices of the shape"):
        resolve_auto_shape(config, few, 0.0)
    from mggcn.assemble.plan import plan_shape

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


def test_what_cannot_be_made_is_a_row_and_no_error(tmp_path: Path) -> None:
    """Fails if one candidate that is damaged or impossible keeps the others from being chosen."""
    write_store(graph(), tmp_path / "store")
    stored = open_store(tmp_path / "store")
    resolve_auto(config_of(2), stored)
    folder = kept_in(stored, "libra-2-1-shuffled")
    assert folder is not None
    owner = folder / "libra-2-1-shuffled" / "owner.npy"
    damaged = bytearray(owner.read_bytes())
    damaged[-1] ^= 1
    owner.write_bytes(damaged)
    config, choice = resolve_auto(config_of(2), stored)
    assert choice is not None
    verdicts = {row.candidate.strategy: row for row in choice.rows}
    assert verdicts["delayed cd-0"].verdict == "not possible"
    assert "SHA-256" in verdicts["delayed cd-0"].note
    assert config.run.strategy in ("broadcast", "halo", "slice")
    shape = graph_shape(graph(), config_of(1))
    assert "at most 1024 parts" in str(_count_partition(graph(), shape, config_of(1100, order="random"), "cut", 1))


@pytest.mark.parametrize(("ranks", "delay"), [(1, "0"), (3, "5"), (3, "none")])
def test_a_cut_has_no_order_to_choose(ranks: int, delay: str) -> None:
    """Fails if an inexact strategy that was named is refused because the order was left open."""
    config, choice = resolve_auto(config_of(ranks, strategy="delayed", delay=delay), graph())
    assert choice is None
    assert config.run.order == "random"
    assert config.run.strategy == ("broadcast" if ranks == 1 else "delayed")


def test_a_named_delay_is_listed() -> None:
    """Fails if auto compares another delay than the one that was asked for."""
    _, choice = resolve_auto(config_of(3, delay="3"), graph())
    assert choice is not None
    assert {"delayed cd-0", "delayed cd-3", "delayed 0c"} < {row.candidate.strategy for row in choice.rows}


@pytest.mark.parametrize("setting", [{"delay": "5"}, {"delay": "none"}, {"stale_aggregates": "reuse"}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_delay_needs_a_strategy_that_has_one(setting: dict[str, str], ranks: int) -> None:
    """Fails if a run that was meant to be delayed is exact without a word, or a choice keeps what it has no use for."""
    (name,) = setting
    for strategy in ("broadcast", "halo", "slice"):
        refused = config_of(ranks, strategy=strategy, order="none", **setting)
        with pytest.raises(ConfigError, match=rf"run\.{name} {setting[name]} would change nothing.*--strategy delayed"):
            resolve_auto(refused, graph())
        with pytest.raises(ConfigError, match=rf"run\.{name}"):
            resolve_auto_shape(
                refused,
                shape_of(1000, 5000, 10, 4),
                1.5,
            )
    kept, _ = resolve_auto(config_of(ranks, strategy="delayed", **setting), graph())
    expected = setting[name] if ranks > 1 else getattr(RunConfig(), name)
    assert getattr(kept.run, name) == expected
    shaped, _ = resolve_auto_shape(
        config_of(ranks, strategy="auto", **setting),
        shape_of(1000, 5000, 10, 4),
        1.5,
    )
    chosen, _ = resolve_auto(config_of(ranks, strategy="auto", **setting), graph())
    for run in (shaped.run, chosen.run):
        assert run.strategy != "delayed", "the rest of the test is about strategies over rows"
        assert (run.delay, run.stale_aggregates) == ("0", "discard")
    assert resolve_auto(chosen, graph())[0] == chosen, "a run folder's configuration settles to itself"


def test_orders_that_follow_edges_need_a_store() -> None:
    """Fails if a bare shape is planned as if METIS had cut it, or one rank is asked for its replication."""
    from mggcn.assemble.plan import plan_shape

    shape = shape_of(1000, 5000, 10, 4)
    with pytest.raises(ConfigError, match="plan it on a store"):
        plan_shape(config_of(4, strategy="halo", order="metis"), shape)
    assert plan_shape(config_of(1, strategy="delayed", order="random"), shape).ranks[0].aggregation.exact
