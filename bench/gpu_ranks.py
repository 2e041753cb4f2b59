"""Training on 1 to all GPUs over NCCL: what `mggcn train` takes for an epoch beside what `mggcn plan` predicts.

The emulated run trains on CPUs over gloo: a test of the part, as elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import table
from gpu_cases import CASES, PRECISIONS
from gpu_graphs import find_store
from gpu_lab import ROOT, Lab, Row, attempt

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


def nccl_mib(record: dict[str, Any] | None) -> str:
    """What NCCL took of the GPU that lost most, beside the plan; GPU 0 also holds this process, in the peak."""
    return f"{record['measured_bytes'] / 2**20:.0f} ({record['planned_bytes'] / 2**20:.0f})" if record else ""


def describe(rows: list[dict[str, Any]]) -> str:
    """The Markdown of this part."""
    timed = [row for row in rows if row["kind"] == "ranks" and "median" in row]
    alone = {row["precision"]: row["median"] for row in timed if row["ranks"] == 1}
    lines = [
        [
            row["ranks"],
            row["strategy"],
            row["precision"],
            f"{1e3 * row['median']:.3f}",
            f"{1e3 * row['predicted']:.3f}",
            f"{alone[row['precision']] / row['median']:.2f}" if row["precision"] in alone else "",
            f"{(row['bytes_sent_per_epoch'] or 0) / 1e6:.1f}",
            f"{row['measured_peak_bytes'] / 2**30:.2f} ({row['planned_peak_bytes'] / 2**30:.2f})",
            nccl_mib(row.get("nccl")),
            (row["captured"] or {}).get("epoch", ""),
        ]
        for row in timed
    ]
    if not lines:
        return ""
    head = ["ranks", "strategy", "precision", "ms/epoch (median)", "predicted ms", "faster than one rank"]
    head += ["MB sent by rank 0", "peak GiB (planned)", "NCCL MiB (planned)", "epochs"]
    return f"Predicted for {timed[0]['machine']}.\n\n" + table(head, lines)
