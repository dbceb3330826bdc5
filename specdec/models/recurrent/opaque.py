"""States that are only known as what a model returns, to be given back to it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.errors import ModelLoadError

NUM_COPIES = 3
"""Of a state: the newest, and two earlier ones to go back to."""
_NAMES = ("state", "cache_params", "past_key_values")
_NUM_TOKENS = (1, 33)


@dataclass(frozen=True, slots=True)
class OpaqueState:
    """A model's state as an object of its own.

    Attributes:
        argument: Under which name the model takes it, and returns it.
        bytes_per_sequence: Bytes of its tensors that do not grow.
        bytes_per_token: Bytes by which they grow with a token.
    """

    argument: str
    bytes_per_sequence: int
    bytes_per_token: int


@torch.inference_mode()
def find_opaque_state(model: PreTrainedModel) -> OpaqueState:
    """Run a model over a few tokens and measure what it returns as its state.

    Raises:
        ModelLoadError: it returns none, or cannot run.
    """
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    argument = next((known for known in _NAMES if known in parameters), None)
    sizes = []
    try:
        for num_tokens in _NUM_TOKENS:
            tokens = torch.zeros(1, num_tokens, dtype=torch.long, device=model.get_input_embeddings().weight.device)
            output = model(input_ids=tokens, use_cache=True)
            state = None if argument is None else getattr(output, argument, None)
            sizes.append(sum(tensor.nbytes for tensor in _tensors(state, set())))
    except Exception as error:
        raise ModelLoadError(f"{name} cannot run with a state: {type(error).__name__}: {error}") from error
    if argument is None or not sizes[0]:
        raise ModelLoadError(f"{name} has recurrent layers and does not give their state away")
    per_token = -(-(sizes[1] - sizes[0]) // (_NUM_TOKENS[1] - _NUM_TOKENS[0]))
    return OpaqueState(argument, max(0, sizes[0] - per_token), max(0, per_token))


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that an object leads to, each once."""
    if id(value) in seen or value is None or isinstance(value, str | int | float | type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, seen)
    elif type(value).__module__.startswith("transformers."):
        for item in vars(value).values():
            if not hasattr(item, "to_diff_dict"):  # a configuration holds none
                yield from _tensors(item, seen)
