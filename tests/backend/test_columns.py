"""Some columns of a matrix at a time: masks of dropout are those of whole rows."""

from __future__ import annotations

import pytest
import torch

from mggcn.backend.base import Dropout, Epilogue
from mggcn.backend.cpu.backend import CpuBackend


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_columns_have_the_mask_of_whole_rows(dtype: torch.dtype) -> None:
    """Fails if dropout of some columns draws other words than that of all."""
    backend = CpuBackend(dtype, 1)
    z = torch.rand(5, 150, generator=torch.Generator().manual_seed(3)).to(dtype) + 1
    clock, ids = torch.tensor([7, 2]), torch.arange(5) * 1000
    whole, parts = torch.empty_like(z), torch.empty_like(z)
    backend.finish(z, whole, Epilogue(dropout=Dropout(0.5, clock, 1), row_ids=ids))
    for first in range(0, 150, 32):
        some = slice(first, first + 32)
        dropout = Dropout(0.5, clock, 1, first)
        backend.finish(z[:, some], parts[:, some], Epilogue(dropout=dropout, row_ids=ids))
    assert torch.equal(whole, parts)
    assert 200 < int((whole == 0).sum()) < 550
