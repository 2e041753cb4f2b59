"""Seconds and peak memory of training epochs: mggcn in its precisions, and PyTorch Geometric, on one GPU in turn.

Both train the same network from the same weights; their losses must agree. No dropout, no evaluation. mggcn's epochs run
as `mggcn train` runs them between two looks; PyG's without a look, launched from the host and as a CUDA graph. Every
contender has a process of its own; `mode` is how the device got the epochs in the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from bench.gpu.graphs import CASES, LAYERS, PRECISIONS, find_store
from bench.gpu.lab import Lab, Row, attempt, shortened, tf32
from bench.gpu.pyg import GAT, KINDS, Peer
from bench.peers.attention import MODELS
from bench.report import spread
from mggcn.assemble.plan import plan_graph, plan_shape, resolve
from mggcn.assemble.rank import Rank, make_rank
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.comm.single import SingleCommunicator
from mggcn.config import Config, from_tables
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store
from mggcn.planning.shape import graph_shape
from mggcn.train.runtime import Weights

EPOCHS = 20_000
"""Room in the history of losses: no case gets that far."""
LR = 0.01
LOOKED_AT = 3
WINDOW_S = 0.2


def measure(lab: Lab, case: str) -> None:
    """Write a row per contender."""
    name, hidden = CASES[case] if case in CASES else LAYERS[case][:2]
    settings = lab.settings
    store = find_store(name, settings.scale, settings.cache, settings.data)
    graph = open_store(store)
    extents = {"rows": graph.num_vertices, "nnz": graph.num_edges + graph.num_vertices, "hidden": hidden}
    lab.write(kind="case", graph=graph.name, classes=graph.num_classes, **extents)
    if case in LAYERS:
        measure_layers(lab, graph, hidden, LAYERS[case][2])
        return
    for precision in PRECISIONS:
        attempt(lab, wanted("mggcn", precision), own, lab, graph, hidden, precision, "own", alone=True)
    if not lab.emulated:
        attempt(lab, wanted("mggcn with cuSPARSE", "fp32"), own, lab, graph, hidden, "fp32", "cusparse", alone=True)
    for kind in KINDS[:1] if settings.quick else KINDS:
        for mode in Peer.MODES:  # the launched one leaves nothing behind
            measure_peer(lab, graph, hidden, kind, mode, "fp32", alone=mode == Peer.MODES[0])
    timed = [row for row in lab.find(kind="epoch", precision="fp32") if "median" in row and "pyg" in row]
    if timed:
        best = min(timed, key=lambda row: float(row["median"]))
        measure_peer(lab, graph, hidden, best["pyg"], best["asked"], "tf32", alone=True)


def measure_layers(lab: Lab, graph: Graph, hidden: tuple[int, ...], kind: str) -> None:
    """Write rows of mggcn's layers and PyG's, whose GAT looks for self-loops in every epoch and cannot be captured."""
    for precision in (name for name in PRECISIONS if name in ("fp32", "tf32")):
        attempt(lab, wanted("mggcn", precision), own, lab, graph, hidden, precision, "own", kind, alone=True)
    for precision in ("fp32", "tf32"):
        for mode in Peer.MODES[:1] if kind == GAT else Peer.MODES:
            measure_peer(lab, graph, hidden, kind, mode, precision, alone=mode == Peer.MODES[0])


def measure_compiled(lab: Lab, case: str) -> None:
    """Write a row per kind of PyG's layers under torch.compile; what does not compile is a row that says why."""
    name, hidden = CASES[case]
    settings = lab.settings
    graph = open_store(find_store(name, settings.scale, settings.cache, settings.data))
    weights = initial_weights(lab, graph, hidden)

    def train(kind: str) -> Row:
        torch._dynamo.reset()
        peer = Peer(lab, graph, hidden, weights, kind, LR, lambda net: torch.compile(net))
        losses = [peer.step() for _ in range(LOOKED_AT)]
        return {**time_epochs(lab, peer.epochs("launched")[0]), "memory": lab.memory(), "losses": losses}

    for kind in KINDS:
        what = {"kind": "epoch", "contender": f"PyG {kind}", "precision": "fp32", "mode": "torch.compile", "pyg": kind}
        attempt(lab, what, train, kind)


def wanted(contender: str, precision: str, mode: str = "captured", **more: str) -> Row:
    """What a row is about."""
    return {"kind": "epoch", "contender": contender, "precision": precision, "asked": mode, **more}


def own(lab: Lab, graph: Graph, hidden: tuple[int, ...], precision: str, spmm: str, model: str = "gcn") -> Row:
    """Train with mggcn."""
    with tf32(precision == "tf32"):
        began = time.perf_counter()
        rank = make(lab, graph, hidden, precision, spmm, model)
        losses = [rank.trainer.step(0)]
        ready, setup = time.perf_counter() - began, lab.memory()
        if not lab.emulated:
            torch.cuda.reset_peak_memory_stats()
        losses += [rank.trainer.step(epoch) for epoch in range(1, 4)]
        done = [4]

        def epochs(count: int) -> None:
            rank.trainer.advance(done[0], done[0] + count)
            done[0] += count

        seconds = time_epochs(lab, epochs)
        # Last: a profiler that was once attached may slow launches down.
        kernels = count_kernels(lab, lambda: epochs(1))
    plan = rank.plan
    # Libraries and context are no part of torch's memory; cuBLAS's work space is.
    facts = {
        "planned": plan.total_bytes - plan.regions["runtime"],
        "arena": plan.arena_bytes,
        "products": plan.num_spmm,
    }
    mode = lab.noted(rank.trainer.states["epoch"])
    where = {"memory": lab.memory(), "setup_memory": setup, "setup_s": ready}
    return {**seconds, **where, "mode": mode, "losses": losses[:LOOKED_AT], "kernels": kernels, **facts}


def settings_of(
    lab: Lab, graph: Graph, hidden: tuple[int, ...], precision: str, spmm: str, model: str = "gcn"
) -> Config:
    tables = {
        "model": {"hidden": hidden, **MODELS.get(model, {})},
        "train": {"epochs": EPOCHS, "eval_every": 0, "lr": LR},
        "run": {"device": "cuda", "precision": precision, "spmm": spmm, "memory_limit": lab.free_bytes()},
    }
    return resolve(from_tables(tables), graph)


def make(lab: Lab, graph: Graph, hidden: tuple[int, ...], precision: str, spmm: str, model: str = "gcn") -> Rank:
    """A rank that is ready to train on the lab's device."""
    config = settings_of(lab, graph, hidden, precision, spmm, model)
    plan, owners = plan_graph(config, graph)
    return make_rank(config, graph, plan, owners, SingleCommunicator(), device_of=lambda *_: lab.device)


def initial_weights(lab: Lab, graph: Graph, hidden: tuple[int, ...], model: str = "gcn") -> dict[str, torch.Tensor]:
    """The weights that mggcn begins with, which are the same on every device."""
    config = settings_of(lab, graph, hidden, "fp32", "own", model)
    parameters = plan_shape(config, graph_shape(graph, config)).ranks[0].values.parameters
    weights = Weights(parameters, torch.float32, CpuBackend(torch.float32, 1))
    weights.initialize(config.train.seed)
    return weights.state_dict()


def measure_peer(
    lab: Lab, graph: Graph, hidden: tuple[int, ...], kind: str, mode: str, precision: str, *, alone: bool
) -> None:
    """Train with PyG and write what was found."""

    def train() -> Row:
        with tf32(precision == "tf32"):
            peer = Peer(lab, graph, hidden, initial_weights(lab, graph, hidden, kind), kind, LR)
            losses = [peer.step() for _ in range(LOOKED_AT)]
            if not lab.emulated:
                torch.cuda.reset_peak_memory_stats()
            products = peer.count_products()
            epochs, state = peer.epochs(mode)
            row = {**time_epochs(lab, epochs), "mode": lab.noted(state), "memory": lab.memory(), "losses": losses}
            kernels = count_kernels(lab, peer.step) if mode == "launched" else None
        return {**row, "kernels": kernels, "products": products}

    attempt(lab, wanted(f"PyG {kind}", precision, mode, pyg=kind), train, alone=alone)


def time_epochs(lab: Lab, epochs: Callable[[int], None]) -> Row:
    """Seconds of an epoch by the wall clock, from an idle device to an idle device, over as many as fill a window."""
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
        print(shortened(error))
        return None
