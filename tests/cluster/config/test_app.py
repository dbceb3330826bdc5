from __future__ import annotations

import pytest

from cluster.config.app import AppArgs, ServiceConfig
from cluster.config.base import keys_of
from cluster.config.files import load_config, merged
from cluster.config.limits import Limits
from cluster.config.models import memory_amount
from cluster.models.demos import demo_folder
from cluster.models.sources import draft_source, target_source
from specdec.protocol.leases import Times


def test_defaults_are_the_demo_pair_on_loopback():
    config = load_config()
    assert config.is_demo
    assert config.has_draft
    assert (config.host, config.port, config.num_speculative_tokens) == ("127.0.0.1", 8000, "auto")
    assert config.model_name == "specdec-demo"


def test_the_other_demo_target_has_a_name_and_a_folder_of_its_own_and_the_same_draft():
    plain, hybrid = load_config(), load_config(None, {"demo": "hybrid"})
    assert hybrid.is_demo
    assert hybrid.model_name == "specdec-demo-hybrid"
    assert target_source(hybrid).path != target_source(plain).path
    assert target_source(hybrid).path == str(demo_folder("hybrid"))
    assert draft_source(hybrid) == draft_source(plain)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("auto", "auto"),
        (0.5, 0.5),
        ("0.25", 0.25),
        (1, 1.0),
        (1 << 30, 1 << 30),
        ("512MiB", 512 << 20),
        ("2 GB", 2 * 10**9),
    ],
)
def test_memory_is_a_fraction_or_bytes(given, read):
    found = memory_amount(given)
    assert found == read
    assert type(found) is type(read)


def test_a_string_stands_for_a_model_and_flags_win_over_the_file(tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text(
        "target: some/target\ndraft:\n  model: some/draft\n  dtype: bfloat16\n"
        "port: 9000\nlimits: {max_queued_requests: 7}\n"
    )
    config = load_config(path, {"draft.model": "other/draft", "target.dtype": "float32", "port": "9001"})
    assert (config.target.model, config.target.dtype) == ("some/target", "float32")
    assert (config.draft.model, config.draft.dtype) == ("other/draft", "bfloat16")
    assert (config.port, config.limits.max_queued_requests) == (9001, 7)
    assert config.model_name == "some/target"


def test_a_target_alone_has_no_draft():
    assert not load_config(None, {"target.model": "x"}).has_draft


@pytest.mark.parametrize(
    ("draft", "found"),
    [
        ({}, (True, True, False, True)),
        ({"method": "model"}, (True, True, False, True)),
        ({"method": "ngram"}, (False, False, True, False)),
        ({"method": ["ngram"]}, (False, False, True, False)),
        ({"method": ["ngram", "model"]}, (True, True, True, True)),
        ({"method": "ngram+model", "application": "drafts"}, (True, False, True, True)),
        ({"method": "medusa"}, (False, False, False, True)),
        ({"method": ["ngram", "medusa"], "heads": "h"}, (False, False, True, True)),
        ({"method": ["ngram", "model", "medusa"]}, (True, True, True, True)),
    ],
)
def test_the_method_says_who_drafts(draft, found):
    config = AppArgs.model_validate({"draft": draft})
    assert (config.has_draft, config.has_own_draft, config.drafts_from_tokens, config.is_auto) == found
    assert config.speculates
    assert (draft_source(config) is not None) == config.has_own_draft


def test_an_empty_file_says_nothing(tmp_path):
    path = tmp_path / "service.yaml"
    for text in ("# nothing\n", "target:\n", "target: {model: }\n"):
        path.write_text(f"{text}demo: plain\n")
        assert load_config(path) == load_config(None, {"demo": "plain"})


def test_the_applications_arguments_are_all_but_the_address():
    config = load_config(
        None, {"target.model": "x", "target.token": "secret", "target.kv_cache_memory": "0.5", "port": 1234}
    )
    args = config.app_args()
    assert {path.partition(".")[0] for path, _ in keys_of(ServiceConfig)} - set(AppArgs.model_fields) == {
        "host",
        "port",
        "tls",
        "tracing",
        "update_timeout_s",
    }
    given = {"target": {"model": "x", "token": "secret", "kv_cache_memory": 0.5}, "ui": "on"}
    assert args == AppArgs.model_validate(given)
    assert args.target.token.get_secret_value() == "secret"
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("given", "ui"),
    [
        ({}, "on"),
        ({"host": "::1"}, "on"),
        ({"host": "localhost"}, "on"),
        ({"host": "127.1.2.3", "ui": "off"}, "off"),
        ({"host": "0.0.0.0"}, "auto"),
        ({"host": "gpu7.example.org"}, "auto"),
        ({"host": "0.0.0.0", "ui": "on"}, "on"),
        ({"ui": False}, "off"),  # what YAML makes of off
        ({"host": "::", "ui": True}, "on"),
    ],
)
def test_the_page_is_served_on_loopback_or_where_it_is_asked_for(given, ui):
    assert load_config(None, given).app_args().ui == ui


def test_merging_changes_neither_argument():
    data = {"limits": {"max_body_bytes": 2048}}
    assert merged(ServiceConfig, data, {"limits.max_queued_requests": 1})["limits"] == {
        "max_body_bytes": 2048,
        "max_queued_requests": 1,
    }
    assert data == {"limits": {"max_body_bytes": 2048}}


def test_the_largest_body_follows_the_longest_sequence():
    assert Limits().body_bytes(131_072) == 2 << 20
    assert Limits(max_body_bytes=2048).body_bytes(131_072) == 2048


def test_the_protocols_times_are_the_librarys_own():
    given = ServiceConfig().protocol.model_dump()
    assert Times(**given) == Times()


def test_every_key_is_documented():
    from cluster.cli.flags import config_keys

    assert all(field.description for _, field in config_keys())
