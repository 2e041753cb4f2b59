"""The version, read by code that may not import the package's public names."""

__version__ = "0.1.0"
