"""The messages between ingress, router, target and drafter.

Safety rests on no message's order, delivery or timing: any of them may be lost, doubled, late or out of order. All are
small, immutable, and travel in batches, one batch per engine step and link.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr

from specdec.core.log import PrefixHash
from specdec.core.params import SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.core.types import Finish, PackedLogprobs, SpeculationMode, TokenLogprobs, Tokens


class Epoch(NamedTuple):
    """An incarnation of a sequence on a worker; compared as a pair.

    Attributes:
        attempt: Raised by the ingress when it submits the sequence again.
        n: Raised by the router when it opens the sequence anew on that worker's link.
    """

    attempt: int
    n: int


Interval = tuple[float, float]
"""When a step of a model began and ended, in seconds since the epoch, by the clock of the machine that it ran on."""


class RoundTimes(NamedTuple):
    """When a round was worked on.

    Attributes:
        target: The step that decided it.
        draft: The drafter's steps for the sequence that were reported to the target since the round before.
    """

    target: Interval
    draft: tuple[Interval, ...] = ()


DRAFTER = "drafter"
"""Kind of the workers that draft."""


class TokenKind(IntEnum):
    """What the round that gave a token made of it."""

    PLAIN = 0
    """No draft was verified."""
    ACCEPTED = 1
    """A draft token that was kept."""
    CORRECTED = 2
    """The target's token in place of a draft token."""
    BONUS = 3
    """The target's token after a draft that was kept whole."""


class TokenSource(IntEnum):
    """Where the draft of a token's round came from."""

    MODEL = 0
    """A draft model; of a plain token, nowhere."""
    NGRAM = 1
    """The sequence's own text."""
    PREDICTION = 2
    """The prediction of its request."""
    HEADS = 3
    """Heads on the target."""
    OTHER = 4
    """A token drafter from outside the tree."""


def pack_provenance(kind: TokenKind, source: TokenSource = TokenSource.MODEL) -> int:
    """A token's kind and source as one byte: kind + 4 * source."""
    return kind | source << 2


def token_kind(provenance: int) -> TokenKind:
    """The kind in such a byte."""
    return TokenKind(provenance & 3)


def token_source(provenance: int) -> TokenSource:
    """The source in such a byte."""
    return TokenSource(provenance >> 2)


def count_accepted(provenance: bytes) -> int:
    """How many tokens were accepted draft tokens."""
    return sum(byte & 3 == TokenKind.ACCEPTED for byte in provenance)


class Notes(Struct, frozen=True, array_like=True):
    """How tokens came: one entry of each field per token.

    Attributes:
        provenance: A byte per token: its kind and its source, by :func:`pack_provenance`.
        num_drafted: At the last token of a round, the draft tokens verified in it; 0 at all others. So sums over any
            part of a log count rounds and draft tokens exactly, however often a message was repeated.
        logprobs: Log probabilities, where the request asked for them.
        prompt_logprobs: Those of the prompt, where asked for; they go with the first output token.
        num_cached_tokens: With the first output token, how many of the prompt's tokens were not read, since another
            sequence had left what they give.
        times: At the last token of a round, when it was worked on; None at all others. Empty where the request did not
            ask.
    """

    provenance: bytes = b""
    num_drafted: Tokens = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: PackedLogprobs | None = None
    num_cached_tokens: int = 0
    times: tuple[RoundTimes | None, ...] = ()

    def last(self, count: int) -> Notes:
        """The notes of the last ``count`` tokens."""
        if count == len(self.provenance):
            return self
        start = len(self.provenance) - count
        logprobs = None if self.logprobs is None else self.logprobs[start:]
        return Notes(self.provenance[start:], self.num_drafted[start:], logprobs, times=self.times[start:])

    def first(self, count: int) -> Notes:
        """The notes of the first ``count`` tokens."""
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        if not count:
            return Notes(logprobs=logprobs)
        provenance, num_drafted, times = self.provenance[:count], self.num_drafted[:count], self.times[:count]
        return Notes(provenance, num_drafted, logprobs, self.prompt_logprobs, self.num_cached_tokens, times)

    def __add__(self, other: Notes) -> Notes:
        """Notes of two runs of tokens, one after the other."""
        if not self.provenance and self.logprobs is None:
            return other
        logprobs = (
            None if self.logprobs is None and other.logprobs is None else (self.logprobs or ()) + (other.logprobs or ())
        )
        times = () if not self.times and not other.times else self._all_times() + other._all_times()
        begins = self if self.provenance else other
        return Notes(
            self.provenance + other.provenance,
            self.num_drafted + other.num_drafted,
            logprobs,
            begins.prompt_logprobs,
            begins.num_cached_tokens,
            times,
        )

    def _all_times(self) -> tuple[RoundTimes | None, ...]:
        """An entry per token, also where nobody measured."""
        return self.times or (None,) * len(self.provenance)


class Plan(Struct, frozen=True, array_like=True):
    """The controller's choice for a sequence.

    Attributes:
        num_draft_tokens: Most draft tokens per round; 0 is plain decoding.
        num_branches: Most outcomes per offer beside the accepted path (its fan-out).
        acceptance_rate: Expected, per draft token; it shapes the fan-out.
        mode: ``sequential``: draft for the newest prefix_hash only; else draft ahead while the target verifies. Whether
            that is ``off``, ``overlap`` or ``outcomes`` follows from the numbers of draft tokens and branches.
        draft_wait_s: In turn, how long the target may hold a sequence back for an offer; 0 goes on plainly at once.
    """

    num_draft_tokens: int = 0
    num_branches: int = 0
    acceptance_rate: float = 0.8
    mode: SpeculationMode = "overlap"
    draft_wait_s: float = 0.0

    def __post_init__(self) -> None:
        """Name the mode that the numbers imply."""
        ahead: SpeculationMode = "outcomes" if self.num_branches else "overlap"
        mode = "off" if not self.num_draft_tokens else "sequential" if self.mode == "sequential" else ahead
        force_setattr(self, "mode", mode)


class Submit(Struct, frozen=True, array_like=True, tag=True):
    """Ingress to router: a request, with the output the client already has.

    Attributes:
        prompt: The log's first tokens. Messages of a batch that have the same object share it on the wire, too.
        decision: Fingerprint of everything that decides its tokens; the router refuses another (rule 14).
        output: The rest of the log.
        numeric: Hash of the logits of the target that began the output (rule 17). It is empty before a token is known,
            and for a sequence that does not keep its bits.
    """

    seq: str
    attempt: int
    ingress: str
    prompt: SharedTokens
    spec: SequenceSpec
    decision: str = ""
    output: Tokens = ()
    numeric: str = ""


class Want(Struct, frozen=True, array_like=True, tag=True):
    """Ingress to router: still wanted, and acknowledged up to length ``have``."""

    seq: str
    attempt: int
    ingress: str
    have: int


class Cancel(Struct, frozen=True, array_like=True, tag=True):
    """Ingress to router: no longer wanted."""

    seq: str
    attempt: int


class NewTokens(Struct, frozen=True, array_like=True, tag=True):
    """Router to ingress: the tokens from ``base`` on, cumulative since the last Want.

    Attributes:
        plan: By which they are drafted now, for those who ask.
        numeric: As in :class:`Submit`, for when it is submitted again; empty where the ingress knows.
    """

    seq: str
    attempt: int
    base: int
    tokens: Tokens
    notes: Notes
    prefix_hash: PrefixHash
    plan: Plan | None = None
    numeric: str = ""


class End(Struct, frozen=True, array_like=True, tag=True):
    """Router to ingress: the sequence is finished at ``prefix_hash``; the ingress ends only when it has it.

    Attributes:
        reason: What went wrong, where ``finish`` is ``error`` (rule 13).
    """

    seq: str
    attempt: int
    prefix_hash: PrefixHash
    finish: Finish
    reason: str = ""


class Gone(Struct, frozen=True, array_like=True, tag=True):
    """Router to ingress: not held here; submit it again.

    Attributes:
        why: ``unknown``, ``draining`` (rule 15) or ``model``, another fingerprint (rule 14).
    """

    seq: str
    attempt: int
    why: str = "unknown"


class Open(Struct, frozen=True, array_like=True, tag=True):
    """Router to worker: hold this sequence, whose log is ``prompt`` and ``output``. Idempotent.

    Attributes:
        prompt: As in :class:`Submit`.
        fingerprint: What the worker must be: the fingerprint of everything that decides tokens, or, where it is to
            draft, that of the vocabulary (rule 14).
        suspects: Name of the group that it is in quarantine with: only these share a step until each has taken one
            (rule 16). Empty for a sequence that is not suspected.
        numeric: As in :class:`Submit`.
    """

    seq: str
    epoch: Epoch
    router: str
    prompt: SharedTokens
    spec: SequenceSpec
    plan: Plan
    lease_s: float
    fingerprint: str = ""
    suspects: str = ""
    output: Tokens = ()
    numeric: str = ""


class Verdict(Struct, frozen=True, array_like=True, tag=True):
    """Target to router: all tokens after the last acknowledged length, repeated until acknowledged.

    Attributes:
        base: Length of the log before ``tokens``.
        prefix_hash: PrefixHash of the target's log after ``tokens``.
        finish: Why the sequence ended, if it did.
        reason: What went wrong, where ``finish`` is ``error`` (rule 13).
        numeric: Hash of the target's logits (rule 17), until something of it is acknowledged.
    """

    seq: str
    epoch: Epoch
    base: int
    tokens: Tokens
    notes: Notes
    prefix_hash: PrefixHash
    finish: Finish | None = None
    reason: str = ""
    numeric: str = ""


class Ack(Struct, frozen=True, array_like=True, tag=True):
    """Router to target: the log is recorded up to ``length``; gives credit."""

    seq: str
    epoch: Epoch
    length: int


class Commit(Struct, frozen=True, array_like=True, tag=True):
    """Router to drafter: tokens committed since the last one it is known to have."""

    seq: str
    epoch: Epoch
    base: int
    tokens: Tokens
    prefix_hash: PrefixHash


class Outcome(NamedTuple):
    """The result of one verification: the key of a branch."""

    num_accepted: int
    next_token: int


class Offer(Struct, frozen=True, array_like=True, tag=True):
    """Drafter to target, through the router: what may follow ``prefix_hash``.

    Attributes:
        chain: Draft tokens from ``prefix_hash`` on.
        branches: For outcomes of the verification of ``chain``, what would follow: the log after outcome (n, token)
            would be prefix_hash + chain[:n] + (token,), and the branch's chain would go on from there.
        steps: The drafter's steps for the sequence since the offer before, where the request asked for times.
    """

    seq: str
    epoch: Epoch
    prefix_hash: PrefixHash
    chain: Tokens
    branches: tuple[tuple[Outcome, Tokens], ...] = ()
    steps: tuple[Interval, ...] = ()


class PlanUpdate(Struct, frozen=True, array_like=True, tag=True):
    """Router to worker: the controller has chosen anew."""

    seq: str
    epoch: Epoch
    plan: Plan


class Close(Struct, frozen=True, array_like=True, tag=True):
    """Router to worker: forget this sequence."""

    seq: str
    epoch: Epoch


class Live(Struct, frozen=True, array_like=True, tag=True):
    """Router to worker: these are still wanted; renews their leases.

    Attributes:
        lease_s: For how long from now on; 0 leaves it as it was.
    """

    router: str
    entries: tuple[tuple[str, Epoch], ...]
    lease_s: float = 0.0


class Resync(Struct, frozen=True, array_like=True, tag=True):
    """Worker to router: I cannot go on with this one; open it anew."""

    worker: str
    seq: str
    epoch: Epoch
    have: int
    why: str


class Alive(Struct, frozen=True, array_like=True, tag=True):
    """Worker to router: a heartbeat with the worker's metrics.

    Attributes:
        numeric: Hash of a target's logits (rule 17); empty if it is not strict.
    """

    worker: str
    metrics: dict[str, float] = {}
    numeric: str = ""


ToRouterFromIngress = Submit | Want | Cancel
ToIngress = NewTokens | End | Gone
ToTarget = Open | Ack | Offer | PlanUpdate | Close | Live
ToDrafter = Open | Commit | PlanUpdate | Close | Live
ToRouterFromWorker = Verdict | Offer | Resync | Alive
Message = ToRouterFromIngress | ToIngress | ToTarget | ToDrafter | ToRouterFromWorker
