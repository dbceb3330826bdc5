"""Pairs of real shape, made on the device: of random weights, or such that each token's follower is set."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.gpu.steps import SHAPES, random_model

END, MAX_LENGTH = 1, 8192
_SCALE = 0.5
"""Of the heads that set the follower: its logit is far above all others, and within what bf16 holds."""
_NEXT = 0.8
"""Of the right token's logit over that of the wrong one that is said."""


def near_pair(
    fields: dict[str, object], device: torch.device, dtype: torch.dtype, noise: float
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target with random weights, and a draft that often agrees: the same with noise on its matrices.

    Args:
        fields: Of the target.
        device: Where both are made.
        dtype: Of their weights.
        noise: Its standard deviation over the weights' own.
    """
    torch.manual_seed(0)
    target = random_model(fields, device, dtype)
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim >= 2:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
    return target, draft


def chain_pair(
    shapes: str, device: torch.device, dtype: torch.dtype, acceptance_rate: float, *, next_guess: bool = False
) -> Iterator[tuple[str, PreTrainedModel]]:
    """A target that says a set follower after each token, and a draft that is right after a share of them.

    All matrices are read and multiplied, but layers add nothing: embeddings alone decide, and heads have them in
    another order. So drafts are accepted at the rate, whatever is generated. Only one model is in memory at a time,
    if the caller lets go of the one before.

    Args:
        shapes: A name in ``SHAPES``; the target is a whole number of times as wide as the draft.
        device: Where they are made.
        dtype: Of their weights.
        acceptance_rate: Share of tokens after which the draft is right.
        next_guess: Whether, where it is not, the right token is the next that it would say.

    Yields:
        ``target`` and ``draft``, each with its model.
    """
    of_target, of_draft = SHAPES[shapes]["target"], SHAPES[shapes]["draft"]
    width, vocab_size = int(str(of_draft["hidden_size"])), int(str(of_draft["vocab_size"]))
    repeats = int(str(of_target["hidden_size"])) // width
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randn(vocab_size, width, generator=generator, device=device)
    follower = torch.randperm(vocab_size, generator=generator, device=device)
    follower[follower == END] = 2  # nothing ends by itself
    heads = torch.zeros_like(tokens)
    heads[follower] = tokens * _SCALE
    yield "target", _chain_model(of_target, dtype, tokens.repeat(1, repeats), heads.repeat(1, repeats) / repeats)
    is_wrong = torch.rand(vocab_size, generator=generator, device=device) >= acceptance_rate
    wrong = tokens.roll(1, 0) + _NEXT * tokens if next_guess else tokens.roll(1, 0)
    yield "draft", _chain_model(of_draft, dtype, torch.where(is_wrong.unsqueeze(1), wrong, tokens), heads)


def save_pair(folder: Path, pair: Iterator[tuple[str, PreTrainedModel]]) -> None:
    """Write each model, and a tokenizer whose words are ``t0``, ``t1`` and so on, into a folder of its role's name."""
    for role, model in pair:
        model.save_pretrained(folder / role)
        words = {f"t{i}": i for i in range(model.config.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        names = {"unk_token": "t0", "eos_token": f"t{END}"}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, **names).save_pretrained(
            folder / role
        )


@torch.no_grad()
def _chain_model(
    fields: dict[str, object], dtype: torch.dtype, embeddings: torch.Tensor, heads: torch.Tensor
) -> PreTrainedModel:
    model = random_model(fields | {"tie_word_embeddings": False, "eos_token_id": END}, embeddings.device, dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
    model.get_input_embeddings().weight.copy_(embeddings)
    model.get_output_embeddings().weight.copy_(heads)
    return model
