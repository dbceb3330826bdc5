"""What a generation config sets for requests that do not say."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import GenerationConfig

import specdec.demo
from specdec.checkpoint.configuration import generation_defaults
from specdec.core.errors import ModelLoadError
from specdec.core.params import GenerationDefaults, SamplingParams
from specdec.models.describe import describe_model
from specdec.models.loading import ModelSource, load_model

DRAFT = Path(specdec.demo.__path__[0]) / "draft"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DRAFT, tmp_path / "model"))


def defaults_of(**values: object) -> GenerationDefaults:
    return generation_defaults(GenerationConfig(**values), "some/model")


def test_a_config_that_says_nothing_changes_nothing() -> None:
    assert defaults_of() == generation_defaults(None, "some/model") == GenerationDefaults()
    assert GenerationDefaults().sampling == SamplingParams()
    assert GenerationDefaults().remark("some/model") is None


def test_what_is_honoured_is_taken() -> None:
    values = {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    found = defaults_of(**values, do_sample=True, max_new_tokens=99, eos_token_id=[1, 2], pad_token_id=0)
    assert found == GenerationDefaults(**values, max_tokens=99)
    assert found.sampling == SamplingParams(**values)


def test_numbers_come_in_their_declared_types() -> None:
    found = defaults_of(temperature=1, top_k=-1, top_p=1)
    assert (found.temperature, found.top_k, found.top_p) == (1.0, 0, 1.0)
    assert type(found.temperature) is float


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("do_sample", False),
        ("no_repeat_ngram_size", 3),
        ("suppress_tokens", [5]),
        ("bad_words_ids", [[5, 6]]),
        ("min_new_tokens", 4),
        ("forced_eos_token_id", 2),
        ("num_beams", 4),
        ("typical_p", 0.5),
    ],
)
def test_what_is_not_honoured_is_named(field: str, value: object) -> None:
    found = defaults_of(**{field: value})
    assert found.not_honoured == (field,)
    assert found.sampling == SamplingParams()
    assert found.remark("some/model") == f"the generation config of some/model sets {field}: not honoured here"


def test_values_that_change_nothing_are_not_named() -> None:
    neutral = {"do_sample": True, "no_repeat_ngram_size": 0, "suppress_tokens": [], "num_beams": 1, "typical_p": 1.0}
    assert defaults_of(**neutral, use_cache=True, output_logits=False, bos_token_id=1) == GenerationDefaults()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", 3.0, r"temperature must be a number from 0 to 2, not 3\.0"),
        ("temperature", "warm", "temperature must be a number"),
        ("top_k", 1.5, "top_k must be an integer"),
        ("top_p", 1.5, "top_p must be a number from 0 to 1"),
        ("repetition_penalty", -1.0, "repetition_penalty must be a number"),
        ("max_new_tokens", 2.5, "max_new_tokens must be an integer of at least 1"),
    ],
)
def test_a_default_out_of_range_is_refused(field: str, value: object, message: str) -> None:
    config = GenerationConfig()
    setattr(config, field, value)
    with pytest.raises(ModelLoadError, match=f"the generation config of some/model cannot be honoured: {message}"):
        generation_defaults(config, "some/model")


@pytest.mark.parametrize("values", [{"temperature": 3.0}, {"max_new_tokens": -1}])
def test_a_model_with_such_a_default_does_not_load(folder: Path, values: dict[str, object]) -> None:
    """Neither where its weights are wanted nor where it is only talked of."""
    (folder / "generation_config.json").write_text(json.dumps(values))
    for read in (load_model, describe_model):
        with pytest.raises(ModelLoadError, match=f"{next(iter(values))}"):
            read(ModelSource(str(folder), device="cpu"))


@pytest.mark.parametrize("has_own_file", [True, False])
def test_a_description_says_what_the_loaded_model_says(folder: Path, has_own_file: bool) -> None:
    """Where there is no generation config, transformers takes what older models say in their config.json."""
    values = {"temperature": 0.3, "no_repeat_ngram_size": 2, "eos_token_id": [0, 9]}
    path = folder / "generation_config.json"
    if has_own_file:
        path.write_text(json.dumps(values))
    else:
        path.unlink()
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | values))
    source = ModelSource(str(folder), device="cpu")
    loaded, described = load_model(source), describe_model(source)
    assert described.generation_defaults == loaded.generation_defaults
    assert described.generation_defaults == GenerationDefaults(temperature=0.3, not_honoured=("no_repeat_ngram_size",))
    assert described.eos_token_ids == loaded.eos_token_ids == (0, 9)
