"""What is fuzzed: stores as their readers and as kernels meet them, files of edges and settings, checkpoints.

A target has a corpus of sound and odd inputs, and a function that reads a changed one. It returns, or raises an
MggcnError: whatever else it does is a finding.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mggcn.api.load import load_source
from mggcn.cli import entry as cli
from mggcn.config import Config
from mggcn.config.files import from_toml, to_toml
from mggcn.errors import MggcnError, StoreError
from mggcn.graph.digests import Hasher
from mggcn.graph.layout import graph_arrays
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_digests, write_store
from tests.cli.test_bad_inputs import EDGES, HEADERS, MATRIX_MARKET, NPZ, TOML
from tests.fuzz.mutate import mutate
from tests.graphs import make_graph, pattern


@dataclass(frozen=True)
class Target:
    """One kind of input: `run` changes one by the generator's choice, and reads it in a folder of its own."""

    name: str
    weight: int
    run: Callable[[Path, random.Random], None]


SOUND_EDGES = "".join(f"{u} {(7 * u + 1) % 50} {u / 7:.3f}\n" for u in range(50)).encode()
SOUND_MTX = b"%%MatrixMarket matrix coordinate real general\n% c\n9 9 3\n1 2 0.5\n3 4 1\n9 9 2\n"


def readers() -> list[Target]:
    """Text and binary files of edges, arrays beside them, settings."""
    texts = [SOUND_EDGES, b"source,target,weight\n0,1,2.5\n1,2,3\n", b"# c\n0\t1\n1\t2\n", *EDGES.values()]
    headers = list(HEADERS.values())
    settings = [to_toml(Config()).encode(), *TOML.values()]

    def source(name: str, corpus: list[bytes], packed: bool = False) -> Target:
        def run(folder: Path, rng: random.Random) -> None:
            content = mutate(rng.choice(corpus), corpus, rng)
            if packed:
                content = gzip.compress(content, 1)
                content = mutate(content, [content], rng) if rng.random() < 0.5 else content
            (folder / name).write_bytes(content)
            load_source(folder / name)

        return Target(name, 4, run)

    def companion(folder: Path, rng: random.Random) -> None:
        (folder / "edges.txt").write_bytes(SOUND_EDGES)
        (folder / "a.npy").write_bytes(mutate(rng.choice(headers), headers, rng))
        role = rng.choice(["features", "labels", "edge_types"])
        load_source(folder / "edges.txt", **{role: folder / "a.npy"})

    def toml(folder: Path, rng: random.Random) -> None:
        (folder / "c.toml").write_bytes(mutate(rng.choice(settings), settings, rng))
        from_toml(folder / "c.toml", saved=rng.random() < 0.3)

    return [
        source("edges.txt", texts),
        source("edges.csv", texts),
        source("edges.txt.gz", texts, packed=True),
        source("matrix.mtx", [SOUND_MTX, *MATRIX_MARKET.values()]),
        source("arrays.npz", list(NPZ.values())),
        Target("companion", 4, companion),
        Target("settings", 4, toml),
    ]


def libraries(sound: Path) -> list[Target]:
    """Files of other libraries' forms: Parquet, a saved Data of PyG's."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from torch_geometric.data import Data

    ends = np.arange(40)
    columns = {"source": ends, "target": ends * 7 % 40, "weight": ends / 7}
    pq.write_table(pa.table(columns), sound / "edges.parquet", compression="snappy", row_group_size=16)
    data = Data(
        x=torch.ones(40, 2), edge_index=torch.from_numpy(np.stack([ends, ends * 7 % 40])), y=torch.arange(40) % 3
    )
    torch.save(data, sound / "data.pt")

    def source(name: str, weight: int) -> Target:
        content = (sound / name).read_bytes()

        def run(folder: Path, rng: random.Random) -> None:
            (folder / name).write_bytes(mutate(content, [content], rng))
            load_source(folder / name)

        return Target(name, weight, run)

    return [source("edges.parquet", 3), source("data.pt", 2)]


def stores(sound: Path) -> list[Target]:
    """Stores: damaged, those whose digests were made anew for what they hold, and folders of others."""
    store = sound / "store"
    write_store(
        make_graph(pattern("weighted", 30, 5), num_features=3, num_classes=3, weighted=True, seed=5),
        store,
    )
    content = {path.name: path.read_bytes() for path in store.iterdir()}
    names = sorted(content)

    def damage(folder: Path, rng: random.Random) -> Path:
        target = folder / "store"
        shutil.copytree(store, target)
        for name in rng.sample(names, rng.choice((1, 1, 2))):
            (target / name).write_bytes(mutate(content[name], [*content.values()], rng))
        return target

    def damaged(folder: Path, rng: random.Random) -> None:
        for rows in graph_arrays(open_store(damage(folder, rng), verify=rng.random() < 0.2)).values():
            rows.read(0, rows.shape[0])

    def foreign(folder: Path, rng: random.Random) -> None:
        target = damage(folder, rng)
        (target / "meta.json").write_text("{}")
        open_store(target)

    def resealed(folder: Path, rng: random.Random) -> None:
        """Somebody who can write a store can write its digests: kernels must not follow what it holds."""
        target = folder / "store"
        shutil.copytree(store, target)
        name = rng.choice([name for name in names if name.endswith(".npy")])
        whole = bytearray(content[name])
        for _ in range(rng.choice((1, 1, 3))):
            whole[rng.randrange(128, len(whole))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        (target / name).write_bytes(whole)
        meta = json.loads((target / "meta.json").read_text())
        digests = {}
        for stored in meta["sha256"]:
            hasher = Hasher()
            hasher.update((target / stored).read_bytes())
            digests[stored] = hasher.finish()
        write_digests(target, {key: meta[key] for key in meta if key not in ("sha256", "meta_sha256")}, digests)
        order = rng.choice(["random", "none", "locality"])
        finished(["train", str(target), "--epochs", "1", "--quiet", "--out", str(folder / "run"), "--order", order])

    return [
        Target("damaged store", 6, damaged),
        Target("foreign store", 4, foreign),
        Target("resealed store", 3, resealed),
    ]


def finished(arguments: list[str]) -> None:
    """Run a command in this process. Raises: StoreError if it refused; AssertionError if it ended otherwise."""
    code = cli.main([*arguments, "--set", "run.threads=1", "--set", "model.hidden=4"])
    if code == 2:
        raise StoreError("refused")
    # A weight of another size may well end in a loss that is not finite.
    assert code in (0, 1), f"exit code {code}"


def checkpoints(sound: Path) -> list[Target]:
    """Checkpoints with and without digests."""
    import torch

    from mggcn.train.checkpoint import Progress, load_checkpoint, save_checkpoint

    scores = {"epoch": 3, "train": 0.5, "val": None, "test": 0.25}
    weights = {"layers.1.weight": torch.ones(3, 4), "layers.1.bias": torch.arange(4.0)}
    finished = [{"seed": 5, "epochs": 3, "best": scores, "final": scores}]
    parts = {"weights": weights, "optimizer": {"layers.1.weight:step": torch.tensor(3.0)}}
    save_checkpoint(sound / "checkpoints", Progress(epoch=3, best=scores, finished=finished), parts)

    def run(folder: Path, rng: random.Random) -> None:
        target = folder / "checkpoints"
        shutil.copytree(sound / "checkpoints", target)
        files = sorted(path for path in target.rglob("*") if path.is_file())
        path = rng.choice(files)
        path.write_bytes(mutate(path.read_bytes(), [file.read_bytes() for file in files], rng))
        if rng.random() < 0.6:  # as earlier versions, or somebody who knows of digests, would write it
            (name,) = (entry.name for entry in target.iterdir() if entry.is_dir())
            progress = target / name / "progress.json"
            if rng.random() < 0.5:
                digest = " " + hashlib.sha256(progress.read_bytes()).hexdigest()
            else:
                digest = ""
            (target / "latest").write_text(name + digest)
        load_checkpoint(target)

    return [Target("checkpoint", 5, run)]


def all_targets(sound: Path) -> list[Target]:
    """Make the corpora in a folder; return what is fuzzed."""
    return [*readers(), *libraries(sound), *stores(sound), *checkpoints(sound)]


__all__ = ["MggcnError", "Target", "all_targets"]
