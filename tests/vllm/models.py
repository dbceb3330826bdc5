"""The demo models, and prompts for them; nothing of vLLM's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from cluster.models.demos import demo_folder
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.drafter import ModelDrafter
from specdec.engine.target import ModelTarget
from specdec.models.loading import ModelSource

TARGET, DRAFT, HYBRID = (ModelSource(str(demo_folder(x)), dtype="float32") for x in ("target", "draft", "hybrid"))
VOCAB_SIZE = 4096
ROOMY = BackendOptions(max_model_len=512, max_num_batched_tokens=4096, kv_cache_memory=256 << 20, max_num_seqs=32)
NUM_TOKENS = 48


def own_target() -> ModelTarget:
    return build_target(TARGET, ROOMY)[0]


def own_drafter() -> ModelDrafter:
    return build_drafter(DRAFT, ROOMY, TARGET)[0]


def prompts() -> list[list[int]]:
    """Eight beginnings of Python's own modules, 7 to 182 tokens long."""
    tokenizer = Tokenizer.from_file(str(Path(TARGET.path) / "tokenizer.json"))
    library = Path(json.__file__).parent.parent
    names = ("json/decoder", "argparse", "heapq", "queue", "shutil", "textwrap", "dataclasses", "statistics")
    return [tokenizer.encode((library / f"{name}.py").read_text()).ids[: 7 + 25 * i] for i, name in enumerate(names)]


def spec_of(sampling: SamplingParams, i: int, **changes: object) -> SequenceSpec:
    """Of the prompt of that number."""
    spec = SequenceSpec(sampling, 1000 + i, len(prompts()[i]), NUM_TOKENS, (0,), arrival_s=float(i))
    return replace(spec, **changes)
