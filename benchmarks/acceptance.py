"""How often draft tokens are kept, by temperature, beside the most that any rule could keep.

    python -m benchmarks.acceptance [--tokens 128] [--samples 8] [--temperatures 0.6,1]

Each round verifies one draft token, and the bounds are averaged over the positions where one was verified. No rule
keeps more than 1 - TV(target, draft) (Leviathan et al. 2023, corollary 3.6). A rule that draws from the draft cut to
its 32 most likely tokens, as it must be to travel, keeps at most 1 - TV(target, cut draft).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.modes.prompts import CODE
from cluster.config.app import ServiceConfig
from cluster.models.sources import draft_source, target_source
from specdec import ModelSource, SamplingParams
from specdec.core.messages import Notes, TokenKind, token_kind
from specdec.core.params import SequenceSpec
from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.engine import InProcessService
from specdec.models.loading import load_tokenizer
from specdec.sampling.noise import derive_seed

NUM_CUT = 32


@dataclass(frozen=True, slots=True)
class Row:
    """Figures at one temperature.

    Attributes:
        acceptance: Accepted over verified draft tokens.
        bound: Mean of 1 - TV(target, draft).
        cut_bound: Mean of 1 - TV(target, draft cut to its 32 most likely tokens).
        num_draft_tokens: How many were verified.
    """

    temperature: float
    acceptance: float
    bound: float
    cut_bound: float
    num_draft_tokens: int


@dataclass(slots=True)
class Text:
    """A generated text: all its tokens, prompt included, and how those of the output came."""

    tokens: list[int]
    output_start: int
    notes: Notes = field(default_factory=Notes)

    def drafted(self) -> list[tuple[int, bool]]:
        """(position, whether it was kept) of each verified draft token, of which a round has one at most."""
        found, first = [], 0
        for i, (byte, num_drafted) in enumerate(zip(self.notes.provenance, self.notes.num_drafted, strict=True)):
            if num_drafted:
                found.append(
                    (self.output_start + first, token_kind(self.notes.provenance[first]) is TokenKind.ACCEPTED)
                )
            if token_kind(byte) is not TokenKind.ACCEPTED or num_drafted:
                first = i + 1
        return found


class Pair:
    """Two models, in the engine and as transformers has them.

    Args:
        target: The model that decides.
        draft: The model that proposes.
    """

    def __init__(self, target: ModelSource, draft: ModelSource) -> None:
        tokenizer = load_tokenizer(target)
        options = BackendOptions(vocab_size=len(tokenizer))
        self._vocab_size = len(tokenizer)
        self._prompts = [list(tokenizer.encode(prompt)) for prompt in CODE]
        self._service = InProcessService(build_target(target, options)[0], build_drafter(draft, options, target)[0], 1)
        self._models: list[PreTrainedModel] = [
            AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32) for source in (target, draft)
        ]

    def measure(self, temperature: float, num_tokens: int, num_samples: int) -> Row:
        """Generate from every prompt ``num_samples`` times, and compare the models where drafts were verified."""
        sampling = SamplingParams(temperature=temperature)
        texts = self._generate(sampling, num_tokens, num_samples)
        kept = [was_kept for text in texts for _, was_kept in text.drafted()]
        bounds = torch.cat([self._bounds(text, temperature) for text in texts]).mean(0).tolist()
        return Row(temperature, sum(kept) / len(kept), bounds[0], bounds[1], len(kept))

    def _generate(self, sampling: SamplingParams, num_tokens: int, num_samples: int) -> list[Text]:
        texts: dict[str, Text] = {}
        for i, prompt in enumerate(self._prompts * num_samples):
            name = f"{sampling.temperature}-{i}"
            texts[name] = Text([*prompt], len(prompt))
            spec = SequenceSpec(sampling, derive_seed(1, i, 0), len(prompt), num_tokens, arrival_s=float(i))
            self._service.start(name, prompt, spec)
        num_open = len(texts)
        while num_open:
            for delivery in self._service.pump():
                text = texts[delivery.seq]
                text.tokens += delivery.tokens
                text.notes += delivery.notes
                num_open -= delivery.finish is not None
        return [*texts.values()]

    @torch.inference_mode()
    def _bounds(self, text: Text, temperature: float) -> Tensor:
        """1 - TV with the draft, and with the cut draft, at each drafted position: float32 [draft tokens, 2]."""
        before = [position - 1 for position, _ in text.drafted()]
        ids = torch.tensor([text.tokens])
        logits = (model(ids, use_cache=False).logits[0, before, : self._vocab_size] for model in self._models)
        target_probs, draft_probs = ((each / temperature).softmax(-1) for each in logits)
        return torch.stack([*overlaps(target_probs, draft_probs)], 1)


def overlaps(target_probs: Tensor, draft_probs: Tensor) -> Iterator[Tensor]:
    """1 - TV of float32 [N, V] with [N, V], and with the second cut to its most likely tokens: float32 [N] each."""
    yield torch.minimum(target_probs, draft_probs).sum(-1)
    cut_probs, ids = draft_probs.topk(min(NUM_CUT, draft_probs.shape[1]), dim=-1)
    yield torch.minimum(target_probs.gather(-1, ids), cut_probs / cut_probs.sum(-1, keepdim=True)).sum(-1)


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [
        f"| temperature | acceptance | 1 - TV | 1 - TV, draft cut to {NUM_CUT} | draft tokens |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = f"{row.acceptance:.3f} | {row.bound:.3f} | {row.cut_bound:.3f} | {row.num_draft_tokens}"
        lines.append(f"| {row.temperature:g} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    """Print a table for the configured pair, by default the demo pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each text")
    parser.add_argument("--samples", type=int, default=8, help="texts of each of the eight prompts")
    parser.add_argument("--temperatures", default="0.6,1", help="separated by commas, above 0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = ServiceConfig()
    target, draft = target_source(config), draft_source(config)
    assert draft is not None
    pair = Pair(target, draft)
    temperatures = map(float, arguments.temperatures.split(","))
    print(table([pair.measure(t, arguments.tokens, arguments.samples) for t in temperatures]))


if __name__ == "__main__":
    main()
