"""The draft model's application: what it is told, and what the service's leaves out."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specdec.demo
from cluster.config.app import AppArgs
from cluster.config.models import DraftConfig
from cluster.config.names import DRAFT, INGRESS, ROUTER, TARGET
from cluster.launch.applications import draft_args, of_draft
from cluster.launch.placement import Devices
from cluster.models.identity import fingerprints
from deployments import app
from deployments.ingress import model_info
from deployments.operate import status
from deployments.operate.readiness import ReplicaPoll
from specdec.core.errors import InvalidParameterError

DEMO = Path(specdec.demo.__path__[0])
DRAWS = AppArgs.model_validate({"demo": "hybrid", "draft": {"application": "drafts"}})


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


def test_the_services_application_deploys_no_drafter(deployed: dict[str, tuple[Any, ...]]) -> None:
    app.build_app(DRAWS)
    assert deployed.keys() == {INGRESS, ROUTER, TARGET}
    args, target, *others = deployed[ROUTER]
    assert (args, target, others) == (DRAWS, TARGET, [])
    assert deployed[TARGET][2] == 1.0
    with pytest.raises(InvalidParameterError, match=r"draft.model: .* an application of its own"):
        app.build_app(AppArgs())


def test_one_machine_has_both_and_places_them_together(deployed: dict[str, tuple[Any, ...]]) -> None:
    built = app.build_local(AppArgs.model_validate({"log_level": "debug", "block_size": 32, "limits": {}}))
    assert list(built) == ["specdec", "specdec-draft"]
    assert deployed[TARGET][0].draft.application == "specdec-draft"
    assert (deployed[TARGET][2], deployed[DRAFT][2]) == (1.0, 1.0)
    given, num_torch_threads, _, problem = deployed[DRAFT]
    assert problem == ""
    assert (given, num_torch_threads) == ({"block_size": 32}, 1)
    assert list(app.build_local(AppArgs(num_speculative_tokens=0, draft=DraftConfig(method="ngram")))) == ["specdec"]


@pytest.mark.parametrize(
    ("args", "num_gpus"),
    [
        ({"draft": "d", "actors": {"draft": {"num_gpus": 0.5}}}, 0.5),
        ({"draft": {"model": "d", "revision": 7}}, 0.0),
        ({"nonsense": 1}, 0.0),
        ({"draft": {"device": "cpu"}, "actors": {"draft": {"num_gpus": 1}}}, 0.0),
        ({"draft": None}, 0.0),
        ({"draft": ["d"]}, 0.0),
    ],
)
def test_the_drafts_builder_refuses_nothing(
    deployed: dict[str, tuple[Any, ...]], args: dict[str, Any], num_gpus: float
) -> None:
    """KubeRay would wait for it: its replica says what is wrong."""
    app.build_draft(args)
    (given, _, found, problem), *others = deployed.values()
    assert (given, found, others) == (args, num_gpus, [])
    assert bool(problem) is not bool(num_gpus)


def test_a_drafter_goes_by_its_own_keys_and_its_targets_tokenizer() -> None:
    config = AppArgs.model_validate(
        {"target": {"model": "t", "revision": "1", "dtype": "bfloat16"}, "draft": "d", "protocol": {"lease_s": 9}}
        | {"chat_template": "x", "limits": {"retry_after_s": 7}, "actors": {"target": {"num_gpus": 2}}}
    )
    fixed, live = of_draft(config)
    assert fixed == {"draft": {"model": "d"}}
    assert live == {
        "applications": ["specdec"],
        "target": {"model": "t", "revision": "1"},
        "protocol": {"lease_s": 9.0},
    }
    args, applications = draft_args(fixed, live)
    assert (args.draft, args.protocol, applications) == (config.draft, config.protocol, ("specdec",))
    with pytest.raises(InvalidParameterError, match="nonsense"):
        draft_args({"nonsense": 1}, {})


def test_targets_of_one_vocabulary_may_share_a_draft_model() -> None:
    pool, plain = fingerprints(AppArgs()), AppArgs.model_validate({"draft": {"application": "drafts"}})
    others = [fingerprints(args) for args in (DRAWS, plain)]
    assert {other.vocabulary for other in others} == {pool.vocabulary}
    assert len({other.decision for other in others}) == 2


def test_the_draft_is_no_model_that_requests_can_name() -> None:
    info = model_info(DRAWS, fingerprints(DRAWS))
    assert info.find(f"{info.target.name}-draft") is None
    assert info.num_speculative_tokens == DRAWS.most_draft_tokens


def test_the_metrics_page_has_the_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(status.serve, "get_deployment_handle", lambda *names: asked.append(names))
    for names in (None, "drafts", ["drafts", "tail"]):
        metrics = status.Metrics(status.StatusArgs.model_validate({"application": "chat", "drafts": names}))
        for _, one in metrics._asked:
            assert isinstance(one, ReplicaPoll)
            one._handle()
    of_drafters = [application for name, application in asked if name == DRAFT]
    assert of_drafters == ["drafts", "drafts", "tail"]
    assert {application for name, application in asked if name != DRAFT} == {"chat"}


async def test_failures_of_drafters_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicaPoll, "get", lambda self: asyncio.sleep(0, []))
    metrics = status.Metrics(status.StatusArgs(application="chat", drafts=("drafts",)))
    for count, (_, one) in enumerate(metrics._asked):
        one.num_failures = 10**count
    page = (await metrics(SimpleNamespace(headers={}))).body.decode()  # type: ignore[arg-type]
    found = dict(re.findall(r'specdec_scrape_failures_total{deployment="(\w+)"} (\S+)', page))
    assert {name: float(count) for name, count in found.items()} == {
        INGRESS: 1.0,
        ROUTER: 10.0,
        TARGET: 100.0,
        DRAFT: 1000.0,
    }
