"""Which variants are tried how often, what is taken, and what it costs: pure functions of the seconds that calls took."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mggcn.backend.cpu import sizes as cpu_sizes
from mggcn.backend.cpu.spmm import worth_timing
from mggcn.backend.cpu.variants import MatrixTraits, candidates, choose_spmm, expected_s
from mggcn.backend.spmm_choice import HOPELESS, SpmmChoice, SpmmKey
from mggcn.config import Config, RunConfig, TrainConfig
from mggcn.tuning.epochs import LAST, limits_of
from mggcn.tuning.exploration import BUDGET, KEPT_GAIN, OUT, SAMPLES, Exploration, Limits, Trial
from mggcn.tuning.findings import Findings, from_json, to_json
from tests.machines import ZEN3, tight

KEY = SpmmKey(10, 20, 300, 16, 4, True, "a")
VARIANTS = (SpmmChoice(ahead=16), SpmmChoice(), SpmmChoice("panels", 32), SpmmChoice("blocks", 0, 4))
FREE = Limits(budget=math.inf)


def trial_of(expected: Sequence[float]) -> Trial:
    return Trial(KEY, VARIANTS[: len(expected)], tuple(expected))


def proposing(expected: Sequence[float]) -> Callable[[float], tuple[SpmmKey, Mapping[SpmmChoice, float]]]:
    return lambda slowest: (KEY, dict(zip(VARIANTS, expected, strict=False)))


class Calls:
    """A run's products, which take the seconds that `taken` says of their variants."""

    def __init__(self, limits: Limits, taken: Sequence[float], expected: Sequence[float] = ()) -> None:
        self.exploration = Exploration()
        self.exploration.open(limits)
        self._taken, self._propose = taken, proposing(expected or taken)

    def call(self, at: str = "a", kind: str = "alike") -> int | None:
        """Make a call; return the variant that it timed."""
        exploration = self.exploration
        trial = exploration.trial(at, self._propose)
        number = None if trial is None else exploration.sample(trial, kind)
        if trial is not None and number is not None:
            exploration.add(trial, kind, number, self._taken[number])
        return number

    def epoch(self, *calls: str, seconds: float = 10.0, **options: Any) -> list[int | None]:
        self.exploration.begin()
        timed = [self.call(at, **options) for at in calls or ("a",)]
        self.exploration.epoch(seconds)
        return timed


def test_slow_variants_are_called_once_and_the_fastest_is_taken() -> None:
    """Fails if the first epoch counts, the order is not the model's, a slow one is tried twice, or ranks report before."""
    run = Calls(FREE, [1.0, 1.2, 0.8, 0.9])
    assert [run.epoch() for _ in range(9)] == [[k] for k in (None, 0, 1, 2, 3, 0, 2, 3, None)]
    [trial] = run.exploration.trials
    assert (trial.known, trial.fastest, trial.gain) == (True, 2, 1.25)
    assert trial.winner.reason == "measured: 1.25 times as fast as rows, 16 ahead"
    assert run.exploration.cost_s == trial.spent_s == pytest.approx(2 * 0.2 + 0.4 + 2 * 0.1)
    assert run.exploration.winners["a"] == trial.winner
    assert SAMPLES * len(run.exploration.trials[0].variants) < LAST


@dataclass(frozen=True)
class Drawn:
    """Four products that take half of an epoch, of three variants each, of which the figures are wrong by 0.12."""

    seed: int
    noise: float
    """Standard deviation of a call, upwards."""
    disturbed: float
    """Share of the calls that take 1.3 to 2.5 times as long."""

    def run(self) -> tuple[float, float, float]:
        """Return later epochs as found and by the figures, over the best ones; and what trying cost, in epochs."""
        draw, exploration, products = random.Random(self.seed), Exploration(), []
        for _ in range(4):
            expected = [1.0] + [draw.uniform(0.95, 1.5) for _ in range(2)]
            products.append((expected, [seconds * math.exp(draw.gauss(0, 0.12)) for seconds in expected]))
        exploration.open(Limits(200))
        for _ in range(LAST):
            exploration.begin()
            for at, (expected, taken) in enumerate(products):
                trial = exploration.trial(at, proposing(expected))
                number = None if trial is None else exploration.sample(trial, "alike")
                if trial is not None and number is not None:
                    longer = draw.uniform(1.3, 2.5) if draw.random() < self.disturbed else 1.0
                    seconds = taken[number] * longer * math.exp(abs(draw.gauss(0, self.noise)))
                    exploration.add(trial, "alike", number, seconds)
            exploration.epoch(8.0)
        exploration.close()
        of = {at: VARIANTS.index(dataclasses.replace(winner, reason="")) for at, winner in exploration.winners.items()}
        best = 4.0 + sum(min(taken) for _, taken in products)
        found = 4.0 + sum(taken[of.get(at, 0)] for at, (_, taken) in enumerate(products))
        model = 4.0 + sum(taken[0] for _, taken in products)
        return found / best, model / best, exploration.cost_s / 8.0


@pytest.mark.parametrize(("noise", "disturbed", "found"), [(0.03, 0.0, 1.005), (0.05, 0.1, 1.008), (0.15, 0.3, 1.018)])
def test_drawn_seconds(noise: float, disturbed: float, found: float) -> None:
    """Fails if trying costs more than an epoch, or chooses hardly better than the figures, on quiet machines and others."""
    runs = [Drawn(seed, noise, disturbed).run() for seed in range(7000, 7200)]
    over, model, cost = (statistics.mean(values) for values in zip(*runs, strict=True))
    assert 1.0 <= over <= found < 1.019 < model
    assert cost < BUDGET
    assert max(spent for *_, spent in runs) < 1.25


def test_less_than_the_gain_keeps_the_model_s_way() -> None:
    """Fails if chance decides, or a product whose model's variant stays would be explored again."""
    trial = trial_of([1.0, 1.0])
    trial.seconds = [[1.0] * SAMPLES, [0.97, 0.99, 0.98]]
    assert trial.known
    assert not trial.beaten
    assert (trial.winner.way, trial.winner.ahead) == ("rows", 16)
    assert "no other variant was 1.05 times as fast" in trial.winner.reason


def test_the_least_seconds_of_a_variant_count() -> None:
    """Fails if one disturbed call loses a variant that is not out, an average decides, or one of the model's is enough."""
    trial = trial_of([1.0, 1.0])
    trial.seconds = [[1.0], [0.5]]
    assert (trial.next, trial.beaten, trial.known) == (0, False, False)
    trial.seconds = [[1.0] * SAMPLES, [1.2, 0.8]]
    assert (trial.fastest, trial.beaten, trial.gain) == (1, True, 1.25)
    trial.seconds = [[9.0], [1.0, 1.0]]
    assert trial.next == 0, "the model's is never out after one call"


def test_calls_that_are_not_alike_are_not_compared() -> None:
    """Fails if calls with and without dropout are compared with each other."""
    run = Calls(FREE, [1.0, 0.5])
    run.epoch()
    assert run.epoch(kind="dropout") == [0]
    assert run.epoch(kind="plain") == [None]
    assert run.epoch(kind="dropout") == [1]


@pytest.mark.parametrize("seed", [6121, 90533, 1877, 44029, 73])
def test_steady_seconds_find_the_fastest_variant(seed: int) -> None:
    """Fails if of variants that always take the same, in any order, another than the fastest is kept, or it costs more."""
    draw = random.Random(seed)
    seconds = [math.exp(draw.uniform(-1, 1)) for _ in range(draw.randint(2, 4))]
    run = Calls(FREE, seconds)
    while not run.exploration.done:
        run.epoch()
    [trial] = run.exploration.trials
    best = min(seconds)
    assert trial.fastest == seconds.index(best)
    assert trial.beaten == (seconds[0] >= KEPT_GAIN * best)
    far = [variant > 0 and seconds[variant] > OUT * best for variant in range(len(seconds))]
    assert all(len(values) <= (1 if out else SAMPLES) for out, values in zip(far, trial.seconds, strict=True))
    spent = sum(value - best for values in trial.seconds for value in values)
    assert run.exploration.cost_s == pytest.approx(spent)


def test_an_exploration_keeps_to_its_budget() -> None:
    """Fails if trying costs more than its epochs, or a variant that is too dear keeps others or the run waiting."""
    for budget in (0.05, 0.5, BUDGET, 9.0):
        run = Calls(Limits(budget=budget), [1.0, 1.4, 1.3, 0.9], [1.0, 1.4, 1.3, 1.2])
        for _ in range(12):
            run.epoch(*"abcde", seconds=6.0)
        # What is expected of a variant decides beforehand; here they are at most a tenth dearer than that.
        assert 0 < run.exploration.cost_s <= 1.25 * budget * 6.0
        assert run.exploration.done
        assert any(trial.dropped for trial in run.exploration.trials) == (budget < 9.0)
        assert (budget == 9.0) == all(trial.beaten for trial in run.exploration.trials)


def test_a_slow_first_epoch_allows_half() -> None:
    """Fails if the first epoch, slower than those behind it, lets trying cost more than promised, or decides for good."""
    for later, third in ((8.0, [0, None, 1, 0]), (4.0, [0, None, 0, None])):
        run = Calls(Limits(), [1.0, 4.0])
        run.epoch(*"aabb", seconds=8.0)
        assert run.epoch(*"aabb", seconds=later) == [0, 1, 0, None]
        assert run.epoch(*"aabb", seconds=later) == third
        assert run.exploration.cost_s <= BUDGET * later
        assert run.exploration.done


@pytest.mark.parametrize(("epochs", "known"), [(100, False), (400, True)])
def test_what_a_short_run_leaves_out_is_open_to_longer_ones(epochs: int, known: bool) -> None:
    """Fails if a table of a short run keeps a variant from all runs behind it."""
    run = Calls(Limits(epochs), [0.01, 0.01, 0.013])
    for _ in range(9):
        run.epoch()
    [trial] = run.exploration.trials
    assert (len(trial.variants), trial.known) == (2 + known, known)
    assert bool(Findings(((0, trial),), 0.0, 1.0).kept()) == known


@pytest.mark.parametrize(
    ("epochs", "calls", "model_s", "other", "tried"),
    [
        (40, 1, 0.01, 1.0, False),
        (60, 1, 0.01, 1.0, True),
        (100, 1, 0.01, 1.3, False),
        (200, 1, 0.01, 1.3, True),
        (9000, 1, 0.01, 1.5, False),
        (25, 3, 0.01, 1.0, True),
        (9000, 1, 0.00009, 1.0, False),
        (None, 1, 0.00009, 2.5, True),
    ],
)
def test_a_trial_must_be_able_to_repay_itself(
    epochs: int | None, calls: int, model_s: float, other: float, tried: bool
) -> None:
    """Fails if a run too short to gain tries anything, one that is long enough does not, or calls an epoch do not count."""
    run = Calls(Limits(epochs, math.inf), [model_s, other * model_s])
    for _ in range(3):
        run.epoch(*"a" * calls)
    assert bool(run.exploration.trials) == tried


def test_which_runs_try() -> None:
    """Fails if run.tune means something else, or auto touches short runs, GPUs or timelines."""

    def limits(epochs: int = 200, repeat: int = 1, **run: Any) -> Limits | None:
        return limits_of(Config(train=TrainConfig(epochs=epochs, repeat=repeat), run=RunConfig(**run)))

    assert limits() == Limits(200)
    assert limits(6, 3) == Limits(18)
    assert limits_of(Config(), 150) == Limits(50)
    assert limits(tune="on", epochs=3) == Limits(None)
    assert limits(LAST) is limits(tune="off") is limits(device="cuda") is limits(timeline=True) is None


def test_products_of_rare_evaluations_are_not_waited_for() -> None:
    """Fails if a product that only every k-th epoch's evaluation uses keeps the command from its end, or is never tried."""
    run = Calls(FREE, [1.0, 0.9])
    done = []
    for epoch in range(6):
        run.epoch("training")
        done.append(run.exploration.done)
        if epoch == 4:
            assert run.call("evaluation") is not None
    assert done == [False] * 4 + [True, False]


@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_training_says_which_calls_of_a_product_count(first: str) -> None:
    """Fails if an evaluation's call, which has no dropout, is compared with training's, or takes other than the winner."""
    run = Calls(FREE, [1.0, 0.5])
    if first == "evaluation":
        assert run.call(kind="plain") is None
    run.epoch(kind="dropout")
    for variant in (0, 1, 0, 1):
        assert run.call(kind="plain") is None
        assert run.epoch(kind="dropout") == [variant]
    assert run.call(kind="plain") is None
    assert run.exploration.winners["a"].ahead == 0


def test_a_second_run_on_the_same_kernels_knows_what_the_first_found() -> None:
    """Fails if a run of a sweep tries a product again, reports or pays for another's, or does not try its own."""
    run = Calls(FREE, [1.0, 0.5])
    for _ in range(5):
        run.epoch()
    run.exploration.close()
    assert run.epoch() == [None]
    run.exploration.open(FREE)
    assert run.exploration.cost_s == 0
    assert [run.epoch("a", "b") for _ in range(5)] == [[None, k] for k in (None, 0, 1, 0, 1)]
    assert len(run.exploration.trials) == 1
    assert {at: winner.ahead for at, winner in run.exploration.winners.items()} == {"a": 0}
    run.exploration.close()
    assert run.exploration.winners.keys() == {"a", "b"}


def test_variants_that_are_proposed() -> None:
    """Fails if the model's choice is not first and once, a hopeless variant is tried, or a promising one comes late."""
    reuse = tuple((n, round(58_000 * (1 - (1 - 1 / 58_000) ** n))) for n in (1024 << k for k in range(11)))
    matrix = MatrixTraits(58_000, 58_000, 14_300_000, reuse=reuse)
    for width, item in itertools.product((16, 41, 128, 512), (2, 4, 8)):
        model = choose_spmm(matrix, width, item, ZEN3)
        found = worth_timing(matrix, width, item, ZEN3, model, summed=True)
        variants, costs = list(found), list(found.values())
        assert costs == [expected_s(matrix, width, item, ZEN3, variant) for variant in variants]
        assert variants[0] == model
        assert costs[1:] == sorted(costs[1:])
        assert max(costs) <= HOPELESS * costs[0]
        ways = [variant.way for variant in variants[1:]]
        assert len(set(ways)) == len(ways) <= 3, "one of each way"
        known = [
            v for v in candidates(matrix, width, item, ZEN3).values() if v != dataclasses.replace(model, reason="")
        ]
        for way in {variant.way for variant in known}:
            best = min(expected_s(matrix, width, item, ZEN3, variant) for variant in known if variant.way == way)
            assert (best in costs[1:]) == (best <= HOPELESS * costs[0])
        every = worth_timing(matrix, width, item, ZEN3, model, summed=True, slowest=math.inf)
        assert len(every) == len(candidates(matrix, width, item, ZEN3)), "the command tries all"
    assert choose_spmm(matrix, 512, 4, ZEN3).way == "panels"
    few_panels = {variant.way for variant in worth_timing(matrix, 16, 4, ZEN3, SpmmChoice(), summed=False)}
    assert few_panels == {"rows"}


def test_no_variant_that_is_proposed_works_in_more_than_is_planned() -> None:
    """Fails if a panel of more rows than the matrix has entries, which no plan reckons with, is tried."""
    figures = tight(2**16)
    tried = left_out = 0
    for (rows, columns, nnz), width, item in itertools.product(
        ((300, 500, 2700), (40, 900, 90), (5000, 700, 3)), (16, 41, 300), (2, 4, 8)
    ):
        matrix = MatrixTraits(rows, columns, nnz)
        planned = cpu_sizes.spmm_bytes(rows, min(columns, nnz), nnz, width, item, max(item, 4), figures)
        variants = worth_timing(matrix, width, item, figures, SpmmChoice(), summed=True, slowest=math.inf)
        assert all(cpu_sizes.variant_bytes(matrix, width, item, variant) <= planned for variant in variants)
        tried += len(variants)
        left_out += len(candidates(matrix, width, item, figures)) - len(variants)
    assert tried > 27
    assert left_out > 0


def test_findings_of_several_ranks() -> None:
    """Fails if what a rank tells is lost on the way, the cheapest rank's cost is told, or a rank without gain decides."""
    ranks = []
    for seconds, epoch_s in (((1.0, 0.5), 2.0), ((1.0, 0.9), 4.0), ((1.0, 2.0), 4.0)):
        run = Calls(FREE, seconds)
        for _ in range(5):
            run.epoch(seconds=epoch_s)
        ranks.append(to_json(run.exploration))
    all_found = from_json(ranks)
    assert [rank for rank, _ in all_found.trials] == [0, 1, 2]
    assert [trial.gain for _, trial in all_found.trials] == pytest.approx([2.0, 1 / 0.9, 1.0])
    assert all_found.kept()[KEY].reason.startswith("measured: 2.00 times as fast")
    assert (all_found.cost_s, all_found.summary()["epochs"]) == pytest.approx((1.0, 0.5))
    assert all_found.summary() == pytest.approx(
        {"seconds": 1.0, "epochs": 0.5, "products": 3, "unfinished": 0, "beaten": 2}
    )
    before = {"seconds": 0.5, "epochs": 0.25, "products": 4, "unfinished": 3, "beaten": 1}
    assert all_found.summary(before) == pytest.approx(
        {"seconds": 1.5, "epochs": 0.75, "products": 4, "unfinished": 0, "beaten": 3}
    )


def test_the_cost_in_words() -> None:
    """Fails if seconds are written with an exponent, or short ones are lost."""
    trial = trial_of([1.0, 1.0])
    said = [Findings(((0, trial),), seconds, 2.0).text.split(":")[0] for seconds in (123.4, 1.26, 0.0126)]
    assert said == [
        "trying variants cost 123.4 s, 61.7 epochs",
        "trying variants cost 1.3 s, 0.6 epochs",
        "trying variants cost 12.6 ms, 0.0 epochs",
    ]
