"""What the API allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from deployments.openai.admission import AdmissionLimits

UnknownFields = Literal["ignore", "refuse"]


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits and choices of one API.

    Attributes:
        max_body_bytes: Largest request body; beyond it 413.
        max_sequences: Most sequences (prompts times ``n``) of one request.
        max_stop_strings: Most stop strings of one request.
        max_stop_characters: Longest stop string.
        retry_after_s: What ``Retry-After`` says where the service cannot take a request now.
        stream_interval: Least tokens of a choice in a stream's event; its first come at once, the last with its end.
        chat_template: Jinja template in place of the tokenizer's own; None keeps that.
        trust_request_chat_template: Let requests bring a ``chat_template``. A template is a program: it can keep a
            thread and memory busy without end, so only those who may do that should reach the API.
        unknown_fields: What becomes of fields that nobody knows: ``ignore`` names them in a header, ``refuse``
            answers 400.
        admission: What is taken in at once.
        body_timeout_s: Longest time from a request's arrival until all of its body is there.
        queue_timeout_s: Longest wait for a request's first token, from its arrival on, and for each further one.
        request_timeout_s: Longest time from a request's arrival to the end of its answer; None does not bound it.
        allowed_origins: Web pages that may call from a browser.
        send_request_id: Send ``x-request-id`` in answers; off where a proxy in front does it.
    """

    max_body_bytes: int = 4 << 20
    max_sequences: int = 128
    max_stop_strings: int = 16
    max_stop_characters: int = 1024
    retry_after_s: int = 1
    stream_interval: int = 1
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    unknown_fields: UnknownFields = "ignore"
    admission: AdmissionLimits = AdmissionLimits()  # noqa: RUF009 - it is frozen
    body_timeout_s: float = math.inf
    queue_timeout_s: float = math.inf
    request_timeout_s: float | None = None
    allowed_origins: tuple[str, ...] = ()
    send_request_id: bool = True
