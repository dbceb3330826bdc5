"""The shipped pair is what it is said to be: its sizes, its format, and a draft that the target mostly agrees with."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open

import specdec.demo
from specdec import BackendOptions, ModelSource, SamplingParams, SpeculativeEngine

DEMO = Path(specdec.demo.__file__).parent
TARGET, DRAFT = DEMO / "target", DEMO / "draft"
MAX_PAIR_BYTES = 32_000_000
PROMPT = "def read_lines(path):\n"


def tensors_of(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of every stored tensor, by name."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}


def num_parameters(folder: Path) -> int:
    return sum(math.prod(shape) for _, shape in tensors_of(folder).values())


def num_layers(folder: Path) -> int:
    stored = {name.split(".")[2] for name in tensors_of(folder) if name.startswith("model.layers.")}
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == len(stored)
    return len(stored)


def test_it_is_small_enough_for_a_package() -> None:
    assert sum(path.stat().st_size for folder in (TARGET, DRAFT) for path in folder.iterdir()) <= MAX_PAIR_BYTES


@pytest.mark.parametrize("folder", [TARGET, DRAFT], ids=lambda folder: folder.name)
def test_it_is_stored_in_bfloat16(folder: Path) -> None:
    assert {dtype for dtype, _ in tensors_of(folder).values()} == {"BF16"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_draft_is_a_small_part_of_the_target() -> None:
    assert num_layers(TARGET) >= 8
    assert num_parameters(TARGET) >= 11_000_000
    assert num_layers(DRAFT) <= 2
    assert num_parameters(DRAFT) <= num_parameters(TARGET) / 8


def test_both_have_one_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (TARGET / name).read_bytes() == (DRAFT / name).read_bytes()


def test_the_target_keeps_most_of_the_drafts_tokens() -> None:
    sources = [ModelSource(str(folder), dtype="float32", device="cpu") for folder in (TARGET, DRAFT)]
    engine = SpeculativeEngine.from_pretrained(
        *sources, options=BackendOptions(kv_cache_memory=64 << 20, max_model_len=256)
    )
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    stats = engine.generate(PROMPT, greedy, max_tokens=128, num_speculative_tokens=4).stats
    assert stats.num_draft_tokens >= 100
    assert stats.num_accepted_tokens / stats.num_draft_tokens >= 0.6
