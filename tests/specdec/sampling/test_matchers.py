"""A mask depends on the log and the drafts before it, and on nothing else; whatever was asked before."""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from transformers import AutoTokenizer

import specdec.demo
from specdec.core.errors import InvalidParameterError
from specdec.core.grammar import MAX_GRAMMAR_BYTES, Grammar
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens, TokenSequence, common_prefix_length
from specdec.core.types import Tokens
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.structured import matchers as module
from specdec.structured.compiler import Grammars
from specdec.structured.matchers import Matchers
from tests.specdec.operators import Operators
from tests.specdec.sampling.reference import probs_of

TOKENIZER = AutoTokenizer.from_pretrained(Path(specdec.demo.__file__).parent / "target")
V = len(TOKENIZER)
EOS = (0, 2)
GRAMMARS = Grammars(TOKENIZER, V, EOS)
PERSON = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 5},
                "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
            },
            "required": ["name", "tags"],
            "additionalProperties": False,
        }
    ),
)
DIGITS = Grammar("regex", "[0-9]{1,4}")
NUMBERS = Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}}')
PROMPT = [40, 41, 42]


def spec_of(grammar: Grammar | None, seed: int = 1, **sampling: object) -> SequenceSpec:
    params = SamplingParams(grammar=grammar, **sampling)  # type: ignore[arg-type]
    return SequenceSpec(params, seed, len(PROMPT), 50, EOS)


def compiled(grammar: Grammar) -> LLMatcher:
    return GRAMMARS.compiled(grammar, EOS).result()


def allowed_ids(mask: torch.Tensor) -> list[list[int]]:
    """The tokens that each row of a bitmask allows."""
    bits = np.unpackbits(mask.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")[:, :V]
    return [row.nonzero()[0].tolist() for row in bits]


def fresh(grammar: Grammar, output: Sequence[int]) -> list[int]:
    """What a matcher that was never used before allows after an output."""
    matcher = compiled(grammar).deep_copy()
    assert matcher.try_consume_tokens(list(output)) == len(output)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:V]
    return bits.nonzero()[0].tolist()


def walk(grammar: Grammar, rng: random.Random, length: int, output: Sequence[int] = ()) -> list[int]:
    """An output that the grammar allows, of at most ``length`` tokens."""
    walked = list(output)
    while len(walked) < length:
        possible = [token for token in fresh(grammar, walked) if token not in EOS]
        if not possible:
            break
        walked.append(rng.choice(possible))
    return walked


def groups_of(rng: random.Random, output: list[int], spec: SequenceSpec) -> RowGroup:
    """A part of an output as a log, and a part of what follows as its draft."""
    start = rng.randrange(len(output))
    log, draft = output[:start], output[start : start + rng.randrange(5)]
    return RowGroup(spec, [*PROMPT, *log], tuple(draft))


def assert_masks_are_fresh(matchers: Matchers, groups: list[RowGroup]) -> None:
    masked, failures = matchers.masked(groups)
    assert not failures
    for group in masked:
        assert group.mask is not None
        grammar, output = group.spec.sampling.grammar, group.tokens[len(PROMPT) :]
        assert grammar is not None
        wanted = [fresh(grammar, [*output, *group.draft[:i]]) for i in range(1 + len(group.draft))]
        assert allowed_ids(group.mask) == wanted


def test_masks_follow_logs_that_grow_shrink_and_change() -> None:
    """Logs in any order, two of one sequence among them, against matchers that were made for each."""
    rng = random.Random(4)
    outputs = [walk(PERSON, rng, 24) for _ in range(4)]
    matchers, specs = Matchers(GRAMMARS), [spec_of(PERSON, seed) for seed in (1, 2)]
    for _ in range(60):
        assert_masks_are_fresh(matchers, [groups_of(rng, rng.choice(outputs), specs[i]) for i in (0, 0, 1)])
    assert matchers.num_mask_calls == 60


LISTS = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "array",
            "items": {"anyOf": [{"type": "object"}, {"const": "a constant of some length"}, {"type": "array"}]},
        }
    ),
)
SUFFIX = Grammar("grammar", 'start: (gen "x")*\ngen[stop="."]: /[a-z]*/')


@pytest.mark.parametrize("grammar", [LISTS, DIGITS, SUFFIX], ids=["lists", "digits", "cannot go back"])
def test_masks_after_refused_drafts_are_those_of_a_new_matcher(grammar: Grammar) -> None:
    """A log that only grows: by a part of its draft, then by something else, in places that look alike before it."""
    matchers = Matchers(GRAMMARS)
    for seed in range(6):
        rng, spec, log = random.Random(seed), spec_of(grammar, seed), list[int]()
        while len(log) < 24:
            draft = walk(grammar, rng, len(log) + rng.randrange(5), log)[len(log) :]
            assert_masks_are_fresh(matchers, [RowGroup(spec, [*PROMPT, *log], tuple(draft))])
            log += draft[: rng.randrange(len(draft) + 1)]
            longer = walk(grammar, rng, len(log) + 1, log)
            if longer == log:
                break
            log = longer
            matchers.forced(spec, [*PROMPT, *log], 8)


def test_a_step_costs_the_same_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied and nothing is compared from its beginning, though each draft is refused."""
    spec, compared, unit = spec_of(NUMBERS), list[int](), TOKENIZER.encode("1,")
    log, matchers = np.array([*PROMPT, *TOKENIZER.encode("["), *unit * 1500], np.int32), Matchers(GRAMMARS)

    def counted(read: TokenSequence, output: TokenSequence, start: int = 0) -> int:
        compared.append(min(len(read), len(output)) - start)
        return common_prefix_length(read, output, start)

    def step(length: int) -> list[str]:
        names = list[str]()

        def seen(frame: FrameType, event: str, argument: object) -> None:
            if event == "c_call":
                names.append(getattr(argument, "__name__", ""))

        tokens, draft = log[:length], (unit[0], unit[0])
        sys.setprofile(seen)
        try:
            allowed = matchers.allowed(spec, tokens, draft)
            matchers.forced(spec, tokens, 8)
            matchers.masked([RowGroup(spec, tokens, allowed)])
        finally:
            sys.setprofile(None)
        return names

    monkeypatch.setattr(module, "common_prefix_length", counted)
    step(len(log) - 40)
    compared.clear()
    names = [name for length in range(len(log) - 38, len(log), 2) for name in step(length)]
    assert "try_consume_tokens" in names
    assert "deep_copy" not in names
    assert max(compared) <= 256


def test_a_refused_draft_leaves_nothing_behind() -> None:
    """A draft opens an array and has a comma in it; in its place an empty one is closed, so that no number may follow.

    By its own ``rollback`` llguidance 1.7.6 to 1.9.1 allow one.
    """
    grammar = Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "object"}}))
    before, draft, instead = (TOKENIZER.encode(text) for text in ('[{"list', '": [4,', '": [],'))
    matchers, spec = Matchers(GRAMMARS), spec_of(grammar)
    for output, drafted in ((before, draft), (before + instead, [])):
        (group,), failures = matchers.masked([RowGroup(spec, [*PROMPT, *output], tuple(drafted))])
        assert not failures
        assert group.mask is not None
        assert allowed_ids(group.mask)[0] == fresh(grammar, output)


def test_that_a_matcher_goes_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is worth something: a matcher that only reads on fails it."""
    monkeypatch.setattr(module, "common_prefix_length", lambda read, output, *_: min(len(read), len(output)))
    with pytest.raises(AssertionError):
        test_masks_follow_logs_that_grow_shrink_and_change()


def test_drafts_are_cut_where_the_grammar_forbids() -> None:
    matchers = Matchers(GRAMMARS)
    one, two, letter = (TOKENIZER.encode(text)[0] for text in ("1", "2", "a"))
    spec, log = spec_of(DIGITS), [*PROMPT, one]

    def cut(draft: Tokens) -> Tokens:
        return matchers.allowed(spec, log, draft)

    assert cut((one, two, letter, one)) == (one, two)
    for draft in ((one, two, letter, one), (one, EOS[1], EOS[1], one)):
        (group,), failures = matchers.masked([RowGroup(spec, log, draft)])
        assert not failures
        assert one in allowed_ids(group.mask)[0]
        assert EOS[1] in allowed_ids(group.mask)[1]
    assert cut((letter,)) == ()
    assert cut((one, EOS[1], EOS[1])) == (one, EOS[1])
    assert cut((one, one, one, EOS[0])) == (one, one, one, EOS[0]), "it can only end there"
    assert cut((one, one, one, one)) == (one, one, one)
    log = [*PROMPT, one, one, one, one]
    assert cut((EOS[0],)) == (EOS[0],), "a matcher that has ended says no to every token"
    assert cut((one,)) == ()
    assert matchers.num_forbidden_draft_tokens == 4


def test_an_output_ends_only_where_it_matches() -> None:
    spec, (brace,) = spec_of(PERSON, temperature=0.0), TOKENIZER.encode("{")
    logits = torch.zeros(1, V)
    logits[0, 0] = 9.0
    assert Sampler(V, grammars=GRAMMARS).sample(logits, [RowGroup(spec, PROMPT)]).tolist() == [brace]
    whole = [*PROMPT, *TOKENIZER.encode('{"name":"","tags":[]}')]
    logits[0, brace] = 20.0
    assert Sampler(V, grammars=GRAMMARS).sample(logits, [RowGroup(spec, whole)]).tolist() == [0]


def test_after_an_end_that_does_not_count_only_ends_follow() -> None:
    """``ignore_eos`` and ``min_tokens`` go on behind a whole output: with what is no text."""
    whole = [*PROMPT, *TOKENIZER.encode("1234")]
    spec = spec_of(DIGITS, ignore_eos=True)
    matchers = Matchers(GRAMMARS)
    log = [*whole, EOS[1]]
    (group,), failures = matchers.masked([RowGroup(spec, log, (EOS[1],))])
    assert not failures
    assert group.mask is not None
    assert allowed_ids(group.mask) == [list(EOS)] * 2
    assert matchers.allowed(spec, log, (EOS[0], *TOKENIZER.encode("1"))) == (EOS[0],)
    sampler = Sampler(V, grammars=GRAMMARS)
    spec = spec_of(DIGITS, min_tokens=20, temperature=0.0)
    assert sampler.sample(torch.rand(1, V), [RowGroup(spec, whole)]).item() in EOS
    assert not sampler.take_failures()


def test_a_grammar_goes_before_all_else_that_is_forbidden() -> None:
    digits = [token for token in fresh(DIGITS, ()) if token not in EOS]
    sampler = Sampler(V, grammars=GRAMMARS)
    logits = torch.randn(1, V)
    best = max(digits, key=lambda token: float(logits[0, token]))
    spec = spec_of(DIGITS, temperature=0.0, allowed_token_ids=SharedTokens((70, 71)))
    assert sampler.sample(logits, [RowGroup(spec, PROMPT)]).tolist() == [best]
    spec = spec_of(
        DIGITS, temperature=0.0, logit_bias=((digits[3], 100.0),), allowed_token_ids=SharedTokens((70, digits[3]))
    )
    assert sampler.sample(logits, [RowGroup(spec, PROMPT)]).tolist() == [digits[3]]

    def nothing(groups: Sequence[RowGroup], logits: torch.Tensor) -> None:
        logits[:, digits] = -torch.inf

    sampler = Sampler(V, [nothing], grammars=GRAMMARS)
    assert sampler.sample(logits, [RowGroup(spec_of(DIGITS, temperature=0.0), PROMPT)]).tolist() == [best]


def test_rows_with_and_without_a_grammar_share_a_batch() -> None:
    rng, sampler = random.Random(5), Sampler(V, grammars=GRAMMARS)
    digits = walk(DIGITS, rng, 2)
    groups = [
        RowGroup(spec_of(None), PROMPT, (5, 6)),
        RowGroup(spec_of(DIGITS), PROMPT, tuple(digits)),
        RowGroup(spec_of(PERSON), PROMPT),
    ]
    logits = torch.randn(sum(1 + len(group.draft) for group in groups), V)
    probs = probs_of(sampler, logits, groups).split([3, len(digits) + 1, 1])
    torch.testing.assert_close(probs[0], logits[:3].softmax(1))
    for i in range(len(digits) + 1):
        wanted = torch.full((V,), -torch.inf)
        ids = fresh(DIGITS, digits[:i])
        wanted[ids] = logits[3 + i, ids]
        torch.testing.assert_close(probs[1][i], wanted.softmax(0))
    assert sampler.matchers is not None
    assert sampler.matchers.num_mask_calls == 1
    masked = sampler.masked(groups)
    probs_of(sampler, logits, masked)
    sampler.sample(logits, masked)
    assert sampler.matchers.num_mask_calls == 2, "masks are found once a step"


def operators(sampler: Sampler, groups: list[RowGroup]) -> list[str]:
    logits = torch.randn(sum(1 + len(group.draft) for group in groups), V)
    with Operators() as counted:
        sampler.sample(logits, groups)
    return counted.names


def test_what_nobody_asks_for_dispatches_nothing() -> None:
    groups = [RowGroup(spec_of(None, seed, top_k=5), PROMPT, (7,)) for seed in range(3)]
    without, able = Sampler(V), Sampler(V, grammars=GRAMMARS)
    assert operators(able, groups) == operators(without, groups)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_operators_do_not_grow_with_the_rows(num_drafts: int) -> None:
    """But for one view of the bitmask a sequence."""

    def count(num_groups: int) -> int:
        draft = tuple(walk(DIGITS, random.Random(1), num_drafts))
        groups = [RowGroup(spec_of(DIGITS, seed, temperature=0.0), PROMPT, draft) for seed in range(num_groups)]
        names = operators(Sampler(V, grammars=GRAMMARS), groups)
        return len([name for name in names if "slice" not in name])

    assert count(2) == count(16)


def test_no_python_runs_for_single_rows() -> None:
    """What is called to find masks depends on the sequences, and not on how many drafts they have."""

    def calls(num_drafts: int) -> int:
        rng, matchers = random.Random(1), Matchers(GRAMMARS)
        groups = [RowGroup(spec_of(PERSON, seed), PROMPT, tuple(walk(PERSON, rng, num_drafts))) for seed in range(6)]
        matchers.masked(groups)  # what is made once is made
        count = 0

        def seen(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(seen)
        try:
            matchers.masked(groups)
        finally:
            sys.setprofile(None)
        return count

    assert 0 < calls(8) == calls(1)


def test_a_matcher_goes_with_its_sequence() -> None:
    rng, matchers = random.Random(7), Matchers(GRAMMARS)
    output = walk(PERSON, rng, 12)
    specs = [spec_of(PERSON, seed) for seed in range(5)]
    assert_masks_are_fresh(matchers, [RowGroup(spec, [*PROMPT, *output]) for spec in specs])
    assert len(matchers._kept) == 5
    del specs[1:]
    gc.collect()
    assert len(matchers._kept) == 1


def test_a_log_that_does_not_match_is_an_error_of_its_own() -> None:
    sampler = Sampler(V, grammars=GRAMMARS)
    groups = [RowGroup(spec_of(DIGITS, 1), [*PROMPT, 93]), RowGroup(spec_of(DIGITS, 2), PROMPT)]
    masked = sampler.masked(groups)
    failures = sampler.take_failures()
    assert [id(group) in failures for group in masked] == [True, False]
    assert "does not allow the token 93" in str(failures[id(masked[0])])
    sampler = Sampler(V)
    masked = sampler.masked(groups[1:])
    assert "does not take grammars" in str(sampler.take_failures()[id(masked[0])])


def matches(grammar: Grammar, text: str) -> bool:
    matcher = compiled(grammar).deep_copy()
    tokens = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


TAG = Grammar(
    "structural_tag",
    json.dumps(
        {
            "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
            "triggers": ["<f="],
        }
    ),
)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_object"), ('{"a": [1, {"b": null}]}', "{}"), ("[]", '{"a":  1}', '{"a"')),
        (Grammar("json_schema", '{"type": "integer"}'), ("12", "-3"), ("1.5", '"1"', "")),
        (Grammar("regex", "a+b"), ("aab",), ("b", "aa")),
        (Grammar("choice", '["yes", "no, \\"sir\\"", "\\u00e9"]'), ("yes", 'no, "sir"', "é"), ("y", "maybe")),
        (Grammar("grammar", 'start: "a" B\nB: /[0-9]+/'), ("a12",), ("a",)),
        (Grammar("grammar", 'root ::= "a" [0-9]+ ("b" | "c")'), ("a1b", "a12c"), ("a1", "ab")),
        (TAG, ("free text", "see <f=a>12</f> and <f=a>3</f>"), ("<f=b>12</f>", "<f=a>x</f>", "<f=a>1")),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_kinds(grammar: Grammar, good: tuple[str, ...], bad: tuple[str, ...]) -> None:
    assert [text for text in good if not matches(grammar, text)] == []
    assert [text for text in bad if matches(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", '{"type": "objec"}'), "Invalid type: objec"),
        (Grammar("json_schema", "{"), "EOF"),
        (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar("json_schema", '{"type": "string", "pattern": "("}'), "unclosed group"),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("choice", "[]"), "none of them empty"),
        (Grammar("choice", '["a", ""]'), "none of them empty"),
        (Grammar("grammar", "start: foo"), 'unknown name: "foo"'),
        (Grammar("grammar", "root ::= ["), "GBNF"),
        (Grammar("structural_tag", "{}"), "'structures' with 'begin'"),
        (Grammar("structural_tag", '{"triggers": ["<"], "structures": [{"begin": "a", "end": "b"}]}'), "triggers"),
        (Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), f"at most {MAX_GRAMMAR_BYTES}"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidParameterError, match=r"^the grammar cannot be used: ") as caught:
            GRAMMARS.check(grammar)
        assert reason in str(caught.value)
        assert len(str(caught.value)) < 600
        assert caught.value.parameter == "grammar"


def test_what_takes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.structured.compiler._LIMITS", LLParserLimits(max_grammar_size=20))
    with pytest.raises(InvalidParameterError, match="grammar size"):
        Grammars(TOKENIZER, V, EOS).check(PERSON)


def test_without_an_ending_token_nothing_could_end() -> None:
    with pytest.raises(InvalidParameterError, match="no end-of-sequence token"):
        Grammars(TOKENIZER, V).check(DIGITS)


def test_the_grammars_of_live_sequences_are_kept_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.structured.compiler._MOST_KEPT", 2)
    grammars, compiled = Grammars(TOKENIZER, V, EOS), []
    work = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda *key: compiled.append(key) or work(*key))
    matchers = Matchers(grammars)
    specs = [spec_of(Grammar("regex", f"a{i}"), i) for i in range(5)]
    for _ in range(3):
        for spec in specs:
            matchers.is_ready(spec)
        assert not matchers.masked([RowGroup(spec, PROMPT) for spec in specs])[1]
    assert len(compiled) == 5
    grammars.check(Grammar("regex", "a0"))
    assert len(compiled) == 5, "it is held, though three were used since"
    del spec, specs
    gc.collect()
    assert len(matchers._compiled) == 0


def test_each_grammar_is_compiled_once_and_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.structured.compiler._MOST_KEPT", 128)
    grammars, compiled = Grammars(TOKENIZER, V, EOS), []
    work = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda *key: compiled.append(key) or work(*key))
    for i in (*range(140), 139, 12, 0):
        grammars.check(Grammar("regex", f"a{i}"))
    assert len(compiled) == 141, "the first was dropped, the others were there"
