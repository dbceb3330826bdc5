"""A drafter whose model can also be asked by itself: two state machines over one model."""

from __future__ import annotations

from msgspec.structs import replace

from specdec.core.messages import Ack, Alive, Live, Message, Offer, Open
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.leases import Times
from specdec.protocol.target import TargetMachine


class DraftWorkerMachine:
    """Drafts for the target's sequences, and decides the tokens of its own.

    Driven like its parts. A sequence is in one of them: its request names the model that answers.

    Args:
        drafter: For sequences of the target.
        solo: For sequences of the draft model itself; of the same name.

    Attributes:
        drafter: As given.
        solo: As given.
    """

    def __init__(self, drafter: DrafterMachine, solo: TargetMachine) -> None:
        assert drafter.name == solo.name
        self.name = drafter.name
        self.drafter = drafter
        self.solo = solo

    def set_times(self, times: Times) -> None:
        """Go by other times from now on."""
        self.drafter.set_times(times)
        self.solo.set_times(times)

    def drain(self, now_s: float) -> None:
        """Take no sequences any more; see :meth:`specdec.protocol.worker.WorkerMachine.drain`."""
        self.drafter.drain(now_s)
        self.solo.drain(now_s)

    @property
    def is_drained(self) -> bool:
        """Whether both parts drain, and hold no sequence."""
        return self.drafter.is_drained and self.solo.is_drained

    def receive(self, message: Message, now_s: float) -> None:
        """Take in one message."""
        match message:
            case Open(spec=spec):
                (self.solo if spec.model == "draft" else self.drafter).receive(message, now_s)
            case Ack() | Offer():
                self.solo.receive(message, now_s)
            case Live(entries=entries):
                own = tuple(entry for entry in entries if self.solo.holds(entry[0]))
                self.solo.renew(replace(message, entries=own), now_s)
                others = tuple(entry for entry in entries if not self.solo.holds(entry[0]))
                self.drafter.receive(replace(message, entries=others), now_s)
            case _:  # to close, or to plan anew: whoever does not hold it does nothing
                self.drafter.receive(message, now_s)
                self.solo.receive(message, now_s)

    def unsendable(self, message: Message, reason: str, now_s: float) -> None:
        """A message is too long to be sent."""
        self.solo.unsendable(message, reason, now_s)

    def step(self, now_s: float) -> bool:
        """One step of each part. True if either did anything."""
        drafted = self.drafter.step(now_s)
        return self.solo.step(now_s) or drafted

    def report(self) -> dict[str, float]:
        """The drafter's counters and gauges, with what both parts hold, and the sequences that the other part ended."""
        solo, report = self.solo.report(), self.drafter.report()
        own = ("num_sequences", "num_steps", "num_errors", "num_failed_steps", "num_suspects", "num_committed_tokens")
        for name in (*own, *(name for name in solo if name.startswith("num_refused/"))):
            report[name] = report.get(name, 0.0) + solo[name]
        return report | {"num_solo_sequences": solo["num_sequences"]}

    def take_outbox(self) -> dict[str, list[Message]]:
        """Messages since the last call, by router."""
        messages = self.drafter.take_outbox()
        for peer, more in self.solo.take_outbox().items():
            messages.setdefault(peer, []).extend(more)
        return {peer: [self._counted(message) for message in batch] for peer, batch in messages.items()}

    def _counted(self, message: Message) -> Message:
        """A heartbeat tells of both parts."""
        if not isinstance(message, Alive):
            return message
        num_solo = self.solo.report()["num_sequences"]
        num_sequences = message.report["num_sequences"] + num_solo
        return replace(
            message, report={**message.report, "num_sequences": num_sequences, "num_solo_sequences": num_solo}
        )
