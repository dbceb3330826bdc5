"""What the API allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cluster.config.limits import Limits, SharePrefixes

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

UnknownFields = Literal["ignore", "refuse"]
UnsupportedTools = Literal["refuse", "drop"]


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits and choices of one API.

    Attributes:
        limits: What is taken in, and for how long.
        stream_interval: Least tokens of a choice in a stream's event; its first come at once, the last with its end.
        chat_template: Jinja template in place of the tokenizer's own; None keeps that.
        trust_request_chat_template: Let requests bring a ``chat_template``. A template is a program: it can keep a
            thread and memory busy without end, so only those who may do that should reach the API.
        tool_parser: How the model writes tool calls: ``auto``, or as
            :class:`specdec.structured.parsing.selection.AnswerForms` says.
        reasoning_tags: Around its reasoning: ``auto``, ``none``, or both with a comma between them.
        unknown_fields: What becomes of fields that nobody knows: ``ignore`` names them in a header, ``refuse``
            answers 400.
        unsupported_tools: What becomes of tools of responses that are no functions: ``drop`` names them in a header,
            ``refuse`` answers 400.
        allowed_origins: Web pages that may call from a browser.
        ui: Serve the page ``/ui``.
        send_request_id: Send ``x-request-id`` in answers; off where a proxy in front does it.
        admin_keys: Names of the API keys that may administer.
        share_prefixes: Whose requests share cached prefixes.
        tracer: Makes the spans of requests; None where nobody traces.
    """

    limits: Limits = field(default_factory=Limits)
    stream_interval: int = 1
    chat_template: str | None = None
    unsupported_tools: UnsupportedTools = "refuse"
    trust_request_chat_template: bool = False
    tool_parser: str = "auto"
    reasoning_tags: str = "auto"
    unknown_fields: UnknownFields = "ignore"
    allowed_origins: tuple[str, ...] = ()
    ui: bool = False
    send_request_id: bool = True
    admin_keys: tuple[str, ...] = ()
    share_prefixes: SharePrefixes = "key"
    tracer: Tracer | None = None
