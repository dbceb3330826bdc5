"""Further drafters of a service: each has a name, and a draft model with replicas of its own, or a pool."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from pydantic import Field, model_validator

from cluster.config.models import DraftConfig
from cluster.config.replicas import MOST_REPLICAS, ActorOptions
from specdec.core.messages import DRAFTER

MOST_DRAFTERS = 7
"""Beside ``draft``."""
_OWN = frozenset(("name", "replicas", "actor"))
_OF_TARGET = frozenset(("heads", "tree_tokens"))


class DrafterConfig(DraftConfig):
    """One of several drafters: the keys of ``draft`` that are of a draft model, and where it runs; or a pool."""

    beside_pool: ClassVar[frozenset[str]] = frozenset(("name", "pool"))

    name: str = Field(description="by which metrics tell of it")
    replicas: int = Field(1, ge=1, le=MOST_REPLICAS, description="copies of it")
    actor: ActorOptions = Field(default_factory=ActorOptions, description="explicit placement of one")

    @model_validator(mode="before")
    @classmethod
    def _is_a_process_of_its_own(cls, data: Any) -> Any:
        if isinstance(data, dict):
            name = data.get("name")
            if not re.fullmatch("[a-z][a-z0-9-]{0,31}", str(name)) or name in ("target", DRAFTER):
                raise ValueError(
                    "each needs a name: a small letter, then small letters, digits and dashes, 32 at most; not target, "
                    f"nor {DRAFTER}, the name of draft itself"
                )
            if data.get("placement") == "same_process":
                raise ValueError(f"{name} drafts in a process of its own: same_process is for draft")
            if data.get("method", "model") != "model" or _OF_TARGET & data.keys():
                raise ValueError(
                    f"{name} drafts by a model: lookup and heads draft in the target's process, joined in draft.method"
                )
            if not data.get("model") and not data.get("pool"):
                raise ValueError(f"{name} must have a model or a pool")
        return data

    def as_draft(self) -> dict[str, Any]:
        """What it says of its model, as the keys of ``draft``."""
        return self.model_dump(exclude_unset=True, exclude=set(_OWN))


def pool_key(name: str) -> str:
    """The key by which the drafter of a name is another application's."""
    return "draft.pool" if name == DRAFTER else f"drafters.{name}.pool"


def named_models(value: Any) -> Any:
    """Read a list of drafters; on a command line ``name=model``, with commas between them.

    Raises:
        ValueError: It is not of this form, or two have one name.
    """
    if isinstance(value, str):
        pairs = [entry.strip().partition("=") for entry in value.split(",")]
        if not all(name and model for name, _, model in pairs):
            raise ValueError("must be a list of drafters with name and model; on a command line name=model,name=model")
        value = tuple({"name": name, "model": model} for name, _, model in pairs)
    names = [one.get("name") for one in value if isinstance(one, dict)] if isinstance(value, (list, tuple)) else []
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"names {twice} twice")
    return value
