"""The workers that a router knows, and how many links it has to each."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from specdec.drafting.length.plans import WorkerKind
from specdec.protocol.affinity import BLOCK_TOKENS, CachedPrefixes, block_digests, choose
from specdec.protocol.sessions import RouterCounters, Session, WorkerLink

AFFINITY_SLACK = 2
"""Sequences."""


@dataclass(slots=True)
class Worker:
    """A worker as a router knows it.

    Attributes:
        report: Its newest counters.
        is_silent: Nothing was heard for too long; it gets no sequence until it is heard again.
        is_draining: It takes no sequences any more (rule 15).
        is_other_model: It has refused a sequence because its model is another (rule 14).
        asked_s: When it was sent a renewal that it has not answered yet.
        num_links: Links to it: its load.
        prefixes: What it was given to read.
    """

    kind: WorkerKind
    heard_s: float
    report: dict[str, float] = field(default_factory=dict)
    is_silent: bool = False
    is_draining: bool = False
    is_other_model: bool = False
    asked_s: float | None = None
    num_links: int = 0
    prefixes: CachedPrefixes = field(default_factory=CachedPrefixes)

    @property
    def takes_sequences(self) -> bool:
        """Whether sequences may be opened on it."""
        return not (self.is_silent or self.is_draining or self.is_other_model)


class WorkerPool:
    """Workers by name. Links are attached and detached here alone, so that loads need not be counted anew.

    Args:
        counters: Of the router: gets what placements found in targets' caches.

    Attributes:
        affinity_slack: A sequence goes where its prefix is cached unless that worker holds over so many more than the
            least loaded; below 0 it goes to the least loaded. It may be changed.
    """

    def __init__(self, counters: RouterCounters) -> None:
        self.affinity_slack = AFFINITY_SLACK
        self._counters = counters
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[tuple[str, Worker]]:
        return iter(list(self._workers.items()))

    def get(self, name: str | None) -> Worker | None:
        """A worker that can be reached."""
        return None if name is None else self._workers.get(name)

    def add(self, name: str, kind: WorkerKind, now_s: float) -> Worker:
        """A worker can be reached, or can be reached again: nothing is known of it."""
        worker = self._workers[name] = Worker(kind, now_s)
        return worker

    def remove(self, name: str) -> None:
        """A worker is gone; unknown ones are ignored."""
        self._workers.pop(name, None)

    def reports(self) -> dict[str, tuple[WorkerKind, dict[str, float]]]:
        """The newest counters of every worker that is heard, by its name."""
        return {name: (worker.kind, worker.report) for name, worker in self if not worker.is_silent}

    def _able(self, kind: WorkerKind, apart_from: Container[str] = ()) -> dict[str, Worker]:
        workers = self._workers.items()
        return {
            name: one for name, one in workers if one.kind == kind and one.takes_sequences and name not in apart_from
        }

    def least_loaded(self, kind: WorkerKind, apart_from: Container[str] = ()) -> str | None:
        """The worker of a kind with the fewest links; None where none takes sequences."""
        able = self._able(kind, apart_from)
        return min(able, key=lambda name: (able[name].num_links, name), default=None)

    def choose(self, kind: WorkerKind, session: Session) -> str | None:
        """The worker of a kind that a sequence is to be opened on; None where none takes sequences."""
        able = self._able(kind)
        if len(able) < 2:
            return next(iter(able), None)
        digests = _digests(session)
        loads = {name: worker.num_links for name, worker in able.items()}
        cached = {name: worker.prefixes.num_cached(digests) for name, worker in able.items()}
        name = choose(loads, cached, len(digests), self.affinity_slack)
        if kind == "target":
            self._counters.num_placements["some" if cached[name] else "none"] += 1
            self._counters.num_reusable_prompt_tokens += BLOCK_TOKENS * max(cached.values())
            self._counters.num_reused_prompt_tokens += BLOCK_TOKENS * cached[name]
        return name

    def is_replaced(self, kind: WorkerKind) -> bool:
        """Whether there are workers of a kind, and all of them are of another model."""
        found = [worker.is_other_model for worker in self._workers.values() if worker.kind == kind]
        return bool(found) and all(found)

    def attach(self, link: WorkerLink, name: str) -> None:
        """A sequence is to be opened on a worker."""
        link.worker = name
        self._workers[name].num_links += 1

    def has_read(self, session: Session) -> None:
        """A sequence ends that the workers of its links have read."""
        digests = _digests(session)
        for worker in map(self.get, (link.worker for link in session.links)):
            if worker is not None:  # also where it is the only one of its kind: another may come
                worker.prefixes.add(digests)

    def detach(self, link: WorkerLink) -> bool:
        """What is open on a link is so no more, and what comes next has a new n. Whether anything was."""
        worker = self.get(link.worker)
        if worker is not None:
            worker.num_links -= 1
        was_open = link.worker is not None
        if was_open:
            link.n += 1
        link.worker, link.is_replanned = None, False
        return was_open


def _digests(session: Session) -> list[int]:
    return block_digests(session.log, session.spec.prefix_group(session.spec.adapter))
