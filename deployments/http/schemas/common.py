"""What the bodies of all generating endpoints have in common, and what those of completions and chat completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from deployments.http.schemas.fields import (
    IGNORED,
    MOST_ITEMS,
    REFUSED,
    Bias,
    Body,
    Integer,
    JsonObject,
    Stops,
    TokenSet,
)
from specdec.core.errors import InvalidParameterError
from specdec.core.params import Exactness
from specdec.core.validation import MAX_NUM_STOP_TOKENS

MOST_BAD_WORDS = 64
Word = Annotated[str, Field(min_length=1, max_length=256)]
MetricsDetail = Literal["none", "summary", "detailed"]


class StreamOptions(Body):
    """How a stream is sent.

    Attributes:
        include_usage: Send a last chunk with the usage.
        continuous_usage_stats: Send the usage so far with every chunk.
        include_speculation: Send with every chunk how its tokens came, as ``specdec`` of its choice.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_speculation: bool | None = None


class SamplingBody(Body):
    """How tokens are chosen; null and absent mean the same: the model's default, or OpenAI's.

    Attributes:
        model: Name of the target or of an adapter.
        seed: Makes the answer reproducible; drawn where absent.
        stop: Strings that end the text; they are not part of it.
        num_speculative_tokens: Bound on draft tokens per round; 0 is plain decoding.
        disable_spec_decode: True is another way to write ``num_speculative_tokens: 0``.
        exactness: ``strict`` refuses a service that is not; ``fast`` goes on with any bits.
        per_request_spec_decode_metrics: Send what speculation did, as ``metrics.speculative_decoding``.
        priority: Requests of a lower one go first; 0 by default.
        cache_salt: Share cached prefixes only among requests with the same salt (and the same API key, in any case).
        allowed_token_ids: The only tokens that may be chosen.
        bad_words: Words that the output must not hold.
        skip_special_tokens: Leave special tokens out of the text; by default they are.
        spaces_between_special_tokens: False is refused where the tokenizer would write some.
        include_stop_str_in_output: Stop strings and ending tokens are part of the text.
        truncate_prompt_tokens: Keep only so many of a prompt's last tokens; -1 keeps as many as there is room for.
        structured_outputs: What the output must be, in vLLM's words: one of ``json``, ``json_object``, ``regex``,
            ``choice``, ``grammar``, ``structural_tag``; ``guided_json`` and its like are its older names.
        request_id: Of the answer and in log lines, in place of the ``x-request-id`` that came with the request.
    """

    model: Annotated[str, Field(min_length=1, max_length=256)]
    seed: Integer | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[Integer], Field(max_length=MAX_NUM_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias | None = None
    min_tokens: Integer | None = None
    num_speculative_tokens: Integer | None = None
    disable_spec_decode: bool | None = None
    exactness: Exactness | None = None
    stream: bool | None = None
    per_request_spec_decode_metrics: MetricsDetail | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    allowed_token_ids: TokenSet | None = None
    bad_words: Annotated[list[Word], Field(max_length=MOST_BAD_WORDS, fail_fast=True)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    structured_outputs: JsonObject | None = None
    guided_json: JsonObject | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MOST_ITEMS, fail_fast=True)] | None = None
    guided_grammar: str | None = None
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = None


class GenerationBody(SamplingBody):
    """A request for completions or chat completions.

    Both kinds of body have all fields of :mod:`deployments.http.schemas.fields` in common.

    Attributes:
        n: Samples per prompt.
        max_tokens: Most output tokens.
        return_token_ids: Send the tokens' ids too.
        return_recording: Send with the end of each choice the line of a recording that ``specdec replay`` and
            ``specdec audition`` read, as ``recording`` of the choice.
        prompt_logprobs: Alternatives to report per prompt token, as vLLM does.
        add_special_tokens: Whether prompts get those that the tokenizer adds by itself; by default texts do, and
            conversations, whose template has its own, do not.
        return_tokens_as_token_ids: Write tokens as ``token_id:7`` in ``logprobs``.
        response_format: What the output must be: OpenAI's object, also with vLLM's ``structural_tag``.
    """

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = REFUSED
    ignored: ClassVar[frozenset[str]] = IGNORED

    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_recording: bool | None = None
    prompt_logprobs: Integer | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: JsonObject | None = None

    def check_together(self) -> None:
        """Check what concerns several fields.

        Raises:
            InvalidParameterError: Two fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("stream_options", "stream_options needs stream to be true")
        if self.truncate_prompt_tokens == 0:
            raise InvalidParameterError("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1")

    @property
    def output_limit(self) -> int | None:
        """Most output tokens, if the request says."""
        return self.max_tokens

    @property
    def output_limit_name(self) -> str:
        """What the request calls that."""
        return "max_tokens"

    @property
    def prompt_name(self) -> str:
        """What the request calls its prompt."""
        return "prompt"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token to report; None reports nothing."""
        return None

    @property
    def logprobs_name(self) -> str:
        """What the request calls that."""
        return "logprobs"

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token that the answer needs; None needs nothing."""
        return self.prompt_logprobs

    @property
    def shows_output(self) -> bool:
        """Whether the answer has output; else it only tells of its prompt."""
        return True

    @property
    def may_be_kept(self) -> bool:
        """Whether the service may record the answer: ``store: false`` and ``cache_salt`` each forbid it."""
        return (self.model_extra or {}).get("store") is not False and self.cache_salt is None

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def wants_speculation(self) -> bool:
        """Whether every chunk of a stream tells how its tokens came."""
        return self.stream_options is not None and bool(self.stream_options.include_speculation)

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)
