from __future__ import annotations

import pytest
import torch

from mggcn.comm.calls import Call, disagreement

CALLS = (
    Call(op="broadcast", dtype=torch.bfloat16, count=12, root=2),
    Call(op="all_reduce", dtype=torch.float64, count=3),
    Call(op="all_to_all", dtype=torch.int64, count=6, root=0, sends=(1, 0, 2), receives=(0, 0, 5)),
    Call(op="barrier"),
)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_encoding_keeps_the_call(call: Call) -> None:
    """Fails if ranks would compare less than what they asked for."""
    assert Call.decode(call.encode(3)) == call


def test_agreement_and_missing_ranks() -> None:
    """Fails if equal calls, or a rank that has not come yet, count as a disagreement."""
    for call in CALLS[:2]:
        assert disagreement({rank: call for rank in range(3)}) is None
    some = {
        0: Call(op="all_to_all", dtype=torch.int64, count=6, root=0, sends=(1, 0, 2), receives=(1, 4, 5)),
        2: Call(op="all_to_all", dtype=torch.int64, count=6, root=0, sends=(5, 0, 0), receives=(2, 9, 0)),
    }
    assert disagreement(some) is None


def test_disagreement_groups_ranks() -> None:
    """Fails if it is not said which ranks want what."""
    odd = Call(op="barrier")
    assert disagreement({0: CALLS[0], 1: odd, 2: CALLS[0]}) == (
        "ranks 0, 2 asked for broadcast of 12 x bfloat16 from rank 2; rank 1 asked for barrier"
    )
