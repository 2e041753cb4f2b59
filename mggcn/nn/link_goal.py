"""What a user's own module is trained for where links are predicted: the loss of a step's pairs, and scores of other links.

N vertices, V rows of this rank, M pairs of a step on it, D columns of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from mggcn.blocks.padded import PairRoom
from mggcn.config import LinksConfig
from mggcn.errors import ConfigError
from mggcn.feed.pairs import LinkDraws, LinkFeed
from mggcn.nn.module_parts import Recipe, check_mean, named_loss, own_loss
from mggcn.nn.pairs import PairModule, decoder_of, every_row, pair_scores, users_module
from mggcn.nn.partitioned import PartitionedGraph
from mggcn.partition.order import part_sizes
from mggcn.train.engine import Scores
from mggcn.train.link_scores import LinkScores, PairDecoder
from mggcn.train.pairs import PairMemory, pairs_in_place


class LinkGoal:
    """Implements `Goal` of module_engine.py: pairs are those of a planned model's run (feed/pairs.py).

    Memory: embeddings of all vertices, twice, and the pairs of a step, on each rank.
    """

    def __init__(self, recipe: Recipe, part: PartitionedGraph) -> None:
        self._recipe, self._part, links = recipe, part, recipe.config.links
        self._backend = part.aggregation.backend
        train = part.links["train"]
        draws = LinkDraws(train, part.num_vertices, links.negatives, links.negatives_from == "in-batch")
        self._feed = LinkFeed(draws, part.rank, part.num_ranks, None)
        count = part_sizes(train.shape[0], part.num_ranks)[part.rank] * (1 + links.negatives)
        real = str(part.dtype).removeprefix("torch.")
        room = PairRoom(pairs=count, rows=part.num_vertices, real=real, dot=not links.decoder)
        self._memory = PairMemory(self._backend, room)
        self._pairs = pairs_in_place(self._backend, room, self._memory.arrays)
        self._is_mean = False

    def loss(self, module: Module, embeddings: Tensor, seed: int, epoch: int, *, looks: bool) -> Tensor:
        """Return this rank's share of the mean over the pairs of all ranks, from the embeddings (V, D). Collective.

        looks: whether a user's function is looked at, as of `check_mean`. Raises: ConfigError.
        """
        (batch,) = self._feed.epoch(seed, epoch)
        assert batch.pairs is not None  # LinkFeed gives them
        self._backend.activate()
        self._memory.write(batch.pairs)
        scores = pair_scores(
            module, every_row(self._checked(module, embeddings), self._part), self._pairs, self._backend
        )
        labels, loss = self._memory.arrays["labels"], self._recipe.loss
        if loss is None:
            return named_loss(self._recipe.config.train.loss, scores, labels)[0] / batch.pairs.total
        total, mean = own_loss(loss, scores, labels)
        if mean and looks and not self._is_mean:
            self._is_mean = check_mean(loss, scores.detach(), labels, self._part.rank)
        return total / batch.pairs.total

    def _checked(self, module: Module, embeddings: Tensor) -> Tensor:
        """Return the embeddings. Raises: ConfigError if their type or columns are not those of the run."""
        came, columns, name = (
            embeddings.shape[1],
            self._recipe.config.links.embedding,
            type(users_module(module)).__name__,
        )
        if embeddings.dtype != self._part.dtype or not came:
            raise ConfigError(
                f"{name} returns {came} columns of {embeddings.dtype}; embeddings need one at least, of the run's "
                f"{self._part.dtype}"
            )
        if came != columns and (isinstance(module, PairModule) or columns != LinksConfig().embedding):
            raise ConfigError(
                f"{name} returns {came} columns, and the run has links.embedding = {columns}; set embedding={came}"
            )
        return embeddings

    def evaluate(self, module: Module, embeddings: Tensor) -> Scores:
        """Return the score of each split, None of training links. Collective."""
        return self._scores(module).scores(embeddings)

    def every(self, module: Module, embeddings: Tensor) -> dict[str, Mapping[str, float | None]]:
        """Return every score of the links of each split that has any. Collective."""
        return {name: found for name, found in self._scores(module).every(embeddings).items() if found}

    def _scores(self, module: Module) -> LinkScores:
        part, decoder = self._part, PairDecoder(decoder_of(module), self._backend.upload)
        metric, comm = self._recipe.config.train.metric, part.aggregation.comm
        return LinkScores(metric, part.links, decoder, comm, self._backend, part.gather)


def scores_of_pairs(module: Module, embeddings: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the scores float64 (K,) of pairs of rows (K, 2) of embeddings (N, D), logits of a link."""
    x = torch.from_numpy(embeddings)
    heads, tails = pairs.T.copy()
    return PairDecoder(decoder_of(module)).scores(x, heads, tails[:, None])[:, 0]
