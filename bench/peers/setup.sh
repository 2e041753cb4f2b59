#!/bin/sh
# Makes the environment of the libraries that mggcn is compared with: torch for CPUs, PyG, DGL, SciPy and, where they can
# be had, MKL and torch-sparse. Each is then tried on a tiny graph: FOLDER/peers.json says which ones work.
# Usage: bench/peers/setup.sh [FOLDER]    FOLDER: default build/peers. PYTHON: the interpreter, default python3.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-"$root/build/peers"}

"${PYTHON:-python3}" -m venv "$folder"
install() {
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints-cpu.txt" "$@"
}

install torch
install torch_geometric scipy

# DGL 2.1.0 was made for torch 2.2. Its data loaders (graphbolt) are one library per version of torch and none of them fits;
# nothing here needs them, and with an empty module the rest works. Of its requirements torchdata serves them alone.
# Without packaging it looks for a copy in setuptools, which later ones (from 67 on) do not have and torch does not bear.
install networkx requests tqdm psutil pandas packaging
install --no-deps "dgl==2.1.0"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
: > "$site/dgl/graphbolt/__init__.py"

install mkl sparse-dot-mkl || echo "MKL cannot be installed here: it is left out"
# From source it takes a quarter of an hour, so only as a wheel.
install --only-binary=:all: torch-sparse torch-scatter || echo "no wheels of torch-sparse here: it is left out"

case $folder in /*) ;; *) folder="$PWD/$folder" ;; esac

# PyG's NeighborLoader needs torch-sparse's sampling operator alone, which two files of its sources make: a minute or two.
sources=$(mktemp -d)
flags='import torch
from torch.utils.cpp_extension import include_paths, library_paths
print(*(f"-I{path}" for path in include_paths()), *(f"-L{path} -Wl,-rpath,{path}" for path in library_paths()),
      f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")'
# shellcheck disable=SC2046
install setuptools wheel &&
  "$folder/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --no-binary torch-sparse --dest "$sources" "torch-sparse==0.6.18" &&
  tar -xzf "$sources"/torch_sparse-*.tar.gz -C "$sources" --strip-components 1 &&
  "${CXX:-g++}" -O3 -std=c++20 -shared -fPIC -fopenmp -DAT_PARALLEL_OPENMP -w \
    -I"$sources/third_party/parallel-hashmap" -I"$sources/csrc" $("$folder/bin/python" -c "$flags") \
    "$sources/csrc/neighbor_sample.cpp" "$sources/csrc/cpu/neighbor_sample_cpu.cpp" \
    -ltorch -ltorch_cpu -lc10 -o "$folder/neighbor_sample.so" ||
  echo "torch-sparse's sampling operator cannot be compiled here: PyG's sampling is left out"
rm -rf "$sources"

cd "$root" && exec "$folder/bin/python" -m bench.peers.prove "$folder/peers.json"
