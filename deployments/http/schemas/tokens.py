"""The bodies of ``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from deployments.http.schemas.chat import ChatMessages, ConversationBody
from deployments.http.schemas.fields import Body, Integers
from specdec.core.errors import InvalidParameterError

_OF_TEMPLATES = (
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("tools", "reasoning_effort"),
)


class TokenizeBody(ConversationBody):
    """A text or a conversation whose tokens are asked for.

    Attributes:
        model: Absent, the target.
        add_special_tokens: Whether a text gets those that the tokenizer adds by itself; by default it does. A
            conversation has those of its template, and others only where it is asked for.
        return_token_strs: Send each token's own text too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    return_token_strs: bool | None = None

    def check_together(self) -> None:
        """Refuse both, and neither, and what would be ignored.

        Raises:
            InvalidParameterError: It is not one of ``prompt`` and ``messages``, or a field goes with the other.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameterError("prompt", "send either prompt or messages")
        self.check_template()
        for name in _OF_TEMPLATES:
            if self.prompt is not None and getattr(self, name) is not None:
                raise InvalidParameterError(name, f"{name} needs messages; a prompt has no template")


class DetokenizeBody(Body):
    """Tokens whose text is asked for; absent, ``model`` is the target."""

    model: str | None = None
    tokens: Integers
