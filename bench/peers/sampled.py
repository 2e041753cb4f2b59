"""Sampled training: mggcn beside DGL's dgl.dataloading and PyG's NeighborLoader, each in a process of its own.

Batches of 1,024 seeds with fan-outs 15, 10, 5; networks of three layers of 256 (GAT: 4 x 64 heads), dropout 0.5, Adam,
float32. Parts may run one by one: a report keeps what earlier calls of its day and commit have measured.

Losses of whole epochs, and the accuracy after them: all begin a seed with the same weights, take all training vertices in
a random order of their own, the last batch as it is, and step by the mean loss of a batch; a loss is the mean of an
epoch's batches. DGL and mggcn draw in every hop of all vertices that it has. PyG's NeighborLoader draws of a vertex once,
where it is first reached, by that hop's fan-out, and all layers read these edges: vertices near the seeds have more of
them in the lower layers, so that losses have less noise, and are lower. "PyG, drawn again" has the others' rule. GCN is
scaled by the degrees of a batch's blocks in all of them (sample.weights = block), not by the whole graph's: in PyG, whose
layer knows one kind of degree, by a source's edges into it. A row's loop is beside what is drawn in all of them; in timed
epochs of DGL it is an edge that may be drawn. "mggcn, unbiased" is its default, which no peer has: by the degrees of the
whole graph.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
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
    "losses": "Losses of whole epochs, and accuracy",
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
ERRORS_APART, POINTS_APART = 2.0, 0.3
"""Means of seeds agree within so many standard errors, and accuracies also within so many points."""
OWN = "mggcn"
UNBIASED = f"{OWN}, unbiased"


def jobs_of(part: str, kind: str, peers: Peers, threads: int, seed: int) -> Jobs:
    """Return the contenders of a part."""
    epochs, batches = EPOCHS.get(part, 1000), DRAWN if part in ("sampler", "feed") else TRAINED
    job = {"kind": kind, "threads": threads, "batch": BATCH, "fanouts": FANOUTS, "epochs": epochs, "batches": batches}
    job["seed"] = seed
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
    elif part == "losses":
        found = {OWN: own, "DGL": dgl, "PyG, drawn again": pyg | {"again": True}, "PyG": pyg}
        found |= {UNBIASED: own | {"weights": "unbiased"}} if kind == "gcn" else {}
    else:
        found = {f"{OWN}, ahead {n}": own | {"ahead": n} for n in (0, 1, 2)} if part == "feed" else {OWN: own}
        for workers in (0, 1):
            found[f"DGL, workers {workers}"] = dgl | {"workers": workers}
            found[f"PyG, workers {workers}"] = pyg | {"workers": workers}
    return {name: job for name, job in found.items() if job["package"] in (OWN, *peers.versions)}


def measure(part: str, kind: str, case: str, store: Path, peers: Peers, args: Any) -> Found:
    """Compare the contenders of a part, in turn; of memory one after the other, and of losses once for each seed."""
    print(f"{case}: {part} {kind}", file=sys.stderr)
    n, nnz = extents(store)
    found: Found = {"case": case, "part": part, "kind": kind, "vertices": n, "nonzeros": nnz, "left_out": {}}
    lost = found["left_out"]
    if part == "losses":
        return found | over_seeds(partial(starts_of, part, kind, store, peers, args.threads), args.seeds, lost)
    all_starts = starts_of(part, kind, store, peers, args.threads)
    if part == "memory":
        peaks = {name: peak(name, begin, lost) for name, begin in all_starts.items()}
        return found | {"bytes": {name: line for name, line in peaks.items() if line}}
    with started(all_starts, lost) as workers:
        runs = alternate(workers, args.rounds, lost)
        results = for_each(workers, lost, lambda _, worker: worker.ask("result")["result"])
    for key, told in (("figures", "loss"), ("beside", "beside")):
        found[key] = {name: [run[told] for run in runs[name]] for name in runs}
    return found | {"results": results}


Starts = dict[str, Callable[[], Worker]]


def over_seeds(starts: Callable[[int], Starts], seeds: int, lost: Lost) -> Found:
    """Train every contender from each seed. The results of a seed are the losses, and the accuracy behind them.

    One that is lost has the seeds before.
    """
    found: Found = {"figures": {}, "beside": {}, "results": {}}
    for seed in range(1, seeds + 1):
        all_starts = {name: start for name, start in starts(seed).items() if name not in lost}
        with started(all_starts, lost) as workers:
            runs = alternate(workers, 1, lost)
            results = for_each(workers, lost, lambda _, worker: worker.ask("result")["result"])
        for name, result in results.items():
            found["figures"].setdefault(name, []).append(result[-2])
            found["beside"].setdefault(name, []).append(runs[name][0]["beside"])
            found["results"].setdefault(name, []).append(result)
        print(f"seed {seed}: {results}", file=sys.stderr)
    return found


def starts_of(part: str, kind: str, store: Path, peers: Peers, threads: int, seed: int = 1) -> Starts:
    """Return what starts each contender; where peers train, mggcn has written the weights that all begin with."""
    contenders = Contenders(Case(store.name, HIDDEN), store, threads, peers.python)
    malloc, jobs = "default" if part == "memory" else "tuned", jobs_of(part, kind, peers, threads, seed)
    if part in ("epochs", "memory", "losses") and len(jobs) > 1:
        contenders.own({}, model=MODELS[kind], train={"seed": seed}, keep=True)(malloc).kill()
    starts: Starts = {}
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
        timed = found["part"] != "losses"
        names = {name: marked(name, found["beside"][name] if timed else []) for name in found["figures"]}
        head, lines = HEADS_OF[found["part"]], [[label, *cells(found, name)] for name, label in names.items()]
    text += table(head, lines)
    return text + "".join(f"\nLeft out: {name}: {why}.\n" for name, why in found["left_out"].items())


SECONDS = ("contender", "ms (median)", "min .. max", "time / first")
HEADS_OF = {
    "sampler": (*SECONDS, "edges", "input rows"),
    "feed": SECONDS,
    "epochs": ("contender", "ms an epoch (median)", *SECONDS[2:]),
    "shares": ("contender", "ms an epoch (median)", *(f"{stage} %" for stage in STAGES)),
    "losses": (
        "contender",
        "seeds",
        *(f"epoch {number}" for number in range(1, EPOCHS["losses"])),
        f"epoch {EPOCHS['losses']}",
        "test accuracy %",
    ),
}


def cells(found: Found, name: str) -> list[str]:
    """A contender's line of a table."""
    figures, result = found["figures"][name], found["results"].get(name, [])
    if found["part"] == "losses":
        *losses, last, accuracy = zip(*result, strict=True)
        means = [f"{statistics.mean(values):.3f}" for values in losses]
        return [str(len(result)), *means, deviating(last, 4), deviating([100 * value for value in accuracy], 2)]
    seconds = spread(figures)
    if found["part"] == "shares":
        return [milliseconds(seconds)[0], *(f"{100 * share / sum(result):.0f}" for share in result)]
    first = spread(next(iter(found["figures"].values())))["median"]
    sizes = [f"{round(size):,}" for size in result] if found["part"] == "sampler" else []
    return [*milliseconds(seconds), f"{seconds['median'] / first:.2f}", *sizes]


def deviating(values: Sequence[float], digits: int) -> str:
    """The mean of several runs, and their deviation if there are two."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.{digits}f} +- {deviation:.{digits}f}"


def agreement(what: str, ours: Sequence[float], theirs: Sequence[float], points: float = 0.0) -> str:
    """A line that says whether two means agree: within ERRORS_APART pooled standard errors, or by less than `points`."""
    n, m, apart = len(ours), len(theirs), abs(statistics.mean(ours) - statistics.mean(theirs))
    squares = (n - 1) * statistics.variance(ours) + (m - 1) * statistics.variance(theirs)
    error = math.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))
    told = f"- {what}: {apart:.4g} apart, {apart / error if error else math.inf * apart:.1f} standard errors"
    if apart <= ERRORS_APART * error:
        return f"{told} (agree: at most {ERRORS_APART:g})\n"
    within = f" or {points:g} points" if points else ""
    if apart <= points:
        return f"{told} (agree: at most {points:g} points)\n"
    return f"{told} (APART: more than {ERRORS_APART:g}{within})\n"


def agreements(found: Found) -> str:
    """Whether losses of the last epoch and accuracies are those of mggcn, where there are several seeds of both."""
    results = {name: list(zip(*runs, strict=True)) for name, runs in found["results"].items() if len(runs) > 1}
    if OWN not in results:
        return ""
    *_, own_last, own_accuracy = results.pop(OWN)
    text = ""
    results.pop(UNBIASED, None)  # of another estimate
    for name, (*_, last, accuracy) in results.items():
        text += agreement(f"{name}, last loss", own_last, last)
        scores = ([100 * score for score in of] for of in (own_accuracy, accuracy))
        text += agreement(f"{name}, test accuracy", *scores, points=POINTS_APART)
    return text


def both(line: dict[str, int]) -> int:
    return line["Pss_Anon"] + line["Pss_Shmem"]


def verdicts(found: Found) -> str:
    """How the goals fared, as far as contenders ran."""
    part, text = found["part"], ""
    if part == "losses":
        return agreements(found)
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
        "seeds": {"type": int, "default": 5, "help": "runs of each contender for losses and accuracy"},
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
    if {row["part"] for row in results} == {"losses"}:
        around.pop("began")  # what else runs changes seconds alone
    body = ""
    for part, title in PARTS.items():
        judged = args.scale == 1.0 or part == "losses"
        texts = [described(row) + "\n" + verdicts(row) * judged for row in results if row["part"] == part]
        body += "\n".join([f"## {title}\n", *texts, ""]) * bool(texts)
    record = {"surroundings": around, "scale": args.scale, "seed": SEED, "measured": results}
    write_report("sampled", "Sampled training: mggcn, DGL and PyG", body, record, args.out)


if __name__ == "__main__":
    main()
