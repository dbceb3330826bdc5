"""Tiny checkpoints on disk, with any vocabulary."""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.specdec.models.families import randomize

WITH_GAPS = {"<unk>": 0, "a": 1, "b": 5, "<end>": 9}
"""Four tokens whose ids go up to 9."""


def save_checkpoint(
    folder: Path,
    vocabulary: Mapping[str, int] = WITH_GAPS,
    *,
    num_logits: int = 16,
    seed: int = 0,
    **generation: object,
) -> Path:
    """Save a random llama of one layer with a word-level tokenizer and a generation config."""
    words = Tokenizer(WordLevel(dict(vocabulary), unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=num_logits,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=vocabulary["<end>"],
    )
    randomize(LlamaForCausalLM(config), seed).save_pretrained(folder)
    values = {"eos_token_id": vocabulary["<end>"], **generation}
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder
