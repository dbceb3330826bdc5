"""Outputs match their grammars, and are what plain decoding gives: whatever is drafted, verified and lost."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import specdec.demo
from cluster.models.demos import demo_folder
from specdec import BackendOptions, GenerationResult, Grammar, ModelSource, SamplingParams, SpeculativeEngine
from specdec.core.errors import InvalidParameterError
from specdec.engine.pair import PairedTarget
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, load_model
from specdec.sampling.pipeline import Sampler
from specdec.structured.compiler import Grammars
from specdec.structured.matchers import Matchers
from tests.sizes import some
from tests.specdec.engine.schemas import grammar_of, is_valid
from tests.specdec.operators import Operators

DEMO = Path(specdec.demo.__file__).parent
OPTIONS = BackendOptions(max_model_len=512, max_num_seqs=20)
PROMPTS = ("def parse(text):\n    return ", "A record in JSON: ")
TEMPERATURES, PAIRS = (0.0, 1.0), ("plain", "hybrid")
MAX_TOKENS = 96


@lru_cache(maxsize=4)
def engine_of(pair: str) -> SpeculativeEngine:
    target = "hybrid" if pair == "hybrid" else "target"
    return SpeculativeEngine.from_pretrained(
        ModelSource(str(demo_folder(target))), ModelSource(str(DEMO / "draft")), options=OPTIONS
    )


@cache
def undrafted() -> SpeculativeEngine:
    return SpeculativeEngine.from_pretrained(ModelSource(str(DEMO / "target")), options=OPTIONS)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO / "target")


@cache
def matcher_source() -> Grammars:
    return Grammars(tokenizer(), len(tokenizer()), (tokenizer().eos_token_id,))


def make_sampler() -> Sampler:
    """With matchers of its own."""
    return Sampler(len(tokenizer()), grammars=matcher_source())


@cache
def model_of(name: str) -> LoadedModel:
    return load_model(ModelSource(str(demo_folder(name))))


def runner_of(name: str) -> ModelRunner:
    """A model of the pair with empty caches."""
    return ModelRunner(model_of(name), num_blocks=300, block_size=4, num_state_slots=16)


def backends_of(engine: SpeculativeEngine) -> tuple[Any, Any]:
    """Of the target, and of the draft."""
    paired = engine._service.target._backend
    assert isinstance(paired, PairedTarget)
    return paired._target, paired._drafter


def matchers_of(engine: SpeculativeEngine) -> tuple[Matchers, Matchers]:
    """Those of the target, and of the draft."""
    in_target, in_draft = (backend._sampler.matchers for backend in backends_of(engine))
    assert in_target
    assert in_draft
    return in_target, in_draft


def sampling(temperature: float, schema: dict[str, Any]) -> SamplingParams:
    return SamplingParams(temperature=temperature, grammar=grammar_of(schema))


def check(schema: dict[str, Any], result: GenerationResult) -> None:
    """What ended parses and is valid; what was cut off is a beginning that the grammar accepts."""
    assert result.finish_reason in ("stop", "length"), result.error
    if result.finish_reason == "stop":
        assert is_valid(schema, result.text), result.text
        return
    matcher = matcher_source().compiled(grammar_of(schema), (0,)).result().deep_copy()
    assert matcher.try_consume_tokens(list(result.token_ids)) == len(result.token_ids)


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


BOOKING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "number_of_passengers": {"type": "integer", "minimum": 1, "maximum": 9},
        "departure_airport_code": {"enum": ["FRA", "OSL"]},
        "needs_wheelchair_assistance": {"type": "boolean"},
    },
    "required": ["number_of_passengers", "departure_airport_code", "needs_wheelchair_assistance"],
    "additionalProperties": False,
}
"""Most of what it describes is forced."""


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
def test_what_a_grammar_forces_is_drafted_without_a_draft_model(temperature: float) -> None:
    """Every token has its forward pass, and is the one it would have been: there are fewer steps."""
    engine = undrafted()
    params = sampling(temperature, PERSON)
    plain, bounded, forced = (
        engine.generate_batch(PROMPTS, params, seed=3, max_tokens=MAX_TOKENS, num_speculative_tokens=count)
        for count in (0, 1, None)
    )
    for one, two, three in zip(plain, bounded, forced, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids
        check(PERSON, three)
        assert one.stats.num_draft_tokens == 0
        assert two.stats.num_draft_tokens == two.stats.num_drafts > 0
        assert three.stats.num_rounds < 0.8 * len(three.token_ids)
    short = engine.generate(PROMPTS[0], params, seed=3, max_tokens=3)
    assert len(short.token_ids) == 3
    assert short.stats.num_draft_tokens <= 2


class Counted(NamedTuple):
    """What two prompts' outputs took."""

    tokens: list[Any]
    num_rounds: int
    num_draft_tokens: int
    num_draft_forwards: int


@pytest.mark.parametrize(
    ("pair", "temperature"),
    some([("plain", 0.0), ("hybrid", 0.0), ("hybrid", 1.0), ("plain", 1.0)]),
)
def test_what_a_grammar_forces_goes_first_in_every_draft(
    pair: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens in fewer steps of the draft model, and of the target where the draft model knows no grammar."""
    engine = engine_of(pair)
    params = sampling(temperature, BOOKING)
    in_target, in_draft = (backend._sampler for backend in backends_of(engine))
    forwards: list[int] = []
    runner = backends_of(engine)[1]._runner
    work = runner.forward
    monkeypatch.setattr(runner, "forward", lambda rows: forwards.append(len(rows)) or work(rows))

    def run(count: int) -> Counted:
        del forwards[:]
        results = engine.generate_batch(PROMPTS, params, seed=3, max_tokens=MAX_TOKENS, num_speculative_tokens=count)
        for one in results:
            check(BOOKING, one)
        figures = [(one.stats.num_rounds, one.stats.num_draft_tokens) for one in results]
        return Counted([one.token_ids for one in results], *map(sum, zip(*figures, strict=True)), len(forwards))

    plain, *in_both = (run(count) for count in (0, 2, 6))
    assert plain.num_draft_tokens == plain.num_draft_forwards == 0
    monkeypatch.setattr(in_draft, "forced", lambda *_: ())
    drawn = [run(count) for count in (2, 6)]
    monkeypatch.setattr(in_draft, "masked", list)
    unmasked = [run(count) for count in (2, 6)]
    monkeypatch.setattr(in_target, "forced", lambda *_: ())
    nowhere = [run(count) for count in (2, 6)]
    for both, own, target, none in zip(in_both, drawn, unmasked, nowhere, strict=True):
        assert both.tokens == own.tokens == target.tokens == none.tokens == plain.tokens
        assert both.num_rounds <= target.num_rounds < none.num_rounds < plain.num_rounds
        assert 3 * both.num_draft_forwards < own.num_draft_forwards


def test_with_all_else_at_once_no_token_changes() -> None:
    """Penalties, bias, truncation, log probabilities, prompts in chunks that begin alike, too few blocks for all."""
    params = SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=400,
        frequency_penalty=0.4,
        repetition_penalty=1.1,
        logit_bias=((93, -3.0), (95, 1.0)),
        min_tokens=12,
        logprobs=2,
        grammar=grammar_of(PERSON),
    )
    prompts = ["x = 1\n" * 30 + f"record_{i} = " for i in range(5)]
    options = replace(OPTIONS, max_model_len=256, max_num_batched_tokens=24, kv_cache_memory=18 * 393_216)
    target, draft = (ModelSource(str(demo_folder(name))) for name in ("target", "draft"))
    short = SpeculativeEngine.from_pretrained(target, draft, options=options, num_speculative_tokens=4)
    wanted = engine_of("plain").generate_batch(prompts, params, seed=9, max_tokens=60, num_speculative_tokens=0)
    results = short.generate_batch(prompts, params, seed=9, max_tokens=60)
    gauges = short._service.target._backend.metrics()
    assert gauges["num_evictions"] > 0
    assert gauges["num_reused_tokens"] > 0
    for one, plain in zip(results, wanted, strict=True):
        assert one.token_ids == plain.token_ids
        assert [entry.rank for entry in one.logprobs or ()] == [entry.rank for entry in plain.logprobs or ()]
        assert len(one.logprobs or ()) == len(one.token_ids)
        check(PERSON, one)
    assert sum(one.stats.num_accepted_tokens for one in results) > 20


def test_one_mask_call_a_step_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("plain")
    backends = backends_of(engine)
    forwards = Counter[str]()
    for name, backend in zip(("target", "draft"), backends, strict=True):

        def forward(rows: Any, name: str = name, work: Any = backend._runner.forward, **more: Any) -> Any:
            forwards[name] += any(row.num_logits for row in rows)
            return work(rows, **more)

        monkeypatch.setattr(backend._runner, "forward", forward)
    before = [one.num_mask_calls for one in matchers_of(engine)]
    engine.generate_batch(PROMPTS * 3, sampling(1.0, PERSON), seed=2, max_tokens=MAX_TOKENS, num_speculative_tokens=4)
    after = [one.num_mask_calls for one in matchers_of(engine)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [forwards["target"], forwards["draft"]]
    before = [one.num_mask_calls for one in matchers_of(engine)]
    engine.generate(PROMPTS[0], SamplingParams(temperature=0.0), max_tokens=8)
    assert [one.num_mask_calls for one in matchers_of(engine)] == before


VIEWS = {f"aten.{name}" for name in ("slice.Tensor", "view.dtype", "view.default", "detach.default")}
"""Those of uploads are kept as long as shapes stay, and blocks that are copied depend on what the cache holds."""


def test_steps_without_a_grammar_are_as_if_there_were_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operators in the same order, in both models, for a batch that comes after one with a grammar."""
    engine = engine_of("plain")
    engine.generate(PROMPTS[0], sampling(1.0, PERSON), seed=1, max_tokens=12)

    def operators() -> list[str]:
        with Operators() as counted:
            engine.generate_batch(PROMPTS, SamplingParams(temperature=1.0, top_p=0.9), seed=1, max_tokens=12)
        return [name for name in counted.names if name not in VIEWS]

    operators()  # what is kept from step to step is there
    able = operators()
    for backend in backends_of(engine):
        monkeypatch.setattr(backend._sampler, "matchers", None)
    assert able == operators()
    assert len(able) > 100


def test_what_cannot_be_compiled_is_refused_before_anything_is_begun() -> None:
    with pytest.raises(InvalidParameterError, match="unclosed group"):
        engine_of("plain").generate("a", SamplingParams(grammar=Grammar("regex", "(")), max_tokens=2)


def test_a_worker_refuses_what_it_cannot_compile_by_an_error_of_that_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ingress has checked it; a worker of another version may still see it otherwise."""
    engine = engine_of("plain")
    monkeypatch.setattr(Grammars, "check", lambda *_: None)
    (result,) = engine.generate_batch(["a"], SamplingParams(grammar=Grammar("regex", "(")), max_tokens=2)
    assert result.finish_reason == "error"
    assert "unclosed group" in result.error


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_object"),
        Grammar(
            "structural_tag",
            json.dumps({"triggers": ["e"], "structures": [{"begin": "e[", "schema": {"enum": [1, 2]}, "end": "]"}]}),
        ),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_texts_without_a_bound_are_followed_too(grammar: Grammar) -> None:
    """Whatever is drafted; both models' masks are those of the whole text before it."""
    params, engine, texts = SamplingParams(temperature=1.0, grammar=grammar), engine_of("plain"), list[str]()
    for seed in range(4):
        plain, drafted = (
            engine.generate("It is ", params, seed=seed, max_tokens=40, num_speculative_tokens=count)
            for count in (0, 4)
        )
        assert plain.token_ids == drafted.token_ids
        matcher = matcher_source().compiled(grammar, (0,)).result().deep_copy()
        tokens = [token for token in plain.token_ids if token]
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        texts.append(plain.text)
    if grammar.kind == "structural_tag":
        assert all(re.fullmatch(r"([^e]|e\[[12]\])*(e(\[[12]?)?)?", text) for text in texts)
        assert any("e[" in text for text in texts)


def test_every_kind_of_grammar_is_followed() -> None:
    params, engine = SamplingParams(temperature=1.0), engine_of("plain")

    def text(grammar: Grammar) -> str:
        return engine.generate("It is ", replace(params, grammar=grammar), seed=3, max_tokens=40).text

    assert text(Grammar("choice", '["yes", "no"]')) in ("yes", "no")
    assert text(Grammar("regex", "[a-c]{3}-[0-9]{2}"))[3] == "-"
    assert isinstance(json.loads(text(Grammar("json_schema", '{"type": "array", "maxItems": 2}'))), list)
    assert text(Grammar("grammar", 'start: "<" ("a" | "b") ">"')) in ("<a>", "<b>")
