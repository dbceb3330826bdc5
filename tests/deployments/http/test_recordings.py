"""Answers as recordings: told with the answer, kept in a folder, collected by a command, said again by replay."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import AutoTokenizer

from cluster.cli.main import main
from cluster.config.limits import Recordings
from deployments.http import recordings
from deployments.http.app import create_app
from deployments.http.keys import ApiKeys
from deployments.http.recordings import RecordingFolder
from deployments.http.service import ApiSettings
from specdec.audition.recording import Sample, line_of, read_recording, sample_of
from specdec.audition.replay import replay
from specdec.core.params import SamplingParams
from tests.deployments.http.conftest import listening
from tests.deployments.http.engine_service import DEMO, EngineService

PROMPT = "def add(a, b):\n"
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "return_recording": True}


@pytest.fixture(scope="module")
def service() -> EngineService:
    return EngineService()


@pytest.fixture
async def recorded(service: EngineService, tmp_path: Path) -> AsyncIterator[tuple[httpx2.AsyncClient, RecordingFolder]]:
    """A client of a service whose API key ``night/1`` is recorded, ``day`` is not."""
    folder = RecordingFolder("ingress#1")
    folder.set(Recordings(folder=str(tmp_path / "kept"), owners=("night/1",)))
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    keys = ApiKeys({"night/1": "n" * 20, "day": "d" * 20})
    app = create_app(service, ApiSettings(), tokenizer, keys=keys, recordings=folder)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://api") as client:
        yield client, folder


async def ask(client: httpx2.AsyncClient, body: dict[str, Any], key: str = "d", path: str = "completions") -> Any:
    answer = await client.post(f"/v1/{path}", json=body, headers={"Authorization": f"Bearer {key * 20}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def samples_of(answer: Any) -> list[Sample]:
    return [sample_of(json.dumps(choice["recording"]).encode()) for choice in answer["choices"]]


async def test_a_recorded_answer_is_said_again(recorded: Any, service: EngineService) -> None:
    client, _ = recorded
    answer = await ask(client, BODY | {"n": 2, "temperature": 0.8, "top_p": 0.9, "return_token_ids": True})
    samples = samples_of(answer)
    assert [list(sample.output_token_ids) for sample in samples] == [one["token_ids"] for one in answer["choices"]]
    assert len({sample.seed for sample in samples}) == 2
    assert {sample.owner for sample in samples} == {"day"}
    assert all(one.is_same for one in replay(service._engine, samples))
    changed = [replace(sample, seed=7) for sample in samples]
    assert not any(one.is_same for one in replay(service._engine, changed))


@pytest.mark.parametrize("stop", [None, "return"])
async def test_a_stream_ends_with_the_same_recording(recorded: Any, stop: str | None) -> None:
    client, _ = recorded
    body = BODY | {"seed": 5, "temperature": 0.7, "stop": stop}
    whole = await ask(client, body)
    answer = await client.post("/v1/completions", json=body | {"stream": True}, headers=_bearer("d"))
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    told = [choice["recording"] for chunk in chunks for choice in chunk["choices"] if "recording" in choice]
    assert told == [choice["recording"] for choice in whole["choices"]]
    assert chunks[-1]["choices"][0].get("recording") is not None
    assert told[0]["finish_reason"] == ("length" if stop is None else "stop")


async def test_a_folder_keeps_what_named_owners_are_answered(recorded: Any, tmp_path: Path) -> None:
    client, folder = recorded
    plain = {name: value for name, value in BODY.items() if name != "return_recording"}
    chat = {"model": "demo", "input": PROMPT, "max_output_tokens": 8, "temperature": 0}
    kept = await ask(client, BODY | {"seed": 1, "temperature": 0.5}, "n")
    await ask(client, chat, "n", "responses")
    for private in ({"store": False}, {"cache_salt": "mine"}):
        await ask(client, plain | private, "n")
    await ask(client, chat | {"store": False}, "n", "responses")
    await ask(client, plain, "d")
    folder.close()
    (file,) = (tmp_path / "kept").iterdir()
    written = list(read_recording(file))
    assert written[:1] == samples_of(kept)
    assert [sample.owner for sample in written] == ["night/1", "night/1"]
    assert written[1].max_tokens == 8
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def sample(number: int) -> Sample:
    return Sample((number,), tuple(range(4096)), 4096, SamplingParams())


def test_the_oldest_recordings_make_room(tmp_path: Path) -> None:
    kept = tmp_path / "mine.jsonl"
    kept.write_text("not ours\n")
    names = "a", "b"
    for name in names:
        folder = RecordingFolder(name)
        folder.set(Recordings(folder=str(tmp_path), owners=("*",), max_bytes=1 << 20))
        for number in range(100):
            folder._write(sample(number), folder._settings) if folder._room.acquire() else None
        folder.close()
    files = [path for path in tmp_path.iterdir() if path != kept]
    num_bytes = sum(path.stat().st_size for path in files)
    assert (1 << 20) * 3 // 4 < num_bytes <= 1 << 20
    assert kept.exists()
    newest = [one.prompt_token_ids for path in files for one in read_recording(path) if path.name[10] == "b"]
    assert (99,) in newest
    assert len(line_of(sample(0))) * 200 > 2 << 20, "more was written than there is room for"


def test_a_folder_that_cannot_be_written_is_reported_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = RecordingFolder("a")
    folder.set(Recordings(folder=str(tmp_path / "file" / "below"), owners=("*",)))
    for number in range(1000):  # more than may wait
        folder.add(sample(number))
    folder.close()
    assert [record.message for record in caplog.records if "recordings are lost" in record.message]


def test_a_day_has_files_of_its_own_and_so_has_what_follows_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = ["2026-01-01", "2026-01-01", "2026-01-02", "2026-01-02", "2026-01-02"]
    folder = RecordingFolder("a")
    folder.set(Recordings(folder=str(tmp_path), owners=("*",)))

    def kept() -> list[list[int]]:
        return [[one.prompt_token_ids[0] for one in read_recording(path)] for path in sorted(tmp_path.iterdir())]

    def write(number: int) -> None:
        monkeypatch.setattr(recordings, "_today", lambda: days[number])
        assert folder._room.acquire()
        folder._write(sample(number), folder._settings)

    for number in range(3):
        write(number)
    assert kept() == [[0, 1], [2]]

    def full(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(path.read_bytes() + b"{")  # half a line
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(recordings, "open", full, raising=False)
        write(3)
    write(4)
    folder.close()
    assert kept() == [[0, 1], [2], [4]]


@pytest.mark.parametrize("changes", [{"folder": "x"}, {"owners": ("a",)}])
def test_a_folder_and_its_owners_go_together(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is needed with recordings"):
        Recordings(**changes)


async def run(*arguments: str) -> int:
    return await asyncio.to_thread(main, arguments)


def lines(path: Path, bodies: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return str(path)


async def test_the_command_collects_samples_in_order(
    service: EngineService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = create_app(service, ApiSettings(), AutoTokenizer.from_pretrained(DEMO / "target"))
    bodies = [{"prompt": [number + 5], "max_tokens": 4, "seed": number, "stream": True} for number in range(5)]
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "n": 2}}
    file = lines(tmp_path / "asked.jsonl", [*bodies, batch, {"prompt": "a", "temperature": -1}])
    out = tmp_path / "out.jsonl"
    async with listening(app) as url:
        assert await run("record", file, "--url", url, "--out", str(out)) == 1  # the last is refused
        assert await run("record", file, "--url", url, "--out", str(out)) == 2  # it is there already
    output = capsys.readouterr()
    assert "7 samples of 6 requests" in output.out
    assert "line 7: HTTP 400: temperature must be" in output.err
    samples = list(read_recording(out))
    assert [one.prompt_token_ids for one in samples[:5]] == [(number + 5,) for number in range(5)]
    assert all(one.is_same for one in replay(service._engine, samples))


@pytest.mark.parametrize("line", [{"input": "a"}, {"prompt": "a", "messages": []}, ["a"]])
async def test_the_command_names_a_line_that_is_no_request(
    tmp_path: Path, line: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(tmp_path / "asked.jsonl", [{"prompt": "a"}, line])
    assert await run("record", file, "--out", str(tmp_path / "out")) == 2
    assert "line 2: must be an object with either prompt or messages" in capsys.readouterr().err


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key * 20}"}
