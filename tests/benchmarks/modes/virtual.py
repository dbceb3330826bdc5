"""A pair on scripted tokens and emulated devices in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.backends import stand_in
from benchmarks.modes.offline import Pair, load_pair
from cluster.config.app import AppArgs
from tests.clock import VirtualClock

CLOCK = VirtualClock()


def virtual(role: str, build: Callable[[], Any], args: AppArgs, **options: str) -> Any:
    """What the key ``backend`` names here."""
    return stand_in(role, build, args, clock=CLOCK, **options)


def virtual_pair(options: str) -> Pair:
    """A pair whose clock begins at 0, by the arguments of :func:`benchmarks.backends.stand_in`."""
    CLOCK.reset()
    args = AppArgs.model_validate({"backend": f"tests.benchmarks.modes.virtual:virtual:{options}"})
    return load_pair(args, clock=CLOCK.now_s)
