"""A pair in one process under the service's own controller, whose step times change as it goes."""

from __future__ import annotations

from itertools import cycle

from specdec.core.backends import DraftBackend, TargetBackend
from specdec.drafting.controller import Controller
from specdec.drafting.modes import Bounds
from specdec.engine.engine import InProcessService
from specdec.engine.timing import StepTimer
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import TokenDelta
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine

TARGET_S = 0.03
DRAFT_S = (0.0005, 0.012, 0.003, 0.1)
"""A draft step's time, each for a while: long drafts are worth it, short ones, none."""
ROUND_S, PHASE_S = 0.1, 1.5
_TIMES = Times(lease_s=1e6, peer_timeout_s=1e6, renew_interval_s=2 * ROUND_S)


class ControlledService(InProcessService):
    """A round is a tenth of a second of a virtual clock; plans change between rounds and in the midst of sequences."""

    def __init__(self, target: TargetBackend, drafter: DraftBackend) -> None:
        self._now_s = 0.0
        super().__init__(target, drafter, 0, clock=lambda: self._now_s)
        self._phases = cycle(DRAFT_S)
        self._phase_ends_s = 0.0
        self._steps: dict[str, StepTimer] = {}
        self._change()
        self.controller = Controller(Bounds(num_draft_tokens=8, num_branches=4))
        self.router = RouterMachine("router", self.controller, _TIMES)
        self.target = TargetMachine("target", target, _TIMES, lambda: self._steps["target"].metrics())
        self.drafter = DrafterMachine("drafter", drafter, _TIMES, lambda: self._steps["drafter"].metrics())
        for name in ("target", "drafter"):
            self.router.worker_joined(name, name, 0.0)

    def pump(self) -> list[TokenDelta]:
        """One round, at its time."""
        self._now_s += ROUND_S
        if self._now_s >= self._phase_ends_s:
            self._change()
        return super().pump()

    def _change(self) -> None:
        self._phase_ends_s = self._now_s + PHASE_S
        target, drafter = StepTimer(), StepTimer()
        draft_s = next(self._phases)
        for num_rows in (1, 2, 4, 8, 16, 32, 64):
            drafter.add(num_rows, num_rows, draft_s)
            for num_tokens in (num_rows, 5 * num_rows):
                target.add(num_rows, num_tokens, TARGET_S)
        self._steps = {"target": target, "drafter": drafter}
