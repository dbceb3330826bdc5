"""A draft model that is asked by itself beside its drafting."""

from specdec.core.backends import Proposal, Status, Verification
from specdec.core.messages import Alive, Close, Epoch, Live, Offer, Open, Plan, Resync, Verdict
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.protocol.drafter import DrafterMachine, DraftWorkerMachine
from specdec.protocol.leases import Times
from specdec.protocol.target import TargetMachine


class Counting:
    """Both backends: the next token is the length of what was read."""

    max_model_len = 100

    def __init__(self) -> None:
        self.released: list[str] = []

    def verify(self, jobs):
        return [Verification(Status.DECIDED, (len(job.log),)) for job in jobs]

    def propose(self, jobs):
        return [Proposal(Status.DECIDED, len(job.tokens)) for job in jobs]

    def rest(self) -> None:
        pass

    def release(self, key: str) -> None:
        self.released.append(key)


def opening(seq: str, model: str) -> Open:
    spec = SequenceSpec(SamplingParams(), 1, 2, 3, model=model)
    plan = Plan(num_draft_tokens=2, mode="sequential") if model == "target" else Plan()
    return Open(seq, Epoch(1, 0), "R", (7, 8), spec, plan, lease_s=5.0)


def make(max_unacked_tokens: int = 256) -> tuple[DraftWorkerMachine, Counting]:
    backend, times = Counting(), Times(max_unacked_tokens=max_unacked_tokens)
    machine = DraftWorkerMachine(DrafterMachine("D", backend, times), TargetMachine("D", backend, times))
    machine.receive(opening("drafted", "target"), 0.0)
    machine.receive(opening("own", "draft"), 0.0)
    return machine, backend


def run(machine: DraftWorkerMachine, now_s: float = 0.0) -> list:
    while machine.step(now_s):
        pass
    return machine.take_outbox().get("R", [])


def test_it_drafts_for_the_target_and_decides_for_itself() -> None:
    messages = run(make()[0])
    assert [m.chain for m in messages if isinstance(m, Offer)] == [(2, 3)]
    verdicts = [m for m in messages if isinstance(m, Verdict)]
    assert {m.seq for m in verdicts} == {"own"}
    assert (verdicts[-1].tokens, verdicts[-1].finish) == ((2, 3, 4), "length")


def test_its_own_sequences_go_before_what_it_drafts() -> None:
    machine, backend = make()
    while not any(isinstance(m, Verdict) and m.finish for m in machine.take_outbox().get("R", [])):
        assert not machine.drafter.counters.num_proposed_tokens
        assert machine.step(0.0)
    assert machine.step(0.0)
    assert machine.drafter.counters.num_proposed_tokens == 1
    machine.receive(opening("later", "draft"), 1.0)
    for now_s in (4.0, 8.0):  # each in time for its own, and none for what it drafts
        machine.receive(Live("R", (("later", Epoch(1, 0)),)), now_s)
        machine.step(now_s)
    assert machine.standalone.holds("later")
    assert "drafted" in backend.released, "leases end while nothing is drafted"


def test_it_drafts_while_its_own_sequences_await_an_acknowledgement() -> None:
    machine, _ = make(max_unacked_tokens=1)
    assert [machine.step(0.0) for _ in range(2)] == [True, True]
    assert (machine.standalone.counters.num_committed_tokens, machine.drafter.counters.num_proposed_tokens) == (1, 1)


def test_leases_of_both_are_renewed_and_what_is_unknown_is_asked_for_once() -> None:
    machine, backend = make()
    epoch = Epoch(1, 0)
    machine.receive(Live("R", (("drafted", epoch), ("own", epoch), ("neither", epoch))), 4.0)
    messages = run(machine, 8.0)
    assert [m.seq for m in messages if isinstance(m, Resync)] == ["neither"]
    reports = [m.metrics for m in messages if isinstance(m, Alive)]
    assert [(report["num_sequences"], report["num_standalone_sequences"]) for report in reports] == [(2.0, 1.0)]
    assert "drafted" not in backend.released
    machine.step(10.0)
    assert {"drafted", "own"} <= set(backend.released)


def test_each_is_closed_where_it_is() -> None:
    machine, backend = make()
    for seq in ("drafted", "own"):
        machine.receive(Close(seq, Epoch(1, 0)), 0.0)
    assert sorted(backend.released) == ["drafted", "own"]
    assert run(machine) == []
