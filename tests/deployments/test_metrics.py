from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from deployments.metrics import WorkerReports
from deployments.openai.tally import RoundTally, speculation_metrics
from specdec.engine.scripted import Script, ScriptedDrafter, ScriptedTarget
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.leases import Times
from specdec.protocol.messages import Plan
from specdec.protocol.target import TargetMachine


def test_choices_and_estimates_are_on_the_page():
    registry = CollectorRegistry()
    reports = {
        "T#1": (
            "target",
            {
                "num_sequences": 2.0,
                "planned_draft_tokens": 5.0,
                "estimated_target_step_seconds": 0.03,
                "step/0/rows": 1.0,
            },
        ),
        "R#1": (
            "router",
            {
                "planned_draft_tokens": 4.0,
                "planned_sequences/off": 1.0,
                "planned_sequences/overlap": 2.0,
            },
        ),
    }
    registry.register(WorkerReports([reports], "m"))
    page = generate_latest(registry).decode()
    assert 'specdec_planned_draft_tokens{model_name="m",role="router",router="R#1",worker="R#1"} 4.0' in page
    assert 'specdec_planned_draft_tokens{model_name="m",role="target",router="R#1",worker="T#1"} 5.0' in page
    assert 'specdec_planned_sequences{mode="overlap",model_name="m",role="router",worker="R#1"} 2.0' in page
    assert 'specdec_estimated_target_step_seconds{model_name="m",role="target",router="R#1",worker="T#1"} 0.03' in page
    assert "step/" not in page


def test_what_workers_hold_and_what_is_kept_for_reuse_are_series_of_their_own():
    registry = CollectorRegistry()
    held = {"state_slots_in_use": 2.0, "state_slots_reusable": 3.0, "kv_blocks_in_use": 4.0, "kv_blocks_reusable": 5.0}
    held["num_state_slots"] = 8.0
    report = held | {"num_evictions": 6.0, "num_fallbacks/reads_single_tokens": 7.0}
    registry.register(WorkerReports([{"T#1": ("target", report)}], "m"))
    page = generate_latest(registry).decode()
    labels = 'model_name="m",role="target",worker="T#1"'
    for name, value in (*held.items(), ("num_evictions_total", 6.0)):
        assert f"specdec_{name}{{{labels}}} {value}" in page
    assert (
        'specdec_num_fallbacks_total{model_name="m",reason="reads_single_tokens",role="target",worker="T#1"} 7.0'
        in page
    )


def test_what_became_of_offers_and_branches_is_on_the_page():
    """By the names under which the machines count it."""
    registry = CollectorRegistry()
    target = TargetMachine("T#1", ScriptedTarget(Script(0.8, 0.9, range(5, 50)), 100), Times())
    drafter = DrafterMachine("D#1", ScriptedDrafter(Script(0.8, 0.9, range(5, 50)), 100), Times())
    target.counters.num_stale_offers = 2
    target.counters.num_branch_hits, target.counters.num_branch_misses = 7, 9
    drafter.counters.num_branches_forked, drafter.counters.num_promoted = 9, 4
    drafter.counters.num_branch_tokens_wasted, drafter.counters.num_offers = 5, 6
    drafter.counters.num_right_tokens, drafter.counters.num_wrong_tokens = 2, 3
    reports = {"T#1": ("target", target.report()), "D#1": ("drafter", drafter.report() | {"num_waiting_sequences": 7})}
    registry.register(WorkerReports([reports], "m"))
    expected = {
        "T#1": {
            "num_offers": 0,
            "num_stale_offers": 2,
            "num_branch_hits": 7,
            "num_branch_misses": 9,
        },
        "D#1": {
            "num_offers": 6,
            "num_branches_forked": 9,
            "num_promoted": 4,
            "num_right_tokens": 2,
            "num_wrong_tokens": 3,
            "num_branch_tokens_wasted": 5,
            "num_waiting_sequences": 7,
        },
    }
    for worker, figures in expected.items():
        labels = {"model_name": "m", "role": reports[worker][0], "worker": worker}
        found = {
            name: registry.get_sample_value(
                f"specdec_{name}{'' if name == 'num_waiting_sequences' else '_total'}", labels
            )
            for name in figures
        }
        assert found == figures
        assert figures.keys() <= reports[worker][1].keys()


def test_the_plan_is_among_the_figures_of_an_answer():
    tally = RoundTally()
    assert "plan" not in speculation_metrics(tally, 4, False)
    tally.plan = Plan(3, 8, mode="overlap", acceptance_rate=0.75, draft_wait_s=0.25)
    expected = {"num_draft_tokens": 3, "num_branches": 8, "mode": "outcomes", "acceptance_rate": 0.75}
    assert speculation_metrics(tally, 4, False)["plan"] == expected | {"draft_wait_s": 0.25}
    tally.plan = Plan()
    assert speculation_metrics(tally, 4, False)["plan"]["mode"] == "off"
