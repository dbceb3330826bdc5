"""``/v1/admin/quantization``: who may ask, what may be asked, and what would be deployed."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from cluster.config.app import AppArgs
from cluster.config.names import DEPLOYMENTS
from deployments.http.app import create_app
from deployments.http.errors import ApiError
from deployments.http.keys import ApiKeys
from deployments.http.service import ApiSettings
from deployments.operate import requantize
from deployments.operate.requantize import add_quantization_routes, requantized

from .conftest import Bench

KEYS = {"admin": "secret", "guest": "other"}
PATH = "/v1/admin/quantization"


class Serve:
    """Stands for Serve: an application in a state, and what it was given to deploy."""

    def __init__(self) -> None:
        self.state = "RUNNING"
        self.deployed: list[AppArgs] = []

    def get_replica_context(self) -> SimpleNamespace:
        return SimpleNamespace(app_name="specdec")

    def status(self) -> SimpleNamespace:
        found = SimpleNamespace(status=SimpleNamespace(value=self.state))
        return SimpleNamespace(applications={"specdec": found})

    def RunTarget(self, target: AppArgs, logging_config: dict[str, Any], **_: str) -> AppArgs:
        assert logging_config == {"encoding": target.log_format.upper(), "enable_access_log": False}
        return target

    def run_many(self, targets: list[AppArgs], **_: bool) -> None:
        self.deployed += targets
        self.state = "DEPLOYING"


@pytest.fixture(autouse=True)
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    serve = Serve()
    monkeypatch.setattr(requantize, "serve", serve)
    monkeypatch.setattr(requantize, "load_builder", lambda _: lambda args: args)
    return serve


async def ask(bench: Bench, key: str, *bodies: object, is_local: bool = True, **settings: tuple[str, ...]) -> Any:
    """Send bodies at once, or ask what holds; gives the answers, or the only one."""
    app = create_app(bench.service, ApiSettings(**settings), bench.tokenizer, keys=ApiKeys(KEYS))
    add_quantization_routes(app, AppArgs(), is_local=is_local)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://api") as http:
        answers = await asyncio.gather(
            *(http.request("GET" if body is None else "POST", PATH, json=body, headers=headers) for body in bodies)
        )
    return answers[0] if len(answers) == 1 else answers


@pytest.mark.parametrize("body", [None, {"target": "int8"}])
@pytest.mark.parametrize(("key", "admins"), [("other", ("admin",)), ("secret", ())])
async def test_only_an_administrators_key_will_do(bench, body, key, admins):
    answer = await ask(bench, key, body, admin_keys=admins)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_needed")
    assert (await ask(bench, "wrong", body, admin_keys=("admin",))).status_code == 401


async def test_what_holds_is_told(bench):
    told = (await ask(bench, "secret", None, admin_keys=("admin",))).json()
    assert {role: told[role]["quantization"] for role in told} == {"target": "none", "draft": "none"}
    assert told["target"]["fingerprint"] != told["draft"]["fingerprint"]
    assert (await ask(bench, "secret", {"target": "none"}, admin_keys=("admin",))).json() == told | {"replaced": []}


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "target"), ({"target": "int3"}, "target"), ({"draft": 8}, "draft"), ({"traget": "int8"}, "traget")],
)
async def test_what_cannot_be_is_refused(bench, body, param):
    answer = await ask(bench, "secret", body, admin_keys=("admin",))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("status", "is_local", "target", "answer", "is_deployed"),
    [
        ("RUNNING", True, "int8", 202, True),
        ("RUNNING", True, "none", 202, False),
        ("DEPLOYING", True, "int8", 409, False),
        ("DEPLOYING", True, "none", 409, False),
        ("NOT_STARTED", True, "none", 409, False),
        ("DELETING", True, "none", 409, False),
        ("DEPLOY_FAILED", True, "int8", 202, True),
        ("DEPLOY_FAILED", True, "none", 202, True),
        ("UNHEALTHY", True, "none", 202, True),
        ("RUNNING", False, "int8", 409, False),
        ("RUNNING", False, "none", 202, False),
        ("DEPLOY_FAILED", False, "none", 409, False),
    ],
)
async def test_it_is_deployed_unless_it_runs_so_or_an_update_is_under_way(
    bench, serve, status, is_local, target, answer, is_deployed
):
    """An ingress of before an update has what was before: what it serves is not what will be, nor a way back."""
    serve.state = status
    told = await ask(bench, "secret", {"target": target}, is_local=is_local, admin_keys=("admin",))
    assert told.status_code == answer
    if told.status_code == 409:
        line = f"the application is {status}:" if is_local else f"put target.quantization: {target} there"
        assert line in told.json()["error"]["message"]
    else:
        assert told.json()["replaced"] == list(DEPLOYMENTS) * is_deployed, "Serve replaces all of them"
    assert [args.target.quantization for args in serve.deployed] == [target] * is_deployed


async def test_what_an_administrator_does_is_logged(bench, caplog):
    with caplog.at_level("INFO", logger="ray.serve"):
        await ask(bench, "secret", {"target": "int8"}, is_local=False, admin_keys=("admin",))
    assert "key=admin set quantization target=int8 draft=None" in caplog.text


async def test_of_two_changes_at_once_one_is_refused(bench, serve, monkeypatch):
    both_look = threading.Barrier(2)
    status = serve.status

    def looked() -> SimpleNamespace:
        found = status()
        with suppress(threading.BrokenBarrierError):  # one alone waits for the other in vain
            both_look.wait(0.5)
        return found

    monkeypatch.setattr(serve, "status", looked)
    answers = await ask(bench, "secret", {"target": "int8"}, {"target": "int4"}, admin_keys=("admin",))
    assert sorted(answer.status_code for answer in answers) == [202, 409]
    assert len(serve.deployed) == 1


def test_all_else_stays_as_it_was():
    args = AppArgs.model_validate({"max_model_len": 64, "target": {"quantization": "int8"}, "replicas": {"target": 2}})
    wanted = requantized(args, None, "int4")
    assert (wanted.target.quantization, wanted.draft.quantization) == ("int8", "int4")
    assert wanted.model_dump(exclude={"draft"}) == args.model_dump(exclude={"draft"})
    assert requantized(wanted, "none", None).target.quantization == "none"
    with pytest.raises(ApiError, match="no draft model is deployed with this target"):
        requantized(AppArgs.model_validate({"target": "some/target"}), None, "int8")
    with pytest.raises(ApiError, match="quantization is not for engine vllm: say it in engine_args"):
        requantized(AppArgs.model_validate({"target": {"model": "some/target", "engine": "vllm"}}), "int8", None)
