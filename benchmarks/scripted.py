"""Backends without a model: tokens by a hash, so that acceptance and next guesses are dials.

The true token at a position is a hash of (seed, position), whatever stands before it. A draft token is right with a
given probability, independently by position; where it is wrong, the true token is among the next three guesses with
another. Everything is a function of seed and position, so that every schedule gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np

from specdec.core.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.core.drafts import depths
from specdec.core.params import SequenceSpec
from specdec.core.types import TokenLogprobs, Tokens
from specdec.sampling.acceptance import walk_draft

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROPOSALS_KEPT = 1 << 13
_SEED_AND_POSITION = Struct("<QQ")

RANK_SHARES = (0.7, 0.2, 0.1)
"""Where the true token stands among a wrong draft token's first three guesses, if it is there."""


@dataclass(frozen=True, slots=True)
class Script:
    """What the scripted backends say.

    Attributes:
        acceptance_rate: Probability that a draft token is the true one.
        next_guess_rate: Probability that, where it is not, the true token is among the next three guesses.
        vocabulary: Ids that may be said; at least 8, so that there are wrong ones to guess.
    """

    acceptance_rate: float
    next_guess_rate: float
    vocabulary: Tokens

    def true_token(self, seed: int, position: int) -> int:
        """The token at an absolute position of a sequence."""
        return self.vocabulary[self._true_index(seed, position)]

    def draft_tokens(self, seed: int, position: int, num_guesses: int) -> Tokens:
        """The draft's token at a position, and ``num_guesses`` more, the likeliest first; all different."""
        rank = self._true_rank(seed, position)
        true, size = self._true_index(seed, position), len(self.vocabulary)
        count = min(1 + num_guesses, size - 1)
        said = [self.vocabulary[(true + 1 + i) % size] for i in range(count)]
        if rank is not None and rank < count:
            said.insert(rank, self.vocabulary[true])
        return tuple(said[:count])

    def _true_index(self, seed: int, position: int) -> int:
        return _hash(seed, position, b"true") % len(self.vocabulary)

    def _true_rank(self, seed: int, position: int) -> int | None:
        """Where the true token stands: 0 is the draft token itself, 1 to 3 the guesses, None nowhere."""
        if _uniform(seed, position, b"accept") < self.acceptance_rate:
            return 0
        if _uniform(seed, position, b"guess") >= self.next_guess_rate:
            return None
        drawn = _uniform(seed, position, b"rank")
        reached = (drawn < share for share in accumulate(RANK_SHARES[:-1]))
        return next((rank for rank, is_reached in enumerate(reached, 1) if is_reached), len(RANK_SHARES))


LOGIT_SCALE, ERROR_SCALE = 3.0, 0.88
"""Deviations of the target's logits, and of a drafter's errors: it is right at .7 of places."""
_SHARED, _OWN = 1, 2


@dataclass(frozen=True, slots=True)
class ErringScript(Script):
    """What a drafter says whose logits are the target's with errors, which it has in part in common with others.

    Both add the same Gumbel noise. Logits, noise and errors are drawn by position; ``acceptance_rate`` and
    ``next_guess_rate`` do not count.

    Attributes:
        number: Of the drafter: others err elsewhere.
        correlation: Of its logits' errors with those of any other, in [0, 1].
    """

    number: int = 0
    correlation: float = 0.0

    def _true_rank(self, seed: int, position: int) -> int | None:
        size = len(self.vocabulary)
        shared = np.random.default_rng((_SHARED, seed, position))
        scores = LOGIT_SCALE * shared.standard_normal(size) + shared.gumbel(size=size)
        own = np.random.default_rng((_OWN, seed, position, self.number)).standard_normal(size)
        errors = self.correlation**0.5 * shared.standard_normal(size) + (1 - self.correlation) ** 0.5 * own
        drafted = scores + ERROR_SCALE * errors
        return int((drafted > drafted[scores.argmax()]).sum())


class ScriptedTarget:
    """A :class:`specdec.core.backends.TargetBackend` that says what the script does, for any sequence.

    A draft token is kept where it is the true one, under either acceptance rule.
    """

    def __init__(self, script: Script, max_model_len: int) -> None:
        self._script = script
        self.max_model_len = max_model_len

    def metrics(self) -> dict[str, float]:
        """Scripted tokens hold nothing."""
        return {"backend/is_scripted": 1.0}

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """One step; see :meth:`specdec.core.backends.TargetBackend.verify`."""
        return [self._verify(job) for job in jobs]

    def release(self, key: str) -> None:
        """Nothing is held."""

    def _verify(self, job: VerifyJob) -> Verification:
        seed, length = job.spec.seed, len(job.log)
        places = (0, *depths(job.parents or range(-1, len(job.draft) - 1)))
        chosen = [self._script.true_token(seed, length + place) for place in places]
        walked = walk_draft(chosen, job.draft, job.parents)
        logprobs = _logprobs(job.spec, len(walked.run))
        return Verification(Status.DECIDED, walked.run, walked.num_accepted, len(job.draft), logprobs)


class ScriptedDrafter:
    """A :class:`specdec.core.backends.DraftBackend` that guesses as the script says."""

    def __init__(self, script: Script, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        # The branches of a sequence ask for the same positions, and so does the chain after them.
        self._said = lru_cache(_PROPOSALS_KEPT)(_Proposals(script))

    def metrics(self) -> dict[str, float]:
        """Scripted tokens hold nothing."""
        return {"backend/is_scripted": 1.0}

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """One step; see :meth:`specdec.core.backends.DraftBackend.propose`."""
        return [self._said(job.spec.seed, len(job.tokens), job.num_guesses) for job in jobs]

    def rest(self) -> None:
        """Nothing is to be done."""

    def rename(self, key: str, new_key: str) -> None:
        """Nothing is held."""

    def release(self, key: str) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class _Proposals:
    """What is proposed at a position of a sequence, however it is asked for."""

    script: Script

    def __call__(self, seed: int, position: int, num_guesses: int) -> Proposal:
        token, *guesses = self.script.draft_tokens(seed, position, num_guesses)
        return Proposal(Status.DECIDED, token, tuple(guesses))


def plain_token_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Tokens:
    """Ids of tokens that are printable ASCII by themselves: a text of them has no unfinished character."""
    special = set(tokenizer.all_special_ids)
    texts = tokenizer.batch_decode([[token] for token in range(vocab_size)])
    plain = (token for token, text in enumerate(texts) if token not in special and text.isascii())
    return tuple(token for token in plain if texts[token].isprintable() and texts[token])


def _logprobs(spec: SequenceSpec, count: int) -> tuple[TokenLogprobs, ...] | None:
    """A script is certain of what it says."""
    return None if spec.sampling.logprobs is None else (TokenLogprobs(0.0, 1),) * count


def _hash(seed: int, position: int, purpose: bytes) -> int:
    message = _SEED_AND_POSITION.pack(seed, position)
    return int.from_bytes(blake2b(message, digest_size=8, key=purpose).digest(), "little")


def _uniform(seed: int, position: int, purpose: bytes) -> float:
    """In [0, 1)."""
    return (_hash(seed, position, purpose) >> 11) / 2**53
