"""tiles.png: how nonzeros spread over the P x P tiles and over ranks; of a vertex cut: how its copies do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.report.figure import INK, MUTED, PALETTE, count_unit, format_count, new_figure, save, tidy
from mggcn.report.run_folder import Json


def draw_tiles(plan: Json, path: Path) -> Path:
    """Draw the heat map of the tiles and the bars; one rank's single tile gets a small picture."""
    partition = plan["partition"]
    nnz = np.array(partition["nnz"], dtype=np.float64)
    num_ranks = len(nnz)
    cut = partition.get("kind") == "cut"
    side = min(max(1.8, 0.62 * num_ranks), 6.0)
    figure = new_figure(2 * side + 3.6, side + 1.3)
    map_axes, bar_axes = figure.subplots(1, 2)
    if cut:
        leaves = np.array(partition["leaves"], dtype=np.float64).sum(0)
        _draw_map(map_axes, leaves, "share of the leaves (%)", "root on rank", "leaf on rank")
    else:
        _draw_map(map_axes, nnz, "share of the nonzeros (%)", "columns owned by rank", "rows owned by rank")
    _draw_bars(bar_axes, nnz.sum(axis=1))
    title = (
        f"{float(partition['replication']):.3f} copies of a vertex on average"
        if cut
        else f"the busiest ranks of the stages take {float(partition['critical_path_over_ideal']):.3f} times an even share"
    )
    figure.suptitle(title, fontsize=10, color=INK)
    return save(figure, path)


def _draw_map(axes: Any, counts: npt.NDArray[np.float64], title: str, across: str, down: str) -> None:
    num_ranks = len(counts)
    share = 100 * counts / max(counts.sum(), 1.0)
    # The largest share takes a middling blue, so that dark figures stay legible on every tile.
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1.6 * max(share.max(), 1e-9), aspect="equal", interpolation="nearest")
    if num_ranks <= 16:
        size, decimals = (8, min(num_ranks - 1, 1)) if num_ranks <= 8 else (6, 2)
        for i, j in np.ndindex(num_ranks, num_ranks):
            axes.text(j, i, f"{share[i, j]:.{decimals}f}", ha="center", va="center", fontsize=size, color=INK)
    ticks = range(num_ranks) if num_ranks <= 16 else range(0, num_ranks, -(-num_ranks // 8))
    axes.set_xticks(list(ticks))
    axes.set_yticks(list(ticks))
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(down, fontsize=9)
    axes.set_title(title, fontsize=9, loc="left", color=INK)
    tidy(axes)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _draw_bars(axes: Any, per_rank: npt.NDArray[np.float64]) -> None:
    """Draw the nonzeros of each rank beside their mean."""
    mean = float(per_rank.mean())
    axes.bar(range(len(per_rank)), per_rank, 0.7, color=PALETTE[0])
    if len(per_rank) > 1:
        axes.axhline(mean, color=MUTED, linestyle="--", linewidth=1)
        over = per_rank.max() / mean if mean else 1.0
        axes.set_title(f"nonzeros per rank, largest {over:.3f} x mean", fontsize=9, loc="left", color=INK)
    else:
        axes.set_title("nonzeros", fontsize=9, loc="left", color=INK)
        axes.margins(x=0.6)
    if len(per_rank) <= 8:
        for rank, count in enumerate(per_rank):
            axes.text(rank, count / 2, format_count(count), ha="center", va="center", fontsize=8, color="white")
    if len(per_rank) <= 16:
        axes.set_xticks(range(len(per_rank)))
    axes.margins(y=0.12)
    axes.set_xlabel("rank", fontsize=9)
    unit, name = count_unit(per_rank.max())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / unit:g} {name}".strip() if value else "0")
    tidy(axes)
