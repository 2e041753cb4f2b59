"""Table [sample] of the settings: batches of training vertices, and how their neighbourhoods are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal

from mggcn.config.values import ALL as _ALL
from mggcn.config.values import Range
from mggcn.config.values import require as _require
from mggcn.config.values import settle as _settle

MAX_LINES: Final = 2**31 - 1
"""Rows of a cache, which have numbers of 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """Table [sample]: batches, whose gradient is an estimate of the whole graph's. Evaluation is exact unless
    train.evaluate is sampled.
    """

    batch: Annotated[int, Range(0)] = 0
    """Training vertices of a step, on all ranks together; 0, or all: the whole graph is one step, and nothing is drawn."""
    fanout: Annotated[tuple[int | str, ...], Range(-1)] = ()
    """In-neighbours that are drawn of each vertex, a number for each layer, that of the layer next to the output first,
    such as 15,10,5; -1, or all: every one. For model.kind rgcn a layer may have numbers by relation, such as
    0:15/3:all/else:5, in Python {0: 15, 3: "all", "else": 5}: 15 of relation 0, all of relation 3, 5 of each other one, and
    of a relation with 0 none; in other layers a number is then that of each relation, as with by_type. Without batch all of
    them, or not set."""
    draw: Literal["uniform", "replace", "weight", "labor", "labor-one"] = "uniform"
    """How in-neighbours are drawn. uniform: without replacement; replace: with it; weight: without replacement, the heavier
    an edge the sooner, and the edges drawn then count alike, as much as all of the vertex's edges do, or, where all are
    drawn, their weights; labor: LABOR-0 (Balin and Catalyurek 2023), a random number for each vertex, the same for all that
    may draw it, so that fewer are drawn; labor-one: the same number in every layer."""
    by_type: bool = False
    """For model.kind rgcn: draw so many in-neighbours of each relation, instead of so many whatever their relation."""
    weights: Literal["unbiased", "mean", "block"] = "unbiased"
    """What a drawn edge counts, beside its part of the whole graph's normalisation. unbiased: one over the chance of being
    drawn, so that a sum over neighbours has the whole graph's as its expectation, but for draw weight; mean: as much as
    makes the edges drawn of a vertex count as all of its edges; block: 1, normalised by how many edges were drawn, as DGL's
    GraphConv does."""
    first: Literal["drawn", "full"] = "drawn"
    """Where the sums over neighbours of the first layer come from. drawn: as those of the others; full: from A X, all sums,
    which are computed once before training, kept in a temporary file and gathered as features are: the last hop is not
    drawn, and its fan-out not read (BatchGNN's cache, in exact form). For models whose first layer sums X itself."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is smaller than the others."""
    deal: Literal["global", "ranges", "by-class"] = "global"
    """How training vertices come into batches. global: in an order of their own in each epoch, every one once; ranges: each
    rank shuffles a range of them, mostly its own vertices, as DistDGL does, so that batches depend on the number of ranks;
    by-class: a vertex is drawn in proportion to the weight of its class in train.class_weights, and the loss then counts
    all that are drawn alike, so that its expectation is the loss that these weights describe."""
    plan: Literal["auto", "bound", "run"] = "auto"
    """How many rows and edges a batch is planned to have at most. bound: what fan-outs allow; run: what some batches of the
    first epochs have, and 5 % more: a step that has more is then cut into halves, whose gradients are added; auto: bound
    where it takes little memory (beside a GPU, where it sends at most 1 MiB), or a batch norm or weights block would see
    the halves, rows are learned, or halo is history, else run."""
    rows: Literal["mapped", "owners", "parts"] = "mapped"
    """What ranks read of the store for their batches. mapped: each maps all of it; owners: each reads the features of the
    vertices that it owns, and asks the owners for others; parts: each reads the edges of its own vertices alone, too, and
    has their owners draw around others, as on machines that hold a part each. Same batches, same bits; labels are read from
    the store in any case."""
    macro: Annotated[int, Range(0)] = 1
    """Unless rows is mapped, the batches whose rows are fetched together, each row once (a macrobatch of BatchGNN): fewer
    rows are sent, and more are held; 0: all batches of an epoch. No result changes."""
    cache_rows: Annotated[int, Range(0)] = 0
    """Unless rows is mapped, the rows of other ranks that each rank fetches once, before training, and keeps: those of the
    vertices that most others have as an in-neighbour. No result changes."""
    ahead: Annotated[int, Range(-1, 64)] = -1
    """Batches that threads draw and gather beside the step; 0: each is drawn when it is its turn; -1: 2, and beside a GPU
    three for four cores of a rank, 2 to 12. No result changes."""
    halo: Literal["exact", "history"] = "exact"
    """What a batch of several ranks reads of vertices that other ranks own. exact: they are drawn around and computed as
    all others; history: nothing is drawn around them, and each layer takes their rows as their owners last sent them, from
    a cache (DistGNN-MB): an approximation, for ranks whose batches are independent. Evaluation stays exact."""
    history_lines: Annotated[int, Range(1, MAX_LINES)] = 1_000_000
    """Of halo history: rows that the cache of a layer holds, at most as many as a rank reads of others. A row that comes to
    a full cache takes the oldest place."""
    history_life: Annotated[int, Range(0)] = 2
    """Of halo history: steps for which a row counts after the one in which it came; rows that never change, such as
    features, always do."""
    history_rows: Annotated[int, Range(1, MAX_LINES)] = 2000
    """Of halo history: most rows of a layer that a rank sends each other rank in a step; of more, those are drawn in
    proportion to the in-edges of their vertices."""
    history_delay: Annotated[int, Range(0, 64)] = 1
    """Of halo history: steps that a message takes. 0: each layer waits for the rows of the same step."""
    history_ends: Literal["keep", "paper"] = "keep"
    """Of halo history, what becomes of messages at the end of an epoch. keep: they arrive in the next one; paper: an
    epoch's first history_delay steps read no cache, and its last ones send nothing (DistGNN-MB, Algorithm 2)."""
    history_missing: Literal["rest", "zero"] = "rest"
    """Of halo history, what a vertex that is not in the cache does to a sum. rest: what is left counts as much as all of
    it; zero: its row counts as zeros."""
    compare_gradient: Annotated[int, Range(0)] = 0
    """Epochs after which the gradient of the next step is compared with the exact one of the whole graph, at the same
    weights: cosine and ratio of norms, in the history; 0: never. No other result changes."""

    def __post_init__(self) -> None:
        _settle(self, "sample")
        if self.halo != "history":
            named = [name for name, default in HISTORY.items() if getattr(self, name) != default]
            _require(
                not named,
                f"{', '.join(f'sample.{name}' for name in named)} belong{'s' * (len(named) == 1)} to sample.halo "
                f"history, got {self.halo}; leave {'it' if len(named) == 1 else 'them'} out, or set sample.halo history",
            )
        _require(
            0 not in self.fanout,
            f"sample.fanout must be 1 or more for each layer, or all, got {self.fanout_text}",
        )
        for name, value, default in (("macro", self.macro, 1), ("cache_rows", self.cache_rows, 0)):
            _require(
                value == default or self.rows != "mapped",
                f"sample.{name} is {value}, and with sample.rows mapped no row is fetched; set sample.rows = owners, or "
                f"leave sample.{name} out",
            )
        if not self.batch:
            if set(self.fanout) == {-1}:  # all neighbours in one step are the whole graph, which draws nothing
                object.__setattr__(self, "fanout", ())
            _require(
                not self.compare_gradient,
                f"sample.compare_gradient is {self.compare_gradient}, and without sample.batch every gradient is exact; "
                "set sample.batch, such as 1024",
            )
            _require(
                not self.fanout,
                f"sample.fanout is {self.fanout_text}, and without sample.batch the whole graph is one "
                "step; set sample.batch, such as 1024",
            )

    def require_fanout(self) -> None:
        """Refuse batches for which nothing says how many in-neighbours are drawn. Raises: ConfigError."""
        _require(
            bool(self.fanout) or not self.batch,
            f"sample.batch is {self.batch}, and sample.fanout is not set; give it a number for each layer, such as "
            "15,10,5, or all",
        )

    @property
    def fanout_text(self) -> str:
        """The fan-outs as the command line takes them."""
        return ",".join("all" if numbers == _ALL["fanout"] else str(numbers) for numbers in self.fanout)

    @property
    def drawn_fanout(self) -> tuple[int | str, ...]:
        """The fan-outs of the hops that are drawn."""
        return self.fanout[:-1] if self.first == "full" else self.fanout

    @property
    def draws_by_type(self) -> bool:
        """Whether neighbours of each relation are drawn apart: with by_type, or where a layer has numbers by relation."""
        return self.by_type or any(isinstance(numbers, str) for numbers in self.fanout)


HISTORY: Final[Mapping[str, Any]] = {
    name: default
    for name, default in ((one.name, one.default) for one in fields(SampleConfig))
    if name.startswith("history_")
}
"""Settings that belong to sample.halo history, with their defaults."""
