"""The workers of the comparisons with other libraries on a toy graph, as far as the libraries are here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import arrays, graphs, worker
from bench.graphs import RELABELLED, Made
from bench.peers import worker_product, worker_pyg, worker_pyg_layers
from bench.peers.attention import MODELS
from bench.peers.layers import Sampled, trained
from bench.peers.libraries import find_peers
from bench.report import ROOT
from mggcn.graph.generate import community
from mggcn.graph.store import open_store, write_store

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
    dense = arrays.normalised_dense(store) @ arrays.operand(60, WIDTH).astype(np.float64)
    assert contender.result() == pytest.approx(arrays.sample_of(dense), abs=1e-5)
    assert contender.facts["repeats"] >= 1


def test_normalised_adjacency(store: Path) -> None:
    """Fails if a self-loop or an edge is lost, or a scale is of another degree."""
    graph = open_store(store)
    dense = np.eye(60)
    dense[np.repeat(np.arange(60), np.diff(graph.adj.indptr.array())), graph.adj.indices.array()] = 1.0
    scale = dense.sum(axis=1) ** -0.5
    np.testing.assert_allclose(arrays.normalised_dense(store), scale[:, None] * dense * scale, rtol=1e-6)


@pytest.mark.parametrize("precomputed", [False, True])
def test_networks_agree(precomputed: bool, store: Path, tmp_path: Path) -> None:
    """Fails if a way of PyG trains another network than mggcn, also where A X is computed once."""
    job = {"store": str(store), "hidden": [4, 6], "classes": 3, "weights": str(tmp_path / "w.npz"), "threads": 1}
    own = worker.prepare(job | {"run": {"order": "locality"}})
    expected = [own.epoch() for _ in range(3)]
    assert own.facts["order"] == "locality"
    assert len(own.facts["work"]["gathers"]) == 4, "two layers, both directions; the first has none"
    for kind in ("fused", "scaled", "csr", "scatter"):
        peer = worker_pyg.prepare(job | {"kind": kind, "precomputed": precomputed})
        assert [peer.epoch() for _ in range(3)] == pytest.approx(expected, rel=1e-5), kind


@pytest.mark.parametrize("kind", MODELS)
def test_layers_agree(kind: str, store: Path, tmp_path: Path) -> None:
    """Fails if PyG's layers start from other weights than mggcn's, or have another activation, norm or bias."""
    job = {"store": str(store), "hidden": [8, 8], "classes": 3, "weights": str(tmp_path / "w.npz"), "threads": 1}
    own = worker.prepare(job | {"run": {"precision": "fp64"}, "model": MODELS[kind]})
    expected = [own.epoch() for _ in range(3)]
    for way in ("scatter", "csr") if kind == "sage-mean" else ("scatter",):
        facts = {"kind": kind, "way": way, "heads": 4, "batch_norm": kind == "gin", "double": way == "scatter"}
        peer = worker_pyg_layers.prepare(job | facts)
        error = 1e-6 if way == "scatter" else 1e-4
        assert [peer.epoch() for _ in range(3)] == pytest.approx(expected, rel=error), way


def test_sparse_features_and_several_splits(tmp_path: Path) -> None:
    """Fails if a triple is read as another matrix, or vertices of another split count as trained ones."""
    dense = np.array([[0, 2, 0], [0, 0, 0], [1, 0, 3]], np.float32)
    triple = {"indptr": [0, 1, 1, 3], "indices": [1, 0, 2], "data": np.array([2, 1, 3], np.float32)}
    for name, array in triple.items():
        np.save(tmp_path / f"features_{name}.npy", np.asarray(array))
    np.testing.assert_array_equal(arrays.dense_features(tmp_path), dense)
    np.save(tmp_path / "labels.npy", np.array([4, -1, 6]))
    np.save(tmp_path / "train.npy", np.array([[True, False, True], [True, True, True]]))
    ids, labels = arrays.targets(tmp_path)
    assert (ids.tolist(), labels.tolist()) == ([0, 2], [4, 6])


def test_real_graphs_are_copied_or_given_features(store: Path, tmp_path: Path) -> None:
    """Fails if partitions of the source come along, or a graph without features gets none."""
    (store / "partitions").mkdir(exist_ok=True)
    graphs.make(str(tmp_path / "copy"), source=str(store))
    assert not (tmp_path / "copy" / "partitions").exists()
    bare = community(50, 80, 0, 0, seed=3)
    write_store(bare, tmp_path / "bare")
    graphs.make(str(tmp_path / "made"), source=str(tmp_path / "bare"))
    made = open_store(tmp_path / "made")
    assert (made.features.shape, made.num_classes) == ((50, 128), 40)  # type: ignore[union-attr]
    np.testing.assert_array_equal(made.adj.indices.array(), bare.adj.indices.array())


def test_ids_at_random_are_those_of_the_same_graph(store: Path, tmp_path: Path) -> None:
    """Fails if an edge is lost on the way, the ids stay, or names come along that contenders would have to hold."""
    graph = open_store(store)
    graphs.make(str(tmp_path / "other"), source=str(store), relabel=True)
    other = open_store(tmp_path / "other")
    assert other.ids is None
    assert other.num_edges == graph.num_edges
    assert not np.array_equal(other.labels.array(), graph.labels.array())  # type: ignore[union-attr]  # both have some
    assert sorted(np.diff(other.adj.indptr.array())) == sorted(np.diff(graph.adj.indptr.array()))


def test_graphs_of_the_papers_are_made(tmp_path: Path) -> None:
    """Fails if a graph without features gets some, edges have no relations, or an R-MAT both directions."""
    for name, more in (
        ("AM-like", {"relations": 133, "features": 0, "symmetric": False}),
        ("LDBC-like", {"relations": 0, "features": 135, "symmetric": False}),
        ("papers-like", {"relations": 0, "features": 128, "symmetric": True}),
    ):
        graphs.make(str(tmp_path / name), made=dataclasses.asdict(graphs.GENERATED[name].scaled(0.003)))
        made = open_store(tmp_path / name)
        found = {"relations": made.num_relations, "features": made.num_features, "symmetric": made.symmetric}
        assert found == more
        assert made.labels is not None


def test_scaled_graphs_are_possible_and_known_by_name(tmp_path: Path) -> None:
    """Fails if a toy has fewer vertices than its classes want or more edges than fit, or a missing graph passes."""
    made = Made(1000, 400_000, 8, 40)
    assert (made.scaled(1.0), made.scaled(0.01).vertices) == (made, 160)
    assert made.scaled(0.01).edges == 160 * 159 // 8 < 4000
    assert (made.scaled(1.0, 2.0).vertices, made.scaled(2.0).vertices) == (1000, 2000)
    assert not graphs.available("cnr_2000", tmp_path)
    (tmp_path / "cnr_2000").mkdir()
    assert graphs.available("cnr_2000" + RELABELLED, tmp_path)
    assert graphs.available("arxiv-like", None)


def test_environments(tmp_path: Path) -> None:
    """Fails if what setup.sh found is not believed, or a library is compared with that is not there."""
    assert "dgl" not in find_peers(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / "peers.json").write_text(json.dumps({"versions": {"dgl": "2.1.0"}, "faults": {"mkl": "absent"}}))
    peers = find_peers(tmp_path)
    assert (peers.python, "dgl" in peers, "scipy" in peers) == (str(tmp_path / "bin" / "python"), True, False)


def test_setup_is_a_proper_script_and_names_no_host() -> None:
    """Fails on a mistake of syntax, or where the script says itself where packages come from."""
    script = ROOT / "bench" / "peers" / "setup.sh"
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
    assert "://" not in script.read_text()


def test_networks_on_batches_are_scored_by_the_whole_graph(store: Path, tmp_path: Path) -> None:
    """Fails if scores are of training vertices or of a batch, or their rows are dropped."""
    nets: list[torch.nn.Module] = []
    x, known = torch.from_numpy(arrays.dense_features(store)), torch.from_numpy(np.load(store / "labels.npy"))
    train, _ = (torch.from_numpy(array) for array in arrays.targets(store))
    whole = torch.from_numpy(arrays.normalised_dense(store)).float()

    class Layer(torch.nn.Linear):
        def forward(self, block: torch.Tensor, h: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return block @ super().forward(h)

    def step(net: torch.nn.Module, seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return net([whole, whole[seeds]], x), known[seeds]

    np.savez(tmp_path / "weights.npz")
    job = {"part": "losses", "epochs": 2, "threads": 1, "hidden": [64], "classes": 3, "store": str(store), "seed": 3}
    sampled = Sampled(
        train.split(10), train.numel(), x, lambda d, e, _: Layer(d, e), step, lambda net, _: nets.append(net), whole
    )
    contender = trained(job | {"weights": str(tmp_path / "weights.npz")}, sampled, {})
    assert contender.result() == [], "nothing is trained yet"
    last, (*losses, accuracy) = contender.epoch(), contender.result()
    assert len(losses) == 2
    assert losses[-1] == last
    with torch.no_grad():
        right = (nets[0].eval()([whole, whole], x).argmax(1) == known).numpy()
    test = np.load(store / "test.npy").reshape(-1, 60)[0].astype(bool)
    assert accuracy == pytest.approx(right[test].mean())
    assert right[test].mean() != right.mean(), "so that the test tells them apart"
