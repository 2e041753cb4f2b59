"""Host arrays sent through two pinned buffers, with a wire that is as late as it may be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn.backend.cuda import device as cuda_device
from mggcn.backend.cuda.upload import Uploads
from mggcn.config import Config, DataConfig, ModelConfig, RunConfig
from mggcn.graph.csr import ArrayRows
from tests.devices import EMULATED
from tests.graphs import make_graph, on_ranks, pattern

BUFFER = 96


class Wire:
    """Copies what it was given when somebody waits for it, or at the end; `waited`: numbers of the parts waited for."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.waited: list[int] = []
        self.arrived = 0
        self.pinned = 0

    def pin(self, nbytes: int) -> Tensor:
        self.pinned += 1
        return torch.full((nbytes,), 0x7F, dtype=torch.uint8)

    def send(self, out: Tensor, pinned: Tensor) -> Callable[[], object]:
        number = len(self.parts)
        self.parts.append((out, pinned))

        def wait() -> None:
            self.waited.append(number)
            self.deliver(number + 1)

        return wait

    def deliver(self, count: int) -> None:
        for out, pinned in self.parts[self.arrived : count]:
            out.copy_(pinned)
        self.arrived = max(self.arrived, count)

    def uploads(self, small_bytes: int = 0) -> Uploads:
        return Uploads(self.pin, self.send, BUFFER, small_bytes)


def arrays() -> list[tuple[str, np.ndarray, Tensor]]:
    """Name, what is sent, and where to: types, shapes, strides; the buffers hold 96 bytes."""
    rng = np.random.default_rng(7)
    wide = rng.random((37, 5)).astype(np.float32)
    read_only = rng.integers(0, 99, 50)
    read_only.flags.writeable = False
    return [
        ("one part", np.arange(11, dtype=np.int64), torch.zeros(11, dtype=torch.int64)),
        ("whole parts", np.arange(48, dtype=np.int64), torch.zeros(48, dtype=torch.int64)),
        ("a rest", np.arange(1001, dtype=np.int32), torch.zeros(1001, dtype=torch.int32)),
        ("bool", rng.random(500) < 0.5, torch.zeros(500, dtype=torch.bool)),
        ("nothing", np.zeros(0, np.float32), torch.zeros(0)),
        ("padded rows", wide, torch.zeros(37, 16)[:, :5]),
        ("to bf16", wide, torch.zeros(37, 8, dtype=torch.bfloat16)[:, :5]),
        ("to float64", wide, torch.zeros(37, 5, dtype=torch.float64)),
        ("columns of a wider array", rng.random((37, 9))[:, 2:7], torch.zeros(37, 5, dtype=torch.float64)),
        ("read only", read_only, torch.zeros(50, dtype=torch.int64)),
        ("rows that pass a buffer", rng.random((3, 40)), torch.zeros(3, 40, dtype=torch.float64)),
    ]


@pytest.mark.parametrize(("name", "array", "out"), arrays(), ids=lambda value: value if isinstance(value, str) else "")
def test_what_arrives_is_what_was_sent(name: str, array: np.ndarray, out: Tensor) -> None:
    """Fails if a buffer is filled while it is on its way, a part or a row is lost, or a value is converted otherwise."""
    wire = Wire()
    expected = torch.zeros_like(out).copy_(torch.from_numpy(array.copy()))
    sent = array.copy()
    sent.flags.writeable = array.flags.writeable
    uploads = wire.uploads()
    uploads.write(sent, out)
    if sent.flags.writeable:
        sent.fill(0)
    wire.deliver(len(wire.parts))
    assert torch.equal(out, expected)
    assert (name == "rows that pass a buffer") == (wire.pinned == 0)


def test_a_buffer_is_filled_while_the_other_is_sent() -> None:
    """Fails if the host waits for the part that it has just sent, and so for every part; also from call to call."""
    wire = Wire()
    uploads = wire.uploads()
    arrays = [np.arange(12.0) + 100 * k for k in range(5)]
    outs = [torch.zeros(12, dtype=torch.float64) for _ in arrays]
    for array, out in zip(arrays, outs, strict=True):
        uploads.write(array, out)
    assert wire.waited == [0, 1, 2]
    wire.deliver(5)
    assert all(torch.equal(out, torch.from_numpy(array)) for array, out in zip(arrays, outs, strict=True))
    assert wire.pinned == 2


def test_small_arrays_take_no_pinned_memory() -> None:
    wire = Wire()
    out = torch.zeros(12, dtype=torch.float64)
    wire.uploads(small_bytes=97).write(np.arange(12.0), out)
    assert torch.equal(out, torch.arange(12.0, dtype=torch.float64))
    assert (wire.pinned, wire.parts) == (0, [])


def test_without_pinned_memory_uploads_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a system that locks no pages stops a run, is asked again and again, or nobody learns of it."""
    asked: list[int] = []

    def refuse(nbytes: int) -> Tensor:
        asked.append(nbytes)
        raise RuntimeError("cannot lock pages\nand more")

    uploads = Uploads(refuse, Wire().send, BUFFER, 0)
    outs = [torch.zeros(100, dtype=torch.float64) for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        for out in outs:
            uploads.write(np.arange(100.0), out)
    assert all(torch.equal(out, torch.arange(100.0, dtype=torch.float64)) for out in outs)
    assert asked == [BUFFER]
    assert [record.getMessage() for record in caplog.records] == [
        "no pinned memory, so that uploads take longer: cannot lock pages"
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("order", ["none", "permute"])
def test_features_go_to_the_device_as_all_else(precision: Any, order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if what is largest, dense features, takes another way, in either branch of their reading."""
    sent: list[tuple[int, ...]] = []
    write = Uploads.write

    def noted(self: Uploads, array: np.ndarray, out: Tensor) -> None:
        sent.append(array.shape)
        write(self, array, out)

    monkeypatch.setattr(Uploads, "write", noted)
    graph = make_graph(pattern("random", 41, 3), num_features=7, num_classes=3, seed=5)
    run = RunConfig(device="cuda", precision=precision, transport="single", order=order)
    config = Config(model=ModelConfig(kind="mlp", hidden=(8,)), data=DataConfig(), run=run)
    ((dense, ids),) = on_ranks(
        config,
        graph,
        lambda rank: (rank.trainer.runtime.inputs.owned.dense, rank.trainer.runtime.inputs.owned.ids),
        device_of=EMULATED.device_of,
    )
    assert (41, 7) in sent
    assert isinstance(graph.features, ArrayRows)
    assert torch.equal(dense, torch.from_numpy(graph.features.read(0, 41))[ids].to(dense.dtype))


@pytest.mark.cuda
def test_a_gpu_gets_what_was_sent() -> None:
    """Fails if a copy overtakes the filling of its buffer, or the kernels behind it read too early."""
    device = cuda_device.CudaDevice(0, capture=False)
    rng = np.random.default_rng(3)
    for rows, cols, ld in ((3_000_000, 16, 16), (500_000, 41, 48)):
        array = rng.random((rows, cols), dtype=np.float32)
        out = torch.zeros(rows, ld, device=device.torch_device)[:, :cols]
        device.write(array, out)
        twice = out * 2
        assert torch.equal(twice.cpu(), torch.from_numpy(array) * 2)
