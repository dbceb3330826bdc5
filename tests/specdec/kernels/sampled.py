"""Steps to sample by, laid out for the kernels from the groups of rows that the sampler in torch takes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.drafts import path_to
from specdec.core.params import SamplingParams
from specdec.kernels.sample import SampleStep
from specdec.sampling.edits import _completing
from specdec.sampling.rows import RowGroup
from tests.specdec.sampling.reference import make_spec, random_params


def step_of(groups: Sequence[RowGroup], vocab_size: int, padding: int = 0) -> SampleStep:
    """The arrays of a step; each sequence's counts are in a slot of another number."""
    rows: dict[str, list] = {
        name: [] for name in ("sequence", "position", "draft", "parent", "grammar", "ended", "bad")
    }
    first, count, allowed = [], [], []
    masks: list[Tensor] = []
    slots = [*range(len(groups))][::-1]
    counts = torch.zeros(len(groups), vocab_size, dtype=torch.int32)
    prompts = torch.zeros(len(groups), vocab_size, dtype=torch.bool)
    for number, group in enumerate(groups):
        params, draft = group.spec.sampling, list(group.draft)
        tree = group.parents or range(-1, len(draft) - 1)
        start = len(rows["sequence"])
        first.append(start)
        count.append(1 + len(draft))
        for token in group.tokens[group.spec.output_start :]:
            counts[slots[number], token] += 1
        prompts[slots[number], list(group.tokens[: group.spec.output_start])] = True
        allowed.append(-1)
        if params.allowed_token_ids:
            allowed[-1] = len(masks)
            masks.append(bits([token in params.allowed_token_ids for token in range(vocab_size)]))
        for node in range(-1, len(draft)):
            path = [draft[at] for at in path_to(tree, node)] if node >= 0 else []
            one = RowGroup(group.spec, [*group.tokens, *path])
            rows["sequence"].append(number)
            rows["position"].append(len(one.tokens))
            rows["draft"].append(draft[node] if node >= 0 else -1)
            rows["parent"].append(start + 1 + tree[node] if node >= 0 else -1)
            short = one.num_output_tokens < params.min_tokens
            rows["ended"].append(list(group.spec.ending_token_ids) if short else [])
            rows["bad"].append([token for _, token in _completing(one)] if params.bad_words else [])
            rows["grammar"].append(-1 if group.mask is None else len(masks))
            if group.mask is not None:
                masks.append(group.mask[node + 1])
    for name in rows:
        rows[name] += [[] if name in ("ended", "bad") else -1] * padding
    wanted = [group.spec.sampling for group in groups]
    biases = [list(one.logit_bias) for one in wanted]
    seeds = [group.spec.seed - (group.spec.seed >> 63 << 64) for group in groups]
    width = max(map(len, biases))
    return SampleStep(
        **{name: int32(rows[name]) for name in ("sequence", "position", "draft", "parent", "grammar")},
        first=int32(first),
        count=int32(count),
        seed=torch.tensor(seeds),
        temperature=torch.tensor([0.0 if one.is_greedy else one.temperature for one in wanted]),
        top_k=int32([one.top_k for one in wanted]),
        top_p=torch.tensor([one.top_p for one in wanted], dtype=torch.float64),
        min_p=torch.tensor([math.log(one.min_p) if one.min_p else -math.inf for one in wanted]),
        slot=int32(slots),
        penalties=torch.tensor([(o.repetition_penalty, o.frequency_penalty, o.presence_penalty) for o in wanted]),
        counts=counts,
        prompt_bits=torch.stack([bits(row.tolist()) for row in prompts]),
        bias_token=padded([[token for token, _ in one] for one in biases]),
        bias=torch.tensor([[b for _, b in one] + [0.0] * (width - len(one)) for one in biases]).view(
            len(groups), width
        ),
        allowed=int32(allowed),
        masks=torch.stack(masks) if masks else torch.zeros(0, 1, dtype=torch.int32),
        ended=padded(rows["ended"]),
        bad=padded(rows["bad"]),
        rejects=int32([one.acceptance == "rejection" for one in wanted]),
        draft_ids=torch.full((len(rows["draft"]), 1), -1, dtype=torch.int32),
        draft_probs=torch.zeros(len(rows["draft"]), 1),
    )


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded(lists: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, lists))
    return int32([[*values, *[-1] * (width - len(values))] for values in lists]).view(len(lists), width)


def bits(allowed: Sequence[bool]) -> Tensor:
    """int32 [ceil(V / 32)]."""
    words = [sum(1 << i for i, one in enumerate(allowed[at : at + 32]) if one) for at in range(0, len(allowed), 32)]
    return int32([word - (word >> 31 << 32) for word in words])


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
