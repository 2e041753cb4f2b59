"""Building blocks for one's own torch modules: messages along edges on one device, and sums over neighbours across ranks.

`import mggcn.nn` loads torch. See docs/own-models.md.
"""

from mggcn.nn.aggregate import aggregate
from mggcn.nn.graph import DeviceGraph
from mggcn.nn.partitioned import PartitionedGraph
from mggcn.nn.reduce import reduce_edges
from mggcn.nn.run import run

__all__ = ["DeviceGraph", "PartitionedGraph", "aggregate", "reduce_edges", "run"]
