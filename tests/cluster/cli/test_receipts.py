"""``specdec replay`` and ``specdec audit``: what they refuse, before any model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cluster.cli import main
from cluster.cli.receipts import own_model
from cluster.config.app import ServiceConfig
from specdec.core.params import SamplingParams
from specdec.receipts.format import Receipt, ReceiptChoice, ReceiptModel, sealed
from specdec.receipts.signing import SigningKey
from specdec.sampling.noise import derive_seed


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


@pytest.fixture(scope="module")
def receipt() -> Receipt:
    own = own_model(ServiceConfig())
    choice = ReceiptChoice(0, derive_seed(1, 0, 0), 2, (5, 6), "length", (-1.0,))
    return Receipt(
        id="cmpl-1",
        created=1,
        model=ReceiptModel("specdec-demo", own.weights, own.tokenizer),
        contract=own.contract,
        sampling=SamplingParams(),
        seed=1,
        stop=(),
        eos_token_ids=(0,),
        prompts=((1, 2),),
        choices=(choice,),
    )


def file_of(folder: Path, value: Any) -> str:
    file = folder / "file.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(file)


@pytest.mark.parametrize("command", ["replay", "audit"])
@pytest.mark.parametrize("content", ["no JSON", "[1]", "{}", '{"receipt": 3}'])
def test_what_is_no_receipt_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, content: str
) -> None:
    assert main([command, file_of(tmp_path, content)]) == 2
    assert capsys.readouterr().err.startswith(f"specdec {command}: ")
    assert main([command, str(tmp_path / "missing.json")]) == 2


def test_another_signature_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], receipt: Receipt, key: SigningKey
) -> None:
    envelope, _ = sealed(receipt, SigningKey(Ed25519PrivateKey.generate()))
    public = tmp_path / "public.pem"
    public.write_text(key.public.pem)
    for command in ("replay", "audit"):
        assert main([command, file_of(tmp_path, envelope), "--public-key", str(public)]) == 2
        assert "is not signed with the key" in capsys.readouterr().err


def test_another_model_or_contract_is_refused_by_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], receipt: Receipt, key: SigningKey
) -> None:
    other_isa = msgspec.structs.replace(receipt, contract=receipt.contract | {"isa": "other"})
    other_model = msgspec.structs.replace(receipt, model=msgspec.structs.replace(receipt.model, weights="sha256:0"))
    adapted = msgspec.structs.replace(receipt, model=msgspec.structs.replace(receipt.model, adapter="1"))
    for changed, text in (
        (other_isa, "numeric_contract: isa is other there"),
        (other_model, "names other weights or another tokenizer"),
        (adapted, "with an adapter"),
    ):
        assert main(["replay", file_of(tmp_path, sealed(changed, key)[0])]) == 2
        assert text in capsys.readouterr().err


def test_a_share_is_a_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], receipt: Receipt, key: SigningKey
) -> None:
    file = file_of(tmp_path, sealed(receipt, key)[0])
    for share in ("0", "1.5", "-1"):
        assert main(["audit", file, "--share", share]) == 2
        assert "--share must be above 0" in capsys.readouterr().err


def test_a_service_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], receipt: Receipt, key: SigningKey
) -> None:
    file = file_of(tmp_path, sealed(receipt, key)[0])
    assert main(["replay", file, "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err
