"""The drafter's state machine: everything it says may be wrong, late or missing."""

from __future__ import annotations

from dataclasses import dataclass, fields

from specdec.protocol.backends import DraftBackend, DraftJob, Status
from specdec.protocol.leases import Times
from specdec.protocol.marks import Extension, common_prefix_length
from specdec.protocol.messages import Candidates, Commit, Message, Offer, Open
from specdec.protocol.worker import Gauges, WorkerMachine, WorkerRow


class DraftRow(WorkerRow):
    """A sequence on a drafter.

    Attributes:
        chain: Draft tokens after the log.
        candidates: What each of them was drawn from, under the rejection rule; else empty.
        offered_end: Absolute length, log and chain, up to which the present chain has been offered.
        agreed: Length up to which log and chain are what the backend was given last.
    """

    __slots__ = ("agreed", "candidates", "chain", "offered_end")

    def __init__(self, message: Open) -> None:
        super().__init__(message)
        self.chain: list[int] = []
        self.candidates: list[Candidates] = []
        self.offered_end = len(self.log)
        self.agreed = 0

    @property
    def end(self) -> int:
        """Absolute length of log and chain."""
        return len(self.log) + len(self.chain)


@dataclass(slots=True)
class DrafterCounters:
    """What a drafter has done since it started."""

    num_steps: int = 0
    num_proposed_tokens: int = 0
    num_kept_tokens: int = 0
    num_discarded_tokens: int = 0
    num_offers: int = 0


class DrafterMachine(WorkerMachine[DraftRow]):
    """Extends a chain for every sequence, all in one batch, a token a step.

    In mode ``overlap`` the chain goes one draft length and a bonus token beyond what the target verifies now, along the
    accepted path; in mode ``in_turn`` it ends at the draft length.
    """

    def __init__(self, name: str, backend: DraftBackend, times: Times, gauges: Gauges | None = None) -> None:
        super().__init__(name, times, gauges)
        self._backend = backend
        self.counters = DrafterCounters()

    def step(self, now_s: float) -> bool:
        """One more draft token for every chain that wants one. True if anything was drafted or read."""
        self._expire(now_s)
        rows = [row for row in self._rows if len(row.chain) < self._wanted(row)]
        if not rows:
            return False
        rows.sort(key=lambda row: (row.spec.arrival_s, row.seq))
        jobs = [DraftJob(row.seq, row.log.tokens + row.chain, row.spec, row.agreed, len(row.log)) for row in rows]
        proposals = self._backend.propose(jobs)
        for row, job, proposal in zip(rows, jobs, proposals, strict=True):
            if proposal.status is not Status.WAITING:
                row.agreed = len(job.tokens)
            if proposal.token is not None:
                row.chain.append(proposal.token)
                if proposal.candidates is not None:
                    row.candidates.append(proposal.candidates)
                self.counters.num_proposed_tokens += 1
                self._offer_if_due(row)
        worked = any(proposal.status is not Status.WAITING for proposal in proposals)
        self.counters.num_steps += worked
        return worked

    def report(self) -> dict[str, float]:
        """Counters and gauges for the router."""
        figures = super().report()
        figures.update({f.name: float(getattr(self.counters, f.name)) for f in fields(self.counters)})
        return figures

    def _wanted(self, row: DraftRow) -> int:
        """Length the chain should have: by plan, and within the request's and the draft model's lengths."""
        num_tokens = row.plan.num_draft_tokens
        if num_tokens and row.plan.mode == "overlap":
            num_tokens += num_tokens + 1
        left = row.spec.output_start + row.spec.max_tokens - 1 - len(row.log)
        return max(0, min(num_tokens, left, self._backend.max_model_len - len(row.log)))

    def _offer_if_due(self, row: DraftRow) -> None:
        """Offer a finished chain, and in overlap its parts: a target that has used up its draft needs the next soon."""
        fresh = row.end - row.offered_end
        complete = len(row.chain) >= self._wanted(row)
        part = -(-row.plan.num_draft_tokens // 2)
        if complete or (row.plan.mode == "overlap" and fresh >= part):
            row.offered_end = row.end
            self.counters.num_offers += 1
            mark, candidates = row.log.mark(), tuple(row.candidates)
            offer = Offer(row.seq, row.inc, mark, tuple(row.chain), candidates=candidates)
            self._outbox.put(row.router, offer)

    def _new_row(self, message: Open, now_s: float) -> DraftRow:
        return DraftRow(message)

    def _on_other(self, message: Message, now_s: float) -> None:
        if not isinstance(message, Commit):
            return
        row = self._rows.current(message.seq, message.inc)
        if row is None:
            return
        length = len(row.log)
        match row.log.extend_to(message.base, message.tokens, message.mark):
            case Extension.EXTENDED:
                self._follow(row, length)
            case Extension.GAP | Extension.MISMATCH as problem:
                self._resync(row.router, row.seq, row.inc, problem.value)

    def _follow(self, row: DraftRow, old_length: int) -> None:
        """Keep of the chain what follows the tokens just committed; drop it where they differ."""
        new = row.log.tokens[old_length:]
        same = common_prefix_length(row.chain, new)
        row.agreed = min(row.agreed, old_length + same)
        self.counters.num_kept_tokens += same
        if same == len(new):
            del row.chain[:same], row.candidates[:same]
        else:
            self.counters.num_discarded_tokens += len(row.chain) - same
            row.chain, row.candidates = [], []
            row.offered_end = len(row.log)
        row.offered_end = max(row.offered_end, len(row.log))

    def _dropped(self, row: DraftRow | None) -> None:
        if row is not None:
            self._backend.release(row.seq)
