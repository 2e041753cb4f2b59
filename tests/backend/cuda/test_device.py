"""What of the GPU's own device can be held to something: refusals without one, streams and captures with one."""

from __future__ import annotations

import sys
import threading
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from mggcn.backend.cuda import capture as cuda_capture
from mggcn.backend.cuda import device as cuda_device
from mggcn.backend.cuda import presence as cuda_presence
from mggcn.backend.cuda import triton_kernels
from mggcn.errors import BackendError
from tests.emulator.contexts import Contexts


def test_a_machine_without_gpu_is_told_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if --device cuda ends in a traceback of torch or CuPy, or does not say what to do."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendError, match="needs a torch built for CUDA") as error:
        cuda_presence.check_cuda("fp32")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="no usable NVIDIA GPU") as error:
        cuda_presence.check_cuda("fp32")
    assert "\n" not in str(error.value)


def test_a_cupy_that_finds_no_toolkit_stops_no_test() -> None:
    """Fails if its warning, which is for those who need CUDA's headers, ends the tests of a machine without a toolkit."""
    warnings.warn("CUDA path could not be detected. Set CUDA_PATH environment variable.", UserWarning, stacklevel=1)


@pytest.mark.parametrize("available", [False, RuntimeError("cudaErrorInsufficientDriver")])
def test_a_cupy_that_cannot_use_the_gpu_is_told_in_one_line(
    available: bool | RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a driver too old for CuPy's CUDA ends in CuPy's traceback: is_available raises there (CuPy 13.4)."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    answer = Mock(side_effect=available) if isinstance(available, RuntimeError) else Mock(return_value=available)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(is_available=answer)))
    with pytest.raises(BackendError, match=r"CuPy cannot use the GPU that torch sees.*; run mggcn doctor") as error:
        cuda_presence.check_cuda("fp32")
    assert "\n" not in str(error.value)
    assert isinstance(available, bool) or str(available) in str(error.value)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_an_old_gpu_refuses_new_types(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a V100 is asked for bf16 and answers with something else."""
    monkeypatch.setattr(cuda_presence, "missing_for_cuda", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    with pytest.raises(BackendError, match=rf"{precision} needs a GPU of compute capability 8.0 .* Tesla V100 has 7.0"):
        cuda_presence.check_cuda(precision)
    cuda_presence.check_cuda("fp32")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    cuda_presence.check_cuda(precision)


@pytest.mark.cuda
def test_a_captured_function_repeats_itself() -> None:
    """Fails if a replay does not do what the function did, or a warm call is lost."""
    device = cuda_device.CudaDevice(0, capture=True)
    total = torch.zeros(1, device=device.torch_device)
    calls = []

    def add() -> None:
        calls.append(0)
        total.add_(1.0)

    run = device.repeatable(add)
    for _ in range(10):
        run()
    assert total.item() == 10.0
    assert len(calls) == cuda_capture.WARM_CALLS + 1


@pytest.mark.cuda
def test_the_lane_waits_and_is_waited_for() -> None:
    """Fails if a copy overtakes the kernel that writes its source, or what reads the copy overtakes it."""
    device = cuda_device.CudaDevice(0, capture=False)
    source = torch.zeros(1 << 24, device=device.torch_device)
    target = torch.zeros_like(source)
    for round_ in range(20):
        for _ in range(50):
            source.add_(1.0)
        with device.comm_stream.working(device.record()):
            target.copy_(source)
            arrived = device.comm_stream.record()
        arrived.wait()
        total = target.sum()
        assert total.item() == source.numel() * 50.0 * (round_ + 1)


@pytest.mark.cuda
def test_memory_and_time_are_measured() -> None:
    """Fails if the peak misses an allocation, or timestamps run backwards."""
    device = cuda_device.CudaDevice(0, capture=False)
    before, began = device.peak_bytes(), device.timestamp()
    held = torch.zeros(1 << 28, dtype=torch.uint8, device=device.torch_device)
    ended = device.timestamp()
    device.synchronize()
    assert device.peak_bytes() >= before
    assert device.peak_bytes() >= held.nbytes
    assert ended.seconds_since(began) > 0


def test_cupy_is_given_the_stream_by_the_name_that_it_knows() -> None:
    """Fails if CuPy 14, which warns of ExternalStream, is asked for it, or the address is lost on the way."""

    class Streams:
        def from_external(self, foreign: object) -> tuple[str, object]:
            return "from_external", foreign.__cuda_stream__()  # type: ignore[attr-defined]

    class New:
        class cuda:  # noqa: N801
            Stream = Streams()

    class Old:
        class cuda:  # noqa: N801
            class Stream: ...

            @staticmethod
            def ExternalStream(address: int, index: int) -> tuple[str, int, int]:  # noqa: N802
                return "ExternalStream", address, index

    assert cuda_device.cupy_stream(New, 4096, 1) == ("from_external", (0, 4096))
    assert cuda_device.cupy_stream(Old, 4096, 1) == ("ExternalStream", 4096, 1)


@pytest.mark.parametrize("planted", [False, True])
def test_a_thread_that_waits_for_a_copy_makes_no_context_elsewhere(
    planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a thread that draws batches ahead waits on GPU 0, where each of the other ranks would take half a GiB, or if
    one that names no GPU is not seen to do so.
    """
    contexts = Contexts(monkeypatch)
    if planted:
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    stream = SimpleNamespace(device=torch.device("cuda", 3))
    event = cuda_device.CudaEvent(stream)  # type: ignore[arg-type]  # a stand-in
    for wait in (event.synchronize, event.done):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert contexts.made == ({0, 3} if planted else {3})  # the event's own is on its stream's GPU


class Registers:
    """The part of CuPy's runtime that pins memory; pinned: addresses at present, events: what was asked."""

    class CUDARuntimeError(Exception):
        pass

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses, self.pinned, self.sizes = refuses, set[int](), list[int]()

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:  # noqa: N802  # CUDA's name
        if self.refuses:
            raise self.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory\nmore")
        assert flags == 0
        assert address % 4096 == 0
        self.pinned.add(address)
        self.sizes.append(nbytes)

    def hostUnregister(self, address: int) -> None:  # noqa: N802  # CUDA's name
        self.pinned.remove(address)


def pinning(runtime: Registers) -> cuda_device.CudaDevice:
    """A device of which only pinned memory works."""
    device = object.__new__(cuda_device.CudaDevice)
    device._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    return device


def test_memory_is_pinned_for_as_long_as_somebody_has_it() -> None:
    """Fails if memory ends while it is pinned, or is no longer pinned while a view of it is there."""
    runtime = Registers()
    memory = pinning(runtime).pinned(10_000)
    assert memory.tolist() == [0] * 10_000
    assert runtime.sizes == [10_000]
    address, view = memory.data_ptr(), memory.numpy().view("int32")[3:40]
    assert runtime.pinned == {address}
    del memory
    sent = torch.from_numpy(view)
    del view
    assert runtime.pinned == {address}
    del sent
    assert not runtime.pinned


def test_no_bytes_pin_no_page() -> None:
    """Fails if an array of no elements pins a page that others use, and takes the pin away when it ends."""
    runtime = Registers()
    assert pinning(runtime).pinned(0).nbytes == 0
    assert runtime.sizes == []


def test_a_system_that_pins_nothing_still_trains(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a limit of locked memory ends a run, or nothing says why its uploads are slow."""
    memory = pinning(Registers(refuses=True)).pinned(100)
    assert memory.nbytes == 100
    assert "no pinned memory, so that uploads take longer: cudaErrorMemoryAllocation: out of memory" in caplog.text


@pytest.mark.parametrize(
    ("capability", "version", "used"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.2.0", False), ((9, 0), "4.0.0", False), ((8, 0), "3.6.0", False)],
)
def test_products_of_tensor_cores_need_what_was_tried(
    capability: tuple[int, int], version: str, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if another GPU, or a Triton whose compiler takes other arguments, multiplies by kernels that nobody tried."""
    monkeypatch.setattr(triton_kernels.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton_kernels.metadata, "version", lambda name: version)
    assert triton_kernels.available(capability) == used
