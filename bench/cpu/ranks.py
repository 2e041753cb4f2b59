"""Whole runs of `mggcn train` on several ranks of one machine, and sweeps over many.

threads  ranks times threads on the arxiv-like graph, over both transports, one of each in turn
delays   DistGNN's delays at P = 1, 2, 4: seconds, memory, bytes sent (its figures 5 and 6, table 6)
lag      cd-0 and cd-5 on a network on which every message takes a while
sweep    `mggcn sweep` over 12 settings of Cora beside 12 times `mggcn train`, one after the other, in turn
edges    bytes and messages of batches whose edges are drawn by their owners, beside a dry run's
relays   rows and edges of batches from their owners on a network on which every message takes a while
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

from bench.graphs import available, find_data, store_of
from bench.process import mggcn
from bench.report import MIB, SEED, listed, milliseconds, parse, spread, surroundings, table, write_report

GRAPH, HIDDEN = "arxiv-like", "256,256"
WAYS = [(1, 1, "single"), (1, 2, "single"), (2, 1, "threads"), (2, 1, "gloo")]
"""Ranks, threads of each, transport."""
RANKS = (1, 2, 4)
COST = ("amazon_computers", "facebook_pages")
DELAYS = {
    "cd-0": ("0", "reuse"),
    "cd-5 reuse": ("5", "reuse"),
    "cd-5 discard": ("5", "discard"),
    "0c": ("none", "reuse"),
}
SAGE = {"model.kind": "sage", "model.hidden": "64", "model.dropout": "0.5"}


def words_of(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def trained(store: Path, settings: dict[str, Any], epochs: int) -> dict[str, Any]:
    """What a run says of itself, and the plan of its largest rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = words_of(settings | {"train.eval_every": 0})
        mggcn("train", str(store), *words, "--epochs", str(epochs), "--out", str(out), "--quiet")
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        ranks = json.loads((out / "plan.json").read_text())["per_rank"]
    return result | {"rank": max(ranks, key=lambda rank: rank["total_bytes"])}


def threads(args: Any) -> tuple[str, Any]:
    """Seconds and peaks by ranks, threads and transport, shuffled in every round."""
    store, runs = store_of(GRAPH, args), {f"{p} x {t}, {transport}": [] for p, t, transport in WAYS}  # type: ignore[var-annotated]
    shuffled = random.Random(SEED)
    for number in range(args.rounds):
        print(f"threads: round {number + 1} of {args.rounds}", file=sys.stderr)
        for p, t, transport in shuffled.sample(WAYS, len(WAYS)):
            settings = {"model.hidden": HIDDEN, "run.order": "locality"}
            settings |= {"run.ranks": p, "run.threads": t, "run.transport": transport}  # type: ignore[dict-item]
            runs[f"{p} x {t}, {transport}"].append(trained(store, settings, 5))
    times = {name: spread([run["seconds_per_epoch"] for run in found]) for name, found in runs.items()}
    base = next(iter(times.values()))["median"]
    rows = [
        [
            name,
            *milliseconds(of),
            f"{base / of['median']:.2f}",
            f"{max(r['measured_peak_bytes'] for r in runs[name]) / MIB:.0f}",
        ]
        for name, of in times.items()
    ]
    head = ["ranks x threads", "ms/epoch (median)", "min .. max", "times as fast as the first", "peak MiB of a process"]
    return f"{GRAPH}, hidden {HIDDEN}.\n\n{table(head, rows)}", runs


def delays(args: Any) -> tuple[str, Any]:
    """Seconds, memory and bytes of each delay; ranks are threads of this machine's cores."""
    rows, runs = [], []
    for name in (name for name in COST if available(name, find_data(args.data))):
        for ranks in RANKS:
            for label, (delay, stale) in DELAYS.items() if ranks > 1 else [("P = 1", ("", ""))]:
                settings = SAGE | {"run.ranks": ranks, "run.threads": 1}
                if ranks > 1:
                    settings |= {"run.transport": "threads", "run.strategy": "delayed"}
                    settings |= {"run.delay": delay, "run.stale_aggregates": stale}
                found = trained(store_of(name, args), settings, 30)
                regions = found["rank"]["regions"]
                moving = found["rank"]["total_bytes"] - regions["runtime"]
                kept = regions.get("messages and sums in flight", 0)
                runs.append({"graph": name, "ranks": ranks, "run": label, **found})
                cells = [f"{1e3 * found['seconds_per_epoch']:.1f}", f"{moving / MIB:.1f}", f"{kept / MIB:.1f}"]
                rows.append([name, ranks, label, *cells, f"{(found['bytes_sent_per_epoch'] or 0) / MIB:.2f}"])
    return table(
        ["graph", "P", "run", "ms/epoch", "MiB of a rank", "of it in flight", "MiB sent by rank 0"], rows
    ), runs


class Late:
    """An event that is not over before a moment."""

    def __init__(self, inner: Any, moment: float) -> None:
        self._inner, self._moment = inner, moment

    def wait(self) -> None:
        self._inner.wait()
        time.sleep(max(0.0, self._moment - time.monotonic()))


class Lagging:
    """A communicator whose broadcasts and all-to-alls are over no sooner than `seconds` after they started.

    Sums over ranks are not held back: every strategy waits for those of the gradients once an epoch.
    """

    def __init__(self, inner: Any, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def broadcast(self, *args: Any, **more: Any) -> Late:
        return Late(self._inner.broadcast(*args, **more), time.monotonic() + self._seconds)

    def all_to_all(self, *args: Any, **more: Any) -> Late:
        return Late(self._inner.all_to_all(*args, **more), time.monotonic() + self._seconds)


def lagged(made: tuple[Any, ...], seconds: float, epochs: int, comm: Any) -> list[float]:
    """Train on one rank; return the seconds of each epoch."""
    from mggcn.assemble.rank import make_rank

    rank, found = make_rank(*made, cast(Any, Lagging(comm, seconds))), []
    for epoch in range(epochs):
        began = time.perf_counter()
        rank.trainer.step(epoch)
        found.append(time.perf_counter() - began)
    rank.trainer.runtime.state()  # every message has come
    return found


def lag(args: Any) -> tuple[str, Any]:
    """Epoch seconds of two ranks with messages that are on their way for 0 or args.lag seconds."""
    from mggcn.assemble.plan import plan_graph, resolve
    from mggcn.comm.threads import run_threads
    from mggcn.config import from_tables
    from mggcn.graph.store import open_store

    graph = open_store(store_of(args.lagging, args))
    rows, runs = [], {}
    for label, delay in (("cd-0", "0"), ("cd-5", "5")):
        run = {
            "ranks": 2,
            "threads": 1,
            "transport": "threads",
            "strategy": "delayed",
            "delay": delay,
            "stale_aggregates": "reuse",
        }
        tables = {
            "model": {"kind": "sage", "hidden": [128, 128], "dropout": 0.5},
            "train": {"eval_every": 0},
            "run": run,
        }
        config = resolve(from_tables(tables), graph)
        plan, partition = plan_graph(config, graph)
        made, epochs = (config, graph, plan, partition), 10 + 4 * args.rounds
        for seconds in (0.0, args.lag):
            times = run_threads(2, partial(lagged, made, seconds, epochs), 300)[0]
            runs[f"{label}, {seconds:g} s"] = times[10:]
        without, late = (spread(runs[f"{label}, {seconds:g} s"])["median"] for seconds in (0.0, args.lag))
        messages = plan.ranks[0].messages(plan.ranks[0].train) - 2
        cells = [
            f"{1e3 * without:.0f}",
            f"{1e3 * late:.0f}",
            f"{late / without:.2f}",
            f"{(late - without) / args.lag:.2f}",
        ]
        rows.append([label, messages, *cells])
    head = ["run", "messages", "ms/epoch", f"with {1e3 * args.lag:.0f} ms a message", "ratio", "lags paid"]
    return f"{args.lagging}, hidden 128,128, P = 2.\n\n" + table(head, rows), runs


RELAYS: dict[str, dict[str, Any]] = {
    "rows mapped": {},
    "rows from their owners": {"rows": "owners"},
    "rows from their owners, sample.ahead = 0": {"rows": "owners", "ahead": 0},
    "edges and rows from their owners": {"rows": "parts"},
    "edges and rows from their owners, sample.ahead = 0": {"rows": "parts", "ahead": 0},
}
"""Settings of [sample] under which a step waits for nothing, for one message at a time, or for all, one after the other."""


def relays(args: Any) -> tuple[str, Any]:
    """Seconds of a step on batches of two ranks, with messages of rows that are on their way for 0 or args.lag seconds."""
    from mggcn.assemble.plan import plan_graph, resolve
    from mggcn.comm.threads import run_threads
    from mggcn.config import from_tables
    from mggcn.graph.store import open_store

    graph, rows, runs = open_store(store_of(args.lagging, args)), [], {}
    for label, sample in RELAYS.items():
        tables = {
            "model": {"kind": "sage", "aggregator": "mean", "hidden": [16]},
            "train": {"epochs": 2, "eval_every": 0},
            "sample": {"batch": 100, "fanout": [10, 5]} | sample,
            "run": {"ranks": 2, "threads": 1, "transport": "threads"},
        }
        config = resolve(from_tables(tables), graph)
        plan, partition = plan_graph(config, graph)
        made = (config, graph, plan, partition)
        found = [run_threads(2, partial(lagged, made, s, 2), 300)[0][1] / plan.steps for s in (0.0, args.lag)]
        runs[label] = {"steps": plan.steps, "seconds": found}
        rows.append([label, *(f"{1e3 * s:.0f}" for s in found), f"{found[1] / max(found[0], args.lag):.2f}"])
    head = ["", "ms/step", f"with {1e3 * args.lag:.0f} ms a message", "over the longer of computing and one message"]
    return f"{args.lagging}, P = 2, the second epoch of two.\n\n{table(head, rows)}", runs


GRID: dict[str, list[Any]] = {
    "train.lr": [0.005, 0.01, 0.02],
    "model.dropout": [0.5, 0.8],
    "model.hidden": [[16], [64]],
}
"""Settings of the sweep's trials."""


def sweep(args: Any) -> tuple[str, Any]:
    """Seconds of a sweep and of as many runs, from start to end of each command."""
    store, runs = store_of("cora", args), {"sweep": [], "train": []}  # type: ignore[var-annotated]
    points = [dict(zip(GRID, point, strict=True)) for point in itertools.product(*GRID.values())]
    for number in range(args.rounds):
        print(f"sweep: round {number + 1} of {args.rounds}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as name:
            grid = Path(name) / "grid.toml"
            varied = "\n".join(f"{key} = {json.dumps(values)}" for key, values in GRID.items())
            grid.write_text(f"[train]\nepochs = 200\n\n[grid]\n{varied}\n")
            began = time.perf_counter()
            mggcn("sweep", str(grid), str(store), "--out", str(Path(name) / "sweep"), "--quiet")
            runs["sweep"].append(time.perf_counter() - began)
            began = time.perf_counter()
            for k, point in enumerate(points):
                words = words_of({key: str(value).strip("[]") for key, value in point.items()})
                mggcn("train", str(store), *words, "--epochs", "200", "--out", str(Path(name) / f"run{k}"), "--quiet")
            runs["train"].append(time.perf_counter() - began)
    rows = [[name, *milliseconds(spread(found))] for name, found in runs.items()]
    share = spread(runs["sweep"])["median"] / spread(runs["train"])["median"]
    head = ["12 settings, 200 epochs each", "ms (median)", "min .. max"]
    verdict = "met" if share <= 0.5 else "MISSED"
    return f"Cora. The sweep takes {share:.2f} of the separate runs ({verdict}, goal 0.5).\n\n{table(head, rows)}", runs


ORDERS = ("random", "metis-balanced")
STEPS = 48
"""Steps of an epoch with which a batch of 4,096 cuts products' training vertices."""


def sent_in_an_epoch(made: tuple[Any, ...], comm: Any) -> tuple[int, int]:
    """Train an epoch on one rank; return the bytes that it sent, and its messages."""
    from mggcn.assemble.rank import make_rank

    rank = make_rank(*made, comm)
    before = rank.comm.bytes_sent, rank.comm.messages
    rank.trainer.step(0)
    return rank.comm.bytes_sent - before[0], rank.comm.messages - before[1]


def edges(args: Any) -> tuple[str, Any]:
    """Bytes and messages of an epoch on four ranks that hold the edges of their own vertices alone, beside a dry run's."""
    from mggcn.assemble.plan import plan_graph, resolve
    from mggcn.assemble.stack import read_rows
    from mggcn.blocks.letters import num_stages
    from mggcn.comm.threads import run_threads
    from mggcn.config import from_tables
    from mggcn.graph.splits import training_rows
    from mggcn.graph.store import open_store
    from mggcn.partition.rows.partition import row_owners
    from mggcn.planning.batch_rows import row_bytes_of
    from mggcn.planning.batches import answer_plan

    graph, rows, runs = open_store(store_of(args.drawn, args)), [], []
    training = training_rows(graph, "main", 0)
    assert training is not None
    sample = {"batch": max(4, round(training.sum() / STEPS)), "fanout": [15, 10, 5]}
    for order, ahead in itertools.product(ORDERS, (2, 0)):
        sent: dict[str, tuple[int, int]] = {}
        for kind in ("mapped", "parts"):
            tables = {
                "model": {"kind": "sage", "aggregator": "mean", "hidden": [16, 16]},
                "train": {"epochs": 1, "eval_every": 0},
                "sample": sample | {"ahead": ahead, "rows": kind},
                "run": {"ranks": 4, "threads": 1, "transport": "threads", "order": order},
            }
            config = resolve(from_tables(tables), graph)
            plan, partition = plan_graph(config, graph)
            made = (config, graph, plan, partition)
            found = run_threads(4, partial(sent_in_an_epoch, made), 600)
            sent[kind] = sum(nbytes for nbytes, _ in found), found[0][1]
        owner = row_owners(partition).owner_of(slice(None))
        drawn = read_rows(config, graph, plan.shape, owner, (1,), most=2**31)
        planned = drawn.letter_bytes(1, row_bytes_of(config, graph.num_features), answer_plan(config, plan.shape))
        counted = [of - base for of, base in zip(sent["parts"], sent["mapped"], strict=True)]
        stages = num_stages(3)
        messages = plan.steps + 3 * stages - 2 if ahead else 2 * stages * plan.steps
        far = 1 - float(drawn.asked.sum((0, 2)).trace() / drawn.asked.sum())
        runs.append(
            {"order": order, "ahead": ahead, "bytes": [counted[0], planned], "messages": [counted[1], messages]}
        )
        cells = [f"{far:.2f}", f"{counted[0]:,}", f"{planned:,}", f"{counted[1]:,}", f"{messages:,}"]
        rows.append([order, ahead, plan.steps, *cells])
    head = [
        "order",
        "sample.ahead",
        "steps",
        "share of vertices that others draw around",
        "bytes counted",
        "bytes planned",
    ]
    head += ["messages counted", "messages planned"]
    return f"{args.drawn} at {args.scale:g}, P = 4, fan-outs 15,10,5, an epoch.\n\n{table(head, rows)}", runs


PARTS = {
    "threads": threads,
    "delays": delays,
    "lag": lag,
    "sweep": sweep,
    "edges": edges,
    "relays": relays,
}


def options(arguments: list[str] | None = None) -> Any:
    own: dict[str, dict[str, Any]] = {
        "parts": {"default": ",".join(PARTS)},
        "lag": {"type": float, "default": 0.2, "help": "seconds that a message takes"},
        "lagging": {"default": "amazon_computers", "help": "the graph of that part"},
        "drawn": {"default": "products-like, 8 % train", "help": "the graph whose batches are drawn by owners"},
    }
    return parse(__doc__, "scale", "rounds", "data", "cache", arguments=arguments, **own)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    record: dict[str, Any] = {"surroundings": surroundings()}
    body = ""
    for part in listed(args.parts, list(PARTS)):
        text, record[part] = PARTS[part](args)
        body += f"## {part}\n\n{text}\n"
    write_report("ranks", "Ranks and threads of one machine", body, record, args.out)


if __name__ == "__main__":
    main()
