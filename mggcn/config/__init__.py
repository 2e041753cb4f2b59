"""Settings as frozen dataclasses: one definition for Python, the TOML file and the command line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mggcn.config.links import LinksConfig as LinksConfig
from mggcn.config.model import ModelConfig as ModelConfig
from mggcn.config.run import RunConfig as RunConfig
from mggcn.config.sample import SampleConfig as SampleConfig
from mggcn.config.values import DEBUG, DROPPED, RENAMED, Range, fields_of, parse_field, setting
from mggcn.config.values import require as _require
from mggcn.config.values import settle as _settle
from mggcn.errors import ConfigError, did_you_mean

MetricName = Literal[
    "auto",
    "accuracy",
    "balanced_accuracy",
    "macro_f1",
    "micro_f1",
    "roc_auc",
    "average_precision",
    "mae",
    "rmse",
    "r2",
    "mrr",
    "hits@1",
    "hits@3",
    "hits@5",
    "hits@10",
    "hits@20",
    "hits@50",
    "hits@100",
]
"""Scores that the history may have."""
Rung = Literal["memory", "recompute", "host", "disk"]
"""Where rows are between the ops of an epoch: what run.capacity auto chooses from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Table [data]: the parts of the store that a run reads, and how."""

    inputs: str = "stored"
    """What a model reads of each vertex. stored: its features; learned:D, such as learned:64: a row of D numbers of its own
    instead, an embedding, which is trained with the weights. Rows start uniform in +-1 / sqrt(D), named by seed and vertex,
    and belong to the graph on which they are trained; each is stored and moved by the rank that owns its vertex."""
    row_normalize: bool = False
    """Divide each vertex's features by the sum of their absolute values (Kipf & Welling's recipe)."""
    splits: Literal["main", "alt"] = "main"
    """Family of splits: the published one, or the store's second family `alt_*`."""
    split: Annotated[int, Range(0)] = 0
    """Number of the split in its family, from 0."""

    def __post_init__(self) -> None:
        _settle(self, "data")
        kind, _, width = self.inputs.partition(":")
        learned = kind == "learned" and width.isascii() and width.isdigit() and int(width) >= 1
        _require(
            learned or self.inputs == "stored",
            f"data.inputs must be stored, or learned:D with D of 1 or more, such as learned:64, got {self.inputs!r}",
        )
        object.__setattr__(self, "inputs", f"learned:{int(width)}" if learned else "stored")
        _require(
            not (self.learned and self.row_normalize),
            f"data.row_normalize divides features, and data.inputs {self.inputs} reads none; leave one of them out",
        )

    @property
    def learned(self) -> int:
        """Columns of the learned rows of vertices; 0: a run reads features."""
        return int(self.inputs.partition(":")[2] or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Table [train]: how the model is trained."""

    epochs: Annotated[int, Range(1)] = 200
    """Passes over the training vertices: with the whole graph each is a step, with batches as many steps as there are
    batches."""
    lr: Annotated[float, Range(0)] = 0.01
    """Learning rate at epoch 0."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimiser, as in torch.optim."""
    row_optimizer: Literal["adam", "adagrad"] = "adam"
    """How learned rows (data.inputs) move in a run on batches: a step moves those that it reads, and no others. adam: as
    torch.optim.SparseAdam, with moments of these rows alone and bias corrections by all steps; adagrad: as
    torch.optim.Adagrad with sparse gradients. Neither decays. Over the whole graph train.optimizer moves all rows."""
    momentum: Annotated[float, Range(0, below=1)] = 0.0
    """Momentum of sgd; 0: none."""
    weight_decay: Annotated[float, Range(0)] = 0.0
    """Weight decay: L2 for adam and sgd, decoupled for adamw."""
    weight_decay_on: Literal["all", "first"] = "all"
    """Parameters that decay: all, or the first layer's weight matrix only (Kipf & Welling)."""
    clip_norm: Annotated[float, Range(0)] = 0.0
    """Largest norm of the gradient of all weights together: a larger one is scaled down to it before the step, as by
    torch.nn.utils.clip_grad_norm_; 0 never clips."""
    schedule: Literal["constant", "cosine", "step", "plateau"] = "constant"
    """Learning rate over the epochs: constant, half a cosine down to 0, times schedule_gamma every schedule_step, or times
    schedule_gamma where the validation score gets no better, as torch's ReduceLROnPlateau."""
    schedule_step: Annotated[int, Range(1)] = 100
    """Epochs between two cuts of the step schedule."""
    schedule_gamma: Annotated[float, Range(above=0, most=1)] = 0.5
    """Factor of each cut of the step and plateau schedules."""
    schedule_patience: Annotated[int, Range(0)] = 10
    """Evaluations without a better validation score that the plateau schedule lets pass; the one after them cuts."""
    warmup: Annotated[int, Range(0)] = 0
    """Epochs over which the learning rate rises linearly from 0."""
    schedule_start: Annotated[int, Range(0)] = 0
    """Epoch, from 0, at which schedule and warm-up begin: a run that is continued with a new schedule records it here."""
    patience: Annotated[int, Range(0)] = 0
    """Stop after this many evaluations without a better validation score; 0 never stops early."""
    eval_every: Annotated[int, Range(0)] = 1
    """Epochs between evaluations; 0 evaluates only after the last epoch. An evaluation that is made only because the run
    ends counts neither for patience nor for the schedule, and is the best only if there is no other."""
    evaluate: Literal["auto", "whole", "blocks", "sampled"] = "auto"
    """How a run on batches computes scores, exactly but for sampled. whole: by the whole graph's program, which needs room
    for the graph, its features and a layer of all vertices; blocks: layer by layer, over some vertices and all of their
    in-neighbours at a time, with features and edges read from the store; sampled: as blocks, but over 20 in-neighbours of
    each that are drawn, to compare with BatchGNN, and marked as that; auto: whole where it fits, else blocks, decided for
    each graph that is trained on or predicted."""
    loss: Literal["auto", "cross_entropy", "bce", "mse", "mae"] = "auto"
    """Mean over the training vertices, or over their known entries. auto: cross_entropy for classes, bce (cross-entropy of
    each label) for several labels a vertex, mse (squared error) for numbers; mae is the absolute error."""
    class_weights: str = "none"
    """Weight of each class in cross_entropy: none, balanced (training vertices / (classes x those of the class)), or one
    number per class, such as 1,2.5,1. The loss is divided by the weights of the training vertices, as torch's."""
    label_smoothing: Annotated[float, Range(0, below=1)] = 0.0
    """Share of a training vertex's label that is spread evenly over all classes (cross_entropy)."""
    ignored_labels: tuple[int, ...] = ()
    """Classes whose vertices neither the loss nor a score counts."""
    metric: MetricName = "auto"
    """Score of the history. auto: the one that the store names; else accuracy for classes, micro_f1 for several labels,
    roc_auc for links, and for numbers rmse, or mae under the loss mae. Of several labels or targets: the mean, except for
    micro_f1."""
    seed: int = 1
    """Seed of weights, dropout and partition, in [0, 2^32)."""
    repeat: Annotated[int, Range(1)] = 1
    """Number of runs, with seeds seed, seed + 1, ...; mean and deviation are reported."""
    checkpoint_every: Annotated[int, Range(0)] = 0
    """Epochs between checkpoints; 0 saves at the end, when interrupted, and by the clock."""
    checkpoint_minutes: Annotated[float, Range(0)] = 10.0
    """Minutes of training after which a checkpoint is due, whatever checkpoint_every says: a crash loses no more than that.
    0 ignores the clock."""

    def __post_init__(self) -> None:
        given: Any = self.class_weights
        if not isinstance(given, str):
            object.__setattr__(self, "class_weights", ",".join(map(str, given)))
        _settle(self, "train")
        object.__setattr__(self, "class_weights", self.class_weights.strip("[]() ").replace(" ", ""))
        _require(
            self.class_weights in ("none", "balanced") or all(weight > 0 for weight in self.weights_of_classes()),
            f"train.class_weights must be none, balanced, or a positive number per class, got {self.class_weights!r}",
        )
        _require(
            all(label >= 0 for label in self.ignored_labels),
            f"train.ignored_labels must be classes, 0 or more, got {self.ignored_labels}; vertices of the label -1 belong "
            "in no training mask",
        )
        if self.loss in ("bce", "mse", "mae"):
            named = [name for name, default in CLASS_SETTINGS.items() if getattr(self, name) != default]
            _require(
                not named,
                f"{', '.join(f'train.{name}' for name in named)} belong{'s' * (len(named) == 1)} to cross_entropy, got "
                f"train.loss {self.loss}; leave {'it' if len(named) == 1 else 'them'} out",
            )
        if self.patience and not self.eval_every:
            raise ConfigError("train.patience counts evaluations, but train.eval_every is 0; set it to 1 or more")
        if self.schedule == "plateau" and not self.eval_every:
            raise ConfigError(
                "train.schedule plateau counts evaluations, but train.eval_every is 0; set it to 1 or more"
            )
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(f"train.momentum belongs to sgd, got train.optimizer {self.optimizer}; leave it at 0")
        last = self.seed + self.repeat - 1
        seeds = f"{self.seed} .. {last}"
        _require(0 <= self.seed and last < 2**32, f"train.seed .. seed + repeat - 1 must lie in [0, 2^32), got {seeds}")

    def weights_of_classes(self) -> tuple[float, ...]:
        """Return the weights in class_weights. Raises: ConfigError if it is not a list of numbers."""
        try:
            numbers = tuple(float(part) for part in self.class_weights.split(","))
        except ValueError:
            numbers = (math.nan,)
        _require(
            all(map(math.isfinite, numbers)),
            f"train.class_weights must be none, balanced, or one number per class, such as 1,2.5,1; got "
            f"{self.class_weights!r}",
        )
        return numbers


CLASS_SETTINGS: Mapping[str, Any] = {"class_weights": "none", "label_smoothing": 0.0, "ignored_labels": ()}
"""Settings that belong to cross-entropy, with their defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run; the run folder keeps them as config.toml, where some stand in [debug] (see DEBUG)."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    links: LinksConfig = field(default_factory=LinksConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        model, sample, train, evaluate = self.model, self.sample, self.train, f"train.evaluate {self.train.evaluate}"
        if sample.batch:
            _require(
                model.aggregates,
                f"model.kind {model.kind} reads no neighbours, so there is nothing to draw; leave sample.batch out",
            )
            sample.require_fanout()
            _require(
                sample.plan != "run" or not self.reads_whole_batches,
                "sample.plan run may cut a step into halves, and a batch norm, sample.weights block, or sample.halo "
                "history of several ranks would see each alone; choose bound or auto",
            )
            given = "sample.by_type" if sample.by_type else f"sample.fanout {sample.fanout_text}"
            _require(
                model.typed or not sample.draws_by_type,
                f"{given} draws neighbours of each relation, which model.kind {model.kind} does not tell apart; "
                f"{'leave it out' if sample.by_type else 'give one number for each layer'}, or choose rgcn",
            )
            _require(
                sample.deal != "by-class" or self.train.class_weights != "none",
                "sample.deal by-class draws training vertices by train.class_weights, which is none; set it to balanced, "
                "or to a number for each class",
            )
            _require(
                self.run.strategy != "delayed",
                "run.strategy delayed keeps sums of the whole graph's epochs, and batches have none; choose halo",
            )
            _require(
                self.run.spmm == "own",
                "debug.spmm cusparse prepares a product for one matrix, and every batch has others; use own",
            )
            _require(
                len(sample.fanout) == model.num_aggregations,
                f"sample.fanout must have {model.num_aggregations} numbers, one for each sum over neighbours of the model, "
                f"got {sample.fanout_text}{'; write all once for each' * (set(sample.fanout) == {-1})}",
            )
            _require(
                bool(sample.drawn_fanout),
                "sample.first full leaves nothing to draw, because the model sums over neighbours once; choose drawn",
            )
            _require(
                sample.rows == "mapped" or (self.run.device == "cpu" and sample.first == "drawn"),
                f"sample.rows {sample.rows} is for CPUs, and for sample.first drawn: A X lies in a file that all ranks "
                "map; choose mapped",
            )
            _require(
                sample.rows == "mapped" or self.run.batches == "independent" or self.run.ranks == 1,
                f"sample.rows {sample.rows} is for ranks with batches of their own, and run.batches is {self.run.batches}; "
                "choose independent",
            )
            _require(
                sample.rows == "mapped" or not self.evaluates_by_blocks,
                f"{evaluate} reads any rank's rows from the store, and sample.rows {sample.rows} does not; "
                "choose whole",
            )
            self._check_history()
        _require(
            self.run.order != "metis-balanced" or (self.data.splits, self.data.split) == ("main", 0),
            f"run.order metis-balanced makes the first split even among the ranks, and data.splits {self.data.splits}, "
            f"data.split {self.data.split} trains on another; choose metis",
        )
        if self.evaluates_by_blocks:
            _require(
                not sample.compare_gradient,
                f"sample.compare_gradient computes the whole graph's gradient, for which {evaluate} leaves no "
                "memory; leave one of them out",
            )
            _require(
                self.run.device == "cpu",
                f"{evaluate} computes on CPUs; with --device cuda leave it out",
            )
            _require(
                train.evaluate == "blocks" or sample.weights != "block",
                f"{evaluate} normalises by the whole graph's degrees, and sample.weights block by those of a batch; choose "
                "mean",
            )
        self._check_learned()
        several = model.residual == "linear" or model.kind in ("gin", "gatv2", "rgcn")
        if self.train.weight_decay_on == "first" and (several or (model.kind == "sage" and model.aggregator != "gcn")):
            raise ConfigError(
                "debug.weight_decay_on first is for models with one matrix in their first layer (gcn, gat, sgc, appnp, "
                f"mlp, no linear residual), got model.kind {model.kind}, model.residual {model.residual}; use all"
            )

    def _check_learned(self) -> None:
        """Refuse settings that do not go with learned rows. Raises: ConfigError."""
        run, train, sample, rows = self.run, self.train, self.sample, f"data.inputs {self.data.inputs}"
        if not self.data.learned:
            return
        refused = (
            (run.device != "cpu", f"{rows} trains on CPUs alone so far; leave --device cuda out"),
            (run.precision == "bf16", f"{rows} needs rows that small steps move, finer than bf16; choose mixed"),
            (run.features == "sparse", f"{rows} keeps dense rows; leave debug.features sparse out"),
            (run.strategy == "delayed", f"{rows} has each row on one rank, and delayed cuts vertices; choose halo"),
            (
                train.clip_norm > 0,
                f"train.clip_norm needs all gradients on a rank, and {rows} shares them; leave it out",
            ),
            (train.repeat > 1, f"train.repeat keeps weights in one file, and {rows} on all ranks; run each train.seed"),
            (sample.first == "full", f"sample.first full computes A X once, and {rows} moves X; choose drawn"),
            (sample.plan == "run", f"sample.plan run may halve a step, and {rows} exchanges rows once; choose auto"),
            (sample.rows != "mapped", f"sample.rows {sample.rows} fetches features, and {rows} has none; leave it out"),
            (
                self.evaluates_by_blocks,
                f"train.evaluate {train.evaluate} reads stored features, and not {rows}; choose whole",
            ),
        )
        for wrong, message in refused:
            _require(not wrong, message)

    @property
    def plans_bounds(self) -> bool:
        """Whether batches are planned by their bounds, so that none is cut into halves."""
        return self.reads_whole_batches or self.data.learned > 0

    def _check_history(self) -> None:
        """Refuse what does not go with rows of other ranks that come from a cache. Raises: ConfigError."""
        model, sample, run = self.model, self.sample, self.run
        if sample.halo == "exact":
            return
        pooled = model.kind == "sage" and model.aggregator == "max"
        refused = (
            ("run.batches", run.batches != "independent", "other batches compute every row", "independent"),
            ("data.inputs learned", self.data.learned > 0, "rows that are learned need gradients", "stored"),
            ("run.device", run.device != "cpu", "a GPU has no cache of rows yet", "cpu"),
            (f"sample.rows {sample.rows}", sample.rows != "mapped", "features of others come from the cache", "mapped"),
            ("sample.first full", sample.first == "full", "A X needs no rows of other ranks", "drawn"),
            ("sample.weights block", sample.weights == "block", "a row that is sent is of another batch", "unbiased"),
            ("sample.compare_gradient", sample.compare_gradient > 0, "it would send a step's rows twice", "0"),
            ("model.norm_layer batch", model.norm_layer == "batch", "rows of other ranks are not computed", "layer"),
            ("model.aggregator max", pooled, "a row can be left out of sums alone", "gcn or mean"),
            (
                f"model.kind {model.kind}",
                model.attends or model.typed,
                "a row can be left out of sums alone",
                "gcn, sage, gin, sgc or appnp",
            ),
        )
        for name, is_set, why, instead in refused:
            _require(
                not is_set,
                f"sample.halo history does not go with {name}: {why}; choose {instead}, or sample.halo exact",
            )

    @property
    def reads_history(self) -> bool:
        """Whether rows of other ranks come from a cache: of one rank there are none."""
        return self.sample.batch > 0 and self.sample.halo == "history" and self.run.ranks > 1

    @property
    def shares_batches(self) -> bool:
        """Whether several ranks compute each step's rows together."""
        return self.sample.batch > 0 and self.run.batches == "cooperative" and self.run.ranks > 1

    @property
    def fetches_rows(self) -> bool:
        """Whether ranks ask each other for the features of their batches' rows."""
        return self.sample.batch > 0 and self.sample.rows != "mapped" and self.run.ranks > 1

    @property
    def draws_at_owners(self) -> bool:
        """Whether ranks have each other draw around the vertices whose edges they lack."""
        return self.fetches_rows and self.sample.rows == "parts"

    @property
    def evaluates_by_blocks(self) -> bool:
        """Whether scores are to be computed layer by layer, not by the whole graph's program; not if that is left open."""
        return self.train.evaluate in ("blocks", "sampled")

    def evaluating(self, how: Literal["auto", "whole", "blocks", "sampled"]) -> Config:
        """Return the same settings with another train.evaluate."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, evaluate=how))

    def on_rung(self, rung: Rung) -> Config:
        """Return the same settings with run.capacity auto replaced: recompute is in memory, too, with run.recompute on."""
        capacity: Literal["memory", "host", "disk"] = "memory" if rung == "recompute" else rung
        again: Literal["off", "on"] = "on" if rung == "recompute" else self.run.recompute
        return dataclasses.replace(self, run=dataclasses.replace(self.run, capacity=capacity, recompute=again))

    @property
    def climbs(self) -> bool:
        """Whether run.capacity auto may choose."""
        return self.run.capacity == "auto" and self._moves

    @property
    def moves_instead(self) -> bool:
        """Whether run.capacity memory keeps rows in memory that could be on the last rung."""
        return self.run.capacity == "memory" and self._moves

    @property
    def last_rung(self) -> Literal["host", "disk"]:
        """Where rows are that memory does not hold: of a GPU on the host, of CPUs on disk."""
        return "host" if self.run.device == "cuda" else "disk"

    @property
    def _moves(self) -> bool:
        """Whether rows could be on the last rung: those of runs over the whole graph."""
        return not self.sample.batch and not self.data.learned

    @property
    def reads_whole_batches(self) -> bool:
        """Whether a step's result depends on all of its seeds together, beside the sum of their losses."""
        return self.model.norm_layer == "batch" or self.sample.weights == "block" or self.reads_history


PARTS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "train": TrainConfig,
    "sample": SampleConfig,
    "links": LinksConfig,
    "run": RunConfig,
}
TABLES = (*PARTS, "debug")
"""Tables of settings in files and on the command line; those of [debug] are fields of the part that reads them."""


def parse_value(table: str, key: str, value: Any) -> Any:
    """Convert text or a TOML value to the type of the setting `table.key`.

    Raises: ConfigError if the table or key is unknown or the value does not fit its type.
    """
    if table not in TABLES:
        raise ConfigError(f"unknown table [{table}]{did_you_mean(table, TABLES)}; known are {', '.join(TABLES)}")
    if (table, key) in RENAMED:
        new, values = RENAMED[table, key]
        meaning = ", ".join(f"{was} is now {now}" for was, now in values.items())
        raise ConfigError(f"{table}.{key} has been renamed to {setting(table, new)}, and its values too: {meaning}")
    if (table, key) in DROPPED:
        raise ConfigError(f"there is no setting {table}.{key} any more: {DROPPED[table, key]}")
    part = DEBUG.get(key, table) if table == "debug" else table
    owner = next((name for name, kind in PARTS.items() if key in fields_of(kind)), part)
    if owner != part:
        name = setting(owner, key)
        raise ConfigError(f"unknown setting {table}.{key}; it belongs to [{name.partition('.')[0]}]: {name}")
    if part == "debug":
        meant = did_you_mean(key, DEBUG, "debug.")
        raise ConfigError(f"unknown setting debug.{key}{meant}; known in [debug] are {', '.join(DEBUG)}")
    return parse_field(PARTS[part], part, key, value)


def from_tables(tables: Mapping[str, Any], base: Config | None = None) -> Config:
    """Return `base` (default: all defaults), overridden by the settings of nested tables.

    Settings of [debug] are also taken from the table of the part that reads them, where earlier versions had them.
    Raises: ConfigError for an unknown table or key (the known ones are listed) or a value that does not fit.
    """
    return with_parts(base or Config(), parse_tables(tables))


def parse_tables(tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of nested tables, each of its type, by the part of the configuration that reads them.

    Raises: ConfigError as `from_tables`, but for what does not fit other settings.
    """
    parts = dict[str, dict[str, Any]]()
    for table, settings in tables.items():
        if not isinstance(settings, Mapping):
            known = ", ".join(TABLES)
            raise ConfigError(f"{table!r} must be a table such as [{table}], got {settings!r}; known are {known}")
        if table not in TABLES:
            raise ConfigError(f"unknown table [{table}]{did_you_mean(table, TABLES)}; known are {', '.join(TABLES)}")
        for key, value in settings.items():
            parsed = parse_value(table, key, value)
            parts.setdefault(DEBUG[key] if table == "debug" else table, {})[key] = parsed
    return parts


def with_parts(config: Config, *layers: Mapping[str, Mapping[str, Any]], model: ModelConfig | None = None) -> Config:
    """Return the configuration with settings as `parse_tables` has them, of which later layers win, and with this model.

    They are checked together, once: one may need what another gives. Raises: ConfigError.
    """
    merged = dict[str, dict[str, Any]]()
    for parts in layers:
        for part, values in parts.items():
            merged.setdefault(part, {}).update(values)
    changed: dict[str, Any] = {} if model is None else {"model": model}
    for part, values in merged.items():
        changed[part] = dataclasses.replace(changed.get(part, getattr(config, part)), **values)
    return dataclasses.replace(config, **changed)
