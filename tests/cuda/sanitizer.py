"""compute-sanitizer over a few tests of each file of cuda/, on a GPU: `python -m tests.cuda.sanitizer memcheck|racecheck`.

Files run side by side, each in a process, and kernels of torch are left out, so that a tool takes a minute or two. The
first row is a kernel with a fault, which the tool must name. compute-sanitizer is part of CUDA's toolkit, and of the wheel
nvidia-cuda-sanitizer-api (the version of the driver's CUDA), under nvidia/cu13/bin: say where with --tool-path.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
B = "tests/backend"
GROUPS = {
    "spmm": ([f"{B}/cuda/test_spmm.py"], "variant_is_right and f32 and not bf16"),
    "rows": (
        [f"{B}/test_rows.py", f"{B}/test_move_rows.py"],
        "(finish_in_place and padded or philox and padded or gather_and_scatter or sparse_values and rectangular)",
    ),
    "columns": (
        [f"{B}/test_rows.py", f"{B}/test_product_grad.py"],
        "(activation_grad and padded-37 or product_grad and 41 or column_sums_of_many)",
    ),
    "norms": ([f"{B}/test_norms.py"], "padded"),
    "loss": (
        [f"{B}/test_loss.py"],
        "(cross_entropy and 1.0-41-padded or weights and 1.0-41-0.1-True or confusion and 400-5)",
    ),
    "entries": ([f"{B}/test_loss.py"], "(losses_of_entries and 1.0-7-padded or counts_of and 400-5)"),
    "edges": ([f"{B}/test_edges.py"], "graph and hub"),
    "relations": ([f"{B}/test_relations.py"], "(padded or order_of_relations and 40)"),
    "attention": (
        [f"{B}/test_neighbours.py"],
        "(triples or head_dots or (test_maximum or attention and shape1) and whole and one and (0.4 or False))",
    ),
    "hubs": ([f"{B}/test_hubs.py"], "power and not products and not True and not 0.0"),
    "epoch_end": ([f"{B}/test_epoch_end.py"], "(clipped and adam or books)"),
}
"""Tests by files of kernels, of float32 on a GPU."""
CUT_OFF = 124
"""Exit status of `timeout`."""
ONLY = " and cuda and f32 and not cusparse"
PLANTED = """
import sys, torch, numpy as np
from pathlib import Path
from mggcn.backend.cuda.device import CudaDevice
device = CudaDevice(0, capture=False)
module = device.compile(Path("tests/emulator/example.cu"), ())
x, out = (torch.zeros(192, device="cuda") for _ in range(2))
addresses = np.uint64(x.data_ptr()), np.uint64(out.data_ptr())
if sys.argv[1] == "memcheck":  # 64 floats, behind the 192 that there are
    module.get_function("shifted")((1,), (32,), (*addresses, np.int32(192)))
else:
    module.get_function("reverse")((3,), (64,), (*addresses, np.int32(1)))
try:
    device.synchronize()
except Exception as error:  # of torch or of CuPy, which sees first what was planted
    print(error)
"""


@dataclass(frozen=True, slots=True)
class Found:
    """What a tool says of a process: how many errors, None if it came to no end, and the first of them."""

    errors: int | None
    first: str


def parse(log: str) -> Found:
    """Return what a log of memcheck or racecheck says."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", log)
    first = re.search(r"^=+ ((?:Error|Warning|Invalid|Internal).*(?:\n=+ +\S.*){0,3})", log, re.M)
    text = re.sub(r"\s*\n=+\s*", "; ", first[1]) if first else ""
    return Found(int(summary[1] or summary[2]) if summary else None, text)


def find() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def checked(tool: str, path: str, name: str, command: list[str], limit_s: float) -> tuple[Found, str]:
    """Run a command under a tool; return what it found, and a row of the table."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mggcn-sanitizer-") as folder:
        log = Path(folder) / "log"
        options = ["--target-processes", "application-only", "--kernel-name-exclude", "kns=_Z", "--print-limit", "3"]
        options += ["--report-api-errors", "no"] if tool == "memcheck" else []
        done = subprocess.run(
            ["timeout", "-k", "5", f"{limit_s:g}", path, "--tool", tool, *options, "--log-file", str(log), *command],
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # or tensors lie in blocks of torch's
            capture_output=True,
            text=True,
            check=False,
            cwd=CHECKOUT,
        )
        said = (
            [f"cut off after {limit_s:g} s"] if done.returncode == CUT_OFF else (done.stdout or done.stderr).split("\n")
        )
        found = parse(log.read_text(errors="replace") if log.exists() else "")
    errors = "no end" if found.errors is None else found.errors
    last = next((line for line in reversed(said) if line.strip()), "")[:80]
    row = f"| {name} | {errors} | {last} | {time.monotonic() - started:.0f} | {found.first[:300]} |"
    return found, row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=["memcheck", "racecheck"])
    parser.add_argument("--tool-path", default=find())
    parser.add_argument("--seconds", type=float, default=85, help="of each process")
    args = parser.parse_args()
    if args.tool_path is None:
        parser.error("compute-sanitizer is not here: pip install nvidia-cuda-sanitizer-api, and say --tool-path")
    test = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "cuda",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-n",
        "0",
    ]
    commands = {"planted": [sys.executable, "-c", PLANTED, args.tool]}
    commands |= {name: [*test, *files, "-k", select + ONLY] for name, (files, select) in GROUPS.items()}
    with ThreadPoolExecutor(len(commands)) as pool:
        found = dict(
            zip(
                commands,
                pool.map(lambda name: checked(args.tool, args.tool_path, name, commands[name], args.seconds), commands),
                strict=True,
            )
        )
    print(f"| {args.tool} of | errors | tests | s | first |\n| --- | --- | --- | --- | --- |")
    print("\n".join(row for _, row in found.values()))
    good = all(what.errors == 0 and " passed" in row for name, (what, row) in found.items() if name != "planted")
    return 0 if good and found["planted"][0].errors else 1


if __name__ == "__main__":
    sys.exit(main())
