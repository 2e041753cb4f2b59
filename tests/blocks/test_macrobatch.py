"""Macrobatches: which steps they have, and how many of them are needed at once."""

from __future__ import annotations

import pytest

from mggcn.blocks.macrobatch import Macrobatches


@pytest.mark.parametrize("steps", [1, 2, 5, 12])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 40])
def test_spans_cut_every_epoch_into_consecutive_steps(steps: int, size: int) -> None:
    """Fails if a step is in none, in two or in another one than `of` says, or one has steps of two epochs."""
    macros = Macrobatches(steps, size)
    spans = [macros.span(number) for number in range(3 * macros.per_epoch)]
    assert [step for span in spans for step in span] == list(range(3 * steps))
    assert all(macros.of(step) == number for number, span in enumerate(spans) for step in span)
    assert all(len({step // steps for step in span}) == 1 for span in spans)
    assert max(map(len, spans)) == macros.batches == min(size or steps, steps)


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 2, 3])
@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_as_many_are_held_as_a_window_needs(steps: int, size: int, ahead: int) -> None:
    """Fails if a window of steps needs more macrobatches than are held, or one is held for nothing."""
    macros = Macrobatches(steps, size)
    needed = [len({macros.of(step + further) for further in range(ahead + 1)}) for step in range(2 * steps)]
    assert macros.at_once(ahead) == max(needed)
