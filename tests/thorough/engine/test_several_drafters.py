"""Rule 18 over real models: several drafters' drafts are verified as one tree, and no token changes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specdec.core.backends import Verification, VerifyJob
from specdec.core.messages import Plan
from specdec.core.params import SamplingParams
from specdec.engine.drafter import ModelDrafter
from specdec.engine.target import ModelTarget
from tests.sizes import some
from tests.specdec.engine.overlap import OverlapService
from tests.specdec.engine.pairs import backend, collect, make_draft, make_model, make_service, run
from tests.specdec.engine.test_exactness import HALF_RIGHT, make_cases

NOISE = HALF_RIGHT["llama"]
PLAN = Plan(4, 4, acceptance_rate=0.5)


class Watched(ModelTarget):
    """Counts the trees that it was given."""

    num_trees = 0

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        self.num_trees += sum(bool(job.parents) for job in jobs)
        return super().verify(jobs)


@pytest.mark.parametrize("temperature", some([1.0, 0.0], 1))
@pytest.mark.parametrize("loses_one", [False, True])
def test_tokens_are_those_of_plain_decoding(temperature: float, loses_one: bool) -> None:
    """The second is the less noisy one, the third another model altogether; the first is lost now and then."""
    cases = make_cases(SamplingParams(temperature=temperature, top_p=0.95))
    wanted = run(make_service("llama", NOISE, 0), cases)[0]
    rng = random.Random(3)
    drafts = [
        backend(ModelDrafter, make_draft("llama", noise), chunk=128) for noise in (NOISE, NOISE / 2, float("inf"))
    ]
    target, others = backend(Watched, make_model("llama")), {"second": drafts[1], "third": drafts[2]}
    service = OverlapService(target, drafts[0], PLAN, lambda: rng.randrange(9), others)
    if loses_one:
        pump = service.pump

        def lose_and_pump() -> object:
            if rng.random() < 0.2:
                service.router.worker_lost("drafter", 0.0)
                service.router.worker_joined("drafter", "drafter", 0.0)
            return pump()

        service.pump = lose_and_pump  # type: ignore[method-assign,assignment]
    assert [output.tokens for output in collect(service, cases)] == wanted
    assert target.num_trees > 10
    counts = {name: one.num_accepted_tokens for name, one in service.target.counters.by_drafter.items()}
    assert sum(counts.values()) == service.target.counters.num_accepted_tokens
    assert counts["second"] > 5
    if loses_one:
        assert service.router.counters.num_reopened > 2
