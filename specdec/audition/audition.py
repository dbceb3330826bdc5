"""Try drafts on recorded answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.audition.reading import Reading, read_drafts
from specdec.audition.recording import Sample
from specdec.audition.report import Audition, Certainty
from specdec.audition.rounds import earned_by_lookup, earned_by_reading
from specdec.engine.build import BackendOptions, build_drafter
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
    return Audition(draft.path, certainty, earned, [_right(reading) for reading in readings])


def _certainty(samples: Sequence[Sample], dtype: torch.dtype) -> Certainty:
    if any(sample.seed is None and not sample.sampling.is_greedy for sample in samples):
        return "law"
    return "run" if dtype is torch.float32 else "near"


def _right(reading: Reading) -> tuple[int, int]:
    """How many first tokens of drafts are right, and of how many places."""
    places = [place for place, room in enumerate(reading.room) if room]
    return sum(reading.num_right[place] > 0 for place in places), len(places)
