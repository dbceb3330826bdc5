"""The router: the log of record of each sequence, placement, and the relay between draft and target."""

from __future__ import annotations

import time
from typing import Any

from ray import serve

from cluster.config.app import AppArgs
from cluster.config.environment import check_node
from cluster.config.live import set_log_level
from cluster.config.names import DRAFT, TARGET
from cluster.config.replicas import least
from cluster.models.identity import fingerprints
from deployments.metrics.autoscaling import ExposedDrafts, Metrics, Waker
from deployments.metrics.replica import Measured, ReplicaMetrics
from deployments.metrics.spans import sequence_tracer
from deployments.operate.live import LiveKeys
from deployments.operate.readiness import users_load, users_poll
from deployments.transport.endpoints import PeerGroup, RouterEndpoint, replica_id
from deployments.transport.wire import FingerprintKind
from specdec.core.messages import DRAFTER
from specdec.core.types import SpeculationMode
from specdec.drafting.controller import Controller
from specdec.drafting.modes import MODES, Bounds
from specdec.drafting.plans import SEQUENTIAL_WAIT_S, PlanController, Planner, WorkerKind, fixed_plan, no_drafts
from specdec.protocol.router import RouterMachine


class SpeculationRouter(LiveKeys, Measured, RouterEndpoint):
    """Relays offers and verdicts, plans, and recovers what a worker's death leaves open.

    Args:
        args: The service's configuration.
        workers: Handles of the workers' deployments, so that Serve deploys them too; links find them by name.
    """

    def __init__(self, args: AppArgs, *workers: Any) -> None:
        self._args = self._in_force = args
        check_node()
        set_log_level(args)
        own = fingerprints(args)
        self._machine = RouterMachine(
            replica_id(),
            planner_of(args),
            args.protocol.times(),
            fingerprints=own,
            max_reopens=args.limits.max_reopens,
        )
        self._machine.tracer = sequence_tracer("router", self._machine.name)
        self._machine.workers.affinity_slack = args.affinity_slack
        groups = [_group("target", None)]
        if args.has_drafters:
            groups.append(_group(DRAFTER, args.draft.application))
        self._router_host = self.start_router(self._machine, workers=groups, fingerprints=own)
        self._least = _min_workers(args)
        self._exposed = ExposedDrafts()
        self.start_metrics(ReplicaMetrics("router", args.model_name, self._metrics))
        self._users = users_poll()
        self._waker: Waker | None = None
        self._call_drafters()

    def _go_by(self, args: AppArgs) -> None:
        before, planner = self._in_force, planner_of(args)
        self._in_force = args
        self._least = _min_workers(args)
        self._call_drafters()

        def change(machine: RouterMachine, now_s: float) -> None:
            machine.set_times(args.protocol.times())
            machine.quarantine.max_reopens = args.limits.max_reopens
            machine.workers.affinity_slack = args.affinity_slack
            if (args.speculation_mode, args.num_branches) != (
                before.speculation_mode,
                before.num_branches,
            ):  # else what it has learned stays
                machine.set_planner(planner, now_s)

        self._router_host.tell(change)

    async def _metrics(self) -> Metrics:
        of_workers = self._machine.worker_metrics()
        linked = [kind for kind, _ in of_workers.values()]
        workers = {f"num_workers/{kind}": float(linked.count(kind)) for kind in self._least}
        workers |= {f"min_workers/{kind}": float(least) for kind, least in self._least.items()}
        targets = {name: metrics for name, (kind, metrics) in of_workers.items() if kind == "target"}
        exposed = {"exposed_draft_share": self._exposed.update(targets, time.monotonic())}
        return self._machine.metrics() | workers | exposed | self.config_metrics()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: this replica's load, and whether users wait."""
        return await super().record_autoscaling_stats() | await users_load(self._users)

    async def exposed_draft_share(self) -> float:
        """The newest exposed draft time of all targets, as a share of theirs, for the drafters' autoscaling."""
        return self._exposed.share

    def _is_serving(self) -> bool:
        has_target = any(
            kind == "target" and not metrics.get("is_draining")
            for kind, metrics in self._machine.worker_metrics().values()
        )
        return super()._is_serving() and has_target

    def _call_drafters(self) -> None:
        """Call for a drafter when one is wanted, where there may be none."""
        if self._least.get(DRAFTER) == 0 and self._waker is None:
            self._waker = Waker(self._lacks_drafter, self._wake_drafter)
            self._closers.append(self._waker.close)

    def _lacks_drafter(self) -> bool:
        of_workers = self._machine.worker_metrics().values()
        is_there = any(kind == DRAFTER and not metrics.get("is_draining") for kind, metrics in of_workers)
        return not is_there and self._machine.lacks_drafter()

    def _wake_drafter(self) -> Any:
        return serve.get_deployment_handle(DRAFT, self._args.draft.application).wake.remote()

    async def workers(self) -> dict[str, tuple[WorkerKind, bool]]:
        """Every live worker by its name: its kind, and whether it drains."""
        of_workers = self._machine.worker_metrics().items()
        return {name: (kind, bool(metrics.get("is_draining"))) for name, (kind, metrics) in of_workers}


def _min_workers(args: AppArgs) -> dict[WorkerKind, int]:
    """Return how many workers of each kind there are in any case."""
    workers: dict[WorkerKind, int] = {"target": least(args.replicas.target)}
    if args.has_drafters:
        workers[DRAFTER] = least(args.replicas.draft)
    return workers


def planner_of(args: AppArgs) -> Planner | PlanController:
    """Who plans: the controller, or the same plan for all where the draft length is fixed."""
    if not args.has_drafters:
        return no_drafts
    if args.num_speculative_tokens == "auto":
        modes = frozenset(MODES if args.speculation_mode == "auto" else ("off", args.speculation_mode))
        return Controller(Bounds(args.most_draft_tokens, args.num_branches, modes))
    mode: SpeculationMode = "overlap" if args.speculation_mode == "auto" else args.speculation_mode
    wait_s = SEQUENTIAL_WAIT_S if mode == "sequential" else 0.0
    num_branches = args.num_branches if mode == "outcomes" else 0
    return fixed_plan(args.num_speculative_tokens, mode, wait_s, num_branches)


def _group(kind: WorkerKind, application: str | None) -> PeerGroup[RouterMachine]:
    def joined(machine: RouterMachine, name: str, now_s: float) -> None:
        machine.worker_joined(name, kind, now_s)

    match: FingerprintKind = "decision" if kind == "target" else "vocabulary"
    deployment = TARGET if kind == "target" else DRAFT
    return PeerGroup(deployment, joined, RouterMachine.worker_lost, match, application=application)
