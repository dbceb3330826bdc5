"""What a drafter has drafted of a sequence: its chain, or a branch after another outcome."""

from __future__ import annotations

from specdec.protocol.backends import DraftJob, Proposal
from specdec.protocol.branches import Likelihoods
from specdec.protocol.messages import Candidates
from specdec.types import Tokens


class Path:
    """Draft tokens, with what is known of each.

    Attributes:
        tokens: The draft tokens.
        proposals: What the backend said of each of them.
    """

    __slots__ = ("proposals", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.proposals: list[Proposal] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, proposal: Proposal) -> None:
        """Add the token that a backend proposed."""
        assert proposal.token is not None, "only what was decided is drafted"
        self.tokens.append(proposal.token)
        self.proposals.append(proposal)

    def drop_first(self, count: int) -> None:
        """Forget the first ``count`` tokens: they are committed."""
        del self.tokens[:count], self.proposals[:count]

    def guesses(self, count: int) -> list[Tokens]:
        """For each of the first ``count``, other tokens that may well stand in its place, the likeliest first."""
        return [proposal.guesses for proposal in self.proposals[:count]]

    def siblings(self, count: int, most: int) -> tuple[Tokens, ...]:
        """The same for an offer: ``most`` at each place, at most."""
        return tuple(guesses[:most] for guesses in self.guesses(count))

    def likelihoods(self, count: int) -> list[Likelihoods]:
        """For each of the first ``count``, how likely it is and each of its guesses; empty where that is unknown."""
        return [proposal.likelihoods for proposal in self.proposals[:count]]

    def candidates(self, count: int | None = None) -> tuple[Candidates, ...]:
        """What each of the first ``count`` was drawn from, under the rejection rule; else nothing."""
        if not self.proposals or self.proposals[0].candidates is None:
            return ()
        drawn = (proposal.candidates for proposal in self.proposals[:count])
        return tuple(candidates for candidates in drawn if candidates is not None)


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
        job: What was asked of the backend last, where it would be asked the same again.
    """

    __slots__ = (
        *("is_begun", "is_waiting", "job", "key", "num_offered", "num_useful", "num_wanted", "path", "position"),
        *("token", "tokens"),
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
        self.job: DraftJob | None = None
