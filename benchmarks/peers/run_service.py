"""This project's service over HTTP, target and draft in processes of their own, as ``specdec serve`` starts it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import httpx2
from loop import answer_requests, arguments

import specdec
from benchmarks.modes.load import fresh_salt
from benchmarks.modes.services import Services
from cluster.cli.serve import serve
from cluster.config.app import ServiceConfig
from cluster.config.models import DraftConfig, TargetConfig

REQUEST_TIMEOUT_S = 600


def main(*, engine: Mapping[str, Any] = MappingProxyType({}), **keys: Any) -> None:
    """Serve the pair as the service does by default, but for ``engine``'s keys of the target and others; and ask it."""
    given = arguments()
    config = ServiceConfig(
        target=TargetConfig(model=given.target, dtype=given.dtype, **engine),
        draft=DraftConfig(model=given.draft, dtype=given.dtype),
        **keys,
    )
    with Services({"": config}, serve) as services:
        client = httpx2.Client(base_url=services.urls[""], timeout=REQUEST_TIMEOUT_S)
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        post = partial(client.post, "/v1/completions")

        def generate(prompt_ids: list[int], max_tokens: int, num_speculative_tokens: int) -> dict[str, Any]:
            body = {"model": model, "prompt": prompt_ids, "max_tokens": max_tokens, "temperature": 0}
            extras: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True, "cache_salt": fresh_salt()}
            if not num_speculative_tokens:
                extras["num_speculative_tokens"] = 0
            choice = post(json=body | extras).raise_for_status().json()["choices"][0]
            return {"token_ids": choice["token_ids"]}

        versions = {name: importlib.metadata.version(name) for name in ("ray", "torch")} | {
            "specdec": specdec.__version__
        }
        settings = "service over HTTP, draft and target in two processes, one thread each; mode and draft length: auto"
        for name, value in {**engine, **keys}.items():
            settings += f"; {name}: {value}"
        answer_requests(versions, settings, generate)


if __name__ == "__main__":
    main()
