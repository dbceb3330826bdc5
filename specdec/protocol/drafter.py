"""The drafter's state machine: everything it says may be wrong, late or missing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

from specdec.core.backends import DraftBackend, DraftJob, Proposal, Status
from specdec.core.errors import DeviceLostError
from specdec.core.log import Extension
from specdec.core.messages import Commit, Message, Open
from specdec.drafting.branches import BRANCHES_IN_ALL, branch_share
from specdec.protocol.draft_sequence import Branch, DraftSequence, Path
from specdec.protocol.leases import Times, label, labels, microseconds
from specdec.protocol.worker import BackendMetrics, LastInterval, StepGroups, WorkerMachine, is_at_fault

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DrafterCounters:
    """What a drafter has done since it started.

    Attributes:
        num_kept_tokens: Draft tokens, of chains and promoted branches, that were committed.
        num_discarded_tokens: Draft tokens of chains that the log went past another way.
        num_branches_forked: Branches begun.
        num_right_tokens: Tokens of chains and promoted branches that were decided as drafted,
            whether or not they were verified: offers may be late.
        num_wrong_tokens: ... in whose place another was; what was drafted after them is in neither.
        num_promoted: Branches that became the chain, because their outcome came.
        num_branch_tokens_wasted: Draft tokens of branches whose outcome did not come.
        num_failed_steps: Steps that failed as a whole, and were contained.
        num_skipped_sequences: Sequences for which nothing is drafted any more, because it failed.
    """

    num_steps: int = 0
    num_proposed_tokens: int = 0
    num_kept_tokens: int = 0
    num_discarded_tokens: int = 0
    num_right_tokens: int = 0
    num_wrong_tokens: int = 0
    num_offers: int = 0
    num_branches_forked: int = 0
    num_promoted: int = 0
    num_branch_tokens_wasted: int = 0
    num_failed_steps: int = 0
    num_skipped_sequences: int = 0


Task = tuple[DraftSequence, Branch | None, Path, DraftJob]
"""One row of a step: a sequence's chain, or one of its branches, and what it makes longer."""


class DrafterMachine(WorkerMachine[DraftSequence]):
    """Extends a chain for every sequence, and branches beside it, all in one batch, by what the backend gives a step.

    In mode ``sequential`` the chain ends at the draft length. In the others it goes one draft length and a bonus
    token beyond what the target verifies now, along the accepted path; and where the plan has branches, other likely
    outcomes of that verification get a chain each. The verdict promotes one branch, or none, and frees its siblings.

    It does not die of a sequence: one that fails, or whose step fails twice when it is alone in it, is drafted for no
    more, and the target goes on with it plainly.

    Args:
        name: By which its peers know it.
        backend: Does the work.
        times: The protocol's clock.
        backend_metrics: Gives the backend's, to tell of beside its own.
        branches_in_all: Most branches of all sequences together; see :func:`specdec.drafting.branches.branch_share`.
        fingerprint: Of the vocabulary; see :class:`specdec.protocol.worker.WorkerMachine`.
        last_interval: Tells when steps ran, for requests that ask.
    """

    def __init__(
        self,
        name: str,
        backend: DraftBackend,
        times: Times,
        backend_metrics: BackendMetrics | None = None,
        branches_in_all: int = BRANCHES_IN_ALL,
        *,
        fingerprint: str = "",
        last_interval: LastInterval | None = None,
    ) -> None:
        super().__init__(name, times, backend_metrics, fingerprint=fingerprint)
        self._backend = backend
        self._last_interval = last_interval
        self._branches_in_all = branches_in_all
        self._num_waiting = 0
        self.counters = DrafterCounters()
        self._groups = StepGroups()

    def step(self, now_s: float) -> bool:
        """One more draft token for every chain and branch that wants one. True if anything was drafted or read.

        Raises:
            DeviceLostError: The backend can no longer be used.
        """
        self.expire(now_s)
        sequences = sorted(self._sequences, key=attrgetter("rank"))
        self._share_branches(sequences)
        for sequence in sequences:
            self._branch_out(sequence)
        tasks = self._tasks(sequences)
        self._num_waiting = 0
        drafting = list({sequence.seq: sequence for sequence, _, _, _ in tasks}.values())
        worked = self._groups.step(drafting, lambda batch: self._draft(batch, tasks))
        if not worked:
            self._backend.rest()
        for sequence in sequences:
            if sequence.is_due:
                self._outbox.put(sequence.router, sequence.take_offer())
                self.counters.num_offers += 1
                if sequence.span is not None:
                    sequence.span.add(num_offers=1)
        if worked:
            self.counters.num_steps += 1
        return worked

    def metrics(self) -> dict[str, float]:
        """Counters and gauges for the router; ``num_waiting_sequences`` found no room in the last step (rule 7)."""
        metrics = super().metrics()
        metrics.update({f.name: float(getattr(self.counters, f.name)) for f in fields(self.counters)})
        metrics["num_waiting_sequences"] = float(self._num_waiting)
        metrics["num_branches_held"] = float(sum(len(sequence.branches) for sequence in self._sequences))
        return metrics

    # What is drafted.

    def _tasks(self, sequences: Sequence[DraftSequence]) -> list[Task]:
        """A job for each chain that is too short, in order, then for each branch: they yield first."""
        tasks: list[Task] = [
            (sequence, None, sequence.path, sequence.chain_job())
            for sequence in sequences
            if len(sequence.path) < sequence.num_wanted
        ]
        for sequence in sequences:
            if sequence.branches:
                tasks += [(sequence, branch, branch.path, job) for branch, job in sequence.growing_branches()]
        return tasks

    def _draft(self, sequences: Sequence[DraftSequence], tasks: Sequence[Task]) -> bool:
        """A step of the backend for these; what goes wrong in it is contained, but for the loss of its device."""
        names = {sequence.seq for sequence in sequences}
        tasks = [task for task in tasks if task[0].seq in names]
        if not tasks:
            return False
        for _, branch, _, _ in tasks:
            if branch is not None:
                branch.is_begun = True
        try:
            proposals = self._backend.propose([task[3] for task in tasks])
        except DeviceLostError:
            raise
        except Exception as error:
            self._contain(sequences, error)
            return True
        return self._take(tasks, proposals)

    def _take(self, tasks: Sequence[Task], proposals: Sequence[Proposal]) -> bool:
        """Add what was proposed, and count who found no room (rule 7). True if anything was drafted or read."""
        num_waiting = 0
        failed: list[DraftSequence] = []
        suspects: dict[str, DraftSequence] = {}
        timed: dict[str, DraftSequence] = {}
        for (sequence, branch, _, job), proposed in zip(tasks, proposals, strict=True):
            proposal = proposed.checked()
            is_waiting = proposal.status is Status.WAITING
            if is_waiting:
                num_waiting += 1
                if branch is None:
                    self._num_waiting += 1
            if branch is not None:
                branch.is_waiting = is_waiting
            elif not is_waiting:
                sequence.agreed = len(job.tokens)
            if (sequence.spec.wants_times or sequence.span is not None) and not is_waiting:
                timed[sequence.seq] = sequence
            if proposal.status is Status.FAILED:
                failed.append(sequence)
            elif proposal.status is Status.SUSPECT:
                suspects[sequence.seq] = sequence
            if proposal.token is not None:
                count = sequence.take(branch, proposal)
                self.counters.num_proposed_tokens += count
                if sequence.span is not None:
                    sequence.span.add(num_proposed_tokens=count)
                self._groups.passed(sequence)
        for sequence in failed:
            self._skip(sequence)
        for sequence in suspects.values():
            self._suspect([sequence])
        if self._last_interval is not None and timed:
            interval = self._last_interval()
            for sequence in timed.values():
                if sequence.spec.wants_times:
                    sequence.intervals.append(interval)
                if sequence.span is not None:
                    sequence.span.add(step_us=microseconds(interval))
        return num_waiting < len(proposals)

    def _contain(self, sequences: Sequence[DraftSequence], error: Exception) -> None:
        """A step has failed: who was alone in it twice is drafted for no more, and all others are suspects."""
        self.counters.num_failed_steps += 1
        logger.error("A draft step of %d sequences failed: %s", len(sequences), labels(sequences), exc_info=error)
        self._suspect(sequences)

    def _suspect(self, sequences: Sequence[DraftSequence]) -> None:
        for sequence in sequences:
            self._free(sequence)
        if len(sequences) == 1 and is_at_fault(sequences[0]):
            self._skip(sequences[0])
        else:
            self._groups.divide(sequences)

    def _skip(self, sequence: DraftSequence) -> None:
        """Draft nothing more for a sequence; the target decodes it plainly."""
        if not sequence.is_skipped:
            self.counters.num_skipped_sequences += 1
            logger.info("The sequence %s is drafted for no more", label(sequence))
        self._groups.passed(sequence)
        sequence.skip()
        self._free(sequence)

    def _free(self, sequence: DraftSequence) -> None:
        self._drop_branches(sequence)
        self._backend.release(sequence.seq)
        sequence.agreed = 0

    # Branches.

    def _share_branches(self, sequences: Sequence[DraftSequence]) -> None:
        """Each sequence gets the same share of the branches in all; what it holds already, it keeps."""
        most = branch_share(sum(sequence.wants_branches for sequence in sequences), self._branches_in_all)
        for sequence in sequences:
            sequence.bound_branches(most)

    def _branch_out(self, sequence: DraftSequence) -> None:
        """Fork what the fan-out allows and the chain's guesses name by now."""
        if not sequence.has_branches:
            self._drop_branches(sequence)
            return
        offered = min(sequence.plan.num_draft_tokens, sequence.num_offered)
        if sequence.num_verified < offered and sequence.is_complete and not sequence.has_news:
            # Nothing else is left to do for this verification: the next one is of what was offered in the meantime.
            sequence.num_verified = offered
        missing = sequence.num_branches - len(sequence.branches)
        named = len(sequence.log), sequence.num_verified, min(len(sequence.path), sequence.num_verified + 1)
        if missing <= 0 or named == sequence.forked_for:
            return
        sequence.forked_for = named
        for outcome in sequence.likely_outcomes():
            if sequence.fork(outcome) is not None:
                self.counters.num_branches_forked += 1
                missing -= 1
                if not missing:
                    return

    def _drop_branches(self, sequence: DraftSequence, before: int | None = None) -> None:
        """Free all branches, or those of positions ``before`` one."""
        for place, branch in list(sequence.branches.items()):
            if before is None or branch.position < before:
                del sequence.branches[place]
                self.counters.num_branch_tokens_wasted += len(branch.path)
                if branch.is_begun:
                    self._backend.release(branch.key)

    # What is committed.

    def _new_sequence(self, message: Open, now_s: float) -> DraftSequence:
        return DraftSequence(message, self._backend.max_model_len)

    def _on_open(self, message: Open, now_s: float) -> None:
        held = self._sequences.get(message.seq)
        super()._on_open(message, now_s)
        if held is not None and self._sequences.get(message.seq) is not held:
            self._drop_branches(held)

    def _on_other(self, message: Message, now_s: float) -> None:
        if not isinstance(message, Commit):
            return
        sequence = self._sequences.current(message.seq, message.epoch)
        if sequence is None:
            return
        length = len(sequence.log)
        match sequence.log.extend_to(message.base, message.tokens, message.prefix_hash):
            case Extension.EXTENDED:
                self._follow(sequence, length)
                self._begin_round(sequence)
            case Extension.GAP | Extension.MISMATCH as problem:
                self._resync(sequence.router, sequence.seq, sequence.epoch, problem.value)

    def _follow(self, sequence: DraftSequence, old_length: int) -> None:
        """Keep of chain and branches what follows the tokens just committed; drop what differs."""
        length = len(sequence.log)
        start = self._advance(sequence, old_length)
        if start < length:
            branch = sequence.branches.pop((start, int(sequence.log.tokens[start])), None)
            self._drop_branches(sequence)
            if branch is not None:
                self._promote(sequence, branch)
                start = self._advance(sequence, branch.position + 1)
        if start < length:
            self.counters.num_discarded_tokens += len(sequence.path)
            sequence.drop_chain(start)
        self._drop_branches(sequence, before=length)
        sequence.offered_end = max(sequence.offered_end, length)

    def _advance(self, sequence: DraftSequence, start: int) -> int:
        """Take off the chain, which begins at ``start``, what of it is committed; gives the length to which that is.

        A draft token is accepted if and only if it is the one that is decided, verified or not.
        """
        end = sequence.advance(start)
        self.counters.num_kept_tokens += end - start
        if sequence.span is not None:
            sequence.span.add(num_kept_tokens=end - start)
        self.counters.num_right_tokens += end - start
        if end < len(sequence.log) and len(sequence.path) > 0:
            self.counters.num_wrong_tokens += 1
        return end

    def _promote(self, sequence: DraftSequence, branch: Branch) -> None:
        """The branch is the chain from now on. What either held agrees up to the outcome's token, at least."""
        self.counters.num_promoted += 1
        self.counters.num_discarded_tokens += len(sequence.path)
        sequence.take_over(branch)
        if branch.is_begun:
            self._backend.rename(branch.key, sequence.seq)

    def _begin_round(self, sequence: DraftSequence) -> None:
        """Take it that the target verifies now what it was offered; nothing, where that is nothing and it goes on."""
        sequence.num_verified = min(sequence.plan.num_draft_tokens, sequence.num_offered)

    def _dropped(self, sequence: DraftSequence | None) -> None:
        if sequence is not None:
            self._free(sequence)
