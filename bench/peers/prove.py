"""Tries every library that mggcn is compared with on a tiny graph, in the environment that setup.sh has made.

Usage: python -m bench.peers.prove FILE; FILE gets the versions of those that work and what keeps the others from it. Fails
if DGL, PyG, torch or SciPy does not work: what comes from wheels for some systems alone (MKL, torch-sparse) may be absent.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from bench.peers.libraries import DISTRIBUTIONS, OPTIONAL
from bench.peers.products import KINDS
from bench.process import Worker, last_line

TINY, WIDTH = 40, 8


def tiny_store(folder: Path) -> None:
    """A ring of vertices with chords, as the folder of arrays that the workers read."""
    import numpy as np

    neighbours = np.array([[(v + step) % TINY for step in (-7, -1, 1, 7)] for v in range(TINY)])
    np.save(folder / "indptr.npy", np.arange(TINY + 1, dtype=np.int64) * 4)
    np.save(folder / "indices.npy", np.sort(neighbours, axis=1).reshape(-1).astype(np.int32))


def fault_of(library: str, store: Path) -> str:
    """Multiply with the first kind of a library, compare with dense matrices in float64; "" if nothing is wrong."""
    import numpy as np

    from bench.arrays import normalised_dense, operand, sample_of

    kind = next(kind for kind, (name, _) in KINDS.items() if name == library)
    try:
        worker = Worker("bench.peers.worker_product", "default", 1, {"store": str(store), "width": WIDTH, "kind": kind})
    except RuntimeError as error:
        return last_line(error)
    try:
        worker.ask("epoch")
        found = worker.ask("result")["result"]
    except RuntimeError as error:
        return last_line(error)
    finally:
        worker.kill()
    expected = sample_of(normalised_dense(store) @ operand(TINY, WIDTH).astype(np.float64))
    apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    return "" if apart < 1e-5 else f"its product is {apart:.1e} off"


def main(file: str) -> None:
    versions, faults = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "ring"
        store.mkdir()
        tiny_store(store)
        for library, distribution in DISTRIBUTIONS.items():
            try:
                version, fault = metadata.version(distribution), fault_of(library, store)
            except metadata.PackageNotFoundError:
                fault = "not installed"
            if fault:
                faults[library] = fault
            else:
                versions[library] = version
            print(f"{library}: {f'left out: {fault}' if fault else f'{version}, works'}")
    Path(file).write_text(json.dumps({"versions": versions, "faults": faults}, indent=1) + "\n")
    if needed := sorted(set(faults) - OPTIONAL):
        sys.exit(f"not usable: {', '.join(needed)}")


if __name__ == "__main__":
    main(sys.argv[1])
