"""What bench/pruning.py makes of its figures; what it measures needs minutes."""

from __future__ import annotations

from tests.bench.conftest import BENCH  # noqa: F401  (puts bench/ on the path)

import pruning  # isort: skip


def test_the_report() -> None:
    """Fails if figures land in other columns, or a ratio is upside down."""
    result = {
        "graph": "some",
        "hidden": (16, 8),
        "nonzeros": 1000,
        "layers": [
            {"layer": 2, "rows": 90, "nnz": 900, "pruned": False},
            {"layer": 3, "rows": 10, "nnz": 125, "pruned": True},
        ],
        "wall": {"off": [0.3], "auto": [0.2]},
        "ops": {
            "off": {"aggregate 2": [0.5, 0.25], "aggregate 3": [0.125], "aggregate-grad 3": [0.25], "loss": [0.125]},
            "auto": {
                "aggregate 2": [0.25, 0.5],
                "aggregate 3": [0.0625],
                "aggregate-grad 3": [0.0625],
                "loss": [0.125],
            },
        },
        "seconds": {"off": {"plan": 1.0, "set-up": 2.0}, "auto": {"plan": 1.5, "set-up": 2.25}},
        "largest_loss_difference": 0.0,
        "graph_bytes": {"off": 2**20, "auto": 3 * 2**20},
    }
    row = "| some | 16-8 | 3: 12.5%, 2: 90.0% (all computed) | 375.0 | 125.0 | 750.0 | 500.0 | 1.500 | 1.500 "
    row += "| 2.0 | 0.50 | 0.25 |"
    said = pruning.describe([result])
    assert row in said
    assert "equal, bit for bit" in said
    assert "differ by at most 2.0e-07" in pruning.describe([result, result | {"largest_loss_difference": 2e-7}])
