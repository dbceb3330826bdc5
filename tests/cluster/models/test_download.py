from __future__ import annotations

import shutil
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

from cluster.cli import main
from cluster.config.app import AppArgs
from cluster.models.demos import REPOSITORY_WEIGHTS
from cluster.models.download import check_models, fetch_models
from specdec.core.errors import InvalidParameterError


def args(target, draft=None, **target_options):
    tree = {"target": {"model": str(target), **target_options}}
    return AppArgs.model_validate(tree | ({} if draft is None else {"draft": str(draft)}))


def test_the_demo_pair_needs_nothing():
    fetch_models(AppArgs(), pytest.fail)


def test_local_folders_are_looked_at_and_nothing_is_downloaded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert fetch_models(args(tmp_path, tmp_path), pytest.fail) == args(tmp_path, tmp_path)


def test_a_missing_folder_is_refused_by_its_key(tmp_path):
    with pytest.raises(InvalidParameterError, match=r"target.model: there is no folder"):
        fetch_models(args(tmp_path / "absent"), pytest.fail)


def test_a_folder_without_a_model_is_refused_by_its_key(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidParameterError, match=r"draft.model: the folder .* has no config.json"):
        fetch_models(args(tmp_path, tmp_path / "empty"), pytest.fail)


def test_the_hub_is_asked_for_the_revision_with_the_token(monkeypatch):
    asked, commit = [], "0123456789abcdef0123456789abcdef01234567"

    def download(name, **options):
        asked.append((name, options))
        return f"/cache/models--some--target/snapshots/{commit}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    lines = []
    wanted = args("some/target", revision="v2", token="hf_secret")
    pinned = fetch_models(wanted, lines.append)
    assert pinned == wanted.model_copy(update={"target": wanted.target.model_copy(update={"revision": commit})})
    assert AppArgs.model_validate(pinned.model_dump(exclude_unset=True)).target.revision == commit
    ((name, options),) = asked
    assert (name, options["revision"], options["token"]) == ("some/target", "v2", "hf_secret")
    patterns = {name: options[name] for name in ("allow_patterns", "ignore_patterns")}
    files = ["model.safetensors", "consolidated.safetensors", "config.json", "pytorch_model.bin"]
    assert list(filter_repo_objects(files, **patterns)) == ["model.safetensors", "config.json"]
    assert len(lines) == 1
    assert "some/target" in lines[0]


@pytest.mark.parametrize("kind", [LocalEntryNotFoundError, httpx2.RemoteProtocolError])
def test_what_the_hub_does_not_give_is_said_with_the_key(monkeypatch, kind):
    def refuse(*_args, **_options):
        raise kind("the hub cannot be reached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(InvalidParameterError, match=r"target.model: cannot get some/target: the hub cannot be reached"):
        fetch_models(args("some/target"), lambda _line: None)


def test_what_another_machine_may_have_is_warned_of(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise httpx2.ConnectError("the hub cannot be reached")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    lines = []
    check_models(args(tmp_path / "absent", "some/draft"), lines.append)
    assert [line.split(":")[0] for line in lines] == ["target.model", "draft.model"]


@pytest.mark.parametrize("kind", [RepositoryNotFoundError, RevisionNotFoundError])
def test_what_the_hub_does_not_have_is_refused_by_its_key(monkeypatch, kind):
    def refuse(_api, name, **options):
        asked.append((name, options["revision"], options["token"]))
        raise kind("404", response=httpx2.Response(404, request=httpx2.Request("GET", "http://hub")))

    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(InvalidParameterError, match=r"target.model: there is no model some/target on the hub"):
        check_models(args("some/target", revision="v2"), pytest.fail)
    assert asked == [("some/target", "v2", None)]


def test_of_what_is_in_the_cache_the_hub_is_not_asked(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_args, **_options: "/cache/config.json")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_args, **_options: pytest.fail("asked"))
    check_models(args("some/target"), pytest.fail)


def test_a_folder_that_is_here_and_holds_no_model_is_refused(tmp_path):
    with pytest.raises(InvalidParameterError, match=r"target.model: the folder .* has no config.json"):
        check_models(args(tmp_path), pytest.fail)


@pytest.mark.parametrize(
    ("keys", "command"),
    [
        ({"demo": "chat"}, "demo: the models are not on this machine; run: specdec demo make chat"),
        ({"demo": "hybrid"}, "demo: the models are not on this machine; run: specdec demo make hybrid"),
        (
            {"draft": {"method": "medusa"}},
            "draft.heads: the models are not on this machine; run: specdec demo make heads",
        ),
    ],
)
def test_a_demo_that_is_not_there_is_refused_with_the_command_that_makes_it(tmp_path, monkeypatch, keys, command):
    monkeypatch.setattr("cluster.models.demos.demo_folder", lambda name: tmp_path / name)
    monkeypatch.setattr("subprocess.run", lambda *_args, **_options: pytest.fail("something was started"))
    with pytest.raises(InvalidParameterError) as refused:
        fetch_models(AppArgs.model_validate(keys), pytest.fail)
    assert str(refused.value) == command


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.models.demos._made_folder", lambda name: tmp_path / "home" / name)
    return tmp_path / "home"


def test_making_a_demo_copies_its_weights_once(home, capsys):
    assert main(["demo", "make", "hybrid"]) == 0
    assert {file.name for file in (REPOSITORY_WEIGHTS / "hybrid").iterdir()} == {
        file.name for file in (home / "hybrid").iterdir()
    }
    (home / "hybrid" / "model.safetensors").write_bytes(b"mine")
    assert main(["demo", "make", "hybrid"]) == 0
    assert (home / "hybrid" / "model.safetensors").read_bytes() == b"mine"
    assert capsys.readouterr().out.splitlines() == [str(home / "hybrid")] * 2


def test_weights_of_another_version_are_refused(home, tmp_path, capsys):
    weights = Path(shutil.copytree(REPOSITORY_WEIGHTS, tmp_path / "weights"))
    (weights / "heads" / "model.safetensors").write_bytes(b"other")
    assert main(["demo", "make", "heads", "--weights", str(weights)]) == 2
    assert "heads/model.safetensors is not the file of this version of specdec" in capsys.readouterr().err
    assert main(["demo", "make", "heads", "--weights", str(tmp_path)]) == 2
    assert "give its folder demo_weights by --weights" in capsys.readouterr().err
    assert not (home / "heads").exists()


def test_nothing_in_the_place_of_a_demo_is_overwritten(home, capsys):
    (home / "hybrid").mkdir(parents=True)
    (home / "hybrid" / "notes.txt").write_text("mine")
    assert main(["demo", "make", "hybrid"]) == 2
    assert "is there and is no model; remove it first" in capsys.readouterr().err
    assert (home / "hybrid" / "notes.txt").read_text() == "mine"
