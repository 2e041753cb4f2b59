"""Reports that failing ranks leave for their parent, and the choice of the first of several failures."""

from __future__ import annotations

import builtins
import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, final

from mggcn import errors
from mggcn.errors import CommError, MggcnError
from mggcn.files import open_file, read_object, reason, write_text

LOG_TAIL_BYTES: Final = 2000
STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_CODES: Final = tuple(128 + number for number in STOPS)
"""Exit codes of a rank that saved and stopped because of a signal."""


STOPPED: Final = 1 << 16
"""In place of an exit code: the process lives, but does not run."""


@final
class Stopped(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP came where there is nothing to save: each unwinds the stack like Ctrl-C.

    A class of its own for SIGINT too: Python 3.11 ends by the signal, whatever main returns, if a plain KeyboardInterrupt
    came out of a string that some module executes while it is imported.
    """

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def stops() -> tuple[signal.Signals, ...]:
    """Return the signals that end a run cleanly; not SIGHUP if it is ignored, as under nohup."""
    return tuple(number for number in STOPS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN)


def by_signal(number: int) -> str:
    """Return " by SIGTERM" or the like, for a message about an interruption; "" for Ctrl-C."""
    return "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"


def signal_of(stop: KeyboardInterrupt) -> int:
    """Return the number of the signal that raised `stop`."""
    return stop.signum if isinstance(stop, Stopped) else signal.SIGINT


@final
class Interrupted(MggcnError):  # noqa: N818  like KeyboardInterrupt: it is no error
    """A signal ended the run in an orderly way: everything that must be saved has been saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_code: int = 128 + signum


SHORT_OF_PROCESSES: Final = ("can't start new thread", "Resource temporarily unavailable")
SHORT_OF_MEMORY: Final = (
    *("bad_alloc", "can't allocate memory", "Cannot allocate memory", "failed to map segment", "out of memory"),
    *SHORT_OF_PROCESSES,
)
"""What libraries say that raise no MemoryError."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error of any class means that memory ran out, also that for a new thread's stack."""
    if isinstance(error, MggcnError):
        return False
    return isinstance(error, MemoryError) or any(words in str(error) for words in SHORT_OF_MEMORY)


def out_of_processes(error: BaseException) -> bool:
    """Return whether the error says that no thread or process could be started, because a limit on them was reached."""
    return any(words in str(error) for words in SHORT_OF_PROCESSES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One exception, as the rank that raised it reports it in rank-R.error.json."""

    rank: int
    name: str
    message: str
    traceback: str
    exit_code: int
    secondary: bool
    """A CommError: as a rule the consequence of another rank's failure."""
    monotonic_s: float
    """CLOCK_MONOTONIC, which all processes of a machine share."""
    wall_s: float

    @staticmethod
    def of(rank: int, error: BaseException) -> Report:
        """Describe `error`, which `rank` has just raised."""
        code = error.exit_code if isinstance(error, MggcnError) else 1
        text = str(error)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) and 0 < error.code < 256 else 1
            text = f"sys.exit({error.code!r}) before the work was done"
        return Report(
            rank=rank,
            name="MemoryError" if out_of_memory(error) else type(error).__name__,
            message=text,
            traceback="".join(traceback.format_exception(error)),
            exit_code=code,
            secondary=isinstance(error, CommError),
            monotonic_s=time.monotonic(),
            wall_s=time.time(),
        )

    def save(self, folder: Path) -> None:
        """Write the report so that a reader finds all of it or nothing."""
        write_text(report_path(folder, self.rank), json.dumps(asdict(self), indent=1))

    def error(self) -> Exception:
        """Return the exception, in its own class if that can be made from a message alone."""
        found = getattr(errors, self.name, None) or getattr(builtins, self.name, None)
        message = self.message if found is errors.DivergedError else f"rank {self.rank}: {self.message}"
        error: Exception = MggcnError(f"rank {self.rank}: {self.name}: {self.message}")
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                error = found(message)
            except TypeError:  # for example UnicodeDecodeError, which takes five arguments
                pass
        error.add_note(f"On rank {self.rank}:\n{self.traceback}")
        return error


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How the process of a rank ended."""

    rank: int
    code: int
    """As subprocess reports it: the exit status, or minus the signal; STOPPED for one that a signal has stopped."""
    seen_s: float
    """CLOCK_MONOTONIC when the parent saw it."""


def report_path(folder: Path, rank: int) -> Path:
    """Return the file in which `rank` leaves its report."""
    return folder / f"rank-{rank}.error.json"


def log_path(folder: Path, rank: int) -> Path:
    """Return the file that receives the output of `rank`; rank 0 has none."""
    return folder / f"rank-{rank}.log"


def first_error(endings: Sequence[Ending], signals: Sequence[int], folder: Path) -> Exception | None:
    """Return the error to raise for `endings`, given the signals that the parent received (the second one kills).

    The earliest failure that is not a CommError, else a rank that left before others failed, else an interruption, else the
    earliest CommError.
    """
    primary: list[tuple[float, Exception]] = []
    secondary: list[tuple[float, Exception]] = []
    stops = list(signals)
    ours = {*signals, signal.SIGKILL} if len(signals) > 1 else {*signals}
    for ending in endings:
        if ending.code == 0:
            continue
        report = _load(folder, ending.rank)
        if report is not None:
            (secondary if report.secondary else primary).append((report.monotonic_s, report.error()))
        elif ending.code in STOP_CODES:
            stops.append(ending.code - 128)
        elif -ending.code not in ours:
            primary.append((ending.seen_s, CommError(_describe(ending, folder))))
    left = _left_early(endings)
    early: list[tuple[float, Exception]] = [(left.seen_s, CommError(_describe(left, folder)))] if left else []
    asked: list[tuple[float, Exception]] = (
        [(0.0, Interrupted(stops[0]))] if stops and any(e.code for e in endings) else []
    )
    for failures in (primary, early, asked, secondary):
        if failures:
            return min(failures, key=lambda failure: failure[0])[1]
    return None


def _left_early(endings: Sequence[Ending]) -> Ending | None:
    """Return the first rank that ended with code 0 before another one, or in one look with it, failed or stood still."""
    failed = [ending for ending in endings if ending.code not in (0, *STOP_CODES)]
    left = min((ending for ending in endings if ending.code == 0), key=lambda ending: ending.seen_s, default=None)
    return left if left and failed and left.seen_s <= min(ending.seen_s for ending in failed) else None


def _describe(ending: Ending, folder: Path) -> str:
    """Say how a rank ended that left no report."""
    if ending.code == STOPPED:
        return (
            f"rank {ending.rank} is stopped (SIGSTOP, a debugger), and the others waited for it in vain; resume the run"
        )
    if ending.code == 0:
        how = f"rank {ending.rank} exited with code 0 before the work was done"
    elif ending.code > 0:
        how = f"rank {ending.rank} ended with exit code {ending.code} and did not say why"
    else:
        how = f"rank {ending.rank} was killed by {_signal_name(-ending.code)}"
        if -ending.code == signal.SIGKILL:
            how += "; memory may have run out: see dmesg, and use less of it per rank"
        if -ending.code == signal.SIGBUS:
            # A map cannot say which of its files it was, and by now the store may be whole again.
            how += (
                "; a file that it maps, such as of the store, may have been truncated, or a disk failed: mggcn store "
                "verify names the file"
            )
        if -ending.code == signal.SIGABRT:
            how += "; ranks may have disagreed about a size, or NCCL failed or took too long"
    return f"{how}; {output_of(folder, ending.rank)}"


def output_of(folder: Path, rank: int) -> str:
    """Say where the output of `rank` is, or how its log ends."""
    log = log_path(folder, rank)
    try:
        return f"{log} ends:\n{_tail(log).decode(errors='replace').strip() or '(empty)'}"
    except FileNotFoundError:  # of rank 0, and of ranks without logs
        return "its output is above"
    except OSError as error:
        return f"{log} cannot be read: {reason(error)}"


def _tail(path: Path) -> bytes:
    with open_file(path) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES, 0))
        return file.read(LOG_TAIL_BYTES)


def process_state(pid: int) -> str:
    """Return Linux's state of a process: R, S, D, Z, T (stopped), t (traced); "" if it is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _load(folder: Path, rank: int) -> Report | None:
    try:
        return Report(**read_object(report_path(folder, rank)))
    except (OSError, ValueError, TypeError):
        return None
