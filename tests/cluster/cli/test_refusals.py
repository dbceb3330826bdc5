"""What the command line must not say: each row ends with one line that names the flag, and exit code 2."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import specdec.models.loading  # noqa: F401 - torchao warns on stderr as it is imported
from cluster.cli import main
from cluster.cli.vllm_flags import INSTEAD, advice

FILE = "FILE.yaml"
DEMO, T = {"demo": "plain"}, {"target": "t", "draft": "d"}

COMMANDS: list[tuple[str, str]] = [
    (
        "frobnicate",
        "'serve', 'generate', 'record', 'replay', 'audition', 'train-draft', 'config', 'render', 'demo', 'doctor'",
    ),
    ("serve --prot 8", "unknown argument --prot; did you mean --port?"),
    ("serve --num-spec 3", "unknown argument --num-spec; did you mean --max-num-seqs?"),
    ("serve --bogus 3", "unknown argument --bogus; see specdec serve --help"),
    ("serve --port 99999", "port: must be a whole number, at least 0 and at most 65535"),
    ("serve --host 'not an address'", "no address of this machine"),
    ("serve --config missing.yaml", "missing.yaml: cannot be read"),
    ("serve --draft x", "needs a target"),
    ("config one --target another", "target.model: named twice, by MODEL (one) and by --target"),
    ("config --skip-parity-check true", "true is no model; flags that are on or off take no value"),
    ("config t --draft-method ngram+model", "ngram+model needs a draft model"),
    ("config t --draft d --draft-heads h", "heads needs method medusa"),
    ("config t --speculative-config {", "--speculative-config: not JSON"),
    ("config t --speculative-config []", "--speculative-config: must be a JSON object"),
    (
        """config t --speculative-config '{"prompt_lookup_max": 4}'""",
        "--speculative-config: unknown key 'prompt_lookup_max'; allowed are model, num_speculative_tokens, method, ",
    ),
    (
        """config t --speculative-config '{"method": "eagle"}'""",
        "--speculative-config: method must be one of draft_model, ngram, medusa, eagle3",
    ),
    ("config t --lora-modules a", "--lora-modules: a must have the form NAME=PATH"),
    ("""config t --lora-modules '{"name": "a"}'""", "--lora-modules: an object must have name and path"),
    ("config t --enable-lora", "--enable-lora: name adapters by --lora-modules"),
    ("config t --api-key a,b", "comma"),
    ("generate x --max-tokens 0", "--max-tokens must be at least 1"),
    ("generate x --temperature -1", "--temperature must be a number from 0 to 2"),
    ("generate x --temperature nan", "--temperature must be a number from 0 to 2"),
    ("generate x --seed -1", "--seed must be at least 0"),
    ("audition f --draft d --require better", "--require compares the last draft with the first: give --draft twice"),
    ("train-draft f --draft d", "the following arguments are required: --out"),
    *((f"serve {flag} x", f"unknown argument {flag}; {advice(flag)}") for flag in INSTEAD),
]


def selecting(role: str, **labels: str) -> dict[str, Any]:
    return {"actors": {"router": {"label_selector": {"role": role, **labels}}}}


ON_A_CLUSTER: list[tuple[dict[str, Any], str, str]] = [
    ({"target": {"model": "t", "token": "hf_0123"}}, "", "target.token: a cluster would show it"),
    ({"target": "t", "draft": {"model": "d", "token": "hf_0123"}}, "", "draft.token: a cluster would show it"),
    (DEMO | {"host": "127.0.0.1"}, "", "host: 127.0.0.1: nobody else reaches it"),
    (DEMO | {"host": "10.0.0.7"}, "", "host: 10.0.0.7: every node would listen on it"),
    (DEMO | {"port": 0}, "--serve", "port: 0 takes any port"),
    (DEMO | {"port": 9000}, "", "port: the pods' port is 8000"),
    (DEMO | {"tls": {"ssl_certfile": "c", "ssl_keyfile": "k"}}, "", "tls: KubeRay and the probes speak"),
    (DEMO | {"tls": {"ssl_certfile": "c"}}, "--serve", "tls: ssl_certfile and ssl_keyfile need each other"),
    ({"target": "t", "draft": {"application": "p"}}, "", "draft.application: this is one pair"),
    (T | {"separate_draft": True}, "", "the draft model always is an application of its own"),
    (DEMO | selecting("Front"), "", "actors.router.label_selector: role: Front: it is the name of pods"),
    (
        DEMO | selecting("front", zone="in(a,b)"),
        "",
        "actors.router.label_selector: zone: in(a,b): it is the name of pods",
    ),
    (
        DEMO
        | {"actors": {**selecting("m", zone="a")["actors"], "target": {"label_selector": {"role": "m", "zone": "b"}}}},
        "",
        "actors.target.label_selector: zone: replicas with role m share pods",
    ),
    (DEMO | {"store": {"redis_url": "redis://host:6379/0"}}, "", "the key 'store' was removed: responses and adapters"),
    ({"limits": {}}, "", "target: names no model"),
    (DEMO | {"prot": 1}, "", "unknown key 'prot'; did you mean 'port'?"),
]


@pytest.mark.parametrize(
    ("keys", "words", "told"),
    [
        *(({}, words, told) for words, told in COMMANDS),
        *((keys, f"render {FILE} {flags}", told) for keys, flags, told in ON_A_CLUSTER),
        (DEMO | {"target": {"engine": "vllm"}}, f"generate text --config {FILE}", "vllm is for the service: it needs"),
    ],
)
def test_it_is_refused_in_one_line_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], words: str, told: str
) -> None:
    (tmp_path / FILE).write_text(yaml.safe_dump(keys))
    argv = [str(tmp_path / word) if word == FILE else word for word in shlex.split(words)]
    try:
        code = main(argv)
    except SystemExit as ended:
        code = ended.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert told in line
    assert line.startswith((f"specdec {argv[0]}: ", "specdec: "))
    assert "hf_0123" not in line


def test_a_flag_like_no_other_is_refused_without_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--zzzzzz"])
    assert "nearest" not in capsys.readouterr().err
