"""How often draft tokens are kept, by rule and temperature, beside the best any rule could do.

    python -m cluster.bench.acceptance [--tokens 128] [--temperatures 0.6,1]

Each round verifies one draft token, so that every position of the text is counted once and none is conditioned on the
token before it having been kept. The best possible is 1 - TV(target, draft) (Leviathan et al. 2023, corollary 3.6),
averaged over the positions of the coupled rule's texts, which are the target's own.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from cluster.bench.prompts import CODE
from cluster.config import ServiceConfig
from cluster.sources import draft_source, target_source
from specdec import ModelSource, SamplingParams, SpeculativeEngine
from specdec.models.loading import load_tokenizer
from specdec.sampling.params import Acceptance

RULES: tuple[Acceptance, ...] = ("coupled", "rejection")


@dataclass(frozen=True, slots=True)
class Row:
    """Acceptance at one temperature.

    Attributes:
        by_rule: Accepted over verified draft tokens.
        best: Mean of 1 - TV.
        num_draft_tokens: How many were verified under the coupled rule.
    """

    temperature: float
    by_rule: dict[str, float]
    best: float
    num_draft_tokens: int


def measure(target: ModelSource, draft: ModelSource, temperature: float, num_tokens: int) -> Row:
    """Generate from all prompts under both rules, and compare the distributions along the texts."""
    engine = SpeculativeEngine.from_pretrained(target, draft, num_speculative_tokens=1)
    by_rule: dict[str, float] = {}
    texts: list[list[int]] = []
    num_draft_tokens = 0
    tokenizer = load_tokenizer(target)
    for rule in RULES:
        engine.reset_stats()
        sampling = SamplingParams(temperature=temperature, acceptance=rule, ignore_eos=True)
        results = engine.generate_batch(CODE, sampling, seed=1, max_tokens=num_tokens)
        by_rule[rule] = engine.stats.acceptance_rate
        if rule == "coupled":
            num_draft_tokens = engine.stats.num_draft_tokens
            texts = [
                [*tokenizer.encode(prompt), *result.token_ids] for prompt, result in zip(CODE, results, strict=True)
            ]
    return Row(temperature, by_rule, _best(target, draft, texts, num_tokens, temperature), num_draft_tokens)


@torch.inference_mode()
def _best(
    target: ModelSource, draft: ModelSource, texts: list[list[int]], num_tokens: int, temperature: float
) -> float:
    models = [AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32) for source in (target, draft)]
    overlaps: list[torch.Tensor] = []
    for text in texts:
        ids = torch.tensor([text])
        target_probs, draft_probs = ((m(ids).logits[0, -num_tokens - 1 : -1] / temperature).softmax(-1) for m in models)
        overlaps.append(torch.minimum(target_probs, draft_probs).sum(-1))
    return float(torch.cat(overlaps).mean())


def main() -> None:
    """Print a Markdown table for the configured pair, by default the demo pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each of the eight prompts")
    parser.add_argument("--temperatures", default="0.6,1", help="separated by commas, above 0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = ServiceConfig()
    target, draft = target_source(config), draft_source(config)
    assert draft is not None
    lines = ["| temperature | coupled | rejection | best possible (1 - TV) | draft tokens |", "|---|---|---|---|---|"]
    for temperature in map(float, arguments.temperatures.split(",")):
        row = measure(target, draft, temperature, arguments.tokens)
        rates = " | ".join(f"{row.by_rule[rule]:.3f}" for rule in RULES)
        lines.append(f"| {temperature:g} | {rates} | {row.best:.3f} | {row.num_draft_tokens} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
