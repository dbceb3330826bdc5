"""Whether recorded steps, recorded chains and kernels' decisions are right on the device that they run on.

Steps and chains are compared with the same ones run operator by operator on the same device, decisions with those of
torch on the CPU. Padding and compiled layers round otherwise, so that logits are close, and tokens may differ where two
are as good; decisions of the same logits are the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from specdec.core.backends import DraftJob, Proposal, Status
from specdec.core.errors import RecordedStepsError
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.drafter import ModelDrafter
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.parity_check import TOLERANCES
from specdec.sampling.acceptance import decide
from specdec.sampling.pipeline import RowGroup, Sampler

_MAX_COMPARED_ROWS = 16
"""Rows of logits of a step that are compared."""
_MAX_CONTEXT = 5
"""Tokens before a step or a chain that is compared."""
_TIE = 8.0
"""Times the tolerance of logits: two tokens whose scores are closer are a tie, which rounding may decide."""
_NUM_GUESSES = 12
_MAX_STEPS = 4
"""In which a drafter may read a short text and draft."""
_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.2),
)


def check_recorded_steps(runner: ModelRunner, seed: int = 0) -> float:
    """Compare recorded steps of the smallest, a middle and the largest size with the same ones run by operators.

    Args:
        runner: Whose steps are recorded. It holds what it held before when the check is done.
        seed: Of the tokens.

    Returns:
        The standard deviation of a row's logits, about.

    Raises:
        RecordedStepsError: logits differ by more than rounding.
    """
    assert runner.limits is not None, "record_graphs comes first"
    rng, spread = random.Random(seed), 0.0
    sizes = runner.limits.graph_sizes
    for number in sorted({0, len(sizes) // 2, len(sizes) - 1}):
        below = sizes[number - 1] if number else 0
        counts = _counts(runner, below, sizes[number])
        if counts is None:
            continue
        rows = [_tokens(runner, rng, rng.randint(1, _MAX_CONTEXT) + count) for count in counts]
        recorded = _logits(runner, rows, counts)
        with runner.unrecorded():
            eager = _logits(runner, rows, counts)
        variance = eager.var(dim=-1, correction=0).mean()
        error, spread = ((recorded - eager).square().mean() / variance).sqrt().item(), variance.sqrt().item()
        if not error <= _tolerance(runner):  # also where it is not a number
            raise RecordedStepsError(
                f"a recorded step of {runner.loaded.name} of {sum(counts)} tokens gives logits that differ by "
                f"{error:.2g} of their spread from those of its operators, where {_tolerance(runner):g} is allowed"
            )
    return spread


def _counts(runner: ModelRunner, below: int, size: int) -> list[int] | None:
    """Tokens of each row of a step that is recorded with a size; None if the cache has no room for such a step."""
    limits = runner.limits
    assert limits is not None, "record_graphs comes first"
    num_tokens = min((below + size + 1) // 2 + 1, size, limits.max_tokens)
    num_rows = min(limits.max_rows, num_tokens)
    if runner.states is not None:
        num_rows = min(num_rows, runner.states.num_free)
    longest = min(limits.max_length, runner.loaded.max_model_len) - _MAX_CONTEXT
    while num_rows:
        longest_count = -(-num_tokens // num_rows)
        num_blocks = num_rows * runner.pool.blocks_for(_MAX_CONTEXT + longest_count)
        has_room = all(group.num_free >= num_blocks for group in runner.pool.groups)
        if longest_count <= longest and has_room:
            return [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
        num_rows //= 2
    return None


def _logits(runner: ModelRunner, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> torch.Tensor:
    """Logits of some of the last tokens of rows, those before which are read in a step of its own."""
    sequences = [runner.new_sequence(salt=None) for _ in rows]
    try:
        for is_last in (False, True):
            inputs = []
            for sequence, row, count in zip(sequences, rows, counts, strict=True):
                tokens = list(row[len(row) - count :] if is_last else row[: len(row) - count])
                if not runner.reserve(sequence, len(sequence) + len(tokens)):
                    raise RecordedStepsError(f"too few cache blocks to check recorded steps of {runner.loaded.name}")
                inputs.append(RowInput(sequence, tokens, len(tokens) if is_last else 1))
            logits = _forward(runner, inputs)
        every = max(1, len(logits) // _MAX_COMPARED_ROWS)
        return logits[every - 1 :: every].clone()  # a recorded step gives memory that the next one writes again
    finally:
        for sequence in sequences:
            runner.free(sequence)


def _forward(runner: ModelRunner, rows: Sequence[RowInput]) -> torch.Tensor:
    """Run rows in as many steps as the recorded sizes need; return the logits of the last step."""
    assert runner.limits is not None, "record_graphs comes first"
    part: list[RowInput] = []
    for row in rows:
        if part and sum(len(other.tokens) for other in part) + len(row.tokens) > runner.limits.max_tokens:
            runner.forward(part)
            part = []
        part.append(row)
    return runner.forward(part)


def check_recorded_chains(
    drafter: ModelDrafter, runner: ModelRunner, max_rows: int, spread: float, seed: int = 0
) -> None:
    """Compare drafts of recorded chains with those of passes that are run by operators, of few rows and of many.

    Args:
        drafter: Nothing is done if it has no recorded chains. It holds what it held before when the check is done.
        runner: The drafter's.
        max_rows: Most rows of a step.
        spread: As :func:`check_recorded_steps` gives it.
        seed: Of the texts.

    Raises:
        RecordedStepsError: drafts differ where two tokens are not as good.
    """
    if drafter.chain_device is None:
        return
    rng = random.Random(seed)
    for num_rows in sorted({min(2, max_rows), max_rows}):
        texts = [_tokens(runner, rng, rng.randint(2, _MAX_CONTEXT)) for _ in range(num_rows)]
        more = [rng.randrange(drafter.vocab_size) for _ in texts]
        recorded = _drafts(drafter, texts, more, 0)
        with runner.unrecorded():
            eager = _drafts(drafter, texts, more, min(_NUM_GUESSES, drafter.vocab_size - 1))
        for ours, theirs in zip(recorded, eager, strict=True):
            if not _are_same(ours, theirs, _TIE * _tolerance(runner) * spread):
                tokens = [[one.token for one in drawn] for drawn in (ours, theirs)]
                raise RecordedStepsError(
                    f"a recorded chain of {runner.loaded.name} drafts {tokens[0]}, its operators {tokens[1]}"
                )


def _drafts(
    drafter: ModelDrafter, texts: Sequence[Sequence[int]], more: Sequence[int], num_guesses: int
) -> list[list[Proposal]]:
    """Drafts after texts that have been read but for a token each; none of a text that finds no room."""
    keys = [f"check-{i}" for i in range(len(texts))]
    most = drafter.num_chained_tokens
    specs = [SequenceSpec(_PARAMS[i % 2], i, 1, len(text) + 1 + most) for i, text in enumerate(texts)]
    drawn: dict[str, list[Proposal]] = {}
    try:
        for is_last in (False, True):
            drawn = {}
            for _ in range(_MAX_STEPS):
                jobs = []
                for i, (key, text, spec) in enumerate(zip(keys, texts, specs, strict=True)):
                    tokens = [*text, more[i]] if is_last else [*text]
                    count = 1 + (most - 1 + i) % most
                    if key not in drawn:
                        agreed = len(text) if is_last else 0
                        jobs.append(DraftJob(key, tokens, spec, agreed, len(tokens), None, num_guesses, count))
                proposals = drafter.propose(jobs) if jobs else []
                for job, proposal in zip(jobs, proposals, strict=True):
                    if proposal.status is Status.DECIDED:
                        drawn[job.key] = [proposal, *proposal.further]
                    elif proposal.status not in (Status.PREFILLING, Status.WAITING):
                        raise RecordedStepsError(f"a draft of the check ended as {proposal.status.name}")
    finally:
        for key in keys:
            drafter.release(key)
    return [drawn.get(key, []) for key in keys]


def _are_same(ours: Sequence[Proposal], theirs: Sequence[Proposal], tie: float) -> bool:
    """Whether drafts are the same up to the first token that is as good as another."""
    for one, other in zip(ours, theirs, strict=False):
        if one.token == other.token:
            continue
        if not other.likelihoods:
            return True  # a tie already among the operators' own
        if one.token not in other.guesses:
            return False
        likelihood = other.likelihoods[1 + other.guesses.index(one.token)]
        return likelihood > 0 and math.log(other.likelihoods[0] / likelihood) <= tie
    return True


def check_decisions(sampler: Sampler, device: torch.device, seed: int = 0) -> None:
    """Compare what kernels decide of logits with what torch decides of the same ones on the CPU.

    Args:
        sampler: Nothing is done if it has no kernels.
        device: Of the logits.
        seed: Of the logits.

    Raises:
        RecordedStepsError: a decision differs.
    """
    if sampler.kernels(device) is None:
        return
    generator, reference = torch.Generator().manual_seed(seed), Sampler(sampler.vocab_size, on_kernels=False)
    logits = 3 * torch.randn(3 * len(_PARAMS), sampler.vocab_size, generator=generator)
    likeliest = logits.argmax(1).tolist()
    groups = [
        RowGroup(SequenceSpec(params, seed + i, 2, 8), (1, 2, 3), (likeliest[3 * i], likeliest[3 * i + 1]))
        for i, params in enumerate(_PARAMS)
    ]
    expected = decide(reference, logits, groups).runs
    with torch.inference_mode():
        found = decide(sampler, logits.to(device), groups).runs
    for params, one, other in zip(_PARAMS, found, expected, strict=True):
        if one.run != other.run:
            raise RecordedStepsError(
                f"kernels decide {[*one.run]} with {params}, and torch decides {[*other.run]} of the same logits"
            )


def _tokens(runner: ModelRunner, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(min(runner.loaded.vocab_size, runner.vocab_size)) for _ in range(count)]


def _tolerance(runner: ModelRunner) -> float:
    return TOLERANCES.get(runner.loaded.dtype, TOLERANCES[torch.bfloat16])
