"""`mggcn tune`: what it measures is plausible, is written where plans find it, and is read back as written."""

from __future__ import annotations

import dataclasses
import json
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from mggcn.aggregate.edge_op import EDGE_KERNELS
from mggcn.assemble.plan import plan_graph
from mggcn.backend.base import Epilogue
from mggcn.backend.cpu import measure
from mggcn.backend.cpu.spmm import CpuSpmm
from mggcn.backend.spmm_choice import SpmmChoice
from mggcn.cost.machine import MACHINES, read_machine
from mggcn.errors import ConfigError, PlanError
from mggcn.graph.store import write_store
from mggcn.memory.pages import DiskRates
from mggcn.planning.op_cost import epoch_cost
from mggcn.planning.run import RunPlan
from mggcn.runs import epoch_rates, tune, tune_products
from mggcn.runs.tune import TuneSettings, copy_rates, write_machine
from mggcn.train import disk_rates
from tests.cli.runs import refused, run_main
from tests.graphs import make_graph, pattern

SHAPE = ["--vertices", "1000", "--edges", "1e4", "--features", "8", "--classes", "3"]


@pytest.mark.full
@pytest.mark.parametrize("in_place", [False, True])
def test_passes_have_their_rates_by_the_bytes_that_they_move(in_place: bool) -> None:
    """Fails if a plan looks up a pass of so many bytes at another size than one of as many was timed at, or the pass in
    place does nothing.
    """
    moved = set[int]()

    class Passing:
        dtype = torch.float32

        def finish(self, z: torch.Tensor, out: torch.Tensor, epilogue: Epilogue) -> None:
            assert (z is out) == in_place
            assert epilogue.relu == in_place
            moved.add(z.nbytes + out.nbytes)

    table = copy_rates(Passing(), 0.0, in_place=in_place)  # type: ignore[arg-type]  # what is asked of a backend
    assert [size for size, _ in table] == sorted(moved)


def test_tune_writes_what_plans_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the figures do not land where plans look for them, cannot be read, or are not those of a computer."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "FOOTPRINTS", (2**18, 2**22))
    monkeypatch.setattr(measure, "ENOUGH_SHARE", 0.0)
    for name, epochs in (("LARGE", 4), ("SMALL", 8), ("BATCHES", 4)):
        trained = getattr(epoch_rates, name)
        settings = trained.settings.replace(trained.settings.split()[0], f"train.epochs={epochs}")
        monkeypatch.setattr(epoch_rates, name, trained._replace(vertices=4096, edges=16_384, settings=settings))
    assert run_main("plan", *SHAPE, "--ranks", 2) == 0
    before = capsys.readouterr().out
    assert "which are assumed; run mggcn tune" in before or "assumed, not measured; run mggcn tune" in before
    monkeypatch.setattr(disk_rates, "MATRIX_BYTES", disk_rates.LEAST_BYTES)
    assert run_main("tune", "--ranks", "2", "--threads", "1", "--seconds", "0.01", "--scratch", tmp_path) == 0
    said = capsys.readouterr().out
    path = tmp_path / "mggcn" / "machine.toml"
    assert f"written to {path}" in said
    machine = read_machine(path)
    assert (machine.origin, machine.device.kind, machine.device.cores) == ("measured", "cpu", 1)
    assert [size for size, _ in machine.device.gather.points] == [2**18, 2**22]
    in_place = machine.device.in_place
    assert in_place is not None
    rates = [rate for table in (machine.device.gather, machine.device.copy, in_place) for _, rate in table.points]
    assert all(1e7 < rate < 1e13 for rate in rates)
    assert set(machine.device.gemm) == {"fp32", "bf16", "fp64"}
    assert all(1e8 < rate < 1e15 for rate in machine.device.gemm.values())
    assert 1e-8 < machine.device.call_s <= machine.device.op_s < 1
    assert 0 < machine.device.matrix_s < 1
    assert 0.5 <= machine.device.pace < 100
    assert f"in an epoch work takes {machine.device.pace:.2f} times as long as at these rates" in said
    assert 0 <= machine.device.row_s < 1e-5
    assert list(machine.device.edge_s) == list(EDGE_KERNELS)
    for kernel, (edge, head, column) in machine.device.edge_s.items():
        assert 1e-9 < edge + 4 * head + 64 * column < 1e-4, kernel
    disk = machine.disk
    assert disk is not None
    assert all(1e6 < rate < 1e12 for rate in (disk.read, disk.write, disk.both))
    assert f"the disk reads {disk.read / 1e9:.2f} GB/s" in said
    assert [(link.transport, link.ranks) for link in machine.links] == [("threads", 2), ("gloo", 2)]
    assert all(link.pooled and 0 <= link.busy <= 1 for link in machine.links)
    assert all(1e-7 < seconds < 1 for link in machine.links for seconds in link.latency_s.values())
    assert all(1e6 < rate < 1e13 for link in machine.links for rate in link.rates.values())
    assert run_main("plan", *SHAPE, "--ranks", 2) == 0
    out = capsys.readouterr().out
    assert f"predicted on {machine.title}, parts of rank" in out
    assert "not measured" not in out


def test_what_epochs_take_beside_kernels_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if epochs that take what a plan says for some beginning, matrix and pace are not told apart from them."""
    machine = read_machine(MACHINES / "assumed-cpu.toml")
    true = {"op_s": 3e-4, "matrix_s": 7e-4, "pace": 1.25}
    late = dataclasses.replace(machine, device=dataclasses.replace(machine.device, **true))

    def planned(run: epoch_rates.Trained, threads: int, folder: Path) -> tuple[RunPlan, float]:
        assert not folder.exists()
        plan, _ = plan_graph(run.config(threads), run.graph(), machine)
        return plan, plan.steps * epoch_cost(plan, late).step_s

    monkeypatch.setattr(epoch_rates.Trained, "median_s", planned)
    assert epoch_rates.epoch_rates(machine, 2, tmp_path) == pytest.approx(true)


def test_a_machine_is_tuned_without_memory_for_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if minutes of measurements are lost where a run of tune's own does not fit."""
    content, said = tomllib.loads((MACHINES / "assumed-cpu.toml").read_text()), list[str]()

    def refused_(*_: Any) -> dict[str, float]:
        raise PlanError("it needs 300 MiB,\nand 200 are free")

    monkeypatch.setattr(tune, "epoch_rates", refused_)
    assert tune.beside_kernels(content, 1, tmp_path, said.append) == {}
    assert said[1:] == ["not measured: it needs 300 MiB, and 200 are free"]


def test_a_call_is_an_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a call counts as fast as the fastest."""
    seconds = iter([1e-6] * (tune.CALLS // 3) + [5e-5] * tune.CALLS)
    monkeypatch.setattr(tune, "_called_s", lambda *_: next(seconds))
    assert tune.call_seconds(tune.cpu_backend(1, "fp32")) == 5e-5


def test_a_disk_is_measured_where_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a folder in memory passes for a disk, or a full disk for a measured one."""
    said: list[str] = []
    assert tune.disk_table(None, said.append) == {}
    assert not said
    monkeypatch.setattr(tune, "in_memory", lambda _: True)
    with pytest.raises(ConfigError, match="are in memory; name another"):
        tune.disk_table(tmp_path, said.append)
    monkeypatch.setattr(tune, "in_memory", lambda _: False)

    def full(folder: Path) -> DiskRates:
        raise PlanError(f"{folder} is full")

    monkeypatch.setattr(tune, "measure_disk", full)
    with pytest.raises(PlanError, match="is full"):
        tune.disk_table(tmp_path, said.append)
    monkeypatch.setattr(tune, "measure_disk", lambda _: DiskRates(1.23456e9, 2e9, 3e9))
    assert tune.disk_table(tmp_path, said.append) == {"read": 1.23e9, "write": 2e9, "both": 3e9}


def test_what_is_known_of_the_disk_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if tuning without --scratch forgets half a minute's measurement, or ends at a file that it replaces anyway."""
    path, given = tmp_path / "machine.toml", list[Any]()

    def measured(settings: Any, folder: Any, report: Any, disk: Any) -> dict[str, Any]:
        given.append(disk)
        content = tomllib.loads((MACHINES / "assumed-cpu.toml").read_text())
        return content | ({} if len(given) == 1 else {"disk": tune.disk_table(DiskRates(1e9, 2e9, 3e9), report)})

    monkeypatch.setattr(tune, "tune_machine", measured)
    for _ in range(3):
        assert run_main("tune", "--out", path) == 0
    told = capsys.readouterr().out
    assert told.count("the disk is not measured") == 1
    assert told.count("the disk reads 1.00 GB/s, writes 2.00, and moves 3.00 doing both") == 2
    path.write_text("[disk]\nread = 1\n")
    assert run_main("tune", "--out", path) == 0
    assert run_main("tune", "--out", path, "--scratch", tmp_path) == 0
    assert given == [None, None, DiskRates(1e9, 2e9, 3e9), None, tmp_path]


def store_of_many_variants(folder: Path) -> Path:
    """A store whose sparse products go in several variants."""
    graph = make_graph(pattern("directed", 300, 9), num_features=19, num_classes=4, sparse=True, weighted=True, seed=3)
    write_store(graph, folder / "store")
    return folder / "store"


def test_tuned_products_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if training does not take what was measured, does not record it, or gets other numbers from it."""
    store = store_of_many_variants(tmp_path)
    run = ["--threads", 1, "--set", "model.hidden=33", "--set", "run.products=gemm-first"]

    def train(name: str) -> list[float]:
        assert run_main("train", store, *run, "--epochs", 5, "--out", tmp_path / name, "--quiet") == 0
        return [json.loads(line)["loss"] for line in (tmp_path / name / "history.jsonl").read_text().splitlines()]

    plain = train("plain")
    assert not (tmp_path / "plain" / "products.json").exists()
    # Whatever is fastest here: a variant that no model would choose wins by far.
    monkeypatch.setattr(
        tune_products, "call_s", lambda call, choice, synchronize: 1e-9 if choice.way == "blocks" else 9e-9
    )
    assert run_main("tune", "--store", store, "--threads", 1, "--width", "33") == 0
    said = capsys.readouterr().out
    assert "the model: rows" in said
    assert ", measured: 9.00 times as fast as rows" in said
    assert "; blocks, 2 0.00 (3)" in said
    assert "sparse products take another variant than the model's; timing them took" in said
    taken: list[SpmmChoice] = []
    multiply = CpuSpmm.multiply

    def recorded(self: CpuSpmm, adj: Any, h: Any, out: Any, **options: Any) -> None:
        if out.shape[1] != 19:  # A X, a product of set-up alone: no epoch makes it
            taken.append(self.choice(adj, h, out))
        multiply(self, adj, h, out, **options)

    monkeypatch.setattr(CpuSpmm, "multiply", recorded)
    assert train("tuned") == plain
    assert all(choice.reason.startswith("measured: 9.00 times as fast as rows") for choice in taken)
    assert {choice.way for choice in taken} == {"blocks"}
    table = json.loads((tmp_path / "tuned" / "products.json").read_text())["tables"][0]
    assert len(table["products"]) == len(json.loads((store / "tuned.json").read_text())["tables"][0]["products"]) >= 2


def test_a_damaged_table_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the advice of training, to measure again, does not help, or a place is refused after all timing."""
    graph = make_graph(pattern("random", 60, 5), num_features=9, num_classes=4, seed=3)
    store = tmp_path / "store"
    write_store(graph, store)
    (store / "tuned.json").write_text('{"tables": []}')
    train = ["train", store, "--threads", 1, "--epochs", 1, "--out", tmp_path / "run", "--quiet"]
    command = ["tune", "--store", store, "--threads", 1, "--set", "model.hidden=5", "--epochs", "1e9"]
    assert "measure again with mggcn tune --store" in refused(capsys, *train)
    assert run_main(*command) == 0
    assert "tuned.json holds no measured products; measure again" in capsys.readouterr().out
    assert run_main(*train) == 0

    def never(*_: Any) -> None:
        raise AssertionError("timed before the store was found to be read-only")

    monkeypatch.setattr(tune_products, "tune_products", never)
    # As root, no folder is read-only.
    (store / "tuned.json").unlink()
    (store / "tuned.json").mkdir()
    assert "cannot be written to" in refused(capsys, *command)


def test_a_signal_ends_tuning_and_real_seconds_reach_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if Ctrl-C is a traceback or looks like success, an empty table is written, or measured variants are not."""
    store = store_of_many_variants(tmp_path)
    command = ["tune", "--store", store, "--threads", 1, "--width", "33", "--epochs", "1e9"]
    with monkeypatch.context() as patch:
        patch.setattr(tune_products, "REPORT_S", 0.0)
        patch.setattr(tune_products, "progress", lambda *_: signal.raise_signal(signal.SIGINT))
        assert run_main(*command) == 130
    out, err = capsys.readouterr()
    assert "for about 1e+09 epochs' seconds at most" in out
    assert f"{store / 'tuned.json'} is not made" in out
    assert err == "mggcn: interrupted by SIGINT\n"
    assert not (store / "tuned.json").exists()
    (store / "tuned.json").write_text('{"format_version": 1}')
    monkeypatch.setattr(tune_products, "REPORT_S", 0.0)
    assert run_main(*command) == 0
    out = capsys.readouterr().out
    assert "tuned.json holds measured products of format 1" in out
    assert "sparse products are known (rank 0)" in out
    [table] = json.loads((store / "tuned.json").read_text())["tables"]
    assert len(table["products"]) >= 2
    assert all(row["way"]["reason"].startswith("measured: ") for row in table["products"])


def test_the_cost_that_is_told_is_the_one_that_is_heeded(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the help of tune tells another number of epochs than it uses."""
    assert run_main("tune", "--help") == 0
    assert f"left open (default: {tune_products.BUDGET:g})" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_switch_of_earlier_versions(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if --tune, which trained with variants being tried, is refused without what takes its place."""
    for given in (["--tune"], ["--tune", "off"], ["--tune=auto"]):
        said = refused(capsys, command, "store", *given)
        assert "unrecognized arguments: --tune" in said
        assert "or as mggcn tune --store has measured them; remove it" in said
    assert "there is no setting debug.tune any more" in refused(capsys, "settings", "debug.tune")


def test_what_tune_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if senseless ranks or a place that cannot be written are found out after a minute, or with a traceback."""
    assert "--ranks expects numbers of ranks such as 2,4, got 'two'" in refused(capsys, "tune", "--ranks", "two")
    assert "numbers of ranks from 2 on, got 1 and (1, 2)" in refused(capsys, "tune", "--ranks", "1,2", "--threads", 1)
    assert "--seconds" in refused(capsys, "tune", "--seconds", "-1")
    assert "remove --out" in refused(capsys, "tune", "--store", tmp_path, "--out", tmp_path / "x.toml")
    assert "remove it" in refused(capsys, "tune", "--store", tmp_path, "--scratch", tmp_path)
    nowhere = tmp_path / "nowhere"
    assert f"can be made in {nowhere}: No such file" in refused(capsys, "tune", "--scratch", nowhere)
    assert "with --store, --epochs says" in refused(capsys, "tune", "--store", tmp_path, "--seconds", "1")
    for epochs in ("0", "-1", "nan", "inf"):
        assert "--epochs must be a positive number" in refused(capsys, "tune", "--store", tmp_path, "--epochs", epochs)
    run = [
        "--root",
        tmp_path,
        "--config",
        tmp_path / "c.toml",
        "--set",
        "model.hidden=3",
        "--width",
        "3",
        "--epochs",
        0,
    ]
    for option in (run[:2], run[2:4], run[4:6], run[6:8], run[8:]):
        said = refused(capsys, "tune", *option)
        assert f"{option[0]} belong to a run" in said
        assert "name it with --store" in said
    assert "--root, --config, --set, --width, --epochs belong to a run" in refused(capsys, "tune", *run)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be written to" in refused(capsys, "tune", "--out", blocked / "machine.toml")
    with pytest.raises(ConfigError, match="with --out"):
        write_machine({}, blocked / "machine.toml")
    with pytest.raises(ConfigError, match="1 thread or more"):
        TuneSettings(0)
