"""The GPU script: tried out without one, its kernels in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import importlib
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
    long,
    memory,
    pair,
    pairs,
    sampling,
    service,
    shapes,
    strict,
    tuning,
)
from benchmarks.gpu.report import ERRORS, FIGURES, LOG, Report
from benchmarks.modes.compare import Variant
from benchmarks.modes.load import Workload
from benchmarks.modes.measures import Run, Stream, TokenArrival
from tests.specdec.kernels.interpreter import interpreted

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 0
    assert capsys.readouterr().out == "skipped: torch finds no GPU here\n"


def right(report: Report, device: torch.device, sizes: Any) -> None:
    report.figure("step_ms", 3.0, over=2.0, most=1.4)


def wrong(report: Report, device: torch.device, sizes: Any) -> None:
    right(report, device, sizes)
    report.check("bits", False)


def broken(report: Report, device: torch.device, sizes: Any) -> None:
    right(report, device, sizes)
    raise RuntimeError("broken")


def missing(report: Report, device: torch.device, sizes: Any) -> None:
    raise ModuleNotFoundError("No module named 'triton'")


@pytest.mark.parametrize(
    ("run", "code", "failures", "not_run"),
    [(right, 0, [], []), (wrong, 1, ["bits"], []), (broken, 1, ["long"], []), (missing, 0, [], ["long"])],
)
def test_a_section_writes_what_it_finds_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Any, code: int, failures: list[str], not_run: list[str]
) -> None:
    monkeypatch.setattr(long, "run", run)
    before = Report(folder=tmp_path)
    before.figure("earlier_ms", 1.0)
    assert script.run_here(script.Part("long", 60.0), tmp_path, is_small=True) == code
    told = json.loads((tmp_path / FIGURES).read_text())
    ratio = {} if run is missing else {"step_ms": 3.0, "step_ms_over_least": 1.5}
    assert told == {"figures": {"earlier_ms": 1.0} | ratio, "failures": failures, "not_run": not_run}
    assert (run is missing) == ("not run: No module named 'triton'" in (tmp_path / LOG).read_text())


@pytest.mark.parametrize(
    ("does", "failures"),
    [("sleep 600", ["bits", "steps"]), ("kill -SEGV $$", ["bits", "steps"]), ("exit 1", ["bits"])],
    ids=["hangs", "dies", "ends"],
)
def test_what_a_process_has_written_is_kept_however_it_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str, failures: list[str]
) -> None:
    python = tmp_path / "python"
    written = '{"figures": {"ms": 1}, "failures": ["bits"], "not_run": []}'
    python.write_text(f"#!/bin/sh\necho trouble >&2\necho '{written}' > {tmp_path / FIGURES}\n{does}\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(script, "GRACE_S", 0.0)
    report = Report(folder=tmp_path)
    script.run_apart(script.Part("steps", 0.5 if "sleep" in does else 60), report)
    assert report.failures == json.loads((tmp_path / FIGURES).read_text())["failures"] == failures
    assert report.figures == {"ms": 1}
    assert (tmp_path / ERRORS).read_text() == "trouble\n"


def test_a_section_that_has_no_time_left_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(limit_s=5.0)
    assert report.has_time(4.0, "this")
    assert not report.has_time(6.0, "that")
    assert capsys.readouterr().out.endswith("left out for want of time: that\n")


def test_every_call_ends_within_ten_minutes_and_is_one_short_line() -> None:
    for name, parts in script.CALLS.items():
        assert {part.section for part in parts} <= script.SECTIONS.keys()
        assert script.limits_s(parts) <= 570, name
        for part in parts:
            module = importlib.import_module(f"benchmarks.gpu.{part.section}")
            for size in (module.FULL, module.SMALL):
                known = {one.name for one in dataclasses.fields(size)}
                assert part.changes.keys() <= known, part


def test_what_is_asked_for_changes_sizes() -> None:
    asked = {"streams": "1,32", "kinds": "int8", "contexts": "8192"}
    assert script.changed(pair.FULL, asked, is_small=False).streams == (1, 32)
    assert script.changed(long.FULL, asked, is_small=False).contexts == (8192,)
    assert script.changed(layers.SMALL, asked, is_small=True).kinds == ("int8",)
    assert script.changed(pair.SMALL, asked, is_small=True) == pair.SMALL


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
    tried = tuning.variants(table)
    configs = {one.config for one in tried.values()}
    tiles = itertools.product((32, 64), (4, 8), (2, 4, 5))
    assert {(one.keys, one.num_warps, one.num_stages) for one in configs} >= set(tiles)
    assert len(tried) == len(configs) + 4, "two lengths of segments, split never or always"


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_embedding_of_the_input_alone_is_not_read_whole(is_tied: bool) -> None:
    fields = shapes.SHAPES["tiny"]["target"] | {"tie_word_embeddings": is_tied}
    loaded = shapes.make_model(fields, CPU, torch.float32)
    layers = sum(p.nbytes for name, p in loaded.model.named_parameters() if "embed_tokens" not in name)
    buffers = sum(buffer.nbytes for buffer in loaded.model.buffers())
    # Tied, the one matrix of 256 rows of 64 floats is read whole as the output's.
    assert shapes.read_bytes(loaded) == layers + buffers + (256 * 64 * 4 if is_tied else 0)


def test_the_least_of_a_step_is_the_larger_of_reading_and_multiplying(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = shapes.make_model(shapes.SHAPES["tiny"]["target"], CPU, torch.float32)
    read = shapes.read_bytes(loaded)
    monkeypatch.setattr(long, "read_bandwidth", lambda _: 1e6)
    monkeypatch.setattr(long, "product_rate", lambda _: 1e6)
    # A token's keys and values: 4 layers x 2 heads x 16 wide, twice, of 4 bytes.
    assert long.least_step_s(loaded, 1, 1, 9) == pytest.approx((read + 10 * 4 * 2 * 16 * 2 * 4) / 1e6)
    monkeypatch.setattr(long, "read_bandwidth", lambda _: 1e9)
    assert long.least_step_s(loaded, 2, 3, 9) == pytest.approx(2 * 6 * read / 4 / 1e6)


def test_the_limit_of_a_pair_is_that_of_its_steps_in_turn() -> None:
    """Of 2 draft tokens a round 2.44 are won at .8: 2.44 x 10 / (12 + 2 x 1); 7 cost too much."""
    times = pair.PairTimes({16: {0: 0.010, 2: 0.012, 7: 0.100}, 1: {0: 9.0}}, {16: 0.001, 1: 1.0})
    assert times.limit(16, 0.8) == (pytest.approx(2.44 * 10 / 14), 2)
    assert times.over_plain(16, 7, 1.0) == pytest.approx(0.010 / 0.107)


def test_the_limit_of_a_host_s_draft_is_that_of_steps_that_overlap() -> None:
    """At c = .5 two tokens fit into a step, which gives 1 + .7 + .49; a third makes it half as long again."""
    assert host_drafter.overlapped_limit(0.5, 0.7) == (pytest.approx(2.19), 2)
    assert host_drafter.overlapped_limit(2.0, 0.7) == (pytest.approx(1.7 / 2), 1)


@pytest.mark.parametrize(
    ("section", "figure"),
    [
        (executor, ""),
        (long, "target_3x3_at_32_ms_over_least"),
        (pair, "pair_3_of_limit"),
        (exact, "exact_bf16_t1_k8_flips"),
        (memory, "memory_draft_graphs_mib"),
        (heads, "eagle3_round_3x2_ms"),
    ],
)
def test_sections_of_whole_models_run_without_a_gpu(section: Any, figure: str) -> None:
    report = Report()
    section.run(report, CPU, section.SMALL)
    assert report.failures == []
    assert figure in ["", *report.figures]


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
    assert least[0] == shapes.read_bytes(loaded) - 0.75 * of_experts
    assert least[1] - least[0] == pytest.approx((0.75 - 0.75**3) * of_experts)


def test_other_tokens_are_found_and_judged_by_how_close_their_scores_are() -> None:
    made = generation.Pair(*pairs.near_pair(shapes.SHAPES["tiny"]["draft"], CPU, torch.float32, 0.3), exact.SMALL.work)
    prompts = exact.SMALL.work.prompts(256)
    (texts, stats), runner = made.generate(prompts, 1.0, 4), made.runners["target"]
    assert stats.num_tokens == 36
    assert exact.difference(runner, prompts[1], 1, 1.0, texts[1], texts[1]) is None
    other = [*texts[1][:5], (texts[1][5] + 1) % 256, *texts[1][6:]]
    gap = exact.difference(runner, prompts[1], 1, 1.0, texts[1], other)
    assert gap is not None
    assert gap > exact.TIE


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_drafts_of_a_chain_are_accepted_at_the_rate_that_is_set(rate: float) -> None:
    """Each token has one follower, whatever came before it."""
    target, draft = (pairs.Chain("tiny", rate).make(role, CPU, torch.float32) for role in ("target", "draft"))
    work = generation.Work(num_rows=4, prompt_length=3, num_tokens=60)
    made = generation.Pair(target, draft, work)
    texts, stats = made.generate(work.prompts(256), 1.0, 1)
    followers = {two for text in texts for two in itertools.pairwise(text)}
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


def test_a_service_is_compared_with_what_its_steps_allow() -> None:
    def runner(variant: Variant, workload: Workload) -> Run:
        asked.append((variant.name, workload))
        text = "other" if variant.name == wrong else "same"
        stream = Stream(text, (TokenArrival(0.1, 30 if variant.name == "4" else 20),))
        return Run((stream,) * len(workload.prompts), 1.0, 0.0, {})

    asked: list[tuple[str, Workload]] = []
    for wrong, failures in (("", []), ("4", ["16 streams: the same texts with drafts as without"])):  # noqa: B007
        report = Report()
        service.compare(report, runner, service.SMALL.work, 16, lambda plain: (plain / 160, 2))
        assert report.failures == failures
    assert report.figures["service_16_4_over_plain"] == report.figures["service_16_4_over_plain_low"] == 1.5
    assert report.figures["service_16_4_of_limit"] == pytest.approx(1.5 / 2)
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
