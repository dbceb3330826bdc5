"""A draft that gives all its tokens in one pass, beside one that gives a token a step.

    python -m benchmarks.parallel_drafting --target FOLDER --draft FOLDER --parallel-drafting FOLDER

First the time that a drafter takes for a round of 7 tokens: a chain alone, and with branches for 16 outcomes, in one
batch; by this machine's clock and on a device whose steps all take the same. Then what each draft gains in one process,
in turn, one stream: the same texts with drafts and without, by turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import cast, get_args

import torch

from benchmarks.edits import measure
from benchmarks.emulation import EmulatedDevice, EmulatedDrafter, StepCost
from benchmarks.modes.prompts import CODE
from cluster.config.models import Dtype
from cluster.models.demos import demo_folder
from specdec.checkpoint.compat import tokenizer_width
from specdec.core.backends import DraftBackend, DraftJob, Status
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import Tokens
from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.engine import InProcessService
from specdec.models.loading import ModelSource, load_tokenizer
from tests.specdec.engine.pairs import Case

NUM_DRAFT_TOKENS = 7


def round_s(drafter: DraftBackend, prompt: Tokens, num_branches: int, number: int) -> float:
    """Seconds that a drafter takes for a round: the chain and branches after other outcomes, each of 7 tokens."""
    spec = SequenceSpec(SamplingParams(temperature=0.0), 1, len(prompt), 1 << 20)
    chain = f"{number}"
    first = DraftJob(chain, [*prompt], spec, 0, len(prompt))
    while drafter.propose([first])[0].status is not Status.DECIDED:
        pass
    texts = {chain: [*prompt]} | {f"{number}#{i}": [*prompt, 100 + i] for i in range(num_branches)}
    begun = {key: len(text) for key, text in texts.items()}
    read = dict.fromkeys(texts, len(prompt) - 1)
    started_s = time.perf_counter()
    while any(len(text) - begun[key] < NUM_DRAFT_TOKENS for key, text in texts.items()):
        jobs = [
            DraftJob(
                *(key, text, spec, read[key], len(prompt)),
                fork_of=None if key == chain else chain,
                num_tokens=NUM_DRAFT_TOKENS - (len(text) - begun[key]),
            )
            for key, text in texts.items()
        ]
        for job, proposal in zip(jobs, drafter.propose(jobs), strict=True):
            assert proposal.status is Status.DECIDED
            read[job.key] = len(job.tokens)
            job.tokens.extend(one.token for one in (proposal, *proposal.further) if one.token is not None)
    took_s = time.perf_counter() - started_s
    for key in texts:
        drafter.release(key)
    return took_s


def round_times(drafter: DraftBackend, prompts: Sequence[Tokens], rounds: int) -> Iterator[str]:
    """Median milliseconds of a round, without branches and with 16."""
    for num_branches in (0, 16):
        times = [round_s(drafter, prompts[i % len(prompts)], num_branches, i) for i in range(rounds + 1)]
        yield f"{1e3 * statistics.median(times[1:]):.1f}"


def main() -> None:
    """Measure, and print a table of rounds and one of texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=str(demo_folder("target")))
    parser.add_argument("--draft", default=str(demo_folder("draft")), help="gives a token a step")
    parser.add_argument("--parallel-drafting", required=True, help="folder of the draft that gives all in one pass")
    parser.add_argument("--dtype", default="float32", choices=get_args(Dtype))
    parser.add_argument("--emulated-step-ms", type=float, default=30.0, help="of a draft step on the emulated device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source = ModelSource(arguments.target, dtype=cast(Dtype, arguments.dtype))
    tokenizer = load_tokenizer(source)
    prompts = [tuple(tokenizer.encode(prompt)) for prompt in CODE[:4]]
    common = {"vocab_size": tokenizer_width(tokenizer), "max_num_seqs": 32, "kv_cache_memory": 256 << 20}
    target, _ = build_target(source, BackendOptions(**common))
    drafters = {}
    for name, path, step in (("a token a step", arguments.draft, 1), ("one pass", arguments.parallel_drafting, 1 + 7)):
        options = BackendOptions(**common, num_step_tokens=step)
        drafters[name], *_ = build_drafter(ModelSource(path, dtype=source.dtype), options, source)
    print("| draft | ms a round of 7 tokens | with 16 branches | emulated | with 16 branches |\n|---|---|---|---|---|")
    for name, drafter in drafters.items():
        emulated = EmulatedDrafter(drafter, EmulatedDevice(StepCost(arguments.emulated_step_ms)))
        times = [ms for one in (drafter, emulated) for ms in round_times(one, prompts, 8 * arguments.rounds)]
        print(f"| {name} | {' | '.join(times)} |", flush=True)
    print("\n| draft | T | over plain (least, median, most) | tokens a round | accepted |\n|---|---|---|---|---|")
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature)
        cases = [Case(prompt, arguments.max_tokens, sampling, i, None, ()) for i, prompt in enumerate(prompts)]
        for name, drafter in drafters.items():
            ratios, stats, same = measure(InProcessService(target, drafter, NUM_DRAFT_TOKENS), cases, arguments.rounds)
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            a_round, accepted = stats.num_tokens / stats.num_rounds, stats.num_accepted_tokens / stats.num_draft_tokens
            note = "" if same else " (tokens differ: near-ties)"
            print(
                f"| {name}{note} | {temperature:g} | {low:.2f}, {middle:.2f}, {high:.2f} "
                f"| {a_round:.2f} | {accepted:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
