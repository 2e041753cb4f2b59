"""What makes the CPU fast changes no result: every switch on and off, in all combinations."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import numpy as np
import pytest

from mggcn.backend.cpu import backend as cpu_backend
from mggcn.backend.cpu import spmm as cpu_spmm
from mggcn.backend.cpu.machine import Caches
from mggcn.backend.cpu.variants import GemmVariant, MatrixTraits, candidates
from mggcn.backend.spmm_choice import SpmmChoice, SpmmVariant
from mggcn.config import Config
from mggcn.planning import regions
from tests.planning.test_pruning import graph_of, trained
from tests.train.test_exact import TOLERANCE, config_of, relative_error

Prune = Literal["auto", "off"]
Precision = Literal["fp32", "bf16"]
PRUNE: tuple[Prune, ...] = ("auto", "off")
WAYS: tuple[SpmmVariant, ...] = ("rows", "panels", "blocks")
DENSE: tuple[GemmVariant, ...] = ("own", "torch")
HIDDEN = (40, 33)
"""Rows of several cache lines, so that every way is possible."""


def switch(monkeypatch: pytest.MonkeyPatch, way: SpmmVariant, dense: GemmVariant) -> set[SpmmVariant]:
    """Have sparse products go one way where they can, and dense ones be made by one side; return the ways taken."""
    taken: set[SpmmVariant] = set()

    def forced(matrix: MatrixTraits, width: int, item: int, caches: Caches, *, summed: bool = True) -> SpmmChoice:
        ways = candidates(matrix, width, item, caches, summed=summed).values()
        choice = next((choice for choice in ways if choice.way == way), SpmmChoice())
        taken.add(choice.way)
        return choice

    monkeypatch.setattr(cpu_spmm, "choose_spmm", forced)
    for room in (cpu_backend, regions):
        monkeypatch.setattr(room, "gemm_variant", lambda _: dense)
    return taken


def switched(config: Config, prune: Prune, threads: int = 1) -> Config:
    run = dataclasses.replace(config.run, prune=prune, threads=threads)
    return dataclasses.replace(config, run=run)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dense", DENSE)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_under_every_switch(way: SpmmVariant, dense: GemmVariant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a way of a product, who multiplies, pruning and the order of the vertices do not go together."""
    taken = switch(monkeypatch, way, dense)
    graph = graph_of()
    for prune, order, ranks in itertools.product(PRUNE, ("locality", "none"), (1, 3)):
        config = switched(config_of(ranks, order, hidden=HIDDEN, dropout=0.4), prune)
        assert relative_error(config, graph) < TOLERANCE
    assert way in taken


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dense", DENSE)
@pytest.mark.parametrize("way", WAYS)
def test_bits_repeat_under_every_switch(
    way: SpmmVariant, dense: GemmVariant, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a second run, another number of threads or pruning changes a bit, or ranks change more than rounding."""
    switch(monkeypatch, way, dense)
    graph = graph_of()

    def run(ranks: int, prune: Prune, threads: int = 1) -> Config:
        config = config_of(ranks, "locality", hidden=HIDDEN, dropout=0.4)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=4, lr=0.005))
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, precision=precision))
        return switched(config, prune, threads)

    losses, tensors, pruned = trained(run(1, "auto"), graph)
    assert pruned
    # torch's products may depend on the number of threads; ours do not.
    for config in (run(1, "auto"), run(1, "auto", threads=2) if dense == "own" else run(1, "auto"), run(1, "off")):
        again = trained(config, graph)
        assert again[0] == losses
        assert all((a == b).all() for a, b in zip(again[1], tensors, strict=True))
    shared = trained(run(3, "auto"), graph)[0]
    np.testing.assert_allclose(shared, losses, rtol=1e-5 if precision == "fp32" else 1e-2)
