"""Training epochs of attention, mggcn beside PyG: GAT and GATv2 of three layers with 4 x 64 heads from the same weights.

PyG's messages are the edges times all heads' columns, several times a layer: --scale makes the graph smaller where
they do not fit. mggcn's rows are in the order by locality, without pruning.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.contest import OWN, Case, Contenders, Found, compare, described, extents, wrong
from bench.graphs import store_of
from bench.peers.libraries import Peers, find_peers, missing_text
from bench.report import listed, parse, surroundings, verdict, write_report

HEADS = 4
KINDS = ("gat", "gatv2")
CASE = Case("arxiv-like", (256, 256), over_pyg=3.0)
MEMORY_OF_PYG = 0.3
"""Largest accepted peak memory of a process, without imports, over that of PyG's."""


def measure(kind: str, peers: Peers, args: Any) -> Found:
    """Compare one kind of attention."""
    store = store_of(CASE.graph, args)
    contenders = Contenders(CASE, store, args.threads, peers.python)
    model = {"kind": kind, "heads": HEADS}
    own = contenders.own({"order": "locality", "prune": "off"}, model=model, keep=True)
    starts = {OWN: own}
    if "pyg" in peers:
        starts["PyG"] = contenders.peer("pyg_attention", kind=kind, heads=HEADS)
    n, nnz = extents(store)
    return {"case": f"{CASE.name}, {kind}", "kind": kind, "vertices": n, "nonzeros": nnz} | compare(
        starts, args.rounds, alone=True
    )


def verdicts(found: Found) -> str:
    if "PyG" not in found["seconds"]:
        return ""
    times = {name: line["median"] for name, line in found["seconds"].items()}
    peaks = {name: found["peak_bytes"][name] - found["prepared"][name]["imported"] for name in times}
    share = peaks[OWN] / peaks["PyG"]
    faster = verdict("times faster than PyG", times["PyG"] / times[OWN], CASE.over_pyg or 0.0)
    return faster + verdict("peak memory over PyG's, without imports", share, MEMORY_OF_PYG, at_most=True)


def main(arguments: list[str] | None = None) -> None:
    own: dict[str, dict[str, Any]] = {"kinds": {"default": "", "help": f"of {', '.join(KINDS)}"}}
    args = parse(__doc__, "scale", "threads", "rounds", "peers", "data", "cache", arguments=arguments, **own)
    peers, around = find_peers(args.peers), surroundings()
    around["versions"] |= {f"peer {library}": version for library, version in peers.versions.items()}
    results = [measure(kind, peers, args) for kind in listed(args.kinds, KINDS)]
    parts = [
        f"## {found['case']}: {found['vertices']:,} vertices, {found['nonzeros']:,} nonzeros\n\n"
        f"{described(found, args.threads)}\n{verdicts(found)}"
        for found in results
    ]
    record = {"surroundings": around, "options": {k: str(v) for k, v in vars(args).items() if v and k != "out"}}
    body = missing_text(peers) + "\n".join(parts)
    write_report("attention", "Attention: mggcn and PyG", body, record | {"measured": results}, args.out)
    if faults := wrong(results):
        sys.exit("the contenders do not compute the same: " + "; ".join(faults))


if __name__ == "__main__":
    main()
