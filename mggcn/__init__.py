"""mggcn: whole-graph training of graph neural networks, exact and planned, on one to P ranks."""

__version__ = "0.1.0"
