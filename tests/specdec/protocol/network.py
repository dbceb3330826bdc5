"""A network that loses, doubles, delays and reorders."""

from __future__ import annotations

import random
from collections import defaultdict, deque

from specdec.core.messages import Message, Open, Submit

Letter = tuple[str, Message]
Opening = tuple[str, Open | Submit]


class Network:
    """Messages by the step in which they arrive. An address outlives its process: the next life gets its mail."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.loss = rng.choice((0.0, 0.1, 0.3))
        self.doubling = rng.choice((0.0, 0.2, 0.4))
        self.delay = rng.choice((0.05, 0.2, 0.5))
        self.is_hostile = True
        self.num_messages = 0
        self.openings: defaultdict[str, list[Opening]] = defaultdict(list)
        self._last_words: defaultdict[str, deque[Letter]] = defaultdict(lambda: deque(maxlen=4))
        self._mail: defaultdict[int, list[Letter]] = defaultdict(list)

    def send(self, sender: str, peer: str, message: Message, now: int) -> None:
        copies = 1
        self._last_words[sender].append((peer, message))
        if isinstance(message, Open | Submit):
            self.openings[peer].append((peer, message))
        if self.is_hostile:
            x = self._rng.random()
            copies = 0 if x < self.loss else 2 if x < self.loss + self.doubling else 1
        for _ in range(copies):
            self.num_messages += 1
            self._mail[now + self._latency()].append((peer, message))

    def _latency(self) -> int:
        if self.is_hostile and self._rng.random() < self.delay:
            return self._rng.randint(2, self._rng.choice((4, 12, 60, 400)))
        return self._rng.randint(1, 2)

    def arrivals(self, now: int) -> list[Letter]:
        """What arrives in this step, in any order."""
        letters = self._mail.pop(now, [])
        self._rng.shuffle(letters)
        return letters

    def hold(self, peer: str, message: Message, until: int) -> None:
        """What cannot be taken in now."""
        self._mail[until].append((peer, message))

    def repeat_openings(self, peer: str, now: int) -> None:
        """The last of what has ever opened a sequence at an address comes once more."""
        latest = {letter[1].seq: letter for letter in self.openings[peer]}
        self._mail[now + 1] += list(latest.values()) if self._rng.random() < 0.7 else self.openings[peer][-4:]

    def repeat_last_words(self, sender: str, now: int) -> None:
        """What a process said last comes once more, when another may have its address already."""
        for letter in self._last_words[sender]:
            self._mail[now + self._rng.randint(1, 8)].append(letter)

    def repeat_all_openings(self, now: int) -> None:
        for letters in self.openings.values():
            self._mail[now + 1] += letters

    def calm_down(self, now: int) -> None:
        """From now on everything arrives, once; what is still on its way does so within 20 steps."""
        self.is_hostile = False
        late = [letter for letters in self._mail.values() for letter in letters]
        self._mail.clear()
        for letter in late:
            self._mail[now + self._rng.randint(1, 20)].append(letter)
