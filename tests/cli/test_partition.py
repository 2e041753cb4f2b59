"""`mggcn partition`: what it prints, where the cut lies, and what it refuses."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.assemble.plan import partition_graph
from mggcn.config import from_tables
from mggcn.errors import PlanError
from mggcn.graph.store import open_store
from mggcn.memory import units
from mggcn.partition.cache import cuts
from mggcn.partition.cache.cuts import EDGE_CUTS, LOCALITY_ORDERS, STREAM_CUTS, VERTEX_CUTS
from mggcn.partition.cut.libra import LibraSettings
from mggcn.partition.locality.order import LocalitySettings
from mggcn.partition.metis import run as metis
from mggcn.partition.metis.run import MetisSettings
from mggcn.partition.ranges import RELABELLED
from mggcn.partition.rows.partition import row_owners
from mggcn.partition.stream import StreamSettings
from mggcn.runs.train import prepare_run, run_training
from tests.cli.runs import refused, run_main
from tests.partition.metis.test_run import needs_pymetis


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "small"
    assert run_main("generate", "rmat", folder, "--scale", 9, "--edge-factor", 8, "--seed", 11) == 0
    return folder


Shown = Callable[[Any], list[str]]
"""What a command says of a cut."""


def of_libra(s: Any) -> list[str]:
    """Figures of a vertex cut."""
    texts = [f"replication {s.replication:.3f}", f"balance {s.edge_balance:.4f}"]
    return [*texts, f"split vertices {s.split_share:.1%}"]


def of_metis(s: Any) -> list[str]:
    """Figures of an edge cut."""
    halo = f"({min(s.halo_per_part):,} to {max(s.halo_per_part):,} rows that a part receives)"
    return [
        f"edge cut {s.cut_share:.1%} ({s.num_cut:,} of 4,096 edges)",
        f"nonzero balance {s.nonzero_balance:.4f}",
        f"row balance {s.row_balance:.4f}",
        f"halo rows {s.halo_share:.1%} of the vertices {halo}",
    ]


def of_locality(s: Any) -> list[str]:
    """Figures of an order."""
    return [
        f"edges inside clusters {s.inside_share:.1%} ({s.num_clusters:,} clusters",
        f"average gap {s.gap:,.0f} places between the ends of an edge ({s.gap_before:,.0f} before)",
        f"take {s.critical_path:.3f} times an even share",
        f"nonzero balance {s.nonzero_balance:.4f}",
        f"row balance {s.row_balance:.4f}",
    ]


def streamed(parts: int, seed: int) -> StreamSettings:
    return StreamSettings(parts=parts)


KINDS = [
    pytest.param("libra", "libra-{}-77-shuffled", VERTEX_CUTS.find_or_make, LibraSettings, of_libra, id="libra"),
    pytest.param(
        "metis", "metis-{}-77", EDGE_CUTS.find_or_make, MetisSettings, of_metis, id="metis", marks=needs_pymetis
    ),
    pytest.param(
        "metis-balanced",
        "metis-balanced-{}-77",
        EDGE_CUTS.find_or_make,
        functools.partial(MetisSettings, kind="metis-balanced"),
        of_metis,
        id="metis-balanced",
        marks=needs_pymetis,
    ),
    pytest.param("stream", "stream-{}", STREAM_CUTS.find_or_make, streamed, of_metis, id="stream"),
    pytest.param(
        "locality", "locality-{}-77", LOCALITY_ORDERS.find_or_make, LocalitySettings, of_locality, id="locality"
    ),
]


@pytest.mark.parametrize(("kind", "name", "find", "settings", "shown"), KINDS)
@pytest.mark.parametrize("parts", [1, 4])
def test_a_cut_is_made_and_found_again(
    parts: int,
    kind: str,
    name: str,
    find: Any,
    settings: Any,
    shown: Shown,
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails if the figures are not those of the cut that lies where the command says, or it is made twice."""
    capsys.readouterr()
    seed = [] if kind == "stream" else ["--seed", 77]
    command = ("partition", store, "--kind", kind, "--parts", parts, *seed, "--out", tmp_path)
    assert run_main(*command) == 0
    said = capsys.readouterr().out
    assert f"saved in {tmp_path / name.format(parts)}" in said
    found = find(open_store(store), settings(parts=parts, seed=77), tmp_path)
    assert found.seconds is None
    assert found.cut.statistics.num_edges == 4096
    texts = shown(found.cut.statistics)
    assert [text for text in texts if text not in said] == []
    assert said.index("planned memory: ") < said.index(texts[0])
    assert "made in" in said
    assert "backward" not in said
    assert run_main("partition", store.name, "--root", store.parent, *command[2:]) == 0
    again = capsys.readouterr().out
    assert "made earlier" in again
    assert texts[0] in again
    assert "planned memory: " not in again
    assert run_main(*command, "--force") == 0
    assert "made in" in capsys.readouterr().out


@needs_pymetis
def test_splits_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the command does not say what is even, or how the splits came out."""
    sizes = ["--vertices", 900, "--edges", 4000, "--features", 2, "--classes", 3]
    assert run_main("generate", "community", tmp_path / "store", *sizes, "--seed", 11) == 0
    capsys.readouterr()
    assert run_main("partition", tmp_path / "store", "--kind", "metis-balanced", "--parts", 3) == 0
    said = capsys.readouterr().out
    assert "3 parts of even nonzeros, vertices, train, val, test, seed 1" in said
    assert [f"{name} balance 1.0" in said for name in ("training", "validation", "test")] == [True] * 3
    assert run_main("partition", tmp_path / "store", "--list") == 0
    assert "metis-balanced-3-1  metis-balanced" in capsys.readouterr().out


def test_options_decide_the_place(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if seed, order or --out do not reach the cut."""
    assert run_main("partition", store, "--parts", 3, "--edges", "stored", "--out", tmp_path) == 0
    assert run_main("partition", store, "--parts", 70, "--seed", 5, "--out", tmp_path) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["libra-3-1-stored", "libra-70-5-shuffled"]
    assert not (store / "partitions" / "libra-3-1-stored").exists()


def test_what_is_refused(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a wrong setting, a cut of another graph or too little memory gets through, or writes anything."""
    out = ["--out", tmp_path / "cuts"]
    assert "1 to 1024 parts, got 2000" in refused(capsys, "partition", store, "--parts", 2000, *out)
    assert "invalid choice" in refused(capsys, "partition", store, "--parts", 2, "--edges", "sorted", *out)
    assert "invalid choice" in refused(capsys, "partition", store, "--parts", 2, "--kind", "hash", *out)
    assert "needs --parts P" in refused(capsys, "partition", store, *out)
    by_stream = ("partition", store, "--kind", "stream", *out)
    assert "--seed 5 would change nothing" in refused(capsys, *by_stream, "--parts", 2, "--seed", 5)
    assert "Libra only, and a stream" in refused(capsys, *by_stream, "--parts", 2, "--edges", "stored")
    assert "1 to 1024 parts, got 2000" in refused(capsys, *by_stream, "--parts", 2000)
    by_metis = ("partition", store, "--kind", "metis", *out)
    assert "applies to Libra only, and METIS" in refused(capsys, *by_metis, "--parts", 2, "--edges", "stored")
    by_locality = ("partition", store, "--kind", "locality", *out)
    assert "Libra only, and an order by locality" in refused(capsys, *by_locality, "--parts", 2, "--edges", "stored")
    with monkeypatch.context() as patch:
        patch.setattr(units, "free_bytes", lambda: 1000)
        assert "1000 B are free" in refused(capsys, "partition", store, "--parts", 2, *out)
        assert "1000 B are free" in refused(capsys, *by_locality, "--parts", 2)
        assert "1000 B are free" in refused(capsys, *by_stream, "--parts", 2)
        patch.setattr(metis, "require_pymetis", lambda: None)
        assert "1000 B are free" in refused(capsys, *by_metis, "--parts", 2)
    assert not (tmp_path / "cuts").exists()
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(capsys, "partition", store, "--parts", 2, "--out", tmp_path / "file")
    assert run_main("partition", store, "--parts", 2, *out) == 0
    other = tmp_path / "other"
    assert run_main("generate", "rmat", other, "--scale", 9, "--edge-factor", 8, "--seed", 12) == 0
    assert "built from a different version of graph" in refused(capsys, "partition", other, "--parts", 2, *out)


@pytest.mark.covering(1)
@pytest.mark.parametrize("what", [["--parts", "2"], ["--list"]], ids=" ".join)
def test_no_torch_is_loaded(store: Path, tmp_path: Path, what: list[str]) -> None:
    """Fails if a cut waits for torch, or pays its memory."""
    code = "import sys; from mggcn.cli.entry import main; assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "partition", str(store), *what, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


RELABELS = [
    pytest.param(["--kind", "stream"], id="stream"),
    pytest.param(["--kind", "locality"], id="locality"),
    pytest.param([], id="metis", marks=needs_pymetis),
    pytest.param(["--leaves", 8], id="leaves", marks=needs_pymetis),
]


@pytest.mark.parametrize("how", RELABELS)
def test_a_relabelled_store_is_the_same_graph(how: list[Any], tmp_path: Path) -> None:
    """Fails if a loss depends on the numbers of vertices, a part is not a range, or a name is another vertex's."""
    given, out = tmp_path / "given", tmp_path / "out"
    sizes = ["--vertices", 300, "--edges", 1800, "--features", 5, "--classes", 3]
    assert run_main("generate", "community", given, *sizes, "--seed", 11) == 0
    assert run_main("partition", given, *how, "--parts", 3, "--relabel", out) == 0
    old, new = open_store(given), open_store(out, verify=True)
    assert new.ids is not None
    order = new.ids.array()
    assert np.array_equal(np.sort(order), np.arange(300))
    assert old.labels is not None
    assert new.labels is not None
    assert np.array_equal(new.labels.array(), old.labels.array()[order])
    bounds = new.meta[RELABELLED]["bounds"]
    config = from_tables({"run": {"ranks": 3, "order": "ranges"}})
    assert row_owners(partition_graph(config, new)).counts == tuple(np.diff(bounds))
    run = {"ranks": 3, "transport": "threads", "precision": "fp64", "strategy": "halo"}
    common = {"train": {"epochs": 4, "seed": 3}, "model": {"hidden": [6], "dropout": 0.0}}
    losses = []
    for name, order_of_rows in (("given", "random"), ("out", "ranges")):
        graph, config = open_store(tmp_path / name), from_tables(common | {"run": run | {"order": order_of_rows}})
        job = prepare_run(config, graph, None, tmp_path / f"run-{name}")
        run_training(job, graph, quiet=True)
        rows = (tmp_path / f"run-{name}" / "history.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
        plan = json.loads((tmp_path / f"run-{name}" / "plan.json").read_text())
        holds = [rank["regions"]["who holds which rows"] for rank in plan["per_rank"]]
        assert holds == [0 if name == "out" else 6 * 300] * 3
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-10)


def test_what_cannot_be_relabelled(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if --relabel with a wrong setting gets through, cuts before it looks, or a store in its way is replaced."""
    out, cut = tmp_path / "out", ["--out", tmp_path / "cuts"]
    command = ("partition", store, "--parts", 2, "--relabel", out, *cut)
    assert "Libra assigns edges" in refused(capsys, *command, "--kind", "libra")
    assert "--leaves are METIS's" in refused(capsys, *command, "--kind", "stream", "--leaves", 8)
    assert "between the number of parts and 1,048,576, got 1" in refused(capsys, *command, "--leaves", 1)
    assert "add --relabel OUT" in refused(capsys, "partition", store, "--parts", 2, "--leaves", 8)
    assert "remove one of them" in refused(capsys, *command, "--list")
    with monkeypatch.context() as patch:
        patch.setattr(units, "free_bytes", lambda: 1000)
        patch.setattr(cuts, "stream", lambda *_: 1 // 0)
        patch.setattr(metis, "halved", lambda *_: 1 // 0)
        for how in (["--kind", "stream"], ["--leaves", 8]):
            assert "relabelling needs" in refused(capsys, *command, *how)
    out.mkdir()
    assert "exists already" in refused(capsys, *command, "--kind", "stream")
    assert not (tmp_path / "cuts").exists()
    assert run_main(*command, "--kind", "stream", "--force") == 0
    assert open_store(out).num_vertices == open_store(store).num_vertices


@pytest.mark.parametrize("name", ["given", "away/../given", "link"])
@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_a_store_is_not_relabelled_over_itself(
    name: str, force: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the store that is read, or its cuts, are lost, or a cut is made before the refusal."""
    given = tmp_path / "given"
    assert run_main("generate", "rmat", given, "--scale", 6, "--seed", 12) == 0
    assert run_main("partition", given, "--kind", "stream", "--parts", 3) == 0
    (tmp_path / "away").mkdir()
    (tmp_path / "link").symlink_to("given")
    before = {path: path.read_bytes() for path in given.rglob("*") if path.is_file()}
    out = f"{tmp_path}/{name}"
    for source in (given, tmp_path / "link"):
        command = ["partition", source, "--kind", "stream", "--parts", 2, "--relabel", out, *force]
        why = f"{out} is the store {source} itself, which would be lost; choose another name"
        assert why in refused(capsys, *command)
        command[command.index(out)] = f"{out}/inner"
        assert f"{out}/inner lies in the store {source}" in refused(capsys, *command)
    assert {path: path.read_bytes() for path in given.rglob("*") if path.is_file()} == before


@needs_pymetis
def test_both_directions_of_a_directed_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the rows that the backward pass receives are not said where they are others."""
    folder = tmp_path / "directed"
    np.savetxt(tmp_path / "edges.txt", [(u, (u * u + 1) % 97) for u in range(97)], fmt="%d")
    assert run_main("prepare", tmp_path / "edges.txt", folder) == 0
    capsys.readouterr()
    assert run_main("partition", folder, "--kind", "metis", "--parts", 3) == 0
    graph = open_store(folder)
    assert not graph.symmetric
    back = EDGE_CUTS.find_or_make(graph, MetisSettings(parts=3), folder / "partitions").cut.statistics.halo_t_per_part
    assert f"halo rows of the backward pass {min(back):,} to {max(back):,}" in capsys.readouterr().out


def test_memory_that_may_be_enough(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a graph is refused that METIS may well coarsen fast enough, or the doubt is not said."""

    def reached(*_: object) -> None:
        raise PlanError("reached")

    graph = open_store(store)
    memory = metis.metis_memory(graph.num_vertices, graph.num_edges, graph.symmetric)
    monkeypatch.setattr(metis, "require_pymetis", lambda: None)
    monkeypatch.setattr(cuts, "metis", reached)
    for free, doubtful in ((memory.least, True), (memory.most, False)):
        monkeypatch.setattr(units, "free_bytes", lambda free=free: free)
        capsys.readouterr()
        assert run_main("partition", store, "--kind", "metis", "--parts", 2, "--out", tmp_path) == 2
        said = capsys.readouterr()
        assert "reached" in said.err
        assert ("METIS may run out of memory" in said.out) == doubtful


def test_without_pymetis(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a missing package is not answered with the line that installs it, or keeps Libra from working."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    command = ("partition", store, "--parts", 2, "--out", tmp_path)
    assert 'pip install "mggcn[metis]"' in refused(capsys, *command, "--kind", "metis", code=1)
    assert run_main(*command) == 0


OTHERS = ["locality-4-77", "metis-3-9", "odd"]
METIS_META = {
    "format_version": 1,
    "settings": {"kind": "metis", "parts": 3, "seed": 9},
    "graph_sha256": "another",
    "cut_share": 0.125,
    "nonzero_balance": 1.25,
    "row_balance": 1.5,
}


def test_the_list(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a figure of a cut is not in its line, or a folder that is no cut ends in a traceback."""
    capsys.readouterr()
    assert run_main("partition", store, "--list", "--out", tmp_path / "none") == 0
    assert f"no cuts in {tmp_path / 'none'}" in capsys.readouterr().out
    for parts in (16, 2):
        assert run_main("partition", store, "--parts", parts, "--seed", 8, "--out", tmp_path) == 0
    assert run_main("partition", store, "--kind", "locality", "--parts", 4, "--seed", 77, "--out", tmp_path) == 0
    for name, meta in (("metis-3-9", json.dumps(METIS_META)), ("odd", '{"format_version": 1, "settings": [7]}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_text(meta)
    capsys.readouterr()
    assert run_main("partition", store, "--list", "--out", tmp_path) == 0
    title, header, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith(f" in {tmp_path}")
    assert header.split() == ["name", "kind", "parts", "seed", "cost", "balance", "bytes"]
    assert [line.split()[0] for line in lines] == ["libra-2-8-shuffled", "libra-16-8-shuffled", *OTHERS]
    for line, parts in zip(lines[:2], (2, 16), strict=True):
        s = VERTEX_CUTS.find_or_make(open_store(store), LibraSettings(parts=parts, seed=8), tmp_path).cut.statistics
        assert line.split()[1:4] == ["libra", str(parts), "8"]
        assert f"replication {s.replication:.3f}" in line
        assert f"edges {s.edge_balance:.3f}, rows {s.row_balance:.3f}" in line
        assert line.endswith(" KiB")
    order = LOCALITY_ORDERS.find_or_make(open_store(store), LocalitySettings(parts=4, seed=77), tmp_path).cut.statistics
    assert lines[2].split()[1:4] == ["locality", "4", "77"]
    assert f"inside clusters {order.inside_share:.1%}" in lines[2]
    assert f"nonzeros {order.nonzero_balance:.3f}, rows {order.row_balance:.3f}" in lines[2]
    assert lines[3].split()[1:4] == ["metis", "3", "9"]
    assert "edge cut 12.5%" in lines[3]
    assert "nonzeros 1.250, rows 1.500" in lines[3]
    assert lines[3].endswith("of another graph")
    assert lines[4].split()[1:4] == ["?"] * 3
