"""Tokens that a grammar forces, and the matchers that find them: each for its own sequence."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from specdec.core.grammar import Grammar
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.structured import matchers as module
from specdec.structured.matchers import Matchers
from tests.specdec.sampling.test_matchers import (
    DIGITS,
    EOS,
    GRAMMARS,
    PERSON,
    PROMPT,
    TOKENIZER,
    V,
    allowed_ids,
    spec_of,
    walk,
)


@pytest.mark.parametrize("grammar", [PERSON, DIGITS, Grammar("regex", "[ab]the same for all[0-9]")])
def test_tokens_are_forced_where_masks_allow_no_other(grammar: Grammar) -> None:
    """After every beginning, as far as that goes; of several ending tokens none is."""
    rng, lengths = random.Random(2), list[int]()
    for seed in range(6):
        output = walk(grammar, rng, 24)
        for eos in (EOS, EOS[:1]):
            spec, matchers = replace(spec_of(grammar, seed), eos_token_ids=eos), Matchers(GRAMMARS)
            sampler = Sampler(V, grammars=GRAMMARS)
            for count in (*range(len(output) + 1), 0):
                log, only = [*PROMPT, *output[:count]], list[int]()
                while len(only) < 8 and only[-1:] != [eos[0]]:
                    (group,), _ = matchers.masked([RowGroup(spec, [*log, *only])])
                    assert group.mask is not None
                    (allowed,) = allowed_ids(group.mask)
                    if len(allowed) > 1:
                        break
                    only += allowed
                for most in (8, 2, 0):
                    assert sampler.forced(spec, log, most) == tuple(only[:most])
                lengths.append(len(only))
    assert min(lengths) == 0 < max(lengths)


def test_sequences_alike_in_everything_do_not_take_each_others_matchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams of one seed in a library's process; every benchmark with one seed and one schema."""
    texts = [TOKENIZER.encode(f'{{"name": "{name}"') for name in ("abc", "xyz")]
    specs = [spec_of(PERSON) for _ in range(2)]
    matchers, read = Matchers(GRAMMARS), []
    consume = module._Matcher._consume

    def counted(matcher: module._Matcher, new: list[int]) -> None:
        read.append(len(new))
        consume(matcher, new)

    monkeypatch.setattr(module._Matcher, "_consume", counted)
    for length in range(min(map(len, texts)) + 1):
        for spec, text in zip(specs, texts, strict=True):
            matchers.forced(spec, [*PROMPT, *text[:length]], 8)
    assert sum(read) == 2 * min(map(len, texts)), "each token is read once"


def test_a_long_constant_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    constant = Grammar("json_schema", json.dumps({"const": "abcdefgh " * 400}))
    spec, found = spec_of(constant), []
    find = module._Matcher._found
    monkeypatch.setattr(module._Matcher, "_found", lambda *args: found.append(1) or find(*args))
    matchers, text = Matchers(GRAMMARS), list[int]()
    for _ in range(60):
        forced = matchers.forced(spec, [*PROMPT, *text], 4)
        assert len(forced) == 4
        text += forced
    assert len(found) == 1
    other = [*text[:20], *TOKENIZER.encode("z")]
    assert matchers.forced(spec, [*PROMPT, *other], 4) == (), "what is not allowed is forgotten"
    assert matchers.forced(spec, [*PROMPT, *text[:20]], 4) == tuple(text[20:24])
