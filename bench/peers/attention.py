"""Training epochs of attention, GraphSAGE and GIN: mggcn beside the layers of DGL and PyG, from the same weights.

Three layers of 256, which is 4 x 64 heads. Attention's contenders run one after the other. A peer whose rows for each edge
would not fit the free memory is left out, and some kinds are therefore compared on 0.4 of the graph, too. mggcn's rows are
in the order by locality, without pruning.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from bench.contest import OWN, Case, Contenders, Found, compare, described, extents, wrong
from bench.graphs import store_of
from bench.peers.epochs import what_fits
from bench.peers.libraries import Peers, find_peers, missing_text
from bench.process import memory_free
from bench.report import listed, parse, surroundings, verdict, write_report

HEADS, WIDTH = 4, 256
ATTENTION = ("gat", "gatv2")
SAGE = {"kind": "sage", "self_loops": False}
MODELS: dict[str, dict[str, Any]] = {
    "gat": {"kind": "gat", "heads": HEADS},
    "gatv2": {"kind": "gatv2", "heads": HEADS},
    "sage-mean": SAGE | {"aggregator": "mean"},
    "sage-max": {"kind": "sage", "aggregator": "max"},
    "gin": {"kind": "gin", "norm_layer": "batch"},
}
TIMES_FASTER, OF_MEMORY = 3.0, 0.3
"""Goals of attention over each peer: seconds, and peak memory of a process without imports."""
TIMES_FASTER_SUMS = 1.5
"""Goal of GraphSAGE and GIN over the faster of all peers' ways."""
AGAIN = f"{OWN}, products made again"
"""mggcn with run.recompute = on: the memory that attention needs at least."""
DGL, SCATTER, CSR = "DGL", "PyG", "PyG csr"
EDGE_ROWS = {
    ("gat", SCATTER): 4.5,
    ("gatv2", SCATTER): 11.5,
    ("sage-mean", SCATTER): 1.5,
    ("sage-max", SCATTER): 8.5,
    ("gin", SCATTER): 1.5,
    ("gat", DGL): 0.5,
    ("gatv2", DGL): 7.5,
}
"""About how many matrices of a row of `WIDTH` floats for each edge a peer holds at its peak; others hold none."""
VERTEX_ROWS = 40
"""The same for each vertex."""
TOLERANCES = {"gin": 2e-2}
"""Of losses where Adam turns rounding into whole steps. In float64 PyG's are mggcn's (tests/bench/test_peers.py)."""


@dataclass(frozen=True)
class Contest:
    """A kind of layers on a case's graph."""

    kind: str
    case: Case

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.case.name}"


ARXIV = Case("arxiv-like", (WIDTH, WIDTH))
LESS = Case("arxiv-like", (WIDTH, WIDTH), vertices=0.4, edges=0.4)
"""So much of it that every peer's rows fit 20 GiB."""
CONTESTS = {
    contest.name: contest
    for contest in (
        Contest("gat", ARXIV),
        Contest("gat", LESS),
        Contest("gatv2", ARXIV),
        Contest("gatv2", LESS),
        Contest("gat", Case("reddit-like", (WIDTH, WIDTH))),
        Contest("gatv2", Case("reddit-like", (WIDTH, WIDTH))),
        Contest("sage-mean", ARXIV),
        Contest("sage-max", ARXIV),
        Contest("sage-max", LESS),
        Contest("gin", ARXIV),
    )
}


def starts_of(contest: Contest, contenders: Contenders, peers: Peers) -> dict[str, Any]:
    """What starts every contender; the first one writes the weights."""
    kind = contest.kind
    job = {"kind": kind, "heads": HEADS, "batch_norm": MODELS[kind].get("norm_layer") == "batch"}
    run = {"order": "locality", "prune": "off"}
    starts = {OWN: contenders.own(run, model=MODELS[kind], keep=True)}
    if kind in ATTENTION:
        starts[AGAIN] = contenders.own(run | {"recompute": "on"}, model=MODELS[kind])
    if "dgl" in peers:
        starts[DGL] = contenders.peer("dgl_layers", **job)
    if "pyg" in peers:
        starts[SCATTER] = contenders.peer("pyg_layers", way="scatter", **job)
        if kind in ("sage-mean", "gin"):
            starts[CSR] = contenders.peer("pyg_layers", way="csr", **job)
    return starts


def measure(contest: Contest, peers: Peers, args: Any) -> Found:
    store = store_of(contest.case.graph, args, vertices=contest.case.vertices, edges=contest.case.edges)
    contenders = Contenders(contest.case, store, args.threads, peers.python)
    starts, (n, nnz) = starts_of(contest, contenders, peers), extents(store)
    row = 4 * WIDTH
    need = {name: round(row * (EDGE_ROWS.get((contest.kind, name), 0) * nnz + VERTEX_ROWS * n)) for name in starts}
    left_out, alone = what_fits(need, memory_free())
    starts = {name: start for name, start in starts.items() if name not in left_out}
    print(contest.name, file=sys.stderr)
    found = compare(starts, args.rounds, alone=alone or contest.kind in ATTENTION)
    found["left_out"] |= left_out
    found |= {"tolerance": TOLERANCES[contest.kind]} if contest.kind in TOLERANCES else {}
    return {"case": contest.name, "kind": contest.kind, "vertices": n, "nonzeros": nnz} | found


def verdicts(found: Found) -> str:
    """How the goals fared, as far as contenders ran."""
    times = {name: line["median"] for name, line in found["seconds"].items()}
    own, others = times.get(OWN), {name: seconds for name, seconds in times.items() if name not in (OWN, AGAIN)}
    if not own or not others:
        return ""
    if found["kind"] not in ATTENTION:
        best = min(others, key=others.__getitem__)
        return verdict(f"times faster than {best}, the faster one", others[best] / own, TIMES_FASTER_SUMS)
    peaks = {name: found["peak_bytes"][name] - found["prepared"][name]["imported"] for name in times}
    text = ""
    for ours in (name for name in (OWN, AGAIN) if name in times):
        for name, seconds in others.items():
            text += verdict(f"{ours}: times faster than {name}", seconds / times[ours], TIMES_FASTER)
            peak = peaks[ours] / peaks[name]
            text += verdict(f"{ours}: peak memory over {name}'s, without imports", peak, OF_MEMORY, at_most=True)
    return text


def main(arguments: list[str] | None = None) -> None:
    own: dict[str, dict[str, Any]] = {
        "kinds": {"default": "", "help": f"of {', '.join(MODELS)}"},
        "graphs": {"default": "", "help": "of arxiv-like, reddit-like"},
    }
    args = parse(__doc__, "scale", "threads", "rounds", "peers", "data", "cache", arguments=arguments, **own)
    kinds = listed(args.kinds, list(MODELS))
    graphs = listed(args.graphs, ["arxiv-like", "reddit-like"])
    peers, around = find_peers(args.peers), surroundings()
    around["versions"] |= {f"peer {library}": version for library, version in peers.versions.items()}
    chosen = [contest for contest in CONTESTS.values() if contest.kind in kinds and contest.case.graph in graphs]
    results = [measure(contest, peers, args) for contest in chosen]
    parts = [
        f"## {found['case']}\n\n{found['vertices']:,} vertices, {found['nonzeros']:,} nonzeros.\n\n"
        f"{described(found, args.threads)}\n{verdicts(found) if args.scale == 1.0 else ''}"
        for found in results
    ]
    record = {"surroundings": around, "options": {k: str(v) for k, v in vars(args).items() if v and k != "out"}}
    body = missing_text(peers) + "\n" + "\n".join(parts)
    title = "Attention, GraphSAGE and GIN: mggcn, DGL and PyG"
    write_report("attention", title, body, record | {"measured": results}, args.out)
    if faults := wrong(results):
        sys.exit("the contenders do not compute the same: " + "; ".join(faults))


if __name__ == "__main__":
    main()
