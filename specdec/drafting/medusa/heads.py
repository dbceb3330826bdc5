"""Medusa heads: they read the target's last hidden state, and give candidates for the tokens after the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from specdec.core.errors import ModelLoadError
from specdec.drafting.heads import read_heads
from specdec.models.hidden import AFTER_NORM
from specdec.models.loading import LoadedModel
from specdec.models.probe import AttentionLayer


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """The shape of Medusa heads, by the names of their ``config.json``.

    Attributes:
        num_heads: Positions proposed for.
        num_hidden_layers: Residual layers of a head.
        medusa_fc_bias: Whether these have biases.
        truncated_vocab_size: Tokens that heads know, of those that ``token_map`` lists; None for all.
        original_lm_head: All heads share one vocabulary head; it is the model's own where the file holds none.
        logit_scale: Factor of the logits.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_hidden_layers: int = 1
    medusa_fc_bias: bool = False
    truncated_vocab_size: int | None = None
    original_lm_head: bool = False
    logit_scale: float = 1.0

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> HeadsConfig:
        """From a ``config.json``: any number of heads or layers is what its name says (``medusa_num_heads``).

        Raises:
            KeyError: A size is missing.
        """
        known = {name: fields[name] for name in cls.__slots__ if name in fields}
        for name, value in fields.items():
            if "num" in name and "heads" in name:
                known["num_heads"] = value
            elif "num" in name and "layers" in name:
                known["num_hidden_layers"] = value
        for name in ("hidden_size", "vocab_size", "num_heads"):
            known[name] = int(known[name])
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        return {"model_type": "medusa", "architectures": ["MedusaModel"], **asdict(self)}


class _ResidualBlock(nn.Module):
    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(
            nn.Linear(size, size, bias=config.medusa_fc_bias) for _ in range(config.num_hidden_layers)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + silu(layer(hidden))
        return hidden


class MedusaHeads(nn.Module):
    """Residual layers on the last hidden state and a vocabulary head, for each position.

    Cai et al. 2024, "Medusa: Simple LLM inference acceleration framework with multiple decoding heads", section 2.1.
    Parameters have the names that vLLM's ``vllm/model_executor/models/medusa.py`` reads.

    Args:
        config: The shape.
        lm_head: The model's own vocabulary head, for heads without one.
    """

    def __init__(self, config: HeadsConfig, lm_head: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(_ResidualBlock(config) for _ in range(config.num_heads))
        self._borrowed = (lm_head,)  # in a tuple: its weights are not part of the heads
        self.token_map: torch.Tensor | None
        self.register_buffer("token_map", None, persistent=False)
        width = config.truncated_vocab_size or config.vocab_size
        self.lm_heads = nn.ModuleList()
        if lm_head is None:
            count = 1 if config.original_lm_head else config.num_heads
            self.lm_heads.extend(nn.Linear(config.hidden_size, width, bias=False) for _ in range(count))

    @property
    def num_tokens(self) -> int:
        """How many positions in a row are proposed for."""
        return self.config.num_heads

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the vocabulary heads read: [..., hidden size] -> [num_tokens, ..., hidden size]."""
        return torch.stack([block(hidden) for block in self.blocks])

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What the model's vocabulary head reads."""
        return (AFTER_NORM,)

    @property
    def cache_layers(self) -> tuple[AttentionLayer, ...]:
        """None."""
        return ()

    @property
    def num_bytes(self) -> int:
        """Of its own weights."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def fuse(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The logits for all places, [N, num_tokens, vocabulary]: a head that all share is one product."""
        return self.all_logits(states[0]).transpose(0, 1)

    def logits(self, features: torch.Tensor, place: int) -> torch.Tensor:
        """As :meth:`specdec.drafting.heads.DraftHeads.logits`."""
        return features[:, place]

    def all_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits for the positions that follow the token which the model itself chooses.

        Args:
            hidden: [R, hidden size], what the model's vocabulary head read.

        Returns:
            float32 [num_tokens, R, vocabulary].
        """
        states = self.states(hidden)
        shared = self._borrowed[0] or (self.lm_heads[0] if self.config.original_lm_head else None)
        if shared is not None:
            logits: torch.Tensor = shared(states)
        else:
            logits = torch.stack([head(state) for head, state in zip(self.lm_heads, states, strict=True)])
        logits = logits.float() * self.config.logit_scale
        if self.token_map is None:
            return logits
        spread = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        return spread.index_copy_(-1, self.token_map, logits)


def load(path: str, target: LoadedModel) -> MedusaHeads:
    """Load Medusa heads for a model, into its dtype and onto its device.

    Args:
        path: Local folder or hub id, with ``config.json`` and safetensors.
        target: The model.

    Raises:
        ModelLoadError: They cannot be read, or are not this model's.
    """
    fields, weights = read_heads(path)
    try:
        config = HeadsConfig.read(fields)
    except KeyError as error:
        raise ModelLoadError(f"{path} has no Medusa heads: its config.json lacks {error}") from error
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"cannot load the heads {path}: {error}") from error
    lm_head = target.model.get_output_embeddings()
    width = lm_head.in_features if lm_head is not None else None
    if (config.hidden_size, config.vocab_size) != (width, target.vocab_size):
        raise ModelLoadError(
            f"the heads {path} are not for {target.name}: hidden_size and vocab_size must be {width} and "
            f"{target.vocab_size}, not {config.hidden_size} and {config.vocab_size}"
        )
    weights = {name.replace("medusa_heads.", "").replace("lm_head.", "lm_heads.0."): t for name, t in weights.items()}
    token_map = weights.pop("token_map", None)
    borrows = config.original_lm_head and not any(name.startswith("lm_heads.") for name in weights)
    heads = MedusaHeads(config, lm_head if borrows else None)
    _fill(heads, weights, token_map, path)
    heads.eval().requires_grad_(False).to(lm_head.weight.device, target.dtype)
    return heads


def _fill(heads: MedusaHeads, weights: dict[str, torch.Tensor], token_map: torch.Tensor | None, path: str) -> None:
    config = heads.config
    width = config.truncated_vocab_size or config.vocab_size
    if width < config.vocab_size:
        if token_map is None or token_map.shape != (width,):
            raise ModelLoadError(f"the heads {path} know {width} tokens: token_map must list as many")
        heads.token_map = token_map.long()
        for name, weight in weights.items():
            if name.startswith("lm_heads.") and len(weight) > width:
                weights[name] = weight[heads.token_map]
    expected = {name: parameter.shape for name, parameter in heads.state_dict().items()}
    wrong = sorted(name for name in expected if name not in weights or weights[name].shape != expected[name])
    if wrong:
        raise ModelLoadError(f"the weights of the heads {path} lack {wrong[0]}, or have it in another shape")
    heads.load_state_dict({name: weights[name] for name in expected})
