"""Sections of the configuration about limits and access, and where API keys come from."""

from __future__ import annotations

from pathlib import Path

from cluster.config.app import ServiceConfig
from cluster.config.base import validated
from cluster.config.environment import api_keys
from cluster.config.limits import Tls

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who may call\n\nalice: {ALICE}\n")
    assert api_keys(str(file), {"SPECDEC_API_KEYS": f" bob = {BOB},"}) == {"alice": ALICE, "bob": BOB}
    assert api_keys(None, {}) == {}


def test_https_takes_both_files() -> None:
    both = {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"}
    assert validated(ServiceConfig, {"tls": both}).tls.http_options() == both
    assert Tls().http_options() == {}
