"""Steps that are decided by kernels: all arrays go to the device at once, and one record comes back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.messages import Candidates
from specdec.executor.staging import Field, Layout, Record, Staging
from specdec.kernels.sample import NUM_ACCEPTED, NUM_FIXED, SampleStep, record_width
from specdec.sampling.edits import Editor, Edits, padded
from specdec.sampling.logprobs import entries_of, logprob_numbers
from specdec.sampling.rows import UNUSED_TRUNCATION, LogprobReport, Rows, VerifiedRun

_LEAST_CAPABILITY = (8, 0)
_WORD_BYTES, _ALIGNMENT = 4, 4
"""Of what is sent: int32 words, and in words where an array may begin."""
_NOTHING = Candidates((), ())


def runs_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device: CUDA from compute capability 8.0, with Triton."""
    return device.type == "cuda" and _can_run(device)


@cache
def _can_run(device: torch.device) -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


_TYPES = {np.int32: torch.int32, np.float32: torch.float32, np.int64: torch.int64, np.float64: torch.float64}


class StagedStep(NamedTuple):
    """What kernels are given of a step.

    Attributes:
        step: Its arrays, on the device.
        options: What is used at all, by the names of ``TritonSampler.decide``.
        others: What else was sent.
    """

    step: SampleStep
    options: dict[str, bool]
    others: list[Tensor]


class KernelSampler:
    """Decides steps by kernels; its buffers grow by doubling with the largest step.

    Args:
        vocab_size: V.
        editor: Lays out edits, for the device where rows are sampled.
    """

    def __init__(self, vocab_size: int, editor: Editor) -> None:
        self._vocab_size, self._device, self.editor = vocab_size, editor.device, editor
        self._sizes = self._room = 0, 0, 0
        self._kernels: Any = None
        self._record: Record | None = None
        self._staging: Staging | None = None
        self._sent_shapes: list[tuple[type[Any], tuple[int, ...]]] = []
        self._views: list[Tensor] = []

    def sample(self, logits: Tensor, rows: Rows) -> Tensor:
        """The coupled rule's token for every row: int32 [N], overwritten by the next step.

        Args:
            logits: [N, at least V], as the model gave them; not changed.
            rows: Of them; groups with a grammar have their masks.
        """
        self._decide(logits, self.stage(rows), rows)
        return self._chosen(rows)

    def score(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """The same, and by what they were chosen, with noise: float32 [N, V]."""
        scores = torch.empty(rows.num_rows, self._vocab_size, device=self._device)
        self._decide(logits, self.stage(rows), rows, scores)
        return self._chosen(rows), scores

    def verify(
        self, logits: Tensor, rows: Rows, candidates: Sequence[tuple[Candidates, ...]], flags: Tensor | None
    ) -> tuple[list[VerifiedRun], list[LogprobReport], NDArray[np.bool_]]:
        """Decide by both rules. One transfer brings all of it to the host, and there is one wait.

        Args:
            logits: As above.
            rows: As above.
            candidates: Of each group, what its draft was drawn from under the rejection rule.
            flags: bool [F], on the device, to be brought along.

        Returns:
            Each group's run, what to report of it, and the flags.
        """
        asking = rows.using(lambda params: params.logprobs is not None)
        num_top = [rows.groups[i].spec.sampling.logprobs or 0 for i in asking]
        most = max((rows.counts[i] for i in asking), default=0)
        first = np.array([rows.starts[i] for i in asking], np.int64)
        staged = self.stage(rows, candidates, np.array(asking, np.int64), first)
        self._make_room(rows)
        width = 2 + 2 * min(max(2, *num_top, 0), self._vocab_size)
        num_flags = 0 if flags is None else len(flags)
        record = self._begin_record(num_flags, len(asking) * most, width)
        self._decide(logits, staged, rows)
        if flags is not None:
            record.tensors["flags"][:num_flags].copy_(flags)
        if asking:
            given = record.tensors["numbers"][: len(asking) * most * width]
            numbers, starts = staged.others
            given.copy_(self._logprobs(logits, numbers, starts, most, max(num_top)).view(-1))
        # Numbers come last, and are not copied where nobody asks.
        record.download(None if asking else record.layout.offsets["numbers"])
        arrays = record.collect()
        decided = arrays["decided"]
        runs = [_run(decided[i], len(decided[i]) // 2 - 1, bool(group.parents)) for i, group in enumerate(rows.groups)]
        reports: list[LogprobReport] = [None] * len(runs)
        reported = arrays["numbers"][: len(asking) * most * width].reshape(len(asking), most, width)
        for i, own, top in zip(asking, reported, num_top, strict=True):
            own = own[: len(runs[i].run)]
            reports[i] = tuple(entries_of(own.tolist(), [top] * len(own)))
        return runs, reports, arrays["flags"][:num_flags] != 0

    def stage(
        self, rows: Rows, candidates: Sequence[tuple[Candidates, ...]] = (), *others: NDArray[np.int64]
    ) -> StagedStep:
        """Lay a step out, and bring it to the device in one transfer; it stays there until the next step."""
        edits = self.editor.lay_out(rows)
        arrays, options = _laid_out(rows, edits, candidates)
        sent = self._sent([*arrays.values(), *edits.changes, *others])
        fields = dict(zip(arrays, sent, strict=False))
        changes, rest = sent[len(fields) :][: len(edits.changes)], sent[len(fields) + len(edits.changes) :]
        counts = self.editor.token_counts
        if options["penalties"]:
            counts.apply(*changes)
        return StagedStep(SampleStep(counts=counts.counts, prompt_bits=counts.prompt_bits, **fields), options, rest)

    def _sent(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Arrays of items of whole words, on the device."""
        counts = [values.nbytes // _WORD_BYTES for values in arrays]
        *starts, end = accumulate((-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts), initial=0)
        if self._staging is None or self._staging.layout.num_words < end:
            self._staging = Staging(Layout((Field("words", (1 << (end - 1).bit_length(),)),)), self._device)
            self._sent_shapes = []
        words = self._staging.begin()["words"]
        for values, start, count in zip(arrays, starts, counts, strict=True):
            words[start : start + count] = np.ascontiguousarray(values).reshape(-1).view(np.int32)
        self._staging.upload(end)
        shapes = [(values.dtype.type, values.shape) for values in arrays]
        if shapes != self._sent_shapes:  # steps that decode have those of the step before
            self._sent_shapes = shapes
            parts = (self._staging.words[start : start + count] for start, count in zip(starts, counts, strict=True))
            self._views = [
                part.view(_TYPES[dtype]).view(shape) for part, (dtype, shape) in zip(parts, shapes, strict=True)
            ]
        return self._views

    def _decide(self, logits: Tensor, staged: StagedStep, rows: Rows, scores: Tensor | None = None) -> None:
        self._make_room(rows)
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # Triton launches there
            self._kernels.decide(logits, staged.step, scores=scores, **staged.options)

    def _chosen(self, rows: Rows) -> Tensor:
        chosen: Tensor = self._kernels.chosen[: rows.num_rows]
        return chosen

    def _logprobs(self, logits: Tensor, numbers: Tensor, starts: Tensor, most: int, num_top: int) -> Tensor:
        """What to report of the tokens of records; of those that are not there anything.

        Args:
            logits: Of all rows.
            numbers: int64 [G], the groups that ask.
            starts: int64 [G], their first rows.
            most: Tokens of each.
            num_top: See :func:`logprob_numbers`.
        """
        decided = self._kernels.record.index_select(0, numbers)
        width = decided.shape[1] // 2 - 1
        tokens, path = decided[:, NUM_FIXED:][:, :most], decided[:, NUM_FIXED + width :][:, : most - 1]
        of_token = torch.cat((starts.unsqueeze(1), starts.unsqueeze(1) + 1 + path), 1)
        return logprob_numbers(
            logits[:, : self._vocab_size], of_token.reshape(-1), tokens.clamp(min=0).long().reshape(-1), num_top
        )

    def _make_room(self, rows: Rows) -> None:
        needed = rows.num_rows, len(rows.groups), max(rows.counts)
        if not _holds(self._sizes, needed):
            from specdec.kernels.triton.sample import TritonSampler

            self._sizes, self._room = _doubled(self._sizes, needed), (0, 0, 0)
            self._kernels = self._record = None  # its buffers go first
            self._kernels = TritonSampler(self._vocab_size, *self._sizes, self._device)

    def _begin_record(self, num_flags: int, num_numbers: int, width: int) -> Record:
        """The record, which the kernels write from now on."""
        needed = num_flags, num_numbers * width, 0
        if self._record is None or not _holds(self._room, needed):
            self._room = _doubled(self._room, needed)
            num_flags, num_numbers, _ = self._room
            decided = Field("decided", (self._sizes[1], record_width(self._sizes[2])))
            others = Field("flags", (num_flags,)), Field("numbers", (num_numbers,), torch.float64)
            self._record = Record(Layout((decided, *others)), self._device, depth=1)
            self._kernels.record = self._record.tensors["decided"]
        return self._record


_Sizes = tuple[int, int, int]


def _holds(sizes: _Sizes, needed: _Sizes) -> bool:
    return all(size >= number for size, number in zip(sizes, needed, strict=True))


def _doubled(sizes: _Sizes, needed: _Sizes) -> _Sizes:
    """Powers of two that hold what is needed, and not less than before."""
    first, second, third = (
        max(size, 1 << (number - 1).bit_length() if number else 0) for size, number in zip(sizes, needed, strict=True)
    )
    return first, second, third


def _run(record: NDArray[np.int32], width: int, is_tree: bool) -> VerifiedRun:
    count = int(record[NUM_ACCEPTED])
    run = record[NUM_FIXED : NUM_FIXED + count + 1].tolist()
    path = record[NUM_FIXED + width :][:count].tolist() if is_tree else ()
    return VerifiedRun(tuple(run), count, tuple(path))


def _laid_out(
    rows: Rows, edits: Edits, candidates: Sequence[tuple[Candidates, ...]]
) -> tuple[dict[str, NDArray[Any]], dict[str, bool]]:
    """The arrays of a step but for what is kept by slot, by the names of :class:`SampleStep`; what is used of it."""
    groups = rows.groups
    drawn: list[Candidates] = []
    for group, own in zip(groups, candidates or [()] * len(groups), strict=True):
        drawn += (_NOTHING, *(own or [_NOTHING] * len(group.draft)))
    temperatures, truncation = rows.temperatures(), rows.truncation()
    rejects = np.array([group.spec.sampling.acceptance == "rejection" for group in groups], np.int32)
    arrays = {
        "sequence": rows.spread(np.arange(len(groups), dtype=np.int32)),
        "position": np.array(rows.positions(), np.int32),
        "draft": rows.drafts(),
        "parent": rows.parents(),
        "first": np.array(rows.starts, np.int32),
        "count": np.array(rows.counts, np.int32),
        "seed": np.array([group.spec.seed for group in groups], np.uint64).view(np.int64),
        "temperature": temperatures,
        "top_k": truncation[:, 0].astype(np.int32),
        "top_p": truncation[:, 1].copy(),
        "min_p": truncation[:, 2].astype(np.float32),
        "slot": edits.slots.clip(0),
        "penalties": edits.penalties,
        "ahead": edits.ahead,
        "bias_token": _widened(edits.bias_token, -1),
        "bias": _widened(edits.bias, 0),
        "allowed": edits.allowed,
        "grammar": edits.grammar,
        "masks": edits.masks,
        "ended": _widened(edits.ended, -1),
        "bad": _widened(edits.bad, -1),
        "rejects": rejects,
        "draft_ids": _widened(padded([one.ids for one in drawn], np.int32, -1), -1, 1),
        "draft_probs": _widened(padded([one.probs for one in drawn], np.float32, 0), 0, 1),
    }
    options = {
        "penalties": bool((edits.slots >= 0).any()),
        "truncation": bool((truncation != UNUSED_TRUNCATION).any()),
        "noise": bool((temperatures > 0).any()),
        "rejection": bool(rejects.any()),
    }
    return arrays, options


def _widened(values: NDArray[Any], fill: float, least: int = 0) -> NDArray[Any]:
    """[.., a power of two, or 0]: kernels are compiled for each width."""
    width = max(least, 1 << (values.shape[1] - 1).bit_length() if values.shape[1] else 0)
    if width == values.shape[1]:
        return values
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)
