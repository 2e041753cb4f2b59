"""Training epochs of mggcn, DGL and PyG: what each does of itself, with A X computed once for all, mggcn's switches, sizes.

mggcn computes A X once of itself. Its rows are float32 in the order by locality without pruning, unless they say otherwise.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.contest import OWN, Case, Contenders, Found, bound_of, compare, described, extents, wrong
from bench.cpu import ceilings
from bench.graphs import available, find_data, store_of
from bench.peers.libraries import Peers, find_peers, missing_text
from bench.process import memory_free
from bench.report import GIB, bars, lines, listed, parse, surroundings, table, verdict, write_report

PARTS = {
    "peers": "What each library does of itself",
    "precomputed": "A X computed once for all",
    "switches": "mggcn's switches",
    "sizes": "A growing graph",
}
CASES = {
    case.name: case
    for case in (
        Case("reddit-like", (512,), 4.0, 6.0, of_bound=0.75),
        Case("reddit-like", (256, 256), 3.0, 6.0, of_bound=0.75),
        Case("arxiv-like", (16,), 2.0, 4.0),
        Case("arxiv-like", (512,), 1.5, 2.5, bf16_over_dgl=2.5, of_bound=0.6),
        Case("arxiv-like", (256, 256), 1.5, 2.5, bf16_over_dgl=2.5, of_bound=0.6),
        Case("cnr_2000", (128, 128)),
        Case("dblp_2010", (128, 128)),
        Case("amazon_computers", (512, 512)),
    )
}
SIZES = [Case("arxiv-like", (128,), edges=n) for n in (1, 2, 4, 8, 16)]
SIZES += [Case("arxiv-like", (128,), edges=n, vertices=n) for n in (2, 4, 8, 16)]
MEMORY_OF_DGL = 0.6
"""Largest accepted peak memory of a process, over that of DGL's."""
BASE = {"order": "locality", "prune": "off"}
ALL_ON = {"order": "locality", "prune": "auto", "precision": "bf16"}
SWITCHES: dict[str, tuple[dict[str, str], bool]] = {
    "all switches on": (ALL_ON, False),
    "without the order by locality": (ALL_ON | {"order": "none"}, False),
    "without panels, blocks and rows ahead": (ALL_ON, True),
    "without pruning": (ALL_ON | {"prune": "off"}, False),
    "without bf16": (ALL_ON | {"precision": "fp32"}, False),
    "all switches off": ({"order": "none", "prune": "off"}, True),
}
"""Settings, and whether products are plain (DistGNN, figure 4)."""
PYG_KINDS = ("fused", "scaled", "csr", "sparse", "scatter")
PILOT_ROUNDS = 2
SHARE_OF_FREE = 0.6
OF_MATRICES, OF_EDGES = {OWN: 4, "DGL": 12, "PyG": 15}, {OWN: 12, "DGL": 60, "PyG": 60}
"""About how many matrices of a hidden layer's size, and bytes a nonzero, a process holds at its peak (scaling's report)."""


def fastest_pyg(contenders: Contenders, peers: Peers) -> tuple[str, dict[str, Any]]:
    """Try every way of PyG alone; return the fastest one and the seconds of all, "" if there is none."""
    found: dict[str, Any] = {}
    # Autograd keeps about eight times the messages that are written out.
    messages = 8 * 4 * extents(contenders.store)[1] * max(contenders.case.hidden)
    for kind in PYG_KINDS if "pyg" in peers else ():
        if kind == "sparse" and "torch-sparse" not in peers:
            found[kind] = peers.faults["torch-sparse"]
        elif kind == "scatter" and messages > SHARE_OF_FREE * memory_free():
            found[kind] = "its messages need more than the free memory"
        else:
            tried = compare({kind: contenders.peer("pyg", kind=kind)}, PILOT_ROUNDS)
            found[kind] = tried["left_out"].get(kind) or tried["seconds"][kind]["median"]
    timed = {kind: value for kind, value in found.items() if isinstance(value, float)}
    return min(timed, key=timed.__getitem__, default=""), found


def starts_of(part: str, contenders: Contenders, peers: Peers, pyg: str) -> dict[str, Any]:
    """What starts every contender of a part; the first one writes the weights."""
    starts = {OWN: contenders.own(BASE, keep=True)}
    if part == "switches":
        runs = {name: contenders.own(run, plain_rows=plain) for name, (run, plain) in SWITCHES.items()}
        return starts | runs
    if part == "peers":
        starts[f"{OWN} bf16"] = contenders.own(BASE | {"precision": "bf16"})
        starts[f"{OWN} prune"] = contenders.own(BASE | {"prune": "auto"})
    once = part == "precomputed"
    if "dgl" in peers:
        starts["DGL"] = contenders.peer("dgl", precomputed=once)
    if pyg:
        starts["PyG" if part == "sizes" else f"PyG {pyg}"] = contenders.peer("pyg", kind=pyg, precomputed=once)
    return starts


def what_fits(need: dict[str, int], free: int) -> tuple[dict[str, str], bool]:
    """Who is not run, with the reason, and whether the others run one after the other; bytes needed and free."""
    left_out = {
        name: f"not run: it needs about {nbytes / GIB:.0f} GiB, {free / GIB:.0f} are free"
        for name, nbytes in need.items()
        if nbytes > 0.9 * free
    }
    return left_out, sum(nbytes for name, nbytes in need.items() if name not in left_out) > 0.7 * free


def measure(case: Case, parts: list[str], peers: Peers, args: Any) -> list[Found]:
    """All comparisons of one case."""
    store = store_of(case.graph, args, vertices=case.vertices, edges=case.edges)
    contenders = Contenders(case, store, args.threads, peers.python)
    n, nnz = extents(store)
    pyg, pilots, found = "scaled" if "pyg" in peers else "", {}, []
    if {"peers", "precomputed"} & set(parts):
        contenders.own(BASE, keep=True)("tuned").kill()  # it has written the weights
        pyg, pilots = fastest_pyg(contenders, peers)
    for part in parts:
        starts, left_out, alone = starts_of(part, contenders, peers, pyg), {}, False
        if part == "sizes":
            need = {c: OF_MATRICES[c] * 4 * n * max(case.hidden) + OF_EDGES[c] * nnz for c in starts}
            left_out, alone = what_fits(need, memory_free())
            starts = {name: start for name, start in starts.items() if name not in left_out}
        for malloc in args.malloc.split(",") if part == "peers" else ["tuned"]:
            print(f"{case.name}: {part}, malloc {malloc}", file=sys.stderr)
            compared = compare(starts, args.rounds, malloc, alone=alone)
            compared["left_out"] |= left_out
            facts = {"case": case.name, "part": part, "vertices": n, "nonzeros": nnz, "pilots": pilots}
            found.append(facts | compared)
    return found


def verdicts(case: Case, found: Found, figures: Found) -> str:
    """How a case's goals fared in the comparison of what each library does of itself, as far as contenders ran."""
    times = {name: line["median"] for name, line in found["seconds"].items()}
    if found["part"] != "peers" or OWN not in times:
        return ""
    text, own, where = "", times[OWN], f"malloc {found['malloc']}"
    if "DGL" in times:
        share = found["peak_bytes"][OWN] / found["peak_bytes"]["DGL"]
        text += verdict(f"{where}: peak memory over DGL's", share, MEMORY_OF_DGL, at_most=True)
    if found["malloc"] != "tuned":
        return text
    pyg = next((name for name in times if name.startswith("PyG")), "")
    bound = bound_of(found, OWN, figures)
    goals = [
        ("times faster than DGL", times.get("DGL"), own, case.over_dgl),
        (f"times faster than {pyg}", times.get(pyg), own, case.over_pyg),
        ("bf16 times faster than DGL's float32", times.get("DGL"), times.get(f"{OWN} bf16"), case.bf16_over_dgl),
        ("share of the bound", bound and bound["total"], own, case.of_bound),
    ]
    return text + "".join(verdict(what, a / b, goal) for what, a, b, goal in goals if a and b and goal)


def plots_of(results: list[Found]) -> list[dict[str, Any]]:
    """Ratios of time and memory over mggcn's, of time over that with every switch on, and seconds by nonzeros."""
    cells: dict[str, dict[str, dict[str, float]]] = {"peers": {}, "precomputed": {}, "memory": {}, "switches": {}}
    points: dict[str, list[tuple[float, float]]] = {}
    for found in (f for f in results if f["malloc"] == "tuned"):
        part, times = found["part"], {name: line["median"] for name, line in found["seconds"].items()}
        base = times.get("all switches on" if part == "switches" else OWN)
        names = {name: "PyG's fastest way" if name.startswith("PyG ") else name for name in times}
        if part == "sizes":
            for name, seconds in times.items():
                points.setdefault(name, []).append((found["nonzeros"], seconds))
        elif base:
            others = {name: short for name, short in names.items() if times[name] != base}
            cells[part][found["case"]] = {short: times[name] / base for name, short in others.items()}
            if part == "peers":
                peaks = found["peak_bytes"]
                cells["memory"][found["case"]] = {short: peaks[name] / peaks[OWN] for name, short in others.items()}
    return [
        *bars("Training epochs", "time of an epoch over mggcn's (float32), logarithmic", cells["peers"]),
        *bars("Training epochs, A X computed once for all", "time of an epoch over mggcn's", cells["precomputed"]),
        *bars("Peak memory of the process", "peak over mggcn's (float32)", cells["memory"]),
        *bars("Each switch off alone", "time of an epoch over that with all switches on", cells["switches"]),
        *lines("A growing graph", "seconds per epoch", "nonzeros", points),
    ]


def describe(results: list[Found], args: Any, figures: Found) -> str:
    text = (
        f"Scale {args.scale:g}, {args.threads} threads, {args.rounds} rounds in shuffled order. CPU ms: over the threads. "
        "Peaks are of the epochs (VmHWM, set-up forgotten). The bound is of float32: dense products at the measured peak, "
        "sparse ones at the rate of gathers from operands of their size; blocks and panels, which gather from the cache, "
        "can exceed it.\n"
    )
    for found in results:
        sizes = f"{found['vertices']:,} vertices, {found['nonzeros']:,} nonzeros"
        text += f"\n## {found['case']}: {PARTS[found['part']]}, malloc {found['malloc']}\n\n{sizes}.\n\n"
        text += described(found, args.threads, figures)
        text += (
            "\n" + verdicts(CASES[found["case"]], found, figures)
            if args.scale == 1.0 and found["case"] in CASES
            else ""
        )
    tried = [
        [f["case"], kind, v if isinstance(v, str) else f"{1e3 * v:.0f}"]
        for f in results
        for kind, v in f["pilots"].items()
    ]
    tried = [list(row) for row in dict.fromkeys(map(tuple, tried))]
    if tried:
        text += "\n## PyG's ways, each alone: the fastest is compared\n\n" + table(["case", "way", "ms/epoch"], tried)
    return f"{text}\n## Ceilings\n\n{ceilings.describe(figures)}"


def options(arguments: list[str] | None = None) -> Any:
    own: dict[str, dict[str, Any]] = {
        "parts": {"default": "peers,precomputed,switches", "help": f"of {', '.join(PARTS)}"},
        "cases": {"default": "", "help": "networks on graphs, by name"},
        "malloc": {"default": "tuned,default", "help": "settings of glibc, a comparison of peers for each"},
    }
    shared = ("scale", "threads", "rounds", "peers", "ceilings", "data", "cache")
    return parse(__doc__, *shared, arguments=arguments, **own)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    parts, peers, data = listed(args.parts, list(PARTS)), find_peers(args.peers), find_data(args.data)
    cases = [CASES[name] for name in listed(args.cases, list(CASES))]
    around, figures = surroundings(), ceilings.figures_of(args)
    around["versions"] |= {f"peer {library}": version for library, version in peers.versions.items()}
    results: list[Found] = []
    missing = [case.name for case in cases if not available(case.graph, data)]
    usual = [part for part in parts if part != "sizes"]
    for case in (case for case in cases if usual and case.name not in missing):
        results += measure(case, usual, peers, args)
    for case in SIZES if "sizes" in parts else ():
        results += measure(case, ["sizes"], peers, args)
    body = missing_text(peers) + "".join(f"Left out: {name}: no such graph here.\n" for name in missing)
    record = {"surroundings": around, "options": {k: str(v) for k, v in vars(args).items() if v and k != "out"}}
    record |= {"ceilings": figures, "measured": results, "plots": plots_of(results)}
    name = "-".join(["peers-epoch", *(() if "peers" in parts else parts)])
    write_report(
        name, "Training epochs: mggcn, DGL and PyG", f"{body}\n{describe(results, args, figures)}", record, args.out
    )
    if faults := wrong(results):
        sys.exit("the contenders do not compute the same: " + "; ".join(faults))


if __name__ == "__main__":
    main()
