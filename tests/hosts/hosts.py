"""Machines that a test makes on this one: each has its own network, mounts, processes and name, and nothing outlives them.

A host is a process in namespaces of its own, and its children. A bridge in another namespace joins them by pairs of
virtual interfaces; none of the addresses or routes leads out, and the machine's own network gets no interface. The kernel
ends a host, its processes and its cable with its first process, and that one with the tests.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.77.0"
NAMES = "abcdef"
"""Of hosts, in the order of their addresses."""
SPACES = ("--net", "--mount", "--uts", "--pid")
READY_S = 10.0


@functools.cache
def lacking() -> str:
    """Return what this machine lacks to have hosts, "" if nothing."""
    if absent := [
        name for name in ("ip", "ss", "unshare", "nsenter", "setpriv", "mount") if shutil.which(name) is None
    ]:
        return f"hosts need {', '.join(absent)} (iproute2, util-linux)"
    try:
        with Hosts(None) as hosts:
            hosts.add("a", 1)
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        return f"namespaces cannot be made here, as root may: {told}"
    return ""


class Space:
    """Namespaces, held by a process that ends with this one."""

    def __init__(self, script: str) -> None:
        # setpriv: the kernel ends unshare with the tests, and unshare --kill-child ends the namespaces with unshare.
        held = ["setpriv", "--pdeathsig", "KILL", "unshare", *SPACES, "--fork", "--kill-child=KILL", "--mount-proc"]
        self.process = subprocess.Popen(
            [*held, "sh", "-c", f"set -e; {script}\necho ready; exec sleep 100000"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = 0
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        if self.process.stdout.readline() != "ready\n":
            told = self.process.stderr.read().strip()
            self.end()
            raise OSError(told)
        self.pid = _child(self.process.pid)

    def end(self) -> None:
        """End every process in here."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # which unshare then buries
        else:
            self.process.kill()
        self.process.wait()
        self.pid = 0
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def command(self, *words: object) -> list[str]:
        """Return the command that runs another one in here."""
        return ["nsenter", "--target", str(self.pid), *SPACES, *map(str, words)]

    def run(self, *words: object) -> str:
        """Run a command in here and return what it printed. Raises: CalledProcessError."""
        return subprocess.run(self.command(*words), check=True, capture_output=True, text=True, timeout=60).stdout


class Host(Space):
    """A machine. address: its own in the network of all hosts."""

    def __init__(self, name: str, number: int, folder: Path | None) -> None:
        self.name, self.number, self.address = name, number, f"{NETWORK}.{number}"
        self._started: list[subprocess.Popen[str]] = []
        script = f"hostname {name}; ip link set lo up"
        if folder is not None:
            # As Debian has it: a machine takes its own name for an address of loopback.
            others = [f"{NETWORK}.{place} {other}" for place, other in enumerate(NAMES, start=1) if other != name]
            names = folder / f"hosts-{name}"
            names.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *others, ""]))
            script += f"; mount --bind {names} /etc/hosts"
        super().__init__(script)

    def start(self, *words: object, env: Mapping[str, object] | None = None, out: Path) -> subprocess.Popen[str]:
        """Start a program whose output goes to the files OUT.out and OUT.err."""
        given = {name: str(value) for name, value in (env or {}).items()}
        with out.with_suffix(".out").open("w") as told, out.with_suffix(".err").open("w") as errors:
            process = subprocess.Popen(
                self.command(*words),
                env={**os.environ, "PYTHONPATH": str(ROOT), **given},
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=errors,
                text=True,
            )
        self._started.append(process)
        return process

    def end(self) -> None:
        super().end()
        for process in self._started:  # nsenter, which ends with what it started
            process.wait()

    def mount(self, source: Path, target: Path, *, readonly: bool = False) -> None:
        """Show a folder at the place of another one, on this host alone."""
        self.run("mount", "--bind", source, target)
        if readonly:
            self.run("mount", "-o", "remount,bind,ro", target)

    def listeners(self) -> list[str]:
        """Return `address:port` of every TCP and UDP socket that listens here."""
        return sorted(line.split()[4] for line in self.run("ss", "-Hltun").splitlines())


class Hosts:
    """Some hosts, joined by a bridge; all of them end with the block."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._bridge = Space("ip link add br0 type bridge; ip link set br0 up")
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.end()
        self._bridge.end()

    def add(self, name: str, number: int) -> Host:
        """Start a host and plug in its cable; one of this name that ended before is as if it came back."""
        host = Host(name, number, self._folder)
        if name in self.hosts:
            self.hosts[name].end()
            self._unplug(name)
        self.hosts[name] = host
        # Neither end is ever in this machine's own network.
        make = ["ip", "link", "add", _port(name), "type", "veth", "peer", "name", "eth0", "netns", host.pid]
        make += ["address", f"02:00:00:00:00:{number:02x}"]  # a machine that comes back has the card that it had
        subprocess.run(
            ["nsenter", "--target", str(self._bridge.pid), "--net", *map(str, make)], check=True, capture_output=True
        )
        self._bridge.run("ip", "link", "set", _port(name), "master", "br0", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        return host

    def cut(self, name: str) -> None:
        """Cut the cable of a host: nothing arrives, and nobody is told."""
        self._bridge.run("ip", "link", "set", _port(name), "down")

    def mend(self, name: str) -> None:
        """Mend the cable."""
        self._bridge.run("ip", "link", "set", _port(name), "up")

    def kill(self, name: str, *, power: bool = False) -> None:
        """End a host at once. power: before its kernel can close a connection."""
        if power:
            self.cut(name)
        self.hosts[name].end()

    def _unplug(self, name: str) -> None:
        """Wait until the cable of a host that has ended is gone: the kernel takes its time."""
        give_up_at = time.monotonic() + READY_S
        while _port(name) in self._bridge.run("ip", "-br", "link"):
            if time.monotonic() > give_up_at:
                self._bridge.run("ip", "link", "del", _port(name))
            time.sleep(0.05)


def _port(name: str) -> str:
    return f"to-{name}"


def _child(pid: int) -> int:
    """Return the first child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@contextlib.contextmanager
def some_hosts(folder: Path, count: int) -> Iterator[Hosts]:
    """Yield hosts a, b, ... whose files are in a folder; skip the test where there can be none."""
    if problem := lacking():
        pytest.skip(problem)
    with Hosts(folder) as hosts:
        for number, name in enumerate(NAMES[:count], start=1):
            hosts.add(name, number)
        yield hosts


def rank_env(rank: int, size: int, port: int) -> dict[str, object]:
    """What Slurm, for example, tells the only rank of a host; the process of rank 0, on host a, is to hold the store."""
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "a",
        "MASTER_PORT": port,
    }


def finished(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[int]:
    """Wait for processes and return their exit codes; none outlives this call."""
    give_up_at = time.monotonic() + timeout_s
    try:
        return [process.wait(max(give_up_at - time.monotonic(), 0.1)) for process in processes]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
