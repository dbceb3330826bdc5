"""Target and draft: a replica per model, its engine on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ray import serve

from cluster.config.app import AppArgs
from cluster.config.environment import check_node, hide_gpus, prepare_for_vllm
from cluster.config.live import set_log_level
from cluster.config.names import ROUTER
from cluster.launch.applications import draft_args
from cluster.launch.startup import NO_DRAFTS, startup
from cluster.models.identity import fingerprints, target_path, token_of
from cluster.models.sources import backend_of, backend_options, draft_source, ngram_options, target_source
from cluster.models.vllm import vllm_options
from deployments.metrics.autoscaling import Metrics
from deployments.metrics.replica import Measured, ReplicaMetrics
from deployments.metrics.spans import sequence_tracer
from deployments.operate.live import LiveKeys
from deployments.operate.readiness import ReplicaPoll, users_load, users_poll
from deployments.transport.endpoints import WorkerEndpoint, replica_id
from deployments.transport.host import WorkerHost
from deployments.transport.link import spawn
from specdec.checkpoint.compat import tokenizer_width
from specdec.checkpoint.fingerprint import vocabulary_fingerprint
from specdec.core.backends import DraftBackend, TargetBackend
from specdec.core.errors import InvalidParameterError, SpecdecError
from specdec.core.types import UNKNOWN, Fingerprints, Progress
from specdec.drafting.length import DraftLengths
from specdec.engine.build import Built, build_drafter, build_target, pair_gpu_shares
from specdec.engine.observed import ObservedDrafter, ObservedTarget
from specdec.engine.pair import PairedTarget
from specdec.engine.timing import LastRound, LastStep, StepMetrics, profile_drafter, profile_target
from specdec.models.loading import load_tokenizer
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.target import TargetMachine

logger = logging.getLogger("ray.serve")

_TIMING = "timing its steps"
FIRST_RETRY_S, MAX_RETRY_S = 30.0, 300.0
"""Until a draft model that cannot be loaded is tried again; doubled each time."""
START_TIMEOUT_S = 600.0
"""How long Serve is kept waiting for a draft model to load: longer updates leave a while without drafts."""


class _Worker(LiveKeys, Measured, WorkerEndpoint):
    """A worker whose times and log level change without a restart."""

    _worker_host: WorkerHost[Any]

    def _go_by(self, args: AppArgs) -> None:
        self._worker_host.tell(lambda machine, _now_s: machine.set_times(args.protocol.times()))


class TargetServer(_Worker):
    """Serves the target model to all routers.

    Args:
        args: The service's configuration.
        num_torch_threads: Threads for torch on a CPU.
        num_gpus: GPUs that Ray gave this replica; a fraction is a part of one, and 0 is none.
    """

    def __init__(self, args: AppArgs, num_torch_threads: int, num_gpus: float) -> None:
        self._args = args
        check_node()
        set_log_level(args)
        torch.set_num_threads(num_torch_threads)
        gpu_share = _gpu_share(num_gpus)
        name, steps, draft_steps = replica_id(), StepMetrics(), StepMetrics()
        own = fingerprints(args)
        drafter: DraftBackend | None = None
        with _startup() as say:
            shares = _pair_shares(args, gpu_share)
            built: list[Built] = []
            build = partial(_target_backend, args, shares[0], say, built.append)
            backend = backend_of(args, "target", build)
            if args.is_paired:
                drafter = backend_of(args, "draft", lambda: _draft_backend(args, shares[1], say))
            if args.is_auto:
                say(_TIMING)
                profile_target(backend, steps.profiled)
                if drafter is not None:
                    profile_drafter(drafter, draft_steps.profiled)
        last_round = LastRound()
        observed: TargetBackend = ObservedTarget(backend, [last_round, steps])
        if drafter is not None:
            observed_drafter = ObservedDrafter(drafter, [last_round, draft_steps])
            observed = PairedTarget(observed, observed_drafter, args.most_draft_tokens)

        def worker_metrics() -> dict[str, float]:
            of_steps = steps.metrics()
            of_steps["busy_s"] += draft_steps.metrics()["busy_s"]
            return observed.metrics() | of_steps | self.config_metrics()

        chooses = args.is_auto and (args.is_paired or args.draft.method != "model")
        machine = TargetMachine(
            name,
            observed,
            args.protocol.times(),
            worker_metrics,
            fingerprint=own.decision,
            numeric=built[0].numeric if built else "",
            last_interval=last_round.interval,
            last_draft_intervals=last_round.draft_intervals,
            ngram=ngram_options(args),
            chooser=DraftLengths(steps.metrics, draft_steps.metrics if args.is_paired else None) if chooses else None,
        )
        machine.tracer = sequence_tracer("target", name)
        self._worker_host = self.start_worker(
            machine,
            routers=ROUTER,
            step_timeout_s=args.step_timeout_s,
            last_progress=_last_progress(backend, drafter),
            fingerprints=own,
        )

        async def ask() -> Metrics:
            """Ask the machine in its own turn."""
            return await self._worker_host.ask(lambda _machine: machine.metrics() | steps.step_counts())

        self.start_metrics(ReplicaMetrics("target", args.model_name, ask))
        self._users = users_poll()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: this replica's load, and whether users wait."""
        return await super().record_autoscaling_stats() | await users_load(self._users)


class DraftServer(_Worker):
    """Serves the draft model to the routers of the applications that its ``user_config`` names.

    It loads in the background and never fails a start: Serve and KubeRay would wait for it. Until it has loaded, and
    while it cannot, there are no drafts; the log, ``/health`` and ``specdec_draft_failed`` say why.

    Args:
        args: Keys of :class:`AppArgs` that a drafter goes by.
        num_torch_threads: Threads for torch on a CPU.
        num_gpus: GPUs that Ray gave this replica; a fraction is a part of one, and 0 is none.
        problem: Why it can have no place that its args ask for; then it drafts nothing.
    """

    def __init__(self, args: dict[str, Any], num_torch_threads: int, num_gpus: float, problem: str = "") -> None:
        self._started = ExitStack()
        self._given, self._args, self._problem = args, AppArgs(), problem
        self._me, self._fingerprints, self._closers = replica_id(), UNKNOWN, []
        check_node()
        torch.set_num_threads(num_torch_threads)
        self._gpu_share = _gpu_share(num_gpus)
        self._applications: tuple[str, ...] = ()
        self._machine: DrafterMachine | None = None
        self._steps = StepMetrics()
        self._vocabulary = self._failure = ""
        self._told_s = 0.0
        self._has_tried = asyncio.Event()
        self._loading: asyncio.Task[None] | None = None
        self._routers: list[ReplicaPoll] = []
        self._say = self._started.enter_context(_startup())

    async def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Draft for these applications, and go by these keys, from now on; the first call begins to load."""
        args = self._args
        try:
            args, applications = draft_args(self._given, user_config or {})
            vocabulary = "" if self._machine is None else await asyncio.to_thread(_vocabulary, args)
        except SpecdecError as error:
            self._refused("user_config", error)
            if self._machine is None:
                self._fails(error)
            return
        finally:
            if not self._closers:
                self.start_metrics(ReplicaMetrics("draft", args.model_name, self._metrics))
        self._args, self._applications = args, applications
        self._routers = [ReplicaPoll(partial(_routers, name), "exposed_draft_share", 1.0) for name in applications]
        set_log_level(args)
        if self._loading is None:
            self._loading = spawn(self._load())
        elif self._machine is not None:
            self._failure = "" if vocabulary == self._vocabulary else "the target has another vocabulary now"
            self._go_by(args)
            self.dial_routers_of(applications)

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        self._started.close()  # with the line that says why there are no drafts
        return super().__del__()

    def _fails(self, error: Exception) -> None:
        """Say why there are no drafts, where it is looked for."""
        self._failure = str(error) or repr(error)
        logger.error("There are no drafts: %s", self._failure, exc_info=not isinstance(error, SpecdecError))
        self._tell_failure()
        self._has_tried.set()

    def _tell_failure(self) -> None:
        """Leave it for ``/health``, which forgets what nobody repeats."""
        self._told_s = time.monotonic()
        self._say(f"{NO_DRAFTS}{self._failure}")

    async def _load(self) -> None:
        """Load the model, and draft; what fails is tried again, after twice the time."""
        wait_s = FIRST_RETRY_S
        while True:
            try:
                backend = await asyncio.to_thread(self._built)
                break
            except Exception as error:
                self._fails(error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)
        self._started.close()
        self._failure, last_step = "", LastStep()
        observed = ObservedDrafter(backend, [last_step, self._steps])
        machine = DrafterMachine(
            self._me,
            observed,
            self._args.protocol.times(),
            lambda: observed.metrics() | self._steps.metrics() | self.config_metrics(),
            fingerprint=self._vocabulary,
            last_interval=last_step.interval,
        )
        machine.tracer = sequence_tracer("drafter", self._me)
        self._worker_host = self.start_worker(
            machine,
            routers=ROUTER,
            step_timeout_s=self._args.step_timeout_s,
            last_progress=getattr(backend, "last_progress", None),
            fingerprints=Fingerprints(vocabulary=self._vocabulary),
            match="vocabulary",
            applications=self._applications,
        )
        self._machine = machine
        self._has_tried.set()

    def _built(self) -> DraftBackend:
        args, say = self._args, self._say
        if self._problem:
            raise InvalidParameterError("args", self._problem)
        if not args.has_own_draft:
            raise InvalidParameterError("draft.model", "draft.model: the application's args name no draft model")
        self._vocabulary = _vocabulary(args)
        backend: DraftBackend = backend_of(args, "draft", partial(_draft_backend, args, self._gpu_share, say))
        if args.is_auto:
            say(_TIMING)
            profile_drafter(backend, self._steps.profiled)
        return backend

    async def check_health(self) -> None:
        """Serve's health check; the first one waits until the model has loaded, or cannot.

        Raises:
            HostFailedError: The machine has raised, or hangs.
            InvalidParameterError: The target has another vocabulary than the one that this replica has loaded for.
        """
        if not self._has_served:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_tried.wait(), START_TIMEOUT_S)
        await super().check_health()
        if self._machine is None and self._failure and time.monotonic() - self._told_s > MAX_RETRY_S:
            self._tell_failure()
        if self._machine is not None and self._failure:  # a new replica loads for the other one
            raise InvalidParameterError("target", f"target: {self._failure}")

    async def _metrics(self) -> Metrics:
        failed = {"draft_failed": float(bool(self._failure))}
        if self._machine is None:
            return failed | self.config_metrics()
        counted: Metrics = await self._worker_host.ask(lambda machine: machine.metrics() | self._steps.step_counts())
        return {**failed, **counted}

    async def wake(self) -> None:
        """A router wants a drafter where there is none; the call itself has made Serve start this one."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: this replica's load, and how late all drafts are."""
        shares = await asyncio.gather(*(asked.get() for asked in self._routers))
        late = max((share for of_application in shares for share in of_application), default=0.0)
        return await super().record_autoscaling_stats() | {"late": late}


def _vocabulary(args: AppArgs) -> str:
    return vocabulary_fingerprint(target_path(args), args.target.revision, token_of(args.target))


def _routers(application: str) -> Any:
    return serve.get_deployment_handle(ROUTER, application)


@contextmanager
def _startup() -> Iterator[Progress]:
    """Around what takes long in a start: gives a function that logs a line, and shows it to those who wait."""
    context = serve.get_replica_context()
    with startup(context.app_name, context.deployment, replica_id()) as show:

        def say(line: str) -> None:
            logger.info(line)
            show(line)

        yield say


def _gpu_share(num_gpus: float) -> float:
    """Part of its GPU that a replica has; one that has none sees none, as those of its node are others'."""
    if not num_gpus:
        hide_gpus()
    return min(1.0, num_gpus or 1.0)


def _pair_shares(args: AppArgs, gpu_share: float) -> tuple[float, float]:
    """Parts of the replica's GPU for its target, and for a draft model in its process."""
    draft = draft_source(args) if args.is_paired else None
    return (gpu_share, 0.0) if draft is None else pair_gpu_shares(target_source(args), draft, gpu_share)


def _last_progress(*backends: TargetBackend | DraftBackend | None) -> Callable[[], float] | None:
    """When the newest layer of any of some backends was done; None where none of them tells."""
    found = [progress for one in backends if (progress := getattr(one, "last_progress", None)) is not None]
    return (lambda: max(progress() for progress in found)) if found else None


def _target_backend(args: AppArgs, gpu_share: float, say: Progress, on_built: Callable[[Built], None]) -> TargetBackend:
    source = target_source(args)
    width = tokenizer_width(load_tokenizer(source))
    options = replace(backend_options(args, args.target, width), device_share=gpu_share)
    if args.target.engine == "vllm":
        prepare_for_vllm(torch.get_num_threads())
        from specdec.engine.vllm.build import build_vllm_target

        return build_vllm_target(source, options, vllm_options(args), say)
    backend, built = build_target(source, options, say)
    on_built(built)
    _report(built)
    return backend


def _draft_backend(args: AppArgs, gpu_share: float, say: Progress) -> DraftBackend:
    source = draft_source(args)
    assert source is not None, "deployed without a draft model"
    options = replace(backend_options(args, args.draft), device_share=gpu_share)
    target, has_branches = target_source(args), not args.is_paired
    drafter, built = build_drafter(source, options, target, say, has_branches=has_branches)
    _report(built)
    return drafter


def _report(built: Built) -> None:
    logger.info("%s: %s; %s", built.loaded.name, built.memory, built.admission)
    remark = built.loaded.generation_defaults.remark(built.loaded.name)
    if remark is not None:
        logger.warning(remark)
