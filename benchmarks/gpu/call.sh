#!/usr/bin/env bash
# One call on a machine that has torch, Triton and transformers, with what benchmarks/gpu/pack.sh has packed:
#
#   bash benchmarks/gpu/call.sh a|b|c|d [--small]
#
# Figures are printed as they come; $OUT (build/gpu/out by default) gets all of it. Each call stands alone, and ends by
# itself within ten minutes. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
for archive in build/gpu/*.tar.xz; do tar --extract --file "$archive" --directory "$site"; done
python=${PYTHON:-python3}
# Ray waits 15 s for an agent that imports much: it must not compile all that first.
"$python" -m compileall -q -j 0 "$site" benchmarks cluster deployments specdec 2> /dev/null || true
export PYTHONPATH=$PWD:$site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error RAY_USAGE_STATS_ENABLED=0
"$python" -m benchmarks.gpu --out "${OUT:-build/gpu/out}" --call "$@"
