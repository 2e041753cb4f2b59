"""Work that is recorded: when it is launched piece by piece, when whole, and what a refused recording leaves."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from mggcn.backend.cuda.capture import WARM_CALLS, Captured, Refusals
from mggcn.errors import BackendError, CommError
from tests.emulator.capture import BEGIN, END, Allocator, CaptureDevice, stand_in


class CompileError(Exception):
    """What CuPy raises for a kernel that does not compile: no RuntimeError."""


ERRORS = {
    "torch": RuntimeError("operation not permitted when stream is capturing\nmore"),
    "CuPy": CompileError("cannot open source file"),
    "cuSPARSE": BackendError("cusparseSpMM failed with cuSPARSE status 7"),
}
TORCHES = {
    "2.11": Allocator,
    "2.13": lambda: Allocator(ends=True),
    "later": lambda: Allocator(ends=True, releases=True),
}


@pytest.fixture(params=TORCHES)
def allocator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found: Allocator = TORCHES[request.param]()
    stand_in(monkeypatch, found)
    return found


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    yield
    gc.enable()


def captured(device: CaptureDevice, work: Callable[[], None]) -> Captured:
    device.function = work
    return Captured(work, device, refusals=device.refusals)  # type: ignore[arg-type]


def test_warm_calls_then_a_recording_then_replays(allocator: Allocator) -> None:
    """Fails if a call does no work or does it twice, or another thread's garbage may end up in a recording."""
    done: list[tuple[str, bool]] = []
    device = CaptureDevice()
    run = Captured(
        lambda: done.append((device.phase, gc.isenabled())),
        device,  # type: ignore[arg-type]
        refusals=device.refusals,
    )
    device.function = lambda: done.append(("replaying", gc.isenabled()))
    states = []
    for _ in range(5):
        run()
        states.append(run.state)
    warm, replay = ("", True), ("replaying", True)
    assert done == [warm, warm, ("recording", False), replay, replay, replay]
    assert states == ["eager", "eager", "captured", "captured", "captured"]
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("number", [BEGIN, 1, END])
@pytest.mark.parametrize("kind", ERRORS)
def test_what_cannot_be_recorded_goes_on_as_it_was(
    kind: str, number: int, enabled: bool, allocator: Allocator, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if a refusal loses a call, is tried again, is not spoken of, or leaves allocator or collector changed."""
    device = CaptureDevice(number=number, error=ERRORS[kind])
    done: list[int] = []

    def work() -> None:
        if device.phase == "recording":
            device.call()
        else:
            done.append(0)

    if not enabled:
        gc.disable()
    runs = [captured(device, work), captured(device, work)]
    for run in runs:
        for _ in range(5):
            run()
    assert len(done) == 10
    reason = f"{type(ERRORS[kind]).__name__}: {str(ERRORS[kind]).splitlines()[0]}"
    assert [run.state for run in runs] == [f"refused: {reason}"] * 2
    assert [record.message for record in caplog.records] == [
        f"a CUDA graph cannot be captured; epochs are launched op by op: {reason}"
    ]
    assert gc.isenabled() == enabled
    assert not allocator.underway
    allocator.empty()
    assert not allocator.users
    again = captured(CaptureDevice(), lambda: None)  # as in another process
    for _ in range(3):
        again()
    assert again.state == "captured"


def test_an_error_of_the_work_itself_is_raised_by_the_launch(allocator: Allocator) -> None:
    """Fails if what is wrong outside of a recording, too, is taken for a refusal and lost."""
    calls: list[int] = []

    def work() -> None:
        calls.append(0)
        if len(calls) > WARM_CALLS:
            raise ValueError("broken for good")

    run = captured(CaptureDevice(), work)
    run()
    run()
    with pytest.raises(ValueError, match="broken for good"):
        run()
    assert run.state == "refused: ValueError: broken for good"
    assert not allocator.underway


@pytest.mark.parametrize("error", [CommError("rank 1: disk full"), KeyboardInterrupt()], ids=["comm", "interrupt"])
def test_what_no_launch_can_mend_passes_through(error: BaseException, allocator: Allocator) -> None:
    """Fails if the failure of another rank or Ctrl-C is swallowed, or leaves the allocator in a recording."""
    device = CaptureDevice()

    def work() -> None:
        if device.phase == "recording":
            raise error

    run = captured(device, work)
    run()
    run()
    # The end of the recording hides it behind an error of its own, in torch and here.
    with pytest.raises(type(error)):
        run()
    assert not allocator.underway


def test_ranks_capture_together_or_not_at_all(allocator: Allocator) -> None:
    """Fails if a rank keeps its graph though another was refused, or speaks of it as well."""
    device = CaptureDevice()
    run = Captured(
        lambda: None,
        device,  # type: ignore[arg-type]
        lambda reason: (reason or "rank 1: no memory", False),
        refusals := Refusals(),
    )
    for _ in range(4):
        run()
    assert run.state == "refused: rank 1: no memory"
    assert refusals.reason == "rank 1: no memory"
    assert device.replays == 0
    allocator.empty()
    assert not allocator.users
