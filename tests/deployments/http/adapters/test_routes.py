"""Adapters by name: who is meant, who may load one, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from cluster.config.app import AppArgs
from cluster.config.limits import ResponsesStore
from deployments.http.app import create_app
from deployments.http.keys import ApiKeys
from deployments.http.service import ApiSettings, ServedModel
from deployments.http.store import MemoryStore
from deployments.operate import adapters as adapters_module
from deployments.operate.adapters import add_adapter_routes, configured_adapters
from specdec.checkpoint.fingerprint import adapter_reference
from specdec.core.errors import InvalidParameterError
from specdec.core.types import Adapter

from .kit import KEYS, Post, Service

PATHS = ("chat", "sql")


@pytest.mark.parametrize("name", ["sql", "demo:sql"])
async def test_an_adapter_is_named_alone_or_after_its_model(name: str, service: Service, post: Post) -> None:
    _, answer = await post("completions", model=name, prompt="x")
    _, plain = await post("completions", model="demo", prompt="x")
    specs = [request.spec for request in service.asked]
    assert [None if spec.adapter is None else spec.adapter.name for spec in specs] == ["sql", None]
    assert specs[0].prefix_group(specs[0].adapter) != specs[1].prefix_group(specs[1].adapter)
    assert (answer["model"], plain["model"]) == ("sql", "demo")
    assert answer["system_fingerprint"] != plain["system_fingerprint"]
    assert service.bench.metric("prompt_tokens_total", key="ops") == 2, "the label is the model's name"


async def test_adapters_are_listed_with_parent_and_root(http: httpx2.AsyncClient) -> None:
    listed = {one["id"]: one for one in (await http.get("/v1/models")).json()["data"]}
    assert list(listed) == ["demo", "sql"]
    assert (listed["sql"]["parent"], listed["sql"]["root"]) == ("demo", "sql"), "no path of this machine"
    assert listed["demo"]["parent"] is None
    assert (await http.get("/v1/models/demo:sql")).json() == listed["sql"]


@pytest.mark.parametrize("name", ["demo:nothing", "nothing", "other:sql", "demo:", ":sql"])
async def test_unknown_names_are_404(name: str, post: Post) -> None:
    status, error = await post("chat/completions", model=name, messages=[{"role": "user", "content": "x"}])
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_an_adapter_comes_and_goes(service: Service, post: Post, folder: Path) -> None:
    load = {"lora_name": "talk", "lora_path": "chat", "draft_lora_path": str(folder / "chat-draft")}
    assert (await post("completions", model="talk", prompt="x"))[0] == 404
    assert (await post("load_lora_adapter", **load))[0] == 200
    assert (await post("load_lora_adapter", **load))[0] == 200, "the same again"
    assert (await post("completions", model="talk", prompt="x"))[0] == 200
    spec = service.asked[0].spec
    assert spec.adapter is not None
    assert spec.draft_adapter is not None
    assert Path(spec.adapter.path), Path(spec.draft_adapter.path) == (folder / "chat", folder / "chat-draft")
    assert (await post("unload_lora_adapter", lora_name="talk", lora_int_id=3))[0] == 200
    assert (await post("completions", model="talk", prompt="x"))[0] == 404
    status, error = await post("unload_lora_adapter", lora_name="talk")
    assert (status, error["param"]) == (404, "lora_name")


@pytest.mark.parametrize("name", ["chat", "demo:chat"])
async def test_an_adapter_of_the_folder_is_there_without_a_load(name: str, service: Service, post: Post) -> None:
    answers = await asyncio.gather(*(post("completions", model=name, prompt="x") for _ in range(3)))
    assert [status for status, _ in answers] == [200] * 3
    assert service.names()["chat"] == "chat"
    assert service.num_published == 1, "those who ask at once share one load"


async def test_an_adapter_of_the_folder_that_was_unloaded_stays_so(
    service: Service, post: Post, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    assert (await post("completions", model="chat", prompt="x"))[0] == 200
    assert (await post("unload_lora_adapter", lora_name="chat"))[0] == 200
    other = Service(tokenizer, folder, service.store)
    await other.adapters.find("chat")
    assert "chat" not in other.names()
    service.store = other.adapters._store = MemoryStore(ResponsesStore())  # the store has lost it
    await other.adapters.find("chat")
    another = Service(tokenizer, folder, service.store)
    await another.adapters.find("chat")
    assert "chat" not in another.names() | other.names()
    await another.adapters.load("chat", "chat", None, False)
    assert another.names()["chat"] == "chat"


@pytest.mark.parametrize(
    ("name", "status"),
    [("large", 400), ("outside", 404), ("../outside", 404), ("link", 404), (".", 404), ("circle", 404)],
)
async def test_what_the_folder_has_not_or_cannot_be_served(name: str, status: int, post: Post) -> None:
    found, error = await post("completions", model=name, prompt="x")
    assert (found, error["param"]) == (status, "model")
    assert status == 404 or "rank" in error["message"]


@pytest.mark.parametrize("name", ["team/sql:v2", "../sql", "ä b", "x" * 200])
async def test_any_name_is_a_name_everywhere(name: str, service: Service, post: Post, http: httpx2.AsyncClient) -> None:
    """As it is and after the model's, at each endpoint that answers, and in the list."""
    assert (await post("load_lora_adapter", lora_name=name, lora_path="chat"))[0] == 200
    for model in (name, f"demo:{name}"):
        assert (await post("completions", model=model, prompt="x"))[0] == 200
        assert (await post("chat/completions", model=model, messages=[{"role": "user", "content": "x"}]))[0] == 200
        assert (await post("responses", model=model, input="x"))[0] == 200
    assert [request.spec.adapter.name for request in service.asked if request.spec.adapter] == [name] * 6
    assert (await http.get(f"/v1/models/{quote(name, safe='')}")).json()["id"] == name
    assert (await post("unload_lora_adapter", lora_name=name))[0] == 200


async def test_a_request_looks_its_adapter_up_and_walks_over_none(service: Service, post: Post) -> None:
    class Looked(dict[str, ServedModel]):
        def __iter__(self) -> Any:
            raise AssertionError("a request walked over all adapters")

        values = items = keys = __iter__  # type: ignore[assignment]

    info = service.bench.service.model_info()
    service.bench.service._info = replace(info, adapters=Looked(info.adapters))
    for name in ("sql", "demo:sql", "demo"):
        assert (await post("completions", model=name, prompt="x"))[0] == 200
    assert [bool(request.spec.adapter) for request in service.asked] == [True, True, False]


async def test_the_open_page_names_no_adapter(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/")).json()["models"] == ["demo"]


async def test_a_name_changes_its_adapter_only_where_that_is_said(service: Service, post: Post) -> None:
    assert (await post("load_lora_adapter", lora_name="mine", lora_path="chat"))[0] == 200
    status, error = await post("load_lora_adapter", lora_name="mine", lora_path="sql")
    assert (status, error["param"]) == (400, "lora_name")
    assert (await post("load_lora_adapter", lora_name="mine", lora_path="sql", load_inplace=True))[0] == 200
    await post("completions", model="mine", prompt="x")
    assert service.asked[0].spec.adapter.path.endswith("/sql")


@pytest.mark.parametrize("path", ["load_lora_adapter", "unload_lora_adapter"])
async def test_only_keys_that_are_named_may_do_it(path: str, post: Post, http: httpx2.AsyncClient) -> None:
    body = {"lora_name": "chat", "lora_path": "chat"}
    status, error = await post(path, key="user", **body)
    assert (status, error["code"]) == (403, "admin_key_needed")
    assert (await http.post(f"/v1/{path}", json=body, headers={"Authorization": "Bearer wrong"})).status_code == 401


@pytest.mark.parametrize("keys", [KEYS, {}], ids=["keys", "none"])
async def test_nobody_may_where_no_key_is_named(keys: dict[str, str], service: Service) -> None:
    app = create_app(service.bench.service, ApiSettings(), service.bench.tokenizer, keys=ApiKeys(keys))
    add_adapter_routes(app, service.adapters)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api") as client:
        headers = {"Authorization": f"Bearer {KEYS['ops']}"}
        body = {"lora_name": "a", "lora_path": "b"}
        assert (await client.post("/v1/load_lora_adapter", json=body, headers=headers)).status_code == 403


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"lora_name": "x", "lora_path": "../outside"}, "lora_path", "a folder in"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path", "a folder in"),
        ({"lora_name": "x", "lora_path": "nothing"}, "lora_path", "a folder in"),
        ({"lora_name": "x", "lora_path": "some/repository"}, "lora_path", "a folder in"),
        ({"lora_name": "x", "lora_path": "a\0b"}, "lora_path", "a folder in"),
        ({"lora_name": "x", "lora_path": "a" * 300}, "lora_path", "a folder in"),
        ({"lora_name": "x", "lora_path": "circle"}, "lora_path", "a folder in"),
        ({"lora_name": "x", "lora_path": "not-finite"}, "lora_path", "not all finite"),
        ({"lora_name": "x", "lora_path": "link"}, "lora_path", "a folder in"),
        ({"lora_name": "x", "lora_path": "large"}, "lora_path", "rank 17; at most 16"),
        ({"lora_name": "x", "lora_path": "chat-draft"}, "lora_path", "are not those of a layer of"),
        ({"lora_name": "x", "lora_path": "chat", "draft_lora_path": "/etc"}, "draft_lora_path", "a folder in"),
        ({"lora_name": "x", "lora_path": "chat", "draft_lora_path": "sql"}, "draft_lora_path", "0.mlp.down_proj"),
        ({"lora_name": "demo", "lora_path": "chat"}, "lora_name", "name of a model"),
        ({"lora_name": "demo:chat", "lora_path": "chat"}, "lora_name", "name of a model"),
        ({"lora_name": "sql", "lora_path": "chat"}, "lora_name", "another adapter"),
        ({"lora_name": "", "lora_path": "chat"}, "lora_name", "at least 1"),
        ({"lora_path": "chat"}, "lora_name", "required"),
        ({"lora_name": "x", "lora_path": "chat", "is_3d_lora_weight": True}, "is_3d_lora_weight", "not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("lora") else "",
)
async def test_what_cannot_be_loaded_is_refused(body: dict[str, Any], param: str, says: str, post: Post) -> None:
    status, error = await post("load_lora_adapter", **body)
    assert (status, error["param"]) == (400, param), error
    assert says in error["message"]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "x", "path": "large"}, "lora.adapters[1].path: .*rank 17; at most 16"),
        ({"name": "x", "path": "nothing"}, "lora.adapters[1].path: .*nothing"),
        ({"name": "demo", "path": "chat"}, "lora.adapters[1].name: demo .*name of a model"),
        ({"name": "x", "path": "chat", "draft": "sql"}, "lora.adapters[1].draft: .*0.mlp.down_proj"),
    ],
    ids=["rank", "no folder", "name", "draft"],
)
def test_a_refused_adapter_of_the_configuration_is_named_by_its_entry(
    service: Service, folder: Path, entry: dict[str, str], says: str
) -> None:
    paths = {key: value if key == "name" else str(folder / value) for key, value in entry.items()}
    adapters = [{"name": "sql", "path": str(folder / "sql")}, paths]
    args = AppArgs.model_validate({"lora": {"adapters": adapters}})
    with pytest.raises(InvalidParameterError, match="^" + says.replace("[", r"\[")) as refused:
        configured_adapters(args, service.bench.service.model_info().target)
    assert refused.value.parameter == says.partition(":")[0]


async def test_configured_adapters_stay(post: Post) -> None:
    status, error = await post("unload_lora_adapter", lora_name="sql")
    assert (status, error["param"]) == (400, "lora_name")


async def test_a_name_that_leaves_the_configuration_means_what_was_loaded_by_it(
    service: Service, post: Post, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    other = Service(tokenizer, folder, service.store)
    other.adapters.set_configured(("chat",))
    assert (await post("load_lora_adapter", lora_name="chat", lora_path="chat"))[0] == 200
    await other.adapters.refresh()
    assert other.num_published == 0, "the configuration's own is served by the name"
    other.adapters.set_configured(())
    assert other.names() == {"sql": "sql", "chat": "chat"}


async def test_of_two_loads_of_a_name_at_once_one_is_refused(service: Service, post: Post) -> None:
    answers = await asyncio.gather(*(post("load_lora_adapter", lora_name="mine", lora_path=path) for path in PATHS))
    assert sorted(status for status, _ in answers) == [200, 400]
    (path,) = (path for path, (status, _) in zip(PATHS, answers, strict=True) if status == 200)
    assert service.names()["mine"] == path


async def test_an_adapter_that_is_gone_is_refused_and_nothing_is_lost(
    service: Service, folder: Path, post: Post
) -> None:
    shutil.copytree(folder / "chat", folder / "copy")
    (folder / "copy" / "adapter_model.safetensors").unlink()
    status, error = await post("load_lora_adapter", lora_name="copy", lora_path="copy")
    assert (status, error["param"]) == (400, "lora_path")
    assert "has no adapter_model.safetensors" in error["message"]
    await asyncio.sleep(0)
    assert (await post("completions", model="sql", prompt="x"))[0] == 200


@pytest.mark.parametrize(
    ("fault", "status", "param", "words"),
    [
        (httpx2.ReadTimeout("The read operation timed out"), 400, "lora_path", "cannot be found on the hub: The read"),
        (OSError(errno.ENOSPC, "No space left on device"), 503, None, "cannot be kept in the hub's cache here: [Errno"),
    ],
    ids=["connection lost", "disk full"],
)
async def test_an_adapter_that_cannot_be_got_is_refused_and_the_service_goes_on(
    service: Service, post: Post, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: int, param: str, words: str
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise fault

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    monkeypatch.setattr(service.adapters, "_args", AppArgs.model_validate({"lora": {"hub": True}}))
    told, error = await post("load_lora_adapter", lora_name="x", lora_path="some/adapter")
    assert (told, error["param"]) == (status, param)
    assert f"some/adapter {words}" in error["message"]
    assert (await post("completions", model="sql", prompt="x"))[0] == 200


def has_size(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The hub says so of every file."""
    found = SimpleNamespace(size=size)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url: found)


async def test_an_adapter_on_the_hub_that_is_too_large_is_not_downloaded(
    service: Service, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[object] = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **_: downloads.append(args))
    has_size(monkeypatch, 2049)
    lora = {"hub": True, "max_adapter_bytes": 2048}
    monkeypatch.setattr(service.adapters, "_args", AppArgs.model_validate({"lora": lora}))
    status, error = await post("load_lora_adapter", lora_name="x", lora_path="some/adapter")
    assert (status, error["param"], downloads) == (400, "lora_path", [])
    assert "lora.max_adapter_bytes" in error["message"]


async def test_loads_that_take_too_long_are_504_and_hold_up_no_check_of_what_others_loaded(
    service: Service,
    post: Post,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other_model = Service(tokenizer, folder, service.store, "another model")
    await other_model.adapters.load("chat", "chat", None, in_place=False)
    may_end = threading.Event()

    def hang(*_: object, **__: object) -> str:
        may_end.wait(60)
        raise OSError

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hang)
    has_size(monkeypatch, 1)
    lora = {"hub": True, "load_timeout_s": 0.05}
    monkeypatch.setattr(service.adapters, "_args", AppArgs.model_validate({"lora": lora}))
    try:
        told = [await post("load_lora_adapter", lora_name=name, lora_path="some/adapter") for name in "xyz"]
        await service.adapters.refresh()
    finally:
        may_end.set()
    assert [(status, error["code"]) for status, error in told] == [(504, "load_timeout")] * 3
    assert service.names() == {"sql": "sql", "chat": "chat"}


async def test_a_load_whose_client_has_gone_lets_nobody_name_the_adapter(
    service: Service, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be stopped, so a download goes on into the cache; its end changes nothing."""
    may_end, running = threading.Event(), threading.Event()

    def slow_reference(name: str, path: str) -> Adapter:
        running.set()
        assert may_end.wait(60)
        return adapter_reference(name, path)

    monkeypatch.setattr(adapters_module, "adapter_reference", slow_reference)
    body = b'{"lora_name": "late", "lora_path": "chat"}'
    headers = [(b"authorization", f"Bearer {KEYS['ops']}".encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/load_lora_adapter", "root_path": "", "query_string": b""}
    scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "server": ("api", 80), "client": ("c", 1)}
    told: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if told:
            return told.pop()
        await asyncio.to_thread(running.wait, 60)
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None: ...

    try:
        async with asyncio.timeout(60):
            await service.app(scope, receive, send)
    finally:
        may_end.set()
    assert (await post("load_lora_adapter", lora_name="next", lora_path="chat"))[0] == 200, "the thread is free"
    assert service.names() == {"sql": "sql", "next": "chat"}


async def test_what_an_administrator_does_is_logged(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="ray.serve"):
        await post("load_lora_adapter", lora_name="a\nb", lora_path="chat")
        await post("unload_lora_adapter", lora_name="a\nb")
        await post("unload_lora_adapter", key="user", lora_name="a")
    told = [text.split(" ", 2)[2] for text in caplog.messages if text.startswith("admin ")]
    assert told == [
        r"key=ops load_lora_adapter lora_name='a\nb' lora_path='chat' draft_lora_path=None",
        r"key=ops unload_lora_adapter lora_name='a\nb'",
    ]


async def test_loads_that_take_long_keep_no_large_request_waiting(
    service: Service, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body is read in a thread of the event loop, which has one here."""
    may_go_on, waiting = threading.Event(), []

    def slow_reference(name: str, path: str) -> Adapter:
        waiting.append(name)
        assert may_go_on.wait(60)
        return adapter_reference(name, path)

    monkeypatch.setattr(adapters_module, "adapter_reference", slow_reference)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    names = [f"chat-{i}" for i in range(10)]
    loads = [asyncio.create_task(post("load_lora_adapter", lora_name=name, lora_path="chat")) for name in names]
    try:
        async with asyncio.timeout(20):
            while not waiting:
                await asyncio.sleep(0.01)
            assert (await post("completions", model="demo", prompt="x", user="x" * 20_000))[0] == 200
        assert len(waiting) <= 2
    finally:
        may_go_on.set()
    assert [status for status, _ in await asyncio.gather(*loads)] == [200] * 10
