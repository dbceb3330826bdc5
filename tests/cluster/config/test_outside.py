"""What a module outside the tree adds by a configuration alone: keys, and a drafter from tokens that goes by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.config.app import AppArgs
from cluster.config.files import load_config
from cluster.config.models import draft_method
from cluster.models.sources import ngram_options
from specdec.core.messages import Notes
from specdec.protocol.target import TargetMachine
from tests.letters import provenance
from tests.specdec.protocol.test_target import TIMES, TRUE, Oracle, open_message, verdicts

pytestmark = pytest.mark.usefixtures("outside")
KEYS, METHOD = "outside_specdec:Keys", "outside_specdec:drafter"


def test_a_drafter_from_outside_drafts_as_its_own_keys_say() -> None:
    args = AppArgs.model_validate(
        {"draft": {"method": METHOD}, "num_speculative_tokens": 8, "extensions": {KEYS: {"ahead": 3}}}
    )
    assert (args.has_draft, args.speculates) == (False, True)
    machine = TargetMachine("T", Oracle(), TIMES, ngram=ngram_options(args))
    machine.receive(open_message(max_tokens=5), 0.0)
    for _ in range(2):
        machine.step(0.0)
    verdict = verdicts(machine)[-1]
    assert (verdict.tokens, verdict.notes) == (TRUE[:5], Notes(provenance("vuuuw"), (3, 0, 0, 0, 3)))
    assert machine.metrics()["num_accepted_tokens_by_source/counting"] > 0


def test_keys_from_outside_come_by_file_flag_and_service(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"demo: plain\nextensions: {{'{KEYS}': {{ahead: 5}}}}\n")
    from outside_specdec import Keys  # type: ignore[import-not-found]

    assert load_config(file).extension(Keys).ahead == 5
    parser = Parser()
    add_config_flags(parser)
    flags = parser.parse_args(["--extensions", f"{{'{KEYS}': {{ahead: 4}}}}"])
    config = load_config(file, config_overrides(flags))
    assert config.app_args().extension(Keys).ahead == 4
    assert AppArgs().extension(Keys).ahead == 1


def test_methods_are_named_in_one_order() -> None:
    assert draft_method(f"medusa+{METHOD}+model") == f"{METHOD}+model+medusa"
