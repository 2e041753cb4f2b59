"""The workers of the comparisons with other libraries on a toy graph, as far as the libraries are here."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.graph.generate import community
from mggcn.graph.store import open_store, write_store
from tests.bench.conftest import BENCH

import common  # isort: skip
import peers_cases  # isort: skip
import peers_data  # isort: skip
import peers_env  # isort: skip
import peers_spmm  # isort: skip
import worker_mggcn  # isort: skip
import worker_product  # isort: skip
import worker_pyg  # isort: skip

WIDTH = 7


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers") / "graph"
    write_store(community(60, 200, 5, 3, seed=7741, train=0.5), folder)
    return folder


@pytest.fixture(autouse=True)
def modes() -> Iterator[None]:
    """Workers set threads and the mode of gradients for their whole process: put both back."""
    threads = torch.get_num_threads()
    with torch.set_grad_enabled(True):
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "kind", ["mggcn", "mggcn, order by locality", "torch CSR", "torch reduce", "PyG EdgeIndex", "SciPy"]
)
def test_products_agree(kind: str, store: Path) -> None:
    """Fails if a kind multiplies something else than the normalised adjacency, or returns it in another order."""
    contender = worker_product.prepare({"store": str(store), "width": WIDTH, "kind": kind, "threads": 1})
    contender.epoch()
    dense = peers_data.normalised_dense(store) @ peers_data.operand(60, WIDTH).astype(np.float64)
    assert contender.result() == pytest.approx(peers_data.sample_of(dense), abs=1e-5)
    assert contender.facts["repeats"] >= 1


def test_normalised_adjacency(store: Path) -> None:
    """Fails if a self-loop or an edge is lost, or a scale is of another degree."""
    graph = open_store(store)
    dense = np.eye(60)
    dense[np.repeat(np.arange(60), np.diff(graph.adj.indptr.array())), graph.adj.indices.array()] = 1.0
    scale = dense.sum(axis=1) ** -0.5
    np.testing.assert_allclose(peers_data.normalised_dense(store), scale[:, None] * dense * scale, rtol=1e-6)


@pytest.mark.parametrize("precomputed", [False, True])
def test_networks_agree(precomputed: bool, store: Path, tmp_path: Path) -> None:
    """Fails if a way of PyG trains another network than mggcn, also where A X is computed once."""
    job = {"store": str(store), "hidden": [4, 6], "classes": 3, "weights": str(tmp_path / "w.npz"), "threads": 1}
    own = worker_mggcn.prepare(job | {"settings": {"run": {"order": "locality"}}})
    expected = [own.epoch() for _ in range(3)]
    assert own.facts["order"] == "locality"
    assert len(own.facts["work"]["gathers"]) == 4, "two layers, both directions; the first has none"
    for kind in ("fused", "scaled", "csr", "scatter"):
        peer = worker_pyg.prepare(job | {"kind": kind, "precomputed": precomputed})
        assert [peer.epoch() for _ in range(3)] == pytest.approx(expected, rel=1e-5), kind


def test_sparse_features_and_several_splits(tmp_path: Path) -> None:
    """Fails if a triple is read as another matrix, or vertices of another split count as trained ones."""
    dense = np.array([[0, 2, 0], [0, 0, 0], [1, 0, 3]], np.float32)
    triple = {"indptr": [0, 1, 1, 3], "indices": [1, 0, 2], "data": np.array([2, 1, 3], np.float32)}
    for name, array in triple.items():
        np.save(tmp_path / f"features_{name}.npy", np.asarray(array))
    np.testing.assert_array_equal(peers_data.dense_features(tmp_path), dense)
    np.save(tmp_path / "labels.npy", np.array([4, -1, 6]))
    np.save(tmp_path / "train.npy", np.array([[True, False, True], [True, True, True]]))
    ids, labels = peers_data.targets(tmp_path)
    assert (ids.tolist(), labels.tolist()) == ([0, 2], [4, 6])


def test_real_graphs_are_copied_or_given_features(store: Path, tmp_path: Path) -> None:
    """Fails if partitions of the source come along, or a graph without features gets none."""
    (store / "partitions").mkdir(exist_ok=True)
    peers_cases.make({}, str(store), str(tmp_path / "copy"))
    assert not (tmp_path / "copy" / "partitions").exists()
    bare = community(50, 80, 0, 0, seed=3)
    write_store(bare, tmp_path / "bare")
    peers_cases.make({}, str(tmp_path / "bare"), str(tmp_path / "made"))
    made = open_store(tmp_path / "made")
    assert (made.features.shape, made.num_classes) == ((50, 128), 40)  # type: ignore[union-attr]
    np.testing.assert_array_equal(made.adj.indices.array(), bare.adj.indices.array())


def test_environments(tmp_path: Path) -> None:
    """Fails if what setup.sh found is not believed, or a library is compared with that is not there."""
    assert "dgl" not in peers_env.find_peers(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / "peers.json").write_text(json.dumps({"versions": {"dgl": "2.1.0"}, "faults": {"mkl": "absent"}}))
    peers = peers_env.find_peers(tmp_path)
    assert peers.python == str(tmp_path / "bin" / "python")
    kinds, left_out = peers_spmm.chosen_kinds(peers, "")
    assert [kind for kind in kinds if kind.startswith("DGL")] == [
        "DGL copy_u + scaling",
        "DGL copy_u alone",
        "DGL u_mul_e",
    ]
    assert "MKL: absent" in left_out
    assert "SciPy" not in kinds


def test_setup_is_a_proper_script_and_names_no_host() -> None:
    """Fails on a mistake of syntax, or where the script says itself where packages come from."""
    script = BENCH / "peers" / "setup.sh"
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
    assert "://" not in script.read_text()


def test_a_worker_that_died_while_idle_is_a_worker_s_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if its broken pipe ends a benchmark, which leaves out what raises RuntimeError."""
    (tmp_path / "worker.py").write_text("input(); print('{}', flush=True); input()")
    monkeypatch.setattr(common, "HERE", tmp_path)
    worker = common.Worker("worker.py", "tuned", 1, {})
    worker.process.kill()
    worker.process.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^died: signal 9$"):
            worker.ask("epoch")
    worker.kill()


def test_a_contender_that_dies_loses_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a signal in one contender's process takes the epochs of the others, or hides what happened."""
    (tmp_path / "worker.py").write_text(
        f"import os, sys; sys.path.insert(0, {str(BENCH)!r}); import common\n"
        "def prepare(job):\n"
        "    left = iter(range(job['epochs']))\n"
        "    return common.Contender(lambda: float(next(left, -1) + 1 or os.kill(os.getpid(), 11) or 0), {})\n"
        "common.serve(prepare)\n"
    )
    monkeypatch.setattr(common, "HERE", tmp_path)
    workers = {name: common.Worker("worker.py", "tuned", 1, {"epochs": n}) for name, n in (("a", 9), ("b", 1))}
    lost: dict[str, str] = {}
    epochs = common.alternate(workers, 1, 3, lost)
    for worker in workers.values():
        worker.kill()
    assert lost == {"b": "died: signal 11"}
    assert list(workers) == ["a"]
    assert [run["loss"] for run in epochs["a"]] == [1.0, 2.0, 3.0, 4.0]
    assert list(epochs) == ["a"]


def test_processes_leave_their_memory_to_those_of_the_next_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if processes that a wider product cannot use stay beside its groups, or their memory counts as taken."""
    alive: list[list[str]] = []
    side_by_side: list[list[list[str]]] = []

    class Counted(peers_spmm.Processes):
        def kill(self) -> None:
            alive.remove(self.kinds)

    def measured(one: peers_spmm.Processes, width: int, rounds: int) -> dict[str, Any]:
        if one.kinds not in alive:
            alive.append(one.kinds)
        side_by_side.append([list(kinds) for kinds in alive])
        return {"seconds": dict.fromkeys(one.kinds, width)}

    needed = peers_spmm.needed_bytes(10, 20, 512)
    patched = {
        "Processes": Counted,
        "measure": measured,
        "sizes_of": lambda _: (10, 20),
        # Three of the widest fit where nothing else is held.
        "memory_free": lambda: 3 * needed / peers_spmm.SHARE_OF_FREE - needed * sum(map(len, alive)),
        "find_peers": lambda _: None,
        "lines_of": lambda *_: [],
    }
    for name, value in patched.items():
        monkeypatch.setattr(peers_spmm, name, value)
    args = argparse.Namespace(widths="4,8,512,4", peers=None, threads=1, rounds=1)
    record: dict[str, Any] = {"measured": [], "ceilings": {}}
    kinds = ["a", "b", "c", "d", "e"]
    assert peers_spmm.measure_graph("some", Path("store"), kinds, record, args) == []
    assert side_by_side == [[kinds], [kinds], [["a", "b", "c"]], [["a", "d", "e"]], [kinds]]
    assert [list(found["seconds"]) for found in record["measured"]] == [kinds, kinds, kinds, kinds]
    assert alive == []


def test_rounds_are_shuffled_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a contender is left out of a round, or all rounds have one order."""
    monkeypatch.setattr(common, "SETTLE_S", 0.0)
    asked: list[str] = []

    class Asked:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, _: str) -> dict[str, Any]:
            asked.append(self.name)
            return {"seconds": 1.0}

    names = ["a", "b", "c"]
    found = common.alternate({name: Asked(name) for name in names}, 1, 5, {})  # type: ignore[misc]
    rounds = [tuple(asked[start : start + 3]) for start in range(0, 18, 3)]
    assert all(sorted(one) == names for one in rounds)
    assert len(set(rounds)) > 1
    assert {name: len(runs) for name, runs in found.items()} == dict.fromkeys(names, 6)


def test_reports_quote_no_path_of_the_machine() -> None:
    """Fails if a folder outside the repository is told, or one inside is hidden."""
    inside = str(BENCH / "results")
    assert common.shown("/home/someone/graphs") == "<graphs>"
    assert common.shown("--cache=/home/someone/graphs") == "--cache=<graphs>"
    assert common.shown(inside) == "bench/results"
    assert [common.shown(text) for text in ("--rounds", "3", "a=b")] == ["--rounds", "3", "a=b"]


def test_a_worker_forgets_its_peak() -> None:
    """Fails if memory that was held before counts as the peak of what follows."""
    code = (
        f"import sys; sys.path.insert(0, {str(BENCH)!r}); import common\n"
        "held = bytearray(64 << 20); before = common.memory()['VmHWM']\n"
        "del held; common.forget_peak(); print(before - common.memory()['VmHWM'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 48 << 20
