"""What a worker reports of its steps: how long they take by how much is in them, and the time between them.

How long a backend's steps take by how much is in them, measured as it loads: so that the first requests are planned.

Steps of made-up sequences run through the backend; what they leave in its caches may be taken by any request.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence

from specdec.core.backends import DraftBackend, DraftJob, Proposal, Status, TargetBackend, Verification, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.messages import Interval
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.observed import ObservedDrafter, ObservedTarget, StepListener, StepRecord

_SAMPLES_KEPT = 31
_BUCKETS_KEPT = 48
_BUCKETS_PER_OCTAVE = 4


class StepTimer:
    """Durations of steps, by rows and tokens, in buckets a quarter of an octave wide.

    Of each bucket the newest samples are kept and their median is reported, so that a pause of the process, or a
    neighbour on the same device, does not count for more than the one step that it hit. Buckets unused for longest are
    forgotten first.
    """

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[int, int], deque[tuple[int, int, float]]] = OrderedDict()

    def add(self, num_rows: int, num_tokens: int, duration_s: float) -> None:
        """A step of so many rows and tokens, at least one of each, took so many seconds."""
        key = _bucket(num_rows), _bucket(num_tokens)
        if key not in self._buckets:
            self._buckets[key] = deque(maxlen=_SAMPLES_KEPT)
            while len(self._buckets) > _BUCKETS_KEPT:
                self._buckets.popitem(last=False)
        self._buckets[key].append((num_rows, num_tokens, duration_s))
        self._buckets.move_to_end(key)

    def metrics(self) -> dict[str, float]:
        """Per bucket ``step/<i>/rows`` and ``step/<i>/tokens`` (means), ``.../seconds`` (median), ``.../num_steps``."""
        metrics: dict[str, float] = {}
        for i, samples in enumerate(self._buckets.values()):
            rows, tokens, seconds = zip(*samples, strict=True)
            metrics[f"step/{i}/rows"] = statistics.fmean(rows)
            metrics[f"step/{i}/tokens"] = statistics.fmean(tokens)
            metrics[f"step/{i}/seconds"] = statistics.median(seconds)
            metrics[f"step/{i}/num_steps"] = float(len(samples))
        return metrics


def _bucket(count: int) -> int:
    """Buckets of one up to 8, then a quarter of an octave wide."""
    if count <= 2 * _BUCKETS_PER_OCTAVE:
        return count
    octave = count.bit_length() - 1
    return _BUCKETS_PER_OCTAVE * octave + ((count - (1 << octave)) * _BUCKETS_PER_OCTAVE >> octave)


class LastStep:
    """When the newest step ran; a listener of :mod:`specdec.engine.observed` whose clock is ``time.monotonic_ns``."""

    def __init__(self) -> None:
        self._start_ns = self._end_ns = 0

    def __call__(self, step: StepRecord) -> None:
        """A step has ended."""
        self._start_ns, self._end_ns = step.start_ns, step.end_ns

    def interval(self) -> Interval:
        """Its start and end, in seconds since the epoch."""
        ahead_ns = time.time_ns() - time.monotonic_ns()
        return (self._start_ns + ahead_ns) / 1e9, (self._end_ns + ahead_ns) / 1e9


class LastRound:
    """When a pair in one process had its newest round: a listener of both models, like :class:`LastStep`."""

    def __init__(self) -> None:
        self._target = LastStep()
        self._drafting: list[Interval] = []
        self._drafts: tuple[Interval, ...] = ()

    def __call__(self, step: StepRecord) -> None:
        """A step of either has ended; the target's ends a round."""
        if step.role == "target":
            self._target(step)
            self._drafts, self._drafting = tuple(self._drafting), []
        else:
            if step.since_ns == step.start_ns:  # the first of a round: the round before may have failed
                self._drafting = []
            own = LastStep()
            own(step)
            self._drafting.append(own.interval())

    def interval(self) -> Interval:
        """Of the target's step, in seconds since the epoch."""
        return self._target.interval()

    def draft_intervals(self) -> tuple[Interval, ...]:
        """Of the draft model's steps before it."""
        return self._drafts


class StepMetrics:
    """What a worker's metrics say of its steps; a listener of :mod:`specdec.engine.observed`."""

    def __init__(self) -> None:
        self._timer = StepTimer()
        self._busy_s = self._gap_s = 0.0
        self._num_gaps = 0
        self._last_end_ns = 0
        self._num_decode_steps: Counter[tuple[int, int]] = Counter()
        self._decode_s: defaultdict[tuple[int, int], float] = defaultdict(float)

    def __call__(self, step: StepRecord) -> None:
        """A step has ended."""
        self._busy_s += step.duration_s
        if step.goes_on:
            self._gap_s += (step.start_ns - self._last_end_ns) / 1e9
            self._num_gaps += 1
        self._last_end_ns = step.end_ns
        if step.is_decode:
            duration_s = (step.end_ns - step.since_ns) / 1e9
            num_tokens = -(-step.num_tokens // step.num_passes)
            self._timer.add(step.num_rows, num_tokens, duration_s / step.num_passes)
            size = _power_of_two(step.num_rows), _power_of_two(step.num_tokens)
            self._num_decode_steps[size] += 1
            self._decode_s[size] += duration_s

    def profiled(self, step: StepRecord) -> None:
        """A step has ended that was made to see how long it takes: it counts as a step, but not as work."""
        if step.is_decode:
            self._timer.add(step.num_rows, step.num_tokens, step.duration_s)

    def metrics(self) -> dict[str, float]:
        """For the worker's metrics, by name.

        ``busy_s``: seconds in steps. ``gap_s`` and ``num_gaps``: seconds between steps of which the later goes on with
        a row of the earlier, and how often.
        ``step/<i>/...``: times of steps that read no prompt; see :meth:`StepTimer.metrics`.
        """
        gaps = {"gap_s": self._gap_s, "num_gaps": float(self._num_gaps)}
        return {"busy_s": self._busy_s, **gaps, **self._timer.metrics()}

    def step_counts(self) -> dict[str, float]:
        """Steps that read no prompt, for metrics: ``decode_steps/<rows>/<tokens>``, and the seconds they took.

        Rows and tokens are rounded up to powers of two, so that there are few series. To be called between steps.
        """
        counts = {f"decode_steps/{rows}/{tokens}": float(n) for (rows, tokens), n in self._num_decode_steps.items()}
        return counts | {f"decode_step_s/{rows}/{tokens}": s for (rows, tokens), s in self._decode_s.items()}


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


NUM_ROWS = (1, 2, 4, 8, 16, 32, 64)
DRAFT_LENGTHS = (0, 1, 2, 4, 8)
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
        listener: Called with each step.
        limit_s: Seconds after which no larger size is begun.
    """
    observed = ObservedTarget(backend, [listener])
    for keys in _sizes(backend.max_model_len, limit_s):
        logs = [TokenLog(_PROMPT) for _ in keys]
        for length in (0, *(length for length in DRAFT_LENGTHS for _ in range(NUM_STEPS))):
            draft = (1,) * length
            results = observed.verify(
                [
                    VerifyJob(key, log, draft, _spec(i), max_own_tokens=length)
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
    num_tokens = int(backend.metrics().get("num_step_tokens", 1))
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
