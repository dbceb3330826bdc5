"""A drafter's jobs in the vocabulary of its own model, where that is not the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.checkpoint.compat import VocabularyMapping
from specdec.core.backends import DraftJob
from specdec.core.tokens import TokenBuffer, as_list, common_prefix_length

_NOT_SHARED = -1e4
"""Logit of a token that the draft lacks: never drawn, unless a grammar allows no token that both have."""


@dataclass(slots=True)
class _Text:
    """A sequence in both vocabularies: ``ends[i]`` tokens of the draft's spell the first ``i`` of the target's."""

    tokens: TokenBuffer
    in_draft: list[int]
    ends: list[int]

    def first(self, length: int) -> _Text:
        return _Text(TokenBuffer(self.tokens[:length]), self.in_draft[: self.ends[length]], self.ends[: length + 1])


class VocabularyMapper:
    """Maps jobs to the vocabulary of the draft model; each token is mapped once."""

    def __init__(self, mapping: VocabularyMapping) -> None:
        self._mapping = mapping
        self._shared = torch.from_numpy(mapping.shared), torch.from_numpy(mapping.shared_in_draft)
        self._empty = _Text(TokenBuffer(), [*mapping.beginning], [len(mapping.beginning)])
        self._texts: dict[str, _Text] = {}

    def logits(self, draft_logits: Tensor) -> Tensor:
        """The draft's logits [N, its width] as float32 [N, vocab_size], in the order of the target's tokens.

        The maps are uploaded at the first call.
        """
        device = draft_logits.device
        if self._shared[0].device != device:
            self._shared = self._shared[0].to(device), self._shared[1].to(device)
        logits = torch.full((len(draft_logits), self._mapping.vocab_size), _NOT_SHARED, device=device)
        shared, shared_in_draft = self._shared
        logits[:, shared] = draft_logits[:, shared_in_draft].float()
        return logits

    def mapped(self, job: DraftJob) -> DraftJob:
        """The same job in the draft's tokens, lengths too."""
        text = self._texts.get(job.key) or self._texts.get(job.fork_of or "") or self._empty
        kept = common_prefix_length(text.tokens.array, job.tokens)
        new = as_list(job.tokens[kept:])
        if kept < len(text.tokens) or text is not self._texts.get(job.key):
            text = self._texts[job.key] = text.first(kept)
        for token in new:
            text.in_draft.extend(self._mapping.spelled[token])
            text.ends.append(len(text.in_draft))
        text.tokens.extend(new)
        agreed, num_committed = (text.ends[min(length, len(job.tokens))] for length in (job.agreed, job.num_committed))
        return job._replace(tokens=text.in_draft, agreed=agreed, num_committed=num_committed)

    def rename(self, key: str, new_key: str) -> None:
        """What is known of a branch is its sequence's from now on."""
        text = self._texts.pop(key, None)
        if text is not None:
            self._texts[new_key] = text

    def release(self, key: str) -> None:
        """Forget a sequence; unknown keys are ignored."""
        self._texts.pop(key, None)
