"""Greedy output through the engine is that of transformers, for one decoder family after another."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from specdec.core.params import SamplingParams
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, ModelSource, load_model, prepare_model
from specdec.models.parity_check import check_admission
from specdec.sampling.pipeline import Sampler
from tests.specdec.engine.pairs import Case, add_noise, assert_same, greedy, make_model, run
from tests.specdec.models.families import SOME_FAMILIES, VOCAB_SIZE, randomize

BLOCK_SIZE = CHUNK = 16
MAX_MODEL_LEN = 128
NUM_DRAFT_TOKENS = 4
WINDOW = 6
PROMPT_LENGTHS = (3, 47, 18, 33)
"""Shorter than the window, more than two chunks, and a chunk and a bit."""
WITH_WINDOWS = {"mistral", "gemma2", "gemma3", "cohere2", "gpt_oss", "qwen2", "qwen2_moe"}
NOISE = 0.05
"""What makes a draft of a family's twin half right."""
NOISES = {"deepseek_v3": 0.04}
"""Where it is another."""


def make_runner(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, num_blocks=64, block_size=BLOCK_SIZE)


def make_service(target: LoadedModel, draft: LoadedModel) -> InProcessService:
    """A pair with blocks of the usual size; a prompt is read in chunks of one block."""
    lengths = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": CHUNK}
    return InProcessService(
        ModelTarget(make_runner(target), Sampler(VOCAB_SIZE), **lengths),
        ModelDrafter(make_runner(draft), Sampler(VOCAB_SIZE), **lengths),
        NUM_DRAFT_TOKENS,
    )


def make_cases() -> list[Case]:
    rng = random.Random(21)
    greedily = SamplingParams(temperature=0.0)
    prompts = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in PROMPT_LENGTHS]
    return [Case(prompt, 18 + 3 * i, greedily) for i, prompt in enumerate(prompts)]


def assert_greedy_is_that_of(stock: PreTrainedModel, service: InProcessService) -> None:
    """One ragged batch of four, with a draft that is sometimes right and sometimes wrong."""
    stock.set_attn_implementation("eager")  # the others leave out what some families do to their scores
    cases = make_cases()
    outputs, stats = run(service, cases)
    for got, case in zip(outputs, cases, strict=True):
        assert_same(got, greedy(stock, case), case, stock)
    assert len({token for output in outputs for token in output}) > 8  # no model that says one thing whatever it reads
    assert 0.25 < stats.acceptance_rate < 0.75, stats


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_greedy_output_is_that_of_transformers(family: str) -> None:
    target = prepare_model(make_model(family), family)
    windows = {layer.window for layer in target.attention_layers}
    assert (WINDOW in windows) == (family in WITH_WINDOWS)
    draft = prepare_model(add_noise(make_model(family), NOISES.get(family, NOISE)), family)
    assert_greedy_is_that_of(make_model(family), make_service(target, draft))


def save_gemma3_with_vision(folder: Path) -> None:
    """A checkpoint that reads images too, as the hub has them: ``Gemma3ForConditionalGeneration`` in safetensors."""
    text = make_model("gemma3").config.to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        boi_token_index=VOCAB_SIZE - 3,
        eoi_token_index=VOCAB_SIZE - 2,
        image_token_index=VOCAB_SIZE - 1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    randomize(transformers.Gemma3ForConditionalGeneration(config)).save_pretrained(folder)


def test_the_text_part_of_a_checkpoint_that_reads_images(tmp_path: Path) -> None:
    save_gemma3_with_vision(tmp_path)
    source = ModelSource(str(tmp_path), device="cpu")
    target, draft = load_model(source), load_model(source)
    assert check_admission(make_runner(target)).relative_error < 1e-4
    assert WINDOW in {layer.window for layer in target.attention_layers}
    add_noise(draft.model, NOISE)
    stock = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path)
    assert_greedy_is_that_of(stock, make_service(target, draft))
