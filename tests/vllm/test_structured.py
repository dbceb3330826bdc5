"""Grammars over vLLM: the masks are ours."""

from __future__ import annotations

from dataclasses import replace

from specdec.core.backends import VerifyJob
from specdec.core.grammar import Grammar
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.engine.vllm.target import VllmTarget
from specdec.models.loading import load_tokenizer
from tests.specdec.engine.contract import Shadow, decided
from tests.specdec.engine.pairs import Case, collect
from tests.specdec.engine.schemas import grammar_of, is_valid, make_schemas
from tests.vllm.models import TARGET, own_drafter

NUM_SCHEMAS = 24
MAX_TOKENS = 64


def cases(temperature: float, grammars: list[Grammar]) -> list[Case]:
    prompt = tuple(load_tokenizer(TARGET).encode("A record in JSON: "))
    params = SamplingParams(temperature=temperature)
    return [
        Case(prompt, MAX_TOKENS, replace(params, grammar=one), i, eos_token_ids=(0,)) for i, one in enumerate(grammars)
    ]


def check(engine: VllmTarget, reference: ModelTarget, found: list[Case]) -> Shadow:
    """With drafts of a model, and with what the grammars force: the texts of our own target, each decision the same."""
    for target in (engine, reference):
        assert target._sampler.matchers is not None
        for case in found:
            assert case.sampling.grammar is not None
            target._sampler.matchers._grammars.check(case.sampling.grammar)
    shadow = Shadow(engine, reference)
    outputs = collect(InProcessService(shadow, own_drafter(), 4), found)
    wanted = collect(InProcessService(reference, None, 0), found)
    assert [(one.tokens, one.finish) for one in outputs] == [(one.tokens, one.finish) for one in wanted]
    assert {one.finish for one in outputs} <= {"stop", "length"}
    return shadow


def test_schemas_of_the_corpus(engine: VllmTarget, reference: ModelTarget) -> None:
    schemas = make_schemas(NUM_SCHEMAS)
    found = cases(1.0, [grammar_of(schema) for schema in schemas])
    shadow = check(engine, reference, found)
    assert shadow.seen["accepted"] > 0


def test_what_is_forced_is_drafted(engine: VllmTarget, reference: ModelTarget) -> None:
    schema = {"type": "object", "properties": {"a_long_name_that_must_follow": {"const": "and its value"}}}
    schema |= {"required": ["a_long_name_that_must_follow"], "additionalProperties": False}
    (case,) = cases(0.0, [grammar_of(schema)])
    spec = case.spec()
    for target in (engine, reference):
        target._sampler.matchers._grammars.check(spec.sampling.grammar)
    shadow, log = Shadow(engine, reference), TokenLog(case.prompt)
    while log.tokens[-1] != 0:
        log.extend(decided(shadow, VerifyJob("forced", log, (), spec, room=4)).run)
    shadow.release("forced")
    assert shadow.seen["forced"] > 2
    assert shadow.seen["accepted"] > 8
    assert is_valid(schema, load_tokenizer(TARGET).decode(log.tail(spec.output_start), skip_special_tokens=True))


def test_a_grammar_that_is_wrong_ends_its_own_sequence(engine: VllmTarget) -> None:
    good, bad = cases(0.0, [Grammar("regex", "[a-f]{9}"), Grammar("regex", "(")])
    outputs = collect(InProcessService(engine, None, 0), [good, bad])
    assert [one.finish for one in outputs] == ["stop", "error"]
    assert outputs[1].tokens == []
