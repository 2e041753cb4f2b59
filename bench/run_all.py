"""Every benchmark of the CPU in turn, each with a report of its own; `--quick` is `make bench`: tables at a small scale.

Needs no other library, but says which ones bench/peers/setup.sh would add. A part that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import ceilings
from common import HERE
from peers_cases import find_data
from peers_env import ADVICE, find_peers
from peers_options import add_options

QUICK_SCALE = "0.1"
FULL: dict[str, list[str]] = {
    "ceilings": ["ceilings.py"],
    "spmm": ["peers_spmm.py"],
    "epoch": ["peers_epoch.py"],
    "setup": ["setup_cost.py"],
    "blocks": ["blocks.py"],
    "scaling": ["scaling.py"],
}
QUICK: dict[str, list[str]] = {
    "spmm": ["peers_spmm.py", "--graphs", "arxiv-like,reddit-like", "--widths", "128,512", "--rounds", "3"],
    "epoch": [
        "peers_epoch.py",
        *("--cases", "reddit-like 2x512,arxiv-like 3x256", "--rounds", "3", "--warm-up", "1"),
        *("--malloc", "tuned", "--parts", "peers"),
    ],
}
"""Scripts and their arguments by name of the part."""
TAKES_CEILINGS, TAKES_PEERS = {"spmm", "epoch"}, {"spmm", "epoch", "scaling"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"two parts at scale {QUICK_SCALE}, in minutes")
    parser.add_argument("--parts", default="", help="names of some of the parts; default: all")
    add_options(parser, "threads", "peers", "data", "cache", "out")
    return parser.parse_args()


def commands(args: argparse.Namespace, figures: Path) -> dict[str, list[str]]:
    """The command of every part that was asked for. Raises: SystemExit for a part that does not exist."""
    parts = QUICK if args.quick else FULL
    asked = args.parts.split(",") if args.parts else list(parts)
    if unknown := sorted(set(asked) - set(parts)):
        sys.exit(f"unknown parts {', '.join(unknown)}; there are {', '.join(parts)}")
    found = {}
    for name in asked:
        script, *rest = parts[name]
        options = ["--threads", str(args.threads)]
        if name != "ceilings":
            options += ["--cache", str(args.cache)]
        if args.quick:
            options += ["--scale", QUICK_SCALE]
        if name in TAKES_CEILINGS:
            options += ["--ceilings", str(figures)]
        if name in TAKES_PEERS:
            options += ["--peers", str(args.peers)]
        if args.data and name not in ("ceilings", "scaling"):
            options += ["--data", str(args.data)]
        if args.out:
            options += ["--out", str(args.out)]
        found[name] = [sys.executable, str(HERE / script), *rest, *options]
    return found


def main() -> None:
    args = parse()
    peers = find_peers(args.peers)
    print(f"compared with: {', '.join(f'{name} {version}' for name, version in peers.versions.items()) or 'nothing'}")
    if "dgl" not in peers:
        print(f"without DGL and others: {ADVICE}")
    if find_data(args.data) is None:
        print("without the real graphs: no data folder")
    args.cache.mkdir(parents=True, exist_ok=True)
    figures = args.cache / "ceilings.json"
    asked = commands(args, figures)
    if TAKES_CEILINGS & set(asked):
        figures.write_text(json.dumps(ceilings.measured(args.threads, 0.1 if args.quick else 0.3)))
    failed = []
    for name, command in asked.items():
        began = time.perf_counter()
        code = subprocess.run(command, check=False).returncode
        print(f"{name}: {'done' if code == 0 else f'FAILED with code {code}'} in {time.perf_counter() - began:.0f} s")
        failed += [name] if code else []
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
