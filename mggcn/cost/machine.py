"""Machines as their TOML files describe them: what one device does in a second, and what the links between ranks carry.

A file holds rates for kernels as they run, not peaks: measured by `mggcn tune`, or estimated from data sheets, which
`origin` says. Files of known machines are in the folder machines. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from mggcn.aggregate.edge_op import EDGE_KERNELS, Arithmetic
from mggcn.backend.cpu.figures import ITEMS, Figures, MeasuredGather
from mggcn.backend.gather_rates import CacheRates, Gather
from mggcn.comm.nccl_memory import NcclMeasured, NcclSizes
from mggcn.config.files import read_tables
from mggcn.cost.toml_fields import Fields
from mggcn.errors import ConfigError
from mggcn.memory.pages import DiskRates

MACHINES: Final = Path(__file__).with_name("machines")
LIKE: Final = {"H100": "dgx-h100", "H200": "hgx-h200", "A100": "dgx-a100", "V100": "dgx-1"}
"""Shipped files by words of the names of GPUs."""
UPLOAD: Final = 20e9
"""Bytes per second of uploads to a GPU whose file does not say: between PCIe 3 and 4 with 16 lanes."""
PRECISIONS: Final = ("fp32", "tf32", "bf16", "fp64")
Kind = Literal["cpu", "cuda"]
Origin = Literal["measured", "partly", "described", "assumed"]
MessageKind = Literal["broadcast", "all_to_all", "all_reduce"]
MESSAGES: Final[tuple[MessageKind, ...]] = get_args(MessageKind)


@dataclass(frozen=True, slots=True)
class RateTable:
    """Bytes per second by the bytes of the operand that the work touches: caches make small ones fast. Or FLOP per second
    by width.

    points: (footprint in bytes, bytes per second), footprints rising.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, footprint: float) -> float:
        """Return the rate, linear in the logarithm of the footprint between points, constant beyond the last ones."""
        before = self.points[0]
        for point in self.points:
            if footprint <= point[0]:
                if point is before:
                    return point[1]
                share = math.log(footprint / before[0]) / math.log(point[0] / before[0])
                return before[1] + share * (point[1] - before[1])
            before = point
        return before[1]

    def row_s(self, row_bytes: float, footprint: float) -> float:
        """Implement Gather.row_s."""
        return row_bytes / self.at(footprint)

    def slice_bytes(self, row_bytes: int, footprint: float) -> int:
        """Return 0: the measured rates already include the choice of variant."""
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRates:
    """Rates of one device alone: a GPU, a socket, or all cores of a host that its ranks share."""

    kind: Kind
    count: int
    """Devices of the machine."""
    shared: bool
    """Whether several ranks may share a device; each then gets its part of the rates, and their operands of the cache."""
    cores: int
    """Number of calls that a device runs concurrently."""
    memory_bytes: int
    copy: RateTable
    """Bytes per second, read plus written, of passes over whole matrices."""
    gather: Gather
    """Seconds of a row that a sparse product reads at random, by bytes of the dense operand."""
    row_s: float
    """Additional seconds per gathered row, wherever it is stored: this makes narrow rows expensive."""
    call_s: float
    """Seconds of a kernel beside its work: launch, Python, waking the threads."""
    gemm: Mapping[str, float]
    """FLOP per second of dense products by precision, of shapes for which there is no table."""
    gemm_rows: Mapping[str, RateTable] = field(default_factory=dict)
    """Likewise of products with a result for each row, by the harmonic mean of both widths: an assumption about
    products whose widths differ."""
    gemm_sums: Mapping[str, RateTable] = field(default_factory=dict)
    """Likewise of sums over the rows, the gradients of weights."""
    fused: Mapping[str, float] = field(default_factory=dict)
    """Likewise of products of rows with all that follows in the same kernel; none in a precision in which products and
    what follows are kernels of their own."""
    fused_grad: Mapping[str, float] = field(default_factory=dict)
    """Likewise of gradients of rows, with the activation's. Of the same precisions."""
    in_place: RateTable | None = None
    """As `copy`, of passes that write where they read, for which nothing is fetched to be overwritten; None: as `copy`."""
    edge_s: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """Seconds of a core for an edge, for each of its heads and each of its columns of float32, which kernels along edges
    (aggregate/edge_op.py) take beside reading its row; those without figures are as fast as rows are read."""
    op_s: float = 0.0
    """As `call_s`, of the first call of an op, or behind a wait: threads have gone to sleep meanwhile; 0: as any call."""
    matrix_s: float = 0.0
    """Seconds of Python on a host for each matrix of a batch, with all that a step on one takes beside ops and draws; 0: as
    some beginnings of ops (cost/batches.py)."""
    pace: float = 1.0
    """How many times as long work takes in an epoch as at these rates, which are those of kernels called one by one."""
    least_s: float = 0.0
    """Seconds that a kernel takes at least, however little it does: its loads wait for each other."""
    upload: float = 0.0
    """Bytes per second from the host's memory to a device of its own; 0: its memory is the host's."""

    def along_edge_s(self, what: Arithmetic | None) -> tuple[float, float]:
        """Return the seconds for which all cores compute along an edge, for what is computed for edges at once and for its
        columns; 0 where nothing was measured.
        """
        if what is None or what.kernel not in self.edge_s:
            return 0.0, 0.0
        edge, head, column = self.edge_s[what.kernel]
        return (edge + head * what.heads) / self.cores, column * what.columns / self.cores

    @property
    def unfused(self) -> DeviceRates:
        """The device with products that are kernels of their own, as without Triton."""
        return dataclasses.replace(self, fused={}, fused_grad={})


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Rates of a transport between `ranks` ranks.

    pooled: all messages pass one bottleneck (the memory of a shared host): rates count the bytes that reach any rank.
    Otherwise a rate is that of each rank, in bytes that it sends or receives. An all-reduce counts what a ring sends.
    latency_s: seconds of a message without bytes.
    busy: share of a rank's device that a message in flight takes from computing; with 1, nothing overlaps.
    """

    transport: str
    ranks: int
    rates: Mapping[MessageKind, float]
    latency_s: Mapping[MessageKind, float]
    pooled: bool
    busy: float

    def transfer_s(self, kind: MessageKind, sent: list[int], received: list[int]) -> float:
        """Return the seconds for which one message holds the link, from its bytes on every rank, without its latency."""
        if self.pooled:
            moved = sum(received)
        else:
            # The root of a broadcast sends its block once; the network, or the other ranks, multiply it.
            moved = max(received) if kind == "broadcast" else max(*sent, *received)
        return moved / self.rates[kind]

    def message_s(self, kind: MessageKind, sent: list[int], received: list[int]) -> float:
        """Return the seconds of a message on a link that is free: its latency, and its bytes over the rate."""
        return self.latency_s[kind] + self.transfer_s(kind, sent, received)


@dataclass(frozen=True, slots=True)
class Topology:
    """Equal links of a device, as far as the analysis of 1.5D partitions counts them (MG-GCN, section 5.1)."""

    broadcast: int
    """Links that a broadcast to all ranks can use."""
    replication: int
    """Groups of ranks, and copies of every row, of the 1.5D partition."""
    group_broadcast: int
    """Links that a broadcast within a group can use."""
    reduction: int
    """Links that the reduction between the groups can use."""


ASSUMED_DISK: Final = DiskRates(4e8, 4e8, 4e8)
"""A disk that was never measured: a SATA SSD, or what a rented machine's disk is often held to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine on which a plan is costed."""

    name: str
    title: str
    origin: Origin
    device: DeviceRates
    links: tuple[Link, ...]
    topology: Topology | None = None
    nccl: tuple[NcclMeasured, ...] = ()
    """NCCL's measured memory on its GPUs."""
    disk: DiskRates | None = None
    """The disk that the ranks of a device share, where rows are on disk; None: it was not measured."""

    @property
    def disk_rates(self) -> DiskRates:
        """The disk, as measured or assumed."""
        return self.disk or ASSUMED_DISK

    @property
    def caveat(self) -> str:
        """Return a warning about rates that were not measured; "" for measured ones."""
        return {
            "measured": "",
            "partly": "measured, except for its messages, which are assumed; run mggcn tune",
            "described": "described from data sheets, not measured",
            "assumed": "assumed, not measured; run mggcn tune",
        }[self.origin]

    def sharing(self, ranks: int) -> int:
        """Return the ranks on each device. Raises: ConfigError if there are more ranks than devices and none is shared."""
        share = -(-ranks // self.device.count)
        if share > 1 and not self.device.shared:
            raise ConfigError(
                f"machine {self.name} has {self.device.count} devices, one for each rank, got {ranks} ranks; "
                "plan fewer ranks, or describe a larger machine in a file for --machine"
            )
        return share

    def link(self, ranks: int, transport: str) -> Link:
        """Return the link for as many ranks: of the transport if it is described, with the next number of ranks."""
        same = [link for link in self.links if link.transport == transport] or list(self.links)
        return min(same, key=lambda link: (abs(math.log(link.ranks / ranks)), link.ranks))

    def memory_per_rank(self, ranks: int) -> int:
        """Return the bytes that each of `ranks` ranks may use. Raises: ConfigError as sharing."""
        return self.device.memory_bytes // self.sharing(ranks)


def read_machine(path: Path) -> Machine:
    """Read a machine's file. Raises: ConfigError that names the file and the key that is unknown, missing or wrong."""
    top = Fields(read_tables(path, "machine"), f"{path}")
    device = top.table("device")
    machine = Machine(
        name=top.text("name"),
        title=top.text("title"),
        origin=top.choice("origin", get_args(Origin)),
        device=_device(device),
        links=tuple(_link(entry) for entry in top.tables("link")),
        topology=_topology(top.table("topology")) if top.has("topology") else None,
        nccl=tuple(_nccl(entry) for entry in top.tables("nccl")) if top.has("nccl") else (),
        disk=_disk(top.table("disk")) if top.has("disk") else None,
    )
    top.finish()
    return machine


def shipped_machines() -> list[str]:
    """Return the names of shipped machines, which --machine takes besides files."""
    return sorted(path.stem for path in MACHINES.glob("*.toml"))


def find_machine(name: str) -> Machine:
    """Return a machine by the name of a shipped one or by its file. Raises: ConfigError that lists the known names."""
    if name in shipped_machines():
        return read_machine(MACHINES / f"{name}.toml")
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"--machine expects a file or one of {', '.join(shipped_machines())}, got {name!r}; "
            "mggcn tune --out FILE writes a file for this machine"
        )
    return read_machine(path)


def tuned_path() -> Path:
    """Return where `mggcn tune` saves the rates of this machine: below $XDG_CONFIG_HOME, by default ~/.config."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mggcn" / "machine.toml"


def default_machine(kind: Kind, tuned: Path, gpu: str = "") -> Machine:
    """Return the machine in the file `tuned` if its device is of this kind, else a shipped or an assumed one.

    gpu: the name of the GPU that is here, by which one like it is found, with as many as there are ranks. What was measured
    of NCCL and of the disk counts in either case: it is this machine's. Raises: ConfigError if the file is there but cannot
    be read.
    """
    assumed = read_machine(MACHINES / f"assumed-{kind}.toml")
    name = next((name for part, name in LIKE.items() if re.search(rf"\b{part}\b", gpu)), "")
    if kind == "cuda" and name:
        machine = find_machine(name)
        device = dataclasses.replace(machine.device, count=assumed.device.count)
        assumed = dataclasses.replace(machine, device=device, title=f"{gpu}, as in {machine.title}")
    if not os.path.lexists(tuned):
        return assumed
    machine = read_machine(tuned)
    if machine.device.kind == kind:
        return machine
    return dataclasses.replace(assumed, nccl=machine.nccl, disk=machine.disk)


def with_figures(machine: Machine, figures: Figures, threads: int, ranks: int, item: int = 4) -> Machine:
    """Return an assumed machine with the rates by which kernels are chosen, those of all threads of its ranks.

    item: bytes of a number in rows that are multiplied with the graph. Rates of messages and the cost of a call stay
    assumed. Nothing changes if the figures are assumed.
    """
    if not figures.measured:
        return machine
    dense = {name: rate for item, name in ITEMS.items() if (rate := figures.slowest_shape(item))}
    device = dataclasses.replace(
        machine.device,
        cores=threads,
        copy=RateTable(figures.copy),
        gather=MeasuredGather(figures, item),
        row_s=0.0,
        gemm={**machine.device.gemm, **dense},
    )
    title = f"this machine ({threads} thread{'s' * (threads > 1)})"
    origin: Origin = "measured" if ranks == 1 else "partly"
    return dataclasses.replace(machine, name="measured", title=title, origin=origin, device=device)


def _device(fields: Fields) -> DeviceRates:
    device = DeviceRates(
        kind=fields.choice("kind", get_args(Kind)),
        count=fields.whole("count", 1),
        shared=fields.flag("shared"),
        cores=fields.whole("cores", 1),
        memory_bytes=fields.whole("memory_bytes", 1),
        copy=_table(fields, "copy"),
        gather=_table(fields, "gather"),
        row_s=fields.number("row_s", least=0.0),
        call_s=fields.number("call_s", least=0.0),
        gemm=fields.named_numbers("gemm", PRECISIONS, some=True),
        gemm_rows=_by_width(fields, "gemm_rows"),
        gemm_sums=_by_width(fields, "gemm_sums"),
        fused=_fused(fields, "fused"),
        fused_grad=_fused(fields, "fused_grad"),
        in_place=_table(fields, "in_place") if fields.has("in_place") else None,
        edge_s=_edges(fields) if fields.has("edge_s") else {},
        op_s=fields.number("op_s", least=0.0) if fields.has("op_s") else 0.0,
        matrix_s=fields.number("matrix_s", least=0.0) if fields.has("matrix_s") else 0.0,
        pace=fields.number("pace") if fields.has("pace") else 1.0,
        least_s=fields.number("least_s", least=0.0) if fields.has("least_s") else 0.0,
    )
    if device.fused.keys() != device.fused_grad.keys():
        raise ConfigError(f"{fields.where}: fused and fused_grad need the same precisions")
    upload = fields.number("upload") if device.kind == "cuda" and fields.has("upload") else 0.0
    fields.finish()
    if device.kind == "cuda":
        device = dataclasses.replace(device, gather=_cached(fields, device), row_s=0.0, upload=upload or UPLOAD)
    return device


def _fused(fields: Fields, key: str) -> Mapping[str, float]:
    return fields.named_numbers(key, ("fp32", "tf32", "bf16"), some=True) if fields.has(key) else {}


def _table(fields: Fields, key: str) -> RateTable:
    return _rising(fields, key, fields.pairs(key), "footprints")


def _by_width(fields: Fields, key: str) -> Mapping[str, RateTable]:
    found = fields.named_pairs(key, PRECISIONS) if fields.has(key) else {}
    return {name: _rising(fields, f"{key}.{name}", points, "widths") for name, points in found.items()}


def _edges(fields: Fields) -> Mapping[str, tuple[float, float, float]]:
    found = fields.named_lists("edge_s", EDGE_KERNELS, 3)
    return {name: (edge, head, column) for name, (edge, head, column) in found.items()}


def _rising(fields: Fields, key: str, points: list[tuple[float, float]], what: str) -> RateTable:
    firsts = [first for first, _ in points]
    if firsts != sorted(set(firsts)):
        raise ConfigError(f"{fields.where}: {key} needs rising {what}, got {firsts}")
    return RateTable(tuple(points))


def _cached(fields: Fields, device: DeviceRates) -> CacheRates:
    """A GPU's gathers: up to the bytes that its cache holds, and beyond; row_s is what rows from memory cost."""
    points = device.gather.points
    if len(points) != 2:
        raise ConfigError(
            f"{fields.where}: gather of a GPU expects two points, the bytes of an operand that its cache holds and any "
            f"beyond, each with its rate, got {len(points)}"
        )
    (cache_bytes, cached), (_, missed) = points
    return CacheRates(cache_bytes, cached, missed, device.row_s)


def _link(fields: Fields) -> Link:
    link = Link(
        transport=fields.text("transport"),
        ranks=fields.whole("ranks", 1),
        rates=fields.named_numbers("rates", MESSAGES),
        latency_s=fields.named_numbers("latency_s", MESSAGES),
        pooled=fields.flag("pooled"),
        busy=fields.number("busy", least=0.0, most=1.0),
    )
    fields.finish()
    return link


def _disk(fields: Fields) -> DiskRates:
    disk = DiskRates(fields.number("read"), fields.number("write"), fields.number("both"))
    fields.finish()
    return disk


def _nccl(fields: Fields) -> NcclMeasured:
    names = [field.name for field in dataclasses.fields(NcclSizes)]
    measured = NcclMeasured(
        fields.whole("ranks", 1),
        NcclSizes(**{name: fields.whole(name, 1) for name in names}),
        fields.whole("collective_bytes", 0),
        fields.whole("p2p_bytes", 0),
    )
    fields.finish()
    return measured


def _topology(fields: Fields) -> Topology:
    topology = Topology(
        fields.whole("broadcast", 1),
        fields.whole("replication", 2),
        fields.whole("group_broadcast", 1),
        fields.whole("reduction", 1),
    )
    fields.finish()
    return topology
