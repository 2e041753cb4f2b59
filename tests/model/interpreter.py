"""What a graph of values means, in float64 with NumPy alone: every kind of node in a line, without any kernel of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.kinds.dense import InputGrad, Linear, LinearGrad, SparseLinear, SparseWeightGrad, WeightGrad
from mggcn.model.kinds.elementwise import ActivationGrad, Add, BiasGrad, Elementwise, EpilogueSpec, Rounded
from mggcn.model.kinds.ends import DroppedValues, Input, Loss, Score
from mggcn.model.runtime import Parameter
from mggcn.model.values import Graph, Value

ROWS, CLASSES = 9, 3


@dataclass
class Meaning:
    """A graph of ROWS vertices with random numbers for all that a program reads; gradients: what it leaves."""

    seed: int
    parameters: dict[str, Any]
    norm: str = "symmetric"
    gradients: dict[str, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def of(parameters: dict[str, Parameter], norm: str, seed: int = 4127) -> Meaning:
        """Random weights."""
        rng = np.random.default_rng(seed)
        return Meaning(seed, {name: 0.4 * rng.normal(size=p.shape) for name, p in sorted(parameters.items())}, norm)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed + 1)
        self.a_t = rng.random((ROWS, ROWS)) * (rng.random((ROWS, ROWS)) < 0.4)
        self.scales = {"": np.ones((ROWS, 1)), "row": rng.random((ROWS, 1)) + 0.5, "col": rng.random((ROWS, 1)) + 0.5}
        if self.norm == "mean":
            self.scales["col"][:] = 1
        self.labels = rng.integers(0, CLASSES, ROWS)

    def x(self, cols: int, kind: Input) -> np.ndarray:
        """The features, or what set-up made of them."""
        x = np.random.default_rng(self.seed + 2).normal(size=(ROWS, cols))
        if kind.aggregated:
            return np.asarray(self.scales["row"] * (self.a_t @ (self.scales["col"] * x)))
        return np.asarray(self.scales["col"] * x if kind.scaled else x)

    def mask(self, site: int, cols: int, probability: float) -> np.ndarray:
        """What dropout multiplies with."""
        keep = np.random.default_rng(self.seed + 100 + site).random((ROWS, cols)) >= probability
        return keep * (65536 / (65536 - round(65536 * probability)))

    def finished(self, z: np.ndarray, spec: EpilogueSpec) -> np.ndarray:
        z = self.scales[spec.row_scale] * z + (self.parameters[spec.bias] if spec.bias else 0)
        z = np.maximum(z, 0) if spec.relu else z
        return np.asarray(self.scales[spec.out_scale] * z * self.mask(spec.site, z.shape[1], spec.dropout))

    def again(self, kind: Any, x: np.ndarray) -> np.ndarray:
        """What a product reads: its operand, or what it makes of it block by block."""
        spec = getattr(kind, "recomputed", None)
        return x if spec is None else self.finished(x, spec)

    def weights(self, kind: Any) -> np.ndarray:
        """The matrix of a product, or the sum of its two."""
        added = getattr(kind, "added", "")
        return np.asarray(self.parameters[kind.weight] + (self.parameters[added] if added else 0))

    def activation_grad(self, kind: ActivationGrad, g: np.ndarray, h: np.ndarray) -> np.ndarray:
        keep = 65536 / (65536 - round(65536 * kind.dropout))
        dz = (h != 0) * keep * self.scales[kind.h_scale] * g
        if kind.sums:
            self.gradients[kind.sums] = dz.sum(0)
        return np.asarray(self.scales[kind.row_scale] * dz)

    def run(self, graph: Graph) -> dict[Value, Any]:
        """Compute every value of a graph; parameters' gradients go to `gradients`."""
        found: dict[Value, Any] = {}
        for value in graph.values():
            found[value] = self.node(value, *(found[operand] for operand in value.operands))
        return found

    def node(self, value: Value, *operands: Any) -> Any:
        kind = value.kind
        match kind:
            case Input():
                return self.x(value.cols, kind)
            case DroppedValues():
                return operands[0] * self.mask(0, value.cols, kind.probability)
            case Linear() | SparseLinear():
                return self.finished(self.again(kind, operands[0]) @ self.weights(kind), kind.finish)
            case LinearGrad():
                return self.finished(operands[0] @ self.weights(kind).T, kind.finish)
            case InputGrad():
                g, h = operands
                return self.activation_grad(kind.activation, g @ self.weights(kind).T, h)
            case WeightGrad() | SparseWeightGrad():
                x, g = operands
                for name in (kind.weight, getattr(kind, "added", "")):
                    if name:
                        self.gradients[name] = self.again(kind, x).T @ g
            case Aggregate():
                return self.finished((self.a_t.T if kind.backward else self.a_t) @ operands[0], kind.finish)
            case Elementwise():
                return self.finished(operands[0], kind.spec)
            case ActivationGrad():
                return self.activation_grad(kind, *operands)
            case BiasGrad():
                self.gradients[kind.bias] = operands[0].sum(0)
            case Add():
                return operands[0] + operands[1]
            case Rounded() | Score():
                return operands[0]
            case Loss():
                e = np.exp(operands[0] - operands[0].max(1, keepdims=True))
                dz = (e / e.sum(1, keepdims=True) - np.eye(CLASSES)[self.labels]) / ROWS
                if kind.sums:
                    self.gradients[kind.sums] = dz.sum(0)
                return self.scales[kind.row_scale] * dz
            case _:
                raise AssertionError(f"no meaning of {value}")
        return None
