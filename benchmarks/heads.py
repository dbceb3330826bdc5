"""What heads on a target gain without a draft model: ``python -m benchmarks.heads --target FOLDER [--trees 0,auto]``.

Each row generates the same tokens with heads and plainly, by turns, one stream, and names the ratio of their times; of
a tree, how many tokens it has, 0 for a chain of a token from each head, auto for as many of the largest's as step times
and what was kept before say. Beside them what a verification of so many tokens takes over a single token's, so that the
ratio can be told from the tokens a round.
"""

from __future__ import annotations

import argparse
import statistics
from typing import cast, get_args

import torch

from benchmarks.edits import measure
from benchmarks.modes.prompts import CODE
from benchmarks.turns import spread
from cluster.config.models import Dtype
from cluster.models.demos import demo_folder
from specdec.checkpoint.compat import tokenizer_width
from specdec.core.params import SamplingParams
from specdec.drafting.heads import HeadsOptions
from specdec.drafting.length import DraftLengths
from specdec.engine.build import BackendOptions, build_target
from specdec.engine.engine import InProcessService
from specdec.engine.observed import ObservedTarget
from specdec.engine.timing import StepMetrics, profile_target
from specdec.models.loading import ModelSource, load_tokenizer
from tests.specdec.engine.pairs import Case


def main() -> None:
    """Measure, and print a row of Markdown for each size of a tree and temperature."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=str(demo_folder("target")), help="folder of the target")
    parser.add_argument("--heads", default=str(demo_folder("heads")), help="folder of its heads")
    parser.add_argument("--dtype", default="float32", choices=get_args(Dtype))
    parser.add_argument("--trees", default="0,8,16,32,auto", help="tokens of a tree")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source = ModelSource(arguments.target, dtype=cast(Dtype, arguments.dtype))
    tokenizer = load_tokenizer(source)
    prompts = [tuple(tokenizer.encode(prompt)) for prompt in CODE[: arguments.num_prompts]]
    print(
        "| tree | T | over plain (least, median, most) | tokens a round | draft tokens a round | a round over plain's |"
    )
    print("|---|---|---|---|---|---|")
    trees = arguments.trees.split(",")
    for size in trees:
        most = max((int(tree) for tree in trees if tree != "auto"), default=32) if size == "auto" else int(size)
        heads = HeadsOptions(arguments.heads, 64, most)
        options = BackendOptions(vocab_size=tokenizer_width(tokenizer), max_num_seqs=4, heads=heads)
        target, report = build_target(source, options)[0], StepMetrics()
        profile_target(target, report.profiled)
        chooser = DraftLengths(report.metrics) if size == "auto" else None
        service = InProcessService(ObservedTarget(target, [report]), None, 0, chooser=chooser)
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(temperature=temperature)
            cases = [Case(prompt, arguments.max_tokens, sampling, i, None, ()) for i, prompt in enumerate(prompts)]
            ratios, stats, same = measure(service, cases, arguments.rounds)
            a_round, drafted = stats.num_tokens / stats.num_rounds, stats.num_draft_tokens / stats.num_drafts
            note = "" if same else " (tokens differ: near-ties)"
            print(
                f"| {size}{note} | {temperature:g} | {spread(ratios)} "
                f"| {a_round:.2f} | {drafted:.1f} | {a_round / statistics.median(ratios):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
