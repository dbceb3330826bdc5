"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.openai.schemas.common import GenerationBody
from deployments.openai.schemas.fields import Body
from deployments.openai.schemas.others import REFUSED_IN_MESSAGES, TAKEN_IN_MESSAGES
from specdec.errors import InvalidParameterError


def _only_text(kind: Any) -> Any:
    if kind != "text":
        raise PydanticCustomError("unsupported_parameter", "must be 'text': other parts are not supported")
    return kind


class TextPart(Body):
    """A piece of a message's content."""

    type: Annotated[Any, AfterValidator(_only_text), WithJsonSchema({"const": "text"})]
    text: str


def _kind_of_content(content: Any) -> str | None:
    return "str" if isinstance(content, str) else "list" if isinstance(content, list) else None


Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("list")],
    Discriminator(
        _kind_of_content,
        custom_error_type="content_type",
        custom_error_message='must be a string or a list of parts {"type": "text", "text": ...}',
    ),
]


class ChatMessage(Body):
    """One turn."""

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED_IN_MESSAGES
    taken: ClassVar[frozenset[str]] = TAKEN_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class TemplatedBody(Body):
    """How a conversation is made into a prompt.

    Attributes:
        chat_template: Jinja template in place of the model's, where the service trusts requests with that.
        chat_template_kwargs: Variables for the template.
        add_generation_prompt: End with what an answer begins with; by default, unless the last message is gone on with.
        continue_final_message: Go on with the last message instead of answering it.
        add_special_tokens: Add those that the tokenizer puts around a text.
    """

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None

    def check_template(self) -> None:
        """Refuse two ends of one prompt.

        Raises:
            InvalidParameterError: The last message is to be both gone on with and answered.
        """
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidParameterError(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )


class ChatBody(TemplatedBody, GenerationBody):
    """A conversation to go on with.

    Attributes:
        messages: The turns so far.
        max_completion_tokens: Newer name of ``max_tokens``.
        logprobs: Whether to report log probabilities.
        top_logprobs: Alternatives to report per token.
    """

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    def check_together(self) -> None:
        """Refuse two limits, and alternatives of nothing."""
        super().check_together()
        self.check_template()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidParameterError("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameterError("top_logprobs", "top_logprobs needs logprobs to be true")

    @property
    def output_limit(self) -> int | None:
        """Most output tokens, if the request says."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def output_limit_name(self) -> str:
        """What the request calls that."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def prompt_name(self) -> str:
        """What the request calls its prompt."""
        return "messages"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token to report; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def logprobs_name(self) -> str:
        """What the request calls that."""
        return "top_logprobs"
