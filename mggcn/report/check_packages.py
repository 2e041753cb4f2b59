"""Doctor: Python and the packages, each in a version that mggcn was written for."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from importlib import metadata

from mggcn.report.findings import Finding

PYTHON = (3, 11)
# Distribution -> (module, least version); tests compare the versions with pyproject.toml.
REQUIRED = {
    "numpy": ("numpy", "1.26"),
    "scipy": ("scipy.sparse", "1.11"),
    "torch": ("torch", "2.6"),
    "safetensors": ("safetensors.torch", "0.4"),
    "tomli-w": ("tomli_w", "1.0"),
}
# Distribution -> (least version, extra that installs it, what it is for).
OPTIONAL = {
    "matplotlib": ("3.8", "report", "mggcn report"),
    "torch_geometric": ("2.6", "pyg", "graphs from PyTorch Geometric"),
    "tensorboard": ("2.16", "tensorboard", "mggcn train --log tensorboard"),
    "pymetis": ("2025.2", "metis", "mggcn partition --kind metis"),
}


def check_python(version: tuple[int, int, int] = sys.version_info[:3]) -> Finding:
    """Compare the running interpreter with the oldest supported one."""
    shown = ".".join(map(str, version))
    if version[:2] >= PYTHON:
        return Finding("Python", "ok", shown)
    least = ".".join(map(str, PYTHON))
    return Finding(
        "Python", "broken", f"{shown}, expected {least} or newer", f"install mggcn with Python {least} or newer"
    )


def check_required(name: str) -> Finding:
    """Import a package that mggcn cannot do without and compare its version."""
    module, least = REQUIRED[name]
    install = f'pip install "{name}>={least}"'
    try:
        importlib.import_module(module)
        version = metadata.version(name)
    except (ImportError, OSError) as error:
        return Finding(name, "broken", f"cannot be imported: {error}", install)
    if not is_at_least(version, least):
        return Finding(name, "broken", f"{version}, expected {least} or newer", install)
    return Finding(name, "ok", version)


def check_exchange() -> Finding:
    """Pass an array from NumPy to torch and back: a torch built for another NumPy cannot."""
    name = "numpy <-> torch"
    try:
        import numpy as np
        import torch

        back = torch.from_numpy(np.arange(3.0)).add_(1).numpy()
    except (ImportError, OSError, RuntimeError) as error:
        return Finding(
            name,
            "broken",
            str(error),
            "install torch and numpy versions made for each other: pip install -U torch numpy",
        )
    if back.tolist() != [1.0, 2.0, 3.0]:
        return Finding(name, "broken", f"torch computed {back.tolist()} instead of [1, 2, 3]", "reinstall torch")
    return Finding(name, "ok", "share memory")


def check_optional(name: str) -> Finding:
    """Look for an optional package without importing it."""
    least, extra, purpose = OPTIONAL[name]
    install = f'for {purpose}: pip install "mggcn[{extra}]"'
    version = installed_version(name)
    if version is None or importlib.util.find_spec(name) is None:
        return Finding(name, "missing", "not installed", install)
    if not is_at_least(version, least):
        return Finding(name, "missing", f"{version}, expected {least} or newer", install)
    return Finding(name, "ok", version)


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_at_least(version: str, least: str) -> bool:
    """Compare the leading numbers of two versions: 2.13.0+cpu is at least 2.6."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", text, maxsplit=1)[0])]

    return numbers(version) >= numbers(least)
