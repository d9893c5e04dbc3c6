# barter in a container.
#
#   docker build -t barter .                                              # CPU
#   docker build -t barter:cuda --build-arg TORCH=cu128 .                 # CUDA; needs the NVIDIA container toolkit to run
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" barter run # five clients on handwritten digits
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" --gpus all barter:cuda run config.toml
#
# TORCH is the suffix of PyTorch's package index: cpu, cu126, cu128, ...

FROM python:3.12-slim-bookworm AS build
ARG TORCH=cpu
ARG EXTRAS=report,onnx,privacy,flower
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN python -m venv /opt/barter
ENV PATH=/opt/barter/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
# Install torch first: it is large and seldom changes, so rebuilds reuse its layer.
RUN pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${TORCH}" \
        "$(grep '^torch==' constraints.txt)" "$(grep '^torchvision==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

FROM python:3.12-slim-bookworm
# A C compiler and OpenSSL: Triton compiles kernels for GPUs, and `barter flower init` makes certificates. Versions are
# those of the Debian release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev openssl \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home barter \
    && mkdir /work \
    && chown barter:barter /work
COPY --from=build /opt/barter /opt/barter
# A user given by --user has no home directory, so caches and settings go to the mounted folder.
ENV PATH=/opt/barter/bin:$PATH \
    HOME=/work \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
ENTRYPOINT ["barter"]
CMD ["run"]
