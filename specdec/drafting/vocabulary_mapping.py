"""A drafter's jobs in the vocabulary of its own model, where that is not the target's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.checkpoint.vocabulary import Translation
from specdec.core.backends import DraftJob
from specdec.core.tokens import TokenBuffer, as_list, common_prefix_length


@dataclass(slots=True)
class _Text:
    """A sequence in both vocabularies: ``ends[i]`` tokens of the draft's spell the first ``i`` of the target's."""

    tokens: TokenBuffer
    in_draft: list[int]
    ends: list[int]

    def first(self, length: int) -> _Text:
        return _Text(TokenBuffer(self.tokens[:length]), self.in_draft[: self.ends[length]], self.ends[: length + 1])


class Translator:
    """Reads jobs to a draft model of another vocabulary; each token is translated once."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._empty = _Text(TokenBuffer(), [*translation.beginning], [len(translation.beginning)])
        self._texts: dict[str, _Text] = {}

    def logits(self, draft_logits: Tensor) -> Tensor:
        """See :meth:`Translation.logits`; the maps are uploaded at the first call."""
        self._translation = self._translation.on(draft_logits.device)
        return self._translation.logits(draft_logits)

    def translated(self, job: DraftJob) -> DraftJob:
        """The same job in the draft's tokens, lengths too."""
        text = self._texts.get(job.key) or self._texts.get(job.fork_of or "") or self._empty
        kept = common_prefix_length(text.tokens.array, job.tokens)
        new = as_list(job.tokens[kept:])
        if kept < len(text.tokens) or text is not self._texts.get(job.key):
            text = self._texts[job.key] = text.first(kept)
        for token in new:
            text.in_draft.extend(self._translation.spelled[token])
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
