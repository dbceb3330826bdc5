"""Rule 18, of several drafters, switched off clause by clause in the real machines; see ``mutations.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from msgspec.structs import replace

from specdec.core.drafts import OFFERS_KEPT, Draft, remaining_draft
from specdec.core.messages import Epoch, Offer, Open
from specdec.protocol import target
from specdec.protocol.draft_sequence import DraftSequence
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.router import RouterMachine
from specdec.protocol.sessions import Session, WorkerLink
from specdec.protocol.target import TargetMachine
from specdec.protocol.target_sequence import KeptOffer, TargetSequence
from tests.specdec.protocol.mutations import Mutation

DRAFTER_MUTATIONS: dict[str, Mutation] = {}


def mutation(mutate: Mutation) -> Mutation:
    DRAFTER_MUTATIONS[mutate.__name__] = mutate
    return mutate


@mutation
def named_offers(patch: pytest.MonkeyPatch) -> None:
    """An offer names its drafter. Off: it is the first one's whose opening fits."""
    on_offer = RouterMachine._on_offer

    def take_as_any(self: RouterMachine, message: Offer) -> None:
        session = self._sessions.get(message.seq)
        if session is not None:
            fitting = [link.kind for link in session.drafting if session.link_epoch(link) == message.epoch]
            message = replace(message, drafter=next(iter(fitting), message.drafter))
        on_offer(self, message)

    patch.setattr(RouterMachine, "_on_offer", take_as_any)


@mutation
def own_incarnations(patch: pytest.MonkeyPatch) -> None:
    """A drafter's incarnations are counted by themselves. Off: with those of all others."""

    def link_epoch(self: Session, link: WorkerLink) -> Epoch:
        links = [link] if link is self.target else self.drafters.values()
        return Epoch(self.epoch.attempt, sum(one.n for one in links))

    patch.setattr(Session, "link_epoch", link_epoch)


@mutation
def commits_to_all(patch: pytest.MonkeyPatch) -> None:
    """What is committed goes to every drafter. Off: to the first."""
    commit = RouterMachine._commit

    def tell_first(self: RouterMachine, session: Session, link: WorkerLink, base: int) -> None:
        if link is session.drafting[0]:
            commit(self, session, link, base)

    patch.setattr(RouterMachine, "_commit", tell_first)


@mutation
def own_mark(patch: pytest.MonkeyPatch) -> None:
    """An offer is judged by its drafter's mark. Off: by the newest of another drafter."""

    def rest(self: TargetMachine, sequence: TargetSequence, offer: Offer) -> Draft:
        marks = (kept.offer.prefix_hash for kept in reversed(sequence.offers) if kept.offer.drafter != offer.drafter)
        offer = replace(offer, prefix_hash=next(marks, offer.prefix_hash))
        return remaining_draft(offer, sequence.log)

    patch.setattr(TargetMachine, "_rest", rest)


@mutation
def merged_as_a_trie(patch: pytest.MonkeyPatch) -> None:
    """Chains of one base branch where they differ. Off: one follows the other."""

    def one_after_another(chains: Sequence[Draft]) -> tuple[Draft, list[int]]:
        most = max(len(chain.tokens) for chain in chains)
        tokens = tuple(token for chain in chains for token in chain.tokens)[:most]
        return Draft(tokens, chains[0].source), [len(chain.tokens) for chain in chains]

    patch.setattr(target, "merge", one_after_another)


@mutation
def order_of_merging(patch: pytest.MonkeyPatch) -> None:
    """No draft token decides the order in which chains are merged. Off: it is that of their tokens."""

    def by_tokens(self: TargetMachine, sequence: TargetSequence, drafters: Mapping[str, Any]) -> list[str]:
        return sorted(drafters, key=lambda name: drafters[name][0].tokens)

    patch.setattr(TargetMachine, "_ranked", by_tokens)


@mutation
def own_room(patch: pytest.MonkeyPatch) -> None:
    """A drafter's offers take its own room alone. Off: those of all share it, and who says most has it."""

    def superfluous(self: TargetSequence, drafter: str) -> KeptOffer | None:
        return self.offers[0] if len(self.offers) > OFFERS_KEPT else None

    patch.setattr(TargetSequence, "superfluous", superfluous)


@mutation
def lost_with_its_offers(patch: pytest.MonkeyPatch) -> None:
    """Nothing is taken from a drafter that was given up, though it may live on. Off: its offers are the next one's."""
    on_offer = RouterMachine._on_offer

    def take_old(self: RouterMachine, message: Offer) -> None:
        session = self._sessions.get(message.seq)
        if session is not None and message.drafter in session.drafters:
            message = replace(message, epoch=session.link_epoch(session.drafters[message.drafter]))
        on_offer(self, message)

    patch.setattr(RouterMachine, "_on_offer", take_old)


@mutation
def named_by_each_router(patch: pytest.MonkeyPatch) -> None:
    """A pool's drafters draft under the name that each router gives them. Off: under the first that they were given."""
    begin = DrafterMachine._new_sequence
    names: WeakKeyDictionary[DrafterMachine, str] = WeakKeyDictionary()

    def begin_under_the_first(self: DrafterMachine, message: Open, now_s: float) -> DraftSequence:
        return begin(self, replace(message, drafter=names.setdefault(self, message.drafter)), now_s)

    patch.setattr(DrafterMachine, "_new_sequence", begin_under_the_first)
