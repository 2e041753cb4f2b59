"""Runs the steps of Dockerfile.cpu in a Debian root made by debootstrap: as root, on Debian, without a container engine.

    python packaging/try_cpu_image.py ROOT                      ROOT: a new folder, some 4 GB; a second run begins anew
        --secret pip=PIP.CONF                                   a build secret, as of docker build
        --build-arg TORCH_INDEX_URL=...                         a build argument
        --bind FOLDER                                           shown inside, read only: a package index on the disk

Every stage begins as a copy of the bare root, COPY reads the checkout, RUN runs under chroot. Then the image's own command,
its health check and a training run as its user. Printed first: in what this differs from the image.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
DIFFERENCES = """\
What differs from the image that `docker build` makes:
- debootstrap's minimal root stands for the image debian:{release}-slim, which leaves out documentation besides;
- steps run under chroot: this machine's kernel, network, name servers, /proc, /sys and /dev, and no limits of a container;
- each stage is a copy of the root, and no layers are made: sizes are those of folders;
- LABEL, HEALTHCHECK's times and .dockerignore change nothing here; only what COPY names is copied.
"""
USAGE_AFTER = (
    "generate community /tmp/graph --vertices 2000",
    "train /tmp/graph --epochs 20 --out /tmp/run",
    "report /tmp/run",
)


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile in order, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), " ".join(rest.split())) for word, rest in found]


def substituted(text: str, known: Mapping[str, str]) -> str:
    """Replace ${NAME} by what is known of it, "" if nothing is."""
    return re.sub(r"\$\{(\w+)\}", lambda name: known.get(name[1], ""), text)


def mounts(run: str) -> tuple[list[dict[str, str]], str]:
    """Split RUN's text into its --mount options and its command."""
    found = []
    while match := re.match(r"--mount=(\S+)\s+", run):
        found.append(dict(part.split("=", 1) for part in match[1].split(",")))
        run = run[match.end() :]
    return found, run


@dataclass
class Stage:
    """A stage of the build: its root, and what instructions have set so far."""

    root: Path
    arguments: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    user: str = "root"
    workdir: str = "/"
    settings: dict[str, str] = field(default_factory=dict)
    """ENTRYPOINT, CMD and HEALTHCHECK."""

    def run(self, command: list[str]) -> None:
        """Run a command inside, as the stage's user. Raises: subprocess.CalledProcessError."""
        home = {"HOME": "/root" if self.user == "root" else f"/home/{self.user}"}
        # Processes of their own: tini is the first of them, as in a container.
        apart = ["unshare", "--pid", "--fork", "--kill-child", f"--mount-proc={self.root / 'proc'}"]
        inside = [*apart, "chroot", f"--userspec={self.user}", str(self.root), "/bin/sh", "-c", 'cd "$0" && exec "$@"']
        subprocess.run([*inside, self.workdir, *command], env=home | self.arguments | self.environ, check=True)


@dataclass
class Build:
    """What the steps of all stages read."""

    bare: Path
    arguments: dict[str, str]
    secrets: dict[str, Path]
    binds: list[Path]
    named: dict[str, Stage] = field(default_factory=dict)

    def stages(self, steps: list[tuple[str, str]]) -> Iterator[Stage]:
        """Run every step; yield each stage at its end."""
        before: dict[str, str] = {}
        stage = None
        for word, rest in steps:
            print(f"--- {word} {rest[:150]}", flush=True)
            if word == "FROM":
                if stage:
                    yield stage
                stage = self._begin(rest)
            elif stage is None:
                name, _, default = rest.partition("=")
                before[name] = self.arguments.get(name, default)
            else:
                self._step(stage, word, substituted(rest, stage.arguments | stage.environ) if word == "ENV" else rest)
        if stage:
            yield stage

    def _begin(self, rest: str) -> Stage:
        name = rest.rpartition(" AS ")[2] if " AS " in rest else "image"
        stage = self.named[name] = Stage(self.bare.with_name(name))
        subprocess.run(["cp", "--archive", str(self.bare), str(stage.root)], check=True)
        subprocess.run(["mount", "--types", "sysfs", "sysfs", str(stage.root / "sys")], check=True)
        subprocess.run(["mount", "--rbind", "/dev", str(stage.root / "dev")], check=True)
        shutil.copy("/etc/resolv.conf", stage.root / "etc" / "resolv.conf")
        for folder in self.binds:
            _bind(folder, stage.root / folder.relative_to("/"))
        return stage

    def _step(self, stage: Stage, word: str, rest: str) -> None:
        if word == "RUN":
            self._run(stage, rest)
        elif word == "COPY":
            _copy(stage, rest.split())
        elif word == "ARG":
            name, _, default = rest.partition("=")
            stage.arguments |= {name: value} if (value := self.arguments.get(name, default)) else {}
        elif word == "ENV":
            stage.environ |= dict(part.split("=", 1) for part in shlex.split(rest))
        elif word == "WORKDIR":
            stage.workdir = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = rest
        elif word in ("ENTRYPOINT", "CMD", "HEALTHCHECK"):
            stage.settings[word] = rest
        elif word != "LABEL":
            raise SystemExit(f"{word} is an instruction that this script does not know")

    def _run(self, stage: Stage, rest: str) -> None:
        """Run a step with its mounts, which are gone afterwards: no secret stays in the root."""
        wanted, command = mounts(rest)
        placed = []
        for mount in wanted:
            source = (
                self.secrets.get(mount["id"])
                if mount["type"] == "secret"
                else self.named[mount["from"]].root / mount["source"].lstrip("/")
            )
            if source is not None:
                placed.append(_bind(source, stage.root / mount["target"].lstrip("/")))
        try:
            stage.run(["/bin/sh", "-c", command])
        finally:
            for target in placed:
                subprocess.run(["umount", str(target)], check=True)
                target.rmdir() if target.is_dir() else target.unlink()


def _bind(source: Path, target: Path) -> Path:
    """Show a file or folder at another place, read only."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(exist_ok=True) if source.is_dir() else target.touch()
    subprocess.run(["mount", "--bind", "--options", "ro", str(source), str(target)], check=True)
    return target


def _copy(stage: Stage, words: list[str]) -> None:
    *sources, target = words
    inside = stage.root / os.path.join(stage.workdir, target).lstrip("/")
    for name in sources:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, inside, ignore=shutil.ignore_patterns("__pycache__", "*.so"), dirs_exist_ok=True)
        elif target.endswith("/"):
            inside.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, inside / source.name)
        else:
            shutil.copy(source, inside)


def main() -> int:
    """Make the root, run the steps, then what the image is for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    for name in ("secret", "build-arg"):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--bind", action="append", default=[], type=Path, metavar="FOLDER")
    parser.add_argument("--mirror", default="", help="Debian mirror of debootstrap, if not its own default")
    a = parser.parse_args()
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        raise SystemExit("needs root, for chroot, and debootstrap: apt-get install debootstrap")
    if "MGGCN_OWN_MOUNTS" not in os.environ:
        # A mount namespace of its own: whatever happens, no mount outlives this command.
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
        return subprocess.run(command, env=os.environ | {"MGGCN_OWN_MOUNTS": "1"}, check=False).returncode
    steps = instructions((CHECKOUT / "Dockerfile.cpu").read_text())
    release = next(rest for word, rest in steps if word == "ARG").partition("=")[2]
    print(DIFFERENCES.format(release=release), flush=True)
    a.root.mkdir(parents=True, exist_ok=True)
    for old in ("build", "image"):
        shutil.rmtree(a.root / old, ignore_errors=True)
    bare = a.root / "bare"
    if not (bare / "etc" / "debian_version").exists():
        command = ["debootstrap", "--variant=minbase", release, str(bare), *([a.mirror] if a.mirror else [])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    pairs = {
        name: dict(pair.split("=", 1) for pair in given) for name, given in (("arg", a.build_arg), ("secret", a.secret))
    }
    build = Build(bare, pairs["arg"], {name: Path(file) for name, file in pairs["secret"].items()}, a.bind)
    began = time.monotonic()
    *_, image = build.stages(steps)
    print(f"--- built in {time.monotonic() - began:.0f} s", flush=True)
    use(image, a.bind)
    return 0


def use(image: Stage, binds: list[Path]) -> None:
    """Run what the image runs: its command, its health check, and a training with a report."""
    entry = json.loads(image.settings["ENTRYPOINT"])
    check = json.loads(image.settings["HEALTHCHECK"].partition("CMD ")[2])
    after = [[*entry, *words.split()] for words in USAGE_AFTER]
    for command in ([*entry, *json.loads(image.settings["CMD"])], check, *after):
        print(f"--- as {image.user}: {shlex.join(command)}", flush=True)
        image.run(command)
    shown = [f"--exclude={image.root / folder.relative_to('/')}" for folder in binds]
    measure = ["du", "--one-file-system", "--summarize", "--block-size=1M", *shown, str(image.root)]
    size = subprocess.run(measure, capture_output=True, text=True, check=True).stdout.split()[0]
    print(f"--- the image's root takes {size} MiB")


if __name__ == "__main__":
    sys.exit(main())
