import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

import specdec.demo
from specdec.checkpoint.fingerprint import model_fingerprint
from specdec.core.errors import ModelLoadError
from specdec.core.params import GenerationDefaults
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel, ModelSource, load_model, load_tokenizer, prepare_model
from specdec.models.parity_check import check_admission
from tests.specdec.models.families import FAMILIES, REFUSED, VOCAB_SIZE, make_model

DRAFT = Path(specdec.demo.__path__[0]) / "draft"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo pair's draft, to be spoilt."""
    return Path(shutil.copytree(DRAFT, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_demo_draft_is_ready_for_a_runner() -> None:
    lines: list[str] = []
    loaded = load_model(ModelSource(str(DRAFT), device="cpu"), lines.append)
    assert loaded.dtype == torch.float32  # though it is bfloat16 on disk
    assert loaded.device == torch.device("cpu")
    assert (loaded.vocab_size, loaded.eos_token_ids, loaded.max_model_len) == (4096, (0,), 2048)
    assert loaded.num_parameters == sum(tensor.numel() for tensor in load_file(DRAFT / "model.safetensors").values())
    assert loaded.weights_bytes >= 4 * loaded.num_parameters
    assert [layer.bytes_per_token for layer in loaded.attention_layers] == [2 * 5 * 32 * 4] * 2
    assert not loaded.model.training
    assert len(lines) == 3
    assert "float32 on cpu" in lines[-1]


def test_dtype_is_taken_as_asked() -> None:
    loaded = load_model(ModelSource(str(DRAFT), dtype="bfloat16", device="cpu"))
    assert loaded.dtype == loaded.attention_layers[0].dtype == torch.bfloat16


def test_the_tokenizer_loads() -> None:
    assert load_tokenizer(ModelSource(str(DRAFT))).eos_token == "<|endoftext|>"


def test_several_ends_and_the_generation_defaults_are_read(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[0, 7], do_sample=True, temperature=0.6, top_k=20)
    loaded = load_model(ModelSource(str(folder), device="cpu"))
    assert loaded.eos_token_ids == (0, 7)
    assert loaded.generation_defaults == GenerationDefaults(temperature=0.6, top_k=20)


def test_loading_leaves_transformers_settings_as_they_were() -> None:
    before = (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())
    load_model(ModelSource(str(DRAFT), device="cpu"))
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before


def test_too_little_memory_for_the_weights_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nOf the allocated memory 2 is ...")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", no_memory)
    with pytest.raises(ModelLoadError, match=r"the weights of .* do not fit into the memory of cpu: ") as caught:
        load_model(ModelSource(str(DRAFT), device="cpu"))
    assert str(caught.value).endswith("Tried to allocate 1 GiB.")


def test_a_missing_folder_is_named() -> None:
    for path in ("/no/such/folder", "./nothing", "~/nothing-here"):
        with pytest.raises(ModelLoadError, match=f"there is no folder {path}"):
            load_model(ModelSource(path))
        with pytest.raises(ModelLoadError, match="there is no folder"):
            load_tokenizer(ModelSource(path))


def test_a_folder_without_configuration_or_safetensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load_model(ModelSource(str(folder)))
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config.json"):
        load_model(ModelSource(str(folder)))


def junk_of_the_same_length(content: bytes) -> bytes:
    return b"\x7f" * len(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: b"", r"model\.safetensors is empty: download or copy it again$"),
        (lambda content: content[:20], r"model\.safetensors is cut off: it has 20 bytes, and its header alone"),
        (
            lambda content: content[: len(content) // 2],
            r"model\.safetensors is cut off: it has .* of .* bytes: download or copy it again$",
        ),
        (lambda content: content + b"more", r"model\.safetensors is damaged: it has .* its header describes"),
        (junk_of_the_same_length, r"model\.safetensors is not a safetensors file$"),
        (lambda content: content[:8] + b"{" * 3000 + content[3008:], r"model\.safetensors is not a safetensors file$"),
    ],
)
def test_a_damaged_file_of_weights_is_named(folder: Path, spoil: Callable[[bytes], bytes], message: str) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    for use in (lambda: load_model(ModelSource(str(folder), device="cpu")), lambda: model_fingerprint(str(folder))):
        with pytest.raises(ModelLoadError, match=message):
            use()


def test_a_damaged_or_missing_shard_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="1MB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    source = ModelSource(str(folder), device="cpu")
    load_model(source)
    shard = min(folder.glob("model-00002-*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(ModelLoadError, match=rf"{shard.name} is cut off"):
        load_model(source)
    with monkeypatch.context() as patch:  # of a model on the hub no folder is checked before it is loaded
        patch.setattr("specdec.models.loading._check_folder", lambda path: None)
        with pytest.raises(ModelLoadError, match=rf"{shard.name} is cut off"):
            load_model(source)
    shard.unlink()
    with pytest.raises(ModelLoadError, match=rf"lacks 1 of \d files that .*\.index\.json names, such as {shard.name}"):
        load_model(source)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"index\.json is not an index of safetensors files"):
        load_model(source)


def test_missing_weights_are_not_filled_with_random_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 are missing .* model.layers.1.mlp.up_proj.weight"):
        load_model(ModelSource(str(folder), device="cpu"))


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=100)
    with pytest.raises(ModelLoadError, match=r"^cannot load .* at revision v7: .*mismatched_sizes"):
        load_model(ModelSource(str(folder), revision="v7", device="cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "not a causal language model"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "not a causal language model"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 2}, "kind 'chunked_attention'"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "needs code of its own"),
        ({"model_type": "unheard-of"}, "cannot load"),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights_are_read(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_model(ModelSource(str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device must be auto"),
        ({"device": "cuda:99"}, "is not there"),
        ({"dtype": "int4"}, "dtype must be auto"),
    ],
)
def test_bad_options_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(ModelSource(str(DRAFT), **options))


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_would_come_out_wrong_are_refused(family: str) -> None:
    with pytest.raises(ModelLoadError):
        prepare_model(make_model(family), family)


def test_a_layer_whose_mask_is_narrower_than_what_it_reads_is_refused() -> None:
    model = make_model("qwen2_moe")
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(ModelLoadError, match="reads all positions, but its mask says otherwise"):
        prepare_model(model, "qwen2_moe")
    model.model.layers[0].self_attn.sliding_window = 7
    with pytest.raises(ModelLoadError, match="reads a window of 7 positions, but its mask says otherwise"):
        prepare_model(model, "qwen2_moe")


def test_the_text_part_of_a_model_that_reads_images_is_served(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config=make_model("llama").config.to_dict(),
        vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **vision},
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    loaded = load_model(ModelSource(str(tmp_path), device="cpu"))
    assert (loaded.vocab_size, loaded.max_model_len, len(loaded.attention_layers)) == (VOCAB_SIZE, 1024, 4)
    assert check_admission(ModelRunner(loaded, num_blocks=40, block_size=4)).relative_error < 1e-4


def test_layers_say_what_they_cache_and_read(models: Callable[[str], tuple[LoadedModel, object]]) -> None:
    windows = {family: [layer.window for layer in models(family)[0].attention_layers] for family in FAMILIES}
    assert windows["llama"] == [None] * 4
    assert windows["mistral"] == [6] * 4
    assert windows["gemma3"] == windows["qwen2"] == windows["qwen2_moe"] == [6, None, 6, None]
    assert not models("gemma2")[0].attention_layers[0].is_plain
    assert not models("gpt_oss")[0].attention_layers[0].is_plain


def test_scaling_that_depends_on_the_longest_row_ends_the_model_where_it_begins() -> None:
    config = transformers.Phi3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=32,
        max_position_embeddings=4096,
        original_max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=2,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 256,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
        },
    )
    assert prepare_model(transformers.Phi3ForCausalLM(config), "phi3").max_model_len == 256
