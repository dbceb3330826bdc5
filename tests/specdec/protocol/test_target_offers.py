"""What a target makes of offers: which it drafts from, keeps and drops, and how it counts them."""

from __future__ import annotations

import pytest

from specdec.core.backends import Status, Verification
from specdec.core.drafts import children_of
from specdec.core.messages import Ack, Offer, Outcome, Plan
from tests.specdec.protocol.scripted import PROMPT, log_of
from tests.specdec.protocol.test_target import EPOCH, TRUE, Oracle, machine_with, offer, open_message


def branched(committed, chain, *branches):
    return Offer("s", EPOCH, log_of(committed).prefix_hash(), tuple(chain), branches)


def num_stale(machine):
    return machine.metrics()["num_stale_offers"]


def judged(machine):
    """Rounds foreseen in time, and not foreseen, once two more have followed."""
    for _ in range(2):
        for sequence in machine._sequences:
            machine.receive(Ack("s", EPOCH, len(sequence.log)), 2.0)
        machine.step(2.0)  # none waits so long
    names = ("num_branch_hits", "num_branch_misses")
    return tuple(machine.metrics()[name] for name in names)


def test_rounds_are_counted_by_whether_their_outcome_was_offered():
    """TRUE is 3, 4, 5, 6, 7, 8, ...; the first round verifies 3, 9."""
    hit = Outcome(1, 4), (5, 6)
    machine = machine_with(open_message(), offer((), (3, 9)))
    machine.step(0.0)
    machine.receive(branched((), (3, 9), (Outcome(0, 8), (1,)), hit), 0.0)
    machine.step(0.0)
    assert machine._backend.batches[-1] == [("s", (5, 6))]
    machine.receive(branched(TRUE[:2], (5, 6), (Outcome(2, 8), (9,))), 0.0)
    machine.step(0.0)  # the token after 5, 6 is 7, not 8
    assert num_stale(machine) == 1  # of the first two, the one a part of the other, something was verified
    assert judged(machine) == (1, 1)
    assert judged(machine) == (1, 1)  # once
    assert num_stale(machine) == 1


def test_a_consumed_offer_says_nothing_of_the_round_after_its_branch():
    """Its branches were for the outcome that came; nothing was offered for the next one."""
    machine = machine_with(open_message(), branched((), (9,), (Outcome(0, 3), TRUE[1:3])))
    for _ in range(2):
        machine.step(0.0)
    assert machine._backend.batches[-1] == [("s", TRUE[1:3])]
    assert judged(machine) == (1, 0)


def test_branches_are_judged_along_the_chain_that_goes_on():
    """Two rounds along one chain; the branch of the first is not asked, that of the second comes."""
    machine = machine_with(open_message(plan=Plan(1)), branched((), (*TRUE[:3], 9), (Outcome(3, TRUE[3]), TRUE[4:6])))
    for _ in range(3):
        machine.step(0.0)
    assert machine._backend.batches == [[("s", TRUE[:1])], [("s", TRUE[2:3])], [("s", TRUE[4:5])]]
    assert judged(machine) == (2, 0)


@pytest.mark.parametrize(("chain", "counted"), [(TRUE[1:3], (1, 0)), ((8, 8), (0, 1))])
def test_a_sequence_that_ends_has_all_rounds_counted_but_its_last(chain, counted):
    token = TRUE[0] if counted[0] else 8
    machine = machine_with(open_message(max_tokens=2), branched((), (9,), (Outcome(0, token), chain)))
    for _ in range(2):
        machine.step(0.0)
    names = ("num_branch_hits", "num_branch_misses")
    assert machine._sequences.current("s", EPOCH).finish is not None
    assert tuple(machine.metrics()[name] for name in names) == counted


def test_the_tail_of_an_offer_whose_round_was_followed_by_another_is_used():
    machine = machine_with(open_message())
    for _ in range(2):
        machine.step(0.0)
    machine.receive(branched((), (9,), (Outcome(0, 3), TRUE[1:4])), 0.0)
    machine.step(0.0)
    assert machine._backend.batches[-1] == [("s", TRUE[2:4])]


def test_a_chain_made_after_a_miss_is_no_hit():
    machine = machine_with(open_message())
    machine.step(0.0)
    machine.receive(branched((), (9,), (Outcome(0, 8), (4,))), 0.0)
    machine.receive(offer(TRUE[:1], TRUE[1:3]), 0.0)
    machine.step(0.0)
    assert machine._backend.batches[-1] == [("s", TRUE[1:3])]
    assert judged(machine) == (0, 1)


def test_a_later_part_takes_the_place_of_an_earlier_one_and_of_no_other():
    """Six parts of one offer, and one for an earlier prefix hash that came late: all of use are kept."""
    machine = machine_with(open_message(), offer((), (3, 4, 5, 6)))
    for count in range(1, 7):
        machine.receive(branched(TRUE[:1], TRUE[1 : 1 + count]), 0.0)
    (sequence,) = machine._sequences
    assert [len(kept.offer.chain) for kept in sequence.offers] == [4, 6]
    machine.receive(branched(TRUE[:1], (4, 9)), 0.0)
    assert [len(kept.offer.chain) for kept in sequence.offers] == [4, 6, 2]


def test_an_offer_that_was_used_up_is_not_stale():
    machine = machine_with(open_message(), offer((), TRUE[:2]))
    machine.step(0.0)
    for length in (3, 6):
        machine.receive(Ack("s", EPOCH, len(PROMPT) + length), 0.0)
        machine.receive(offer(TRUE[:length], TRUE[length : length + 2]), 0.0)
        machine.step(0.0)
    assert machine.counters.num_accepted_tokens == 6
    assert num_stale(machine) == 0


def test_an_offer_of_which_nothing_was_verified_is_stale():
    machine = machine_with(open_message(plan=Plan(0)), offer((), (8,)))
    machine.receive(offer((), TRUE[:1]), 0.0)
    machine.step(0.0)  # the plan forbids both
    assert num_stale(machine) == 0
    machine.step(0.0)  # the one was wrong, the other right but not asked
    assert num_stale(machine) == 2


def test_an_unused_offer_that_must_make_room_is_stale():
    machine = machine_with(open_message(), *(offer((), (token,)) for token in (1, 2, 5, 6)))
    assert num_stale(machine) == 0
    machine.receive(offer((), (7,)), 0.0)
    assert num_stale(machine) == 1


def test_an_offer_that_fits_no_more_is_dropped_when_it_comes():
    machine = machine_with(open_message(), offer((), (3, 4, 5, 6, 7, 9)))
    machine.step(0.0)
    machine.receive(offer((), (3, 4, 5, 6, 7, 9, 9)), 0.0)  # grown, still with what was used
    (sequence,) = machine._sequences
    assert not sequence.offers
    assert num_stale(machine) == 0
    machine.receive(offer((), (9, 9)), 0.0)
    assert not sequence.offers
    assert num_stale(machine) == 1
    machine.receive(branched((), (3, 4, 9), (Outcome(2, 5), (6, 7, 8, 9))), 0.0)  # some of its tail is left
    assert len(sequence.offers) == 1


def test_an_offer_whose_chain_was_decided_may_have_a_branch_for_what_comes_next():
    machine = machine_with(open_message())
    machine.step(0.0)
    machine.receive(branched((), TRUE[:1], (Outcome(1, 4), (5, 6))), 0.0)
    machine.step(0.0)  # 4 is decided
    assert num_stale(machine) == 0
    machine.step(0.0)
    assert machine._backend.batches[-1] == [("s", (5, 6))]
    machine.receive(branched(TRUE[:2], TRUE[2:5], (Outcome(2, 9), (1,))), 0.0)  # no branch after its whole chain
    assert [kept.is_used for sequence in machine._sequences for kept in sequence.offers] == [True]
    assert num_stale(machine) == 1


class TreeOracle(Oracle):
    """Verifies trees."""

    def _decide(self, job):
        true, children = self.true[len(job.log) - len(PROMPT) :], children_of(job.proposed.parents)
        if not job.parents:
            return super()._decide(job)
        at, count = -1, 0
        while (kept := [node for node in children.get(at, ()) if job.draft[node] == true[count]]) != []:
            at, count = kept[0], count + 1
        return Verification(Status.DECIDED, true[: count + 1], count, len(job.draft))
