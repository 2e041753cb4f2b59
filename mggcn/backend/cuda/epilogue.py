"""The epilogue of a row as arguments of a CUDA kernel, in the order in which every kernel declares them."""

from __future__ import annotations

from torch import Tensor

from mggcn.backend.base import Epilogue

EpilogueArgs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, int, int, int, float]


def epilogue_args(epilogue: Epilogue | None) -> EpilogueArgs:
    """Return row_scale, bias, out_scale, row_ids, clock, relu, layer, threshold, keep_scale; None switches all off.

    A kernel declares them as const real_t* (3), const long long* (2), int, unsigned (2) and float: struct Epilogue of
    cuda/epilogue.cuh in another order.
    """
    if epilogue is None:
        return None, None, None, None, None, 0, 0, 0, 1.0
    vectors = (epilogue.row_scale, epilogue.bias, epilogue.out_scale)
    drop = epilogue.dropout
    if drop is None:
        return *vectors, None, None, int(epilogue.relu), 0, 0, 1.0
    return *vectors, epilogue.row_ids, drop.clock, int(epilogue.relu), drop.layer, drop.threshold, drop.keep_scale
