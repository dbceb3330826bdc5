from __future__ import annotations

import pytest

from cluster.config.app import AppArgs, ServiceConfig
from cluster.config.base import key_paths
from cluster.config.files import load_config, merged
from cluster.config.models import memory_amount
from cluster.models.demos import demo_folder
from cluster.models.sources import draft_source, target_source
from specdec.core.errors import InvalidParameterError
from specdec.protocol.leases import Times


def refused(overrides):
    with pytest.raises(InvalidParameterError) as caught:
        load_config(None, overrides)
    return caught.value.parameter, str(caught.value)


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
    ("key", "nearest"),
    [
        ("prot", "port"),
        ("num_speculative_token", "num_speculative_tokens"),
        ("limits.max_boddy_bytes", "limits.max_body_bytes"),
        ("max_body_bytes", "limits.max_body_bytes"),
        ("actors.draft.num_gpu", "actors.draft.num_gpus"),
        ("limits.port", "port"),
        ("target.modell", "target.model"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key, nearest):
    parameter, message = refused({key: 1})
    assert parameter == key
    assert f"unknown key '{key}'" in message
    assert f"'{nearest}'" in message


def test_an_unknown_key_is_refused_in_serves_own_arguments_too():
    with pytest.raises(ValueError, match=r"unknown key 'limits\.max_body_byte'.*'limits\.max_body_bytes'"):
        AppArgs.model_validate({"limits": {"max_body_byte": 5}})


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("port", 65536, "a whole number, at least 0 and at most 65535"),
        ("port", -1, "at least 0 and at most 65535"),
        ("port", "http", "a whole number"),
        ("port", True, "true and false are not allowed"),
        ("num_speculative_tokens", 65, "'auto' or a whole number of tokens, at least 0 and at most 64"),
        ("num_speculative_tokens", "many", "'auto' or a whole number"),
        ("num_speculative_tokens", -1, "'auto' or a whole number"),
        ("demo", "default", "'plain', 'hybrid' or 'chat'"),
        ("block_size", 0, "at least 1 and at most 1024"),
        ("max_model_len", 1, "at least 2"),
        ("limits.max_body_bytes", 10, "at least 1024"),
        ("protocol.lease_s", 0, "more than 0 and at most 3600"),
        ("protocol.lease_s", float("nan"), "more than 0"),
        ("replicas.target", 0, "at least 1 and at most 1024, or a range such as {min: 1, max: 4}"),
        ("replicas.target", "many", "a whole number, at least 1"),
        ("replicas.target", True, "true and false are not allowed"),
        ("replicas.target", {"min": 1}, "max: must be a whole number, at least 1 and at most 1024"),
        ("replicas.target", {"min": 3, "max": 2}, "min must be at most max (2)"),
        ("replicas.target", {"max": 2, "maxx": 3}, "unknown key 'maxx'; the nearest known key is 'max'"),
        ("replicas.target", {"min": 0, "max": 2}, "min must be at least 1: nobody would answer"),
        ("replicas.draft", {"min": 0, "max": 0}, "max: must be a whole number, at least 1 and at most 1024"),
        ("speculation_mode", "both", "'auto', 'sequential', 'overlap' or 'outcomes'"),
        ("target.dtype", "int8", "'float32'"),
        ("target.device", "gpu", "auto, cpu, cuda or cuda:N"),
        ("draft.kv_cache_memory", "1.5", "a fraction of the free memory in (0, 1]"),
        ("log_level", "loud", "'debug'"),
        ("acceptance", "typical", "'coupled' or 'rejection'"),
        ("logits_processors", ["masks"], "a list of import strings of the form 'package.module:name'"),
        ("logits_processors", "masks:", "a list of import strings"),
        ("logits_processors", [3], "a list of import strings"),
        ("logits_processors", "", "a list of import strings"),
        ("limits", 3, "must hold keys and values"),
        ("tool_parser", "qwen", "auto, hermes, llama3, response_template, or an import string"),
        ("tool_parser", "my.parsers:", "an import string"),
        ("reasoning_tags", "<think>", "two tags with a comma between them"),
        ("reasoning_tags", "a,b,c", "two tags"),
        ("reasoning_tags", True, "true and false are not allowed"),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_is_allowed(key, value, allowed):
    parameter, message = refused({key: value})
    assert parameter == key
    assert allowed in message


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"draft.model": "x"}, "needs a target"),
        ({"demo": "hybrid", "target.model": "x"}, "demo: hybrid is a target itself: give no other target with it"),
        ({"target.revision": "main"}, "need a model"),
        ({"target.model": "x", "target.device": "cpu", "target.device_map": "auto"}, "exclude each other"),
        ({"target.model": "x", "acceptance": "rejection"}, "acceptance: rejection needs drafts"),
        ({"protocol.renew_interval_s": 4, "protocol.lease_s": 5}, "at most a third of lease_s"),
    ],
)
def test_what_would_be_ignored_or_cannot_work_is_refused(overrides, named):
    assert named in refused(overrides)[1]


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


@pytest.mark.parametrize("given", [0, -1, 2, 1.5, "1 kB", "much", "nan", "512 cows", None])
def test_other_amounts_of_memory_are_refused(given):
    with pytest.raises(ValueError, match="fraction of the free memory"):
        memory_amount(given)


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
        ({"method": "ngram+model", "pool": "drafts"}, (True, False, True, True)),
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


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"target": "t", "draft": {"method": "ngram+model"}}, "ngram\\+model needs a draft model"),
        ({"target": "t", "draft": {"method": "ngram", "model": "d"}}, "method ngram has no draft model"),
        ({"draft": {"method": "ngram", "pool": "drafts"}}, "method ngram has no draft model"),
        ({"draft": {"method": "ngram", "kv_cache_memory": 0.5}}, "method ngram has no draft model"),
        ({"draft": {"method": ["model", "grams"]}}, "must be model, ngram, medusa, or package.module:name"),
        ({"draft": {"method": "ngram+ngram"}}, "each once"),
        ({"draft": {"method": "ngram+my.module:drafter"}}, "must name one drafter from tokens"),
        ({"target": "t", "draft": {"method": "medusa"}}, "name the target's heads"),
        ({"demo": "hybrid", "draft": {"method": "medusa"}}, "name the target's heads"),
        ({"target": "t", "draft": {"method": "model+medusa", "heads": "h"}}, "model\\+medusa needs a draft model"),
        (
            {"target": "t", "draft": {"method": "medusa", "heads": "h", "model": "d"}},
            "method medusa has no draft model",
        ),
        ({"draft": {"heads": "h"}}, "heads needs method medusa"),
        ({"draft": {"method": "ngram", "tree_tokens": 8}}, "tree_tokens needs heads"),
        ({"draft": {"method": "medusa", "tree_tokens": 65}}, "64"),
        ({"target": {"model": "t", "engine": "vllm"}, "draft": {"method": "medusa", "heads": "h"}}, "takes no heads"),
    ],
)
def test_a_method_that_cannot_be_is_refused(data, named):
    with pytest.raises(ValueError, match=named):
        AppArgs.model_validate(data)


def test_look_up_alone_takes_both_rules():
    assert AppArgs.model_validate({"draft": {"method": "ngram"}, "acceptance": "rejection"}).speculates


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("port: [", "not YAML"),
        ("- port", "keys and values"),
        ("7: 8", "keys and values"),
        ("prot: 1", "nearest known key is 'port'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, text, named):
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(InvalidParameterError, match=named) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidParameterError, match=r"missing\.yaml: cannot be read"):
        load_config(tmp_path / "missing.yaml")


def test_an_empty_file_says_nothing(tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text("# nothing\n")
    assert load_config(path, {"demo": "plain"}) == load_config(None, {"demo": "plain"})


@pytest.mark.parametrize(
    "text", ["", "target:\n", "target: {model: }\n", "target: {dtype: float32}\n", "limits: {retry_after_s: 3}\n"]
)
def test_a_file_gets_the_demo_pair_by_name_only(tmp_path, text):
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(InvalidParameterError, match=r"target: .*; name a model, or ask for .* with demo: plain"):
        load_config(path)
    path.write_text(f"{text}demo: plain\n")
    assert load_config(path).model_name == "specdec-demo"


@pytest.mark.parametrize("target", [None, {"model": None}])
def test_an_empty_target_is_refused_in_serves_arguments_too(target):
    with pytest.raises(ValueError, match="target: is empty"):
        AppArgs.model_validate({"target": target})


def test_the_applications_arguments_are_all_but_the_address():
    config = load_config(
        None, {"target.model": "x", "target.token": "secret", "target.kv_cache_memory": "0.5", "port": 1234}
    )
    args = config.app_args()
    assert {path.partition(".")[0] for path in key_paths(ServiceConfig)} - set(AppArgs.model_fields) == {
        "host",
        "port",
        "separate_draft",
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


def test_a_wrong_switch_says_what_is_allowed():
    with pytest.raises(InvalidParameterError, match="ui: must be 'auto', 'on' or 'off'"):
        load_config(None, {"ui": "yes"})


def test_merging_changes_neither_argument():
    data = {"limits": {"max_body_bytes": 2048}}
    assert merged(ServiceConfig, data, {"limits.max_queued_requests": 1})["limits"] == {
        "max_body_bytes": 2048,
        "max_queued_requests": 1,
    }
    assert data == {"limits": {"max_body_bytes": 2048}}


def test_the_protocols_times_are_the_librarys_own():
    given = ServiceConfig().protocol.model_dump()
    assert Times(**given) == Times()


def test_every_key_is_documented():
    from cluster.cli.flags import config_keys

    assert all(field.description for _, field in config_keys())
