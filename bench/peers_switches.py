"""The parts of mggcn that bench/peers_epoch.py switches on and off, as far as this version has them. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from mggcn.config import RunConfig, from_tables
from mggcn.errors import ConfigError

OWN = "mggcn"
Settings = dict[str, Any]
ALL_ON: dict[str, Settings] = {
    "order": {"order": "locality"},
    "ways": {},
    "prune": {"prune": "auto"},
    "bf16": {"precision": "bf16"},
}
"""Run settings by switch; `ways` (panels, blocks, rows fetched ahead) is no setting: the worker can switch it off."""
OFF: dict[str, Settings] = {"order": {"order": "none"}, "ways": {}, "prune": {"prune": "off"}, "bf16": {}}
TEXTS = {
    "order": "without the order by locality",
    "ways": "without panels, blocks and rows ahead",
    "prune": "without pruning",
    "bf16": "without bf16",
}


def switches() -> dict[str, bool]:
    """Which switches this version has."""
    try:
        from_tables({"run": {"precision": "bf16"}})
        bf16 = True
    except ConfigError:
        bf16 = False
    return {
        "order": True,
        "ways": importlib.util.find_spec("mggcn.backend.cpu.variants") is not None,
        "prune": "prune" in {field.name for field in dataclasses.fields(RunConfig)},
        "bf16": bf16,
    }


def run_settings(here: dict[str, bool], turned_on: set[str]) -> Settings:
    """Run settings with some switches on and the others off."""
    run: Settings = {}
    for name in (name for name, present in here.items() if present):
        run |= (ALL_ON if name in turned_on else OFF)[name]
    return {"run": run}


def base_settings(here: dict[str, bool]) -> Settings:
    """Settings of the rows called mggcn: float32 in the order by locality, not pruned."""
    return run_settings(here, {"order", "ways"})


def without(here: dict[str, bool]) -> dict[str, tuple[Settings, bool]]:
    """Settings with every switch on, with each of them off alone, and with all off; and whether products are plain."""
    names = {name for name, present in here.items() if present}
    found = {"all switches on": (run_settings(here, names), False)}
    for name in sorted(names, key=list(here).index):
        found[TEXTS[name]] = (run_settings(here, names - {name}), name == "ways")
    found["all switches off"] = (run_settings(here, set()), "ways" in names)
    return found
