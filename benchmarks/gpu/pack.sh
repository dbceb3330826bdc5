#!/usr/bin/env bash
# Packs what a GPU machine without a network lacks: libraries beside torch, Triton and transformers, and what is needed of
# Ray, and of OpenVINO for drafts on the host.
#
#   benchmarks/gpu/pack.sh [FOLDER]           archives, into build/gpu by default; prints what travels, in MiB
#   benchmarks/gpu/pack.sh --copy FOLDER      the tree without weights, as it travels
#   benchmarks/gpu/pack.sh --strip            takes weights out of this working tree: `git checkout .` brings them back
#
# Shapes are made on the device, so that no section reads weights. The machine has Python 3.12 on x86-64.
set -euo pipefail
cd "$(dirname "$0")/../.."

MOST_MIB=64
# Versions are those of constraints.txt and requirements.lock, or the newest.
SITE=(
    accelerate llguidance msgspec prometheus-client psutil torchao
    aiohttp_cors annotated-doc annotated-types argcomplete colorful fastapi google-api-core googleapis-common-protos
    google-auth grpcio-reflection jsonschema jsonschema-specifications opencensus opencensus-context opentelemetry-api
    opentelemetry-exporter-prometheus opentelemetry-proto opentelemetry-sdk opentelemetry-semantic-conventions platformdirs
    proto-plus pydantic pydantic-core referencing rpds-py smart_open starlette typing-inspection uvicorn watchfiles
)
PLATFORMS=(manylinux_2_{34,31,28,27,24,17,12,5}_x86_64 manylinux2014_x86_64 manylinux1_x86_64)

tracked() {  # that lie here and are no weights
    git ls-files --cached --others --exclude-standard | grep -v '\.safetensors$' | while read -r file; do
        [ ! -e "$file" ] || echo "$file"
    done
}

weights() { git ls-files '*.safetensors'; }

case ${1:-} in
    --copy)
        mkdir -p "$2"
        tracked | tar --create --files-from=- | tar --extract --directory="$2"
        exit ;;
    --strip)
        git diff --quiet HEAD -- $(weights) || { echo "Weights differ from the last commit: commit them first" >&2; exit 1; }
        rm -f $(weights)
        exit ;;
esac

out=${1:-build/gpu}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sed -n 's/^\([a-z0-9._-]*==[^ ;]*\) \\$/\1/p' requirements.lock > "$work/locked.txt"
fetch() {
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp "${PLATFORMS[@]/#/--platform=}" --constraint constraints.txt --constraint "$work/locked.txt" --dest "$work/$1" "${@:2}"
    python3 - "$work/$1" "$work/$1-site" <<'PYTHON'
import pathlib, sys, zipfile
for wheel in pathlib.Path(sys.argv[1]).glob("*.whl"):
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(sys.argv[2])
PYTHON
}
pack() { tar --create --directory="$work/$1-site" --exclude=tests --exclude='*.pyi' . | xz --threads=0 -6 > "$out/$1.tar.xz"; }

fetch site "${SITE[@]}"
# What asks for the version of an installed distribution finds one.
mkdir "$work/site-site/specdec_serve-0.dist-info"
printf 'Metadata-Version: 2.1\nName: specdec-serve\nVersion: 0\n' > "$work/site-site/specdec_serve-0.dist-info/METADATA"
pack site
fetch ray ray
(
    cd "$work/ray-site"
    rm -rf ray/{rllib,tune,train,data,air,llm,jars,cpp,include} ray/dashboard/client ray-*.data
    strip --strip-unneeded ray/_raylet.so ray/core/src/ray/raylet/raylet ray/core/src/ray/gcs/gcs_server
    # Wheels say what may be run, and zipfile does not take it over.
    chmod +x ray/core/src/ray/raylet/raylet ray/core/src/ray/gcs/gcs_server
)
pack ray
fetch openvino openvino
(
    cd "$work/openvino-site/openvino"
    # It reads models by its frontend for torch.
    rm -rf libs/libopenvino_{intel_gpu,intel_npu,auto,auto_batch,hetero}_plugin.so libs/cache.json include cmake tools \
        libs/libopenvino_{gguf,jax,onnx,paddle,tensorflow,tensorflow_lite}_frontend.so* \
        frontend/{gguf,jax,onnx,paddle,tensorflow}/py_*.so
)
pack openvino

tree_kib=$(tracked | tr '\n' '\0' | du --files0-from=- --apparent-size -ck | tail -n 1 | cut -f 1)
packed_kib=$(du --apparent-size -ck "$out"/*.tar.xz | tail -n 1 | cut -f 1)
awk -v tree="$tree_kib" -v packed="$packed_kib" -v most="$MOST_MIB" 'BEGIN {
    printf "tree without weights %.1f MiB, packed %.1f MiB, together %.1f of %d MiB\n", tree / 1024, packed / 1024, (tree + packed) / 1024, most
    exit tree + packed > 1024 * most
}'
