"""What every benchmark's report has: options, where and with what it was made, medians, tables and plots.

Imports nothing large: a contender's process pays only for its own libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
MIB, GIB = 2**20, 2**30
SEED = 20260
DISTURBED = 0.1
"""Share of the cores that other programs take, above which a row is marked."""

OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"type": float, "default": 1.0, "help": "of generated graphs; goals are for 1"},
    "threads": {"type": int, "default": 2},
    "rounds": {"type": int, "default": 7, "help": "timed turns of each contender"},
    "data": {"type": Path, "help": "folder of the real graphs (default: $MGGCN_DATA)"},
    "cache": {"type": Path, "default": ROOT / "build" / "graphs", "help": "folder that keeps the graphs"},
    "peers": {"type": Path, "default": ROOT / "build" / "peers", "help": "environment that peers/setup.sh makes"},
    "ceilings": {"type": Path, "help": "file of cpu/ceilings.py's figures, measured into it if it is not there"},
    "out": {"type": Path, "help": "folder of the report (default: bench/results)"},
}


def parse(doc: str | None, *names: str, arguments: Sequence[str] | None = None, **own: dict[str, Any]) -> Any:
    """Parse the command line: `names` are shared options, `own` those of one benchmark; "positional": it has no flag."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, how in {**own, **{name: OPTIONS[name] for name in (*names, "out")}}.items():
        positional = how.get("positional", False)
        words = {key: value for key, value in how.items() if key != "positional"}
        parser.add_argument(name if positional else f"--{name.replace('_', '-')}", **words)
    return parser.parse_args(arguments)


def listed(names: str, known: Sequence[str]) -> list[str]:
    """Split a list of names, all if there are none. Raises: SystemExit for a name that does not exist."""
    found = names.split(",") if names else list(known)
    if unknown := sorted(set(found) - set(known)):
        sys.exit(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum, maximum and the distance between the quartiles over the median."""
    median = statistics.median(values)
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [median] * 3
    iqr = (quarters[2] - quarters[0]) / median if median else 0.0
    return {"median": median, "min": min(values), "max": max(values), "iqr_over_median": iqr}


def milliseconds(found: Mapping[str, float]) -> list[str]:
    """Cells of a spread of seconds: the median, and the range."""
    return [f"{1e3 * found['median']:.1f}", f"{1e3 * found['min']:.1f} .. {1e3 * found['max']:.1f}"]


def busy_s() -> float:
    """Seconds that this machine's cores have worked, together, for whatever program; of a virtual one, also for others."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle, waiting = fields[3:5]
    return (sum(fields) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Processor seconds of this process and of those that it has started and seen end."""
    return sum(os.times()[:4])


def taken_by_others(began: Sequence[float]) -> float:
    """The share of the cores that other programs have taken since `began`: a clock's time, `busy_s` and `own_s` then.

    0 if that is unknown or less than a second ago, which `busy_s` is too coarse for.
    """
    if not began or time.monotonic() - began[0] < 1:
        return 0.0
    clock, busy, own = began
    return max(busy_s() - busy - (own_s() - own), 0.0) / ((time.monotonic() - clock) * (os.cpu_count() or 1))


def marked(name: str, beside: Sequence[float]) -> str:
    """A row's name, and what others took of the cores beside it if that disturbs: the median over its runs."""
    share = statistics.median(beside) if beside else 0.0
    return f"{name} (disturbed: others took {share:.0%})" if share > DISTURBED else name


def verdict(what: str, value: float, goal: float, *, at_most: bool = False) -> str:
    """A line that says whether a goal was met."""
    met = value <= goal if at_most else value >= goal
    sign = "at most" if at_most else "at least"
    return f"- {what}: {value:.2f} ({'met' if met else 'MISSED'}, goal {sign} {goal:g})\n"


def hardware() -> str:
    """A short name of this machine's processor and the cores that may be used, for the name of a file."""
    from mggcn.backend.cpu.machine import processor_name

    name = re.sub(r"\((r|tm)\)|\b(cpu|processor|family|model|stepping)\b", " ", processor_name().lower())
    words = re.findall(r"[a-z0-9]+", name) or [platform.machine()]
    return "-".join([*words[:4], f"{len(os.sched_getaffinity(0))}cpu"])


def shown(argument: str) -> str:
    """An argument of a command as a report quotes it: of a path outside the repository only the last part."""
    option, equals, value = argument.partition("=")
    path = Path(value if equals else argument)
    if not path.is_absolute():
        return argument
    inside = path.is_relative_to(ROOT)
    text = str(path.relative_to(ROOT)) if inside else f"<{path.name}>"
    return f"{option}={text}" if equals else text


def command_line() -> str:
    """The command of this process, as it is run from the repository root."""
    script = shown(sys.argv[0]).removesuffix("/__main__.py").removesuffix(".py").replace("/", ".")
    return shlex.join(["python", "-m", script, *map(shown, sys.argv[1:])])


def surroundings() -> dict[str, Any]:
    """What a report must say of where and with what it was made."""
    from mggcn.backend.cpu.machine import processor_name

    versions = {}
    for package in ("mggcn", "torch", "numpy", "scipy", "torch_geometric"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "mggcn", "cpu", "cuda")
    return {
        "command": command_line(),
        "hardware": hardware(),
        "processor": processor_name(),
        "date": time.strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": (git("rev-parse", "HEAD") or "unknown") + (" with changes in mggcn/ or cpu/" if changed else ""),
        "load_average_before": os.getloadavg()[0],
        "began": [time.monotonic(), busy_s(), own_s()],
        "gathers": gathers(),
    }


def gathers() -> list[tuple[int, float]]:
    """Bytes per second of rows of 256 bytes at random, by the bytes that they lie in: what this machine's caches give.

    Nothing where other programs have the cores: what is assumed then says nothing of this machine.
    """
    from mggcn.assemble.plan import figures_here
    from mggcn.backend.cpu.figures import MeasuredGather
    from mggcn.config import Config

    figures = figures_here(Config())
    return list(MeasuredGather(figures).points) if figures.measured else []  # type: ignore[arg-type]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def write_report(what: str, title: str, body: str, record: dict[str, Any], out: Path | None) -> Path:
    """Write <what>_<hardware>_<date>.md and .json to `out` (default: bench/results), print the former; return the .json."""
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    around = record["surroundings"]
    share = taken_by_others(around.get("began", ()))
    around["taken_by_others"] = share
    disturbed = f" **Other programs took {share:.0%} of the cores meanwhile: measure it again.**" * (share > DISTURBED)
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    machine = around.get("processor") or around["hardware"]
    head = (
        f"# {title}\n\n```\n{around['command']}\n```\n\n{machine}, Linux {around['kernel']}, Python "
        f"{around['python']}, {versions}; commit {around['commit']}; {around['date']}; load average at the start "
        f"{around['load_average_before']:.2f}.{disturbed}{_caches(around)} All runs: the .json file beside this one.\n\n"
    )
    path = folder / f"{what}_{around['hardware']}_{around['date']}"
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    path.with_suffix(".md").write_text(head + body)
    print(head + body)
    print(f"written: {path}.md and .json")
    return path.with_suffix(".json")


def _caches(around: dict[str, Any]) -> str:
    rates = ", ".join(f"{size / MIB:g} MiB {rate / 1e9:.0f}" for size, rate in around.get("gathers", ()))
    if not rates:
        return " Its caches were not measured: other programs had the cores."
    return f" Rows of 256 bytes at random, all threads, GB/s by operand: {rates}."


def bars(title: str, quantity: str, cells: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """What `bench.plots` draws: a bar for every series (inner keys) in every group (outer keys), if there is any."""
    names = list(dict.fromkeys(name for group in cells.values() for name in group))
    series = {name: [group.get(name) for group in cells.values()] for name in names}
    plot = {"kind": "bars", "title": title, "quantity": quantity, "groups": list(cells), "series": series}
    return [plot] if series else []


def lines(
    title: str, quantity: str, abscissa: str, points: Mapping[str, Sequence[tuple[float, float]]]
) -> list[dict[str, Any]]:
    """What `bench.plots` draws: a line through the points of every series, if there is any point."""
    series = {name: [list(point) for point in found] for name, found in points.items() if found}
    plot = {"kind": "lines", "title": title, "quantity": quantity, "abscissa": abscissa, "series": series}
    return [plot] if series else []
