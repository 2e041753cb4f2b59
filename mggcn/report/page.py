"""index.html: what a run did, where its memory went and how its work was shared, on one page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mggcn.config_model import ignored_settings
from mggcn.graph.class_names import recorded_names
from mggcn.report.figure import format_bytes, format_count
from mggcn.report.markup import details, escape, image, page, table
from mggcn.report.run_folder import Json, RunRecord

_COSTS = {
    "epochs": "epochs",
    "seconds_per_epoch": "time per epoch (median)",
    "setup_seconds": "setup time",
    "planned_peak_bytes": "peak memory, planned{peak}",
    "measured_peak_bytes": "peak memory, measured{peak}",
    "arena_bytes": "arena{rank}",
    "bytes_sent_per_epoch": "sent per epoch{rank}",
}


def write_page(record: RunRecord, images: Sequence[Path], path: Path, timeline: Iterable[str] = ()) -> Path:
    """Write the page with the three plots inlined; `timeline` is the section about where an epoch's time went."""
    name = str(record.plan["graph"]["name"])
    curves, memory, tiles = images
    body = [
        f"<h1>{escape(name)}: {escape(record.metric)}</h1>",
        f'<p class="under">{escape(_subtitle(record))}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in record.notes),
        _results(record.result, *_whose(record)) if record.result else "",
        "<h2>Curves</h2>",
        image(curves, "loss and scores over the epochs"),
        *_class_scores(record),
        "<h2>Memory</h2>",
        image(memory, "buffers in the arena over the ops of an epoch, and memory by purpose"),
        *_memory_tables(record.plan),
        "<h2>Tiles and ranks</h2>",
        image(tiles, "nonzeros per tile of the adjacency and per rank"),
        *_rank_tables(record.plan),
        *timeline,
        "<h2>Plan</h2>",
        _list(record.plan["reasons"]) if record.plan["reasons"] else "<p>No choice had to be explained.</p>",
        *_programs(record.plan),
        "<h2>Configuration</h2>",
        _configuration(record.config),
        *_provenance(record),
    ]
    path.write_text(page(f"mggcn run {record.path.resolve().name}: {name}", body), encoding="utf-8")
    return path


def _subtitle(record: RunRecord) -> str:
    plan, graph = record.plan, record.plan["graph"]
    ranks = "1 rank" if plan["ranks"] == 1 else f"{plan['ranks']} ranks"
    parts = [f"{format_count(graph['num_vertices'])} vertices", f"{format_count(graph['num_edges'])} edges"]
    parts += [f"{graph[key]:,} {key.removeprefix('num_')}" for key in ("num_features", "num_classes") if key in graph]
    where = f"{ranks} on {plan['device']}, {plan['precision']}, strategy {plan['strategy']}, order {plan['order']}"
    return f"{', '.join(parts)} · {where} · run {record.path.resolve().name}"


def _whose(record: RunRecord) -> tuple[str, str]:
    """Say which ranks the peak memory, arena and bytes sent belong to; nothing for a single rank."""
    if record.plan["ranks"] == 1:
        return "", ""
    together = record.config.get("run", {}).get("transport") == "threads"
    return " (all ranks)" if together else " (largest rank)", " (rank 0)"


def _results(result: Json, peak: str = "", rank: str = "") -> str:
    """Scores of the best and the last epoch, or of every repeat, beside the costs and the ranks that they belong to."""
    costs = [
        (label.format(peak=peak, rank=rank), _quantity(key, result[key]))
        for key, label in _COSTS.items()
        if key in result
    ]
    scores = _repeats(result) if "runs" in result else _scores(result)
    return f'<div class="columns">{scores}{table((), costs, numeric=[1])}</div>'


def _scores(result: Json) -> str:
    final = {"epoch": "last", **result["final"]}
    rows = [
        (label, entry.get("epoch"), *(_show(entry.get(split)) for split in ("train", "val", "test")))
        for label, entry in (("best validation", result["best"]), ("last epoch", final))
        if entry is final or entry.get("val") is not None
    ]
    return table((result["metric"], "epoch", "train", "val", "test"), rows, numeric=range(1, 5))


def _class_scores(record: RunRecord) -> Iterable[str]:
    """Scores of each class or label of the splits, beside the confusion matrix; only those of one split are unfolded."""
    splits = (record.result or {}).get("per_class", {})
    one = "label" if record.plan["graph"].get("task") == "labels" else "class"
    shown = [name for name in ("test", "val", "train") if name in splits]
    if shown:
        yield f"<h2>Scores of each {one}</h2>"
        yield f"<p>Of the weights that `mggcn predict` takes. A {one} that is never predicted has the precision 0.</p>"
    for split in shown:
        body = _class_table(
            one, splits[split], recorded_names(record.plan.get("class_names"), len(splits[split]["f1"]))
        )
        yield f"<h3>{split}</h3>{body}" if split == shown[0] else details(f"{split} vertices", body)


def _class_table(one: str, scores: Json, names: Sequence[str]) -> str:
    """Return the scores of each class, by its name where it has one, and the confusion matrix."""
    called = names or range(len(scores["f1"]))
    columns = (scores[key] for key in ("precision", "recall", "f1", "support"))
    rows = [(name, *map(_show, row)) for name, row in zip(called, zip(*columns, strict=True), strict=True)]
    listed = table((one, "precision", "recall", "F1", "vertices"), rows, numeric=range(1 if names else 0, 5))
    if one == "label":
        return listed
    if (matrix := scores.get("confusion")) is None:
        return f"{listed}<p>There are too many classes for a confusion matrix.</p>"
    head = ("confusion matrix", *(f"predicted {name}" for name in called))
    rows = [
        (name if names else f"class {name}", *(f"{count:,}" for count in row))
        for name, row in zip(called, matrix, strict=True)
    ]
    return f'<div class="columns">{listed}{table(head, rows, numeric=range(1, len(head)))}</div>'


def _repeats(result: Json) -> str:
    """One row for each run and one for mean and deviation, which may be numbers or tables of numbers."""
    rows = [(f"run {number}", _show(_scored(run))) for number, run in enumerate(result["runs"])]
    rows += [(key, _show(result[key])) for key in ("mean", "std") if key in result]
    return table((f"{len(result['runs'])} runs", str(result["metric"])), rows)


def _scored(run: Any) -> Any:
    """Return what a repeat scored: its best epoch if it recorded one."""
    return run["best"] if isinstance(run, Mapping) and "best" in run else run


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_show(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_show, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _quantity(key: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return _show(value)
    if "bytes" in key:
        return format_bytes(value)
    return f"{value:.4g} s" if "seconds" in key else f"{value:,}"


def _memory_tables(plan: Json) -> Iterable[str]:
    rank = plan["per_rank"][0]
    yield table(
        ("region of rank 0", "size"),
        [*((name, format_bytes(size)) for name, size in rank["regions"].items()),
         ("total", format_bytes(rank["total_bytes"]))],
        numeric=[1],
    )  # fmt: skip
    head = ("program", "buffer", "rows", "columns", "type", "lifetime", "size", "offset", "ops")
    rows = [
        (
            b["program"], b["name"], f"{b['rows']:,}", f"{b['cols']:,}", b["dtype"], b["lifetime"],
            format_bytes(b["nbytes"]), f"{b['offset']:,}", f"{b['first']}..{b['last']}",
        )
        for b in rank["buffers"]
    ]  # fmt: skip
    yield details(f"All {len(rows)} buffers of rank 0", table(head, rows, numeric=(2, 3, 6, 7)))


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


def _rank_tables(plan: Json) -> Iterable[str]:
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
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _programs(plan: Json) -> Iterable[str]:
    for name, ops in plan["programs"].items():
        items = "".join(f"<li>{escape(op)}</li>" for op in ops)
        yield details(f"Program {name}: {len(ops)} ops", f'<ol start="0">{items}</ol>')


def _configuration(config: Json) -> str:
    """Every setting that counts, one table for each TOML table; loose keys come first."""
    model = config.get("model")
    if isinstance(model, Mapping):
        ignored = ignored_settings(str(model.get("kind")))
        config = {**config, "model": {key: value for key, value in model.items() if key not in ignored}}
    loose = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    groups: list[tuple[str, Mapping[str, Any]]] = [("", loose)] if loose else []
    groups += [(f"[{name}]", group) for name, group in config.items() if isinstance(group, Mapping)]
    tables = (table((name, ""), [(key, _setting(value)) for key, value in group.items()]) for name, group in groups)
    return f'<div class="columns">{"".join(tables)}</div>'


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _provenance(record: RunRecord) -> Iterable[str]:
    result = record.result or {}
    versions = result.get("versions")
    rows = list(versions.items()) if isinstance(versions, Mapping) else []
    if "graph_sha256" in result:
        rows.append(("graph sha256", result["graph_sha256"]))
    if rows:
        yield "<h2>Versions</h2>"
        yield table((), rows)
