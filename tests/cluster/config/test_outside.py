"""What a module outside the tree adds by a configuration alone: keys, and a drafter from tokens that goes by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.config.app import AppArgs
from cluster.config.files import load_config
from cluster.config.models import draft_method
from cluster.models.sources import ngram_options
from specdec.core.errors import InvalidParameterError
from specdec.core.messages import Notes
from specdec.protocol.target import TargetMachine
from tests.letters import provenance
from tests.specdec.protocol.test_target import TIMES, TRUE, Oracle, open_message, verdicts

MODULE = '''
from pydantic import Field

from cluster.config.base import StrictModel
from specdec.core.drafts import Draft


class Keys(StrictModel):
    """Its keys."""

    ahead: int = Field(1, ge=1, le=8)


class Counting:
    """Drafts that each token is one more than the one before it."""

    is_long = True

    def __init__(self, most):
        self.most, self.judged = most, []

    def draft(self, log, room, reading):
        (last,) = log.tail(len(log) - 1)
        return Draft(tuple(range(last + 1, last + 1 + min(self.most, room))), source="counting")

    def judge(self, num_drafted, num_accepted):
        self.judged.append((num_drafted, num_accepted))


def drafter(args):
    """Makes the drafter of each sequence."""
    ahead = args.extension(Keys).ahead
    return lambda spec, most: Counting(min(ahead, most))
'''
KEYS, METHOD = "outside_specdec:Keys", "outside_specdec:drafter"


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_specdec.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


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


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {KEYS: {"ahead": 9}},
            "extensions: outside_specdec:Keys: ahead: must be a whole number, at least 1 and",
        ),
        ({KEYS: {"aheda": 1}}, "unknown key 'aheda'; the nearest known key is 'ahead'"),
        ({METHOD: {}}, "outside_specdec:drafter must be a subclass of cluster.config.base.StrictModel"),
        ({"nowhere_specdec:Keys": {}}, "cannot import nowhere_specdec:Keys: ModuleNotFoundError"),
        ({"keys": {}}, "keys: must be the import string of a model"),
        (["keys"], "must hold sections of keys"),
    ],
)
def test_keys_from_outside_that_cannot_be_are_refused(given: object, named: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        load_config(None, {"extensions": given})
    assert caught.value.parameter == "extensions"
    assert named in str(caught.value)


def test_a_method_that_cannot_be_imported_is_refused() -> None:
    args = AppArgs.model_validate({"draft": {"method": "nowhere_specdec:drafter"}})
    with pytest.raises(InvalidParameterError, match=r"draft\.method: cannot import nowhere_specdec:drafter"):
        ngram_options(args)


def test_methods_are_named_in_one_order() -> None:
    assert draft_method(f"medusa+{METHOD}+model") == f"{METHOD}+model+medusa"
