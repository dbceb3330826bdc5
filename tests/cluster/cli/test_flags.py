from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.cli import main
from cluster.cli.flags import Parser, add_service_flags, config_overrides, flag_of
from cluster.cli.main import COMMANDS, build_parser
from cluster.cli.vllm_flags import INSTEAD, advice, key_entries
from cluster.config.app import ServiceConfig
from cluster.config.environment import RAY_SETTINGS, api_keys, prepare_for_ray, set_for_command
from cluster.config.files import config_keys, load_config
from cluster.launch.local import check_port
from specdec.core.errors import InvalidParameterError

EXAMPLES = {
    "demo": "plain",
    "executor": "eager",
    "gpu_memory_utilization": 0.8,
    "skip_parity_check": True,
    "target.model": "some/target",
    "target.revision": "main",
    "target.token": "hf_secret",
    "target.dtype": "bfloat16",
    "target.device": "cuda:1",
    "target.quantization": "int8",
    "target.kv_cache_memory": "512MiB",
    "draft.model": "some/draft",
    "draft.method": "ngram+model",
    "draft.placement": "separate",
    "draft.revision": "v1",
    "draft.token": "hf_other",
    "draft.dtype": "float16",
    "draft.parallel_drafting": True,
    "draft.other_vocabulary": True,
    "draft.device_map": {"": 0, "lm_head": "cpu"},
    "draft.quantization": "int4",
    "draft.kv_cache_memory": 0.25,
    "served_model_name": "mine, also-mine",
    "max_model_len": 4096,
    "block_size": 32,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 17,
    "num_speculative_tokens": 7,
    "strict_tile_tokens": 32,
    "logits_processors": "some.masks:digits, masks:Table.words",
    "speculation_mode": "sequential",
    "num_branches": 3,
    "affinity_slack": 3,
    "limits.max_body_bytes": 2048,
    "limits.max_concurrent_requests": 3,
    "limits.max_queued_requests": 0,
    "limits.max_sequences": 9,
    "limits.max_stop_strings": 2,
    "limits.max_stop_characters": 99,
    "limits.priorities": "own",
    "limits.retry_after_s": 5,
    "limits.max_total_body_bytes": 1 << 20,
    "limits.max_total_tokens": 100_000,
    "limits.max_share_per_key": 0.25,
    "limits.max_reopens": 5,
    "limits.body_timeout_s": 20,
    "limits.queue_timeout_s": 20,
    "limits.request_timeout_s": 120,
    "limits.stream_headers_after_s": 4.5,
    "limits.stream_comment_every_s": 7.5,
    "limits.slow_client_timeout_s": 12.5,
    "limits.max_logprobs": 5,
    "limits.max_prompt_logprobs_tokens": 4096,
    "access.api_keys_file": "keys.txt",
    "access.admin_keys": "alice, bob",
    "access.share_prefixes": "group",
    "access.metrics_need_key": False,
    "access.allowed_origins": "https://a.example, https://b.example:8443",
    "access.allow_unauthenticated_ray": True,
    "log_format": "json",
    "lora.max_adapter_bytes": 1 << 20,
    "lora.load_timeout_s": 60,
    "lora.max_loras": 8,
    "lora.max_rank": 32,
    "tls.ssl_certfile": "cert.pem",
    "tls.ssl_keyfile": "key.pem",
    "tracing.exporter": "otlp",
    "tracing.endpoint": "http://localhost:4318",
    "tracing.sampling_ratio": 0.25,
    "tracing.trust_traceparent": False,
    "protocol.lease_s": 9.5,
    "protocol.renew_interval_s": 0.25,
    "protocol.retry_interval_s": 0.125,
    "protocol.renew_grace_s": 0.75,
    "protocol.peer_timeout_s": 12,
    "protocol.max_unacked_tokens": 64,
    "replicas.target": 2,
    "replicas.draft": {"min": 0, "max": 3},
    "replicas.router": 4,
    "replicas.ingress": 5,
    "updates.target": "surge",
    "updates.draft": "replace",
    "updates.router": "replace",
    "updates.ingress": "replace",
    "update_timeout_s": 60.0,
    "actors.target.num_gpus": 0.5,
    "actors.target.num_cpus": 2,
    "actors.target.resources": {"big": 1},
    "actors.target.label_selector": {"pool": "big"},
    "actors.target.accelerator_type": "H200",
    "actors.draft.num_gpus": 1,
    "actors.draft.num_cpus": 0.5,
    "actors.draft.resources": {"small": 1},
    "actors.draft.label_selector": {"pool": "small"},
    "actors.draft.accelerator_type": "L4",
    "actors.router.num_gpus": 0.25,
    "actors.router.num_cpus": 1,
    "actors.router.resources": {"front": 1},
    "actors.router.label_selector": {"pool": "front"},
    "actors.router.accelerator_type": "T4",
    "actors.ingress.num_gpus": 0.125,
    "actors.ingress.num_cpus": 0.75,
    "actors.ingress.resources": {"front": 2},
    "actors.ingress.label_selector": {"pool": "text"},
    "actors.ingress.accelerator_type": "A10",
    "drain_timeout_s": 45,
    "stream_interval": 8,
    "ui": "off",
    "chat_template": "template.jinja",
    "tool_parser": "my.parsers:Parser",
    "reasoning_tags": "<think>, </think>",
    "unknown_fields": "refuse",
    "trust_request_chat_template": True,
    "unsupported_tools": "drop",
    "recordings.folder": "/srv/recordings",
    "recordings.owners": "nightly, weekly",
    "recordings.max_bytes": 1 << 24,
    "responses_store.enabled": True,
    "responses_store.max_responses": 100,
    "responses_store.max_bytes": 1 << 20,
    "responses_store.max_age_s": 60.0,
    "backend": "some.devices:slow:target=30",
    "log_level": "warning",
    "step_timeout_s": 5.0,
    "host": "localhost",
    "port": 1234,
}
OF_VLLM = {
    "target.engine_args": {"quantization": "fp8"},
    "target.python": "some/python",
    "target.allow_untested": True,
}
NOT_TOGETHER = OF_VLLM | {
    "draft.engine": "openvino",
    "logprobs_mode": "processed_logprobs",
    "exactness": "strict",
    "target.engine": "vllm",
    "draft.heads": "some/heads",
    "draft.tree_tokens": 16,
    "target.device_map": "auto",
    "draft.device": "cpu",
    "draft.application": "drafts",
    "lora.adapters": "sql=/srv/sql, chat=some/chat",
    "lora.models": "target",
    "lora.folder": "/srv/adapters",
    "lora.hub": True,
}


def as_yaml(values, path):
    tree = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    path.write_text(yaml.safe_dump(tree))
    return path


def from_flags(values):
    parser = Parser()
    add_service_flags(parser)
    argv = [_flag(key, value) for key, value in values.items()]
    return load_config(None, config_overrides(parser.parse_args(argv)))


def _flag(key, value):
    if isinstance(value, bool):
        return flag_of(key) if value else flag_of(key).replace("--", "--no-", 1)
    return f"{flag_of(key)}={_text(value)}"


def _text(value):
    return value if isinstance(value, str) else json.dumps(value)


def from_environment(values, monkeypatch):
    for key, value in values.items():
        monkeypatch.setenv("SPECDEC__" + key.upper().replace(".", "__"), _text(value))
    return load_config()


def test_the_environment_and_yaml_say_the_same(tmp_path, monkeypatch):
    from_file = load_config(as_yaml(EXAMPLES, tmp_path / "service.yaml"))
    assert from_environment(EXAMPLES, monkeypatch) == from_file


def test_flags_win_over_the_environment_over_secrets_over_the_file(tmp_path, monkeypatch):
    (tmp_path / "secrets").mkdir()
    for key in ("port", "host", "target.token", "served_model_name"):
        (tmp_path / "secrets" / key).write_text("1\n")
    monkeypatch.setenv("SPECDEC__PORT", "2")
    monkeypatch.setenv("SPECDEC__HOST", "2")
    path = as_yaml({"port": 0, "host": "0", "target.model": "t", "log_level": "error"}, tmp_path / "service.yaml")
    config = load_config(path, {"port": "3"}, tmp_path / "secrets")
    assert (config.port, config.host, config.served_model_name, config.log_level) == (3, "2", ("1",), "error")
    assert config.target.token.get_secret_value() == "1"


def test_the_model_comes_first():
    parser = build_parser()
    chosen = parser.parse_args(["serve", "some/target", "--draft", "some/draft"])
    assert config_overrides(chosen) == {"target.model": "some/target", "draft.model": "some/draft"}


def test_the_configuration_in_force_can_be_printed_and_read_again(tmp_path, capsys):
    assert main(["config", "t", "--draft", "d", "--target-token", "hf_secret", "--skip-parity-check"]) == 0
    text = capsys.readouterr().out
    assert "hf_secret" not in text
    printed = yaml.safe_load(text)
    assert (printed["target"]["model"], printed["skip_parity_check"]) == ("t", True)
    (tmp_path / "again.yaml").write_text(text)
    assert load_config(tmp_path / "again.yaml").draft.model == "d"


def test_what_other_servers_flags_are_answered_with_exists():
    known = {flag_of(key) for key, _ in config_keys()}
    named = {word.strip(",:;") for flag in INSTEAD for word in advice(flag).split() if word.startswith("--")}
    assert named <= known


def test_there_is_an_example_of_every_key():
    assert {key for key, _ in config_keys()} == set(EXAMPLES) | set(NOT_TOGETHER)


def test_flags_and_yaml_say_the_same(tmp_path):
    from_file = load_config(as_yaml(EXAMPLES, tmp_path / "service.yaml"))
    assert from_flags(EXAMPLES) == from_file
    unset = [key for key in EXAMPLES if key != "demo" and _value(from_file, key) == _value(ServiceConfig(), key)]
    assert unset == []


@pytest.mark.parametrize("key", EXAMPLES | NOT_TOGETHER)
def test_each_flag_sets_its_key_and_no_other(tmp_path, key):
    needed = {"target.model": "t"} if key == "draft.application" else {"target.model": "t", "draft.model": "d"}
    needed |= {"target.engine": "vllm"} if key in OF_VLLM else {}
    if key in ("draft.heads", "draft.tree_tokens"):
        needed |= {"draft.method": "model+medusa", "draft.heads": "h"}
    if key.startswith("recordings."):
        needed |= {name: EXAMPLES[name] for name in ("recordings.folder", "recordings.owners")}
        needed[key] = {"recordings.folder": "elsewhere", "recordings.owners": "others"}.get(key, 1 << 30)
    value = (EXAMPLES | NOT_TOGETHER)[key]
    file = load_config(as_yaml(needed | {key: value}, tmp_path / "service.yaml"))
    assert from_flags(needed | {key: value}) == file
    plain = load_config(as_yaml(needed, tmp_path / "plain.yaml"))
    differing = [name for name, _ in config_keys() if _value(file, name) != _value(plain, name)]
    assert differing == ([key] if key != "demo" else [])


def _value(config, key):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def run(*argv):
    return subprocess.run([sys.executable, "-m", "cluster.cli", *argv], capture_output=True, text=True, timeout=60)


def test_help_names_every_flag_of_the_configuration(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help=all"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(flag_of(key) in text for key, _ in config_keys())
    assert "[limits.max_body_bytes]" in text


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


def test_the_command_line_as_a_process():
    assert run("--version").stdout.startswith("specdec ")
    assert run("serve", "--prot", "8").returncode == 2


def test_a_port_that_is_taken_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InvalidParameterError, match=f"port: 127.0.0.1:{port} cannot be had"):
            check_port("127.0.0.1", port)
        assert main(["serve", "--port", str(port)]) == 2
        assert str(port) in capsys.readouterr().err
    assert check_port("127.0.0.1", port) == port


def test_port_0_is_any_free_one():
    assert check_port("127.0.0.1", 0) > 0


def test_settings_leave_what_the_user_has_set():
    environment = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0"}
    prepare_for_ray(environment)
    assert environment == RAY_SETTINGS | {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0"}


def test_the_command_is_installed():
    command = Path(sys.executable).parent / "specdec"
    assert subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60).returncode == 0


def overrides_of(*words):
    return config_overrides(build_parser().parse_args(["serve", *words]))


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (("--dtype", "bfloat16"), {"target.dtype": "bfloat16"}),
        (("--quantization", "fp8"), {"target.quantization": "fp8"}),
        (("--max-num-seqs", "8"), {"max_num_seqs": "8"}),
        (("--max-num-batched-tokens", "512"), {"max_num_batched_tokens": "512"}),
        (("--max-lora-rank", "32"), {"lora.max_rank": "32"}),
        (("--max-logprobs", "5"), {"limits.max_logprobs": "5"}),
        (("--ssl-certfile", "c", "--ssl-keyfile", "k"), {"tls.ssl_certfile": "c", "tls.ssl_keyfile": "k"}),
        (("--served-model-name", "a", "b"), {"served_model_name": ["a", "b"]}),
        (
            ("--enable-lora", "--lora-modules", "a=/x", '{"name": "b", "path": "/y", "base_model_name": "m"}'),
            {"lora.adapters": [{"name": "a", "path": "/x"}, {"name": "b", "path": "/y"}]},
        ),
        (("--enable-lora", "--lora-folder", "/x"), {"lora.folder": "/x"}),
        (("--enforce-eager",), {"executor": "eager"}),
        (
            ("--speculative-config", '{"model": "d", "num_speculative_tokens": 3}'),
            {"draft.method": "model", "draft.model": "d", "num_speculative_tokens": 3},
        ),
        (
            ("--speculative-config", '{"model": "d", "method": "draft_model", "parallel_drafting": true}'),
            {"draft.method": "model", "draft.model": "d", "draft.parallel_drafting": True},
        ),
        (
            ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
            {"draft.method": "ngram", "num_speculative_tokens": 3},
        ),
        (
            ("--speculative-config", '{"method": "medusa", "model": "h"}'),
            {"draft.method": "medusa", "draft.heads": "h"},
        ),
    ],
)
def test_vllms_flags_set_our_keys(words, overrides):
    assert overrides_of(*words) == overrides


def test_origins_may_be_a_json_list_as_in_vllm():
    config = load_config(None, overrides_of("--allowed-origins", '["https://a.example", "*"]'))
    assert config.access.allowed_origins == ("https://a.example", "*")


def test_keys_of_the_command_line_join_those_of_the_environment():
    environment = {"SPECDEC_API_KEYS": "ann=0123456789abcdef"}
    set_for_command(key_entries(["fedcba9876543210"]), "/models", environment)
    assert api_keys(None, environment) == {"ann": "0123456789abcdef", "command-line-1": "fedcba9876543210"}
    assert environment["HF_HUB_CACHE"] == "/models"


def test_the_help_is_a_screen_and_all_of_it_is_asked_for(capsys):
    shown = []
    for words in (("--help",), ("--help=all",)):
        with pytest.raises(SystemExit) as ended:
            main(["serve", *words])
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)
    assert len(shown[0].splitlines()) <= 50
    assert "--help=all" in shown[0]
    assert "--target-dtype" not in shown[0]
    assert all(flag_of(key) in shown[1] for key, _ in config_keys())
