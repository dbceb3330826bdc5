"""Adapters by name, over a script: the ingress' part of them and what asks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from cluster.config.app import AppArgs
from cluster.config.limits import ResponsesStore
from deployments.http.app import create_app
from deployments.http.keys import ApiKeys
from deployments.http.service import ApiSettings, SequenceRequest, ServedModel
from deployments.http.store import Changes, MemoryStore, Store, Version
from deployments.operate.adapters import LoadedAdapters, add_adapter_routes, configured_adapters
from specdec.core.types import Adapter

from ..conftest import Bench

KEYS = {"ops": "sk-ops-0123456789abc", "user": "sk-user-0123456789ab"}


Post = Callable[..., Any]


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
            find_adapter=self.adapters.find,
        )
        add_adapter_routes(self.app, self.adapters)

    def names(self) -> dict[str, str]:
        """The adapters that requests can name, with the names of their folders."""
        models = self.bench.service.model_info().adapters
        return {name: Path(model.root).name for name, model in models.items()}

    def script(self, request: SequenceRequest) -> list[Any]:
        self.asked.append(request)
        return self.bench.say("yes")
