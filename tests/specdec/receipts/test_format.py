"""Envelopes: what is signed is what is read, and nothing else."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from specdec.core.errors import InvalidParameterError
from specdec.core.grammar import Grammar
from specdec.core.params import SamplingParams
from specdec.core.types import TokenLogprobs
from specdec.receipts.contract import contract_difference, numeric_contract
from specdec.receipts.format import PAYLOAD_TYPE, Receipt, ReceiptChoice, ReceiptModel, opened, sealed
from specdec.receipts.issue import ChoiceRecord
from specdec.receipts.signing import SigningKey, load_signing_key, read_public_key

SAMPLING = SamplingParams(
    temperature=0.7, logit_bias=((5, 1.5),), bad_words=((1, 2),), grammar=Grammar("regex", "[ab]+")
)
RECEIPT = Receipt(
    id="cmpl-1",
    created=7,
    model=ReceiptModel("demo", "sha256:aa", "sha256:bb"),
    contract=numeric_contract("float32", "cpu"),
    sampling=SAMPLING,
    seed=2**64 - 1,
    stop=("\n",),
    eos_token_ids=(0,),
    prompts=((1, 2), (3,)),
    choices=(ReceiptChoice(1, 2**63 + 1, 16, (4, 5), "length", (-0.5,)),),
)


@pytest.fixture
def key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


def edited(envelope: dict[str, Any], change: Any) -> dict[str, Any]:
    receipt = json.loads(base64.b64decode(envelope["payload"]))
    change(receipt)
    return envelope | {"payload": base64.b64encode(json.dumps(receipt).encode()).decode()}


def test_what_was_sealed_is_opened(key: SigningKey) -> None:
    envelope, sha256 = sealed(RECEIPT, key)
    sent = json.loads(json.dumps(envelope, indent=2))
    found = opened(sent, read_public_key(key.public.pem))
    assert found == (RECEIPT, sha256, True)
    assert not opened(sent).is_signed
    spec = found.receipt.spec(found.receipt.choices[0])
    assert (spec.seed, spec.output_start, spec.max_tokens, spec.sampling) == (2**63 + 1, 1, 16, SAMPLING)


def test_another_library_finds_the_signature_that_dsse_describes(key: SigningKey) -> None:
    envelope, _ = sealed(RECEIPT, key)
    payload = base64.b64decode(envelope["payload"])
    said = b"DSSEv1 " + str(len(PAYLOAD_TYPE)).encode() + b" " + PAYLOAD_TYPE.encode()
    said += b" " + str(len(payload)).encode() + b" " + payload
    public = load_pem_public_key(key.public.pem.encode())
    public.verify(base64.b64decode(envelope["signatures"][0]["sig"]), said)


def test_what_was_edited_or_signed_by_another_is_refused(key: SigningKey) -> None:
    envelope, _ = sealed(RECEIPT, key)
    for change in (
        lambda receipt: receipt["choices"][0].update(token_ids=[4, 6]),
        lambda receipt: receipt["sampling"].update(temperature=0.8),
        lambda receipt: receipt["model"].update(weights="sha256:cc"),
    ):
        opened(edited(envelope, change))  # well-formed
        with pytest.raises(InvalidParameterError, match="not signed with the key"):
            opened(edited(envelope, change), key.public)
    with pytest.raises(InvalidParameterError, match="not signed with the key"):
        opened(envelope, SigningKey(Ed25519PrivateKey.generate()).public)


@pytest.mark.parametrize(
    "change",
    [
        lambda receipt: receipt.pop("prompts"),
        lambda receipt: receipt.update(version=99),
        lambda receipt: receipt["choices"][0].update(prompt=2),
        lambda receipt: receipt.update(logprob_stride=0),
    ],
)
def test_what_is_no_receipt_is_refused_by_name(key: SigningKey, change: Any) -> None:
    envelope, _ = sealed(RECEIPT, key)
    for broken in (edited(envelope, change), {}, [], envelope | {"payload": "?"}, envelope | {"payloadType": "x"}):
        with pytest.raises(InvalidParameterError, match="this is no receipt"):
            opened(broken)


def test_keys_are_those_of_openssl(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", file], check=True, timeout=60)
    key = load_signing_key(file)
    assert read_public_key(key.public.pem).keyid == key.keyid
    for name, text in (("missing", None), ("text", "hello"), ("public", key.public.pem)):
        other = tmp_path / name
        if text is not None:
            other.write_text(text)
        with pytest.raises(InvalidParameterError, match=r"receipts\.key_file"):
            load_signing_key(other)


def test_every_eighth_log_probability_is_noted_however_the_tokens_come() -> None:
    entries = [TokenLogprobs(float(-i), 1) for i in range(40)]
    for size in (1, 3, 8, 11):
        record = ChoiceRecord()
        for start in range(0, 30, size):
            tokens = tuple(range(start, min(start + size, 30)))
            record.add(tokens, entries[start : start + size + 2], None)
        assert record.token_ids == list(range(30))
        assert record.logprobs == [0, -8, -16, -24]


def test_contracts_name_what_differs() -> None:
    own = numeric_contract("bfloat16", "cpu")
    assert contract_difference(own, own) == ""
    assert contract_difference(own, own | {"isa": "AVX2"}) == f"isa is AVX2 there and {own['isa']} here"
    assert "isa is nothing there" in contract_difference(own, {k: v for k, v in own.items() if k != "isa"})
