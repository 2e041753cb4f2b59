"""Run folders as `mggcn train` leaves them, with made-up but plausible content."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.config.files import to_toml

# A formula that does not parse, a glyph that fonts lack and a control character come first: plots cut long names.
HOSTILE = "$\\frac{$ 図 \x07 <script>alert('x')</script> & \"q\""


def make_plan(ranks: int, layers: int = 3, name: str = "arxiv") -> dict[str, Any]:
    """A plan with 5 ops a layer and buffers of different lifetimes and sizes."""
    rows, width = 169_343 // ranks, 256
    train = [f"{kind} {layer}" for layer in range(1, layers + 1) for kind in ("linear", "aggregate", "relu")]
    train += ["loss", *(f"{kind} {layer} back" for layer in range(layers, 0, -1) for kind in ("aggregate", "linear"))]
    train += ["all-reduce gradients", "optimiser step"]
    per_rank = [_rank(r, ranks, rows, width, layers, len(train)) for r in range(ranks)]
    rng = np.random.default_rng(905)
    nnz = rng.integers(400_000, 520_000, (ranks, ranks)) // ranks
    return {
        "ranks": ranks, "device": "cpu", "precision": "fp32", "strategy": "broadcast", "order": "random",
        "graph": {"name": name, "num_vertices": 169_343, "num_edges": 1_166_243, "num_features": 128,
                  "num_classes": 40, "symmetric": False},
        "reasons": ["layer 1: S A X kept instead of X (82.7 MiB, dense): no SpMM in either direction",
                    "layer 2: gemm-first, 256 -> 256 columns through the graph", "layer 3: gemm-first, 40 < 256"],
        "programs": {"train": train, "evaluate": train[: 3 * layers], "setup": ["aggregate 0"]},
        "per_rank": per_rank,
        "partition": {"nnz": nnz.tolist(), "rows_needed": (nnz // 9).tolist(), "critical_path_over_ideal": 1.034},
    }  # fmt: skip


def _rank(rank: int, ranks: int, rows: int, width: int, layers: int, num_ops: int) -> dict[str, Any]:
    nbytes, offset, buffers = rows * width * 4, 0, []
    for layer in range(1, layers + 1):
        buffers.append(_buffer(f"h{layer}", rows, width, "kept", offset, 3 * layer - 3, num_ops - 2 * layer))
        offset += nbytes
    buffers.append(_buffer("hw", rows, width, "scratch", offset, 0, num_ops - 3))
    offset += nbytes
    if ranks > 1:
        for slot in ("BC1", "BC2"):
            buffers.append(_buffer(slot, rows, width, "scratch", offset, 1, num_ops - 3))
            offset += nbytes
    if layers > 1:  # Narrow and tall, above h1 once h2 has died: its label must be turned.
        buffers.append(_buffer("buckets", rows, width, "scratch", nbytes, num_ops - 2, num_ops - 2))
    buffers.append(_buffer("logits gradient", rows, 40, "scratch", offset, 3 * layers - 1, 3 * layers + 2))
    buffers.append(_buffer("loss", 1, 1, "state", offset + rows * 160, 3 * layers, num_ops - 1))
    arena = offset + rows * 160 + 64
    regions = {"arena": arena, "features": rows * 512, "graph": 12_000_000 // ranks + 9_000_000 * rank,
               "vertex data": rows * 24, "weights and optimiser": 1_400_000, "runtime": 180_000_000}  # fmt: skip
    return {"rank": rank, "rows": rows, "nnz": 1_300_000 // ranks, "arena_bytes": arena,
            "paper_bytes": nbytes * (layers + 3), "regions": regions, "total_bytes": sum(regions.values()),
            "messages_per_epoch": 5 * (ranks - 1), "bytes_sent_per_epoch": 5 * nbytes * (ranks - 1), "num_spmm": 5,
            "buffers": [*buffers, _buffer("h1", rows, width, "scratch", 0, 0, 5, program="evaluate")]}  # fmt: skip


def _buffer(name: str, rows: int, cols: int, lifetime: str, offset: int, first: int, last: int,
            program: str = "train") -> dict[str, Any]:  # fmt: skip
    return {"program": program, "name": name, "rows": rows, "cols": cols, "ld": cols, "dtype": "fp32",
            "lifetime": lifetime, "nbytes": rows * cols * 4, "offset": offset, "first": first,
            "last": last}  # fmt: skip


def history(epochs: int, repeats: int = 1, every: int = 1) -> list[dict[str, Any]]:
    """Falling losses; scores every `every` epochs; later repeats stop a little earlier."""
    rng = np.random.default_rng(17)
    lines = []
    for run in range(repeats):
        for epoch in range(1, epochs + 1 - 3 * run):
            rise = 1 - math.exp(-epoch / (0.2 * epochs))
            noise = rng.normal(0, 0.004)
            scored = epoch % every == 0
            scores = {
                s: (f * rise + noise if scored else None) for s, f in (("train", 0.79), ("val", 0.73), ("test", 0.715))
            }
            line = {"epoch": epoch, "loss": 3.7 * math.exp(-3 * rise) + abs(noise), **scores, "seconds": 0.41}
            lines.append(line if repeats == 1 else {**line, "run": run})
    return lines


def make_result(lines: list[dict[str, Any]], repeats: int = 1) -> dict[str, Any]:
    runs = [[line for line in lines if line.get("run", 0) == run] for run in range(repeats)]
    bests = [max((e for e in run if e["val"] is not None), key=lambda e: e["val"]) for run in runs]
    best = [{key: b[key] for key in ("epoch", "train", "val", "test")} for b in bests]
    result = {
        "metric": "accuracy", "best": best[0], "final": {k: runs[0][-1][k] for k in ("train", "val", "test")},
        "epochs": runs[0][-1]["epoch"], "seconds_per_epoch": 0.4123, "setup_seconds": 3.2,
        "planned_peak_bytes": 1_234_567_890, "measured_peak_bytes": 1_200_000_000, "arena_bytes": 800_000_000,
        "bytes_sent_per_epoch": 0, "versions": {"mggcn": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "graph_sha256": "ab" * 32,
    }  # fmt: skip
    if repeats > 1:
        tests = [b["test"] for b in best]
        result |= {"runs": [{"seed": 1 + k, "best": b} for k, b in enumerate(best)]}
        result |= {"mean": {"test": float(np.mean(tests))}, "std": {"test": float(np.std(tests))}}
    return result


def write_run(folder: Path, *, ranks: int = 1, repeats: int = 1, epochs: int = 60, every: int = 1, layers: int = 3,
              name: str = "arxiv", finished: bool = True) -> Path:  # fmt: skip
    """Write a complete run folder, or one without result.json."""
    folder.mkdir(parents=True)
    config = Config(model=ModelConfig(hidden=(256,) * (layers - 1)), train=TrainConfig(epochs=epochs, repeat=repeats),
                    run=RunConfig(ranks=ranks))  # fmt: skip
    lines = history(epochs, repeats, every)
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "plan.json").write_text(json.dumps(make_plan(ranks, layers, name)))
    if finished:
        (folder / "result.json").write_text(json.dumps(make_result(lines, repeats)))
    return folder
