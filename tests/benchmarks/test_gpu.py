"""The GPU script: tried out without one, its kernels in Triton's interpreter."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import (
    attention,
    exact,
    executor,
    faults,
    generation,
    heads,
    host_drafter,
    layers,
    memory,
    pairs,
    sampling,
    service,
    steps,
    strict,
    tuning,
)
from benchmarks.gpu.report import Report
from benchmarks.modes.compare import Variant
from benchmarks.modes.load import Workload
from benchmarks.modes.measures import Run, Stream, TokenArrival
from benchmarks.step_times import StepTime
from tests.specdec.kernels.interpreter import interpreted

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 0
    assert capsys.readouterr().out == "skipped: torch finds no GPU here\n"


def test_what_breaks_or_is_missing_hides_no_other_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(report: Report, device: torch.device) -> None:
        raise ModuleNotFoundError("No module named 'triton'")

    def wrong(report: Report, device: torch.device) -> None:
        report.check("bits", False)
        raise RuntimeError("broken")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script, "run_apart", script.run_here)
    monkeypatch.setattr(attention, "run", missing)
    monkeypatch.setattr(sampling, "run", wrong)
    monkeypatch.setattr(steps, "run", lambda report, device: report.figure("step_ms", 3.0, over=2.0, most=1.4))
    path = tmp_path / "figures.json"
    assert script.main(["--sections", "attention,sampling,steps", "--json", str(path)]) == 1
    told = json.loads(path.read_text())
    assert told == {
        "figures": {"step_ms": 3.0, "step_ms_over_least": 1.5},
        "failures": ["bits", "sampling"],
        "not_run": ["attention"],
    }
    out = capsys.readouterr().out
    assert "not run: No module named 'triton'" in out
    assert "step_ms 3, 1.50 of the least 2 (aim 1.4: missed)" in out


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_gpu_is_recorded_where_every_section_has_run(monkeypatch: pytest.MonkeyPatch, is_missing: bool) -> None:
    recorded: list[torch.device] = []

    def run(report: Report, device: torch.device) -> None:
        if is_missing:
            raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script, "run_apart", script.run_here)
    monkeypatch.setattr(attention, "run", run)
    monkeypatch.setattr(sampling, "run", lambda report, device: None)
    monkeypatch.setattr(executor, "run", lambda report, device: None)
    monkeypatch.setattr(executor, "write_record", lambda report, device: recorded.append(device))
    assert script.main(["--sections", "attention,sampling,executor"]) == 0
    assert len(recorded) == 1 - is_missing
    assert script.main(["--sections", "executor"]) == 0
    assert len(recorded) == 1 - is_missing, "it alone says too little"


@pytest.mark.parametrize(
    ("does", "ran", "failures"),
    [
        ("sleep 600", True, ["steps"]),
        ("kill -SEGV $$", True, ["steps"]),
        ('echo \'{"figures": {"ms": 1}, "failures": [], "not_run": []}\' > $6', True, []),
        ('echo \'{"figures": {}, "failures": [], "not_run": ["steps"]}\' > $6', False, []),
    ],
    ids=["hangs", "dies", "runs", "is-not-run"],
)
def test_a_section_in_a_process_of_its_own_ends_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str, ran: bool, failures: list[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    report = Report()
    assert script.run_apart("steps", report, limit_s=0.5 if "sleep" in does else 60) is ran
    assert report.failures == failures


@interpreted
def test_kernels_are_right_in_the_interpreter() -> None:
    report = Report()
    attention.run(report, CPU, attention.SMALL)
    sampling.run(report, CPU, sampling.SMALL)
    assert report.failures == []


@interpreted
def test_strict_steps_are_compared_and_timed() -> None:
    report = Report()
    strict.run(report, CPU, strict.SMALL)
    assert report.failures == []
    assert report.figures["strict_positions"] > 15
    assert report.figures["strict_positions_with_other_bits"] == 0
    assert {"strict_step_2x8_ms_over_least", "strict_256x64_float32_split_sizes"} <= report.figures.keys()


@interpreted
def test_tiles_are_timed_beside_those_of_the_table() -> None:
    from specdec.kernels.triton.attention import tile_config

    report = Report()
    tuning.run(report, CPU, tuning.SMALL)
    assert [*report.figures] == ["tuning_tiny_1x1_at_8_us", "tuning_tiny_1x1_at_8_us_over_least"]
    table = tuning.Variant(tile_config(attention.make_shape((32, 8, 128), [(1, 1)], torch.bfloat16)), 256)
    # Eight tiles of which one is the table's, two lengths of segments, split never or always.
    assert len(tuning.variants(table)) == 1 + 7 + 2 + 2


def test_steps_are_stated_over_reading_the_weights() -> None:
    report = Report()
    steps.run(report, CPU, steps.SMALL)
    ratios = [name for name in report.figures if name.endswith("_over_least")]
    target = [f"target_step_{rows}x{tokens}_ms_over_least" for rows in (1, 3) for tokens in (1, 3)]
    assert sorted(ratios) == sorted([*target, "draft_step_1_ms_over_least", "draft_step_3_ms_over_least"])


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_embedding_of_the_input_alone_is_not_read_whole(is_tied: bool) -> None:
    fields = steps.SHAPES["tiny"]["target"] | {"tie_word_embeddings": is_tied}
    loaded = steps.make_model(fields, CPU, torch.float32)
    layers = sum(p.nbytes for name, p in loaded.model.named_parameters() if "embed_tokens" not in name)
    buffers = sum(buffer.nbytes for buffer in loaded.model.buffers())
    # Tied, the one matrix of 256 rows of 64 floats is read whole as the output's.
    assert steps.read_bytes(loaded) == layers + buffers + (256 * 64 * 4 if is_tied else 0)


def test_padded_steps_are_compared_and_timed() -> None:
    report = Report()
    executor.run(report, CPU, "tiny", context=32)
    assert report.failures == []
    assert {"graph_target_step_64x8_ms", "graph_draft_step_1x1_ms"} <= report.figures.keys()


@pytest.mark.parametrize(
    ("section", "figure"),
    [
        (exact, "exact_bf16_t1_k8_flips"),
        (memory, "memory_draft_graphs_mib"),
        (heads, "eagle3_round_3x2_ms"),
        (host_drafter, "host_drafter_over_gpu_in_turn"),
    ],
)
def test_sections_of_whole_models_run_without_a_gpu(section: Any, figure: str) -> None:
    report = Report()
    section.run(report, CPU, section.SMALL)
    assert report.failures == []
    assert figure in report.figures


@interpreted
def test_layers_of_each_kind_are_compared_and_timed_launched_and_recorded() -> None:
    """But for the hybrid's comparison, of which ``tests/thorough/executor`` has more: here it takes half a minute."""
    report, check, checked = Report(), layers.check, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "check", lambda _, kind, runner: checked.append((kind, runner)))
        layers.run(report, CPU, layers.SMALL)
    for kind, runner in checked[1:]:
        check(report, kind, runner)
    assert report.failures == []
    kinds, ways, steps_ = ("hybrid", "experts", "adapters", "int8"), ("launched", "recorded"), ("2x1", "2x3")
    named = {f"{kind}_{way}_step_{step}_ms" for kind in kinds for way in ways for step in steps_}
    assert named <= report.figures.keys()
    loaded = layers.make_kind("experts", layers.SMALL.shapes["experts"], CPU, torch.float32)
    of_experts = 2 * 8 * (2 * 32 * 64 + 64 * 32) * 4
    # Of eight experts a token chooses two; three tokens leave each with (6 / 8)^3.
    least = [layers.least_bytes(loaded, 1, count) for count in (1, 3)]
    assert least[0] == steps.read_bytes(loaded) - 0.75 * of_experts
    assert least[1] - least[0] == pytest.approx((0.75 - 0.75**3) * of_experts)


def test_other_tokens_are_found_and_judged_by_how_close_their_scores_are() -> None:
    pair = generation.Pair(*pairs.near_pair(steps.SHAPES["tiny"]["draft"], CPU, torch.float32, 0.3), exact.SMALL.work)
    prompts = exact.SMALL.work.prompts(256)
    (texts, stats), runner = pair.generate(prompts, 1.0, 4), pair.runners["target"]
    assert stats.num_tokens == 36
    assert exact.difference(runner, prompts[1], 1, 1.0, texts[1], texts[1]) is None
    other = [*texts[1][:5], (texts[1][5] + 1) % 256, *texts[1][6:]]
    gap = exact.difference(runner, prompts[1], 1, 1.0, texts[1], other)
    assert gap is not None
    assert gap > exact.TIE


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_drafts_of_a_chain_are_accepted_at_the_rate_that_is_set(rate: float) -> None:
    """Each token has one follower, whatever came before it."""
    models = dict(pairs.chain_pair("tiny", CPU, torch.float32, rate))
    work = generation.Work(num_rows=4, prompt_length=3, num_tokens=60)
    pair = generation.Pair(models["target"], models["draft"], work)
    texts, stats = pair.generate(work.prompts(256), 1.0, 1)
    followers = {pair for text in texts for pair in itertools.pairwise(text)}
    assert len(followers) == len({before for before, _ in followers})
    assert stats.acceptance_rate == pytest.approx(rate, abs=0.2 if 0 < rate < 1 else 0)


def test_faults_are_tried_out_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults, "CHILD_WORK", generation.Work(num_rows=2, prompt_length=4, num_tokens=8))
    report = Report()
    faults.check_out_of_memory(report, CPU, faults.SMALL)
    faults.check_progress(report, CPU)
    assert report.failures == []
    last_lines = []
    for what in ("generate", "generate", "assert"):
        faults.main([what, "--device", "cpu"])
        last_lines.append(capsys.readouterr().out.splitlines()[-1])
    assert last_lines[0] == last_lines[1]
    assert last_lines[0].startswith("tokens ")
    assert last_lines[2] == "lost: the device can no longer be used: CUDA error: device-side assert triggered"


def test_what_processes_of_their_own_say_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(what: str, _device: torch.device) -> subprocess.Popen[str]:
        said.append(f"tokens {len(said)}" if what == "generate" else "it went on")
        command = ["sh", "-c", f"echo ready; echo {said[-1]}"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    said: list[str] = []
    monkeypatch.setattr(faults, "_child", child)
    report = Report()
    faults.check_processes(report, CPU)
    faults.check_lost_device(report, CPU)
    assert len(report.failures) == 3, "two processes, the one that is left, and the device"


def test_a_service_is_compared_with_what_its_steps_allow_in_turn() -> None:
    """Of 2 draft tokens a round 2.44 are won at .8: 2.44 x 10 / (12 + 2 x 1); 7 cost too much."""
    numbers = {0: 0.010, 2: 0.012, 7: 0.100}
    steps_ = [StepTime("target", 16, length, time_s, time_s) for length, time_s in numbers.items()]
    steps_ += [StepTime("draft", 16, 0, 0.001, 0.001), StepTime("target", 1, 0, 9.0, 9.0)]
    assert service.limit(steps_, 16) == (pytest.approx(2.44 * 10 / 14), 2)

    def runner(variant: Variant, workload: Workload) -> Run:
        asked.append((variant.name, workload))
        text = "other" if variant.name == wrong else "same"
        stream = Stream(text, (TokenArrival(0.1, 30 if variant.name == "4" else 20),))
        return Run((stream,) * len(workload.prompts), 1.0, 0.0, {})

    asked: list[tuple[str, Workload]] = []
    for wrong, failures in (("", []), ("4", ["16 streams: the same texts with drafts as without"])):  # noqa: B007
        report = Report()
        service.compare(report, runner, service.SMALL, 16, steps_)
        assert report.failures == failures
    assert report.figures["service_16_4_over_plain"] == report.figures["service_16_4_over_plain_low"] == 1.5
    assert report.figures["service_16_4_of_limit"] == pytest.approx(1.5 / (2.44 * 10 / 14))
    of_first_round = [workload for _, workload in asked[:3]]
    assert [workload.num_speculative_tokens for workload in of_first_round] == [0, None, 4]
    assert len({workload.prompts for workload in of_first_round}) == 1


def test_the_target_is_killed_while_its_streams_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only it: not the shell above it, nor a process beside it."""
    monkeypatch.setattr(service, "_KILL_AFTER_S", 0.05)
    command = (
        "(exec -a ray::ServeReplica:app:DraftServer sleep 60) & (exec -a ray::ServeReplica:app:TargetServer sleep 60)"
    )
    workloads: list[Workload] = []

    with subprocess.Popen(["bash", "-c", f"{command}; echo killed; wait"], stdout=subprocess.PIPE) as above:
        assert above.stdout is not None

        def runner(_variant: Variant, workload: Workload) -> Run:
            workloads.append(workload)
            if len(workloads) == 2:
                assert above.stdout.readline() == b"killed\n"
            return Run((Stream("text", ()),), float(len(workloads)), 0.0, {})

        while len([title for _, title in service.descendants(above.pid) if title.startswith("ray::")]) < 2:
            assert above.poll() is None
        report = Report()
        service.kill_target(report, runner, service.SMALL, above.pid)
        (left,) = [pid for pid, title in service.descendants(above.pid) if title.startswith("ray::")]
        os.kill(left, signal.SIGKILL)
    assert report.failures == []
    assert report.figures == {"service_kill_pause_s": 1.0}
    assert workloads[0] == workloads[1]
