"""Feed changed stores, sources, settings and checkpoints to their readers for some minutes; print what happened.

    python -m tests.fuzz --minutes 30 --seed 61173 --jobs 2

Every case runs in one of several processes: a crash or a hang ends a process, is counted, and the next one goes on
behind it. What was found lies in OUT, a folder; `--case NUMBER` runs one case again. Exit code 1 if anything was found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BAD = ("traceback", "crash", "hang", "memory")
EVERY = range(1 << 60)
BATCH_S = 120.0
"""Seconds after which a process is replaced, so that what one case leaves behind reaches few others."""


@dataclass
class Findings:
    """Totals by target and outcome, and what must not happen."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad: list[dict[str, Any]] = field(default_factory=list)


def fuzz(seconds: float, seed: int, jobs: int, *, only: str = "", cases: range = EVERY) -> Findings:
    """Run cases on several processes until they are done or the seconds are over."""
    found, lock, until = Findings(), threading.Lock(), time.monotonic() + seconds

    def one(lane: int, scratch: Path) -> None:
        number = cases.start + lane
        while (left := until - time.monotonic()) > 0 and number < cases.stop:
            place = scratch / f"at-{lane}"
            place.write_text(f"{number} -")
            arguments = (seed, number, jobs, cases.stop, min(left, BATCH_S), place, only)
            command = [sys.executable, "-m", "tests.fuzz.worker", *map(str, arguments)]
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
            with lock:
                for line in lines:
                    if "counts" in line:
                        number = line["number"]
                        for target, kind, count in line["counts"]:
                            found.counts[target, kind] += count
                    else:
                        found.bad.append(line)
                if not lines or "counts" not in lines[-1]:
                    at, _, target = place.read_text().partition(" ")
                    log = place.with_suffix(".crash")
                    text = (log.read_text() if log.exists() else "") + ended.stderr[-2000:]
                    kind = "hang" if "Timeout" in text else "crash"
                    found.bad.append({"number": int(at), "target": target, "kind": kind, "text": text})
                    found.counts[target, kind] += 1
                    log.unlink(missing_ok=True)
                    number = int(at) + jobs

    with tempfile.TemporaryDirectory(prefix="mggcn-fuzz-") as scratch:
        lanes = [threading.Thread(target=one, args=(lane, Path(scratch))) for lane in range(jobs)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    return found


def table(found: Findings) -> str:
    """Return the totals as text."""
    kinds = ["accepted", "refused", *BAD]
    targets = sorted({target for target, _ in found.counts})
    lines = [f"{'':16}" + "".join(f"{kind:>11}" for kind in kinds)]
    for target in targets:
        lines.append(f"{target:16}" + "".join(f"{found.counts[target, kind]:>11,}" for kind in kinds))
    sums = [sum(found.counts[target, kind] for target in targets) for kind in kinds]
    return "\n".join([*lines, f"{'all':16}" + "".join(f"{count:>11,}" for count in sums), f"{sum(sums):,} cases"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=61173)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="targets whose names hold this text")
    parser.add_argument("--case", type=int, help="run one case, which a finding names")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz")
    args = parser.parse_args()
    cases = EVERY if args.case is None else range(args.case, args.case + 1)
    found = fuzz(60 * args.minutes, args.seed, args.jobs, only=args.only, cases=cases)
    print(table(found))
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"seed-{args.seed}.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in found.bad)
    for line in found.bad[:20]:
        print(f"\ncase {line['number']} of seed {args.seed}, {line['target']}: {line['kind']}\n{line['text'][-1500:]}")
    return 1 if found.bad else 0


if __name__ == "__main__":
    sys.exit(main())
