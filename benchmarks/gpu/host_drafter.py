"""A service of a 32B target on the GPU whose draft runs on the host's cores and overlaps with it: over plain decoding.

Target and draft are actors of their own, as the product places them with ``draft.device: cpu``. The draft is right at a
set rate, and where it is not, the right token is its second guess (:class:`benchmarks.gpu.pairs.Chain`): every outcome
can be foreseen. So the limit over plain is max over K of E(K) / max(1, K·c), with c the draft's step over the target's.
The draft is loaded from disk in each of ``WAYS``; the one with the shortest step drafts.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.pairs import Chain, save_draft
from benchmarks.gpu.report import Report
from benchmarks.gpu.service import SMALL_KEYS, VARIANTS, ServedWork, compare, make_workload, served
from benchmarks.modes.compare import Runner
from benchmarks.modes.services import HttpRunner
from specdec.core.backends import DraftJob, Status
from specdec.core.errors import SpecdecError
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import Engine, Quantization
from specdec.drafting.modes import expected_tokens
from specdec.engine.drafter import ModelDrafter
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, load_model
from specdec.sampling.pipeline import Sampler

FREE_CORES = 3
"""Left to the processes of target, router and ingress."""


class Way(NamedTuple):
    """How the host runs the draft; the fields are keys of ``draft``."""

    engine: Engine
    quantization: Quantization
    dtype: str


WAYS = {
    "openvino_int8": Way("openvino", "int8", "bfloat16"),
    "int8": Way("transformers", "int8", "bfloat16"),
    "bfloat16": Way("transformers", "none", "bfloat16"),
    "int4": Way("transformers", "int4", "bfloat16"),
    "float32": Way("transformers", "none", "float32"),
}
_MOST_LENGTH = 8
_MAX_LENGTH = 512
_DRAFTS_WITHIN_S = 30.0
_NEEDED_S = 300.0
"""For the service, once a way is known."""


@dataclass(frozen=True)
class Sizes:
    """What is run: the pair, streams at once, the work, the service's keys, and timed draft steps."""

    chain: Chain
    streams: tuple[int, ...]
    work: ServedWork
    keys: dict[str, object]
    repeats: int
    needed_s: float


FULL = Sizes(
    Chain("32b-0.6b", 0.7, next_guess=True),
    (1, 4),
    ServedWork("host_drafter", prompt_length=16, num_tokens=256, rounds=4),
    {"max_num_seqs": 4, "max_model_len": 1024},
    15,
    _NEEDED_S,
)
SMALL = Sizes(
    Chain("tiny", 0.7, next_guess=True), (1,), ServedWork("host_drafter", 4, 24, rounds=1), SMALL_KEYS, 3, 0.0
)


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Find the fastest draft on the host, then serve it, and compare."""
    num_cores = max(1, (os.cpu_count() or 1) - FREE_CORES)
    torch.set_num_threads(num_cores)
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        sizes.chain.write(Path(folder), ("target",))
        save_draft(Path(folder, "draft"), sizes.chain.make("draft", torch.device("cpu"), torch.bfloat16))
        way, draft_s = fastest(report, Path(folder, "draft"), sizes)
        keys = sizes.keys | {
            "target.model": f"{folder}/target",
            "draft.model": f"{folder}/draft",
            "draft.device": "cpu",
            **{f"draft.{name}": value for name, value in way._asdict().items()},
            "actors.draft.num_cpus": num_cores,
        }

        def limit(plain_tokens_per_s: float) -> tuple[float, int]:
            return overlapped_limit(draft_s * plain_tokens_per_s, sizes.chain.acceptance_rate)

        with served(report, "host_drafter", device, keys) as services:
            runner = HttpRunner(services.urls)
            report.check("the draft is there", is_drafting(runner, sizes.work))
            for num_streams in sizes.streams:
                # A step of all streams takes as long as one of a single stream: plain tokens of one are steps.
                compare(report, runner, sizes.work, num_streams, lambda rate, n=num_streams: limit(rate / n))


def is_drafting(runner: Runner, work: ServedWork) -> bool:
    """Whether drafts come within half a minute: a service is ready without them."""
    deadline_s = time.monotonic() + _DRAFTS_WITHIN_S
    while time.monotonic() < deadline_s:
        done = runner(VARIANTS[-1], make_workload(work, 1, VARIANTS[-1].num_speculative_tokens, 0.0, 99))
        if any(stream.stats.num_drafts for stream in done.streams):
            return True
    return False


def overlapped_limit(c: float, acceptance_rate: float) -> tuple[float, int]:
    """The most over plain where every outcome is foreseen, and the draft tokens a round that allow it.

    Args:
        c: A draft step over a target's.
        acceptance_rate: Of each draft token.
    """
    lengths = range(1, 1 + _MOST_LENGTH)
    return max((expected_tokens(acceptance_rate, length) / max(1.0, length * c), length) for length in lengths)


def fastest(report: Report, folder: Path, sizes: Sizes) -> tuple[Way, float]:
    """The way with the shortest draft step on the host, and that step's seconds."""
    found: dict[Way, float] = {}
    for name, way in WAYS.items():
        if found and not report.has_time(sizes.needed_s, f"a draft in {name}"):
            break
        try:
            found[way] = draft_step_s(ModelSource(str(folder), device="cpu", **way._asdict()), sizes.repeats)
        except (SpecdecError, ImportError) as error:
            report.say(f"on the host, {name}: {error}")
        else:
            report.figure(f"host_drafter_draft_step_{name}_ms", 1e3 * found[way])
    best = min(found, key=found.__getitem__)
    return best, found[best]


def draft_step_s(source: ModelSource, repeats: int) -> float:
    """Median seconds of a step of one row."""
    loaded = load_model(source)
    if source.engine == "openvino":
        from specdec.executor.openvino.runner import OpenVINORunner

        runner: ModelRunner = OpenVINORunner(loaded, num_blocks=64, quantization=source.quantization)
    else:
        runner = ModelRunner(loaded, num_blocks=64)
    limits: dict[str, Any] = {"max_model_len": _MAX_LENGTH, "max_num_batched_tokens": _MAX_LENGTH}
    drafter = ModelDrafter(runner, Sampler(runner.vocab_size), **limits)
    log = TokenLog([3 + i % 11 for i in range(64)])
    spec = SequenceSpec(SamplingParams(temperature=0, ignore_eos=True), 0, len(log), _MAX_LENGTH)
    spent: list[float] = []
    agreed = 0
    while len(spent) < repeats + 2:  # the first two read the prompt and warm up
        start_s = time.monotonic()
        (proposal,) = drafter.propose([DraftJob("draft", log.tokens, spec, agreed, len(log))])
        if proposal.status is Status.DECIDED:
            spent.append(time.monotonic() - start_s)
            agreed = len(log)
    return statistics.median(spent[2:])


def _memory() -> Path | None:
    """Where the draft is written: memory, where there is such a folder."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else None
