"""Benchmarks of mggcn: README.md lists the commands. Run from the repository root."""
