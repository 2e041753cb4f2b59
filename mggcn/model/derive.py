"""Reverse-mode differentiation of a graph of values: the backward pass as nodes of the same kinds.

Source: Griewank & Walther, Evaluating Derivatives (2008), ch. 3.
"""

from __future__ import annotations

from mggcn.errors import PlanError
from mggcn.model.kinds.elementwise import Add
from mggcn.model.kinds.ends import Loss
from mggcn.model.values import Graph, Value


def derive(logits: Value) -> Graph:
    """Return the training graph of a model: the gradients of all parameters from the loss of its logits.

    A value has a gradient if a parameter is below it; the input has none. Where several nodes read a value, its gradient
    is the sum of theirs. Raises: PlanError if a kind between parameters and loss has no adjoint, or two nodes read one
    parameter.
    """
    values = Graph((logits,)).values()
    depends = _depends(values)
    if logits not in depends:
        raise PlanError("the logits depend on no parameter: there is nothing to train")
    gradients = {logits: Value(Loss(), (logits,), logits.cols)}
    roots: list[Value] = []
    for value in reversed(values):
        if value not in gradients or value not in depends:
            continue
        adjoint = value.kind.adjoint(value, gradients.pop(value))
        roots += adjoint.effects
        for operand, gradient in zip(value.operands, adjoint.operands, strict=True):
            if gradient is None or operand not in depends:
                continue
            before = gradients.get(operand)
            gradients[operand] = gradient if before is None else Value(Add(), (before, gradient), operand.cols)
    written = [root.kind.gradient_of for root in roots if root.kind.gradient_of]
    if twice := sorted({name for name in written if written.count(name) > 1}):
        raise PlanError(f"several nodes of the model read {', '.join(twice)}; give each node a parameter of its own")
    return Graph(tuple(roots))


def _depends(values: tuple[Value, ...]) -> set[Value]:
    """The values that have a parameter below them. A kind has parameters if its adjoint has effects."""
    found: set[Value] = set()
    for value in values:
        if any(operand in found for operand in value.operands) or value.kind.has_parameters:
            found.add(value)
    return found
