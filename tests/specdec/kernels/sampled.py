"""Groups of rows that use everything, and what kernels are told of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.params import SamplingParams
from specdec.sampling.edits import Editor
from specdec.sampling.on_kernels import KernelSampler, StagedStep
from specdec.sampling.rows import RowGroup, Rows
from specdec.sampling.token_counts import bits_of
from tests.specdec.sampling.reference import make_spec, random_params


def step_of(groups: Sequence[RowGroup], vocab_size: int) -> StagedStep:
    """What kernels are given of groups."""
    sampler = KernelSampler(vocab_size, Editor(vocab_size, torch.device("cpu")))
    return sampler.staged(sampler.lay_out(Rows(groups)))


def bits(allowed: Sequence[bool]) -> Tensor:
    """int32 [ceil(V / 32)]."""
    return torch.from_numpy(bits_of([token for token, is_in in enumerate(allowed) if is_in], len(allowed)))


def random_groups(
    rng: random.Random, vocab_size: int, count: int, trees: bool = False, **fields: object
) -> list[RowGroup]:
    """Sequences with every parameter on in about half of them, and drafts, some of which are trees."""
    groups = []
    for _ in range(count):
        params = random_params(rng, vocab_size, **fields) if fields or rng.random() < 0.9 else SamplingParams()
        tokens = rng.choices(range(vocab_size), k=rng.randrange(3, 12))
        draft = tuple(rng.choices(range(vocab_size), k=rng.randrange(5)))
        mask = None
        if rng.random() < 0.4:
            mask = torch.stack([bits([rng.random() < 0.3 for _ in range(vocab_size)]) for _ in range(1 + len(draft))])
        spec = make_spec(params, rng.getrandbits(64), output_start=2, eos_token_ids=(0,))
        parents = tuple(rng.randrange(-1, i) if i else -1 for i in range(len(draft))) if trees else ()
        groups.append(RowGroup(spec, tokens, draft, mask, parents))
    return groups
