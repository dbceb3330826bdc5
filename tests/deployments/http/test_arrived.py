"""When a request came: at Serve's proxy, where it may have waited for an ingress."""

from __future__ import annotations

import time
from typing import Any

import httpx2
import pytest

from deployments.http.middleware import _waited_s
from deployments.proxy import ARRIVED, middlewares, own_traces_only

from .conftest import Bench


async def test_the_proxy_stamps_every_request_and_takes_a_clients_own_stamp_away() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    (middleware,) = middlewares()
    before_s = time.time()
    scope = {"type": "http", "headers": [(b"host", b"api"), (ARRIVED.encode(), b"1.0")], "path": "/"}
    await middleware.cls(app)(scope, None, None)
    await middleware.cls(app)({"type": "websocket", "headers": []}, None, None)
    (host, stamp) = seen[0]["headers"]
    assert host == (b"host", b"api")
    assert before_s <= float(stamp[1]) <= time.time()
    assert seen[1]["headers"] == []


@pytest.mark.parametrize(("of", "names"), [(middlewares, ["traceparent", ARRIVED]), (own_traces_only, [ARRIVED])])
async def test_who_does_not_trust_a_traceparent_lets_nobody_see_it(of: Any, names: list[str]) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append([name.decode() for name, _ in scope["headers"]])

    (middleware,) = of()
    scope = {"type": "http", "headers": [(b"traceparent", b"00-1-2-01")], "path": "/"}
    await middleware.cls(app, **middleware.kwargs)(scope, None, None)
    assert seen == [names]


@pytest.mark.parametrize("stamp", ["", "soon", "nan", "inf", "-5", "9e9", "1.0"])
def test_a_stamp_that_cannot_be_right_says_nothing(stamp: str) -> None:
    assert _waited_s(stamp) == 0


async def test_what_a_request_waited_at_the_proxy_is_part_of_its_times(bench: Bench, http: httpx2.AsyncClient) -> None:
    bench.says("a b")
    headers = {ARRIVED: repr(time.time() - 7)}
    answer = await http.post("/v1/completions", json={"model": "demo", "prompt": "x"}, headers=headers)
    assert answer.status_code == 200
    assert 7 <= bench.metric("time_to_first_token_seconds_sum") < 60


async def test_but_of_no_deadline(bench: Bench, http: httpx2.AsyncClient) -> None:
    """Clocks of two nodes may differ: nobody is refused for that."""
    bench.says("a b")
    headers = {ARRIVED: repr(time.time() - 200), "x-request-timeout-seconds": "60"}
    answer = await http.post("/v1/completions", json={"model": "demo", "prompt": "x"}, headers=headers)
    assert answer.status_code == 200
