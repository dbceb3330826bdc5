"""The adapters that requests can name, in each replica of the ingress: configured ones, and those loaded since."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import PlainTextResponse

from cluster.config import AppArgs
from cluster.lora import LoraConfig
from cluster.sources import draft_source, target_source
from deployments.openai.context import ApiOf, ArrivalOf
from deployments.openai.errors import ApiError
from deployments.openai.ignored import with_ignored
from deployments.openai.schemas.adapters import LoadAdapterBody, UnloadAdapterBody
from deployments.openai.service import ServedModel
from deployments.openai.strict_json import StrictJsonRoute
from specdec.errors import InvalidParameterError, ModelLoadError
from specdec.models.describe import linear_shapes
from specdec.models.fingerprint import adapter_folder, adapter_reference
from specdec.models.loading import ModelSource
from specdec.models.lora.checkpoint import AdapterCheckpoint
from specdec.types import Adapter

Loaded = Mapping[str, ServedModel]
"""Adapters by their names."""
_HUB_ID = re.compile(r"[\w-]+(\.[\w-]+)*/[\w-]+(\.[\w-]+)*")
_LEARNS_FOR_S = 10.0
"""So long a replica that has started asks the others, who are told of changes as soon as Serve lists them."""


def configured_adapters(args: AppArgs, base: ServedModel) -> tuple[ServedModel, ...]:
    """The adapters that are always there.

    Raises:
        ModelLoadError: One cannot be found, or cannot be served.
        InvalidParameterError: A name is taken.
    """
    return tuple(served_adapter(args, base, one.name, one.path, one.draft) for one in args.lora.adapters)


def served_adapter(args: AppArgs, base: ServedModel, name: str, path: str, draft: str | None) -> ServedModel:
    """An adapter of ``base``, checked against the models' layers, as a model that requests can name.

    Raises:
        ModelLoadError: It cannot be found, or cannot be served.
        InvalidParameterError: The name is a model's.
    """
    if name in (base.name, f"{base.name}-draft") or name.startswith(f"{base.name}:"):
        raise InvalidParameterError("lora_name", f"lora_name: {name} is, or begins like, the name of a model")
    adapter = _checked(target_source(args), args.lora, name, path)
    own_draft = draft_source(args)
    twin = None
    if draft is not None:
        twin = adapter_reference(name, draft) if own_draft is None else _checked(own_draft, args.lora, name, draft)
    decision = f"{base.decision}:{adapter.fingerprint}"
    return replace(
        base, name=name, decision=decision, root=adapter.path, parent=base.name, adapter=adapter, draft_adapter=twin
    )


def _checked(source: ModelSource, config: LoraConfig, name: str, path: str) -> Adapter:
    adapter = adapter_reference(name, path)
    AdapterCheckpoint(adapter_folder(adapter.path), linear_shapes(source), config.max_rank)
    return adapter


def allowed_path(config: LoraConfig, path: str, parameter: str) -> str:
    """Where an adapter is that a request names: in the folder of the configuration, or on the hub.

    Raises:
        InvalidParameterError: It is neither, or the configuration does not allow it.
    """
    if config.folder is not None and "\0" not in path:
        folder = Path(config.folder).expanduser().resolve()
        found = (folder / path).resolve()
        if found.is_relative_to(folder) and found.is_dir():
            return str(found)
    if config.hub and _HUB_ID.fullmatch(path) and not Path(path).exists():
        return path
    allowed = [f"a folder in {config.folder}"] if config.folder is not None else []
    allowed += ["a hub id"] if config.hub else []
    raise InvalidParameterError(parameter, f"{parameter} must be {' or '.join(allowed)}")


class LoadedAdapters:
    """What was loaded by requests. A sequence carries its adapter, so that unloading one ends no stream.

    Args:
        args: The service's configuration.
        base: The model that they change.
        publish: Told of all adapters when they have changed.
        tell: Tells all replicas, this one among them, of an adapter's name, and of what it is now.
        ask: What the others have loaded; None from one that does not know yet.
    """

    def __init__(
        self,
        args: AppArgs,
        base: ServedModel,
        publish: Callable[[Loaded], None],
        tell: Callable[[str, ServedModel | None], Awaitable[None]],
        ask: Callable[[], Awaitable[list[Loaded | None]]],
    ) -> None:
        self._args, self._base = args, base
        self._publish, self._tell, self._ask = publish, tell, ask
        self._loaded: dict[str, ServedModel] = {}
        self._learns_until_s = time.monotonic() + _LEARNS_FOR_S

    @property
    def known(self) -> Loaded | None:
        """What was loaded; None while this replica learns of it."""
        return None if time.monotonic() < self._learns_until_s else self._loaded

    async def learn(self) -> None:
        """Ask the others, in the first seconds; to be called again and again."""
        if time.monotonic() < self._learns_until_s:
            known = next((loaded for loaded in await self._ask() if loaded is not None), None)
            if known is not None:
                self._loaded = dict(known)
                self._publish(self._loaded)

    def changed(self, name: str, model: ServedModel | None) -> None:
        """An adapter was loaded, or unloaded, by whichever replica."""
        if model is not None:
            self._loaded[name] = model
        else:
            self._loaded.pop(name, None)
        self._publish(self._loaded)

    async def load(self, name: str, path: str, draft: str | None, in_place: bool) -> None:
        """Check an adapter, and let requests name it.

        Raises:
            InvalidParameterError: It cannot be served, it is not where adapters may be, or the name is taken.
        """
        config = self._args.lora
        path = allowed_path(config, path, "lora_path")
        draft = None if draft is None else allowed_path(config, draft, "draft_lora_path")
        try:
            model = await asyncio.to_thread(served_adapter, self._args, self._base, name, path, draft)
        except ModelLoadError as error:
            raise InvalidParameterError("lora_path", str(error)) from error
        held = self._loaded.get(name)
        if name in self._configured or (held is not None and held != model and not in_place):
            raise InvalidParameterError("lora_name", f"lora_name: there is another adapter of the name {name}")
        await self._tell(name, model)

    async def unload(self, name: str) -> bool:
        """Let no new request name an adapter; whether there was one.

        Raises:
            InvalidParameterError: It is one of the configuration.
        """
        if name in self._configured:
            raise InvalidParameterError("lora_name", f"lora_name: {name} is one of the configuration, lora.adapters")
        is_there = name in self._loaded
        await self._tell(name, None)
        return is_there

    @property
    def _configured(self) -> frozenset[str]:
        return frozenset(one.name for one in self._args.lora.adapters)


def add_adapter_routes(app: FastAPI, adapters: LoadedAdapters) -> None:
    """Let administrators load and unload adapters, by vLLM's paths and bodies.

    Args:
        app: Gets the routes.
        adapters: Are changed.
    """
    router = APIRouter(prefix="/v1", route_class=StrictJsonRoute)

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterBody, api: ApiOf, arrival: ArrivalOf) -> Response:
        api.check_admin(arrival)
        ignored = api.ignored.names(body)
        await adapters.load(body.lora_name, body.lora_path, body.draft_lora_path, bool(body.load_inplace))
        return with_ignored(PlainTextResponse(f"Success: the LoRA adapter {body.lora_name!r} is loaded."), ignored)

    @router.post("/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterBody, api: ApiOf, arrival: ArrivalOf) -> Response:
        api.check_admin(arrival)
        ignored = api.ignored.names(body)
        if not await adapters.unload(body.lora_name):
            message = f"there is no adapter {body.lora_name!r} that was loaded"
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        return with_ignored(PlainTextResponse(f"Success: the LoRA adapter {body.lora_name!r} is unloaded."), ignored)

    app.include_router(router)
