"""Operators that recorded layers call in place of what cannot be recorded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_NAMESPACE = "specdec"
"""Of the operators, in ``torch.ops``."""


@dataclass(frozen=True, slots=True)
class Operators:
    """Operators of torch's registry, which knows them as long as this lives.

    Attributes:
        library: What they are registered with.
        attention: (query, key, value) -> attended; marks where attention belongs, and is never run.
        packed_linear: (inputs, packed weight, bias or None) -> results. Inductor takes torch's own operator only with
            constant weights, with which every layer would have to be compiled.
    """

    library: torch.library.Library
    attention: Any
    packed_linear: Any


@cache
def operators() -> Operators:
    """Register them, at the first call."""
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("attention(Tensor query, Tensor key, Tensor value) -> Tensor")  # type: ignore[no-untyped-call]
    library.define("packed_linear(Tensor inputs, Tensor packed, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
    # Chosen by the inputs' device alone, as packed weights are of a kind of their own.
    library.impl("packed_linear", _multiply, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_NAMESPACE}::attention", _attended_shape, lib=library)
    torch.library.register_fake(f"{_NAMESPACE}::packed_linear", _multiplied_shape, lib=library)
    registered = getattr(torch.ops, _NAMESPACE)
    return Operators(library, registered.attention.default, registered.packed_linear.default)


def _multiply(inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(inputs, packed, bias, "none", [], "")
    return result


def _multiplied_shape(inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return inputs.new_empty(*inputs.shape[:-1], packed.shape[0])


def _attended_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    batch, num_heads, length, _ = query.shape
    return query.new_empty(batch, length, num_heads, value.shape[3])
