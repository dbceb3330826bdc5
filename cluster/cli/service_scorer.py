"""Answers read by a running service: what it says of a prompt's log probabilities decides what an audit decides.

Of each position it names the most likely tokens alone, so that an audit may miss what is beyond them; it flags no more.
It reads once, so that rounding cannot be measured: its bits must not depend on the batch (strict), or hardly (float32).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.cli.service_rerun import ServiceRerun
from specdec.core.errors import InvalidParameterError, SequenceFailedError
from specdec.core.params import SequenceSpec
from specdec.core.types import Tokens
from specdec.receipts.audit import Own
from specdec.receipts.format import Receipt, opened
from specdec.receipts.scoring import Floats, Scorer
from specdec.sampling.pipeline import Sampler

NUM_TOP = 20


class ServiceScorer(Scorer):
    """Reads answers in a service, one at a time.

    Args:
        service: Where.
        sampler: For its target.
        receipt: That names the model.
        priority: Of its requests.

    Attributes:
        own: What the service says of itself.

    Raises:
        InvalidParameterError: The service gives no receipts, or its rounding is not known.
        ServiceUnavailableError: It does not answer.
    """

    calibration_tokens = 0

    def __init__(self, service: ServiceRerun, sampler: Sampler, receipt: Receipt, priority: int) -> None:
        self._service, self._sampler, self._name = service, sampler, receipt.model.name
        self._priority = priority
        self.own = _own(self._ask(receipt.prompts[0][:1]))
        if self.own.contract.get("exactness") == "fast" and self.own.contract.get("dtype") != "float32":
            raise InvalidParameterError("url", f"--url needs a strict service or one in float32: {self.own.contract}")

    def refusal(self, receipt: Receipt) -> str:
        """See :meth:`Scorer.refusal`."""
        needs_logits = receipt.sampling.repetition_penalty != 1
        return "repetition_penalty needs logits: audit it without --url" if needs_logits else ""

    def _ask(self, tokens: Tokens, **others: object) -> dict[str, Any]:
        body = {"model": self._name, "prompt": list(tokens), "max_tokens": 1, "receipt": True}
        return self._service.ask(body | {"priority": self._priority} | others)

    def _logits(self, prompt: Tokens, output: Tokens, chunk_tokens: int) -> Iterator[tuple[int, int, Tensor]]:
        """Log probabilities in place of logits; -inf for tokens that are not named.

        The last token is drawn, as the only one allowed: a prompt that fills the context is refused.
        """
        last = {"logprobs": NUM_TOP, "allowed_token_ids": output[-1:], "return_tokens_as_token_ids": True}
        try:
            answer = self._ask(prompt + output[:-1], prompt_logprobs=NUM_TOP, ignore_eos=True, **last)
        except InvalidParameterError as error:
            raise SequenceFailedError(str(error)) from None
        if _own(answer) != self.own:
            raise InvalidParameterError("url", "--url: the service's targets differ in model or numeric contract")
        (choice,) = answer["choices"]
        told = [
            {int(token): one["logprob"] for token, one in entry.items()}
            for entry in choice["prompt_logprobs"][len(prompt) :]
        ]
        (top,) = choice["logprobs"]["top_logprobs"]
        told.append({int(token.removeprefix("token_id:")): logprob for token, logprob in top.items()})
        for start in range(0, len(told), chunk_tokens):
            entries = told[start : start + chunk_tokens]
            logits = torch.full((len(entries), self._sampler.vocab_size), -torch.inf)
            for row, entry in zip(logits, entries, strict=True):
                if max(entry) >= len(row):
                    raise InvalidParameterError("target", "target: the service's model has another tokenizer")
                row[list(entry)] = torch.tensor(list(entry.values()))
            yield start, start + len(entries), logits

    def _of_rows(
        self,
        spec: SequenceSpec,
        before: Tokens,
        tokens: Tokens,
        logits: Tensor,
        pairs: NDArray[np.int64] | None,
        start: int,
        slack: float,
    ) -> tuple[Floats, NDArray[np.int64], Floats, Floats]:
        """The token itself counts as kept by top-k, top-p and min-p; others as far as the named ones alone tell."""
        written = torch.tensor(tokens)[:, None]
        values, best = self._scores(spec, before, tokens[:-1], logits).topk(2, dim=1)
        whole = replace(spec, sampling=replace(spec.sampling, top_k=0, top_p=1.0, min_p=0.0))
        own = self._scores(whole, before, tokens[:-1], logits).gather(1, written)
        gaps = torch.where(own.isinf(), torch.inf, (values[:, :1] - own).clamp(min=0))[:, 0]
        margins = values[:, 0] - values[:, 1]
        logprobs = logits.gather(1, written)[:, 0]
        return gaps.double().numpy(), best.numpy(), margins.double().numpy(), logprobs.double().numpy()


def _own(answer: dict[str, Any]) -> Own:
    receipt = opened(answer["receipt"]).receipt
    return Own(receipt.model.weights, receipt.model.tokenizer, receipt.contract)
