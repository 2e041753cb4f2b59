"""Epochs of mggcn by its settings, in processes of their own, in turn: what one part of it gains, costs and keeps.

pruning       epochs that leave out rows that nothing reads; one layer's share: `mggcn train --timeline`
sparse-input  sparse features kept sparse, and as a dense matrix
order         random ids and the order by locality, of which cpu/locality.py says more
setup         planning and set-up without the order, with it made now, and kept
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.contest import Case, Contenders, Found, compare, described, extents, wrong
from bench.graphs import available, find_data, store_of
from bench.peers.epochs import BASE
from bench.peers.epochs import CASES as NETWORKS
from bench.report import listed, parse, surroundings, table, write_report
from mggcn.graph.store import open_store
from mggcn.partition.cache.cuts import users_cuts

GOAL_EPOCHS, PAYS_BACK = 3, 20
"""The order may cost so many epochs, or must have paid for itself after PAYS_BACK."""
Settings = dict[str, dict[str, Any]]
"""Run settings by contender, the base first."""
PRUNED = [
    Case("cora", (64,)),
    Case("amazon_computers", (512, 512)),
    Case("coauthor_cs", (512,)),
    Case("arxiv-like", (256, 256)),
    Case("products-like, 8 % train", (128, 128)),
    Case("products-like, 0.2 % train", (128, 128)),
]
RANDOM_IDS = ("products-like", "arxiv-like", "reddit-like, 128 features", "R-MAT, 2^17", "cnr_2000, relabelled")
RANDOM_IDS += ("dblp_2010, relabelled",)
EXPERIMENTS: dict[str, tuple[list[Case], Settings, dict[str, Any]]] = {
    "pruning": (PRUNED, {"all rows": {"prune": "off"}, "pruned": {"prune": "auto"}}, {"dropout": 0.5}),
    "sparse-input": (
        [Case("coauthor_cs", (64,)), Case("coauthor_cs", (512,))],
        {"dense": {"features": "dense"}, "auto": {"features": "auto"}},
        {},
    ),
    "order": (
        [Case(graph, (128, 128)) for graph in RANDOM_IDS],
        {"random ids": {"order": "none"}, "by locality": {"order": "locality"}},
        {},
    ),
    "setup": (
        list(NETWORKS.values()),
        {"no order": BASE | {"order": "none"}, "order made": BASE, "order kept": BASE},
        {},
    ),
}


def predicted(found: Found) -> str:
    """The plan's seconds of sparse products, over the first contender's."""
    sparse = {name: ready["predicted"].get("sparse", 0.0) for name, ready in found["prepared"].items()}
    first = next(iter(sparse.values()), 0.0)
    told = ", ".join(f"{name} {first / s:.2f}" for name, s in list(sparse.items())[1:] if s)
    return f"\nSparse products, predicted: times as fast as the first: {told}.\n" if told else ""


def forget(store: Path) -> None:
    """Remove what runs, and `mggcn tune --store`, have kept of a store's graph."""
    (store / "tuned.json").unlink(missing_ok=True)
    shutil.rmtree(users_cuts(open_store(store)), ignore_errors=True)


def set_up_cost(found: Found) -> dict[str, float]:
    """Seconds that making the order adds to set-up; the same in epochs; and when the order has paid for it."""
    whole = {name: ready["plan_seconds"] + ready["rank_seconds"] for name, ready in found["prepared"].items()}
    epoch = {name: line["median"] for name, line in found["seconds"].items()}
    extra, saved = whole["order made"] - whole["no order"], epoch["no order"] - epoch["order kept"]
    pays_back = extra / saved if saved > 0 else float("inf")
    return {"order_s": extra, "in_epochs": extra / epoch["order kept"], "pays_back": pays_back}


def set_up_row(found: Found) -> list[str]:
    cost = set_up_cost(found)
    met = cost["in_epochs"] <= GOAL_EPOCHS or cost["pays_back"] <= PAYS_BACK
    cells = [f"{cost['order_s']:.2f}", f"{cost['in_epochs']:.1f}", f"{cost['pays_back']:.1f}"]
    return [found["case"], *cells, "met" if met else "MISSED"]


def measure(what: str, case: Case, store: Path, args: Any) -> Found:
    """Compare the contenders of an experiment on one case; `setup` on a copy of the store, which keeps the order."""
    _, settings, model = EXPERIMENTS[what]
    contenders = Contenders(case, store, args.threads, machine=args.machine)
    starts = {name: contenders.own(run, model=model) for name, run in settings.items()}
    print(f"{what}: {case.name}", file=sys.stderr)
    n, nnz = extents(store)
    facts = {"case": case.name, "what": what, "vertices": n, "nonzeros": nnz}
    if what != "setup":
        return facts | compare(starts, args.rounds)
    with tempfile.TemporaryDirectory(prefix="mggcn-setup-", dir=args.cache) as folder:
        copy = Path(folder) / store.name
        shutil.copytree(store, copy, ignore=shutil.ignore_patterns("partitions", "tuned.json"))
        forget(copy)
        contenders = Contenders(case, copy, args.threads)
        starts = {name: contenders.own(run) for name, run in settings.items()}
        return facts | compare(starts, args.rounds)


def describe(results: list[Found], args: Any) -> str:
    text = f"Scale {args.scale:g}, {args.threads} threads, {args.rounds} rounds in shuffled order, malloc tuned.\n"
    for found in results:
        sizes = f"{found['vertices']:,} vertices, {found['nonzeros']:,} nonzeros"
        text += f"\n## {found['what']}: {found['case']}\n\n{sizes}.\n\n{described(found, args.threads)}"
        text += predicted(found) if found["what"] == "order" else ""
    rows = [set_up_row(found) for found in results if found["what"] == "setup" and len(found["seconds"]) == 3]
    goal = f"goal: {GOAL_EPOCHS} epochs, or back in {PAYS_BACK}"
    head = ["case", "order s", "in epochs", "paid back after", goal]
    return text + (f"\n## What set-up costs\n\n{table(head, rows)}" if rows else "")


def options(arguments: list[str] | None = None) -> Any:
    own: dict[str, dict[str, Any]] = {
        "what": {"default": ",".join(EXPERIMENTS), "help": "experiments"},
        "graphs": {"default": "", "help": "names of some of the graphs, separated by semicolons (default: all)"},
        "machine": {"default": "assumed-cpu", "help": "machine of the predictions: a name, or a file of mggcn tune"},
    }
    return parse(__doc__, "scale", "threads", "rounds", "data", "cache", arguments=arguments, **own)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    whats, results = listed(args.what, list(EXPERIMENTS)), []
    around = surroundings()
    for what in whats:
        for case in EXPERIMENTS[what][0]:
            wanted = not args.graphs or case.graph in args.graphs.split(";")
            if wanted and available(case.graph, find_data(args.data)):
                results.append(measure(what, case, store_of(case.graph, args), args))
    record = {"surroundings": around, "measured": results}
    write_report("-".join(["epochs", *whats]), "Epochs by settings", describe(results, args), record, args.out)
    if faults := wrong(results):
        sys.exit("the contenders do not compute the same: " + "; ".join(faults))


if __name__ == "__main__":
    main()
