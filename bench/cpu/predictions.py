"""Forty runs of our own beside their plans: seconds of an epoch and peak memory, as `mggcn plan` says and as they are.

The runs were written down before any of them was measured. Each is planned here, on this machine as `mggcn tune` describes
it right before, since what its memory carries may change within minutes, and is then `mggcn train` in a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.graphs import available, find_data, store_of
from bench.process import mggcn
from bench.report import MIB, parse, surroundings, table, verdict, write_report
from mggcn.assemble.plan import plan_graph, this_machine
from mggcn.config import Config
from mggcn.config.files import with_settings
from mggcn.cost.machine import tuned_path
from mggcn.errors import MggcnError
from mggcn.graph.store import open_store
from mggcn.planning.op_cost import epoch_cost
from mggcn.runs.auto import resolve_auto

WITHIN_S, WITHIN_BYTES = 0.2, 0.05
"""How far a prediction may lie from what was measured, as a share of it."""
GOAL = 36
TIMED_S = 5.0
"""Predicted seconds of a run's timed epochs, of which there are LEAST to MOST."""
LEAST, MOST = 3, 200
FIRST_STEPS = 4
"""Steps before the first timed epoch: until memory is mapped and the machine's clocks are up."""
LARGE = "sample.batch=1024 sample.fanout=15,10,5"
MEAN = "model.kind=sage model.aggregator=mean model.self_loops=false"
TWO = "run.ranks=2"
REDDIT = "reddit-like, 128 features"

ROWS: tuple[tuple[str, str], ...] = (
    ("cora", "model.kind=gcn model.hidden=256"),
    ("cora", "model.kind=gat model.hidden=64 model.heads=8"),
    ("coauthor_cs", "model.kind=gcn model.hidden=128"),
    ("coauthor_cs", "model.kind=gcn model.hidden=128 debug.features=dense"),
    ("coauthor_cs", f"{MEAN} model.hidden=128 model.dropout=0.5"),
    ("coauthor_cs", "model.kind=mlp model.hidden=256,256"),
    ("dblp", "model.kind=gcn model.hidden=256 model.dropout=0.5 model.input_dropout=0.5"),
    ("dblp", "model.kind=appnp model.hidden=64"),
    ("dblp", "model.kind=sgc"),
    ("cnr_2000", "model.kind=gcn model.hidden=128,128"),
    ("cnr_2000", "model.kind=gcn model.hidden=128,128 run.precision=bf16"),
    ("cnr_2000", f"model.kind=gcn model.hidden=128,128 run.strategy=halo run.order=none {TWO}"),
    ("cnr_2000", f"{MEAN} model.hidden=64,64 run.transport=threads {TWO}"),
    ("arxiv-like", "model.kind=gcn model.hidden=256,256"),
    ("arxiv-like", "model.kind=gcn model.hidden=256,256 run.precision=mixed"),
    ("arxiv-like", "model.kind=gcn model.hidden=256,256 model.norm_layer=batch run.recompute=on"),
    ("arxiv-like", f"{MEAN} model.hidden=256 model.norm_layer=layer model.residual=linear"),
    ("arxiv-like", "model.kind=gin model.hidden=128,128"),
    ("arxiv-like", "model.kind=gat model.hidden=128 model.heads=4"),
    ("arxiv-like", "model.kind=gatv2 model.hidden=64 model.heads=4"),
    ("arxiv-like", f"model.kind=gcn model.hidden=128,128 {TWO}"),
    ("arxiv-like", f"model.kind=gcn model.hidden=128,128 run.strategy=slice {TWO}"),
    ("arxiv-like", f"model.kind=sage model.hidden=128,128 run.strategy=delayed run.delay=5 {TWO}"),
    (REDDIT, "model.kind=gcn model.hidden=128,128"),
    (REDDIT, "model.kind=gcn model.hidden=128,128 run.precision=bf16"),
    (REDDIT, "model.kind=sage model.aggregator=max model.hidden=64"),
    ("community 0.1 M", "model.kind=gcn model.hidden=64,64"),
    ("community 0.1 M", "model.kind=gcn model.hidden=64,64 debug.prune=off"),
    ("AM-like", "model.kind=rgcn model.hidden=16 model.bases=30 data.inputs=learned:16"),
    ("cora", f"{MEAN} model.hidden=64 sample.batch=32 sample.fanout=5,5"),
    ("coauthor_cs", f"{MEAN} model.hidden=128 sample.batch=128 sample.fanout=10,5"),
    ("coauthor_cs", "model.kind=gcn model.hidden=128 sample.batch=1024 sample.fanout=10,5 debug.features=dense"),
    ("community 0.1 M", f"{MEAN} model.hidden=256,256 {LARGE}"),
    ("community 0.1 M", f"model.kind=gcn model.hidden=256,256 sample.draw=labor {LARGE}"),
    ("community 0.1 M", f"{MEAN} model.hidden=128,128 sample.draw=replace run.precision=bf16 {LARGE}"),
    ("community 0.1 M", "model.kind=gat model.hidden=64 model.heads=4 sample.batch=1024 sample.fanout=10,5"),
    ("community 0.1 M", f"{MEAN} model.hidden=128,128 {LARGE} {TWO}"),
    ("community 0.1 M", f"{MEAN} model.hidden=128,128 {LARGE} run.batches=cooperative {TWO}"),
    ("arxiv-like", f"{MEAN} model.hidden=256,256 {LARGE}"),
    ("cnr_2000", f"{MEAN} model.hidden=128 sample.batch=1024 sample.fanout=10,5 sample.draw=labor-one"),
)
"""Graph and settings of each run."""


def config_of(text: str, threads: int) -> Config:
    """The configuration of a run; `threads` of all ranks together."""
    config = with_settings(Config(), [*text.split(), "train.eval_every=0"])
    return with_settings(config, [f"run.threads={max(1, threads // config.run.ranks)}"])


def predict(store: Path, text: str, threads: int) -> dict[str, float]:
    """Return the seconds of an epoch, its steps and the peak bytes of a process, by the functions of `mggcn plan`."""
    graph = open_store(store)
    machine = this_machine(config_of(text, threads))
    config, _ = resolve_auto(config_of(text, threads), graph, machine)
    plan, _ = plan_graph(config, graph, machine)
    return {
        "seconds": plan.steps * epoch_cost(plan, machine).step_s,
        "steps": plan.steps,
        "bytes": plan.process_bytes,
        "runtime": plan.ranks[0].regions["runtime"],
    }


def train(store: Path, text: str, threads: int, predicted: dict[str, float]) -> dict[str, Any]:
    """Train in a process of its own; return the seconds of its epochs after the first ones, and its peak bytes."""
    first = math.ceil(FIRST_STEPS / predicted["steps"])
    timed = min(max(math.ceil(TIMED_S / predicted["seconds"]), LEAST), MOST)
    settings = [*text.split(), "train.eval_every=0", f"train.epochs={first + timed}"]
    settings.append(f"run.threads={config_of(text, threads).run.threads}")
    words = [word for setting in settings for word in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="mggcn-predictions-") as folder:
        run = Path(folder) / "run"
        mggcn("train", str(store), *words, "--out", str(run), "--quiet")
        result = json.loads((run / "result.json").read_text())
        history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in history]
    return {"seconds": seconds[first:], "first": seconds[:first], "bytes": result["measured_peak_bytes"]}


def measure(number: int, args: Any) -> dict[str, Any]:
    """Predict and train one of ROWS, counted from 1; a run that fails says why."""
    graph, text = ROWS[number - 1]
    print(f"{number} of {len(ROWS)}: {graph}, {text}", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"number": number, "graph": graph, "settings": text}
    if not available(graph, find_data(args.data)):
        return found | {"failed": "the graph is not here"}
    store = store_of(graph, args)
    try:
        found["machine"] = tuned(args.machine, args.threads)
        found["predicted"] = predict(store, text, args.threads)
        return found | {"measured": train(store, text, args.threads, found["predicted"])}
    except (RuntimeError, MggcnError) as error:
        return found | {"failed": str(error)}


def ratios(found: dict[str, Any]) -> tuple[float, float] | None:
    """Return predicted over measured seconds, by the median epoch, and bytes; None for a run that failed."""
    if "failed" in found:
        return None
    predicted, measured = found["predicted"], found["measured"]
    return predicted["seconds"] / statistics.median(measured["seconds"]), predicted["bytes"] / measured["bytes"]


def within(found: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether seconds and bytes are within their bounds."""
    both = ratios(found)
    return (False, False) if both is None else (abs(both[0] - 1) <= WITHIN_S, abs(both[1] - 1) <= WITHIN_BYTES)


def row_of(found: dict[str, Any]) -> list[str]:
    """The table's line of a run."""
    where, both = [str(found["number"]), found["graph"], found["settings"]], ratios(found)
    if both is None:
        return [*where, *[""] * 7, f"failed: {found['failed']}"]
    predicted, measured = found["predicted"], found["measured"]
    seconds, (good_s, good_bytes) = measured["seconds"], within(found)
    missed = [what for what, good in (("seconds", good_s), ("peak", good_bytes)) if not good]
    return [
        *where,
        *(f"{1e3 * value:.1f}" for value in (predicted["seconds"], statistics.median(seconds))),
        f"{1e3 * min(seconds):.1f} .. {1e3 * max(seconds):.1f}",
        f"{both[0]:.2f}",
        *(f"{nbytes / MIB:.1f}" for nbytes in (predicted["bytes"], measured["bytes"])),
        f"{both[1]:.3f}",
        "MISSED: " + ", ".join(missed) if missed else "met",
    ]


def describe(results: list[dict[str, Any]], args: Any) -> str:
    """The report's text: how many runs are within the bounds, and all of them."""
    marks = [within(found) for found in results]
    above = sum(both[1] < 1 for found in results if (both := ratios(found)) is not None)
    goal = GOAL * len(results) / len(ROWS)
    text = f"{len(results)} of {len(ROWS)} runs, {args.threads} threads of all ranks together. Planned "
    text += (
        "by the file below.\n\n" if args.machine else "right after `mggcn tune`, which was called anew before each.\n\n"
    )
    text += verdict(f"runs within {WITHIN_S:.0%} in seconds", sum(good for good, _ in marks), goal)
    text += verdict(f"runs within {WITHIN_BYTES:.0%} in peak memory", sum(good for _, good in marks), goal)
    text += f"- runs whose peak is above the plan: {above}\n\n"
    head = ["", "graph", "settings", "planned ms", "ms (median)", "min .. max", "planned / measured"]
    head += ["planned MiB", "peak MiB", "planned / measured", "verdict"]
    return text + table(head, [row_of(found) for found in results])


def numbers_of(text: str) -> list[int]:
    """Return the runs that --rows names, such as 1-20 or 7. Raises: SystemExit for those that are not there."""
    first, _, last = text.partition("-")
    bounds = [int(bound) if bound.isdigit() else 0 for bound in (first, last or first)]
    if not 1 <= bounds[0] <= bounds[1] <= len(ROWS):
        sys.exit(f"--rows expects numbers in 1 .. {len(ROWS)}, such as 1-20, got {text}")
    return list(range(bounds[0], bounds[1] + 1))


def tuned(machine: str, threads: int) -> str:
    """Put this machine's file where commands find it: as given, or as `mggcn tune` measures it now; return it."""
    tuned_path().parent.mkdir(exist_ok=True)
    if machine:
        shutil.copyfile(machine, tuned_path())
    else:
        mggcn("tune", "--out", str(tuned_path()), "--ranks", "2", "--threads", str(threads))
    return tuned_path().read_text()


def options(arguments: list[str] | None = None) -> Any:
    own: dict[str, dict[str, Any]] = {
        "rows": {"default": f"1-{len(ROWS)}", "help": "numbers of the runs"},
        "machine": {"default": "", "help": "the machine's file; default: mggcn tune measures it before each run"},
        "beside": {"type": Path, "help": ".json of an earlier report, whose other runs are put beside these"},
    }
    return parse(__doc__, "scale", "threads", "data", "cache", arguments=arguments, **own)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    numbers = numbers_of(args.rows)
    record: dict[str, Any] = {"surroundings": surroundings(), "measured": []}
    before = os.environ.get("XDG_CONFIG_HOME")
    with tempfile.TemporaryDirectory(prefix="mggcn-config-") as folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        try:
            results = {number: measure(number, args) for number in numbers}
        finally:
            os.environ.pop("XDG_CONFIG_HOME")
            if before is not None:
                os.environ["XDG_CONFIG_HOME"] = before
    earlier = json.loads(args.beside.read_text())["measured"] if args.beside else []
    results = {found["number"]: found for found in earlier} | results
    record["measured"] = [results[number] for number in sorted(results)]
    machine = next((found["machine"] for found in record["measured"] if "machine" in found), "")
    title = "The machine's file of the first run" if not args.machine else "The machine's file"
    body = f"{describe(record['measured'], args)}\n## {title}\n\n```\n{machine}\n```\n"
    write_report("predictions", "Forty runs beside their plans", body, record, args.out)


if __name__ == "__main__":
    main()
