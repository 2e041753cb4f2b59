"""cd-r: split vertices exchange their sums one bin per epoch, and messages arrive r epochs later (DistGNN, Algorithm 4).

The phase of epoch e is e mod r: bin number e mod r is exchanged. Its leaves send their partial sums, which the roots add r
epochs later; its roots send totals, which the leaves take another r epochs later. In the other phases a split vertex has
its local partial sum (`local`, Algorithm 4 as written), or every copy adds what last came from the others to its own fresh
sum (`last`: a root then sends each leaf the total without that leaf's part). Where nothing has come, the local sum is
scaled up by the degree that it lacks, as in 0c: degrees travel with the sums. Both directions work alike, each aggregation
with messages of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mggcn.aggregate.base import Aggregation, aggregate_name
from mggcn.aggregate.delayed_part import DeviceLists, Part
from mggcn.aggregate.edge_op import SUM, Accumulation, EdgeOp, Target
from mggcn.backend.events import DONE, Event

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator


class DelayedByEpochs(Aggregation):
    """The strategy on one rank; states: the planned buffers of every aggregation; keep_last: as in the plan."""

    exact = False

    def __init__(
        self, part: Part, comm: Communicator, states: Mapping[str, Mapping[str, Tensor]], keep_last: bool
    ) -> None:
        self._part = part
        shares = _Shares(part)
        self._posts = {op: _Post(op, part, shares, comm, buffers, keep_last) for op, buffers in states.items()}
        self._epoch = 0

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if epoch == 0:
            for post in self._posts.values():
                post.forget()

    def forward(self, h: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        split = self._part.begin_split(op, h, target)
        self._posts[aggregate_name(layer, False)].exchange(target.out, self._epoch)
        for half in (1, 2):
            self._part.compute(op, h, target, half)
        self._part.end_split(split)

    def backward(self, g: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self._posts[aggregate_name(layer, True)].exchange(g, self._epoch)
        self._part.compute_t(op, g, target)

    def state(self) -> Mapping[str, Tensor]:
        return {name: tensor for post in self._posts.values() for name, tensor in post.state().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for op, post in self._posts.items():
            post.load_state({name: tensor for name, tensor in state.items() if name.startswith(f"{op}.")})


class _Shares:
    """Factors that scale up split rows whose remote sums have not arrived, for each state of the bins."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def apply(self, sums: Tensor, up: tuple[int, ...], down: tuple[int, ...]) -> None:
        """Scale up all split rows except the roots of bins `up` and the leaves of bins `down`, whose sums are complete."""
        part, count = self._part, len(self._part.bins)
        if len(up) == len(down) == count:
            return
        if (up, down) not in self._known:
            if len(self._known) >= count:
                self._known.clear()  # the states of the first epochs do not recur
            shares = part.missing.copy()
            complete = [rows for number in up for rows in part.bins[number].roots]
            for rows in (*complete, *(part.bins[number].leaves for number in down)):
                shares[rows.cpu().numpy()] = 1
            self._known[up, down] = part.backend.upload(shares)
        part.scale(sums, self._known[up, down])


class _Post:
    """The messages of one aggregation: those in flight in each bin, and the last received."""

    def __init__(
        self, op: str, part: Part, shares: _Shares, comm: Communicator, buffers: Mapping[str, Tensor], keep_last: bool
    ) -> None:
        self._op = op
        self._comm = comm
        self._shares = shares
        self._part = part
        self._backend = part.backend
        self._bins = part.bins
        self._keep_last = keep_last
        self._buffers = {name.removeprefix(f"{op}."): buffer for name, buffer in buffers.items()}
        self._leaf_rows = _ranges([sum(lists.leaf_counts) for lists in part.bins])
        self._root_rows = _ranges([sum(lists.root_counts) for lists in part.bins])
        # By bin: the message on its way to the roots, or back to the leaves, and whether one has ever come.
        self._up: dict[int, Event] = {}
        self._down: dict[int, Event] = {}
        self._have_up: set[int] = set()
        self._have_down: set[int] = set()

    def exchange(self, sums: Tensor, epoch: int) -> None:
        """Complete the split rows of `sums` (V, D), local partial sums, with what has arrived; send this epoch's bin."""
        partial, phase = self._part.sums(sums), epoch % len(self._bins)
        lists = self._bins[phase]
        # What this bin sent r epochs ago. All ranks wait for the same messages, in the same order.
        if phase in self._up:
            self._arrive(self._up, phase, "roots")
            self._have_up.add(phase)
        if phase in self._down:
            self._arrive(self._down, phase, "leaves")
            self._have_down.add(phase)
        # Before anything is scaled or added: a leaf sends its own fresh sum and nothing that came from its root, which
        # would count it twice.
        partial.gather(lists.leaves, self._rows("leaves-out", phase))
        used = range(len(self._bins)) if self._keep_last else [phase]
        up, down = (tuple(number for number in used if number in have) for have in (self._have_up, self._have_down))
        # Scaled before anything is added: only where nothing has come does the local sum stand for the whole one.
        self._shares.apply(sums, up, down)
        for number in up:
            self._bins[number].add_to_roots(self._rows(self._last("roots"), number), partial)
        if phase in self._have_up:
            self._gather_roots(lists, partial, phase)
        # Without `last` the roots add straight from the receive buffer: the next message may start only now.
        arriving = self._rows("roots-in", phase)
        self._up[phase] = lists.send_up(self._comm, self._rows("leaves-out", phase), arriving, self._backend.record())
        for number in down:
            take = partial.combine if self._keep_last else partial.scatter
            take(self._rows(self._last("leaves"), number), self._bins[number].leaves)
        # A root can send a total once its leaves' sums have arrived and the leaves have read the previous total.
        if phase in self._have_up:
            arriving = self._rows("leaves-in", phase)
            self._down[phase] = lists.send_down(
                self._comm, self._rows("roots-out", phase), arriving, self._backend.record()
            )

    def _gather_roots(self, lists: DeviceLists, partial: Accumulation, phase: int) -> None:
        """Copy a bin's totals to the send buffer; with `last`, without the part of the leaf, which adds its own fresh
        sum.
        """
        totals = self._rows("roots-out", phase)
        lists.gather_roots(partial, totals)
        if self._keep_last:
            totals.sub_(self._rows("roots-last", phase))

    def _arrive(self, events: dict[int, Event], phase: int, end: str) -> None:
        """Wait for a bin's message; copy it where `last` needs it in other phases, while the next one is on its way."""
        events.pop(phase).wait()
        if self._keep_last:
            self._rows(f"{end}-last", phase).copy_(self._rows(f"{end}-in", phase))

    def _last(self, end: str) -> str:
        """The buffer with the last message received at one end: a copy, or the receive buffer until the next message
        starts.
        """
        return f"{end}-last" if self._keep_last else f"{end}-in"

    def _rows(self, name: str, number: int) -> Tensor:
        rows = self._leaf_rows if name.startswith("leaves") else self._root_rows
        return self._buffers[name][rows[number]]

    def forget(self) -> None:
        """Reset once no message is in flight: one that nobody waits for would overwrite the rows of the next run."""
        self._settle()
        for known in (self._up, self._down, self._have_up, self._have_down):
            known.clear()

    def _settle(self) -> None:
        """Wait for every message, in the same order on all ranks."""
        for number in range(len(self._bins)):
            for events in (self._up, self._down):
                if number in events:
                    events[number].wait()
                    events[number] = DONE

    def state(self) -> dict[str, Tensor]:
        """Return the messages received, and an int64 (2, r) state per direction and bin: 0 nothing, 1 sent, 2 received
        and sent again.
        """
        self._settle()
        kept = [name for name in self._buffers if not name.endswith("-out")]
        tensors = {f"{self._op}.{name}": self._buffers[name].cpu().contiguous() for name in kept}
        progress = torch.zeros(2, len(self._bins), dtype=torch.int64)
        for row, (sent, have) in enumerate(((self._up, self._have_up), (self._down, self._have_down))):
            for number in range(len(self._bins)):
                progress[row, number] = (number in sent) + (number in have)
        return tensors | {f"{self._op}.progress": progress}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; an empty mapping resets all."""
        self.forget()
        if not state:
            return
        for name, tensor in state.items():
            if (short := name.removeprefix(f"{self._op}.")) in self._buffers:
                self._buffers[short].copy_(tensor)
        progress = state[f"{self._op}.progress"]
        for row, (sent, have) in enumerate(((self._up, self._have_up), (self._down, self._have_down))):
            for number, stage in enumerate(progress[row].tolist()):
                if stage >= 1:
                    sent[number] = DONE
                if stage >= 2:
                    have.add(number)


def _ranges(counts: Sequence[int]) -> list[slice]:
    """Return consecutive ranges of the given numbers of rows."""
    result, first = [], 0
    for count in counts:
        result.append(slice(first, first + count))
        first += count
    return result
