"""Tries every library that mggcn is compared with on a tiny graph, in the environment that setup.sh has made.

Usage: prove.py FILE; FILE gets the versions of those that work and what keeps the others from it. Fails if DGL, PyG,
torch or SciPy does not work: what comes from wheels for some systems alone (MKL, torch-sparse) may be absent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCH))  # this script lies one folder below the modules it shares

from common import Worker  # noqa: E402
from peers_env import DISTRIBUTIONS, OPTIONAL  # noqa: E402
from peers_spmm_cases import KINDS  # noqa: E402

TINY = 40


def tiny_store(folder: Path) -> None:
    """A ring of vertices with chords, as the folder of arrays that the workers read."""
    import numpy as np

    neighbours = np.array([[(v + step) % TINY for step in (-7, -1, 1, 7)] for v in range(TINY)])
    np.save(folder / "indptr.npy", np.arange(TINY + 1, dtype=np.int64) * 4)
    np.save(folder / "indices.npy", np.sort(neighbours, axis=1).reshape(-1).astype(np.int32))


def expected(store: Path, width: int) -> list[float]:
    """What every library must find, from dense matrices in float64."""
    import numpy as np
    from peers_data import normalised_dense, operand, sample_of

    return sample_of(normalised_dense(store) @ operand(TINY, width).astype(np.float64))


def trial(library: str, store: Path) -> str:
    """Multiply with the first kind of a library; return what is wrong, "" if nothing is."""
    width = 8
    kind = next(kind for kind, (name, _) in KINDS.items() if name == library)
    job = {"store": str(store), "width": width, "kind": kind}
    worker = None
    try:
        worker = Worker("worker_product.py", "default", 1, job)
        worker.ask("epoch")
        found = worker.ask("result")["result"]
        worker.close()
    except (RuntimeError, subprocess.SubprocessError) as error:
        return str(error).strip().splitlines()[-1]
    finally:
        if worker is not None:
            worker.kill()
    apart = max(abs(a - b) for a, b in zip(found, expected(store, width), strict=True))
    return "" if apart < 1e-5 else f"its product is {apart:.1e} off"


def main() -> None:
    versions, faults = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "ring"
        store.mkdir()
        tiny_store(store)
        for library, distribution in DISTRIBUTIONS.items():
            try:
                version = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                faults[library] = "not installed"
                continue
            fault = trial(library, store)
            if fault:
                faults[library] = fault
            else:
                versions[library] = version
    Path(sys.argv[1]).write_text(json.dumps({"versions": versions, "faults": faults}, indent=1) + "\n")
    for library, version in versions.items():
        print(f"{library} {version}: works")
    for library, fault in faults.items():
        print(f"{library}: left out: {fault}")
    if needed := sorted(set(faults) - OPTIONAL):
        sys.exit(f"not usable: {', '.join(needed)}")


if __name__ == "__main__":
    main()
