"""PyG's epochs under torch.compile, each way that it has for a whole graph: apart, because compiling takes a minute."""

from __future__ import annotations

from typing import Any

import torch
from gpu_cases import CASES
from gpu_epoch import LOOKED_AT, LR, initial_weights, time_epochs
from gpu_graphs import find_store
from gpu_lab import Lab, attempt
from gpu_pyg import KINDS, Peer

from mggcn.graph.store import open_store


def measure(lab: Lab, case: str) -> None:
    """Write a row per kind of PyG's layers; what does not compile is a row that says why."""
    name, hidden = CASES[case]
    settings = lab.settings
    graph = open_store(find_store(name, settings.scale, settings.cache, settings.data))
    weights = initial_weights(lab, graph, hidden)

    def train(kind: str) -> dict[str, Any]:
        torch._dynamo.reset()
        peer = Peer(lab, graph, hidden, weights, kind, LR, lambda net: torch.compile(net))
        losses = [peer.step() for _ in range(LOOKED_AT)]
        return {**time_epochs(lab, peer.epochs("launched")[0]), "memory": lab.memory(), "losses": losses}

    for kind in KINDS:
        what = {"kind": "epoch", "contender": f"PyG {kind}", "precision": "fp32", "mode": "torch.compile", "pyg": kind}
        attempt(lab, what, train, kind)
