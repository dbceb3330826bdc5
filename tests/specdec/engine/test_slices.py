"""Many rows are sampled slice by slice: the same tokens and log probabilities, in bounded memory."""

import numpy as np
import pytest
import torch

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.sampling import logprobs, rows
from specdec.sampling.acceptance import decide, propose
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.sampling.rows import Rows, on_device, row_slices

VOCAB = 97
PARAMS = (
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=2),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, logprobs=0),
    SamplingParams(temperature=1.2, logprobs=1),
    SamplingParams(temperature=1.0),
)
ROWS_BYTES = 4 * VOCAB


def groups_of(num: int) -> list[RowGroup]:
    made = []
    for i in range(num):
        spec = SequenceSpec(PARAMS[i % len(PARAMS)], seed=i, output_start=1, max_tokens=9)
        made.append(RowGroup(spec, [3, 5, i % 7], tuple((7 * i + j) % VOCAB for j in range(i % 5))))
    return made


def test_slices_hold_whole_groups_and_no_more_rows_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_SLICE_BYTES", 4 * ROWS_BYTES)
    counts = [1, 2, 1, 1, 9, 3, 1]
    found = list(row_slices(counts, VOCAB))
    assert [(part.start, part.stop, rows.start, rows.stop) for part, rows in found] == [
        (0, 3, 0, 4),
        (3, 4, 4, 5),
        (4, 5, 5, 14),
        (5, 7, 14, 18),
    ]


@pytest.mark.parametrize("with_tree", [False, True])
def test_what_is_decided_in_slices_is_what_is_decided_at_once(with_tree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, generator = groups_of(24), torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(Rows(groups).num_rows, VOCAB, generator=generator)
    for i in (9, 12) if with_tree else ():
        groups[i] = groups[i]._replace(parents=(-1, -1, 0, 1)[: len(groups[i].draft)])

    def decided() -> tuple[object, ...]:
        sampler = Sampler(VOCAB)
        runs = decide(sampler, logits, groups).runs
        reports = sampler.logprobs(logits, groups, runs)
        proposed = propose(sampler, logits[: len(groups)], [RowGroup(g.spec, g.tokens) for g in groups], 2)
        return runs, reports, [one._replace(likelihoods=()) for one in proposed]

    whole = decided()
    sampled: list[int] = []
    choose = Sampler.sample
    monkeypatch.setattr(rows, "MAX_SLICE_BYTES", 6 * ROWS_BYTES)
    monkeypatch.setattr(logprobs, "_MAX_SLICE_BYTES", 2 * ROWS_BYTES)
    monkeypatch.setattr(
        Sampler, "sample", lambda self, rows, part: sampled.append(len(rows)) or choose(self, rows, part)
    )
    assert decided() == whole
    assert len(sampled) > 5
    assert max(sampled) <= 6


def test_arrays_go_to_a_device_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.array([True, False, True]),
        np.zeros((0, 4), dtype=np.int32),
        np.array([0.5, 1.5, -2.0], dtype=np.float32),
        np.array([1e300], dtype=np.float64),
    ]
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: sent.append(tensor) or tensor)
    for device in ("meta", "cpu"):
        found = on_device(torch.device(device), *arrays)
        assert all(torch.equal(tensor, torch.from_numpy(values)) for tensor, values in zip(found, arrays, strict=True))
    assert len(sent) == 1
