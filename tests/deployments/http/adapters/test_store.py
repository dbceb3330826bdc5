"""What ingresses know of adapters that another one has loaded."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from cluster.config.limits import ResponsesStore
from deployments.http.store import NOTHING, Changes, MemoryStore
from deployments.operate import adapters as adapters_module
from deployments.operate.adapters import _ENCODE
from specdec.checkpoint.fingerprint import adapter_reference
from specdec.core.errors import ServiceUnavailableError
from tests.waiting import eventually

from ..stores import FaultyStore
from .kit import KEYS, CountingStore, Service, replace_name


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
    assert (len(faults), caplog.text.count("are not seen yet")) == (0, 1)


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


async def test_a_check_goes_on_though_nobody_waits_for_it(
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
    await old.adapters.unload("gone")
    await new.adapters.refresh()
    assert new.names() == {"sql": "sql", "kept": "chat", "slow": "sql"}
    assert checks.checked == ["chat", "chat", "sql"]
