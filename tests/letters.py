"""How tokens came, a letter each: short to write and to compare.

``p`` plain; ``a`` accepted, ``c`` corrected and ``b`` bonus of a draft model; ``A``, ``C``, ``B`` of the text itself;
``x``, ``y``, ``z`` of a prediction; ``h``, ``i``, ``j`` of heads; ``u``, ``v``, ``w`` of another drafter.
"""

from __future__ import annotations

from specdec.core.messages import Notes, TokenKind, TokenSource, pack_provenance, token_kind, token_source

_LETTERS = ("pacb", " ACB", " xyz", " hij", " uvw")
ACCEPTED = frozenset("aAxhu")


def spelled(notes: Notes) -> str:
    """A letter per token."""
    return "".join(_LETTERS[token_source(byte)][token_kind(byte)] for byte in notes.provenance)


def provenance(text: str) -> bytes:
    """What such letters stand for."""
    return bytes(
        pack_provenance(TokenKind(row.index(letter)), TokenSource(source))
        for letter in text
        for source, row in enumerate(_LETTERS)
        if letter in row
    )
