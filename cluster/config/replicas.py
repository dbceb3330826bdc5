"""How many replicas each deployment has: a number, or a range within which Serve follows the load.

What one replica asks of Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from cluster.config.base import StrictModel, first_error, refused_key
from cluster.config.names import AUTOSCALER

MOST_REPLICAS = 1024
_METRICS_INTERVAL_S, _LOOK_BACK_S = 1.0, 5.0
"""How often a replica reports its load to Serve, and over which time Serve takes the mean."""
_HELP = f"a whole number, at least 1 and at most {MOST_REPLICAS}, or a range such as {{min: 1, max: 4}}"


class ActorOptions(StrictModel):
    """What one replica asks of Ray, in place of what placement would choose."""

    num_gpus: float | None = Field(None, ge=0, le=64, description="GPUs of one replica; a fraction shares one")
    num_cpus: float | None = Field(
        None, ge=0, le=1024, description="CPU cores of one replica, and a model's torch threads"
    )
    resources: dict[str, float] = Field(default_factory=dict, description="Ray's custom resources of one replica")
    label_selector: dict[str, str] = Field(default_factory=dict, description="labels its node must have")
    accelerator_type: str | None = Field(None, description="kind of GPU its node must have")


class ReplicaRange(StrictModel):
    """As few replicas as the load needs, within bounds."""

    min: int = Field(
        1, ge=0, le=MOST_REPLICAS, description="replicas that are there in any case; 0 for the draft alone"
    )
    max: int = Field(ge=1, le=MOST_REPLICAS, description="replicas at most; placement keeps room for so many")
    sequences: float | None = Field(
        None, gt=0, le=65536, description="sequences that one replica is to hold; none: as many as it keeps up with"
    )
    upscale_delay_s: float = Field(10.0, ge=0, le=86400, description="more are started when needed for so long")
    downscale_delay_s: float = Field(300.0, ge=0, le=86400, description="some are stopped when not needed for so long")

    @model_validator(mode="after")
    def _is_a_range(self) -> ReplicaRange:
        if self.min > self.max:
            raise ValueError(f"min must be at most max ({self.max})")
        return self


def replica_count(value: Any) -> Any:
    """Read a number of replicas, or a range of them; text is read as YAML.

    Raises:
        ValueError: For anything else.
    """
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            value = None
    if isinstance(value, Mapping):
        try:
            return ReplicaRange.model_validate(value)
        except ValidationError as error:
            raise ValueError(first_error(ReplicaRange, error)[1]) from None
    is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_REPLICAS
    if not is_count and not isinstance(value, ReplicaRange):
        raise ValueError(f"must be {_HELP}")
    return value


ReplicaCount = Annotated[int | ReplicaRange, BeforeValidator(replica_count)]


class Replicas(StrictModel):
    """How many copies of each deployment run."""

    target: ReplicaCount = Field(1, description="replicas of the target: a number, or a range such as {min: 1, max: 4}")
    draft: ReplicaCount = Field(1, description="replicas of the draft, where there is one; min may be 0")
    router: ReplicaCount = Field(1, description="replicas of the router")
    ingress: ReplicaCount = Field(1, description="replicas of the HTTP ingress")

    @model_validator(mode="after")
    def _served_in_any_case(self) -> Replicas:
        for name in ("target", "router", "ingress"):
            if least(getattr(self, name)) < 1:
                raise refused_key(f"replicas.{name}", f"replicas.{name}: min must be at least 1: nobody would answer")
        return self


class Updates(StrictModel):
    """What happens to running replicas when a change restarts them."""

    target: Literal["auto", "surge", "replace"] = Field(
        "auto",
        description="surge: new replicas start first; replace: old ones stop first; auto: as room allows",
    )
    draft: Literal["auto", "surge", "replace"] = Field(
        "auto", description="the same for the draft; while it is replaced answers are the same, but slower"
    )
    router: Literal["surge", "replace"] = Field("surge", description="the same for the router")
    ingress: Literal["surge", "replace"] = Field("surge", description="the same for the HTTP ingress")


def scaling(count: int | ReplicaRange, part: str) -> dict[str, Any]:
    """The options of a Serve deployment, as plain data, for a number of replicas or for a range.

    Args:
        count: How many.
        part: The deployment's name in the configuration.
    """
    if isinstance(count, int) or count.min == count.max:
        return {"num_replicas": count if isinstance(count, int) else count.max}
    policy = {"policy_function": AUTOSCALER, "policy_kwargs": {"part": part, "sequences": count.sequences}}
    config = {
        "min_replicas": count.min,
        "max_replicas": count.max,
        "upscale_delay_s": count.upscale_delay_s,
        "downscale_delay_s": count.downscale_delay_s,
        "metrics_interval_s": _METRICS_INTERVAL_S,
        "look_back_period_s": _LOOK_BACK_S,
        "policy": policy,
    }
    return {"autoscaling_config": config}


def least(count: int | ReplicaRange) -> int:
    """Replicas that are there in any case."""
    return count if isinstance(count, int) else count.min


def most(count: int | ReplicaRange) -> int:
    """Replicas that there may be."""
    return count if isinstance(count, int) else count.max
