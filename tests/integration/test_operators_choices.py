"""What the operator and the checkpoint decide reaches the workers: rule, processors, defaults, vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from pydantic import TypeAdapter

from specdec.engine.trace import WorkerTrace
from tests.integration.running import RunningService
from tests.specdec.checkpoints import WITH_GAPS, save_checkpoint

NO_A = "tests.cluster.processors:no_a"
BOTH_WORDS = {"1": 100, "5": 100}
END = WITH_GAPS["<end>"]
MOST_ANSWERS = 20
DRAFTS = ("--num-speculative-tokens", "4", "--mode", "in_turn")
"""Drafts whatever the controller would think of them; the target waits for the first ones."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pair whose vocabulary has gaps, and whose target keeps the most likely token unless told otherwise."""
    target = save_checkpoint(tmp_path_factory.mktemp("target"), temperature=0.0, max_new_tokens=5)
    return {"target": target, "draft": save_checkpoint(tmp_path_factory.mktemp("draft"), seed=1)}


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[OpenAI]:
    flags = [part for role, folder in folders.items() for part in (f"--{role}", str(folder))]
    running = RunningService(*flags, "--acceptance", "rejection", "--logits-processors", NO_A, "--trace", *DRAFTS)
    yield running.client()
    assert running.stop() == 0


def ask(client: OpenAI, folders: dict[str, Path], **options: object) -> list[int]:
    extra = {"return_token_ids": True, **options}
    body = {"model": str(folders["target"]), "prompt": [1, 5, END, 1], "max_tokens": 30}
    return client.completions.create(**body, extra_body=extra).choices[0].token_ids


def test_the_processor_acts_on_every_token_of_both_models(client: OpenAI, folders: dict[str, Path]) -> None:
    """With the bias only two words are left, and the processor forbids one of them."""
    for num_speculative_tokens in (0, 4):
        options = {"logit_bias": BOTH_WORDS, "num_speculative_tokens": num_speculative_tokens}
        assert ask(client, folders, temperature=2, seed=1, **options) == [5] * 30
    draft = client.completions.create(
        model=f"{folders['target']}-draft", prompt="a b", max_tokens=9, logit_bias=BOTH_WORDS, temperature=2
    )
    assert draft.choices[0].text == "b" * 9


def test_the_services_rule_is_the_one_that_holds(client: OpenAI, folders: dict[str, Path]) -> None:
    options = {"temperature": 2, "seed": 3, "ignore_eos": True}
    unsaid = ask(client, folders, **options, num_speculative_tokens=0)
    assert unsaid == ask(client, folders, **options, acceptance="rejection", disable_spec_decode=True)
    assert unsaid != ask(client, folders, **options, acceptance="coupled", num_speculative_tokens=0)


def test_the_models_defaults_hold_where_a_request_says_nothing(client: OpenAI, folders: dict[str, Path]) -> None:
    texts = {tuple(ask(client, folders, seed=seed, ignore_eos=True)) for seed in range(4)}
    assert len(texts) == 1
    warm = {tuple(ask(client, folders, seed=seed, ignore_eos=True, temperature=2)) for seed in range(4)}
    assert len(warm) == 4


def test_the_highest_token_id_can_be_chosen_and_ends_the_text(client: OpenAI, folders: dict[str, Path]) -> None:
    assert ask(client, folders, logit_bias={str(END): 100}) == [END]


def test_the_operator_may_have_steps_and_messages_recorded(client: OpenAI, folders: dict[str, Path]) -> None:
    wanted = {(what, kind) for what in ("arrived", "received") for kind in ("Verdict", "Offer")}
    wanted |= {("sent", kind) for kind in ("Ack", "Commit", "Offer", "Open")}
    kinds: set[tuple[str, str]] = set()
    for _ in range(MOST_ANSWERS):  # on a busy machine a short answer may end before its first offer
        ask(client, folders, num_speculative_tokens=4, ignore_eos=True)
        answer = httpx.get(str(client.base_url.join("/debug/trace")), timeout=30).raise_for_status()
        traces = {trace.role: trace for trace in TypeAdapter(list[WorkerTrace]).validate_json(answer.content)}
        kinds = {(message.what, message.kind) for message in traces["router"].messages}
        if wanted <= kinds:
            break
    assert wanted <= kinds
    assert set(traces) == {"target", "drafter", "router"}
    assert len({trace.clock.boot_id for trace in traces.values()}) == 1
    assert traces["target"].target_steps
    assert traces["drafter"].draft_steps
