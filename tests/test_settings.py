"""The typed keywords are those of the config and of `load`, with the same values."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal, get_args, get_origin

from mggcn.config import PARTS, DataConfig, RunConfig, TrainConfig
from mggcn.config.model import ModelConfig
from mggcn.config.values import ALL
from mggcn.graph.convert import COMPLETING
from mggcn.runs.folder import CONTINUABLE, MACHINE
from mggcn.settings import LoadArguments, ModelSettings, ScheduleSettings, Settings, SweepSettings


def hints(kind: Any) -> dict[str, Any]:
    names = dict.fromkeys(("Loss", "Metric", "MakeOptimizer", "MakeSchedule"), Any)
    return typing.get_type_hints(kind, None, names)


def values(hint: Any) -> set[object]:
    """The texts of a Literal, also inside a union."""
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return set().union(*map(values, get_args(hint)))


def test_every_setting_is_a_keyword_with_its_values() -> None:
    """Fails if a setting, or one of its values, is in the config and not among the keywords, or the other way round."""
    typed, known = hints(Settings), dict[str, Any]()
    for kind in PARTS.values():
        known |= typing.get_type_hints(kind)
    assert typed.keys() == known.keys() - {"ranks"}
    assert hints(SweepSettings).keys() == known.keys()
    for name, hint in known.items():
        wanted = values(hint) | ({"none"} if name == "norm" else {"all"} if name in ALL else set())
        assert name == "ranks" or values(typed[name]) == wanted, name
        assert name == "ranks" or hint not in (int, float, bool) or hint in (typed[name], *get_args(typed[name])), name
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert hints(ModelSettings).keys() == fields - {"kind", "hidden", "heads", "hops", "teleport"}
    assert {name for kind in (DataConfig, TrainConfig, RunConfig) for name in kind.__dataclass_fields__} <= known.keys()
    assert hints(ScheduleSettings).keys() == {*CONTINUABLE, *MACHINE} - {"epochs"}


def test_every_argument_of_load_is_a_keyword() -> None:
    """Fails if `load` takes an argument that editors do not know."""
    assert hints(LoadArguments).keys() == {*COMPLETING, "verify", "ids"}
