"""The tables and figures of the five papers behind mggcn: what is published, ours, how it was had, and a verdict.

python -m bench.papers PAPER [ITEM] [--scale S] [--dry]: PAPER is mg-gcn, distgnn, distdgl, distgnn-mb or batchgnn, ITEM one
of its tables or figures. --dry lists them, what each does and needs, and computes nothing. The exit status is 1 if a bar is
missed.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench import plots
from bench.graphs import available, find_data
from bench.papers.items import HEAD, HOW, PAPERS, Item, Ours, Paper, judge, read_paper
from bench.peers.libraries import find_peers
from bench.report import parse, surroundings, table, write_report
from mggcn.cost.machine import shipped_machines
from mggcn.errors import MggcnError

SCALE = 0.1
"""Of generated graphs: with it each item ends within minutes on two cores."""
Run = Callable[[Paper, Item, Any], Ours]


def runs_of(name: str) -> dict[str, Run]:
    """Return what computes each item of a paper, but those that only other hardware gives."""
    runs: dict[str, Run] = importlib.import_module(f"bench.papers.{name.replace('-', '_')}").RUNS
    return runs


def lacking(item: Item, args: Any) -> list[str]:
    """Return what an item needs and is not here, each with its kind."""
    found = []
    for need in item.needs:
        kind, _, name = need.partition(" ")
        there = {
            "graph": lambda name: available(name, find_data(args.data)),
            "machine": lambda name: name in shipped_machines(),
            "peer": lambda name: name in find_peers(args.peers),
            "package": lambda name: importlib.util.find_spec(name) is not None,
            "hardware": lambda name: False,
        }[kind]
        found += [] if there(name) else [f"{kind} {name}"]
    return found


def listed(paper: Paper, items: list[Item], args: Any) -> str:
    """Say of every item what it will do and need."""
    rows = []
    for item in items:
        absent = lacking(item, args)
        needs = ", ".join(f"{need} (absent)" if need in absent else need for need in item.needs) or "nothing"
        takes = f"{item.takes:g} s" if item.is_run else ""
        bars = "; ".join(bar.text for bar in item.bars) or "none"
        rows.append([item.name, item.where, item.how, item.does, needs, takes, bars])
    return f"{paper.title}\n\n" + table(["item", "where", "how", "what it does", "needs", "about", "bar"], rows)


def run_item(paper: Paper, item: Item, run: Run | None, args: Any) -> dict[str, Any]:
    """Compute an item; one that fails says so, and the others go on."""
    began = time.perf_counter()
    absent = lacking(item, args)
    try:
        ours = Ours(values={}, absent=absent) if run is None else run(paper, item, args)
        ours.absent = list(dict.fromkeys([*ours.absent, *absent]))
        outcome = judge(item, ours, args.scale)
        verdict, failed, rows = outcome.verdict, outcome.failed, outcome.rows
    except (MggcnError, RuntimeError, subprocess.SubprocessError) as error:
        ours, verdict, failed, rows = Ours(values={}), f"FAILED: {error}", True, []
    print(f"{paper.name} {item.name}: {verdict}", file=sys.stderr)
    facts = {"item": item.name, "how": item.how, "verdict": verdict, "failed": failed}
    facts |= {"seconds": time.perf_counter() - began, "published": dict(item.published), "ours": ours.values}
    return facts | {"rows": rows, "text": ours.text, "reason": ours.reason, "plots": ours.plots, "facts": ours.facts}


def described(item: Item, found: dict[str, Any]) -> str:
    """A section of the report."""
    how = "; ".join(f"{letter}, {HOW[letter]}" for letter in item.how)
    says = f" {item.says}" if item.says else ""
    text = f"## {item.name}: {item.title}\n\n{item.where}, {item.unit}.{says}\n\nHow: {how}. {item.does}.\n\n"
    text += table(HEAD, found["rows"]) if found["rows"] else ""
    text += f"\n**{found['verdict']}**\n"
    text += f"\n{found['reason']}\n" if found["reason"] and found["failed"] else ""
    return text + (f"\n{found['text'].rstrip()}\n" if found["text"] else "") + "\n"


def summary(results: list[dict[str, Any]]) -> str:
    """The verdicts by item."""
    rows = [[found["item"], found["how"], found["verdict"], f"{found['seconds']:.1f}"] for found in results]
    return table(["item", "how", "verdict", "s"], rows)


def options(arguments: list[str] | None = None) -> Any:
    own: dict[str, dict[str, Any]] = {
        "paper": {"choices": PAPERS, "positional": True},
        "item": {"nargs": "?", "default": "", "help": "one of the paper's, as --dry lists them; default: all"},
        "scale": {"type": float, "default": SCALE, "help": "of generated graphs; bars that need more say so"},
        "dry": {"action": "store_true", "help": "list the items, what each does and needs, and compute nothing"},
        "rounds": {"type": int, "default": 3, "help": "timed turns of each contender"},
        "epochs": {"type": int, "default": 0, "help": "of trainings; 0: each item's, times the scale"},
    }
    own["item"]["positional"] = True
    return parse(__doc__, "threads", "data", "cache", "peers", arguments=arguments, **own)


def main(arguments: list[str] | None = None) -> int:
    args = options(arguments)
    paper = read_paper(args.paper)
    items = [paper.item(args.item)] if args.item else list(paper.items)
    if args.dry:
        print(listed(paper, items, args))
        return 0
    around, runs = surroundings(), runs_of(paper.name)
    results = [run_item(paper, item, runs.get(item.name), args) for item in items]
    body = f"{paper.title}. {paper.source}\n\nScale {args.scale:g} of generated graphs.\n\n{summary(results)}\n"
    body += "".join(described(item, found) for item, found in zip(items, results, strict=True))
    record = {"surroundings": around, "paper": paper.name, "scale": args.scale, "items": results}
    record["plots"] = [plot for found in results for plot in found["plots"]]
    what = "-".join(["papers", paper.name, *([args.item] if args.item else [])])
    path = write_report(what, f"{paper.name}: published and ours", body, record, args.out)
    if record["plots"]:
        plots.main(path)
    if failed := [found["item"] for found in results if found["failed"]]:
        print(f"bars missed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
