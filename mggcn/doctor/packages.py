"""Doctor: Python and the packages that mggcn's own metadata asks for, each in a version that it was written for."""

from __future__ import annotations

import importlib
import platform
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from mggcn.doctor.findings import Finding, guarded

if TYPE_CHECKING:
    from packaging.requirements import Requirement

MODULES = {"scipy": "scipy.sparse", "safetensors": "safetensors.torch"}
"""Modules that load a package's libraries, where another than the first does."""
PURPOSES = {
    "report": "mggcn report",
    "pyg": "graphs from PyTorch Geometric",
    "tensorboard": "mggcn train --log tensorboard",
    "metis": "mggcn partition --kind metis",
    "sweep": "mggcn sweep",
}
"""What extras are for that are worth a line."""


def check_packages() -> tuple[list[Finding], list[Finding]]:
    """Import the packages that mggcn needs, look for optional ones, and compare their versions.

    Raises: PackageNotFoundError where mggcn is not installed, ImportError without `packaging`.
    """
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in metadata.requires("mggcn") or ()]
    needed = [Finding("Python", "ok", platform.python_version())]
    needed += [guarded(r.name, partial(check_required, r)) for r in wanted if r.marker is None]
    optional = [
        guarded(r.name, partial(check_optional, r, extra))
        for extra in PURPOSES
        for r in wanted
        if r.marker is not None and r.marker.evaluate({"extra": extra})
    ]
    return needed, optional


def has_torch() -> bool:
    """Return whether torch can be imported."""
    try:
        importlib.import_module("torch")
    except (ImportError, OSError):
        return False
    return True


def check_required(requirement: Requirement) -> Finding:
    """Import a package that mggcn needs, and compare its version."""
    name = requirement.name
    install = f'pip install "{requirement}"'
    try:
        importlib.import_module(MODULES.get(name, name.replace("-", "_")))
        version = metadata.version(name)
    except (ImportError, OSError) as error:
        return Finding(name, "broken", f"cannot be imported: {error}", install)
    if not suffices(version, requirement):
        return Finding(name, "broken", f"{version}, expected {requirement.specifier}", install)
    return Finding(name, "ok", version)


def check_optional(requirement: Requirement, extra: str) -> Finding:
    """Look for an optional package without importing it."""
    name = requirement.name
    install = f'for {PURPOSES[extra]}: pip install "mggcn[{extra}]"'
    version = installed_version(name)
    if version is None:
        return Finding(name, "missing", "not installed", install)
    if not suffices(version, requirement):
        return Finding(name, "missing", f"{version}, expected {requirement.specifier}", install)
    return Finding(name, "ok", version)


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def suffices(version: str, requirement: Requirement) -> bool:
    """Return whether a version is recent enough, whatever its build: 2.13.0+cpu and 2.6.0a0+git12 are at least 2.6."""
    from packaging.version import Version

    return requirement.specifier.contains(Version(version).base_version)
