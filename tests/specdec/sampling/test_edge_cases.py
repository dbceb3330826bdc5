"""Known edge cases of speculative sampling, by their numbers in the project's list."""

from __future__ import annotations

import pytest
import torch

from specdec.core.params import SamplingParams, StopCondition
from specdec.sampling.acceptance import verify_coupled
from specdec.sampling.noise import Purpose, uniforms
from specdec.sampling.pipeline import RowGroup, Sampler, VerifiedRun
from specdec.sampling.rejection import propose_truncated, verify_rejection

from .reference import TableModel, make_spec, plain_decoding, row_probs

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
    (result,) = verify_coupled(chosen, [RowGroup(spec, [1], (7, EOS, 8))])
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
    probs = Sampler(VOCAB).probs(torch.zeros(4, VOCAB), [group])
    assert (probs[:, [EOS, STOP]] == 0).all(1).tolist() == [True, True, False, False]
    ignoring = RowGroup(make_spec(SamplingParams(min_tokens=3, ignore_eos=True), eos_token_ids=(EOS,)), [1, 2])
    assert Sampler(VOCAB).probs(torch.zeros(1, VOCAB), [ignoring])[0, EOS] > 0


def test_edge_05_logprobs_come_from_the_tokens_own_row_for_every_kind_of_token() -> None:
    spec = make_spec(SamplingParams(logprobs=1), seed=3)
    sampler = Sampler(VOCAB)
    truth = plain_decoding(sampler, MODEL, spec, [1], 4)
    wrong = (truth[2] + 1) % VOCAB
    for draft in ((), tuple(truth[:3]), (*truth[:2], wrong)):
        group = RowGroup(spec, [1], draft)
        logits = MODEL.rows([group])
        (result,) = verify_coupled(sampler.sample(logits, [group]), [group])
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
    probs = Sampler(VOCAB).probs(logits, [group])
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
        (result,) = verify_coupled(sampler.sample(MODEL.rows([group]), [group]), [group])
        assert result.num_accepted == 4
        log = [*log, *result.run]
    assert log[1:] == truth[: len(log) - 1]


@pytest.mark.parametrize("params", [SamplingParams(min_p=0.3), SamplingParams(logit_bias=((5, -100.0), (7, 3.0)))])
def test_edge_07_min_p_and_logit_bias_act_on_every_row(params: SamplingParams) -> None:
    group = RowGroup(make_spec(params), [1], (2, 8, 9))
    logits = MODEL.rows([group])
    probs = Sampler(VOCAB).probs(logits, [group])
    assert probs.shape == (4, VOCAB)
    for i in range(4):
        naive = torch.tensor(row_probs(logits[i].tolist(), group.spec, [1]))
        torch.testing.assert_close(probs[i], naive)
        assert not torch.allclose(probs[i], logits[i].softmax(0))


def test_edge_08_the_draft_distribution_sent_is_the_one_drawn_from() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.8, logit_bias=((6, 2.0),))
    groups = [RowGroup(make_spec(params, seed), [1]) for seed in range(4000)]
    draft = propose_truncated(Sampler(VOCAB), MODEL.rows(groups), groups)
    expected = torch.tensor(row_probs(MODEL.row([1]).tolist(), groups[0].spec, [1]))
    sent = torch.zeros(VOCAB).index_add_(0, draft.ids[0], draft.probs[0])
    torch.testing.assert_close(sent, expected)
    drawn = draft.tokens.bincount(minlength=VOCAB) / len(groups)
    assert (drawn - expected).abs().max() < 5 * 0.5 / len(groups) ** 0.5
    assert not drawn[expected == 0].any()


def test_edge_08_a_greedy_draft_is_certain_and_leaves_the_target_without_its_token() -> None:
    sampler, token = Sampler(VOCAB), int(MODEL.row([1]).argmax())
    heads = [RowGroup(make_spec(SamplingParams(temperature=0.0), seed), [1]) for seed in range(3000)]
    draft = propose_truncated(sampler, MODEL.rows(heads), heads)
    assert draft.tokens.unique().tolist() == [token]
    assert draft.probs[0].tolist() == [1.0] + [0.0] * (VOCAB - 1)
    groups = [RowGroup(make_spec(seed=seed), [1], (token,)) for seed in range(3000)]
    results = verify_rejection(sampler.probs(MODEL.rows(groups), groups), groups, draft.ids, draft.probs)
    share = sum(result.num_accepted for result in results) / len(results)
    assert share == pytest.approx(MODEL.row([1]).softmax(0)[token].item(), abs=0.03)
    assert token not in {result.run[0] for result in results if result.num_accepted == 0}


def test_edge_09_a_token_without_target_probability_never_passes() -> None:
    target = torch.tensor([[0.0, 0.4, 0.6], [0.2, 0.3, 0.5]])
    groups = [RowGroup(make_spec(seed=seed), [1], (0,)) for seed in range(2000)]
    # The smaller the draft's own probability, the closer a non-strict test would come.
    for draft_prob in (1.0, 1e-3, 1e-30):
        ids = torch.tensor([[0, 1]]).expand(2000, 2)
        probs = torch.tensor([[draft_prob, 1 - draft_prob]]).expand(2000, 2)
        results = verify_rejection(target.repeat(2000, 1), groups, ids, probs)
        assert {result.num_accepted for result in results} == {0}
        assert 0 not in {result.run[0] for result in results}


def test_edge_09_the_test_is_strict_where_u_equals_the_ratio() -> None:
    group = RowGroup(make_spec(seed=4), [1], (0,))
    u = uniforms([4], [1], Purpose.TARGET, "cpu")[0, 0]
    # In float64 the ratio of these is u itself; the next larger target probability passes.
    ids, certain = torch.tensor([[0]]), torch.tensor([[1.0]], dtype=torch.float64)
    for target_prob, accepted in ((u, 0), (torch.nextafter(u, u + 1), 1)):
        target = torch.stack((target_prob, 1 - target_prob)).expand(2, 2)
        assert verify_rejection(target, [group], ids, certain)[0].num_accepted == accepted


def test_edge_09_where_no_mass_is_left_over_the_target_itself_is_drawn_from() -> None:
    # The draft claims more than the target everywhere, so that target - draft has no positive part.
    target = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    groups = [RowGroup(make_spec(seed=seed), [1], (0,)) for seed in range(1000)]
    ids, probs = torch.tensor([[0, 1]]).expand(1000, 2), torch.tensor([[1.0, 1.0]]).expand(1000, 2)
    results = verify_rejection(target.repeat(1000, 1), groups, ids, probs)
    corrected = [result.run[0] for result in results if result.num_accepted == 0]
    assert 400 < len(corrected) < 600
    assert 0.4 < sum(corrected) / len(corrected) < 0.6


def test_edge_10_a_seed_fixes_the_tokens_and_seeds_share_no_stream() -> None:
    texts = {tuple(plain_decoding(Sampler(VOCAB), MODEL, make_spec(seed=seed), [1], 12)) for seed in range(40)}
    assert len(texts) == 40
    for rule in ("coupled", "rejection"):
        runs = []
        for _ in range(2):
            group, sampler = RowGroup(make_spec(seed=6), [1], (2, 3)), Sampler(VOCAB)
            logits = MODEL.rows([group])
            if rule == "coupled":
                runs.append(verify_coupled(sampler.sample(logits, [group]), [group]))
            else:
                ids, probs = torch.tensor([[2, 3]] * 2), torch.full((2, 2), 0.5)
                runs.append(verify_rejection(sampler.probs(logits, [group]), [group], ids, probs))
        assert runs[0] == runs[1]


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
        (coupled,) = verify_coupled(sampler.sample(logits, [group]), [group])
        ids = torch.tensor([[token] for token in draft])
        (rejection,) = verify_rejection(sampler.probs(logits, [group]), [group], ids, torch.ones(2, 1))
        assert coupled == rejection == VerifiedRun((*draft, bonus), 2)


def _best(spec: object, tokens: list[int]) -> int:
    return row_probs(MODEL.row(tokens).tolist(), spec, tokens).index(1.0)  # type: ignore[arg-type]
