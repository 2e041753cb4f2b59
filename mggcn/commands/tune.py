"""Measure this machine's memory, cores and transports, so that plans predict seconds; takes less than a minute."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mggcn.commands.settings import whole

if TYPE_CHECKING:
    from mggcn.plan.description import Machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where the figures go (default: $XDG_CONFIG_HOME/mggcn/machine.toml or ~/.config/mggcn/machine.toml, which "
        "plans read without being told)",
    )
    parser.add_argument("--ranks", default="2,4", metavar="P,...", help="numbers of ranks to measure (default: 2,4)")
    parser.add_argument("--threads", type=whole, default=0, help="threads of all ranks together; 0: all cores")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="about how long each figure is measured (default: 0.3)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, write and print."""
    from mggcn.errors import ConfigError
    from mggcn.jobs.tune import TuneSettings, check_writable, tune, write_machine
    from mggcn.plan.description import read_machine, tuned_path

    try:
        ranks = tuple(int(text) for text in arguments.ranks.split(","))
    except ValueError:
        raise ConfigError(f"--ranks expects numbers of ranks such as 2,4, got {arguments.ranks!r}") from None
    threads = arguments.threads or len(os.sched_getaffinity(0))
    settings = TuneSettings(threads, ranks, arguments.seconds)
    path = arguments.out or tuned_path()
    check_writable(path)
    with tempfile.TemporaryDirectory(prefix="mggcn-tune-") as folder:
        content = tune(settings, Path(folder), lambda text: print(f"measuring: {text}", flush=True))
    write_machine(content, path)
    machine = read_machine(path)
    print("\n".join(machine_lines(machine)))
    print(f"written to {path}" + ("" if arguments.out is None else f"; plan with --machine {path}"))
    return 0


def machine_lines(machine: Machine) -> list[str]:
    """Return the figures of a machine as text."""
    from mggcn.plan.description import MESSAGES
    from mggcn.plan.machine import human
    from mggcn.train.plantext import table

    device = machine.device
    tables = zip(device.gather.points, device.copy.points, strict=True)
    rates = [(human(size), f"{gather / 1e9:.1f}", f"{copy / 1e9:.1f}") for (size, gather), (_, copy) in tables]
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
    products = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in device.gemm.items())
    kinds = [kind.replace("_", "-") for kind in MESSAGES]
    header = ("transport", "ranks", *kinds, *(f"{kind} us" for kind in kinds), "of the cores")
    return [
        machine.title,
        *table(("operand", "gather GB/s", "copy GB/s"), rates),
        f"  dense products {products}; a gathered row {1e9 * device.row_s:.2f} ns beside its bytes, a call "
        f"{1e6 * device.call_s:.1f} us",
        "messages: GB/s that reach all ranks together, microseconds of one without bytes",
        *table(header, links),
    ]
