"""Building blocks for your own torch modules: messages along edges on one device, and sums over neighbours across ranks.

`import mggcn.nn` loads torch. See docs/own-models.md.
"""

from mggcn.nn.aggregate import aggregate
from mggcn.nn.batches import SampledBatch, SampledLoader, batches
from mggcn.nn.graph import DeviceGraph
from mggcn.nn.layers import BatchNorm, dropout
from mggcn.nn.neighbours import attend, attend_dynamic, reduce
from mggcn.nn.partitioned import PartitionedGraph
from mggcn.nn.reduce_edges import reduce_edges
from mggcn.nn.relations import aggregate_relations
from mggcn.nn.run import run
from mggcn.nn.sampled_block import SampledBlock

__all__ = [
    "BatchNorm",
    "DeviceGraph",
    "PartitionedGraph",
    "SampledBatch",
    "SampledBlock",
    "SampledLoader",
    "aggregate",
    "aggregate_relations",
    "attend",
    "attend_dynamic",
    "batches",
    "dropout",
    "reduce",
    "reduce_edges",
    "run",
]
