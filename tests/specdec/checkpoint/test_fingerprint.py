"""Fingerprints: the content of a model's files decides, and nothing else."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from cluster.config.app import AppArgs
from cluster.models.demos import demo_folder
from cluster.models.identity import fingerprints
from specdec.checkpoint import fingerprint as file_hashes_module
from specdec.checkpoint.fingerprint import (
    ADAPTER_WEIGHTS,
    _read,
    adapter_folder,
    adapter_reference,
    file_hashes,
    model_fingerprint,
    vocabulary_fingerprint,
)
from specdec.core.errors import ModelLoadError
from tests.specdec.adapters import write_adapter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_folder("draft"), tmp_path / "model"))


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_neither_path_nor_age_nor_a_readme_counts(folder: Path) -> None:
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    (folder / "README.md").write_text("another text")
    assert model_fingerprint(str(folder)) == model_fingerprint(str(demo_folder("draft")))


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"rms_norm_eps": 0.5}),
        ("config.json", {"quantization_config": {"bits": 4}}),
        ("generation_config.json", {"temperature": 0.5}),
        ("adapter_config.json", {"r": 8}),
        ("tokenizer_config.json", {"eos_token": "x"}),
    ],
)
def test_what_the_configuration_says_counts(folder: Path, file: str, values: dict[str, object]) -> None:
    (folder / file).exists() or (folder / file).write_text("{}")
    before, vocabulary = model_fingerprint(str(folder)), vocabulary_fingerprint(str(folder))
    edit(folder / file, **values)
    assert model_fingerprint(str(folder)) != before
    assert vocabulary_fingerprint(str(folder)) == vocabulary


def test_every_byte_of_the_weights_counts(folder: Path) -> None:
    file = folder / "model.safetensors"
    seen, content = {model_fingerprint(str(folder))}, bytearray(file.read_bytes())
    for at in (len(content) - 1, len(content) // 2, len(content) // 3, 3 * len(content) // 4):
        content[at] ^= 1
        file.write_bytes(content)
        seen.add(model_fingerprint(str(folder)))
    assert len(seen) == 5


def test_a_large_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(file_hashes_module, "MIN_KEPT_BYTES", 4)
    monkeypatch.setattr(file_hashes_module, "_read", lambda file: read.append(file) or _read(file))
    file, cache = tmp_path / "weights", tmp_path / "cache"
    file.write_bytes(b"first")
    status = file.stat()
    first = file_hashes([file], cache)
    assert first == file_hashes([file], cache) == {"weights": hashlib.sha256(b"first").hexdigest()}
    assert len(read) == 1
    time.sleep(0.02)  # a tick of a file system's clock
    file.write_bytes(b"other")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # what rsync does
    assert file_hashes([file], cache) == {"weights": hashlib.sha256(b"other").hexdigest()}
    assert len(read) == 2
    for entry in cache.iterdir():
        entry.write_text("a crash cut this o")
    assert file_hashes([file], cache) == {"weights": hashlib.sha256(b"other").hexdigest()}


def test_hashes_that_cannot_be_kept_are_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hashes_module, "MIN_KEPT_BYTES", 0)
    (tmp_path / "not-a-folder").touch()
    assert file_hashes([tmp_path / "not-a-folder"], tmp_path / "not-a-folder") == {
        "not-a-folder": hashlib.sha256(b"").hexdigest()
    }


def test_a_vocabulary_is_its_tokens_and_their_ids(folder: Path) -> None:
    pair = [vocabulary_fingerprint(str(demo_folder(name))) for name in ("target", "draft", "hybrid")]
    assert len(set(pair)) == 1
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert vocabulary_fingerprint(str(folder)) != pair[0]
    (folder / "tokenizer.json").unlink()  # the older form: all files count
    before = vocabulary_fingerprint(str(folder))
    (folder / "vocab.json").write_text("{}")
    assert vocabulary_fingerprint(str(folder)) != before


def test_of_a_model_on_the_hub_the_commit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, file: str, revision: str | None, token: str | None) -> str:
        assert (name, token) == ("some/model", "secret")
        path = tmp_path / f"commit-of-{revision or 'main'}" / file
        path.parent.mkdir(exist_ok=True)
        shutil.copy(demo_folder("draft") / file, path)
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    taken = [model_fingerprint("some/model", revision, "secret") for revision in (None, "main", "v2")]
    assert taken[0] == taken[1] != taken[2]
    assert vocabulary_fingerprint("some/model", None, "secret") == vocabulary_fingerprint(str(demo_folder("draft")))


def test_of_an_adapter_each_number_counts_and_nothing_else(tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", {"model.layers.0.mlp.up_proj": (64, 4096)}, 8, 0)
    file = tmp_path / "one" / ADAPTER_WEIGHTS
    before = adapter_reference("a", str(tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two" / "README.md").write_text("trained at night")
    assert adapter_reference("b", str(tmp_path / "two")).fingerprint == before.fingerprint
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    assert adapter_reference("a", str(tmp_path / "one")).fingerprint != before.fingerprint


def test_an_adapter_on_the_hub_stays_the_commit_that_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = ["1" * 40]
    for seed, commit in enumerate(("1" * 40, "2" * 40)):
        write_adapter(tmp_path / commit, {"model.layers.0.mlp.up_proj": (64, 32)}, 4, seed)

    def download(name: str, file: str, revision: str | None, token: str | None) -> str:
        assert name == "some/adapter"
        return str(tmp_path / (revision or newest[0]) / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    before = adapter_reference("a", "some/adapter")
    assert before.path == f"some/adapter@{'1' * 40}"
    newest[0] = "2" * 40
    assert adapter_reference("a", before.path) == before
    after = adapter_reference("a", "some/adapter")
    assert (after.path, after.fingerprint == before.fingerprint) == (f"some/adapter@{'2' * 40}", False)
    assert adapter_folder(before.path) == tmp_path / ("1" * 40)


@pytest.mark.parametrize("fingerprint", [model_fingerprint, vocabulary_fingerprint, adapter_folder])
def test_a_connection_that_is_lost_is_said(
    fingerprint: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object, **__: object) -> str:
        raise httpx2.ReadTimeout("The read operation timed out")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", lose)
    with pytest.raises(ModelLoadError, match="some/model cannot be found on the hub: The read operation timed out"):
        fingerprint("some/model")


def test_what_cannot_be_read_says_so(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a safetensors file"):
        model_fingerprint(str(folder))


def decision(**args: object) -> str:
    return fingerprints(AppArgs.model_validate(args)).decision


def test_a_service_is_known_by_what_decides_its_tokens() -> None:
    plain = decision()
    assert decision(limits={"max_sequences": 3}, num_speculative_tokens=2, log_level="error", block_size=8) == plain
    assert decision(target={"model": str(demo_folder("target")), "dtype": "float32"}, draft=None) == plain
    others = {
        decision(demo="hybrid"),
        decision(target={"dtype": "bfloat16"}),
        decision(logits_processors=["tests.cluster.processors:no_newline"]),
        decision(backend="benchmarks.backends:stand_in:acceptance=0.5"),
    }
    assert len(others | {plain}) == 5


def test_what_drafts_is_in_no_fingerprint() -> None:
    own = fingerprints(AppArgs())
    assert own == fingerprints(AppArgs.model_validate({"draft": {"dtype": "bfloat16"}}))


def test_other_versions_count_where_numbers_may_round_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[dict[str, object]] = [{}, {"target": {"dtype": "bfloat16"}}]
    before = [decision(**kind) for kind in kinds]
    monkeypatch.setattr("cluster.models.identity.version", lambda package: "99")
    after = [decision(**kind) for kind in kinds]
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)
