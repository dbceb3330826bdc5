"""The two acceptance rules side by side: a batch may hold sequences of both.

The coupled rule: a draft token is kept if and only if it is the token the target chooses with the shared noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.messages import Candidates
from specdec.core.types import Tokens
from specdec.sampling.on_kernels import LaidOut, Launched
from specdec.sampling.pipeline import Sampler
from specdec.sampling.rejection import propose_several, propose_truncated, verify_rejection
from specdec.sampling.rows import LogprobReport, RowGroup, Rows, VerifiedRun, on_device, row_slices


def verify_coupled(chosen: Tensor | Sequence[int], groups: Sequence[RowGroup]) -> list[VerifiedRun]:
    """What plain decoding would have given, as far as the draft foresaw it.

    Daliri, Musco and Suresh 2024, section 4.

    Args:
        chosen: int64 [N]: the target's token for every row, from ``Sampler.sample``.
        groups: The sequences of the N rows, in order.

    Returns:
        One entry per group. One transfer from the device for all of them.
    """
    rows = Rows(groups)
    choices: list[int] = torch.as_tensor(chosen).tolist()
    return [
        walk_coupled(choices[start : start + count], group.draft, group.parents)
        for group, start, count in zip(groups, rows.starts, rows.counts, strict=True)
    ]


def walk_coupled(chosen: Sequence[int], draft: Tokens, parents: Tokens = ()) -> VerifiedRun:
    """Down a draft by the target's own choices: a token is kept if what it follows was, and it was chosen there.

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

    Every group's run is decided by the rule that its request names. Where kernels decide, all of it comes to the host
    at once, and nothing is waited for before :meth:`collect`. Else :meth:`launch` decides.

    Args:
        sampler: Applies each request's parameters.
        groups: The sequences of the step's rows of logits, in order.
        candidates: Per group, what each draft token was drawn from; empty under the coupled rule.
        device: Where logits will be.

    Attributes:
        groups: As given, with the masks of grammars.
        arrays: What has to be on the device before :meth:`launch`: it may travel with the step's input.
    """

    def __init__(
        self,
        sampler: Sampler,
        groups: Sequence[RowGroup],
        candidates: Sequence[tuple[Candidates, ...]],
        device: torch.device,
    ) -> None:
        self.groups = sampler.masked(groups)
        self._sampler, self._candidates, self._kernels = sampler, candidates, sampler.kernels(device)
        rows = Rows(self.groups)
        self._slices = list(row_slices(rows.counts, sampler.vocab_size))
        self._parts: list[LaidOut] = []
        self._launched: Launched | None = None
        if self._kernels is not None:
            for number, (part, _) in enumerate(self._slices):
                own = rows.part(range(len(self.groups))[part])
                self._parts.append(self._kernels.lay_out(own, candidates[part], number))
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
                runs += _verify(self._sampler, logits[rows], self.groups[part], self._candidates[part])
            logprobs = self._sampler.logprobs(logits, self.groups, runs)
            self._decided = Decided(runs, logprobs, _NO_FLAGS if flags is None else flags.cpu().numpy())

    def collect(self) -> Decided:
        """What was decided."""
        return self._decided if self._launched is None else Decided(*self._launched.collect())


def decide(
    sampler: Sampler,
    logits: Tensor,
    groups: Sequence[RowGroup],
    candidates: Sequence[tuple[Candidates, ...]],
    flags: Tensor | None = None,
) -> Decided:
    """A whole :class:`Decision` at once."""
    decision = Decision(sampler, groups, candidates, logits.device)
    decision.launch(logits, flags)
    return decision.collect()


def verify(
    sampler: Sampler,
    logits: Tensor,
    groups: Sequence[RowGroup],
    candidates: Sequence[tuple[Candidates, ...]],
) -> list[VerifiedRun]:
    """The runs of :func:`decide`."""
    return decide(sampler, logits, groups, candidates).runs


def _verify(
    sampler: Sampler,
    logits: Tensor,
    groups: Sequence[RowGroup],
    candidates: Sequence[tuple[Candidates, ...]],
) -> list[VerifiedRun]:
    """Arguments as for :func:`verify`."""
    runs: list[VerifiedRun | None] = [None] * len(groups)
    coupled, rejection = _by_rule(groups)
    for of_rule in (coupled, rejection):
        if not of_rule:
            continue
        part, rows = _part(logits, groups, of_rule)
        if of_rule is coupled:
            found = verify_coupled(sampler.sample(rows, part), part)
        else:
            ids, probs = _tensors([drawn for i in of_rule for drawn in candidates[i]], logits.device)
            found = verify_rejection(sampler.probs(rows, part), part, ids, probs)
        for i, run in zip(of_rule, found, strict=True):
            runs[i] = run
    return [run for run in runs if run is not None]


def propose_siblings(sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup], count: int) -> list[list[Drawn]]:
    """Up to ``count`` different draft tokens for one place of each group, the likeliest or first drawn first.

    Arguments as for :func:`propose`. Under rejection each comes with what it was drawn from, given those before it:
    with temperature 0 that is itself. With another temperature there are always ``count``, so that the shape of a tree
    tells nothing of the tokens in it; those for which no probability was left have none, and are never kept.
    """
    found = [
        [first, *(Drawn(token) for token in first.guesses[: count - 1])]
        for first in propose(sampler, logits, groups, count - 1)
    ]
    rejection = _by_rule(groups)[1] if count > 1 else []
    for i in rejection:
        found[i] = [one._replace(candidates=one.candidates or Candidates((one.token,), (1.0,))) for one in found[i]]
    random = [i for i in rejection if not groups[i].spec.sampling.is_greedy]
    if random:
        part, rows = _part(logits, groups, random)
        drafts = propose_several(sampler, rows, part, count)
        of_rank = [_rows_of(draft.tokens, draft.ids, draft.probs) for draft in drafts]
        for i, *drawn in zip(random, *of_rank, strict=True):
            found[i] = [Drawn(token, Candidates(tuple(ids), tuple(probs))) for token, ids, probs in drawn]
    return found


class Drawn(NamedTuple):
    """One draft token.

    Attributes:
        candidates: Under the rejection rule, what it was drawn from.
        guesses: Other tokens that may well stand in its place, the likeliest first.
        likelihoods: Under the coupled rule, how likely the token is to be kept, and each guess to be in its place.
    """

    token: int
    candidates: Candidates | None = None
    guesses: Tokens = ()
    likelihoods: tuple[float, ...] = ()


def propose(sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup], num_guesses: int = 0) -> list[Drawn]:
    """Draw one draft token per group by the rule its request names; under rejection, with what it was drawn from.

    Args:
        sampler: Applies each request's parameters.
        logits: float32 [N, at least V], the draft's.
        groups: N sequences, one row each.
        num_guesses: How many other tokens are wanted beside each, at most: ranked with the noise under the coupled
            rule, by probability under rejection.
    """
    proposals: list[Drawn] = []
    for part, rows in row_slices([1] * len(groups), sampler.vocab_size):
        proposals += _propose(sampler, logits[rows], groups[part], num_guesses)
    return proposals


def _propose(sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup], num_guesses: int) -> list[Drawn]:
    """Arguments as for :func:`propose`."""
    proposals = [Drawn(0)] * len(groups)
    coupled, rejection = _by_rule(groups)
    if coupled:
        part, rows = _part(logits, groups, coupled)
        for i, drawn in zip(coupled, _draw_coupled(sampler, rows, part, num_guesses), strict=True):
            proposals[i] = drawn
    if rejection:
        part, rows = _part(logits, groups, rejection)
        for i, drawn in zip(rejection, _draw_truncated(sampler, rows, part, num_guesses), strict=True):
            proposals[i] = drawn
    greedy = [i for i in rejection if num_guesses and groups[i].spec.sampling.temperature == 0]
    if greedy:
        # All probability is on one token, and what the target may say instead depends on the logits alone.
        part, rows = _part(logits, groups, greedy)
        for i, drawn in zip(greedy, _draw_coupled(sampler, rows, part, num_guesses), strict=True):
            proposals[i] = proposals[i]._replace(guesses=drawn.guesses)
    return proposals


def _draw_coupled(sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup], num_guesses: int) -> list[Drawn]:
    return drawn_coupled(groups, downloaded(rank_coupled(sampler, logits, groups, num_guesses)))


def rank_coupled(
    sampler: Sampler,
    logits: Tensor,
    groups: Sequence[RowGroup],
    num_guesses: int,
    laid_out: LaidOut | None = None,
    sent: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """What :func:`drawn_coupled` tells draft tokens from, on the device: the tokens, [N], come first.

    With kernels nothing waits for the device. Arguments as for :func:`propose` and :meth:`Sampler.sample`, of groups
    under the coupled rule.
    """
    if not num_guesses:
        return [sampler.sample(logits, groups, laid_out, sent)]
    ranked = sampler.choose_and_guess(logits, groups, num_guesses, laid_out, sent)
    return [ranked.chosen, ranked.tokens, ranked.scores]


def drawn_coupled(groups: Sequence[RowGroup], columns: Sequence[NDArray[Any]]) -> list[Drawn]:
    """Draft tokens from what :func:`rank_coupled` gives of the same groups, on the host."""
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
    """A coupled draft token with those that come after it: as many as were ranked, less itself; -1 is none."""
    if ranked[0] != token:  # a tie, which two ways of looking for the best have decided differently
        return Drawn(token, None, _guesses(token, ranked, len(ranked) - 1))
    guesses = _guesses(token, ranked, len(ranked) - 1)
    return Drawn(token, None, guesses, tuple(likelihoods[: 1 + len(guesses)]))


def _draw_truncated(sampler: Sampler, logits: Tensor, groups: Sequence[RowGroup], num_guesses: int) -> list[Drawn]:
    draft = propose_truncated(sampler, logits, groups)
    drawn: list[Drawn] = []
    for token, ids, probs in _rows_of(draft.tokens, draft.ids, draft.probs):
        possible = (other for other, prob in zip(ids, probs, strict=True) if prob > 0)
        guesses = _guesses(token, possible, num_guesses) if num_guesses else ()
        drawn.append(Drawn(token, Candidates(tuple(ids), tuple(probs)), guesses))
    return drawn


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


def _rows_of(*columns: Tensor) -> Iterable[tuple[Any, ...]]:
    """For each row of [N] or [N, C] tensors, its numbers and lists."""
    return zip(*(column.tolist() for column in downloaded(columns)), strict=True)


def _by_rule(groups: Sequence[RowGroup]) -> tuple[list[int], list[int]]:
    rejection = [i for i, group in enumerate(groups) if group.spec.sampling.acceptance == "rejection"]
    chosen = set(rejection)
    return [i for i in range(len(groups)) if i not in chosen], rejection


def _part(logits: Tensor, groups: Sequence[RowGroup], indexes: list[int]) -> tuple[list[RowGroup], Tensor]:
    """Some of the groups, and their rows; no copy where that is all of them."""
    if len(indexes) == len(groups):
        return list(groups), logits
    (numbers,) = on_device(logits.device, Rows(groups).numbers(indexes))
    return [groups[i] for i in indexes], logits[numbers]


def _tensors(candidates: Sequence[Candidates], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and probabilities, [draft tokens, widest]; shorter ones are filled with probability 0."""
    width = max(chain.from_iterable((len(drawn.ids), len(drawn.probs)) for drawn in candidates), default=1)
    ids = _filled([drawn.ids for drawn in candidates], width, np.int64)
    probs = _filled([drawn.probs for drawn in candidates], width, np.float32)
    ids_on_device, probs_on_device = on_device(device, ids, probs)
    return ids_on_device, probs_on_device


def _filled(lists: Sequence[Sequence[float]], width: int, dtype: type[np.int64 | np.float32]) -> NDArray[Any]:
    """[number of lists, width], with zeros after the end of each."""
    filled = np.zeros((len(lists), width), dtype=dtype)
    lengths = np.array([len(values) for values in lists], dtype=np.int64)
    filled[np.arange(width) < lengths[:, None]] = [*chain.from_iterable(lists)]
    return filled
