"""Measured figures in the user's cache folder: a file for each machine, set of cores and number of threads."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any, Final

from mggcn.backend.cpu.cores import usable_cores
from mggcn.backend.cpu.figures import Figures, figures_from_dict
from mggcn.backend.cpu.machine import Host, machine_digest
from mggcn.backend.cpu.measure import measure
from mggcn.errors import one_line, printable
from mggcn.files import read_object, reason, write_text
from mggcn.host import user_cache

FORMAT_VERSION: Final = 2
"""Raised when what is measured or a kernel changes: what was measured before is measured again."""
log: logging.Logger = logging.getLogger(__name__)


def figures_path(host: Host) -> Path:
    """Return the file of the figures of a host, in the user's cache folder."""
    digest = hashlib.sha256(json.dumps(_described(host), sort_keys=True).encode()).hexdigest()
    return user_cache() / f"figures-{digest[:16]}.json"


def figures_of(host: Host, free_bytes: int, *, anew: bool = False) -> Figures:
    """Return the figures of this host: cached ones, or else those measured now, which are then cached.

    free_bytes: free memory, an eighth of which measuring may use. anew: measure even if figures are cached.
    Figures of a busy machine are measured again once it is quiet. While others use the cores, cached figures stay.
    Cost: at most 0.3 s if none are cached. If the folder cannot be written, each process measures again.
    """
    path, busy = figures_path(host), is_busy(host.threads)
    content = _read(path, host)
    if content is None or anew or (content["busy"] and not busy):
        sparse, *dense = host.kernels.split()
        found = measure(host.threads, sparse, tuple(dense), free_bytes)
        if not found.measured and content is not None:
            return figures_from_dict(content["figures"])
        write_figures(path, host, found, busy=busy or not found.measured)
        return found
    return figures_from_dict(content["figures"])


def kept_figures(host: Host) -> Figures | None:
    """Return the cached figures of a host; None if they are missing, damaged, or another version's or machine's."""
    content = _read(figures_path(host), host)
    return None if content is None else figures_from_dict(content["figures"])


def is_busy(threads: int) -> bool:
    """Return whether other programs use so much of the cores that measurements of `threads` threads would be wrong."""
    return os.getloadavg()[0] > max(usable_cores() - threads, 0) + 0.5


def _read(path: Path, host: Host) -> dict[str, Any] | None:
    """The content of a file, if its figures are sound and this host's."""
    try:
        content: dict[str, Any] = read_object(path)
        if (content["format_version"], content["host"]) != (FORMAT_VERSION, _described(host)):
            return None
        figures_from_dict(content["figures"])
        return content if isinstance(content["busy"], bool) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%s): this machine is measured again", printable(path), one_line(reason(error)))
        return None


def write_figures(path: Path, host: Host, figures: Figures, *, busy: bool = False) -> None:
    """Write figures to the cache in one step. A reader sees a whole file; of two writers the last one wins.

    busy: other programs ran beside the measurement, so that a quieter moment measures again.
    """
    content = {"format_version": FORMAT_VERSION, "host": _described(host), "busy": busy}
    content |= {"figures": figures.to_dict()}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(content, indent=1) + "\n")


def _described(host: Host) -> dict[str, Any]:
    """A host of this machine: others of its kind, which may share the folder, have figures of their own."""
    return dataclasses.asdict(host) | {"machine": machine_digest()}
