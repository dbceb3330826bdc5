"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Any

from deployments.openai.generation import SampleDelta
from specdec.protocol.messages import TokenLogprobs
from specdec.text.pieces import TokenTexts

_LOWEST = -9999.0
"""What OpenAI writes for an impossible token; JSON has no infinity."""


def completion_logprobs(texts: TokenTexts, delta: SampleDelta, num_top: int, start: int) -> dict[str, Any] | None:
    """The ``logprobs`` object of a completion.

    Args:
        texts: The tokenizer's token texts.
        delta: The tokens.
        num_top: Alternatives asked for; with 0 there are none to list.
        start: Characters before the output, where the prompt is echoed.
    """
    if delta.logprobs is None:
        return None
    chosen = list(zip(delta.token_ids, delta.logprobs, strict=True))
    return {
        "tokens": [texts.text(token) for token, _ in chosen],
        "token_logprobs": [_finite(entry.logprob) for _, entry in chosen],
        "top_logprobs": [_top_by_text(texts, token, entry) for token, entry in chosen] if num_top else None,
        "text_offset": [start + offset for offset in delta.offsets],
    }


def chat_logprobs(texts: TokenTexts, delta: SampleDelta) -> dict[str, Any] | None:
    """The ``logprobs`` object of a chat completion."""
    if delta.logprobs is None:
        return None
    content = []
    for token, entry in zip(delta.token_ids, delta.logprobs, strict=True):
        top = [_chat_entry(texts, other, logprob) for other, logprob in entry.top]
        content.append(_chat_entry(texts, token, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": list(texts.utf8(token))}


def _top_by_text(texts: TokenTexts, token: int, entry: TokenLogprobs) -> dict[str, float]:
    """The most likely tokens and the chosen one; of two with the same text the more likely stands."""
    top: dict[str, float] = {}
    for other, logprob in (*entry.top, (token, entry.logprob)):
        top.setdefault(texts.text(other), _finite(logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
