"""Sections of the configuration about limits and access, and where API keys come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray._private.authentication import authentication_utils

from cluster.config.app import ServiceConfig
from cluster.config.base import validated
from cluster.config.environment import api_keys, check_ray
from cluster.config.limits import Tls
from specdec.core.errors import InvalidParameterError

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who may call\n\nalice: {ALICE}\n")
    assert api_keys(str(file), {"SPECDEC_API_KEYS": f" bob = {BOB},"}) == {"alice": ALICE, "bob": BOB}
    assert api_keys(None, {}) == {}


@pytest.mark.parametrize(
    "line", [ALICE, f": {ALICE}", "alice: short", "alice:", f"alice: {ALICE} {BOB}", f"alice: {ALICE}\nalice: {BOB}"]
)
def test_what_are_no_keys_with_names_is_refused_and_not_told(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(line)
    with pytest.raises(InvalidParameterError, match="keys, line") as caught:
        api_keys(str(file), {})
    assert "0123456789" not in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidParameterError, match="nowhere"):
        api_keys("/nowhere", {})


@pytest.mark.parametrize("text", ["", "\n", "# alice: later\n"])
def test_a_file_without_a_key_does_not_open_the_service(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    for environment in ({}, {"SPECDEC_API_KEYS": f"bob={BOB}"}):
        with pytest.raises(InvalidParameterError, match="has no key in it") as caught:
            api_keys(str(file), environment)
        assert caught.value.parameter == "access.api_keys_file"


@pytest.mark.parametrize("is_on", [True, False])
def test_a_ray_without_tokens_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: is_on)
    check_ray(allow_unauthenticated=True)
    if is_on:
        check_ray(allow_unauthenticated=False)
    else:
        with pytest.raises(InvalidParameterError, match="allow_unauthenticated_ray"):
            check_ray(allow_unauthenticated=False)


def test_https_needs_both_files() -> None:
    both = {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"}
    assert validated(ServiceConfig, {"tls": both}).tls.http_options() == both
    assert Tls().http_options() == {}
    with pytest.raises(InvalidParameterError, match="need each other"):
        Tls(ssl_certfile="cert.pem").http_options()


@pytest.mark.parametrize("origins", ["ftp://x", "https://a.example/path", ["https://a b"], 1])
def test_what_is_no_origin_is_refused(origins: object) -> None:
    with pytest.raises(InvalidParameterError, match="allowed_origins"):
        validated(ServiceConfig, {"access": {"allowed_origins": origins}})
