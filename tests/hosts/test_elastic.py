"""torchrun on several hosts: a host is killed or comes back, and the run goes on; what it and gloo open, host by host."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli.runs import history, losses, run_main, same_tensors, saved_epochs, saved_tensors
from tests.hosts.hosts import NETWORK, ROOT, Hosts, finished, some_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

PAGE = ROOT / "docs" / "machines.md"
SETTINGS = [
    "--threads",
    1,
    "--seed",
    90210,
    "--precision",
    "fp64",
    "--set",
    "model.dropout=0.4",
    "--set",
    "model.hidden=32",
]
SAVING = ["--set", "model.hidden=32", "--set", "train.checkpoint_every=5", "--set", "run.timeout_s=8"]
EPOCHS = 300
WITHOUT_END = 10**7
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3,join_timeout=120,read_timeout=20"
"""Seconds in which torchrun misses a host; its own are 15 and 30."""


class Launch:
    """torchrun on some hosts, of one rank each; host a holds the rendezvous."""

    def __init__(self, hosts: Hosts, root: Path, words: list[object], nodes: str, on: str = "ab") -> None:
        self.hosts, self.root = hosts, root
        elastic = ["--nnodes", nodes, "--nproc-per-node", 1, "--max-restarts", 3, "--rdzv-conf", QUICK]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "a:29500", "--rdzv-id", "test"]
        self._command = [sys.executable, "-m", "torch.distributed.run", *elastic, *meeting, "-m", "mggcn", *words]
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._started = 0
        for name in on:
            self.start(name)

    def start(self, name: str) -> None:
        """Start torchrun on a host."""
        self._started += 1
        out = self.root / f"torchrun-{self._started}-{name}"
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
        self.processes[name] = self.hosts.hosts[name].start(*self._command, env=env, out=out)

    def end(self, timeout_s: float) -> list[int]:
        try:
            return finished([self.processes[name] for name in sorted(self.processes)], timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(self.said())

    def said(self) -> str:
        """What all of them have printed."""
        return "\n".join(path.read_text() for path in sorted(self.root.glob("torchrun-*")))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "community"
    assert run_main("generate", "community", folder, "--vertices", 8000, "--edges", 60000, "--seed", 71) == 0
    return folder


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks that nothing disturbs, on this machine."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert run_main("train", store, *SETTINGS, *SAVING, "--epochs", EPOCHS, "--ranks", 2, "--quiet", "--out", out) == 0
    return out


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with some_hosts(tmp_path, 2) as some:
        yield some


def words(store: Path, out: Path, epochs: int = EPOCHS) -> list[object]:
    return ["train", store, *SETTINGS, *SAVING, "--epochs", epochs, "--out", out]


def rows(out: Path) -> int:
    path = out / "history.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until(condition: Callable[[], bool], launch: Launch, timeout_s: float = 90.0) -> None:
    """Wait for a condition. Fails with what was printed."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, launch.said()
        time.sleep(0.02)


def ranks_now(out: Path) -> int:
    return int(json.loads((out / "job.json").read_text())["assignment"]["ranks"])


def test_the_host_that_is_left_goes_on_and_takes_the_other_in_again(
    store: Path, whole: Path, hosts: Hosts, tmp_path: Path
) -> None:
    """Fails if the run ends with a host, begins anew, or a host that comes back is not taken in, or a loss differs."""
    out = tmp_path / "run"
    launch = Launch(hosts, tmp_path, words(store, out, WITHOUT_END), "1:2")
    until(lambda: rows(out) > 20 and ranks_now(out) == 2, launch)
    hosts.kill("b")
    until(lambda: ranks_now(out) == 1 and rows(out) > 60, launch)
    hosts.add("b", 2)
    launch.start("b")
    until(lambda: ranks_now(out) == 2, launch)
    before = saved_epochs(out)
    until(lambda: saved_epochs(out) >= before + 20, launch)
    for name in "ab":
        hosts.kill(name)
    assert len(re.findall(r"started again: the run in .* goes on after \d+ epochs", launch.said())) >= 2
    found = losses(out)[:EPOCHS]
    np.testing.assert_allclose(found, losses(whole)[: len(found)], rtol=1e-6)


@pytest.mark.parametrize("power", [False, True])
def test_as_many_ranks_give_the_same_bits(store: Path, whole: Path, hosts: Hosts, tmp_path: Path, power: bool) -> None:
    """Fails if what torchrun starts again on the same number of hosts loses an epoch or a bit."""
    out = tmp_path / "run"
    launch = Launch(hosts, tmp_path, words(store, out), "2")
    until(lambda: rows(out) > 20, launch)
    hosts.kill("b", power=power)
    hosts.add("b", 2)
    launch.start("b")
    assert launch.end(150) == [0, 0], launch.said()
    assert history(out) == history(whole)
    assert same_tensors(out, whole)


BATCHES = ["--batch", 64, "--fanout", "4,3", "--set", "model.kind=sage", "--set", "model.aggregator=mean"]
SAMPLED = {
    "parts": [*BATCHES, "--set", "sample.rows=parts", "--set", "run.order=none"],
    "cooperative": [*BATCHES, "--set", "run.batches=cooperative"],
    "history": [*BATCHES, "--set", "sample.halo=history", "--set", "sample.history_delay=2"],
    "learned": [*BATCHES, "--features", "learned:8"],
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_batches_go_on_with_the_same_bits(store: Path, hosts: Hosts, tmp_path: Path, kind: str) -> None:
    """Fails if a run on batches that lost a host and has it back differs in a bit: relays, caches or rows began anew."""
    settings, out, whole = [*words(store, tmp_path / "run", 40), *SAMPLED[kind]], tmp_path / "run", tmp_path / "whole"
    alone = [*words(store, whole, 40), *SAMPLED[kind], "--ranks", 2, "--quiet"]
    assert run_main(*alone) == 0
    launch = Launch(hosts, tmp_path, settings, "2")
    until(lambda: saved_epochs(out) >= 5 and rows(out) > 7, launch)
    hosts.kill("b")
    hosts.add("b", 2)
    launch.start("b")
    assert launch.end(150) == [0, 0], launch.said()
    assert re.search(r"started again: the run in .* goes on after \d+ epochs", launch.said())
    assert history(out) == history(whole)
    found, expected = saved_tensors(out), saved_tensors(whole)
    assert found.keys() == expected.keys()
    # A message on its way has as many rows as it may have: those behind the ones that were sent are not read.
    read = [name for name in found if not name.endswith(".in")]
    assert all(torch.equal(found[name], expected[name]) for name in read)


def test_nothing_outlives_the_host_of_the_rendezvous_but_the_checkpoint(
    store: Path, whole: Path, hosts: Hosts, tmp_path: Path
) -> None:
    """Fails if ranks wait for a host that holds torchrun's store and is gone, or the run cannot be continued."""
    out = tmp_path / "run"
    launch = Launch(hosts, tmp_path, words(store, out), "1:2")
    until(lambda: rows(out) > 20 and ranks_now(out) == 2, launch)
    hosts.kill("a")
    (code,) = finished([launch.processes["b"]], 90)
    assert code != 0
    done = saved_epochs(out)
    assert done >= 20
    hosts.add("a", 1)
    (tmp_path / "again").mkdir()
    again = Launch(hosts, tmp_path / "again", ["train", "--resume", out], "2")
    assert again.end(120) == [0, 0], again.said()
    assert history(out) == history(whole)


def test_the_firewall_rule_of_the_page_keeps_strangers_out(store: Path, hosts: Hosts, tmp_path: Path) -> None:
    """Fails if the rule of docs/machines.md leaves a port of a run open, or keeps the machines of the run apart."""
    if shutil.which("nft") is None or shutil.which("bash") is None:
        pytest.skip("the rule needs nft (nftables), and asking for ports bash")
    rules = [line for line in PAGE.read_text().splitlines() if line.startswith("nft ")]
    assert len(rules) == 4
    stranger = hosts.add("e", 5)
    asked = ["bash", "-c", f"exec 3<>/dev/tcp/{hosts.hosts['a'].address}/29500"]
    launch = Launch(hosts, tmp_path, words(store, tmp_path / "run", WITHOUT_END), "2", on="ab")
    until(lambda: rows(tmp_path / "run") > 5, launch)
    stranger.run("timeout", 5, *asked)  # as long as nothing is done about it
    for name in "ab":
        hosts.hosts[name].run("sh", "-ec", "\n".join(rules).replace("10.0.0.0/24", f"{NETWORK}.0/30"))
    open_ports = [where.rpartition(":")[2] for where in hosts.hosts["a"].listeners()]
    assert len(open_ports) == 3
    for port in open_ports:
        with pytest.raises(subprocess.CalledProcessError):
            stranger.run("timeout", 1, *[word.replace("29500", port) for word in asked])
    hosts.hosts["b"].run("timeout", 5, *asked)
    before = rows(tmp_path / "run")
    until(lambda: rows(tmp_path / "run") > before + 20, launch)


def test_what_listens_under_torchrun(store: Path, hosts: Hosts, tmp_path: Path) -> None:
    """Fails if docs/machines.md no longer lists every socket that listens."""
    out = tmp_path / "run"
    launch = Launch(hosts, tmp_path, words(store, out, WITHOUT_END), "2")
    until(lambda: rows(out) > 5, launch)
    found = {name: hosts.hosts[name].listeners() for name in "ab"}
    gloo = {name: [where for where in found[name] if where.startswith("10.77.0.")] for name in "ab"}
    rest = {name: sorted(set(found[name]) - set(gloo[name])) for name in "ab"}
    assert [len(gloo[name]) for name in "ab"] == [1, 1], found
    assert rest["b"] == [], found
    assert "*:29500" in rest["a"], found
    assert len(rest["a"]) == 2, found
    assert all(where.startswith("*:") for where in rest["a"]), found


def test_what_listens_on_one_machine(store: Path, hosts: Hosts, tmp_path: Path) -> None:
    """Fails if ranks that mggcn itself starts listen where other machines reach them, or meet over the network."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "mggcn", *words(store, out, WITHOUT_END), "--ranks", 2, "--transport", "gloo"]
    started = hosts.hosts["a"].start(*command, out=tmp_path / "alone")
    give_up_at = time.monotonic() + 90
    while rows(out) <= 5:
        assert started.poll() is None, (tmp_path / "alone.err").read_text()
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
    found = hosts.hosts["a"].listeners()
    assert [where.rpartition(":")[0] for where in found] == ["127.0.0.1", "127.0.0.1"], found
