"""``specdec generate`` and ``specdec doctor`` on the demo pair."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.models.demos import demo_folder
from tests.cluster.processors import NEWLINE
from tests.specdec.checkpoints import save_checkpoint

PROMPT = "def fibonacci(n):"


def printed(capsys, *argv, code=0):
    assert main(list(argv)) == code
    return capsys.readouterr()


def generated(capsys, *argv, temperature="0"):
    flags = (
        "--temperature",
        temperature,
        "--json",
        "--max-tokens",
        "24",
        "--target-kv-cache-memory",
        "64MiB",
        "--max-model-len",
        "256",
    )
    return json.loads(printed(capsys, "generate", PROMPT, *flags, *argv).out)


def test_generate_prints_one_object(capsys):
    result = generated(capsys)
    assert set(result) == {"text", "token_ids", "finish_reason", "stats"}
    assert len(result["token_ids"]) == 24
    assert result["finish_reason"] == "length"
    assert result["text"]
    stats = result["stats"]
    assert stats["num_tokens"] == 24
    assert stats["acceptance_rate"] == stats["num_accepted_tokens"] / stats["num_draft_tokens"] > 0
    assert stats["mean_acceptance_length"] > 1


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_seeds_text_does_not_depend_on_the_draft(capsys, temperature):
    def run(*flags):
        return generated(capsys, "--seed", "7", *flags, temperature=temperature)

    with_draft = run()
    without = run("--num-speculative-tokens", "0")
    alone = run("--target", str(demo_folder("target")))
    assert with_draft["token_ids"] == without["token_ids"] == alone["token_ids"]
    assert without["stats"]["num_drafts"] == alone["stats"]["num_drafts"] == 0 < with_draft["stats"]["num_drafts"]


def test_generate_streams_the_same_text(capsys):
    flags = ("--temperature", "0", "--max-tokens", "24", "--target-kv-cache-memory", "64MiB", "--max-model-len", "256")
    streamed = printed(capsys, "generate", PROMPT, *flags)
    assert streamed.out == generated(capsys)["text"] + "\n"
    assert "[24 tokens, " in streamed.err


def test_generate_takes_the_models_own_defaults(capsys, tmp_path):
    """One token is kept: every seed gives the most likely text; a flag wins over a default."""
    greedy = generated(capsys, "--target", str(demo_folder("target")))
    target = Path(shutil.copytree(demo_folder("target"), tmp_path / "target"))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 2.0, "top_k": 1}))
    flags = ("--target", str(target), "--json", "--max-tokens", "24", "--target-kv-cache-memory", "64MiB")
    found = json.loads(printed(capsys, "generate", PROMPT, *flags, "--max-model-len", "256", "--seed", "3").out)
    assert found["token_ids"] == greedy["token_ids"]
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.0}))
    hot = generated(capsys, "--target", str(target), "--seed", "3", temperature="2")
    assert hot["token_ids"] != greedy["token_ids"]


def test_logits_processors_are_named_in_the_configuration(capsys):
    plain = generated(capsys)
    masked = generated(capsys, "--logits-processors", "tests.cluster.processors:no_newline")
    assert NEWLINE in plain["token_ids"]
    assert NEWLINE not in masked["token_ids"]
    assert len(masked["token_ids"]) == 24
    assert masked["stats"]["acceptance_rate"] > 0


def test_generate_refuses_what_is_too_long(capsys):
    flags = ("--max-tokens", "300", "--target-kv-cache-memory", "64MiB", "--max-model-len", "256")
    assert "exceed 256 tokens" in printed(capsys, "generate", PROMPT, *flags, code=2).err


def test_a_folder_that_is_not_there_is_one_line(capsys):
    shown = printed(capsys, "generate", PROMPT, "--target", "/nowhere/model", code=2)
    assert shown.err.splitlines()[-1] == "specdec generate: there is no folder /nowhere/model"


SMALL = ("--target-kv-cache-memory", "64MiB", "--draft-kv-cache-memory", "8MiB", "--max-model-len", "256")


def found_by_doctor(capsys, *flags, code=0):
    """The problems, and texts by what they are about, each as one."""
    found = json.loads(printed(capsys, "doctor", "--json", *flags, code=code).out)
    about = {line["about"] for line in found["findings"]}
    return found["problems"], {
        name: "\n".join(line["text"] for line in found["findings"] if line["about"] == name) for name in about
    }


def test_doctor_finds_the_demo_pair_well(capsys):
    problems, texts = found_by_doctor(capsys, *SMALL)
    assert problems == []
    assert "4096 tokens in common" in texts["pair"]
    versions = [name.split()[0] for name in texts["versions"].split(", ")]
    assert versions == ["python", "specdec", "torch", "transformers", "accelerate", "ray", "pydantic"]
    for role in ("target", "draft"):
        assert "float32 on " in texts[role]
        assert "a sequence of 256 tokens takes" in texts[role]
        error, tolerance = re.search(r"relative error (\S+) \(allowed (\S+)\)", texts[role]).groups()
        assert float(error) <= float(tolerance)


def test_doctor_refuses_a_tokenizer_wider_than_its_model(capsys, tmp_path):
    target = save_checkpoint(tmp_path, num_logits=9)
    problems, _ = found_by_doctor(capsys, "--target", str(target), code=2)
    assert problems == [f"{target} has 9 logits, but its tokenizer has token ids up to 9"]


def test_doctor_names_what_is_not_honoured(capsys, tmp_path):
    target = save_checkpoint(tmp_path, no_repeat_ngram_size=2, min_new_tokens=3, temperature=0.5)
    warning = (
        f"warning    the generation config of {target} sets min_new_tokens, no_repeat_ngram_size: not honoured here"
    )
    assert warning in printed(capsys, "doctor", "--target", str(target)).out.splitlines()


def test_doctor_refuses_defaults_out_of_range(capsys, tmp_path):
    target = save_checkpoint(tmp_path, temperature=3.0)
    (problem,), _ = found_by_doctor(capsys, "--target", str(target), code=2)
    assert "temperature must be a number from 0 to 2, not 3.0" in problem


def test_doctor_names_a_processor_that_is_not_there(capsys):
    flags = ("--target", str(demo_folder("draft")), "--logits-processors", "nowhere.masks:digits")
    (problem,), _ = found_by_doctor(capsys, *flags, code=2)
    assert "logits_processors: cannot import nowhere.masks:digits" in problem


def test_doctor_says_it_in_words(capsys):
    text = printed(capsys, "doctor", *SMALL).out
    for words in (
        "torch ",
        "cores ",
        "placement ",
        "parity check passed",
        " ms for one token",
        "fits together",
        "the draft's step takes ",
        "verdict    can be served",
    ):
        assert words in text


def test_doctor_says_what_does_not_fit(capsys, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(demo_folder("draft"), draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[1000:1002]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    pair = ("--target", str(demo_folder("target")), "--draft", str(draft))
    (problem,), texts = found_by_doctor(capsys, *SMALL, *pair, code=2)
    assert "the vocabularies differ: token 1000 is" in problem
    assert "pair" not in texts


def test_doctor_says_how_much_memory_is_lacking(capsys):
    shown = printed(capsys, "doctor", "--target-kv-cache-memory", "2MiB", "--draft-kv-cache-memory", "8MiB", code=2)
    assert "one sequence of 2048 tokens" in shown.out
    assert "2.0 MiB may be used" in shown.out
    assert shown.out.splitlines()[-1] == "verdict    cannot be served"
