"""Ingress, router, target and drafter in one process, joined by plain function calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from specdec.core.backends import DraftBackend, TargetBackend
from specdec.core.drafts import DraftChooser
from specdec.core.params import SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.drafting.length.plans import fixed_plan, no_drafts
from specdec.drafting.ngram import NgramOptions
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine, TokenDelta
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine


class InProcessService:
    """The whole line in one thread: each ``pump`` drafts for all sequences, then verifies all of them once.

    Args:
        num_draft_tokens: Draft length where the request names none.
        drafter: None where there is no draft model.
        ngram: Of the target; None for none.
        chooser: Of the target; None takes drafts in order, and all of them.

    Attributes:
        is_idle: Whether the newest ``pump`` found nothing to do: all sequences wait, for a grammar that is compiled or
            an adapter that is read.
        clock: Seconds, only for leases, which nobody lets run out here.
    """

    def __init__(
        self,
        target: TargetBackend,
        drafter: DraftBackend | None,
        num_draft_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        ngram: NgramOptions | None = None,
        chooser: DraftChooser | None = None,
    ) -> None:
        times = Times(lease_s=1e6, peer_timeout_s=1e6)
        planner = fixed_plan(num_draft_tokens, "sequential") if drafter is not None else no_drafts
        self._clock = clock
        self.is_idle = False
        self.ingress = IngressMachine("ingress", times)
        self.router = RouterMachine("router", planner, times)
        self.target = TargetMachine("target", target, times, ngram=ngram, chooser=chooser)
        self.drafter = DrafterMachine("drafter", drafter, times) if drafter is not None else None
        self.router.worker_joined("target", "target", clock())
        if drafter is not None:
            self.router.worker_joined("drafter", "drafter", clock())
        self.ingress.router_joined("router", clock())

    def start(self, seq: str, prompt: SharedTokens | Iterable[int], spec: SequenceSpec) -> None:
        """Take a sequence in."""
        self.ingress.start(seq, prompt, spec, self._clock())

    def cancel(self, seq: str) -> None:
        """Forget a sequence, everywhere, at once."""
        self.ingress.cancel(seq)
        self._exchange()

    def pump(self) -> list[TokenDelta]:
        """One round: all drafting there is to do, one verification, and what it delivered."""
        now_s = self._clock()
        for machine in (self.ingress, self.router):
            machine.step(now_s)
        self._exchange()
        worked = False
        while self.drafter is not None and self.drafter.step(now_s):
            worked = True
        self._exchange()
        self.is_idle = not self.target.step(now_s) and not worked
        self._exchange()
        return self.ingress.take_deliveries()

    def _exchange(self) -> None:
        """Carry messages until there are none left."""
        machines = {m.name: m for m in (self.ingress, self.router, self.target, self.drafter) if m is not None}
        moved = True
        while moved:
            moved = False
            for machine in list(machines.values()):
                for peer, messages in machine.take_outbox().items():
                    moved = True
                    for message in messages:
                        machines[peer].receive(message, self._clock())
