"""Owners take turns at a target: what one of them sends keeps no other from its share."""

from __future__ import annotations

from collections import Counter

import pytest

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.scheduler import CachedPrefix, Request, Scheduler
from specdec.protocol.target import in_turns
from specdec.protocol.target_sequence import TargetSequence

NUM_STEPS = 50


class Room:
    """A cache with room for so many sequences, taken from the last."""

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.held: dict[str, int] = {}
        self.places: dict[str, int] = {}

    def find_prefix(self, key: str) -> CachedPrefix:
        return CachedPrefix(0)

    def allocate(self, key: str, num_step_tokens: int) -> int | None:
        if key not in self.held and len(self.held) >= self.num_sequences:
            last = max(self.held, key=self.places.__getitem__)
            if self.places[last] < self.places[key]:
                return None
            del self.held[last]
        return self.held.setdefault(key, 0)

    def extend(self, key: str, length: int) -> bool:
        return True

    def blocks(self, key: str, start: int, stop: int) -> tuple[str, ...]:
        return ()


def sequence(name: str, owner: bytes, arrival_s: float, priority: int) -> TargetSequence:
    spec = SequenceSpec(SamplingParams(), 0, 10, 100, arrival_s=arrival_s, priority=priority, owner=owner)
    found = TargetSequence.__new__(TargetSequence)
    found.seq, found.spec, found.rank = name, spec, (priority, arrival_s, name)
    return found


@pytest.mark.parametrize(("max_num_seqs", "room"), [(256, 100), (256, 10**6), (64, 10**6), (8, 10**6), (64, 8)])
@pytest.mark.parametrize("priority", [-1, 0])
@pytest.mark.parametrize("first_s", [0.0, 1000.0])
def test_each_of_two_owners_has_its_rows_whatever_the_other_sends(
    max_num_seqs: int, room: int, priority: int, first_s: float
) -> None:
    """One of them sends 128 sequences, before the other one's 64 or after them."""
    sequences = [sequence(f"B{i}", b"B" * 8, 500.0 + i, 0) for i in range(64)]
    sequences += [sequence(f"A{i}", b"A" * 8, first_s + i, priority) for i in range(128)]
    ordered = in_turns(sequences)
    scheduler, cache, rows = Scheduler(8192, max_num_seqs), Room(room), Counter[str]()
    cache.places = {one.seq: place for place, one in enumerate(ordered)}
    for step in range(NUM_STEPS):
        requests = [
            Request(one.seq, 11 + step, num_computed_tokens=cache.held.get(one.seq, 0), owner=one.spec.owner)
            for one in ordered
        ]
        for row in scheduler.schedule(requests, cache):
            key = requests[row.request].key
            rows[key[0]] += 1
            cache.held[key] = 11 + step
    places = min(max_num_seqs, room, len(sequences))
    least = min(0.4 * places, 64) * NUM_STEPS
    assert min(rows["A"], rows["B"]) >= least, rows


def test_owners_take_turns_and_a_priority_orders_its_owners_alone() -> None:
    given = [("a0", "a", 0.0, 0), ("a1", "a", 1.0, 0), ("a2", "a", 2.0, -5), ("b0", "b", 3.0, 0), ("b1", "b", 4.0, 0)]
    sequences = [sequence(name, owner.encode(), at, priority) for name, owner, at, priority in given]
    assert [one.seq for one in in_turns(sequences)] == ["a2", "b0", "a0", "b1", "a1"]
    passing = sequence("admin", b"", 9.0, -1)
    assert in_turns([*sequences, passing])[0].seq == "admin"


class Full(Room):
    """No room for keys that begin with "big"."""

    def allocate(self, key: str, num_step_tokens: int) -> int | None:
        return None if key.startswith("big") else super().allocate(key, num_step_tokens)


def test_a_prompt_without_room_blocks_its_own_owner_alone() -> None:
    scheduler, cache = Scheduler(8192, 256), Full(10**6)
    requests = [Request("big", 10, owner=b"A")]
    requests += [Request(f"{owner}{i}", 10, owner=owner.encode()) for i in range(20) for owner in "AB"]
    begun = Counter(requests[row.request].key[0] for row in scheduler.schedule(requests, cache))
    assert begun == {"A": 16, "B": 20}, "16 of its owner's pass it"
