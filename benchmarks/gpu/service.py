"""A whole service over a pair of real shape, with drafts and without, beside what its steps allow in turn.

Needs what a service needs: Ray, FastAPI and the rest. Models are written to memory (``/dev/shm``) where there is one.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray  # noqa: F401  # what is lacking is said before anything is made
import torch

from benchmarks.gpu.generation import Pair, Work
from benchmarks.gpu.pairs import chain_pair, save_pair
from benchmarks.gpu.report import Report
from benchmarks.modes.compare import Comparison, Runner, Variant
from benchmarks.modes.compare import Work as ComparedWork
from benchmarks.modes.load import Workload
from benchmarks.modes.measures import Run
from benchmarks.modes.services import HttpRunner, Services
from benchmarks.step_times import StepTime, measure_steps
from cluster.cli.serve import serve
from cluster.config.files import load_config
from specdec.drafting.length.modes import expected_tokens

ACCEPTANCE_RATE = 0.8
VARIANTS = (Variant("plain", 0), Variant("default", None), Variant("4", 4))
AIMS, NO_AIMS = (0.97, 0.94, 0.85), (None, None, None)
"""Of the default over plain, of the lower end of its 95% interval, and of what step times allow."""
_MEMORY = Path("/dev/shm")
_KILL_AFTER_S = 2.0


@dataclass(frozen=True)
class Sizes:
    """What is run.

    Attributes:
        shapes: A name in ``SHAPES``.
        num_streams: Streams at once, of each comparison; the kill is under the second.
        work: The most of it.
        draft_lengths: Draft tokens a row, of the steps that are timed.
        repeats: Of each timed step.
        rounds: That count, of each comparison; one more comes first.
        keys: Of the service's configuration.
    """

    shapes: str
    num_streams: tuple[int, ...]
    work: Work
    draft_lengths: tuple[int, ...]
    repeats: int
    rounds: int
    keys: dict[str, object]


FULL = Sizes(
    "8b-1b",
    (1, 16, 64),
    Work(num_rows=64, prompt_length=64, num_tokens=192),
    (0, 1, 2, 4, 7),
    15,
    6,
    {"executor": "graphs", "max_num_seqs": 64, "max_model_len": 2048},
)
SMALL = Sizes(
    "tiny",
    (1, 2),
    Work(num_rows=2, prompt_length=8, num_tokens=24),
    (0, 2),
    3,
    1,
    {
        "executor": "graphs",
        "max_num_seqs": 4,
        "max_model_len": 256,
        "target.kv_cache_memory": "16MiB",
        "draft.kv_cache_memory": "16MiB",
    },
)


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Time the steps of the pair in this process, then serve it and compare, and kill its target under load."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        steps = time_steps(report, device, sizes, Path(folder))
        if device.type == "cuda":
            gc.collect()  # a runner and its graphs know each other
            torch.cuda.empty_cache()
        models = {"target.model": f"{folder}/target", "draft.model": f"{folder}/draft", "host": "127.0.0.1"}
        started_s = time.monotonic()
        with Services({"service": load_config(None, models | sizes.keys)}, serve) as services:
            report.figure("service_start_s", time.monotonic() - started_s)
            runner = HttpRunner(services.urls)
            if device.type == "cuda":
                apart = [title for _, title in descendants(services.pid("service")) if ":DraftServer" in title]
                report.check("by default both models are in one process of one GPU", not apart, f"{apart}")
            for num_streams in sizes.num_streams:
                compare(report, runner, sizes, num_streams, steps)
            kill_target(report, runner, sizes, services.pid("service"))


def time_steps(report: Report, device: torch.device, sizes: Sizes, folder: Path) -> list[StepTime]:
    """Make the pair, write it into the folder, and time its recorded steps at the numbers of streams."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    models = dict(chain_pair(sizes.shapes, device, dtype, ACCEPTANCE_RATE))
    save_pair(folder, iter(models.items()))
    report.say("the pair is written")
    pair = Pair(models["target"], models["draft"], sizes.work)
    pair.record(report)
    return measure_steps(
        pair.target,
        pair.drafter,
        batches=sizes.num_streams,
        draft_lengths=sizes.draft_lengths,
        context=sizes.work.prompt_length + sizes.work.num_tokens // 2,
        repeats=sizes.repeats,
    )


def limit(steps: Sequence[StepTime], num_rows: int) -> tuple[float, int]:
    """The most that drafts can gain where both models take turns, and the draft tokens a round that gain it.

    max over K of E·t(1) / (t(K+1) + K·d): t(n) is the target's step with n tokens a row, d a draft step.

    Args:
        steps: Of both models at that number of rows.
        num_rows: Streams.
    """
    here = [step for step in steps if step.num_rows == num_rows]
    target = {step.num_draft_tokens: step.median_s for step in here if step.device == "target"}
    (draft_s,) = (step.median_s for step in here if step.device == "draft")
    return max(
        (expected_tokens(ACCEPTANCE_RATE, length) * target[0] / (target[length] + length * draft_s), length)
        for length in target
    )


def compare(report: Report, runner: Runner, sizes: Sizes, num_streams: int, steps: Sequence[StepTime]) -> None:
    """Rounds in which each variant does the same work once; drafts change no text."""
    runs = defaultdict[str, list[Run]](list)
    for number in range(1 + sizes.rounds):
        for variant in VARIANTS:
            workload = _workload(sizes, num_streams, variant.num_speculative_tokens, 0.0, number)
            done = runner(variant, workload)
            if number:
                runs[variant.name].append(done)
    work = ComparedWork("words", num_streams, sizes.work.num_tokens, 0.0)
    compared = Comparison(work, VARIANTS, tuple(tuple(runs[variant.name]) for variant in VARIANTS))
    same = all(map(compared.has_equal_texts, range(len(VARIANTS))))
    report.check(f"{num_streams} streams: the same texts with drafts as without", same)
    most, length = limit(steps, num_streams)
    report.say(f"{num_streams} streams: steps in turn allow {most:.2f} times plain, with {length} draft tokens")
    report.figure(f"service_{num_streams}_limit_over_plain", most)
    for number, variant in enumerate(VARIANTS):
        name = f"service_{num_streams}_{variant.name}"
        report.figure(f"{name}_tokens_per_s", statistics.median(run.tokens_per_s for run in runs[variant.name]))
        if number:
            pooled, aims = compared.pooled(number, 0), AIMS if variant.name == "default" else NO_AIMS
            report.figure(f"{name}_over_plain", pooled.ratio, least=aims[0])
            report.figure(f"{name}_over_plain_low", pooled.low, least=aims[1])
            report.figure(f"{name}_of_limit", pooled.ratio / most, least=aims[2])


def kill_target(report: Report, runner: Runner, sizes: Sizes, service_pid: int) -> None:
    """Kill the target under load: its streams pause until there is another one, and say what they would have said."""
    num_streams = sizes.num_streams[1]
    workload = _workload(sizes, num_streams, None, 1.0, 1000)
    wanted = runner(VARIANTS[1], workload)
    targets = [pid for pid, title in descendants(service_pid) if ":TargetServer" in title and title.startswith("ray::")]
    report.check("the target's process is found", len(targets) == 1, f"{targets}")
    if len(targets) != 1:
        return
    timer = threading.Timer(min(_KILL_AFTER_S, wanted.duration_s / 2), os.kill, (targets[0], signal.SIGKILL))
    timer.start()
    got = runner(VARIANTS[1], workload)
    timer.join()
    report.check(f"the target is killed under {num_streams} streams: the same texts", got.texts == wanted.texts)
    report.figure("service_kill_pause_s", got.duration_s - wanted.duration_s)


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """The processes below one, with their titles."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it has ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, ()))
    for one in found:
        found += children.get(one, ())
        try:
            title = Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        yield one, title


def _workload(
    sizes: Sizes, num_streams: int, num_draft_tokens: int | None, temperature: float, number: int
) -> Workload:
    """Prompts of random words; every round has others, the same for all variants."""
    rng = random.Random(number)
    prompts = tuple(
        " ".join(f"t{rng.randrange(2, 200)}" for _ in range(sizes.work.prompt_length)) for _ in range(num_streams)
    )
    return Workload(prompts, sizes.work.num_tokens, temperature, num_draft_tokens, number * num_streams)
