"""Names of Ray that it documents nowhere and specdec uses: each is tried, so that a Ray without it fails a test."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve._private.http_util import ASGIAppReplicaWrapper, MessageQueue
from ray.serve._private.replica import UserCallableWrapper
from ray.serve.handle import DeploymentBroadcastResponse
from ray.serve.metrics import Counter
from ray.serve.request_router import PendingRequest, ReplicaID

from cluster.config.app import FILE
from cluster.config.environment import RAY_SETTINGS
from deployments.http.untaken import queue_of
from deployments.operate.stores import _HEAD
from deployments.transport.discovery import PinningRequestRouter, process_board

ROOT = Path(__file__).resolve().parents[2]
RAY = Path(ray.__file__).parent
USED = {
    "ray.experimental.internal_kv._internal_kv_del",
    "ray.experimental.internal_kv._internal_kv_get",
    "ray.experimental.internal_kv._internal_kv_list",
    "ray.experimental.internal_kv._internal_kv_put",
    "ray._private.authentication.authentication_utils.is_token_auth_enabled",
    "ray._private.state.available_resources_per_node",
    "ray.serve._private.tracing_utils:default_tracing_exporter",
    "._fetch_replica_results_async",
    "._message_queue",
    "._record",
    "._deployment_id",
    "._replicas",
    "._asgi_app",
    ".__serve_build_asgi_app__",
}
"""Every such name in the source; below, there is a test of each."""


def private_names() -> Iterator[str]:
    """Private names in the source that it does not define itself."""
    trees = [ast.parse(path.read_text()) for name in ("cluster", "deployments") for path in (ROOT / name).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(module)) if module.startswith("ray"):
                yield from (f"{module}.{alias.name}" for alias in node.names if "._" in f"{module}.{alias.name}")
            case ast.Constant(value=str(text)) if text.startswith("ray.") and "._" in text:
                yield text
            case ast.Attribute(attr=name) if name.startswith("_") and not name.endswith("__") and name not in own:
                yield f".{name}"


def test_every_private_name_of_rays_has_a_test() -> None:
    """Names that the source also gives things of its own are not seen, and stand in the list by hand."""
    known_to_python = {"._actions", "._asdict", "._exit"}
    by_hand = {"._record", "._asgi_app", ".__serve_build_asgi_app__"}
    assert set(private_names()) - known_to_python == USED - by_hand


@pytest.mark.parametrize("name", sorted(name for name in USED if not name.startswith(".")))
def test_a_function_is_where_it_was(name: str) -> None:
    module, _, function = name.replace(":", ".").rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_key_value_store_takes_a_namespace() -> None:
    from ray.experimental import internal_kv

    for name in ("put", "get", "del", "list"):
        assert "namespace" in inspect.signature(getattr(internal_kv, f"_internal_kv_{name}")).parameters


def test_available_resources_are_told_by_node() -> None:
    from ray._private.state import available_resources_per_node

    assert list(inspect.signature(available_resources_per_node).parameters) == []


def test_the_exporter_of_traces_to_files_is_serves_default() -> None:
    from ray.serve._private.constants import DEFAULT_TRACING_EXPORTER_IMPORT_PATH

    assert FILE == DEFAULT_TRACING_EXPORTER_IMPORT_PATH


async def test_a_broadcast_gives_each_replicas_answer_apart() -> None:
    async def fetched() -> list[str]:
        return ["one", "another"]

    response = DeploymentBroadcastResponse.__new__(DeploymentBroadcastResponse)
    response.__dict__ |= {"_replica_results": None, "_loop": asyncio.get_running_loop(), "_coro": fetched()}
    assert await response._fetch_replica_results_async() == ["one", "another"]


def test_the_answer_of_a_replica_is_awaited_by_get_async() -> None:
    from ray.serve._private.replica_result import ActorReplicaResult, gRPCReplicaResult

    assert all(
        inspect.iscoroutinefunction(inspect.unwrap(one.get_async)) for one in (ActorReplicaResult, gRPCReplicaResult)
    )


def test_a_counter_takes_a_zero() -> None:
    recorded: list[Any] = []
    counter = Counter("specdec_test_zero", tag_keys=("label",))
    counter._metric = SimpleNamespace(record=lambda value, tags: recorded.append((value, tags["label"])))
    counter._record(0.0, {"label": "x"})
    assert recorded == [(0.0, "x")]


async def test_the_queue_of_a_stream_is_the_one_that_serve_empties() -> None:
    """It would be an empty one, and no slow client would be seen, if Serve called any of three names otherwise."""
    seen: list[Any] = []

    async def call(_info: Any, _scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        seen.extend([queue_of(send), list(queue_of(send))])

    replica = SimpleNamespace(
        get_user_method_info=lambda _: None, _run_user_code_in_separate_thread=False, _call_http_entrypoint=call
    )
    taken = UserCallableWrapper.call_http_entrypoint(replica, SimpleNamespace(call_method=""), lambda _: None, {}, None)
    messages = [message for batch in [batch async for batch in taken] for message in batch]
    queue, held = seen
    assert held == messages == [{"type": "http.response.start", "status": 200}]
    assert isinstance(queue, deque)
    assert not queue


def test_the_queue_of_serves_messages_is_a_deque() -> None:
    assert isinstance(MessageQueue()._message_queue, deque)


def test_the_application_of_a_replica_is_built_late_and_found_by_name() -> None:
    from ray.serve._private.replica import SERVE_BUILD_ASGI_APP_METHOD

    assert SERVE_BUILD_ASGI_APP_METHOD == "__serve_build_asgi_app__"
    called: list[str] = []

    async def second(_scope: Any, _receive: Any, _send: Any) -> None:
        called.append("second")

    wrapper = ASGIAppReplicaWrapper(None)
    wrapper._asgi_app = second
    asyncio.run(wrapper({}, None, None))
    assert called == ["second"]


async def test_a_request_router_tells_whose_replicas_it_is_given() -> None:
    router = PinningRequestRouter(DeploymentID("TargetServer", "service"), DeploymentHandleSource.UNKNOWN)
    assert (router._deployment_id.app_name, router._deployment_id.name) == ("service", "TargetServer")
    assert router.curr_replicas == {}
    heard: list[frozenset[str]] = []
    process_board().subscribe(("service", "TargetServer"), heard.append)
    router.update_replicas([])
    router.on_replica_actor_died(ReplicaID("x", DeploymentID("TargetServer", "service")))
    assert heard == [frozenset()]


async def test_a_request_router_reaches_a_replica_that_is_listed_no_more_while_a_link_holds_it() -> None:
    deployment, board, heard = DeploymentID("Router", "service"), process_board(), list[frozenset[str]]()
    router = PinningRequestRouter(deployment, DeploymentHandleSource.UNKNOWN)
    old, new = (SimpleNamespace(replica_id=ReplicaID(name, deployment)) for name in ("old", "new"))
    board.subscribe(("service", "Router"), heard.append)

    async def chosen(replica: str) -> list[Any]:
        metadata = RequestMetadata("request", "request", session_id=replica)
        (choice,) = await router.choose_replicas(router._replicas_list, PendingRequest([], {}, metadata))
        return choice

    board.hold(b"link", "old")
    router.update_replicas([old])
    router.update_replicas([new])
    assert heard == [{"old"}, {"new"}]
    assert list(router.curr_replicas.values()) == [new], "a broadcast would reach it"
    assert await chosen("old") == [old]
    assert await chosen("") == await chosen("another") == await chosen("new") == [new]
    router.update_replicas([])
    assert (await chosen("old"), await chosen("")) == ([old], [])
    board.release(b"link")
    router.update_replicas([new])
    assert router._replicas_list == [new]
    assert await chosen("old") == [new]


def test_a_replica_awaits_a_coroutine_that_del_gives() -> None:
    """Replicas drain in it."""
    ended: list[str] = []

    async def drain() -> None:
        ended.append("drained")

    class Draining:
        def __del__(self) -> Any:
            return None if ended else drain()

    async def stop() -> None:
        wrapper = UserCallableWrapper.__new__(UserCallableWrapper)
        wrapper.__dict__ |= {"_callable": Draining(), "_destructor_called": False, "_user_code_threadpool": None}
        wrapper.__dict__ |= {"_run_user_code_in_separate_thread": False, "_run_sync_methods_in_threadpool": False}
        wrapper.__dict__ |= {"_warned_about_sync_method_change": True}
        await wrapper.call_destructor()

    asyncio.run(stop())
    assert ended == ["drained"]


def test_the_head_has_the_resource_by_which_it_is_asked_for() -> None:
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME

    assert _HEAD == HEAD_NODE_RESOURCE_NAME


@pytest.mark.parametrize("name", sorted(name for name in RAY_SETTINGS if name.startswith("RAY_")))
def test_a_setting_is_one_that_ray_reads(name: str) -> None:
    """A variable that nobody reads fails nowhere."""
    sources = [path for folder in ("serve/_private", "_private", "_common") for path in (RAY / folder).rglob("*.py")]
    if not any(name in path.read_text() for path in sources):  # of the core, which is compiled
        assert name.removeprefix("RAY_").encode() in (RAY / "_raylet.so").read_bytes()
