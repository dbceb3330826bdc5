from __future__ import annotations

import pytest

from specdec.core.messages import Plan
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.plans import fixed_plan, no_drafts


@pytest.mark.parametrize(("named", "expected"), [(None, 4), (0, 0), (7, 7)])
def test_a_request_may_name_its_own_draft_length(named, expected):
    spec = SequenceSpec(SamplingParams(), 0, 1, 1, num_speculative_tokens=named)
    wanted = Plan(expected, 8, mode="sequential", draft_wait_s=0.5) if expected else Plan()
    assert fixed_plan(4, "sequential", 0.5, 8)(spec) == wanted
    assert no_drafts(spec).num_draft_tokens == 0
