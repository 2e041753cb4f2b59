"""Cora with Kipf and Welling's settings on CPU and GPU: test scores over seeds, loss curves with dropout, repeated bits."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.graphs import find_store
from bench.gpu.lab import Lab, attempt
from bench.report import ROOT
from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank, make_rank
from mggcn.comm.single import SingleCommunicator
from mggcn.config import Config, from_tables
from mggcn.config.files import from_toml
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store

RECIPE = ROOT / "recipes" / "cora-kipf.toml"
CURVE = 50
"""Epochs over which losses are compared."""
SEEDS = range(1, 11)
Curve = npt.NDArray[np.float64]


def measure(lab: Lab, case: str) -> None:
    """Write rows of the kinds curve and scores."""
    settings = lab.settings
    graph = open_store(find_store(case, settings.scale, settings.cache, settings.data))
    config = from_tables({"train": {"eval_every": 0}}, from_toml(RECIPE))
    attempt(lab, {"kind": "curve"}, curves, lab, graph, config)
    seeds = SEEDS[:1] if settings.quick else SEEDS
    for device in ("cuda", "cpu"):
        attempt(lab, {"kind": "scores", "device": device}, scores, lab, graph, config, device, seeds)


def train(lab: Lab, graph: Graph, config: Config, device: str, seed: int = 1) -> Rank:
    """A rank that has yet to make its first step."""
    tables = {"train": {"seed": seed}, "run": {"device": device, "memory_limit": lab.free_bytes()}}
    config = resolve(from_tables(tables, config), graph)
    plan, owners = plan_graph(config, graph)
    return make_rank(config, graph, plan, owners, SingleCommunicator(), device_of=lambda *_: lab.device)


def losses(rank: Rank, epochs: int) -> Curve:
    """Train the first epochs; on a GPU they are queued without a look, as `mggcn train` does."""
    first = rank.trainer.step(0)
    return np.array([first, *rank.trainer.advance(1, epochs)[:, 0]])


def curves(lab: Lab, graph: Graph, config: Config) -> dict[str, Any]:
    """Losses on CPU and GPU, and whether a second run on the GPU has the same bits."""
    epochs = 3 if lab.emulated else CURVE
    on_cpu = losses(train(lab, graph, config, "cpu"), epochs)
    before, again = (train(lab, graph, config, "cuda") for _ in range(2))
    curve = losses(before, epochs)
    apart = float(np.abs(curve / on_cpu - 1).max())
    same_losses = losses(again, curve.size).tobytes() == curve.tobytes()
    one, two = (rank.trainer.runtime.weights.state_dict() for rank in (before, again))
    same = {"losses": same_losses, "weights": all(bool((one[name] == two[name]).all()) for name in one)}
    found = {"graph": graph.name, "epochs": epochs, "apart": apart, "cpu": on_cpu.tolist(), "gpu": curve.tolist()}
    return found | {"repeats": same, "mode": lab.noted(before.trainer.states["epoch"])}


def scores(lab: Lab, graph: Graph, config: Config, device: str, seeds: range) -> dict[str, Any]:
    """Test scores after the last epoch, and seconds of an epoch with dropout."""
    last = 2 if lab.emulated else config.train.epochs
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=last))
    found, seconds = [], []
    for seed in seeds:
        rank = train(lab, graph, config, device, seed)
        rank.trainer.step(0)
        middle = last // 2
        rank.trainer.advance(1, middle)
        began = time.perf_counter()
        rank.trainer.advance(middle, last)
        seconds.append((time.perf_counter() - began) / (last - middle))
        found.append(rank.trainer.evaluate()["test"])
    known = [score for score in found if score is not None]
    average, deviation = (f(known) if known else None for f in (statistics.fmean, statistics.pstdev))
    return {"test": found, "mean": average, "std": deviation, "epoch_s": statistics.median(seconds)}
