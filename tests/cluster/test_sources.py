"""From the configuration to what the engine library takes."""

from __future__ import annotations

import pytest

from cluster.config import AppArgs
from cluster.sources import backend_options
from specdec.errors import InvalidParameterError
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.masks:digits", "cannot import nowhere.masks:digits: ModuleNotFoundError: No module named 'nowhere'"),
        ("tests.cluster.processors:digits", "cannot import .*: AttributeError: .*'digits'"),
        ("tests.cluster.processors:TABLE", "tests.cluster.processors:TABLE must be a function .* is of type dict"),
        ("tests.cluster.processors:Forbid", "tests.cluster.processors:Forbid must be a function .* is a class"),
        ("broken:mask", "cannot import broken:mask: RuntimeError: not today"),
    ],
)
def test_a_processor_that_cannot_be_had_is_refused(tmp_path, monkeypatch, name, message):
    (tmp_path / "broken.py").write_text('raise RuntimeError("not today")')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidParameterError, match=f"logits_processors: {message}") as caught:
        options_with(name)
    assert caught.value.parameter == "logits_processors"
