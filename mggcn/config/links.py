"""Table [links] of the settings: how links are predicted from embeddings of vertices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mggcn.config.values import Range
from mggcn.config.values import settle as _settle


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksConfig:
    """Table [links]: for a graph whose edges are split into links (mggcn prepare --links)."""

    embedding: Annotated[int, Range(1)] = 64
    """Columns of a vertex's embedding, which the model's last layer gives."""
    decoder: Annotated[tuple[int, ...], Range(1)] = ()
    """Hidden widths of the network that scores a pair, of the product of both embeddings column by column; none: the score
    is their dot product."""
    negatives: Annotated[int, Range(1, 1024)] = 1
    """Pairs without a link that training draws for each link, anew in every step: its source and another destination."""
    negatives_from: Literal["uniform", "in-batch"] = "uniform"
    """Destinations of the pairs without a link. uniform: any vertex but the source; in-batch: those of the step's other
    links, so that vertices with many links are drawn more often, and batches have no further seeds."""

    def __post_init__(self) -> None:
        _settle(self, "links")
