"""How many threads compute, chosen from what epochs take: on a busy machine each of an epoch's kernels waits for its
last thread, and fewer threads are faster (docs/notes/0022-small-graphs.md).

No result depends on it: every kernel gives the same bits on any number of threads (backend/team.py).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from mggcn.backend.team import Team
from mggcn.host import ProcessorUse, ProcessorWatch

TRIAL = 3
"""Epochs of a trial, and those after which there may be one. One more before them wakes or ends threads and counts
for nothing."""
SHARE = 0.02
FREE_S = 0.05
"""Trials may cost this share of the time of all epochs, and this many seconds more."""
GAIN = 0.95
"""More threads must take less than this share of the time of fewer, for they take twice the processor's."""
WAITED = 0.1
"""Share of waiting from which fewer threads are tried. A quiet machine's is below 0.02."""
SLOWER = 1.5
"""Times of the best epochs of as many threads, beyond which something else must be using the cores."""
HOPELESS = 2.0
"""Times of the present epochs after which a trial is given up at its first one."""
PAUSES = range(8, 65)
"""Least and most epochs between trials; the pause doubles after each that gained nothing."""
LOOK_S = 0.05
"""Seconds between two looks at the processor's counts, which move by ticks of up to 0.01 s."""


class Cores:
    """Measures the processor's use over LOOK_S or more; None until the first measurement."""

    def __init__(self) -> None:
        self._watch, self._use, self._looked = ProcessorWatch(), None, time.monotonic()

    _use: ProcessorUse | None

    def __call__(self) -> ProcessorUse | None:
        if (now := time.monotonic()) >= self._looked + LOOK_S:
            self._use, self._looked = self._watch.use(), now
        return self._use


class ThreadChoice:
    """Chooses `team.running` after each epoch, among all of the team's threads, half of them, and so on down to one.

    A trial of half or twice as many compares TRIAL epochs with those before it. Fewer are tried when the threads wait for
    cores, more when cores idle, and both when what trials may cost allows it.

    Several ranks wait for each other, so they choose alike, from the mean of their seconds, which comes an epoch late;
    what one of them knows of its cores is not theirs.

    first: threads to begin with, at most those of the team: a GPU's has one. use: how the cores are used.
    """

    def __init__(self, team: Team, first: int, ranks: int, use: Callable[[], ProcessorUse | None]) -> None:
        sizes = [team.planned]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
        self._team, self._use, self._ranks = team, use, ranks
        self._lag = int(ranks > 1)
        self._sizes = sizes[::-1]
        team.running = min(first, team.planned)
        self._seen = {size: deque[float](maxlen=5) for size in sizes}
        self._best: dict[int, float] = {}
        self._skip = 1 + self._lag
        self._home: tuple[int, float] | None = None
        self._pause, self._paused = 0, 0
        self._total_s = self._spent_s = 0.0
        self.epochs: dict[int, int] = dict.fromkeys(sizes, 0)
        """Epochs that each number of threads has computed."""
        self._told = self._busy = False

    def after_epoch(self, seconds: float, mean_s: float, epoch: int) -> str:
        """Record an epoch; return a message for the user, or "".

        seconds: of this rank. mean_s: the mean of all ranks, the same on each. epoch: those that are done.
        """
        self.epochs[self._team.running] += 1
        if self._team.planned == 1 or not self._fewer_after(seconds if self._ranks == 1 else mean_s):
            return ""
        if self._told or not self._busy:
            return ""
        self._told, running = True, self._team.running
        count = "one thread" if running == 1 else f"{running} threads"
        return f"the machine is busy: {count} from epoch {epoch + 1} on, more when it is quiet"

    def _fewer_after(self, seconds: float) -> bool:
        """Take note of an epoch; return whether a trial has found that fewer threads are faster."""
        running = self._team.running
        self._total_s += seconds
        if self._home is not None:
            self._spent_s += max(0.0, seconds - self._home[1])
        if self._skip:
            self._skip -= 1
            if self._home is None or self._lag or seconds <= HOPELESS * self._home[1]:
                return False
        seen = self._seen[running]
        seen.append(seconds)
        if self._home is not None:
            size, before = self._home
            return self._judge(size, before) if len(seen) >= TRIAL or seconds > HOPELESS * before else False
        self._paused += 1
        if len(seen) < TRIAL or self._paused < self._pause:
            return False
        now = statistics.median(seen)
        self._best[running] = min(now, self._best.get(running, now))
        if (candidate := self._candidate(running, now)) is not None:
            self._home = running, now
            self._seen[candidate].clear()
            self._switch(candidate)
        return False

    def _judge(self, home: int, before: float) -> bool:
        """End a trial: keep what is faster. Returns whether that is fewer threads."""
        tried = self._team.running
        now = statistics.median(self._seen[tried])
        fewer = tried < home
        better = before >= GAIN * now if fewer else now < GAIN * before
        self._home = None
        self._seen[home].clear()
        self._seen[home].append(before)  # what this number of threads is known to take
        self._paused, self._pause = 0, PAUSES[0] if better else min(2 * self._pause or PAUSES[0], PAUSES[-1])
        if better:
            self._skip = 0
            return fewer
        self._switch(home)
        return False

    def _candidate(self, running: int, now: float) -> int | None:
        """Return the number of threads that deserves a trial, None if there is none or trials have cost enough."""
        at = self._sizes.index(running)
        left = FREE_S + SHARE * self._total_s - self._spent_s
        use = self._use() if self._ranks == 1 else None
        if at > 0 and left >= 0:
            waits = use is not None and use.waited > WAITED
            self._busy = waits or now > SLOWER * self._best[running]
            fewer = self._sizes[at - 1]
            # What once was slower is worth another trial only if something has changed.
            if waits or ((self._busy or not self._seen[fewer]) and self._price(fewer, now) <= left):
                return fewer
        if at + 1 < len(self._sizes):
            more = self._sizes[at + 1]
            room = use is not None and use.idle_cores > 0.75 * (more - running)
            if left >= 0 if room else self._price(more, now) <= left:
                return more
        return None

    def _price(self, size: int, now: float) -> float:
        """Return the seconds that a trial is expected to cost: by the last one, or for twice the time."""
        seen = self._seen[size]
        extra = max(0.0, statistics.median(seen) - now) if seen else now
        return extra if extra > (HOPELESS - 1) * now else TRIAL * extra

    def _switch(self, size: int) -> None:
        self._team.running = size
        self._skip = 1 + self._lag
