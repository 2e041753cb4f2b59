"""What bench/peers_epoch.py's figures say: tables, ratios, shares of the bound, and how the goals fared."""

from __future__ import annotations

from typing import Any

import ceilings
from common import MIB, table
from peers_cases import CASES, MEMORY_OF_DGL, Case
from peers_switches import OWN
from plots import bars

Found = dict[str, Any]
HEAD = (
    "malloc",
    "contender",
    "ms/epoch (median)",
    "min .. max",
    "IQR",
    "cores used",
    "time / mggcn",
    "of the bound",
    "of the bound in cache",
    "peak MiB",
    "imports MiB",
    "data MiB",
    "set-up peak MiB",
    "mggcn's peak / this",
    "mggcn's data / this",
    "loss apart",
)
PARTS = {
    "peers": "What each library does of itself",
    "precomputed": "A X computed once for all",
    "switches": "mggcn's switches",
}


def data_bytes(compared: Found, name: str) -> int:
    """Peak of the epochs without what the process held after its imports."""
    return int(compared["peak_bytes"][name] - compared["prepared"][name]["imported"]["VmRSS"])


def bound_of(compared: Found, name: str, figures: Found) -> dict[str, float] | None:
    """The bounds of one of mggcn's rows in float32: the ceilings are of nothing else."""
    ready = compared["prepared"][name]
    return ceilings.bounds(figures, ready["work"]) if ready.get("precision") == "fp32" else None


def line_of(compared: Found, name: str, figures: Found) -> list[Any]:
    seconds, runs = compared["seconds"][name], compared["epochs"][name]
    bound = bound_of(compared, name, figures)
    peaks, data = compared["peak_bytes"], data_bytes(compared, name)
    cores = sum(run["cpu_seconds"] for run in runs) / sum(run["seconds"] for run in runs)
    shares = ["", ""] if bound is None else [f"{bound[key] / seconds['median']:.2f}" for key in ("total", "cached")]
    memory = ["", ""]
    if name != OWN:
        memory = [f"{peaks[OWN] / peaks[name]:.2f}", f"{data_bytes(compared, OWN) / max(data, 1):.2f}"]
    return [
        compared["malloc"],
        name,
        f"{1000 * seconds['median']:.1f}",
        f"{1000 * seconds['min']:.1f} .. {1000 * seconds['max']:.1f}",
        f"{seconds['iqr_over_median']:.0%}",
        f"{cores:.2f}",
        f"{seconds['median'] / compared['seconds'][OWN]['median']:.2f}",
        *shares,
        f"{peaks[name] / MIB:.0f}",
        f"{compared['prepared'][name]['imported']['VmRSS'] / MIB:.0f}",
        f"{data / MIB:.0f}",
        f"{compared['prepared'][name]['memory']['VmHWM'] / MIB:.0f}",
        *memory,
        f"{compared['loss_error'][name]:.0e}",
    ]


def verdict(what: str, value: float, goal: float, largest: bool = False) -> str:
    met = value <= goal if largest else value >= goal
    sign = "at most" if largest else "at least"
    return f"- {what}: {value:.2f} ({'met' if met else 'MISSED'}, goal {sign} {goal:g})\n"


def verdicts(case: Case, found: Found, figures: Found) -> str:
    """How a case's goals fared, as far as their contenders ran."""
    text = ""
    for compared in (c for c in found["comparisons"] if c["part"] == "peers" and OWN in c["seconds"]):
        times = {name: line["median"] for name, line in compared["seconds"].items()}
        where, own = f"malloc {compared['malloc']}", times[OWN]
        pyg = next((name for name in times if name.startswith("PyG")), None)
        if "DGL" in times:
            share = compared["peak_bytes"][OWN] / compared["peak_bytes"]["DGL"]
            text += verdict(f"{where}: peak memory over DGL's", share, MEMORY_OF_DGL, largest=True)
        if compared["malloc"] != "tuned":
            continue
        if case.over_dgl and "DGL" in times:
            text += verdict(f"{where}: times faster than DGL", times["DGL"] / own, case.over_dgl)
        if case.over_pyg and pyg:
            text += verdict(f"{where}: times faster than {pyg}", times[pyg] / own, case.over_pyg)
        if case.bf16_over_dgl and f"{OWN} bf16" in times and "DGL" in times:
            ratio = times["DGL"] / times[f"{OWN} bf16"]
            text += verdict(f"{where}: bf16 times faster than DGL's float32", ratio, case.bf16_over_dgl)
        bound = bound_of(compared, OWN, figures)
        if case.of_bound and bound is not None:
            text += verdict(f"{where}: share of the bound", bound["total"] / own, case.of_bound)
    return text


def describe_case(found: Found, record: Found) -> str:
    """One case: a table for each part of the comparisons, PyG's ways, goals."""
    case, settings = CASES[found["case"]], record["settings"]
    text = (
        f"## {case.name}\n\n{found['vertices']:,} vertices, {found['nonzeros']:,} nonzeros, hidden {case.hidden}, "
        f"{settings['rounds']} timed epochs after {settings['warm_up']}.\n\n"
    )
    for part, title in PARTS.items():
        same = [compared for compared in found["comparisons"] if compared["part"] == part]
        lines = [line_of(c, name, record["ceilings"]) for c in same for name in c["seconds"] if OWN in c["seconds"]]
        if lines:
            text += f"{title}:\n\n{table(HEAD, lines)}\n"
        reasons = {f"Left out: {name}: {why}.\n" for c in same for name, why in c["left_out"].items()}
        text += "".join(sorted(reasons)) + ("\n" if reasons else "")
    text += "".join(f"Lost: {line}.\n" for line in found["lost"]) + ("\n" if found["lost"] else "")
    bound = next((bound_of(c, OWN, record["ceilings"]) for c in found["comparisons"] if OWN in c["seconds"]), None)
    if bound is not None:
        text += (
            f"The bound: dense products {1000 * bound['dense']:.1f} ms at the peak, sparse ones "
            f"{1000 * bound['sparse']:.1f} ms at the rate of their operands' sizes; with all gathers from the cache "
            f"{1000 * bound['cached']:.1f} ms in all.\n\n"
        )
    tried = [[kind, f"{1000 * v:.0f}" if isinstance(v, float) else v] for kind, v in found["pilots"].items()]
    if tried:
        head = "PyG's ways, each alone and as it is (the fastest is compared, also with A X computed once)"
        text += f"{head}:\n\n{table(['way', 'ms/epoch'], tried)}\n"
    return text + (verdicts(case, found, record["ceilings"]) if settings["scale"] == 1.0 else "")


def plots_of(record: Found) -> list[dict[str, Any]]:
    """Ratios of time and memory over mggcn's, and of time over that with every switch on, by case."""
    cells: dict[str, dict[str, dict[str, float]]] = {"time": {}, "precomputed": {}, "memory": {}, "switches": {}}
    for found in record["measured"]:
        for compared in (c for c in found["comparisons"] if c["malloc"] == "tuned"):
            times = {name: line["median"] for name, line in compared["seconds"].items()}
            base = times.get("all switches on" if compared["part"] == "switches" else OWN)
            if base is None:
                continue
            others = {shared_name(name): name for name in times if times[name] != base}
            ratios = {short: times[name] / base for short, name in others.items()}
            cells["time" if compared["part"] == "peers" else compared["part"]][found["case"]] = ratios
            if compared["part"] == "peers":
                peaks = compared["peak_bytes"]
                cells["memory"][found["case"]] = {short: peaks[name] / peaks[OWN] for short, name in others.items()}
    return [
        *bars("Training epochs", "time of an epoch over mggcn's (float32), logarithmic", cells["time"]),
        *bars("Training epochs, A X computed once for all", "time of an epoch over mggcn's", cells["precomputed"]),
        *bars("Peak memory of the process", "peak over mggcn's (float32)", cells["memory"]),
        *bars("Each switch off alone", "time of an epoch over that with all switches on", cells["switches"]),
    ]


def shared_name(name: str) -> str:
    """The name of a contender in all cases: of PyG's ways another one is fastest on another graph."""
    return "PyG's fastest way" if name.startswith("PyG") else name.removesuffix(", A X precomputed")


def describe(record: Found) -> str:
    """The report's text."""
    settings = record["settings"]
    text = (
        f"Scale {settings['scale']:g}, {settings['threads']} threads; contenders in shuffled order in every round. Ratios "
        "of time are this contender's over mggcn's. Peaks are of the epochs (VmHWM, set-up forgotten); data: without what "
        "the imports hold. The bound is of float32: dense products at the measured peak, sparse ones at the measured rate "
        "of gathers from operands of their size; blocks and panels, which gather from the cache, can exceed it.\n\n"
    )
    text += "".join(describe_case(found, record) + "\n" for found in record["measured"])
    text += "".join(f"Left out: {name}: {why}.\n" for name, why in sorted(record["left_out"].items()))
    return text + f"\n## Ceilings\n\n{ceilings.describe(record['ceilings'])}"
