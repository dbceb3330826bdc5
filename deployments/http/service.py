"""What an ingress needs of the service behind it: sequences of tokens, models, and what the API allows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol

from cluster.config.limits import Limits, SharePrefixes
from specdec.core.params import PLAIN_DEFAULTS, Exactness, GenerationDefaults, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.core.types import Adapter, Tokens
from specdec.protocol.ingress import TokenDelta

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests can name.

    Attributes:
        name: What requests give as ``model``, and what answers name.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        vocab_size: Number of token ids.
        eos_token_ids: Ids that end a sequence.
        defaults: What holds for requests that do not say.
        decision: Fingerprint of all that decides its tokens, where it is known.
        weights: What its weights are, by their content, where that is known.
        root: Where it comes from, where that is shown.
        parent: Of an adapter, the name of the model that it changes.
        adapter: With which the target answers, if it is one.
        draft_adapter: The draft model's adapter that goes with it, if there is one.
        other_names: What requests may give as ``model``, too.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: Tokens = ()
    defaults: GenerationDefaults = PLAIN_DEFAULTS
    decision: str = ""
    weights: str = ""
    root: str = ""
    parent: str | None = None
    adapter: Adapter | None = None
    draft_adapter: Adapter | None = None
    other_names: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """In metrics, where adapters have no series of their own: they come and go."""
        return self.parent or self.name

    @property
    def weights_version(self) -> str:
        """What answers give as ``weights_version``; empty where nothing is known."""
        return (
            self.weights if self.adapter is None or not self.weights else f"{self.weights}+{self.adapter.fingerprint}"
        )

    @property
    def fingerprint(self) -> str:
        """What answers give as ``system_fingerprint``: another one may have other tokens for the same seed."""
        said = self.decision or repr(self)
        return f"fp_{blake2b(said.encode(), digest_size=6).hexdigest()}"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served.

    Attributes:
        num_speculative_tokens: Draft tokens per round where a request says nothing.
        exactness: Of the target.
        created_s: When the service was started, in seconds since the epoch.
        adapters: The adapters of the target by name, each a model that requests can name. A view of what is loaded
            now: it changes as adapters are loaded and unloaded, and nobody copies it per request.
    """

    target: ServedModel
    num_speculative_tokens: int = 0
    exactness: Exactness = "fast"
    created_s: int = 0
    adapters: Mapping[str, ServedModel] = field(default_factory=dict)

    def find(self, name: str) -> ServedModel | None:
        """The model that a request calls ``name``: an adapter also with the target's name and a colon before its own.

        Takes the same time however many adapters there are.
        """
        names = self.target.name, *self.target.other_names
        if name in names:
            return self.target
        base, colon, adapter = name.partition(":")
        return self.adapters.get(adapter if colon and base in names else name)


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to generate.

    Attributes:
        seq: Unique among all sequences of all ingresses.
        prompt: The prompt's tokens, at least one; samples of one prompt share them.
    """

    seq: str
    prompt: SharedTokens
    spec: SequenceSpec


class TokenService(Protocol):
    """Whoever generates tokens: the router's client in the service, an engine or a script in tests."""

    def model_info(self) -> ModelInfo:
        """What is served.

        Raises:
            ServiceUnavailableError: The models are not ready.
        """
        ...

    def open(self, request: SequenceRequest) -> AsyncGenerator[TokenDelta]:
        """Generate one sequence.

        Nothing happens before the first delta is asked for. It comes, without tokens if need be, as soon as a worker
        has begun: answers begin only then, so that what is refused, or fails before, has a status code. The last delta
        has ``finish``, unless the sequence ends with an error. Closing the generator before (``aclose``, or cancelling
        the task that waits in it) cancels the sequence everywhere.

        Raises:
            ServiceUnavailableError: No worker can take the sequence now.
            InvalidParameterError: The service cannot honour the request.
            SequenceFailedError: The sequence cannot be generated to its end; nothing comes after this.
        """
        ...

    def check_health(self) -> None:
        """Return if requests are taken.

        Raises:
            ServiceUnavailableError: They are not; the message says why.
        """
        ...

    async def check_ready(self) -> None:
        """Return if requests are taken, and a target computes them now.

        Raises:
            ServiceUnavailableError: The message says what is missing.
        """
        ...


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
        unknown_fields: What becomes of fields that nobody knows: ``ignore`` logs each once, ``refuse`` answers 400.
        unsupported_tools: What becomes of tools of responses that are no functions: ``drop`` leaves them out,
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
