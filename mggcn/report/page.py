"""index.html: what a run did, where its memory went and how its work was shared, on one page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mggcn.config.model import ignored_settings
from mggcn.files import write_bytes
from mggcn.report.curves import curve_charts
from mggcn.report.figure import format_bytes, format_count
from mggcn.report.markup import details, escape, image, page, prose, table
from mggcn.report.memory import RUNTIME
from mggcn.report.run_folder import Json, RunRecord, changed_settings
from mggcn.report.scores import class_scores, headline, link_scores, score_table, show

_COSTS = {
    "epochs": "epochs",
    "seconds_per_epoch": "time per epoch (median)",
    "setup_seconds": "setup time",
    "planned_peak_bytes": "peak memory, planned{peak}",
    "measured_peak_bytes": "peak memory, measured{peak}",
    "arena_bytes": "arena{rank}",
    "bytes_sent_per_epoch": "sent per epoch{rank}",
}


def write_page(record: RunRecord, images: Mapping[str, Path], path: Path, timeline: Iterable[str] = ()) -> Path:
    """Write the page with the pictures "memory", if memory was planned, and, of several ranks, "tiles".

    timeline: where an epoch's time went.
    """
    name = str(record.plan["graph"]["name"])
    body = [
        *headline(record),
        f"<h1>{escape(name)}: {escape(_model_name(record))}</h1>",
        f'<p class="under">{escape(_subtitle(record))}</p>',
        *(f'<p class="note">{prose(note)}</p>' for note in record.notes),
        *_beginning(record),
        "<h2>Curves</h2>",
        f'<div class="charts">{"".join(curve_charts(record))}</div>',
        *_results(record),
        *class_scores(record),
        *link_scores(record),
        *_memory(record.plan, images.get("memory")),
        *_rank_section(record.plan, images.get("tiles")),
        *timeline,
        "<h2>Plan</h2>",
        _list(record.plan["reasons"]) if record.plan["reasons"] else "<p>No choice had to be explained.</p>",
        *_programs(record.plan),
        "<h2>Configuration</h2>",
        _configuration(record.config),
        *_provenance(record),
    ]
    text = page(f"mggcn run {record.path.resolve().name}: {name}", body)
    write_bytes(path, text.encode(errors="replace"), durable=False)  # a folder's name may be no UTF-8
    return path


def _subtitle(record: RunRecord) -> str:
    plan, graph = record.plan, record.plan["graph"]
    ranks = "1 rank" if plan["ranks"] == 1 else f"{plan['ranks']} ranks"
    parts = [f"{format_count(graph['num_vertices'])} vertices", f"{format_count(graph['num_edges'])} edges"]
    counts = {"num_features": "features"} | ({} if graph.get("task") == "links" else {"num_classes": "classes"})
    parts += [f"{graph[key]:,} {what}" for key, what in counts.items() if key in graph]
    where = f"{ranks} on {plan['device']}, {plan['precision']}, strategy {plan['strategy']}, order {plan['order']}"
    began = str(record.job.get("began", ""))[:16].replace("T", " ")
    when = f" · {began}" if began else ""
    return f"{', '.join(parts)} · {where} · run {record.path.resolve().name}{when}"


def _model_name(record: RunRecord) -> str:
    own = record.plan.get("module")
    return str(own["module"] if own else record.config.get("model", {}).get("kind", record.metric))


def _beginning(record: RunRecord) -> Iterable[str]:
    """Yield the command that trains this run again, and the settings that are not the defaults."""
    changed = changed_settings(record)
    if record.plan.get("module"):
        opened = f"mggcn.Trainer.from_run({str(record.path)!r}, graph, module)"
        yield f"<p>A module of your own. To open the run in Python:</p><pre><code>{escape(opened)}</code></pre>"
    elif store := record.job.get("store"):
        words = ["mggcn", "train", str(store)]
        words += [word for name, value in changed.items() for word in ("--set", f"{name}={setting_text(value)}")]
        yield f"<p>To train it again:</p><pre><code>{escape(shlex.join(words))}</code></pre>"
    rows = [(name, setting_text(value)) for name, value in changed.items()]
    yield (
        table(("setting that differs from its default", ""), rows) if rows else "<p>All settings are the defaults.</p>"
    )


def setting_text(value: Any) -> str:
    """Return a setting's value as text in the form of `--set`."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _whose(record: RunRecord) -> tuple[str, str]:
    """Say which ranks the peak memory, arena and bytes sent belong to; nothing for a single rank."""
    if record.plan["ranks"] == 1:
        return "", ""
    together = record.config.get("run", {}).get("transport") == "threads"
    return " (all ranks)" if together else " (largest rank)", " (rank 0)"


def _results(record: RunRecord) -> Iterable[str]:
    """Yield the scores beside the costs and the ranks that they belong to."""
    if (result := record.result) is None:
        return
    peak, rank = _whose(record)
    costs = [
        (label.format(peak=peak, rank=rank), _quantity(key, result[key]))
        for key, label in _COSTS.items()
        if key in result
    ]
    yield "<h2>Scores and costs</h2>"
    yield f'<div class="columns">{score_table(record)}{table((), costs, numeric=[1])}</div>'


def _quantity(key: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return show(value)
    if "bytes" in key:
        return format_bytes(value)
    return f"{value:.4g} s" if "seconds" in key else f"{value:,}"


def _memory(plan: Json, picture: Path | None) -> Iterable[str]:
    """Yield the memory that was planned; of a module of one's own nothing was."""
    if picture is not None:
        yield "<h2>Memory</h2>"
        yield image(picture, "buffers in the arena over the ops of an epoch, and memory by purpose")
        yield from _memory_tables(plan)


def _memory_tables(plan: Json) -> Iterable[str]:
    rank = plan["per_rank"][0]
    # The runtime is Python's and torch's: on small graphs a hundred times what the run adds to it.
    own = {name: size for name, size in rank["regions"].items() if name != RUNTIME}
    rows = [(name, format_bytes(size)) for name, size in own.items()]
    rows.append(("the run's own", format_bytes(sum(own.values()))))
    if RUNTIME in rank["regions"]:
        rows.append(("runtime: Python, torch and libraries", format_bytes(rank["regions"][RUNTIME])))
    yield table(("region of rank 0", "size"), [*rows, ("total", format_bytes(rank["total_bytes"]))], numeric=[1])
    head = ("program", "buffer", "rows", "columns", "type", "lifetime", "size", "offset", "ops")
    listed = [
        (
            b["program"], b["name"], f"{b['rows']:,}", f"{b['cols']:,}", b["dtype"], b["lifetime"],
            format_bytes(b["nbytes"]), f"{b['offset']:,}", f"{b['first']}..{b['last']}",
        )
        for b in rank["buffers"]
    ]  # fmt: skip
    yield details(f"All {len(listed)} buffers of rank 0", table(head, listed, numeric=(2, 3, 6, 7)))


_RANK_COLUMNS: dict[str, Callable[[Any], str]] = {
    "rank": str,
    "rows": "{:,}".format,
    "nnz": "{:,}".format,
    "num_spmm": "{:,}".format,
    "messages_per_epoch": "{:,}".format,
    "bytes_sent_per_epoch": format_bytes,
    "arena_bytes": format_bytes,
    "paper_bytes": format_bytes,
    "total_bytes": format_bytes,
}


def _rank_section(plan: Json, tiles: Path | None) -> Iterable[str]:
    """Yield how ranks share the graph; nothing of one rank, which shares with none."""
    if tiles is None:
        return
    yield "<h2>Tiles and ranks</h2>"
    yield image(tiles, "nonzeros per tile of the adjacency and per rank")
    shown = {key: show for key, show in _RANK_COLUMNS.items() if key in plan["per_rank"][0]}
    rows = [[show(rank[key]) if key in rank else "-" for key, show in shown.items()] for rank in plan["per_rank"]]
    named = {"nnz": "nonzeros", "num_spmm": "sparse products", "paper_bytes": "buffers of MG-GCN's paper"}
    head = [named.get(key, key.removesuffix("_bytes").replace("_", " ")) for key in shown]
    yield table(head, rows, numeric=range(len(head)))
    needed = plan["partition"].get("rows_needed")
    if needed and len(needed) > 1:
        columns = ["rank", *(f"needs of {rank}" for rank in range(len(needed)))]
        lines = [(rank, *(f"{count:,}" for count in row)) for rank, row in enumerate(needed)]
        yield details("Rows that each rank needs of each other", table(columns, lines, numeric=range(len(columns))))


def _list(lines: Iterable[object]) -> str:
    return "<ul>" + "".join(f"<li>{prose(line)}</li>" for line in lines) + "</ul>"


def _programs(plan: Json) -> Iterable[str]:
    for name, ops in plan["programs"].items():
        items = "".join(f"<li>{escape(op)}</li>" for op in ops)
        yield details(f"Program {name}: {len(ops)} ops", f'<ol start="0">{items}</ol>')


def _configuration(config: Json) -> str:
    """Every setting that counts, one table for each TOML table; loose keys come first."""
    model = config.get("model")
    if isinstance(model, Mapping):
        ignored = ignored_settings(str(model.get("kind")))
        config = config | {
            name: {key: value for key, value in config[name].items() if key not in ignored}
            for name in ("model", "debug")
            if isinstance(config.get(name), Mapping)
        }
    loose = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    groups: list[tuple[str, Mapping[str, Any]]] = [("", loose)] if loose else []
    groups += [(f"[{name}]", group) for name, group in config.items() if isinstance(group, Mapping)]
    tables = (
        table((name, ""), [(key, setting_text(value) or "none") for key, value in group.items()])
        for name, group in groups
    )
    return f'<div class="columns">{"".join(tables)}</div>'


def _provenance(record: RunRecord) -> Iterable[str]:
    result = record.result or {}
    versions = result.get("versions")
    rows = list(versions.items()) if isinstance(versions, Mapping) else []
    if "graph_sha256" in result:
        rows.append(("graph sha256", result["graph_sha256"]))
    if rows:
        yield "<h2>Versions</h2>"
        yield table((), rows)
