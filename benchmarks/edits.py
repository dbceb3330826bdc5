"""What prompt lookup gains in a rewrite: ``python -m benchmarks.edits --target FOLDER [--dtype bfloat16]``.

Each row generates the same tokens with and without prompt lookup, by turns, one stream, and names the ratio. A
prediction is the output itself with every sixteenth token left out, as a small edit leaves the rest of a file; a copy
is the head of a file again after it; text at temperature 1 has nothing to be found.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast, get_args

import torch

from benchmarks.modes.prompts import CODE, CODE_LONG
from benchmarks.turns import by_turns, spread
from cluster.config.models import Dtype
from specdec.checkpoint.compat import tokenizer_width
from specdec.core.params import SamplingParams
from specdec.drafting.ngram import NgramOptions
from specdec.engine.build import BackendOptions, build_target
from specdec.engine.engine import InProcessService
from specdec.engine.results import SpecStats
from specdec.models.loading import ModelSource, load_tokenizer
from tests.specdec.engine.pairs import Case, run

EDIT_EVERY = 16
MOST = 16


def edited(output: Sequence[int]) -> tuple[int, ...]:
    """An output with every sixteenth token left out."""
    return tuple(token for i, token in enumerate(output, 1) if i % EDIT_EVERY)


def measure(service: InProcessService, cases: Sequence[Case], rounds: int) -> tuple[list[float], SpecStats, bool]:
    """Time without prompt lookup over time with it, by round; what it did; whether all tokens were the same."""

    def outputs(bound: int | None) -> list[tuple[list[list[int]], SpecStats]]:
        return [run(service, [replace(case, num_speculative_tokens=bound)]) for case in cases]

    turns = by_turns([partial(outputs, 0), partial(outputs, None)], rounds)
    same = all([tokens for tokens, _ in plain] == [tokens for tokens, _ in ours] for (_, plain), (_, ours) in turns)
    stats = sum((stats for _, stats in turns[-1][1][1]), SpecStats())
    return [plain_s / our_s for (plain_s, _), (our_s, _) in turns], stats, same


def main() -> None:
    """Measure, and print a row of Markdown for each kind of work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--dtype", default="float32", choices=get_args(Dtype))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--only", default="", help="kinds of work whose name begins so")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source = ModelSource(arguments.target, dtype=cast(Dtype, arguments.dtype))
    tokenizer = load_tokenizer(source)
    options = BackendOptions(vocab_size=tokenizer_width(tokenizer), max_num_seqs=4)
    target, _ = build_target(source, options)
    service = InProcessService(target, None, 0, ngram=NgramOptions(MOST))

    def cases(prompts: Sequence[str], temperature: float) -> list[Case]:
        sampling = SamplingParams(temperature=temperature)
        encoded = (tuple(tokenizer.encode(prompt)) for prompt in prompts)
        return [Case(prompt, arguments.max_tokens, sampling, i, None, ()) for i, prompt in enumerate(encoded)]

    def predicted(some: Sequence[Case]) -> list[Case]:
        known = [run(service, [replace(case, num_speculative_tokens=0)])[0][0] for case in some]
        return [replace(case, prediction=edited(output)) for case, output in zip(some, known, strict=True)]

    copies = [f"{file}\n\n\n{file[:400]}" for file in CODE_LONG]
    works = {
        "prediction, T=0": predicted(cases(CODE[:4], 0.0)),
        "prediction, T=1": predicted(cases(CODE[:4], 1.0)),
        "copy of a file in the prompt, T=0": cases(copies, 0.0),
        "nothing to find, T=1": cases(CODE[4:], 1.0),
    }
    print("| work | over plain (least, median, most) | tokens a round | rows with drafts | accepted |")
    print("|---|---|---|---|---|")
    for name, some in works.items():
        if not name.startswith(arguments.only):
            continue
        ratios, stats, same = measure(service, some, arguments.rounds)
        share = f"{stats.num_drafts / stats.num_rounds:.1%} | {stats.acceptance_rate:.0%}"
        per_round = stats.num_tokens / stats.num_rounds
        note = "" if same else " (tokens differ: near-ties)"
        print(f"| {name}{note} | {spread(ratios)} | {per_round:.2f} | {share} |", flush=True)


if __name__ == "__main__":
    main()
