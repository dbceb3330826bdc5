"""The demo draft in other vocabularies, and with a mask token."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import specdec.demo

DRAFT = Path(specdec.demo.__path__[0]) / "draft"
_NUM_SPECIAL = 3
_PADDING = 16
"""The vocabulary's width stays a multiple of it."""


def save_shuffled(folder: Path) -> Path:
    """The demo draft with the same tokens in another order, but for those that are special."""
    order = [*range(_NUM_SPECIAL, _vocab_size())]
    random.Random(0).shuffle(order)
    return _save(folder, [*range(_NUM_SPECIAL), *order])


def save_smaller(folder: Path, num_tokens: int = 1500) -> Path:
    """The demo draft with the first tokens of its vocabulary alone."""
    return _save(folder, range(num_tokens))


def save_masked(folder: Path) -> Path:
    """The demo draft with a mask token, ``pard_token``, which it was not taught: it begins as the mean of others."""
    shutil.copytree(DRAFT, folder)
    weights = load_file(DRAFT / "model.safetensors")
    name = "model.embed_tokens.weight"
    mean = weights[name].float().mean(0, keepdim=True).expand(_PADDING, -1)
    weights[name] = torch.cat((weights[name], mean.to(weights[name].dtype)))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((DRAFT / "config.json").read_text())
    added = {"vocab_size": _vocab_size() + _PADDING, "pard_token": _vocab_size()}
    (folder / "config.json").write_text(json.dumps(config | added))
    return folder


def _vocab_size() -> int:
    return len(json.loads((DRAFT / "tokenizer.json").read_text())["model"]["vocab"])


def _save(folder: Path, kept: Sequence[int]) -> Path:
    """The demo draft with the tokens ``kept``, which have the ids 0, 1, 2, ..."""
    shutil.copytree(DRAFT, folder)
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text())
    texts = {i: text for text, i in tokenizer["model"]["vocab"].items()}
    vocabulary = {texts[i]: place for place, i in enumerate(kept)}
    tokenizer["model"]["vocab"] = vocabulary
    tokenizer["model"]["merges"] = [
        pair for pair in tokenizer["model"]["merges"] if all(text in vocabulary for text in (*pair, "".join(pair)))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(DRAFT / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][list(kept)].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((DRAFT / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(kept)}))
    return folder
