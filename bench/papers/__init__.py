"""The tables and figures of the five papers behind mggcn, by one command: `python -m bench.papers PAPER`."""
