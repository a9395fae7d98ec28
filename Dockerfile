# An image for GPU nodes. It has not been built or run by the tests, which only read it.
#
#   docker build -t rolemesh .
#   docker build -t rolemesh --build-arg EXTRAS=train,vllm .
#   docker build -t rolemesh --build-arg BASE=IMAGE --build-arg TORCH=image .    keeps the torch that IMAGE has
#
# torch's wheels bring CUDA's libraries; a driver on the host and NVIDIA's container runtime are what else is needed.
ARG BASE=python:3.11-bookworm
FROM ${BASE}
# pinned: as constraints-gpu.txt says; image: as the base has it
ARG TORCH=pinned
ARG EXTRAS=train
# an index of torch's builds; empty: pip's own
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/rolemesh
COPY . .
# torch goes first: asked for later, or in a range, pip may take another build of it.
RUN set -e; \
    if [ "${TORCH}" = image ]; then \
        python launch/scripts/keep_torch.py > pins.txt; \
    else \
        echo "-c constraints-gpu.txt" > pins.txt; \
        python -m pip install -c pins.txt ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch; \
    fi; \
    python -m pip install -c pins.txt ".[${EXTRAS}]"; \
    python -m pip check
WORKDIR /
CMD ["rolemesh", "--help"]
