"""The product of a graph with a dense matrix: mggcn's kernel, each of its switches alone, and other libraries, in turn.

Bytes are what each product must touch if nothing stays in a cache, the same for all of a type: a column id and a row of the
dense operand per nonzero, a pointer and a row of the result per vertex. The edges have no weights; the peers store ones.
Beside the wall clock stands the processor time over the threads: where other programs run, it tells what the kernel takes,
but for the cache and the memory that they take from it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from common import TUNED, cache_folder, make_store, spread, surroundings, table, write_report
from spmm_cases import CHOSEN, GRAPHS, PLAIN, load, own, peers

GB = 1e9
ENVIRONMENT = TUNED | {"GOMP_SPINCOUNT": "0"}
"""Threads that wait take no processor time."""
WIDTHS = "16,41,64,128,256,512"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=[*GRAPHS, "all"], default="all")
    parser.add_argument("--scale", type=float, default=1.0, help="of vertices and edges")
    parser.add_argument("--widths", default=WIDTHS)
    parser.add_argument("--types", default="float32,bfloat16")
    parser.add_argument("--ways", choices=["chosen", "all"], default="chosen", help="of our kernel, beside plain rows")
    parser.add_argument("--no-peers", action="store_true", help="our kernel alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="folder that keeps the graphs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    return parser.parse_args()


def measure(store: Path, width: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time every contender `rounds` times after one round of warm-up, which also compares their results."""
    data = load(store, width, args.threads)
    contenders: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    for kind in args.types.split(","):
        found, choice = own(data, kind, args.ways == "all")
        contenders |= found
        chosen[kind] = f"{choice.way} {choice.panel or choice.blocks}, {choice.ahead} ahead: {choice.reason}"
    if not args.no_peers:
        contenders |= peers(data)
    check(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, function in contenders.items():
            began, spent = time.perf_counter(), time.process_time()
            function()
            seconds[name].append(time.perf_counter() - began)
            cpu[name].append((time.process_time() - spent) / args.threads)
    nbytes = {name: data.moved(2 if "bfloat16" in name else 4) for name in contenders}
    flop = 2 * int(data.indices.size) * width
    return {"width": width, "bytes": nbytes, "flop": flop, "seconds": seconds, "cpu": cpu, "chosen": chosen}


def check(contenders: dict[str, Any]) -> None:
    """Compare all results with those of plain rows; the ways of our kernel bit by bit. Raises: AssertionError."""
    import torch

    plain = {
        kind: function().clone()
        for name, function in contenders.items()
        for way, _, kind in [name.partition(", ")]
        if way == PLAIN
    }
    for name, function in contenders.items():
        _, _, kind = name.partition(", ")
        if kind:
            assert torch.equal(function(), plain[kind]), f"{name} has other bits than {PLAIN}, {kind}"
        else:
            torch.testing.assert_close(function(), next(iter(plain.values())).float(), rtol=1e-4, atol=1e-2)


def rows_of(found: dict[str, Any]) -> list[list[Any]]:
    """Lines of the table: ratios compare with the plain rows of float32, or of what there is."""
    base = next(iter(found["seconds"]))
    lines = []
    for name, values in found["seconds"].items():
        wall, cpu = spread(values), spread(found["cpu"][name])
        lines.append(
            [
                found["workload"],
                found["width"],
                name,
                f"{1000 * wall['median']:.1f}",
                f"{1000 * wall['min']:.1f} .. {1000 * wall['max']:.1f}",
                f"{1000 * cpu['median']:.1f}",
                f"{1000 * cpu['min']:.1f}",
                f"{found['bytes'][name] / cpu['min'] / GB:.1f}",
                f"{found['flop'] / cpu['min'] / GB:.1f}",
                f"{ratio(found['seconds'], base, name):.2f}",
                f"{ratio(found['cpu'], base, name):.2f}",
            ]
        )
    return lines


def ratio(seconds: dict[str, list[float]], base: str, name: str) -> float:
    """The median over the rounds of how many times faster than the base a contender was."""
    return spread([a / b for a, b in zip(seconds[base], seconds[name], strict=True)])["median"]


HEAD = (
    "graph",
    "width",
    "contender",
    "ms (median)",
    "min .. max",
    "cpu ms / threads (median)",
    "(min)",
    "GB/s",
    "GFLOP/s",
    "plain / it",
    "the same, cpu",
)


def main() -> None:
    args = parse()
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        # glibc and libgomp read their settings when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    import torch

    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    record: dict[str, Any] = {"surroundings": surroundings(), "measured": []}
    with cache_folder(args.cache) as cache:
        for name in GRAPHS if args.workload == "all" else [args.workload]:
            store = make_store(GRAPHS[name].scaled(args.scale), cache)
            for width in (int(w) for w in args.widths.split(",")):
                found = {"workload": name, **measure(store, width, args)}
                record["measured"].append(found)
                print(table(HEAD, rows_of(found)), file=sys.stderr)
    rows = [row for found in record["measured"] for row in rows_of(found)]
    choices = [
        [f["workload"], f["width"], kind, text] for f in record["measured"] for kind, text in f["chosen"].items()
    ]
    body = (
        f"Scale {args.scale:g}, {args.threads} threads, {args.rounds} rounds, malloc tuned. GB/s and GFLOP/s are of the "
        f"least processor time. '{CHOSEN}' is what `choose_spmm` takes, '{PLAIN}' the kernel with every switch off.\n\n"
    )
    body += table(HEAD, rows) + "\n" + table(["graph", "width", "type", "chosen, and why"], choices)
    write_report("spmm", "Products of a graph with a dense matrix", body, record, args.out)


if __name__ == "__main__":
    main()
