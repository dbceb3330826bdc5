"""Hybrid checkpoints from a folder: what an engine makes of them, and models that run without speculation."""

import shutil
from pathlib import Path

import pytest
import torch

import specdec.demo
from specdec.core.errors import ModelLoadError
from specdec.core.params import SamplingParams
from specdec.engine.build import BackendOptions, build_target
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService, SpeculativeEngine
from specdec.engine.target import ModelTarget
from specdec.executor.snapshot_runner import SnapshotRunner
from specdec.models.loading import ModelSource, prepare_model
from specdec.sampling.pipeline import Sampler
from tests.specdec.engine.pairs import MAX_MODEL_LEN, add_noise, assert_same, greedy, run
from tests.specdec.models.recurrent_families import OPAQUE, VOCAB_SIZE, make_recurrent
from tests.thorough.engine.test_recurrent import NOISE, make_cases
from tests.thorough.models.test_snapshots import READS_MANY

DEMO = Path(specdec.demo.__file__).parent / "draft"
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [70, 300, 41, 500, 12, 77]


def save(folder: Path, family: str, noise: float = 0.0) -> ModelSource:
    """A checkpoint as the hub has them, with the demo pair's tokenizer."""
    model = make_recurrent(family, vocab_size=4096)
    (add_noise(model, noise) if noise else model).save_pretrained(folder)
    for file in DEMO.glob("*token*"):
        shutil.copy(file, folder)
    return ModelSource(str(folder), device="cpu")


def test_an_engine_speculates_with_hybrids(tmp_path: Path) -> None:
    target, draft = save(tmp_path / "a", "qwen3_5"), save(tmp_path / "b", "qwen3_5", NOISE)
    options = BackendOptions(max_model_len=128, kv_cache_memory=1 << 24)
    engine = SpeculativeEngine.from_pretrained(target, draft, options=options)
    plain = SpeculativeEngine.from_pretrained(target, options=options)
    result = engine.generate(PROMPT, GREEDY, max_tokens=24)
    assert result.token_ids == plain.generate(PROMPT, GREEDY, max_tokens=24).token_ids
    assert result.stats.num_accepted_tokens > 0
    assert result.stats.fallbacks == {}


def test_a_target_that_reads_single_tokens_runs_without_speculation(tmp_path: Path) -> None:
    target = save(tmp_path / "a", "minimax")
    options = BackendOptions(max_model_len=128, kv_cache_memory=1 << 24)
    said: list[str] = []
    engine = SpeculativeEngine.from_pretrained(target, target, options=options, progress=said.append)
    assert any("prefixes are not shared" in line for line in said)
    engine.generate_batch([PROMPT, PROMPT[:2]], GREEDY, max_tokens=6)
    assert engine.stats.fallbacks == {"reads_single_tokens": 2}
    assert engine.stats.num_draft_tokens == 0
    assert engine._service.target._backend.metrics()["num_fallbacks/reads_single_tokens"] == 2
    engine.generate(PROMPT, GREEDY, max_tokens=6, num_speculative_tokens=0)
    assert engine.stats.fallbacks == {"reads_single_tokens": 2}


def test_the_window_and_the_check_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path, "bamba")
    options = BackendOptions(max_model_len=64, kv_cache_memory=1 << 24, rollback_tokens=30)
    _, built = build_target(source, options)
    assert built.memory.rollback_tokens == built.runner.max_rollback == 30
    assert built.admission is not None
    tolerances = dict.fromkeys((torch.float32, torch.bfloat16), 0.0)
    monkeypatch.setattr("specdec.models.parity_check.TOLERANCES", tolerances)
    with pytest.raises(ModelLoadError, match="cannot be served exactly"):
        build_target(source, options)
    _, built = build_target(source, BackendOptions(max_model_len=64, kv_cache_memory=1 << 24, skip_parity_check=True))
    assert built.admission is None
    assert any("was not checked" in note for note in built.notes)


@pytest.mark.parametrize("family", OPAQUE)
def test_states_that_are_copied_serve_targets_and_drafts(family: str) -> None:
    def runner(model: object) -> SnapshotRunner:
        loaded = prepare_model(model, family)
        return SnapshotRunner(loaded, num_blocks=200, block_size=4, reads_many=READS_MANY[family])

    lengths = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 16}
    target, draft = runner(make_recurrent(family)), runner(add_noise(make_recurrent(family), NOISE))
    service = InProcessService(
        ModelTarget(target, Sampler(VOCAB_SIZE), **lengths), ModelDrafter(draft, Sampler(VOCAB_SIZE), **lengths), 3
    )
    cases = make_cases()[:3]
    outputs, stats = run(service, cases)
    stock = make_recurrent(family)
    for got, case in zip(outputs, cases, strict=True):
        # Whole forwards decide: cached generation is not right in all of these families.
        assert_same(got, greedy(stock, case, use_cache=False), case, stock)
    assert (stats.num_draft_tokens > 0) == READS_MANY[family]
    assert target.states is not None
    assert target.states.num_in_use == 0
