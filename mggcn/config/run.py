"""Table [run] of the settings: where and how a run executes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mggcn.config.values import Range
from mggcn.config.values import require as _require
from mggcn.config.values import settle as _settle
from mggcn.errors import ConfigError

MAX_RANKS = 4096
"""Ranks of a plan; more than any node has."""
MAX_DELAY = 1000
"""Epochs that a message of the delayed strategy may take."""
MAX_THREADS = 4096
"""Threads of a rank: beyond what machines have, OpenMP ends the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Table [run]: where and how a run executes. Beyond rounding, only an inexact `delay` changes a result."""

    ranks: Annotated[int, Range(1, MAX_RANKS)] = 1
    """Number of ranks P that share the graph."""
    threads: Annotated[int, Range(0, MAX_THREADS)] = 0
    """Threads per rank; 0 divides the machine's cores among the ranks, and takes fewer where epochs are short or the
    machine is busy. No result depends on it."""
    bind: Literal["auto", "off"] = "auto"
    """Cores of rank processes. auto: where a machine has several memory nodes with room, a rank on a CPU is bound to cores
    of one node, from the first that the run may use, and a rank on a GPU to those of the GPU's node. off: nothing is
    bound, for example because two runs share the machine."""
    transport: Literal["auto", "single", "threads", "gloo", "nccl"] = "auto"
    """How ranks exchange messages; auto: single for one rank; for several, gloo on CPUs and nccl on GPUs."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the kernels run."""
    precision: Literal["fp32", "tf32", "mixed", "bf16", "fp64"] = "fp32"
    """Type of activations and messages. tf32 rounds the operands of dense products; mixed rounds what is multiplied with
    the graph, and messages, to bf16 and keeps the rest in fp32; bf16 keeps weights and sums in fp32. On GPUs of capability
    9.0 with Triton dense products of fp32 and mixed, but for gradients of weights, are three products of TF32 each, as
    exact as fp32's (`backend` in a run's record)."""
    order: Literal["random", "permute", "none", "ranges", "metis", "metis-balanced", "stream", "locality", "auto"] = (
        "random"
    )
    """Which vertices each rank owns: random assignment that keeps the order, full permutation, ranges with even numbers of
    vertices (none), or cut where nonzeros and splits are even too (ranges, for a relabelled store), METIS's parts of even
    work, those in which vertices and the first training, validation and test split are even too, as batches
    need them, parts found in one pass over the edges (stream), or ranges of an order in which neighbours are near each
    other (locality), on one rank too; auto takes the one with the least predicted seconds."""
    spmm: Literal["own", "cusparse"] = "own"
    """Sparse products on a GPU: mggcn's kernels, or NVIDIA's cuSPARSE for comparison."""
    strategy: Literal["broadcast", "halo", "slice", "delayed", "auto"] = "broadcast"
    """How neighbours' rows arrive. broadcast: MG-GCN's stages; halo: only the rows that are needed; slice: every rank
    multiplies the whole graph with a slice of the columns; delayed: DistGNN's partial aggregates over a vertex cut; auto:
    the exact one with the least predicted seconds that fits."""
    batches: Literal["independent", "cooperative", "auto"] = "independent"
    """Of sampled training on several ranks. independent: each rank computes all rows that its own training vertices need;
    cooperative: every row of a step is computed once, by the rank that owns it, and sent to those that read it (Balin,
    LaSalle and Catalyurek 2025). Draws and gradients are the same, up to rounding. auto: the one with the least predicted
    seconds that fits; with a batch norm, or `sample.weights` block, cooperative, whose results do not depend on the number
    of ranks."""
    delay: str = "0"
    """For the delayed strategy: none (0c) never sends, 0 (cd-0) is exact, r >= 1 (cd-r) sends a bin of the split vertices
    per epoch, which arrives r epochs later. none and r >= 1 approximate the gradient; evaluation is always exact. Other
    strategies refuse it and `stale_aggregates`; auto lists such runs and chooses an exact one."""
    stale_aggregates: Literal["discard", "reuse"] = "discard"
    """For cd-r, in epochs in which a split vertex exchanges nothing: reuse adds the sums last received from its other
    copies to its fresh local sum; discard scales the local sum up by the degree that it lacks (DistGNN, Algorithm 4)."""
    products: Literal["auto", "gemm-first", "aggregate-first"] = "auto"
    """Order of the two products of an inner layer; auto puts the narrower side through the graph."""
    features: Literal["auto", "dense", "sparse"] = "auto"
    """How the input is stored, and on CPUs that of a batch; auto compares work, and counts zeros of dense sources first;
    sparse converts them, but those that batches read from a store."""
    prune: Literal["auto", "off"] = "auto"
    """Rows that nothing reads in a training epoch: auto leaves them out of the aggregations where that saves enough of them
    and the strategy is exact over rows; off computes everything. Evaluation always does."""
    recompute: Literal["off", "on"] = "off"
    """Rows that dense products made and the backward pass reads: on computes them again where their operand is kept
    anyway, for less memory and the time of these products; the same bits."""
    capacity: Literal["auto", "memory", "host", "disk"] = "auto"
    """Where rows are between the ops of an epoch, with the same bits in every case. memory: all that the backward pass
    reads stays there. host, for whole graphs on GPUs: in pinned memory of the host from the forward to the backward pass,
    of as few matrices as `memory_limit` asks for, without one of all. disk, for whole graphs on CPUs: in a file, of which
    ops read some rows or some columns at a time, as many as `memory_limit` lets. Both take less memory and more seconds.
    auto: the first that fits of memory, memory with `recompute` on, and host or disk (docs/capacity.md)."""
    scratch: str = ""
    """Folder, on a fast disk, of the file that holds rows on disk; by default the run folder. The file has no name, and is
    gone with the process."""
    log: Literal["none", "tensorboard"] = "none"
    """Where the history goes beside history.jsonl. tensorboard: the run folder's tensorboard/, which TensorBoard reads."""
    timeline: bool = False
    """Record when every op of a few epochs ran, on which stream: the run folder's timeline.json."""
    memory_limit: Annotated[int, Range(0)] = 0
    """Bytes that one rank may use; 0 takes what the machine or cgroup has free, divided by the ranks."""
    timeout_s: Annotated[float, Range(above=0)] = 600.0
    """Seconds after which a rank that waits for another gives up."""

    def __post_init__(self) -> None:
        _settle(self, "run")
        _require(
            self.delay == "none" or (self.delay.isascii() and self.delay.isdigit() and int(self.delay) <= MAX_DELAY),
            f"run.delay must be none or a number of epochs in 0 .. {MAX_DELAY}, got {self.delay!r}",
        )
        object.__setattr__(self, "delay", self.delay if self.delay == "none" else str(int(self.delay)))
        if self.transport == "nccl" and self.device == "cpu":
            raise ConfigError("run.transport nccl moves data between GPUs; use --device cuda, or gloo on CPUs")
        if self.transport == "gloo" and self.device == "cuda":
            raise ConfigError(
                "run.transport gloo moves host memory; with --device cuda use nccl, or threads on one GPU"
            )
        if self.precision == "tf32" and self.device == "cpu":
            raise ConfigError("run.precision tf32 needs --device cuda; on a CPU use fp32, mixed, bf16 or fp64")
        if self.precision == "mixed" and self.spmm == "cusparse":
            raise ConfigError(
                "run.precision mixed needs --spmm own: cuSPARSE rounds no results; or choose fp32 or bf16"
            )
        if self.transport == "single" and self.ranks > 1:
            raise ConfigError(f"run.transport single has one rank, got run.ranks {self.ranks}; use threads or gloo")

    @property
    def delay_epochs(self) -> int | None:
        """Epochs that a message of the delayed strategy takes; None: it is never sent."""
        return None if self.delay == "none" else int(self.delay)

    @property
    def cut_bins(self) -> int:
        """Bins of the split vertices of a cut, one of which exchanges its sums per epoch."""
        return max(self.delay_epochs or 0, 1)

    @property
    def process_transport(self) -> Literal["gloo", "nccl"]:
        """Transport between ranks that are processes."""
        return "gloo" if self.device == "cpu" else "nccl"
