"""Receipts of a strict service with two targets: signed, replayed and audited by it and without it; edits are found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from cluster.cli import main
from cluster.cli.service_rerun import ServiceRerun
from specdec.receipts.format import opened, sealed
from specdec.receipts.signing import load_signing_key
from tests.integration.running import RunningService, eventually
from tests.specdec.receipts.answers import with_token

MAX_MODEL_LEN = 64
STRICT = ("--exactness", "strict", "--target-dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN))
PROMPT = "def read_lines(path):\n    with open"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "receipts.pem"
    key = Ed25519PrivateKey.generate()
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return file


@pytest.fixture(scope="module")
def service(key_file: Path) -> Iterator[RunningService]:
    running = RunningService("--receipts-key-file", str(key_file), *STRICT, "--replicas-target", "2")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def answer(service: RunningService) -> dict[str, Any]:
    return asked(service, max_tokens=40, seed=4, n=2, temperature=0.8)


def asked(service: RunningService, ignore_eos: bool = False, **options: Any) -> dict[str, Any]:
    body: Any = {"receipt": True, "return_token_ids": True, "top_k": 50, "ignore_eos": ignore_eos}
    found = service.client().completions.create(model=service.model, prompt=PROMPT, extra_body=body, **options)
    return found.model_dump()


def steps(service: RunningService) -> dict[str, float]:
    """Of each target."""
    found = {key: count for key, count in service.metrics().items() if re.match(r"specdec_steps_total.*:?TargetS", key)}
    assert len(found) == 2
    return found


def test_the_service_replays_it_and_so_does_an_engine(
    service: RunningService, answer: dict[str, Any], key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer))
    keys, before = ("--receipts-key-file", str(key_file), *STRICT), steps(service)
    for where in (*[("--url", service.url)] * 3, ()):
        assert main(["replay", str(file), *where, *keys]) == 0
        assert capsys.readouterr().out == f"same ({answer['id']}, signed)\n"
    eventually(lambda: all(steps(service)[one] > count for one, count in before.items()), 60, "either target replays")


def test_an_edited_token_is_found_by_both_and_by_the_audit(
    service: RunningService, answer: dict[str, Any], key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = opened(answer["receipt"]).receipt
    own = receipt.choices[1].token_ids[9]
    envelope, _ = sealed(with_token(receipt, 1, 9, (own + 1) % 4096), load_signing_key(key_file))
    (tmp_path / "honest.json").write_text(json.dumps(answer))
    (tmp_path / "edited.json").write_text(json.dumps(envelope))
    keys = ("--receipts-key-file", str(key_file), *STRICT)
    gaps = []
    for where in (("--url", service.url), ()):
        assert main(["replay", str(tmp_path / "edited.json"), *where, *keys]) == 1
        said = capsys.readouterr().out
        assert said.startswith(f"choice 1, token 9: the receipt has token {(own + 1) % 4096}, now token {own}, logits ")
        gaps.append(float(said.split(" logits ")[1].split()[0]))
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-2)
    files = (str(tmp_path / "honest.json"), str(tmp_path / "edited.json"))
    for where in (("--url", service.url), ()):
        assert main(["audit", *files, "--json", *where, *keys]) == 1
        verdicts = sorted(map(json.loads, capsys.readouterr().out.splitlines()), key=lambda one: one["status"])
        found = [(one["status"], one["choice"], one["token"]) for one in verdicts]
        assert found == [("flagged", 1, 9), ("ok", None, None)]


def test_an_answer_that_fills_the_context_is_read_and_at_a_low_priority(
    service: RunningService,
    answer: dict[str, Any],
    key_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[dict[str, Any]] = []
    ask = ServiceRerun.ask

    def remember(self: ServiceRerun, body: dict[str, Any]) -> dict[str, Any]:
        sent.append(body)
        return ask(self, body)

    monkeypatch.setattr(ServiceRerun, "ask", remember)
    room = MAX_MODEL_LEN - answer["usage"]["prompt_tokens"]
    full = asked(service, ignore_eos=True, max_tokens=room, seed=5)
    receipt = opened(full["receipt"]).receipt
    own = receipt.choices[0].token_ids[-1]
    envelope, _ = sealed(with_token(receipt, 0, room - 1, (own + 1) % 4096), load_signing_key(key_file))
    for name, value in (("full", full), ("edited", envelope)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    keys = ("--url", service.url, "--receipts-key-file", str(key_file), *STRICT)
    assert main(["audit", str(tmp_path / "full.json"), *keys]) == 0
    assert f"{room} tokens: 1 ok" in capsys.readouterr().err
    assert [body["priority"] for body in sent] == [100, 100]
    assert main(["audit", str(tmp_path / "edited.json"), "--priority", "-7", *keys]) == 1
    assert f"choice 0, token {room - 1}: " in capsys.readouterr().out
    assert [body["priority"] for body in sent[2:]] == [-7, -7]
    assert main(["replay", str(tmp_path / "edited.json"), *keys]) == 1
    assert f"now token {own}, logits " in capsys.readouterr().out
