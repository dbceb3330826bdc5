"""What may draft for the chat demo in the place of its two layers: Medusa heads, an EAGLE-3 head, a PARD draft.

All learn what the target says in the chats of :mod:`examples.train_draft.chat`, by the forward KL over the tokens that
occur there, in answers alone, and begin as parts of the target: Medusa heads change nothing, the EAGLE-3 head is its
last layer over one of its later states, and the PARD draft is the demo's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from examples.train_draft import chat, checkpoints, heads, loop, models
from examples.train_draft.chat import Chats
from examples.train_draft.checkpoints import Checkpoint
from examples.train_draft.distill import divergence
from examples.train_draft.loop import LossFunction, Plan
from examples.train_draft.models import TrainedEagle3
from examples.train_draft.optimizers import Rates
from examples.train_draft.parallel_drafting import LATER, Masks, packed_states
from specdec.drafting.eagle3.layouts import Eagle3Config
from specdec.drafting.medusa.heads import HeadsConfig, MedusaHeads

Kind = Literal["medusa", "eagle3", "pard"]
_NUM_HEADS = 4
_NUM_PLACES = 3
"""Tokens in a row that the EAGLE-3 head learns to draft over what it made of the ones before."""
_MASKS = Masks(num_masks=7, num_anchors=12)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is learned.

    Attributes:
        chats: What the target wrote.
        vocabulary: Tokens that count, int64 [n].
        weights: Of the target's vocabulary head, float32 [n, hidden size].
    """

    chats: Chats
    vocabulary: Tensor
    weights: Tensor

    @classmethod
    def of(cls, target: PreTrainedModel, chats: Chats) -> Lesson:
        """Over the tokens that occur in the chats more than once."""
        vocabulary = chat.vocabulary_of(chats, target.config.vocab_size)
        return cls(chats, vocabulary, target.lm_head.weight.detach()[vocabulary])

    def tokens(self, number: int) -> Tensor:
        """Of a chat, int64 [T]."""
        return torch.from_numpy(self.chats.tokens[number].astype(np.int64))

    def states(self, number: int) -> Tensor:
        """Of the target after its last norm, float32 [T, hidden size]."""
        return torch.from_numpy(self.chats.hidden[number].astype(np.float32))

    def says(self, states: Tensor) -> Tensor:
        """Log probabilities of what is said, float32 [N, n], by states [N, hidden size]."""
        return functional.log_softmax(states @ self.weights.T, -1)

    def loss(self, number: int, states: Tensor, places: Tensor) -> Tensor:
        """How far what is said by states [N, hidden size] is from what the target says at places of a chat, int64 [N].

        Only what the assistant says counts: place p says token p + 1.
        """
        places, states = places.flatten(), states.flatten(0, -2)
        counts = torch.from_numpy(self.chats.answers[number])[places + 1]
        of_target = self.says(self.states(number)[places[counts]])
        return divergence(self.says(states[counts]), of_target, 0.0)


def _mean(loss: Callable[[int], Tensor]) -> LossFunction:
    """Over numbers of chats, int64 [B, 1]."""
    return lambda numbers: torch.stack([loss(number) for number in numbers.flatten().tolist()]).mean()[None]


def medusa_loss(medusa: MedusaHeads, lesson: Lesson) -> LossFunction:
    """Each head's loss counts for less than that of the one before."""

    def loss_of(number: int) -> Tensor:
        hidden = lesson.states(number)[: -1 - medusa.num_tokens]
        places = torch.arange(len(hidden))
        of_heads = enumerate(medusa.states(hidden), 1)
        return torch.stack([heads.LATER**i * lesson.loss(number, made, places + i) for i, made in of_heads]).sum()

    return _mean(loss_of)


def begin_medusa(target: PreTrainedModel) -> PreTrainedModel:
    """Heads of one layer that change nothing yet."""
    config = target.config
    shape = HeadsConfig(config.hidden_size, config.vocab_size, _NUM_HEADS, medusa_fc_bias=True, original_lm_head=True)
    return models.from_fields(shape.to_dict())


def begin_eagle3(target: PreTrainedModel) -> PreTrainedModel:
    """The target's last layer over the latest state that it reads; it does not look at tokens yet."""
    config, size = target.config, target.config.hidden_size
    layer = AutoConfig.for_model(**config.to_dict() | {"num_hidden_layers": 1})
    shape = Eagle3Config(layer, config.vocab_size, size)
    shape = replace(shape, eagle_aux_hidden_state_layer_ids=shape.layers_read(config.num_hidden_layers))
    head = models.from_fields(shape.to_dict())
    last = target.model.layers[-1].state_dict()
    state = {f"layers.0.{name}": tensor for name, tensor in last.items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        of_features = last[f"self_attn.{name}.weight"]
        state[f"layers.0.self_attn.{name}.weight"] = torch.cat((torch.zeros_like(of_features), of_features), 1)
    state["layers.0.hidden_norm.weight"] = last["input_layernorm.weight"]
    state["layers.0.input_layernorm.weight"] = torch.ones(size)
    state["norm.weight"] = target.model.norm.weight
    state["fc.weight"] = torch.cat((torch.zeros(size, 2 * size), torch.eye(size)), 1)
    head.load_state_dict(state)
    return head


def seen_in_drafts(length: int, num_places: int) -> Tensor:
    """What sees what where drafts of all positions are packed, bool [num_places * length] squared.

    Row i of part j is the token of a draft that ends at position i and began j tokens before: it sees the text up to
    there, and its own draft (Li et al. 2025, "EAGLE-3", section 3.2).
    """
    places = torch.arange(length)
    behind = places[:, None] - places
    parts = [[behind >= j] + [behind == j - m for m in range(1, num_places)] for j in range(num_places)]
    for j, row in enumerate(parts):
        row[1 + j :] = [torch.zeros(length, length, dtype=torch.bool)] * (num_places - 1 - j)
    return torch.cat([torch.cat(row, 1) for row in parts])


def packed_drafts(head: TrainedEagle3, fused: Tensor, followed: Tensor, num_places: int) -> list[Tensor]:
    """What the logits of drafts of several tokens are of, [T, F] for each place.

    Args:
        head: Reads the target's embeddings.
        fused: Features of the states of T tokens, [T, F].
        followed: The token after each, int64 [T].
        num_places: Of a draft.

    Returns:
        Row i of place j follows token i + 1 in a draft that began j tokens before; the first j rows are of no draft.
    """
    length, features, made, cache = len(fused), fused, list[Tensor](), DynamicCache()
    positions = torch.arange(length)
    for count in range(1, num_places + 1):
        sees = seen_in_drafts(length, count)[-length:][None, None]
        made.append(head(features, followed, positions, attention_mask=sees, past_key_values=cache))
        features = torch.cat((made[-1][:1], made[-1][:-1]))
    return made


def eagle3_loss(head: TrainedEagle3, lesson: Lesson, read: np.ndarray, num_places: int = _NUM_PLACES) -> LossFunction:
    """Later tokens of a draft are learned over the features that the head made for those before (EAGLE-3, section 3.2).

    Args:
        head: Reads the target's embeddings.
        lesson: What is learned.
        read: The states that it reads, float16 [num_chats, T, 3 * hidden size].
        num_places: Tokens in a row that are learned.
    """

    def loss_of(number: int) -> Tensor:
        tokens, states = lesson.tokens(number), torch.from_numpy(read[number].astype(np.float32))
        length = len(tokens) - 2
        fused, places = head.fuse(states[:length].chunk(3, -1)), 1 + torch.arange(length)
        made = packed_drafts(head, fused, tokens[1 : 1 + length], num_places)
        losses = [LATER**j * lesson.loss(number, head.norm(one)[j:], places[j:]) for j, one in enumerate(made)]
        return torch.stack(losses).sum()

    return _mean(loss_of)


@torch.no_grad()
def write_read_states(target: PreTrainedModel, layers: list[int], chats: Chats, path: Path) -> np.ndarray:
    """The input of some of the target's layers in the chats, float16 [num_chats, T, layers * hidden size]; once."""
    shape = (*chats.tokens.shape, len(layers) * target.config.hidden_size)
    if not path.exists() or path.stat().st_size != 2 * np.prod(shape):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            for tokens in chats.tokens:
                rows = torch.from_numpy(tokens.astype(np.int64))[None]
                states = target.model(rows, use_cache=False, output_hidden_states=True).hidden_states
                file.write(torch.cat([states[i] for i in layers], -1).half().numpy().tobytes())
        partial.replace(path)
    return np.memmap(path, dtype=np.float16, mode="r").reshape(shape)


def begin_pard(draft: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, chats: Chats) -> PreTrainedModel:
    """The demo's draft, whose mask token is a special one that no chat has, as in PARD's own checkpoints."""
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    unused = sorted(set(special) - set(np.unique(chats.tokens).tolist()))
    fields = {"pard_token": unused[-1], "spd_type": "pard", "para_num": 1 + _MASKS.num_masks}
    made = models.from_fields(draft.config.to_dict() | fields)
    made.load_state_dict(draft.state_dict())
    return made


def pard_loss(draft: PreTrainedModel, lesson: Lesson, masks: Masks = _MASKS) -> LossFunction:
    """As :func:`examples.train_draft.parallel_drafting.parallel_drafting_loss`, over the chats."""

    def loss_of(number: int) -> Tensor:
        tokens = lesson.tokens(number)[:-1]
        anchors, sees = masks.layout(len(tokens), number)
        states = packed_states(draft, tokens[None], anchors, sees, masks.num_masks)[0]
        loss = lesson.loss(number, states[: len(tokens)], torch.arange(len(tokens)))
        of_masks = states[len(tokens) :].unflatten(0, (masks.num_anchors, masks.num_masks))
        for i in range(masks.num_masks):
            loss = loss + LATER**i * lesson.loss(number, of_masks[:, i], anchors + 1 + i)
        return loss

    return _mean(loss_of)


def train(
    kind: Kind,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    chats: Chats,
    plan: Plan,
    rates: Rates,
    work: Path,
) -> Checkpoint:
    """Trains, or goes on training, the drafter at ``work/chat-KIND.pt``; exports it to ``work/pair/chat-KIND``.

    Args:
        kind: What is trained.
        target: Its model, not to be trained.
        draft: The demo's draft, with which a PARD draft begins.
        tokenizer: Of both.
        chats: What the target wrote.
        plan: How long, and how steps are made.
        rates: Learning rates.
        work: Folder of checkpoints.
    """
    path, lesson = work / f"chat-{kind}.pt", Lesson.of(target, chats)
    begin: dict[Kind, Callable[[], PreTrainedModel]] = {
        "medusa": lambda: begin_medusa(target),
        "eagle3": lambda: begin_eagle3(target),
        "pard": lambda: begin_pard(draft, tokenizer, chats),
    }
    checkpoint = checkpoints.load(path) if path.exists() else Checkpoint(begin[kind](), {}, 0, 0, 0.0)
    model: Any = checkpoint.model
    if kind == "medusa":
        loss_of = medusa_loss(model, lesson)
    elif kind == "eagle3":
        model.reads(target.get_input_embeddings().weight)
        read = write_read_states(target, [*model.hidden_layers], chats, work / "chat-states.bin")
        loss_of = eagle3_loss(model, lesson, read)
    else:
        model.get_input_embeddings().requires_grad_(False)
        loss_of = pard_loss(model, lesson)
    source = chat.numbers(len(chats.tokens) - chats.num_held_out, plan, checkpoint.step)
    loop.train([loop.Student(checkpoint, rates, path)], source, plan, loss_of)
    folder = work / "pair" / f"chat-{kind}"
    if kind == "medusa":
        heads.export_heads(model, folder)
    elif kind == "eagle3":
        models.export_eagle3(model, folder)
    else:
        models.export(model, tokenizer, folder)
    return checkpoint
