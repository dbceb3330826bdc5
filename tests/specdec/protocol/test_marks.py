from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.protocol.marks import Extension, Mark, TokenLog, common_prefix_length

tokens_strategy = st.lists(st.integers(0, 3), max_size=8)


def test_a_mark_depends_on_tokens_and_length_alone():
    log = TokenLog([5, 6])
    log.extend([7, 0])
    assert log.mark() == TokenLog([5, 6, 7, 0]).mark()
    assert log.mark(2) == TokenLog([5, 6]).mark()
    assert len({TokenLog(tokens).mark() for tokens in ([], [0], [0, 0], [1, 0], [0, 1], [1], [2])}) == 7


def test_has_compares_the_prefix_of_that_length():
    log = TokenLog([5, 6, 7])
    assert log.has(TokenLog([5, 6]).mark())
    assert log.has(TokenLog([]).mark())
    assert not log.has(TokenLog([5, 7]).mark())
    assert not log.has(TokenLog([5, 6, 7, 8]).mark())


def test_tail():
    log = TokenLog([5, 6, 7])
    assert (log.tail(0), log.tail(2), log.tail(3), log.tail(1, 2)) == ((5, 6, 7), (7,), (), (6,))


@pytest.mark.parametrize(
    ("base", "sent", "whole", "expected", "after"),
    [
        (3, (8,), [5, 6, 7, 8], Extension.EXTENDED, [5, 6, 7, 8]),
        (1, (6, 7, 8, 9), [5, 6, 7, 8, 9], Extension.EXTENDED, [5, 6, 7, 8, 9]),
        (0, (5, 6), [5, 6], Extension.NOTHING_NEW, [5, 6, 7]),
        (3, (), [5, 6, 7], Extension.NOTHING_NEW, [5, 6, 7]),
        (1, (9,), [5, 9], Extension.MISMATCH, [5, 6, 7]),
        (1, (9, 7, 8), [5, 9, 7, 8], Extension.MISMATCH, [5, 6, 7]),
        (3, (8,), [5, 6, 9, 8], Extension.MISMATCH, [5, 6, 7]),
        (4, (9,), [5, 6, 7, 8, 9], Extension.GAP, [5, 6, 7]),
    ],
)
def test_extend_to(base, sent, whole, expected, after):
    log = TokenLog([5, 6, 7])
    assert log.extend_to(base, sent, TokenLog(whole).mark()) is expected
    assert log.tokens == after
    assert log.mark() == TokenLog(after).mark()


def test_a_refused_extension_leaves_a_log_that_can_go_on():
    log = TokenLog([5, 6])
    assert log.extend_to(2, (7, 8), Mark(4, 0)) is Extension.MISMATCH
    assert log.extend_to(2, (7, 8), TokenLog([5, 6, 7, 8]).mark()) is Extension.EXTENDED
    assert log.mark(3) == TokenLog([5, 6, 7]).mark()


@given(tokens_strategy, tokens_strategy, st.integers(0, 8))
def test_extend_to_takes_exactly_the_logs_that_continue_this_one(mine, theirs, base):
    base = min(base, len(theirs))
    log = TokenLog(mine)
    extension = log.extend_to(base, tuple(theirs[base:]), TokenLog(theirs).mark())
    if base > len(mine):
        assert extension is Extension.GAP
    elif len(theirs) > len(mine):
        assert (extension is Extension.EXTENDED) == (theirs[: len(mine)] == mine)
    else:
        assert (extension is Extension.NOTHING_NEW) == (mine[: len(theirs)] == theirs)
    assert log.tokens == (theirs if extension is Extension.EXTENDED else mine)


@given(tokens_strategy, tokens_strategy)
def test_common_prefix_length(a, b):
    length = common_prefix_length(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]
    assert common_prefix_length(a, b, start=length) == length


class Interrupted(list[int]):
    """Digests during whose first use another thread asks for the mark."""

    def __init__(self, log: TokenLog) -> None:
        super().__init__([0])
        self._log, self._is_interrupted = log, False

    def __len__(self) -> int:
        count = super().__len__()
        if not self._is_interrupted:
            self._is_interrupted = True
            self._log.mark()
        return count


def test_two_threads_that_ask_for_a_mark_at_a_time_get_the_same():
    log = TokenLog(range(9))
    log._digests = Interrupted(log)
    assert log.mark() == log.mark() == TokenLog(range(9)).mark()
    assert log.mark(4) == TokenLog(range(4)).mark()
