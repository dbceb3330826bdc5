"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from deployments.http.schemas.common import GenerationBody
from deployments.http.schemas.fields import REFUSED, REFUSED_IN_COMPLETIONS, TAKEN, TAKEN_IN_COMPLETIONS, Prompts
from specdec.core.errors import InvalidParameterError


class CompletionBody(GenerationBody):
    """A text to go on with.

    Attributes:
        prompt: Text, token ids, or a list of either.
        echo: Begin the answer with the prompt.
        logprobs: Alternatives to report per token; with ``echo`` per token of the prompt too.
        max_tokens: Most output tokens; 0, which takes ``echo``, only scores the prompt.
    """

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED | REFUSED_IN_COMPLETIONS
    taken: ClassVar[frozenset[str]] = TAKEN | TAKEN_IN_COMPLETIONS

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None

    def check_together(self) -> None:
        """Refuse to answer with nothing."""
        super().check_together()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidParameterError("max_tokens", "max_tokens must be at least 1; 0 is for echo alone")

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token to report; None reports nothing."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token that the answer needs; None needs nothing."""
        needed = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in needed if count is not None), default=None)

    @property
    def echoes_logprobs(self) -> bool:
        """Whether ``logprobs`` begins with those of the prompt."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def shows_output(self) -> bool:
        """Whether the answer has output; else it only tells of its prompt."""
        return self.max_tokens != 0
