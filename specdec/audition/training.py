"""Train a draft model on recorded answers. Samples that it is judged by later are held out."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec.audition.recording import Sample
from specdec.checkpoint.weight_files import INDEX, local_folder
from specdec.core.errors import InvalidParameterError, MemoryPlanError, ModelLoadError
from specdec.core.tokens import as_array
from specdec.core.types import Progress
from specdec.models.describe import describe_model
from specdec.models.loading import ModelSource, allocation, load_config, load_tokenizer, load_weights, quiet
from specdec.models.quantization import own_quantization

CHECKPOINT = "training.pt"
"""State of an unfinished training, in the output folder."""
HELD_OUT_SHARE = 10
"""One prompt in ``HELD_OUT_SHARE`` is held out."""
_HELD_OUT_BATCHES = 16
"""Batches of held-out samples whose loss is told during training."""
_WARMUP_SHARE = 0.05
_MAX_NORM = 1.0
_COPIED = {".json", ".model", ".txt", ".jinja", ".tiktoken"}
_NO_LABEL = -100


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How a draft is trained.

    Attributes:
        num_epochs: Passes over the recording, at least 1.
        batch_tokens: Tokens of an optimizer step, prompts and padding included. A longer sample loses its beginning.
        learning_rate: Peak rate of AdamW, after a warm-up; it then decays to 0.
        lora_rank: Rank of the change to each linear layer; 0 trains all weights.
        has_bfloat16: Compute in bfloat16; the weights that learn are float32.
        checkpoint_steps: Steps between two checkpoints, with a line of progress each. They decide no weight.
    """

    num_epochs: int = 1
    batch_tokens: int = 4096
    learning_rate: float = 1e-4
    lora_rank: int = 0
    has_bfloat16: bool = False
    checkpoint_steps: int = 50


def is_held_out(sample: Sample) -> bool:
    """Return whether a sample is held out to judge drafts. All answers to one prompt are held out, or none."""
    digest = blake2b(as_array(sample.prompt_token_ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def split(samples: Iterable[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Split a recording into samples to learn and samples held out.

    Samples without an output, or with an adapter of the draft, are left out.

    Raises:
        InvalidParameterError: One part would be empty.
    """
    parts: tuple[list[Sample], list[Sample]] = [], []
    for sample in samples:
        if sample.output_token_ids and sample.draft_adapter is None:
            parts[is_held_out(sample)].append(sample)
    if not all(parts):
        counts = f"{len(parts[0])} samples with an output to learn and {len(parts[1])} held out"
        raise InvalidParameterError("file", f"FILE has {counts}: record more prompts, of which a tenth is held out")
    return parts


def check_out(out: Path) -> None:
    """Refuse an output folder that holds anything but an unfinished training run.

    Raises:
        InvalidParameterError: It is a file, or has files.
    """
    begun = out / CHECKPOINT
    is_free = not out.exists() or begun.exists() or (out.is_dir() and all(one == _part(begun) for one in out.iterdir()))
    if not is_free:
        raise InvalidParameterError("out", f"--out: {out} is not an empty folder: name a new one")


def train_draft(
    samples: Sequence[Sample], draft: ModelSource, out: Path, plan: TrainingPlan, progress: Progress
) -> None:
    """Train a draft model and write it to a folder, with its tokenizer; or go on with a training that was interrupted.

    The loss is the cross-entropy of the recorded output tokens. Prompts are context only. The same samples, draft and
    plan give the same weights on a CPU, with interrupts and without.

    Args:
        samples: A recording, in the draft's vocabulary.
        draft: The model to begin with; it is left as it is. Its ``dtype`` is not used: see ``plan``.
        out: A new or empty folder, or the folder of an interrupted training of the same samples, draft and plan.
        plan: How to train.
        progress: Called with a line for each checkpoint.

    Raises:
        InvalidParameterError: Samples, plan or folder do not allow it.
        ModelLoadError: The draft cannot be loaded.
        MemoryPlanError: A batch does not fit into the device's memory.
    """
    check_out(out)
    learned, held_out = split(samples)
    load_tokenizer(draft)  # puts the files that are copied in the end into the cache of the hub
    if quantized := own_quantization(load_config(draft)):
        raise ModelLoadError(f"{draft.path} is quantized ({quantized}): train the model that it was made from")
    model = load_weights(replace(draft, dtype="float32", quantization="none"), progress).eval()
    _check_vocabulary(samples, model, draft.path)
    max_length = min(plan.batch_tokens, describe_model(draft).max_model_len)
    batches = [batch for epoch in range(plan.num_epochs) for batch in _batches(learned, epoch, plan, max_length)]
    judged = list(_batches(held_out, 0, plan, max_length))[:_HELD_OUT_BATCHES]
    progress(f"{len(learned)} samples to learn in {len(batches)} steps, {len(held_out)} held out")
    out.mkdir(parents=True, exist_ok=True)
    run = _Run(model, _trainable(model, plan.lora_rank), plan, len(batches), _key(learned, draft, plan))
    run.resume(out / CHECKPOINT)
    with allocation(MemoryPlanError, f"a batch does not fit into the memory of {model.device}: lower --batch-tokens"):
        progress(f"step {run.num_done} of {len(batches)}: held-out loss {run.loss(judged, max_length):.4f}")
        for batch in batches[run.num_done :]:
            run.step(batch, max_length)
            if run.num_done % plan.checkpoint_steps == 0 or run.num_done == len(batches):
                run.save(out / CHECKPOINT)
                progress(f"step {run.num_done} of {len(batches)}: held-out loss {run.loss(judged, max_length):.4f}")
    _write(model, draft, out)


def _part(checkpoint: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return checkpoint.with_suffix(".part")


class _Run:
    """A training under way."""

    def __init__(
        self, model: PreTrainedModel, parameters: dict[str, nn.Parameter], plan: TrainingPlan, num_steps: int, key: str
    ) -> None:
        self._model, self._parameters, self._plan = model, parameters, plan
        self._num_steps, self._key = num_steps, key
        self._optimizer = torch.optim.AdamW(parameters.values(), betas=(0.9, 0.98), weight_decay=0.0)
        self.num_done = 0

    def step(self, batch: Sequence[Sample], max_length: int) -> None:
        """Learn one batch."""
        loss = self._losses(batch, max_length).mean()
        if not loss.isfinite():
            message = f"the loss is {loss.item()} in step {self.num_done + 1}: lower --learning-rate"
            raise InvalidParameterError("learning_rate", message)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters.values(), _MAX_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_done += 1

    @torch.no_grad()
    def loss(self, batches: Sequence[Sequence[Sample]], max_length: int) -> float:
        """Return the mean cross-entropy of an output token, in nats."""
        losses = torch.cat([self._losses(batch, max_length) for batch in batches])
        return losses.mean().item()

    def _losses(self, batch: Sequence[Sample], max_length: int) -> torch.Tensor:
        """Return the cross-entropy of each output token of a batch: float32 [output tokens]."""
        token_ids, labels, num_places = _tensors(batch, max_length)
        device = self._model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self._plan.has_bfloat16):
            output = self._model(token_ids.to(device), use_cache=False, logits_to_keep=num_places)
        is_output = labels != _NO_LABEL
        logits = output.logits[:, -num_places:][is_output.to(device)].float()
        return cross_entropy(logits, labels[is_output].to(device), reduction="none")

    def _rate(self) -> float:
        """Return the learning rate of the next step."""
        warmup = max(1, round(_WARMUP_SHARE * self._num_steps))
        remaining = (self._num_steps - self.num_done) / max(1, self._num_steps - warmup)
        return self._plan.learning_rate * min(1.0, (self.num_done + 1) / warmup, remaining)

    def save(self, path: Path) -> None:
        """Write a checkpoint as a whole or not at all."""
        part = _part(path)
        state = {"key": self._key, "num_done": self.num_done, "optimizer": self._optimizer.state_dict()}
        torch.save(state | {"parameters": self._parameters}, part)
        part.replace(path)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint, if there is one.

        Raises:
            InvalidParameterError: It is of another training.
        """
        if not path.exists():
            return
        state = torch.load(path, map_location=self._model.device, weights_only=True)
        if state["key"] != self._key:
            message = f"--out: {path.parent} has a training of other samples, another draft or other options"
            raise InvalidParameterError("out", message)
        self.num_done = state["num_done"]
        self._optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state["parameters"][name])


class _LowRank(nn.Module):
    """A change of low rank to a weight [rows, columns], which begins as none."""

    def __init__(self, weight: torch.Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=generator) / columns**0.5
        self.down = nn.Parameter(down.to(weight.device))
        self.up = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the changed weight."""
        return weight + self.up @ self.down


def _trainable(model: PreTrainedModel, lora_rank: int) -> dict[str, nn.Parameter]:
    """Return the parameters that learn: all of a model's, or changes of low rank to its linear layers."""
    if lora_rank:
        model.requires_grad_(False)
        head, generator = model.get_output_embeddings(), torch.Generator().manual_seed(0)
        layers = [one for one in model.modules() if isinstance(one, nn.Linear | Conv1D) and one is not head]
        for layer in layers:
            parametrize.register_parametrization(layer, "weight", _LowRank(layer.weight, lora_rank, generator))
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def _batches(samples: Sequence[Sample], epoch: int, plan: TrainingPlan, max_length: int) -> Iterator[list[Sample]]:
    """Yield all samples in an order that the epoch decides, as many in a batch as fit into its tokens."""
    batch: list[Sample] = []
    width = 0
    for sample in random.Random(epoch).sample(list(samples), len(samples)):
        length = min(len(sample.prompt_token_ids) + len(sample.output_token_ids), max_length)
        if batch and max(width, length) * (len(batch) + 1) > plan.batch_tokens:
            yield batch
            batch, width = [], 0
        batch.append(sample)
        width = max(width, length)
    yield batch


def _tensors(batch: Sequence[Sample], max_length: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a batch's inputs and labels, padded at their ends.

    Returns:
        Token ids, int64 [samples, width]; labels of the last places, int64 [samples, places]; how many places.
    """
    texts = [[*sample.prompt_token_ids, *sample.output_token_ids][-max_length:] for sample in batch]
    width = max(map(len, texts)) - 1
    token_ids = torch.zeros(len(batch), width, dtype=torch.int64)
    labels = torch.full_like(token_ids, _NO_LABEL)
    first = width
    for row, (sample, text) in enumerate(zip(batch, texts, strict=True)):
        start = max(0, len(text) - 1 - len(sample.output_token_ids))
        token_ids[row, : len(text) - 1] = torch.tensor(text[:-1])
        labels[row, start : len(text) - 1] = torch.tensor(text[start + 1 :])
        first = min(first, start)
    return token_ids, labels[:, first:], width - first


def _check_vocabulary(samples: Iterable[Sample], model: PreTrainedModel, name: str) -> None:
    most = max(max(ids) for sample in samples for ids in (sample.prompt_token_ids, sample.output_token_ids) if ids)
    num_tokens = model.get_input_embeddings().weight.shape[0]
    if most >= num_tokens:
        message = f"--draft: {name} has {num_tokens} tokens and FILE has token id {most}: it is of another vocabulary"
        raise InvalidParameterError("draft", message)


def _key(samples: Iterable[Sample], draft: ModelSource, plan: TrainingPlan) -> str:
    """Return a digest of all that decides the trained weights."""
    key = blake2b(repr((draft.path, draft.revision, replace(plan, checkpoint_steps=0))).encode(), digest_size=16)
    for sample in samples:
        for ids in (sample.prompt_token_ids, sample.output_token_ids):
            key.update(len(ids).to_bytes(8, "little") + as_array(ids).tobytes())
    return key.hexdigest()


def _write(model: PreTrainedModel, draft: ModelSource, out: Path) -> None:
    """Write the model in its checkpoint's dtype, with the draft's tokenizer, and remove the training's state."""
    for layer in list(model.modules()):
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")
    folder = local_folder(draft.path, draft.revision)
    assert folder is not None, "it was loaded"
    for file in folder.iterdir():
        if file.suffix in _COPIED and file.name != INDEX:
            shutil.copyfile(file, out / file.name)
    with quiet():
        model.to(load_config(draft).dtype or torch.float32).save_pretrained(out)
    (out / CHECKPOINT).unlink()
