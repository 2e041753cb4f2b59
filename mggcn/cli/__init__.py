"""One module per command of `mggcn`: its arguments, and what it calls."""
