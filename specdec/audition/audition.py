"""Try drafts on recorded answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.audition.reading import Reading, read_drafts
from specdec.audition.recording import Sample
from specdec.audition.report import Audition, Certainty
from specdec.audition.rounds import Earned, earned_by_lookup, earned_by_reading
from specdec.core.params import SequenceSpec
from specdec.engine.build import BackendOptions, build_drafter
from specdec.engine.engine import SpeculativeEngine
from specdec.models.loading import ModelSource

MOST_DRAFT_TOKENS = 16
_SEED = 0x5BEC


def audition_lookup(samples: Sequence[Sample], lengths: Sequence[int]) -> Audition:
    """Try prompt lookup; only what its drafts earn by rounds is told."""
    earned = {length: [earned_by_lookup(sample, length) for sample in samples] for length in lengths}
    return Audition("ngram", "run", earned, [])


def audition_model(
    samples: Sequence[Sample], target: ModelSource, draft: ModelSource, options: BackendOptions, lengths: Sequence[int]
) -> Audition:
    """Try a draft model, by one reading of all answers.

    Args:
        samples: At least one.
        target: Whose tokenizer the samples have; its weights are not read.
        draft: The draft model.
        options: How it is run.
        lengths: Draft lengths, at least 1 each.

    Raises:
        ModelLoadError: It cannot be loaded.
        IncompatiblePairError: It cannot draft for the target.
        MemoryPlanError: Its cache cannot hold one sequence.
    """
    drafter, built = build_drafter(draft, options, target, has_branches=False)
    seeds = [_SEED + number for number in range(len(samples))]
    is_parallel = options.num_step_tokens > 1
    readings = read_drafts(drafter, samples, max(lengths), seeds=seeds, is_parallel=is_parallel)
    earned = {
        length: [earned_by_reading(reading, length, drafts_first=False) for reading in readings] for length in lengths
    }
    certainty = _certainty(samples, built.loaded.dtype)
    num_failed = sum(not reading.is_whole for reading in readings)
    remark = f"{num_failed} answers could not be read to their end, as with an adapter that the draft does not have"
    right = [_right(reading) for reading in readings]
    return Audition(draft.path, certainty, earned, right, remark if num_failed else "")


def audition_heads(
    samples: Sequence[Sample], target: ModelSource, options: BackendOptions, lengths: Sequence[int]
) -> Audition:
    """Try heads on a target, which says all answers again at each draft length: heads read what it computes.

    Args:
        samples: At least one.
        target: The target.
        options: How it is run, with the heads.
        lengths: Draft lengths, at least 1 each.

    Raises:
        ModelLoadError: The target or the heads cannot be loaded.
        MemoryPlanError: The cache cannot hold one sequence.
    """
    assert options.heads is not None
    engine = SpeculativeEngine.from_pretrained(target, num_speculative_tokens=max(lengths), options=options)
    specs = [_again(sample, _SEED + number) for number, sample in enumerate(samples)]
    earned: dict[int, list[Earned]] = {}
    num_others = 0
    for length in sorted({1, *lengths}):
        asked = [
            (sample.prompt_token_ids, replace(spec, num_speculative_tokens=length))
            for sample, spec in zip(samples, specs, strict=True)
        ]
        results = engine.generate_specs(asked)
        pairs = zip(results, samples, strict=True)
        num_others = max(num_others, sum(one.token_ids != sample.output_token_ids for one, sample in pairs))
        earned[length] = [
            Earned(one.num_tokens, one.num_rounds, one.num_draft_tokens, one.num_accepted_tokens)
            for one in (result.stats for result in results)
        ]
    right = [(one.num_accepted_tokens, one.num_draft_tokens) for one in earned[1]]
    chosen = {length: earned[length] for length in lengths}
    certainty: Certainty = "law" if _has_unknown_noise(samples) else "near" if num_others else "run"
    remark = f"{num_others} answers of the target are others than the recorded ones" if num_others else ""
    return Audition(options.heads.path, certainty, chosen, right, remark)


def _again(sample: Sample, seed: int) -> SequenceSpec:
    """What says a sample again; to its length, if something ended it that is not in it, such as a stop string."""
    spec, output = sample.spec(seed), sample.output_token_ids
    return spec if output[-1] in spec.ending_token_ids else replace(spec, max_tokens=len(output))


def _certainty(samples: Sequence[Sample], dtype: torch.dtype) -> Certainty:
    if _has_unknown_noise(samples):
        return "law"
    return "run" if dtype is torch.float32 else "near"


def _has_unknown_noise(samples: Sequence[Sample]) -> bool:
    return any(sample.seed is None and not sample.sampling.is_greedy for sample in samples)


def _right(reading: Reading) -> tuple[int, int]:
    """How many first tokens of drafts are right, and of how many places."""
    places = [place for place, room in enumerate(reading.room) if room]
    return sum(reading.num_right[place] > 0 for place in places), len(places)
