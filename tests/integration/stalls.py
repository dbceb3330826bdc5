"""A step of the target whose layers take long, or one of which blocks, beside seeded streams.

A hook on the logits goes by the bias of a request: once, the layers of the next step wait as it asks for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from specdec.core.params import SequenceSpec
from tests.specdec.hooks import by_row

HOOK = "tests.integration.stalls:hook"
STEP_TIMEOUT_S = 5.0
NUM_LAYERS = 12
"""Of the demo pair's target."""

PAUSES_S = {
    4004: (600.0,),
    4005: (20.0 / NUM_LAYERS,) * NUM_LAYERS,
}
"""How long each layer of one step waits, by the token whose bias asks for it."""
BLOCK, TWENTY_SECONDS = PAUSES_S


@by_row
def hook(spec: SequenceSpec, tokens: list[int], logits: torch.Tensor) -> None:
    """A logits processor after whose call for the fifth token the layers of one step wait."""
    for token, _ in spec.sampling.logit_bias:
        if token in PAUSES_S and len(tokens) == spec.output_start + 4:
            _wait_in_layers(PAUSES_S[token])


def asking_for(token: int, model: str) -> dict[str, Any]:
    """The body of a request that asks for pauses; without drafts, so that each position is decided once."""
    return {
        "model": model,
        "prompt": "def stall():\n",
        "max_tokens": 40,
        "temperature": 1,
        "seed": 1,
        "ignore_eos": True,
        "num_speculative_tokens": 0,
        "logit_bias": {str(token): 0.5},
    }


def _wait_in_layers(pauses_s: Sequence[float]) -> None:
    left = iter(pauses_s)

    def wait(module: nn.Module, _: object) -> None:
        if type(module).__name__.endswith("DecoderLayer"):
            pause_s = next(left, None)
            if pause_s is None:
                handle.remove()
            else:
                time.sleep(pause_s)

    handle = register_module_forward_pre_hook(wait)
