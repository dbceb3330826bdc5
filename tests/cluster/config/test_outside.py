"""What a module outside the tree adds by a configuration alone: a drafter from tokens."""

from __future__ import annotations

import pytest

from cluster.config.app import AppArgs
from cluster.config.models import draft_method
from cluster.models.sources import ngram_options
from specdec.core.messages import Notes
from specdec.protocol.target import TargetMachine
from tests.letters import provenance
from tests.specdec.protocol.test_target import TIMES, TRUE, Oracle, open_message, verdicts

pytestmark = pytest.mark.usefixtures("outside")
METHOD = "outside_specdec:drafter"


def test_a_drafter_from_outside_drafts() -> None:
    args = AppArgs.model_validate({"draft": {"method": METHOD}, "num_speculative_tokens": 8})
    assert (args.has_draft, args.speculates) == (False, True)
    machine = TargetMachine("T", Oracle(), TIMES, ngram=ngram_options(args))
    machine.receive(open_message(max_tokens=5), 0.0)
    for _ in range(2):
        machine.step(0.0)
    verdict = verdicts(machine)[-1]
    assert (verdict.tokens, verdict.notes) == (TRUE[:5], Notes(provenance("vuuuw"), (3, 0, 0, 0, 3)))
    assert machine.metrics()["num_accepted_tokens_by_source/counting"] > 0


def test_methods_are_named_in_one_order() -> None:
    assert draft_method(f"medusa+{METHOD}+model") == f"{METHOD}+model+medusa"
