"""Machines' files: what they say is read, what they must not say is refused, and what is shipped is complete."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mggcn.cost.machine import (
    ASSUMED_DISK,
    MACHINES,
    RateTable,
    default_machine,
    find_machine,
    read_machine,
    shipped_machines,
    tuned_path,
)
from mggcn.errors import ConfigError
from mggcn.memory.pages import DiskRates

GOOD = """
name = "desk"
title = "a desk"
origin = "measured"
[device]
kind = "cpu"
count = 1
shared = true
cores = 8
memory_bytes = 1000
copy = [[1e6, 4e10], [1e8, 1e10]]
gather = [[1e6, 8e10], [1e8, 8e9]]
row_s = 0.0
call_s = 1e-5
gemm = { fp32 = 1e11 }
[[link]]
transport = "gloo"
ranks = 2
rates = { broadcast = 1e9, all_to_all = 2e9, all_reduce = 3e9 }
latency_s = { broadcast = 1e-4, all_to_all = 2e-4, all_reduce = 3e-4 }
pooled = true
busy = 0.5
[[link]]
transport = "threads"
ranks = 4
rates = { broadcast = 4e9, all_to_all = 5e9, all_reduce = 6e9 }
latency_s = { broadcast = 1e-5, all_to_all = 1e-5, all_reduce = 1e-5 }
pooled = true
busy = 1
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "desk.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_as_written(tmp_path: Path) -> None:
    """Fails if a figure of a file lands elsewhere or is changed."""
    machine = read_machine(written(tmp_path, "\ufeff" + GOOD))
    assert (machine.name, machine.title, machine.origin, machine.caveat) == ("desk", "a desk", "measured", "")
    device = machine.device
    assert (device.kind, device.count, device.shared, device.cores, device.memory_bytes) == ("cpu", 1, True, 8, 1000)
    assert device.copy.points == ((1e6, 4e10), (1e8, 1e10))
    assert device.gather.points == ((1e6, 8e10), (1e8, 8e9))
    assert (device.row_s, device.call_s, dict(device.gemm)) == (0.0, 1e-5, {"fp32": 1e11})
    gloo, threads = machine.links
    assert (gloo.transport, gloo.ranks, gloo.pooled, gloo.busy) == ("gloo", 2, True, 0.5)
    assert gloo.rates == {"broadcast": 1e9, "all_to_all": 2e9, "all_reduce": 3e9}
    assert gloo.latency_s == {"broadcast": 1e-4, "all_to_all": 2e-4, "all_reduce": 3e-4}
    assert threads.busy == 1.0
    assert machine.topology is None
    assert (machine.disk, machine.disk_rates) == (None, ASSUMED_DISK)


def test_a_disk_is_read_and_belongs_to_the_machine(tmp_path: Path) -> None:
    """Fails if a disk that was measured is not the plans', or its rates change places."""
    path = written(tmp_path, GOOD.replace("[[link]]", "[disk]\nread = 3e9\nwrite = 2e9\nboth = 2.5e9\n[[link]]", 1))
    disk = DiskRates(read=3e9, write=2e9, both=2.5e9)
    assert read_machine(path).disk == read_machine(path).disk_rates == disk
    assert default_machine("cuda", path).disk == disk


def test_dense_rates_may_be_known_by_width(tmp_path: Path) -> None:
    """Fails if a table is read as the other shape's, or a file without tables is refused."""
    tables = (
        "gemm = { fp32 = 1e11 }\ngemm_rows = { fp32 = [[16, 1e10], [64, 9e10]] }\ngemm_sums = { bf16 = [[16, 2e10]] }"
    )
    device = read_machine(written(tmp_path, GOOD.replace("gemm = { fp32 = 1e11 }", tables))).device
    assert {name: table.points for name, table in device.gemm_rows.items()} == {"fp32": ((16, 1e10), (64, 9e10))}
    assert {name: table.points for name, table in device.gemm_sums.items()} == {"bf16": ((16, 2e10),)}
    plain = read_machine(written(tmp_path, GOOD)).device
    assert not plain.gemm_rows
    assert not plain.gemm_sums


def test_arithmetic_along_edges_may_be_known(tmp_path: Path) -> None:
    """Fails if a kernel's three figures change places, or a file without them is refused."""
    figures = "call_s = 1e-5\nedge_s = { gat = [1e-9, 2e-9, 3e-11], maximum_grad = [1e-9, 0, 2e-11] }"
    device = read_machine(written(tmp_path, GOOD.replace("call_s = 1e-5", figures))).device
    assert device.edge_s == {"gat": (1e-9, 2e-9, 3e-11), "maximum_grad": (1e-9, 0.0, 2e-11)}
    assert not read_machine(written(tmp_path, GOOD)).device.edge_s


def test_passes_in_place_may_be_known(tmp_path: Path) -> None:
    """Fails if the table is not read, or a file without one is refused."""
    table = "call_s = 1e-5\nin_place = [[1e6, 8e10], [1e8, 2e10]]"
    found = read_machine(written(tmp_path, GOOD.replace("call_s = 1e-5", table))).device.in_place
    assert found is not None
    assert found.points == ((1e6, 8e10), (1e8, 2e10))
    assert read_machine(written(tmp_path, GOOD)).device.in_place is None


def test_what_epochs_take_beside_kernels_may_be_known(tmp_path: Path) -> None:
    """Fails if the three figures change places, or a file without them is refused."""
    figures = "call_s = 1e-5\nop_s = 2e-5\nmatrix_s = 3e-5\npace = 1.25"
    device = read_machine(written(tmp_path, GOOD.replace("call_s = 1e-5", figures))).device
    assert (device.call_s, device.op_s, device.matrix_s, device.pace) == (1e-5, 2e-5, 3e-5, 1.25)
    plain = read_machine(written(tmp_path, GOOD)).device
    assert (plain.op_s, plain.matrix_s, plain.pace) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "desk"', "", "name is missing; expected text"),
        ('name = "desk"', "name = 3", "name expects text, got 3"),
        (
            'origin = "measured"',
            'origin = "guessed"',
            "origin expects one of measured, partly, described, assumed, got 'guessed'",
        ),
        ("cores = 8", "cores = 8\nspeed = 3", r"\[device\]: unknown key 'speed'; known are kind, count"),
        ("count = 1", "count = 0", "count expects a whole number from 1 on, got 0"),
        ("count = 1", "count = true", "count expects a whole number from 1 on, got True"),
        ("shared = true", "shared = 1", "shared expects true or false, got 1"),
        ("copy = [[1e6, 4e10], [1e8, 1e10]]", "copy = []", "copy expects pairs of numbers above 0"),
        ("copy = [[1e6, 4e10], [1e8, 1e10]]", "copy = [[1e6]]", "copy expects pairs of numbers above 0"),
        ("copy = [[1e6, 4e10], [1e8, 1e10]]", "copy = [[1e8, 4e10], [1e6, 1e10]]", "copy needs rising footprints"),
        ("gather = [[1e6, 8e10], [1e8, 8e9]]", "gather = [[1e6, -1]]", "gather expects pairs of numbers above 0"),
        ("call_s = 1e-5", "call_s = -1e-5", "call_s expects a number from 0 on, got -1e-05"),
        ("call_s = 1e-5", "call_s = 1e-5\nop_s = -1", "op_s expects a number from 0 on, got -1"),
        ("call_s = 1e-5", "call_s = 1e-5\npace = 0", "pace expects a number above 0, got 0"),
        ("call_s = 1e-5", "call_s = nan", "call_s expects a number from 0 on, got nan"),
        ("gemm = { fp32 = 1e11 }", "gemm = { }", "gemm expects numbers for some of fp32, tf32, bf16, fp64"),
        ("gemm = { fp32 = 1e11 }", "gemm = { fp8 = 1 }", r"\[gemm\]: unknown key 'fp8'"),
        (
            "gemm = { fp32 = 1e11 }",
            "gemm = { fp32 = 1e11 }\nfused = { fp32 = 1e11 }",
            r"\[device\]: fused and fused_grad need the same precisions",
        ),
        (
            "gemm = { fp32 = 1e11 }",
            "gemm = { fp32 = 1e11 }\ngemm_rows = { fp32 = [[64, 1e10], [16, 2e10]] }",
            r"gemm_rows.fp32 needs rising widths, got \[64.0, 16.0\]",
        ),
        (
            "gemm = { fp32 = 1e11 }",
            "gemm = { fp32 = 1e11 }\ngemm_sums = { }",
            "gemm_sums expects lists of pairs for some of fp32, tf32, bf16, fp64",
        ),
        (
            "call_s = 1e-5",
            "call_s = 1e-5\nedge_s = { }",
            "edge_s expects lists of 3 numbers from 0 on for some of gat, ",
        ),
        ("call_s = 1e-5", "call_s = 1e-5\nedge_s = { gat = [1, 2] }", r"gat expects 3 numbers from 0 on, got \[1, 2\]"),
        ("call_s = 1e-5", "call_s = 1e-5\nedge_s = { sums = [1, 2, 3] }", r"\[edge_s\]: unknown key 'sums'"),
        ("gemm = { fp32 = 1e11 }", "gemm = 1e11", r"gemm expects a table \[gemm\], got"),
        ("busy = 0.5", "busy = 1.5", "number 1: busy expects a number from 0 to 1, got 1.5"),
        ("broadcast = 4e9", "broadcast = 0", r"number 2: \[rates\]: broadcast expects a number above 0, got 0"),
        ("broadcast = 1e-5, ", "", r"number 2: \[latency_s\]: broadcast is missing"),
        ("busy = 1\n", "busy = 1\n[topology]\nbroadcast = 6\n", r"\[topology\]: replication is missing"),
        ("busy = 1\n", "busy = 1\n[notes]\n", "unknown key 'notes'"),
        ("busy = 1\n", "busy = 1\n[disk]\nread = 1e9\n", r"\[disk\]: write is missing; expected a number above 0"),
        ("busy = 1\n", "busy = 1\n[disk]\nread = 0\n", r"\[disk\]: read expects a number above 0, got 0"),
        ("[device]", "[device", "is not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Fails if a wrong key, type or value is accepted, or the error does not name the file, the key and what came."""
    assert old in GOOD
    path = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as refusal:
        read_machine(path)
    assert str(path) in str(refusal.value)


def test_links_are_needed_and_missing_files_named(tmp_path: Path) -> None:
    """Fails if a machine without links is read, or a missing file is not named."""
    without = GOOD[: GOOD.index("[[link]]")]
    with pytest.raises(ConfigError, match="link is missing"):
        read_machine(written(tmp_path, without))
    with pytest.raises(ConfigError, match=r"cannot read .*absent.toml: No such file"):
        read_machine(tmp_path / "absent.toml")


def test_rates_between_points() -> None:
    """Fails if a rate is not linear in the logarithm of the footprint, or runs away beyond the last points."""
    table = RateTable(((2.0**20, 80.0), (2.0**24, 40.0), (2.0**26, 10.0)))
    assert [table.at(size) for size in (0, 1, 2**20)] == [80.0, 80.0, 80.0]
    assert table.at(2**22) == pytest.approx(60.0)
    assert table.at(2**24) == pytest.approx(40.0)
    assert table.at(2**25) == pytest.approx(25.0)
    assert [table.at(size) for size in (2**26, 2**40)] == [10.0, 10.0]
    assert RateTable(((1e6, 7.0),)).at(3) == 7.0


def test_a_link_is_found_by_transport_then_ranks(tmp_path: Path) -> None:
    """Fails if another transport's rates serve where the right ones are known, or far ranks where near ones are."""
    text = GOOD + GOOD[GOOD.index("[[link]]") : GOOD.rindex("[[link]]")].replace("ranks = 2", "ranks = 8")
    machine = read_machine(written(tmp_path, text))
    found = {(ranks, kind): machine.link(ranks, kind) for ranks in (1, 2, 3, 7, 64) for kind in ("gloo", "threads")}
    assert all(link.transport == kind for (_, kind), link in found.items())
    assert [found[ranks, "gloo"].ranks for ranks in (1, 2, 3, 7, 64)] == [2, 2, 2, 8, 8]
    assert machine.link(4, "nccl").ranks == 4


def test_pooled_links_count_all_bytes_and_others_the_busiest_rank(tmp_path: Path) -> None:
    """Fails if a message's bytes are not divided by the rate of its kind, by the link's own count."""
    pooled = read_machine(written(tmp_path, GOOD)).links[0]
    assert pooled.transfer_s("broadcast", [3000, 0, 0, 0], [0, 1000, 1000, 1000]) == pytest.approx(3000 / 1e9)
    assert pooled.transfer_s("all_to_all", [10, 20], [20, 10]) == pytest.approx(30 / 2e9)
    own = find_machine("dgx-1").links[0]
    assert own.transfer_s("broadcast", [3000, 0, 0, 0], [0, 1000, 1000, 1000]) == pytest.approx(1000 / 127e9)
    assert own.transfer_s("all_to_all", [10, 50], [20, 10]) == pytest.approx(50 / 75e9)


def test_more_ranks_than_devices(tmp_path: Path) -> None:
    """Fails if a machine hands out devices that it has not, or forgets that ranks of a host share it."""
    host = read_machine(written(tmp_path, GOOD))
    assert [host.sharing(ranks) for ranks in (1, 2, 5)] == [1, 2, 5]
    assert host.memory_per_rank(4) == 250
    node = find_machine("dgx-a100")
    assert [node.sharing(ranks) for ranks in (1, 8)] == [1, 1]
    with pytest.raises(ConfigError, match="dgx-a100 has 8 devices, one for each rank, got 9 ranks"):
        node.sharing(9)


@pytest.mark.parametrize("name", shipped_machines())
def test_shipped_machines(name: str) -> None:
    """Fails if a shipped file cannot be read, claims to be measured, or has a rate without a source."""
    machine = find_machine(name)
    assert machine.name == name
    measured = machine.origin == "partly"
    assert measured or machine.origin in ("described", "assumed")
    assert ("except for its messages" if measured else "not measured") in machine.caveat
    for table in (machine.device.copy, machine.device.gather):
        rates = [rate for _, rate in table.points]
        assert rates == sorted(rates, reverse=True), "caches make small operands fast"
    if not measured:  # reading alone may be faster than reading and writing
        assert machine.device.gather.points[-1][1] <= machine.device.copy.points[-1][1]
    text = (MACHINES / f"{name}.toml").read_text()
    if machine.origin in ("described", "partly"):
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if re.match(r"(count|memory_bytes|copy|gather|row_s|call_s|least_s|gemm|rates|latency_s|busy)\b", line):
                above = " ".join(lines[max(0, number - 3) : number + 1])
                assert re.search(r"\[[PDENM]\]", above), f"{name}: {line} has no source"


def test_the_machines_of_the_papers_are_shipped() -> None:
    """Fails if a machine that a plan may be made for is missing."""
    assert {"dgx-1", "dgx-a100", "dgx-h100", "xeon-cluster", "m5.24xlarge"} <= set(shipped_machines())
    assert [find_machine(f"dgx-{kind}").device.count for kind in ("1", "a100", "h100")] == [8, 8, 8]
    assert [find_machine(name).device.count for name in ("xeon-cluster", "m5.24xlarge")] == [128, 16]
    assert find_machine("m5.24xlarge").memory_per_rank(16) == 384 * 2**30
    with pytest.raises(ConfigError, match=r"a file or one of assumed-cpu, .*dgx-1, .*got 'dgx-2'; mggcn tune"):
        find_machine("dgx-2")


def test_a_tuned_file_is_the_default_for_its_kind_of_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a plan ignores the tuned file, takes a CPU's for GPUs, or hides that nothing was measured."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tuned_path()
    assert path == tmp_path / "mggcn" / "machine.toml"
    assert default_machine("cpu", path).name == "assumed-cpu"
    path.parent.mkdir()
    path.write_text(GOOD)
    assert default_machine("cpu", path).name == "desk"
    assert default_machine("cuda", path).name == "assumed-cuda"
    assert "run mggcn tune" in default_machine("cuda", path).caveat


def test_a_gpu_that_is_here_is_planned_with_figures_of_its_kind(tmp_path: Path) -> None:
    """Fails if a plan on an H100 reckons with an unknown card's cache, or has no GPU for a rank of a second node."""
    none = tmp_path / "machine.toml"
    for gpu, name in (("NVIDIA H100 80GB HBM3", "dgx-h100"), ("Tesla V100-SXM2-32GB", "dgx-1")):
        machine = default_machine("cuda", none, gpu)
        assert (machine.name, machine.device.gather) == (name, find_machine(name).device.gather)
        assert machine.title.startswith(gpu)
        assert "not measured" in machine.caveat
        assert machine.sharing(16) == 1
    assert "except for its messages" in default_machine("cuda", none, "NVIDIA H200").caveat
    assert default_machine("cuda", none, "Quadro T1000").name == "assumed-cuda"


def test_the_files_travel_with_the_package_and_need_no_torch(tmp_path: Path) -> None:
    """Fails if a machine's file would not be installed, or reading one loads torch."""
    pyproject = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    assert pyproject["tool"]["scikit-build"]["wheel"]["packages"] == ["mggcn"]
    assert not any("machines" in pattern for pattern in pyproject["tool"]["scikit-build"]["sdist"]["exclude"])
    script = (
        "import sys; from mggcn.cost.machine import find_machine; from mggcn.cost.epoch import predict\n"
        "find_machine('dgx-1'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
