"""The adapters that requests can name, in each replica of the ingress: configured ones, and those loaded since."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
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

_HUB_ID = re.compile(r"[\w-]+(\.[\w-]+)*/[\w-]+(\.[\w-]+)*(@\w[\w.-]*)?")
_MAX_HUB_ID = 200
"""Characters."""
_LEARNS_FOR_S, _ASKS_EVERY_S = 10.0, 10.0
"""So long a replica that has started asks the others each second; then in these times, for what it was not told."""
_NUM_CHECKERS = 2
"""Threads of their own, as a hub may take its time: other requests need those of the event loop."""
_FORGETS_AFTER_NS = 3600 * 10**9
"""By then no replica hears anything of what was before an adapter was unloaded."""


Twins = tuple[Adapter, Adapter | None]
"""An adapter, and its twin for the draft model, if it has one."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a name means from now on.

    Attributes:
        order: Of two changes the greater one holds, at every replica, whichever it hears of first. A time in
            nanoseconds, later than that of all changes that its replica knew, and the replica's name.
        twins: The adapter, without the model that it changes: a replica of an update may have another one. None where
            it was unloaded.
    """

    order: tuple[int, str]
    twins: Twins | None


Changes = Mapping[str, Change]
"""The last ones, by their names."""


def configured_adapters(args: AppArgs, base: ServedModel) -> tuple[ServedModel, ...]:
    """The adapters that are always there.

    Raises:
        InvalidParameterError: One cannot be found, or cannot be served; or its name is a model's.
    """
    return tuple(_served(base, _checked_twins(args, base, one.name, one.path, one.draft)) for one in args.lora.adapters)


def _served(base: ServedModel, twins: Twins) -> ServedModel:
    """An adapter of ``base`` as a model that requests can name."""
    adapter, twin = twins
    decision = f"{base.decision}:{adapter.fingerprint}"
    return replace(
        base,
        name=adapter.name,
        decision=decision,
        root=adapter.path,
        parent=base.name,
        adapter=adapter,
        draft_adapter=twin,
    )


def _checked_twins(args: AppArgs, base: ServedModel, name: str, path: str, draft: str | None) -> Twins:
    """An adapter of ``base``, checked against the models' layers.

    Raises:
        InvalidParameterError: It, or its twin, cannot be found, or cannot be served; or the name is a model's.
    """
    if name in (base.name, f"{base.name}-draft") or name.startswith(f"{base.name}:"):
        raise InvalidParameterError("lora_name", f"lora_name: {name} is, or begins like, the name of a model")
    adapter = _checked("lora_path", target_source(args), args.lora, name, path)
    return adapter, None if draft is None else _checked("draft_lora_path", draft_source(args), args.lora, name, draft)


def _checked(parameter: str, source: ModelSource | None, config: LoraConfig, name: str, path: str) -> Adapter:
    """An adapter of a model; of one that others load (a pool of drafts) only what it is."""
    try:
        adapter = adapter_reference(name, path)
        if source is not None:
            AdapterCheckpoint(adapter_folder(adapter.path), linear_shapes(source), config.max_rank)
    except ModelLoadError as error:
        raise InvalidParameterError(parameter, str(error)) from error
    return adapter


def allowed_path(config: LoraConfig, path: str, parameter: str) -> str:
    """Where an adapter is that a request names: in the folder of the configuration, or on the hub.

    Raises:
        InvalidParameterError: It is neither, or the configuration does not allow it.
    """
    if config.folder is not None:
        folder = Path(config.folder).expanduser().resolve()
        with suppress(OSError, RuntimeError, ValueError):  # a name that is too long, links in a circle, a NUL
            found = (folder / path).resolve()
            if found.is_relative_to(folder) and found.is_dir():
                return str(found)
    if config.hub and len(path) <= _MAX_HUB_ID and _HUB_ID.fullmatch(path) and not Path(path).exists():
        return path
    allowed = [f"a folder in {config.folder}"] if config.folder is not None else []
    allowed += ["a hub id"] if config.hub else []
    raise InvalidParameterError(parameter, f"{parameter} must be {' or '.join(allowed)}")


class LoadedAdapters:
    """What was loaded by requests. A sequence carries its adapter, so that unloading one ends no stream.

    Args:
        args: The service's configuration.
        base: The model that they change.
        replica: This replica's name.
        publish: Told of each change: a name, and what it means now; None where it means nothing any more.
        tell: Tells all replicas, this one among them, what a name means from now on.
        ask: What all replicas know.

    Attributes:
        changes: What this replica knows.
    """

    def __init__(
        self,
        args: AppArgs,
        base: ServedModel,
        replica: str,
        publish: Callable[[str, ServedModel | None], None],
        tell: Callable[[str, Change], Awaitable[None]],
        ask: Callable[[], Awaitable[list[Changes]]],
    ) -> None:
        self._args, self._base, self._replica = args, base, replica
        self._publish, self._tell, self._ask = publish, tell, ask
        self.changes: dict[str, Change] = {}
        self._one_by_one = asyncio.Lock()
        self._checkers = ThreadPoolExecutor(_NUM_CHECKERS, thread_name_prefix="adapters")
        self._learns_until_s = time.monotonic() + _LEARNS_FOR_S
        self._asks_next_s = 0.0

    async def learn(self) -> None:
        """Ask all others what they know: each time at first and until one answers, then seldom; to be called often."""
        now_s = time.monotonic()
        if now_s < self._asks_next_s:
            return
        answers = await self._ask()
        if answers and now_s >= self._learns_until_s:
            self._asks_next_s = now_s + _ASKS_EVERY_S
        for known in answers:
            for name, change in known.items():
                self.changed(name, change)

    def changed(self, name: str, change: Change) -> None:
        """An adapter was loaded, or unloaded, by whichever replica."""
        held = self.changes.get(name)
        if held is not None and held.order >= change.order:
            return
        self.changes[name] = change
        since_ns = self._newest_ns() - _FORGETS_AFTER_NS
        self.changes = {
            name: one for name, one in self.changes.items() if one.twins is not None or one.order[0] > since_ns
        }
        self._publish(name, None if change.twins is None else _served(self._base, change.twins))

    async def load(self, name: str, path: str, draft: str | None, in_place: bool) -> None:
        """Check an adapter, and let requests name it.

        Raises:
            InvalidParameterError: It cannot be served, it is not where adapters may be, or the name is taken.
        """
        config = self._args.lora
        path = allowed_path(config, path, "lora_path")
        draft = None if draft is None else allowed_path(config, draft, "draft_lora_path")
        check = partial(_checked_twins, self._args, self._base, name, path, draft)
        twins = await asyncio.get_running_loop().run_in_executor(self._checkers, check)
        async with self._one_by_one:
            held = self._held(name)
            if name in self._configured or (held is not None and held != twins and not in_place):
                raise InvalidParameterError("lora_name", f"lora_name: there is another adapter of the name {name}")
            await self._change(name, twins)

    async def unload(self, name: str) -> bool:
        """Let no new request name an adapter; whether there was one.

        Raises:
            InvalidParameterError: It is one of the configuration.
        """
        if name in self._configured:
            raise InvalidParameterError("lora_name", f"lora_name: {name} is one of the configuration, lora.adapters")
        async with self._one_by_one:
            is_there = self._held(name) is not None
            await self._change(name, None)
        return is_there

    async def _change(self, name: str, twins: Twins | None) -> None:
        await self._tell(name, Change((max(time.time_ns(), self._newest_ns() + 1), self._replica), twins))

    def _newest_ns(self) -> int:
        return max((one.order[0] for one in self.changes.values()), default=0)

    def _held(self, name: str) -> Twins | None:
        return self.changes[name].twins if name in self.changes else None

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
