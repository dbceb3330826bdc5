from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from cluster.config import AppArgs
from cluster.download import fetch_models
from specdec.errors import InvalidParameterError


def args(target, draft=None, **target_options):
    tree = {"target": {"model": str(target), **target_options}}
    return AppArgs.model_validate(tree | ({} if draft is None else {"draft": str(draft)}))


def test_the_demo_pair_needs_nothing():
    fetch_models(AppArgs(), pytest.fail)


def test_local_folders_are_looked_at_and_nothing_is_downloaded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    fetch_models(args(tmp_path, tmp_path), pytest.fail)


def test_a_missing_folder_is_refused_by_its_key(tmp_path):
    with pytest.raises(InvalidParameterError, match=r"target.model: there is no folder"):
        fetch_models(args(tmp_path / "absent"), pytest.fail)


def test_a_folder_without_a_model_is_refused_by_its_key(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidParameterError, match=r"draft.model: the folder .* has no config.json"):
        fetch_models(args(tmp_path, tmp_path / "empty"), pytest.fail)


def test_the_hub_is_asked_for_the_revision_with_the_token(monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.append((name, options)))
    lines = []
    fetch_models(args("some/target", revision="v2", token="hf_secret"), lines.append)
    ((name, options),) = asked
    assert (name, options["revision"], options["token"]) == ("some/target", "v2", "hf_secret")
    assert len(lines) == 1
    assert "some/target" in lines[0]


def test_what_the_hub_refuses_is_said_with_the_key(monkeypatch):
    def refuse(*_args, **_options):
        raise LocalEntryNotFoundError("not in the cache, and the hub cannot be reached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(InvalidParameterError, match=r"target.model: cannot get some/target: not in the cache"):
        fetch_models(args("some/target"), lambda _line: None)
