"""The compiled CPU kernels of cpu/*.cpp: where the library is, which instruction set runs, how a kernel is called.

`pip install` compiles them. In a checkout that is not installed, `python -m mggcn.native` does, into build/checkout/.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from mggcn import forks
from mggcn.errors import BackendError

LIBRARY = "mggcn/libmggcn_cpu.so"
CHECKOUT = Path(__file__).resolve().parents[1]
"""The folder that holds the package: a checkout, with a CMakeLists.txt, if mggcn is not installed."""
BUILD = CHECKOUT / "build" / "checkout"
_REMEDY = "install mggcn with a C++ compiler present: pip install . (Debian, Ubuntu: apt-get install g++)"


class DropoutArgs(ctypes.Structure):
    """`Dropout` of cpu/philox.h."""

    _fields_ = (
        ("seed", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
        ("layer", ctypes.c_uint32),
        ("threshold", ctypes.c_uint32),
        ("keep_scale", ctypes.c_double),
        ("first_group", ctypes.c_uint32),
    )


class EpilogueArgs(ctypes.Structure):
    """`Epilogue<T>` of cpu/epilogue.h."""

    _fields_ = (
        ("row_scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out_scale", ctypes.c_void_p),
        ("row_ids", ctypes.c_void_p),
        ("dropout", DropoutArgs),
        ("relu", ctypes.c_int32),
    )


class ActivationArgs(ctypes.Structure):
    """`Activation<T>` of cpu/activation.h."""

    _fields_ = (
        ("h_scale", ctypes.c_void_p),
        ("out_scale", ctypes.c_void_p),
        ("keep_scale", ctypes.c_double),
        ("masked", ctypes.c_int32),
    )


class OwnersArgs(ctypes.Structure):
    """`Owners` of cpu/owners.h."""

    _fields_ = (
        ("owner", ctypes.c_void_p),
        ("local", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("ranks", ctypes.c_int64),
    )


class SweepArgs(ctypes.Structure):
    """`Sweep` of cpu/sweep.h."""

    _fields_ = (
        ("indptr", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("first_row", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("owners", OwnersArgs),
        ("rows", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("self_loops", ctypes.c_int32),
        ("required_rows", ctypes.c_void_p),
        ("required_cols", ctypes.c_void_p),
    )


class CutEdgesArgs(ctypes.Structure):
    """`CutEdges` of cpu/libra.cpp."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("dst", ctypes.c_void_p),
        ("row_at", ctypes.c_void_p),
        ("degree", ctypes.c_void_p),
        ("num_edges", ctypes.c_int64),
        ("num_loops", ctypes.c_int64),
    )


class LibraArgs(ctypes.Structure):
    """`Libra` of cpu/libra.cpp."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("dst", ctypes.c_void_p),
        ("row_at", ctypes.c_void_p),
        ("degree", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("edge_part", ctypes.c_void_p),
        ("load", ctypes.c_void_p),
        ("open", ctypes.c_void_p),
        ("num_edges", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("words", ctypes.c_int32),
        ("wide", ctypes.c_int32),
        ("shuffled", ctypes.c_int32),
        ("typed", ctypes.c_int32),
    )


class ChunkArgs(ctypes.Structure):
    """`Chunk` of cpu/locality.h."""

    _fields_ = (
        ("indptr", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("indptr_t", ctypes.c_void_p),
        ("indices_t", ctypes.c_void_p),
        ("first_row", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    )


class StreamArgs(ctypes.Structure):
    """`Stream` of cpu/stream.cpp."""

    _fields_ = (
        ("owner", ctypes.c_void_p),
        ("load", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("cost", ctypes.c_void_p),
        ("met", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("per_row", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("penalty", ctypes.c_double),
        ("per_vertex", ctypes.c_double),
    )


class ClustersArgs(ctypes.Structure):
    """`Clusters` of cpu/locality.cpp."""

    _fields_ = (
        ("cluster", ctypes.c_void_p),
        ("volume", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("active", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("batch", ctypes.c_void_p),
        ("total", ctypes.c_int64),
        ("scale", ctypes.c_int64),
        ("key", ctypes.c_uint64),
        ("moved", ctypes.c_int64),
    )


class BlockValuesArgs(ctypes.Structure):
    """`BlockValues` of cpu/block_values.cpp."""

    _fields_ = (
        ("store_indptr", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("indptr", ctypes.c_void_p),
        ("place", ctypes.c_void_p),
        ("store_indices", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("draw", ctypes.c_void_p),
        ("degrees", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("values_t", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("self_loops", ctypes.c_int32),
        ("normalised", ctypes.c_int32),
        ("by_weight", ctypes.c_int32),
    )


class RowScalesArgs(ctypes.Structure):
    """`RowScales` of cpu/scales.cpp."""

    _fields_ = (
        ("indptr", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("known", ctypes.c_void_p),
        ("num_entries", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("bad", ctypes.c_int64),
        ("self_loops", ctypes.c_int32),
        ("symmetric", ctypes.c_int32),
        ("status", ctypes.c_int32),
    )


class RelationMeansArgs(ctypes.Structure):
    """`RelationMeans` of cpu/relations.cpp."""

    _fields_ = (
        ("indptr", ctypes.c_void_p),
        ("place", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("store_indptr", ctypes.c_void_p),
        ("store_types", ctypes.c_void_p),
        ("store_degrees", ctypes.c_void_p),
        ("draw", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("bad", ctypes.c_int64),
        ("relations", ctypes.c_int32),
        ("wide", ctypes.c_int32),
        ("mode", ctypes.c_int32),
    )


class RelationOrderArgs(ctypes.Structure):
    """`RelationOrder` of cpu/relations.cpp."""

    _fields_ = (
        ("indptr", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("types", ctypes.c_void_p),
        ("work", ctypes.c_void_p),
        ("rows_out", ctypes.c_void_p),
        ("indices_out", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
        ("relations", ctypes.c_int32),
        ("wide", ctypes.c_int32),
    )


class EdgeTextArgs(ctypes.Structure):
    """`EdgeText` of cpu/parse.cpp."""

    _fields_ = (
        ("text", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
        ("out", ctypes.c_void_p * 4),
        ("kinds", ctypes.c_char * 4),
        ("columns", ctypes.c_int32),
        ("comma", ctypes.c_int32),
        ("edges", ctypes.c_int64),
        ("bad", ctypes.c_int64),
        ("odd", ctypes.c_int64),
    )


_P, _L, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
_U = ctypes.c_uint64
# Argument types by kernel; a name ending in _ exists for f32 and f64, and for bf16 if it takes dense rows; those with
# dense results for f32 beside bf16, either way or as far as runs need them, too.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "mggcn_spmm_": (_P,),
    "mggcn_gemm_": (_P,),
    "mggcn_ascending": (_P, _P, _L, _P, _I),
    "mggcn_reuse": (_P, _L, _L, _L, _L, _L, _P, _I),
    "mggcn_finish_": (_P, _L, _P, _L, _L, _L, _L, _P, _I),
    "mggcn_activation_grad_": (_P, _L, _P, _L, _P, _L, _L, _L, _L, _I, _D, _P, _P, _P, _L, _L, _I),
    "mggcn_sum_partials_": (_P, _P, _L),
    "mggcn_gather_rows_": (_P, _L, _P, _P, _L, _L, _L, _I),
    "mggcn_gather_sparse_": (_P, _P, _P, _P, _P, _L, _L, _L, _I, _P),
    "mggcn_gather_csr_": (_P, _P, _P, _L, _L, _P, _P, _L, _I, _L, _P, _P, _P, _P),
    "mggcn_transpose_csr_": (_P, _P, _P, _L, _L, _P, _P, _P, _P),
    "mggcn_scatter_rows_": (_P, _L, _P, _P, _L, _L, _L, _I),
    "mggcn_scatter_add_rows_": (_P, _L, _P, _P, _L, _L, _L, _I),
    "mggcn_dropout_values_": (_P, _P, _P, _P, _L, _P, _P, _I),
    "mggcn_edge_reduce_": (_P,),
    "mggcn_edge_gradient_": (_P,),
    "mggcn_maximum_": (_P,),
    "mggcn_maximum_combine_": (_P,),
    "mggcn_maximum_grad_": (_P,),
    "mggcn_attend_": (_P,),
    "mggcn_attend_combine_": (_P,),
    "mggcn_attend_sources_": (_P,),
    "mggcn_attend_destinations_": (_P,),
    "mggcn_layer_norm_": (_P,),
    "mggcn_layer_norm_grad_": (_P,),
    "mggcn_column_moments_": (_P,),
    "mggcn_batch_norm_": (_P,),
    "mggcn_column_products_": (_P,),
    "mggcn_batch_norm_grad_": (_P,),
    "mggcn_head_dots_": (_P, _L, _P, _L, _P, _L, _L, _L, _L, _I),
    "mggcn_softmax_xent_": (_P, _L, _L, _L, _P, _P, _D, _P, _D, _P, _P, _P, _L, _L, _P, _I),
    "mggcn_entry_loss_": (_P, _L, _L, _L, _P, _P, _D, _I, _P, _P, _P, _L, _L, _P, _I),
    "mggcn_entry_counts_": (_P, _L, _L, _L, _P, _P, _P, _I),
    "mggcn_confusion_": (_P, _L, _L, _L, _P, _P, _P, _I),
    "mggcn_tile_count": (_P, _P, _I),
    "mggcn_tile_fill": (_P, _P, _P, _P, _I, _I, _I),
    "mggcn_tile_sort": (_P, _L, _P, _P, _I, _I),
    "mggcn_tile_degree": (_P, _P, _I),
    "mggcn_required_reads": (_P, _P, _I),
    "mggcn_required_tiles": (_P, _I, _P, _P, _P, _I),
    "mggcn_block_values_": (_P, _P),
    "mggcn_row_scales_": (_P, _P),
    "mggcn_relation_means_": (_P, _P, _P),
    "mggcn_relation_order_": (_P, _P, _P),
    "mggcn_parse_edges": (_P, _I),
    "mggcn_balance": (_P, _L, _L, _P),
    "mggcn_libra_edges": (_P, _P, _L, _L, _I, _P),
    "mggcn_libra_assign": (_P, _L, _L),
    "mggcn_cut_roots": (_P, _L, _I, _L, _P, _P, _P),
    "mggcn_cut_isolated": (_P, _L, _I, _P, _I, _L, _P),
    "mggcn_cut_edge_parts": (_P, _P, _L, _L, _I, _P, _P, _I, _P, _P),
    "mggcn_locality_move": (_P, _P),
    "mggcn_locality_cut": (_P, _P, _I, _U, _U, _P, _P),
    "mggcn_locality_csr": (_P, _L, _L, _P, _P),
    "mggcn_locality_group": (_P, _L, _L, _P, _P),
    "mggcn_locality_gaps": (_P, _P, _P),
    "mggcn_stream": (_P, _P),
    "mggcn_triangles": (_P, _P, _L, _P, _P),
    "mggcn_reuse_trace": (_P, _P, _I, _U, _P, _P, _P),
    "mggcn_reuse_distances": (_P, _P, _P, _L, _I, _P, _P, _P),
    "mggcn_sample_batch": (_P, _P, _L, _P, _I, _I),
    "mggcn_sample_rows": (_P,),
    "mggcn_number_columns": (_P, _P, _L, _P, _L, _L),
    "mggcn_pack": (_P, _L),
    "mggcn_share_count": (_P,),
    "mggcn_share_cut": (_P,),
    "mggcn_history_store": (_P,),
    "mggcn_history_find": (_P,),
    "mggcn_history_copy": (_P, _L, _P, _P, _L, _P, _L, _L, _I),
    "mggcn_history_shares_": (_P, _P, _P, _P, _P, _L),
}


def path() -> Path:
    """Return the path of the compiled library.

    Raises: BackendError if mggcn is neither installed nor built in place, or was built in place from older sources.
    """
    try:
        found = Path(str(metadata.distribution("mggcn").locate_file(LIBRARY)))
    except metadata.PackageNotFoundError as error:
        found = BUILD / Path(LIBRARY).name
        if not found.exists():
            in_place = " or, in a checkout, python -m mggcn.native" if (CHECKOUT / "CMakeLists.txt").exists() else ""
            raise BackendError(
                f"mggcn is imported but not installed, so its CPU kernels are missing; {_REMEDY}{in_place}"
            ) from error
        _check_age(found)
    if not found.exists():
        raise BackendError(f"the CPU kernels are missing at {found}; {_REMEDY}")
    return found


def _check_age(built: Path) -> None:
    """Raise BackendError if a source is newer than the library: its kernels may take other arguments than are passed."""
    changed = built.stat().st_mtime_ns
    newer = [source for source in (CHECKOUT / "cpu").glob("*") if source.stat().st_mtime_ns > changed]
    if newer:
        raise BackendError(
            f"{newer[0].relative_to(CHECKOUT)} is newer than the CPU kernels in {built.parent}; "
            "build them again: python -m mggcn.native"
        )


def build() -> Path:
    """Compile the kernels of a checkout in place, as an installation would, and return the library.

    Cost: half a minute once, then what changed. Raises: BackendError with what CMake or the compiler said.
    """
    source, target = str(CHECKOUT), str(BUILD)
    jobs = str(len(os.sched_getaffinity(0)))  # without a number make starts all compilers at once, 200 MB each
    for step in (["-S", source, "-B", target, "-DCMAKE_BUILD_TYPE=Release"], ["--build", target, "--parallel", jobs]):
        try:
            done = subprocess.run(["cmake", *step], capture_output=True, text=True, check=False)
        except OSError as error:
            raise BackendError(
                f"building in place needs CMake ({error}): apt-get install cmake, or pip install ."
            ) from error
        if done.returncode:
            raise BackendError(f"building the CPU kernels in {BUILD} failed:\n{done.stdout}{done.stderr}")
    built = BUILD / Path(LIBRARY).name
    built.touch()  # a source that nothing includes makes no new library
    return built


def installed_or_built() -> Path:
    """Return the library of an installation, or else that of this checkout, built as its sources are now."""
    try:
        metadata.distribution("mggcn")
    except metadata.PackageNotFoundError:
        return build()
    return path()


def limit_spinning() -> None:
    """Let OpenMP threads wait briefly, then sleep: on busy cores libgomp's default spins a hundred times as long as it
    works.

    To be called before torch is loaded; what the user has set for libgomp stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library, once per process. Raises: BackendError if it is missing or cannot be loaded."""
    try:
        return ctypes.CDLL(str(path()))
    except OSError as error:
        raise BackendError(f"the CPU kernels cannot be loaded: {error}; {_REMEDY}") from error


def isas() -> tuple[str, ...]:
    """Return the instruction sets of this build that the processor has, slowest first."""
    return dense_isas()[:2]


def isa() -> str:
    """Return the instruction set whose kernels run, except for dense products."""
    return isas()[-1]


def dense_isas() -> tuple[str, ...]:
    """Return the instruction sets of dense products' kernels that the processor has, slowest first."""
    return ("baseline", "avx2", "avx512", "avx512_bf16")[: library().mggcn_isas()]


def dense_isa() -> str:
    """Return the instruction set whose kernels run dense products."""
    return dense_isas()[-1]


def sets_in_use() -> str:
    """Return the instruction sets whose kernels run, for records and reports."""
    return isa() if dense_isa() == isa() else f"{isa()}, dense products up to {dense_isa()}"


def require_threads() -> None:
    """Check that kernels can run. Raises: BackendError in a forked child that would wait for its parent's threads."""
    if forks.lacks_threads():
        raise BackendError(
            "this process was forked from one that has computed, and lacks its threads, which could not be ended before: "
            'it would wait for ever; start it with multiprocessing.get_context("spawn") or "forkserver", or fork before '
            "anything is computed"
        )


@functools.cache
def kernel(name: str, kind: str = "", set_: str = "") -> Callable[..., None]:
    """Return a kernel by name and type ("mggcn_spmm_", "f32"); `set_` overrides the processor's best set, for tests.

    Raises: BackendError as `require_threads` does.
    """
    require_threads()
    _forget_in_children()
    function = getattr(library(), f"{name}{kind}_{set_ or isa()}")
    function.argtypes = _SIGNATURES[name]
    function.restype = None
    return function  # type: ignore[no-any-return]


_clear_kernels = kernel.cache_clear


@functools.cache
def _forget_in_children() -> None:
    """Have forked children ask `require_threads` again."""
    os.register_at_fork(after_in_child=_clear_kernels)


if __name__ == "__main__":
    print(installed_or_built())
