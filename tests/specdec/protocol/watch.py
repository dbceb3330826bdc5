"""What must hold in every step of a random schedule."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from specdec.core.drafts import OFFERS_KEPT
from specdec.core.messages import Ack, Cancel, Close, Epoch, Message, Notes, Offer, Open, Submit
from specdec.core.types import Finish, Tokens
from specdec.protocol.draft_sequence import DraftSequence
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import MODEL_REPLACED, IngressMachine, TokenDelta
from specdec.protocol.leases import LeasedSequence, Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.sessions import Session, WorkerLink
from specdec.protocol.target import TargetMachine
from specdec.protocol.target_sequence import TargetSequence
from tests.letters import spelled
from tests.specdec.protocol.scripted import PROMPT, Script, ScriptedDraft, ScriptedTarget, expect

Machine = IngressMachine | RouterMachine | TargetMachine | DrafterMachine
NEVER = Epoch(-1, 0), 0.0
LAG = 40
"""Steps within which a drafter has heard of a token, once nothing is lost."""


@dataclass
class Node:
    """A process: a life of an address."""

    name: str
    life: int
    machine: Machine
    backends: tuple[ScriptedTarget | ScriptedDraft, ...] = ()
    stalled_until: int = 0
    model: str = "this model"
    at_drain: set[tuple[str, Epoch]] = field(default_factory=set)

    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new."""
        return self.machine.is_draining

    @property
    def sequences(self) -> list[LeasedSequence]:
        """What it holds for others."""
        match self.machine:
            case RouterMachine():
                return list(self.machine._sessions)
            case IngressMachine():
                return []
            case _:
                return list(self.machine._sequences)


@dataclass
class Client:
    """What the client of a request has seen."""

    tokens: list[int] = field(default_factory=list)
    notes: Notes = Notes()  # noqa: RUF009 - immutable
    state: str = "live"
    finish: Finish | None = None


class Watch:
    """Follows all processes from outside, and raises ViolationError at the first broken promise."""

    def __init__(
        self,
        scripts: dict[str, Script],
        times: Times,
        *,
        repeats: bool,
        most_branches: int,
    ) -> None:
        self._scripts, self._times, self._repeats = scripts, times, repeats
        self._most_branches = most_branches
        self.clients: dict[str, Client] = {}
        self.num_opens: Counter[str] = Counter()
        self.num_draft_opens: Counter[str] = Counter()
        self.num_alone: Counter[str] = Counter()
        self._graves: dict[tuple[str, int, str], tuple[Epoch, float]] = {}
        self._held: defaultdict[tuple[str, int], dict[str, Epoch]] = defaultdict(dict)
        self._logs: dict[tuple[object, ...], Tokens] = {}
        self._granted: dict[tuple[str, Epoch], int] = {}
        self._committed: defaultdict[str, set[Tokens]] = defaultdict(set)
        self._offers: set[tuple[object, ...]] = set()
        self._opened: dict[tuple[int, str, str], Epoch] = {}
        self._lengths: defaultdict[tuple[str, str, Epoch], list[int]] = defaultdict(list)

    def follow(self, router: RouterMachine) -> None:
        """Count who was alone in quarantine, or alone at all, on a worker that a router loses."""
        lose = router.worker_lost

        def count_and_lose(name: str, now_s: float) -> None:
            there = [s for s in router._sessions if s.finish is None and s.target.worker == name]
            tried = [s for s in there if s.suspects is not None]
            for alone in (there, tried):
                if len(alone) == 1:
                    self.num_alone[alone[0].seq] += 1
                    break
            lose(name, now_s)

        send = router._dispatcher.send

        def check_and_send(link: WorkerLink, message: Message) -> None:
            session = router._sessions.get(message.seq) if isinstance(message, Offer) else None
            if session is not None and isinstance(message, Offer):
                made = message.seq, session.link_epoch(session.drafter), *_content(message)
                expect(made in self._offers, "an offer of a drafter that has not made it, or not for this opening")
            if isinstance(message, Open):
                self._opened[id(router), message.seq, link.kind] = message.epoch
            send(link, message)

        router.worker_lost = count_and_lose  # type: ignore[method-assign]
        router._dispatcher.send = check_and_send  # type: ignore[method-assign]

    def drains(self, node: Node) -> None:
        """A process begins to drain: what it holds now is all that it may hold from now on."""
        if not node.is_draining:
            node.at_drain = {(sequence.seq, sequence.epoch) for sequence in node.sequences}

    def sent(self, sender: str, peer: str, message: Message, *, is_hostile: bool) -> None:
        """A process has sent a message; whether or not it arrives, it may have given credit."""
        match message:
            case Offer(seq, epoch) if sender.startswith("D"):
                self._offers.add((seq, epoch, *_content(message)))
            case Open(seq, epoch) if peer.startswith("T"):
                self._grant(seq, epoch, len(message.prompt) + len(message.output))
                self.num_opens[seq] += not is_hostile
            case Submit(seq):
                self.num_opens[seq] += not is_hostile
            case Open(seq):
                self.num_draft_opens[seq] += not is_hostile
            case Ack(seq, epoch, length):
                self._grant(seq, epoch, length)

    def _grant(self, seq: str, epoch: Epoch, length: int) -> None:
        self._granted[seq, epoch] = max(length, self._granted.get((seq, epoch), 0))

    def followed(self, nodes: Mapping[str, Node], now: int) -> None:
        """Nothing is lost any more: who drafts for a sequence has all that was committed a while ago."""
        for node in nodes.values():
            for session in node.machine._sessions if isinstance(node.machine, RouterMachine) else ():
                lengths = self._lengths[node.name, session.seq, session.epoch]
                lengths.append(len(session.log))
                for link in session.links[1:] if len(lengths) > LAG else ():
                    machine = None if link.worker is None else nodes[link.worker].machine
                    if not isinstance(machine, DrafterMachine) or now - link.opened_s < LAG:
                        continue
                    held = machine._sequences.current(session.seq, session.link_epoch(link))
                    is_behind = held is not None and len(held.log) < lengths[-1 - LAG]
                    expect(not is_behind, "a drafter does not hear of what is committed")

    def received(self, node: Node, message: Message, now: int) -> None:
        """A process has taken in a message."""
        self.moved(node, now)
        if isinstance(message, Close | Cancel):
            epoch = Epoch(message.attempt, 0) if isinstance(message, Cancel) else message.epoch
            if message.seq not in self._held[node.name, node.life]:
                self._bury(node, message.seq, epoch, now)

    def moved(self, node: Node, now: int) -> None:
        """A process has taken in a message, or has made a step."""
        sequences, held = node.sequences, self._held[node.name, node.life]
        if not (sequences or held or any(backend.held for backend in node.backends)):
            return
        epochs = {sequence.seq: sequence.epoch for sequence in sequences}
        for seq, epoch in held.items():
            if seq not in epochs:
                self._bury(node, seq, epoch, now)
        self._held[node.name, node.life] = epochs
        for sequence in sequences:
            expect(node.model == "this model" or isinstance(sequence, DraftSequence), "a sequence of another model")
            is_new = node.is_draining and (sequence.seq, sequence.epoch) not in node.at_drain
            expect(not is_new, "a process that drains took a sequence")
            epoch, until = self._grave(node, sequence.seq)
            expect(sequence.epoch > epoch or now > until, "a closed sequence came back")
            if isinstance(sequence, TargetSequence):
                self._check_target_sequence(node, sequence, until)
            elif isinstance(sequence, Session):
                self._check_session(node, sequence)
            elif isinstance(sequence, DraftSequence):
                expect(len(sequence.branches) <= self._most_branches, "more branches than any plan allows")
                self._check_draft_sequence(sequence)
        known = epochs.keys() | {
            b.key for sequence in sequences if isinstance(sequence, DraftSequence) for b in sequence.branches.values()
        }
        for backend in node.backends:
            expect(known >= set(backend.held), "a backend holds a sequence or branch that its machine does not")

    @staticmethod
    def _check_draft_sequence(sequence: DraftSequence) -> None:
        expect(
            list(sequence.tokens) == [*sequence.log.tail(0), *sequence.path.tokens], "a chain does not continue its log"
        )
        for branch in sequence.branches.values():
            if branch.tokens is not None:
                whole = [*sequence.tokens[: branch.position], branch.token, *branch.path.tokens]
                expect(branch.tokens == whole, "a branch does not continue its sequence")

    def _grave(self, node: Node, seq: str) -> tuple[Epoch, float]:
        return self._graves.get((node.name, node.life, seq), NEVER)

    def _bury(self, node: Node, seq: str, epoch: Epoch, now: int) -> None:
        buried, until = self._grave(node, seq)
        if epoch >= buried or now > until:
            self._graves[node.name, node.life, seq] = epoch, now + self._times.tombstone_s

    def _check_target_sequence(self, node: Node, sequence: TargetSequence, grave: float) -> None:
        key, log, script = (
            (node.name, node.life, sequence.seq, sequence.epoch, grave),
            sequence.log.tail(0),
            self._scripts[sequence.seq],
        )
        expect(len(sequence.offers) <= OFFERS_KEPT, "more offers than are kept")
        seen = self._logs.get(key, ())
        if log == seen:
            return
        expect(log[: len(seen)] == seen, "the target undid a token")
        ends = [n for n in range(len(PROMPT), len(log) + 1) if script.finish(log[:n]) is not None]
        expect(ends in ([], [len(log)]), "committed after finish")
        excess = len(log) - self._granted[sequence.seq, sequence.epoch]
        expect(excess <= self._times.max_unacked_tokens, "more than the credit past the last acknowledgement")
        self._logs[key] = log
        self._committed[sequence.seq].add(log)

    def _check_session(self, node: Node, session: Session) -> None:
        for link in session.links:
            opened = self._opened.get((id(node.machine), session.seq, link.kind))
            is_opened = link.worker is None or session.link_epoch(link) == opened
            expect(is_opened, "a worker has a sequence under another epoch than it was opened there")
        key, log = (node.name, node.life, session.seq, session.epoch), session.log.tail(0)
        if log != self._logs.get(key, PROMPT):
            expect(log in self._committed[session.seq], "the log of record is no prefix of one log")
            self._logs[key] = log

    def delivered(self, deliveries: Iterable[TokenDelta]) -> None:
        """The ingress has handed tokens to clients."""
        for delivery in deliveries:
            client, script = self.clients[delivery.seq], self._scripts[delivery.seq]
            expect(client.state == "live", "something was delivered after the end")
            client.tokens += delivery.tokens
            client.notes += delivery.notes
            log = (*PROMPT, *client.tokens)
            committed = self._committed[delivery.seq]
            expect(log == PROMPT or log in committed, "the client's tokens are no prefix of one log")
            if self._repeats:
                expect(tuple(client.tokens) == script.true[: len(client.tokens)], "not the true sequence")
            if delivery.finish is not None:
                client.state, client.finish = "finished", delivery.finish
                if client.finish == "error":
                    self._check_error(script, log, delivery.reason)
                else:
                    expect(script.finish(log) == client.finish, "ended with tokens missing, or for a wrong reason")
            check_notes(client, script)

    def _check_error(self, script: Script, log: Tokens, reason: str) -> None:
        """Only who is at fault ends with an error, or who failed alone twice."""
        expect(bool(reason), "an error without a reason")
        if reason != MODEL_REPLACED:  # that may come after all tokens, where only the word of the end was lost
            expect(script.finish(log) is None, "an error after the end")
            is_at_fault = script.poisons(log) != "" or self.num_alone[script.seq] >= 2
            expect(is_at_fault, "an error of another sequence")


def _content(offer: Offer) -> tuple[object, ...]:
    return offer.prefix_hash, offer.chain, offer.branches


KINDS = dict(zip("acbspACBxyz", "acbapacbacb", strict=True))


def source_of(letter: str) -> int:
    """A number for where a round's draft was from."""
    return next(i for i, letters in enumerate(("acbs", "ACB", "xyz", "p")) if letter in letters)


def check_notes(client: Client, script: Script) -> None:
    """Notes name each token, and are made of rounds: accepted ones, then a corrected, bonus or plain one.

    A round may lack its first tokens, where its position had been decided by another life of the target before.
    """
    notes, accepted = client.notes, 0
    expect(len(spelled(notes)) == len(notes.num_drafted) == len(client.tokens), "notes are not one for each token")
    for i, (letter, num_drafted) in enumerate(zip(spelled(notes), notes.num_drafted, strict=True)):
        kind = KINDS[letter]
        accepted += kind == "a"
        if kind == "a" and not num_drafted:
            expect(i + 1 < len(spelled(notes)), "a round without an end")
            expect(source_of(spelled(notes)[i + 1]) == source_of(letter), "a round whose draft is from two sources")
            continue
        fits = {"a": accepted <= num_drafted, "b": accepted <= num_drafted, "c": accepted < num_drafted}
        expect(fits.get(kind, kind == "p" and num_drafted == accepted == 0), "a round that cannot be")
        accepted = 0
    if script.spec.sampling.logprobs is None:
        expect(not notes.logprobs, "log probabilities that nobody asked for")
    else:
        told = [(-entry.logprob, entry.rank) for entry in notes.logprobs or ()]
        expect(told == [(token, i + 1) for i, token in enumerate(client.tokens)], "log probabilities of other tokens")
