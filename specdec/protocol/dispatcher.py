"""Which worker has which sequence: placed where its prefix is cached, opened, closed, and what follows a death."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from specdec.core.log import TokenLog
from specdec.core.messages import DRAFTER, Close, Message, Open
from specdec.core.types import Fingerprints
from specdec.drafting.plans import WorkerKind
from specdec.protocol.leases import Outbox, label, labels
from specdec.protocol.sessions import Quarantine, RouterCounters, Session, WorkerLink

BLOCK_TOKENS = 32
"""Prefixes are distinguished at each multiple of this. Workers' cache blocks may have another size."""
MOST_BLOCKS = 1 << 16
"""That many of a worker are remembered. Whether it still has them only it knows: a wrong guess costs time alone."""
MOST_COMPARED = 1 << 10
"""So many blocks of a sequence are looked at, its first: a longer prompt goes where these are."""
ROUTER_BLOCKS = (8, 1)
"""By so many first blocks of a prompt its router is chosen: by as many as it has of these."""
LEAST_SHARE = 0.5
"""Less of a prompt than this is not worth a worker that is not the least loaded."""


def block_digests(log: TokenLog, salt: str) -> list[int]:
    """A digest of each prefix of whole blocks, the shortest first; prefixes are shared only under the same salt."""
    count = min(len(log) // BLOCK_TOKENS, MOST_COMPARED)
    digests = log.prompt.block_digests(BLOCK_TOKENS, MOST_COMPARED)[:count]  # once for all samples of a prompt
    digests += [log.prefix_hash(BLOCK_TOKENS * number).digest for number in range(len(digests) + 1, count + 1)]
    own = hash(salt)
    return [digest ^ own for digest in digests]


class CachedPrefixes:
    """Prefixes that a worker has read, as far as its router knows; those used longest ago are forgotten first.

    Args:
        most_blocks: That are remembered.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._newest: tuple[int, int] | None = None

    def add(self, digests: Sequence[int]) -> None:
        """A sequence with these prefixes was given to the worker."""
        newest = (len(digests), digests[-1]) if digests else None
        if newest == self._newest:  # the samples of a prompt end one after the other
            return
        self._newest = newest
        for digest in reversed(digests):  # of a prefix its end is forgotten first: without its beginning it is no use
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)

    def num_cached(self, digests: Sequence[int]) -> int:
        """How many of these blocks, from the first on, were given to it before."""
        count = 0
        while count < len(digests) and digests[count] in self._blocks:
            count += 1
        return count


def choose(loads: Mapping[str, int], num_cached: Mapping[str, int], num_blocks: int, slack: int) -> str:
    """The worker with most of a prompt among those that hold at most ``slack`` sequences more than the least loaded.

    One that has less than half of the prompt has nothing of it, for this. Of several with as much the least loaded is
    chosen, and of these the first by name.

    Args:
        loads: Sequences by worker; at least one worker.
        num_cached: Blocks of the prompt by worker.
        num_blocks: Of the prompt.
        slack: Below 0 nobody looks at what is cached.
    """
    if slack < 0:
        return min(loads, key=lambda name: (loads[name], name))
    most, least_cached = min(loads.values()) + slack, max(1, LEAST_SHARE * num_blocks)
    able = [name for name, load in loads.items() if load <= most]
    worth = {name: count if (count := num_cached.get(name, 0)) >= least_cached else 0 for name in able}
    return min(able, key=lambda name: (-worth[name], loads[name], name))


def choose_router(loads: Mapping[str, int], log: TokenLog, salt: str, seq: str, slack: int) -> str:
    """The router for a sequence: the same for prompts that begin alike, as it knows what it gave its workers to read.

    All ingresses choose alike. A router with over ``slack`` sequences more of an ingress than another is left out.

    Args:
        loads: Sequences of this ingress by router; at least one router.
        log: The sequence's.
        salt: Prefixes are shared only under the same.
        seq: Its name, by which a prompt is placed that has not even a block.
        slack: At least 0.
    """
    if len(loads) == 1:
        return next(iter(loads))
    lengths = (BLOCK_TOKENS * count for count in ROUTER_BLOCKS)
    key = next((str(log.prefix_hash(length).digest) for length in lengths if length <= len(log)), seq)
    most = min(loads.values()) + slack
    able = [name for name, load in loads.items() if load <= most]
    return max(able, key=lambda name: (crc32(f"{salt}/{key}/{name}".encode()), name))


AFFINITY_SLACK = 2
"""Sequences."""


@dataclass(slots=True)
class Worker:
    """A worker as a router knows it.

    Attributes:
        metrics: Its newest ones.
        is_draining: It takes no sequences any more (rule 15).
        is_other_model: It has refused a sequence because its model is another (rule 14).
        numeric: The hash of its logits that its heartbeats name (rule 17); empty before the first.
        num_links: Links to it: its load.
        prefixes: What it was given to read.
    """

    kind: WorkerKind
    metrics: dict[str, float] = field(default_factory=dict)
    is_draining: bool = False
    is_other_model: bool = False
    numeric: str = ""
    num_links: int = 0
    prefixes: CachedPrefixes = field(default_factory=CachedPrefixes)

    @property
    def takes_sequences(self) -> bool:
        """Whether sequences may be opened on it."""
        return not (self.is_draining or self.is_other_model)


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

    def add(self, name: str, kind: WorkerKind) -> Worker:
        """A worker can be reached, or can be reached again: nothing is known of it."""
        worker = self._workers[name] = Worker(kind)
        return worker

    def remove(self, name: str) -> None:
        """A worker is gone; unknown ones are ignored."""
        self._workers.pop(name, None)

    def worker_metrics(self) -> dict[str, tuple[WorkerKind, dict[str, float]]]:
        """The newest counters of every worker, by its name."""
        return {name: (worker.kind, worker.metrics) for name, worker in self}

    def _able(self, kind: WorkerKind, apart_from: Container[str] = ()) -> dict[str, Worker]:
        workers = self._workers.items()
        return {
            name: one for name, one in workers if one.kind == kind and one.takes_sequences and name not in apart_from
        }

    def with_bits(self, numeric: str) -> dict[str, Worker]:
        """Targets that take sequences, and have named this hash of their logits."""
        return {name: one for name, one in self._able("target").items() if one.numeric == numeric}

    def least_loaded(self, kind: WorkerKind, apart_from: Container[str] = ()) -> str | None:
        """The worker of a kind with the fewest links; None where none takes sequences."""
        able = self._able(kind, apart_from)
        return min(able, key=lambda name: (able[name].num_links, name), default=None)

    def choose(self, kind: WorkerKind, session: Session, numeric: str = "") -> str | None:
        """The worker of a kind that a sequence is to be opened on; None where none takes sequences.

        Args:
            kind: Of the worker.
            session: The sequence.
            numeric: The hash that it keeps to: a target that has named it goes first. Empty for none.
        """
        able = self.with_bits(numeric) if numeric else {}
        able = able or self._able(kind, session.refused_by)
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

    def is_replaced(self, kind: WorkerKind, refused_by: Container[str] = ()) -> bool:
        """Whether there are workers of a kind that stay, and all of them are of another model, or have refused."""
        staying = [(name, one) for name, one in self._workers.items() if one.kind == kind and not one.is_draining]
        found = [one.is_other_model or name in refused_by for name, one in staying]
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


logger = logging.getLogger(__name__)


class Dispatcher:
    """A router's links to its workers.

    Args:
        router: Its name.
        outbox: Where messages for workers are put.
        counters: Of the router.
        quarantine: Its suspects.
        lease_s: For which sequences are opened.
        fingerprints: Of the models that workers must have (rule 14).

    Attributes:
        workers: Those that can be reached.
        lease_s: As given; it may be changed.
    """

    def __init__(
        self,
        router: str,
        outbox: Outbox,
        counters: RouterCounters,
        quarantine: Quarantine,
        lease_s: float,
        fingerprints: Fingerprints,
    ) -> None:
        self._router = router
        self._outbox = outbox
        self._counters = counters
        self._quarantine = quarantine
        self.lease_s = lease_s
        self._fingerprints = fingerprints
        self.workers = WorkerPool(counters)

    def place(self, session: Session, link: WorkerLink, now_s: float) -> None:
        """Open a session on a worker of a kind, under a new n if it was open before.

        It goes where most of it is cached, if that worker is not too loaded, else to the least loaded.
        """
        self._counters.num_reopened += self.workers.detach(link)
        name = self.workers.choose(link.kind, session, _numeric(session, link))
        if name is not None:
            self.workers.attach(link, name)
            self.open(session, link, now_s)

    def place_missing(self, session: Session, link: WorkerLink, now_s: float) -> None:
        """Open a session where it is not, unless it waits for its group's turn."""
        if link.worker is None and not _is_suspected(session, link):
            self.place(session, link, now_s)

    def reopen(self, session: Session, link: WorkerLink, why: str, now_s: float) -> None:
        """Open a session anew where it is."""
        logger.info("The sequence %s is opened again on %s: %s", label(session), link.worker, why)
        self._counters.num_reopened += 1
        link.n += 1
        link.is_replanned = False
        self.open(session, link, now_s)

    def refused(self, session: Session, link: WorkerLink, why: str, now_s: float) -> None:
        """A worker takes this session neither now nor later; one of a group goes elsewhere with its group."""
        logger.info("The sequence %s was refused by %s: %s", label(session), link.worker, why)
        group = session.suspects
        if group is None or not _is_suspected(session, link):
            self.place(session, link, now_s)
            return
        for member in group.members:
            self.workers.detach(member.target)
        self._quarantine.put_back(group)

    def open(self, session: Session, link: WorkerLink, now_s: float) -> None:
        """Tell a session's worker the whole of it."""
        link.opened_s = now_s
        link.length = link.sent = len(session.log)
        if session.span is not None:
            session.span.add(**{f"num_{'target' if link.kind == 'target' else 'drafter'}_openings": 1})
        fingerprints, is_deciding = self._fingerprints, link is session.target
        group = session.suspects if is_deciding else None
        message = Open(
            session.seq,
            session.link_epoch(link),
            self._router,
            session.log.prompt,
            session.spec,
            session.plan,
            self.lease_s,
            fingerprint=fingerprints.decision if is_deciding else fingerprints.vocabulary,
            suspects="" if group is None else group.name,
            output=session.log.tail(len(session.log.prompt)),
            numeric=_numeric(session, link),
        )
        self.send(link, message)

    def close(self, session: Session, link: WorkerLink) -> None:
        """Close what is open on a link; the tombstone there keeps out what is not newer."""
        self.send(link, Close(session.seq, session.link_epoch(link)))
        self.workers.detach(link)

    def close_all(self, session: Session) -> None:
        """Close what is open of a session."""
        session.end_span()
        self._quarantine.leave(session)
        has_output = len(session.log) > session.spec.output_start
        if has_output and session.finish != "error":
            self.workers.has_read(session)
        for link in session.links:
            self.close(session, link)

    def send(self, link: WorkerLink, message: Message) -> None:
        """Send a message to a link's worker, if there is one."""
        if link.worker is not None:
            self._outbox.put(link.worker, message)

    # Workers that die, and workers that drain.

    def lose(self, name: str, sessions: Iterable[Session], now_s: float, *, is_only_one: bool) -> list[Session]:
        """A worker is dead, or as good as that: what it decided is suspected, what it drafted is opened elsewhere.

        Args:
            name: Of the worker.
            sessions: Of the router.
            now_s: The time.
            is_only_one: Whether the worker had said that it holds no more than one sequence.

        Returns:
            Sessions that are at fault, and must end.
        """
        decided: list[Session] = []
        for session in sessions:
            for link in session.links:
                if link.worker == name and link is session.target:
                    decided.append(session)
                elif link.worker == name:
                    self.place(session, link, now_s)
        for session in decided:
            self.workers.detach(session.target)
        if decided:
            logger.warning("Lost the worker %s; opening its sequences elsewhere: %s", name, labels(decided))
        at_fault = self._quarantine.failed(name, decided, is_only_one=is_only_one)
        self._counters.num_suspects += len(decided) - len(at_fault)
        return at_fault

    def try_suspects(self, now_s: float) -> None:
        """Open a group of suspects on each worker that has none, the least loaded first."""
        for kind in ("target", DRAFTER) if self._quarantine.is_waiting else ():
            without = set(self._quarantine.taken)
            while (name := self.workers.least_loaded(kind, without)) is not None:
                without.add(name)
                group = self._quarantine.next_for(name, kind)
                if group is None:
                    continue
                self._counters.num_reopened += len(group.members)
                for session in group.members:
                    self.workers.attach(session.target, name)
                    self.open(session, session.target, now_s)

    def hand_over(self, sessions: Iterable[Session], now_s: float) -> None:
        """Take from workers that drain what another of their kind can go on with; suspects first take their step.

        A strict sequence stays until another target is known to have the same bits (rule 17).
        """
        draining = {
            name
            for name, worker in self.workers
            if worker.is_draining and worker.num_links and self.workers.least_loaded(worker.kind) is not None
        }
        for session in sessions if draining else ():
            for link in session.links:
                if link.worker not in draining or _is_suspected(session, link):
                    continue
                numeric = _numeric(session, link)
                if not numeric or self.workers.with_bits(numeric):
                    self._counters.num_handed_over += 1
                    self.close(session, link)
                    self.place(session, link, now_s)


def _numeric(session: Session, link: WorkerLink) -> str:
    """Return the hash of logits that a link's worker must have; empty if any worker will do."""
    return session.numeric if link is session.target else ""


def _is_suspected(session: Session, link: WorkerLink) -> bool:
    """Whether a link waits for its group's turn, or is in quarantine with it."""
    return link is session.target and session.suspects is not None
