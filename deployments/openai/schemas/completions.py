"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from deployments.openai.schemas.common import GenerationBody
from deployments.openai.schemas.fields import Prompts, refused
from specdec.errors import UnsupportedParameterError


class CompletionBody(GenerationBody):
    """A text to go on with.

    Attributes:
        prompt: Text, token ids, or a list of either.
        echo: Begin the answer with the prompt.
        logprobs: Alternatives to report per token.
    """

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[Any, refused(1)] = None
    suffix: Annotated[Any, refused("")] = None

    def check_together(self) -> None:
        """Refuse log probabilities of the prompt, which ``echo`` would need."""
        if self.echo and self.logprobs is not None:
            raise UnsupportedParameterError("logprobs", "logprobs with echo is not supported")

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token to report; None reports nothing."""
        return self.logprobs
