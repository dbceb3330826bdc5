"""An ingress, a router, a target and a drafter in one process, joined by real links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.scripted import Script, ScriptedDrafter, ScriptedTarget
from cluster.config.names import DRAFT, TARGET
from deployments.http.service import ModelInfo, ServedModel
from deployments.router import _group
from deployments.tokens import RoutedTokens
from deployments.transport import endpoints
from deployments.transport.endpoints import IngressEndpoint, PeerGroup, RouterEndpoint, WorkerEndpoint
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import Fingerprints
from specdec.drafting.plans import fixed_plan
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine
from tests.deployments.transport.test_streams import Call, Poster
from tests.letters import spelled
from tests.waiting import eventually

SCRIPT = Script(0.8, 0.9, tuple(range(50)))
NUM_TOKENS = 300
PRINTS = Fingerprints("d", "v")


class Line:
    """The four ends; what Serve would tell them is told here.

    Args:
        monkeypatch: Puts other things in the place of what only Serve can do.
        target: What the target says that it serves.
        max_model_len: Longest sequence.
        backend: What the target runs; by default the script.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        target: Fingerprints = PRINTS,
        max_model_len: int = 2000,
        backend: Any = None,
    ) -> None:
        self._patch = monkeypatch
        self.num_accepted = 0
        monkeypatch.setattr(endpoints, "Discovery", lambda _name, _app, on_change: self._discover(on_change))
        monkeypatch.setattr(endpoints, "node_id", lambda: "node")
        self.ends = [self.router, self.worker, self.drafter, self.ingress] = [
            RouterEndpoint(), WorkerEndpoint(), WorkerEndpoint(), IngressEndpoint()
        ]  # fmt: skip
        name, times = f"r{id(self)}", Times()
        machine = RouterMachine(name, fixed_plan(4, "sequential", draft_wait_s=5.0), times)
        self._as("Router", name)
        groups = [_group("target", None), _group("drafter", None)]
        self.router.start_router(machine, workers=groups, fingerprints=PRINTS)
        self.name, self.routers = name, machine
        self._as(TARGET, "t")
        steps = TargetMachine("t", backend or ScriptedTarget(SCRIPT, max_model_len), times)
        self.worker.start_worker(steps, routers="Router", step_timeout_s=30.0, fingerprints=target)
        self._as(DRAFT, "d")
        drafts = DrafterMachine("d", ScriptedDrafter(SCRIPT, max_model_len), times)
        self.drafter.start_worker(
            drafts, routers="Router", step_timeout_s=30.0, fingerprints=Fingerprints("e", "v"), match="vocabulary"
        )
        self.tokens = RoutedTokens(ModelInfo(ServedModel("demo", max_model_len, 4096, (4095,))))
        self._as("Ingress", "i")
        group = PeerGroup("Router", IngressMachine.router_joined, IngressMachine.router_lost)
        ingress = self.ingress.start_ingress(
            IngressMachine("i", times), routers=group, after=self.tokens.deliver, fingerprints=PRINTS
        )
        self.tokens.connect(ingress, lambda: bool(self.ingress.linked_peers()))

    def _as(self, deployment: str, replica: str) -> None:
        context = SimpleNamespace(app_name="app", deployment=deployment, replica_tag=replica)
        self._patch.setattr("deployments.transport.endpoints.serve.get_replica_context", lambda: context)

    def _discover(self, on_change: Callable[[frozenset[str]], None]) -> Any:
        asyncio.get_running_loop().call_soon(lambda: on_change(frozenset({self.name})))

        def pinned(method: str, replica: str, *, stream: bool) -> Any:
            if not stream:
                return Poster(self.router._streams)
            return SimpleNamespace(remote=lambda first: Call(self.router.link(first)))

        return SimpleNamespace(pinned=pinned, close=lambda: None)

    async def generate(self, seed: int) -> tuple[int, ...]:
        spec = SequenceSpec(SamplingParams(temperature=1.0), seed=seed, output_start=3, max_tokens=NUM_TOKENS)
        request = SimpleNamespace(seq=f"s{seed}", prompt=(1, 2, 3), spec=spec, cache_salt=None)
        found: tuple[int, ...] = ()
        async for delta in self.tokens.open(request):
            found += delta.tokens
            self.num_accepted += spelled(delta.notes).count("a")
        return found

    async def close(self) -> None:
        for end in self.ends:
            end.close_transport()
        await eventually(lambda: len(asyncio.all_tasks()) == 1)
