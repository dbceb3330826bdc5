"""A grammar begins where the reasoning ends, in the middle of a draft too: the same tokens for any draft."""

from __future__ import annotations

import json

import jsonschema
import pytest

from specdec import Grammar, SamplingParams
from specdec.structured.constraints import HERMES, Tags, Tool, after_reasoning, only_calls, short_reasoning
from specdec.structured.parsing.calls import HermesParser
from specdec.structured.parsing.reasoning import ReasoningTags
from tests.letters import spelled
from tests.sizes import some
from tests.specdec.engine.pairs import Case, collect
from tests.specdec.engine.schemas import grammar_of
from tests.thorough.engine.test_structured import (
    PAIRS,
    PERSON,
    engine_of,
    matcher_source,
    matchers_of,
    tokenizer,
    undrafted,
)

PROMPT = "def parse(text):\n    "
AS_TEXT = ReasoningTags("<think>", "(")
"""What the demo models write sooner or later, and often as the end of a token."""
AS_TOKENS = ReasoningTags("<|im_start|>", "<|im_end|>")
BUDGET, MAX_TOKENS = 7, 90
END = 2
"""The token of the second tag."""


def tags() -> Tags:
    return Tags(tokenizer().get_added_vocab(), (0,))


def person() -> Grammar:
    return grammar_of(PERSON)


REASONED = {
    "by text": after_reasoning(AS_TEXT, True, None, tags(), person()),
    "by tokens": after_reasoning(AS_TOKENS, True, BUDGET, tags(), person()),
    "calls": after_reasoning(
        AS_TOKENS, True, BUDGET, tags(), only_calls(HERMES, [Tool("person", PERSON)], False, tags())
    ),
}


def check(name: str, tokens: tuple[int, ...]) -> None:
    """What follows the reasoning is whole and valid."""
    if name == "by text":
        if tokens[-1] != 0:
            return  # it was cut off
        answer = tokenizer().decode(tokens).partition(AS_TEXT.end)[2]
    else:
        assert tokens[BUDGET] == END
        assert END not in tokens[:BUDGET]
        answer = tokenizer().decode(tokens[BUDGET + 1 :])
    answer = answer.removesuffix("<|endoftext|>").lstrip("\n")
    if name == "calls":
        parser = HermesParser()
        name_of, *pieces = [*parser.push(answer), *parser.finish()]
        assert name_of.name == "person"
        answer = "".join(piece.arguments for piece in pieces)
    jsonschema.validate(json.loads(answer), PERSON)


@pytest.mark.parametrize("name", REASONED)
@pytest.mark.parametrize("temperature", some([0.0, 1.0]))
@pytest.mark.parametrize("pair", some(PAIRS))
def test_no_draft_changes_a_token(pair: str, name: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, grammar=REASONED[name], logit_bias=((0, 4.0),))
    prompts = [PROMPT] * (3 if temperature else 1)
    modes = [(engine_of(pair), count) for count in (0, 1, 4, 8)]
    if pair == "plain":
        modes.append((undrafted(), None))
    found = [
        [
            one.token_ids
            for one in engine.generate_batch(
                prompts, params, seed=2, max_tokens=MAX_TOKENS, num_speculative_tokens=count
            )
        ]
        for engine, count in modes
    ]
    assert all(one == found[0] for one in found)
    for tokens in found[0]:
        check(name, tokens)
    assert not temperature or any(tokens[-1] == 0 for tokens in found[0])
    in_target, in_draft = matchers_of(engine_of(pair))
    assert in_draft.num_forbidden_draft_tokens == in_target.num_forbidden_draft_tokens == 0


@pytest.mark.parametrize("name", some(["by text", "by tokens"]))
@pytest.mark.parametrize("pair", some(PAIRS))
def test_reasoning_ends_in_the_middle_of_a_draft(pair: str, name: str) -> None:
    params = SamplingParams(temperature=1.0, grammar=REASONED[name])
    matcher_source().check(REASONED[name])  # time passes by steps there, and not while a grammar is compiled
    prompt = tuple(tokenizer().encode(PROMPT))
    cases = [Case(prompt, 60, params, seed, 4, (0,)) for seed in range(9)]
    plain = [Case(prompt, 60, params, seed, 0, (0,)) for seed in range(9)]
    service = engine_of(pair)._service
    wanted = [output.tokens for output in collect(service, plain)]
    found = collect(service, cases)
    assert [output.tokens for output in found] == wanted
    crossed = 0
    for output in found:
        ends = [AS_TEXT.end in tokenizer().decode(token) or token == END for token in output.tokens]
        place = ends.index(True) if True in ends[:-1] else 0
        crossed += spelled(output.notes)[place : place + 2].startswith("a") and spelled(output.notes)[place + 1] != "p"
    assert crossed > 0, "no draft went on after the end of the reasoning"


def test_a_budget_alone_ends_the_reasoning_and_bounds_nothing_else() -> None:
    grammar = short_reasoning(AS_TOKENS, True, BUDGET, tags())
    params = SamplingParams(temperature=1.0, grammar=grammar, ignore_eos=True)
    for count in (0, 4):
        result = engine_of("plain").generate(PROMPT, params, seed=4, max_tokens=24, num_speculative_tokens=count)
        assert result.token_ids[BUDGET] == END
        assert len(result.token_ids) == 24
