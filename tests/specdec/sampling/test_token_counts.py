"""Counts kept between steps are those of the log at hand, however logs grow, are cut back, or take turns."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from specdec.core.params import SamplingParams
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.sampling.token_counts import History, TokenCounts

from .reference import edited_row, make_spec

VOCAB = 9
PENALTIES = SamplingParams(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3)


def check(token_counts: TokenCounts, group: RowGroup) -> None:
    """Against a count from the beginning."""
    counted = token_counts.counted(group, VOCAB)
    start, lists_prompt = group.spec.output_start, group.spec.sampling.repetition_penalty != 1
    output = Counter(group.tokens[start:])
    ids = counted.ids.tolist()
    known = {*output, *group.draft, *(group.tokens[:start] if lists_prompt else ())} & set(range(VOCAB))
    assert len(ids) == len(set(ids))
    # One more at most: a token to fill up with, where all the others are drafted.
    assert known <= set(ids)
    assert len(set(ids) - known) <= (known <= set(group.draft))
    assert counted.counts.tolist() == [output[i] for i in ids]
    in_prompt = set(group.tokens[:start]) if lists_prompt else set()
    assert counted.seen.tolist() == [i in output or i in in_prompt for i in ids]
    assert [ids[p] if p >= 0 else None for p in counted.places] == [t if t in known else None for t in group.draft]
    assert ids[counted.undrafted] not in group.draft or set(range(VOCAB)) <= set(group.draft)


def changed(rng: random.Random, log: list[int], output_start: int) -> list[int]:
    """The log with its end cut off, or in another prompt, and with new tokens."""
    if rng.random() < 0.1:
        log = [rng.randrange(VOCAB), *log[1:]]
    kept = rng.choice((len(log), len(log), rng.randrange(output_start, len(log) + 1)))
    return [*log[:kept], *(rng.randrange(-1, VOCAB + 2) for _ in range(rng.randrange(5)))]


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.4])
@pytest.mark.parametrize("max_kept_tokens", [1 << 20, 200, 0])
def test_counts_of_logs_that_grow_shrink_and_take_turns(repetition_penalty: float, max_kept_tokens: int) -> None:
    rng = random.Random(int(max_kept_tokens + repetition_penalty * 10))
    token_counts = TokenCounts(max_kept_tokens)
    params = SamplingParams(repetition_penalty=repetition_penalty, frequency_penalty=0.1)
    specs = [make_spec(params, seed, output_start=4) for seed in (1, 1, 2)]
    logs = [[rng.randrange(VOCAB) for _ in range(4)] for _ in specs]
    for _ in range(300):
        i = rng.randrange(len(specs))
        logs[i] = changed(rng, logs[i], 4)[:40]
        draft = tuple(rng.randrange(-2, VOCAB + 2) for _ in range(rng.randrange(12)))
        check(token_counts, RowGroup(specs[i], logs[i], draft))
        kept = sum(history.size for _, history in token_counts._kept.values())
        assert kept == token_counts._num_tokens
        assert kept <= max_kept_tokens or len(token_counts._kept) == 1


def test_sequences_with_the_same_seed_and_as_long_a_prompt_have_histories_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushed: list[int] = []
    push = History._push
    monkeypatch.setattr(History, "_push", lambda self, token: (pushed.append(token), push(self, token)))
    token_counts, logs = TokenCounts(), [[i, *range(5)] for i in range(3)]
    specs = [make_spec(PENALTIES, seed=1, output_start=3) for _ in logs]
    for _ in range(4):
        for spec, log in zip(specs, logs, strict=True):
            check(token_counts, RowGroup(spec, log))
    assert len(pushed) == 3 * 3, "each output is counted once, not in every step"


def test_what_was_counted_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[int] = []
    push = History._push
    monkeypatch.setattr(History, "_push", lambda self, token: (pushed.append(token), push(self, token)))
    token_counts, log = TokenCounts(), [i % VOCAB for i in range(5000)]
    spec = make_spec(PENALTIES, output_start=100)
    for end in (4000, 4003, 4001, 4008):
        check(token_counts, RowGroup(spec, log[:end], (1, 2)))
    assert pushed == [*log[100:4000], *log[4000:4003], *log[4001:4008]]


def test_one_sampler_over_many_steps_penalises_like_plain_python() -> None:
    """Rows of sequences, of branches that share a seed, and of drafts that hold the whole vocabulary."""
    rng, sampler = random.Random(3), Sampler(VOCAB)
    generator = torch.Generator().manual_seed(3)
    specs = [make_spec(PENALTIES, 1, output_start=3), make_spec(PENALTIES, 2, output_start=1), make_spec(seed=3)]
    logs = [[rng.randrange(VOCAB) for _ in range(3)] for _ in specs]
    for _ in range(30):
        logs = [changed(rng, log, 3) for log in logs]
        drafts = [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(5))) for _ in specs]
        groups = [RowGroup(*each) for each in zip(specs, logs, drafts, strict=True)]
        groups += [RowGroup(specs[0], [*logs[0], 5, 5], (5, 6)), RowGroup(specs[1], [4], (*range(VOCAB), 4))]
        contexts = [(g.spec, [*g.tokens, *g.draft[:i]]) for g in groups for i in range(1 + len(g.draft))]
        logits = torch.randn(len(contexts), VOCAB, generator=generator) * 3
        expected = [edited_row(row, *context) for row, context in zip(logits.tolist(), contexts, strict=True)]
        torch.testing.assert_close(sampler.probs(logits, groups), torch.tensor(expected).softmax(1))
