"""The world of tokens: the log of record per sequence, placement, and the relay between draft and target."""

from __future__ import annotations

from typing import Any

from cluster.config import AppArgs
from deployments.names import DRAFT, TARGET
from deployments.transport.endpoints import PeerGroup, RouterEndpoint, replica_id
from specdec.protocol.plans import fixed_plan, no_drafts
from specdec.protocol.router import RouterMachine, WorkerKind

IN_TURN_WAIT_S = 1.0
"""Longest wait of a target for a draft in mode ``in_turn``; a drafter that is gone costs this once per sequence."""


class SpeculationRouter(RouterEndpoint):
    """Relays offers and verdicts, plans, and recovers what a worker's death leaves open.

    Args:
        args: The service's configuration.
        workers: Handles of the workers' deployments, so that Serve deploys them too; links find them by name.
    """

    def __init__(self, args: AppArgs, *workers: Any) -> None:
        wait_s = IN_TURN_WAIT_S if args.mode == "in_turn" else 0.0
        planner = fixed_plan(args.num_speculative_tokens, args.mode, wait_s) if args.has_draft else no_drafts
        self._machine = RouterMachine(replica_id(), planner, args.protocol.times())
        groups = [_group(TARGET, "target")]
        if args.has_draft:
            groups.append(_group(DRAFT, "drafter"))
        self.start_router(self._machine, workers=groups)

    async def reports(self) -> dict[str, tuple[WorkerKind, dict[str, float]]]:
        """The newest counters of every live worker, by its name."""
        return self._machine.reports()


def _group(deployment: str, kind: WorkerKind) -> PeerGroup[RouterMachine]:
    def joined(machine: RouterMachine, name: str, now_s: float) -> None:
        machine.worker_joined(name, kind, now_s)

    def lost(machine: RouterMachine, name: str, now_s: float) -> None:
        machine.worker_lost(name, now_s)

    return PeerGroup(deployment, joined, lost)
