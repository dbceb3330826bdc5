"""Compiled layers: what the model's own layers give, but for rounding."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import fresh_cache
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaMLP

from cluster.identity import demo_folder
from specdec import BackendOptions, ModelSource, SamplingParams, SpeculativeEngine
from specdec.engine.heads import HeadsOptions
from specdec.errors import ModelLoadError
from specdec.models.admission import check_admission
from specdec.models.compiled import compile_layers
from specdec.models.compiled.layers import CompiledLayer
from specdec.models.loading import load_model, prepare_model
from specdec.models.runner import ModelRunner, RowInput
from tests.specdec.engine.schemas import grammar_of
from tests.specdec.engine.test_processors import BOTH
from tests.specdec.engine.test_structured import PERSON
from tests.specdec.models.families import make_model, randomize
from tests.specdec.models.recurrent_families import make_recurrent


def compiled_runner(model, name: str) -> tuple[ModelRunner, str]:
    loaded = prepare_model(model, name)
    return ModelRunner(loaded, num_blocks=64), str(compile_layers(loaded.model, name, loaded.max_model_len))


def logits_after_prompt(runner: ModelRunner, num_tokens: int) -> torch.Tensor:
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, 40)
    runner.forward([RowInput(sequence, list(range(3, 20)), 0)])
    logits = runner.forward([RowInput(sequence, list(range(40, 40 + num_tokens)), num_tokens)])
    runner.free(sequence)
    return logits


# Biases and windows; norms and residuals of another order.
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_one_graph_serves_all_numbers_of_tokens(family: str) -> None:
    """1 among them, for which it was not recorded."""
    runner, report = compiled_runner(make_model(family), family)
    assert report == "4 of 4 layers compiled, 1 kind"
    assert check_admission(runner).relative_error < 1e-5
    whole = logits_after_prompt(runner, 9)
    for num_tokens in range(1, 9):
        torch.testing.assert_close(logits_after_prompt(runner, num_tokens), whole[:num_tokens], rtol=1e-4, atol=1e-4)


def test_a_compiled_model_in_bfloat16_is_admitted() -> None:
    runner, _ = compiled_runner(make_model("qwen2").bfloat16(), "qwen2")
    check_admission(runner)


def test_the_graphs_are_really_run() -> None:
    """Weights of one layer in the place of another's are found out."""
    runner, _ = compiled_runner(make_model("llama"), "llama")
    assert check_admission(runner).relative_error < 1e-5
    first, second, *_ = (layer.forward for layer in runner.loaded.model.model.layers)
    assert isinstance(first, CompiledLayer)
    assert isinstance(second, CompiledLayer)
    second._after_inputs = first._after_inputs
    with pytest.raises(ModelLoadError, match="cannot be served exactly"):
        check_admission(runner)


def test_layers_that_hand_keys_to_later_ones_stay_as_they_are() -> None:
    config = Gemma3nTextConfig(
        vocab_size=128,
        vocab_size_per_layer_input=128,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=96,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        laurel_rank=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    loaded = prepare_model(randomize(Gemma3nForCausalLM(config)), "gemma3n")
    with pytest.raises(ModelLoadError, match="Gemma3nTextDecoderLayer is not: it is given a KVSharingDict"):
        compile_layers(loaded.model, "gemma3n", loaded.max_model_len)
    assert check_admission(ModelRunner(loaded, num_blocks=64)).relative_error < 1e-5


def test_a_layer_that_keeps_something_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would not; and what it kept while it was recorded is gone."""
    forward = LlamaMLP.forward

    def keep(self: LlamaMLP, inputs: torch.Tensor) -> torch.Tensor:
        self.kept = forward(self, inputs)
        return self.kept

    monkeypatch.setattr(LlamaMLP, "forward", keep)
    loaded = prepare_model(make_model("llama"), "llama")
    kept = loaded.model.model.layers[0].mlp.kept
    with pytest.raises(ModelLoadError, match="LlamaDecoderLayer is not: it leaves something behind"):
        compile_layers(loaded.model, "llama", loaded.max_model_len)
    assert type(loaded.model.model.layers[0].mlp.kept) is type(kept) is torch.Tensor


def test_a_model_that_reads_few_tokens_is_recorded_with_fewer() -> None:
    """And passes the cache by its place, to layers that are no ``nn.Linear``."""
    config = GPT2Config(vocab_size=128, n_positions=29, n_embd=64, n_layer=2, n_head=4)
    runner, report = compiled_runner(randomize(GPT2LMHeadModel(config)), "short")
    assert report == "2 of 2 layers compiled, 1 kind"
    assert check_admission(runner).relative_error < 1e-5


def test_weights_are_freed_with_the_model() -> None:
    runner, _ = compiled_runner(make_model("llama"), "llama")
    weight = weakref.ref(runner.loaded.model.model.layers[1].mlp.up_proj.weight)
    gc.collect()
    gc.disable()
    try:
        del runner
        assert weight() is None
    finally:
        gc.enable()


def test_a_model_with_a_state_of_its_own_kind_is_refused(tmp_path: Path) -> None:
    make_recurrent("rwkv").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="it keeps a state that can only be copied; set compile to false"):
        load_model(ModelSource(str(tmp_path), device="cpu", compile=True))


def test_recurrent_layers_stay_as_they_are() -> None:
    runner, report = compiled_runner(make_recurrent("lfm2"), "lfm2")
    assert report == "1 of 3 layers compiled, 1 kind; Lfm2DecoderLayer is not: it keeps a recurrent state"
    assert check_admission(runner).relative_error < 1e-5


@pytest.mark.parametrize(
    ("family", "dtype", "reason"),
    [
        ("mixtral", torch.bfloat16, "MixtralDecoderLayer is not: what it does depends on the number of tokens"),
        (
            "deepseek_v3",
            torch.float32,
            "DeepseekV3DecoderLayer is not: it attends to other keys and values than it caches",
        ),
    ],
)
def test_a_model_of_which_nothing_can_be_compiled_is_refused(family: str, dtype: torch.dtype, reason: str) -> None:
    loaded = prepare_model(make_model(family).to(dtype), family)
    with pytest.raises(ModelLoadError, match=r"no layer of mine can be compiled .*; set compile to false") as caught:
        compile_layers(loaded.model, "mine", loaded.max_model_len)
    assert reason in str(caught.value)
    check_admission(ModelRunner(loaded, num_blocks=64))  # it runs as before


def test_without_a_compiler_the_message_says_so() -> None:
    source = ModelSource(str(demo_folder("draft")), device="cpu", compile=True)
    without = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with (
        without,
        fresh_cache(),
        pytest.raises(ModelLoadError, match=r"cannot be compiled: InductorError: InvalidCxxCompiler: .*no-such-comp"),
    ):
        load_model(source)


def test_a_compiled_pair_says_what_a_plain_one_says() -> None:
    """At any draft length: sampled, edited, hooked, by a grammar, in chunks, and with a prefix that was read before."""
    lines: list[str] = []
    folders = [str(demo_folder(name)) for name in ("target", "draft")]
    plain, compiled = (
        SpeculativeEngine.from_pretrained(
            *(ModelSource(folder, dtype="float32", device="cpu", compile=is_compiled) for folder in folders),
            options=BackendOptions(kv_memory=64 << 20, max_num_batched_tokens=16, logits_processors=BOTH),
            progress=lines.append,
        )
        for is_compiled in (False, True)
    )
    assert [line for line in lines if "compiled" in line] == [
        "12 of 12 layers compiled, 1 kind",
        "2 of 2 layers compiled, 1 kind",
    ]
    edits = {"top_k": 50, "repetition_penalty": 1.1, "presence_penalty": 0.2, "logit_bias": ((7, 1.0),)}
    sampling = SamplingParams(temperature=1.0, ignore_eos=True, **edits)
    for params in (sampling, SamplingParams(temperature=1.0, grammar=grammar_of(PERSON))):
        texts = [
            engine.generate(list(range(5, 50)), params, seed=7, max_tokens=40, num_speculative_tokens=length).token_ids
            for engine, length in ((plain, 0), (compiled, 0), (compiled, 3), (compiled, 7))
        ]
        assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("tree_tokens", [0, 12])
def test_heads_on_a_compiled_target_say_what_they_say_on_a_plain_one(tree_tokens: int) -> None:
    """In chains and in trees: no token changes, and as many are kept."""
    lines: list[str] = []
    heads = HeadsOptions(str(demo_folder("heads")), 64, tree_tokens)
    plain, compiled = (
        SpeculativeEngine.from_pretrained(
            ModelSource(str(demo_folder("target")), dtype="float32", device="cpu", compile=is_compiled),
            options=BackendOptions(kv_memory=64 << 20, heads=heads),
            progress=lines.append,
        )
        for is_compiled in (False, True)
    )
    assert "12 of 12 layers compiled, 1 kind" in lines
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, ignore_eos=True)
        alone, *drafted = (
            engine.generate("import os\n\ndef ", sampling, seed=7, max_tokens=40, num_speculative_tokens=bound)
            for engine, bound in ((plain, 0), (plain, None), (compiled, None))
        )
        assert [one.token_ids for one in drafted] == [alone.token_ids] * 2
        kept = [one.stats.num_accepted_tokens for one in drafted]
        assert kept[0] == kept[1] > 3
