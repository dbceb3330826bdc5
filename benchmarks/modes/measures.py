"""Figures from what happened: plain arithmetic on arrivals and steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.engine.observed import StepRecord
from specdec.engine.results import SpecStats

PERCENTILES = (50, 95, 99)
DEVICES = {"target": "target", "drafter": "draft"}
"""By a worker's role."""


class TokenArrival(NamedTuple):
    """Tokens that came together.

    Attributes:
        time_s: When, counted from the request.
        num_tokens: How many.
    """

    time_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What one device did in a stretch of time.

    Attributes:
        wall_s: Length of the stretch.
        busy_s: Time in steps, of all workers.
        num_steps: How many.
        num_emulated_steps: How many of them ended at an emulated time.
        num_overruns: How many of those took longer to compute than that.
        decode_step_s: Mean time of the steps that read no prompt; None where they are not known one by one.
        num_workers: Of the device, each with steps of its own.
    """

    wall_s: float
    busy_s: float
    num_steps: int
    num_emulated_steps: int = 0
    num_overruns: int = 0
    decode_step_s: float | None = None
    num_workers: int = 1

    @property
    def idle_share(self) -> float:
        """Part of the workers' time outside steps."""
        return max(0.0, 1 - self.busy_s / (self.wall_s * self.num_workers)) if self.wall_s else 0.0

    @property
    def step_s(self) -> float | None:
        """Time of a step: of one that reads no prompt where that is known, else the mean of all."""
        return self.decode_step_s or (self.busy_s / self.num_steps if self.num_steps else None)


@dataclass(frozen=True, slots=True)
class Stream:
    """What one request gave.

    Attributes:
        text: All of it.
        arrivals: Its tokens, by when they came.
        stats: What speculation did.
    """

    text: str
    arrivals: tuple[TokenArrival, ...]
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def num_rounds(self) -> int:
        """Verifications, with a draft and without: each gives one token beside those accepted."""
        return self.num_tokens - self.stats.num_accepted_tokens

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.arrivals[0].time_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first message per second after it; 0 where there was only one."""
        first, last = self.arrivals[0], self.arrivals[-1]
        span_s = last.time_s - first.time_s
        return (self.num_tokens - first.num_tokens) / span_s if span_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload in one variant.

    Attributes:
        load: The machine's load average after it.
        devices: What the devices did, by ``target`` and ``draft``, as far as known.
    """

    streams: tuple[Stream, ...]
    duration_s: float
    load: float = 0.0
    devices: dict[str, DeviceUse] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all streams."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all streams per second, the prompts' time included."""
        return self.num_tokens / self.duration_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second of all streams, each from its first tokens on."""
        return sum(stream.decode_tokens_per_s for stream in self.streams)

    @property
    def texts(self) -> tuple[str, ...]:
        """The streams' texts, in the order of their prompts."""
        return tuple(stream.text for stream in self.streams)


def token_gaps_s(arrivals: Sequence[TokenArrival]) -> list[float]:
    """Inter-token latencies of one stream: for every token but the first, the time since the token before it.

    Tokens that came together have no time between them: a message of n tokens gives one gap and n - 1 zeros. So the
    mean is that of the stream, and the high percentiles are pauses that a reader sees.
    """
    gaps: list[float] = []
    last_s: float | None = None
    for time_s, num_tokens in arrivals:
        first = [] if last_s is None else [time_s - last_s]
        gaps += [*first, *[0.0] * (num_tokens - 1)] if num_tokens else []
        last_s = time_s if num_tokens else last_s
    return gaps


def percentiles_s(gaps: Iterable[float]) -> tuple[float, ...]:
    """The 50th, 95th and 99th percentile, interpolated linearly; zeros where there are no values."""
    values = list(gaps)
    if len(values) < 2:
        return tuple((values or [0.0]) * len(PERCENTILES))
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    return tuple(hundredths[p - 1] for p in PERCENTILES)


def mean(values: Iterable[float]) -> float | None:
    """The arithmetic mean; None of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else None


def tokens_per_round(streams: Iterable[Stream]) -> float | None:
    """Tokens of a round after each stream's first, which gives one; None where there were none."""
    streams = list(streams)
    num_rounds = sum(stream.num_rounds - 1 for stream in streams)
    return sum(stream.num_tokens - 1 for stream in streams) / num_rounds if num_rounds > 0 else None


def device_use(steps: Iterable[StepRecord], wall_s: float) -> dict[str, DeviceUse]:
    """What each device did, ``target`` and ``draft``, from its steps one by one."""
    by_device: dict[str, list[StepRecord]] = {}
    for step in steps:
        by_device.setdefault(DEVICES[step.role], []).append(step)
    uses: dict[str, DeviceUse] = {}
    for device, done in sorted(by_device.items()):
        decode_step_s = mean(step.duration_s for step in done if step.is_decode)
        uses[device] = DeviceUse(wall_s, sum(step.duration_s for step in done), len(done), decode_step_s=decode_step_s)
    return uses
