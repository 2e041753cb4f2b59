"""The order `stream`: its parts against its definition, their balance, and what they save."""

from __future__ import annotations

import numpy as np
import pytest

from mggcn import native
from mggcn.errors import ConfigError
from mggcn.graph.generate import community, rmat
from mggcn.partition.locality import chunks
from mggcn.partition.metis.edge_cut import edge_cut
from mggcn.partition.order import assign
from mggcn.partition.stream import StreamSettings, stream, stream_parts
from tests.partition.cut.test_libra import KINDS, dense_of, graph_of
from tests.partition.stream_twin import stream_twin


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2, 3, 70])
def test_parts_are_those_of_the_definition(kind: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a neighbour is missed, counted twice or before it has a part, a tie goes elsewhere, or chunks or
    instruction sets differ.
    """
    graph, expected = graph_of(dense_of(kind)), stream_twin(dense_of(kind) != 0, parts)
    got = stream_parts(graph, parts)
    assert got.dtype == np.uint16
    assert got.tolist() == expected
    kernel = native.kernel
    with monkeypatch.context() as patch:
        patch.setattr(native, "kernel", lambda name: kernel(name, set_="baseline"))
        patch.setattr(chunks, "EDGES", 7)
        patch.setattr(chunks, "ROWS", 5)
        assert stream_parts(graph, parts).tolist() == expected


@pytest.mark.parametrize("parts", [2, 8])
def test_parts_are_even_and_cut_less(parts: int) -> None:
    """Fails if the limit is forgotten, hubs are not counted as work, or the parts cut about as much as random ones."""
    for graph, less in ((community(4000, 40000, 2, 8, seed=11), 0.85), (rmat(scale=11, edge_factor=8, seed=5), 1.0)):
        s = stream(graph, StreamSettings(parts=parts)).statistics
        assert s.nonzero_balance <= 1.051
        drawn = edge_cut(graph, assign(graph.num_vertices, parts, "random", 3).owner, parts).statistics
        assert s.num_cut < less * drawn.num_cut


def test_wrong_settings_are_refused() -> None:
    """Fails if parts that no cut can have get through."""
    for parts in (0, 1025):
        with pytest.raises(ConfigError, match=f"1 to 1024 parts, got {parts}"):
            StreamSettings(parts=parts)
