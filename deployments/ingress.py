"""The ingress: the OpenAI-style API in front of the routers."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.config.app import AppArgs
from cluster.config.environment import api_keys, check_node
from cluster.config.live import set_log_level
from cluster.config.names import ROUTER
from cluster.models.identity import fingerprints
from cluster.models.sources import read_template, target_source
from deployments.http.admission import Admission
from deployments.http.app import create_app, request_grammars
from deployments.http.keys import ApiKeys
from deployments.http.observer import Observer
from deployments.http.recordings import RecordingFolder
from deployments.http.service import ApiSettings, ModelInfo, ServedModel
from deployments.http.store import NOTHING, Store
from deployments.metrics.autoscaling import LONG_QUEUE_S, Metrics
from deployments.metrics.replica import Measured, ReplicaMetrics
from deployments.metrics.spans import serve_tracer
from deployments.operate.adapters import LoadedAdapters, add_adapter_routes, configured_adapters
from deployments.operate.live import LiveKeys, WatchedFile
from deployments.operate.readiness import ReplicaPoll
from deployments.operate.stores import open_store
from deployments.tokens import RoutedTokens
from deployments.transport.endpoints import IngressEndpoint, PeerGroup, replica_id
from deployments.transport.link import spawn
from specdec.checkpoint.compat import check_width, tokenizer_width
from specdec.checkpoint.fingerprint import weights_hash
from specdec.core.errors import ServiceUnavailableError, SpecdecError
from specdec.core.types import Fingerprints
from specdec.models.describe import describe_model
from specdec.models.loading import load_tokenizer
from specdec.protocol.ingress import IngressMachine

logger = logging.getLogger("ray.serve")

_READ_S = 3.0
"""How long a start waits for what was loaded: without it, requests ask for what they do not find."""
_READY_S = 1.0
"""For how long the routers' answer holds to whether there is a target."""
ROUTERS = PeerGroup(
    ROUTER, IngressMachine.router_joined, IngressMachine.router_lost, refused=IngressMachine.router_refused
)


@serve.ingress()
class OpenAIIngress(LiveKeys, Measured, IngressEndpoint):
    """Validates, tokenizes and answers; the tokens come from the routers.

    Args:
        args: The service's configuration.
        router: Handle of the routers' deployment, so that Serve deploys it too.
    """

    def __init__(self, args: AppArgs, router: Any) -> None:
        self._args = self._in_force = args
        check_node()
        set_log_level(args)
        self._keys_file = WatchedFile(args.access.api_keys_file)
        self._recordings = RecordingFolder(replica_id())
        own = fingerprints(args)
        info = model_info(args, own)
        self._target = info.target
        self._configured = {one.name: one for one in configured_adapters(args, info.target)}
        info = replace(info, adapters=self._configured)
        self._service = RoutedTokens(info)
        self._store: Store | None = None
        if args.lora.is_dynamic or args.responses_store.enabled:
            self._store = open_store(args, serve.get_replica_context().app_name)
        self._adapters: LoadedAdapters | None = None
        if self._store is not None and args.lora.is_dynamic:
            self._adapters = LoadedAdapters(args, info.target, self._store, self._service.set_adapter)
        machine = IngressMachine(replica_id(), args.protocol.times(), fingerprints=own)
        self._machine = machine
        self._ingress_host = self.start_ingress(machine, routers=ROUTERS, after=self._service.deliver, fingerprints=own)
        routers = ReplicaPoll(lambda: router, "workers", _READY_S)
        self._service.connect(self._ingress_host, lambda: bool(self.linked_peers()), routers.get)
        if self._adapters is not None:
            self._adapters.start()
            self._closers.append(self._adapters.close)
        elif self._store is not None:
            self._store_start = spawn(self._start_store(self._store))
        self.start_metrics(ReplicaMetrics("ingress", args.model_name, self._metrics))

    async def _start_store(self, store: Store) -> None:
        """Have the store's process start now: the first response waits for it no longer than for any answer."""
        with suppress(ServiceUnavailableError):
            await store.changes(NOTHING, _READ_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The HTTP application of this replica."""
        self._tokenizer = load_tokenizer(target_source(self._args))
        self._observer = Observer(self._replica_metrics.registry, self._args.model_name)
        self._admission = Admission(self._args.limits)
        self._grammars = request_grammars(self._tokenizer)
        return self._http_application(self._args)

    async def _prepare(self, args: AppArgs) -> None:
        if args.lora.adapters != self._in_force.lora.adapters:
            found = await asyncio.to_thread(configured_adapters, args, self._target)
            self._configured = {one.name: one for one in found}

    def _go_by(self, args: AppArgs) -> None:
        """Requests that are open end by the old keys."""
        app = self._http_application(args)
        self._asgi_app = app  # the name by which Serve's wrapper finds it for each request
        if args.access.api_keys_file != self._in_force.access.api_keys_file:
            self._keys_file = WatchedFile(args.access.api_keys_file)
        if args.lora.adapters != self._in_force.lora.adapters:
            gone = {one.name for one in self._in_force.lora.adapters} - self._configured.keys()
            for name, adapter in [*((name, None) for name in gone), *self._configured.items()]:
                self._service.set_adapter(name, adapter)
            if self._adapters is not None:
                self._adapters.set_configured(self._configured)
        self._in_force = args
        self._ingress_host.tell(lambda machine, _now_s: machine.set_times(args.protocol.times()))

    async def check_health(self) -> None:
        """Serve's health check, once a second: API keys are read again when their file has changed."""
        if self._adapters is not None and not self._has_served:  # the first check ends the start
            await self._adapters.read(_READ_S)
        await super().check_health()
        if self._keys_file.has_changed():
            try:
                self._go_by(self._in_force)
            except SpecdecError as error:
                self._refused("access.api_keys_file", error)

    def _http_application(self, args: AppArgs) -> FastAPI:
        limits, access = args.limits, args.access
        keys = ApiKeys(api_keys(access.api_keys_file))
        logger.info("API keys: %s", ", ".join(keys.names) or "none, everybody may call")
        if limits.max_share_per_key is None and len(keys.names) > 1:
            limits = limits.model_copy(update={"max_share_per_key": 0.5})
        settings = ApiSettings(
            limits=limits,
            stream_interval=args.stream_interval,
            chat_template=read_template(args.chat_template),
            tool_parser=args.tool_parser,
            reasoning_tags=args.reasoning_tags,
            unknown_fields=args.unknown_fields,
            trust_request_chat_template=args.trust_request_chat_template,
            allowed_origins=access.allowed_origins,
            ui=args.ui == "on",
            send_request_id=False,  # Serve's proxy sends it
            admin_keys=access.admin_keys,
            share_prefixes=access.share_prefixes,
            unsupported_tools=args.unsupported_tools,
            tracer=serve_tracer(),
        )
        self._recordings.set(args.recordings)
        app = create_app(
            self._service,
            settings,
            self._tokenizer,
            self._observer,
            keys,
            self._admission,
            self._store if args.responses_store.enabled else None,
            self._grammars,
            None if self._adapters is None else self._adapters.find,
            self._recordings if args.recordings.folder is not None else None,
        )
        if self._adapters is not None:
            add_adapter_routes(app, self._adapters)
        return app

    async def _metrics(self) -> Metrics:
        drains = {"is_draining": float(self._service.is_draining)}
        users = {
            "slots_used_share": self._admission.slots_used,
            "num_waiting_requests": float(self._admission.num_waiting),
            "num_requests_refused": float(self._admission.num_refused),
            "longest_queue_s": self._observer.longest_queue_s(),
        }
        return self._machine.metrics() | self.config_metrics() | drains | users

    async def users_wait(self) -> float:
        """1 while users of this ingress wait, or are refused, else 0: for the autoscaling of targets and routers."""
        return float(self._replica_metrics.load.users_wait > 0 or self._observer.longest_queue_s() > LONG_QUEUE_S)

    async def refusal(self) -> str:
        """Why this replica takes no requests, for operators; empty where it does."""
        return self._service.state()

    async def drain_requests(self) -> int:
        """Refuse new requests from now on, with 503; open ones go on.

        Returns:
            How many sequences are open or have slots: a request keeps its own until its whole answer is with Serve.
        """
        self._service.drain()
        return max(self._service.num_open, self._admission.num_sequences)


def model_info(args: AppArgs, own: Fingerprints) -> ModelInfo:
    """What the API says of the target, from its configuration alone.

    Raises:
        SpecdecError: It cannot be read, or its tokenizer does not fit it.
    """
    source = target_source(args)
    model, vocab_size = describe_model(source), tokenizer_width(load_tokenizer(source))
    check_width(model.name, model.vocab_size, vocab_size)
    target = ServedModel(
        name=args.model_name,
        max_model_len=min(args.max_model_len or model.max_model_len, model.max_model_len),
        vocab_size=vocab_size,
        eos_token_ids=model.eos_token_ids,
        defaults=model.generation_defaults,
        decision=own.decision,
        weights=weights_hash(source.path, source.revision, source.token),
        root=source.path,
        other_names=args.served_model_name[1:],
    )
    return ModelInfo(
        target,
        num_speculative_tokens=args.most_draft_tokens if args.speculates else 0,
        exactness=args.exactness,
        created_s=int(time.time()),
    )
