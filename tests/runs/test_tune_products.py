"""Variants of sparse products, all timed: which is called how often, what is kept, and on which operands."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mggcn.assemble import plan as assemble
from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank, make_rank
from mggcn.backend.cuda import spmm as cuda_spmm
from mggcn.backend.cuda.variants import Variant
from mggcn.backend.spmm_choice import NO_CHOICES, Choices, SpmmChoice, SpmmKey
from mggcn.comm.single import SingleCommunicator
from mggcn.errors import ConfigError
from mggcn.runs import tune_products as tune
from mggcn.runs.tune_products import KEPT_GAIN, OUT, SAMPLES, Call, Findings, Trial, tune_products
from mggcn.train.engine import Stop
from tests.devices import emulated
from tests.graphs import make_graph, pattern
from tests.machines import tight
from tests.runs.small import config_of, store_of

KEY = SpmmKey(10, 20, 300, 16, 4, True, "a")
VARIANTS = (SpmmChoice(ahead=16), SpmmChoice(), SpmmChoice("panels", 32), SpmmChoice("blocks", 0, 4))


def called(seconds: Sequence[float]) -> tuple[Trial, list[int]]:
    """A product whose variants always take the same, timed to its end, and the variants that were called in their order."""
    trial, order = Trial(KEY, VARIANTS[: len(seconds)]), []
    while (number := trial.next) is not None:
        order.append(number)
        trial.seconds[number].append(seconds[number])
    return trial, order


def test_slow_variants_are_called_once_and_the_fastest_is_taken() -> None:
    """Fails if the model's is not called first, a slow one is called twice, or one that is near is called too seldom."""
    trial, order = called([1.0, 1.2, 0.8, 0.9])
    assert order == [0, 1, 2, 3, 0, 2, 3, 0, 2, 3]
    assert (trial.known, trial.fastest, trial.gain) == (True, 2, 1.25)
    assert trial.winner.reason == "measured: 1.25 times as fast as rows, 16 ahead"


def test_less_than_the_gain_keeps_the_model_s_variant() -> None:
    """Fails if chance decides, or the table does not get a product whose model's variant stays."""
    trial, _ = called([1.0, 0.97])
    assert (trial.known, trial.beaten) == (True, False)
    assert (trial.winner.way, trial.winner.ahead) == ("rows", 16)
    assert "no other variant was 1.05 times as fast" in trial.winner.reason
    assert Findings(((0, trial),), 0.0).kept().keys() == {KEY}


def test_the_least_seconds_of_a_variant_count() -> None:
    """Fails if one disturbed call loses a variant that is not out, an average decides, or one of the model's is enough."""
    trial = Trial(KEY, VARIANTS[:2], [[1.0], [0.5]])
    assert (trial.next, trial.beaten, trial.known) == (0, False, False)
    trial.seconds = [[1.0] * SAMPLES, [1.2, 0.8, 1.9]]
    assert (trial.fastest, trial.beaten, trial.gain) == (1, True, 1.25)
    trial.seconds = [[9.0], [1.0] * SAMPLES]
    assert trial.next == 0, "the model's is never out after one call"


@pytest.mark.parametrize("seed", [6121, 90533, 1877, 44029, 73])
def test_steady_seconds_find_the_fastest_variant(seed: int) -> None:
    """Fails if of variants in any order another than the fastest is kept, or one that is far behind is called again."""
    draw = random.Random(seed)
    seconds = [math.exp(draw.uniform(-1, 1)) for _ in range(draw.randint(2, 4))]
    trial, _ = called(seconds)
    best = min(seconds)
    assert trial.fastest == seconds.index(best)
    assert trial.beaten == (seconds[0] >= KEPT_GAIN * best)
    far = [variant > 0 and seconds[variant] > OUT * best for variant in range(len(seconds))]
    assert all(len(values) <= (1 if out else SAMPLES) for out, values in zip(far, trial.seconds, strict=True))


def test_findings_of_several_ranks() -> None:
    """Fails if of products that look alike one without gain decides, or one that is left open is kept or counted."""
    trials = [called([1.0, other])[0] for other in (0.5, 0.9, 2.0)]
    left_open = Trial(dataclasses.replace(KEY, width=3), VARIANTS[:2], [[1.0], []])
    found = Findings((*((rank, trial) for rank, trial in enumerate(trials)), (2, left_open)), 12.34)
    assert found.kept().keys() == {KEY}
    assert found.kept()[KEY].reason.startswith("measured: 2.00 times as fast")
    assert found.text == (
        "2 of 4 sparse products take another variant than the model's, 1 left open; timing them took 12.3 s"
    )
    assert [line.partition(":")[0] for line in found.lines()] == ["rank 0", "rank 1", "rank 2", "rank 2"]
    assert found.lines()[-1].endswith("ms: rows, 16 ahead 1000.00 (1); left open")
    assert Findings((), 0.0).text == "no sparse product of this run has several variants"


@pytest.mark.parametrize("strategy", ["broadcast", "delayed"])
@pytest.mark.usefixtures("blocks_win")
def test_all_products_of_a_run(strategy: str, tmp_path: Path) -> None:
    """Fails if a product of a rank, a direction or of evaluations alone is not timed, or one of set-up alone is."""
    graph = store_of(tmp_path)
    run: Any = {"strategy": strategy, "delay": "none" if strategy == "delayed" else "0"}
    found = tune_products(resolve(config_of(2, **run), graph), graph, 1e9, lambda _: None, Stop())
    assert all(trial.known for _, trial in found.trials)
    # In both directions two tiles, pruned in training, so that evaluation has two more; or two parts of a vertex cut.
    each = 4 if strategy == "delayed" else 6
    assert [rank for rank, _ in found.trials] == [0] * each + [1] * each
    # Entries of a cut's parts are not in order, as blocks need them.
    assert strategy == "delayed" or all(trial.winner.way == "blocks" for _, trial in found.trials)


def test_real_seconds_come_from_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if seconds are not those of the calls, or a product stays open although nothing ends its trials."""
    monkeypatch.setattr(tune, "REPORT_S", 0.0)
    graph = store_of(tmp_path)
    said: list[str] = []
    began = time.perf_counter()
    found = tune_products(resolve(config_of(1), graph), graph, 1e9, said.append, Stop())
    whole_s = time.perf_counter() - began
    seconds = [value for _, trial in found.trials for values in trial.seconds for value in values]
    assert 0 < min(seconds)
    assert sum(seconds) < found.seconds < whole_s
    assert all(len(trial.seconds[0]) == SAMPLES and trial.known for _, trial in found.trials)
    assert len(found.kept()) >= 2
    assert said[0].endswith(f"calls: 0 of {len(found.trials)} sparse products are known (rank 0)")


def test_a_signal_or_the_budget_ends_it_with_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks that are threads wait for each other when they end, or one call of a variant decides for good."""
    monkeypatch.setattr(tune, "REPORT_S", 0.0)
    graph, stop = store_of(tmp_path), Stop()

    def say(text: str) -> None:
        stop.signal = signal.SIGINT

    config = resolve(config_of(2), graph)
    found = tune_products(config, graph, 1e9, say, stop)
    assert {rank for rank, _ in found.trials} == {0, 1}
    assert any(not trial.known for _, trial in found.trials)
    monkeypatch.setattr(tune, "LEAST_S", 0.0)
    found = tune_products(config, graph, 1e-9, lambda _: None, Stop())
    assert not any(values for _, trial in found.trials for values in trial.seconds)
    assert found.kept() == {}


@pytest.mark.parametrize(
    ("ranks", "strategy", "delay"), [(1, "broadcast", "0"), (3, "delayed", "2"), (2, "slice", "0")]
)
def test_variants_keep_to_the_plan_s_memory(
    ranks: int, strategy: str, delay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a variant that is timed works in more than is planned, or a strategy's products are never timed."""
    monkeypatch.setattr(assemble, "figures_here", lambda config: tight(2**17))
    made: list[Rank] = []

    def kept(*args: Any, **options: Any) -> Rank:
        made.append(make_rank(*args, **options))
        return made[-1]

    monkeypatch.setattr(tune, "make_rank", kept)
    adj = pattern("directed", 400, 9)
    graph = make_graph(adj, num_features=90, num_classes=7, sparse=True, weighted=False, seed=3)
    run: Any = {"strategy": strategy, "delay": delay, "features": "sparse"}
    found = tune_products(resolve(config_of(ranks, **run), graph), graph, 1e9, lambda _: None, Stop())
    assert len(made) == ranks
    for rank in made:
        backend: Any = rank.trainer.runtime.backend
        assert 0 < backend.work_space_bytes <= rank.plan.regions["kernel work space"]
    for _, trials in itertools.groupby(found.trials, key=lambda pair: pair[0]):
        assert {"rows", "blocks"} <= {variant.way for _, trial in trials for variant in trial.variants}


def test_a_gpu_times_its_slices_and_takes_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a GPU's slices are not timed, or a run does not take what was kept."""

    def call_s(call: Call, choice: SpmmChoice, synchronize: Callable[[], None]) -> float:
        call.run(choice)
        return 1e-9 if choice.way == "panels" else 2e-9

    monkeypatch.setattr(tune, "call_s", call_s)
    graph = store_of(tmp_path)
    config = resolve(config_of(1, device="cuda", memory_limit=2**40), graph)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden=(33, 33)))
    found = tune_products(config, graph, 1e9, lambda _: None, Stop(), emulated)
    kept = found.kept()
    assert {(key.width, key.item) for key in kept} == {(33, 4)}
    assert {variant.panel for variant in kept.values()} == {32}
    assert "panels of 32 columns" in "\n".join(found.lines())

    def losses(choices: Choices) -> list[float]:
        tiles.clear()
        plan, partition = plan_graph(config, graph)
        comm = SingleCommunicator()
        rank = make_rank(config, graph, plan, partition, comm, device_of=emulated, choices=choices)
        return [rank.trainer.step(epoch) for epoch in range(3)]

    tiles: list[int] = []
    choose = cuda_spmm.choose

    def recorded(width: int, itemsize: int, aligned: bool, panel: int = 0, *, weighted: bool = False) -> Variant:
        variant = choose(width, itemsize, aligned, panel, weighted=weighted)
        tiles.extend([variant.tile(itemsize)] if width == 33 else [])
        return variant

    monkeypatch.setattr(cuda_spmm, "choose", recorded)
    plain, whole = losses(NO_CHOICES), set(tiles)
    sliced, slices = losses(kept), set(tiles)
    assert 32 not in whole
    assert slices == {32}
    assert sliced == pytest.approx(plain, rel=1e-5)
    assert losses(kept) == sliced
    with pytest.raises(ConfigError, match=r"mggcn's own products, got debug\.spmm cusparse"):
        tune_products(config_of(1, device="cuda", spmm="cusparse"), graph, 2.0, lambda _: None, Stop())
