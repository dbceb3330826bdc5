from __future__ import annotations

import random
import struct
import threading
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.log import Extension, PrefixHash, TokenLog
from specdec.core.tokens import SharedTokens

tokens_strategy = st.lists(st.integers(0, 3), max_size=8)


def test_a_mark_depends_on_tokens_and_length_alone():
    log = TokenLog([5, 6])
    log.extend([7, 0])
    assert log.prefix_hash() == TokenLog([5, 6, 7, 0]).prefix_hash()
    assert log.prefix_hash(2) == TokenLog([5, 6]).prefix_hash()
    assert len({TokenLog(tokens).prefix_hash() for tokens in ([], [0], [0, 0], [1, 0], [0, 1], [1], [2])}) == 7


def test_a_mark_is_the_same_on_every_machine_and_in_every_version():
    digest = blake2b(struct.pack("<3i", 1, 70_000, 2), digest_size=8).digest()
    assert TokenLog([1, 70_000, 2]).prefix_hash() == PrefixHash(3, int.from_bytes(digest, "little"))
    assert TokenLog([1, 70_000, 2]).prefix_hash().digest == 5558890658498822268


def test_marks_of_long_logs_do_not_depend_on_how_they_grew_or_on_what_was_asked_before():
    """Longer than the distance at which states of the hash are kept, with the prompt's end between two of them."""
    rng = random.Random(0)
    tokens = [rng.randrange(1 << 17) for _ in range(5000)]
    whole, prompt = TokenLog(tokens), SharedTokens(tokens[:1500])
    logs = [TokenLog(prompt, tokens[1500:1600]) for _ in range(2)]
    lengths = rng.sample(range(5001), 200)
    for start in range(1600, 5000, 170):
        for log in logs:
            log.extend(tokens[start : start + 170])
        logs[0].prefix_hash(rng.randrange(start))
    logs[1].tokens  # noqa: B018  (joins the prompt and the rest)
    for length in lengths:
        assert (
            logs[0].prefix_hash(length)
            == logs[1].prefix_hash(length)
            == whole.prefix_hash(length)
            == TokenLog(tokens[:length]).prefix_hash()
        )


def test_has_compares_the_prefix_of_that_length():
    log = TokenLog([5, 6, 7])
    assert log.has(TokenLog([5, 6]).prefix_hash())
    assert log.has(TokenLog([]).prefix_hash())
    assert not log.has(TokenLog([5, 7]).prefix_hash())
    assert not log.has(TokenLog([5, 6, 7, 8]).prefix_hash())


@pytest.mark.parametrize("num_prompt", range(5))
def test_pieces_of_a_log_with_and_without_its_prompt(num_prompt):
    tokens = [5, 6, 7, 8]
    log = TokenLog(tokens[:num_prompt], tokens[num_prompt:])
    pieces = [(start, stop) for start in range(5) for stop in (*range(start, 5), 9, None)]
    for start, stop in pieces:
        assert log.tail(start, stop) == tuple(tokens[start:stop])
        assert log.array(start, stop).tolist() == tokens[start:stop]
    assert all(type(token) is int for token in log.tail(0))
    assert (log.tokens.tolist(), log.tokens.dtype, len(log)) == (tokens, np.int32, 4)


def test_samples_of_a_request_share_its_prompt_until_all_of_it_is_wanted_in_one_piece():
    prompt = SharedTokens(range(1000))
    logs = [TokenLog(prompt, (i,)) for i in range(2)]
    for log in logs:
        log.extend((7,))
    assert all(np.shares_memory(log.array(0, 1000), prompt.tokens) for log in logs)
    assert [log.tokens[998:].tolist() for log in logs] == [[998, 999, 0, 7], [998, 999, 1, 7]]


def test_what_a_log_hands_out_stays_as_it_is_and_cannot_be_changed():
    log = TokenLog([5], [6])
    whole, end = log.tokens, log.array(1)
    assert log.extend_to(2, (7, 8), PrefixHash(4, 0)) is Extension.MISMATCH
    log.extend([9] * 1000)
    assert (whole.tolist(), end.tolist()) == ([5, 6], [6])
    for array in (whole, end, log.tokens, TokenLog([5]).tokens):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_token_that_does_not_fit_is_refused_and_nothing_is_appended():
    log = TokenLog([5])
    with pytest.raises(OverflowError):
        log.extend((6, 1 << 31))
    assert log.tail(0) == (5,)


@pytest.mark.parametrize(
    ("base", "sent", "whole", "expected", "after"),
    [
        (3, (8,), [5, 6, 7, 8], Extension.EXTENDED, (5, 6, 7, 8)),
        (1, (6, 7, 8, 9), [5, 6, 7, 8, 9], Extension.EXTENDED, (5, 6, 7, 8, 9)),
        (0, (5, 6), [5, 6], Extension.NOTHING_NEW, (5, 6, 7)),
        (3, (), [5, 6, 7], Extension.NOTHING_NEW, (5, 6, 7)),
        (1, (9,), [5, 9], Extension.MISMATCH, (5, 6, 7)),
        (1, (9, 7, 8), [5, 9, 7, 8], Extension.MISMATCH, (5, 6, 7)),
        (3, (8,), [5, 6, 9, 8], Extension.MISMATCH, (5, 6, 7)),
        (4, (9,), [5, 6, 7, 8, 9], Extension.GAP, (5, 6, 7)),
    ],
)
def test_extend_to(base, sent, whole, expected, after):
    log = TokenLog([5, 6], [7])
    assert log.extend_to(base, sent, TokenLog(whole).prefix_hash()) is expected
    assert log.tail(0) == after
    assert log.prefix_hash() == TokenLog(after).prefix_hash()


@pytest.mark.parametrize("length", [2, 2000])
def test_a_refused_extension_leaves_a_log_that_can_go_on(length):
    """Its digests forget what was refused, states kept on the way included."""
    tokens = list(range(2 * length))
    log, refused = TokenLog([], tokens[:length]), (9,) * length
    assert log.extend_to(length, refused, PrefixHash(2 * length, 0)) is Extension.MISMATCH
    assert log.extend_to(length, tuple(tokens[length:]), TokenLog(tokens).prefix_hash()) is Extension.EXTENDED
    assert log.prefix_hash(2 * length - 1) == TokenLog(tokens[:-1]).prefix_hash()


@given(tokens_strategy, tokens_strategy, st.integers(0, 8), st.integers(0, 8))
def test_extend_to_takes_exactly_the_logs_that_continue_this_one(mine, theirs, base, num_prompt):
    base = min(base, len(theirs))
    log = TokenLog(mine[:num_prompt], mine[num_prompt:])
    extension = log.extend_to(base, tuple(theirs[base:]), TokenLog(theirs).prefix_hash())
    if base > len(mine):
        assert extension is Extension.GAP
    elif len(theirs) > len(mine):
        assert (extension is Extension.EXTENDED) == (theirs[: len(mine)] == mine)
    else:
        assert (extension is Extension.NOTHING_NEW) == (mine[: len(theirs)] == theirs)
    assert list(log.tail(0)) == (theirs if extension is Extension.EXTENDED else mine)


def test_two_threads_that_ask_for_a_mark_at_a_time_get_the_same():
    tokens = list(range(300_000))
    prompt, wanted = SharedTokens(tokens[:150_000]), TokenLog(tokens).prefix_hash()
    for _ in range(3):
        log, found = TokenLog(SharedTokens(prompt.tokens), tokens[150_000:]), list[PrefixHash]()
        threads = [
            threading.Thread(target=lambda log=log, found=found: found.append(log.prefix_hash())) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [wanted] * 4
        assert log.prefix_hash(200_000) == TokenLog(tokens[:200_000]).prefix_hash()
