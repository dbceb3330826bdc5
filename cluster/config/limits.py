"""What the service takes in, from whom, and for how long: sections of the configuration."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cluster.config.base import StrictModel, refused_key
from specdec.core.errors import InvalidParameterError
from specdec.core.validation import MAX_LOGPROBS

_ORIGIN = re.compile(r"\*|https?://[^\s/,]+")


class Limits(StrictModel):
    """What an ingress takes in. Beyond it answers 400 or 413; 429 where the same request may be sent again later."""

    max_body_bytes: int | None = Field(
        None,
        ge=1 << 10,
        le=1 << 30,
        description="largest request body, beyond it 413; default 1 MiB + 8 bytes x max_model_len",
    )
    max_total_body_bytes: int = Field(
        64 << 20, ge=1 << 10, le=1 << 40, description="bodies of all requests of one ingress together; beyond it 429"
    )
    max_concurrent_requests: int = Field(256, ge=1, le=65536, description="sequences that one ingress has open at once")
    max_queued_requests: int = Field(
        256, ge=0, le=65536, description="requests that may wait beyond those; then 429; 0: none waits"
    )
    max_total_tokens: int | None = Field(
        1 << 26,
        ge=1,
        description="tokens of an ingress's requests, outputs as expected; beyond it 429; none: no bound",
    )
    max_logprobs: int = Field(
        MAX_LOGPROBS,
        ge=0,
        le=MAX_LOGPROBS,
        description="alternatives per token that a request may ask for; beyond it 400",
    )
    max_prompt_logprobs_tokens: int = Field(
        1 << 15,
        ge=1,
        le=1 << 30,
        description="prompt tokens of a request that asks for their log probabilities; beyond it 400",
    )
    max_share_per_key: float | None = Field(
        None,
        gt=0,
        le=1,
        description="most of an ingress that one API key may hold; default 0.5 with several keys",
    )
    max_sequences: int = Field(128, ge=1, le=4096, description="sequences of one request: prompts times n")
    max_stop_strings: int = Field(16, ge=0, le=1024, description="stop strings of one request")
    max_stop_characters: int = Field(1024, ge=1, le=1 << 16, description="length of one stop string")
    max_reopens: int = Field(
        3, ge=0, le=1000, description="most times that a sequence is opened again after failures of its own"
    )
    body_timeout_s: float = Field(
        30.0, gt=0, le=86400, description="longest time from a request's arrival until its body is there; then 408"
    )
    queue_timeout_s: float = Field(
        300.0,
        gt=0,
        le=86400,
        description="longest wait for the first token, or for each further one; then 503",
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        le=604800,
        description="longest time from a request's arrival to its answer's end; then 504; none: no bound",
    )
    stream_headers_after_s: float = Field(
        10.0,
        gt=0,
        le=86400,
        description="a stream that still waits gets its headers then; later failures are error events",
    )
    stream_comment_every_s: float = Field(
        15.0, gt=0, le=86400, description="while a stream has nothing to send, it sends an SSE comment this often"
    )
    priorities: Literal["off", "own", "all"] = Field(
        "off",
        description="requests that priority orders: none (others than 0 refused); a key's own; admins': all",
    )
    slow_client_timeout_s: float = Field(
        30.0, gt=0, le=86400, description="a stream ends of which its client takes nothing for this long"
    )
    retry_after_s: int = Field(
        1, ge=1, le=3600, description="what Retry-After says with a 503, and at least with a 429"
    )

    def body_bytes(self, max_model_len: int) -> int:
        """The largest request body where a sequence has at most so many tokens."""
        return (1 << 20) + 8 * max_model_len if self.max_body_bytes is None else self.max_body_bytes


class ResponsesStore(StrictModel):
    """What is kept of the responses of ``/v1/responses``."""

    enabled: bool = Field(
        False,
        description="keep responses of /v1/responses for previous_response_id and GET, unless store is false",
    )
    max_responses: int = Field(
        10_000, ge=1, le=10_000_000, description="responses at most; then the oldest of the API key go that has most"
    )
    max_bytes: int = Field(
        256 << 20,
        ge=1 << 10,
        le=1 << 40,
        description="of all kept responses; then the oldest go of the API key that has most",
    )
    max_age_s: float = Field(86400.0, gt=0, le=31_536_000, description="how long a response is kept")


def origins(value: Any) -> Any:
    """Read a list of origins; on a command line they are separated by commas, or are a JSON list as in vLLM.

    Raises:
        ValueError: One is neither ``*`` nor of the form ``https://host``.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        names: Any = json.loads(value)
    else:
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) and _ORIGIN.fullmatch(name) for name in names
    ):
        raise ValueError("must be a list of origins such as https://example.org, or *")
    return tuple(names)


def names(value: Any) -> Any:
    """Read a list of names; in a text they are separated by commas.

    Raises:
        ValueError: One is empty.
    """
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        return value
    found = tuple(name.strip() for text in texts for name in text.split(","))
    if "" in found:
        raise ValueError("must be names with commas between them, none of them empty")
    return found


SharePrefixes = Literal["key", "group", "all"]


class Recordings(StrictModel):
    """Answers that each ingress writes into a folder, to be replayed, and to try or train drafts on."""

    folder: str | None = Field(
        None, min_length=1, description="where recordings are written, for whoever may read users' texts; none: nowhere"
    )
    owners: Annotated[tuple[str, ...], BeforeValidator(names)] = Field(
        (), description="names of the API keys whose answers are recorded; * for all, also without keys"
    )
    max_bytes: int = Field(
        1 << 30, ge=1 << 20, le=1 << 50, description="of all recordings in the folder; then the oldest file goes"
    )

    @model_validator(mode="after")
    def _both(self) -> Recordings:
        if bool(self.owners) != (self.folder is not None):
            missing, given = ("owners", "folder") if self.folder is not None else ("folder", "owners")
            raise refused_key(f"recordings.{missing}", f"recordings.{missing}: is needed with recordings.{given}")
        return self


class Access(StrictModel):
    """Who may call the service. API keys themselves are no part of the configuration: it is stored, and shown."""

    api_keys_file: str | None = Field(
        None,
        min_length=1,
        description="file of API keys, a line 'name: key' each; read again when it changes",
    )
    admin_keys: Annotated[tuple[str, ...], BeforeValidator(names)] = Field(
        (), description="names of the API keys that may load adapters"
    )
    share_prefixes: SharePrefixes = Field(
        "key",
        description="whose requests share cached prefixes: one key's, those of a team/ prefix, or everybody's",
    )
    metrics_need_key: bool = Field(
        True, description="where there are API keys, ask for one at /metrics too; /health never does"
    )
    allowed_origins: Annotated[tuple[str, ...], BeforeValidator(origins)] = Field(
        (), description="web pages that may call from a browser (CORS), such as https://example.org; * for all"
    )
    allow_unauthenticated_ray: bool = Field(
        False,
        description="start on a Ray cluster without token authentication, where anyone can run code",
    )


class Tls(StrictModel):
    """HTTPS at the proxy; a Serve configuration of one's own sets the same under http_options."""

    ssl_certfile: str | None = Field(None, min_length=1, description="certificate file; with it the service is HTTPS")
    ssl_keyfile: str | None = Field(None, min_length=1, description="file with the certificate's private key")

    def http_options(self) -> dict[str, str]:
        """The options of Serve's proxies.

        Raises:
            InvalidParameterError: One file is given without the other.
        """
        given = self.model_dump(exclude_none=True)
        if len(given) == 1:
            (name,) = given
            raise InvalidParameterError(f"tls.{name}", "tls: ssl_certfile and ssl_keyfile need each other")
        return given
