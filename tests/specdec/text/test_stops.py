from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.text.detokenizer import StopScanner


def scan(stops: list[str], pieces: list[str]) -> tuple[str, str | None, int]:
    """Text before the stop, the stop, and how many pieces were read."""
    scanner = StopScanner(stops)
    texts = []
    for count, piece in enumerate(pieces, 1):
        text, stop = scanner.push(piece)
        texts.append(text)
        if stop is not None:
            return "".join(texts), stop, count
    return "".join(texts) + scanner.finish(), None, len(pieces)


def by_search(stops: list[str], text: str) -> tuple[str, str | None]:
    """The plain way: the stop that ends first, and of those the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


letters = st.text("ab\n", max_size=40)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4),
    letters,
    st.lists(st.integers(0, 40), max_size=10),
)
def test_the_answer_does_not_depend_on_how_the_text_was_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert scan(stops, pieces)[:2] == by_search(stops, text)


def test_what_may_begin_a_stop_is_held_back_and_no_more() -> None:
    scanner = StopScanner(["\n\nclass", "END"])
    assert scanner.push("x = 1\n") == ("x = 1", None)
    assert scanner.push("\ncl") == ("", None)
    assert scanner.push("ear") == ("\n\nclear", None)
    assert scanner.push(" EN") == (" ", None)
    assert scanner.finish() == "EN"


def test_the_piece_that_completes_a_stop_is_the_last_one_read() -> None:
    assert scan(["stop"], ["a st", "o", "p and", "more"]) == ("a ", "stop", 3)


def test_the_stop_that_is_completed_first_wins_not_the_first_listed() -> None:
    assert scan(["three", "two"], ["one two three"])[:2] == ("one ", "two")


def test_without_stops_nothing_is_held_back() -> None:
    assert StopScanner([]).push("\n") == ("\n", None)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.text("ab", max_size=20), st.integers(0, 20))
def test_a_stop_that_is_completed_where_none_counts_is_text(stops: list[str], text: str, start: int) -> None:
    """The first to end behind the start counts, wherever it begins."""
    scanner, start = StopScanner(stops), min(start, len(text))
    texts, found = [scanner.push(text[:start], may_stop=False).text], None
    for character in text[start:]:
        piece, found = scanner.push(character)
        texts.append(piece)
        if found is not None:
            break
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(start + 1, len(text) + 1)
        if text[:end].endswith(stop) and len(stop) <= end
    ]
    if not ends:
        assert ("".join(texts) + scanner.finish(), found) == (text, None)
    else:
        end, _, stop = min(ends)
        assert ("".join(texts), found) == (text[: end - len(stop)], stop)
