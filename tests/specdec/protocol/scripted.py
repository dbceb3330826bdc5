"""What the requests of a random schedule say, and backends that say it without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.protocol.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.protocol.marks import TokenLog, Tokens
from specdec.protocol.messages import Candidates, Finish, TokenLogprobs
from specdec.sampling.params import SamplingParams, SequenceSpec

EOS, STOP, VOCAB = 0, 1, 14
PROMPT = (7, 7)


class ViolationError(Exception):
    """The protocol has broken a promise."""


def expect(holds: bool, promise: str) -> None:
    if not holds:
        raise ViolationError(promise)


@dataclass(frozen=True)
class Script:
    """One request. ``true`` is its only possible output under the coupled rule, and goes on beyond its finish."""

    seq: str
    arrival: int
    spec: SequenceSpec
    true: Tokens
    max_model_len: int

    @classmethod
    def random(cls, rng: random.Random, seq: str, max_model_len: int, *, coupled: bool) -> Script:
        sampling = SamplingParams(
            acceptance="coupled" if coupled else "rejection",
            stop_token_ids=rng.choice(((), (STOP,))),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice((None, 1)),
        )
        arrival = rng.randint(0, 15)
        spec = SequenceSpec(sampling, 0, len(PROMPT), rng.randint(4, 30), eos_token_ids=(EOS,), arrival_s=arrival)
        true = tuple(rng.randrange(VOCAB) for _ in range(max_model_len + 20))
        return cls(seq, arrival, spec, true, max_model_len)

    def finish(self, log: Tokens) -> Finish | None:
        """Why a log ends here, told without the code under test; None if it does not."""
        output = log[len(PROMPT) :]
        if output and (
            (output[-1] == EOS and not self.spec.sampling.ignore_eos) or output[-1] in self.spec.sampling.stop_token_ids
        ):
            return "stop"
        return "length" if len(output) >= self.spec.max_tokens or len(log) >= self.max_model_len else None


class ScriptedTarget:
    """A target's backend with room for ``room`` sequences; reading a sequence takes a step of its own.

    Coupled rule: a token is a function of request and position. Otherwise it is drawn anew each time, and mostly the
    drafted one, as under the rejection rule: whoever decides a position again decides something else.
    """

    def __init__(self, scripts: dict[str, Script], rng: random.Random, *, coupled: bool, room: int) -> None:
        self._scripts, self._rng, self._coupled, self._room = scripts, rng, coupled, room
        self._skips_bonus = not coupled and rng.random() < 0.5
        self.max_model_len = next(iter(scripts.values())).max_model_len
        self.held: set[str] = set()
        self.waiting: set[str] = set()

    def release(self, key: str) -> None:
        self.held.discard(key)

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        keys = [job.key for job in jobs]
        expect(len(set(keys)) == len(keys), "a sequence is twice in a batch")
        arrivals = [job.spec.arrival_s for job in jobs]
        expect(arrivals == sorted(arrivals), "a batch is not in order of arrival")
        taken, self.waiting = set(keys[: self._room]), set(keys[self._room :])
        read = taken & self.held
        if len(self.held | taken) > self._room:
            self.held &= taken
        self.held |= taken
        return [self._decide(job) if job.key in read else self._pass(job.key in taken) for job in jobs]

    def _pass(self, taken: bool) -> Verification:
        return Verification(Status.PREFILLING if taken else Status.WAITING)

    def _decide(self, job: VerifyJob) -> Verification:
        spec, position = job.spec, len(job.log) - len(PROMPT)
        expect(position + len(job.draft) < spec.max_tokens, "a draft is longer than max_tokens allows")
        expect(len(job.log) + len(job.draft) < self.max_model_len, "a draft is longer than the context allows")
        drawn_from = [candidates.ids for candidates in job.candidates]
        expect(self._coupled or drawn_from == [(token,) for token in job.draft], "candidates of other draft tokens")
        draft = job.draft[: self._rng.randint(0, 3)] if self._rng.random() < 0.1 else job.draft  # memory was short
        run: list[int] = []
        for drafted in draft:
            run.append(self._token(job.key, position + len(run), drafted))
            if run[-1] != drafted:
                break
        num_accepted = len(run) - (bool(run) and run[-1] != draft[len(run) - 1])
        if len(run) == num_accepted and not (draft and self._skips_bonus):
            run.append(self._token(job.key, position + len(run), None))
        logprobs = None
        if spec.sampling.logprobs is not None:
            logprobs = tuple(TokenLogprobs(-float(token), position + i + 1) for i, token in enumerate(run))
        return Verification(Status.DECIDED, tuple(run), num_accepted, len(draft), logprobs)

    def _token(self, key: str, position: int, drafted: int | None) -> int:
        if self._coupled:
            return self._scripts[key].true[position]
        if drafted is not None and self._rng.random() < 0.7:
            return drafted
        return self._rng.randrange(VOCAB)


class ScriptedDraft:
    """A drafter's backend: the true token with probability ``skill``, else any; room for two sequences."""

    def __init__(self, scripts: dict[str, Script], rng: random.Random, *, skill: float, max_model_len: int) -> None:
        self._scripts, self._rng, self._skill = scripts, rng, skill
        self.max_model_len = max_model_len
        self.held: dict[str, list[int]] = {}

    def release(self, key: str) -> None:
        self.held.pop(key, None)

    def rename(self, key: str, new_key: str) -> None:
        if key in self.held:
            self.held[new_key] = self.held.pop(key)

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        for job in jobs:
            last = self.held.get(job.key)
            if last is not None:
                expect(last[: job.agreed] == job.tokens[: job.agreed], "a draft job does not agree as far as it says")
            expect(job.agreed <= len(job.tokens) <= self.max_model_len, "a draft job is longer than the model reads")
        taken = {job.key: list(job.tokens) for job in jobs[:2]}
        read = taken.keys() & self.held.keys()
        if len(self.held.keys() | taken.keys()) > 2:
            self.held = {key: tokens for key, tokens in self.held.items() if key in taken}
        self.held.update(taken)
        return [self._draw(job) if job.key in read else self._pass(job.key in taken) for job in jobs]

    def _pass(self, taken: bool) -> Proposal:
        return Proposal(Status.PREFILLING if taken else Status.WAITING)

    def _draw(self, job: DraftJob) -> Proposal:
        token = self.guess(job.key, len(job.tokens))
        is_coupled = job.spec.sampling.acceptance == "coupled"
        return Proposal(Status.DECIDED, token, None if is_coupled else Candidates((token,), (1.0,)))

    def guess(self, key: str, length: int) -> int:
        """What may stand at absolute position ``length``."""
        if self._rng.random() < self._skill:
            return self._scripts[key].true[length - len(PROMPT)]
        return self._rng.randrange(VOCAB)


def log_of(tokens: Sequence[int]) -> TokenLog:
    """A log of the prompt and ``tokens``."""
    return TokenLog((*PROMPT, *tokens))
