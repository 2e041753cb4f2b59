"""Runs cases first, first + step, ... of one seed until the time is over, and says in a file which one it is at.

A case is a number: the same seed and number give the same input. What happens is a line of JSON on standard output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.targets import MggcnError, Target, all_targets

HANG_S = 60.0
"""A case that takes longer is a hang: inputs have some kilobytes, and the machine may be busy."""
MEMORY = 4 << 30
"""Bytes of address space that all cases may take beside what the process has at its start."""


def outcome(target: Target, folder: Path, rng: random.Random) -> tuple[str, str]:
    """Run one case; return what happened, and the text of what must not."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.run(folder, rng)
    except MggcnError:
        return ("refused", "") if "Traceback" not in said.getvalue() else ("traceback", said.getvalue())
    except MemoryError:
        return "memory", traceback.format_exc()
    except BaseException:
        return "traceback", traceback.format_exc()
    return ("accepted", "") if "Traceback" not in said.getvalue() else ("traceback", said.getvalue())


def main() -> None:
    seed, first, step, stop = (int(text) for text in sys.argv[1:5])
    seconds, place, only = float(sys.argv[5]), Path(sys.argv[6]), sys.argv[7]
    log = place.with_suffix(".crash").open("a")
    faulthandler.enable(log)
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="mggcn-fuzz-") as name:
        root = Path(name)
        (root / "sound").mkdir()
        targets = [target for target in all_targets(root / "sound") if only in target.name]
        weights = [target.weight for target in targets]
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
        number, until = first, time.monotonic() + seconds
        while number < stop and time.monotonic() < until:
            rng = random.Random(f"{seed} {number}")
            target = rng.choices(targets, weights)[0]
            place.write_text(f"{number} {target.name}")
            folder = root / "case"
            folder.mkdir()
            faulthandler.dump_traceback_later(HANG_S, exit=True, file=log)
            kind, text = outcome(target, folder, rng)
            faulthandler.cancel_dump_traceback_later()
            shutil.rmtree(folder)
            counts[target.name, kind] += 1
            if text:
                tell({"number": number, "target": target.name, "kind": kind, "text": text})
            number += step
    tell({"counts": [[*key, count] for key, count in counts.items()], "number": number})


def tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
