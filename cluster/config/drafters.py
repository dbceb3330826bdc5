"""Further drafters of a service: each has a name, a draft model, and replicas of its own."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, model_validator

from cluster.config.models import DraftConfig
from cluster.config.replicas import MOST_REPLICAS, ActorOptions
from specdec.core.messages import DRAFTER

MOST_DRAFTERS = 7
"""Beside ``draft``."""
_OWN = frozenset(("name", "replicas", "actor"))
_OF_DRAFT = frozenset(("pool", "heads", "tree_tokens"))


class DrafterConfig(DraftConfig):
    """One of several drafters: the keys of ``draft`` that are of a draft model, and where it runs."""

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
            is_of_model = data.get("method", "model") == "model" and data.get("placement") != "same_process"
            if not is_of_model or not data.get("model") or _OF_DRAFT & data.keys():
                raise ValueError(f"{name} must have a model; pool, heads, other methods and same_process are for draft")
        return data

    def as_draft(self) -> dict[str, Any]:
        """What it says of its model, as the keys of ``draft``."""
        return self.model_dump(exclude_unset=True, exclude=set(_OWN))


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
