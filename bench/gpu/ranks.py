"""Training on 1 to all GPUs over NCCL: what `mggcn train` takes for an epoch beside what `mggcn plan` predicts.

The emulated run trains on CPUs over gloo: a test of the part, as elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.gpu.graphs import CASES, PRECISIONS, find_store
from bench.gpu.lab import Lab, Row, attempt
from bench.report import ROOT

STRATEGIES = ("broadcast", "halo", "slice")
EPOCHS = 40


def measure(lab: Lab, case: str) -> None:
    """Write a row per number of ranks, strategy and precision."""
    name, hidden = CASES[case]
    settings = lab.settings
    store = find_store(name, settings.scale, settings.cache, settings.data)
    gpus = 2 if lab.emulated else torch.cuda.device_count()
    for precision in PRECISIONS[:1] if settings.quick else [p for p in PRECISIONS if p != "tf32"]:
        for ranks in sorted({count for count in (1, 2, 4, 8) if count < gpus} | {gpus}):
            for strategy in STRATEGIES if ranks > 1 and not settings.quick else STRATEGIES[:1]:
                what = {"kind": "ranks", "ranks": ranks, "strategy": strategy, "precision": precision}
                attempt(lab, what, train, lab, store, hidden, ranks, strategy, precision)


def train(lab: Lab, store: Path, hidden: tuple[int, ...], ranks: int, strategy: str, precision: str) -> Row:
    """Train in processes of their own; what the run recorded, and what the plan predicted."""
    options = ["--device", "cpu" if lab.emulated else "cuda", "--ranks", str(ranks), "--strategy", strategy]
    options += ["--set", f"run.precision={precision}", "--set", f"model.hidden={','.join(map(str, hidden))}"]
    plan = json.loads(mggcn("plan", str(store), *options, "--json"))
    with tempfile.TemporaryDirectory() as folder:
        epochs = str(5 if lab.emulated else EPOCHS)
        mggcn(
            "train", str(store), *options, "--epochs", epochs, "--set", "train.eval_every=0", "--out", folder, "--quiet"
        )
        result = json.loads((Path(folder) / "result.json").read_text())
    kept = ("captured", "bytes_sent_per_epoch", "planned_peak_bytes", "measured_peak_bytes", "nccl")
    predicted = {"predicted": plan["predicted"]["training"]["seconds"], "machine": plan["predicted"]["machine"]}
    return {"median": result["seconds_per_epoch"], **predicted, **{key: result.get(key) for key in kept}}


def mggcn(*arguments: str) -> str:
    """Run the command. Raises: ValueError with what it says if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "mggcn", *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode not in (0, 2) or (done.returncode and not done.stdout):
        raise ValueError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout
