"""What a run began with, as its job.json records it: settings, and the digest of every array of its graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mggcn.config import Config, from_tables
from mggcn.config.files import as_saved, from_toml, to_tables
from mggcn.errors import ConfigError, RunError
from mggcn.graph.csr import Graph
from mggcn.graph.layout import digest_of, graph_digests
from mggcn.train.log import read_record, write_json

FREE = (
    *("run.memory_limit", "run.capacity", "run.scratch", "run.timeout_s"),
    *("debug.bind", "run.log", "run.transport"),
)
"""Settings that change no result, and may be edited before a run continues on another machine."""
SHOWN = 4
"""Settings that a refusal names."""


def beginnings(folder: Path, config: Config, graph: Graph) -> dict[str, Any]:
    """Return what job.json records of the settings and data of a run that begins or continues with a configuration.

    config.toml may hold other settings until the run continues. Cost: as `graph_sha256`.
    """
    digests, path = graph_digests(graph), folder / "config.toml"
    before = [from_toml(path, saved=True)] if path.exists() else []
    return {"configs": _tables(*before, config), "graph": digests, "graph_sha256": digest_of(digests)}


def _tables(*configs: Config) -> list[dict[str, dict[str, Any]]]:
    return [to_tables(config) for config in dict.fromkeys(configs)]


def record_change(folder: Path, config: Config) -> None:
    """Record the settings with which a run continues, before config.toml changes: a kill in between loses neither."""
    path = folder / "job.json"
    job = read_record(path) if path.exists() else {}
    if "configs" in job:  # that of an earlier version has none
        before = from_toml(folder / "config.toml", saved=True)
        write_json(path, job | {"configs": _tables(before, config)})


def check_settings(folder: Path, config: Config, job: Mapping[str, Any]) -> None:
    """Refuse a config.toml that differs from the one that the run began or continued with. Raises: RunError."""
    recorded = job.get("configs", ())
    if isinstance(recorded, list) and to_tables(config) in recorded:
        return
    try:
        known = [from_tables(as_saved(tables)) for tables in recorded]
    except (ConfigError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{folder / 'job.json'} is damaged: {error}; start a new run") from error
    if not known:
        return
    asked, began = to_tables(config), to_tables(known[-1])
    changed = [(f"{table}.{key}", asked[table][key], began[table][key]) for table in asked for key in asked[table]]
    differ = [f"{name} {came!r}, it was {was!r}" for name, came, was in changed if came != was and name not in FREE]
    if config in known or not differ:
        return
    more = f", and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
    raise RunError(
        f"config.toml in {folder} is not what the run began with: {'; '.join(differ[:SHOWN])}{more}; put it back, change "
        "what a run may change with --resume, or start a new run"
    )


def changed_parts(job: Mapping[str, Any], graph: Graph) -> str:
    """Return the names of what differs between a graph and the one that a run began with, "" if that was not recorded."""
    before = job.get("graph")
    if not isinstance(before, dict) or not isinstance(before.get("files"), dict):
        return ""
    return differing_parts(before, graph_digests(graph))


def differing_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the names of what differs between two graphs, of which these are the digests."""
    files: dict[str, str] = before["files"]
    arrays = [name for name in sorted(files.keys() | now["files"].keys()) if files.get(name) != now["files"].get(name)]
    extents = [name for name in now if name != "files" and before.get(name) != now[name]]
    return ", ".join([*arrays, *extents])
