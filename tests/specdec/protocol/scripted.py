"""What the requests of a random schedule say, and backends that say it without a model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.core.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.core.drafts import children_of, path_to
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.core.types import Finish, TokenLogprobs, Tokens

EOS, STOP, VOCAB = 0, 1, 14
NO_ID = 2**31
"""No token has this id: it does not fit into 32 bits."""
PROMPT = (7, 7)


class ViolationError(BaseException):
    """The protocol has broken a promise. No machine contains it."""


class DiesError(BaseException):
    """The process in which it is raised dies."""

    def __init__(self, seq: str) -> None:
        super().__init__(seq)
        self.seq = seq


class StepError(Exception):
    """A step fails as a whole, and the process lives on."""


def expect(holds: bool, promise: str) -> None:
    if not holds:
        raise ViolationError(promise)


@dataclass(frozen=True)
class Script:
    """One request. ``true`` is the only output of a target that repeats itself, and goes on beyond its finish.

    Attributes:
        poison: What happens to a step that decides its output from position ``poison_from`` on: nothing, an error of
            its own sequence, an error of the step as a whole, or the death of the process.
        draft_poison: The same for steps that draft for it, but for the death.
        draft_fault: What is wrong with drafts for it: nothing, ``id`` where some hold an id that no token can have, or
            ``step`` where each step fails that verifies one.
    """

    seq: str
    arrival: int
    spec: SequenceSpec
    true: Tokens
    max_model_len: int
    poison: str = ""
    poison_from: int = 0
    draft_poison: str = ""
    draft_fault: str = ""

    @classmethod
    def random(cls, rng: random.Random, seq: str, max_model_len: int) -> Script:
        sampling = SamplingParams(
            stop_token_ids=rng.choice(((), (STOP,))),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice((None, 1)),
        )
        arrival = rng.randint(0, 15)
        spec = SequenceSpec(
            sampling,
            0,
            len(PROMPT),
            rng.randint(4, 30),
            eos_token_ids=(EOS,),
            arrival_s=arrival,
            priority=rng.choice((0, 0, 0, 1, -1)),
        )
        true = tuple(rng.randrange(VOCAB) for _ in range(max_model_len + 20))
        spec = replace(spec, prediction=SharedTokens(_nearly(true)))
        poison = rng.choice(("",) * 9 + ("sequence", "step", "process"))
        draft_poison = rng.choice(("",) * 9 + ("sequence", "step"))
        poisons = poison, rng.randint(0, 5), draft_poison
        return cls(seq, arrival, spec, true, max_model_len, *poisons, _fault_of_drafts(true))

    def poisons(self, log: Sequence[int]) -> str:
        """What happens to a step that decides what comes after a log."""
        return self.poison if len(log) - len(PROMPT) >= self.poison_from else ""

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

    If it repeats itself, a token is a function of request and position. Otherwise it is drawn anew each time, mostly
    as drafted: whoever decides a position again decides something else, as where rounding depends on the batch.
    """

    def __init__(
        self,
        scripts: dict[str, Script],
        rng: random.Random,
        *,
        repeats: bool,
        room: int,
        draft_models: Sequence[DraftModel] = (),
        takes_trees: bool = True,
    ) -> None:
        self._scripts, self._rng, self._repeats, self._room = scripts, rng, repeats, room
        self._draft_models, self._takes_trees = draft_models, takes_trees
        self._skips_bonus = not repeats and rng.random() < 0.5
        self.max_model_len = next(iter(scripts.values())).max_model_len
        self.failing = 0.0
        self.num_alone: Counter[str] = Counter()
        self.held: set[str] = set()
        self.waiting: set[str] = set()

    def release(self, key: str) -> None:
        self.held.discard(key)

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        keys = [job.key for job in jobs]
        expect(len(set(keys)) == len(keys), "a sequence is twice in a batch")
        orders = [(job.spec.priority, job.spec.arrival_s) for job in jobs]
        expect(orders == sorted(orders), "a batch is not in order of priority and arrival")
        taken, self.waiting = set(keys[: self._room]), set(keys[self._room :])
        read = taken & self.held
        if len(self.held | taken) > self._room:
            self.held &= taken
        self.held |= taken
        self._fail([job for job in jobs if job.key in read], jobs)
        return [self._decide(job) if job.key in read else self._pass(job.key in taken) for job in jobs]

    def _fail(self, deciding: Sequence[VerifyJob], jobs: Sequence[VerifyJob]) -> None:
        for job in deciding:
            if self._scripts[job.key].poisons(job.log.tokens) == "process":
                raise DiesError(job.key)
        if any(job.draft and self._scripts[job.key].draft_fault == "step" for job in deciding):
            raise StepError("this step fails with its drafts")
        poisoned = any(self._scripts[job.key].poisons(job.log.tokens) == "step" for job in deciding)
        if poisoned or self._rng.random() < self.failing:
            if len(jobs) == 1 and not jobs[0].draft:
                self.num_alone[jobs[0].key] += 1
            raise StepError("this step fails")

    def _pass(self, taken: bool) -> Verification:
        return Verification(Status.PREFILLING if taken else Status.WAITING)

    def _decide(self, job: VerifyJob) -> Verification:
        if self._scripts[job.key].poisons(job.log.tokens) == "sequence":
            return Verification(Status.FAILED, reason="this sequence fails")
        spec, position = job.spec, len(job.log) - len(PROMPT)
        draft = job.proposed
        expect(position + draft.depth < spec.max_tokens, "a draft is longer than max_tokens allows")
        expect(len(job.log) + draft.depth < self.max_model_len, "a draft is longer than the context allows")
        self._check_draft(job)
        draft = draft if self._takes_trees else draft.chain()
        if self._rng.random() < 0.1:
            draft = draft.only(range(min(len(draft.tokens), self._rng.randint(0, 3))))  # memory was short
        children = children_of(draft.parents or range(-1, len(draft.tokens) - 1))
        run: list[int] = []
        at, num_accepted = -1, 0
        while at in children and len(run) == num_accepted:
            options = [draft.tokens[i] for i in children[at]]
            run.append(self._token(job.key, position + len(run), self._rng.choice(options)))
            if run[-1] in options:
                at, num_accepted = children[at][options.index(run[-1])], num_accepted + 1
        if len(run) == num_accepted and not (draft.tokens and self._skips_bonus):
            run.append(self._token(job.key, position + len(run), None))
        logprobs = None
        if spec.sampling.logprobs is not None:
            logprobs = tuple(TokenLogprobs(-float(token), position + i + 1) for i, token in enumerate(run))
        return Verification(Status.DECIDED, tuple(run), num_accepted, len(draft.tokens), logprobs)

    def _check_draft(self, job: VerifyJob) -> None:
        """What is drafted is what a draft model says after these very tokens."""
        if job.source in ("ngram", "prediction"):
            return  # what the target looked up may be anything
        parents = job.parents or range(-1, len(job.draft) - 1)
        siblings = [(parent, token) for parent, token in zip(parents, job.draft, strict=True)]
        expect(len(set(siblings)) == len(siblings), "a token of a tree is in it twice")
        for i, token in enumerate(job.draft):
            tokens = [*job.log.tokens, *(job.draft[node] for node in path_to(parents, i)[:-1])]
            said = [model.token(job.key, tokens) for model in self._draft_models]
            expect(token in said, "a draft that was made for another log")

    def _token(self, key: str, position: int, drafted: int | None) -> int:
        if self._repeats:
            return self._scripts[key].true[position]
        if drafted is not None and self._rng.random() < 0.7:
            return drafted
        return self._rng.randrange(VOCAB)


class DraftModel:
    """What drafters say: a function of all tokens before. The true token with probability ``skill``, else any."""

    def __init__(self, scripts: dict[str, Script], seed: int, *, skill: float) -> None:
        self._scripts, self._seed, self._skill = scripts, seed, skill

    def token(self, seq: str, tokens: Sequence[int]) -> int:
        x = hash((self._seed, tuple(tokens)))
        if self._scripts[seq].draft_fault == "id" and x % 7 == 0:
            return NO_ID
        return self._true(seq, tokens) if x % 1000 < self._skill * 1000 else x // 1000 % VOCAB

    def poison(self, job: DraftJob) -> str:
        """What happens to a step that drafts for a sequence."""
        return self._scripts[job.fork_of or job.key].draft_poison

    def guesses(self, seq: str, tokens: Sequence[int], count: int) -> Tokens:
        """Others that may come there, distinct, the true one mostly among them."""
        x, token = hash((self._seed, 1, tuple(tokens))), self.token(seq, tokens)
        others = [(x + i) % VOCAB for i in range(VOCAB)]
        if x // VOCAB % 3:
            others.insert(x % 2, self._true(seq, tokens))
        return tuple(dict.fromkeys(other for other in others if other != token))[:count]

    def _true(self, seq: str, tokens: Sequence[int]) -> int:
        return self._scripts[seq].true[len(tokens) - len(PROMPT)]


class ScriptedDraft:
    """A drafter's backend with room for ``room`` sequences and branches; what is begun anew takes a step to read.

    A step gives each of them ``num_step_tokens`` tokens, whether they are of use or not.
    """

    def __init__(self, model: DraftModel, *, room: int, max_model_len: int, num_step_tokens: int = 1) -> None:
        self._model, self._room, self._num_step_tokens = model, room, num_step_tokens
        self.max_model_len = max_model_len
        self.held: dict[str, list[int]] = {}

    def release(self, key: str) -> None:
        self.held.pop(key, None)

    def rest(self) -> None:
        pass

    def rename(self, key: str, new_key: str) -> None:
        expect(key.startswith(f"{new_key}#"), "a branch becomes another sequence")
        if key in self.held:
            self.held[new_key] = self.held.pop(key)

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        ranks = [(job.fork_of is not None, job.spec.priority, job.spec.arrival_s, job.key) for job in jobs]
        expect(ranks == sorted(set(ranks)), "jobs are not in order of priority and arrival, branches last, each once")
        taken = {job.key for job in jobs[: self._room]}
        if len(self.held.keys() | taken) > self._room:
            self.held = {key: tokens for key, tokens in self.held.items() if key in taken}
        if any(self._model.poison(job) == "step" for job in jobs if job.key in taken):
            self.held.update({job.key: list(job.tokens) for job in jobs if job.key in taken})
            raise StepError("this step fails")
        return [self._propose(job, taken=job.key in taken) for job in jobs]

    def _check_agreed(self, job: DraftJob, base: list[int]) -> None:
        expect(base[: job.agreed] == [*job.tokens[: job.agreed]], "a draft job does not agree as far as it says")

    def _propose(self, job: DraftJob, *, taken: bool) -> Proposal:
        expect(job.agreed <= len(job.tokens) <= self.max_model_len, "a draft job is longer than the model reads")
        expect(job.fork_of is None or job.key.startswith(f"{job.fork_of}#"), "a branch of another sequence")
        base = self.held.get(job.key)
        if base is None and job.fork_of is not None:
            base = self.held.get(job.fork_of)
        if base is not None:
            self._check_agreed(job, base)
        if not taken:
            return Proposal(Status.WAITING)
        self.held[job.key] = list(job.tokens)
        if self._model.poison(job) == "sequence":
            return Proposal(Status.FAILED)
        if base is None:
            return Proposal(Status.PREFILLING)
        drawn: list[Proposal] = []
        for _ in range(self._num_step_tokens):
            tokens = [*job.tokens, *(one.token for one in drawn)]
            if not drawn or len(tokens) < self.max_model_len:
                drawn.append(self._draw(job._replace(tokens=tokens)))
        return drawn[0]._replace(further=tuple(drawn[1:]))

    def _draw(self, job: DraftJob) -> Proposal:
        seq = job.fork_of or job.key
        token = self._model.token(seq, job.tokens)
        return Proposal(Status.DECIDED, token, self._model.guesses(seq, job.tokens, job.num_guesses))


def _nearly(true: Tokens) -> Tokens:
    """Of every third request, an output with some tokens changed; drawn from the output alone."""
    rng = random.Random(str(true))
    if rng.random() < 2 / 3:
        return ()
    return tuple(rng.randrange(VOCAB) if rng.random() < 0.1 else token for token in true)


def _fault_of_drafts(true: Tokens) -> str:
    """Of some requests, what is wrong with their drafts; drawn from the output alone."""
    return random.Random(f"drafts of {true}").choice(("",) * 8 + ("id", "step"))


def log_of(tokens: Sequence[int]) -> TokenLog:
    """A log of the prompt and ``tokens``."""
    return TokenLog((*PROMPT, *tokens))
