"""A pair in one process, as a service on one GPU and ``SpeculativeEngine`` run it: tokens per second, beside the limit.

The draft is right at a set rate (:class:`benchmarks.gpu.pairs.Chain`). The limit comes of this run's own times, of what
is recorded alone: E·t(1) / (t(K+1) + K·d), with t(n) a target's step of n tokens a row, and d a token inside a chain.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.pairs import END, Chain, made_weights
from benchmarks.gpu.replays import REPEATS, ROOM, chain_token_s, read_contexts, step_s
from benchmarks.gpu.report import Report
from specdec.core.params import SamplingParams
from specdec.drafting.modes import expected_tokens
from specdec.engine.build import BackendOptions, build_drafter, build_target, pair_gpu_shares
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import SpeculativeEngine
from specdec.engine.results import GenerationResult
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, load_tokenizer

MOST_DRAFT_TOKENS = 8
LENGTHS = (0, 3, 4, 2, 1, 6, 5, 8, 7)
"""Draft tokens a round, those first that may be best."""
_NEEDED_S = 15.0
"""For the tokens of one length; a generous guess."""
_LEAST_TEXTS = 4
_CALLS = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaMemcpyAsync", "cudaEventSynchronize", "cudaStreamSynchronize")


@dataclass(frozen=True)
class Sizes:
    """What is run.

    Attributes:
        chain: The pair.
        streams: Sequences at once.
        context: Tokens of a prompt.
        num_tokens: Generated for each.
        kv_cache_memory: Of each model; None for what a service takes.
        repeats: Of each timed launch.
    """

    chain: Chain
    streams: tuple[int, ...]
    context: int
    num_tokens: int
    kv_cache_memory: int | None = None
    repeats: int = REPEATS


FULL = Sizes(Chain("8b-1b", 0.8), (1, 16, 64), 64, 160)
SMALL = Sizes(Chain("tiny", 0.8), (1, 3), 8, 24, 16 << 20, 2)


@dataclass(frozen=True)
class PairTimes:
    """Seconds on the device.

    Attributes:
        target_s: By rows and draft tokens a row, of a target's step.
        draft_s: By rows, of a token in a chain.
    """

    target_s: Mapping[int, Mapping[int, float]]
    draft_s: Mapping[int, float]

    def over_plain(self, num_rows: int, length: int, tokens_a_round: float) -> float:
        """What drafts of a length gain at most where both models take turns."""
        target_s, draft_s = self.target_s[num_rows], self.draft_s[num_rows]
        return tokens_a_round * target_s[0] / (target_s[length] + length * draft_s)

    def limit(self, num_rows: int, acceptance_rate: float) -> tuple[float, int]:
        """The most of that at an acceptance rate, and the length that has it."""
        lengths = self.target_s[num_rows]
        return max((self.over_plain(num_rows, k, expected_tokens(acceptance_rate, k)), k) for k in lengths)


@dataclass(frozen=True)
class ServedPair:
    """An engine over both models, and what it is made of."""

    engine: SpeculativeEngine
    target: ModelRunner
    drafter: ModelDrafter

    @classmethod
    def load(cls, folder: Path, device: torch.device, sizes: Sizes, report: Report, **further: Any) -> ServedPair:
        """Load what :meth:`Chain.write` has written, as ``SpeculativeEngine.from_pretrained`` does.

        Args:
            folder: Where it is.
            device: Of both models.
            sizes: How much is generated.
            report: Gets the stages, and whether steps are recorded.
            further: Fields of :class:`BackendOptions`, of both models.
        """
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        target, draft = (ModelSource(str(folder / role), dtype=dtype, device=device.type) for role in _ROLES)
        shares = pair_gpu_shares(target, draft)
        options = [
            BackendOptions(
                executor="graphs",
                max_num_seqs=max(sizes.streams),
                max_model_len=sizes.context + sizes.num_tokens + ROOM,
                max_draft_tokens=MOST_DRAFT_TOKENS,
                kv_cache_memory=sizes.kv_cache_memory or "auto",
                device_share=share,
                **further,
            )
            for share in shares
        ]
        with made_weights():
            decides, built = build_target(target, options[0], report.say)
            drafts, of_draft = build_drafter(draft, options[1], target, report.say, has_branches=False)
        for role, runner in (("target", built.runner), ("draft", of_draft.runner)):
            check_recorded(report, role, runner)
        engine = SpeculativeEngine(
            decides,
            drafts,
            load_tokenizer(target),
            eos_token_ids=(END,),
            vocab_size=built.runner.vocab_size,
            num_speculative_tokens=MOST_DRAFT_TOKENS,
        )
        return cls(engine, built.runner, drafts)

    def times(self, report: Report, streams: Sequence[int], context: int, repeats: int) -> PairTimes:
        """Time the target's steps and the draft's chains at numbers of rows."""
        sequences = [self.target.new_sequence() for _ in range(max(streams))]
        read_contexts(self.target, sequences, context)
        target_s, draft_s = {}, {}
        for rows in streams:
            lengths = range(MOST_DRAFT_TOKENS + 1)
            target_s[rows] = {k: step_s(self.target, sequences[:rows], 1 + k, repeats) for k in lengths}
            draft_s[rows] = chain_token_s(self.drafter, rows, context, repeats)
            shown = ", ".join(f"{1e3 * target_s[rows][k]:.2f}" for k in lengths)
            report.figure(f"pair_{rows}_target_step_ms", 1e3 * target_s[rows][0])
            report.figure(f"pair_{rows}_draft_token_ms", 1e3 * draft_s[rows])
            report.say(f"{rows} rows: target steps of K = 0 to {MOST_DRAFT_TOKENS} take {shown} ms")
        for sequence in sequences:
            self.target.free(sequence)
        return PairTimes(target_s, draft_s)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, length: int) -> list[GenerationResult]:
        """Greedily, with so many draft tokens a round."""
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        return self.engine.generate_batch(prompts, greedy, seed=1, max_tokens=num_tokens, num_speculative_tokens=length)


_ROLES = ("target", "draft")


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Time both models' steps, then generate with each draft length; the texts are those without drafts."""
    with tempfile.TemporaryDirectory() as name:
        sizes.chain.write(Path(name))
        pair = ServedPair.load(Path(name), device, sizes, report)
    times = pair.times(report, sizes.streams, sizes.context + sizes.num_tokens // 2, sizes.repeats)
    for num_rows in sizes.streams:
        compare(report, pair, times, sizes, num_rows)
    count_waits(report, pair, sizes)


def compare(report: Report, pair: ServedPair, times: PairTimes, sizes: Sizes, num_rows: int) -> None:
    """Tokens per second of one number of streams, by draft length, over plain and over what this length allows."""
    rate, found = sizes.chain.acceptance_rate, dict[int, float]()
    limit, at = times.limit(num_rows, rate)
    report.figure(f"pair_{num_rows}_limit_over_plain", limit)
    report.say(f"{num_rows} streams: steps in turn allow {limit:.2f} times plain, with {at} draft tokens")
    # A stream alone has few rounds: it says several texts, one after another.
    prompts = [make_prompts(sizes, num_rows, number) for number in range(max(1, _LEAST_TEXTS // num_rows))]
    texts: list[list[int]] = []
    for length in LENGTHS:
        if not report.has_time(_NEEDED_S, f"{num_rows} streams, K = {length}"):
            break
        pair.generate(prompts[0], min(MOST_DRAFT_TOKENS, sizes.num_tokens), length)
        start_s = time.monotonic()
        results = [one for some in prompts for one in pair.generate(some, sizes.num_tokens, length)]
        found[length] = len(results) * sizes.num_tokens / (time.monotonic() - start_s)
        got = [list(result.token_ids) for result in results]
        texts = texts or got
        report.figures[f"pair_{num_rows}_k{length}_tokens_per_s"] = found[length]
        if not length:
            report.say(f"{num_rows} streams, plain: {found[0]:.1f} tokens/s")
            continue
        num_rounds = max(1, sum(result.stats.num_drafts for result in results))
        accepted = sum(result.stats.num_accepted_tokens for result in results) / num_rounds
        over, allowed = found[length] / found[0], times.over_plain(num_rows, length, 1 + accepted)
        report.say(
            f"{num_rows} streams, K = {length}: {found[length]:.1f} tokens/s, {over:.3f} of plain; "
            f"{accepted:.2f} accepted a round ({expected_tokens(rate, length) - 1:.2f} are expected) "
            f"allow {allowed:.3f}: {over / allowed:.3f} of that"
        )
        if got != texts:
            report.check(f"{num_rows} streams, K = {length}: the texts without drafts", False)
    if len(found) > 1:
        best = max(rate for length, rate in found.items() if length)
        report.figure(f"pair_{num_rows}_over_plain", best / found[0])
        report.figure(f"pair_{num_rows}_of_limit", best / found[0] / limit, least=0.85)


def check_recorded(report: Report, role: str, runner: ModelRunner) -> None:
    """A pair whose steps are not recorded and compiled on a GPU is not what a service should run there."""
    report.check(f"the {role} is recorded", runner.is_recorded, runner.graphs_failure)
    if runner.loaded.device.type == "cuda":
        report.check(f"the {role} has compiled layers", not runner.compile_failure, runner.compile_failure)
        report.figure(f"pair_{role}_graphs_mib", runner.graphs_bytes / 2**20)


def count_waits(report: Report, pair: ServedPair, sizes: Sizes) -> None:
    """Waits that torch warns of, and calls of the driver, for a round of the most streams with 4 draft tokens."""
    if pair.target.loaded.device.type != "cuda" or not report.has_time(_NEEDED_S, "waits of a round"):
        return
    prompts = make_prompts(sizes, max(sizes.streams))
    pair.generate(prompts, 40, 4)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results = pair.generate(prompts, 40, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    num_rounds = max(1, *(result.stats.num_drafts for result in results))
    waits = [str(one.message) for one in told if "synchroniz" in str(one.message)]
    report.figure("pair_warned_waits_per_round", len(waits) / num_rounds, most=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pair.generate(prompts, 40, 4)
    calls = {one.key: one.count / num_rounds for one in profile.key_averages() if one.key.startswith(_CALLS)}
    report.say("calls a round: " + ", ".join(f"{name} {count:.1f}" for name, count in sorted(calls.items())))


def make_prompts(sizes: Sizes, num_rows: int, number: int = 0) -> list[list[int]]:
    """Of tokens that depend on the row and the number alone."""
    return [[2 + (7 * row + 13 * i + 31 * number) % 200 for i in range(sizes.context)] for row in range(num_rows)]
