"""How long a backend's steps take by how much is in them, measured as it loads: so that the first requests are planned.

Steps of made-up sequences run through the backend; what they leave in its caches may be taken by any request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from specdec.core.backends import DraftBackend, DraftJob, Proposal, Status, TargetBackend, Verification, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.observed import ObservedDrafter, ObservedTarget, StepListener

NUM_ROWS = (1, 2, 4, 8, 16, 32, 64)
DRAFT_LENGTHS = (0, 4)
NUM_STEPS = 2
"""Of each size."""
LIMIT_S = 1.5
"""No size is begun after so many seconds: the larger ones are left out where steps are long."""
_PROMPT = (1, 1, 1, 1)
_MOST_TOKENS = 64


def profile_target(backend: TargetBackend, listener: StepListener, limit_s: float = LIMIT_S) -> None:
    """Verify no tokens and some, with few rows and many; nothing where the model reads too little, or has no room.

    Args:
        backend: Holds no sequence yet.
        listener: Is told of each step.
        limit_s: Seconds after which no larger size is begun.
    """
    observed = ObservedTarget(backend, [listener])
    for keys in _sizes(backend.max_model_len, limit_s):
        logs = [TokenLog(_PROMPT) for _ in keys]
        for length in (0, *(length for length in DRAFT_LENGTHS for _ in range(NUM_STEPS))):
            draft = (1,) * length
            results = observed.verify(
                [
                    VerifyJob(key, log, draft, _spec(i), wants_own=bool(draft))
                    for i, (key, log) in enumerate(zip(keys, logs, strict=True))
                ]
            )
            if not _are_decided(results):
                break
            for log, result in zip(logs, results, strict=True):
                log.extend(result.run)
        for key in keys:
            observed.release(key)


def profile_drafter(backend: DraftBackend, listener: StepListener, limit_s: float = LIMIT_S) -> None:
    """Draft with few rows and many; see :func:`profile_target`."""
    observed = ObservedDrafter(backend, [listener])
    num_tokens = int(backend.gauges().get("num_step_tokens", 1))
    for keys in _sizes(backend.max_model_len, limit_s):
        tokens, agreed = [list(_PROMPT) for _ in keys], 0
        for _ in range(1 + NUM_STEPS):
            jobs = [
                DraftJob(key, said, _spec(i), agreed, len(_PROMPT), num_tokens=num_tokens)
                for i, (key, said) in enumerate(zip(keys, tokens, strict=True))
            ]
            proposals = observed.propose(jobs)
            if not _are_decided(proposals):
                break
            agreed = len(tokens[0])
            for said, proposal in zip(tokens, proposals, strict=True):
                said += [] if proposal.token is None else [proposal.token]
        observed.rest()
        for key in keys:
            observed.release(key)


def _sizes(max_model_len: int, limit_s: float) -> Iterator[list[str]]:
    """The sequences of each size, few first."""
    began_s = time.monotonic()
    for num_rows in NUM_ROWS:
        if max_model_len >= _MOST_TOKENS and time.monotonic() < began_s + limit_s:
            yield [f"profile {num_rows} {i}" for i in range(num_rows)]


def _are_decided(results: Sequence[Verification] | Sequence[Proposal]) -> bool:
    return all(result.status is Status.DECIDED for result in results)


def _spec(seed: int) -> SequenceSpec:
    return SequenceSpec(SamplingParams(ignore_eos=True), seed, len(_PROMPT), _MOST_TOKENS - len(_PROMPT))
