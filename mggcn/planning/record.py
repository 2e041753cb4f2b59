"""The plan of a run as plain values: writes the run folder's plan.json, and plans the run again from the statistics in
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mggcn.aggregate.base import Strategy
from mggcn.backend.cpu.figures import ASSUMED, figures_from_dict
from mggcn.blocks.block import Capacity, Stack
from mggcn.comm.nccl_memory import memory_from_dict
from mggcn.comm.nccl_settings import UNMEASURED
from mggcn.config import Config
from mggcn.memory.device import launching, runs_nccl
from mggcn.partition.make import stats_from_dict
from mggcn.planning.batches import stack_of
from mggcn.planning.pruning import LayerRows
from mggcn.planning.run import RankPlan, RunPlan, plan_run
from mggcn.planning.shape import GraphShape


def layer_reasons(plan: RunPlan) -> list[str]:
    """Return one line for the input, then one per layer with the order of its products and the reason."""
    values = plan.ranks[0].values
    lines = [f"input: {values.input.reason}"]
    return lines + [f"layer {c.layer} ({c.d_in} -> {c.d_out}): {c.products}, {c.reason}" for c in values.layers]


def to_dict(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as plain values: the run folder's plan.json."""
    first = plan.ranks[0]
    return {
        "ranks": len(plan.ranks),
        "device": plan.config.run.device,
        "precision": plan.config.run.precision,
        "strategy": plan.config.run.strategy,
        "delay": plan.config.run.delay,
        "exact": first.aggregation.exact,
        "order": plan.config.run.order,
        "graph": {
            name: getattr(plan.shape, name)
            for name in ("name", "num_vertices", "num_edges", "num_features", "num_classes", "symmetric", "weighted")
        }
        | {
            name: getattr(plan.shape, name)
            for name in ("feature_nnz", "aggregated_nnz", "num_training", "num_relations", "repeats", "task")
        }
        | (
            {name: getattr(plan.shape, name) for name in ("num_scored", "num_scored_pairs")}
            if plan.shape.task == "links"
            else {}
        )
        | ({"copied_bytes": plan.shape.copied_bytes} if plan.shape.copied_bytes else {})
        | ({"in_place": plan.shape.in_place} if plan.config.sample.batch else {})
        | ({name: getattr(plan.shape, name) for name in ("num_evaluated", "longest_row")} if plan.by_blocks else {}),
        "reasons": layer_reasons(plan),
        "rewrites": list(first.values.explained),
        "training_rows": [_rows_dict(rows) for rows in first.rows],
        "launching": launching(plan.config),
        "figures": plan.figures.to_dict(),
        "nccl": plan.nccl.to_dict() if runs_nccl(plan.config.run) else None,
        "programs": {p.name: [op.label for op in p.ops] for p in first.programs.all},
        "per_rank": [_rank_dict(rank, plan.steps) for rank in plan.ranks],
        "partition": plan.stats.to_dict(),
        **({"evaluate": plan.chosen.train.evaluate} if plan.config.sample.batch else {}),
        "capacity": plan.rung,
        **({"limit": plan.limit} if plan.on_disk or plan.on_host else {}),
        **({"hosted_steps": first.values.hosted} if plan.on_host else {}),
    } | ({} if plan.stack is None else _stack_dict(plan.stack))


def _stack_dict(stack: Stack) -> dict[str, Any]:
    sizes: dict[str, Any] = {"batches": [dataclasses.astuple(size) for size in stack.capacities]}
    if stack.mean:
        sizes["mean_batches"] = stack.mean
    if stack.looked:
        sizes["looked"] = stack.looked
    if stack.nonzeros:
        sizes["nonzeros_of_batches"] = stack.nonzeros
    if stack.together:
        sizes["shared_batches"] = [dataclasses.astuple(size) for size in stack.together]
        sizes |= {"exchanged": [block.name for block in stack.exchanged], "overlap": stack.overlap}
    return sizes


def _rank_dict(rank: RankPlan, steps: int) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "rows": rank.sizes.owned,
        "nnz": rank.nnz,
        "arena_bytes": rank.arena_bytes,
        "paper_bytes": rank.paper_bytes,
        "regions": dict(rank.regions),
        "setup_bytes": rank.setup_bytes,
        **({"pinned_bytes": rank.pinned_bytes} if rank.pinned_bytes else {}),
        "total_bytes": rank.total_bytes,
        "messages_per_epoch": steps * rank.messages(rank.train),
        "bytes_sent_per_epoch": steps * rank.bytes_sent(rank.train),
        "messages_per_evaluation": rank.messages(rank.evaluate),
        "bytes_sent_per_evaluation": rank.bytes_sent(rank.evaluate),
        "num_spmm": rank.num_spmm,
        **({} if rank.disk is None else {"disk": rank.disk.to_dict()}),
        **({"hosted": [[s.name, s.nbytes] for s in rank.hosted]} if rank.hosted else {}),
        "buffers": [
            {
                "program": program.name,
                "name": p.spec.name,
                "rows": p.spec.rows,
                "cols": p.spec.cols,
                "ld": p.spec.ld,
                "dtype": p.spec.dtype,
                "lifetime": p.spec.lifetime,
                "nbytes": p.spec.nbytes,
                "offset": p.offset,
                "first": p.first,
                "last": p.last,
            }
            for program in rank.programs.all
            for p in program.arena.placements
        ],
    }


def _rows_dict(rows: LayerRows) -> dict[str, Any]:
    return {"layer": rows.layer, "rows": rows.rows, "nnz": rows.nnz, "level": rows.block.hops, "reason": rows.reason}


def plan_from_dict(config: Config, content: Mapping[str, Any], strategy: Strategy) -> RunPlan:
    """Return the plan that `to_dict` wrote, planned again from its statistics. Raises: GraphError, PlanError."""
    stats, recorded = stats_from_dict(content["partition"]), content.get("nccl")
    nccl = memory_from_dict(recorded) if recorded else UNMEASURED
    figures = figures_from_dict(content["figures"]) if "figures" in content else ASSUMED
    shape = GraphShape(**content["graph"])
    stack = stack_of(config, shape)
    if stack is not None and "batches" in content:
        sizes, together = (tuple(Capacity.of(c) for c in content.get(k, ())) for k in ("batches", "shared_batches"))
        exchanged = tuple(block for block in stack.blocks if block.name in content.get("exchanged", ()))
        mean = tuple(tuple(pair) for pair in content.get("mean_batches", ()))
        nonzeros = tuple(content.get("nonzeros_of_batches", ()))
        found: dict[str, Any] = {
            "mean": mean,
            "looked": content.get("looked", 0),
            "nonzeros": nonzeros,
            "together": together,
            "exchanged": exchanged,
        }
        stack = Stack(stack.blocks, sizes, **found, overlap=content.get("overlap", 0.0))
    # What auto chose; a run that is planned anew chooses again.
    chosen = config.evaluating(content.get("evaluate", config.train.evaluate))
    rung, limit = content.get("capacity", "memory"), content.get("limit", 0)
    if config.run.capacity == "auto":
        chosen = chosen.on_rung(rung)
    # Other hosts need not choose alike: what a process takes, and its kernels' work space, are theirs.
    panel = (content["per_rank"][0].get("disk") or {}).get("panel_columns", 0) if content.get("per_rank") else 0
    given = {"limit": limit, "panel": panel, "hosted": content.get("hosted_steps", 0)}
    plan = plan_run(chosen, shape, stats, strategy, nccl, figures=figures, stack=stack, **given)
    again = config.run.capacity == "auto" and rung == "recompute"
    return dataclasses.replace(plan, config=config, again=again)
