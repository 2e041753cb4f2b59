"""What the command and the Python API both call: run folders, training on all ranks, predicting."""
