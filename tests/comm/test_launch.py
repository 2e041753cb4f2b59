from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mggcn.comm import launch
from mggcn.comm.failure import STOPPED, Ending, Interrupted, Report, first_error, log_path, out_of_memory
from mggcn.comm.launch import run_ranks
from mggcn.errors import CommError, ConfigError, GraphError, MggcnError
from tests.comm.worlds import wait_until

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def worker(mode: str, folder: Path, bad_rank: int = 1, transport: str = "gloo", timeout_s: float = 60) -> list[str]:
    program = str(Path(__file__).with_name("launch_worker.py"))
    options = ["--transport", transport, "--timeout", str(timeout_s)]
    return [sys.executable, program, "--mode", mode, "--bad-rank", str(bad_rank), "--folder", str(folder), *options]


def script(code: str) -> list[str]:
    """A rank without torch: `rank`, `folder` (of the rendezvous) and the usual modules are at hand."""
    head = "import os, signal, sys, time; rank = int(sys.argv[2]); folder = os.path.dirname(sys.argv[6]);"
    return [sys.executable, "-c", head + code]


def pids(folder: Path) -> list[int]:
    return [int(path.read_text() or 0) for path in folder.glob("pid-*")]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def in_epoch(folder: Path, epoch: int, size: int = 2) -> bool:
    def reached(rank: int) -> bool:
        path = folder / f"epoch-{rank}"
        return path.exists() and int(path.read_text() or 0) >= epoch

    return all(reached(rank) for rank in range(size))


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs two ranks, which have come to epoch 3."""
    yield from start_parent(tmp_path, worker("stop", tmp_path, bad_rank=-1))


@pytest.fixture
def parent_of_deaf(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs two ranks which ignore SIGTERM."""
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "write = lambda name, text: open(os.path.join(folder, '..', f'{name}-{rank}'), 'w').write(text);"
        "write('pid', str(os.getpid())); write('epoch', '3'); time.sleep(60)"
    )
    yield from start_parent(tmp_path, script(code))


def start_parent(folder: Path, rank_command: list[str]) -> Iterator[subprocess.Popen[str]]:
    program = str(Path(__file__).with_name("launch_parent.py"))
    command = [sys.executable, program, str(folder), *rank_command]
    with subprocess.Popen(command, env={**os.environ, **ENV}, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert wait_until(lambda: in_epoch(folder, 3), 60)
            yield process
        finally:
            process.kill()
            for pid in pids(folder):
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


def test_success_leaves_only_logs(tmp_path: Path) -> None:
    """Fails if the private folder stays, a rank is missing, or success is taken for failure."""
    (tmp_path / "rank-0.error.json").write_text("of the run before")
    code = "open(os.path.join(folder, '..', f'pid-{rank}'), 'w').write(str(os.getpid()))"
    run_ranks(script(code), 2, tmp_path, timeout_s=60.0, env=ENV)
    assert len(pids(tmp_path)) == 2
    assert [path.name for path in tmp_path.glob("rank-*")] == ["rank-1.log"]
    assert list(tmp_path.glob(".ranks-*")) == []


def failing_run(
    mode: str, folder: Path, error: type[Exception], transport: str = "gloo", timeout_s: float = 60
) -> Exception:
    """Run two ranks of which rank 1 fails; they must be gone within 10 s of the failure, or of the time limit."""
    with pytest.raises(error) as caught:
        run_ranks(worker(mode, folder, 1, transport, timeout_s), 2, folder, timeout_s=60.0, env=ENV)
    failed_at = (folder / "epoch-1").stat().st_mtime
    assert time.time() - failed_at < 10 + (timeout_s if timeout_s < 60 else 0)
    assert [pid for pid in pids(folder) if alive(pid)] == []
    assert len(pids(folder)) == 2
    return caught.value


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "transport"), [("raise", "gloo"), pytest.param("late raise", "nccl", marks=pytest.mark.slow)]
)
def test_first_error_is_raised_with_its_class(mode: str, transport: str, tmp_path: Path) -> None:
    """Fails if the broken connection of rank 0 hides why rank 1 left, or if the trace is lost."""
    error = failing_run(mode, tmp_path, GraphError, transport)
    assert str(error) == "rank 1: row 7 points at vertex 9 of 8"
    assert "in fail" in error.__notes__[0]
    consequence = (tmp_path / "rank-0.error.json").read_text()
    assert "rank 1 failed: GraphError: row 7 points at vertex 9 of 8" in consequence
    assert '"secondary": true' in consequence


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "transport"), [("kill", "gloo"), pytest.param("late kill", "nccl", marks=pytest.mark.slow)]
)
def test_killed_rank_is_named_with_its_signal(mode: str, transport: str, tmp_path: Path) -> None:
    """Fails if the other rank waits on, or if the connection error of the survivor is shown instead."""
    error = failing_run(mode, tmp_path, CommError, transport)
    assert "rank 1 was killed by SIGKILL; memory may have run out" in str(error)
    assert "rank 1 is about to fail" in str(error)


@pytest.mark.full
def test_sys_exit_in_mid_run_is_an_error(tmp_path: Path) -> None:
    """Fails if a rank may leave with status 0 while others work."""
    error = failing_run("exit", tmp_path, MggcnError)
    assert "rank 1: SystemExit: sys.exit(0) before the work was done" in str(error)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "transport"), [("leave", "gloo"), pytest.param("late leave", "nccl", marks=pytest.mark.slow)]
)
def test_rank_that_leaves_is_named(mode: str, transport: str, tmp_path: Path) -> None:
    """Fails if a rank that ends with status 0, past Python, hangs the others, or they are named in its place."""
    error = failing_run(mode, tmp_path, CommError, transport, timeout_s=3)
    assert "rank 1 exited with code 0" in str(error)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="process states are read from /proc")
@pytest.mark.parametrize(("mode", "transport"), [("halt", "gloo"), ("late halt", "nccl")])
def test_rank_that_stands_still_is_named(mode: str, transport: str, tmp_path: Path) -> None:
    """Fails if ranks wait for ever for one that a signal has stopped, in a message or for their device."""
    error = failing_run(mode, tmp_path, CommError, transport, timeout_s=3)
    assert str(error).startswith("rank 1 is stopped (SIGSTOP")
    said = (tmp_path / "rank-0.error.json").read_text()
    assert "rank 0 waited 3 s for rank 1" in said
    assert ("its device stands still" in said) == (transport == "nccl")


@pytest.mark.full
@pytest.mark.parametrize("transport", ["gloo", pytest.param("nccl", marks=pytest.mark.slow)])
def test_rank_with_a_call_less_is_named(transport: str, tmp_path: Path) -> None:
    """Fails if a difference behind the compared calls hangs the ranks, or leaves open whose it is."""
    with pytest.raises(CommError, match=r"rank 0 waited 3 s for rank 1.* in call 74"):
        run_ranks(worker("fewer", tmp_path, 1, transport, 3), 2, tmp_path, timeout_s=60.0, env=ENV)
    assert not any(alive(pid) for pid in pids(tmp_path))


@pytest.mark.full
def test_hanging_start_of_nccl_is_reported(tmp_path: Path) -> None:
    """Fails if ranks that hang in NCCL's start are killed without a word, or not at all."""
    with pytest.raises(CommError, match=r"rank \d: rank \d waited 3 s with all other ranks to start NCCL"):
        run_ranks(worker("start", tmp_path, 1, "nccl", 3), 2, tmp_path, timeout_s=60.0, env=ENV)


def test_ranks_die_with_their_parent(parent: subprocess.Popen[str], tmp_path: Path) -> None:
    """Fails without the parent-death signal."""
    ranks = pids(tmp_path)
    assert len(ranks) == 2
    parent.kill()
    assert wait_until(lambda: not any(alive(pid) for pid in ranks), 5)


@pytest.mark.full
def test_sigterm_stops_all_ranks_after_the_same_epoch(parent: subprocess.Popen[str], tmp_path: Path) -> None:
    """Fails if the signal is not forwarded, the parent leaves before rank 1, loads torch, or loses the exit code."""
    parent.terminate()
    assert parent.wait(20) == 143
    assert parent.stdout is not None
    assert parent.stdout.read() == "Interrupted: interrupted by SIGTERM; torch imported: False\n"
    assert (tmp_path / "saved-0").read_text() == (tmp_path / "saved-1").read_text()


def test_second_signal_kills(parent_of_deaf: subprocess.Popen[str], tmp_path: Path) -> None:
    """Fails if ranks that ignore SIGTERM can only be killed by hand."""
    ranks = pids(tmp_path)
    parent_of_deaf.terminate()
    time.sleep(1)
    assert all(alive(pid) for pid in ranks)
    parent_of_deaf.terminate()
    assert parent_of_deaf.wait(10) == 143
    assert not any(alive(pid) for pid in ranks)


def test_rank_that_dies_before_it_can_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the log's tail or the exit code is missing, if rank 0 is not inherited, or a deaf rank survives."""
    code = (
        "print('hello from', rank, flush=True);"
        "open(os.path.join(folder, '..', f'pid-{rank}'), 'w').write(str(os.getpid()));"
        "rank or signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(0.5);"
        "rank and sys.exit('no such option'); time.sleep(60)"
    )
    monkeypatch.setattr(launch, "TERMINATE_S", 0.5)
    with pytest.raises(CommError, match=r"(?s)rank 1 ended with exit code 1 .*hello from 1\nno such option"):
        run_ranks(script(code), 2, tmp_path, timeout_s=60.0)
    assert "hello from 0" in capfd.readouterr().out
    assert len(pids(tmp_path)) == 2
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_private_folder_and_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if others may read the rendezvous, or if a rank is not told to stay on this machine."""
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    code = (
        "names = os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME'];"
        "sys.exit(0 if os.stat(folder).st_mode & 0o777 == 0o700 and names == ('lo', 'lo') else 5)"
    )
    run_ranks(script(code), 2, tmp_path, timeout_s=60.0)


def test_interface_that_the_user_chose_for_nccl_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a setting that NCCL may need on this machine is overwritten."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    run_ranks(script("sys.exit(0 if os.environ['NCCL_SOCKET_IFNAME'] == 'eth7' else 5)"), 2, tmp_path, timeout_s=60.0)


def test_hanging_start_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks that never connect are waited for without end."""
    monkeypatch.setattr(launch, "IMPORT_S", 0.5)
    with pytest.raises(CommError, match="did not connect within 1 s"):
        run_ranks(script("time.sleep(60)"), 2, tmp_path, timeout_s=0.5)


def report(rank: int, error: Exception, at: float, folder: Path) -> Ending:
    made = Report.of(rank, error)
    values = {name: getattr(made, name) for name in Report.__dataclass_fields__}
    Report(**{**values, "monotonic_s": at}).save(folder)
    return Ending(rank=rank, code=made.exit_code, seen_s=99.0)


def test_earliest_primary_error_wins(tmp_path: Path) -> None:
    """Fails if the order of ranks, or a CommError that came first, decides."""
    endings = [
        report(0, CommError("connection lost"), 1.0, tmp_path),
        report(1, ConfigError("late"), 3.0, tmp_path),
        report(2, ValueError("early"), 2.0, tmp_path),
    ]
    error = first_error(endings, [], tmp_path)
    assert type(error) is ValueError
    assert str(error) == "rank 2: early"
    assert str(first_error(endings, [signal.SIGTERM], tmp_path)) == "rank 2: early"
    assert isinstance(first_error(endings[:1], [], tmp_path), CommError)
    assert isinstance(first_error(endings[:1], [signal.SIGINT], tmp_path), Interrupted)


def test_a_rank_that_left_or_stands_still_is_blamed(tmp_path: Path) -> None:
    """Fails if the rank that others lost or waited for is not the one that is named, or a real error hides behind it."""
    lost = report(0, CommError("rank 0 lost its connections"), 9.0, tmp_path)
    left, stopped = (Ending(rank=1, code=code, seen_s=2.0) for code in (0, STOPPED))
    assert str(first_error([lost, left], [], tmp_path)).startswith("rank 1 exited with code 0 before the work was done")
    assert str(first_error([lost, stopped], [], tmp_path)).startswith("rank 1 is stopped (SIGSTOP")
    assert first_error([left, Ending(rank=0, code=0, seen_s=2.1)], [], tmp_path) is None
    together = Ending(rank=1, code=0, seen_s=lost.seen_s)  # found in one look: the lost connection follows from the end
    assert str(first_error([lost, together], [], tmp_path)).startswith("rank 1 exited with code 0")
    late = Ending(rank=1, code=0, seen_s=100.0)
    assert str(first_error([lost, late], [], tmp_path)) == "rank 0: rank 0 lost its connections"
    real = report(0, ConfigError("no such column"), 9.0, tmp_path)
    assert str(first_error([real, left], [], tmp_path)) == "rank 0: no such column"


def test_one_that_leaves_the_others_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a launcher waits for ever for ranks that wait for one that has gone, or takes that for success."""
    monkeypatch.setattr(launch, "LEFT_S", 0.2)
    code = "rank and os._exit(0); signal.pthread_sigmask(signal.SIG_UNBLOCK, [15]); time.sleep(60)"
    with pytest.raises(CommError, match="rank 1 exited with code 0 while others still waited for it"):
        run_ranks(script(code), 2, tmp_path, timeout_s=0.3, env=ENV)


@pytest.mark.skipif(sys.platform != "linux", reason="process states are read from /proc")
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    """Fails if the rank that times out is blamed for one that SIGSTOP stopped, or that one outlives the run."""
    code = (
        "open(os.path.join(folder, '..', f'pid-{rank}'), 'w').write(str(os.getpid()));"
        "rank and os.kill(os.getpid(), signal.SIGSTOP); time.sleep(0.5);"
        "from pathlib import Path; from mggcn.comm.failure import Report; from mggcn.errors import CommError;"
        "Report.of(0, CommError('waited for ranks 1, 2')).save(Path(folder).parent); os._exit(1)"
    )
    with pytest.raises(CommError, match=r"^rank 1 is stopped"):
        run_ranks(script(code), 2, tmp_path, timeout_s=30.0, env=ENV)
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_memory_that_runs_out_is_told_as_such() -> None:
    """Fails if what a library says of missing memory travels as an error of the connection or of the program."""
    words = RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: 9 bytes")
    error = Report.of(2, words).error()
    assert isinstance(error, MemoryError)
    assert str(error).startswith("rank 2: ")
    assert out_of_memory(RuntimeError("std::bad_alloc"))
    assert not out_of_memory(ConfigError("Cannot allocate memory"))
    assert not out_of_memory(RuntimeError("Connection refused"))


@pytest.mark.parametrize(("code", "signals"), [(130, []), (143, [15]), (-15, [15]), (-9, [2, 2])])
def test_stops_are_interruptions(tmp_path: Path, code: int, signals: list[int]) -> None:
    """Fails if an orderly stop, or a kill that the user asked for, is blamed on the rank."""
    error = first_error([Ending(rank=1, code=code, seen_s=1.0)], signals, tmp_path)
    assert isinstance(error, Interrupted)
    assert error.exit_code == (143 if 15 in signals else 130)


def test_success_despite_a_signal_is_success(tmp_path: Path) -> None:
    """Fails if a signal that came after the last epoch spoils the run."""
    assert first_error([], [signal.SIGTERM], tmp_path) is None


def test_a_file_that_is_truncated_while_it_is_mapped_is_hinted_at(tmp_path: Path) -> None:
    """Fails if a rank that SIGBUS ends is reported as one that memory or nothing killed, or the others wait for it."""
    mapped = tmp_path / "indices.npy"
    mapped.write_bytes(bytes(1 << 16))
    code = (
        f"import mmap; file = open({str(mapped)!r}, 'r+b'); pages = mmap.mmap(file.fileno(), 0);"
        "file.truncate(100) if rank == 1 else time.sleep(60); print(pages[1 << 15])"
    )
    began = time.monotonic()
    with pytest.raises(CommError, match=r"rank 1 was killed by SIGBUS; a file that it maps.*may have been truncated"):
        run_ranks(script(code), 2, tmp_path, timeout_s=60)
    assert time.monotonic() - began < 50


def test_abort_signal_hints_at_sizes(tmp_path: Path) -> None:
    """Fails if the way in which gloo ends a process stays unexplained."""
    log_path(tmp_path, 1).write_text("terminate called\n")
    error = first_error([Ending(rank=1, code=-signal.SIGABRT, seen_s=1.0)], [], tmp_path)
    assert "SIGABRT; ranks may have disagreed" in str(error)
    assert "terminate called" in str(error)


def test_error_that_needs_more_than_a_message(tmp_path: Path) -> None:
    """Fails if an exception class with its own constructor hides the error."""
    error = Report.of(3, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")).error()
    assert type(error) is MggcnError
    assert "rank 3: UnicodeDecodeError" in str(error)
