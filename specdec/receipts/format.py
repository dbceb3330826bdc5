"""What a receipt says, and the envelope that it travels in.

The envelope is DSSE's (https://github.com/secure-systems-lab/dsse, protocol v1): the receipt is JSON text inside a
base64 string, so that no client which reads and writes JSON anew can break the signature.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from specdec.core.errors import InvalidParameterError
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import Finish, Tokens
from specdec.receipts.signing import PublicKey, SigningKey

PAYLOAD_TYPE = "application/vnd.specdec.receipt+json"
FORMAT_VERSION = 1
LOGPROB_STRIDE = 8
"""Of every so many output tokens the log probability is told, beginning with the first."""


class ReceiptModel(Struct, frozen=True):
    """The model that answered.

    Attributes:
        name: As answers name it.
        weights: Hash of its weights and configuration: :func:`specdec.checkpoint.fingerprint.content_hashes`.
        tokenizer: Hash of its tokenizer.
        chat_template: SHA-256 of the template in force; empty where there is none.
        adapter: Fingerprint of the adapter in use; empty for none.
    """

    name: str
    weights: str
    tokenizer: str
    chat_template: str = ""
    adapter: str = ""


class ReceiptChoice(Struct, frozen=True):
    """One sample.

    Attributes:
        prompt: Number of its prompt.
        seed: Of its noise: see :func:`specdec.sampling.noise.derive_seed`.
        max_tokens: Most output tokens.
        token_ids: The output, as billed.
        finish_reason: How it ended.
        logprobs: Of output tokens 0, stride, 2 * stride, ...: the model's own, before any processing.
    """

    prompt: int
    seed: int
    max_tokens: int
    token_ids: Tokens
    finish_reason: Finish
    logprobs: tuple[float, ...]


class Receipt(Struct, frozen=True):
    """All that decides an answer's tokens, and the tokens.

    Attributes:
        id: Of the answer.
        created: Seconds since the epoch.
        contract: See :mod:`specdec.receipts.contract`.
        sampling: After defaults.
        stop: Strings that end a text.
        prompts: Token ids of each.
    """

    id: str
    created: int
    model: ReceiptModel
    contract: dict[str, str]
    sampling: SamplingParams
    seed: int
    stop: tuple[str, ...]
    eos_token_ids: Tokens
    prompts: tuple[Tokens, ...]
    choices: tuple[ReceiptChoice, ...]
    logprob_stride: int = LOGPROB_STRIDE
    version: int = FORMAT_VERSION

    def spec(self, choice: ReceiptChoice) -> SequenceSpec:
        """The parameters of one of its choices."""
        return SequenceSpec(
            self.sampling,
            choice.seed,
            len(self.prompts[choice.prompt]),
            choice.max_tokens,
            self.eos_token_ids,
        )


class Opened(NamedTuple):
    """A receipt from its envelope.

    Attributes:
        sha256: Of the payload, in hexadecimal: what the service logs.
        is_signed: Whether its signature was checked.
    """

    receipt: Receipt
    sha256: str
    is_signed: bool


def sealed(receipt: Receipt, key: SigningKey) -> tuple[dict[str, Any], str]:
    """The envelope of a receipt, as JSON holds it, and its payload's SHA-256."""
    payload = msgspec.json.encode(receipt, order="sorted")
    signature = {"keyid": key.keyid, "sig": _base64(key.sign(_to_be_signed(payload)))}
    envelope = {"payloadType": PAYLOAD_TYPE, "payload": _base64(payload), "signatures": [signature]}
    return envelope, hashlib.sha256(payload).hexdigest()


def opened(envelope: Any, key: PublicKey | None = None) -> Opened:
    """A receipt from its envelope, its signature checked where there is a key.

    Raises:
        InvalidParameterError: It is no receipt, of another version, or not signed with the key.
    """
    try:
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise ValueError(f"its payloadType is not {PAYLOAD_TYPE}")
        payload = base64.b64decode(envelope["payload"], validate=True)
        signatures = [base64.b64decode(one["sig"], validate=True) for one in envelope["signatures"]]
        version = msgspec.json.decode(payload).get("version")
        if version != FORMAT_VERSION:
            raise ValueError(f"its version is {version}, and only {FORMAT_VERSION} is read")
        receipt = msgspec.json.decode(payload, type=Receipt)
        if any(not 0 <= one.prompt < len(receipt.prompts) for one in receipt.choices) or receipt.logprob_stride < 1:
            raise ValueError("its choices name prompts that it does not have")
    except (KeyError, TypeError, AttributeError, ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise InvalidParameterError("receipt", f"this is no receipt: {error}") from None
    if key is not None and not any(key.verifies(one, _to_be_signed(payload)) for one in signatures):
        raise InvalidParameterError("receipt", f"the receipt {receipt.id} is not signed with the key {key.keyid}")
    return Opened(receipt, hashlib.sha256(payload).hexdigest(), key is not None)


def _to_be_signed(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
