"""Keys of LoRA adapters: which there are, where more may come from, and how many a device holds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cluster.config.base import StrictModel


class AdapterConfig(StrictModel):
    """One adapter."""

    name: str = Field(min_length=1, max_length=256, description="by which requests ask for it")
    path: str = Field(min_length=1, description="hub id, or a folder on every machine with an ingress or a model")
    draft: str | None = Field(None, min_length=1, description="the same for its twin on the draft model")


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
        (), description="adapters that are always there: name, path, and maybe draft, the path of a twin for the draft"
    )
    models: Literal["auto", "target", "both"] = Field(
        "auto",
        description="models that take adapters; auto: as adapters, folder and hub need; specdec render says "
        "it, so that a change of adapters restarts nothing",
    )
    folder: str | None = Field(
        None,
        min_length=1,
        description="folder, on every machine, from which POST /v1/load_lora_adapter takes others; none: from none",
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
            raise ValueError("models must be both, or auto, where adapters may have a twin for the draft")
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
    def has_twins(self) -> bool:
        """Whether the draft has."""
        if self.models != "auto":
            return self.models == "both"
        return self.is_dynamic or any(adapter.draft for adapter in self.adapters)
