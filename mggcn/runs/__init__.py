"""Jobs that the command and the Python API share: run folders, training on all ranks, predicting."""
