"""Plant single faults in a copy of a checkout and count those that its tests catch.

    python -m tests.faults --count 200 --seed 61173 --suite fast --out build/faults

The same seed gives the same faults. For each, the tests that name its module run first, then those of its room, then
tests/golden, then all others (--stages says how many of these four). What was found stands in OUT/<suite>.jsonl, one
fault a line: a run that is started again goes on behind it. OUT/<suite>.md sums up.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.checkout import Checkout, Outcome
from tests.faults.sites import Fault, draw

ROOT = Path(__file__).resolve().parents[2]
MARKS = {"fast": [], "all": ["-m", "not slow"]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=61173)
    parser.add_argument("--suite", choices=MARKS, default="fast")
    parser.add_argument("--stages", type=int, default=4, help="1: tests that name the module; 4: all")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for the tests of one stage")
    parser.add_argument("--source", type=Path, default=ROOT, help="another checkout, of the same sources")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "faults")
    options = parser.parse_args()
    checkout = Checkout(options.source.resolve(), options.out.resolve() / "checkout")
    checkout.build()
    table = options.out / f"{options.suite}.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []
    for fault in draw(checkout.root, options.count, options.seed, checkout.valid):
        said = fault.said((checkout.root / fault.path).read_bytes())
        if all(row["fault"] != said for row in rows):
            outcome, stage = caught(checkout, fault, options)
            rows.append({"fault": said, "kind": fault.kind, "caught": outcome.caught, "by": outcome.by, "stage": stage})
            rows[-1]["seconds"] = round(outcome.seconds, 1)
            with table.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(f"{'caught' if outcome.caught else 'MISSED'} {said}: {outcome.by}", flush=True)
    (options.out / f"{options.suite}.md").write_text(report(rows, options))


def caught(checkout: Checkout, fault: Fault, options: Any) -> tuple[Outcome, int]:
    """Return what became of a fault, and at which stage."""
    stages = checkout.first(fault)[: options.stages]
    with checkout.planted(fault):
        for number, tests in enumerate(stages):
            done = list(itertools.chain(*stages[:number]))
            outcome = checkout.run(tests, done, MARKS[options.suite], options.limit)
            if outcome.caught:
                break
    if "::" in outcome.by and checkout.run([outcome.by], [], MARKS["all"], options.limit).caught:
        outcome = Outcome(False, f"{outcome.by} fails without the fault as well", outcome.seconds)
    return outcome, number + 1


def report(rows: list[dict[str, Any]], options: Any) -> str:
    """Return the counts and the faults that nobody noticed, as Markdown."""
    areas = Counter(row["fault"].partition("/")[0] for row in rows)
    found = Counter(row["fault"].partition("/")[0] for row in rows if row["caught"])
    lines = [f"# Faults caught by the {options.suite} suite: {sum(found.values())} of {len(rows)}", ""]
    lines += [
        f"Seed {options.seed}; stages of tests: {options.stages} of 4.",
        "",
        "| | planted | caught |",
        "|---|---|---|",
    ]
    lines += [f"| {area} | {count} | {found[area]} |" for area, count in sorted(areas.items())]
    return "\n".join([*lines, "", "Missed:", "", *(f"- `{row['fault']}`" for row in rows if not row["caught"]), ""])


if __name__ == "__main__":
    main()
