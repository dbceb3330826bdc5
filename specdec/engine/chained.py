"""Several draft tokens for each row in one step: a pass is launched before the token of the pass before is known here.

The tokens go from the sampler to the next pass on the device, and all of them come to the host at once. So what is
drawn may depend on nothing but logits and noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specdec.cache.blocks import CachedSequence
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenSequence, followed
from specdec.executor.runner import ModelRunner, RowInput
from specdec.sampling.acceptance import Drawn, downloaded, drawn_coupled, rank_coupled
from specdec.sampling.pipeline import RowGroup, Sampler

_UNKNOWN = 0
"""In the place of a token that is not known here yet."""


@dataclass(frozen=True, slots=True)
class ChainRow:
    """A row that gets several tokens.

    Attributes:
        sequence: Has read ``tokens``, and has room for ``num_tokens - 1`` more.
        spec: Of the sequence, under the coupled rule.
        tokens: In the vocabulary of the sampler.
        num_tokens: How many are drawn.
        num_guesses: As for :func:`specdec.sampling.acceptance.propose`.
        adapter: Slot of the adapter; None for none.
    """

    sequence: CachedSequence
    spec: SequenceSpec
    tokens: TokenSequence
    num_tokens: int
    num_guesses: int
    adapter: int | None


@dataclass(frozen=True, slots=True)
class Chained:
    """What was drawn.

    Attributes:
        drawn: Of each row its tokens in order; none from the first pass on whose numbers are not finite.
        spoilt_rows: As :meth:`ModelRunner.spoilt_rows` of the step before, of all its rows.
    """

    drawn: list[list[Drawn]]
    spoilt_rows: frozenset[int]


def draw_chained(runner: ModelRunner, sampler: Sampler, logits: Tensor, rows: Sequence[ChainRow]) -> Chained:
    """Draw the tokens of all rows by as many passes, and read all but each row's last one.

    Args:
        runner: Its newest step has read the rows' tokens.
        sampler: From logits to tokens.
        logits: [rows, V], of that step.
        rows: Those of the most tokens first.
    """
    lengths, flag_rows = [len(row.sequence) for row in rows], runner.flag_rows
    try:
        groups, found = _launch(runner, sampler, logits, rows)
        is_finite, *arrays = downloaded(found)
    except Exception:
        for row, length in zip(rows, lengths, strict=True):
            runner.truncate(row.sequence, length)
        raise
    drawn: list[list[Drawn]] = [[] for _ in rows]
    spoilt_rows = frozenset(flag_rows[is_finite == 0].tolist())
    ended = set(spoilt_rows)
    for number, of_pass in enumerate(groups):
        if number:
            # Of each row a flag for its token, and behind all of them one for its logits.
            is_right = arrays.pop(0).reshape(2, -1).all(0)
            ended |= set(np.flatnonzero(~is_right).tolist())
        width = 3 if max(row.num_guesses for row in rows[: len(of_pass)]) else 1
        columns, arrays = arrays[:width], arrays[width:]
        for i, token in enumerate(drawn_coupled(of_pass, columns)):
            if i not in ended:
                drawn[i].append(token)
    for row, length, own in zip(rows, lengths, drawn, strict=True):
        num_read = max(0, len(own) - 1)
        runner.truncate(row.sequence, length + num_read)
        runner.set_tokens(row.sequence, length, [one.token for one in own[:num_read]])
    return Chained(drawn, spoilt_rows)


def _launch(
    runner: ModelRunner, sampler: Sampler, logits: Tensor, rows: Sequence[ChainRow]
) -> tuple[list[list[RowGroup]], list[Tensor]]:
    """All passes: the groups of each; its flags of what is finite, and what it has drawn, pass by pass."""
    groups: list[list[RowGroup]] = []
    found: list[Tensor] = []
    texts = [row.tokens for row in rows]
    for ahead in range(rows[0].num_tokens):
        drawing = [row for row in rows if row.num_tokens > ahead]
        groups.append([RowGroup(row.spec, text) for row, text in zip(drawing, texts, strict=False)])
        ranked = rank_coupled(sampler, runner.finite(logits), groups[-1], max(row.num_guesses for row in drawing))
        found += [runner.is_finite, *ranked]
        going = [row for row in drawing if row.num_tokens > ahead + 1]
        if not going:
            break
        inputs = [RowInput(row.sequence, [_UNKNOWN], 1, adapter=row.adapter) for row in going]
        logits = runner.forward(inputs, ranked[0][: len(going)].int())
        texts = [followed(text, (_UNKNOWN,)) for text in texts[: len(going)]]
    return groups, found
