"""Known edge cases of speculative sampling, by their numbers in the project's list."""

from __future__ import annotations

import pytest
import torch

from specdec.core.params import SamplingParams, StopCondition
from specdec.sampling.acceptance import walk_drafts
from specdec.sampling.pipeline import RowGroup, Sampler, VerifiedRun

from .reference import TableModel, make_spec, plain_decoding, probs_of, row_probs

VOCAB, EOS, STOP = 10, 3, 4
LONG = 10_000
MODEL = TableModel(VOCAB, 0)


def test_edge_01_stop_comes_before_length_and_a_stop_past_the_cap_is_length() -> None:
    spec = make_spec(SamplingParams(stop_token_ids=(STOP,)), output_start=2, max_tokens=4, eos_token_ids=(EOS,))
    assert StopCondition.of(spec, LONG).walk(2, (9, 9, 9, STOP, 9)) == (4, "stop")
    assert StopCondition.of(spec, LONG).walk(2, (9, 9, 9, 9, STOP)) == (4, "length")
    assert StopCondition.of(spec, 4).walk(2, (9, EOS, STOP)) == (2, "stop")
    assert StopCondition.of(spec, 4).walk(2, (9, 9, EOS)) == (2, "length")


def test_edge_03_what_follows_an_end_inside_the_run_is_dropped() -> None:
    spec = make_spec(SamplingParams(temperature=0.0), output_start=1, eos_token_ids=(EOS, STOP))
    chosen = [7, EOS, 8, 9]
    (result,) = walk_drafts(chosen, [RowGroup(spec, [1], (7, EOS, 8))])
    assert result == VerifiedRun((7, EOS, 8, 9), 3)
    count, finish = StopCondition.of(spec, LONG).walk(1, result.run)
    assert (result.run[:count], finish) == ((7, EOS), "stop")


def test_edge_04_nothing_is_committed_beyond_max_tokens_or_the_context() -> None:
    spec = make_spec(output_start=3, max_tokens=5)
    for before in range(3, 8):
        for run_length in range(1, 9):
            count, finish = StopCondition.of(spec, LONG).walk(before, (9,) * run_length)
            assert count == min(run_length, 8 - before)
            assert (finish == "length") == (before + run_length >= 8)
            count, finish = StopCondition.of(spec, 8).walk(before, (9,) * run_length)
            assert before + count <= 8


def test_edge_04_min_tokens_counts_tokens_and_not_rounds() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(STOP,))
    spec = make_spec(params, output_start=1, eos_token_ids=(EOS,))
    # One output token before the round, and three drafts: rows with 1, 2, 3 and 4 tokens before them.
    group = RowGroup(spec, [1, 2], (5, 6, 7))
    probs = probs_of(Sampler(VOCAB), torch.zeros(4, VOCAB), [group])
    assert (probs[:, [EOS, STOP]] == 0).all(1).tolist() == [True, True, False, False]
    ignoring = RowGroup(make_spec(SamplingParams(min_tokens=3, ignore_eos=True), eos_token_ids=(EOS,)), [1, 2])
    assert probs_of(Sampler(VOCAB), torch.zeros(1, VOCAB), [ignoring])[0, EOS] > 0


def test_edge_05_logprobs_come_from_the_tokens_own_row_for_every_kind_of_token() -> None:
    spec = make_spec(SamplingParams(logprobs=1), seed=3)
    sampler = Sampler(VOCAB)
    truth = plain_decoding(sampler, MODEL, spec, [1], 4)
    wrong = (truth[2] + 1) % VOCAB
    for draft in ((), tuple(truth[:3]), (*truth[:2], wrong)):
        group = RowGroup(spec, [1], draft)
        logits = MODEL.rows([group])
        (result,) = walk_drafts(sampler.sample(logits, [group]), [group])
        (report,) = sampler.logprobs(logits, [group], [result])
        assert report is not None
        assert len(report) == len(result.run)
        for i, (token, entry) in enumerate(zip(result.run, report, strict=True)):
            expected = MODEL.row([1, *result.run[:i]]).double().log_softmax(0)
            assert entry.logprob == pytest.approx(expected[token].item(), abs=1e-9)


def test_edge_05_an_uncertain_token_never_has_a_logprob_of_zero() -> None:
    logits = torch.full((1, VOCAB), -20.0)
    logits[0, 2] = 10.0
    group = RowGroup(make_spec(SamplingParams(logprobs=2)), [1])
    (report,) = Sampler(VOCAB).logprobs(logits, [group], [VerifiedRun((2,), 0)])
    assert report is not None
    # 9 exp(-30), which float32 would lose.
    assert report[0].logprob == pytest.approx(-8.4219e-13, rel=1e-3)
    assert report[0].top[0] == (2, report[0].logprob)


def test_edge_06_a_rows_penalties_count_the_drafts_before_it_and_no_others() -> None:
    params = SamplingParams(frequency_penalty=0.7, presence_penalty=0.2, repetition_penalty=1.2)
    spec = make_spec(params, output_start=2)
    group = RowGroup(spec, [1, 2, 5], (5, 5, 6))
    logits = MODEL.rows([group])
    probs = probs_of(Sampler(VOCAB), logits, [group])
    for i in range(4):
        naive = row_probs(logits[i].tolist(), spec, [1, 2, 5, *group.draft[:i]])
        torch.testing.assert_close(probs[i], torch.tensor(naive))


def test_edge_06_penalties_after_a_long_run_are_those_of_plain_decoding() -> None:
    spec = make_spec(SamplingParams(frequency_penalty=1.5), seed=8)
    sampler = Sampler(VOCAB)
    truth = plain_decoding(sampler, MODEL, spec, [1], 24)
    log = [1]
    while len(log) < 20:
        group = RowGroup(spec, log, tuple(truth[len(log) - 1 : len(log) + 3]))
        (result,) = walk_drafts(sampler.sample(MODEL.rows([group]), [group]), [group])
        assert result.num_accepted == 4
        log = [*log, *result.run]
    assert log[1:] == truth[: len(log) - 1]


@pytest.mark.parametrize("params", [SamplingParams(min_p=0.3), SamplingParams(logit_bias=((5, -100.0), (7, 3.0)))])
def test_edge_07_min_p_and_logit_bias_act_on_every_row(params: SamplingParams) -> None:
    group = RowGroup(make_spec(params), [1], (2, 8, 9))
    logits = MODEL.rows([group])
    probs = probs_of(Sampler(VOCAB), logits, [group])
    assert probs.shape == (4, VOCAB)
    for i in range(4):
        naive = torch.tensor(row_probs(logits[i].tolist(), group.spec, [1]))
        torch.testing.assert_close(probs[i], naive)
        assert not torch.allclose(probs[i], logits[i].softmax(0))


def test_edge_10_a_seed_fixes_the_tokens_and_seeds_share_no_stream() -> None:
    texts = {tuple(plain_decoding(Sampler(VOCAB), MODEL, make_spec(seed=seed), [1], 12)) for seed in range(40)}
    assert len(texts) == 40
    group = RowGroup(make_spec(seed=6), [1], (2, 3))
    first, second = (walk_drafts(Sampler(VOCAB).sample(MODEL.rows([group]), [group]), [group]) for _ in range(2))
    assert first == second


def test_edge_10_draws_after_a_stop_do_not_shift_what_comes_later() -> None:
    spec, sampler = make_spec(seed=2), Sampler(VOCAB)
    truth = plain_decoding(sampler, MODEL, spec, [1], 8)
    # A verification whose result is thrown away, and one of another sequence, in between.
    group = RowGroup(spec, [1], tuple(truth[:6]))
    other = RowGroup(make_spec(seed=77), [1, 5, 6], (1, 2))
    sampler.sample(MODEL.rows([group, other]), [group, other])
    assert plain_decoding(sampler, MODEL, spec, [1, *truth[:3]], 5) == truth[3:]


def test_edge_12_the_bonus_uses_the_whole_pipeline_and_is_not_accepted() -> None:
    params = SamplingParams(top_k=1, frequency_penalty=2.0, logit_bias=((7, 1.0),))
    spec = make_spec(params, seed=1)
    for seed in range(10):
        group = RowGroup(make_spec(params, seed), [1], (2, 7))
        logits, sampler = MODEL.rows([group]), Sampler(VOCAB)
        naive = [row_probs(logits[i].tolist(), spec, [1, 2, 7][: i + 1]) for i in range(3)]
        # Make the draft right, so that the last row's token is a bonus.
        draft = (naive[0].index(1.0),)
        draft = (*draft, _best(spec, [1, *draft]))
        group = RowGroup(group.spec, [1], draft)
        logits, bonus = MODEL.rows([group]), _best(spec, [1, *draft])
        assert walk_drafts(sampler.sample(logits, [group]), [group]) == [VerifiedRun((*draft, bonus), 2)]


def _best(spec: object, tokens: list[int]) -> int:
    return row_probs(MODEL.row(tokens).tolist(), spec, tokens).index(1.0)  # type: ignore[arg-type]
