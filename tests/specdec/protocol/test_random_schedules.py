"""Random schedules over the real machines, without a broken promise: 125, and 20,000 in full."""

from __future__ import annotations

from collections import Counter

import pytest

from specdec.core.messages import Notes
from specdec.protocol.target import TargetMachine
from tests.letters import ACCEPTED, spelled
from tests.sizes import sized
from tests.specdec.protocol.scripted import ScriptedTarget
from tests.specdec.protocol.world import NOTHING, World, run_schedule

PART = sized(125, 250)
NUM_SCHEDULES = sized(PART, 20_000)


def check(first: int, count: int) -> None:
    """A failure names seeds: ``run_schedule(seed)`` repeats one, step by step the same."""
    results = [run_schedule(seed) for seed in range(first, first + count)]
    broken = [(result.seed, result.violation) for result in results if result.violation is not None]
    assert broken == []
    counts = sum((result.counts for result in results), Counter())
    assert counts["finished"] > 2 * count
    assert min(counts[what] for what in ("restarts", "lapses", "rumours", "stalls")) > count / 4
    assert counts["cancelled"] > count / 25
    assert min(counts[what] for what in ("drains", "updates", "errors", "deaths")) > count / 10
    assert counts["accepted"] > counts["tokens"] / 20
    assert counts["predicted"] > counts["tokens"] / 100
    assert min(counts["promoted"], counts["branch hits"], counts["of pairs"]) > count / 10


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, PART))
def test_random_schedules(first: int) -> None:
    check(first, PART)


def test_notes_add_up_to_the_targets_counters() -> None:
    """Where nothing fails and every sequence is opened once, notes and counters tell the same of every round."""
    num_accepted = 0
    for seed in range(sized(40, 200)):
        world = World(seed)
        if any(script.poison or script.draft_poison or script.draft_fault for script in world.scripts.values()):
            continue
        world.adversary, world.net.loss, world.net.delay = NOTHING, 0.0, 0.0
        for node in world.nodes.values():
            for backend in node.backends:
                if isinstance(backend, ScriptedTarget):
                    backend.failing = 0
        for _ in range(20):
            world.step()
            world.disturb()
        world.await_clients()
        clients = world.watch.clients.values()
        machines = [node.machine for node in world.nodes.values()]
        counters = [machine.counters for machine in machines if isinstance(machine, TargetMachine)]
        notes = sum((client.notes for client in clients), Notes())
        num_accepted += sum(letter in ACCEPTED for letter in spelled(notes))
        assert len(spelled(notes)) == sum(c.num_committed_tokens for c in counters)
        assert sum(letter in ACCEPTED for letter in spelled(notes)) == sum(c.num_accepted_tokens for c in counters)
        assert sum(notes.num_drafted) == sum(c.num_draft_tokens for c in counters)
        assert sum(count > 0 for count in notes.num_drafted) == sum(c.num_drafts for c in counters)
    assert num_accepted > sized(20, 100)
