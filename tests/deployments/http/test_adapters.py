"""Adapters by name, over a script: who is meant, who may load one, and what is refused."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
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
from cluster.models.demos import demo_folder
from deployments.http.app import create_app
from deployments.http.keys import ApiKeys
from deployments.http.service import ApiSettings, SequenceRequest, ServedModel
from deployments.http.store import NOTHING, Changes, MemoryStore, Store, Version
from deployments.operate import adapters as adapters_module
from deployments.operate.adapters import _ENCODE, LoadedAdapters, add_adapter_routes, configured_adapters
from specdec.checkpoint.fingerprint import adapter_reference
from specdec.core.errors import ServiceUnavailableError
from specdec.core.types import Adapter
from specdec.models.describe import linear_shapes
from specdec.models.loading import ModelSource
from tests.specdec.adapters import write_adapter

from .conftest import Bench
from .stores import FaultyStore, eventually

PATHS = ("chat", "sql")
KEYS = {"ops": "sk-ops-0123456789abc", "user": "sk-user-0123456789ab"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of the demo target, one of its draft, and one beside the folder."""
    folder = tmp_path_factory.mktemp("all") / "adapters"
    shapes = {role: linear_shapes(ModelSource(str(demo_folder(role)))) for role in ("target", "draft")}
    for seed, (name, rank) in enumerate({"sql": 4, "chat": 8, "large": 17}.items()):
        write_adapter(folder / name, shapes["target"], rank, seed)
    write_adapter(folder / "chat-draft", shapes["draft"], 4, 9)
    write_adapter(folder.parent / "outside", shapes["target"], 4, 8)
    write_adapter(folder / "not-finite", shapes["target"], 4, 7, float("inf"))
    (folder / "link").symlink_to(folder.parent / "outside")
    (folder / "circle").symlink_to(folder / "circle")
    return folder


class CountingStore(MemoryStore):
    """Counts the names that it tells of."""

    num_read = 0

    async def changes(self, since: Version, wait_s: float) -> Changes:
        found = await super().changes(since, wait_s)
        self.num_read += len(found.values)
        return found


def replace_name(adapter: Adapter, name: str) -> Adapter:
    return Adapter(name, adapter.path, adapter.fingerprint)


class Service:
    """A script, with the adapters of a configuration, as an ingress has them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, folder: Path, store: Store | None = None, decision: str = ""
    ) -> None:
        self.args = AppArgs.model_validate(
            {"lora": {"adapters": [{"name": "sql", "path": str(folder / "sql")}], "folder": str(folder)}}
        )
        self.bench = Bench(tokenizer)
        self.asked: list[SequenceRequest] = []
        self.bench.script = self.script
        info = self.bench.service.model_info()
        self.num_published = 0
        adapters = {one.name: one for one in configured_adapters(self.args, info.target)}
        self.bench.service._info = replace(info, adapters=adapters)

        def publish(name: str, model: ServedModel | None) -> None:
            self.num_published += 1
            adapters.pop(name, None)
            adapters.update({} if model is None else {name: model})

        self.store = MemoryStore(ResponsesStore()) if store is None else store
        self.adapters = LoadedAdapters(self.args, replace(info.target, decision=decision), self.store, publish)
        self.app = create_app(
            self.bench.service,
            ApiSettings(admin_keys=("ops",)),
            tokenizer,
            self.bench.observer,
            ApiKeys(KEYS),
            refresh=self.adapters.refresh,
        )
        add_adapter_routes(self.app, self.adapters)

    def names(self) -> dict[str, str]:
        """The adapters that requests can name, with the names of their folders."""
        models = self.bench.service.model_info().adapters
        return {name: Path(model.root).name for name, model in models.items()}

    def script(self, request: SequenceRequest) -> list[Any]:
        self.asked.append(request)
        return self.bench.say("yes")


@pytest.fixture
def service(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Service:
    return Service(tokenizer, folder)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=service.app)
    headers = {"Authorization": f"Bearer {KEYS['ops']}"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://api", headers=headers) as client:
        yield client


Post = Callable[..., Any]


@pytest.fixture
def post(http: httpx2.AsyncClient) -> Post:
    """Send a body; gives the status, and the answer or its error."""

    async def send(path: str, key: str = "ops", **body: Any) -> tuple[int, Any]:
        answer = await http.post(f"/v1/{path}", json=body, headers={"Authorization": f"Bearer {KEYS[key]}"})
        if answer.headers["content-type"].startswith("text/plain"):
            return answer.status_code, answer.text
        told = answer.json()
        return answer.status_code, told.get("error", told)

    return send


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
    assert list(listed) == ["demo", "demo-draft", "sql"]
    assert (listed["sql"]["parent"], listed["sql"]["root"]) == ("demo", "sql"), "no path of this machine"
    assert listed["demo"]["parent"] is None
    assert (await http.get("/v1/models/demo:sql")).json() == listed["sql"]


@pytest.mark.parametrize("name", ["demo:nothing", "nothing", "other:sql", "demo:", ":sql"])
async def test_unknown_names_are_404(name: str, post: Post) -> None:
    status, error = await post("chat/completions", model=name, messages=[{"role": "user", "content": "x"}])
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_an_adapter_comes_and_goes(service: Service, post: Post, folder: Path) -> None:
    load = {"lora_name": "chat", "lora_path": "chat", "draft_lora_path": str(folder / "chat-draft")}
    assert (await post("completions", model="chat", prompt="x"))[0] == 404
    assert (await post("load_lora_adapter", **load))[0] == 200
    assert (await post("load_lora_adapter", **load))[0] == 200, "the same again"
    assert (await post("completions", model="chat", prompt="x"))[0] == 200
    spec = service.asked[0].spec
    assert spec.adapter is not None
    assert spec.draft_adapter is not None
    assert Path(spec.adapter.path), Path(spec.draft_adapter.path) == (folder / "chat", folder / "chat-draft")
    assert (await post("unload_lora_adapter", lora_name="chat", lora_int_id=3))[0] == 200
    assert (await post("completions", model="chat", prompt="x"))[0] == 404
    status, error = await post("unload_lora_adapter", lora_name="chat")
    assert (status, error["param"]) == (404, "lora_name")


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
    for name in ("sql", "demo:sql", "demo", "demo-draft"):
        assert (await post("completions", model=name, prompt="x"))[0] == 200
    assert [bool(request.spec.adapter) for request in service.asked] == [True, True, False, False]


async def test_the_open_page_names_no_adapter(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/")).json()["models"] == ["demo", "demo-draft"]


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


async def test_ingresses_learn_what_is_loaded_at_start_and_on_change(
    tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    store = MemoryStore(ResponsesStore())
    old = Service(tokenizer, folder, store)
    await old.adapters.load("chat", "chat", None, False)
    new = Service(tokenizer, folder, store)
    new.adapters.start()
    try:
        await new.adapters.read(10)
        assert new.names() == old.names() == {"sql": "sql", "chat": "chat"}
        await old.adapters.unload("chat")
        await eventually(lambda: new.names() == old.names() == {"sql": "sql"})
        await new.adapters.load("chat", "sql", None, False)
        await old.adapters.refresh()
        await old.adapters.load("chat", "chat", None, True)
        await eventually(lambda: new.names() == {"sql": "sql", "chat": "chat"})
    finally:
        new.adapters.close()


async def test_a_name_that_another_ingress_has_just_loaded_is_no_404(
    tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    store = MemoryStore(ResponsesStore())
    one, other = Service(tokenizer, folder, store), Service(tokenizer, folder, store)
    await one.adapters.load("chat", "chat", None, False)
    headers = {"Authorization": f"Bearer {KEYS['user']}"}
    transport = httpx2.ASGITransport(app=other.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://api", headers=headers) as http:
        for path, body in (("completions", {"prompt": "x"}), ("responses", {"input": "x"})):
            assert (await http.post(f"/v1/{path}", json={"model": "chat", **body})).status_code == 200
            other.bench.service._info.adapters.clear()  # type: ignore[attr-defined]
            other.adapters._version = NOTHING
        assert (await http.get("/v1/models/chat")).status_code == 200
        assert (await http.get("/v1/models/nothing")).status_code == 404


async def test_a_name_that_is_not_known_while_the_store_does_not_answer_may_be_asked_for_again(
    tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Nobody can say whether another ingress has loaded it: that is no 404."""
    store = FaultyStore(MemoryStore(ResponsesStore()))
    one, other = Service(tokenizer, folder, store), Service(tokenizer, folder, store)
    await one.adapters.load("chat", "chat", None, False)
    headers = {"Authorization": f"Bearer {KEYS['user']}"}
    transport = httpx2.ASGITransport(app=other.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://api", headers=headers) as http:
        store.fault = ServiceUnavailableError("the store is late")
        answer = await http.post("/v1/completions", json={"model": "chat", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
        assert answer.headers["retry-after"] == "1"
        assert "'chat' is not known here" in answer.json()["error"]["message"]
        assert (await http.post("/v1/completions", json={"model": "sql", "prompt": "x"})).status_code == 200
        store.fault = None
        assert (await http.post("/v1/completions", json={"model": "chat", "prompt": "x"})).status_code == 200


@pytest.mark.parametrize("fault", [ServiceUnavailableError("gone"), ValueError("not foreseen")], ids=repr)
async def test_whoever_watches_goes_on_after_any_failure(
    fault: Exception,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(adapters_module, "_RETRY_S", 0.0)
    service = Service(tokenizer, folder)
    faults, real = [fault, fault], service.adapters._apply

    async def fails_twice(changes: Changes) -> None:
        if faults:
            raise faults.pop()
        await real(changes)

    monkeypatch.setattr(service.adapters, "_apply", fails_twice)
    service.adapters.start()
    try:
        await service.adapters.read(10)
    finally:
        service.adapters.close()
    assert service.adapters._has_read.is_set()
    assert (len(faults), caplog.text.count("are not seen for now")) == (0, 1)


async def test_a_record_that_cannot_be_read_is_left_out_and_hides_no_other(
    tokenizer: PreTrainedTokenizerFast, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(ResponsesStore())
    one, other = Service(tokenizer, folder, store), Service(tokenizer, folder, store)
    await store.assign("older", b'["another form"]')
    await one.adapters.load("chat", "chat", None, False)
    await other.adapters.refresh()
    assert other.names() == {"sql": "sql", "chat": "chat"}
    assert "'older' cannot be read" in caplog.text


async def test_adapters_of_a_store_that_is_gone_are_kept_and_put_into_one_that_has_lost_them(
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = Service(tokenizer, folder, FaultyStore(MemoryStore(ResponsesStore())))
    other = Service(tokenizer, folder, service.store)
    for name in ("chat", "again", "unloaded"):
        await service.adapters.load(name, "chat", None, False)
    await other.adapters.refresh()
    service.store.fault = ServiceUnavailableError("gone")  # type: ignore[attr-defined]
    with pytest.raises(ServiceUnavailableError):
        await service.adapters.unload("chat")
    known = {"sql": "sql", "chat": "chat", "again": "chat", "unloaded": "chat"}
    assert service.names() == known
    service.store.fault, service.store.inner = None, CountingStore(ResponsesStore())  # type: ignore[attr-defined]
    await service.store.assign("again", _ENCODE(("", adapter_reference("again", str(folder / "sql")), None)))
    await service.store.assign("unloaded", None)
    await service.adapters.refresh()
    assert service.names() == {"sql": "sql", "chat": "chat", "again": "sql"}, "what it knows anew holds"
    assert "has lost 1: they are put back" in caplog.text
    for one in (other, Service(tokenizer, folder, service.store)):
        await one.adapters.refresh()
        assert one.names() == service.names()


async def test_loading_many_adapters_is_linear_in_their_number(
    tokenizer: PreTrainedTokenizerFast, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published and read, counted; an ingress that starts then reads each once."""
    adapter = adapter_reference("a", str(folder / "chat"))
    monkeypatch.setattr(adapters_module, "_checked_pair", lambda *args: (replace_name(adapter, args[3]), None))
    store = CountingStore(ResponsesStore())
    service = Service(tokenizer, folder, store)
    for number in range(400):
        await service.adapters.load(f"a{number}", "chat", None, False)
    assert len(service.names()) == 401
    assert (service.num_published, store.num_read) == (400, 400)
    new = Service(tokenizer, folder, store)
    await new.adapters.refresh()
    assert (new.num_published, new.names()) == (400, service.names())


async def test_a_replica_of_an_update_has_the_adapter_of_its_own_model(
    tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """As a model that is quantized anew: other tokens, another fingerprint."""
    store = MemoryStore(ResponsesStore())
    old, new = (Service(tokenizer, folder, store, decision) for decision in ("int8", "int4"))
    await old.adapters.load("chat", "chat", None, False)
    await new.adapters.refresh()
    ours, theirs = (one.bench.service.model_info().adapters["chat"] for one in (new, old))
    assert ours.adapter == theirs.adapter
    assert (ours.decision[:5], theirs.decision[:5]) == ("int4:", "int8:")


async def test_what_was_loaded_for_another_model_is_checked_once_and_its_layers_are_read_once(
    tokenizer: PreTrainedTokenizerFast, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests ask meanwhile."""
    store = MemoryStore(ResponsesStore())
    old, new = (Service(tokenizer, folder, store, decision) for decision in ("int8", "int4"))
    for name in "abc":
        await old.adapters.load(name, "chat", None, False)
    counts = Counter[str]()

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return real(*args)

        return call

    for name in ("linear_shapes", "AdapterCheckpoint"):
        monkeypatch.setattr(adapters_module, name, counted(name, getattr(adapters_module, name)))
    new.adapters.start()
    try:
        await asyncio.gather(*(new.adapters.refresh() for _ in range(4)))
        await new.adapters.read(10)
    finally:
        new.adapters.close()
    assert set(new.names()) == {"sql", *"abc"}
    assert counts["linear_shapes"] == 1
    assert counts["AdapterCheckpoint"] <= 6, "by one request, and by whoever watches"


class SlowCheck:
    """Checks of the adapter ``sql`` wait until they may end.

    Attributes:
        checked: The folders' names, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checked: list[str] = []
        self.may_end = threading.Event()
        self._real = adapters_module.AdapterCheckpoint
        monkeypatch.setattr(adapters_module, "AdapterCheckpoint", self._check)

    def _check(self, folder: Path, *rest: Any) -> Any:
        self.checked.append(folder.name)
        assert folder.name != "sql" or self.may_end.wait(30)
        return self._real(folder, *rest)


async def test_an_adapter_serves_once_it_is_checked_and_no_request_waits_for_all(
    tokenizer: PreTrainedTokenizerFast, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "_REFRESH_S", 0.05)
    store = MemoryStore(ResponsesStore())
    old, new = (Service(tokenizer, folder, store, decision) for decision in ("int8", "int4"))
    for name, path in {"slow": "sql", "quick": "chat"}.items():
        await old.adapters.load(name, path, None, False)
    checks = SlowCheck(monkeypatch)
    headers = {"Authorization": f"Bearer {KEYS['user']}"}
    transport = httpx2.ASGITransport(app=new.app)
    new.adapters.start()
    try:
        await eventually(lambda: "sql" in checks.checked)
        assert new.names() == {"sql": "sql", "quick": "chat"}
        async with httpx2.AsyncClient(transport=transport, base_url="http://api", headers=headers) as http:
            answer = await http.post("/v1/completions", json={"model": "slow", "prompt": "x"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "'slow' is not known here" in answer.json()["error"]["message"]
            assert "still being checked" in answer.json()["error"]["message"]
            assert (await http.post("/v1/completions", json={"model": "quick", "prompt": "x"})).status_code == 200
        checks.may_end.set()
        await eventually(lambda: "slow" in new.names())
    finally:
        checks.may_end.set()
        new.adapters.close()
    assert checks.checked == ["chat", "sql"]


async def test_a_check_that_was_cut_short_goes_on_where_it_was(
    tokenizer: PreTrainedTokenizerFast, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is unloaded meanwhile is not taken for lost by the store."""
    store = MemoryStore(ResponsesStore())
    old, new = (Service(tokenizer, folder, store, decision) for decision in ("int8", "int4"))
    for name, path in {"slow": "sql", "kept": "chat", "gone": "chat"}.items():
        await old.adapters.load(name, path, None, False)
    checks = SlowCheck(monkeypatch)
    request = asyncio.create_task(new.adapters.refresh())
    await eventually(lambda: "sql" in checks.checked)
    request.cancel()
    checks.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert new.names() == {"sql": "sql", "kept": "chat", "gone": "chat"}
    await old.adapters.unload("gone")
    await new.adapters.refresh()
    assert new.names() == {"sql": "sql", "kept": "chat", "slow": "sql"}
    assert checks.checked == ["chat", "chat", "sql", "sql"]


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


async def test_a_hub_whose_connection_is_lost_is_a_refusal(
    service: Service, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object, **__: object) -> str:
        raise httpx2.ReadTimeout("The read operation timed out")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", lose)
    monkeypatch.setattr(service.adapters, "_args", AppArgs.model_validate({"lora": {"hub": True}}))
    status, error = await post("load_lora_adapter", lora_name="x", lora_path="some/adapter")
    assert (status, error["param"]) == (400, "lora_path")
    assert "some/adapter cannot be found on the hub" in error["message"]


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
