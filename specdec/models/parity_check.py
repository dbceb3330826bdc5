"""Whether a model's cached, split, rolled back forward gives what its plain forward gives; and the same bits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

import torch
from transformers import PreTrainedModel

from specdec.core.errors import ModelLoadError
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.kernels.attention import ATTENTION_NAME
from specdec.kernels.experts import has_tiled_experts
from specdec.kernels.tiled import NUM_KEYS, NUM_QUERIES
from specdec.models.loading import LoadedModel, quiet
from specdec.models.quantization import is_quantized

TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest relative error allowed, by dtype: above what rounding gives, far below what a wrong token gives."""

_ROW_LENGTHS = (41, 7, 24, 1)
"""Rows read side by side, in short pieces."""
_SHORT_PIECE = 9
_NUM_REFUSED = 3
NUM_CHECKED_ROWS = len(_ROW_LENGTHS)
NUM_CHECKED_TOKENS = NUM_CHECKED_ROWS * (_SHORT_PIECE + _NUM_REFUSED)
"""Most tokens in a step of the check, and in a row, of a model without recurrent layers."""
_NUM_LONG_PIECES = 4
"""Room for as many in a row of its own that is read in pieces longer than the window of a recurrent model: those go
through the model's own scan over many tokens, with a state carried into it."""


@dataclass(frozen=True, slots=True)
class AdmissionReport:
    """What the check found.

    Attributes:
        relative_error: Worst row's root mean square difference, over that of the logits about their mean.
        max_difference: Largest absolute difference of a logit.
        tolerance: What ``relative_error`` was allowed to be.
        num_tokens: Tokens compared.
        duration_s: Wall-clock time of the check.
    """

    relative_error: float
    max_difference: float
    tolerance: float
    num_tokens: int
    duration_s: float


def check_admission(runner: ModelRunner, seed: int = 0) -> AdmissionReport:
    """Compare ragged, split forwards, with refused tokens in between, with one plain forward of each row.

    Args:
        runner: With at least some ten blocks free; it holds what it held before when the check is done.
        seed: Of the tokens, of the splits and of what is refused.

    Raises:
        ModelLoadError: they differ by more than rounding; or too few blocks are free.
        torch.OutOfMemoryError: the device has no room for a forward pass.
    """
    start_s = time.perf_counter()
    rng = random.Random(seed)
    rows, long_piece = _checked_rows(runner, rng)
    try:
        split = _split_forward(runner, rows, long_piece, rng)
        with runner.uncompiled(), _stock_attention(runner.loaded.model):
            whole = [_whole_forward(runner, row) for row in rows]
    except torch.OutOfMemoryError:
        raise  # it says nothing of the model
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelLoadError(
            f"{runner.loaded.name} cannot run split into pieces: {type(error).__name__}: {error}"
        ) from error
    differences = [(a.to(b.device) - b) for a, b in zip(split, whole, strict=True)]
    errors = [
        (difference.square().mean() / logits.var(dim=-1, correction=0).mean()).sqrt().item()
        for difference, logits in zip(differences, whole, strict=True)
    ]
    report = AdmissionReport(
        relative_error=max(errors),
        max_difference=max(difference.abs().max().item() for difference in differences),
        tolerance=TOLERANCES.get(runner.loaded.dtype, TOLERANCES[torch.bfloat16]),
        num_tokens=sum(map(len, rows)),
        duration_s=time.perf_counter() - start_s,
    )
    if not report.relative_error <= report.tolerance:  # also where it is not a number
        raise ModelLoadError(
            f"{runner.loaded.name} cannot be served exactly: its cached forward differs from its plain one by "
            f"{report.relative_error:.2g} of the logits' spread, where {report.tolerance:g} is allowed for "
            f"{str(runner.loaded.dtype).removeprefix('torch.')}: try another dtype; skip_parity_check serves it still"
        )
    return report


def no_strict_reason(loaded: LoadedModel) -> str:
    """What of a model keeps its logits from having the same bits in every step; empty if nothing is known."""
    if loaded.opaque_state is not None:
        return "it keeps a state that can only be copied"
    if any(layer.is_latent for layer in loaded.attention_layers):
        return "it expands what it caches"
    if any(map(is_quantized, loaded.model.modules())):
        return "its weights are quantized"
    for name, module in loaded.model.named_modules():
        if name.endswith(".experts") and not has_tiled_experts(module):
            return f"its experts ({type(module).__name__}) multiply as many tokens as choose them"
    if len({parameter.device for parameter in loaded.model.parameters()}) > 1:
        return "it is on several devices"
    return ""


def check_bits(runner: ModelRunner, seed: int = 0) -> str:
    """Compare the logits' bits of rows read alone and whole with those read in ragged pieces beside others.

    Args:
        runner: As for :func:`check_admission`.
        seed: Likewise.

    Returns:
        Hash of the short rows' logits, and of products in the shapes of attention and adapters (rule 17). Libraries,
        instruction sets and numbers of threads that compute other bits give another hash.

    Raises:
        ModelLoadError: Some differ, or the model is of a kind whose logits may; or too few blocks are free.
    """
    name, reason = runner.loaded.name, no_strict_reason(runner.loaded)
    if not reason:
        rng = random.Random(seed)
        rows, long_piece = _checked_rows(runner, rng)
        split = _split_forward(runner, rows, long_piece, rng)
        alone = [_row_alone(runner, row) for row in rows]
        num_tokens = sum(map(len, rows))
        differs = sum(int((a != b).any(1).sum()) for a, b in zip(split, alone, strict=True))
        reason = f"the logits' bits of {differs} of {num_tokens} tokens depend on the step" if differs else ""
    if reason:
        raise ModelLoadError(f"exactness: strict is not possible with {name}: {reason}")
    bits = [*alone[: len(_ROW_LENGTHS)], *_sample_products(runner)]  # the length of a longer row depends on the window
    return sha256(
        b"".join(values.contiguous().cpu().view(torch.uint8).numpy().tobytes() for values in bits)
    ).hexdigest()


def _sample_products(runner: ModelRunner) -> Iterator[torch.Tensor]:
    """Multiply fixed numbers in the shapes of float32 products whose bits the model's own dtype mostly rounds away."""
    loaded = runner.loaded
    shapes: list[tuple[int, ...]] = []  # products, rows, inner width, input width, output width
    if runner.kernel == "tiled":
        for num_heads, *widths in sorted({(a.num_key_heads, a.key_dim, a.value_dim) for a in loaded.attention_layers}):
            num_rows = NUM_QUERIES * max(1, loaded.config.num_attention_heads // num_heads)
            shapes.append((num_heads, num_rows, NUM_KEYS, *widths))
    if loaded.adapters is not None and runner.tile_tokens is not None:
        for output_width, input_width in sorted(set(loaded.adapters.shapes.values())):
            shapes.append((1, runner.tile_tokens, loaded.adapters.room.max_rank, input_width, output_width))
    dtype = torch.float32 if loaded.device.type == "cpu" else loaded.dtype
    for number, num_rows, inner, width, output_width in shapes:
        generator = torch.Generator().manual_seed(0)
        rows, down, up = (
            torch.randn(number, *shape, generator=generator).to(loaded.device, dtype)
            for shape in ((num_rows, width), (inner, width), (inner, output_width))
        )
        yield torch.bmm(torch.bmm(rows, down.transpose(1, 2)), up)


def _row_alone(runner: ModelRunner, row: list[int]) -> torch.Tensor:
    sequence = runner.new_sequence(salt=None)
    try:
        if not runner.reserve(sequence, len(row)):
            raise ModelLoadError(f"too few cache blocks to check {runner.loaded.name}")
        return runner.forward([RowInput(sequence, row, len(row))])
    finally:
        runner.free(sequence)


def _checked_rows(runner: ModelRunner, rng: random.Random) -> tuple[list[list[int]], int]:
    """Rows of random tokens, and the length of long pieces of the last one, if there is such a one."""
    most = max(1, runner.loaded.max_model_len - 4)
    long_piece = 0 if runner.states is None else runner.states.window.num_tokens + _SHORT_PIECE
    lengths = [*_ROW_LENGTHS, *([_NUM_LONG_PIECES * long_piece] if long_piece else [])]
    return [[rng.randrange(runner.loaded.vocab_size) for _ in range(min(n, most))] for n in lengths], long_piece


def _split_forward(
    runner: ModelRunner, rows: list[list[int]], long_piece: int, rng: random.Random
) -> list[torch.Tensor]:
    """Logits of every row, [length, vocabulary] each; as many rows side by side as there are states for."""
    short_rows, long_rows = rows[: len(_ROW_LENGTHS)], rows[len(_ROW_LENGTHS) :]
    most = len(short_rows) if runner.states is None else max(1, runner.states.num_free)
    parts = [_split_rows(runner, short_rows[i : i + most], 0, rng) for i in range(0, len(short_rows), most)]
    parts += [_split_rows(runner, [row], long_piece, rng) for row in long_rows]
    return [logits for part in parts for logits in part]


def _split_rows(runner: ModelRunner, rows: list[list[int]], long_piece: int, rng: random.Random) -> list[torch.Tensor]:
    """In pieces with up to 3 refused tokens after each, taken back; now and then one more is, and read again.

    Every second piece is ``long_piece`` tokens long where that is not 0.
    """
    num_steps = 0
    sequences = [runner.new_sequence(salt=None) for _ in rows]
    found: list[dict[int, torch.Tensor]] = [{} for _ in rows]
    try:
        while any(len(sequence) < len(row) for sequence, row in zip(sequences, rows, strict=True)):
            inputs, kept = [], []
            is_long = long_piece > 0 and num_steps % 2 == 0
            num_steps += 1
            for index, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
                start = len(sequence)
                length = long_piece if is_long else rng.choice((1, rng.randint(1, _SHORT_PIECE)))
                new = row[start : start + length]
                if not new:
                    continue
                tokens = new + [rng.randrange(runner.loaded.vocab_size) for _ in range(rng.randint(0, _NUM_REFUSED))]
                if not runner.reserve(sequence, start + len(tokens)):
                    raise ModelLoadError(f"too few cache blocks to check {runner.loaded.name}: raise kv_cache_memory")
                inputs.append(RowInput(sequence, tokens, len(tokens)))
                kept.append((index, start, len(new)))
            # A recorded step gives memory that the next one writes again.
            logits = torch.split(runner.forward(inputs).clone(), [row.num_logits for row in inputs])
            for (index, start, num_kept), values in zip(kept, logits, strict=True):
                found[index].update(enumerate(values[:num_kept], start=start))
                goes_on = start + num_kept < len(rows[index])
                one_more = 1 if goes_on and num_kept > 5 else 0  # a token that was right is taken back, too
                runner.truncate(sequences[index], start + num_kept - one_more)
    finally:
        for sequence in sequences:
            runner.free(sequence)
    return [torch.stack([values[i] for i in range(len(values))]) for values in found]


@torch.inference_mode()
def _whole_forward(runner: ModelRunner, row: list[int]) -> torch.Tensor:
    tokens = torch.tensor([row], device=runner.loaded.device)
    positions = torch.arange(len(row), device=runner.loaded.device).unsqueeze(0)
    logits: torch.Tensor = runner.loaded.model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
    return logits[:, : runner.vocab_size].float()


@contextmanager
def _stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """Transformers' own attention and masks, for a while; a model without attention has nothing to change."""
    before = model.config._attn_implementation
    if before != ATTENTION_NAME:
        yield
        return
    with quiet():
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        with quiet():
            model.set_attn_implementation(ATTENTION_NAME)
