from collections.abc import Callable

import pytest
import torch

from specdec.cache.blocks import CachedSequence
from specdec.cache.recurrent.pool import checked_window
from specdec.core.errors import ModelLoadError
from specdec.executor.runner import ModelRunner
from specdec.kernels import scan
from specdec.kernels.attention import ATTENTION_NAME
from specdec.models.loading import LoadedModel, prepare_model
from specdec.models.parity_check import check_admission
from tests.specdec.models.families import SOME_FAMILIES, make_model
from tests.specdec.models.recurrent_families import make_recurrent

Models = Callable[[str], tuple[LoadedModel, object]]


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_families_are_admitted(models: Models, family: str) -> None:
    runner = ModelRunner(models(family)[0], num_blocks=40, block_size=4)
    report = check_admission(runner)
    assert report.relative_error < 1e-4
    assert report.num_tokens == 73
    assert runner.pool.num_in_use == 0
    assert runner.loaded.model.config._attn_implementation == ATTENTION_NAME


def test_rounding_of_bfloat16_is_admitted() -> None:
    loaded = prepare_model(make_model("llama").to(torch.bfloat16), "llama")
    report = check_admission(ModelRunner(loaded, num_blocks=40, block_size=4))
    assert 1e-3 < report.relative_error < report.tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_state_is_rolled_back_wrongly_is_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = prepare_model(make_model("llama").to(dtype), "llama")
    runner = ModelRunner(loaded, num_blocks=40, block_size=4)
    right = runner.pool.truncate

    def one_too_many(sequence: CachedSequence, length: int) -> None:
        """The last token kept is, in truth, the first that was refused."""
        refused = sequence.tokens[length:].tolist()
        right(sequence, length)
        if refused and length > 1:
            slot = sequence.tables[0][(length - 1) // 4] * 4 + (length - 1) % 4
            for pools in runner._cache._pools.values():
                for pool in pools:
                    pool.flatten(0, 1)[slot] = pool.flatten(0, 1)[slot - 1 if slot else 0]

    monkeypatch.setattr(runner.pool, "truncate", torch.inference_mode()(one_too_many))
    with pytest.raises(ModelLoadError, match=r"llama cannot be served exactly: .* differs from its plain one by"):
        check_admission(runner)
    assert runner.pool.num_in_use == 0
    assert loaded.model.config._attn_implementation == ATTENTION_NAME


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ModelLoadError, match="nan"):
        check_admission(ModelRunner(prepare_model(model, "llama"), num_blocks=40, block_size=4))


def test_too_few_blocks_are_named(models: Models) -> None:
    with pytest.raises(ModelLoadError, match="too few cache blocks"):
        check_admission(ModelRunner(models("llama")[0], num_blocks=4, block_size=4))


def test_the_logits_compared_may_be_cut(models: Models) -> None:
    runner = ModelRunner(models("llama")[0], num_blocks=40, block_size=4, vocab_size=100)
    assert check_admission(runner, seed=3).relative_error < 1e-4


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3_5", scan.DeltaRule), ("jamba", scan.Mamba1), ("bamba", scan.Mamba2)]
)
def test_a_scan_that_ignores_the_state_it_is_given_is_refused(
    family: str, kind: type[scan.Scan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces longer than the window go through it; in transformers Mamba-1's does so."""
    loaded = prepare_model(make_recurrent(family), family)
    window = checked_window(6)
    options = {"num_blocks": 60, "block_size": 4, "num_state_slots": 4, "window": window}
    assert check_admission(ModelRunner(loaded, **options)).relative_error < 1e-4
    right = kind.whole
    monkeypatch.setattr(kind, "whole", lambda self, inputs, reads, state: right(self, inputs, reads, state * 0))
    with pytest.raises(ModelLoadError, match="cannot be served exactly"):
        check_admission(ModelRunner(loaded, **options))
