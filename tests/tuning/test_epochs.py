"""Runs whose epochs try the variants of sparse products: the same bits, kept once all ranks know, and cheap."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mggcn.assemble import plan as assemble
from mggcn.assemble.plan import host_of, plan_graph, resolve
from mggcn.assemble.rank import make_rank
from mggcn.backend.cuda import presence as cuda_presence
from mggcn.backend.cuda import spmm as cuda_spmm
from mggcn.backend.cuda.variants import Variant
from mggcn.backend.events import Eager
from mggcn.backend.spmm_choice import NO_CHOICES, Choices, SpmmChoice, SpmmKey
from mggcn.comm.base import Communicator
from mggcn.comm.counting import CountingCommunicator
from mggcn.comm.single import SingleCommunicator
from mggcn.errors import BackendError, ConfigError
from mggcn.graph.store import graph_sha256
from mggcn.runs.local import on_local_ranks
from mggcn.runs.tune import tune_products
from mggcn.train.loop import Stop
from mggcn.train.timeline import Unwatched
from mggcn.tuning import exploration, record
from mggcn.tuning.epochs import LAST, Tuning
from mggcn.tuning.exploration import Exploration, Limits, Trial
from mggcn.tuning.findings import Findings
from mggcn.tuning.record import kept_file, read_choices, write_choices
from tests.cli.runs import history, result, same_tensors
from tests.devices import emulated
from tests.emulator.device import EmulatedDevice
from tests.graphs import make_graph, pattern
from tests.machines import tight
from tests.tuning.runs import config_of, store_of, trained

KEY = SpmmKey(1, 1, 1, 1, 4, True, "a")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.usefixtures("blocks_win")
def test_tuning_changes_no_bit_and_is_kept(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if tuning changes a loss, a score or a weight, keeps nothing, or a second run explores again."""
    graph, config = store_of(tmp_path), config_of(ranks)
    plain = trained(graph, config, tmp_path / "plain")
    assert "tuning" not in result(plain)
    assert not kept_file(graph_sha256(graph)).exists()
    capsys.readouterr()
    tuning = config_of(ranks, tune="on")
    first = trained(graph, tuning, tmp_path / "first")
    said = capsys.readouterr().out
    assert said.count("trying variants cost") == 1
    assert f"kept in {first / 'products.json'} and {kept_file(graph_sha256(graph))}" in said
    cost = result(first)["tuning"]
    assert cost["products"] == cost["beaten"] >= 2 * ranks
    assert cost["unfinished"] == 0
    assert 0 < cost["seconds"] < 1e-6
    kept = read_choices(kept_file(graph_sha256(graph)), host_of(config))
    assert {variant.way for variant in kept.values()} == {"blocks"}
    assert all(variant.reason.startswith("measured: 2.00 times as fast as rows") for variant in kept.values())
    assert read_choices(first / "products.json", host_of(config)) == kept
    second = trained(graph, tuning, tmp_path / "second")
    assert "tuning" not in result(second)
    assert "no variant was left to try: all sparse products were measured before" in capsys.readouterr().out
    for folder in (first, second):
        assert history(folder) == history(plain)
        assert same_tensors(folder, plain)


@pytest.mark.usefixtures("blocks_win")
def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run is lost because the user's cache folder is read-only, nobody says so, or the run forgets its own."""
    graph = store_of(tmp_path)
    # As root, no folder is read-only: here the temporary file has no place.
    write = record.new_file
    kept = kept_file(graph_sha256(graph))
    monkeypatch.setattr(record, "new_file", lambda path, **more: write(path / "no" if path == kept else path, **more))
    folder = trained(graph, config_of(1, tune="on"), tmp_path / "run")
    [said] = [line for line in capsys.readouterr().out.splitlines() if "trying variants" in line]
    assert (
        f"kept in {folder / 'products.json'}; the measured products cannot be written to {kept_file(graph_sha256(graph))}"
        in said
    )
    assert "XDG_CACHE_HOME" in said
    assert len(read_choices(folder / "products.json", host_of(config_of(1)))) >= 2


@pytest.mark.usefixtures("blocks_win")
def test_runs_try_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the default tries nothing in long runs, tries in short ones or with off, or changes a bit."""
    monkeypatch.setattr(exploration, "SHORTEST_S", 0.0)
    monkeypatch.setattr(exploration, "REPAID", 0.01)
    graph = store_of(tmp_path)
    short = config_of(2)
    short = dataclasses.replace(short, train=dataclasses.replace(short.train, epochs=LAST))
    plain = trained(graph, config_of(2, tune="off"), tmp_path / "plain")
    assert "tuning" not in result(plain)
    assert "tuning" not in result(trained(graph, short, tmp_path / "short"))
    assert not kept_file(graph_sha256(graph)).exists()
    folder = trained(graph, config_of(2), tmp_path / "run")
    assert result(folder)["tuning"]["products"] >= 2
    assert kept_file(graph_sha256(graph)).exists()
    assert history(folder) == history(plain)
    assert same_tensors(folder, plain)


def test_products_of_training_are_told_from_those_of_evaluations() -> None:
    """Fails if the epoch loop does not say when training is on: evaluations would begin its trials."""
    tuning = Tuning(SingleCommunicator(), Limits(), lambda _: None)
    tuning.begin(Unwatched(), lambda: None, Exploration())
    begun: dict[str, list[bool]] = {"training": [], "evaluation": []}

    def call(at: str) -> None:
        key = SpmmKey(1, 1, 1, 1, 4, True, at)
        trial = tuning.exploration.trial(at, lambda _: (key, {SpmmChoice(): 1.0, SpmmChoice(ahead=8): 1.0}))
        begun[at].append(trial is not None)

    for epoch in range(2):
        with tuning.epoch(epoch):
            call("training")
        call("training")
        call("evaluation")
    assert begun == {"training": [False, False, True, False], "evaluation": [True, True]}


def test_ranks_end_together_without_a_message_before() -> None:
    """Fails if ranks agree on an epoch by messages, report at different ones, or one that has nothing to say is missing."""

    def body(comm: Communicator) -> tuple[list[int], list[Findings]]:
        messages: list[int] = []
        found: list[Findings] = []
        counted = CountingCommunicator(comm)
        tuning = Tuning(counted, Limits(), found.append)
        tuning.begin(Unwatched(), lambda: None, Exploration())
        expected = {SpmmChoice(ahead=k): 1.0 for k in range(3)}
        for epoch in range(LAST + 2):
            with tuning.epoch(epoch):
                exploration = tuning.exploration
                trial = exploration.trial(0, lambda _: (KEY, expected)) if comm.rank == 1 else None
                number = None if trial is None else exploration.sample(trial, "alike")
                if trial is not None and number is not None:
                    exploration.add(trial, "alike", number, 1e-9 * (3 - number))
            messages.append(counted.messages)
        tuning.close()
        return messages, found

    ranks = on_local_ranks(config_of(3), body)
    sent, *_ = (messages for messages, _ in ranks)
    assert sent[: LAST - 1] == [0] * (LAST - 1)
    assert 0 < sent[LAST - 1] == sent[-1] <= 4, "how long the texts are, then each rank's"
    assert [len(found) for _, found in ranks] == [1, 0, 0]
    [(rank, trial)] = ranks[0][1][0].trials
    assert (rank, trial.known, trial.winner.ahead) == (1, True, 2)


@pytest.mark.parametrize(
    ("ranks", "strategy", "delay"), [(1, "broadcast", "0"), (3, "delayed", "2"), (2, "slice", "0")]
)
def test_variants_keep_to_the_plan_s_memory(
    ranks: int, strategy: str, delay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a variant that is tried works in more than is planned, or a strategy's products are never explored."""
    monkeypatch.setattr(assemble, "figures_here", lambda config: tight(2**17))
    adj = pattern("directed", 400, 9)
    graph = make_graph(adj, num_features=90, num_classes=7, sparse=True, weighted=False, seed=3)
    run: Any = {"strategy": strategy, "delay": delay, "features": "sparse"}
    config = resolve(config_of(ranks, **run), graph)
    plan, partition = plan_graph(config, graph)

    def body(comm: Communicator) -> tuple[float, set[str], int]:
        tuning = Tuning(comm, Limits(budget=math.inf, slowest=math.inf), lambda _: None)
        rank = make_rank(config, graph, plan, partition, comm, tuning=tuning)
        for epoch in range(6):
            rank.trainer.step(epoch)
        rank.trainer.runtime.state()
        rank.watch.close()
        backend: Any = rank.trainer.runtime.backend
        trials = tuning.exploration.trials
        variants = {variant.way for trial in trials for variant in trial.variants}
        samples = sum(len(values) for trial in trials for values in trial.seconds)
        return backend.work_space_bytes / rank.plan.regions["kernel work space"], variants, samples

    for used, variants, samples in on_local_ranks(config, body):
        assert 0 < used <= 1.0
        assert {"rows", "blocks"} <= variants
        assert samples >= 4


@pytest.mark.parametrize("strategy", ["broadcast", "delayed"])
@pytest.mark.usefixtures("blocks_win")
def test_epochs_without_a_run_folder(strategy: str, tmp_path: Path) -> None:
    """Fails if the command's epochs do not end with all products known, those of evaluation alone among them."""
    graph = store_of(tmp_path)
    run: Any = {"strategy": strategy, "delay": "none" if strategy == "delayed" else "0"}
    config = resolve(config_of(2, **run), graph)
    found = tune_products(config, graph, 2.0, lambda _: None, Stop())
    assert all(trial.known for _, trial in found.trials)
    # In both directions two tiles, pruned in training, so that evaluation has two more; or two parts of a vertex cut.
    each = 4 if strategy == "delayed" else 6
    assert [rank for rank, _ in found.trials] == [0] * each + [1] * each
    # Entries of a cut's parts are not in order, as blocks need them.
    assert strategy == "delayed" or all(trial.winner.way == "blocks" for _, trial in found.trials)
    assert 0 < found.cost_s < 1e-6


def test_a_gpu_times_its_slices_and_takes_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a GPU's slices are not timed, an epoch that times them is captured, or a run does not take what was kept."""
    original = Exploration.add

    def add(self: Exploration, trial: Trial, kind: Any, variant: int, seconds: float) -> None:
        assert seconds > 0
        original(self, trial, kind, variant, 1e-9 if trial.variants[variant].way == "panels" else 2e-9)

    monkeypatch.setattr(Exploration, "add", add)
    graph = store_of(tmp_path)
    config = resolve(config_of(1, device="cuda", memory_limit=2**40), graph)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden=(33, 33)))
    captured: list[object] = []
    monkeypatch.setattr(
        EmulatedDevice, "repeatable", lambda self, function, agree: captured.append(function) or Eager(function)
    )
    found = tune_products(config, graph, 1e9, lambda _: None, Stop(), emulated)
    assert not captured
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


def test_what_a_gpu_has_measured_belongs_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if slices that were timed on a GPU are read on another, or on a CPU, or a machine without one has a name."""
    with pytest.raises(BackendError, match=r"run\.device cuda"):
        host_of(config_of(1, device="cuda"))
    monkeypatch.setattr(cuda_presence, "missing_for_cuda", lambda: "")
    key = SpmmKey(1, 1, 1, 33, 4, True, "")
    for processors in (132, 114):
        figures = SimpleNamespace(name="a GPU", major=9, minor=0, multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, figures=figures: figures)
        host = host_of(config_of(1, device="cuda"))
        assert (host.processor, host.kernels, host.threads) == ("a GPU", "sm_90", processors)
        assert read_choices(tmp_path / "tuned.json", host) == {}
        write_choices(tmp_path / "tuned.json", host, {key: SpmmChoice("panels", 32)})
        assert read_choices(tmp_path / "tuned.json", host) == {key: SpmmChoice("panels", 32)}
    assert read_choices(tmp_path / "tuned.json", host_of(config_of(1))) == {}
