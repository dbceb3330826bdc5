"""A whole service over a pair of real shape, with drafts and without, beside what its steps allow in turn.

Needs what a service needs: Ray, FastAPI and the rest. Its weights are made on the device, by each replica.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ray  # noqa: F401  # what is lacking is said before anything is made
import torch

from benchmarks.gpu.pair import FULL as PAIR_FULL
from benchmarks.gpu.pair import SMALL as PAIR_SMALL
from benchmarks.gpu.pair import ServedPair
from benchmarks.gpu.pair import Sizes as PairSizes
from benchmarks.gpu.report import Report
from benchmarks.modes.compare import Comparison, Runner, Variant
from benchmarks.modes.compare import Work as ComparedWork
from benchmarks.modes.load import Workload
from benchmarks.modes.measures import Run
from benchmarks.modes.services import HttpRunner, Services
from cluster.cli.serve import serve
from cluster.config.files import load_config

MADE = "benchmarks.gpu.pairs:made"
"""The key ``backend`` of a service whose weights are made on the device."""
VARIANTS = (Variant("plain", 0), Variant("default", None), Variant("4", 4))
AIMS, NO_AIMS = (0.97, 0.94, 0.85), (None, None, None)
"""Of the default over plain, of the lower end of its 95% interval, and of what step times allow."""
_KILL_AFTER_S = 2.0
_NEEDED_S = 30.0
"""For a round."""


@dataclass(frozen=True)
class ServedWork:
    """What is asked of a service.

    Attributes:
        name: Of the figures.
        prompt_length: In words.
        num_tokens: Of each stream.
        rounds: That count, of each comparison; one more comes first.
    """

    name: str
    prompt_length: int
    num_tokens: int
    rounds: int


@dataclass(frozen=True)
class Sizes:
    """What is run.

    Attributes:
        pair: As its section has it.
        streams: At once, of each comparison; the kill is under the second.
        work: The most of it.
        keys: Of the service's configuration.
        kill_s: That a kill, a start and a run may take.
    """

    pair: PairSizes
    streams: tuple[int, ...]
    work: ServedWork
    keys: dict[str, object]
    kill_s: float = 0.0


FULL = Sizes(
    PAIR_FULL,
    (1, 16, 64),
    ServedWork("service", prompt_length=64, num_tokens=192, rounds=4),
    {"max_num_seqs": 64, "max_model_len": 2048},
    100.0,
)
SMALL_KEYS: dict[str, object] = {
    "max_num_seqs": 4,
    "max_model_len": 256,
    "target.kv_cache_memory": "16MiB",
    "draft.kv_cache_memory": "16MiB",
}
SMALL = Sizes(PAIR_SMALL, (1, 2), ServedWork("service", 8, 24, rounds=1), SMALL_KEYS)


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Time the steps of the pair in this process, then serve it and compare, and kill its target under load."""
    with tempfile.TemporaryDirectory() as folder:
        sizes.pair.chain.write(Path(folder))
        of_pair = replace(sizes.pair, streams=sizes.streams)
        times = ServedPair.load(Path(folder), device, of_pair, report).times(
            report, sizes.streams, of_pair.context + of_pair.num_tokens // 2, of_pair.repeats
        )
        if device.type == "cuda":
            gc.collect()  # a runner and its graphs know each other
            torch.cuda.empty_cache()
        keys = {"target.model": f"{folder}/target", "draft.model": f"{folder}/draft"} | sizes.keys
        with served(report, "service", device, keys) as services:
            runner = HttpRunner(services.urls)
            if device.type == "cuda":
                apart = [title for _, title in descendants(services.pid("service")) if ":DraftServer" in title]
                report.check("by default both models are in one process of one GPU", not apart, f"{apart}")
            rate = sizes.pair.chain.acceptance_rate
            for num_streams in sizes.streams:
                compare(report, runner, sizes.work, num_streams, lambda _, rows=num_streams: times.limit(rows, rate))
            if report.has_time(sizes.kill_s, "the kill of the target"):
                kill_target(report, runner, sizes, services.pid("service"))


@contextmanager
def served(report: Report, name: str, device: torch.device, keys: dict[str, object]) -> Iterator[Services]:
    """A service over weights that are made on the device where a folder has none."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    made: dict[str, object] = {"host": "127.0.0.1", "target.dtype": dtype, "draft.dtype": dtype, "executor": "graphs"}
    started_s = time.monotonic()
    with Services({name: load_config(None, made | {"backend": MADE} | keys)}, serve) as services:
        report.figure(f"{name}_start_s", time.monotonic() - started_s)
        yield services


def compare(
    report: Report,
    runner: Runner,
    work: ServedWork,
    num_streams: int,
    limit: Callable[[float], tuple[float, int]],
) -> None:
    """Rounds in which each variant does the same work once; drafts change no text.

    Args:
        report: Gets the figures, by the work's name.
        runner: Runs a variant.
        work: What is done.
        num_streams: At once.
        limit: From plain tokens per second to the most over it, and the draft tokens a round that allow that.
    """
    runs = defaultdict[str, list[Run]](list)
    for number in range(1 + work.rounds):
        if number > 1 and not report.has_time(_NEEDED_S, f"round {number} of {num_streams} streams"):
            break
        for variant in VARIANTS:
            done = runner(variant, make_workload(work, num_streams, variant.num_speculative_tokens, 0.0, number))
            if number:
                runs[variant.name].append(done)
    what = ComparedWork("words", num_streams, work.num_tokens, 0.0)
    compared = Comparison(what, VARIANTS, tuple(tuple(runs[variant.name]) for variant in VARIANTS))
    same = all(map(compared.has_equal_texts, range(len(VARIANTS))))
    report.check(f"{num_streams} streams: the same texts with drafts as without", same)
    plain = statistics.median(run.tokens_per_s for run in runs[VARIANTS[0].name])
    most, length = limit(plain)
    report.figure(f"{work.name}_{num_streams}_plain_tokens_per_s", plain)
    report.figure(f"{work.name}_{num_streams}_limit_over_plain", most)
    report.say(f"{num_streams} streams: {most:.2f} times plain are allowed, with {length} draft tokens")
    for number, variant in enumerate(VARIANTS[1:], 1):
        name = f"{work.name}_{num_streams}_{variant.name}"
        pooled, aims = compared.pooled(number, 0), AIMS if variant.name == "default" else NO_AIMS
        report.figure(f"{name}_over_plain", pooled.ratio, least=aims[0])
        report.figure(f"{name}_over_plain_low", pooled.low, least=aims[1])
        report.figure(f"{name}_of_limit", pooled.ratio / most, least=aims[2])
        last = runs[variant.name][-1]
        steps = [f"{role} {1e3 * use.step_s:.2f} ms" for role, use in last.devices.items() if use.step_s]
        stats = [stream.stats for stream in last.streams]
        rounds = max(1, sum(one.num_drafts for one in stats))
        accepted = sum(one.num_accepted_tokens for one in stats) / rounds
        num_rounds = sum(one.num_drafts for one in stats)
        report.say(f"{name}: {accepted:.2f} accepted in {num_rounds} rounds; mean steps: {', '.join(steps)}")


def kill_target(report: Report, runner: Runner, sizes: Sizes, service_pid: int) -> None:
    """Kill the target under load: its streams pause until there is another one, and say what they would have said."""
    num_streams = sizes.streams[1]
    workload = make_workload(sizes.work, num_streams, None, 1.0, 1000)
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


def make_workload(
    work: ServedWork, num_streams: int, num_draft_tokens: int | None, temperature: float, number: int
) -> Workload:
    """Prompts of random words; every round has others, the same for all variants."""
    rng = random.Random(number)
    prompts = tuple(
        " ".join(f"t{rng.randrange(2, 200)}" for _ in range(work.prompt_length)) for _ in range(num_streams)
    )
    return Workload(prompts, work.num_tokens, temperature, num_draft_tokens, number * num_streams)
