"""Logits' bits and tokens that differ from the run alone without drafts, by batch, drafts, chunks and cache.

    python -m benchmarks.flips --target MODEL --dtype bfloat16 [--tile-tokens 16]
    python -m benchmarks.flips --random 2048 --dtype bfloat16 [--tile-tokens 16]

Texts are random, and every run reads the same ones, so that each position can be compared. The run to compare with
reads a text alone: its prompt at once, then token by token. The others read several side by side: prompts in chunks,
or from the cache, then K drafts a step of which some are taken back; half way they lose their caches, as those of
a target that dies or preempts them, and read all again.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.core.tokens import TokenBuffer
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, ModelSource, load_model, prepare_model

BATCHES, DRAFTS, CHUNKS, CACHED = (1, 4, 16, 64), (0, 4, 8), (256, 48, 7), (False, True)


@dataclass(frozen=True, slots=True)
class Texts:
    """What is read.

    Attributes:
        num_prompt: Tokens of a prompt.
        num_output: Tokens after it.
        seed: Of the tokens.
    """

    num_prompt: int = 96
    num_output: int = 64
    seed: int = 0

    def text(self, number: int, vocab_size: int) -> list[int]:
        """One text, by its number."""
        rng = random.Random(f"{self.seed}/{number}")
        return [rng.randrange(vocab_size) for _ in range(self.num_prompt + self.num_output)]


@dataclass(frozen=True, slots=True)
class Case:
    """How texts are read.

    Attributes:
        batch: Texts side by side.
        num_drafts: K.
        chunk: Most tokens of a prompt in a step.
        is_cached: Whether the prompts' blocks are there before.
    """

    batch: int
    num_drafts: int
    chunk: int
    is_cached: bool


@dataclass(frozen=True, slots=True)
class Flips:
    """What differs in a case.

    Attributes:
        num_positions: Compared, each as often as it was read.
        num_bits: Of these how many have a logit with other bits.
        num_tokens: Of these how many have another likeliest token.
        duration_s: Of the case.
    """

    case: Case
    num_positions: int
    num_bits: int
    num_tokens: int
    duration_s: float


class FlipRuns:
    """Reads texts of a model in many ways.

    Args:
        runner: Of the model, with room for them: see :func:`num_blocks`.
        texts: What is read.
        most: Texts at once.
    """

    def __init__(self, runner: ModelRunner, texts: Texts, most: int) -> None:
        self._runner, self._texts = runner, texts
        self._all = [texts.text(number, runner.loaded.vocab_size) for number in range(most)]
        alone = Case(1, 0, texts.num_prompt, False)
        reads = (self._read([text], alone, goes_back=False)[0] for text in self._all)
        self._expected = [torch.cat([logits for _, logits in parts]) for parts in reads]

    def compare(self, case: Case) -> Flips:
        """One case: as many texts as it reads side by side."""
        start_s = time.perf_counter()
        found = self._read(self._all[: case.batch], case, goes_back=True)
        pairs = [
            (logits, expected[start : start + len(logits)])
            for parts, expected in zip(found, self._expected, strict=False)
            for start, logits in parts
        ]
        return Flips(
            case,
            num_positions=sum(len(logits) for logits, _ in pairs),
            num_bits=sum(int((a.view(torch.int32) != b.view(torch.int32)).any(1).sum()) for a, b in pairs),
            num_tokens=sum(int((a.argmax(1) != b.argmax(1)).sum()) for a, b in pairs),
            duration_s=time.perf_counter() - start_s,
        )

    def _read(self, texts: list[list[int]], case: Case, *, goes_back: bool) -> list[list[tuple[int, torch.Tensor]]]:
        """What is read of each text: the first position, and logits [tokens, vocabulary], of each step in order."""
        runner, end, rng = self._runner, self._texts.num_prompt, random.Random(0)
        logits: list[list[tuple[int, torch.Tensor]]] = [[] for _ in texts]
        salt = b"flips" if case.is_cached else None
        sequences = [runner.new_sequence(salt) for _ in texts]

        def step(new: list[list[int]]) -> None:
            """Read tokens of each sequence, if any."""
            rows = [(i, s, some) for i, (s, some) in enumerate(zip(sequences, new, strict=True)) if some]
            for _, sequence, some in rows:
                if not runner.reserve(sequence, len(sequence) + len(some)):
                    raise RuntimeError("too few cache blocks for the measurement")
            starts = [len(sequence) for _, sequence, _ in rows]
            values = runner.forward([RowInput(s, some, len(some)) for _, s, some in rows])
            parts = values.split([len(some) for _, _, some in rows])
            for (i, _, _), start, of_row in zip(rows, starts, parts, strict=True):
                logits[i].append((start, of_row.clone()))

        def read_to(length: int) -> None:
            while any(len(sequence) < length for sequence in sequences):
                ends = [min(length, len(sequence) + case.chunk) for sequence in sequences]
                step([text[len(s) : stop] for text, s, stop in zip(texts, sequences, ends, strict=True)])

        read_to(end)
        if case.is_cached:
            for i, text in enumerate(texts):
                runner.keep_prefix(sequences[i], end)
                runner.free(sequences[i])
                sequences[i] = runner.new_sequence(salt)
                runner.reuse_prefix(sequences[i], TokenBuffer(text[:end]))
            read_to(end)
        while len(sequences[0]) < len(texts[0]):
            at = len(sequences[0])
            count = min(1 + case.num_drafts, len(texts[0]) - at)
            step([text[at : at + count] for text in texts])
            kept = at + (rng.randint(1, count) if goes_back else count)
            for sequence in sequences:
                runner.truncate(sequence, kept)
            if goes_back and at < end + self._texts.num_output // 2 <= kept:
                for sequence in sequences:
                    runner.truncate(sequence, 0)
            read_to(kept)  # also where a recurrent state does not reach back
        for sequence in sequences:
            runner.free(sequence)
        return logits


def num_blocks(texts: Texts, most: int) -> int:
    """Blocks of 16 positions that so many texts at once need, and one alone."""
    return (most + 1) * (-(-(texts.num_prompt + texts.num_output) // 16) + 2)


def random_model(hidden_size: int, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    """A Llama of one layer and random weights whose products are as wide as a large model's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 8,
        num_hidden_layers=1,
        num_attention_heads=hidden_size // 128,
        num_key_value_heads=max(1, hidden_size // 512),
        max_position_embeddings=512,
        initializer_range=hidden_size**-0.5,
    )
    return prepare_model(LlamaForCausalLM(config).to(dtype), f"a random Llama of hidden size {hidden_size}")


def cases(batches: Iterable[int] = BATCHES) -> Iterator[Case]:
    """The matrix."""
    return (Case(*values) for values in product(batches, DRAFTS, CHUNKS, CACHED))


def main() -> None:
    """Measure, and print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--target", help="hub id or folder")
    which.add_argument("--random", type=int, metavar="SIZE", help="a random Llama of this hidden size, on the CPU")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tile-tokens", type=int, help="exactness: strict with so many tokens a pass; else fast")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=BATCHES)
    parser.add_argument("--num-prompt", type=int, default=96, help="tokens of each prompt")
    parser.add_argument("--num-output", type=int, default=64, help="tokens after it")
    args = parser.parse_args()
    if args.random is not None:
        loaded = random_model(args.random, getattr(torch, args.dtype))
    else:
        loaded = load_model(ModelSource(args.target, dtype=args.dtype, device=args.device))
    texts, most = Texts(args.num_prompt, args.num_output), max(args.batches)
    blocks = num_blocks(texts, most)
    runner = ModelRunner(loaded, num_blocks=blocks, num_state_slots=2 * most + 2, tile_tokens=args.tile_tokens)
    runs = FlipRuns(runner, texts, most)
    found = []
    for case in cases(args.batches):
        found.append(runs.compare(case))
        print(found[-1], flush=True)
    positions, bits, tokens = (
        sum(getattr(f, name) for f in found) for name in ("num_positions", "num_bits", "num_tokens")
    )
    print(f"{positions} positions: {bits} with other bits, {tokens} other tokens")


if __name__ == "__main__":
    main()
