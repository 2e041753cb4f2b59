"""Contenders in processes of their own: started, asked for one epoch at a time, in turn. One that dies leaves the others.

Imports nothing large: a contender's process pays only for its own libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import ROOT, SEED, busy_s

SETTLE_S = 0.02
"""Between two contenders: until the threads of the one before have ceased to wait for work."""
MALLOC: dict[str, dict[str, str]] = {
    "tuned": {
        "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
        "MALLOC_TOP_PAD_": str(256 << 20),
    },
    "default": {},
}
"""Tuned, glibc keeps what it got: else peers spend much of an epoch on page faults of memory that they just freed."""


def memory() -> dict[str, int]:
    """Bytes of this process: VmHWM is its peak, VmRSS what it holds now."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {key: int(lines[key].split()[0]) * 1024 for key in ("VmHWM", "VmRSS")}


def held(pid: int | str = "self") -> dict[str, int]:
    """Bytes of a process and of those that it has started: anonymous, shared, and pages of files that one of them maps.

    Memory that several of them share counts once. What has ended meanwhile counts as nothing.
    """
    found = dict.fromkeys(("Pss_Anon", "Pss_Shmem", "RssFile"), 0)
    waiting = [str(pid)]
    while waiting:
        process = Path("/proc", waiting.pop())
        with contextlib.suppress(OSError):
            told = [
                *(process / "smaps_rollup").read_text().splitlines(),
                *(process / "status").read_text().splitlines(),
            ]
            lines = dict(line.split(":", 1) for line in told if line.startswith(tuple(found)))
            for name, nbytes in lines.items():
                own = int(nbytes.split()[0]) * 1024
                found[name] = max(found[name], own) if name == "RssFile" else found[name] + own
            for task in (process / "task").iterdir():
                waiting += (task / "children").read_text().split()
    return found


def memory_free() -> int:
    """Bytes that new allocations may take on this machine."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def cpu_s() -> float:
    """Processor seconds of this process and of those that it has started and seen end."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def forget_peak() -> None:
    """Give freed memory back and let VmHWM begin again at what the process holds now."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def last_line(error: BaseException) -> str:
    """What went wrong, in one line: the last one that is none of DGL's trace."""
    lines = [
        line for line in str(error).strip().splitlines() if line and not line.startswith(("Stack trace:", "  [bt]"))
    ]
    return (lines or [type(error).__name__])[-1]


def said(command: list[str], env: dict[str, str] | None = None) -> str:
    """Run a command from the repository root and return what it printed. Raises: RuntimeError with its last line."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [death(done.returncode)])[-1])
    return done.stdout


def mggcn(*arguments: str, malloc: str = "default", group: Path | None = None) -> str:
    """Run the command `mggcn`, in a memory control group if one is given. Raises: RuntimeError."""
    command = [sys.executable, "-m", "mggcn", *arguments]
    if group is not None:
        command = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs"), *command]
    return said(command, os.environ | MALLOC[malloc])


@contextlib.contextmanager
def memory_group(nbytes: int) -> Iterator[Path]:
    """Make a memory control group, of version 1 or 2, with a limit that counts the page cache, too; yield its folder.

    Raises: OSError where this process may make none.
    """
    root = Path("/sys/fs/cgroup")
    first, limit = (root / "memory", "memory.limit_in_bytes") if (root / "memory").is_dir() else (root, "memory.max")
    folder = first / f"mggcn-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / limit).write_text(str(nbytes))
        yield folder
    finally:
        for _ in range(50):  # the last process may be about to leave
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def group_peak(folder: Path) -> int:
    """The most bytes that a control group's processes and page cache have had at once; 0 where the system does not say."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        with contextlib.suppress(OSError):
            return int((folder / name).read_text())
    return 0


def death(code: int) -> str:
    """How a process ended that should have answered."""
    return f"died: signal {-code}" if code < 0 else f"died: exit status {code}"


class Worker:
    """A contender in a fresh process, which answers one command at a time; `module` calls `serve`."""

    def __init__(
        self, module: str, malloc: str, threads: int, job: dict[str, Any], python: str | Path = sys.executable
    ) -> None:
        env = {k: v for k, v in os.environ.items() if k not in MALLOC["tuned"]} | MALLOC[malloc]
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(threads)
        env["DGLBACKEND"] = "pytorch"
        if python != sys.executable:
            env.pop("PYTHONPATH", None)
        command = [str(python), "-m", module]
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
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

    def kill(self) -> None:
        with contextlib.suppress(OSError), self.process:
            self.process.kill()


@dataclass
class Contender:
    """What a worker's `prepare` returns: a function that trains one epoch, facts for the report, numbers to compare."""

    epoch: Callable[[], float]
    facts: dict[str, Any]
    result: Callable[[], list[float]] = list


def serve(prepare: Callable[[dict[str, Any]], Contender]) -> None:
    """Answer the commands of a Worker: prepare, epoch, result, forget. What libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    contender: Contender | None = None
    for line in sys.stdin:
        command, argument = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            began, cpu = time.perf_counter(), cpu_s()
            if command == "prepare":
                contender = prepare(argument)
                answer |= contender.facts
            elif command == "forget":
                forget_peak()
            else:
                assert contender is not None
                answer |= {"loss": contender.epoch()} if command == "epoch" else {"result": contender.result()}
            answer |= {"seconds": time.perf_counter() - began, "cpu_seconds": cpu_s() - cpu}
            answer["memory"] = memory()
        except Exception:
            answer = {"error": traceback.format_exc()}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


Workers = dict[str, Worker]
Lost = dict[str, str]
"""Why each contender that is not compared is left out."""


def for_each(workers: Workers, lost: Lost, do: Callable[[str, Worker], Any]) -> dict[str, Any]:
    """Call `do` with every worker; one that dies or fails loses its own row alone: it leaves `workers`, `lost` says why."""
    found = {}
    for name, worker in list(workers.items()):
        try:
            found[name] = do(name, worker)
        except RuntimeError as error:
            lost[name] = last_line(error)
            workers.pop(name).kill()
    return found


@contextlib.contextmanager
def started(starts: dict[str, Callable[[], Worker]], lost: Lost) -> Any:
    """Contenders that have started, in a block at whose end they are killed; `lost` has those that could not start."""
    workers: Workers = {}
    try:
        for name, start in starts.items():
            try:
                workers[name] = start()
            except RuntimeError as error:
                lost[name] = last_line(error)
        yield workers
    finally:
        for worker in workers.values():
            worker.kill()


def alternate(workers: Workers, rounds: int, lost: Lost) -> dict[str, list[dict[str, Any]]]:
    """Train `rounds` epochs of every worker, in turn, in each round in another order; return what each worker told.

    beside: the share of the cores that other programs took meanwhile.
    """
    epochs: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    shuffled = random.Random(SEED)

    def one(name: str, worker: Worker) -> None:
        time.sleep(SETTLE_S)
        began, busy = time.perf_counter(), busy_s()
        told = worker.ask("epoch")
        others = busy_s() - busy - told.get("cpu_seconds", 0.0)
        told["beside"] = max(0.0, others) / (time.perf_counter() - began) / (os.cpu_count() or 1)
        epochs[name].append(told)

    for _ in range(rounds):
        order = {name: workers[name] for name in shuffled.sample(list(workers), len(workers))}
        for_each(order, lost, one)
        for name in [name for name in workers if name not in order]:
            workers.pop(name)
    return {name: epochs[name] for name in workers}
