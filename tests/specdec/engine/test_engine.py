"""The public engine on the demo pair: text, streams, stops, cancellation, counts."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec
import specdec.demo
from specdec import BackendOptions, CancellationToken, ModelSource, SamplingParams, SpeculativeEngine, TokenEvent
from specdec.core.errors import CancelledError, IncompatiblePairError, InvalidParameterError, SequenceFailedError
from specdec.core.params import SequenceSpec
from specdec.engine import engine as engine_module
from specdec.models.loading import load_tokenizer
from tests.specdec.hooks import by_row

DEMO = Path(specdec.demo.__file__).parent
GREEDY = SamplingParams(temperature=0.0)
PROMPT = "def read(path):\n"
PROMPT_IDS = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def engine() -> SpeculativeEngine:
    target, draft = (ModelSource(str(DEMO / role), dtype="float32") for role in ("target", "draft"))
    return SpeculativeEngine.from_pretrained(target, draft, num_speculative_tokens=3)


def test_exported_names_exist() -> None:
    assert all(getattr(specdec, name).__name__ == name for name in specdec.__all__)


def test_while_all_sequences_wait_for_another_thread_it_does_not_spin(
    engine: SpeculativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(sleep=waits.append, perf_counter=time.perf_counter))
    target: Any = engine._service.target._backend._target  # type: ignore[attr-defined]
    monkeypatch.setattr(target._sampler, "is_ready", lambda _spec: len(waits) >= 3)
    params = replace(GREEDY, prompt_logprobs=0)  # of parameters that can make a sequence wait
    assert len(engine.generate(PROMPT, params, max_tokens=5).token_ids) == 5
    assert waits == [0.005] * 3


def test_counts_add_up(engine: SpeculativeEngine) -> None:
    engine.reset_stats()
    result = engine.generate(PROMPT, GREEDY, max_tokens=40)
    stats = result.stats
    assert stats == engine.stats
    assert stats.num_tokens == len(result.token_ids) == 40
    assert stats.num_tokens == stats.num_accepted_tokens + stats.num_rounds
    assert 0.2 < stats.acceptance_rate < 1
    assert stats.mean_acceptance_length == pytest.approx(1 + stats.num_accepted_tokens / stats.num_drafts)
    engine.generate(PROMPT, GREEDY, max_tokens=5)
    assert engine.stats.num_tokens == 45
    engine.reset_stats()
    assert engine.stats.num_tokens == 0


def test_a_stream_is_the_result_in_pieces(engine: SpeculativeEngine) -> None:
    whole = engine.generate(PROMPT, seed=4, max_tokens=30)
    events = list(engine.stream(PROMPT, seed=4, max_tokens=30))
    assert "".join(event.text for event in events) == whole.text
    assert tuple(token for event in events for token in event.token_ids) == whole.token_ids
    assert events[-1].finish_reason == whole.finish_reason


def test_a_batch_gives_each_what_it_gets_alone(engine: SpeculativeEngine) -> None:
    prompts = [PROMPT, "class A:\n", "import sys\n"]
    together = engine.generate_batch(prompts, GREEDY, max_tokens=20)
    assert [r.text for r in together] == [engine.generate(p, GREEDY, max_tokens=20).text for p in prompts]


def test_a_stop_string_is_not_part_of_the_text(engine: SpeculativeEngine) -> None:
    whole = engine.generate(PROMPT, GREEDY, max_tokens=40)
    stop = whole.text[15:20]
    cut = engine.generate(PROMPT, GREEDY, max_tokens=40, stop=[stop])
    assert (cut.text, cut.finish_reason) == (whole.text.split(stop)[0], "stop")


def test_cancelling_leaves_nothing(engine: SpeculativeEngine) -> None:
    cancellation = CancellationToken()
    seen: list[TokenEvent] = []

    def cancel_at_the_third(event: TokenEvent) -> None:
        seen.append(event)
        if len(seen) == 3:
            cancellation.cancel()

    with pytest.raises(CancelledError):
        engine.generate(PROMPT, on_token=cancel_at_the_third, cancellation=cancellation)
    assert len(seen) == 3
    stream = engine.stream(PROMPT)
    next(stream)
    stream.close()
    gauges = engine._service.target.metrics()
    assert gauges["num_sequences"] == 0
    assert len(engine._service.ingress) == len(engine._service.router._sessions) == 0


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
)
def test_bad_parameters_are_named(engine: SpeculativeEngine, options: dict, parameter: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        engine.generate(PROMPT, **options)
    assert caught.value.parameter == parameter


def test_a_pair_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    for file in (DEMO / "draft").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = load_tokenizer(ModelSource(str(tmp_path)))
    tokenizer.add_tokens(["retorn"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(IncompatiblePairError, match="retorn"):
        SpeculativeEngine.from_pretrained(
            ModelSource(str(DEMO / "target"), dtype="float32"), ModelSource(str(tmp_path), dtype="float32")
        )


def test_several_streams_of_one_engine_lose_nothing(engine: SpeculativeEngine) -> None:
    prompts = [PROMPT, "class A:\n"]
    alone = [engine.generate(prompt, GREEDY, max_tokens=20).text for prompt in prompts]
    first, second = (engine.stream(prompt, GREEDY, max_tokens=20) for prompt in prompts)
    pieces = [next(first).text, next(second).text]
    assert pieces[0] + "".join(event.text for event in first) == alone[0]
    assert pieces[1] + "".join(event.text for event in second) == alone[1]


def test_a_stream_that_is_never_read_begins_nothing(engine: SpeculativeEngine) -> None:
    engine.stream(PROMPT)
    assert len(engine._service.ingress) == 0


def test_a_generation_within_another(engine: SpeculativeEngine) -> None:
    inner: list[str] = []

    def ask_again(event: TokenEvent) -> None:
        if not inner:
            inner.append(engine.generate("class A:\n", GREEDY, max_tokens=12).text)

    outer = engine.generate(PROMPT, GREEDY, max_tokens=20, on_token=ask_again)
    assert outer.text == engine.generate(PROMPT, GREEDY, max_tokens=20).text
    assert inner == [engine.generate("class A:\n", GREEDY, max_tokens=12).text]


def test_a_logits_processor_is_applied_to_every_position() -> None:
    """A hook that forbids the newline, whatever the draft proposes."""
    target, draft = (ModelSource(str(DEMO / role), dtype="float32") for role in ("target", "draft"))
    newline = 201

    def no_newline(groups: object, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[:, newline] = float("-inf")
        return logits

    outputs = set()
    for k in (0, 4):
        options = BackendOptions(logits_processors=(no_newline,))
        engine = SpeculativeEngine.from_pretrained(target, draft, num_speculative_tokens=k, options=options)
        outputs.add(engine.generate(PROMPT, GREEDY, max_tokens=30).token_ids)
    assert len(outputs) == 1
    assert newline not in outputs.pop()


def test_a_sequence_that_fails_is_named_and_the_others_are_returned(engine: SpeculativeEngine) -> None:
    sampler = engine._service.target._backend._target._sampler

    @by_row
    def raising(spec: SequenceSpec, tokens: list[int], logits: torch.Tensor) -> None:
        if spec.output_start == len(tokens) - 2 and tokens[0] == PROMPT_IDS[0]:
            raise ValueError("no such state")

    sampler._processors = (raising,)
    try:
        with pytest.raises(SequenceFailedError, match="ValueError: no such state"):
            engine.generate(PROMPT_IDS, GREEDY, max_tokens=8)
        events = engine.stream(PROMPT_IDS, GREEDY, max_tokens=8)
        with pytest.raises(SequenceFailedError):
            list(events)
        failed, whole = engine.generate_batch([PROMPT_IDS, PROMPT_IDS[1:]], GREEDY, max_tokens=8)
    finally:
        sampler._processors = ()
    assert (failed.finish_reason, failed.error) == ("error", "ValueError: no such state")
    assert len(failed.token_ids) < 8
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 8)
    assert whole.token_ids == engine.generate(PROMPT_IDS[1:], GREEDY, max_tokens=8).token_ids


def test_recorded_steps_give_the_tokens_of_others() -> None:
    """On a CPU they are padded as they would be recorded."""
    texts = []
    pair = [ModelSource(str(DEMO / role), dtype="float32") for role in ("target", "draft")]
    for executor in "graphs", "eager":
        options = BackendOptions(kv_cache_memory=16 << 20, max_model_len=256, executor=executor, max_draft_tokens=4)
        engine = SpeculativeEngine.from_pretrained(*pair, options=options)
        assert (engine._service.target._backend._target._runner._graphs is None) == (executor == "eager")
        results = engine.generate_batch([PROMPT, PROMPT_IDS], seed=3, max_tokens=40)
        texts.append([result.token_ids for result in results])
    assert texts[0] == texts[1]
