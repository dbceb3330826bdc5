"""From the configuration to what the engine library takes."""

from __future__ import annotations

from cluster.config.app import AppArgs
from cluster.models.sources import backend_of, backend_options
from tests.cluster import processors


def options_with(*names):
    args = AppArgs.model_validate({"logits_processors": list(names)})
    return [backend_options(args, model) for model in (args.target, args.draft)]


def test_both_models_get_the_processors_in_their_order():
    names = ("tests.cluster.processors:no_newline", "tests.cluster.processors:TABLE.get")
    for options in options_with(*names):
        first, second = options.logits_processors
        assert first is processors.no_newline
        assert second("newline") == processors.NEWLINE
    assert backend_options(AppArgs(), AppArgs().target).logits_processors == ()


def test_recurrent_states_reach_back_a_draft_and_twice_as_far_where_a_draft_runs_ahead():
    for placement, of_draft in ("separate", 34), ("same_process", 17):
        args = AppArgs.model_validate({"num_speculative_tokens": 16, "draft": {"placement": placement}})
        assert [backend_options(args, model).rollback_tokens for model in (args.target, args.draft)] == [17, of_draft]


def test_recurrent_states_reach_back_a_block_or_no_prompt_would_find_anothers():
    for block_size, reaches in ((8, [8, 18]), (16, [16, 18]), (64, [64, 64])):
        args = AppArgs(num_speculative_tokens=2, block_size=block_size)
        assert [backend_options(args, model).rollback_tokens for model in (args.target, args.draft)] == reaches


def around(role, build, args, *, tag="none"):
    return (role, build() if tag == "wrapped" else None, args.block_size)


def test_a_function_of_ones_own_wraps_or_replaces_a_backend():
    args = AppArgs(block_size=8, backend="tests.cluster.models.test_sources:around:tag=wrapped")
    assert backend_of(args, "target", lambda: "own") == ("target", "own", 8)
    args = AppArgs(backend="tests.cluster.models.test_sources:around")
    assert backend_of(args, "draft", lambda: "own")[:2] == ("draft", None)
    assert backend_of(AppArgs(), "target", lambda: "own") == "own"
