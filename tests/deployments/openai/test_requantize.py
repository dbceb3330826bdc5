"""``/v1/admin/quantization``: who may ask, what may be asked, and what would be deployed."""

from __future__ import annotations

import httpx2
import pytest

from cluster.config import AppArgs
from deployments.openai.app import create_app
from deployments.openai.errors import ApiError
from deployments.openai.keys import ApiKeys
from deployments.openai.settings import ApiSettings
from deployments.requantize import add_quantization_routes, requantized

from .conftest import Bench

KEYS = {"admin": "secret", "guest": "other"}
PATH = "/v1/admin/quantization"


async def ask(bench: Bench, key: str, body: object = None, **settings: tuple[str, ...]) -> httpx2.Response:
    app = create_app(bench.service, ApiSettings(**settings), bench.tokenizer, keys=ApiKeys(KEYS))
    add_quantization_routes(app, AppArgs())
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://api") as http:
        method = "GET" if body is None else "POST"
        return await http.request(method, PATH, json=body, headers=headers)


@pytest.mark.parametrize("body", [None, {"target": "int8"}])
@pytest.mark.parametrize(("key", "admins"), [("other", ("admin",)), ("secret", ())])
async def test_only_an_administrators_key_will_do(bench, body, key, admins):
    answer = await ask(bench, key, body, admin_keys=admins)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_needed")
    assert (await ask(bench, "wrong", body, admin_keys=("admin",))).status_code == 401


async def test_what_holds_is_told(bench):
    told = (await ask(bench, "secret", admin_keys=("admin",))).json()
    assert {role: told[role]["quantization"] for role in told} == {"target": "none", "draft": "none"}
    assert told["target"]["fingerprint"] != told["draft"]["fingerprint"]
    assert (await ask(bench, "secret", {"target": "none"}, admin_keys=("admin",))).json() == told, "nothing to do"


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "target"), ({"target": "int3"}, "target"), ({"draft": 8}, "draft"), ({"traget": "int8"}, "traget")],
)
async def test_what_cannot_be_is_refused(bench, body, param):
    answer = await ask(bench, "secret", body, admin_keys=("admin",))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


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
