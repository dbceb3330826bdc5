"""What writes an answer down, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from deployments.openai.errors import ApiError
from deployments.openai.generation import Generation, SampleDelta
from deployments.openai.messages import Json


class Event(NamedTuple):
    """One event of a stream.

    Attributes:
        name: What stands in its ``event`` line; empty where it has none.
    """

    data: Json
    name: str = ""


class Writer(Protocol):
    """Writes one answer: as one body, or as the events of a stream."""

    @property
    def end_mark(self) -> bytes:
        """What a stream that did not fail ends with, after its last event."""
        ...

    def whole(self, choices: Sequence[SampleDelta], generation: Generation) -> Json:
        """A whole answer; of each choice there is all."""
        ...

    def opening(self, generation: Generation) -> Sequence[Event]:
        """What a stream begins with, before any token."""
        ...

    def news(self, delta: SampleDelta, generation: Generation, num_sent: int) -> Sequence[Event]:
        """What is new in a choice.

        Args:
            delta: It.
            generation: Of all choices.
            num_sent: Output tokens that were sent up to these events, theirs included.
        """
        ...

    async def settle(self, generation: Generation) -> str:
        """Do what must be done before a client knows that the answer has ended.

        A whole answer was written before, a stream's end was not. Returns a warning for the client; empty for none.
        """
        ...

    def closing(self, generation: Generation) -> Sequence[Event]:
        """What a stream ends with, when all choices have ended."""
        ...

    def failed(self, error: ApiError) -> Sequence[Event]:
        """What a stream ends with that cannot go on."""
        ...
