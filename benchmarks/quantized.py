"""What quantization saves and costs: ``python -m benchmarks.quantized --target FOLDER --draft FOLDER``.

Each row is a target by its quantization, with the draft as it is and with the draft quantized alike: bytes of weights,
perplexity on held-out files of Python's standard library, tokens a second of one stream at temperature 0 alone and with
drafts in turn, in one process, and the acceptance. Rows take turns in each round; cells show medians.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import statistics
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast, get_args

import torch

from benchmarks.modes.prompts import CODE
from cluster.config.models import Dtype
from specdec import BackendOptions, ModelSource, SamplingParams, SpeculativeEngine
from specdec.core.types import Quantization
from specdec.engine.build import build_target
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import load_tokenizer

OPTIONS = BackendOptions(max_model_len=512, max_num_seqs=2, skip_parity_check=True)
WINDOW_TOKENS = 512
NO_CODE = {"site-packages", "test", "tests", "idlelib", "encodings"}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Row:
    """A pair, and what was measured of it, by round."""

    target: Quantization
    draft: Quantization
    engine: SpeculativeEngine
    alone: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    acceptance: float = 0.0

    def measure(self, num_prompts: int, num_tokens: int, num_draft_tokens: int) -> None:
        """One round: the same texts alone and with drafts."""
        for most, rates in ((0, self.alone), (num_draft_tokens, self.drafted)):
            self.engine.reset_stats()
            started_s = time.perf_counter()
            for prompt in CODE[:num_prompts]:
                self.engine.generate(prompt, GREEDY, max_tokens=num_tokens, num_speculative_tokens=most)
            rates.append(self.engine.stats.num_tokens / (time.perf_counter() - started_s))
        self.acceptance = self.engine.stats.acceptance_rate


def perplexity(runner: ModelRunner, texts: Sequence[Sequence[int]]) -> float:
    """Of texts, each read by itself."""
    losses = []
    for text in texts:
        sequence = runner.new_sequence(salt=None)
        runner.reserve(sequence, len(text) - 1)
        logits = runner.forward([RowInput(sequence, text[:-1], len(text) - 1)])
        runner.free(sequence)
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="none"))
    return math.exp(torch.cat(losses).mean().item())


def is_held_out(path: str) -> bool:
    """Whether the demo models' training left out this file of the standard library, by its path there."""
    return int.from_bytes(hashlib.sha256(f"python/{path}".encode()).digest()[:8], "big") % 10 == 0


def held_out(target: ModelSource, num_tokens: int) -> list[list[int]]:
    """Heads of files of the standard library that the demo models were not trained on, a window each."""
    tokenizer = load_tokenizer(target)
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path for path in sorted(root.rglob("*.py")) if not NO_CODE & set(path.parts))
    files = (path for path in paths if is_held_out(path.relative_to(root).as_posix()))
    windows = (tokenizer.encode(path.read_text("utf-8", "replace"))[:WINDOW_TOKENS] for path in files)
    whole = (window for window in windows if len(window) == WINDOW_TOKENS)
    return list(itertools.islice(whole, math.ceil(num_tokens / WINDOW_TOKENS)))


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--draft", required=True, help="folder of the draft")
    parser.add_argument("--dtype", default="bfloat16", choices=get_args(Dtype))
    parser.add_argument("--quantizations", default="int8,int4", help="separated by commas")
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--held-out-tokens", type=int, default=16384)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target, draft = (ModelSource(path, dtype=cast(Dtype, options.dtype)) for path in (options.target, options.draft))
    texts = held_out(target, options.held_out_tokens)
    figures: dict[Quantization, tuple[float, float, float]] = {}
    rows: list[Row] = []
    for kind in cast("list[Quantization]", ["none", *options.quantizations.split(",")]):
        built, drafter = (build_target(replace(one, quantization=kind), OPTIONS)[1] for one in (target, draft))
        spent = built.loaded.weights_bytes / (1 << 20), drafter.loaded.weights_bytes / (1 << 20)
        figures[kind] = (*spent, perplexity(built.runner, texts))
        for twin in dict.fromkeys(("none", kind)):
            pair = replace(target, quantization=kind), replace(draft, quantization=twin)
            rows.append(Row(kind, twin, SpeculativeEngine.from_pretrained(*pair, options=OPTIONS)))
    for number in range(options.rounds + 1):
        for row in rows:
            row.measure(options.prompts, options.tokens, options.num_draft_tokens)
            if not number:  # the first warms up
                row.alone.clear()
                row.drafted.clear()
    print("| target | draft | MiB of both | perplexity | alone | with drafts | times | accepted |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        times = statistics.median(two / one for one, two in zip(row.alone, row.drafted, strict=True))
        alone, drafted = statistics.median(row.alone), statistics.median(row.drafted)
        (size, _, loss), (_, draft_size, _) = figures[row.target], figures[row.draft]
        cells = f"{size:.1f} + {draft_size:.1f} | {loss:.3f} | {alone:.1f} | {drafted:.1f} | {times:.2f}"
        print(f"| {row.target} | {row.draft} | {cells} | {row.acceptance:.3f} |")


if __name__ == "__main__":
    main()
