"""Plant single faults in a copy of a checkout and count those that its tests catch.

    python -m tests.faults --count 200 --seed 61173 --suite fast --out build/faults

The same seed gives the same faults. The tests run once with probes at the places of the faults in Python, which say what
runs them (OUT/<suite>-tests.json); for each fault, these tests run, the shortest first, up to --each seconds, then those
that name the module. A fault whose place no test runs is missed. For C++, and for what runs when a module is imported, the
tests that name the module run, then those of its room, then tests/golden, then all: the first --stages of these four.

What was found stands in OUT/<suite>.jsonl, one fault a line: a run that is started again goes on behind it. OUT/<suite>.md
sums up. With --suite full, only faults of OUT/fast.jsonl that nobody caught meet the tests which only `make test-all` runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.checkout import Checkout, Outcome
from tests.faults.probes import Recorded
from tests.faults.sites import AREAS, Fault, draw

ROOT = Path(__file__).resolve().parents[2]
MARKS = {"fast": [], "full": ["-m", "full and not slow"]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=61173)
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--suite", choices=MARKS, default="fast")
    parser.add_argument("--each", type=float, default=60, help="seconds of tests for one fault in Python")
    parser.add_argument("--stages", type=int, default=2, help="1: tests that name the module; 4: all")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one run of tests")
    parser.add_argument("--source", type=Path, default=ROOT, help="another checkout, of the same sources")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "faults")
    options = parser.parse_args()
    checkout = Checkout(options.source.resolve(), options.out.resolve() / "checkout")
    checkout.build()
    faults = draw(checkout.root, options.count, options.seed, checkout.valid, options.areas)
    said = {fault.said((checkout.root / fault.path).read_bytes()): fault for fault in faults}
    if options.suite == "full":
        missed = {row["fault"] for row in found(options.out / "fast.jsonl") if not row["caught"]}
        said = {name: fault for name, fault in said.items() if name in missed}
    table = options.out / f"{options.suite}.jsonl"
    rows = found(table)
    recorded = recording(checkout, said, options)
    for name, fault in said.items():
        if all(row["fault"] != name for row in rows):
            outcome, after = caught(checkout, fault, tests_for(checkout, name, fault, recorded, options), options)
            rows.append({"fault": name, "kind": fault.kind, "caught": outcome.caught, "by": outcome.by, "after": after})
            rows[-1]["seconds"] = round(outcome.seconds, 1)
            with table.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(f"{'caught' if outcome.caught else 'MISSED'} {name}: {outcome.by}", flush=True)
    (options.out / f"{options.suite}.md").write_text(report(rows, options))


def found(table: Path) -> list[dict[str, Any]]:
    """Return what stands in a table of faults, if there is one."""
    return [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []


def recording(checkout: Checkout, faults: dict[str, Fault], options: Any) -> Recorded:
    """Return which tests run the places of the faults in Python, as they once were recorded if these faults were."""
    python = {name: fault for name, fault in faults.items() if fault.path.endswith(".py")}
    kept = options.out / f"{options.suite}-tests.json"
    if kept.exists():
        recorded = Recorded(**json.loads(kept.read_text()))
        if recorded.tests.keys() >= python.keys():
            return recorded
    recorded = checkout.record(list(python.values()), MARKS[options.suite])
    kept.write_text(json.dumps(dataclasses.asdict(recorded)))
    return recorded


def tests_for(checkout: Checkout, name: str, fault: Fault, recorded: Recorded, options: Any) -> list[list[str]]:
    """Return the tests that a fault meets, stage by stage."""
    stages = checkout.first(fault)[: options.stages]
    if not fault.path.endswith(".py") or "" in recorded.tests[name]:
        return stages
    tests = recorded.cheapest(name, options.each)
    return [tests, *stages[:1]] if tests else []


def caught(checkout: Checkout, fault: Fault, stages: list[list[str]], options: Any) -> tuple[Outcome, str]:
    """Return what became of a fault, and after which tests."""
    outcome, after = Outcome(False, "no test runs it", 0.0), "no test"
    with checkout.planted(fault):
        for number, tests in enumerate(stages):
            done = list(itertools.chain(*stages[:number]))
            outcome = checkout.run(tests, done, MARKS[options.suite], options.limit)
            after = f"{len(tests)} tests that run it" if "::" in tests[0] else f"stage {number + 1}"
            if outcome.caught:
                break
    unsure = "::" in outcome.by and outcome.by not in itertools.chain(
        *stages
    )  # what was recorded passed without the fault
    if unsure and checkout.run([outcome.by], [], ["-m", "not slow"], options.limit).caught:
        outcome = Outcome(False, f"{outcome.by} fails without the fault as well", outcome.seconds)
    return outcome, after


def report(rows: list[dict[str, Any]], options: Any) -> str:
    """Return the counts and the faults that nobody noticed, as Markdown."""
    areas = Counter(row["fault"].partition("/")[0] for row in rows)
    noticed = Counter(row["fault"].partition("/")[0] for row in rows if row["caught"])
    lines = [f"# Faults caught by the {options.suite} suite: {sum(noticed.values())} of {len(rows)}", ""]
    lines += [
        f"Seed {options.seed}; at most {options.each:g} s of tests that run the place; else stages {options.stages} of 4.",
        "",
        "| | planted | caught |",
        "|---|---|---|",
    ]
    lines += [f"| {area} | {count} | {noticed[area]} |" for area, count in sorted(areas.items())]
    return "\n".join([*lines, "", "Missed:", "", *(f"- `{row['fault']}`" for row in rows if not row["caught"]), ""])


if __name__ == "__main__":
    main()
