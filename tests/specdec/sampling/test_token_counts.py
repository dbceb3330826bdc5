"""Counts kept between steps are those of the log at hand, however logs grow, are cut back, or take turns."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from specdec.core.params import SamplingParams
from specdec.sampling.edits import Editor
from specdec.sampling.pipeline import RowGroup, Sampler
from specdec.sampling.rows import Rows
from specdec.sampling.token_counts import TokenCounts

from .reference import edited_row, make_spec, probs_of

VOCAB = 9
PENALTIES = SamplingParams(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3)


def make_counts(max_slots: int | None = None) -> TokenCounts:
    return TokenCounts(VOCAB, torch.device("cpu"), max_slots)


def check(token_counts: TokenCounts, *groups: RowGroup) -> list[int]:
    """Against a count from the beginning; gives how many tokens of each group are ahead of its slot's count."""
    token_counts.begin_step()
    counted = token_counts.counted(groups)
    token_counts.apply(*map(torch.from_numpy, counted.changes))
    for group, slot, ahead in zip(groups, counted.slots, counted.ahead, strict=True):
        start, lists_prompt = group.spec.output_start, group.spec.sampling.repetition_penalty != 1
        tokens = list(group.tokens)
        end = len(tokens) - len(ahead)
        assert tokens[end:] == ahead.tolist()
        output = Counter(tokens[start:end])
        assert token_counts.counts[slot].tolist() == [output[token] for token in range(VOCAB)]
        in_prompt = set(tokens[:start]) if lists_prompt else set()
        bits = int(token_counts.prompt_bits[slot])
        assert [bool(bits >> token & 1) for token in range(VOCAB)] == [token in in_prompt for token in range(VOCAB)]
    return [len(ahead) for ahead in counted.ahead]


def changed(rng: random.Random, log: list[int], output_start: int) -> list[int]:
    """The log with its end cut off, or in another prompt, and with new tokens."""
    if rng.random() < 0.1:
        log = [rng.randrange(VOCAB), *log[1:]]
    kept = rng.choice((len(log), len(log), rng.randrange(output_start, len(log) + 1)))
    return [*log[:kept], *(rng.randrange(-1, VOCAB + 2) for _ in range(rng.randrange(5)))]


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.4])
@pytest.mark.parametrize("max_slots", [None, 2])
def test_counts_of_logs_that_grow_shrink_and_take_turns(repetition_penalty: float, max_slots: int | None) -> None:
    rng = random.Random(int(repetition_penalty * 10))
    token_counts = make_counts(max_slots)
    params = SamplingParams(repetition_penalty=repetition_penalty, frequency_penalty=0.1)
    specs = [make_spec(params, seed % 9, output_start=4) for seed in range(12)]
    logs = [[rng.randrange(VOCAB) for _ in range(4)] for _ in specs]
    for step in range(300):
        if step % 50 == 49:
            specs[0] = make_spec(params, 0, output_start=4)  # its slot is free for another
        chosen = rng.sample(range(len(specs)), rng.randrange(1, 3))
        for i in chosen:
            logs[i] = changed(rng, logs[i], 4)[:40]
        if rng.random() < 0.1:
            token_counts.counted([RowGroup(specs[i], logs[i]) for i in chosen])  # and the step fails
        check(token_counts, *(RowGroup(specs[i], logs[i]) for i in chosen))
    num_slots = len(token_counts.counts)
    assert num_slots == max_slots or (max_slots is None and 12 <= num_slots <= 24)


def test_counts_that_were_made_in_inference_mode_go_on_outside() -> None:
    spec = make_spec(PENALTIES, output_start=2)
    with torch.inference_mode():
        token_counts = make_counts()
        check(token_counts, RowGroup(spec, [1, 2, 3]))
    check(token_counts, RowGroup(spec, [1, 2, 3, 4]))


def test_parts_of_a_step_are_counted_before_any_is_applied() -> None:
    """One of a step that has failed before is not taken for one that the device knows."""
    editor, logs = Editor(VOCAB, torch.device("cpu")), [[i, *range(5)] for i in range(4)]
    groups = [RowGroup(make_spec(PENALTIES, seed=i, output_start=3), log) for i, log in enumerate(logs)]
    plain = RowGroup(make_spec(SamplingParams(), output_start=3), logs[0])

    def cleared(*parts: Sequence[RowGroup]) -> list[int]:
        counts = [editor.lay_out(Rows(part), goes_on=number > 0).changes for number, part in enumerate(parts)]
        for changes in counts[: len(counts) - fails]:
            editor.token_counts.apply(*map(torch.from_numpy, changes))
        return [len(changes.cleared) for changes in counts]

    fails = False
    assert cleared(groups[:2], groups[2:]) == [2, 2]
    assert cleared(groups[:2], groups[2:]) == [0, 0]
    fails = True
    assert cleared(groups[:2], groups[2:]) == [0, 0]
    fails = False
    assert cleared([plain], groups[2:]) == [0, 2]


def test_branches_of_a_sequence_share_what_they_have_in_common() -> None:
    spec, token_counts = make_spec(PENALTIES, output_start=2), make_counts()
    log = [1, 2, 3, 4]
    branches = [RowGroup(spec, [*log, *tokens]) for tokens in ([5, 6], [5, 7, 7], [5])]
    assert check(token_counts, *branches) == [1, 2, 0]
    assert check(token_counts, branches[1]) == [0]
    assert check(token_counts, branches[0], RowGroup(spec, [9, *log[1:]])) == [0, 0]
    assert len(token_counts.counts) == 8


def test_sequences_with_the_same_seed_and_as_long_a_prompt_have_counts_of_their_own() -> None:
    token_counts, logs = make_counts(), [[i, *range(5)] for i in range(3)]
    specs = [make_spec(PENALTIES, seed=1, output_start=3) for _ in logs]
    for _ in range(4):
        groups = [RowGroup(spec, log) for spec, log in zip(specs, logs, strict=True)]
        check(token_counts, *groups)
        assert len({*token_counts.counted(groups).slots.tolist()}) == 3
        token_counts.apply(*map(torch.from_numpy, token_counts.counted(groups).changes))


def test_what_was_counted_is_not_counted_again() -> None:
    token_counts, log = make_counts(), [i % VOCAB for i in range(5000)]
    spec = make_spec(PENALTIES, output_start=100)
    sent = []
    for end in (4000, 4003, 4001, 4008):
        changes = token_counts.counted([RowGroup(spec, log[:end])]).changes
        sent.append((len(changes.cleared), changes.by.tolist()))
        token_counts.apply(*map(torch.from_numpy, changes))
        check(token_counts, RowGroup(spec, log[:end]))
    assert sent == [(1, [1] * 3900), (0, [1] * 3), (0, [-1] * 2), (0, [1] * 7)]


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
        torch.testing.assert_close(probs_of(sampler, logits, groups), torch.tensor(expected).softmax(1))
