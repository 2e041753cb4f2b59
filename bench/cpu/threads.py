"""Threads that runs choose, beside one thread, all threads and PyG, on a quiet machine and beside busy programs.

small  GCN of 16 and GAT of 8 heads of 8 on Cora and CiteSeer: `mggcn train`, and Python with torch imported first or
       not; every run a process of its own, in turn; median epoch of 100
large  two larger graphs on a quiet machine: pairs of runs, one with its own choice, one with all threads
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.graphs import available, find_data, store_of
from bench.process import said
from bench.report import SEED, listed, parse, spread, surroundings, table, verdict, write_report

GRAPHS = ("cora", "citeseer")
MODELS: dict[str, dict[str, Any]] = {
    "gcn": {"kind": "gcn", "hidden": [16], "dropout": 0.5},
    "gat": {"kind": "gat", "hidden": [64], "heads": 8, "dropout": 0.6, "activation": "elu"},
}
DOORS = ("command", "torch last", "torch first")
BUSY = 4
"""Processes that do nothing but turn, beside the runs."""
LARGE = (("community", "gcn"), ("arxiv-like", "gcn"))

PYTHON = """
import json, sys
store, model, threads, epochs, first = json.loads(sys.argv[1])
if first: import torch
import mggcn, statistics
kind = {"gcn": mggcn.GCN, "gat": mggcn.GAT}[model.pop("kind")]
model["hidden"] = tuple(model["hidden"])
trainer = mggcn.Trainer(mggcn.load(store), kind(**model), ranks=1, **({"threads": threads} if threads else {}))
print(statistics.median(row["seconds"] for row in trainer.fit(epochs=epochs)))
"""
PYG = """
import json, statistics, sys, time
store, model, threads, epochs, first = json.loads(sys.argv[1])
import mggcn, numpy as np, scipy.sparse, torch
from torch_geometric.nn import GATConv, GCNConv
graph = mggcn.load(store)
indptr, indices = (torch.from_numpy(np.array(a.array(), dtype=np.int64)) for a in (graph.adj.indptr, graph.adj.indices))
rows = torch.repeat_interleave(torch.arange(indptr.numel() - 1), indptr.diff())
edges, labels = torch.stack([rows, indices]), torch.from_numpy(np.array(graph.labels.array())).long()
mask = torch.from_numpy(np.array(graph.splits["train"].array())).bool().ravel()
f, count = graph.features, graph.num_vertices
if hasattr(f, "indptr"):
    values = np.ones(f.indices.array().size) if f.values is None else f.values.array()
    parts = values, f.indices.array(), f.indptr.array()
    dense = scipy.sparse.csr_matrix(parts, shape=(count, graph.num_features)).toarray()
else:
    dense = f.array()
x = torch.from_numpy(np.array(dense, dtype=np.float32))
width, heads, classes, p = model["hidden"][0], model.get("heads", 1), int(labels.max()) + 1, model["dropout"]
if model["kind"] == "gcn":
    one, two, act = GCNConv(x.shape[1], width, cached=True), GCNConv(width, classes, cached=True), torch.relu
else:
    one = GATConv(x.shape[1], width // heads, heads)
    two, act = GATConv(width, classes, 1), torch.nn.functional.elu
optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()], lr=0.01)
seconds = []
for _ in range(epochs):
    began = time.perf_counter()
    optimizer.zero_grad()
    h = torch.nn.functional.dropout(act(one(x, edges)), p)
    loss = torch.nn.functional.cross_entropy(two(h, edges)[mask], labels[mask])
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began)
print(statistics.median(seconds))
"""


@contextlib.contextmanager
def beside(count: int) -> Iterator[None]:
    """Keep `count` processes busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2 * bool(count))
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def epoch_s(door: str, store: Path, model: str, threads: int, epochs: int) -> float:
    """The median epoch of one run in a process of its own."""
    how = MODELS[model]
    if door != "command":
        job = json.dumps([str(store), how, threads, epochs, door == "torch first"])
        return float(said([sys.executable, "-c", PYG if door == "pyg" else PYTHON, job]).split()[-1])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [w for key, value in how.items() for w in ("--set", f"model.{key}={_text(value)}")]
        words += ["--threads", str(threads)] if threads else []
        said([sys.executable, "-m", "mggcn", "train", str(store), *words, "--epochs", str(epochs), "--out", str(out)])
        return float(json.loads((out / "result.json").read_text())["seconds_per_epoch"])


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def small(args: Any) -> tuple[str, Any]:
    """Every door with every choice, quiet and busy."""
    contenders = [(door, threads) for door in DOORS for threads in (0, 1, args.threads)] + [("pyg", 0)]
    shuffled, rows, record, worst = random.Random(SEED), [], [], {"choice": 0.0, "pyg": 0.0}
    for graph in (g for g in GRAPHS if available(g, find_data(args.data))):
        store = store_of(graph, args)
        for model in MODELS:
            for busy in (0, BUSY):
                found: dict[tuple[str, int], list[float]] = {c: [] for c in contenders}
                for number in range(args.rounds):
                    print(f"{graph} {model}, {busy} beside: round {number + 1} of {args.rounds}", file=sys.stderr)
                    with beside(busy):
                        for door, threads in shuffled.sample(contenders, len(contenders)):
                            found[door, threads].append(epoch_s(door, store, model, threads, args.epochs))
                ms = {c: 1e3 * statistics.median(values) for c, values in found.items()}
                for door in DOORS:
                    best = min(ms[door, 1], ms[door, args.threads])
                    ratio, pyg = ms[door, 0] / best, ms[door, 0] / ms["pyg", 0]
                    worst = {"choice": max(worst["choice"], ratio), "pyg": max(worst["pyg"], pyg)}
                    cells = [f"{ms[door, t]:.2f}" for t in (0, 1, args.threads)]
                    rows.append([graph, model, busy, door, *cells, f"{ratio:.2f}", f"{ms['pyg', 0]:.2f}", f"{pyg:.2f}"])
                runs = {f"{door}, {t or 'chosen'}": values for (door, t), values in found.items()}
                record.append({"graph": graph, "model": model, "busy": busy, "seconds": runs})
    head = ["graph", "model", "busy beside", "door", "chosen ms", "1 thread", f"{args.threads} threads"]
    text = table([*head, "chosen / better", "PyG ms", "chosen / PyG"], rows)
    text += "\n" + verdict("worst chosen / better of one and all threads", worst["choice"], 1.2, at_most=True)
    return text + verdict("worst chosen / PyG", worst["pyg"], 1.0, at_most=True), record


def large(args: Any) -> tuple[str, Any]:
    """Pairs of runs on a quiet machine."""
    rows, record, text = [], [], ""
    for graph, model in LARGE:
        store, ratios = store_of(graph, args), []
        for number in range(args.pairs):
            print(f"{graph}: pair {number + 1} of {args.pairs}", file=sys.stderr)
            order = (0, args.threads) if number % 2 else (args.threads, 0)
            seconds = {t: epoch_s("torch last", store, model, t, args.large_epochs) for t in order}
            ratios.append(seconds[0] / seconds[args.threads])
        of = spread(ratios)
        rows.append([graph, model, f"{of['median']:.3f}", f"{of['min']:.3f} .. {of['max']:.3f}"])
        record.append({"graph": graph, "ratios": ratios})
        text += verdict(f"{graph}, chosen / all threads", of["median"], 1.03, at_most=True)
    return table(["graph", "model", "chosen / all threads (median)", "min .. max"], rows) + "\n" + text, record


PARTS = {"small": small, "large": large}


def main(arguments: list[str] | None = None) -> None:
    own: dict[str, dict[str, Any]] = {
        "parts": {"default": "", "help": f"some of {', '.join(PARTS)}, with commas (default: all)"},
        "epochs": {"type": int, "default": 100, "help": "of a small run"},
        "pairs": {"type": int, "default": 20},
        "large-epochs": {"type": int, "default": 20},
    }
    args = parse(__doc__, "scale", "threads", "rounds", "data", "cache", arguments=arguments, **own)
    record: dict[str, Any] = {"surroundings": surroundings()}
    body = ""
    for part in listed(args.parts, list(PARTS)):
        text, record[part] = PARTS[part](args)
        body += f"## {part}\n\n{text}\n"
    write_report("threads", "Threads that runs choose", body, record, args.out)


if __name__ == "__main__":
    main()
