"""The border between the world of text and the world of tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, Protocol

from specdec.core.params import PLAIN_DEFAULTS, Acceptance, GenerationDefaults, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.core.types import Adapter, Tokens
from specdec.protocol.ingress import TokenDelta

ModelRole = Literal["target", "draft"]


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
        root: Where it comes from, where that is told.
        parent: Of an adapter, the name of the model that it changes.
        adapter: With which the target answers, if it is one.
        draft_adapter: Its twin for the draft model, if there is one.
        other_names: What requests may give as ``model``, too.
    """

    name: str
    role: ModelRole
    max_model_len: int
    vocab_size: int
    eos_token_ids: Tokens = ()
    defaults: GenerationDefaults = PLAIN_DEFAULTS
    decision: str = ""
    root: str = ""
    parent: str | None = None
    adapter: Adapter | None = None
    draft_adapter: Adapter | None = None
    other_names: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """In metrics, where adapters are not told apart: they come and go."""
        return self.parent or self.name

    @property
    def fingerprint(self) -> str:
        """What answers give as ``system_fingerprint``: another one may have other tokens for the same seed."""
        said = self.decision or repr(self)
        return f"fp_{blake2b(said.encode(), digest_size=6).hexdigest()}"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served.

    Attributes:
        draft: The draft as a model of its own; None where there is none, or it is not to be called.
        num_speculative_tokens: Draft tokens per round where a request says nothing.
        acceptance_rules: Rules that a request may choose.
        acceptance: The one of them that holds where it chooses none.
        created_s: When the service was started, in seconds since the epoch.
        adapters: The adapters of the target by name, each a model that requests can name. A view of what is loaded
            now: it changes as adapters are loaded and unloaded, and nobody copies it per request.
    """

    target: ServedModel
    draft: ServedModel | None = None
    num_speculative_tokens: int = 0
    acceptance_rules: tuple[Acceptance, ...] = ("coupled",)
    acceptance: Acceptance = "coupled"
    created_s: int = 0
    adapters: Mapping[str, ServedModel] = field(default_factory=dict)

    @property
    def base_models(self) -> tuple[ServedModel, ...]:
        """The models without their adapters, the target first."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    def find(self, name: str) -> ServedModel | None:
        """The model that a request calls ``name``: an adapter also with the target's name and a colon before its own.

        Takes the same time however many adapters there are.
        """
        for model in self.base_models:
            if name == model.name or name in model.other_names:
                return model
        base, colon, adapter = name.partition(":")
        is_of_target = colon and base in (self.target.name, *self.target.other_names)
        return self.adapters.get(adapter if is_of_target else name)


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
