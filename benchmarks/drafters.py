"""What each kind of drafter gains on the same prompts, by turns, one stream, beside the target alone.

    python -m benchmarks.drafters --work WORK [--num-draft-tokens 4] [--max-tokens 48] [--temperatures 0,1]

The target is the chat demo's, with the demo's draft, and with what ``python -m examples.train_draft --work WORK
chat_drafter KIND`` has made for it, as far as that is there. Every round verifies drafts of one length.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast, get_args

import torch

from benchmarks.chat import QUESTIONS
from benchmarks.turns import by_turns, spread
from cluster.config.models import Dtype
from cluster.models.demos import demo_folder
from specdec.checkpoint.compat import tokenizer_width
from specdec.core.params import SamplingParams
from specdec.drafting.heads import HeadsOptions
from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.engine import InProcessService
from specdec.engine.results import SpecStats
from specdec.models.loading import ModelSource, load_tokenizer
from tests.specdec.engine.pairs import Case, run


def services(
    source: ModelSource, draft: ModelSource, work: Path, count: int, options: BackendOptions
) -> dict[str, InProcessService]:
    """A service for each drafter that is there, by its name, and one for none."""
    target, _ = build_target(source, options)
    made = {"none": InProcessService(target, None, 0)}
    folders = {"draft model": Path(draft.path), "PARD": work / "pair" / "chat-pard"}
    for name, num_step_tokens in (("draft model", 1), ("PARD", 1 + count)):
        if folders[name].is_dir():
            drafting = replace(options, num_step_tokens=num_step_tokens)
            drafter, *_ = build_drafter(replace(draft, path=str(folders[name])), drafting, source)
            made[name] = InProcessService(target, drafter, count)
    for method in ("medusa", "eagle3"):
        folder = work / "pair" / f"chat-{method}"
        if folder.is_dir():
            heads = HeadsOptions(str(folder), count, method=method)
            made[method] = InProcessService(build_target(source, replace(options, heads=heads))[0], None, 0)
    return made


def said(service: InProcessService, cases: list[Case]) -> tuple[list[list[int]], SpecStats]:
    """Tokens of all answers, one after another, and what was drafted."""
    results = [run(service, [case]) for case in cases]
    return [tokens for answers, _ in results for tokens in answers], sum((stats for _, stats in results), SpecStats())


def main() -> None:
    """Measure, and print a row of Markdown for each temperature and drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the drafters that were trained")
    parser.add_argument("--target", default=str(demo_folder("chat-target")))
    parser.add_argument("--draft", default=str(demo_folder("chat-draft")))
    parser.add_argument("--dtype", default="float32", choices=get_args(Dtype))
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--num-prompts", type=int, default=len(QUESTIONS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source, draft = (
        ModelSource(path, dtype=cast(Dtype, arguments.dtype)) for path in (arguments.target, arguments.draft)
    )
    tokenizer = load_tokenizer(source)
    chats = ([{"role": "user", "content": question}] for question in QUESTIONS[: arguments.num_prompts])
    prompts = [tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids) for chat in chats]
    options = BackendOptions(
        max_model_len=1024, vocab_size=tokenizer_width(tokenizer), kv_cache_memory=128 << 20, max_num_seqs=4
    )
    made = services(source, draft, arguments.work, arguments.num_draft_tokens, options)
    print("| T | drafter | tokens/s | over none (least, median, most) | tokens a round | accepted | answers |")
    print("|---|---|---|---|---|---|---|")
    for temperature in map(float, arguments.temperatures.split(",")):
        sampling = SamplingParams(temperature=temperature)
        cases = [Case(prompt, arguments.max_tokens, sampling, i) for i, prompt in enumerate(prompts)]
        turns = by_turns([partial(said, service, cases) for service in made.values()], arguments.rounds)
        for (name, _), column in zip(made.items(), zip(*turns, strict=True), strict=True):
            tokens, stats = column[-1][1]
            rate = statistics.median(stats.num_tokens / seconds for seconds, _ in column)
            ratios = [turn[0][0] / seconds for turn, (seconds, _) in zip(turns, column, strict=True)]
            kept = stats.num_accepted_tokens / stats.num_draft_tokens if stats.num_draft_tokens else 0.0
            same = "the same" if all(turn[0][1][0] == tokens for turn in turns) else "differ: near-ties"
            cells = (f"{temperature:g}", name, f"{rate:.1f}", spread(ratios))
            print(
                f"| {' | '.join(cells)} | {stats.num_tokens / stats.num_rounds:.2f} | {kept:.2f} | {same} |", flush=True
            )


if __name__ == "__main__":
    main()
