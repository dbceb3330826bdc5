"""What a drafter has drafted of a sequence: its chain, or a branch after another outcome."""

from __future__ import annotations

from specdec.protocol.backends import Proposal
from specdec.protocol.branches import Likelihoods
from specdec.protocol.marks import Tokens
from specdec.protocol.messages import Candidates


class Path:
    """Draft tokens, with what is known of each.

    Attributes:
        tokens: The draft tokens.
        candidates: What each of them was drawn from, under the rejection rule; else empty.
        guesses: For each of them, other tokens that may well stand in its place, the likeliest first.
        likelihoods: For each of them, how likely it is and each of its guesses; empty where that is unknown.
    """

    __slots__ = ("candidates", "guesses", "likelihoods", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.candidates: list[Candidates] = []
        self.guesses: list[Tokens] = []
        self.likelihoods: list[Likelihoods] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, proposal: Proposal) -> None:
        """Add the token that a backend proposed."""
        assert proposal.token is not None, "only what was decided is drafted"
        self.tokens.append(proposal.token)
        self.guesses.append(proposal.guesses)
        self.likelihoods.append(proposal.likelihoods)
        if proposal.candidates is not None:
            self.candidates.append(proposal.candidates)

    def drop_first(self, count: int) -> None:
        """Forget the first ``count`` tokens: they are committed."""
        del self.tokens[:count], self.candidates[:count], self.guesses[:count], self.likelihoods[:count]


class Branch:
    """A chain after an outcome that the target may yet come to.

    Attributes:
        key: Under which the backend holds its state.
        position: Absolute position of the outcome's token: the draft tokens before it are accepted.
        token: The outcome's token.
        path: What would follow it.
        num_wanted: Tokens of ``path`` that make its draft.
        num_useful: One more, where the token after the draft is of use.
        num_offered: Tokens of ``path`` that the target was told of.
        is_begun: Whether the backend was ever asked for it.
        is_waiting: Whether it found no room when it was asked last.
        tokens: All of its sequence, from the log's first token on; empty until it is first asked for.
    """

    __slots__ = (
        *("is_begun", "is_waiting", "key", "num_offered", "num_useful", "num_wanted", "path", "position", "token"),
        "tokens",
    )

    def __init__(self, key: str, position: int, token: int) -> None:
        self.key = key
        self.position = position
        self.token = token
        self.path = Path()
        self.num_wanted = self.num_useful = self.num_offered = 0
        self.is_begun = False
        self.is_waiting = False
        self.tokens: list[int] = []

    def append(self, proposal: Proposal) -> None:
        """Add the token that a backend proposed."""
        assert proposal.token is not None, "only what was decided is drafted"
        self.path.append(proposal)
        self.tokens.append(proposal.token)
