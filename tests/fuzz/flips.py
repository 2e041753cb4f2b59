"""Flip single bits of stores and run folders, and have them trained on, resumed and scored with: print what happened.

    python -m tests.fuzz.flips --arrays 2000 --checkpoints 500

Every byte of the headers of all arrays and tensors, of meta.json, progress.json and `latest` is changed in one bit, and so
are random bits of arrays and weights. A command must be refused in one line with exit code 2, or give the bits of the
undamaged one.
Exit code 1 if anything else happened.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import io
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mggcn.cli import entry as cli
from mggcn.graph.store_write import write_store
from tests.graphs import make_graph, pattern

COMMANDS = ("train", "resume", "predict")
NPY_HEADER = 128
SETTINGS = ["--set", "run.threads=1", "--set", "model.hidden=4"]


@dataclass(frozen=True)
class Flip:
    """One bit of a file, and the kind of content that it is part of."""

    path: Path
    place: int
    bit: int
    kind: str


class Runs:
    """A store, a run of it that has epochs left, and what its commands give."""

    def __init__(self, root: Path) -> None:
        self.root, self.store, self.run = root, root / "store", root / "run"
        graph = make_graph(
            pattern("weighted", 30, 5), num_features=3, num_classes=3, sparse=True, weighted=True, seed=5
        )
        write_store(graph, self.store)
        code, said = quietly(["train", str(self.store), "--epochs", "2", "--out", str(self.run), *SETTINGS])
        assert code == 0, said
        self.expected = {command: self.outcome(command)[1] for command in COMMANDS}

    def outcome(self, command: str) -> tuple[int, str]:
        """Run a command; return its exit code and the digest of what it gave, or what it said."""
        out = self.root / "out"
        shutil.rmtree(out, ignore_errors=True)
        if command == "train":
            code, said = quietly(["train", str(self.store), "--epochs", "2", "--quiet", "--out", str(out), *SETTINGS])
        elif command == "resume":
            shutil.copytree(self.run, out)
            code, said = quietly(["train", "--resume", str(out), "--epochs", "4", "--quiet"])
        else:
            out.mkdir()
            code, said = quietly(["predict", str(self.run), "--out", str(out / "scores.npy")])
        if code != 0:
            return code, said
        if command == "predict":
            return 0, hashlib.sha256((out / "scores.npy").read_bytes()).hexdigest()
        (weights,) = (out / "checkpoints").glob("*/weights.safetensors")
        return 0, hashlib.sha256(weights.read_bytes()).hexdigest()

    def tried(self, flip: Flip, command: str) -> str:
        """Flip the bit, run the command, put the bit back; return what happened."""
        content = flip.path.read_bytes()
        changed = content[: flip.place] + bytes([content[flip.place] ^ 1 << flip.bit]) + content[flip.place + 1 :]
        flip.path.write_bytes(changed)
        try:
            code, said = self.outcome(command)
        except Exception as error:
            return f"raised {type(error).__name__}"
        finally:
            flip.path.write_bytes(content)
        if code == 0:
            return "same result" if said == self.expected[command] else "other result"
        if "Traceback" in said:
            return "traceback"
        return "refused" if code == 2 and said.count("\n") == 1 else f"exit code {code}"


def quietly(arguments: list[str]) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it said of errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    return code, err.getvalue()


def flips(runs: Runs, arrays: int, weights: int, every: int, rng: random.Random) -> Iterator[Flip]:
    """Every `every`-th byte of what describes arrays and tensors, and random bits of their content."""
    stored = sorted(runs.store.glob("*.npy"))
    tensors = sorted((runs.run / "checkpoints").glob("*/*.safetensors"))
    described = {path: NPY_HEADER for path in stored}
    described |= {path: 8 + int.from_bytes(path.read_bytes()[:8], "little") for path in tensors}
    texts = [runs.store / "meta.json", *(runs.run / "checkpoints").glob("*/progress.json")]
    texts.append(runs.run / "checkpoints" / "latest")
    for path in texts:
        described[path] = path.stat().st_size
    for path, size in described.items():
        kind = path.name if path in texts else "header of an array" if path in stored else "header of tensors"
        for place in range(0, size, every):
            yield Flip(path, place, rng.randrange(8), kind)
    for files, count, kind in ((stored, arrays, "array"), (tensors, weights, "tensors")):
        sizes = np.array([path.stat().st_size - described[path] for path in files])
        for _ in range(count):
            path = rng.choices(files, sizes.tolist())[0]
            place = rng.randrange(described[path], path.stat().st_size)
            yield Flip(path, place, rng.randrange(8), kind)


def flip_all(
    root: Path, arrays: int, weights: int, every: int, seed: int, commands: int = 3
) -> tuple[Counter[tuple[str, str, str]], list[str]]:
    """Try all flips, each with some of the three commands; return totals by kind, command and outcome, and what is wrong.

    A checkpoint plays no part in `train`.
    """
    runs, rng = Runs(root), random.Random(seed)
    totals: Counter[tuple[str, str, str]] = Counter()
    wrong = []
    for number, flip in enumerate(flips(runs, arrays, weights, every, rng)):
        usable = COMMANDS if flip.path.parent == runs.store else COMMANDS[1:]
        rolled = [usable[(number + k) % len(usable)] for k in range(min(commands, len(usable)))]
        for command in rolled:
            found = runs.tried(flip, command)
            totals[flip.kind, command, found] += 1
            if found not in ("refused", "same result"):
                wrong.append(f"{flip.path.name} byte {flip.place} bit {flip.bit}, {command}: {found}")
    return totals, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.flips", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arrays", type=int, default=2000)
    parser.add_argument("--checkpoints", type=int, default=500)
    parser.add_argument("--every", type=int, default=1, help="take every n-th byte of headers and texts")
    parser.add_argument("--commands", type=int, default=3, help="commands for each flip, in turn")
    parser.add_argument("--seed", type=int, default=61173)
    args = parser.parse_args()
    faulthandler.enable()
    with tempfile.TemporaryDirectory(prefix="mggcn-flips-") as folder:
        totals, wrong = flip_all(Path(folder), args.arrays, args.checkpoints, args.every, args.seed, args.commands)
    outcomes = ["refused", "same result", *sorted({found for *_, found in totals} - {"refused", "same result"})]
    print(f"{'':20} {'':8}" + "".join(f"{name:>14}" for name in outcomes))
    for kind, command in sorted({key[:2] for key in totals}):
        print(f"{kind:20} {command:8}" + "".join(f"{totals[kind, command, name]:>14,}" for name in outcomes))
    print(f"{sum(totals.values()):,} commands, {len(wrong)} of them wrong", *wrong[:50], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
