"""Both models in one thread, the drafter at work while a verification runs: what overlap is without clocks."""

from collections.abc import Callable, Iterable

from specdec.core.backends import DraftBackend, TargetBackend
from specdec.core.messages import Message, Plan
from specdec.core.params import SequenceSpec
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine, TokenDelta
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine


class OverlapService:
    """Each ``pump`` is a step of the target; until it ends, the drafter does not hear of its verdicts.

    Args:
        plan: Of every sequence.
        draft_steps: Gives how many steps the drafter makes in the next step of the target.
    """

    def __init__(
        self,
        target: TargetBackend,
        drafter: DraftBackend,
        plan: Plan,
        draft_steps: Callable[[], int],
    ) -> None:
        times = Times(lease_s=1e6, peer_timeout_s=1e6)
        self._draft_steps = draft_steps
        self.ingress = IngressMachine("ingress", times)
        self.router = RouterMachine("router", lambda spec: plan, times)
        self.target = TargetMachine("target", target, times)
        self.drafter = DrafterMachine("drafter", drafter, times)
        machines: tuple[IngressMachine | RouterMachine | TargetMachine | DrafterMachine, ...] = (
            self.ingress,
            self.router,
            self.target,
            self.drafter,
        )
        self._machines = {machine.name: machine for machine in machines}
        for name in ("target", "drafter"):
            self.router.worker_joined(name, name, 0.0)
        self.ingress.router_joined("router", 0.0)

    def start(self, seq: str, prompt: Iterable[int], spec: SequenceSpec) -> None:
        self.ingress.start(seq, prompt, spec, 0.0)
        self._exchange()

    def pump(self) -> list[TokenDelta]:
        self.target.step(0.0)
        verdicts = self.target.take_outbox()
        for _ in range(self._draft_steps()):
            self.drafter.step(0.0)
        self._exchange()
        self._deliver(verdicts)
        self._exchange()
        return self.ingress.take_deliveries()

    def _exchange(self) -> None:
        moved = True
        while moved:
            moved = False
            for machine in self._machines.values():
                moved |= self._deliver(machine.take_outbox())

    def _deliver(self, letters: dict[str, list[Message]]) -> bool:
        for peer, messages in letters.items():
            for message in messages:
                self._machines[peer].receive(message, 0.0)
        return bool(letters)
