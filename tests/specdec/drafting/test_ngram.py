"""Prompt lookup against a search of the whole text, and what it learns from wrong drafts."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.drafting import ngram as ngram_module
from specdec.drafting.ngram import (
    LEAST_MATCH,
    LONG_MATCH,
    Match,
    NgramDrafter,
    NgramOptions,
    Reading,
    TextIndex,
    token_drafter,
)

SPEC = SequenceSpec(SamplingParams(), 0, 4, 1000)
FEW_PLACES = 32


def extend(match: Match, tokens: Sequence[int]) -> None:
    """A text that is looked for in itself goes on."""
    match.index.extend(tokens)
    match.follow(tokens)


def find(match: Match) -> None:
    match.find(match.index.tokens)


def longest_match(text: list[int], end: int) -> int:
    """Length of the longest run before ``end`` that occurs earlier in the text as well, by trying all."""
    for length in range(end - 1, 0, -1):
        if any(text[i : i + length] == text[end - length : end] for i in range(end - length)):
            return length
    return 0


@pytest.mark.parametrize("num_kinds", [2, 3, 5, 12])
@pytest.mark.parametrize("seed", range(6))
def test_it_finds_the_longest_match_and_what_followed_it(num_kinds: int, seed: int) -> None:
    """Short texts: no run of tokens has more places than are compared."""
    rng = random.Random(seed)
    text, match = [], Match(TextIndex())
    while len(text) < FEW_PLACES:
        new = [rng.randrange(num_kinds) for _ in range(rng.choice((1, 1, 2, 5)))]
        if len(text) > 6 and rng.random() < 0.5:  # as an accepted draft comes
            start = rng.randrange(len(text))
            new = text[start : start + 6]
        extend(match, new)
        text += new
        if rng.random() < 0.7:
            find(match)
            wanted = longest_match(text, len(text))
            assert match.length == (wanted if wanted >= LEAST_MATCH else 0)
            if match.length:
                place, count = match.place, match.length
                assert place < len(text)
                assert text[place - count : place] == text[len(text) - count :]
                copied = text[place:] * 10
                assert list(match.following(7)) == copied[:7]


def test_in_a_long_text_a_match_that_is_followed_is_not_lost_among_newer_places() -> None:
    line = [1, 2, 3]  # begins every line, as an indent does
    file = [token for i in range(200) for token in (*line, 1000 + i)]
    match = Match(TextIndex())
    extend(match, [*file, -2, *file[:40]])
    for i in range(40, 120):
        find(match)
        assert match.following(4) == tuple(file[i : i + 4])
        extend(match, [file[i]])


def test_a_text_that_repeats_itself_is_drafted_on_and_on() -> None:
    match = Match(TextIndex())
    extend(match, [7, 1, 2, 3, 1, 2, 3])
    find(match)
    assert (match.length, match.following(8)) == (3, (1, 2, 3, 1, 2, 3, 1, 2))


def test_the_texts_do_not_run_into_each_other() -> None:
    match = Match(TextIndex(num_apart=4))
    extend(match, [1, 2, 3, 4, -1, 9, 9, 2, 3, 4])
    find(match)
    assert match.length == 0  # nothing follows there
    match = Match(TextIndex(num_apart=4))
    extend(match, [1, 2, 3, 4, -1, 1, 2, 3])
    find(match)
    assert (match.place, match.following(5)) == (3, (4,))


def drafted(ngram: NgramDrafter, log: TokenLog, room: int = 100) -> tuple[int, ...]:
    return ngram.draft(log, room, Reading()).tokens


def test_it_drafts_as_far_as_the_match_is_long_and_within_its_bounds() -> None:
    text = [*range(10, 40), *range(10, 15)]
    ngram = NgramDrafter(SPEC, 16)
    assert drafted(ngram, TokenLog(text)) == (15, 16, 17, 18, 19)
    assert drafted(ngram, TokenLog(text), room=2) == (15, 16)
    assert drafted(ngram, TokenLog(text), room=0) == ()
    assert drafted(NgramDrafter(SPEC, 4), TokenLog(text)) == (15, 16, 17, 18)
    log = TokenLog([*text, *range(15, 20)])
    assert drafted(ngram, log) == tuple(range(20, 30))
    assert ngram.is_long
    ending = replace(SPEC, eos_token_ids=(22,))
    assert drafted(NgramDrafter(ending, 16), log) == (20, 21, 22)


def test_no_look_up_where_none_is_wanted() -> None:
    with_prediction = replace(SPEC, prediction=SharedTokens((1, 2)))
    for_all, for_some = NgramOptions(16), NgramOptions(16, for_all=False)
    assert token_drafter(SPEC, for_all) is not None
    assert token_drafter(with_prediction, for_some) is not None
    assert token_drafter(SPEC, for_some) is None
    assert token_drafter(with_prediction, None) is None
    assert token_drafter(replace(SPEC, num_speculative_tokens=0), for_all) is None
    assert token_drafter(SPEC, NgramOptions(0)) is None


def test_wrong_drafts_make_it_ask_for_longer_matches_and_a_right_one_for_short_ones_again() -> None:
    ngram = NgramDrafter(SPEC, 16)
    text = list(range(100, 200))

    def starts_at(length: int) -> bool:
        """Whether a match of this length is enough."""
        probe = NgramDrafter(SPEC, 16)
        probe._needed = ngram._needed
        return drafted(probe, TokenLog([*text, *range(120, 120 + length)])) != ()

    assert [starts_at(n) for n in (2, 3)] == [False, True]
    ngram.judge(3, 1)
    assert [starts_at(n) for n in (5, 6)] == [False, True]
    ngram.judge(6, 0)
    assert [starts_at(n) for n in (11, 12)] == [False, True]
    for _ in range(10):
        ngram.judge(8, 2)
    assert [starts_at(n) for n in (63, 64)] == [False, True]
    ngram.judge(16, 3)
    assert starts_at(3)


def test_the_prediction_is_drafted_at_the_outputs_beginning_and_where_the_output_returns_to_it() -> None:
    prediction = tuple(range(50, 90))
    ngram = NgramDrafter(replace(SPEC, prediction=SharedTokens(prediction)), 16)
    log = TokenLog([1, 2, 3, 4])
    first = ngram.draft(log, 100, Reading())
    assert (first.tokens, first.source) == (prediction[:LONG_MATCH], "prediction")
    log.extend([*prediction[:5], 7])  # the sixth is another
    assert drafted(ngram, log) == ()
    log.extend(prediction[6:9])
    again = ngram.draft(log, 100, Reading())
    assert (again.tokens, again.source) == (prediction[9:12], "prediction")


def test_what_is_in_the_prediction_and_in_the_text_counts_as_the_predictions() -> None:
    text = tuple(range(50, 60))
    ngram = NgramDrafter(replace(SPEC, output_start=13, prediction=SharedTokens(text)), 16)
    log = TokenLog([*text, 1, 2, 3, 9, *text[:4]])
    found = ngram.draft(log, 100, Reading())
    assert (found.tokens, found.source) == (text[4:8], "prediction")
    found = NgramDrafter(SPEC, 16).draft(log, 100, Reading())
    assert (found.tokens, found.source) == (text[4:8], "ngram")


def test_a_long_prediction_is_indexed_a_part_a_step_and_not_when_a_sequence_is_opened() -> None:
    rng = random.Random(0)
    prediction = tuple(rng.randrange(100_000) for _ in range(20_000))
    drafter = NgramDrafter(replace(SPEC, prediction=SharedTokens(prediction)), 16)
    log = TokenLog([1, 2, 3, 4, *prediction[19_000:19_010]])
    sizes, drafts = [len(drafter._own.index.tokens)], []
    for _ in range(3):
        drafts.append(drafted(drafter, log))
        sizes.append(len(drafter._own.index.tokens))
    assert sizes == [0, 8192, 16384, 20_001 + len(log)]
    assert drafts == [(), (), prediction[19_010:19_020]]


def test_many_long_prompts_are_indexed_a_part_a_step_and_what_is_decoded_at_once() -> None:
    rng = random.Random(0)
    text = [rng.randrange(100_000) for _ in range(20_000)]
    spec = replace(SPEC, output_start=len(text))
    logs = [TokenLog([*text, *text[i : i + 5]]) for i in (5, 50, 100)]
    tracemalloc.start()
    lookups = [NgramDrafter(spec, 16) for _ in logs]
    drafted_in: dict[int, int] = {}
    for step in range(20):
        reading = Reading()
        before = sum(ngram._num_read for ngram in lookups)
        for i, (ngram, log) in enumerate(zip(lookups, logs, strict=True)):
            if ngram.draft(log, 100, reading).tokens:
                drafted_in.setdefault(i, step)
        assert sum(ngram._num_read for ngram in lookups) - before <= 8192
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drafted_in == {i: (i + 1) * len(logs[0]) // 8192 for i in range(3)}, "in order of arrival"
    assert size / sum(map(len, logs)) < 20, "bytes a token"
    used_up = Reading()
    used_up.take(1 << 20)
    logs[0].extend(text[10:13])
    assert lookups[0].draft(logs[0], 100, used_up).tokens == tuple(text[13:21])


@pytest.mark.parametrize("num_bits", [2, 10])
def test_many_tokens_at_once_are_indexed_as_one_by_one(num_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_module, "_LEAST_HASH_BITS", num_bits)
    rng = random.Random(1)
    for count in (65, 66, 300):
        text = [rng.randrange(5) for _ in range(count)]
        for start in (0, 1, 2, 50):
            at_once, one_by_one = TextIndex(), TextIndex()
            for index in (at_once, one_by_one):
                index.extend(text[:start])
            at_once.extend(text)
            for token in text:
                one_by_one.extend([token])
            assert at_once._before == one_by_one._before
            assert at_once._newest.tolist() == one_by_one._newest.tolist()


@pytest.mark.parametrize("num_kinds", [2, 4, 10, 100])
def test_where_what_is_found_says_nothing_it_falls_silent(num_kinds: int) -> None:
    """Tokens at random, of few kinds: nearly every end has occurred before, and nothing follows from it."""
    rng = random.Random(num_kinds)
    log, ngram = TokenLog(rng.randrange(num_kinds) for _ in range(1000)), NgramDrafter(SPEC, 16)
    num_rounds, num_drafts = 2000, 0
    for _ in range(num_rounds):
        draft = drafted(ngram, log)
        if draft:
            truth = [rng.randrange(num_kinds) for _ in range(len(draft) + 1)]
            count = next((i for i, (a, b) in enumerate(zip(draft, truth, strict=False)) if a != b), len(draft))
            ngram.judge(len(draft), count)
            log.extend(truth[: count + 1])
        else:
            log.extend([rng.randrange(num_kinds)])
        num_drafts += bool(draft)
    assert 0 < num_drafts <= 0.02 * num_rounds
