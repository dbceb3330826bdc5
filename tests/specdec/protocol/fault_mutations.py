"""Rules 9 and 13 to 16, switched off in the real machines; see ``mutations.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from specdec.core.backends import Proposal
from specdec.core.messages import Open, Submit
from specdec.protocol.router import RouterMachine
from specdec.protocol.sessions import Quarantine, Session, SuspectGroup
from specdec.protocol.target import TargetMachine
from specdec.protocol.target_sequence import TargetSequence
from specdec.protocol.worker import StepGroups, WorkerMachine
from tests.specdec.protocol.mutations import Mutation

FAULT_MUTATIONS: dict[str, Mutation] = {}


def mutation(mutate: Mutation) -> Mutation:
    FAULT_MUTATIONS[mutate.__name__] = mutate
    return mutate


@mutation
def error_is_a_finish(patch: pytest.MonkeyPatch) -> None:
    """Rule 13: a sequence whose sequence or lonely step fails ends."""
    patch.setattr(TargetMachine, "_end_with_error", lambda self, sequence, reason: None)


@mutation
def steps_apart(patch: pytest.MonkeyPatch) -> None:
    """Rule 16: those of a step that failed are tried apart."""

    def together(self: StepGroups, sequences: Sequence[Any]) -> Iterable[Sequence[Any]]:
        yield sequences

    patch.setattr(StepGroups, "batches", together)


@mutation
def failures_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """Rule 16: a step that failed counts against who was alone in it."""
    contain = TargetMachine._contain

    def blame_all(
        self: TargetMachine,
        sequences: Sequence[TargetSequence],
        drafted_for: Sequence[TargetSequence],
        error: Exception,
    ) -> None:
        for sequence in sequences:
            sequence.num_failures += 1
        contain(self, sequences, drafted_for, error)
        for sequence in sequences:
            if sequence.num_failures >= 2 and sequence.finish is None:
                self._end_with_error(sequence, "it was there")

    patch.setattr(TargetMachine, "_contain", blame_all)


@mutation
def no_draft_ends_a_sequence(patch: pytest.MonkeyPatch) -> None:
    """Rule 9: a step that failed with drafts is tried without them, and is no failure of who was in it."""
    suspect = TargetMachine._suspect

    def blame(self: TargetMachine, sequences: Sequence[TargetSequence], _: object, reason: str) -> None:
        suspect(self, sequences, (), reason)

    patch.setattr(TargetMachine, "_suspect", blame)


@mutation
def ids_of_drafts(patch: pytest.MonkeyPatch) -> None:
    """Rule 9: no id that a draft model names fails a process."""
    patch.setattr(Proposal, "checked", lambda self: self)


@mutation
def bounded_reopening(patch: pytest.MonkeyPatch) -> None:
    """Rule 16: who kills its worker alone is not opened again without end."""
    patch.setattr(Quarantine, "_is_at_fault", lambda self, session: False)


@mutation
def opened_apart(patch: pytest.MonkeyPatch) -> None:
    """Rule 16: those of a worker that died are opened apart. Off: in one group."""

    def together(self: Quarantine, sessions: Sequence[Session]) -> None:
        for kind in ("target", "drafter"):
            members = [session for session in sessions if session.target.kind == kind]
            if members:
                self._count += 1
                group = SuspectGroup(f"{self._router}/{self._count}", kind, members)
                for session in members:
                    session.suspects = group
                self._waiting.append(group)

    def alone_or_not(self: Quarantine, worker: str, sessions: Sequence[Session], **_: bool) -> list[Session]:
        at_fault = [session for session in sessions if self._is_at_fault(session)]
        for session in sessions:
            self.leave(session)
        together(self, [session for session in sessions if session not in at_fault])
        return at_fault

    patch.setattr(Quarantine, "failed", alone_or_not)


@mutation
def same_model(patch: pytest.MonkeyPatch) -> None:
    """Rule 14: a worker takes no sequence of another model."""
    refusal = WorkerMachine._refusal
    patch.setattr(WorkerMachine, "_refusal", lambda self, message: refusal(self, replace(message, fingerprint="")))


@mutation
def same_model_at_the_router(patch: pytest.MonkeyPatch) -> None:
    """Rule 14: nor does a router."""
    refusal = RouterMachine._refusal

    def take_any(self: RouterMachine, message: Submit) -> str:
        return refusal(self, replace(message, decision=""))

    patch.setattr(RouterMachine, "_refusal", take_any)


@mutation
def workers_that_drain(patch: pytest.MonkeyPatch) -> None:
    """Rule 15: a worker that drains takes nothing new."""
    refusal = WorkerMachine._refusal

    def take(self: WorkerMachine[Any], message: Open) -> str:
        why = refusal(self, message)
        return "" if why == "draining" else why

    patch.setattr(WorkerMachine, "_refusal", take)


@mutation
def routers_that_drain(patch: pytest.MonkeyPatch) -> None:
    """Rule 15: nor does a router."""
    refusal = RouterMachine._refusal

    def take(self: RouterMachine, message: Submit) -> str:
        why = refusal(self, message)
        return "" if why == "draining" else why

    patch.setattr(RouterMachine, "_refusal", take)
