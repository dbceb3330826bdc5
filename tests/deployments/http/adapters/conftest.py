"""A folder of adapters, and a service that may load them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from cluster.models.demos import demo_folder
from specdec.models.describe import linear_shapes
from specdec.models.loading import ModelSource
from tests.specdec.adapters import write_adapter

from .kit import KEYS, Post, Service


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


@pytest.fixture
def service(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Service:
    return Service(tokenizer, folder)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=service.app)
    headers = {"Authorization": f"Bearer {KEYS['ops']}"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://api", headers=headers) as client:
        yield client


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
