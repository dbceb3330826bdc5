"""Answers of the demo pair, read by the auditor: the honest pass, and each kind of other answer is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cluster.cli.service_scorer import ServiceScorer
from specdec import BackendOptions, SamplingParams, SpeculativeEngine
from specdec.core.errors import InvalidParameterError
from specdec.core.grammar import Grammar
from specdec.core.types import TokenLogprobs, Tokens
from specdec.engine.build import make_sampler
from specdec.receipts.audit import Answer, Auditor
from specdec.receipts.format import Receipt, sealed
from specdec.receipts.scoring import OTHER_CHUNK_TOKENS, Scorer
from specdec.receipts.signing import SigningKey
from tests.specdec.receipts.answers import PROMPTS, answer, make_engine, own, single, source, with_token

OPTIONS = BackendOptions(
    vocab_size=4096, max_model_len=1024, kv_cache_memory=64 << 20, measures_step=False, skip_parity_check=True
)


@pytest.fixture(scope="module")
def engine() -> SpeculativeEngine:
    return make_engine(source())


@pytest.fixture(scope="module")
def auditor() -> Auditor:
    return Auditor(Scorer.from_pretrained(source(), OPTIONS), own())


@pytest.fixture(scope="module")
def honest(engine: SpeculativeEngine) -> Receipt:
    return answer(engine)


SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.6, top_p=0.8, top_k=30),
    SamplingParams(min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((300, 2.0),)),
    SamplingParams(bad_words=((13,),), min_tokens=20, temperature=1.5),
    SamplingParams(grammar=Grammar("regex", "[a-z ]{30,80}")),
)


def test_honest_answers_pass_whatever_was_asked(engine: SpeculativeEngine, auditor: Auditor, honest: Receipt) -> None:
    others = [answer(engine, PROMPTS[:2], one, seed=i, max_tokens=24) for i, one in enumerate(SAMPLINGS)]
    others.append(answer(engine, PROMPTS[:3], drafts=0, seed=9))
    verdicts, bounds = auditor.audit([Answer(one, {}) for one in (honest, *others)])
    assert [verdict.reasons for verdict in verdicts] == [()] * len(verdicts)
    assert {verdict.status for verdict in verdicts} == {"ok"}
    assert sum(verdict.num_tokens for verdict in verdicts) > 400
    assert bounds.gap < 0.01


class Service:
    """Answers the requests of an audit as a running service does."""

    def __init__(self, engine: SpeculativeEngine, receipt: Receipt) -> None:
        self._engine, self._receipt = engine, receipt
        self.most_tokens = 1024

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        if len(body["prompt"]) > self.most_tokens:
            raise InvalidParameterError("prompt", "the prompt is too long")
        names = ("prompt_logprobs", "logprobs", "allowed_token_ids", "ignore_eos")
        asked = SamplingParams(**{name: body[name] for name in names if name in body})
        result = self._engine.generate(body["prompt"], asked, seed=1, max_tokens=body["max_tokens"])
        entries = zip(body["prompt"], result.prompt_logprobs or (), strict=False)
        told = [
            entry and {str(one): {"logprob": logprob} for one, logprob in ((token, entry.logprob), *entry.top)}
            for token, entry in entries
        ]
        envelope, _ = sealed(self._receipt, SigningKey(Ed25519PrivateKey.generate()))
        (last,) = result.logprobs or (TokenLogprobs(0.0, 1),)
        top = {f"token_id:{one}": logprob for one, logprob in ((result.token_ids[0], last.logprob), *last.top)}
        choice = {"prompt_logprobs": told, "logprobs": {"top_logprobs": [top]}}
        return {"receipt": envelope, "choices": [choice]}


def test_a_service_reads_as_the_model_itself_does(engine: SpeculativeEngine, honest: Receipt) -> None:
    sampler = make_sampler(source(), 4096, honest.eos_token_ids, OPTIONS)
    service = Service(engine, honest)
    scorer = ServiceScorer(service, sampler, honest, 100)  # type: ignore[arg-type]
    auditor = Auditor(scorer, scorer.own)
    additive = [
        *(replace(one, repetition_penalty=1.0) for one in SAMPLINGS),
        SamplingParams(temperature=1.2, top_p=0.95),
    ]
    answers = [answer(engine, PROMPTS[:2], one, seed=i, max_tokens=24) for i, one in enumerate(additive)]
    verdicts, bounds = auditor.audit([Answer(one, {}) for one in (honest, *answers)])
    assert [(verdict.status, verdict.reasons) for verdict in verdicts] == [("ok", ())] * len(verdicts)
    assert (bounds.gap, bounds.num_tokens) == (1e-3, 0)
    assert flagged(auditor, with_token(honest, 1, 9, (honest.choices[1].token_ids[9] + 1) % 4096))[1] == 9
    assert -1 not in flagged(auditor, answer(engine, used_seed=7))
    penalized = msgspec.structs.replace(honest, sampling=SAMPLINGS[2])
    assert auditor.audit([Answer(penalized, {})])[0][0].reasons == (scorer.refusal(penalized),)
    rounded = msgspec.structs.replace(honest, contract=honest.contract | {"dtype": "bfloat16"})
    with pytest.raises(InvalidParameterError, match="--url needs a strict service"):
        ServiceScorer(Service(engine, rounded), sampler, honest, 100)  # type: ignore[arg-type]
    service.most_tokens = min(len(prompt) for prompt in honest.prompts) + 39
    verdicts, _ = auditor.audit(single(honest))
    assert {verdict.status for verdict in verdicts} == {"ok", "refused"}, "one that cannot be read ends no audit"
    assert {verdict.reasons for verdict in verdicts} == {(), ("it cannot be read: the prompt is too long",)}


def test_an_answer_that_fills_the_context_is_read_to_its_last_token(engine: SpeculativeEngine) -> None:
    prompt = PROMPTS[0] * 90
    room = 1024 - len(engine._tokenizer.encode(prompt))
    assert 0 < room < 100
    full = answer(engine, [prompt, prompt[:-5]], SamplingParams(ignore_eos=True), max_tokens=room)
    sampler = make_sampler(source(), 4096, full.eos_token_ids, OPTIONS)
    scorer = ServiceScorer(Service(engine, full), sampler, full, 100)  # type: ignore[arg-type]
    auditor = Auditor(scorer, scorer.own)
    (verdict,), _ = auditor.audit([Answer(full, {})])
    assert (verdict.status, verdict.num_tokens) == ("ok", 2 * room)
    edited = with_token(full, 0, room - 1, (full.choices[0].token_ids[-1] + 1) % 4096)
    assert flagged(auditor, edited) == [room - 1, -1]


def flagged(auditor: Auditor, receipt: Receipt) -> list[int | None]:
    """For each choice the token that the audit names; -1 where it passes."""
    verdicts, _ = auditor.audit(single(receipt))
    return [verdict.token if verdict.status == "flagged" else -1 for verdict in verdicts]


def test_another_seed_or_temperature_is_found(engine: SpeculativeEngine, auditor: Auditor) -> None:
    assert -1 not in flagged(auditor, answer(engine, used_seed=7))
    assert flagged(auditor, answer(engine, used=SamplingParams(temperature=0.9))).count(-1) <= 1
    assert -1 not in flagged(auditor, answer(engine, used=SamplingParams(temperature=0.0)))


def test_an_edited_token_is_found_where_it_is(auditor: Auditor, honest: Receipt) -> None:
    receipt = honest
    for choice, one in enumerate(honest.choices):
        at = len(one.token_ids) // 2
        receipt = with_token(receipt, choice, at, (one.token_ids[at] + 1) % 4096)
    assert flagged(auditor, receipt) == [len(one.token_ids) // 2 for one in honest.choices]


def test_what_a_grammar_forbids_is_found(engine: SpeculativeEngine, auditor: Auditor) -> None:
    receipt = answer(engine, PROMPTS[:1], SAMPLINGS[-1], max_tokens=12)
    (verdict,), _ = auditor.audit([Answer(with_token(receipt, 0, 5, 7), {})])
    assert (verdict.status, verdict.token) == ("flagged", 5)
    assert "was not allowed" in verdict.reasons[0]


def test_other_weights_are_found(auditor: Auditor, honest: Receipt) -> None:
    """A fine-tune: the last layers' weights are moved by a few percent."""
    other = make_engine(source(), draft=False)
    torch.manual_seed(0)
    for layer in other._service.target._backend._runner.loaded.model.model.layers[-2:]:
        for weight in layer.parameters():
            weight.data.add_(torch.randn_like(weight) * weight.abs().mean() * 0.1)
    assert -1 not in flagged(auditor, answer(other))


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_another_precision_is_found(auditor: Auditor, precision: str) -> None:
    other = source("bfloat16") if precision == "bfloat16" else source(quantization="int8")
    assert -1 not in flagged(auditor, answer(make_engine(other, draft=False)))


def shown(receipt: Receipt, **change: object) -> Answer:
    return Answer(msgspec.structs.replace(receipt, **change), {})


def test_receipts_that_contradict_themselves_are_flagged_without_the_model(auditor: Auditor, honest: Receipt) -> None:
    first = honest.choices[0]
    cut = msgspec.structs.replace(first, token_ids=first.token_ids[:-1])
    ended = msgspec.structs.replace(first, finish_reason="stop")
    cases = {
        "seed is not that of the request": shown(honest, seed=2),
        "another weights": shown(honest, model=msgspec.structs.replace(honest.model, weights="sha256:x")),
        "another tokenizer": shown(honest, model=msgspec.structs.replace(honest.model, tokenizer="sha256:x")),
        "ends after 39 of 40 tokens": shown(honest, choices=(cut,)),
        "without an ending token": shown(honest, choices=(ended,)),
        "log probabilities": shown(honest, choices=(msgspec.structs.replace(first, logprobs=()),)),
        "token 3: the answer was shown": Answer(honest, {0: edited(first.token_ids)}),
    }
    verdicts, _ = auditor.audit(list(cases.values()))
    for text, verdict in zip(cases, verdicts, strict=True):
        assert (verdict.status, verdict.num_tokens) == ("flagged", 0)
        assert text in verdict.reasons[0]


def edited(tokens: Tokens) -> Tokens:
    return (*tokens[:3], tokens[3] + 1, *tokens[4:])


def test_what_cannot_be_told_is_refused_by_name(auditor: Auditor, honest: Receipt) -> None:
    adapted = shown(honest, model=msgspec.structs.replace(honest.model, adapter="1"))
    other_isa = shown(honest, contract=honest.contract | {"isa": "AVX2"})
    verdicts, _ = auditor.audit([adapted, other_isa])
    assert [verdict.status for verdict in verdicts] == ["refused"] * 2
    for word, verdict in zip(("adapter", "isa is AVX2"), verdicts, strict=True):
        assert word in verdict.reasons[0]


def test_chunks_do_not_matter_in_float32(auditor: Auditor, honest: Receipt) -> None:
    choice = honest.choices[0]
    arguments = honest.spec(choice), honest.prompts[0], choice.token_ids
    whole = auditor._scorer.score(*arguments)
    parts = auditor._scorer.score(*arguments, chunk_tokens=OTHER_CHUNK_TOKENS)
    assert whole.gaps.tolist() == parts.gaps.tolist() == [0] * len(choice.token_ids)
    assert abs(whole.logprobs - parts.logprobs).max() < 1e-3
    assert abs(whole.logprobs[::8] - choice.logprobs).max() < 1e-3
