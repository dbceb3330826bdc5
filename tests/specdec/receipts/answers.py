"""Answers of the demo pair with their receipts, honest and otherwise, for tests of replay and audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

import specdec.demo
from specdec import BackendOptions, ModelSource, SamplingParams, SpeculativeEngine
from specdec.core.params import SequenceSpec
from specdec.receipts.audit import Answer, Own
from specdec.receipts.contract import numeric_contract
from specdec.receipts.format import LOGPROB_STRIDE, Receipt, ReceiptChoice, ReceiptModel
from specdec.sampling.noise import derive_seed

DEMO = Path(specdec.demo.__path__[0])
EOS = (0,)
PROMPTS = (
    "def read_lines(path):\n    with open",
    "class Stack:\n    def __init__(self",
    "import os\nimport sys\n\n\ndef main(",
    "for i in range(10):\n    print(",
    '"""Tools for dates."""\n\nfrom datetime import',
    "    try:\n        value = int(text)\n    except",
    "def test_add():\n    assert add(1, 2)",
    "x = [n * n for n in numbers if",
)


def source(dtype: str = "float32", quantization: str = "none", path: Path = DEMO / "target") -> ModelSource:
    return ModelSource(str(path), dtype=dtype, device="cpu", quantization=quantization)


OPTIONS = BackendOptions(max_model_len=1024, kv_cache_memory=64 << 20, measures_step=False, skip_parity_check=True)


def make_engine(
    target: ModelSource, draft: bool = True, options: BackendOptions = OPTIONS, **others: Any
) -> SpeculativeEngine:
    of_draft = ModelSource(str(DEMO / "draft"), dtype=target.dtype, device="cpu") if draft else None
    return SpeculativeEngine.from_pretrained(target, of_draft, options=options, **others)


def own(dtype: str = "float32") -> Own:
    return Own("sha256:w", "sha256:t", numeric_contract(dtype, "cpu"))


def answer(
    engine: SpeculativeEngine,
    prompts: Sequence[str] = PROMPTS,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - it is frozen
    *,
    max_tokens: int = 40,
    seed: int = 1,
    dtype: str = "float32",
    used: SamplingParams | None = None,
    used_seed: int | None = None,
    drafts: int | None = None,
) -> Receipt:
    """A receipt of one request; ``used`` are the parameters by which its tokens were really chosen."""
    tokens = [tuple(engine._tokenizer.encode(prompt)) for prompt in prompts]
    seeds = [derive_seed(seed if used_seed is None else used_seed, i, 0) for i in range(len(prompts))]
    params = replace(sampling if used is None else used, logprobs=0)
    specs = [
        (prompt, SequenceSpec(params, one, len(prompt), max_tokens, EOS, float(i), num_speculative_tokens=drafts))
        for i, (prompt, one) in enumerate(zip(tokens, seeds, strict=True))
    ]
    choices = []
    for i, result in enumerate(engine.generate_specs(specs)):
        logprobs = tuple(entry.logprob for entry in (result.logprobs or ())[::LOGPROB_STRIDE])
        said = derive_seed(seed, i, 0)
        choices.append(ReceiptChoice(i, said, max_tokens, result.token_ids, result.finish_reason, logprobs))
    model = ReceiptModel("demo", "sha256:w", "sha256:t")
    return Receipt(
        id="cmpl-1",
        created=1,
        model=model,
        contract=own(dtype).contract,
        sampling=sampling,
        seed=seed,
        stop=(),
        eos_token_ids=EOS,
        prompts=tuple(tokens),
        choices=tuple(choices),
    )


def single(receipt: Receipt) -> list[Answer]:
    """Each choice as an answer of its own; its number goes on being its prompt's."""
    return [Answer(msgspec.structs.replace(receipt, choices=(choice,)), {}) for choice in receipt.choices]


def with_token(receipt: Receipt, choice: int, at: int, token: int) -> Receipt:
    """The receipt with one output token edited."""
    choices = list(receipt.choices)
    ids = choices[choice].token_ids
    choices[choice] = msgspec.structs.replace(choices[choice], token_ids=(*ids[:at], token, *ids[at + 1 :]))
    return msgspec.structs.replace(receipt, choices=tuple(choices))
