"""What the key ``backend`` names in benchmarks and tests: emulated devices, scripted tokens, or both.

python -m benchmarks.modes --backend benchmarks.backends:stand_in:target=30,draft=3,acceptance=0.8
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.emulation import Clock, EmulatedDevice, EmulatedDrafter, EmulatedTarget, step_cost
from benchmarks.scripted import Script, ScriptedDrafter, ScriptedTarget, plain_token_ids
from cluster.config.app import AppArgs
from cluster.models.sources import target_source
from specdec.checkpoint.compat import tokenizer_width
from specdec.models.describe import describe_model
from specdec.models.loading import load_tokenizer

NEXT_GUESS_RATE = 0.95


def stand_in(
    role: str,
    build: Callable[[], Any],
    args: AppArgs,
    *,
    target: str | None = None,
    draft: str | None = None,
    acceptance: str | None = None,
    next_guess: str = str(NEXT_GUESS_RATE),
    clock: Clock | None = None,
) -> Any:
    """A worker's backend; see :func:`cluster.models.sources.backend_of`.

    Args:
        role: Of the worker.
        build: Makes its own backend.
        args: The service's configuration.
        target: Time of a target's step on an emulated device, as in ``30+0.02/token``; None: its own.
        draft: The same of a drafter's.
        acceptance: How often a scripted draft token is right; None: the models answer.
        next_guess: How often the true token is among the next three guesses where it is not.
        clock: Of the emulated devices.
    """
    backend = build() if acceptance is None else scripted(role, args, float(acceptance), float(next_guess))
    cost = {"target": target, "draft": draft}.get(role)
    if cost is None:
        return backend
    around = EmulatedTarget if role == "target" else EmulatedDrafter
    return around(backend, EmulatedDevice(step_cost(cost), clock))


def scripted(
    role: str, args: AppArgs, acceptance_rate: float, next_guess_rate: float = NEXT_GUESS_RATE
) -> ScriptedTarget | ScriptedDrafter:
    """A backend that says what a script does, in tokens of the target's tokenizer."""
    source = target_source(args)
    tokenizer = load_tokenizer(source)
    script = Script(acceptance_rate, next_guess_rate, plain_token_ids(tokenizer, tokenizer_width(tokenizer)))
    own = describe_model(source).max_model_len
    kind = ScriptedDrafter if role == "draft" else ScriptedTarget
    return kind(script, min(own, args.max_model_len or own))
