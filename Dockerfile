# mggcn on NVIDIA GPUs. docs/install.md says how to build and run it; it has not been built by the project's CI.
#
#   docker build -t mggcn .                                          CUDA 13: Turing to Blackwell
#   docker build -t mggcn --build-arg CUDA_VERSION=12.6.3 \
#     --build-arg TORCH_INDEX_URL=<torch's index for CUDA 12.6> .    CUDA 12: Volta (V100) to Hopper
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 mggcn  the doctor
#   docker build --secret id=pip,src=pip.conf ...                    an index of your own: its password stays out of the image
ARG CUDA_VERSION=13.0.2
ARG UBUNTU_VERSION=24.04

# The CPU kernels are compiled here, and METIS where it has no wheel; no compiler reaches the image below.
FROM ubuntu:${UBUNTU_VERSION} AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ make python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY cpu cpu
COPY cuda cuda
COPY mggcn mggcn
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /venv \
 && /venv/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . "pymetis>=2025.2"

# The base image has the driver's interface alone: CUDA's libraries and NCCL are those that torch brings, and no others.
FROM nvidia/cuda:${CUDA_VERSION}-base-ubuntu${UBUNTU_VERSION}
ARG CUDA_VERSION
# Index of torch's builds for this CUDA (pytorch.org, "Get started"); without it torch is pip's default build.
ARG TORCH_INDEX_URL
# For example ==2.11.0; without it the newest.
ARG TORCH_VERSION
LABEL org.opencontainers.image.title="mggcn" \
      org.opencontainers.image.description="Whole-graph training of graph neural networks on NVIDIA GPUs" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
# tini reaps the processes of ranks and passes signals on where nobody says --init.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 python3 python3-venv tini \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/mggcn/bin:${PATH}
# The one installation of torch, first, and only if it is built for the image's CUDA.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/mggcn \
 && pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} "torch${TORCH_VERSION}" \
 && python -c 'import sys, torch; want, got = sys.argv[1].split(".")[0], torch.version.cuda; sys.exit(None if got and got.split(".")[0] == want else f"torch {torch.__version__} is not built for CUDA {want}: pass TORCH_INDEX_URL")' "${CUDA_VERSION}" \
 && pip freeze --local --all > /opt/mggcn/torch.txt
# All that is there is held: neither mggcn nor CuPy may bring another torch or NCCL.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-cache-dir --find-links /wheels --constraint /opt/mggcn/torch.txt "$(ls /wheels/mggcn-*.whl)[report,tensorboard,metis,parquet,zstd,ogb,sweep]" "cupy-cuda${CUDA_VERSION%%.*}x" \
 && pip check
RUN useradd --create-home --uid 1010 mggcn \
 && install --directory --owner mggcn --group mggcn /workspace
# Compiled kernels; writable for any user that `docker run --user` names.
ENV CUPY_CACHE_DIR=/tmp/mggcn-kernels \
    MPLCONFIGDIR=/tmp/mggcn-matplotlib \
    LOGNAME=mggcn \
    PYTHONUNBUFFERED=1
USER mggcn
WORKDIR /workspace
# --quick computes nothing on the GPUs, so that a training beside it keeps their memory and time.
HEALTHCHECK --interval=10m --timeout=2m --start-period=2m --retries=2 CMD ["mggcn", "doctor", "--quick"]
ENTRYPOINT ["tini", "--", "mggcn"]
CMD ["doctor"]
