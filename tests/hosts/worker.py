"""A rank on a host: runs the cases of a file one after the other, each in a fork that has loaded torch.

`python -m tests.hosts.worker CASES RANK FOLDER`: CASES is a JSON list of objects with `name`, `words`, `size` and `port`.
The words are those of the command mggcn, in which STORE-R is the store of this rank's host, or "listen". Output goes to
FOLDER/NAME-RANK.out and .err, the exit code to FOLDER/NAME-RANK.code. A host has one rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from mggcn import native
from mggcn.cli.entry import main as mggcn
from mggcn.comm.rank import connect_torchrun
from mggcn.files import write_text
from tests.hosts.hosts import rank_env


def main() -> int:
    native.limit_spinning()
    import torch  # noqa: F401  for the forks

    from mggcn.assemble import rank as _  # noqa: F401

    cases, number, folder = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), Path(sys.argv[3])
    for case in cases:
        if number < case["size"]:
            pid = os.fork()
            if not pid:
                os._exit(run(case, number, folder))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            write_text(folder / f"{case['name']}-{number}.code", str(code))
        # Together into the next one, which has a time limit.
        while not all((folder / f"{case['name']}-{rank}.code").exists() for rank in range(case["size"])):
            time.sleep(0.02)
    return 0


def run(case: dict[str, Any], number: int, folder: Path) -> int:
    """Run a case as this rank and return its exit code."""
    for descriptor, suffix in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{case['name']}-{number}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    env = rank_env(number, case["size"], case["port"])
    words = [word.replace("STORE-R", f"store-{number}") for word in case["words"]]
    os.environ.update({name: str(value) for name, value in env.items()})
    try:
        code = listen(number, folder) if words == ["listen"] else mggcn(words)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def listen(number: int, folder: Path) -> int:
    """Write down which sockets of this host listen once the ranks have met, and which interface gloo was told."""
    comm = connect_torchrun(60.0)
    comm.barrier()
    lines = subprocess.run(["ss", "-Hltun"], check=True, capture_output=True, text=True).stdout.splitlines()
    found = {"listeners": sorted(line.split()[4] for line in lines), "interface": os.environ["GLOO_SOCKET_IFNAME"]}
    (folder / f"listen-{number}.json").write_text(json.dumps(found))
    comm.barrier()
    comm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
