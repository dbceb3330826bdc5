"""What a configuration, a file of it and the environment must not say: each row is refused by the name of its key."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ray._private.authentication import authentication_utils

from cluster.config.app import OTLP_LIBRARY, AppArgs, ServiceConfig
from cluster.config.base import REMOVED, validated
from cluster.config.environment import api_keys, check_ray
from cluster.config.files import load_config
from cluster.config.live import reconfigured
from cluster.config.models import memory_amount
from cluster.launch.local import LocalService
from cluster.models.sources import backend_of, backend_options, ngram_options
from specdec.core.errors import InvalidParameterError

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"
T, VLLM = {"target.model": "t"}, {"target.model": "t", "target.engine": "vllm"}
OPENVINO = {"target.model": "t", "target.engine": "openvino"}
PAIRED = {"draft.placement": "same_process"}
NO_SWITCH, MANY = "true and false are not allowed", "a whole number, at least 1 and at most 1024"
PROCESSORS, METHODS = (
    "a list of import strings of the form 'package.module:name'",
    "must be model, ngram, medusa, eagle3, or",
)
FUNCTION = "must be 'package.module:name', or with arguments"
ORIGINS, RESTART = "must be a list of origins such as https://example.org, or *", "cannot change without a restart"

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("port", 65536, "a whole number, at least 0 and at most 65535"),
    ("port", -1, "at least 0 and at most 65535"),
    ("port", "http", "a whole number"),
    ("port", True, NO_SWITCH),
    ("num_speculative_tokens", 65, "'auto' or a whole number of tokens, at least 0 and at most 64"),
    ("num_speculative_tokens", "many", "'auto' or a whole number"),
    ("num_speculative_tokens", -1, "'auto' or a whole number"),
    ("demo", "default", "'plain', 'hybrid' or 'chat'"),
    ("block_size", 0, "at least 1 and at most 1024"),
    ("max_model_len", 1, "at least 2"),
    ("limits", 3, "must hold keys and values"),
    ("limits.max_body_bytes", 10, "at least 1024"),
    ("protocol.lease_s", 0, "more than 0 and at most 3600"),
    ("protocol.lease_s", float("nan"), "more than 0"),
    ("replicas.target", 0, f"{MANY}, or a range such as {{min: 1, max: 4}}"),
    ("replicas.target", "many", MANY),
    ("replicas.target", True, NO_SWITCH),
    ("replicas.target", {"min": 1}, f"max: must be {MANY}"),
    ("replicas.target", {"min": 3, "max": 2}, "min must be at most max (2)"),
    ("replicas.target", {"max": 2, "maxx": 3}, "unknown key 'maxx'; did you mean 'max'?"),
    ("replicas.target", {"min": 0, "max": 2}, "min must be at least 1: nobody would answer"),
    ("replicas.draft", {"min": 0, "max": 0}, f"max: must be {MANY}"),
    ("speculation_mode", "both", "'auto', 'sequential', 'overlap' or 'outcomes'"),
    ("target.dtype", "int8", "'float32'"),
    ("target.device", "gpu", "auto, cpu, cuda or cuda:N"),
    ("target.engine", "sglang", "must be 'transformers', 'openvino' or 'vllm'"),
    ("target", None, "target: is empty"),
    ("target.model", None, "target: is empty"),
    ("draft.kv_cache_memory", "1.5", "a fraction of the free memory in (0, 1]"),
    ("log_level", "loud", "'debug'"),
    ("ui", "yes", "must be 'auto', 'on' or 'off'"),
    *(("logits_processors", value, PROCESSORS) for value in (["masks"], "masks:", [3], "")),
    ("tool_parser", "qwen", "auto, hermes, llama3, response_template, or an import string"),
    ("tool_parser", "my.parsers:", "an import string"),
    ("reasoning_tags", "<think>", "two tags with a comma between them"),
    ("reasoning_tags", "a,b,c", "two tags"),
    ("reasoning_tags", True, NO_SWITCH),
    ("tracing.exporter", "jaeger", "file, otlp, or package.module:function"),
    ("tracing.exporter", "a.b:", "package.module:function"),
    ("tracing.endpoint", "localhost:4318", "as in http://localhost:4318"),
    ("tracing.sampling_ratio", "1.5", "at least 0 and at most 1"),
    *(("access.allowed_origins", one, ORIGINS) for one in ("ftp://x", "https://a.example/path", ["https://a b"], 1)),
    *(("backend", text, FUNCTION) for text in ("module", "a.b:c:", "a.b:c:d", "a.b:c:d=", "a b:c", 3)),
    ("draft.method", ["model", "grams"], METHODS),
    ("draft.method", "ngram+ngram", "each once"),
    ("draft.method", "ngram+my.module:drafter", "must name one drafter from tokens"),
]
UNKNOWN = {
    "prot": "port",
    "num_speculative_token": "num_speculative_tokens",
    "limits.max_boddy_bytes": "limits.max_body_bytes",
    "max_body_bytes": "limits.max_body_bytes",
    "actors.draft.num_gpu": "actors.draft.num_gpus",
    "limits.port": "port",
    "target.modell": "target.model",
}
TOGETHER: list[tuple[dict[str, Any], str, str]] = [
    ({"draft.model": "x"}, "draft.model", "needs a target"),
    ({"demo": "hybrid", **T}, "demo", "demo: hybrid is a target itself: give no other target with it"),
    ({"target.revision": "main"}, "target", "need a model"),
    (T | {"target.device": "cpu", "target.device_map": "auto"}, "target", "exclude each other"),
    (
        VLLM | {"logprobs_mode": "processed_logprobs"},
        "logprobs_mode",
        "logprobs_mode: vLLM's engine reports raw_logprobs",
    ),
    (VLLM | {"exactness": "strict"}, "exactness", "exactness: strict needs target.engine: transformers"),
    (T | {"exactness": "strict", "target.quantization": "int8"}, "exactness", "needs target.quantization: none"),
    ({"strict_tile_tokens": 3}, "strict_tile_tokens", "strict_tile_tokens must be 0, or 4 to 512"),
    ({"protocol.renew_interval_s": 4, "protocol.lease_s": 5}, "protocol", "at most a third of lease_s"),
    *(
        (T | {f"target.{key}": value}, "target", "need engine: vllm")
        for key, value in (("engine_args", {"quantization": "fp8"}), ("python", "p"), ("allow_untested", True))
    ),
    *(
        (VLLM | {f"target.{key}": value}, "target", "device and device_map are not for engine vllm")
        for key, value in (("device", "cuda:1"), ("device_map", "auto"))
    ),
    *(
        (VLLM | {"target.engine_args": {key: value}}, "target", f"{key} is {why}")
        for key, value, why in (
            ("max_model_len", 4, "said by max_model_len"),
            ("trust_remote_code", True, "set by specdec"),
            ("pipeline_parallel_size", 2, "not tested"),
            ("enable_lora", True, "not tested"),
        )
    ),
    *(
        ({f"{role}.{key}": value, f"{role}.model": "m", "target.model": "t", f"{role}.engine": "openvino"}, role, why)
        for role in ("target", "draft")
        for key, value, why in (
            ("device", "cuda", "engine openvino is for CPUs"),
            ("device_map", "auto", "engine openvino is for CPUs"),
            ("dtype", "float16", "float32 or bfloat16"),
            ("quantization", "int4", "none or int8, not int4"),
            ("engine_args", {"quantization": "fp8"}, "engine_args"),
        )
        if role == "target" or key != "engine_args"
    ),
    (OPENVINO | {"exactness": "strict"}, "exactness", "exactness: strict needs target.engine: transformers"),
    (OPENVINO | {"lora.folder": "/srv"}, "lora", "adapters need target.engine: transformers"),
    ({"lora.adapters": [{"name": "a", "path": "/a"}, {"name": "b"}]}, "lora.adapters[1].path", "[1].path: Field requ"),
    ({"lora.adapters": [{"name": "", "path": "/a"}]}, "lora.adapters[0].name", "[0].name: String should have at least"),
    (
        {"lora.adapters": [{"name": "a", "pth": "/a"}]},
        "lora.adapters[0]",
        "lora.adapters[0]: unknown key 'pth'; did you mean 'path'?",
    ),
    (OPENVINO | {"draft.method": "medusa", "draft.heads": "h"}, "draft.method", "need target.engine: transformers"),
    (
        T | {"draft.model": "d", "draft.engine": "openvino", "lora.folder": "/srv"},
        "lora",
        "the draft's adapters need draft.engine: transformers",
    ),
    (T | {"draft.model": "d", "draft.engine": "vllm"}, "draft.engine", "'transformers' or 'openvino'"),
    (T | {"draft.method": "ngram+model"}, "draft.method", "ngram+model needs a draft model"),
    (T | {"draft.method": "ngram", "draft.model": "d"}, "draft", "method ngram has no draft model"),
    ({"draft.method": "ngram", "draft.application": "drafts"}, "draft", "method ngram has no draft model"),
    ({"draft.method": "ngram", "draft.kv_cache_memory": 0.5}, "draft", "method ngram has no draft model"),
    (T | {"draft.method": "medusa"}, "draft.heads", "name the target's heads"),
    ({"draft.method": "eagle3"}, "draft.heads", "name the target's heads"),
    ({"draft.method": "eagle3+medusa"}, "draft.method", "must name one method of heads, not medusa and eagle3"),
    ({"demo": "hybrid", "draft.method": "medusa"}, "draft.heads", "name the target's heads"),
    (
        T | {"draft.method": "model+medusa", "draft.heads": "h"},
        "draft.method",
        "model+medusa needs a draft model",
    ),
    (T | {"draft": {"method": "medusa", "heads": "h", "model": "d"}}, "draft", "method medusa has no draft model"),
    ({"draft.heads": "h"}, "draft", "heads needs method medusa"),
    ({"draft.method": "ngram", "draft.tree_tokens": 8}, "draft", "tree_tokens needs heads"),
    ({"draft.method": "medusa", "draft.tree_tokens": 65}, "draft.tree_tokens", "64"),
    (VLLM | {"draft.method": "medusa", "draft.heads": "h"}, "draft.method", "heads need target.engine: transformers"),
    (T | PAIRED, "draft.placement", "needs a draft model"),
    (VLLM | PAIRED | {"draft.model": "d"}, "draft.placement", "needs our own engine"),
    (OPENVINO | PAIRED | {"draft.model": "d"}, "draft.placement", "needs one engine for both models"),
    (PAIRED | {"draft.method": "model+medusa"}, "draft.placement", "heads draft in the target's process too"),
    (PAIRED | {"speculation_mode": "overlap"}, "draft.placement", "drafts and verifies in turn"),
    (PAIRED | {"draft.device": "cpu"}, "draft.placement", "has the target's device"),
    (PAIRED | {"replicas.draft": 2}, "draft.placement", "leave out replicas.draft"),
    (PAIRED | {"actors.draft.num_cpus": 2}, "draft.placement", "leave out actors.draft"),
    (PAIRED | {"draft.application": "drafts"}, "draft", "leave out application or placement"),
    ({"draft.placement": "here"}, "draft.placement", "'auto', 'same_process' or 'separate'"),
]
READ: list[tuple[dict[str, Any], str, str]] = [
    *(({key: value}, key.removesuffix(".model"), words) for key, value, words in OUT_OF_RANGE),
    *(({key: 1}, key, f"unknown key '{key}'; did you mean '{known}'?") for key, known in UNKNOWN.items()),
    *TOGETHER,
]


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: None) -> None:
    (tmp_path / "broken.py").write_text('raise RuntimeError("not today")')


def refusal(check: Callable[..., object], *args: Any) -> InvalidParameterError:
    with pytest.raises(InvalidParameterError) as caught:
        check(*args)
    return caught.value


@pytest.mark.parametrize(("keys", "parameter", "words"), READ)
def test_a_configuration_is_refused_by_the_name_of_its_key(keys: dict[str, Any], parameter: str, words: str) -> None:
    error = refusal(load_config, None, keys)
    assert error.parameter == parameter
    assert parameter in str(error)
    assert words in str(error)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"limits": {"max_body_byte": 5}},
            "unknown key 'limits.max_body_byte'; did you mean",
        ),
        ({"target": {"model": None}}, "target: is empty"),
        ({"draft": {"heads": "h"}}, "heads needs method medusa"),
    ],
)
def test_serves_own_arguments_are_refused_by_the_same_rules(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate(keys)
    assert words in str(caught.value)


@pytest.mark.parametrize("given", [0, -1, 2, 1.5, "1 kB", "much", "nan", "512 cows", None])
def test_amounts_of_memory_are_refused_with_what_is_allowed(given: object) -> None:
    with pytest.raises(ValueError, match=r"a fraction of the free memory in .*, or at least 1 MiB in bytes or with"):
        memory_amount(given)


def check_processors(config: ServiceConfig) -> None:
    backend_options(config.app_args(), config.target)


def check_backend(config: ServiceConfig) -> None:
    backend_of(config.app_args(), "target", lambda: "own")


def check_method(config: ServiceConfig) -> None:
    ngram_options(config.app_args())


def check_tracing(config: ServiceConfig) -> None:
    """As a start does, before it starts Ray."""
    lines: list[str] = []
    try:
        LocalService(config, lines.append).start_ray()
    finally:
        assert lines == []


def check_tls(config: ServiceConfig) -> None:
    config.tls.http_options()


P, SOURCES = "tests.cluster.processors", "tests.cluster.models.test_sources"
OTLP = "pip install 'specdec-serve[otlp]'"


@pytest.mark.parametrize(
    ("check", "key", "value", "words"),
    [
        (
            check_processors,
            "logits_processors",
            "nowhere.masks:f",
            "cannot import nowhere.masks:f: ModuleNotFoundError",
        ),
        (check_processors, "logits_processors", f"{P}:digits", f"cannot import {P}:digits: AttributeError"),
        (
            check_processors,
            "logits_processors",
            f"{P}:TABLE",
            f"{P}:TABLE must be a function or a callable object",
        ),
        (check_processors, "logits_processors", f"{P}:Forbid", "and is a class"),
        (check_processors, "logits_processors", "broken:mask", "cannot import broken:mask: RuntimeError: not today"),
        (check_backend, "backend", "no_such_module:f", "cannot import no_such_module:f: ModuleNotFoundError"),
        (check_backend, "backend", f"{P}:TABLE", "must be a function or a callable object, and is of type dict"),
        (
            check_backend,
            "backend",
            f"{SOURCES}:around:size=3",
            "got an unexpected keyword argument 'size'",
        ),
        (check_method, "draft.method", "nowhere:drafter", "draft.method: cannot import nowhere:drafter"),
        (check_tracing, "tracing.exporter", "no.such.module:f", "No module named 'no'"),
        (check_tracing, "tracing.exporter", "os.path:no_such_function", "has no attribute"),
        (check_tracing, "tracing.exporter", "os.path:sep", "sep is no function"),
        (check_tracing, "tracing.exporter", "otlp", OTLP),
        (check_tracing, "tracing.endpoint", "http://a", "needs tracing.exporter: otlp"),
        (check_tls, "tls.ssl_certfile", "cert.pem", "ssl_certfile and ssl_keyfile need each other"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[ServiceConfig], None], key: str, value: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, OTLP_LIBRARY, None)
    further = {"tracing.exporter": "file"} if key == "tracing.endpoint" else {}
    error = refusal(check, load_config(None, {key: value, **further}))
    assert error.parameter.startswith(key.partition(".")[0])
    assert str(error).startswith(error.parameter.partition(".")[0])
    assert words in str(error)


def test_a_key_that_is_like_none_gets_no_hint() -> None:
    assert str(refusal(validated, ServiceConfig, {"bogus": 1})) == "unknown key 'bogus'"


@pytest.mark.parametrize(
    ("user_config", "parameter", "words"),
    [
        ({"access": {"metrics_need_key": False}}, "access.metrics_need_key", RESTART),
        ({"target": "other"}, "target", RESTART),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens", RESTART),
        ({"limit": {}}, "limit", "unknown key 'limit'; did you mean 'limits'?"),
        ({"limits": {"retry_after": 1}}, "limits.retry_after", "did you mean 'limits.retry_after_s'?"),
        ({"limits": {"retry_after_s": 0}}, "limits.retry_after_s", "at least 1"),
        ({"protocol": {"renew_interval_s": 1000}}, "protocol", "renew_interval_s must be at most"),
    ],
)
def test_what_is_changed_while_it_serves_is_refused_by_its_key(
    user_config: dict[str, Any], parameter: str, words: str
) -> None:
    error = refusal(reconfigured, AppArgs.model_validate({"target": "t"}), user_config)
    assert error.parameter == parameter
    assert str(error).startswith("user_config: ")
    assert words in str(error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: [", "not YAML"),
        ("- port", "must hold keys and values"),
        ("7: 8", "must hold keys and values"),
        ("prot: 1", "did you mean 'port'?"),
        ("draft.placement: separate", "unknown key 'draft.placement'; write 'placement' under 'draft'"),
        (None, "cannot be read"),
        ("", "target: names no model; name a model, or ask for the demo pair with demo: plain"),
        ("target:\n", "target: is empty; name a model, or ask for the demo pair with demo: plain"),
        ("target: {model: }\n", "target: is empty; name a model"),
        ("target: {dtype: float32}\n", "target: names no model; name a model"),
        ("limits: {retry_after_s: 3}\n", "target: names no model; name a model"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "service.yaml"
    if text is not None:
        file.write_text(text)
    error = refusal(load_config, file)
    assert str(error).startswith(f"{file}: ")
    assert words in str(error)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SPECDEC__PROT", "environment: unknown key 'prot'; did you mean 'port'?"),
        ("SPECDEC__TARGET__DTYP", "environment: unknown key 'target.dtyp'; did you mean 'target.dtype'?"),
        ("SPECDEC__PORT", "port: must be a whole number, at least 0 and at most 65535"),
    ],
)
def test_a_variable_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.setenv(name, "x")
    assert words in str(refusal(load_config))


@pytest.mark.parametrize(
    ("text", "variable", "words"),
    [
        *(
            (text, "", "keys, line 1: must be a name and a key of at least 16 characters")
            for text in (ALICE, f": {ALICE}")
        ),
        *((f"alice: {key}", "", "keys, line 1: must be") for key in ("short", "", f"{ALICE} {BOB}")),
        (f"alice: {ALICE}\nalice: {BOB}", "", "keys, line 2: the name or the key was there before"),
        *((text, value, "has no key in it") for text in ("", "\n", "# alice: later\n") for value in ("", f"bob={BOB}")),
        (None, "", "No such file"),
        (None, "bob=short", "SPECDEC_API_KEYS, entry 1: must be a name and a key"),
    ],
)
def test_keys_of_callers_are_refused_by_file_and_line_and_not_told(
    tmp_path: Path, text: str | None, variable: str, words: str
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    only_variable = text is None and variable
    error = refusal(api_keys, None if only_variable else str(file), {"SPECDEC_API_KEYS": variable})
    assert error.parameter == "access.api_keys_file"
    assert words in str(error)
    assert "0123456789" not in str(error)


def test_a_ray_without_tokens_is_refused_unless_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: True)
    check_ray(allow_unauthenticated=False)
    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: False)
    check_ray(allow_unauthenticated=True)
    assert "set access.allow_unauthenticated_ray" in str(refusal(check_ray, False))


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_refused_with_its_reason(key: str) -> None:
    with pytest.raises(ValidationError, match=f"the key '{key}' was removed: ") as caught:
        AppArgs.model_validate({key: {"a": 1}})
    assert REMOVED[key] in str(caught.value)
