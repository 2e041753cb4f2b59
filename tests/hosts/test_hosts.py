"""Ranks on two and three machines, which are namespaces here: losses, stores, folders, sockets, and a cable that is cut."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.runs import history, losses, run_main
from tests.hosts.hosts import Hosts, finished, some_hosts

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]

SETTINGS = ["--threads", "1", "--seed", "90210", "--set", "model.dropout=0.4", "--set", "model.hidden=8", "--quiet"]
BATCHES = ["--batch", "64", "--fanout", "5,5"]
KINDS = {
    "broadcast": ["--strategy", "broadcast"],
    "halo": ["--strategy", "halo"],
    "slice": ["--strategy", "slice"],
    "delayed": ["--strategy", "delayed", "--delay", "1"],
    "batches": BATCHES,
    "shared-batches": [*BATCHES, "--set", "run.batches=cooperative"],
    "rows-of-owners": [*BATCHES, "--set", "sample.rows=owners"],
    "parts-of-owners": [*BATCHES, "--set", "sample.rows=parts", "--set", "run.order=none"],
    "history": [*BATCHES, "--set", "sample.halo=history"],
    "learned": [*BATCHES, "--set", "data.inputs=learned:8"],
    "first-full": [*BATCHES, "--set", "sample.first=full"],
}
SAVED_BY_EACH = ("delayed", "learned", "history")
"""Kinds of which every rank saves something of its own."""
OFTEN = [(3, "slice"), (3, "delayed"), (3, "shared-batches"), (3, "parts-of-owners"), (3, "learned"), (2, "halo")]
"""Hosts and kinds that between them send all that any kind does."""
SIZES = OFTEN + [(3, kind) for kind in KINDS if (3, kind) not in OFTEN] + [(2, "batches")]
TIMEOUT_S = 8


@dataclass
class Ran:
    """What ranks on hosts have left: by case their exit codes and errors."""

    folder: Path
    sizes: list[tuple[int, str]]
    """Hosts and kinds that trained: those that a test compares."""

    def code(self, name: str, rank: int) -> int:
        return int((self.folder / f"{name}-{rank}.code").read_text())

    def err(self, name: str, rank: int) -> str:
        """What the rank said, without torch's warnings of addresses that have no name."""
        lines = (self.folder / f"{name}-{rank}.err").read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("[W"))


def train(out: Path, *words: object, epochs: int = 4) -> list[str]:
    return [
        str(word) for word in ("train", out.parents[1] / "STORE-R", *SETTINGS, "--epochs", epochs, *words, "--out", out)
    ]


def all_cases(root: Path, sizes: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """What the ranks do, one after the other; on hosts other than a, runs-of-a cannot be written and hidden is empty."""
    cases: list[dict[str, Any]] = [{"name": "listen", "size": 3, "words": ["listen"]}]
    for size, kind in sizes:
        name = f"{kind}-{size}"
        runs = root / ("runs" if kind in SAVED_BY_EACH else "runs-of-a")
        cases.append({"name": name, "size": size, "words": train(runs / name, *KINDS[kind])})
    quick = ["--set", f"run.timeout_s={TIMEOUT_S}"]
    delayed = train(root / "runs-of-a" / "refused", *KINDS["delayed"])
    other = [word.replace("STORE-R", "other-STORE-R") for word in train(root / "runs" / "other")]
    missing = [word.replace("STORE-R", "missing-STORE-R") for word in train(root / "runs" / "missing")]
    cases += [
        {"name": "may-not-write", "size": 2, "words": delayed},
        {"name": "other-store", "size": 2, "words": other},
        {"name": "no-store", "size": 2, "words": missing},
        {"name": "hidden-folder", "size": 2, "words": train(root / "hidden" / "run", *quick)},
        {"name": "no-run", "size": 2, "words": ["train", "--resume", str(root / "hidden" / "begun")]},
        {"name": "cut", "size": 3, "words": train(root / "runs" / "cut", *quick, epochs=10**8)},
    ]
    return [case | {"port": 29600 + place} for place, case in enumerate(cases)]


def furnish(root: Path, hosts: Hosts) -> None:
    """Give each host a slow cable and a store that others do not see, and host a folders that only it may write, or see."""
    store = root / "store-0"
    make = ["--vertices", 300, "--edges", 1500]
    assert run_main("generate", "community", store, *make, "--seed", 71) == 0
    assert run_main("generate", "community", root / "other-store-1", *make, "--seed", 72) == 0
    shutil.copytree(store, root / "other-store-0")
    shutil.copytree(store, root / "missing-store-0")
    for name in ("runs", "runs-of-a", "hidden", "empty"):
        (root / name).mkdir()
    begun = root / "hidden" / "begun"
    assert run_main("train", store, *SETTINGS, "--epochs", 1, "--ranks", 2, "--out", begun) == 0
    for number, (name, host) in enumerate(hosts.hosts.items()):
        with contextlib.suppress(subprocess.CalledProcessError):  # a kernel or system that shapes no traffic
            host.run("tc", "qdisc", "add", "dev", "eth0", "root", *"tbf rate 20mbit burst 32kb latency 400ms".split())
        if name == "a":
            continue
        shutil.copytree(store, root / f"store-{number}")
        host.mount(root / "empty", store)
        host.mount(root / "empty", root / "hidden")
        host.mount(root / "runs-of-a", root / "runs-of-a", readonly=True)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Ran:
    """Run the cases that were collected on three hosts; in the last one the cable of host b is cut."""
    collected = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    params = [item.callspec.params for item in collected if hasattr(item, "callspec")]
    sizes = [(one["size"], one["kind"]) for one in params if "size" in one]
    root = tmp_path_factory.mktemp("hosts")
    with some_hosts(root, 3) as hosts:
        furnish(root, hosts)
        (root / "cases.json").write_text(json.dumps(all_cases(root, sizes)))
        work = [sys.executable, "-m", "tests.hosts.worker", root / "cases.json"]
        ranks = [
            host.start(*work, number, root, out=root / f"worker-{number}")
            for number, host in enumerate(hosts.hosts.values())
        ]
        try:
            cut_when(hosts, root / "runs" / "cut" / "history.jsonl", ranks)
        finally:
            codes = finished(ranks, 60)
        assert codes == [0, 0, 0], [(root / f"worker-{number}.err").read_text() for number in range(3)]
    return Ran(root, sizes)


def cut_when(hosts: Hosts, sign: Path, ranks: list[subprocess.Popen[str]]) -> None:
    """Cut the cable of host b once a file is there."""
    give_up_at = time.monotonic() + 250
    while not sign.exists() and time.monotonic() < give_up_at and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    time.sleep(0.5)
    hosts.cut("b")
    (sign.parents[2] / "cut-at").write_text(str(time.time()))


@pytest.fixture(scope="module")
def here(ran: Ran) -> Path:
    """The same runs with all ranks as threads on one machine."""
    folder = ran.folder / "here"
    folder.mkdir()
    for size, kind in ran.sizes:
        words = [*SETTINGS, *KINDS[kind], "--epochs", 4, "--ranks", size, "--transport", "threads"]
        assert run_main("train", ran.folder / "store-0", *words, "--out", folder / f"{kind}-{size}") == 0
    return folder


@pytest.mark.parametrize(
    ("size", "kind"),
    [pytest.param(*one, marks=[] if one in OFTEN else pytest.mark.slow) for one in SIZES],
    ids=lambda value: str(value),
)
def test_hosts_give_the_losses_of_one(ran: Ran, here: Path, size: int, kind: str) -> None:
    """Fails if ranks on several machines compute something else than ranks on one, or one needs another's store."""
    name = f"{kind}-{size}"
    for rank in range(size):
        assert ran.code(name, rank) == 0, ran.err(name, rank)
        assert ran.err(name, rank) == ""
    run = ran.folder / ("runs" if kind in SAVED_BY_EACH else "runs-of-a") / name
    np.testing.assert_allclose(losses(run), losses(here / name), rtol=2e-5)
    assert [row["test"] for row in history(run)] == pytest.approx(
        [row["test"] for row in history(here / name)], abs=0.02
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other-store", r"rank 1 on b has another graph in .*other-store-1 than rank 0 on a has in .*other-store-0 \("),
        ("no-store", r"rank 1 on b cannot open its store: there is no .*missing-store-1;"),
        ("hidden-folder", r"rank 1 on b does not see the run folder .*hidden/run; put it on a file system that all"),
        (
            "may-not-write",
            r"rank 1 on b may not write to the run folder .*/refused, where each rank saves the messages",
        ),
    ],
)
def test_what_one_host_lacks_is_refused_on_all(ran: Ran, name: str, words: str) -> None:
    """Fails if a run begins with another graph on one machine, or whose folder it cannot use, or leaves a folder."""
    for rank in range(2):
        assert ran.code(name, rank) == 2
        (line,) = ran.err(name, rank).splitlines()
        assert re.search(rf"^mggcn: rank {rank}: {words}", line), line
    left = {"other-store": "runs/other", "no-store": "runs/missing", "hidden-folder": "hidden/run"}
    assert not (ran.folder / left.get(name, "runs-of-a/refused")).exists()


def test_a_host_that_cannot_begin_tells_the_others(ran: Ran) -> None:
    """Fails if a rank waits its time limit for one on a machine where the run folder is not to be seen."""
    assert [ran.code("no-run", rank) for rank in range(2)] == [1, 2]
    said = f"there is no run folder {ran.folder / 'hidden' / 'begun'};"
    assert ran.err("no-run", 0).startswith(f"mggcn: rank 0: rank 1 on b cannot begin: {said}"), ran.err("no-run", 0)
    assert ran.err("no-run", 1).startswith(f"mggcn: {said}")
    assert [ran.err("no-run", rank).count("\n") for rank in range(2)] == [1, 1]


def test_gloo_listens_on_the_network_of_the_run_alone(ran: Ran) -> None:
    """Fails if a port is open on other addresses, but that of torch's store, whose address nobody can choose."""
    for number in range(3):
        found = json.loads((ran.folder / f"listen-{number}.json").read_text())
        assert found["interface"] == "eth0"
        gloo = [where for where in found["listeners"] if where.startswith(f"10.77.0.{number + 1}:")]
        rest = [where for where in found["listeners"] if where not in gloo]
        assert len(gloo) == 1
        assert rest == (["*:29600"] if number == 0 else [])


def test_a_cut_cable_ends_every_rank_in_time(ran: Ran) -> None:
    """Fails if a rank waits for ever for one that it no longer hears, or does not say which machine that is."""
    cut = float((ran.folder / "cut-at").read_text())
    said = {0: "for rank 1 on b", 1: "lost the host of the store, a: it has not answered", 2: "for rank 1 on b"}
    for rank, words in said.items():
        assert ran.code("cut", rank) == 1
        (line,) = ran.err("cut", rank).splitlines()
        assert words in line, line
        ended = (ran.folder / f"cut-{rank}.code").stat().st_mtime
        assert ended - cut < TIMEOUT_S + 6
