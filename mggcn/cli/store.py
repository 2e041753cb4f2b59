"""Look at a graph store, check every byte of it, or export it to the forms of other programs.

info: counts, degrees, components, homophily and checksums. verify: compare the SHA-256 of every file, and check the graph.
export: to an edge list, SciPy's .npz, PyG's Data (.pt) or Parquet.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mggcn.cli.answer import add_json
from mggcn.errors import printable, shown

if TYPE_CHECKING:
    from mggcn.graph.csr import Graph
    from mggcn.graph.profile import GraphProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    for name, summary in (
        ("info", "print counts, degrees, components, homophily and checksums"),
        ("verify", "compare the SHA-256 of every file, and check what the arrays hold"),
        ("export", "write an edge list, SciPy's .npz, PyG's Data or Parquet"),
    ):
        action = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        action.add_argument("store", help="store folder, or its name under --root")
        action.add_argument("--root", type=Path, metavar="DIR", help="folder in which names of stores are looked up")
        add_json(action)
        if name == "export":
            action.add_argument(
                "out",
                type=Path,
                metavar="FILE",
                help="by suffix: .txt .edges .tsv .csv (also .gz), .npz, .pt, or .parquet: edges, and beside them "
                "NAME.vertices.parquet",
            )
            action.add_argument("--force", action="store_true", help="replace files that exist")


def run(arguments: argparse.Namespace) -> int:
    """Run `info`, `verify` or `export`."""
    from mggcn.cli.train import store_path
    from mggcn.graph.export import export
    from mggcn.graph.store import has_checksums, open_store

    store = store_path(arguments.store, arguments.root)
    graph = open_store(store, verify=arguments.action == "verify")
    if arguments.action == "verify":
        checksums = has_checksums(store)
        arguments.answer = {"store": store, **extents(graph), "checksums": checksums}
        unchecked = "the content was checked, there are no checksums to compare"
        print(f"{printable(store)}: {graph.summary()}; {'checksums hold' if checksums else unchecked}")
    elif arguments.action == "export":
        files = list(export(graph, arguments.out, arguments.force))
        dropped = graph.links.keys() - {"train"} and arguments.out.suffix != ".pt"
        remarks = ["validation and test links, and their negatives, are left out; .pt has them"] if dropped else []
        arguments.answer = {"store": store, "files": files} | ({"remarks": remarks} if remarks else {})
        print(*map(printable, files), *(f"note: {remark}" for remark in remarks), sep="\n")
    elif arguments.json:
        arguments.answer = info_dict(graph, store)
    else:
        print(shown(info(graph, store)))
    return 0


def extents(graph: Graph) -> dict[str, Any]:
    """Return the extents of a graph for answers in JSON."""
    return {
        "name": graph.name,
        "vertices": graph.num_vertices,
        "edges": graph.num_edges,
        "symmetric": graph.symmetric,
        "features": graph.num_features,
        "classes": graph.num_classes,
        "class_names": graph.class_names,
        "task": graph.task,
        "relations": graph.num_relations,
        "splits": {name: rows.shape[0] for name, rows in graph.splits.items()},
        **({"links": {name: rows.shape[0] for name, rows in graph.links.items()}} if graph.links else {}),
    }


def info_dict(graph: Graph, store: Path) -> dict[str, Any]:
    """Return all statistics of a store by name. Cost: as `info`."""
    from mggcn.graph.facts import describe
    from mggcn.graph.layout import graph_arrays, graph_sha256, npy_nbytes
    from mggcn.graph.profile import profile

    digests = graph.meta.get("sha256", {})
    files = {
        f"{name}.npy": {
            "type": str(rows.dtype),
            "shape": rows.shape,
            "bytes": npy_nbytes(rows),
            "sha256": digests.get(f"{name}.npy"),
        }
        for name, rows in sorted(graph_arrays(graph).items())
    }
    described = {name: graph.meta.get(name) for name in ("source", "licence")}
    rest = {"remarks": describe(graph).remarks(), "profile": profile(graph), "files": files}
    return {"store": store, **extents(graph), **described, **rest, "digest": graph_sha256(graph)}


def info(graph: Graph, store: Path) -> str:
    """Return all statistics of a store as text. Cost: as `profile` and `describe`."""
    from mggcn.graph.facts import describe
    from mggcn.graph.layout import graph_arrays, graph_sha256, npy_nbytes
    from mggcn.graph.profile import profile
    from mggcn.memory.units import human
    from mggcn.planning.text import table

    facts, found, digests = describe(graph), profile(graph), graph.meta.get("sha256", {})
    arrays = graph_arrays(graph)
    lines = [
        f"{graph.name} in {store}",
        facts.summary,
        *facts.remarks(),
        f"source {graph.meta.get('source', 'not stated')}, licence {graph.meta.get('licence', 'not stated')}",
        f"{found.num_components:,} weakly connected component{'s' * (found.num_components != 1)}, the largest of "
        f"{found.largest_component:,} vertices",
        *_homophily(found),
        "",
        *table(("degree", *(["vertices"] if graph.symmetric else ["by out-degree", "by in-degree"])), _degrees(found)),
        "",
        *table(
            ("file", "type", "shape", "size", "SHA-256"),
            (
                (
                    f"{name}.npy",
                    str(rows.dtype),
                    " x ".join(f"{extent:,}" for extent in rows.shape),
                    human(npy_nbytes(rows)),
                    str(digests.get(f"{name}.npy", "none")),
                )
                for name, rows in sorted(arrays.items())
            ),
        ),
        f"digest of the graph {graph_sha256(graph)}",
    ]
    return "\n".join(lines)


def _homophily(found: GraphProfile) -> list[str]:
    if found.homophily is None:
        return []
    adjusted = "" if found.adjusted_homophily is None else f", adjusted {found.adjusted_homophily:.4f} (0 by chance)"
    return [f"edge homophily {found.homophily:.4f}{adjusted}"]


def _degrees(found: GraphProfile) -> list[tuple[str, ...]]:
    """Lines of the histogram: a range of degrees, and how many vertices have one of them."""
    both = [found.out_degrees] if found.out_degrees is found.in_degrees else [found.out_degrees, found.in_degrees]
    lines = []
    for bits in range(max(map(len, both))):
        low, high = 1 << bits >> 1, (1 << bits) - 1
        counts = [f"{column[bits] if bits < len(column) else 0:,}" for column in both]
        lines.append((f"{low:,}" if low >= high else f"{low:,} to {high:,}", *counts))
    highest = [found.max_out_degree, found.max_in_degree][: len(both)]
    return [*lines, ("highest", *(f"{degree:,}" for degree in highest))]
