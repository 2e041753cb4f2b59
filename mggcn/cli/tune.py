"""Measure this machine's memory, cores and transports, so that plans predict seconds; takes less than a minute.

With --store: find the fastest variant of each sparse product of a run on that store, and keep it there.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mggcn.cli.answer import add_json
from mggcn.cli.settings import whole
from mggcn.errors import one_line, printable, shown
from mggcn.files import temporary_folder

if TYPE_CHECKING:
    from mggcn.cost.machine import DeviceRates, Machine
    from mggcn.memory.pages import DiskRates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where the figures go (default: $XDG_CONFIG_HOME/mggcn/machine.toml or ~/.config/mggcn/machine.toml, which "
        "plans read without being told)",
    )
    parser.add_argument(
        "--ranks",
        metavar="P,...",
        help="numbers of ranks to measure (default: 2,4); with --store: of the run (default: 1)",
    )
    parser.add_argument("--threads", type=whole, default=0, help="threads of all ranks together; 0: all cores")
    parser.add_argument(
        "--seconds", type=float, help="about how long each kind of message is measured (default: 0.3); not with --store"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="measure the disk of this folder, too, on which runs may have rows (run.scratch), by gigabytes, for half a "
        "minute (default: what the file says of it stays); not with --store",
    )
    group = parser.add_argument_group(
        "sparse products of a run",
        "on a CPU they never change a result, only its seconds; a GPU's slices add long rows in another order",
    )
    group.add_argument("--store", metavar="STORE", help="the run's store, or its name under --root")
    group.add_argument(
        "--epochs",
        type=float,
        help="how many epochs' seconds timing may take, about, before the rest is left open (default: 40); Ctrl-C ends it "
        "and saves what is known",
    )
    group.add_argument("--root", type=Path, metavar="DIR", help="folder in which names of stores are looked up")
    group.add_argument("--config", type=Path, metavar="FILE", help="TOML file of the run's settings")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="any setting of the run, as for mggcn train",
    )
    group.add_argument("--width", metavar="D,...", help="widths of the run's hidden layers: model.hidden")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure this machine, or products on a store; write the figures and print them."""
    return _tune_machine(arguments) if arguments.store is None else _tune_products(arguments)


def _tune_machine(arguments: argparse.Namespace) -> int:
    from mggcn.cost.machine import read_machine, tuned_path
    from mggcn.errors import ConfigError
    from mggcn.runs.tune import TuneSettings, check_writable, tune_machine, write_machine

    of_products = {name: getattr(arguments, name) for name in ("root", "config", "set", "width", "epochs")}
    if given := [f"--{name}" for name, value in of_products.items() if value not in (None, [])]:
        raise ConfigError(
            f"{', '.join(given)} belong to a run, whose sparse products are timed on a store; name it with --store, or "
            "leave them out to measure the machine"
        )
    try:
        ranks = tuple(int(text) for text in (arguments.ranks or "2,4").split(","))
    except ValueError:
        raise ConfigError(f"--ranks expects numbers of ranks such as 2,4, got {arguments.ranks!r}") from None
    threads = arguments.threads or len(os.sched_getaffinity(0))
    settings = TuneSettings(threads, ranks, 0.3 if arguments.seconds is None else arguments.seconds)
    path = arguments.out or tuned_path()
    check_writable(path)
    with temporary_folder() as folder:
        told = functools.partial(print, "measuring:", flush=True)
        content = tune_machine(settings, folder, told, arguments.scratch or _known_disk(path))
    write_machine(content, path)
    arguments.answer = {"file": path, "machine": content}
    print(shown("\n".join(machine_lines(read_machine(path)))))
    print(
        f"written to {printable(path)}" + ("" if arguments.out is None else f"; plan with --machine {printable(path)}")
    )
    return 0


def _known_disk(path: Path) -> DiskRates | None:
    """Return what a machine's file says of the disk, which takes half a minute to measure; None if it says nothing."""
    from mggcn.cost.machine import read_machine
    from mggcn.errors import ConfigError

    try:
        return read_machine(path).disk if path.exists() else None
    except ConfigError:
        return None  # replaced by one that can be read


def _tune_products(arguments: argparse.Namespace) -> int:
    from mggcn.assemble.plan import host_of
    from mggcn.cli.train import store_path
    from mggcn.comm.failure import Interrupted
    from mggcn.config.files import layered, parts_of, read_tables, with_settings
    from mggcn.errors import ConfigError, StoreError
    from mggcn.graph.store import open_store
    from mggcn.runs.auto import resolve_auto
    from mggcn.runs.local import signalled_stop
    from mggcn.runs.product_table import STORE_FILE, check_writable, outdated, read_choices, write_choices
    from mggcn.runs.tune_products import BUDGET, tune_products

    if arguments.out is not None:
        raise ConfigError("mggcn tune --store writes its table beside the store; remove --out")
    if arguments.seconds is not None:
        raise ConfigError(
            "--seconds is for figures of the machine; with --store, --epochs says how long timing may take"
        )
    if arguments.scratch is not None:
        raise ConfigError("--scratch names a disk of the machine; with --store remove it")
    budget = BUDGET if arguments.epochs is None else arguments.epochs
    if not 0 < budget < math.inf:
        raise ConfigError(
            f"--epochs must be a positive number of epochs that timing may take as long as, got {budget:g}"
        )
    named = {"run.ranks": arguments.ranks, "run.threads": arguments.threads or None, "model.hidden": arguments.width}
    settings = [f"{key}={value}" for key, value in named.items() if value is not None]
    files = {} if (path := arguments.config) is None else {path: parts_of(read_tables(path, "configuration"), path)}
    config = layered(files, [*arguments.set, *settings], {})
    if config.run.ranks > 1:
        config = with_settings(config, ["run.transport=threads"])
    store = store_path(arguments.store, arguments.root)
    graph = open_store(store)
    config, _ = resolve_auto(config, graph)
    table, host, damaged = store / STORE_FILE, host_of(config), False
    check_writable(table)
    try:
        read_choices(table, host)
    except StoreError as error:
        damaged = True
        print(f"will be replaced, with all that it holds for this machine: {one_line(str(error))}", flush=True)
    if other := outdated(table):
        print(f"{printable(other)}, and make room for what is found", flush=True)
    print(
        f"timing all variants of the run's sparse products, for about {budget:g} epochs' seconds at most; Ctrl-C ends it "
        "and saves what is known",
        flush=True,
    )
    with signalled_stop() as stop:
        found = tune_products(config, graph, budget, lambda text: print(shown(text), flush=True), stop)
    print(shown("\n".join([*found.lines(), found.text])))
    if (kept := found.kept()) or damaged:
        write_choices(table, host, kept)
    if kept:
        print(f"written to {printable(table)}, which mggcn train reads on this machine with as many threads per rank")
    else:
        state = (
            "holds nothing of this machine now" if damaged else "stays as it is" if table.exists() else "is not made"
        )
        print(f"nothing to save, no other variant is faster: {printable(table)} {state}")
    products = [{"product": key, "variant": variant} for key, variant in kept.items()]
    arguments.answer = {"file": table if kept else None, "kept": products, "text": found.text}
    if stop.signal:
        raise Interrupted(stop.signal)
    return 0


def _gflop_s(device: DeviceRates, precision: str) -> str:
    """Return the rates of dense products, from the slowest to the fastest if they are known by width."""
    tables = [rates[precision].points for rates in (device.gemm_rows, device.gemm_sums) if precision in rates]
    rates = [rate for points in tables for _, rate in points] or [device.gemm[precision]]
    least, most = (f"{rate / 1e9:.0f}" for rate in (min(rates), max(rates)))
    return least if least == most else f"{least} to {most}"


def machine_lines(machine: Machine) -> list[str]:
    """Return a machine's measurements as text."""
    from mggcn.cost.machine import MESSAGES
    from mggcn.memory.units import human
    from mggcn.planning.text import table

    device = machine.device
    rates = [(human(n), f"{rate / 1e9:.1f}", f"{device.copy.at(n) / 1e9:.1f}") for n, rate in device.gather.points]
    links = [
        (
            link.transport,
            link.ranks,
            *(f"{rate / 1e9:.2f}" for rate in link.rates.values()),
            *(f"{1e6 * seconds:.0f}" for seconds in link.latency_s.values()),
            f"{link.busy:.0%}",
        )
        for link in machine.links
    ]
    products = ", ".join(f"{name} {_gflop_s(device, name)} GFLOP/s" for name in device.gemm)
    kinds = [kind.replace("_", "-") for kind in MESSAGES]
    header = ("transport", "ranks", *kinds, *(f"{kind} us" for kind in kinds), "of the cores")
    return [
        machine.title,
        *table(("operand", "gather GB/s", "copy GB/s"), rates),
        f"  dense products {products}; a gathered row {1e9 * device.row_s:.2f} ns beside its bytes, a call "
        f"{1e6 * device.call_s:.1f} us",
        *_epoch_lines(device),
        *_disk_lines(machine.disk),
        "messages: GB/s that reach all ranks together, microseconds of one without bytes",
        *table(header, links),
        *(
            f"NCCL between {m.ranks} GPUs takes {human(m.collective_bytes)} of each, and {human(m.p2p_bytes)} for sends"
            for m in machine.nccl
        ),
    ]


def _epoch_lines(device: DeviceRates) -> list[str]:
    """Return what epochs take beside their kernels, if it was measured."""
    if not device.matrix_s:
        return []
    return [
        f"  in an epoch work takes {device.pace:.2f} times as long as at these rates, the first call of an op "
        f"{1e6 * device.op_s:.1f} us, and Python {1e6 * device.matrix_s:.1f} us for each matrix of a batch"
    ]


def _disk_lines(disk: DiskRates | None) -> list[str]:
    """Return what was measured of the disk."""
    if disk is None:
        return ["  the disk is not measured; name a folder on which runs may have rows with --scratch"]
    read, write, both = (f"{rate / 1e9:.2f}" for rate in (disk.read, disk.write, disk.both))
    return [f"  the disk reads {read} GB/s, writes {write}, and moves {both} doing both"]
