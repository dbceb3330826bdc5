"""Keys of one model: where it comes from, and how and where it runs.

Keys of LoRA adapters: which there are, where more may come from, and how many a device holds.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from cluster.config.base import StrictModel
from specdec.core.types import Engine, Quantization
from specdec.drafting.registry import HEADS, TOKEN_DRAFTERS
from specdec.engine.vllm.checks import refused_argument

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
MIN_KV_BYTES = 1 << 20

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_AMOUNT_HELP = (
    "'auto', a fraction of the free memory in (0, 1], or at least 1 MiB in bytes or with a unit such as 512MiB"
)


def mib(num_bytes: float) -> str:
    """Bytes in MiB."""
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def memory_amount(value: Any) -> Literal["auto"] | float | int:
    """Read an amount of memory: ``auto``, a fraction in (0, 1] (a float), or a number of bytes (an int).

    Raises:
        ValueError: For anything else.
    """
    if value == "auto":
        return "auto"
    match = _AMOUNT.fullmatch(str(value))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"must be {_AMOUNT_HELP}")
    number = float(match[1])
    if not match[2] and 0 < number <= 1:
        return number
    num_bytes = int(number * _UNITS[match[2].lower()])
    if num_bytes < MIN_KV_BYTES:
        raise ValueError(f"must be {_AMOUNT_HELP}")
    return num_bytes


MemoryAmount = Annotated[Literal["auto"] | float | int, BeforeValidator(memory_amount)]


class ModelConfig(StrictModel):
    """One of the two models, and where it runs. A plain string stands for ``{model: ...}``."""

    model: str | None = Field(
        None, min_length=1, description="hub id or local folder; the demo pair's where none is given"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    token: SecretStr | None = Field(None, description="access token for the hub")
    dtype: Dtype = Field("auto", description="float32 on a CPU and for the demo pair, else what the checkpoint says")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    device_map: str | dict[str, int | str] | None = Field(
        None, description="accelerate's device map, for several devices"
    )
    engine: Engine = Field("transformers", description="transformers: on any device; openvino: on CPUs, faster")
    quantization: Quantization = Field(
        "none",
        description="hold linear layers' weights in fewer bits; int4 needs dtype bfloat16, openvino takes int8",
    )
    kv_cache_memory: MemoryAmount = Field(
        "auto", description="cache memory: auto, a fraction of free memory, or an amount such as 512MiB"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, data: Any) -> Any:
        return {"model": data} if isinstance(data, str) else data

    @property
    def is_on_cpu(self) -> bool:
        """Whether it takes no GPU, also where there is one."""
        return self.device == "cpu" or self.engine == "openvino"

    @model_validator(mode="after")
    def _fits_openvino(self) -> ModelConfig:
        if self.engine == "openvino":
            if self.device not in ("auto", "cpu") or self.device_map is not None:
                raise ValueError("engine openvino is for CPUs: leave out device and device_map")
            if self.dtype == "float16":
                raise ValueError("engine openvino takes dtype float32 or bfloat16, not float16")
            if self.quantization not in ("none", "int8"):
                raise ValueError(f"engine openvino takes quantization none or int8, not {self.quantization}")
        return self

    @model_validator(mode="after")
    def _nothing_ignored(self) -> ModelConfig:
        if self.model is None and (self.revision or self.token):
            raise ValueError("revision and token need a model")
        if self.device_map is not None and self.device != "auto":
            raise ValueError("device and device_map exclude each other")
        return self


class TargetConfig(ModelConfig):
    """The model that answers, and the engine that runs it."""

    engine: Literal["transformers", "openvino", "vllm"] = Field(  # type: ignore[assignment]  # a draft's, and vLLM's
        "transformers",
        description="transformers: on any device; openvino: on CPUs, faster; vllm: vLLM's, in its environment",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="with engine vllm: further EngineArgs of vLLM, such as quantization or tensor_parallel_size",
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="with engine vllm: its environment's Python, as .venv-vllm/bin/python; none: the one that runs Ray",
    )
    allow_untested: bool = Field(False, description="with engine vllm: take another version of it than the tested one")

    @model_validator(mode="after")
    def _of_one_engine(self) -> TargetConfig:
        if self.engine != "vllm":
            if self.engine_args or self.python is not None or self.allow_untested:
                raise ValueError("engine_args, python and allow_untested need engine: vllm")
            return self
        if self.device != "auto" or self.device_map is not None:
            raise ValueError("device and device_map are not for engine vllm: it takes the GPUs that its replica has")
        if self.quantization != "none":
            raise ValueError("quantization is not for engine vllm: say it in engine_args")
        refused = refused_argument(self.engine_args)
        if refused:
            raise ValueError(f"engine_args: {refused}")
        return self


_WITHOUT_MODEL = (*TOKEN_DRAFTERS, *HEADS)
DEMO_HEADS = next(iter(HEADS))
"""The method of the heads that the demo target has."""
IMPORT_STRING = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""``package.module:name``"""


def draft_method(value: Any) -> str:
    """Read methods, a list or with a plus between them, as their names in order of preference.

    Raises:
        ValueError: One is unknown or named twice, or two draft from tokens.
    """
    parts = list(map(str, value)) if isinstance(value, (list, tuple)) else str(value).split("+")
    others = [part for part in parts if IMPORT_STRING.fullmatch(part)]
    known = [part for part in (*TOKEN_DRAFTERS, "model", *HEADS) if part in parts]
    if not parts or len(others) + len(known) < len(parts):
        raise ValueError(
            f"must be model, {', '.join(_WITHOUT_MODEL)}, or package.module:name of a token drafter, or several of "
            "them, each once, with a plus between them"
        )
    if len([*others, *(part for part in known if part in TOKEN_DRAFTERS)]) > 1:
        raise ValueError(f"must name one drafter from tokens, not {' and '.join([*others, *known])}")
    of_heads = [part for part in known if part in HEADS]
    if len(of_heads) > 1:
        raise ValueError(f"must name one method of heads, not {' and '.join(of_heads)}")
    return "+".join([*others, *known])


class DraftConfig(ModelConfig):
    """How drafts are made: by a draft model, by prompt lookup, by heads."""

    of_application: ClassVar[frozenset[str]] = frozenset(("application", "method", "heads", "tree_tokens"))
    """Keys that say nothing of the draft model itself."""

    method: Annotated[str, BeforeValidator(draft_method)] = Field(
        "model",
        description=f"who drafts: model, {', '.join(_WITHOUT_MODEL)}, or package.module:name; several joined by +",
    )
    heads: str | None = Field(
        None,
        min_length=1,
        description="hub id or local folder of the target's heads; none: the demo target's",
    )
    tree_tokens: int = Field(
        0,
        ge=0,
        le=64,
        description="most tokens of a tree that heads draft; attention layers only",
    )
    parallel_drafting: bool = Field(
        False,
        description="the draft model gives a round's tokens in one pass; config.json names its mask token",
    )
    other_vocabulary: bool = Field(
        False,
        description="allow a draft model with another vocabulary; tokens that both have are drafted",
    )
    placement: Literal["auto", "same_process", "separate"] = Field(
        "auto",
        description="where one's own draft model runs; auto: in the target's process on a shared GPU",
    )
    application: str | None = Field(
        None,
        min_length=1,
        description="application of the draft model, in a Serve configuration of one's own",
    )

    @property
    def methods(self) -> list[str]:
        """The method's parts."""
        return self.method.split("+")

    @property
    def token_drafter(self) -> str | None:
        """What drafts from tokens: a name of ``TOKEN_DRAFTERS``, an import string, or None."""
        return next((part for part in self.methods if part not in ("model", self.head_method)), None)

    @property
    def head_method(self) -> str | None:
        """The method of heads on the target, a name or, with ``heads``, an import string; None where none draft."""
        named = [part for part in self.methods if part in HEADS]
        outside = [part for part in self.methods if IMPORT_STRING.fullmatch(part)] if self.heads is not None else []
        return next(iter(named or outside), None)

    @property
    def takes_demo_heads(self) -> bool:
        """Whether the demo's heads are of the method."""
        return self.head_method == DEMO_HEADS

    @property
    def has_heads(self) -> bool:
        """Whether heads on the target draft."""
        return self.head_method is not None

    @model_validator(mode="after")
    def _of_one_kind(self) -> DraftConfig:
        others = ", ".join(sorted(self.model_fields_set - self.of_application))
        if "model" not in self.methods and (others or self.application):
            both = draft_method([*self.methods, "model"])
            raise ValueError(
                f"method {self.method} has no draft model: leave out all else of draft, or say {both} to have both"
            )
        if self.heads is not None and not self.has_heads:
            raise ValueError(f"heads needs method {' or '.join(HEADS)}, alone or with others, not {self.method}")
        if self.tree_tokens and not self.has_heads:
            raise ValueError("tree_tokens needs heads: what a draft model or prompt lookup drafts is a chain")
        if self.application is not None and others:
            raise ValueError(f"the application says what its draft model is: leave out application or {others}")
        return self


class AdapterConfig(StrictModel):
    """One adapter."""

    name: str = Field(min_length=1, max_length=256, description="by which requests ask for it")
    path: str = Field(min_length=1, description="hub id, or a folder on every machine with an ingress or a model")
    draft: str | None = Field(None, min_length=1, description="the same for the draft model's adapter")


def named_paths(value: Any) -> Any:
    """Read a list of adapters; on a command line ``name=path``, with commas between them.

    Raises:
        ValueError: One is not of this form.
    """
    if not isinstance(value, str):
        return value
    pairs = [entry.strip().partition("=") for entry in value.split(",")]
    if not all(name and path for name, _, path in pairs):
        raise ValueError("must be a list of adapters with name and path; on a command line name=path,name=path")
    return tuple({"name": name, "path": path} for name, _, path in pairs)


class LoraConfig(StrictModel):
    """LoRA adapters by request."""

    adapters: Annotated[tuple[AdapterConfig, ...], BeforeValidator(named_paths)] = Field(
        (),
        description="adapters that are always there: name, path, and optionally draft, the draft's adapter",
    )
    models: Literal["auto", "target", "both"] = Field(
        "auto",
        description="models that take adapters; auto: as adapters, folder and hub need",
    )
    folder: str | None = Field(
        None,
        min_length=1,
        description="folder, on every machine, of adapters that requests may name; none: no others",
    )
    hub: bool = Field(False, description="let it take adapters from the hub, too")
    max_adapter_bytes: int = Field(
        1 << 30, ge=1 << 10, le=1 << 40, description="largest adapter that a request may load from the hub, in bytes"
    )
    load_timeout_s: float = Field(
        300.0, gt=0, le=86400, description="longest time that a request to load an adapter may take; then 504"
    )
    max_loras: int = Field(4, ge=1, le=4096, description="adapters on a device at once; sequences with others wait")
    max_rank: int = Field(16, ge=1, le=4096, description="largest rank; max_loras of it are counted as memory")

    @model_validator(mode="after")
    def _names_once(self) -> LoraConfig:
        names = [adapter.name for adapter in self.adapters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"adapters names {twice} twice")
        if self.models == "target" and (self.is_dynamic or any(adapter.draft for adapter in self.adapters)):
            raise ValueError("models must be both, or auto, where the draft may have adapters too")
        return self

    @property
    def is_dynamic(self) -> bool:
        """Whether adapters may be loaded while the service runs."""
        return self.folder is not None or self.hub

    @property
    def is_enabled(self) -> bool:
        """Whether the target has room for adapters."""
        return self.models != "auto" or self.is_dynamic or bool(self.adapters)

    @property
    def has_draft_adapters(self) -> bool:
        """Whether the draft has."""
        if self.models != "auto":
            return self.models == "both"
        return self.is_dynamic or any(adapter.draft for adapter in self.adapters)
