"""Cross-entropy with its gradient, and the counts behind the scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mggcn.backend.base import PARTIALS, KernelBackend
from mggcn.backend.cpu import CpuBackend
from tests.backend.cases import TYPES, filled, guards_hold, padded


def run(
    backend: KernelBackend, z: np.ndarray, labels: np.ndarray, mask: np.ndarray, scale: np.ndarray | None = None
) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, gradient and bias gradient of the mean over the rows of the mask."""
    out, whole = padded(*z.shape, backend.dtype)
    filled(out, z.astype(TYPES[backend.dtype]))
    loss, partials = torch.zeros(1, dtype=torch.float64), torch.zeros(PARTIALS, z.shape[1], dtype=torch.float64)
    row_scale = None if scale is None else torch.from_numpy(scale.astype(TYPES[backend.dtype]))
    inv_count = 1.0 / max(int((mask & 1).sum()), 1)
    backend.softmax_xent(out, torch.from_numpy(labels), torch.from_numpy(mask), inv_count, row_scale, loss, partials)
    assert guards_hold(whole, out, 1)
    bias = torch.zeros(z.shape[1], dtype=backend.dtype)
    backend.sum_partials(partials, bias)
    return float(loss), out.numpy(), bias.numpy()


@pytest.mark.parametrize("classes", [1, 2, 7, 41])
@pytest.mark.parametrize("spread", [1.0, 30.0, 1e4, 0.0])
def test_cross_entropy_equals_autograd(backend: KernelBackend, classes: int, spread: float) -> None:
    """Fails if exp overflows, equal logits or one class go wrong, or masked rows, scales or the bias gradient do."""
    rng = np.random.default_rng(classes + 100)
    rows = 150
    z = (rng.choice([-1.0, 0.5, 1.0], (rows, classes)) * spread).astype(TYPES[backend.dtype]).astype(float)
    labels = rng.integers(0, classes, rows).astype(np.int32)
    mask = rng.integers(0, 8, rows).astype(np.uint8)
    labels[mask == 0] = -1
    scale = rng.random(rows) + 0.5
    loss, grad, bias = run(backend, z, labels, mask, scale)
    chosen = (mask & 1).astype(bool)
    x = torch.from_numpy(z).requires_grad_(True)
    with torch.enable_grad():
        expected = torch.nn.functional.cross_entropy(x[chosen], torch.from_numpy(labels.astype(np.int64))[chosen])
        expected.backward()
    limit = 1e-5 if backend.dtype == torch.float32 else 1e-12
    assert loss == pytest.approx(float(expected.detach()), rel=limit, abs=limit)
    wanted = x.grad.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(bias, wanted.sum(0), atol=limit)
    np.testing.assert_allclose(grad, wanted * scale[:, None], atol=limit * np.abs(wanted).max() + limit / rows)
    assert not grad[~chosen].any()


def test_float32_is_as_close_as_its_rounding() -> None:
    """Fails if the exponential of float32 is worse than 1e-5 anywhere on its range."""
    z = np.zeros((4001, 2))
    z[:, 0] = np.linspace(-100, 100, 4001).astype(np.float32)
    labels, mask = np.zeros(4001, np.int32), np.ones(4001, np.uint8)
    single = run(CpuBackend(torch.float32, 1), z, labels, mask)
    double = run(CpuBackend(torch.float64, 1), z, labels, mask)
    assert single[0] == pytest.approx(double[0], rel=1e-6)
    np.testing.assert_allclose(single[1] * 4001, double[1] * 4001, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_reaches_the_loss(backend: KernelBackend, bad: float) -> None:
    """Fails if NaN or infinity in one logit of a train vertex leaves the loss finite."""
    for column in range(3):
        z = np.ones((5, 3))
        z[2, column] = bad
        if bad == float("-inf") and column != 1:
            continue  # a class of probability zero is no error unless it is the label
        loss, _, _ = run(backend, z, np.ones(5, np.int32), np.ones(5, np.uint8))
        assert not np.isfinite(loss)


def test_loss_repeats_for_any_threads() -> None:
    """Fails if the sum over rows depends on the number of threads."""
    rng = np.random.default_rng(404)
    z, labels = rng.normal(size=(3001, 11)), rng.integers(0, 11, 3001).astype(np.int32)
    mask = rng.integers(0, 2, 3001).astype(np.uint8)
    for dtype in (torch.float32, torch.float64):
        one, *others = (run(CpuBackend(dtype, t), z, labels, mask) for t in (1, 2, 2))
        for other in others:
            assert one[0] == other[0]
            assert np.array_equal(one[1], other[1])
            assert np.array_equal(one[2], other[2])


def test_confusion_equals_numpy(backend: KernelBackend) -> None:
    """Fails if splits that overlap, ties, unlabelled vertices or an earlier count are handled wrongly."""
    rng = np.random.default_rng(21)
    rows, classes = 400, 5
    z = rng.integers(-2, 3, (rows, classes)).astype(float)
    labels = rng.integers(0, classes, rows).astype(np.int32)
    mask = rng.integers(0, 8, rows).astype(np.uint8)
    labels[mask == 0] = -1
    logits, _ = padded(rows, classes, backend.dtype)
    filled(logits, z.astype(TYPES[backend.dtype]))
    counts = torch.ones((3, 3, classes), dtype=torch.int64)
    backend.confusion(logits, torch.from_numpy(labels), torch.from_numpy(mask), counts)
    expected = np.ones((3, 3, classes), np.int64)
    best = z.argmax(1)
    for split in range(3):
        chosen = (mask >> split & 1).astype(bool)
        for row, what in enumerate((best[chosen & (best == labels)], best[chosen], labels[chosen])):
            expected[split, row] += np.bincount(what, minlength=classes)
    assert np.array_equal(counts.numpy(), expected)
