"""Running a receipt's request again, and where the answer differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specdec.core.types import Tokens
from specdec.engine.engine import SpeculativeEngine
from specdec.receipts.format import Receipt


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a choice was generated otherwise.

    Attributes:
        choice: Its number.
        token: Number of the first output token that differs.
        said: The receipt's token there; None where the receipt's output ends before.
        found: The new one; None where the new output ends before.
        gap: The new token's logit less the receipt's, of the model alone; None where that is unknown.
    """

    choice: int
    token: int
    said: int | None
    found: int | None
    gap: float | None = None


class Rerun(Protocol):
    """What generates anew: an engine in this process, or a service."""

    def outputs(self, receipt: Receipt) -> Sequence[tuple[Tokens, Sequence[float]]]:
        """Each choice's tokens, and their log probabilities; those of the last ones may be left out."""
        ...

    def logprob(self, receipt: Receipt, tokens: Tokens) -> float:
        """The log probability of the last token, after the others."""
        ...


def first_differences(receipt: Receipt, rerun: Rerun) -> list[Difference]:
    """Where the choices of a receipt are generated otherwise; nothing where they are the same."""
    differences = []
    for number, (choice, (tokens, logprobs)) in enumerate(zip(receipt.choices, rerun.outputs(receipt), strict=True)):
        if tokens == choice.token_ids:
            continue
        at = 0
        while at < min(len(tokens), len(choice.token_ids)) and tokens[at] == choice.token_ids[at]:
            at += 1
        if at == len(tokens) or at == len(choice.token_ids):
            said = choice.token_ids[at] if at < len(choice.token_ids) else None
            differences.append(Difference(number, at, said, tokens[at] if at < len(tokens) else None))
            continue
        text = receipt.prompts[choice.prompt] + choice.token_ids[: at + 1]
        gap = logprobs[at] - rerun.logprob(receipt, text) if at < len(logprobs) else None
        differences.append(Difference(number, at, choice.token_ids[at], tokens[at], gap))
    return differences


class EngineRerun:
    """Generates in this process.

    Args:
        engine: Of the receipt's target; its draft does not matter.
    """

    def __init__(self, engine: SpeculativeEngine) -> None:
        self._engine = engine

    def outputs(self, receipt: Receipt) -> list[tuple[Tokens, list[float]]]:
        """All choices in one batch."""
        specs = [
            (receipt.prompts[choice.prompt], replace(spec, sampling=replace(spec.sampling, logprobs=0)))
            for choice in receipt.choices
            for spec in [receipt.spec(choice)]
        ]
        results = self._engine.generate_specs(specs, receipt.stop)
        return [(result.token_ids, [one.logprob for one in result.logprobs or ()]) for result in results]

    def logprob(self, receipt: Receipt, tokens: Tokens) -> float:
        """Read as the last token of a prompt, if the engine has room for one more, or drawn as its only one."""
        spec = receipt.spec(receipt.choices[0])
        sampling = replace(self._engine.default_sampling, temperature=0.0, logprobs=0, allowed_token_ids=tokens[-1:])
        one = replace(spec, sampling=sampling, output_start=len(tokens) - 1, max_tokens=1)
        (result,) = self._engine.generate_specs([(tokens[:-1], one)])
        assert result.logprobs is not None
        return result.logprobs[0].logprob
