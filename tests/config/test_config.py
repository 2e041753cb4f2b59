"""mggcn/config/__init__.py: conversions, ranges, unknown keys, precedence and the TOML round trip."""

import dataclasses
import inspect
import itertools
import math
import os
import re
import subprocess
import sys
import tomllib
import typing
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import mggcn
from mggcn import config as cfg
from mggcn.config import Config, DataConfig, ModelConfig, RunConfig, SampleConfig, TrainConfig
from mggcn.config import files as config_files
from mggcn.config.files import described, to_tables, to_toml, with_settings
from mggcn.config.values import DEBUG, Range, fields_of, parse_count, setting, with_new_names
from mggcn.errors import ConfigError

CHANGED: dict[str, dict[str, Any]] = {
    "data": {"row_normalize": True, "splits": "alt", "split": 3},
    "model": {
        "kind": "gat",
        "hidden": (9, 255, 15),
        "heads": 3,
        "attention_dropout": 0.375,
        "dropout": 0.25,
        "input_dropout": 0.125,
        "norm": "mean",
        "self_loops": False,
        "bias": False,
        "activation": "gelu",
        "norm_layer": "batch",
        "residual": "identity",
        "jumping": "concat",
        "head": "linear",
        "dense_before": (7,),
        "dense_between": True,
        "dense_after": (5, 3),
        "init": "pyg",
    },
    "train": {
        "epochs": 31,
        "lr": 0.1 + 0.2,
        "optimizer": "sgd",
        "row_optimizer": "adagrad",
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "weight_decay_on": "first",
        "schedule": "step",
        "schedule_step": 17,
        "schedule_gamma": 1e-300,
        "warmup": 5,
        "schedule_start": 4,
        "schedule_patience": 7,
        "clip_norm": 2.5,
        "patience": 11,
        "eval_every": 2,
        "evaluate": "whole",
        "loss": "cross_entropy",
        "class_weights": "balanced",
        "label_smoothing": 0.1,
        "ignored_labels": (2,),
        "metric": "macro_f1",
        "seed": 4294967290,
        "repeat": 3,
        "checkpoint_every": 9,
        "checkpoint_minutes": 0.5,
    },
    "links": {"embedding": 17, "decoder": (9, 3), "negatives": 4, "negatives_from": "in-batch"},
    "run": {
        "ranks": 5,
        "threads": 2,
        "bind": "off",
        "transport": "nccl",
        "device": "cuda",
        "precision": "bf16",
        "spmm": "cusparse",
        "log": "tensorboard",
        "timeline": True,
        "order": "permute",
        "strategy": "delayed",
        "batches": "cooperative",
        "delay": "5",
        "stale_aggregates": "reuse",
        "products": "gemm-first",
        "features": "sparse",
        "prune": "off",
        "recompute": "on",
        "capacity": "disk",
        "scratch": "/fast",
        "memory_limit": 2**40 + 1,
        "timeout_s": 12.5,
    },
}

LEARNED = {"data": {"inputs": "learned:9"}}
"""A setting that several of CHANGED do not go with."""
OTHER_MODELS: list[dict[str, Any]] = [
    {"kind": "sage", "aggregator": "max"},
    {"kind": "gat", "concat_heads": False, "out_heads": 2},
    {"kind": "appnp", "hops": 7, "teleport": 0.25},
    {"kind": "rgcn", "bases": 3},
]


def test_toml_round_trip_of_every_setting(tmp_path: Path) -> None:
    """Fails if a setting is not written, loses precision or comes back as another type (tuples above all)."""
    changed = cfg.from_tables(CHANGED)
    for table, settings in CHANGED.items():
        fields = {item.name for item in dataclasses.fields(cfg.PARTS[table])}
        others = {key for model in OTHER_MODELS if table == "model" for key in model} | set(LEARNED.get(table, ()))
        assert fields == set(settings) | others, "a new setting is missing in CHANGED"
        for key, value in settings.items():
            assert value != getattr(getattr(Config(), table), key), f"{table}.{key} is the default"
    path = tmp_path / "config.toml"
    for config in (cfg.from_tables(LEARNED), changed):
        path.write_text(config_files.to_toml(config), encoding="utf-8")
        assert config_files.from_toml(path) == config
    assert isinstance(config_files.from_toml(path).model.hidden, tuple)
    tables = tomllib.loads(config_files.to_toml(changed))
    assert {*tables["train"], *DEBUG} >= {item.name for item in dataclasses.fields(TrainConfig)}
    assert tables["debug"].keys() == DEBUG.keys()


def test_toml_round_trip_of_defaults_and_of_no_hidden_layer(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    others = [cfg.from_tables({"model": model}) for model in OTHER_MODELS]
    for config in (Config(), Config(model=ModelConfig(hidden=())), *others):
        path.write_text(config_files.to_toml(config), encoding="utf-8")
        assert config_files.from_toml(path) == config


def test_tables_are_plain_values() -> None:
    """Tuples become lists, so that any TOML or JSON writer takes them."""
    tables = config_files.to_tables(Config(model=ModelConfig(hidden=(16,))))
    assert tables["model"]["hidden"] == [16]
    assert {type(v) for table in tables.values() for v in table.values()} <= {str, int, float, bool, list}


@pytest.mark.parametrize(
    ("table", "key", "value", "expected"),
    [
        ("model", "hidden", "16,32", (16, 32)),
        ("model", "hidden", " 16, 32 ", (16, 32)),
        ("model", "hidden", "16,", (16,)),
        ("model", "hidden", "", ()),
        ("model", "hidden", "16", (16,)),
        ("model", "hidden", 16, (16,)),
        ("model", "hidden", [16, 32.0], (16, 32)),
        ("model", "hidden", np.int64(16), (16,)),
        ("model", "hidden", [np.int32(16)], (16,)),
        ("model", "bias", "true", True),
        ("model", "bias", "False", False),
        ("model", "bias", False, False),
        ("model", "norm", "mean", "mean"),
        ("train", "epochs", "30", 30),
        ("train", "epochs", 30.0, 30),
        ("train", "epochs", np.int64(30), 30),
        ("train", "lr", "1e-2", 0.01),
        ("train", "lr", 1, 1.0),
        ("train", "lr", np.float32(0.5), 0.5),
    ],
)
def test_conversions(table: str, key: str, value: object, expected: object) -> None:
    got = cfg.parse_value(table, key, value)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("table", "key", "value", "expects"),
    [
        ("model", "hidden", "16,,32", "integers separated by commas"),
        ("model", "hidden", ",", "integers separated by commas"),
        ("model", "hidden", "16;32", "integers separated by commas"),
        ("model", "hidden", [[16]], "integers separated by commas"),
        ("model", "hidden", [True], "integers separated by commas"),
        ("model", "hidden", True, "integers separated by commas"),
        ("model", "hidden", 1.5, "integers separated by commas"),
        ("model", "hidden", {"16": 1}, "integers separated by commas"),
        ("model", "bias", "yes", "true or false"),
        ("model", "bias", 1, "true or false"),
        ("model", "norm", "none", "one of symmetric, mean"),
        ("model", "norm", 3, "one of symmetric, mean"),
        ("model", "norm", ["mean"], "one of symmetric, mean"),
        ("train", "epochs", "1e-2", "an integer"),
        ("train", "epochs", 1.5, "an integer"),
        ("train", "epochs", np.float32(1.5), "an integer"),
        ("train", "epochs", float("inf"), "an integer"),
        ("train", "epochs", True, "an integer"),
        ("train", "epochs", [1], "an integer"),
        ("train", "lr", "fast", "a finite number"),
        ("train", "lr", "inf", "a finite number"),
        ("train", "lr", float("nan"), "a finite number"),
        ("train", "lr", 10**400, "a finite number"),
        ("train", "lr", False, "a finite number"),
        ("train", "lr", None, "a finite number"),
    ],
)
def test_values_that_do_not_fit(table: str, key: str, value: object, expects: str) -> None:
    """The message names the setting, what it expects and what came."""
    with pytest.raises(ConfigError, match=re.escape(f"{table}.{key} expects {expects}")):
        cfg.parse_value(table, key, value)


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: ModelConfig(hidden=(16, 0)), "each number of model.hidden must be 1 or more, got (16, 0)"),
        (lambda: ModelConfig(hidden=(), residual="linear"), "model.hidden has no layer, and model.residual would"),
        (
            lambda: ModelConfig(hidden=(), norm_layer="batch", dense_between=True),
            "model.dense_between and model.norm_layer",
        ),
        (
            lambda: ModelConfig(hidden=(), dense_before=(4,), residual="identity"),
            "leave it out, or give a hidden layer",
        ),
        (lambda: TrainConfig(seed=-1), "train.seed"),
        (lambda: TrainConfig(seed=2**32), "train.seed"),
        (lambda: TrainConfig(seed=2**32 - 1, repeat=2), "4294967295 .. 4294967296"),
        (lambda: RunConfig(transport="single", ranks=2), "run.transport single"),
    ],
)
def test_what_does_not_go_together(make: Any, setting: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(setting)):
        make()


@pytest.mark.parametrize("name", [f"{part}.{key}" for part, kind in cfg.PARTS.items() for key in fields_of(kind)])
def test_ranges(name: str) -> None:
    """Fails if a setting is a number of any size, or takes one out of its range."""
    part, _, key = name.partition(".")
    hint, bounds = fields_of(cfg.PARTS[part])[key]
    step = 1e-6 if hint is float else 1
    if bounds is None:
        assert key == "seed" or hint not in (int, float)
        return
    ends = (bounds.least - step, bounds.above, bounds.most + step, bounds.below)
    for value in filter(math.isfinite, ends):
        given = (value,) if typing.get_origin(hint) is tuple else value
        with pytest.raises(ConfigError, match=rf"{setting(part, key)} must (lie|be) {re.escape(str(bounds))}, got"):
            cfg.PARTS[part](**{key: given})


def test_edges_of_ranges_are_allowed() -> None:
    assert TrainConfig(seed=2**32 - 1).seed == 2**32 - 1
    assert TrainConfig(lr=0, schedule_gamma=1.0, eval_every=0).lr == 0.0
    assert RunConfig(transport="single", ranks=1).transport == "single"


def test_python_goes_through_the_same_conversions() -> None:
    """Fails if a list, a NumPy integer or a bool slips into a frozen table: config.toml could not be written."""
    model = ModelConfig(hidden=[16, np.int64(8)])  # type: ignore[arg-type, list-item]
    assert model == ModelConfig(hidden=(16, 8))
    assert hash(model) == hash(ModelConfig(hidden=(16, 8)))
    assert "seed = 3" in config_files.to_toml(Config(train=TrainConfig(seed=np.int64(3))))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"train\.epochs expects an integer, got True"):
        TrainConfig(epochs=True)
    with pytest.raises(ConfigError, match=r"run\.device expects one of cpu, cuda, got 'tpu'"):
        RunConfig(device="tpu")  # type: ignore[arg-type]


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"table \[modle\]; did you mean model\?; known are data, model, train, sample"
    ):
        cfg.from_tables({"modle": {}})
    for known in (item.name for item in dataclasses.fields(ModelConfig)):
        with pytest.raises(
            ConfigError,
            match=rf"mean model\.hidden\?; known in \[model\] are .*\b{known}\b",
        ):
            config_files.with_settings(Config(), ["model.hiden=3"])
    path = tmp_path / "bad.toml"
    path.write_text("[train]\nepoch = 3\n")
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}: unknown setting train\.epoch; .*epochs"):
        config_files.from_toml(path)
    path.write_text("epochs = 3\n")
    with pytest.raises(ConfigError, match="'epochs' must be a table"):
        config_files.from_toml(path)


def test_precedence_file_over_base_and_set_over_file(tmp_path: Path) -> None:
    base = cfg.from_tables({"model": {"hidden": [8], "dropout": 0.5}, "train": {"seed": 9}})
    path = tmp_path / "over.toml"
    path.write_text("[model]\nhidden = [32, 32]\n[train]\nlr = 1\n")
    config = config_files.with_settings(config_files.from_toml(path, base), ["train.lr=0.5", "model.hidden=4"])
    assert config.model == ModelConfig(hidden=(4,), dropout=0.5)
    assert config.train == TrainConfig(seed=9, lr=0.5)
    assert base.model.hidden == (8,), "the base is untouched"
    assert cfg.from_tables({}) == Config()
    assert cfg.from_tables({}, base) == base


def test_set_texts() -> None:
    config = config_files.with_settings(
        Config(), ["model.hidden = 16,16", "train.lr=1e-3", "model.bias=false", "run.order=none", "train.lr=2e-3"]
    )
    assert (config.model.hidden, config.train.lr) == ((16, 16), 2e-3)
    assert (config.model.bias, config.run.order) == (False, "none")
    assert config_files.with_settings(config, ["model.hidden="]).model.hidden == ()
    assert config_files.with_settings(config, []) == config


@pytest.mark.parametrize("order", list(itertools.permutations(["run.ranks=4", "run.transport=gloo"])))
def test_set_texts_do_not_depend_on_their_order(order: tuple[str, ...]) -> None:
    """Fails if ranges are checked between two texts: `single` with 4 ranks is invalid only for a moment."""
    base = Config(run=RunConfig(transport="single"))
    assert config_files.with_settings(base, order).run == RunConfig(ranks=4, transport="gloo")


@pytest.mark.parametrize("text", ["model.hidden", "hidden=3", "=3", ""])
def test_malformed_set_texts(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--set expects table\.key=value"):
        config_files.with_settings(Config(), [text])


def test_files_that_are_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*absent\.toml"):
        config_files.from_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        config_files.from_toml(tmp_path)
    for content in (b"[model\n", b"\xff\xfe[model]"):
        (tmp_path / "x.toml").write_bytes(content)
        with pytest.raises(ConfigError, match=r"x\.toml is not valid TOML"):
            config_files.from_toml(tmp_path / "x.toml")


def test_a_byte_order_mark_is_no_setting(tmp_path: Path) -> None:
    """Fails if a settings file as Windows' editor writes it is refused."""
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf[model]\r\nhidden = [4]\r\n")
    assert config_files.from_toml(tmp_path / "x.toml").model.hidden == (4,)


def test_settings_of_earlier_versions(tmp_path: Path) -> None:
    """Fails if an old name is refused without the new one, or a folder that an earlier version saved cannot be read."""
    path = tmp_path / "config.toml"
    path.write_text('[run]\nstrategy = "delayed"\nbetween = "last"\n')
    expected = r"run\.between has been renamed to debug\.stale_aggregates.*local is now discard, last is now reuse"
    with pytest.raises(cfg.ConfigError, match=expected):
        config_files.from_toml(path)
    with pytest.raises(cfg.ConfigError, match=expected):
        config_files.with_settings(cfg.Config(), ["run.between=local"])
    with pytest.raises(cfg.ConfigError, match=expected):
        config_files.with_named(cfg.Config(), {"between": "last"})
    assert config_files.from_toml(path, saved=True).run.stale_aggregates == "reuse"
    assert with_new_names("run", {"between": "local", "ranks": 2}) == {"stale_aggregates": "discard", "ranks": 2}
    assert with_new_names("train", {"between": "local"}) == {"between": "local"}


@pytest.mark.parametrize("table", ["run", "debug"])
@pytest.mark.parametrize("value", ["true", "false", '"auto"', '"on"', '"off"'])
def test_settings_that_are_no_more(table: str, value: str, tmp_path: Path) -> None:
    """Fails if a saved one stops a run from going on, or a given one is ignored or refused without what takes its place."""
    path = tmp_path / "config.toml"
    path.write_text(f"[{table}]\ntune = {value}\n[train]\nepochs = 3\n")
    assert config_files.from_toml(path, saved=True) == Config(train=TrainConfig(epochs=3))
    given: list[Callable[[], Config]] = [
        lambda: config_files.from_toml(path),
        lambda: config_files.with_settings(Config(), [f"{table}.tune={value}"]),
        lambda: config_files.with_named(Config(), {"tune": value}),
        lambda: config_files.with_named(Config(), {f"{table}.tune": value}),
    ]
    for read in given:
        with pytest.raises(ConfigError, match=r"there is no setting \w+\.tune any more: .* mggcn tune --store"):
            read()


@pytest.mark.parametrize("name", DEBUG)
def test_a_setting_of_debug_has_the_names_that_it_had(name: str, tmp_path: Path) -> None:
    """Fails if [debug], or the table that had a setting before, is not read from files, folders of runs or --set."""
    part = DEBUG[name]
    kind = {"kind": "gat"} if part == "model" else {}
    value = {**CHANGED[part], **OTHER_MODELS[1]}[name]
    wanted = cfg.from_tables({part: {name: value}, **({"model": {**kind, name: value}} if kind else {})})
    assert wanted != Config()
    path = tmp_path / "config.toml"
    for table in (part, "debug"):
        tables = {"model": dict(kind), table: {name: value}} if table != part else {part: {**kind, name: value}}
        path.write_text(tomli_w.dumps(tables), encoding="utf-8")
        assert config_files.from_toml(path) == config_files.from_toml(path, saved=True) == wanted
        base = config_files.with_settings(Config(), ["model.kind=gat"] if kind else [])
        assert config_files.with_settings(base, [f"{table}.{name}={str(value).lower()}"]) == wanted
        assert config_files.setting_name(f"{table}.{name}") == f"debug.{name}"
    with pytest.raises(ConfigError, match=rf"debug\.{name} expects .*, got "):
        cfg.from_tables({part: {name: "no such value"}})
    with pytest.raises(ConfigError, match=rf"debug\.{name}x; did you mean debug\.{name}"):
        cfg.from_tables({"debug": {f"{name}x": value}})
    with pytest.raises(ConfigError, match=r"unknown setting debug\.lr; it belongs to \[train\]: train\.lr"):
        cfg.from_tables({"debug": {"lr": 0.1}})


@pytest.mark.parametrize(
    ("bounds", "text", "inside", "outside"),
    [
        (Range(0), "0 or more", [0, 1e9], [-1]),
        (Range(above=0), "positive", [1e-9], [0.0]),
        (Range(1, 64), "in 1 .. 64", [1, 64], [0, 65]),
        (Range(0, below=1), "in [0, 1)", [0.0, 0.99], [-0.1, 1.0]),
        (Range(above=0, most=1), "in (0, 1]", [0.01, 1.0], [0.0, 1.1]),
    ],
)
def test_a_range_says_what_it_takes(bounds: Range, text: str, inside: list[float], outside: list[float]) -> None:
    """Fails if an end of a range is taken for one that belongs to it, or the other way round."""
    assert str(bounds) == text
    assert all(value in bounds for value in inside)
    assert not any(value in bounds for value in outside)


@pytest.mark.parametrize(
    ("text", "count"),
    [("1000", 1000), ("1_000", 1000), ("1.6e9", 1_600_000_000), ("111M", 111_000_000), ("1.5k", 1500)],
)
def test_counts(text: str, count: int) -> None:
    """Fails if a number is read otherwise than people write it."""
    assert parse_count(text) == count
    for wrong in (f"{text}x", "", "1.5", "1e-3", "k"):
        with pytest.raises(ValueError, match="whole number"):
            parse_count(wrong)


def test_a_size_is_a_size_wherever_it_is_set(tmp_path: Path) -> None:
    """Fails if --set, a file or Python refuses the unit that --memory-limit takes."""
    assert config_files.with_settings(Config(), ["run.memory_limit=100MiB"]).run.memory_limit == 100 << 20
    assert config_files.with_named(Config(), {"memory_limit": "2GB"}).run.memory_limit == 2 * 10**9
    (tmp_path / "run.toml").write_text('[run]\nmemory_limit = "1GiB"\n')
    assert config_files.from_toml(tmp_path / "run.toml").run.memory_limit == 1 << 30


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GIN", "GAT", "GATv2", "SGC", "APPNP", "RGCN", "MLP"])
def test_models_have_the_defaults_of_the_settings(name: str) -> None:
    """Fails if a model that Python describes differs from the one that model.kind names."""
    assert getattr(mggcn, name)() == ModelConfig(kind=name.lower())
    assert {"SGC": 2, "APPNP": 10}.get(name, 0) == ModelConfig(kind=name.lower()).hops  # the authors' own


def test_a_saved_run_may_have_settings_that_its_kind_ignores(tmp_path: Path) -> None:
    """Fails if a run of an earlier version, which saved them, cannot go on, or a new run may have them."""
    path = tmp_path / "config.toml"
    path.write_text('[model]\nkind = "gcn"\nhops = 2\nheads = 4\nhidden = [5]\n')
    with pytest.raises(ConfigError, match=r"model\.hops and model\.heads belong|model\.heads belongs to gat, gatv2"):
        config_files.from_toml(path)
    assert config_files.from_toml(path, saved=True).model == ModelConfig(hidden=(5,))
    path.write_text('[model]\nkind = "sgc"\nhops = 3\ndropout = 0.25\n')
    assert config_files.from_toml(path, saved=True).model == ModelConfig(kind="sgc", hops=3)


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "sage", "aggregator": "mean"},
        {"kind": "sage", "aggregator": "max"},
        {"kind": "gin"},
        {"kind": "gatv2"},
        {"kind": "rgcn"},
        {"residual": "linear"},
    ],
)
def test_one_matrix_decays_where_there_is_one(model: dict[str, Any]) -> None:
    """Fails if an arbitrary one of a first layer's matrices decays in silence."""
    with pytest.raises(ConfigError, match="weight_decay_on first is for models with one matrix"):
        Config(model=ModelConfig(**model), train=TrainConfig(weight_decay_on="first"))
    Config(model=ModelConfig(kind="sage", aggregator="gcn"), train=TrainConfig(weight_decay_on="first"))


def test_every_setting_is_described() -> None:
    """Fails if a setting has no meaning, no type, another default, or a line that is no sentence."""
    found = {setting.name: setting for setting in described()}
    assert {name.partition(".")[0] for name in found} == {"data", "model", "train", "sample", "links", "run", "debug"}
    assert sum(not name.startswith("debug.") for name in found) <= 91
    assert len(found) == sum(map(len, to_tables(Config()).values()))
    assert all(20 <= len(setting.meaning) and 8 <= len(setting.line) for setting in found.values())
    assert found["model.norm"].line == "How the adjacency is normalised"
    assert found["train.lr"].meaning == "Learning rate at epoch 0."
    assert "Kipf & Welling 2017" in found["model.kind"].meaning
    assert found["run.memory_limit"].type.startswith("bytes")
    assert found["model.dropout"].type == "a finite number, in [0, 1)"
    assert found["run.ranks"].type == "an integer, in 1 .. 4096"
    assert found["model.hidden"].type.endswith("64,64, each 1 or more")
    assert found["debug.prune"].values == ("auto", "off")


@pytest.mark.parametrize("flags", [[], ["-OO"]])
def test_settings_are_described_from_a_zip_file_without_docstrings(flags: list[str], tmp_path: Path) -> None:
    """Fails if the meanings come from docstrings that `python -OO` drops, or from files that a zip file does not have."""
    package = Path(config_files.__file__).parents[1]
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        for file in [
            *package.glob("config/*.py"),
            *(package / f"{name}.py" for name in ("errors", "files", "version")),
        ]:
            archive.write(file, f"mggcn/{file.relative_to(package)}")
        archive.writestr("mggcn/__init__.py", "")
    program = "from mggcn.config.files import described; print(all(s.meaning for s in described()))"
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "packed.zip")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "True\n", done.stderr


def test_settings_without_sources_have_no_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an installation without sources ends in a traceback."""

    def missing(_: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", missing)
    assert {setting.meaning for setting in described()} == {""}


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"batch": 10}, "sample.fanout is not set"),
        ({"fanout": (5, 5, 5)}, "without sample.batch the whole graph"),
        ({"fanout": (-1, 5, -1)}, "sample.fanout is all,5,all, and without sample.batch the whole graph"),
        (
            {"batch": 10, "fanout": (5, 5)},
            "must have 3 numbers, one for each sum over neighbours of the model, got 5,5",
        ),
        ({"batch": 10, "fanout": "all"}, "of the model, got all; write all once for each"),
        ({"batch": 10, "fanout": (-1, 5)}, "of the model, got all,5$"),
        ({"batch": 10, "fanout": (-1, 0, 5)}, "or all, got all,0,5"),
        ({"batch": 10, "fanout": (5, 0, 5)}, "must be 1 or more for each layer, or all, got 5,0,5"),
        ({"batch": 10, "fanout": (5, -2, 5)}, "each number of sample.fanout must be -1 or more"),
        ({"batch": -1, "fanout": (5, 5, 5)}, "sample.batch must be 0 or more"),
        ({"batch": "some", "fanout": (5, 5, 5)}, "sample.batch expects an integer, or all, got 'some'"),
    ],
)
def test_batches_that_cannot_be(sample: dict[str, Any], words: str) -> None:
    """Fails if fan-outs that fit no model are taken, or the message does not say what would."""
    with pytest.raises(ConfigError, match=words):
        Config(sample=SampleConfig(**sample))


@pytest.mark.parametrize("data", [{"splits": "alt"}, {"split": 1}])
def test_parts_are_even_for_the_first_split(data: dict[str, Any]) -> None:
    """Fails if ranks get even shares of a split that the run does not train on."""
    with pytest.raises(ConfigError, match="trains on another; choose metis"):
        Config(data=DataConfig(**data), run=RunConfig(order="metis-balanced"))
    Config(data=DataConfig(**data), run=RunConfig(order="metis"))


def test_all_is_a_word() -> None:
    """Fails if "all" is not the number that stands for it, on the command line, in a file or in Python."""
    config = with_settings(Config(), ["sample.batch=100", "sample.fanout=5,all,3"])
    assert config.sample.fanout == (5, -1, 3)
    assert with_settings(config, ["sample.batch=all", "sample.fanout="]).sample == SampleConfig()
    for whole in ("all", "all,all,all", (-1, -1), ("all",)):  # drawing all neighbours in one step is the whole graph
        assert SampleConfig(batch="all", fanout=whole) == SampleConfig()  # type: ignore[arg-type]  # words, as users give them
    assert SampleConfig(batch=10, fanout=("all", 3)).fanout == (-1, 3)  # type: ignore[arg-type]
    assert SampleConfig(batch="all").batch == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        "3:all/0:5/else:2,4",
        ("0:5 / 3:-1/else:2", 4),
        [{"else": 2, "3": "all", "0": 5}, "4"],
        ({3: -1, 0: 5, "else": 2}, 4),
    ],
)
def test_fanouts_by_relation_have_one_form(given: Any) -> None:
    """Fails if two ways to say the same numbers give other settings, or a saved one is another when it is read."""
    model = ModelConfig(kind="rgcn", hidden=(8,))
    config = Config(model=model, sample=SampleConfig(batch=5, fanout=given))
    assert config.sample.fanout == ("0:5/3:all/else:2", 4)
    assert config.sample.draws_by_type
    assert cfg.from_tables(to_tables(config)) == config
    assert cfg.from_tables(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(
    "given",
    [
        "0:5/0:3",
        "0:5/",
        ":5",
        "0:",
        "else",
        {},
        {-1: 3},
        {0: -2},
        {0: True},
        {0: 1.5},
        {0: (15, 10)},
        {"cites": 3},
        ":",
    ],
)
def test_fanouts_by_relation_that_cannot_be(given: Any) -> None:
    """Fails if what is no relation, or no number, is taken for one."""
    with pytest.raises(
        ConfigError, match=r"sample.fanout expects integers separated by commas, such as 15,10,all, or by"
    ):
        SampleConfig(batch=5, fanout=(given, 2))


@pytest.mark.parametrize(
    ("given", "twice"),
    [("0:5/0:3", "relation 0"), ({7: 5, "7": 3}, "relation 7"), ("else:5/1:2/else:all", "else")],
)
def test_a_relation_that_is_named_twice_is_told(given: Any, twice: str) -> None:
    """Fails if who names a relation twice is told what numbers look like, and not which one it is."""
    with pytest.raises(ConfigError, match=rf"^sample.fanout expects .*, which names {twice} twice$"):
        SampleConfig(batch=5, fanout=(given, 2))


@pytest.mark.parametrize("fanout", [(), (-1,), (5, 5)])
def test_a_model_without_neighbours_is_told_first(fanout: tuple[int, ...]) -> None:
    """Fails if who trains an MLP on batches is asked for fan-outs, which are then refused."""
    with pytest.raises(ConfigError, match=r"model.kind mlp reads no neighbours, so there is nothing to draw"):
        Config(model=ModelConfig(kind="mlp"), sample=SampleConfig(batch=5, fanout=fanout))


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ({"hidden": (8, 8)}, 3),
        ({"hidden": (8, 8), "head": "linear"}, 2),
        ({"kind": "sgc", "hops": 4}, 4),
        ({"kind": "appnp", "hops": 5}, 5),
        ({"hidden": ()}, 1),
    ],
)
def test_fanouts_are_as_many_as_sums_over_neighbours(model: dict[str, Any], count: int) -> None:
    """Fails if the number of layers that read neighbours is not that of the model."""
    model = {"norm_layer": "none"} | model
    Config(model=ModelConfig(**model), sample=SampleConfig(batch=5, fanout=(2,) * count))
    with pytest.raises(ConfigError, match=f"must have {count} numbers"):
        Config(model=ModelConfig(**model), sample=SampleConfig(batch=5, fanout=(2,) * (count + 1)))
