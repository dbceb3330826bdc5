"""From the configuration to what the engine library takes."""

from __future__ import annotations

import pytest

from cluster.config.app import AppArgs
from cluster.models.sources import backend_of, backend_options
from specdec.core.errors import InvalidParameterError
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


def around(role, build, args, *, tag="none"):
    return (role, build() if tag == "wrapped" else None, args.block_size)


def test_a_function_of_ones_own_wraps_or_replaces_a_backend():
    args = AppArgs(block_size=8, backend="tests.cluster.models.test_sources:around:tag=wrapped")
    assert backend_of(args, "target", lambda: "own") == ("target", "own", 8)
    args = AppArgs(backend="tests.cluster.models.test_sources:around")
    assert backend_of(args, "draft_alone", lambda: "own")[:2] == ("draft_alone", None)
    assert backend_of(AppArgs(), "target", lambda: "own") == "own"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_module:f", "cannot import no_such_module:f: ModuleNotFoundError"),
        ("tests.cluster.processors:TABLE", "must be a function or a callable object, and is of type dict"),
        ("tests.cluster.models.test_sources:around:size=3", "got an unexpected keyword argument 'size'"),
    ],
)
def test_a_function_that_cannot_be_called_is_named(text, message):
    with pytest.raises(InvalidParameterError, match=f"backend: .*{message}"):
        backend_of(AppArgs(backend=text), "target", lambda: "own")


@pytest.mark.parametrize("text", ["module", "a.b:c:", "a.b:c:d", "a.b:c:d=", "a b:c", 3])
def test_a_text_that_names_no_function_is_refused(text):
    with pytest.raises(ValueError, match=r"must be 'package\.module:name'"):
        AppArgs(backend=text)
