"""Whether answers are what their receipts say: read once, token by token, by the model that the auditor has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from specdec.core.errors import MemoryPlanError, SequenceFailedError
from specdec.core.params import SequenceSpec
from specdec.core.types import Tokens
from specdec.receipts.contract import Contract, contract_difference
from specdec.receipts.evidence import ALPHA, Bounds, Rounding, first_excess, first_proved
from specdec.receipts.format import Receipt, ReceiptChoice
from specdec.receipts.scoring import OTHER_CHUNK_TOKENS, Scorer, Scores
from specdec.sampling.noise import derive_seed

_NUM_PARTS = 8
"""Of the probability that an honest service is flagged: see :mod:`specdec.receipts.evidence`."""
_GREEDY = 1.0

Status = Literal["ok", "flagged", "refused"]


class Own(NamedTuple):
    """The auditor's own model: see :class:`specdec.receipts.format.ReceiptModel`."""

    weights: str
    tokenizer: str
    contract: Contract


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to be audited.

    Attributes:
        shown: The token ids that the client was shown, by choice, where they are known.
    """

    receipt: Receipt
    shown: Mapping[int, Tokens]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an answer.

    Attributes:
        id: Of the answer.
        status: ``refused`` where this auditor cannot tell.
        num_tokens: Output tokens that were read.
        reasons: Why, a sentence each.
        token: The output token of ``choice`` that the first reason names; None where it names none.
        choice: Its choice.
    """

    id: str
    status: Status
    num_tokens: int = 0
    reasons: tuple[str, ...] = ()
    choice: int | None = None
    token: int | None = None


class _Read(NamedTuple):
    number: int
    choice: ReceiptChoice
    spec: SequenceSpec
    scores: Scores


class Auditor:
    """Audits answers by reading them.

    Args:
        scorer: Of the auditor's own model.
        own: What that is.
    """

    def __init__(self, scorer: Scorer, own: Own) -> None:
        self._scorer, self._own = scorer, own

    def audit(self, answers: Sequence[Answer]) -> tuple[list[Verdict], Bounds]:
        """Read all answers, some of them twice, then judge each.

        Returns:
            A verdict for each, in order, and the bounds that were used.
        """
        rounding = Rounding()
        said = [self._unread(answer) for answer in answers]
        read: list[list[_Read]] = [[] for _ in answers]
        for i, answer in enumerate(answers):
            if said[i] is None:
                try:
                    read[i] = self._read(answer.receipt, rounding)
                except (MemoryPlanError, SequenceFailedError) as error:
                    said[i] = Verdict(answer.receipt.id, "refused", reasons=(f"it cannot be read: {error}",))
        num_tokens = sum(len(one.choice.token_ids) for choices in read for one in choices)
        bounds = rounding.bounds(num_tokens)
        alpha = ALPHA / (_NUM_PARTS * max(1, sum(map(len, read))))
        verdicts = [
            verdict or judged(answer.receipt, choices, bounds, alpha)
            for answer, verdict, choices in zip(answers, said, read, strict=True)
        ]
        return verdicts, bounds

    def _unread(self, answer: Answer) -> Verdict | None:
        """The verdict where the model need not be asked."""
        receipt = answer.receipt
        if receipt.model.adapter:
            return Verdict(receipt.id, "refused", reasons=("answers with an adapter are not audited",))
        if refusal := self._scorer.refusal(receipt):
            return Verdict(receipt.id, "refused", reasons=(refusal,))
        for name, its, mine in (
            ("weights", receipt.model.weights, self._own.weights),
            ("tokenizer", receipt.model.tokenizer, self._own.tokenizer),
        ):
            if its != mine:
                return Verdict(receipt.id, "flagged", reasons=(f"it names another {name}: {its}, not {mine}",))
        difference = contract_difference(self._own.contract, receipt.contract)
        if difference:
            return Verdict(receipt.id, "refused", reasons=(f"numeric_contract: {difference}",))
        for number, choice in enumerate(receipt.choices):
            reason, token = _inconsistency(receipt, choice, answer.shown.get(number), number)
            if reason:
                return Verdict(receipt.id, "flagged", reasons=(reason,), choice=number, token=token)
        return None

    def _read(self, receipt: Receipt, rounding: Rounding) -> list[_Read]:
        read = []
        for number, choice in enumerate(receipt.choices):
            if not choice.token_ids:
                continue
            spec, prompt = receipt.spec(choice), receipt.prompts[choice.prompt]
            slack = 1e-4 if self._own.contract.get("dtype") == "float32" else 2e-2
            scores = self._scorer.score(spec, prompt, choice.token_ids, slack=slack)
            read.append(_Read(number, choice, spec, scores))
            if rounding.num_tokens < self._scorer.calibration_tokens:
                again = self._scorer.score(
                    spec, prompt, choice.token_ids, chunk_tokens=OTHER_CHUNK_TOKENS, pairs=scores.best
                )
                rounding.add(scores, again, _unit(spec))
        return read


def judged(receipt: Receipt, choices: Sequence[_Read], bounds: Bounds, alpha: float) -> Verdict:
    """The verdict on an answer that was read.

    Args:
        receipt: Of the answer.
        choices: As read.
        bounds: Of the audit.
        alpha: Probability that an honest choice is flagged by one of the tests over many tokens.
    """
    found: list[tuple[int, int, str]] = []
    for one in choices:
        gaps = one.scores.gaps * _unit(one.spec)
        stride = receipt.logprob_stride
        mine = one.scores.logprobs[::stride]
        differences = np.abs(np.array(one.choice.logprobs[: len(mine)]) - mine)
        at = first_excess(gaps, bounds.gap)
        if at is not None:
            token, best = one.choice.token_ids[at], int(one.scores.best[at, 0])
            lacks = f"lacks {gaps[at]:.2g} (bound {bounds.gap:.2g})" if np.isfinite(gaps[at]) else "was not allowed"
            says = f"token {token} {lacks}; seed and model give {best}"
            found.append((one.number, at, f"{says}; {int((gaps > 0).sum())} of {len(gaps)} tokens differ"))
        at = first_proved(gaps, bounds.gap, bounds.mean_gap, alpha)
        if at is not None:
            found.append((one.number, at, f"{int((gaps[: at + 1] > 0).sum())} tokens up to it are not the model's"))
        at = first_excess(differences, bounds.logprob)
        if at is not None:
            says = f"{one.choice.logprobs[at]:.4f}, the model says {one.scores.logprobs[at * stride]:.4f}"
            found.append((one.number, at * stride, f"its log probability is {says} (bound {bounds.logprob:.2g})"))
        at = first_proved(differences, bounds.logprob, bounds.mean_logprob, alpha)
        if at is not None:
            found.append((one.number, at * stride, "log probabilities up to it are not the model's"))
    num_tokens = sum(len(one.choice.token_ids) for one in choices)
    if not found:
        return Verdict(receipt.id, "ok", num_tokens)
    found.sort(key=lambda one: one[:2])
    reasons = tuple(f"choice {number}, token {at}: {text}" for number, at, text in found)
    return Verdict(receipt.id, "flagged", num_tokens, reasons, found[0][0], found[0][1])


def _unit(spec: SequenceSpec) -> float:
    """Logits in one unit of a sequence's scores."""
    return _GREEDY if spec.sampling.is_greedy else spec.sampling.temperature


def _inconsistency(
    receipt: Receipt, choice: ReceiptChoice, shown: Tokens | None, number: int
) -> tuple[str, int | None]:
    """What in a choice contradicts the rest of its receipt, and at which output token; empty for nothing."""
    before = sum(other.prompt == choice.prompt for other in receipt.choices[:number])
    if choice.seed != derive_seed(receipt.seed, choice.prompt, before):
        return f"choice {number}: its seed is not that of the request", None
    if shown is not None and shown != choice.token_ids:
        pairs = zip(shown, choice.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(shown), len(choice.token_ids)))
        return f"choice {number}, token {first}: the answer was shown with other tokens", first
    num_tokens = len(choice.token_ids)
    if len(choice.logprobs) != -(-num_tokens // receipt.logprob_stride):
        return f"choice {number}: it has {len(choice.logprobs)} log probabilities", None
    room = choice.max_tokens
    if num_tokens > room or (choice.finish_reason == "length" and num_tokens < room):
        return f"choice {number}: it ends after {num_tokens} of {room} tokens", num_tokens
    ends = receipt.spec(choice).ending_token_ids
    if choice.finish_reason == "stop" and not receipt.stop and (not num_tokens or choice.token_ids[-1] not in ends):
        return f"choice {number}: it ends without an ending token", num_tokens
    return "", None
