"""The bodies of ``POST /v1/load_lora_adapter`` and ``POST /v1/unload_lora_adapter``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import StringConstraints

from deployments.http.schemas.fields import Body

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
AdapterPath = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class LoadAdapterBody(Body):
    """An adapter to load.

    Attributes:
        lora_name: By which requests ask for it.
        lora_path: A folder in that of the configuration, or a hub id.
        load_inplace: Whether it may take the place of another of that name.
        draft_lora_path: The same for its twin on the draft model.
    """

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = {"is_3d_lora_weight": (False,)}

    lora_name: Name
    lora_path: AdapterPath
    load_inplace: bool | None = None
    draft_lora_path: AdapterPath | None = None


class UnloadAdapterBody(Body):
    """An adapter to unload, by its name."""

    taken: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: Name
