from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.tokens import SharedTokens, TokenBuffer, common_prefix_length, followed

tokens_strategy = st.lists(st.integers(0, 3), max_size=8)


@given(tokens_strategy, tokens_strategy)
def test_common_prefix_length(a, b):
    length = common_prefix_length(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]
    for start in range(length + 1):
        assert common_prefix_length(np.array(a, dtype=np.int32), tuple(b), start) == length


@given(st.lists(st.one_of(tokens_strategy, st.integers(0, 12))))
def test_a_buffer_holds_what_a_list_would(changes):
    buffer, known = TokenBuffer(), list[int]()
    for change in changes:
        if isinstance(change, int):
            buffer.truncate(change)
            del known[change:]
        else:
            buffer.extend(change)
            known += change
        assert (buffer, list(buffer), len(buffer), buffer.array.tolist()) == (known, known, len(known), known)
    assert buffer.copy() == buffer
    assert buffer != [*known, 1]


def test_a_copy_of_a_buffer_is_its_own():
    buffer = TokenBuffer([5, 6])
    copy = buffer.copy()
    copy.truncate(1)
    copy.append(9)
    assert (list(buffer), list(copy), copy[1], copy[1:].tolist()) == ([5, 6], [5, 9], 9, [9])


def test_shared_tokens_are_equal_by_their_tokens_and_do_not_follow_what_they_were_made_of():
    mine = np.array([5, 6], dtype=np.int32)
    shared = SharedTokens(mine)
    mine[0] = 7
    assert shared == SharedTokens((5, 6)) == SharedTokens.from_bytes(b"\5\0\0\0\6\0\0\0")
    assert hash(shared) == hash(SharedTokens((5, 6)))
    assert shared != SharedTokens((5, 7))
    assert shared != (5, 6)
    with pytest.raises(ValueError, match="multiple of"):
        SharedTokens.from_bytes(b"\5\0\0")


def test_shared_tokens_can_be_pickled_once_they_were_hashed():
    tokens = SharedTokens([1, 2, 3])
    digest = tokens.hash_state(2).digest()
    copied = pickle.loads(pickle.dumps(tokens))
    assert copied == tokens
    assert copied.hash_state(2).digest() == digest


def test_followed():
    tokens = np.array([5, 6], dtype=np.int32)
    assert followed(tokens, (7,)).tolist() == [5, 6, 7]
    assert followed([5], ()).dtype == np.int32
