"""Trains the cases of cases.py for ten epochs and notes what must not change: bits, sizes, messages.

`python -m tests.golden.record FILE` writes the record of a checkout; `--only TEXT` takes the cases whose names hold TEXT. A
change that is meant to change them writes tests/golden/recorded.json anew and says why. On every x86-64 processor with AVX2
the bits are the same: kernels and torch are held to AVX2, one thread a rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

CAPABILITY = "ATEN_CPU_CAPABILITY"
EPOCHS = 10


def trained(case: dict[str, Any]) -> dict[str, Any]:
    """Train one case; return its record."""
    from mggcn.assemble.rank import Rank
    from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
    from mggcn.graph.csr import ArrayRows
    from tests.graphs import make_graph, on_ranks, pattern

    n = 67
    rng = np.random.default_rng(271)
    sparse_edges = (rng.random((n, n)) < 0.03).astype(np.float32)
    adj = np.maximum(sparse_edges, sparse_edges.T) if case["edges"] == "sparse" else pattern(case["edges"], n, 11)
    weighted = case["edges"] == "weighted"
    graph = make_graph(adj, num_features=19, num_classes=4, sparse=case["sparse"], weighted=weighted, seed=8)
    if case["edges"] == "sparse":  # few vertices train, so that much is pruned
        train = graph.splits["train"].read(0, 1)[0] & (np.arange(n) % 9 == 0)
        graph = dataclasses.replace(graph, splits=dict(graph.splits) | {"train": ArrayRows(train[None])})
    strategy, _, delay = case["strategy"].partition("-")
    config = Config(
        model=ModelConfig(
            **{k: case[k] for k in ("kind", "hidden", "norm", "self_loops", "bias", "dropout", "input_dropout")}
        ),
        train=TrainConfig(
            seed=20011,
            epochs=EPOCHS,
            lr=0.02,
            weight_decay=1e-3,
            optimizer=case["optimizer"],
            momentum=0.9 if case["optimizer"] == "sgd" else 0.0,
        ),
        run=RunConfig(
            **{k: case[k] for k in ("precision", "ranks", "order", "prune", "products")},
            strategy=strategy,
            delay=delay or "0",
            threads=1,
            transport="threads" if case["ranks"] > 1 else "single",
        ),
    )

    def body(rank: Rank) -> dict[str, Any]:
        losses = [float(rank.trainer.step(epoch)) for epoch in range(EPOCHS)]
        sent, messages = rank.comm.bytes_sent, rank.comm.messages
        rank.trainer.evaluate()
        bits = hashlib.sha256(np.array(losses).tobytes())
        for tensor in (*rank.trainer.runtime.weights.state_dict().values(), rank.trainer.logits().double()):
            bits.update(tensor.numpy().tobytes())
        return {
            "loss": losses[-1],
            "bits": bits.hexdigest()[:16],
            "products": [rank.plan.num_spmm, rank.plan.evaluate_spmm],
            "sent": [sent, messages],
            "arena": rank.plan.arena_bytes,
        }

    ranks = on_ranks(config, graph, body)
    return {
        "loss": ranks[0]["loss"],
        "bits": hashlib.sha256("".join(rank["bits"] for rank in ranks).encode()).hexdigest()[:16],
        **{name: [rank[name] for rank in ranks] for name in ("products", "sent", "arena")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="take the cases whose names hold this text")
    parser.add_argument("--every", type=int, default=1, help="take every n-th of the cases")
    args = parser.parse_args()
    if os.environ.get(CAPABILITY) != "avx2":  # torch reads it once, when it is loaded
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.golden.record", *sys.argv[1:]],
            os.environ | {CAPABILITY: "avx2"},
        )
    warnings.simplefilter("ignore")
    from mggcn import native
    from tests.golden.cases import covering_array, name_of

    native.limit_spinning()
    import torch

    native.dense_isa = lambda: "avx2"
    found = {name_of(case): case for case in covering_array()[:: args.every]}
    record: dict[str, Any] = {"torch": torch.__version__}
    record |= {name: trained(case) for name, case in found.items() if args.only in name}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept)}" for name, kept in record.items())
    args.file.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
