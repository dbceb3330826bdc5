"""The adapters that requests can name: configured ones, and those loaded while the service runs.

The bodies of ``POST /v1/load_lora_adapter`` and ``POST /v1/unload_lora_adapter``, as vLLM has them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import StringConstraints

from cluster.config.app import AppArgs
from cluster.config.models import LoraConfig
from cluster.models.sources import draft_source, target_source
from deployments.http.answers import while_connected
from deployments.http.api import ApiOf, ContextOf
from deployments.http.errors import ApiError
from deployments.http.schemas.fields import Body
from deployments.http.service import ServedModel
from deployments.http.store import NOTHING, Changes, Store
from deployments.http.strict_json import StrictJsonRoute
from deployments.transport.link import spawn
from specdec.checkpoint.fingerprint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_folder, adapter_reference
from specdec.core.errors import InvalidParameterError, ModelLoadError, ServiceUnavailableError, SpecdecError
from specdec.core.types import Adapter
from specdec.models.describe import linear_shapes
from specdec.models.lora.checkpoint import AdapterCheckpoint

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
AdapterPath = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class LoadAdapterBody(Body):
    """An adapter to load.

    Attributes:
        lora_name: By which requests ask for it.
        lora_path: A folder in that of the configuration, or a hub id.
        load_inplace: Whether it may take the place of another of that name.
        draft_lora_path: The same for the draft model's adapter.
    """

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = {"is_3d_lora_weight": (False,)}

    lora_name: Name
    lora_path: AdapterPath
    load_inplace: bool | None = None
    draft_lora_path: AdapterPath | None = None


class UnloadAdapterBody(Body):
    """An adapter to unload, by its name."""

    taken: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: Name


logger = logging.getLogger("ray.serve")

_HUB_ID = re.compile(r"[\w-]+(\.[\w-]+)*/[\w-]+(\.[\w-]+)*(@\w[\w.-]*)?")
_MAX_HUB_ID = 200
"""Characters."""
MAX_ADAPTERS = 100_000
"""That requests can load."""
_NUM_WORKERS = 2
"""Threads of their own, as a hub may take its time: other requests need those of the event loop."""
_WATCH_S, _RETRY_S = 30.0, 1.0
_REFRESH_S = 10.0
"""How long a request waits for what others have loaded: after a change of the model all of it is checked anew."""
_T = TypeVar("_T")


AdapterPair = tuple[Adapter, Adapter | None]
"""An adapter of the target, and the one of the draft model that goes with it, if there is one."""
_ENTRY_KEYS = {"lora_name": "name", "lora_path": "path", "draft_lora_path": "draft"}
"""Keys of an entry of ``lora.adapters`` by the parameters of a request that loads an adapter."""
_ENCODE = msgspec.json.encode
_DECODE = msgspec.json.Decoder(tuple[str, Adapter, Adapter | None]).decode
"""In the store: the fingerprint of the model that an adapter was checked against, and both adapters."""
_UNLOADED = b""
"""In the store: an administrator has unloaded the adapter, and nobody looks for it in the folder."""


def configured_adapters(args: AppArgs, base: ServedModel) -> tuple[ServedModel, ...]:
    """Check the adapters of ``lora.adapters`` and return each as a model that requests can name.

    Raises:
        InvalidParameterError: An adapter cannot be found or served, or its name is a model's. The message names the
            entry of ``lora.adapters``.
    """
    layers = _Layers(args)
    return tuple(_configured(args.lora, layers, base, index) for index in range(len(args.lora.adapters)))


def _configured(config: LoraConfig, layers: _Layers, base: ServedModel, index: int) -> ServedModel:
    entry = config.adapters[index]
    try:
        pair = _checked_pair(config, layers, base, entry.name, entry.path, entry.draft)
    except InvalidParameterError as error:
        message = str(error).removeprefix(f"{error.parameter}: ")
        key = f"lora.adapters[{index}].{_ENTRY_KEYS[error.parameter]}"
        raise InvalidParameterError(key, f"{key}: {message}") from error
    return _served(base, pair)


class _Layers:
    """The layers that adapters may change, of both models: read when they are needed, and once."""

    def __init__(self, args: AppArgs) -> None:
        self._max_rank = args.lora.max_rank
        self._sources = {"target": target_source(args), "draft": draft_source(args)}
        self._shapes: dict[str, dict[str, tuple[int, int]]] = {}

    def check(self, role: str, adapter: Adapter) -> None:
        """Raise :class:`ModelLoadError` where an adapter does not fit; of a model that others load nothing is known."""
        source = self._sources[role]
        if source is None:
            return
        if role not in self._shapes:
            self._shapes[role] = linear_shapes(source)
        AdapterCheckpoint(adapter_folder(adapter.path), self._shapes[role], self._max_rank)


def _served(base: ServedModel, pair: AdapterPair) -> ServedModel:
    """An adapter of ``base`` as a model that requests can name."""
    adapter, draft_adapter = pair
    decision = f"{base.decision}:{adapter.fingerprint}"
    return replace(
        base,
        name=adapter.name,
        decision=decision,
        root=adapter.path,
        parent=base.name,
        adapter=adapter,
        draft_adapter=draft_adapter,
    )


def _checked_pair(
    config: LoraConfig, layers: _Layers, base: ServedModel, name: str, path: str, draft: str | None
) -> AdapterPair:
    """An adapter of ``base``, checked against the models' layers.

    Raises:
        InvalidParameterError: It, or the draft model's, cannot be found, or cannot be served; or the name is a model's.
    """
    if name == base.name or name.startswith(f"{base.name}:"):
        raise InvalidParameterError("lora_name", f"lora_name: {name} is, or begins like, the name of a model")
    adapter = _checked(config, layers, "target", "lora_path", name, path)
    return adapter, None if draft is None else _checked(config, layers, "draft", "draft_lora_path", name, draft)


def _checked(config: LoraConfig, layers: _Layers, role: str, parameter: str, name: str, path: str) -> Adapter:
    try:
        if not Path(path).expanduser().is_dir():
            _check_size(parameter, path, config.max_adapter_bytes)
        adapter = adapter_reference(name, path)
        layers.check(role, adapter)
    except ModelLoadError as error:
        raise InvalidParameterError(parameter, str(error)) from error
    return adapter


def _check_size(parameter: str, path: str, most: int) -> None:
    """Refuse an adapter on the hub that is too large, before it is downloaded; what the hub does not tell is not."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    name, _, revision = path.partition("@")
    try:
        size = get_hf_file_metadata(hf_hub_url(name, ADAPTER_WEIGHTS, revision=revision or None)).size
    except Exception:  # a lost connection is the HTTP client's own kind of error
        return  # the download will say what is wrong, or its cache has the adapter
    if size is not None and size > most:
        text = f"{parameter}: {path} has {size} bytes; at most {most} are loaded (lora.max_adapter_bytes)"
        raise InvalidParameterError(parameter, text)


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


def _decoded(name: str, value: bytes) -> tuple[str, Adapter, Adapter | None] | None:
    """What the store has of an adapter; None where another version has written what this one cannot read."""
    try:
        return _DECODE(value)
    except msgspec.MsgspecError as error:
        logger.warning("The stored adapter %r cannot be read, and is left out: %s", name, error)
        return None


class LoadedAdapters:
    """What was loaded by requests. A sequence carries its adapter, so that unloading one ends no stream.

    The store holds them for all ingresses: the last write wins, wherever it was made. A store that has lost them gets
    them back from the ingresses that know them.

    Args:
        args: The service's configuration.
        base: The model that they change.
        store: Holds them, by name.
        publish: Called with each change: a name, and what it means now; None where it means nothing any more.
    """

    def __init__(
        self,
        args: AppArgs,
        base: ServedModel,
        store: Store,
        publish: Callable[[str, ServedModel | None], None],
    ) -> None:
        self._args, self._base, self._store, self._publish = args, base, store, publish
        self._layers = _Layers(args)
        self._known: dict[str, AdapterPair] = {}
        self._version = NOTHING
        self._unloaded: set[str] = set()
        self._reading = asyncio.Lock()
        self._next_read: asyncio.Task[None] | None = None
        self._finding: dict[str, asyncio.Task[None]] = {}
        self._has_read = asyncio.Event()
        self._one_by_one = asyncio.Lock()
        self._loads = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="adapter-loads")
        # What others have loaded waits for no download.
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="adapter-checks")
        self._configured = frozenset(one.name for one in args.lora.adapters)

    def set_configured(self, names: Iterable[str]) -> None:
        """Refuse these names, which are the configuration's own. A loaded adapter takes a name that it leaves."""
        before, self._configured = self._configured, frozenset(names)
        for name in (before - self._configured) & self._known.keys():
            self._publish(name, _served(self._base, self._known[name]))

    def start(self) -> None:
        """Follow the store from now on, on the event loop."""
        self._task = spawn(self._watch())

    def close(self) -> None:
        """Follow it no more."""
        self._task.cancel()

    async def _watch(self) -> None:
        is_failing = False
        while True:
            try:
                since = self._version
                changes = await self._store.changes(since, _WATCH_S)
                async with self._reading:
                    if self._version == since:  # else a request has read what is new
                        await self._apply(changes)
                is_failing = False
            except Exception as error:  # whatever it is, this must not end: nothing else would follow the store
                if not is_failing:
                    is_defect = not isinstance(error, ServiceUnavailableError)
                    text = "The store does not answer: adapters that other ingresses load are not seen yet: %r"
                    logger.warning(text, error, exc_info=is_defect)
                is_failing = True
                await asyncio.sleep(_RETRY_S)

    async def read(self, timeout_s: float) -> None:
        """Return when the store was read for the first time, or did not answer in time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_read.wait(), timeout_s)

    async def find(self, name: str) -> None:
        """Look for an adapter that no request could name so far: in the store, and then in the folder.

        Raises:
            InvalidParameterError: The folder has one of that name, which cannot be served.
            ServiceUnavailableError: The store does not answer, or adapters are still being checked.
        """
        await self.refresh()
        base, colon, after = name.partition(":")
        name = after if colon and base in (self._base.name, *self._base.other_names) else name
        if name in self._known or name in self._unloaded or self._args.lora.folder is None:
            return
        if name not in self._finding:
            task = self._finding[name] = spawn(self._find_in_folder(name))
            task.add_done_callback(lambda _: self._finding.pop(name))
        await asyncio.shield(self._finding[name])

    async def _find_in_folder(self, name: str) -> None:
        """Load the adapter that lies in the folder under its name, if one does."""
        in_folder = self._args.lora.model_copy(update={"hub": False})
        try:
            path = await asyncio.to_thread(allowed_path, in_folder, name, "model")
        except InvalidParameterError:
            return
        if not await asyncio.to_thread((Path(path) / ADAPTER_CONFIG).is_file):
            return
        try:
            await self.load(name, name, None, in_place=False)
        except InvalidParameterError as error:
            text = f"model: the adapter {name!r} of lora.folder cannot be served: {error}"
            raise InvalidParameterError("model", text) from error

    async def refresh(self) -> None:
        """Take in what has changed up to now: callers share one question to the store, asked after they came.

        Raises:
            ServiceUnavailableError: The store does not answer, or adapters are still being checked.
        """
        if self._next_read is None:
            self._next_read = spawn(self._read_once())
        await asyncio.shield(self._next_read)

    async def _read_once(self) -> None:
        try:
            async with asyncio.timeout(_REFRESH_S), self._reading:
                self._next_read = None
                await self._apply(await self._store.changes(self._version, 0.0))
        except TimeoutError:
            raise ServiceUnavailableError("the loaded adapters are still being checked") from None
        finally:
            if self._next_read is asyncio.current_task():
                self._next_read = None

    async def load(self, name: str, path: str, draft: str | None, in_place: bool) -> None:
        """Check an adapter, and let requests name it.

        Raises:
            InvalidParameterError: It cannot be served, it is not where adapters may be, or the name is taken.
            ServiceUnavailableError: The store does not answer.
            ApiError: 504: it took too long. A download that runs goes on, into the hub's cache.
        """
        config = self._args.lora
        path = allowed_path(config, path, "lora_path")
        draft = None if draft is None else allowed_path(config, draft, "draft_lora_path")
        try:
            async with asyncio.timeout(config.load_timeout_s):
                pair = await _run(self._loads, _checked_pair, config, self._layers, self._base, name, path, draft)
        except TimeoutError:
            text = f"the adapter was not there within {config.load_timeout_s:g} s (lora.load_timeout_s)"
            raise ApiError(504, text, "timeout_error", code="load_timeout") from None
        async with self._one_by_one:
            await self.refresh()
            held = self._known.get(name)
            if name in self._configured or (held is not None and held != pair and not in_place):
                raise InvalidParameterError("lora_name", f"lora_name: there is another adapter of the name {name}")
            if held is None and len(self._known) >= MAX_ADAPTERS:
                raise InvalidParameterError("lora_name", f"lora_name: {MAX_ADAPTERS} adapters are loaded: unload some")
            await self._store.assign(name, _ENCODE((self._base.decision, *pair)))
            await self.refresh()

    async def unload(self, name: str) -> bool:
        """Let no new request name an adapter; whether there was one.

        Raises:
            InvalidParameterError: It is one of the configuration.
            ServiceUnavailableError: The store does not answer.
        """
        if name in self._configured:
            raise InvalidParameterError("lora_name", f"lora_name: {name} is one of the configuration, lora.adapters")
        async with self._one_by_one:
            await self.refresh()  # what a new store has lost is put back before it is taken out
            if name in self._unloaded:
                return False
            was_there = await self._store.assign(name, _UNLOADED if self._args.lora.folder is not None else None)
            await self.refresh()
        return was_there

    async def _apply(self, changes: Changes) -> None:
        """Take in changes since this version, each adapter as soon as it is checked.

        Where this is cut short, the next call begins again, and does not check what is known.
        """
        if changes.is_all:
            missing = {name: known for name, known in self._known.items() if name not in changes.values}
            is_other_store = changes.version[0] != self._version[0]
            for name in self._unloaded - changes.values.keys() if is_other_store else ():
                await self._store.assign(name, _UNLOADED)
            if is_other_store and missing:
                logger.warning("The store of loaded adapters has lost %d: they are put back", len(missing))
                for name, known in missing.items():
                    await self._store.assign(name, _ENCODE((self._base.decision, *known)))
            else:
                for name in missing:
                    self._set(name, None)
        for name, value in changes.values.items():
            (self._unloaded.add if value == _UNLOADED else self._unloaded.discard)(name)
            stored = None if not value else _decoded(name, value)
            self._set(name, None if stored is None else await self._of_this_model(name, *stored))
        self._version = changes.version
        self._has_read.set()

    def _set(self, name: str, pair: AdapterPair | None) -> None:
        if pair is None:
            self._known.pop(name, None)
        else:
            self._known[name] = pair
        if name not in self._configured:  # by this version; another one may have let it be loaded
            self._publish(name, None if pair is None else _served(self._base, pair))

    async def _of_this_model(
        self, name: str, decision: str, adapter: Adapter, draft_adapter: Adapter | None
    ) -> AdapterPair | None:
        """An adapter from the store; None where it was loaded for another model and does not fit this one's layers."""
        pair = adapter, draft_adapter
        if decision != self._base.decision and self._known.get(name) != pair:
            try:
                await _run(self._checks, self._layers.check, "target", adapter)
                if draft_adapter is not None:
                    await _run(self._checks, self._layers.check, "draft", draft_adapter)
            except (SpecdecError, OSError) as error:
                logger.warning("The adapter %r was loaded for another model, and does not fit: %s", name, error)
                return None
        return pair


async def _run(threads: ThreadPoolExecutor, work: Callable[..., _T], *args: Any) -> _T:
    return await asyncio.get_running_loop().run_in_executor(threads, partial(work, *args))


def add_adapter_routes(app: FastAPI, adapters: LoadedAdapters) -> None:
    """Let administrators load and unload adapters, by vLLM's paths and bodies.

    Args:
        app: Gets the routes.
        adapters: Are changed.
    """
    router = APIRouter(prefix="/v1", route_class=StrictJsonRoute)

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterBody, request: Request, api: ApiOf, context: ContextOf) -> Response:
        paths = f"lora_path={body.lora_path!r} draft_lora_path={body.draft_lora_path!r}"
        api.check_admin(context, f"load_lora_adapter lora_name={body.lora_name!r} {paths}")
        api.ignored.note(body)
        load = adapters.load(body.lora_name, body.lora_path, body.draft_lora_path, bool(body.load_inplace))
        await while_connected(request.receive, load)
        return PlainTextResponse(f"Success: the LoRA adapter {body.lora_name!r} is loaded.")

    @router.post("/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterBody, api: ApiOf, context: ContextOf) -> Response:
        api.check_admin(context, f"unload_lora_adapter lora_name={body.lora_name!r}")
        api.ignored.note(body)
        if not await adapters.unload(body.lora_name):
            message = f"there is no adapter {body.lora_name!r} that was loaded"
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        return PlainTextResponse(f"Success: the LoRA adapter {body.lora_name!r} is unloaded.")

    app.include_router(router)
