"""The acceptance rule: a draft token is kept if and only if it is the token the target chooses with the shared noise.

Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding", section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.types import Tokens
from specdec.sampling.on_kernels import LaidOut, Launched
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rows import LogprobReport, RowGroup, Rows, VerifiedRun, row_slices


def walk_drafts(chosen: Tensor | Sequence[int], groups: Sequence[RowGroup]) -> list[VerifiedRun]:
    """Return what plain decoding would have given, as far as the drafts foresaw it.

    Args:
        chosen: int64 [N]: the target's token for every row, from ``Sampler.sample``.
        groups: The sequences of the N rows, in order.

    Returns:
        One entry per group. One transfer from the device for all of them.
    """
    rows = Rows(groups)
    choices: list[int] = torch.as_tensor(chosen).tolist()
    return [
        walk_draft(choices[start : start + count], group.draft, group.parents)
        for group, start, count in zip(groups, rows.starts, rows.counts, strict=True)
    ]


def walk_draft(chosen: Sequence[int], draft: Tokens, parents: Tokens = ()) -> VerifiedRun:
    """Walk down a draft by the target's own choices: a token is kept if its parent was, and if it was chosen there.

    All tokens at one place share its noise, so that the choice after a path is that of the chain of this path.

    Args:
        chosen: The target's token before the draft, then after each of its tokens.
        draft: The draft's tokens.
        parents: Of a tree, which of them each one follows, -1 for none; empty for a chain.
    """
    path: list[int] = []
    at = -1
    for node, parent in enumerate(parents or range(-1, len(draft) - 1)):
        if parent == at and draft[node] == chosen[at + 1]:
            path.append(node)
            at = node
    run = (*(draft[node] for node in path), chosen[at + 1])
    return VerifiedRun(run, len(path), tuple(path) if parents else ())


_NO_FLAGS = np.zeros(0, np.bool_)


class Decided(NamedTuple):
    """A step's result on the host.

    Attributes:
        runs: Each group's.
        logprobs: What to report of each.
        flags: bool [F], what came along.
    """

    runs: list[VerifiedRun]
    logprobs: list[LogprobReport]
    flags: NDArray[np.bool_]


class Decision:
    """The decisions of a step, in three parts: what can be laid out before its pass, launched behind it, collected.

    Where kernels decide, all of it comes to the host at once, and nothing is waited for before :meth:`collect`. Else
    :meth:`launch` decides.

    Args:
        sampler: Applies each request's parameters.
        groups: The sequences of the step's rows of logits, in order.
        device: Where logits will be.

    Attributes:
        groups: As given, with the masks of grammars.
        arrays: What has to be on the device before :meth:`launch`: it may travel with the step's input.
    """

    def __init__(self, sampler: Sampler, groups: Sequence[RowGroup], device: torch.device) -> None:
        self.groups = sampler.masked(groups)
        self._sampler, self._kernels = sampler, sampler.kernels(device)
        rows = Rows(self.groups)
        self._slices = list(row_slices(rows.counts, sampler.vocab_size))
        self._parts: list[LaidOut] = []
        self._launched: Launched | None = None
        if self._kernels is not None:
            for number, (part, _) in enumerate(self._slices):
                own = rows.part(range(len(self.groups))[part])
                self._parts.append(self._kernels.lay_out(own, number))
        self.arrays: Sequence[NDArray[Any]] = [values for part in self._parts for values in part.arrays]
        self._decided = Decided([], [], _NO_FLAGS)

    def launch(
        self,
        logits: Tensor,
        flags: Tensor | None = None,
        sent: Sequence[Tensor] | None = None,
        drawn: Tensor | None = None,
    ) -> None:
        """Decide, as soon as the device has come to it.

        Args:
            logits: float32 [N, at least V], the target's.
            flags: bool [F], to be brought along.
            sent: :attr:`arrays` on the device, if they are there.
            drawn: int32 [D], there, the tokens that drafts name by :func:`specdec.executor.steps.unread`; for kernels.
        """
        if self._kernels is not None:
            self._launched = self._kernels.launch(logits, self._parts, sent, flags, drawn)
        else:
            runs: list[VerifiedRun] = []
            for part, rows in self._slices:
                runs += walk_drafts(self._sampler.sample(logits[rows], self.groups[part]), self.groups[part])
            logprobs = self._sampler.logprobs(logits, self.groups, runs)
            self._decided = Decided(runs, logprobs, _NO_FLAGS if flags is None else flags.cpu().numpy())

    def collect(self) -> Decided:
        """What was decided."""
        return self._decided if self._launched is None else Decided(*self._launched.collect())


def decide(sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup], flags: Tensor | None = None) -> Decided:
    """Make a whole :class:`Decision` at once."""
    decision = Decision(sampler, groups, logits.device)
    decision.launch(logits, flags)
    return decision.collect()


class Drawn(NamedTuple):
    """One draft token.

    Attributes:
        guesses: Other tokens that may well stand in its place, the likeliest first.
        likelihoods: How likely the token is to be kept, and each guess to be in its place.
    """

    token: int
    guesses: Tokens = ()
    likelihoods: tuple[float, ...] = ()


def propose(sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup], num_guesses: int = 0) -> list[Drawn]:
    """Draw one draft token per group.

    Args:
        sampler: Applies each request's parameters.
        logits: float32 [N, at least V], the draft's.
        groups: N sequences, one row each.
        num_guesses: How many other tokens are wanted beside each, at most, ranked with the noise.
    """
    proposals: list[Drawn] = []
    for part, rows in row_slices([1] * len(groups), sampler.vocab_size):
        ranked = rank_tokens(sampler, logits[rows], groups[part], num_guesses)
        proposals += drawn_tokens(groups[part], downloaded(ranked))
    return proposals


def rank_tokens(
    sampler: Sampler,
    logits: Tensor,
    groups: Sequence[RowGroup],
    num_guesses: int,
    laid_out: LaidOut | None = None,
    sent: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return what :func:`drawn_tokens` reads draft tokens from, on the device: the tokens, [N], come first.

    With kernels nothing waits for the device. Arguments as for :func:`propose` and :meth:`Sampler.sample`.
    """
    if not num_guesses:
        return [sampler.sample(logits, groups, laid_out, sent)]
    ranked = sampler.choose_and_guess(logits, groups, num_guesses, laid_out, sent)
    return [ranked.chosen, ranked.tokens, ranked.scores]


def drawn_tokens(groups: Sequence[RowGroup], columns: Sequence[NDArray[Any]]) -> list[Drawn]:
    """Return the draft tokens from what :func:`rank_tokens` gives of the same groups, on the host."""
    tokens, *ranked = columns
    if not ranked:
        return [Drawn(token) for token in tokens.tolist()]
    # Where the draft's best is ahead of another by a logit, the target is taken to be e times likelier to say it.
    heats = np.array([group.spec.sampling.temperature or 1.0 for group in groups])
    scaled = ranked[1] * heats[:, None]
    shares = np.exp(scaled - scaled.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return [_drawn(*row) for row in zip(tokens.tolist(), ranked[0].tolist(), shares.tolist(), strict=True)]


def _drawn(token: int, ranked: list[int], likelihoods: list[float]) -> Drawn:
    """A draft token with those that come after it: as many as were ranked, less itself; -1 is none."""
    if ranked[0] != token:  # a tie, which two ways of looking for the best have decided differently
        return Drawn(token, _guesses(token, ranked, len(ranked) - 1))
    guesses = _guesses(token, ranked, len(ranked) - 1)
    return Drawn(token, guesses, tuple(likelihoods[: 1 + len(guesses)]))


def _guesses(token: int, ranked: Iterable[int], count: int) -> Tokens:
    """The first of the ranked tokens that are not the one drawn; -1 is none."""
    return tuple(islice((other for other in ranked if other not in (token, -1)), count))


def downloaded(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Tensors on the host, in one transfer: float64 holds every id. Integers stay integers; flags become 0 and 1."""
    whole = torch.cat([tensor.double().view(-1) for tensor in tensors]).cpu().numpy()
    parts = np.split(whole, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [
        part.reshape(tensor.shape) if tensor.is_floating_point() else part.reshape(tensor.shape).astype(np.int64)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
