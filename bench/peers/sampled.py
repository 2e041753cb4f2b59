"""Sampled training: mggcn beside DGL's dgl.dataloading and PyG's NeighborLoader, each in a process of its own.

Batches of 1,024 seeds with fan-outs 15, 10, 5; networks of three layers of 256 (GAT: 4 x 64 heads), dropout 0.5, Adam,
float32. Parts may run one by one: a report keeps what earlier calls of its day and commit have measured.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.contest import Case, Contenders, extents
from bench.graphs import available, find_data, store_of
from bench.peers.libraries import Peers, find_peers
from bench.process import Lost, Worker, alternate, for_each, held, started
from bench.report import (
    MIB,
    RESULTS,
    SEED,
    listed,
    marked,
    milliseconds,
    parse,
    spread,
    surroundings,
    table,
    verdict,
    write_report,
)

Found = dict[str, Any]
Jobs = dict[str, dict[str, Any]]
"""What each contender of a comparison does, by its name."""

PARTS = {
    "sampler": "A batch drawn, compacted and transposed",
    "feed": "A batch drawn, and its features gathered",
    "epochs": "Epochs",
    "memory": "Peak memory above the imports",
    "shares": "Where a step's time goes",
    "losses": "Losses of whole epochs",
}
CASES = {
    "arxiv-like": "arxiv-like",
    "reddit-like": "reddit-like, 128 features",
    "products-like": "products-like, 8 % train",
    "cnr_2000": "cnr_2000",
}
"""Graphs of bench/graphs.py."""
HEADS, HIDDEN = 4, (256, 256)
MODELS: dict[str, dict[str, Any]] = {
    "sage": {"kind": "sage", "aggregator": "mean", "self_loops": False},
    "gcn": {"kind": "gcn"},
    "gat": {"kind": "gat", "heads": HEADS},
}
BATCH, FANOUTS = 1024, (15, 10, 5)
DRAWN, TRAINED = 12, 30
"""Batches that are timed in a turn: alone, and of a peer's epoch."""
EPOCHS = {"epochs": 2, "losses": 5}
"""Of a run; the first one of mggcn's is not timed."""
STAGES = ("sample", "gather", "forward", "backward", "rest")
WATCH_S = 0.05
FASTER = {("sampler", "DGL, 1 thread"): 4.0, ("sampler", "DGL, 2 threads"): 3.0, ("sampler", "PyG"): 20.0}
FASTER |= {("epochs", "DGL"): 2.0, ("epochs", "PyG"): 3.0}
"""Goals: how many times faster than a peer, in its best setting."""
THREADS_OVER_ONE, OF_MEMORY = 1.8, 0.5
OWN = "mggcn"


def jobs_of(part: str, kind: str, peers: Peers, threads: int) -> Jobs:
    """Return the contenders of a part."""
    epochs, batches = EPOCHS.get(part, 1000), DRAWN if part in ("sampler", "feed") else TRAINED
    job = {"kind": kind, "threads": threads, "batch": BATCH, "fanouts": FANOUTS, "epochs": epochs, "batches": batches}
    own = job | {"package": OWN, "part": {"epochs": "train", "memory": "own", "shares": "own"}.get(part, part)}
    own["model"] = MODELS[kind] | {"hidden": HIDDEN}
    dgl = job | {"package": "dgl", "part": {"epochs": "train", "memory": "train"}.get(part, part), "heads": HEADS}
    pyg = dgl | {"package": "pyg"}
    if part == "sampler":
        one, two = {"threads": 1}, {"threads": 2}
        found = {f"{OWN}, 1 thread": own | one | {"ahead": 0}, f"{OWN}, 2 threads": own | two | {"ahead": 2}}
        found |= {"DGL, 1 thread": dgl | one, "DGL, 2 threads": dgl | two, "PyG": pyg | one}
    elif part == "shares":
        found = {OWN: own | {"ahead": 0}}
    else:
        found = {f"{OWN}, ahead {n}": own | {"ahead": n} for n in (0, 1, 2)} if part == "feed" else {OWN: own}
        for workers in (0,) if part == "losses" else (0, 1):
            found[f"DGL, workers {workers}"] = dgl | {"workers": workers}
            found[f"PyG, workers {workers}"] = pyg | {"workers": workers}
    return {name: job for name, job in found.items() if job["package"] in (OWN, *peers.versions)}


def measure(part: str, kind: str, case: str, store: Path, peers: Peers, args: Any) -> Found:
    """Compare the contenders of a part, in turn; of memory one after the other, and of losses in a single round."""
    print(f"{case}: {part} {kind}", file=sys.stderr)
    n, nnz = extents(store)
    found: Found = {"case": case, "part": part, "kind": kind, "vertices": n, "nonzeros": nnz, "left_out": {}}
    all_starts, lost = starts_of(part, kind, store, peers, args.threads), found["left_out"]
    if part == "memory":
        peaks = {name: peak(name, begin, lost) for name, begin in all_starts.items()}
        return found | {"bytes": {name: line for name, line in peaks.items() if line}}
    with started(all_starts, lost) as workers:
        runs = alternate(workers, 1 if part == "losses" else args.rounds, lost)
        results = for_each(workers, lost, lambda _, worker: worker.ask("result")["result"])
    for key, told in (("figures", "loss"), ("beside", "beside")):
        found[key] = {name: [run[told] for run in runs[name]] for name in runs}
    return found | {"results": results}


def starts_of(part: str, kind: str, store: Path, peers: Peers, threads: int) -> dict[str, Callable[[], Worker]]:
    """Return what starts each contender; where peers train, mggcn has written the weights that all begin with."""
    contenders = Contenders(Case(store.name, HIDDEN), store, threads, peers.python)
    malloc, jobs = "default" if part == "memory" else "tuned", jobs_of(part, kind, peers, threads)
    if part in ("epochs", "memory", "losses") and len(jobs) > 1:
        contenders.own({}, model=MODELS[kind], keep=True)(malloc).kill()
    starts: dict[str, Callable[[], Worker]] = {}
    for name, job in jobs.items():
        if job["package"] == OWN:
            job |= {"store": str(store)}
            starts[name] = partial(Worker, "bench.peers.worker_sampled_own", malloc, job["threads"], job)
        else:
            starts[name] = partial(replace(contenders, threads=job["threads"]).peer("sampled", **job), malloc)
    return starts


def peak(name: str, begin: Callable[[], Worker], left_out: Lost) -> dict[str, int] | None:
    """Return the most that a contender and its processes hold in a turn above its imports; its set-up is forgotten."""
    ended, most = threading.Event(), dict[str, int]()

    def watch() -> None:
        while not (ended.wait(WATCH_S) and most):
            now = held(worker.process.pid)
            if not most or both(now) > both(most):
                most.update(now)

    with started({name: begin}, left_out) as workers:
        if name not in workers:
            return None
        worker = workers[name]
        watcher = threading.Thread(target=watch)
        for_each(workers, left_out, lambda _, worker: worker.ask("forget"))
        watcher.start()
        for_each(workers, left_out, lambda _, worker: worker.ask("epoch"))
        ended.set()
        watcher.join()
        above = {key: most[key] - nbytes for key, nbytes in worker.ready["imported"].items()}
        return above if name in workers else None


def described(found: Found) -> str:
    """A comparison's table, and who is not in it."""
    text = f"### {found['case']}" + f", {found['kind']}" * (found["part"] not in ("sampler", "feed")) + "\n\n"
    text += f"{found['vertices']:,} vertices, {found['nonzeros']:,} nonzeros.\n\n"
    if found["part"] == "memory":
        head = ("contender", "anonymous and shared MiB", "shared MiB", "mapped files MiB")
        lines = [
            [name, *(f"{value / MIB:.0f}" for value in (both(line), line["Pss_Shmem"], line["RssFile"]))]
            for name, line in found["bytes"].items()
        ]
    else:
        names = {name: marked(name, found["beside"][name]) for name in found["figures"]}
        head, lines = HEADS_OF[found["part"]], [[label, *cells(found, name)] for name, label in names.items()]
    text += table(head, lines)
    return text + "".join(f"\nLeft out: {name}: {why}.\n" for name, why in found["left_out"].items())


SECONDS = ("contender", "ms (median)", "min .. max", "time / first")
HEADS_OF = {
    "sampler": (*SECONDS, "edges", "input rows"),
    "feed": SECONDS,
    "epochs": ("contender", "ms an epoch (median)", *SECONDS[2:]),
    "shares": ("contender", "ms an epoch (median)", *(f"{stage} %" for stage in STAGES)),
    "losses": ("contender", *(f"epoch {number}" for number in range(1, EPOCHS["losses"] + 1))),
}


def cells(found: Found, name: str) -> list[str]:
    """A contender's line of a table."""
    figures, result = found["figures"][name], found["results"].get(name, [])
    if found["part"] == "losses":
        return [f"{loss:.3f}" for loss in result]
    seconds = spread(figures)
    if found["part"] == "shares":
        return [milliseconds(seconds)[0], *(f"{100 * share / sum(result):.0f}" for share in result)]
    first = spread(next(iter(found["figures"].values())))["median"]
    sizes = [f"{round(size):,}" for size in result] if found["part"] == "sampler" else []
    return [*milliseconds(seconds), f"{seconds['median'] / first:.2f}", *sizes]


def both(line: dict[str, int]) -> int:
    return line["Pss_Anon"] + line["Pss_Shmem"]


def verdicts(found: Found) -> str:
    """How the goals fared, as far as contenders ran."""
    part, text = found["part"], ""
    if part == "memory":
        peaks = {name: both(line) for name, line in found["bytes"].items()}
        others = [nbytes for name, nbytes in peaks.items() if name != OWN]
        if others and OWN in peaks:
            share = peaks[OWN] / min(others)
            return verdict("memory over the better peer's", share, OF_MEMORY, at_most=True)
        return ""
    times = {name: spread(figures)["median"] for name, figures in found["figures"].items()}
    for (of, peer), goal in FASTER.items():
        theirs = [seconds for name, seconds in times.items() if name.startswith(peer)]
        ours = [times[name] for name in (OWN, OWN + peer.removeprefix("DGL"), f"{OWN}, 1 thread") if name in times]
        if part == of and theirs and ours:
            text += verdict(f"times faster than {peer}", min(theirs) / ours[0], goal)
    if part == "feed" and {f"{OWN}, ahead 1", f"{OWN}, ahead 2"} <= set(times):
        ratio = times[f"{OWN}, ahead 1"] / times[f"{OWN}, ahead 2"]
        text += verdict("two threads over one", ratio, THREADS_OVER_ONE)
    return text


def kept(args: Any, around: dict[str, Any], results: list[Found]) -> list[Found]:
    """Return the rows of an earlier report of this day and commit that were not measured again."""
    earlier = (args.out or RESULTS) / f"sampled_{around['hardware']}_{around['date']}.json"
    record = json.loads(earlier.read_text()) if earlier.exists() else {"measured": []}
    if not record["measured"] or record["surroundings"]["commit"] != around["commit"] or record["scale"] != args.scale:
        return []
    again = {(found["part"], found["case"], found["kind"]) for found in results}
    return [found for found in record["measured"] if (found["part"], found["case"], found["kind"]) not in again]


def main(arguments: list[str] | None = None) -> None:
    own: dict[str, dict[str, Any]] = {
        "parts": {"default": "", "help": f"of {', '.join(PARTS)}"},
        "cases": {"default": "", "help": f"of {', '.join(CASES)}"},
        "models": {"default": "", "help": f"of {', '.join(MODELS)}"},
    }
    args = parse(__doc__, "scale", "threads", "rounds", "peers", "data", "cache", arguments=arguments, **own)
    models = listed(args.models, list(MODELS))
    peers = Peers(sys.executable, {}, {}) if str(args.peers) == "none" else find_peers(args.peers)
    around = surroundings()
    around["versions"] |= {f"peer {library}": version for library, version in peers.versions.items()}
    data, results = find_data(args.data), []
    for case in (case for case in listed(args.cases, list(CASES)) if available(CASES[case], data)):
        store = store_of(CASES[case], args)
        for part in listed(args.parts, list(PARTS)):
            # The model has no part in what is drawn; attention has no values of edges.
            for kind in models if part not in ("sampler", "feed") else ["gat"]:
                results.append(measure(part, kind, case, store, peers, args))
    results += kept(args, around, results)
    results.sort(key=lambda found: (list(PARTS).index(found["part"]), list(CASES).index(found["case"])))
    body = ""
    for part, title in PARTS.items():
        texts = [described(row) + "\n" + verdicts(row) * (args.scale == 1.0) for row in results if row["part"] == part]
        body += "\n".join([f"## {title}\n", *texts, ""]) * bool(texts)
    record = {"surroundings": around, "scale": args.scale, "seed": SEED, "measured": results}
    write_report("sampled", "Sampled training: mggcn, DGL and PyG", body, record, args.out)


if __name__ == "__main__":
    main()
