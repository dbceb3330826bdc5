"""What grammars cost a step, in microseconds a row: ``python -m benchmarks.masks [--rows 1,16,64] [--drafts 0,4]``.

A row is a sequence here, with its drafts. Each has a text of its own, which goes on from step to step by its drafts and
a token more, as where all drafts are accepted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cluster.models.demos import demo_folder
from specdec.core.grammar import Grammar
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.models.loading import ModelSource, load_tokenizer
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.structured.compiler import Grammars

_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 24},
        "size": {"type": "integer", "minimum": 0, "maximum": 4000},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
_GRAMMAR = Grammar("json_schema", json.dumps({"type": "array", "items": _ITEM, "minItems": 100}))
_MOST_TOKENS_BEFORE = 40


@dataclass(frozen=True, slots=True)
class MaskTime:
    """Medians over the steps of what a grammar adds to a step of one model.

    Attributes:
        num_rows: Sequences in the step, each with a grammar.
        num_drafts: Draft tokens of each.
        cut_s: To look for drafts that the grammar forbids.
        find_s: To follow the logs and find all masks.
        apply_s: What the choice of tokens takes with masks, less what it takes without.
    """

    num_rows: int
    num_drafts: int
    cut_s: float
    find_s: float
    apply_s: float


def measure_masks(
    grammars: Grammars,
    *,
    batches: Sequence[int],
    draft_lengths: Sequence[int],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[MaskTime]:
    """Time the masks of steps by their rows and drafts.

    Args:
        grammars: Of the tokenizer.
        batches: Numbers of sequences.
        draft_lengths: Draft tokens of each.
        repeats: Steps; one more before them is not counted.
        clock: Seconds.
    """
    rng = random.Random(0)
    length = _MOST_TOKENS_BEFORE + (1 + repeats) * (1 + max(draft_lengths))
    texts = [_random_text(grammars, length, rng) for _ in range(max(batches))]
    return [
        _measured(grammars, texts[:num_rows], num_drafts, repeats, clock)
        for num_rows in batches
        for num_drafts in draft_lengths
    ]


def _measured(
    grammars: Grammars, texts: list[list[int]], num_drafts: int, repeats: int, clock: Callable[[], float]
) -> MaskTime:
    sampler, rng = Sampler(grammars.vocab_size, grammars=grammars), random.Random(1)
    params = SamplingParams(temperature=0.0, grammar=_GRAMMAR)
    specs = [SequenceSpec(params, seed, 0, 1 << 16, grammars.eos_token_ids) for seed in range(len(texts))]
    free = SequenceSpec(replace(params, grammar=None), 0, 0, 1 << 16)
    places = [rng.randrange(_MOST_TOKENS_BEFORE) for _ in texts]
    logits = torch.randn(len(texts) * (1 + num_drafts), grammars.vocab_size)
    spent: list[tuple[float, float, float]] = []
    for _ in range(1 + repeats):
        logs = [text[:place] for text, place in zip(texts, places, strict=True)]
        drafts = [tuple(text[place : place + num_drafts]) for text, place in zip(texts, places, strict=True)]
        begun_s = clock()
        cut = [sampler.allowed(*job) for job in zip(specs, logs, drafts, strict=True)]
        cut_s = clock()
        groups = sampler.masked([RowGroup(*job) for job in zip(specs, logs, cut, strict=True)])
        found_s = clock()
        sampler.sample(logits, groups)
        masked_s = clock()
        assert cut == drafts
        assert not sampler.take_failures()
        plain = [RowGroup(free, group.tokens, group.draft) for group in groups]
        plain_s = clock()
        sampler.sample(logits, plain)
        unmasked_s = clock() - plain_s
        spent.append((cut_s - begun_s, found_s - cut_s, masked_s - found_s - unmasked_s))
        places = [place + 1 + num_drafts for place in places]
    return MaskTime(len(texts), num_drafts, *(statistics.median(times) for times in zip(*spent[1:], strict=True)))


def _random_text(grammars: Grammars, length: int, rng: random.Random) -> list[int]:
    """So many tokens, each drawn evenly from those that the grammar allows."""
    matcher = grammars.compiled(_GRAMMAR, grammars.eos_token_ids).result().deep_copy()
    text: list[int] = []
    while len(text) < length:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        text.append(rng.choice(bits[: grammars.vocab_size].nonzero()[0].tolist()))
        matcher.consume_token(text[-1])
    assert not set(text) & set(grammars.eos_token_ids)
    return text


def mask_table(times: Sequence[MaskTime]) -> list[str]:
    """Lines of a Markdown table; all times in microseconds a row."""
    lines = ["| rows | drafts a row | cut | find | apply | all |", "|---|---|---|---|---|---|"]
    for one in times:
        parts = one.cut_s, one.find_s, one.apply_s
        figures = " | ".join(f"{1e6 * seconds / one.num_rows:.0f}" for seconds in (*parts, sum(parts)))
        lines.append(f"| {one.num_rows} | {one.num_drafts} | {figures} |")
    return lines


def main(argv: list[str] | None = None) -> None:
    """Print the table for a model's tokenizer, by default the demo pair's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks", description=__doc__)
    parser.add_argument("--model", default=str(demo_folder("target")), help="where the tokenizer is")
    parser.add_argument("--rows", default="1,16,64", help="numbers of sequences, separated by commas")
    parser.add_argument("--drafts", default="0,4", help="draft tokens of each, separated by commas")
    parser.add_argument("--repeats", type=int, default=50, help="steps")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(ModelSource(arguments.model))
    grammars = Grammars(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    batches, draft_lengths = ([int(n) for n in text.split(",")] for text in (arguments.rows, arguments.drafts))
    times = measure_masks(grammars, batches=batches, draft_lengths=draft_lengths, repeats=arguments.repeats)
    print(f"{grammars.vocab_size} tokens")
    print("\n".join(mask_table(times)))


if __name__ == "__main__":
    main()
