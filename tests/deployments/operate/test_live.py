"""A replica that serves is not stopped by a configuration that is wrong; one that starts is."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request

from cluster.config.app import AppArgs
from cluster.config.environment import api_keys
from cluster.models.sources import read_template
from deployments.http.recordings import RecordingFolder
from deployments.http.service import ModelInfo, ServedModel
from deployments.ingress import OpenAIIngress
from deployments.operate.live import LiveKeys, WatchedFile
from deployments.operate.status import Metrics, StatusArgs
from deployments.tokens import RoutedTokens
from specdec.core.errors import InvalidParameterError


class End(LiveKeys):
    def __init__(self, keys_file: Path, template: Path) -> None:
        self._args = self.in_force = AppArgs()
        self.files = (str(keys_file), str(template))

    def _go_by(self, args: AppArgs) -> None:
        api_keys(self.files[0], {})
        read_template(self.files[1])
        self.in_force = args


@pytest.fixture
def end(tmp_path: Path) -> End:
    keys, template = tmp_path / "keys", tmp_path / "template"
    keys.write_text("alice: sk-alice-0123456789\n")
    template.write_text("{{ messages }}")
    return End(keys, template)


WRONG = [({"limits": {"retry_after": 1}}, "limits.retry_after"), ({"target": "other"}, "target")]


@pytest.mark.parametrize(("user_config", "words"), WRONG)
async def test_a_replica_that_starts_refuses_what_is_wrong(end: End, user_config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words):
        await end.reconfigure(user_config)
    assert end.config_metrics() == {"num_config_errors": 0}


@pytest.mark.parametrize(("user_config", "words"), WRONG)
async def test_a_replica_that_serves_keeps_what_was_in_force(
    end: End, user_config: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    await end.reconfigure({"limits": {"retry_after_s": 7}})
    await end.check_health()
    await end.reconfigure(user_config)
    assert end.in_force.limits.retry_after_s == 7
    assert end.config_metrics() == {"num_config_errors": 1}
    assert words in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    await end.reconfigure({"limits": {"retry_after_s": 9}})
    assert end.in_force.limits.retry_after_s == 9


async def test_what_a_start_has_made_is_not_looked_at_by_every_collection_of_garbage(end: End) -> None:
    await end.check_health()
    frozen = gc.get_freeze_count()
    later = [[number] for number in range(10_000)]
    await end.check_health()
    assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() < frozen + len(later), "once, when the start ends; what is frozen may still be freed"


async def test_an_empty_configuration_goes_back_to_serves_log_level(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    serve, library = logging.getLogger("ray.serve"), logging.getLogger("specdec")
    for logger in (serve, library):  # what is set is undone
        monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(library, "handlers", [])
    await end.reconfigure({"log_level": "debug"})
    assert serve.level == logging.DEBUG
    await end.reconfigure({})
    assert serve.level == logging.WARNING


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("text", [None, b"\xff", b""])
async def test_a_file_that_cannot_be_used_then_stops_no_replica(end: End, index: int, text: bytes | None) -> None:
    await end.check_health()
    file = Path(end.files[index])
    file.unlink() if text is None else file.write_bytes(text)
    await end.reconfigure({"limits": {"retry_after_s": 7}})
    is_refused = not (index == 1 and text == b"")
    assert end.config_metrics() == {"num_config_errors": is_refused}
    assert (end.in_force.limits.retry_after_s == 7) != is_refused


ALICE, BOB = "alice: sk-alice-0123456789", "bob: sk-bob-0123456789"


class Ingress(OpenAIIngress):
    """Without what Serve begins and ends of it."""

    def __del__(self) -> None: ...


async def _allowed(ask: Callable[[str], Awaitable[int]]) -> list[str]:
    """Whose keys are taken."""
    return [line.split(":")[0] for line in (ALICE, BOB) if await ask(line.split(": ")[1]) != 401]


async def _check_rotation(keys: Path, replica: Any, ask: Callable[[str], Awaitable[int]]) -> None:
    seen = []
    for text in (ALICE, f"{ALICE}\n{BOB}", BOB, "", None, ALICE):
        other = keys.with_suffix(".new")
        if text is None:
            keys.unlink()
        else:
            other.write_text(text)
            other.rename(keys)
        await replica.check_health()
        seen.append(await _allowed(ask))
    assert seen == [["alice"], ["alice", "bob"], ["bob"], ["bob"], ["bob"], ["alice"]]


def _ingress(keys: dict[str, Any]) -> Ingress:
    """An ingress without its links."""
    ingress, args = object.__new__(Ingress), AppArgs.model_validate(keys)
    ingress._args = ingress._in_force = args
    ingress._keys_file = WatchedFile(args.access.api_keys_file)
    ingress._replica_metrics = SimpleNamespace(registry=CollectorRegistry())
    ingress._target = ServedModel("m", 100, 100)
    ingress._service = RoutedTokens(ModelInfo(ingress._target))
    ingress._ingress_host = SimpleNamespace(tell=lambda change: None)
    ingress._store = ingress._adapters = None
    ingress._recordings = RecordingFolder("one")
    return ingress


async def test_adapters_and_the_file_of_keys_change_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configured(args: AppArgs, base: ServedModel) -> tuple[ServedModel, ...]:
        if any(one.path == "absent" for one in args.lora.adapters):
            raise InvalidParameterError("lora.adapters", "lora.adapters: there is no absent")
        return tuple(replace(base, name=one.name) for one in args.lora.adapters)

    monkeypatch.setattr("deployments.ingress.configured_adapters", configured)
    files = {name: tmp_path / name for name in ("alice", "bob")}
    for name, text in (("alice", ALICE), ("bob", BOB)):
        files[name].write_text(text)
    ingress = _ingress({"lora": {"models": "target"}, "access": {"api_keys_file": str(files["alice"])}})
    ingress._asgi_app = ingress.__serve_build_asgi_app__()
    ingress._has_served = True

    async def listed(key: str, adapters: dict[str, str], file: str) -> list[str] | int:
        lora = {"adapters": [{"name": name, "path": path} for name, path in adapters.items()]}
        await ingress.reconfigure({"lora": lora, "access": {"api_keys_file": str(files[file])}})
        transport = httpx2.ASGITransport(app=ingress._asgi_app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
            answer = await http.get("/v1/models", headers={"authorization": f"Bearer {key.split(': ')[1]}"})
        return [one["id"] for one in answer.json()["data"]][1:] if answer.status_code == 200 else answer.status_code

    assert await listed(ALICE, {"sql": "a", "chat": "b"}, "alice") == ["sql", "chat"]
    assert await listed(ALICE, {"chat": "b", "code": "c"}, "alice") == ["chat", "code"]
    assert await listed(ALICE, {"chat": "absent"}, "alice") == ["chat", "code"], "it is refused, and nothing changes"
    assert await listed(ALICE, {}, "bob") == 401
    assert await listed(BOB, {}, "bob") == []
    files["bob"].write_text(f"{BOB}\n{ALICE}\n")
    assert ingress._keys_file.has_changed(), "the other file is watched now"


async def test_api_keys_of_the_ingress_follow_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def healthy(self: LiveKeys) -> None: ...

    keys = tmp_path / "keys"
    keys.write_text(ALICE)
    monkeypatch.setattr(LiveKeys, "check_health", healthy)
    ingress = _ingress({"access": {"api_keys_file": str(keys)}})
    app = ingress._asgi_app = ingress.__serve_build_asgi_app__()

    async def ask(key: str) -> int:
        transport = httpx2.ASGITransport(app=ingress._asgi_app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
            return int((await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code)

    await _check_rotation(keys, ingress, ask)
    assert ingress._asgi_app is not app
    assert ingress._asgi_app.state.api.grammars is app.state.api.grammars, "what is compiled is not thrown away"
    assert ingress.config_metrics() == {"num_config_errors": 2}


async def test_api_keys_of_the_metrics_page_follow_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing() -> list[object]:
        return []

    monkeypatch.setattr("deployments.operate.status._asked", lambda *_: SimpleNamespace(get=nothing, num_failures=0))
    keys = tmp_path / "keys"
    keys.write_text(ALICE)
    metrics = Metrics(StatusArgs(api_keys_file=str(keys), metrics_need_key=True))

    async def ask(key: str) -> int:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return (await metrics(Request({"type": "http", "headers": headers}))).status_code

    await _check_rotation(keys, metrics, ask)
