"""The lines that a run prints before it starts: graph, model, strategy and why, predicted peak and seconds. Needs no
torch.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mggcn.blocks.draws import ALL
from mggcn.cost.machine import Machine
from mggcn.errors import MggcnError
from mggcn.memory.device import launching
from mggcn.memory.units import human
from mggcn.planning.block_evaluation import EVALUATED_FANOUT
from mggcn.planning.cost_text import memory_alone, seconds_text
from mggcn.planning.disk_text import long_run_lines, rung_lines
from mggcn.planning.history import unread_cache
from mggcn.planning.op_cost import epoch_cost, first_sums_s
from mggcn.planning.run import RunPlan
from mggcn.planning.text import subject

SAMPLED = f"and so are scores, which are SAMPLED over {EVALUATED_FANOUT} in-neighbours a row"


def opening_lines(
    plan: RunPlan,
    machine: Machine,
    limit: int,
    *,
    store: Path | None = None,
    reason: str = "",
    done: int = 0,
    in_float32: Machine | None = None,
) -> list[str]:
    """Return the lines that a run prints when it starts, or continues after `done` epochs.

    limit: bytes that a rank may use. reason: why `auto` chose its strategy and order; "" if they were set. in_float32: the
    machine with the rates of a run in float32.
    """
    graph, network = subject(plan)
    own = store is not None and graph.startswith(f"{store.name}: ")  # prepare names a graph as its store
    held = graph if store is None else f"store {store}{graph.removeprefix(store.name) if own else f' holds {graph}'}"
    lines = [held, network]
    if plan.stack is not None and plan.config.sample.batch:
        lines += [_batch_line(plan), *_ranks_lines(plan)]
    if every := plan.config.sample.compare_gradient:
        when = "every epoch" if every == 1 else f"every {every:,} epochs"
        lines.append(f"after {when} the gradient of the next step is compared with the exact one")
    if len(plan.ranks) > 1:
        lines.append(
            reason or "strategy and order are those of the settings; --strategy auto --order auto compares all"
        )
    if how := launching(plan.config):
        lines.append(how)
    peak = f"predicted peak {human(plan.largest.total_bytes)} of {human(limit)} per rank"
    with suppress(MggcnError):  # without rates no seconds are predicted, as the last line says
        lines += memory_alone(plan, machine, in_float32 or machine)
    lines += [*rung_lines(plan, machine), *long_run_lines(plan, machine)]
    return [*lines, f"{peak}; {_duration(plan, machine, done)}"]


def _batch_line(plan: RunPlan) -> str:
    """Say how large batches are, what is drawn around their seeds, and what of a run is an estimate."""
    config, sample = plan.config, plan.config.sample
    fanout = ", ".join("all" if numbers == ALL else str(numbers) for numbers in sample.drawn_fanout)
    drawn = f"{fanout} drawn in-neighbours" + " of the seeds, all of the first layer" * (sample.first == "full")
    batch, training = sample.batch, plan.shape.num_training or sample.batch
    of = "links" if plan.shape.task == "links" else "vertices"
    size, steps = f"batches of {batch:,}", f"{plan.steps:,} step{'s' * (plan.steps > 1)} an epoch"
    if batch > training:  # a mistyped size is seen here
        size, steps = f"a batch of all {training:,}", f"which are fewer than {batch:,}, one step an epoch"
    dealt = {"global": "", "ranges": ", dealt by ranges", "by-class": " by weight of class"}[sample.deal]
    scores = SAMPLED if config.train.evaluate == "sampled" else "evaluation is exact"
    return f"{size} training {of}{dealt} and {drawn}, {steps}: gradients are estimates of the whole graph's, {scores}"


def _ranks_lines(plan: RunPlan) -> list[str]:
    """Say what ranks that train on batches share, send each other, and change."""
    config, lines = plan.config, list[str]()
    if plan.stack is not None and plan.stack.together:
        lines.append("ranks share a batch: each of its rows is computed once, by the rank that owns it")
    if config.reads_history:
        cached = (
            "rows of other ranks' vertices come from a cache, as these last sent them: gradients are APPROXIMATE "
            "(mggcn plan says what is sent and kept)"
        )
        unread = unread_cache(config, plan.shape, plan.steps)
        lines.append(f"gradients are APPROXIMATE: {unread}" if unread else cached)
    if config.fetches_rows:
        macro = config.sample.macro
        many = {0: "of an epoch's steps", 1: "of each step"}.get(macro, f"of {macro:,} steps")
        what = "edges and features" if config.draws_at_owners else "features"
        lines.append(f"{what} of other ranks' vertices come from these, those {many} together")
    if config.sample.deal == "ranges" and len(plan.ranks) > 1:
        lines.append(f"batches depend on the {len(plan.ranks)} ranks: each shuffles a range of the training vertices")
    return lines


def _duration(plan: RunPlan, machine: Machine, done: int) -> str:
    """Say how long an epoch and all that are left will take, or why that is not known."""
    train = plan.config.train
    try:
        cost = epoch_cost(plan, machine)
    except MggcnError as error:
        return f"seconds are not predicted: {error}"
    evaluations = train.epochs // train.eval_every - done // train.eval_every if train.eval_every else 1
    left = train.epochs * train.repeat - done
    epoch = plan.steps * cost.step_s
    total = first_sums_s(plan) + left * epoch + evaluations * train.repeat * cost.evaluate_s
    if cost.exact is not None:
        every = plan.config.sample.compare_gradient
        times = train.epochs // every - done // every
        total += times * train.repeat * (cost.exact.seconds + cost.step_s)
    caveat = f" (rates of this machine are {machine.caveat})" if machine.caveat else ""
    return f"{seconds_text(epoch)} per epoch, {seconds_text(total)} for {left:,} epochs{caveat}"
