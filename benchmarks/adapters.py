"""What adapters cost: ``python -m benchmarks.adapters --target DIR/target --draft DIR/draft``.

Sixteen streams on four adapters, four each, against as many on a model without room for any, by turns in one process.
The adapters change so little that texts and drafts stay what they are: what is compared is work, not acceptance.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast, get_args

import torch

from benchmarks.modes.prompts import CODE
from benchmarks.turns import by_turns, spread
from cluster.config.models import Dtype
from specdec.checkpoint.compat import tokenizer_width
from specdec.core.params import SamplingParams
from specdec.core.types import Adapter
from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.engine import InProcessService
from specdec.models.describe import linear_shapes
from specdec.models.loading import ModelSource, load_tokenizer
from specdec.models.lora.slots import LoRAConfig
from tests.specdec.adapters import ATTENTION, write_adapter
from tests.specdec.engine.pairs import Case, run

NUM_STREAMS, NUM_ADAPTERS = 16, 4
STRENGTH = 1e-4


def make_service(source: ModelSource, draft: ModelSource | None, num_draft_tokens: int) -> InProcessService:
    """Both models in this process; without a draft model plain decoding."""
    options = BackendOptions(
        vocab_size=tokenizer_width(load_tokenizer(source)), max_model_len=512, max_num_seqs=NUM_STREAMS
    )
    target, _ = build_target(source, options)
    return InProcessService(
        target, None if draft is None else build_drafter(draft, options, source)[0], num_draft_tokens
    )


def main() -> None:
    """Measure, and print a row of Markdown for each kind of adapters, with and without drafts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--draft", required=True, help="folder of the draft")
    parser.add_argument("--dtype", default="bfloat16", choices=get_args(Dtype))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plain = ModelSource(arguments.target, dtype=cast(Dtype, arguments.dtype))
    draft = ModelSource(arguments.draft, dtype=cast(Dtype, arguments.dtype))
    room = LoRAConfig(NUM_ADAPTERS, arguments.rank)
    tokenizer, shapes = load_tokenizer(plain), linear_shapes(plain)
    prompts = [tuple(tokenizer.encode(CODE[i % len(CODE)]))[:64] for i in range(NUM_STREAMS)]
    attention = {name: shape for name, shape in shapes.items() if name.rpartition(".")[2] in ATTENTION}
    print("| layers | drafts | base, tokens/s | 4 adapters, tokens/s | over base (least, median, most) |")
    print("|---|---|---|---|---|")
    for count in (0, 4):
        base = make_service(plain, draft if count else None, count)
        roomy = ModelSource(arguments.target, dtype=cast(Dtype, arguments.dtype), adapters=room)
        adapted = make_service(roomy, draft if count else None, count)
        for what, layers in (("attention", attention), ("all", shapes)):
            with tempfile.TemporaryDirectory() as folder:
                adapters: list[Adapter | None] = [
                    write_adapter(Path(folder) / f"a{i}", layers, arguments.rank, i, STRENGTH)
                    for i in range(NUM_ADAPTERS)
                ]

                def cases(chosen: Sequence[Adapter | None]) -> list[Case]:
                    greedy = SamplingParams(temperature=0.0)
                    return [
                        Case(prompt, arguments.max_tokens, greedy, i, None, (), adapter=chosen[i % len(chosen)])
                        for i, prompt in enumerate(prompts)
                    ]

                works = [partial(run, base, cases([None])), partial(run, adapted, cases(adapters))]
                turns = by_turns(works, arguments.rounds)
            rates = [[sum(map(len, outputs)) / taken_s for taken_s, (outputs, _) in turn] for turn in turns]
            ratios = [theirs / ours for ours, theirs in rates]
            ours, theirs = (statistics.median(column) for column in zip(*rates, strict=True))
            print(f"| {what} | {count} | {ours:.0f} | {theirs:.0f} | {spread(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
