"""List the named data sets, or download some of them and make their stores."""

from __future__ import annotations

import argparse
from pathlib import Path

from mggcn.cli.answer import add_json

COLUMNS = ("name", "vertices", "edges", "features", "classes", "metric", "licence")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", nargs="*", help="data sets to download; without any, all are listed")
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="folder of the data sets; default: $MGGCN_DATA, else ~/.cache/mggcn"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """List data sets, or make their stores and print the paths."""
    from mggcn.errors import ConfigError, printable
    from mggcn.graph.named.catalogue import DATASETS, dataset_named, read_elsewhere
    from mggcn.graph.named.datasets import data_folder, obtain
    from mggcn.graph.store import is_store

    folder = data_folder(arguments.root)
    named = {name: dataset_named(name) for name in arguments.name}
    if unknown := [name for name, dataset in named.items() if dataset is None]:
        there = read_elsewhere(unknown[0])
        raise ConfigError(f"there is no data set {', '.join(unknown)}; known are {', '.join(DATASETS)}{there}")
    if arguments.name:
        stores = {name: obtain(dataset, folder) for name, dataset in named.items() if dataset is not None}
        arguments.answer = {"folder": folder, "stores": stores}
        print(*map(printable, stores.values()), sep="\n")
        return 0
    titles = ("name", "vertices", "edges", "features", "classes", "score", "licence", f"in {folder}")
    rows, found = [], []
    for d in DATASETS.values():
        counts = (f"{d.vertices:,}", f"{d.edges:,}", str(d.features), str(d.classes))
        here = "store" if is_store(folder / d.name) else "files" if (folder / d.files).exists() else "-"
        rows.append((d.name, *counts, d.metric, d.licence, here))
        found.append({name: getattr(d, name) for name in COLUMNS} | {"present": here if here != "-" else None})
    arguments.answer = {"folder": folder, "datasets": found}
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = (c.rjust(w) if 0 < i < 5 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        print("  ".join(cells).rstrip())
    print("edges as published, before they are symmetrised; mggcn train NAME downloads what is not there")
    return 0
