"""The service's configuration: one tree of typed keys, the same in YAML, as flags, and in Serve's own ``args:``.

Where spans of requests go: a section of the configuration, and its variables.
"""

from __future__ import annotations

import importlib
from ipaddress import ip_address
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from cluster.config.base import StrictModel, refused_key
from cluster.config.environment import PROXY_VARIABLE
from cluster.config.limits import Access, Limits, Recordings, ResponsesStore, Tls, names
from cluster.config.models import DraftConfig, LoraConfig, TargetConfig
from cluster.config.names import OTLP, OWN_TRACES_ONLY
from cluster.config.replicas import ActorOptions, Replicas, Updates
from cluster.config.values import (
    Backend,
    DraftLength,
    ImportStrings,
    ReasoningTagsSetting,
    Switch,
    ToolParser,
)
from specdec.core.errors import InvalidParameterError
from specdec.core.params import Exactness, LogprobsMode
from specdec.core.validation import MAX_NUM_SPECULATIVE_TOKENS
from specdec.drafting.branches import BRANCHES_IN_ALL
from specdec.protocol.leases import Times

FILE = "ray.serve._private.tracing_utils:default_tracing_exporter"
OTLP_LIBRARY = "opentelemetry.exporter.otlp.proto.http"


class Tracing(StrictModel):
    """OpenTelemetry traces; a Serve configuration of one's own needs the variables in every pod's environment."""

    exporter: str | None = Field(
        None,
        pattern=r"^(file|otlp|[^\W\d][\w.]*:[^\W\d]\w*)$",
        description="where traces go: file, otlp, or package.module:function that makes span processors; none: nowhere",
    )
    endpoint: str | None = Field(
        None,
        pattern=r"^https?://\S+$",
        description="the collector of otlp, as in http://localhost:4318; else OpenTelemetry's own variables say",
    )
    sampling_ratio: float = Field(
        1.0, ge=0, le=1, description="share of requests that are traced; a client's traceparent decides for its own"
    )
    trust_traceparent: bool = Field(
        True, description="follow a client's traceparent header; off: sampling_ratio alone decides, traces begin here"
    )

    def check(self) -> None:
        """Refuse an exporter that no process could load, and an endpoint that none would use.

        Raises:
            InvalidParameterError: It is not there, or is not ``otlp`` where there is an endpoint.
        """
        if self.endpoint is not None and self.exporter != "otlp":
            raise InvalidParameterError("tracing.endpoint", "tracing.endpoint: needs tracing.exporter: otlp")
        if self.exporter in (None, "file"):
            return
        module, _, function = (OTLP if self.exporter == "otlp" else str(self.exporter)).partition(":")
        try:
            if self.exporter == "otlp":
                importlib.import_module(OTLP_LIBRARY)
            elif not callable(getattr(importlib.import_module(module), function)):
                raise TypeError(f"{function} is no function")
        except (ImportError, AttributeError, TypeError) as error:
            hint = "; pip install 'specdec-serve[otlp]'" if self.exporter == "otlp" else ""
            raise InvalidParameterError("tracing.exporter", f"tracing.exporter: {error}{hint}") from None

    def variables(self) -> dict[str, str]:
        """What Serve and OpenTelemetry read from the environment of every process; nothing where nothing is traced.

        Serve's ``tracing_config`` says the same, but its proxies do not get that (2.60), and without their spans
        it does not see a client's ``traceparent``.
        """
        if self.exporter is None:
            return {}
        variables = {
            "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": {"file": FILE, "otlp": OTLP}.get(self.exporter, self.exporter),
            "RAY_SERVE_TRACING_SAMPLING_RATIO": str(self.sampling_ratio),
        }
        if self.endpoint is not None:
            variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = self.endpoint
        if not self.trust_traceparent:
            variables[PROXY_VARIABLE] = OWN_TRACES_ONLY
        return variables


LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Demo = Literal["plain", "hybrid", "chat"]
"""A demo target: of attention alone, or of recurrent layers and attention, with one draft; or one that talks."""
CHAT_MODEL = "smollm2-135m-instruct"
DEMO_MODEL_NAMES: dict[Demo, str] = {"plain": "specdec-demo", "hybrid": "specdec-demo-hybrid", "chat": CHAT_MODEL}

NAME_A_MODEL = "name a model, or ask for the demo pair with demo: plain"

MOST_DRAFT_TOKENS = 16
"""Longest draft that ``auto`` chooses; a whole number may be larger."""


class ProtocolTimes(StrictModel):
    """The protocol's clock; see :class:`specdec.protocol.leases.Times`."""

    lease_s: float = Field(5.0, gt=0, le=3600, description="what nobody renews for so long is freed")
    renew_interval_s: float = Field(
        1.0, gt=0, le=1200, description="period of the renewals; at most a third of a lease"
    )
    retry_interval_s: float = Field(0.5, gt=0, le=60, description="what is not acknowledged for so long is sent again")
    renew_grace_s: float = Field(
        0.5, gt=0, le=60, description="renewals leave out what was opened less than this long ago"
    )
    peer_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="a request goes to another router when its own says nothing for so long"
    )
    max_unacked_tokens: int = Field(
        256, ge=1, le=65536, description="tokens a target commits past the last acknowledgement"
    )

    @model_validator(mode="after")
    def _renewed_in_time(self) -> ProtocolTimes:
        if 3 * self.renew_interval_s > self.lease_s:
            raise ValueError(f"renew_interval_s must be at most a third of lease_s ({self.lease_s / 3:g})")
        return self

    def times(self) -> Times:
        """The same, as the state machines take it."""
        return Times(**self.model_dump())


class Actors(StrictModel):
    """Explicit placement, by deployment."""

    target: ActorOptions = Field(default_factory=ActorOptions, description="a replica of the target")
    draft: ActorOptions = Field(default_factory=ActorOptions, description="a replica of the draft")
    router: ActorOptions = Field(default_factory=ActorOptions, description="a replica of the router")
    ingress: ActorOptions = Field(default_factory=ActorOptions, description="a replica of the HTTP ingress")


class AppArgs(StrictModel):
    """Arguments of the application's builder: what to serve and how; where to listen is the launcher's matter."""

    demo: Demo = Field(
        "plain",
        description="demo pair where no target is named: attention, hybrid, or the 135M model that chats",
    )
    target: TargetConfig = Field(default_factory=TargetConfig, description="the model that answers")
    draft: DraftConfig = Field(default_factory=DraftConfig, description="the model that proposes; none: no speculation")
    served_model_name: Annotated[tuple[str, ...], BeforeValidator(names)] = Field(
        (), description="the model's name in the API; requests may give further ones, answers give the first"
    )
    max_model_len: int | None = Field(None, ge=2, le=1 << 24, description="prompt and output together, in tokens")
    block_size: int = Field(16, ge=1, le=1024, description="tokens in a block of the paged cache; 32 by openvino")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="most tokens in one forward pass; chosen by device where none is given",
    )
    max_num_seqs: int = Field(
        256,
        ge=1,
        le=1 << 16,
        description="most sequences in one forward pass; the cache is sized for no more",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="part of a GPU's memory for weights, steps and automatic caches, of both models together",
    )
    executor: Literal["auto", "graphs", "eager"] = Field(
        "auto",
        description="how a GPU runs steps; auto: graphs if a check at load passes, else eager",
    )
    skip_parity_check: bool = Field(
        False, description="serve models without comparing their cached forward with their plain one"
    )
    num_speculative_tokens: DraftLength = Field(
        "auto",
        description=f"draft tokens a round where requests name none, 0 to {MAX_NUM_SPECULATIVE_TOKENS}; auto: measured",
    )
    exactness: Exactness = Field(
        "fast",
        description="strict: a seed's tokens are the same in any precision, batch and schedule; slower",
    )
    strict_tile_tokens: int = Field(
        16,
        ge=0,
        le=512,
        description="with exactness: strict, tokens of every pass, at least 4; 0: whole steps, on GPUs",
    )
    logprobs_mode: LogprobsMode = Field(
        "raw_logprobs",
        description="output tokens' log probabilities: the model's, or after edits, temperature and truncation",
    )
    speculation_mode: Literal["auto", "sequential", "overlap", "outcomes"] = Field(
        "auto",
        description="how drafting and verification overlap; auto: the fastest, or overlap at a fixed length",
    )
    num_branches: int = Field(
        16,
        ge=0,
        le=64,
        description=f"outcomes prepared beside the likeliest; {BRANCHES_IN_ALL} of all sequences, shared evenly",
    )
    drain_timeout_s: float = Field(
        120.0,
        ge=0,
        le=86400,
        description="time that running requests have when the service or a replica stops",
    )
    affinity_slack: int = Field(
        2,
        ge=-1,
        le=65536,
        description="more sequences than the least loaded target that a cached prompt justifies; -1: load alone",
    )
    stream_interval: int = Field(
        1,
        ge=1,
        le=1 << 16,
        description="least tokens of a choice in a stream's event, after its first",
    )
    ui: Switch = Field(
        "auto",
        description="serve the page /ui; auto: where specdec serve listens on loopback",
    )
    limits: Limits = Field(default_factory=Limits, description="what is taken in at once")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="adapters by request")
    access: Access = Field(default_factory=Access, description="who may call")
    responses_store: ResponsesStore = Field(default_factory=ResponsesStore, description="responses kept for later")
    recordings: Recordings = Field(default_factory=Recordings, description="answers kept to try drafts on")
    protocol: ProtocolTimes = Field(default_factory=ProtocolTimes, description="leases and repeats")
    replicas: Replicas = Field(default_factory=Replicas, description="copies of each deployment")
    updates: Updates = Field(
        default_factory=Updates, description="what happens to running replicas when a change restarts them"
    )
    actors: Actors = Field(
        default_factory=Actors, description="explicit placement; chosen from what there is otherwise"
    )
    chat_template: str | None = Field(
        None, min_length=1, description="Jinja file with a chat template in place of the tokenizer's own"
    )
    tool_parser: ToolParser = Field(
        "auto",
        description="form of tool calls: hermes, llama3, response_template, package.module:name; auto: the template's",
    )
    reasoning_tags: ReasoningTagsSetting = Field(
        "auto",
        description="the two tags around reasoning, as '<think>,</think>'; auto: the chat template's",
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="unknown fields of requests: ignored, counted and logged once each, or a 400",
    )
    unsupported_tools: Literal["refuse", "drop"] = Field(
        "refuse",
        description="tools of /v1/responses that are no functions: a 400, or left out",
    )
    trust_request_chat_template: bool = Field(
        False, description="let requests bring a chat_template: a program, for those who may run one"
    )
    step_timeout_s: float = Field(
        60.0, gt=0, le=86400, description="a worker in whose step no layer ends for so long hangs, and is replaced"
    )
    logits_processors: ImportStrings = Field(
        (), description="hooks on every position's logits, as package.module:name: code that both models' processes run"
    )
    backend: Backend = Field(
        None,
        description="for benchmarks: package.module:name[:argument=value,...] that wraps or replaces a worker backend",
    )
    log_level: LogLevel = Field("info", description="least severe message that is logged")
    log_format: LogFormat = Field(
        "text", description="text, or json: an object a line; in a Serve configuration of one's own: logging_config"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_empty_target(cls, data: Any) -> Any:
        """A value that was not filled in must not put the demo pair under real traffic."""
        if isinstance(data, dict) and "target" in data and "demo" not in data:
            target = data["target"]
            if target is None or (isinstance(target, dict) and target.get("model", "") is None):
                raise refused_key("target", f"target: is empty; {NAME_A_MODEL}")
        return data

    @field_validator("target", "draft", mode="before")
    @classmethod
    def _from_nothing(cls, data: Any) -> Any:
        return {} if data is None else data

    @model_validator(mode="after")
    def _whole_pair(self) -> AppArgs:
        if self.demo != "plain" and not self.is_demo:
            raise refused_key("demo", f"demo: {self.demo} is a target itself: give no other target with it")
        if self.draft.model is not None and self.target.model is None:
            raise refused_key("draft.model", "draft.model: a draft model needs a target: give target too")
        others = "+".join(part for part in self.draft.methods if part != "model")
        if others and others != self.draft.method and not self.has_draft:
            needs = f"draft.method: {self.draft.method} needs a draft model: give draft too, or say {others}"
            raise refused_key("draft.method", needs)
        if (
            self.draft.has_heads
            and self.draft.heads is None
            and not (self.draft.takes_demo_heads and self.is_plain_demo)
        ):
            raise refused_key("draft.heads", "draft.heads: name the target's heads, a hub id or a local folder")
        if self.draft.has_heads and self.target.engine != "transformers":
            raise refused_key("draft.method", "draft.method: heads need target.engine: transformers")
        if self.is_paired:
            self._check_paired()
        if self.lora.is_enabled and self.target.engine != "transformers":
            raise refused_key("lora", "lora: adapters need target.engine: transformers")
        if self.lora.has_draft_adapters and self.draft.engine != "transformers":
            raise refused_key("lora", "lora: the draft's adapters need draft.engine: transformers")
        if self.logprobs_mode != "raw_logprobs" and self.target.engine == "vllm":
            raise refused_key("logprobs_mode", "logprobs_mode: vLLM's engine reports raw_logprobs here")
        if self.exactness == "strict" and self.target.engine != "transformers":
            raise refused_key("exactness", "exactness: strict needs target.engine: transformers")
        if self.exactness == "strict" and self.target.quantization != "none":
            raise refused_key("exactness", "exactness: strict needs target.quantization: none")
        if 0 < self.strict_tile_tokens < 4:
            raise refused_key("strict_tile_tokens", "strict_tile_tokens must be 0, or 4 to 512")
        return self

    def _check_paired(self) -> None:
        """Refuse what a draft model in the target's process does not go with."""
        key, says = "draft.placement", "draft.placement: same_process"
        if not self.has_draft_model:
            raise refused_key(key, f"{says} needs a draft model: give draft too")
        if self.target.engine == "vllm":
            raise refused_key(key, f"{says} needs our own engine: vLLM's target takes drafts of a separate draft model")
        if self.draft.engine != self.target.engine:
            raise refused_key(key, f"{says} needs one engine for both models")
        if self.draft.has_heads:
            raise refused_key(key, f"{says}: heads draft in the target's process too: leave out one of both")
        if self.speculation_mode in ("overlap", "outcomes"):
            raise refused_key(key, f"{says} drafts and verifies in turn: leave out speculation_mode")
        if self.draft.device not in ("auto", self.target.device) or self.draft.device_map is not None:
            raise refused_key(key, f"{says} has the target's device: leave out draft.device and draft.device_map")
        for section in ("actors", "replicas", "updates"):
            if "draft" in getattr(self, section).model_fields_set:
                raise refused_key(key, f"{says} has no replicas of the draft: leave out {section}.draft")

    @property
    def is_plain_demo(self) -> bool:
        """Whether the target is the one that there are demo heads for."""
        return self.is_demo and self.demo == "plain"

    @property
    def is_demo(self) -> bool:
        """Whether the demo pair is served."""
        return self.target.model is None

    @property
    def model_name(self) -> str:
        """The name that requests give as ``model``."""
        if self.served_model_name:
            return self.served_model_name[0]
        return self.target.model or DEMO_MODEL_NAMES[self.demo]

    @property
    def most_draft_tokens(self) -> int:
        """Most draft tokens per round where a request names no number."""
        return MOST_DRAFT_TOKENS if self.num_speculative_tokens == "auto" else self.num_speculative_tokens

    @property
    def is_auto(self) -> bool:
        """Whether it is measured how much to draft, of what is not only looked up."""
        return (self.has_draft or self.draft.has_heads) and self.num_speculative_tokens == "auto"

    @property
    def has_draft(self) -> bool:
        """Whether a draft model drafts, wherever it is."""
        return self.has_draft_model or self.draft.application is not None

    @property
    def drafts_from_tokens(self) -> bool:
        """Whether every sequence has drafts from its tokens."""
        return self.draft.token_drafter is not None

    @property
    def speculates(self) -> bool:
        """Whether there are drafts at all."""
        return self.has_draft or self.drafts_from_tokens or self.draft.has_heads

    @property
    def has_own_draft(self) -> bool:
        """Whether a draft model is named that is to be an application of its own."""
        return self.has_draft_model and not self.is_paired

    @property
    def is_paired(self) -> bool:
        """Whether the draft model is in the target's process."""
        return self.draft.placement == "same_process"

    @property
    def has_drafters(self) -> bool:
        """Whether there are processes that draft, wherever they are."""
        return self.has_draft and not self.is_paired

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model is named, wherever it runs."""
        if self.draft.application is not None or "model" not in self.draft.methods:
            return False
        return self.is_demo or self.draft.model is not None


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is one that only this machine reaches."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ServiceConfig(AppArgs):
    """Everything ``specdec serve`` takes: the application's arguments, and where it listens."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes any free one")
    update_timeout_s: float = Field(
        900.0, gt=0, le=604800, description="an update that takes longer is late in /health; it goes on"
    )
    tls: Tls = Field(default_factory=Tls, description="HTTPS")
    tracing: Tracing = Field(default_factory=Tracing, description="OpenTelemetry traces")

    def app_args(self) -> AppArgs:
        """The part that the application's builder takes."""
        own = set(ServiceConfig.model_fields) - set(AppArgs.model_fields)
        args = self.model_dump(exclude_unset=True, exclude=own)
        if self.ui == "auto" and is_loopback(self.host):
            args["ui"] = "on"
        return AppArgs.model_validate(args)
