"""Drafts of heads on the target, for the next round of each sequence that a step has decided.

Heads on the target: they read its last hidden states, and give candidates for the tokens after the next one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import silu

from specdec.core.drafts import NO_DRAFT, Draft, chain_shape, tree_shape
from specdec.core.errors import ModelLoadError
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenBuffer, TokenSequence
from specdec.models.loading import LoadedModel
from specdec.sampling.acceptance import Drawn, propose_siblings
from specdec.sampling.pipeline import RowGroup, Sampler


class DraftHeads(Protocol):
    """What drafts in the target's process; nothing here decides a token."""

    @property
    def num_tokens(self) -> int:
        """How many positions in a row are proposed for."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits for the positions that follow the token which the model itself chooses.

        Args:
            hidden: [R, hidden size], what the model's vocabulary head read at the last committed tokens but one.

        Returns:
            float32 [num_tokens, R, V].
        """
        ...


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

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As :meth:`DraftHeads.logits`."""
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


def load_heads(path: str, target: LoadedModel) -> MedusaHeads:
    """Load Medusa heads for a model, into its dtype and onto its device.

    Args:
        path: Local folder or hub id, with ``config.json`` and safetensors.
        target: The model.

    Raises:
        ModelLoadError: They cannot be read, or are not this model's.
    """
    if target.opaque_state is not None:
        raise ModelLoadError(f"{target.name} keeps a state that can only be copied: it takes no heads")
    folder = _folder(path)
    try:
        config = HeadsConfig.read(json.loads((folder / "config.json").read_text()))
        weights = {
            name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
        }
    except KeyError as error:
        raise ModelLoadError(f"{path} has no Medusa heads: its config.json lacks {error}") from error
    except (OSError, ValueError, TypeError, SafetensorError) as error:
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


def _folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ModelLoadError(f"there is no folder {path} with heads")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["config.json", "*.safetensors"]))
    except Exception as error:  # a lost connection is the HTTP client's own kind of error
        raise ModelLoadError(f"cannot load the heads {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """Which heads are on a target, and how far they draft.

    Attributes:
        path: Local folder or hub id.
        most_tokens: Draft tokens in a row, at most, where the request names no bound of its own.
        tree_tokens: Tokens of a draft that is a tree; with no more than are in a row it is a chain.
    """

    path: str
    most_tokens: int
    tree_tokens: int = 0


class HeadDrafter:
    """Draws from each head in turn, by the rule and the parameters of its sequence: a token, or several for a tree.

    Args:
        heads: Give logits for the positions after the next token.
        sampler: Of the target: what it may not say is not drafted.
        most_tokens: As in :class:`HeadsOptions`.
        tree_tokens: As there.
    """

    def __init__(self, heads: DraftHeads, sampler: Sampler, most_tokens: int, tree_tokens: int = 0) -> None:
        self._heads = heads
        self._sampler = sampler
        self._most = min(most_tokens, heads.num_tokens)
        self._shape = tree_shape(tree_tokens, self._most) if tree_tokens > self._most > 0 else chain_shape(self._most)
        self._most = 1 + max((node.place for node in self._shape), default=-1)
        ranks = {(node.place, node.rank) for node in self._shape}
        self._num_ranks = [sum(place == at for place, _ in ranks) for at in range(self._most)]

    def drafts(self, hidden: torch.Tensor, decided: Sequence[tuple[SequenceSpec, TokenSequence]]) -> list[Draft]:
        """A draft for each sequence; the heads know its last token only by what made the model choose it.

        Args:
            hidden: [R, hidden size], from which each sequence's last token was chosen.
            decided: R sequences: parameters, and all committed tokens.
        """
        drafts = [NO_DRAFT] * len(decided)
        counts = [self._count(spec) for spec, _ in decided]
        drafting = [i for i, count in enumerate(counts) if count]
        if not drafting:
            return drafts
        # Without drawing: what a sampler makes in this mode and keeps could not be changed outside of it.
        with torch.inference_mode():
            logits = self._heads.logits(hidden[drafting] if len(drafting) < len(decided) else hidden)
        texts = {i: TokenBuffer(decided[i][1]) for i in drafting}
        places: list[list[list[Drawn]]] = [[] for _ in drafting]
        for of_head, num_ranks in zip(logits, self._num_ranks[: max(counts)], strict=False):
            groups = [RowGroup(decided[i][0], texts[i].array) for i in drafting]
            # Heads that overflow draft badly, and no more: what they were drawn from stays a distribution.
            siblings = propose_siblings(self._sampler, of_head.nan_to_num(0.0), groups, num_ranks)
            for i, of_row, drawn in zip(drafting, places, siblings, strict=True):
                texts[i].append(drawn[0].token)
                of_row.append(drawn)
        self._sampler.take_failures()  # what a hook made of a draft fails no sequence
        for i, of_row in zip(drafting, places, strict=True):
            drafts[i] = self._shaped(of_row[: counts[i]])
        return drafts

    def _shaped(self, places: list[list[Drawn]]) -> Draft:
        """The shape's tokens, as far as there are heads and candidates; which ones depends on no token drawn."""
        numbers, parents = {-1: -1}, list[int]()
        drawn: list[Drawn] = []
        for number, node in enumerate(self._shape):
            if node.parent in numbers and node.place < len(places) and node.rank < len(places[node.place]):
                numbers[number] = len(drawn)
                parents.append(numbers[node.parent])
                drawn.append(places[node.place][node.rank])
        candidates = tuple(one.candidates for one in drawn if one.candidates is not None)
        is_chain = parents == list(range(-1, len(parents) - 1))
        return Draft(tuple(one.token for one in drawn), candidates, "medusa", () if is_chain else tuple(parents))

    def _count(self, spec: SequenceSpec) -> int:
        bound = spec.num_speculative_tokens
        return self._most if bound is None else min(bound, self._most)
