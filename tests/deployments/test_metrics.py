from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from deployments.metrics import WorkerReports
from deployments.openai.tally import RoundTally, speculation_metrics
from specdec.protocol.messages import Plan


def test_choices_and_estimates_are_on_the_page():
    registry = CollectorRegistry()
    reports = {
        "T#1": ("target", {"num_sequences": 2.0, "estimated_target_step_seconds": 0.03, "step/0/rows": 1.0}),
        "R#1": (
            "router",
            {"planned_draft_tokens": 4.0, "planned_sequences/off": 1.0, "planned_sequences/overlap": 2.0},
        ),
    }
    registry.register(WorkerReports(reports, "m"))
    page = generate_latest(registry).decode()
    assert 'specdec_planned_draft_tokens{model_name="m",role="router",worker="R#1"} 4.0' in page
    assert 'specdec_planned_sequences{mode="overlap",model_name="m",role="router",worker="R#1"} 2.0' in page
    assert 'specdec_estimated_target_step_seconds{model_name="m",role="target",worker="T#1"} 0.03' in page
    assert "step/" not in page


def test_the_plan_is_among_the_figures_of_an_answer():
    tally = RoundTally()
    assert "plan" not in speculation_metrics(tally, 4, False)
    tally.plan = Plan(3, 8, mode="overlap", acceptance_rate=0.75)
    expected = {"num_draft_tokens": 3, "num_branches": 8, "mode": "overlap", "acceptance_rate": 0.75}
    assert speculation_metrics(tally, 4, False)["plan"] == expected
    tally.plan = Plan()
    assert speculation_metrics(tally, 4, False)["plan"]["mode"] == "off"
