from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.text.detokenizer import OutputText, TextDelta

TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"


def spec(**sampling: object) -> SequenceSpec:
    return SequenceSpec(SamplingParams(**sampling), seed=0, output_start=1, max_tokens=100, eos_token_ids=(0,))


def run(
    tokenizer: PreTrainedTokenizerFast, ids: list[int], size: int, stops: list[str], finish: str, spec: SequenceSpec
) -> tuple[str, int, TextDelta]:
    """All text, all billed tokens, and the last delta, for runs of ``size`` tokens."""
    output = OutputText(tokenizer, [0], spec, stops)
    without_offsets = OutputText(tokenizer, [0], spec, stops, tells_offsets=False)
    text, num_billed = "", 0
    for start in range(0, len(ids), size):
        last = start + size >= len(ids)
        delta = output.push(ids[start : start + size], finish if last else None)
        other = without_offsets.push(ids[start : start + size], finish if last else None)
        assert other == (delta if stops else replace(delta, offsets=(), num_shown=0))
        text, num_billed = text + delta.text, num_billed + delta.num_billed
        if delta.finish is not None:
            return text, num_billed, delta
    raise AssertionError("no end")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 1000])
def test_edge_02_a_stop_string_ends_at_the_token_that_completes_it(
    demo_tokenizer: PreTrainedTokenizerFast, size: int
) -> None:
    ids = demo_tokenizer.encode(TEXT)
    text, num_billed, delta = run(demo_tokenizer, ids, size, ["xyz", "\n\ndef"], "length", spec())
    assert text == TEXT[: TEXT.index("\n\ndef")]
    assert (delta.finish, delta.stop_reason) == ("stop", "\n\ndef")
    assert "\n\ndef" in demo_tokenizer.decode(ids[:num_billed])
    assert "\n\ndef" not in demo_tokenizer.decode(ids[: num_billed - 1])


def test_edge_01_a_stop_completed_by_the_last_allowed_token_is_a_stop(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = demo_tokenizer.encode("a + b")
    _, num_billed, delta = run(demo_tokenizer, ids, 8, ["b"], "length", spec())
    assert (num_billed, delta.finish) == (len(ids), "stop")


@pytest.mark.parametrize("size", [1, 4, 100])
def test_edge_04_min_tokens_counts_tokens_for_stop_strings_too(
    demo_tokenizer: PreTrainedTokenizerFast, size: int
) -> None:
    ids = demo_tokenizer.encode("x\nx\nx\nx\n")
    assert len(ids) == 8
    text, num_billed, _ = run(demo_tokenizer, ids, size, ["\n"], "length", spec(min_tokens=5))
    assert (text, num_billed) == ("x\nx\nx", 6)


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(("min_tokens", "num_text", "num_billed"), [(2, 0, 2), (3, 2, 4), (4, 2, 4), (5, 4, 6)])
def test_edge_04_a_stop_string_that_begins_before_min_tokens_counts_if_it_ends_after(
    demo_tokenizer: PreTrainedTokenizerFast, size: int, min_tokens: int, num_text: int, num_billed: int
) -> None:
    ids = demo_tokenizer.encode("x\nx\nx\nx\n")
    text, billed, delta = run(demo_tokenizer, ids, size, ["x\n"], "length", spec(min_tokens=min_tokens))
    assert (text, billed, delta.finish) == ("x\n" * (num_text // 2), num_billed, "stop")


def test_the_token_that_ends_a_sequence_is_billed_and_gives_no_text(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = demo_tokenizer.encode("ok\n")
    for end in (spec(), spec(stop_token_ids=(ids[-1],))):
        given = [*ids, 0] if not end.sampling.stop_token_ids else ids
        text, num_billed, delta = run(demo_tokenizer, given, 2, [], "stop", end)
        assert num_billed == len(given)
        assert delta.finish == "stop"
        assert text == ("ok" if end.sampling.stop_token_ids else "ok\n")
        assert delta.stop_reason == (ids[-1] if end.sampling.stop_token_ids else None)


def test_held_back_text_is_given_at_the_end(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = demo_tokenizer.encode("ok EN")
    assert run(demo_tokenizer, ids, 1, ["END"], "length", spec())[0] == "ok EN"
    assert run(demo_tokenizer, demo_tokenizer.encode("🙂")[:2], 1, [], "length", spec())[0] == "\ufffd"


def test_offsets_are_where_each_token_begins(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = demo_tokenizer.encode("a 🙂b")
    delta = OutputText(demo_tokenizer, [0], spec()).push(ids)
    assert delta.text == "a 🙂b"
    assert delta.offsets[0] == 0
    assert delta.offsets[-1] == 3
    assert sorted(delta.offsets) == list(delta.offsets)


def test_an_end_may_come_without_tokens(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    output = OutputText(demo_tokenizer, [0], spec(), ["b!"])
    assert output.push(demo_tokenizer.encode("b")).text == ""
    assert output.push((), "length") == TextDelta("b", 0, (), "length", num_shown=1)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_stop_string_is_part_of_the_text_where_that_is_asked_for(
    demo_tokenizer: PreTrainedTokenizerFast, size: int
) -> None:
    ids = demo_tokenizer.encode(TEXT)
    output = OutputText(demo_tokenizer, [0], spec(), ["\n\ndef"], includes_stop=True)
    deltas = []
    for start in range(0, len(ids), size):
        deltas.append(output.push(ids[start : start + size]))
        if deltas[-1].finish:
            break
    text = "".join(delta.text for delta in deltas)
    assert text == TEXT[: TEXT.index("\n\ndef") + len("\n\ndef")]
    assert sum(delta.num_shown for delta in deltas) == sum(delta.num_billed for delta in deltas)


def test_so_is_the_token_that_ends_it(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = demo_tokenizer.encode("ok\n")
    for tells_offsets in (False, True):
        options = {"tells_offsets": tells_offsets, "includes_stop": True}
        output = OutputText(demo_tokenizer, [0], spec(stop_token_ids=(ids[-1],)), **options)
        assert output.push(ids, "stop").text == "ok\n"
        assert OutputText(demo_tokenizer, [0], spec(), **options).push([*ids, 0], "stop").text == "ok\n"
        output = OutputText(demo_tokenizer, [0], spec(), skip_special_tokens=False, **options)
        assert output.push([*ids, 0], "stop").text == "ok\n<|endoftext|>"


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_tokens_that_complete_a_stop_string_are_not_shown(demo_tokenizer: PreTrainedTokenizerFast, size: int) -> None:
    """Nor are those that might, while nothing else has come; the first token is shown as soon as its text is."""
    ids = demo_tokenizer.encode(TEXT)
    cut = TEXT.index("\n\ndef")
    output, num_shown, text = OutputText(demo_tokenizer, [0], spec(), ["\n\ndef"]), 0, ""
    for start in range(0, len(ids), size):
        delta = output.push(ids[start : start + size])
        num_shown, text = num_shown + delta.num_shown, text + delta.text
        assert len(demo_tokenizer.decode(ids[: max(num_shown - 1, 0)])) <= len(text)
        if delta.finish:
            break
    assert len(demo_tokenizer.decode(ids[: num_shown - 1])) < cut <= len(demo_tokenizer.decode(ids[:num_shown]))
