"""The comparisons on CPUs in turn, each with a report of its own; `--quick` is `make bench`: tables at a small scale.

Needs no other library, but says which ones bench/peers/setup.sh would add. A part that fails does not stop the others.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.graphs import find_data
from bench.peers.libraries import find_peers, missing_text
from bench.report import ROOT, listed, parse

FULL: dict[str, list[str]] = {
    "spmm": ["bench.peers.products"],
    "epoch": ["bench.peers.epochs"],
    "sizes": ["bench.peers.epochs", "--parts", "sizes"],
    "setup": ["bench.cpu.epochs", "--what", "setup"],
    "ways": ["bench.cpu.ways"],
    "ranks": ["bench.cpu.ranks", "--parts", "threads"],
}
TWO = ("--rounds", "3", "--scale", "0.1")
QUICK: dict[str, list[str]] = {
    "spmm": ["bench.peers.products", "--graphs", "arxiv-like,reddit-like", "--widths", "128,512", *TWO],
    "epoch": [
        *("bench.peers.epochs", "--parts", "peers", "--malloc", "tuned"),
        *("--cases", "reddit-like 2x512,arxiv-like 3x256", *TWO),
    ],
}
"""Modules and their arguments by name of the part."""
TAKES = {
    "bench.peers.products": ("threads", "peers", "ceilings", "data", "cache", "out"),
    "bench.peers.epochs": ("threads", "peers", "ceilings", "data", "cache", "out"),
    "bench.cpu.epochs": ("threads", "data", "cache", "out"),
    "bench.cpu.ways": ("threads", "data", "cache", "out"),
    "bench.cpu.ranks": ("data", "cache", "out"),
}


def options(arguments: list[str] | None = None) -> Any:
    own: dict[str, dict[str, Any]] = {
        "quick": {"action": "store_true", "help": "two parts at a tenth of the size, in minutes"},
        "parts": {"default": "", "help": "names of some of the parts; default: all"},
    }
    return parse(__doc__, "threads", "peers", "ceilings", "data", "cache", arguments=arguments, **own)


def commands(args: Any) -> dict[str, list[str]]:
    """The command of every part that was asked for, after `python -m`."""
    parts = QUICK if args.quick else FULL
    found = {}
    for name in listed(args.parts, list(parts)):
        shared = {option: getattr(args, option) for option in TAKES[parts[name][0]]}
        found[name] = [
            *parts[name],
            *(word for key, value in shared.items() if value for word in (f"--{key}", str(value))),
        ]
    return found


def main(arguments: list[str] | None = None) -> int:
    args = options(arguments)
    peers = find_peers(args.peers)
    print(f"compared with: {', '.join(f'{name} {version}' for name, version in peers.versions.items()) or 'nothing'}")
    print(missing_text(peers), end="")
    if find_data(args.data) is None:
        print("without the real graphs: no data folder")
    if not args.ceilings:
        args.ceilings = args.cache.resolve() / "ceilings.json"
        args.ceilings.unlink(missing_ok=True)  # measured once for all parts, each time
    if args.out:
        args.out = args.out.resolve()
    failed = []
    for name, command in commands(args).items():
        began = time.perf_counter()
        code = subprocess.run([sys.executable, "-m", *command], check=False, cwd=ROOT).returncode
        print(
            f"{name}: {'done' if code == 0 else f'FAILED with code {code}'} in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        failed += [name] if code else []
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
