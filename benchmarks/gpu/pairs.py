"""Pairs of real shape, made on the device: of random weights, or such that each token's follower is set."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.gpu.shapes import SHAPES, config_of, random_model
from specdec.checkpoint.weight_files import WEIGHTS
from specdec.core.types import Progress
from specdec.engine import build as engine_build
from specdec.models.loading import LoadedModel, ModelSource, load_model, prepare_model

B = TypeVar("B")
END, MAX_LENGTH = 1, 8192
_SCALE = 0.5
"""Of the heads that set the follower: its logit is far above all others, and within what bf16 holds."""
_NEXT = 0.8
"""Of the right token's logit over that of the wrong one that is said."""
_OF_CHAINS: dict[str, object] = {"tie_word_embeddings": False, "eos_token_id": END}
_MADE = "made.json"
"""What a checkpoint's weights are made by, in its folder."""
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


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


@dataclass(frozen=True)
class Chain:
    """A target that says a set follower after each token, and a draft that is right after a share of them.

    All matrices are read and multiplied, but layers add nothing: embeddings alone decide, and heads have them in
    another order. So drafts are accepted at the rate, whatever is generated. What decides is drawn on the CPU: it is
    the same in every process, wherever its model is.

    Attributes:
        shapes: A name in ``SHAPES``; the target is a whole number of times as wide as the draft.
        acceptance_rate: Share of tokens after which the draft is right.
        next_guess: Whether, where it is not, the right token is the next that it would say.
    """

    shapes: str
    acceptance_rate: float
    next_guess: bool = False

    def make(self, role: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """The ``target`` or the ``draft``, on its device."""
        of_target, of_draft = SHAPES[self.shapes]["target"], SHAPES[self.shapes]["draft"]
        width, vocab_size = int(str(of_draft["hidden_size"])), int(str(of_draft["vocab_size"]))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(vocab_size, width, generator=generator)
        follower = torch.randperm(vocab_size, generator=generator)
        follower[follower == END] = 2  # nothing ends by itself
        heads = torch.zeros_like(tokens)
        heads[follower] = tokens * _SCALE
        if role == "target":
            repeats = int(str(of_target["hidden_size"])) // width
            return _chain_model(of_target, device, dtype, tokens.repeat(1, repeats), heads.repeat(1, repeats) / repeats)
        is_wrong = torch.rand(vocab_size, generator=generator) >= self.acceptance_rate
        wrong = tokens.roll(1, 0) + _NEXT * tokens if self.next_guess else tokens.roll(1, 0)
        return _chain_model(of_draft, device, dtype, torch.where(is_wrong.unsqueeze(1), wrong, tokens), heads)

    def write(self, folder: Path, roles: Sequence[str] = ("target", "draft")) -> None:
        """Write folders of the roles' names that have all of a checkpoint but weights; see :func:`made`."""
        for role in roles:
            path = folder / role
            config_of(self._fields(role)).save_pretrained(path)
            _save_tokenizer(path, int(str(SHAPES[self.shapes][role]["vocab_size"])))
            save_file({}, path / WEIGHTS)
            (path / _MADE).write_text(json.dumps(asdict(self)))

    def _fields(self, role: str) -> dict[str, object]:
        return SHAPES[self.shapes][role] | _OF_CHAINS


def made(role: str, build: Callable[[], B], args: object) -> B:
    """A worker's backend over weights that are made on its device; see :func:`cluster.models.sources.backend_of`."""
    with made_weights():
        return build()


@contextmanager
def made_weights() -> Iterator[None]:
    """Within, the weights of folders that :meth:`Chain.write` has written are made where they are loaded."""
    load = load_model

    def loaded(source: ModelSource, progress: Progress | None = None) -> LoadedModel:
        folder = Path(source.path)
        if not (folder / _MADE).exists():
            return load(source, progress)
        device = torch.device("cpu" if source.device == "cpu" or not torch.cuda.is_available() else "cuda:0")
        model = Chain(**json.loads((folder / _MADE).read_text())).make(folder.name, device, _DTYPES[source.dtype])
        return prepare_model(model, source.path)

    engine_build.load_model = loaded  # type: ignore[attr-defined]
    try:
        yield
    finally:
        engine_build.load_model = load  # type: ignore[attr-defined]


def save_draft(folder: Path, model: PreTrainedModel) -> None:
    """Write a checkpoint with its weights, and a tokenizer."""
    model.save_pretrained(folder)
    _save_tokenizer(folder, model.config.vocab_size)


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Words are ``t0``, ``t1`` and so on."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "t0", "eos_token": f"t{END}"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, **names)
    fast.save_pretrained(folder)


@torch.no_grad()
def _chain_model(
    fields: dict[str, object],
    device: torch.device,
    dtype: torch.dtype,
    embeddings: torch.Tensor,
    heads: torch.Tensor,
) -> PreTrainedModel:
    model = random_model(fields | _OF_CHAINS, device, dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
    model.get_input_embeddings().weight.copy_(embeddings)
    model.get_output_embeddings().weight.copy_(heads)
    return model
