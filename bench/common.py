"""What the benchmarks share: graphs in a cache folder, contenders in processes of their own, and reports.

Imports nothing large: a contender's process pays only for its own libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
MIB, GIB = 2**20, 2**30
SEED = 20260
SETTLE_S = 0.02
"""Between two contenders: until the threads of the one before have ceased to wait for work."""
TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
"""glibc keeps what it got: without this, peers spend much of an epoch on page faults of memory that they just freed."""
MALLOC: dict[str, dict[str, str]] = {"tuned": TUNED, "default": {}}


@dataclass(frozen=True)
class Workload:
    """A synthetic graph with the extents of a known one, and the network on it. `edges` counts undirected ones."""

    name: str
    vertices: int
    edges: int
    features: int
    classes: int
    hidden: tuple[int, ...]

    def scaled(self, scale: float) -> Workload:
        """The same with fewer vertices and edges: the mean degree stays."""
        vertices, edges = max(self.classes, round(self.vertices * scale)), round(self.edges * scale)
        return Workload(self.name, vertices, edges, self.features, self.classes, self.hidden)

    @property
    def key(self) -> str:
        return f"{self.name}-{self.vertices}-{self.edges}-{self.features}-{self.classes}-{SEED}"


WORKLOADS = {
    "arxiv-like": Workload("arxiv-like", 169_343, 1_170_000, 128, 40, (256, 256)),
    "reddit-like": Workload("reddit-like", 58_000, 7_150_000, 602, 41, (512,)),
}


@contextlib.contextmanager
def cache_folder(path: Path | None) -> Iterator[Path]:
    """The folder for graphs: as given, or a temporary one."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="mggcn-bench-") as temporary:
        yield Path(temporary)


def make_store(work: Workload, cache: Path) -> Path:
    """Return the store of a workload, generated in a process of its own unless the cache has it."""
    store = cache / work.key
    if not store.exists():
        print(f"generating {work.key}", file=sys.stderr)
        code = (
            "import sys; from pathlib import Path; from mggcn.graph.generate import community;"
            "from mggcn.graph.store import write_store; a = [int(x) for x in sys.argv[2:]];"
            "write_store(community(*a[:4], seed=a[4], name=Path(sys.argv[1]).name), sys.argv[1])"
        )
        extents = [work.vertices, work.edges, work.features, work.classes, SEED]
        subprocess.run([sys.executable, "-c", code, str(store), *map(str, extents)], check=True)
    return store


def memory() -> dict[str, int]:
    """Bytes of this process: VmHWM is its peak, VmRSS what it holds now, in anonymous pages and pages of files."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {key: int(lines[key].split()[0]) * 1024 for key in ("VmHWM", "VmRSS", "RssAnon", "RssFile")}


def memory_free() -> int:
    """Bytes that new allocations may take on this machine."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def forget_peak() -> None:
    """Give freed memory back and let VmHWM begin again at what the process holds now."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def whole_run(store: Path, hidden: tuple[int, ...], ranks: int, threads: int) -> dict[str, Any]:
    """Planned and measured memory of a run as `mggcn train` does it: 3 epochs and one evaluation on P ranks."""
    run = {"ranks": ranks, "threads": max(1, threads // ranks)}
    settings = {"model": {"hidden": hidden}, "train": {"epochs": 3, "eval_every": 0}, "run": run}
    command = [sys.executable, str(HERE / "worker_job.py"), str(store), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return {"ranks": ranks, **json.loads(done.stdout.splitlines()[-1])}


class Worker:
    """A contender in a fresh process, which answers one command at a time."""

    def __init__(
        self, script: str, malloc: str, threads: int, job: dict[str, Any], python: str | Path = sys.executable
    ) -> None:
        env = {k: v for k, v in os.environ.items() if k not in TUNED} | MALLOC[malloc]
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(threads)
        env["DGLBACKEND"] = "pytorch"
        if python != sys.executable:
            env.pop("PYTHONPATH", None)
        command = [str(python), str(HERE / script)]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.ready = self.ask("prepare", job | {"threads": threads})
        except BaseException:
            self.kill()
            raise

    def ask(self, command: str, argument: Any = None) -> dict[str, Any]:
        """Have a command done. Raises: RuntimeError with the worker's traceback, or if the worker has died."""
        line = ""
        with contextlib.suppress(OSError):  # it died before it was asked
            print(json.dumps([command, argument]), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(death(self.process.wait()))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> dict[str, Any]:
        """End the process; return its peak and what else it tells."""
        answer = self.ask("close")
        self.process.wait()
        return answer

    def kill(self) -> None:
        with contextlib.suppress(OSError), self.process:
            self.process.kill()


def death(code: int) -> str:
    """How a process ended that should have answered."""
    return f"died: signal {-code}" if code < 0 else f"died: exit status {code}"


@dataclass
class Contender:
    """What a worker's `prepare` returns: a function that trains one epoch, facts for the report, numbers to compare."""

    epoch: Callable[[], float]
    facts: dict[str, Any]
    result: Callable[[], list[float]] = list


def serve(prepare: Callable[[dict[str, Any]], Contender]) -> None:
    """Answer the commands of a Worker: prepare, epoch, result, forget, close. What libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    contender: Contender | None = None
    for line in sys.stdin:
        command, argument = json.loads(line)
        try:
            began, cpu = time.perf_counter(), time.process_time()
            if command == "prepare":
                contender = prepare(argument)
                answer = dict(contender.facts)
            elif command == "epoch":
                assert contender is not None
                answer = {"loss": contender.epoch()}
            elif command == "result":
                assert contender is not None
                answer = {"result": contender.result()}
            elif command == "forget":
                forget_peak()
                answer = {}
            else:
                answer = {}
            answer |= {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
            answer["memory"] = memory()
        except Exception:
            answer = {"error": traceback.format_exc()}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
        if command == "close":
            return


def alternate(
    workers: dict[str, Worker], warm_up: int, rounds: int, lost: dict[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """Train `warm_up` + `rounds` epochs of every worker, in turn, in each round in another order; return them all.

    A worker that dies or fails loses its own epochs alone: it leaves `workers`, and `lost` says why.
    """
    epochs: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    shuffled = random.Random(SEED)
    for _ in range(warm_up + rounds):
        for name in shuffled.sample(list(workers), len(workers)):
            time.sleep(SETTLE_S)
            try:
                epochs[name].append(workers[name].ask("epoch"))
            except RuntimeError as error:
                lost[name] = str(error).strip().splitlines()[-1]
                workers.pop(name).kill()
                del epochs[name]
    return epochs


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum, maximum and the distance between the quartiles over the median."""
    median = statistics.median(values)
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [median] * 3
    return {
        "median": median,
        "min": min(values),
        "max": max(values),
        "iqr_over_median": (quarters[2] - quarters[0]) / median if median else 0.0,
    }


def hardware() -> str:
    """A short name of this machine's processor and the cores that may be used, for the name of a file."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2] for line in lines if line.startswith("model name")), platform.machine())
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return "-".join([*words[:3], f"{len(os.sched_getaffinity(0))}cpu"])


def shown(argument: str) -> str:
    """An argument of a command as a report quotes it: of a path outside the repository only the last part."""
    option, equals, value = argument.partition("=")
    path = Path(value if equals else argument)
    if not path.is_absolute():
        return argument
    inside = path.is_relative_to(HERE.parent)
    text = str(path.relative_to(HERE.parent)) if inside else f"<{path.name}>"
    return f"{option}={text}" if equals else text


def surroundings() -> dict[str, Any]:
    """What a report must say of where and with what it was made."""
    versions = {}
    for package in ("mggcn", "torch", "numpy", "scipy", "torch_geometric"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    git = ["git", "-C", str(HERE.parent)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "--", "mggcn", "cpu", "cuda"], capture_output=True, text=True, check=False
    )
    return {
        "command": shlex.join(["python", *map(shown, sys.argv)]),
        "hardware": hardware(),
        "date": time.strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": (commit or "unknown") + (" with changes in mggcn/ or cpu/" if dirty.stdout else ""),
        "load_average_before": os.getloadavg()[0],
    }


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def write_report(what: str, title: str, body: str, record: dict[str, Any], out: Path | None) -> None:
    """Write <what>_<hardware>_<date>.md and .json to `out` (default: bench/results) and print the former."""
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    around = record["surroundings"]
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    head = (
        f"# {title}\n\n```\n{around['command']}\n```\n\n{around['hardware']}, Linux {around['kernel']}, Python "
        f"{around['python']}, {versions}; commit {around['commit']}; {around['date']}; load average at the start "
        f"{around['load_average_before']:.2f}. All runs: the .json file beside this one.\n\n"
    )
    path = folder / f"{what}_{around['hardware']}_{around['date']}"
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    path.with_suffix(".md").write_text(head + body)
    print(head + body)
    print(f"written: {path}.md and .json")
