"""Which variants are tried how often, what is taken, and what it costs: pure functions of the seconds that calls took."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from mggcn.backend.cpu import sizes as cpu_sizes
from mggcn.backend.cpu.spmm import worth_timing
from mggcn.backend.cpu.variants import MatrixTraits, candidates, choose_spmm, expected_s
from mggcn.backend.sparse_products import HOPELESS
from mggcn.backend.spmm_choice import SpmmChoice, SpmmKey
from mggcn.tuning.exploration import KEPT_GAIN, OUT, SAMPLES, Exploration, Trial
from mggcn.tuning.findings import Findings, from_json, to_json
from tests.machines import ZEN3, tight

KEY = SpmmKey(10, 20, 300, 16, 4, True, "a")
VARIANTS = (SpmmChoice(ahead=16), SpmmChoice(), SpmmChoice("panels", 32), SpmmChoice("blocks", 0, 4))


def called(trial: Trial, seconds: Callable[[int], float], calls: int = 40) -> list[int | None]:
    """Make calls, all alike, which take as long as `seconds` of their variant says; return which variant each sampled."""
    timed = []
    for _ in range(calls):
        timed.append(variant := trial.sample("alike"))
        if variant is not None:
            trial.seconds[variant].append(seconds(variant))
    return timed


def sampled(seconds: Sequence[float]) -> tuple[Trial, list[int | None]]:
    trial = Trial(KEY, VARIANTS[: len(seconds)])
    return trial, called(trial, lambda variant: seconds[variant])


def test_slow_variants_are_called_once_and_the_fastest_is_taken() -> None:
    """Fails if the warm-up counts, the order is not the model's, a slow one is called twice, or the best is not taken."""
    trial, timed = sampled([1.0, 1.2, 0.9, 1.5])
    assert timed[0] is None
    assert timed[1:5] == [0, 1, 2, 3], "each once before any is called again, the model's first"
    assert [timed.count(variant) for variant in range(4)] == [SAMPLES, 1, SAMPLES, 1], (
        "1.2 and 1.5 are more than 1.3 times 0.9"
    )
    assert trial.complete
    assert (trial.winner.way, trial.winner.panel) == ("panels", 32)
    assert trial.winner.reason == "measured: 1.11 times as fast as rows, 16 ahead"
    assert trial.kept == trial.winner
    assert trial.spent_s == pytest.approx(3 * 0.1 + 0.3 + 0.6)


def test_less_than_the_gain_keeps_the_model_s_way() -> None:
    """Fails if chance decides, or a product whose model's variant stays would be explored again."""
    trial, _ = sampled([1.0, 0.97])
    assert trial.winner == VARIANTS[0]
    assert not trial.beaten
    assert trial.kept is not None
    assert (trial.kept.way, trial.kept.ahead) == ("rows", 16)
    assert "no other variant was 1.05 times as fast" in trial.kept.reason


def test_the_least_seconds_of_a_variant_count() -> None:
    """Fails if one disturbed call loses a variant that is not out, or an average decides."""
    trial = Trial(KEY, VARIANTS[:2])
    taken = {0: iter([1.0, 1.0, 1.0]), 1: iter([1.2, 0.8, 1.2])}
    called(trial, lambda variant: next(taken[variant]))
    assert (trial.fastest, trial.beaten) == (1, True)
    assert trial.gain == pytest.approx(1.25)


def test_calls_that_are_not_alike_go_the_best_variant_so_far() -> None:
    """Fails if calls with and without dropout are compared with each other, or those that do not count explore."""
    trial = Trial(KEY, VARIANTS[:2])
    assert trial.sample("dropout") is None
    assert trial.sample("plain") is None
    assert trial.sample("dropout") == 0
    trial.seconds[0].append(1.0)
    assert trial.winner == VARIANTS[0]
    assert trial.sample("dropout") == 1
    trial.seconds[1].append(0.5)
    assert trial.sample("plain") is None
    assert trial.winner == VARIANTS[0], "one call of the model's variant may have been disturbed"
    for variant, seconds in ((0, 1.0), (1, 0.5), (0, 1.0)):
        assert trial.sample("dropout") == variant
        trial.seconds[variant].append(seconds)
    assert trial.sample("plain") is None
    assert (trial.winner.way, trial.winner.ahead) == ("rows", 0)
    assert trial.seconds == [[1.0] * 3, [0.5] * 2]


@pytest.mark.parametrize("seed", [6121, 90533, 1877, 44029, 73])
def test_steady_seconds_find_the_fastest_variant(seed: int) -> None:
    """Fails if of variants that always take the same, in any order, another than the fastest is kept, or it costs more."""
    draw = random.Random(seed)
    seconds = [math.exp(draw.uniform(-1, 1)) for _ in range(draw.randint(2, 12))]
    trial = Trial(KEY, tuple(SpmmChoice(ahead=k) for k in range(len(seconds))))
    called(trial, seconds.__getitem__, calls=1 + SAMPLES * len(seconds))
    best = min(seconds)
    taken = seconds.index(best) if seconds[0] >= KEPT_GAIN * best else 0
    assert trial.complete
    assert trial.kept is not None
    assert trial.kept.ahead == taken
    far = [variant > 0 and seconds[variant] > OUT * best for variant in range(len(seconds))]
    assert [len(values) for values in trial.seconds] == [1 if out else SAMPLES for out in far]
    assert trial.spent_s == pytest.approx(sum(len(v) * (s - best) for v, s in zip(trial.seconds, seconds, strict=True)))


def test_one_disturbed_call_of_the_model_s_variant_does_not_decide() -> None:
    """Fails if the model's variant is out after a call that took long by chance, and another one is kept for good."""
    trial = Trial(KEY, VARIANTS)
    taken = iter([9.0, 1.0, 1.0])
    timed = called(trial, lambda variant: next(taken) if variant == 0 else 1.02)
    assert timed.count(0) == SAMPLES
    assert (trial.complete, trial.beaten, trial.winner) == (True, False, VARIANTS[0])
    # Where the model's variant is the slowest indeed, three calls say so too.
    slow, timed = sampled([9.0, 1.0, 1.02, 1.5])
    assert [timed.count(variant) for variant in range(4)] == [SAMPLES, SAMPLES, SAMPLES, 1]
    assert slow.gain == pytest.approx(9.0)


def test_what_is_known_when_it_stops_is_taken_if_it_is_clear() -> None:
    """Fails if one call of each decides by a few percent, or for good, or a variant that is far ahead is not taken."""
    for seconds, taken in ((1 / (OUT - 0.1), False), (1 / (OUT + 0.1), True)):
        trial = Trial(KEY, VARIANTS[:3])
        called(trial, (1.0, seconds).__getitem__, calls=3)
        trial.stopped = True
        assert trial.sample("alike") is None
        assert (trial.beaten, trial.winner is not VARIANTS[0], trial.kept) == (taken, taken, None)


def test_an_exploration_keeps_to_its_budget() -> None:
    """Fails if the calls cost more than the budget and one call, or another product is begun after it is spent."""
    exploration = Exploration(budget=2.0)
    products = [Trial(KEY, VARIANTS) for _ in range(5)]
    seconds = (1.0, 1.9, 0.8, 1.7)
    assert exploration.trial(0, lambda: products[0]) is None, "the first epoch touches memory for the first time"
    exploration.epoch(3.0)
    exploration.epoch(1.5)
    for at, product in enumerate(products):
        assert exploration.trial(at, functools.partial(products.__getitem__, at)) is product
    assert not exploration.done
    costs = []
    for _ in range(20):
        for product in products:
            if (variant := product.sample("alike")) is not None:
                exploration.add(product, variant, seconds[variant])
                costs.append(exploration.cost_s)
    assert exploration.done
    assert costs[-2] < 2.0 * 1.5 <= costs[-1] <= 2.0 * 1.5 + max(seconds)
    assert exploration.trial("another", lambda: Trial(KEY, VARIANTS)) is None
    exploration.epoch(0.1)
    assert exploration.cost_s == costs[-1]


def test_an_exploration_is_done_with_its_last_product() -> None:
    """Fails if a run that has nothing to explore waits for it, or ends it before it has seen the products of an epoch."""
    exploration = Exploration()
    exploration.epoch(1.0)
    assert not exploration.done
    exploration.epoch(1.0)
    assert exploration.done
    trial = exploration.trial(0, lambda: Trial(KEY, VARIANTS[:2]))
    assert trial is not None
    assert not exploration.done
    for variant in [None, *([0, 1] * SAMPLES)]:
        assert trial.sample("alike") == variant
        if variant is not None:
            exploration.add(trial, variant, 0.1)
    assert exploration.done
    only = exploration.trial(1, lambda: Trial(KEY, VARIANTS[:1]))
    assert only is not None
    assert (only.sample("alike"), only.over, only.kept) == (None, True, None)


def test_products_of_rare_evaluations_are_not_waited_for() -> None:
    """Fails if a product that only every k-th epoch's evaluation uses keeps a run from ending its tuning early."""
    exploration = Exploration()
    made = {at: Trial(KEY, VARIANTS[:2]) for at in ("training", "evaluation")}

    def call(at: str) -> None:
        trial = exploration.trial(at, lambda: made[at])
        if trial is not None and (variant := exploration.sample(at, "alike")) is not None:
            exploration.add(trial, variant, 0.01)

    done = []
    for epoch in range(12):
        exploration.begin()
        call("training")
        exploration.epoch(1.0)
        done.append(exploration.done)
        if epoch in (1, 11):
            call("evaluation")
    # A warm-up of the run and one of the product, then two variants three times each, whatever the evaluation has.
    assert done == [False] * 7 + [True] * 5
    assert not exploration.done, "it is called again"
    assert not made["evaluation"].complete


@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_training_says_which_calls_of_a_product_count(first: str) -> None:
    """Fails if an evaluation's call, which has no dropout, sets the kind for good or is compared, whichever comes first."""
    exploration = Exploration(math.inf)

    def call(kind: str) -> int | None:
        trial = exploration.trial("both", lambda: Trial(KEY, VARIANTS[:2]))
        if trial is None or (variant := exploration.sample("both", kind)) is None:
            return None
        exploration.add(trial, variant, {"plain": 0.1, "dropout": 1.0}[kind] * (1 + 0.1 * variant))
        return variant

    def epoch() -> int | None:
        exploration.begin()
        variant = call("dropout")
        exploration.epoch(1.0)
        return variant

    if first == "evaluation":
        exploration.epoch(1.0)
        assert [call("plain") for _ in range(3)] == [None, 0, 1], (
            "a product that only evaluations use is explored in them"
        )
        spent = exploration.cost_s
        assert spent == pytest.approx(0.01)
        assert epoch() is None, "a warm-up: what evaluations found is forgotten"
    else:
        spent = 0.0
        assert epoch() is None, "the run's warm-up"
        assert call("plain") is None
        assert exploration.trials == (), "an evaluation does not begin what training uses"
        assert exploration.untried == 1
        assert epoch() is None
    timed = []
    for _ in range(2 * SAMPLES - 1):
        timed.append(epoch())
        assert call("plain") is None
    assert timed == [0, 1, 0, 1, 0]
    [trial] = exploration.trials
    assert exploration.untried == 0
    assert trial.seconds == [[1.0] * SAMPLES, [1.1] * (SAMPLES - 1)]
    assert exploration.cost_s == pytest.approx(spent + 0.2)
    exploration.close()
    exploration.begin()
    assert exploration.trial("both", lambda: Trial(KEY, VARIANTS[:2])) is trial, "the winner stays known"


def test_variants_that_are_proposed() -> None:
    """Fails if the model's choice is not first and once, a hopeless variant is tried, or a promising one comes late."""
    reuse = tuple((n, round(58_000 * (1 - (1 - 1 / 58_000) ** n))) for n in (1024 << k for k in range(11)))
    matrix = MatrixTraits(58_000, 58_000, 14_300_000, reuse=reuse)
    for width, item in itertools.product((16, 41, 128, 512), (2, 4, 8)):
        model = choose_spmm(matrix, width, item, ZEN3)
        variants = worth_timing(matrix, width, item, ZEN3, model, summed=True)
        costs = [expected_s(matrix, width, item, ZEN3, variant) for variant in variants]
        assert variants[0] == model
        assert len({(variant.way, variant.panel, variant.blocks, variant.ahead) for variant in variants}) == len(
            variants
        )
        assert costs[1:] == sorted(costs[1:])
        assert max(costs) <= HOPELESS * costs[0]
        ways = [variant.way for variant in variants[1:]]
        assert len(set(ways)) == len(ways), "one of each way"
        known = [
            v for v in candidates(matrix, width, item, ZEN3).values() if v != dataclasses.replace(model, reason="")
        ]
        for way in {variant.way for variant in known}:
            best = min(expected_s(matrix, width, item, ZEN3, variant) for variant in known if variant.way == way)
            assert (best in costs[1:]) == (best <= HOPELESS * costs[0])
    assert choose_spmm(matrix, 512, 4, ZEN3).way == "panels"
    few_panels = {variant.way for variant in worth_timing(matrix, 16, 4, ZEN3, SpmmChoice(), summed=False)}
    assert few_panels == {"rows"}


def test_no_variant_that_is_proposed_works_in_more_than_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a panel of more rows than the matrix has entries, which no plan reckons with, is tried."""
    monkeypatch.setattr("mggcn.backend.cpu.spmm.HOPELESS", math.inf)
    figures = tight(2**16)
    tried = left_out = 0
    for (rows, columns, nnz), width, item in itertools.product(
        ((300, 500, 2700), (40, 900, 90), (5000, 700, 3)), (16, 41, 300), (2, 4, 8)
    ):
        matrix = MatrixTraits(rows, columns, nnz)
        planned = cpu_sizes.spmm_bytes(rows, min(columns, nnz), nnz, width, item, max(item, 4), figures)
        variants = worth_timing(matrix, width, item, figures, SpmmChoice(), summed=True)
        assert all(cpu_sizes.variant_bytes(matrix, width, item, variant) <= planned for variant in variants)
        tried += len(variants)
        left_out += len(candidates(matrix, width, item, figures)) - len(variants)
    assert tried > 27
    assert left_out > 0


def test_findings_of_several_ranks() -> None:
    """Fails if what a rank tells is lost on the way, the cheapest rank's cost is told, or a rank without gain decides."""
    ranks = []
    for seconds, epoch_s in (((1.0, 0.5), 2.0), ((1.0, 0.9), 4.0), ((1.0, 2.0), 4.0)):
        exploration = Exploration()
        exploration.epoch(epoch_s)
        trial = exploration.trial(0, lambda: Trial(KEY, VARIANTS[:2]))
        assert trial is not None
        exploration.trial(1, lambda: Trial(KEY, VARIANTS[:1]))
        for _ in range(2 * SAMPLES + 1):
            if (variant := trial.sample("alike")) is not None:
                exploration.add(trial, variant, seconds[variant])
        ranks.append(to_json(exploration))
    all_found = from_json(ranks)
    assert [rank for rank, _ in all_found.trials] == [0, 1, 2]
    assert [trial.gain for _, trial in all_found.trials] == pytest.approx([2.0, 1 / 0.9, 1.0])
    assert all_found.kept()[KEY].reason.startswith("measured: 2.00 times as fast")
    assert (all_found.cost_s, all_found.cost_epochs) == pytest.approx((1.5, 0.75))
    assert all_found.summary() == pytest.approx(
        {"seconds": 1.5, "epochs": 0.75, "products": 3, "unfinished": 0, "beaten": 2}
    )
    before = {"seconds": 0.5, "epochs": 0.25, "products": 4, "unfinished": 3, "beaten": 1}
    assert all_found.summary(before) == pytest.approx(
        {"seconds": 2.0, "epochs": 1.0, "products": 4, "unfinished": 0, "beaten": 3}
    )


def test_the_cost_in_words() -> None:
    """Fails if seconds are written with an exponent, or short ones are lost."""
    trial = Trial(KEY, VARIANTS[:2])
    said = [Findings(((0, trial),), seconds, 2.0).text.split(":")[0] for seconds in (123.4, 1.26, 0.0126)]
    assert said == [
        "tuning cost 123.4 s, 61.7 epochs",
        "tuning cost 1.3 s, 0.6 epochs",
        "tuning cost 12.6 ms, 0.0 epochs",
    ]
