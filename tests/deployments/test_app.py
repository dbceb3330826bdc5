"""What is certain to fail fails the build, so that the version before goes on serving."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from ray.serve import Application, Deployment
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from cluster.config.app import AppArgs
from cluster.config.names import DRAFT, INGRESS, ROUTER, TARGET
from cluster.launch.placement import Devices
from cluster.models.demos import demo_folder
from deployments import app
from deployments.operate import status
from specdec.core.errors import SpecdecError


def deployments_of(application: Application) -> Iterator[Deployment]:
    yield application._bound_deployment
    for bound in application._bound_deployment.init_args:
        if isinstance(bound, Application):
            yield from deployments_of(bound)


def check(**keys: Any) -> None:
    app.check_files(AppArgs.model_validate(keys))


def test_what_can_be_served_passes() -> None:
    check()
    check(demo="hybrid", num_speculative_tokens=0)


def test_what_only_other_machines_may_have_passes(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    check(target=absent, draft=absent, chat_template=absent, access={"api_keys_file": absent})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{}", "model"),
        ("config.json", "half", "config.json"),
        ("tokenizer.json", "{}", "tokenizer|vocabulary"),
    ],
)
def test_a_folder_that_is_no_model_fails(tmp_path: Path, name: str, content: str, words: str) -> None:
    shutil.copytree(demo_folder("target"), tmp_path / "target")
    (tmp_path / "target" / name).write_text(content)
    with pytest.raises(SpecdecError, match=words):
        check(target=str(tmp_path / "target"), num_speculative_tokens=0)


@pytest.mark.parametrize("key", ["chat_template", "api_keys_file"])
def test_a_file_that_cannot_be_read_fails(tmp_path: Path, key: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff")
    with pytest.raises(SpecdecError, match=key):
        check(**({key: str(file)} if key == "chat_template" else {"access": {key: str(file)}}))


@pytest.mark.parametrize(
    ("parser", "words"),
    [
        ("no_such_module:Parser", "cannot import"),
        ("specdec.structured.parsing.calls:BEGIN", "must be a function or a callable object"),
        ("response_template", "no response template"),
    ],
)
def test_a_parser_that_cannot_be_had_fails(parser: str, words: str) -> None:
    with pytest.raises(SpecdecError, match=f"tool_parser.*{words}"):
        check(tool_parser=parser)


def test_the_build_checks_them_before_anything_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(app, "check_ray", lambda _: None)
    monkeypatch.setattr(app, "ray_devices", lambda: pytest.fail("too late"))
    with pytest.raises(SpecdecError, match=r"target.model"):
        app.build_app(AppArgs.model_validate({"target": str(tmp_path)}))


@pytest.mark.parametrize(
    "build",
    [app.build_app, status.build_health, status.build_metrics],
    ids=lambda build: build.__name__,
)
def test_serve_can_tell_the_class_of_a_builders_argument(build: Any) -> None:
    """Postponed annotations are texts, and Serve then hands the argument over as it came: a dict."""
    (parameter,) = inspect.signature(build).parameters.values()
    assert issubclass(parameter.annotation, BaseModel)


def test_serve_hands_the_drafts_builder_its_args_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ray_devices", lambda: Devices(0, 8))
    monkeypatch.setattr(app, "ray_nodes", tuple)
    assert call_user_app_builder_with_args_if_necessary(app.build_draft, {"nonsense": 1})


def test_every_replica_that_hangs_is_replaced_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve needs three failed checks; it gives each its whole time."""
    monkeypatch.setattr(app, "check_ray", lambda _: None)
    monkeypatch.setattr(app, "ray_devices", lambda: Devices(0, 8))
    monkeypatch.setattr(app, "ray_nodes", tuple)
    service = [one for built in app.build_local(AppArgs()).values() for one in deployments_of(built)]
    draft = [*deployments_of(app.build_draft({"demo": "plain", "actors": {"draft": {"num_gpus": 0}}}))]
    parts = [build(status.StatusArgs())._bound_deployment for build in (status.build_health, status.build_metrics)]
    assert [one.name for one in service] == [INGRESS, ROUTER, TARGET, DRAFT]
    for one in (*service, *draft, *parts):
        config = one._deployment_config
        assert (config.health_check_period_s, config.health_check_timeout_s) == (1, 5), one.name
