"""Log probabilities in OpenAI's two shapes, and those of prompts in vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from deployments.http.generation import SampleDelta, ShownToken
from specdec.core.types import PromptLogprobs, TokenLogprobs
from specdec.text.detokenizer import TokenTexts

_LOWEST = -9999.0
"""What OpenAI writes for an impossible token; JSON has no infinity."""


class TokenNames(Protocol):
    """How single tokens are written."""

    def text(self, token: int) -> str:
        """The token's name."""
        ...

    def utf8(self, token: int) -> bytes:
        """The token's bytes."""
        ...


class TokenIdNames:
    """Tokens by their ids, as vLLM writes them: ``token_id:7``; no two have the same name.

    Args:
        texts: Give their bytes.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def text(self, token: int) -> str:
        """The token's id."""
        return f"token_id:{token}"

    def utf8(self, token: int) -> bytes:
        """The token's bytes."""
        return self._texts.utf8(token)


def completion_logprobs(
    texts: TokenNames, tokens: Sequence[int], entries: PromptLogprobs, offsets: Sequence[int], num_top: int
) -> dict[str, Any]:
    """The ``logprobs`` object of a completion.

    Args:
        texts: How tokens are written.
        tokens: The tokens; those of the prompt too, where it is echoed.
        entries: One per token; None becomes null.
        offsets: For each token, the number of characters of the choice's text before it.
        num_top: Alternatives asked for; with 0 there are none to list.
    """
    top = [
        None if entry is None else _top_by_text(texts, token, entry, num_top)
        for token, entry in zip(tokens, entries, strict=True)
    ]
    return {
        "tokens": [texts.text(token) for token in tokens],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": top if num_top else None,
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    texts: TokenTexts, tokens: Sequence[int], entries: PromptLogprobs, num_top: int
) -> list[dict[str, Any] | None]:
    """The ``prompt_logprobs`` of a choice: for each prompt token, null or a mapping by token id, its own first."""
    return [
        None if entry is None else _by_id(texts, token, entry, num_top)
        for token, entry in zip(tokens, entries, strict=True)
    ]


def chat_logprobs(texts: TokenNames, delta: SampleDelta) -> dict[str, Any] | None:
    """The ``logprobs`` object of a chat completion."""
    return None if delta.logprobs is None else {"content": chat_entries(texts, delta.logprobs), "refusal": None}


def chat_entries(texts: TokenNames, shown: Sequence[ShownToken]) -> list[dict[str, Any]]:
    """For each token an object, as in chat completions."""
    entries = []
    for one in shown:
        top = [_chat_entry(texts, other, logprob) for other, logprob in one.entry.top]
        entries.append(_chat_entry(texts, one.token, one.entry.logprob) | {"top_logprobs": top})
    return entries


def _chat_entry(texts: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": list(texts.utf8(token))}


def _top_by_text(texts: TokenNames, token: int, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """The most likely tokens and the chosen one; of two with the same text the more likely stands."""
    top: dict[str, float] = {}
    for other, logprob in (*entry.top[:num_top], (token, entry.logprob)):
        top.setdefault(texts.text(other), _finite(logprob))
    return top


def _by_id(texts: TokenTexts, token: int, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    ranked = {token: (entry.logprob, entry.rank)}
    for rank, (other, logprob) in enumerate(entry.top[:num_top], 1):
        ranked.setdefault(other, (logprob, rank))
    return {
        str(one): {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text(one)}
        for one, (logprob, rank) in ranked.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
