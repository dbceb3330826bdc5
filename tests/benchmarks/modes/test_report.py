"""What people and programs get to read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.modes.report import BenchReport, Environment, command_line, processor_name
from benchmarks.modes.summary import SummaryRow

ROW = SummaryRow(
    prompts="code",
    temperature=0.0,
    num_streams=2,
    variant="in turn, 4 draft tokens",
    tokens_per_s=80.0,
    ratio=(0.9, 1.5, 2.0),
    decode_tokens_per_s=90.0,
    first_s=0.0425,
    gap_mean_s=0.0126,
    gap_percentiles_s=(0.0, 0.042, 0.045),
    acceptance_rate=0.625,
    mean_acceptance_length=3.5,
    step_s={"target": 0.03, "draft": 0.003},
    idle_share={"target": 0.3, "draft": 0.7},
    load=1.5,
    has_equal_texts=True,
    num_emulated_steps=0,
    num_overruns=0,
)
ENVIRONMENT = Environment(
    machine="A processor, 2 cores, no GPU",
    versions={"torch": "2.13"},
    models={"target": "llama, 12 layers"},
    stand_ins=(),
    work="over HTTP",
    command="python -m benchmarks.modes --streams 2",
)


def cells(report: BenchReport, line: int) -> dict[str, str]:
    rows = [
        [cell.strip() for cell in text.strip("|").split("|")] for text in report.markdown().splitlines() if "|" in text
    ]
    return dict(zip(rows[0], rows[line], strict=True))


def test_a_row() -> None:
    row = cells(BenchReport(ENVIRONMENT, (ROW,)), 2)
    assert row["tokens/s"] == "80.0"
    assert row["against the first variant (least, median, most)"] == "0.90, 1.50, 2.00"
    assert row["TTFT ms"] == "42.5"
    assert row["ITL ms mean; p50, p95, p99"] == "12.6; 0.0, 42.0, 45.0"
    assert row["acceptance"] == "0.625"
    assert row["tokens a draft"] == "3.50"
    assert row["step ms target, draft"] == "30.00, 3.00"
    assert row["idle target, draft"] == "30%, 70%"
    assert row["decoding tokens/s"] == "90.0"
    assert row["same text as the first variant"] == "yes"


def test_what_is_not_known_is_a_dash() -> None:
    bare = replace(
        ROW,
        acceptance_rate=None,
        mean_acceptance_length=None,
        step_s={},
        idle_share={},
        has_equal_texts=False,
    )
    row = cells(BenchReport(ENVIRONMENT, (bare,)), 2)
    assert row["acceptance"] == row["tokens a draft"] == "-"
    assert row["step ms target, draft"] == "-, -"
    assert row["same text as the first variant"] == "no"


def test_it_says_where_and_how() -> None:
    text = BenchReport(ENVIRONMENT, (ROW,)).markdown()
    for said in (
        "A processor",
        "torch 2.13",
        "llama, 12 layers",
        "over HTTP",
        "`python -m benchmarks.modes --streams 2`",
    ):
        assert said in text
    assert "Not real" not in text
    assert "emulated" not in text


@pytest.mark.parametrize(("num_overruns", "verdict"), [(0, "all fitted"), (7, "7 did not fit")])
def test_emulation_is_said(num_overruns: int, verdict: str) -> None:
    environment = replace(ENVIRONMENT, stand_ins=("emulated devices: target=30", "scripted tokens"))
    row = replace(ROW, num_emulated_steps=50, num_overruns=num_overruns)
    text = BenchReport(environment, (row, row)).markdown()
    assert "**Not real: emulated devices: target=30.**" in text
    assert "**Not real: scripted tokens.**" in text
    assert "100 steps" in text
    assert verdict.replace("7", str(2 * num_overruns)) in text


def test_json_has_everything() -> None:
    body = json.loads(BenchReport(ENVIRONMENT, (ROW,)).as_json())
    assert body["environment"]["command"] == ENVIRONMENT.command
    assert body["rows"][0]["tokens_per_s"] == 80.0


def test_the_command_can_be_given_again(tmp_path: Path) -> None:
    assert command_line(["--config", "a b"]) == "python -m benchmarks.modes --config 'a b'"
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : Some CPU @ 3 GHz\n")
    assert processor_name(tmp_path / "cpuinfo") == "Some CPU @ 3 GHz"
    assert processor_name(tmp_path / "missing")
