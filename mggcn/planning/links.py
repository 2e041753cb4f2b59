"""What predicting links adds to a plan: pairs of a step, their matrix, and the scores of validation and test links.

N vertices, P ranks, T training links, M pairs of a step on a rank, S rows that they are of, D columns. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from mggcn.aggregate.base import Matrix
from mggcn.blocks.block import EVERYONE, PAIRS, RowSet, Stack
from mggcn.blocks.padded import PairRoom
from mggcn.config import Config, LinksConfig
from mggcn.config.values import fields_of
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.memory.arena import ITEM_BYTES, BufferSpec
from mggcn.memory.device import DEVICES, REAL, STORAGE, scale_dtype
from mggcn.model.stack import PairScoring
from mggcn.planning.shape import GraphShape
from mggcn.planning.task import HITS

MOST: Final = max(HITS.values())
"""Best scores of negatives that are kept of a split."""
SUMS: Final = 4
"""Sums that ranks add up of a split."""
PAIR_BYTES: Final = 2 << 20
"""Bytes of embeddings, in float64, of the pairs that are scored at a time."""
DRAWING_BYTES: Final = 200
"""Bytes a pair while negatives are drawn and pairs are sorted by row."""


def check_links(config: Config, graph: Graph) -> None:
    """Refuse settings that do not go with links, or need them. Raises: ConfigError."""
    run, default = config.run, LinksConfig()
    if graph.task != "links":
        named = [name for name in fields_of(LinksConfig) if getattr(config.links, name) != getattr(default, name)]
        if named:
            raise ConfigError(
                f"links.{named[0]} is for predicting links, and the edges of {graph.name} are not split: prepare it with "
                "--links 0.8,0.1,0.1, or leave the setting out"
            )
        return
    if run.spmm != "own":
        raise ConfigError(
            "debug.spmm cusparse prepares a product for one matrix, and every step that predicts links has others; use own"
        )
    if run.precision == "bf16":
        raise ConfigError(
            "run.precision bf16 would round the sums over pairs of a vertex; choose fp32, or mixed for a model of mggcn"
        )
    if config.shares_batches:
        raise ConfigError(
            "run.batches cooperative leaves each vertex to one rank, and pairs need both ends on theirs; choose "
            "independent where links are predicted"
        )
    if config.sample.halo == "history":
        raise ConfigError(
            "sample.halo history draws around a rank's own vertices, and a link's ends may be any rank's; choose exact "
            "where links are predicted"
        )
    if config.sample.first == "full":
        raise ConfigError(
            "sample.first full sums over all edges in the first layer, a step's own links too, which are to be left out; "
            "choose drawn where links are predicted"
        )
    if config.sample.deal != "global":
        raise ConfigError(
            f"sample.deal {config.sample.deal} deals out training vertices, and a step's links are drawn from all; choose "
            "global where links are predicted"
        )
    if config.sample.compare_gradient:
        raise ConfigError(
            "sample.compare_gradient compares a batch with the whole graph, whose step leaves no links out; leave it out "
            "where links are predicted"
        )


def scoring_of(config: Config, shape: GraphShape) -> PairScoring | None:
    """Return how a run scores the pairs of a step; None if it predicts no links."""
    if shape.task != "links":
        return None
    everyone = shape.num_vertices if _gathers(config) else 0
    return PairScoring(config.links.decoder, everyone, STORAGE[config.run.precision])


def _gathers(config: Config) -> bool:
    """Whether pairs are of the rows of all ranks: a whole-graph step of several."""
    return config.run.ranks > 1 and not config.sample.batch


def pair_rows(config: Config, shape: GraphShape) -> dict[RowSet, int]:
    """Return the rows of the sets that only links have, the most of any step; {} if a run predicts none."""
    if shape.task != "links":
        return {}
    everyone = {EVERYONE: shape.num_vertices} if _gathers(config) else {}
    return {PAIRS: _links_of_step(config, shape) * (1 + config.links.negatives)} | everyone


def seeds_of_one(config: Config, shape: GraphShape) -> int:
    """Return the most vertices of which a training vertex, or the pairs of a training link, make seeds."""
    return 2 + config.links.negatives if shape.task == "links" else 1


def _links_of_step(config: Config, shape: GraphShape) -> int:
    links = shape.num_training or 1
    return -(-min(config.sample.batch or links, links) // config.run.ranks)


def pair_matrix(config: Config, shape: GraphShape, owned: int, stack: Stack | None) -> Matrix | None:
    """Return the size of the matrix of a step's pairs; None without links. owned: rows of the rank."""
    if shape.task != "links":
        return None
    rows = owned if stack is None else stack.rows[stack.seeds]
    return Matrix(shape.num_vertices if _gathers(config) else rows, 2 * pair_rows(config, shape)[PAIRS])


def keeps_pairs(config: Config) -> bool:
    """Return whether the pairs of steps over the whole graph lie where they are in all of them, as a device needs that
    records a step once. Products of their matrix then divide rows evenly among threads: a row of many pairs takes less time
    than the host takes to make these pairs.
    """
    return not DEVICES[config.run.device].is_host and not config.sample.batch


def pair_room(config: Config, shape: GraphShape, owned: int, stack: Stack | None) -> PairRoom | None:
    """Return what the pairs of a step take on a device that keeps them in one place; None without links. owned, stack: as
    of `pair_matrix`.
    """
    matrix = pair_matrix(config, shape, owned, stack)
    if matrix is None:
        return None
    real = scale_dtype(config.run.precision)
    return PairRoom(pairs=matrix.nnz // 2, rows=matrix.rows, real=real, dot=not config.links.decoder)


def pair_bytes(config: Config, shape: GraphShape, matrix: Matrix, kept: int) -> int:
    """Return the bytes of pairs that are loaded and of those that are scored on one rank, on a CPU also of those on their
    way. kept: bytes of the room of steps over the whole graph, where the device keeps pairs in one place.
    """
    real, pairs = ITEM_BYTES[REAL[config.run.precision]], matrix.nnz // 2
    if not DEVICES[config.run.device].is_host:
        # Those of a batch are among its bytes.
        values = 0 if config.links.decoder else real * matrix.nnz
        return kept + values + _scoring_bytes(config, shape)
    loaded = (8 + real) * matrix.nnz + (real + 1) * pairs
    return loaded + host_pair_bytes(config, shape, matrix, 0) + _scoring_bytes(config, shape)


def host_pair_bytes(config: Config, shape: GraphShape, matrix: Matrix, kept: int) -> int:
    """Return the bytes of pairs on their way on one rank, and of what is counted of scores, in the host's memory. kept: as
    of `pair_bytes`.
    """
    pairs, batches = matrix.nnz // 2, 1 + bool(config.sample.batch) * (config.sample.ahead + 1)
    drawn = 8 * pairs + 4 * matrix.nnz + 8 * (matrix.rows + 1)
    order = 10 * (shape.num_training or 0)  # numbers of links, and on several ranks the rank of each
    return batches * drawn + DRAWING_BYTES * pairs + order + 24 * shape.num_scored + kept


def _scoring_bytes(config: Config, shape: GraphShape) -> int:
    widest = max((config.links.embedding, *config.links.decoder))
    some = 6 * PAIR_BYTES * -(-widest // config.links.embedding)
    return some + (sum(score_sums(config, shape)) if config.run.ranks > 1 else 0)


def counts_nbytes(ranks: int) -> int:
    """Return the bytes of what ranks add up of validation and test links."""
    return 8 * 2 * ranks * (SUMS + MOST)


def score_sums(config: Config, shape: GraphShape) -> tuple[int, ...]:
    """Return the bytes that an evaluation sums over ranks: all embeddings, then counts."""
    rows = BufferSpec("", shape.num_vertices, config.links.embedding, STORAGE[config.run.precision])
    return rows.nbytes, counts_nbytes(config.run.ranks)


def decoder_names(parameters: Collection[str], decoder: Sequence[int]) -> list[str]:
    """Return the names of the layers that score pairs, the last of a run's; [] for dot products."""
    layers = sorted(
        int(name.split(".")[1]) for name in parameters if name.startswith("layers.") and name.endswith(".weight")
    )
    return [f"layers.{number}" for number in layers[-1 - len(decoder) :]] if decoder else []
