"""Making receipts: what a service knows of itself, and what it notes of an answer while that is generated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.core.types import Finish, TokenLogprobs, Tokens
from specdec.receipts.format import LOGPROB_STRIDE
from specdec.receipts.signing import SigningKey


@dataclass(frozen=True, slots=True)
class ReceiptIssuer:
    """What all receipts of a service have in common.

    Attributes:
        key: Signs them.
        weights: Hash of the target's weights.
        tokenizer: Hash of its tokenizer.
        chat_template: Hash of the template in force: :func:`template_hash`.
    """

    key: SigningKey
    weights: str
    tokenizer: str
    chat_template: str


@dataclass(slots=True)
class ChoiceRecord:
    """One choice so far.

    Attributes:
        token_ids: Output tokens, as billed.
        logprobs: Of every token whose number is a multiple of the stride.
        finish: Why it ended, once it has.
        numeric: By which contract it was decided: see :class:`specdec.core.messages.Submit`.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    numeric: str = ""

    def add(self, tokens: Tokens, logprobs: Sequence[TokenLogprobs], finish: Finish | None, numeric: str = "") -> None:
        """Take more tokens, each with its log probability; there may be more of these."""
        start = -len(self.token_ids) % LOGPROB_STRIDE
        self.logprobs += [one.logprob for one in logprobs[start : len(tokens) : LOGPROB_STRIDE]]
        self.token_ids += tokens
        self.finish = finish
        self.numeric = numeric or self.numeric


def template_hash(template: Any) -> str:
    """SHA-256 of a chat template, or of a tokenizer's several by name; empty where there is none."""
    return "" if not template else hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
