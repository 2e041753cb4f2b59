"""A GPU as one rank uses it: torch's memory and streams, CuPy's compiler.

Three streams: kernels run on one, messages on another, which has the higher priority, so that a small copy does not wait
behind the blocks of a long SpMM; batches come on the third. torch is imported before CuPy: both load the CUDA libraries
that torch was built with.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.backend.cpu.memory import allocate
from mggcn.backend.cuda.capture import Captured
from mggcn.backend.cuda.compile import load_kernels
from mggcn.backend.cuda.cusparse import Library
from mggcn.backend.cuda.kernels import Module
from mggcn.backend.cuda.presence import import_cupy
from mggcn.backend.cuda.sizes import DeviceTraits
from mggcn.backend.cuda.triton_kernels import TritonKernels, available
from mggcn.backend.cuda.upload import Uploads
from mggcn.backend.events import Agree, Eager, Event, Repeatable, alone
from mggcn.errors import BackendError

log: logging.Logger = logging.getLogger(__name__)


class CudaEvent:
    """A point in a stream's work; waiting for it orders the current stream after it and does not block the host.

    Any thread may ask for it. A new one uses GPU 0, where the question would make a context of half a GiB: it takes the
    stream's GPU first.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        # blocking: a thread that waits for it sleeps, and leaves its core to those that draw batches.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def done(self) -> bool:
        """Whether the device has passed this point."""
        torch.cuda.set_device(self._device)
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Return once the device has passed this point."""
        torch.cuda.set_device(self._device)
        self._event.synchronize()


class CudaTime:
    """A moment of a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds_since(self, earlier: CudaTime) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaCommStream:
    """The stream of messages, or of batches; `compute` is the stream of kernels."""

    def __init__(self, stream: torch.cuda.Stream, compute: torch.cuda.Stream) -> None:
        self._stream = stream
        self._compute = compute
        self.device: str = str(stream.device)
        self.host_waits: bool = False

    @property
    def recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def working(self, after: Event | None) -> Iterator[None]:
        rank_stream = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            if after is None:
                self._stream.wait_stream(rank_stream)
            else:
                after.wait()
            yield

    def record(self) -> CudaEvent:
        return CudaEvent(self._stream)

    def mark(self) -> CudaEvent:
        """Return a point after all kernels so far; the messages of a replayed graph run on their stream, too."""
        return CudaEvent(self._compute)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._stream.device)[0])


class CudaDevice:
    """One GPU for the calling thread: its streams become the thread's current ones in torch and CuPy.

    capture: whether what repeats may be recorded as a CUDA graph.
    """

    def __init__(self, index: int, *, capture: bool) -> None:
        cupy = import_cupy()
        torch.cuda.set_device(index)
        self.torch_device: torch.device = torch.device("cuda", index)
        self._cupy = cupy
        self._capture = capture
        self._compute = torch.cuda.Stream(self.torch_device)
        self._uploads = Uploads(_pinned, _send)
        self.comm_stream: CudaCommStream = CudaCommStream(
            torch.cuda.Stream(self.torch_device, priority=-1), self._compute
        )
        self.upload_stream: CudaCommStream = CudaCommStream(torch.cuda.Stream(self.torch_device), self._compute)
        # CuPy keeps no reference of its own to the current stream.
        self._cupy_stream = cupy_stream(cupy, self._compute.cuda_stream, index)
        self.activate()
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.traits: DeviceTraits = DeviceTraits(
            properties.name,
            (properties.major, properties.minor),
            properties.multi_processor_count,
            int(cupy.cuda.runtime.getDeviceProperties(index)["l2CacheSize"]),
        )

    def activate(self) -> None:
        """Make the rank's stream the thread's current one in torch and CuPy, after all that the thread has queued."""
        torch.cuda.set_device(self.torch_device)
        before = torch.cuda.current_stream()
        if before != self._compute:
            self._compute.wait_stream(before)
            torch.cuda.set_stream(self._compute)
        self._cupy.cuda.Device(self.torch_device.index).use()
        self._cupy_stream.use()

    @property
    def cusparse(self) -> Library:
        return Library(lambda: torch.cuda.current_stream().cuda_stream)

    @property
    def block_kernels(self) -> TritonKernels | None:
        return TritonKernels(self._cupy, self.traits.capability) if available(self.traits.capability) else None

    def write(self, array: npt.NDArray[Any], out: Tensor) -> None:
        self._uploads.write(array, out)

    def pinned(self, nbytes: int, *, required: bool = False) -> Tensor:
        """Implement KernelBackend.pinned. torch's own pinned memory would take up to twice the bytes.

        Where the system refuses to pin them, and need not, a copy from these bytes holds up the host.
        """
        memory = allocate(nbytes).numpy()
        if not nbytes:  # no page is its own
            return torch.from_numpy(memory)
        address, runtime = memory.ctypes.data, self._cupy.cuda.runtime
        try:
            runtime.hostRegister(address, nbytes, 0)
        except runtime.CUDARuntimeError as error:
            if required:
                raise BackendError(
                    f"the system does not pin {nbytes:,} bytes of the host's memory: {str(error).splitlines()[0]}"
                ) from error
            log.warning("no pinned memory, so that uploads take longer: %s", str(error).splitlines()[0])
        else:
            # Views keep the array alive, and it ends before its memory does.
            weakref.finalize(memory, runtime.hostUnregister, address).atexit = False
        return torch.from_numpy(memory)

    def compile(self, path: Path, options: tuple[str, ...]) -> Module:
        return load_kernels(self._cupy, path, options)

    def mixed_matmul(self, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
        if accumulate:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)

    def record(self) -> CudaEvent:
        return CudaEvent(self._compute)

    def timestamp(self) -> CudaTime:
        return CudaTime(self._compute)

    def repeatable(self, function: Callable[[], None], agree: Agree = alone) -> Repeatable:
        return Captured(function, self._compute, agree) if self._capture else Eager(function)

    def synchronize(self) -> None:
        self._compute.synchronize()
        self.comm_stream._stream.synchronize()

    def peak_bytes(self) -> int:
        """Return the peak of torch's allocator plus all other memory in use on the GPU now: exact if no other process
        uses it.
        """
        free, total = torch.cuda.mem_get_info(self.torch_device)
        others = total - free - torch.cuda.memory_reserved(self.torch_device)
        return others + torch.cuda.max_memory_reserved(self.torch_device)


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _send(out: Tensor, pinned: Tensor) -> Callable[[], object]:
    """Start a copy on the current stream."""
    out.copy_(pinned, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


class _ForeignStream:
    """A stream of torch in the form that CuPy's protocol for external streams requires."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def cupy_stream(cupy: Any, address: int, index: int) -> Any:
    """Return CuPy's view of a stream; the stream must outlive it. CuPy 14 warns of the class that CuPy 13 has for it."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_ForeignStream(address))
    return cupy.cuda.ExternalStream(address, index)
