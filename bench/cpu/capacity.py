"""Epochs whose values lie on disk, in a memory control group whose limit counts the page cache, beside all in memory.

sweep  three layers of 256 on 2.4 million vertices, with 1, 1/2, 1/4 and 1/8 of the peak that they have in memory
large  a store that is larger than the limit (--store, --limit, --settings): two epochs, and predictions
pairs  runs that fit in memory, by this checkout and by another (--other PYTHON), in turn
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.graphs import store_of
from bench.process import group_peak, memory_group, mggcn
from bench.report import GIB, SEED, lines, listed, parse, surroundings, table, verdict, write_report
from mggcn.assemble.plan import plan_graph, this_machine
from mggcn.config import Config
from mggcn.config.files import with_settings
from mggcn.graph.store import open_store
from mggcn.memory.pages import DiskRates
from mggcn.planning.op_cost import disk_cost, epoch_cost
from mggcn.train.disk_rates import measure_disk

GRAPH = "community 2.4 M"
MODEL = ("model.kind=gcn", "model.hidden=256,256,256", "model.dropout=0.5", "train.eval_every=0")
EPOCHS = 3
SHARES = (1, 2, 4, 8)
"""The peak in memory is divided by these."""
SLOWER, OF_DISK, WITHIN = 3.0, 1.3, 0.25
"""Times the epoch in memory; times what the disk needs for the bytes that were counted; how far a plan may lie off."""
PAIRS, RATIO = 20, 1.03
PAIRED = (("arxiv-like", "model.hidden=256,256"), ("community 0.1 M", "model.hidden=128,128"))
"""Graphs and settings of the runs in pairs."""


def planned(store: Path, settings: list[str], disk: DiskRates) -> dict[str, float]:
    """Seconds of a step, those of the disk alone, and the peak, as `mggcn plan` says once tune has measured the disk."""
    graph, config = open_store(store), with_settings(Config(), settings)
    machine = dataclasses.replace(this_machine(config), disk=disk)
    plan, _ = plan_graph(config, graph, machine)
    found = {"seconds": epoch_cost(plan, machine).step_s, "bytes": plan.process_bytes}
    if plan.on_disk:
        cost = disk_cost(plan, machine, "train")
        edges = sum(stage.edges for stage in cost.stages)
        found |= {"disk_seconds": cost.disk_s + edges / disk.read, "edges": edges}
    return found


def trained(store: Path, settings: list[str], limit: int, scratch: Path) -> dict[str, Any]:
    """Train, in a control group if there is a limit; return the seconds of epochs, what moved, and the peaks."""
    with tempfile.TemporaryDirectory(prefix="mggcn-capacity-", dir=scratch) as folder:
        run, words = Path(folder) / "run", [word for setting in settings for word in ("--set", setting)]
        command, peak = ["train", str(store), *words, "--out", str(run), "--quiet"], 0
        if limit:
            with memory_group(limit) as group:
                mggcn(*command, group=group)
                peak = group_peak(group)
        else:
            mggcn(*command)
        result = json.loads((run / "result.json").read_text())
        plan = json.loads((run / "plan.json").read_text())["per_rank"][0]
        rows = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    return {
        "seconds": [row["seconds"] for row in rows],
        "losses": [row["loss"] for row in rows],
        "peak": result["measured_peak_bytes"],
        "group_peak": peak,
        "moved": [row["disk_bytes_read"] + row["disk_bytes_written"] for row in rows if "disk_bytes_read" in row],
        "planned_disk": plan.get("disk"),
    }


def sweep(args: Any) -> tuple[str, Any]:
    """The table of the shares of the peak, and what a plan and the disk say.

    A rented disk may move some times as much in one quarter of an hour as in the next, so it is measured between all runs;
    what is said of a run has the mean of before and behind it.
    """
    store, scratch = store_of(GRAPH, args), args.scratch
    settings = [*MODEL, f"train.epochs={EPOCHS}", f"run.threads={args.threads}"]
    memory, rates = [*settings, "run.capacity=memory"], measure_disk(scratch)
    base = trained(store, memory, 0, scratch) | {"planned": planned(store, memory, rates)}
    found: dict[str, Any] = {"memory": base}
    median = statistics.median(base["seconds"][1:])
    cells = ["in memory", f"{base['peak'] / GIB:.2f}", f"{median:.1f}", f"{base['planned']['seconds']:.1f}"]
    rows = [[*cells, *[""] * (len(HEAD) - len(cells))]]
    rates = measure_disk(scratch)
    for share in SHARES:
        print(f"sweep: 1/{share}", file=sys.stderr, flush=True)
        limit = base["peak"] // share
        own = [*settings, "run.capacity=disk", f"run.memory_limit={limit}", f"run.scratch={scratch}"]
        cells = [f"1/{share}: {limit / GIB:.2f} GiB"]
        try:
            one = trained(store, own, limit, scratch) | {"limit": limit}
        except RuntimeError as error:
            one = {"refused": str(error)}
            rows.append([*cells, "refused", *[""] * (len(HEAD) - 2)])
        else:
            behind = measure_disk(scratch)
            between = mean_rates(rates, behind)
            one |= {"disk": dataclasses.asdict(between), "planned": planned(store, own, between)}
            rows.append([*cells, *compared(one, base, between)])
            rates = behind
        found[f"1/{share}"] = one
    text = f"{GRAPH}, {' '.join(MODEL)}. The disk is measured by gigabytes before and behind every run.\n\n"
    if quarter := found["1/4"].get("ratios"):
        met = min(quarter["memory"] / SLOWER, quarter["disk"] / OF_DISK)
        text += verdict("a quarter: the better of both goals, as a share of it", met, 1.0, at_most=True)
        text += verdict("a quarter: planned over measured, off by", abs(quarter["plan"] - 1), WITHIN, at_most=True)
    return text + "\n" + table(HEAD, rows), found


def mean_rates(before: DiskRates, behind: DiskRates) -> DiskRates:
    """The rates at which a byte takes the mean of the seconds that it took before and behind a run."""
    return DiskRates(
        *(2 / (1 / a + 1 / b) for a, b in zip(dataclasses.astuple(before), dataclasses.astuple(behind), strict=True))
    )


HEAD = [
    *("memory", "peak GiB", "s/epoch", "planned s", "times in memory", "GiB read", "GiB written", "GiB of edges"),
    *("disk reads, writes, both MB/s", "times what the disk needs", "GiB on disk", "losses", "bytes"),
]


def compared(one: dict[str, Any], base: dict[str, Any], rates: DiskRates) -> list[str]:
    """The cells of a run from disk beside the one in memory, whose ratios are added to it."""
    moved = one["planned_disk"]["programs"]["train"]
    seconds = statistics.median(one["seconds"][1:])
    one["as_planned"] = set(one["moved"]) == {moved["bytes_read"] + moved["bytes_written"]}
    one["same"] = one["losses"] == base["losses"]
    one["ratios"] = {
        "memory": seconds / statistics.median(base["seconds"][1:]),
        "disk": seconds / one["planned"]["disk_seconds"],
        "plan": one["planned"]["seconds"] / seconds,
    }
    return [
        f"{one['peak'] / GIB:.2f}, {one['group_peak'] / GIB:.2f} with the page cache",
        f"{seconds:.1f}",
        f"{one['planned']['seconds']:.1f}",
        f"{one['ratios']['memory']:.2f}",
        f"{moved['bytes_read'] / GIB:.1f}",
        f"{moved['bytes_written'] / GIB:.1f}",
        f"{one['planned']['edges'] / GIB:.1f}",
        ", ".join(f"{rate / 1e6:.0f}" for rate in (rates.read, rates.write, rates.both)),
        f"{one['ratios']['disk']:.2f}",
        f"{one['planned_disk']['file_bytes'] / GIB:.1f}",
        "same" if one["same"] else "OTHER",
        "exact" if one["as_planned"] else "OTHER",
    ]


def large(args: Any) -> tuple[str, Any]:
    """Two epochs and the predictions of a store that is larger than the limit."""
    settings = [*args.settings.split(), "train.eval_every=0", "train.epochs=2", f"run.threads={args.threads}"]
    own = [*settings, f"run.memory_limit={args.limit}", f"run.scratch={args.scratch}"]
    found: dict[str, Any] = {"planned": planned(args.store, own, measure_disk(args.scratch))}
    with tempfile.TemporaryDirectory(prefix="mggcn-capacity-", dir=args.scratch) as folder:
        run, words = Path(folder) / "run", [word for setting in own for word in ("--set", setting)]
        for name, command in (
            ("train", ["train", str(args.store), *words, "--out", str(run), "--quiet"]),
            ("predict", ["predict", str(run), "--out", str(Path(folder) / "scores.npy")]),
        ):
            began = time.monotonic()
            with memory_group(args.limit) as group:
                mggcn(*command, group=group)
                found[name] = {"seconds": time.monotonic() - began, "group_peak": group_peak(group)}
        found["scores"] = (Path(folder) / "scores.npy").stat().st_size
        result = json.loads((run / "result.json").read_text())
        found["epochs"] = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
        found["peak"], found["disk"] = result["measured_peak_bytes"], result.get("disk_file_bytes")
    plan = found["planned"]
    seconds = [row["seconds"] for row in found["epochs"]]
    rows = [
        ["seconds of an epoch", f"{plan['seconds']:.0f}", ", ".join(f"{s:.0f}" for s in seconds)],
        ["peak of the process, GiB", f"{plan['bytes'] / GIB:.2f}", f"{found['peak'] / GIB:.2f}"],
        [
            "peak of the group with page cache, GiB",
            f"{args.limit / GIB:.2f} allowed",
            f"{found['train']['group_peak'] / GIB:.2f}",
        ],
        ["seconds of the command", "", f"{found['train']['seconds']:.0f}"],
        ["predictions: seconds; GiB of scores", "", f"{found['predict']['seconds']:.0f}; {found['scores'] / GIB:.2f}"],
    ]
    return f"{args.store.name}: {' '.join(own)}\n\n" + table(["", "planned", "measured"], rows), found


def pairs(args: Any) -> tuple[str, Any]:
    """Seconds of an epoch by this checkout over those by another, in pairs whose order is drawn."""
    order, found, text = random.Random(SEED), dict[str, Any](), ""
    for graph, settings in PAIRED:
        store, ratios = store_of(graph, args), list[float]()
        for number in range(PAIRS):
            print(f"pairs: {graph}, {number + 1} of {PAIRS}", file=sys.stderr, flush=True)
            both = {name: 0.0 for name in order.sample(("this", "other"), 2)}
            for name in both:
                both[name] = _epoch(sys.executable if name == "this" else args.other, store, settings, args.threads)
            ratios.append(both["this"] / both["other"])
        found[graph] = ratios
        text += verdict(
            f"{graph}, {settings}: median ratio of {PAIRS} pairs", statistics.median(ratios), RATIO, at_most=True
        )
    return text, found


def _epoch(python: str, store: Path, settings: str, threads: int) -> float:
    """Median seconds of an epoch, after the third, of a run by an interpreter that has mggcn."""
    words = [
        w for s in (settings, "train.eval_every=0", "train.epochs=13", f"run.threads={threads}") for w in ("--set", s)
    ]
    with tempfile.TemporaryDirectory(prefix="mggcn-capacity-") as folder:
        run = Path(folder) / "run"
        command = [*python.split(), "-m", "mggcn", "train", str(store), *words, "--out", str(run), "--quiet"]
        subprocess.run(command, check=True, cwd=folder)
        rows = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    return statistics.median(row["seconds"] for row in rows[3:])


PARTS = {"sweep": sweep, "large": large, "pairs": pairs}


def main(arguments: list[str] | None = None) -> None:
    own: dict[str, dict[str, Any]] = {
        "parts": {"default": "sweep", "help": f"of {', '.join(PARTS)}"},
        "scratch": {"type": Path, "default": Path("build"), "help": "folder of the page file"},
        "store": {"type": Path, "help": "of the part large"},
        "limit": {"type": int, "default": 4 * GIB, "help": "bytes, of the part large"},
        "settings": {"default": "model.hidden=32", "help": "of the part large"},
        "other": {"default": sys.executable, "help": "interpreter of the other checkout, of the part pairs"},
    }
    args = parse(__doc__, "scale", "threads", "data", "cache", arguments=arguments, **own)
    args.scratch = args.scratch.absolute()
    args.scratch.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"surroundings": surroundings()}
    body = ""
    parts = listed(args.parts, tuple(PARTS))
    for part in parts:
        text, record[part] = PARTS[part](args)
        body += f"## {part}\n\n{text}\n\n"
    if "sweep" in record:
        found = {share: record["sweep"][f"1/{share}"].get("ratios") for share in SHARES}
        points = [(1 / share, ratios["memory"]) for share, ratios in found.items() if ratios]
        record["plots"] = lines(
            "Epochs with values on disk", "times the epoch in memory", "share of the peak in memory", {GRAPH: points}
        )
    write_report("-".join(["capacity", *parts]), "Values on disk", body, record, args.out)


if __name__ == "__main__":
    main()
