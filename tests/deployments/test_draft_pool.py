"""Drafters of an application of their own: whom they serve, and what an application that draws on them leaves out."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

import specdec.demo
from cluster.config.app import AppArgs
from cluster.config.live import reconfigured
from cluster.config.names import DRAFT, INGRESS, ROUTER, TARGET
from cluster.launch.placement import Devices
from cluster.models.identity import fingerprints
from deployments import app
from deployments.ingress import model_info
from deployments.operate import status
from deployments.operate.readiness import ReplicaPoll

DEMO = Path(specdec.demo.__path__[0])
DRAWS = AppArgs.model_validate({"demo": "hybrid", "draft": {"pool": "drafts"}})


def pool_args(**keys: Any) -> app.DraftPoolArgs:
    return app.DraftPoolArgs.model_validate({"applications": ["chat", "code"], **keys})


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """The deployments that a builder binds: by name, the arguments of each."""
    found: dict[str, tuple[Any, ...]] = {}

    def deployment(cls: type[Any], name: str) -> Any:
        made = SimpleNamespace(bind=lambda *args: found.update({name: args}) or name)
        return SimpleNamespace(options=lambda **options: made)

    monkeypatch.setattr(app.serve, "deployment", deployment)
    monkeypatch.setattr(app, "check_ray", lambda _: None)
    monkeypatch.setattr(app, "ray_devices", lambda: Devices(2, 4))
    monkeypatch.setattr(app, "ray_nodes", tuple)
    return found


def test_an_application_that_draws_on_a_pool_deploys_no_drafter(deployed: dict[str, tuple[Any, ...]]) -> None:
    app.build_app(DRAWS)
    assert DRAFT not in deployed
    args, target, *others = deployed[ROUTER]
    assert (args, target, others) == (DRAWS, TARGET, [])
    assert deployed[TARGET][2] == 1.0


def test_a_pool_is_drafters_that_know_whom_they_serve(deployed: dict[str, tuple[Any, ...]]) -> None:
    app.build_draft_pool(pool_args(replicas={"draft": 2}, actors={"draft": {"num_cpus": 3}}))
    (name, (args, num_torch_threads, num_gpus, applications)) = next(iter(deployed.items()))
    assert (name, len(deployed)) == (DRAFT, 1)
    assert (num_torch_threads, num_gpus, applications) == (3, 1.0, ("chat", "code"))
    assert type(args) is AppArgs
    assert reconfigured(args, {"log_level": "debug"}).log_level == "debug", "its user_config is that of every drafter"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"applications": []}, "applications"),
        ({"target": "some/target"}, "a pool needs a draft model"),
        ({"draft": {"pool": "another"}}, "a pool needs a draft model"),
        ({"draft": {"pool": "a", "model": "b"}, "target": "t"}, "pool and model exclude each other"),
    ],
)
def test_a_pool_without_a_draft_or_anybody_to_serve_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        pool_args(**keys)


def test_targets_of_one_vocabulary_may_share_a_pool() -> None:
    pool, plain = fingerprints(pool_args().app_args()), AppArgs.model_validate({"draft": {"pool": "drafts"}})
    others = [fingerprints(args) for args in (DRAWS, plain)]
    assert {other.vocabulary for other in others} == {pool.vocabulary}
    assert len({other.decision for other in others}) == 2


def test_the_draft_of_a_pool_is_no_model_that_requests_can_name() -> None:
    info = model_info(DRAWS, fingerprints(DRAWS))
    assert info.find(f"{info.target.name}-draft") is None
    assert info.num_speculative_tokens == DRAWS.most_draft_tokens


def test_the_metrics_page_has_the_drafters_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(status.serve, "get_deployment_handle", lambda *names: asked.append(names))
    for pools in (None, "drafts", ["drafts", "tail"]):
        metrics = status.Metrics(status.StatusArgs.model_validate({"application": "chat", "draft_pool": pools}))
        for _, one in metrics._asked:
            assert isinstance(one, ReplicaPoll)
            one._handle()
    of_drafters = [application for name, application in asked if name == DRAFT]
    assert of_drafters == ["chat", "chat", "drafts", "chat", "drafts", "tail"]
    assert {application for name, application in asked if name != DRAFT} == {"chat"}


async def test_failures_of_a_pools_drafters_count_with_those_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicaPoll, "get", lambda self: asyncio.sleep(0, []))
    metrics = status.Metrics(status.StatusArgs(application="chat", draft_pool=("drafts",)))
    for count, (_, one) in enumerate(metrics._asked):
        one.num_failures = 10**count
    page = (await metrics(SimpleNamespace(headers={}))).body.decode()  # type: ignore[arg-type]
    found = dict(re.findall(r'specdec_scrape_failures_total{deployment="(\w+)"} (\S+)', page))
    assert {name: float(count) for name, count in found.items()} == {
        INGRESS: 1.0,
        ROUTER: 10.0,
        DRAFT: 10100.0,
        TARGET: 1000.0,
    }
