"""Seconds and peak memory of training epochs: mggcn in three precisions, and PyTorch Geometric, on one GPU in turn.

Both train the same network from the same weights; their losses must agree. No dropout, no evaluation. mggcn's epochs run
as `mggcn train` runs them between two looks; PyG's without a look, launched from the host and as a CUDA graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from common import spread
from gpu_cases import CASES
from gpu_graphs import find_store
from gpu_lab import Lab, attempt, first_line, tf32
from gpu_pyg import KINDS, Peer

from mggcn.assemble import Rank, make_rank, plan_graph, resolve
from mggcn.comm.single import SingleCommunicator
from mggcn.config import from_tables
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store

PRECISIONS = ("fp32", "tf32", "bf16")
EPOCHS = 20_000
"""Room in the history of losses: no case gets that far."""
LR = 0.01
LOOKED_AT = 3
WINDOW_S = 0.2
Weights = dict[str, torch.Tensor]


def measure(lab: Lab, case: str) -> None:
    """Write a row per contender."""
    name, hidden = CASES[case]
    settings = lab.settings
    store = find_store(name, settings.scale, settings.cache, settings.data)
    graph = open_store(store)
    extents = {"rows": graph.num_vertices, "nnz": graph.num_edges + graph.num_vertices, "hidden": hidden}
    lab.write(kind="case", graph=graph.name, classes=graph.num_classes, **extents)
    weights: Weights = {}
    for precision in PRECISIONS:
        what = {"kind": "epoch", "contender": "mggcn", "precision": precision, "mode": "captured"}
        attempt(lab, what, own, lab, graph, hidden, precision, "own", weights)
    if not lab.emulated:
        what = {"kind": "epoch", "contender": "mggcn with cuSPARSE", "precision": "fp32", "mode": "captured"}
        attempt(lab, what, own, lab, graph, hidden, "fp32", "cusparse", weights)
    fastest = (math.inf, "", "")
    for kind in KINDS[:1] if settings.quick else KINDS:
        for mode in Peer.MODES:
            found = measure_peer(lab, graph, hidden, weights, kind, mode, "fp32")
            fastest = min(fastest, (found, kind, mode))
    if fastest[1]:
        measure_peer(lab, graph, hidden, weights, *fastest[1:], "tf32")


def own(lab: Lab, graph: Graph, hidden: tuple[int, ...], precision: str, spmm: str, weights: Weights) -> dict[str, Any]:
    """Train with mggcn; put the initial weights into `weights`."""
    with tf32(precision == "tf32"):
        began = time.perf_counter()
        rank = make(lab, graph, hidden, precision, spmm)
        weights.update(rank.trainer.runtime.weights.state_dict())
        losses = [rank.trainer.step(0)]
        ready, setup = time.perf_counter() - began, lab.memory()
        if not lab.emulated:
            torch.cuda.reset_peak_memory_stats()
        losses += [rank.trainer.step(epoch) for epoch in range(1, 4)]
        done = [4]

        def epochs(count: int) -> None:
            rank.trainer._advance(done[0], done[0] + count)
            done[0] += count

        seconds = time_epochs(lab, epochs)
        # Last: a profiler that was once attached may slow launches down.
        kernels = count_kernels(lab, lambda: epochs(1))
    plan = rank.plan
    # Libraries and context are no part of torch's memory.
    facts = {
        "planned": plan.total_bytes - plan.regions["runtime"],
        "arena": plan.arena_bytes,
        "products": plan.num_spmm,
    }
    where = {"memory": lab.memory(), "setup_memory": setup, "setup_s": ready}
    return {**seconds, **where, "losses": losses[:LOOKED_AT], "kernels": kernels, **facts}


def make(lab: Lab, graph: Graph, hidden: tuple[int, ...], precision: str, spmm: str) -> Rank:
    """A rank that is ready to train on the lab's device."""
    tables = {
        "model": {"hidden": hidden},
        "train": {"epochs": EPOCHS, "eval_every": 0, "lr": LR},
        "run": {"device": "cuda", "precision": precision, "spmm": spmm, "memory_limit": lab.free_bytes()},
    }
    config = resolve(from_tables(tables), graph)
    plan, owners = plan_graph(config, graph)
    return make_rank(config, graph, plan, owners, SingleCommunicator(), device_of=lambda *_: lab.device)


def measure_peer(
    lab: Lab, graph: Graph, hidden: tuple[int, ...], weights: Weights, kind: str, mode: str, precision: str
) -> float:
    """Train with PyG and write what was found; return its median, infinite if it cannot do it."""
    found = [math.inf]

    def train() -> dict[str, Any]:
        with tf32(precision == "tf32"):
            peer = Peer(lab, graph, hidden, weights, kind, LR)
            losses = [peer.step() for _ in range(LOOKED_AT)]
            if not lab.emulated:
                torch.cuda.reset_peak_memory_stats()
            products = peer.count_products()
            row = {**time_epochs(lab, peer.epochs(mode)), "memory": lab.memory(), "losses": losses}
            kernels = count_kernels(lab, peer.step) if mode == "launched" else None
        found[0] = row["median"]
        return {**row, "kernels": kernels, "products": products}

    attempt(lab, {"kind": "epoch", "contender": f"PyG {kind}", "precision": precision, "mode": mode}, train)
    return found[0]


def time_epochs(lab: Lab, epochs: Callable[[int], None]) -> dict[str, Any]:
    """Seconds of an epoch by the wall clock, from an idle device to an idle device, over as many as fill a window."""
    lab.check_time()
    count = 1

    def stretch() -> float:
        lab.device.synchronize()
        began = time.perf_counter()
        epochs(count)
        lab.device.synchronize()
        return (time.perf_counter() - began) / count

    estimate = stretch()
    count = 1 if lab.emulated else max(1, min(1500, math.ceil(WINDOW_S / estimate)))
    return {**spread([stretch() for _ in range(lab.settings.rounds)]), "epochs": count}


def count_kernels(lab: Lab, epoch: Callable[[], object]) -> int | None:
    """Run an epoch, and count what it launches on the GPU; None if the profiler cannot tell."""
    if lab.emulated:
        epoch()
        return None
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            epoch()
            lab.device.synchronize()
        return sum("CUDA" in str(event.device_type) for event in profiler.events() or ())
    except RuntimeError as error:
        print(first_line(error))
        return None
