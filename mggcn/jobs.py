"""What the command and the Python API both call: run folders, planning, starting ranks, training, predicting."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from mggcn import native
from mggcn.assemble import Rank, make_rank, memory_limit, plan_graph, resolve, threads_per_rank
from mggcn.comm.failure import Interrupted
from mggcn.comm.launch import rank_main, run_ranks, torchrun_env, torchrun_main
from mggcn.config import Config, from_tables, from_toml, to_toml
from mggcn.errors import BackendError, ConfigError, MggcnError, RunError
from mggcn.graph.csr import CSR, ArrayRows, Graph
from mggcn.graph.store import graph_sha256, open_store
from mggcn.partition.order import Assignment
from mggcn.train.runlog import RunLog, write_json
from mggcn.train.runplan import RunPlan, plan_from_dict, to_dict
from mggcn.version import __version__

if TYPE_CHECKING:
    from mggcn.comm.base import Communicator
    from mggcn.train.trainer import Stop


def make_run_folder(config: Config, name: str, out: Path | None) -> Path:
    """Create the folder of a new run with its configuration: `out`, or runs/<name>-<time>.

    Raises: RunError if `out` exists and is not empty: a run never overwrites another.
    """
    folder = out
    if folder is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        candidates = (Path("runs") / f"{name}-{stamp}{suffix}" for suffix in ("", *(f"-{k}" for k in range(2, 100))))
        folder = next(path for path in candidates if not path.exists())
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(
            f"{folder} exists and is not empty; choose another --out, or continue that run with --resume {folder}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(to_toml(config))
    except OSError as error:
        raise RunError(f"the run folder {folder} cannot be written: {error.strerror}") from error
    return folder


def extend_run(folder: Path, config: Config, epochs: Any) -> Config:
    """Return a run's configuration with another number of epochs.

    Raises: ConfigError if that is no number or less than what is done; RunError if the run is complete.
    """
    extended = from_tables({"train": {"epochs": epochs}}, config)
    done, complete = epochs_done(folder)
    if complete and extended.train.epochs != config.train.epochs:
        raise RunError(f"the run in {folder} is complete after {done} epochs; start a new one for another number")
    if extended.train.epochs < done:
        raise ConfigError(f"{folder} has trained {done} epochs already, got --epochs {extended.train.epochs}")
    return extended


def epochs_done(folder: Path) -> tuple[int, bool]:
    """Return the epochs of the last history line, and whether the run is complete."""
    try:
        lines = (folder / "history.jsonl").read_text().splitlines()
        done = int(json.loads(lines[-1])["epoch"]) if lines else 0
    except (OSError, ValueError, KeyError):
        done = 0
    return done, (folder / "result.json").exists()


def rewrite_config(folder: Path, config: Config) -> None:
    """Replace the configuration of a run that is continued with another number of epochs."""
    temporary = folder / ".config.toml.tmp"
    temporary.write_text(to_toml(config))
    temporary.rename(folder / "config.toml")


def read_run(folder: Path) -> tuple[Config, dict[str, Any], dict[str, Any]]:
    """Return configuration, plan and job (the store's path) of a run folder. Raises: RunError if it is none."""
    if not folder.is_dir():
        raise RunError(f"there is no run folder {folder}; mggcn train makes one and prints its name")
    try:
        plan = json.loads((folder / "plan.json").read_text())
        job = json.loads((folder / "job.json").read_text())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder} is not the folder of a run: it lacks a readable plan.json or job.json ({error})"
        ) from error
    return from_toml(folder / "config.toml"), plan, job


def prepare_run(config: Config, graph: Graph, store: Path | None, out: Path | None) -> tuple[Path, Config]:
    """Plan a run, refuse it if it does not fit, and write its folder. Returns the folder and the resolved configuration.

    Raises: PlanError before anything is allocated or written; ConfigError, GraphError, RunError.
    """
    check_available(config)
    config = resolve(config, graph)
    plan, _ = plan_graph(config, graph)
    plan.check(memory_limit(config))
    folder = make_run_folder(config, graph.name, out)
    write_plan(folder, plan, store)
    return folder, config


def check_available(config: Config) -> None:
    """Refuse what can be planned but not run here, before anything is written. Raises: BackendError."""
    if config.run.device != "cpu":
        raise BackendError("run.device cuda is not available in this version of mggcn; use --device cpu")
    if config.run.transport == "nccl":
        raise BackendError("run.transport nccl needs GPUs, which this version of mggcn does not use; use gloo")


@contextlib.contextmanager
def discarded_if_refused(folder: Path) -> Iterator[None]:
    """Remove a new run folder if bad input, such as a missing split, shows before the first epoch."""
    try:
        yield
    except MggcnError as error:
        if error.exit_code == 2 and not (folder / "history.jsonl").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def write_plan(folder: Path, plan: RunPlan, store: Path | None) -> None:
    """Record the plan and the store in a run folder, for its ranks, for resuming and for predicting."""
    write_json(folder / "plan.json", to_dict(plan))
    write_json(folder / "job.json", {"store": None if store is None else str(store.resolve())})


@contextlib.contextmanager
def signalled_stop() -> Iterator[Stop]:
    """Give a flag that SIGINT and SIGTERM set, once; a second one acts at once. Elsewhere than in a main thread: unset."""
    from mggcn.train.trainer import Stop

    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        for s in before:
            signal.signal(s, signal.SIG_DFL)

    for s in before:
        signal.signal(s, note)
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def train_rank(
    comm: Communicator,
    config: Config,
    graph: Graph,
    plan: RunPlan,
    owners: Assignment,
    folder: Path,
    *,
    quiet: bool,
    stop: Stop,
    started: float | None = None,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
) -> Rank:
    """Set up, train and record on one rank. Raises: Interrupted after a signal, once everything is saved.

    stop: the flag that `signalled_stop` gives and signals set in the main thread of this process; ranks as threads share it.
    """
    started = time.perf_counter() if started is None else started
    rank = make_rank(config, graph, plan, owners, comm, stop)
    comm.barrier()
    setup_seconds = time.perf_counter() - started
    log = RunLog(folder if comm.rank == 0 else None, quiet, config.train.epochs)
    complete = rank.trainer.fit(log, folder, on_epoch if comm.rank == 0 else None)
    peak = largest_peak(rank, comm)
    if not complete:
        raise Interrupted(stop.signal or signal.SIGTERM)
    if comm.rank == 0:
        write_json(folder / "result.json", result_of(config, graph, plan, rank, setup_seconds, peak))
    return rank


def largest_peak(rank: Rank, comm: Communicator) -> int:
    """Return the largest peak memory of any rank's process. Collective."""
    import torch

    peaks = torch.zeros(comm.size, dtype=torch.float64)
    peaks[comm.rank] = rank.trainer.runtime.backend.peak_bytes()
    comm.all_reduce(peaks).wait()
    return int(peaks.max())


def result_of(
    config: Config, graph: Graph, plan: RunPlan, rank: Rank, setup_seconds: float, measured_peak: int
) -> dict[str, Any]:
    """Return what result.json holds."""
    import scipy
    import torch

    trainer = rank.trainer
    return {
        **trainer.summary(),
        "seconds_per_epoch": float(np.median(trainer.epoch_seconds)) if trainer.epoch_seconds else None,
        "setup_seconds": setup_seconds,
        "planned_peak_bytes": plan.process_bytes,
        "measured_peak_bytes": measured_peak,
        "arena_bytes": rank.plan.arena_bytes,
        "bytes_sent_per_epoch": rank.plan.bytes_sent(rank.plan.train),
        "bytes_sent": rank.comm.bytes_sent,
        "versions": {
            "mggcn": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "machine": f"{platform.machine()} {processor_name()}",
            "kernels": native.isa(),
            "threads": threads_per_rank(config),
        },
        "graph_sha256": graph_sha256(graph),
    }


def processor_name() -> str:
    """Return the processor's name as the kernel gives it, for the record of a run."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def run_training(folder: Path, config: Config, graph: Graph, *, quiet: bool) -> dict[str, Any]:
    """Train the run that `prepare_run` wrote, on as many ranks as it says, and return its result.

    `graph` serves a single rank or ranks as threads; ranks as processes open the store that job.json names.
    Raises: the first error of any rank; Interrupted after SIGINT or SIGTERM, once a checkpoint is written.
    """
    started = time.perf_counter()
    if config.run.transport == "gloo" and config.run.ranks > 1:
        command = [sys.executable, "-m", "mggcn.worker", "train", str(folder), *(["--quiet"] if quiet else [])]
        run_ranks(command, config.run.ranks, folder, timeout_s=config.run.timeout_s)
    else:
        known = known_plan(folder, config, graph)
        with signalled_stop() as stop:
            on_local_ranks(
                config,
                lambda comm: train_rank(comm, config, graph, *known, folder, quiet=quiet, stop=stop, started=started),
            )
    return json.loads((folder / "result.json").read_text())  # type: ignore[no-any-return]


def known_plan(folder: Path, config: Config, graph: Graph) -> tuple[RunPlan, Assignment]:
    """Return the plan that a run folder records, without another pass over the graph, and the assignment."""
    from mggcn.partition.order import assign

    plan = plan_from_dict(config, json.loads((folder / "plan.json").read_text()))
    return plan, assign(graph.num_vertices, config.run.ranks, config.run.order, config.train.seed)


def on_local_ranks(config: Config, body: Callable[[Communicator], Any]) -> list[Any]:
    """Run `body` on every rank of this process: one, or P threads."""
    import torch

    from mggcn.comm.single import SingleCommunicator
    from mggcn.comm.threads import run_threads

    if config.run.ranks == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(threads_per_rank(config))
        try:
            return [body(SingleCommunicator())]
        finally:
            torch.set_num_threads(before)
    return run_threads(config.run.ranks, body, config.run.timeout_s)


def train_worker(comm: Communicator, folder: Path, quiet: bool) -> None:
    """One rank process of `run_training`."""
    started = time.perf_counter()
    config, _, job = read_run(folder)
    graph = open_store(job["store"])
    with signalled_stop() as stop:
        known = known_plan(folder, config, graph)
        train_rank(comm, config, graph, *known, folder, quiet=quiet, stop=stop, started=started)


def train_under_torchrun(
    config: Config, store: Path, out: Path | None, resume: Path | None, *, quiet: bool
) -> tuple[int, dict[str, Any] | None]:
    """Train as one rank of torchrun. Returns its exit code, and the result on rank 0.

    Rank 0 plans and writes the run folder; the others read it there, so the folder must be shared by all ranks.
    """
    found = torchrun_env()
    if found is None:
        raise ConfigError(
            "torchrun's environment is missing; start with torchrun --nproc-per-node P -m mggcn train ..."
        )
    _, size, _ = found
    if config.run.ranks not in (1, size):
        raise ConfigError(f"--ranks {config.run.ranks} differs from torchrun's {size} processes; leave --ranks out")
    if config.run.transport not in ("auto", "gloo"):
        raise ConfigError(f"under torchrun run.transport must be auto or gloo, got {config.run.transport}")
    if resume is not None and config.run.ranks != size:
        raise ConfigError(f"the run in {resume} has {config.run.ranks} ranks, torchrun started {size} processes")
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, ranks=size, transport="gloo"))
    check_available(config)
    result: list[dict[str, Any]] = []

    def body(comm: Communicator) -> None:
        folder = resume
        if comm.rank == 0 and folder is None:
            folder, _ = prepare_run(config, open_store(store), store, out)
        elif comm.rank == 0 and folder is not None:
            rewrite_config(folder, config)
        shared = share_path(comm, folder)
        with contextlib.nullcontext() if comm.rank or resume else discarded_if_refused(shared):
            train_worker(comm, shared, quiet)
        if comm.rank == 0:
            path = share_last(folder)
            result.append(json.loads((path / "result.json").read_text()) | {"folder": str(path)})

    with tempfile.TemporaryDirectory(prefix="mggcn-") as reports:
        code = torchrun_main(config.run.timeout_s, Path(reports), body)
    return code, result[0] if result else None


def share_last(folder: Path | None) -> Path:
    """Return rank 0's own folder."""
    if folder is None:
        raise RunError("rank 0 has no run folder")
    return folder


def share_path(comm: Communicator, path: Path | None) -> Path:
    """Return rank 0's path on every rank. Collective."""
    import torch

    text = torch.zeros(4096, dtype=torch.uint8)
    if comm.rank == 0 and path is not None:
        encoded = str(path.resolve()).encode()
        text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    comm.broadcast(text, 0).wait()
    return Path(bytes(text.tolist()).rstrip(b"\0").decode())


def predict(
    folder: Path,
    out: Path | None = None,
    *,
    weights: str = "best",
    probabilities: bool = False,
    store: Path | None = None,
) -> Path:
    """Write the class scores of every vertex in the original order, (N, C) in the run's precision, as `.npy`.

    weights: "best" (validation) or "last"; scores are logits unless `probabilities`. Runs on the ranks of the run.
    store: another one with the same features; it needs neither labels nor splits. Returns the path.
    Raises: RunError if the run has no checkpoint; ConfigError if `out` cannot be written or the features differ.
    """
    config, plan, job = read_run(folder)
    target = out or folder / "scores.npy"
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigError(f"--out expects a file such as scores.npy in a folder that exists, got {target}")
    source = store or (Path(job["store"]) if job["store"] else None)
    if source is None:
        raise RunError(f"{folder} was trained on a graph in memory; name the store to predict on with --store")
    if not (folder / "checkpoints" / "latest").exists():
        raise RunError(f"{folder} holds no checkpoint to predict with; train the run to its end first")
    width, expected = feature_width(open_store(source)), plan["graph"]["num_features"]
    if width != expected:
        raise ConfigError(f"{source} has {width} features, the run in {folder} was trained on {expected}")
    arguments = {
        "store": str(source.resolve()),
        "out": str(target.resolve()),
        "weights": weights,
        "probabilities": probabilities,
    }
    if config.run.transport == "gloo" and config.run.ranks > 1:
        command = [sys.executable, "-m", "mggcn.worker", "predict", str(folder), "--arguments", json.dumps(arguments)]
        run_ranks(command, config.run.ranks, folder, timeout_s=config.run.timeout_s)
    else:
        on_local_ranks(config, lambda comm: predict_worker(comm, folder, arguments))
    return target


def predict_worker(comm: Communicator, folder: Path, arguments: dict[str, Any]) -> None:
    """Score this rank's vertices into the shared file."""
    from mggcn.train.checkpoint import load_checkpoint

    config, recorded, job = read_run(folder)
    graph = open_store(arguments["store"])
    if arguments["store"] == job["store"]:
        plan, owners = known_plan(folder, config, graph)
    else:
        config, graph = for_scoring(config, graph, recorded["graph"]["num_classes"])
        plan, owners = plan_graph(config, graph)
    rank = make_rank(config, graph, plan, owners, comm)
    found = load_checkpoint(folder / "checkpoints")
    if found is None:
        raise RunError(f"{folder} holds no checkpoint to predict with")
    _, parts = found
    chosen = parts.get("best") if arguments["weights"] == "best" else None
    rank.trainer.runtime.weights.load_state_dict(chosen or parts["weights"])
    write_scores(comm, rank, Path(arguments["out"]), graph.num_vertices, arguments["probabilities"])


def feature_width(graph: Graph) -> int:
    """Return the number of features of a graph, 0 if it has none."""
    if graph.features is None:
        return 0
    return graph.features.num_cols if isinstance(graph.features, CSR) else graph.features.shape[1]


def for_scoring(config: Config, graph: Graph, num_classes: int) -> tuple[Config, Graph]:
    """Return a graph that is only scored, with stand-ins for the labels and splits that a rank asks for."""
    labels = ArrayRows(np.zeros(graph.num_vertices, np.int64))
    everything = ArrayRows(np.ones((1, graph.num_vertices), np.bool_))
    graph = dataclasses.replace(graph, labels=labels, splits={"train": everything}, num_classes=num_classes)
    train = dataclasses.replace(config.train, metric="accuracy", patience=0)
    data = dataclasses.replace(config.data, splits="main", split=0)
    return dataclasses.replace(config, train=train, data=data), graph


def write_scores(comm: Communicator, rank: Rank, target: Path, num_vertices: int, probabilities: bool) -> None:
    """Write the rows of every rank to one `.npy` by original id, beside the target, then rename. Collective."""
    temporary = target.with_name(f".{target.name}.tmp")
    trainer = rank.trainer
    trainer.evaluate()
    scores = trainer.logits().cpu().numpy()
    if comm.rank == 0:
        np.lib.format.open_memmap(temporary, "w+", scores.dtype, (num_vertices, scores.shape[1])).flush()
    comm.barrier()
    whole = np.lib.format.open_memmap(temporary, "r+")
    if probabilities:
        scores = softmax(scores)
    whole[trainer.runtime.inputs.row_ids.cpu().numpy()] = scores
    whole.flush()
    comm.barrier()
    if comm.rank == 0:
        temporary.rename(target)


def softmax(scores: Any) -> Any:
    """Return the probabilities (N, C) of logits (N, C)."""
    shifted = np.exp(scores - scores.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


def worker_main(
    job: str, folder: Path, rank: int, size: int, rendezvous: Path, quiet: bool, arguments: dict[str, Any]
) -> int:
    """Run one rank process that `run_ranks` started."""
    config, _, _ = read_run(folder)

    def body(comm: Communicator) -> None:
        if job == "train":
            train_worker(comm, folder, quiet)
        else:
            predict_worker(comm, folder, arguments)

    return rank_main(rank, size, rendezvous, config.run.timeout_s, folder, body)
