"""Cross-entropy with its gradient, and the counts behind the scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mggcn.backend.base import ENTRY_LOSSES, EntryLoss, KernelBackend, LossTarget
from mggcn.backend.cpu.backend import CpuBackend
from tests.backend.cases import Make, filled, guards_hold, host, padded, real_type, reals, skewed, zeros


def run(
    backend: KernelBackend,
    z: np.ndarray,
    labels: np.ndarray,
    mask: np.ndarray,
    scale: np.ndarray | None = None,
    make: Make = padded,
) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, gradient and bias gradient of the mean over the rows of the mask."""
    out, whole = make(backend, *z.shape)
    filled(out, z)
    loss = zeros(backend, 1, dtype=torch.float64)
    partials = zeros(backend, backend.partials, z.shape[1], dtype=torch.float64).fill_(float("nan"))
    row_scale = None if scale is None else reals(backend, scale)
    inv_count = 1.0 / max(int((mask & 1).sum()), 1)
    backend.softmax_xent(
        out, LossTarget(backend.upload(labels), backend.upload(mask), inv_count), row_scale, loss, partials
    )
    assert guards_hold(whole, out, 1)
    bias = zeros(backend, z.shape[1], dtype=real_type(backend))
    backend.sum_partials(partials, bias)
    return float(loss), host(out), host(bias)


def rounded(backend: KernelBackend, z: np.ndarray) -> np.ndarray:
    return host(torch.from_numpy(z).to(backend.dtype))


@pytest.mark.covering(1)
@pytest.mark.parametrize("make", [padded, skewed])
@pytest.mark.parametrize("classes", [1, 2, 7, 41, 6200])
@pytest.mark.parametrize("spread", [1.0, 30.0, 1e4, 0.0])
def test_cross_entropy_equals_autograd(backend: KernelBackend, classes: int, spread: float, make: Make) -> None:
    """Fails if exp overflows, equal logits or one class go wrong, or masked rows, scales or the bias gradient do."""
    rng = np.random.default_rng(classes + 100)
    rows = 150 if classes < 1000 else 20
    z = rounded(backend, rng.choice([-1.0, 0.5, 1.0], (rows, classes)) * spread)
    labels = rng.integers(0, classes, rows).astype(np.int32)
    mask = rng.integers(0, 8, rows).astype(np.uint8)
    labels[mask == 0] = -1
    scale = rng.random(rows) + 0.5
    loss, grad, bias = run(backend, z, labels, mask, scale, make)
    chosen = (mask & 1).astype(bool)
    x = torch.from_numpy(z).requires_grad_(True)
    with torch.enable_grad():
        expected = torch.nn.functional.cross_entropy(x[chosen], torch.from_numpy(labels.astype(np.int64))[chosen])
        expected.backward()
    limit = 1e-12 if backend.dtype == torch.float64 else 1e-5
    assert loss == pytest.approx(float(expected.detach()), rel=limit, abs=limit)
    wanted = x.grad.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(bias, wanted.sum(0), atol=limit)
    stored = 2.0**-8 if backend.dtype == torch.bfloat16 else limit
    np.testing.assert_allclose(
        grad, wanted * scale[:, None], rtol=stored, atol=limit * np.abs(wanted).max() + limit / rows
    )
    assert not grad[~chosen].any()


def test_float32_is_as_close_as_its_rounding(backend: KernelBackend) -> None:
    """Fails if the exponential of float32 is worse than 1e-5 anywhere on its range."""
    z = np.zeros((4001, 2))
    z[:, 0] = rounded(backend, np.linspace(-100, 100, 4001))
    labels, mask = np.zeros(4001, np.int32), np.ones(4001, np.uint8)
    found = run(backend, z, labels, mask)
    double = run(CpuBackend(torch.float64, 1), z, labels, mask)
    assert found[0] == pytest.approx(double[0], rel=1e-6)
    stored = 2.0**-8 if backend.dtype == torch.bfloat16 else 0
    np.testing.assert_allclose(found[1] * 4001, double[1] * 4001, rtol=stored, atol=1e-6)


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


def test_loss_of_no_rows_is_zero(backend: KernelBackend) -> None:
    """Fails if a rank without rows, or without train vertices, adds to the loss."""
    none = run(backend, np.zeros((0, 4)), np.zeros(0, np.int32), np.zeros(0, np.uint8))
    masked = run(backend, np.ones((9, 4)), np.full(9, -1, np.int32), np.full(9, 6, np.uint8))
    for loss, grad, bias in (none, masked):
        assert loss == 0
        assert not grad.any()
        assert not bias.any()


def test_loss_without_bias_adds_to_what_is_there(backend: KernelBackend) -> None:
    """Fails if a loss without partial sums differs, or an earlier loss is overwritten."""
    rng = np.random.default_rng(4711)
    z, labels, mask = rng.normal(size=(60, 5)), rng.integers(0, 5, 60).astype(np.int32), np.ones(60, np.uint8)
    expected, grad, _ = run(backend, z, labels, mask)
    out = filled(padded(backend, 60, 5)[0], z)
    loss = zeros(backend, 1, dtype=torch.float64).fill_(10.0)
    backend.softmax_xent(out, LossTarget(backend.upload(labels), backend.upload(mask), 1 / 60), None, loss, None)
    # Where the sum is fused with the product, the last bit differs.
    assert float(loss) == pytest.approx(10.0 + expected, rel=1e-15)
    assert np.array_equal(host(out), grad)


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


def counted(backend: KernelBackend, z: np.ndarray, labels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    logits = filled(padded(backend, z.shape[0], z.shape[1], fill=float("inf"))[0], z)
    counts = zeros(backend, 3, 3, z.shape[1], dtype=torch.int64).fill_(1)
    backend.confusion(logits, backend.upload(labels), backend.upload(mask), counts)
    return host(counts) - 1


@pytest.mark.covering(2, rest="slow")
@pytest.mark.parametrize(("rows", "classes"), [(0, 3), (1, 1), (400, 5), (400, 40), (60, 1500)])
def test_confusion_equals_numpy(backend: KernelBackend, rows: int, classes: int) -> None:
    """Fails if splits that overlap, ties, unlabelled vertices or an earlier count are handled wrongly."""
    rng = np.random.default_rng(21)
    z = rng.integers(-2, 3, (rows, classes)).astype(float)
    labels = rng.integers(0, classes, rows).astype(np.int32)
    mask = rng.integers(0, 8, rows).astype(np.uint8)
    labels[mask == 0] = -1
    expected = np.zeros((3, 3, classes), np.int64)
    best = z.argmax(1)
    for split in range(3):
        chosen = (mask >> split & 1).astype(bool)
        for row, what in enumerate((best[chosen & (best == labels)], best[chosen], labels[chosen])):
            expected[split, row] += np.bincount(what, minlength=classes)
    assert np.array_equal(counted(backend, z, labels, mask), expected)


def test_prediction_among_what_is_not_finite(backend: KernelBackend) -> None:
    """Fails if a device predicts another class than the others where scores are NaN or infinite."""
    nan, inf = float("nan"), float("inf")
    cases = [
        ([nan, 5, 7], 0),
        ([1, nan, 7], 2),
        ([-inf, nan, -inf], 0),
        ([-inf, -inf, nan], 0),
        ([3, inf, inf], 1),
        ([nan, inf, nan], 0),
        ([-inf, -3, nan], 1),
        ([nan, nan, nan], 0),
    ]
    z = np.array([row for row, _ in cases])
    predictions = counted(backend, z, np.zeros(len(cases), np.int32), np.ones(len(cases), np.uint8))[0, 1]
    assert predictions.tolist() == np.bincount([best for _, best in cases], minlength=3).tolist()


@pytest.mark.covering(1)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [1, 2, 7, 41, 6200])
@pytest.mark.parametrize("spread", [1.0, 30.0, 1e4])
def test_weights_and_smoothing_equal_autograd(
    backend: KernelBackend, weighted: bool, smoothing: float, classes: int, spread: float
) -> None:
    """Fails if a class's weight or the smoothed target is left out of the loss, the gradient or the bias gradient."""
    rng = np.random.default_rng(classes + 700)
    rows = 150 if classes < 1000 else 20
    z = rounded(backend, rng.choice([-1.0, 0.5, 1.0], (rows, classes)) * spread)
    labels, mask = rng.integers(0, classes, rows).astype(np.int32), rng.integers(0, 2, rows).astype(np.uint8)
    mask[0] = 1
    scale, weights = rng.random(rows) + 0.5, rng.random(classes) + 0.5 if weighted else None
    chosen = mask.astype(bool)
    total = chosen.sum() if weights is None else weights[labels[chosen]].sum()
    out, whole = padded(backend, rows, classes)
    filled(out, z)
    loss, partials = (
        zeros(backend, 1, dtype=torch.float64),
        zeros(backend, backend.partials, classes, dtype=torch.float64),
    )
    target = LossTarget(
        backend.upload(labels),
        backend.upload(mask),
        1 / total,
        None if weights is None else reals(backend, weights),
        smoothing,
    )
    backend.softmax_xent(out, target, reals(backend, scale), loss, partials)
    assert guards_hold(whole, out, 1)
    bias = zeros(backend, classes, dtype=real_type(backend))
    backend.sum_partials(partials, bias)
    x = torch.from_numpy(z).requires_grad_(True)
    with torch.enable_grad():
        expected = torch.nn.functional.cross_entropy(
            x[chosen],
            torch.from_numpy(labels.astype(np.int64))[chosen],
            weight=None if weights is None else torch.from_numpy(weights),
            label_smoothing=smoothing,
        )
        expected.backward()
    check(backend, loss, out, bias, expected, x, scale)


def check(backend, loss, out, bias, expected, x, scale):  # type: ignore[no-untyped-def]
    """Loss, gradient times the rows' scales, and its columns against autograd's."""
    limit = 1e-12 if backend.dtype == torch.float64 else 1e-5
    wanted = x.grad.numpy()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=limit, abs=limit)
    np.testing.assert_allclose(host(bias), wanted.sum(0), atol=limit * max(1, np.abs(wanted).sum(0).max()))
    stored = 2.0**-8 if backend.dtype == torch.bfloat16 else limit
    np.testing.assert_allclose(
        host(out), wanted * scale[:, None], rtol=stored, atol=limit * np.abs(wanted).max() + limit / len(wanted)
    )


LOSSES = {
    "bce": torch.nn.functional.binary_cross_entropy_with_logits,
    "mse": torch.nn.functional.mse_loss,
    "mae": torch.nn.functional.l1_loss,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ENTRY_LOSSES)
@pytest.mark.parametrize("make", [padded, skewed])
@pytest.mark.parametrize("columns", [1, 2, 7, 130, 6200])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e4])
def test_losses_of_entries_equal_autograd(
    backend: KernelBackend, kind: EntryLoss, columns: int, spread: float, make: Make
) -> None:
    """Fails if an unknown entry counts, large scores overflow, or a row, its scale or the bias gradient goes wrong."""
    rng = np.random.default_rng(columns + 900)
    rows = 150 if columns < 1000 else 20
    z = rounded(backend, rng.choice([-1.0, 0.5, 1.0], (rows, columns)) * spread)
    targets = rng.integers(0, 2, z.shape).astype(float) if kind == "bce" else rng.normal(size=z.shape)
    targets = targets.astype(np.float32).astype(float)
    targets[rng.random(z.shape) < 0.3] = np.nan
    targets[0, 0] = 1
    mask = rng.integers(0, 8, rows).astype(np.uint8)
    mask[0] = 1
    known = ~np.isnan(targets) & (mask & 1 == 1)[:, None]
    scale = rng.random(rows) + 0.5
    out, whole = make(backend, rows, columns)
    filled(out, z)
    loss, partials = (
        zeros(backend, 1, dtype=torch.float64),
        zeros(backend, backend.partials, columns, dtype=torch.float64),
    )
    target = LossTarget(reals(backend, targets), backend.upload(mask), 1 / known.sum())
    backend.entry_loss(kind, out, target, reals(backend, scale), loss, partials)
    assert guards_hold(whole, out, 1)
    bias = zeros(backend, columns, dtype=real_type(backend))
    backend.sum_partials(partials, bias)
    x = torch.from_numpy(z).requires_grad_(True)
    with torch.enable_grad():
        expected = LOSSES[kind](x[known], torch.from_numpy(targets)[known])
        expected.backward()
    check(backend, loss, out, bias, expected, x, scale)
    assert not host(out)[~known].any()


@pytest.mark.parametrize("kind", ENTRY_LOSSES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_entries_that_are_not_finite_reach_the_loss(backend: KernelBackend, kind: EntryLoss, bad: float) -> None:
    """Fails if NaN or infinity in one known score leaves the loss finite, or in an unknown one does not."""
    for unknown in (False, True):
        out = filled(padded(backend, 5, 3)[0], np.ones((5, 3)))
        out[2, 1] = bad
        targets = np.zeros((5, 3)) if bad > 0 else np.ones((5, 3))
        targets[2, 1] = np.nan if unknown else targets[2, 1]
        loss = zeros(backend, 1, dtype=torch.float64)
        target = LossTarget(reals(backend, targets), backend.upload(np.ones(5, np.uint8)), 0.1)
        backend.entry_loss(kind, out, target, None, loss, None)
        assert np.isfinite(float(loss)) == unknown


@pytest.mark.covering(2, rest="slow")
@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (1, 1), (400, 5), (60, 300)])
def test_counts_of_entries_equal_numpy(backend: KernelBackend, rows: int, columns: int) -> None:
    """Fails if an unknown entry, a score of 0, a split that overlaps or an earlier count is handled wrongly."""
    rng = np.random.default_rng(33)
    z = rng.integers(-2, 3, (rows, columns)).astype(float)
    targets = rng.choice([0.0, 1.0, np.nan], z.shape)
    mask = rng.integers(0, 8, rows).astype(np.uint8)
    scores = filled(padded(backend, rows, columns, fill=float("inf"))[0], z)
    counts = zeros(backend, 3, 3, columns, dtype=torch.int64).fill_(1)
    backend.entry_counts(scores, reals(backend, targets), backend.upload(mask), counts)
    predicted, positive = (z > 0) & ~np.isnan(targets), targets == 1
    for split in range(3):
        chosen = (mask >> split & 1).astype(bool)[:, None]
        for row, what in enumerate((predicted & positive, predicted, positive)):
            assert np.array_equal(host(counts)[split, row] - 1, (what & chosen).sum(0))
