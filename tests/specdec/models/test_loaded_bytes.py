"""How far the weights are is told in bytes, and costs no load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specdec.demo
from specdec.models import loading
from specdec.models.loading import ModelSource, load_model, watched, weights_bytes

DRAFT = Path(specdec.demo.__path__[0]) / "draft"


def sparse(path: Path, sizes: dict[str, int]) -> None:
    """A safetensors file of any size that takes no room: nothing but its header is written."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def reported(names: list[str], sizes: dict[str, int], seconds_each: float) -> list[str]:
    lines: list[str] = []
    loaded: list[str] = []
    for name, value in watched([(n, n) for n in names], sizes, lines.append, lambda: len(loaded) * seconds_each):
        assert name == value
        loaded.append(name)
    assert loaded == names
    return lines


def test_bytes_are_counted_over_all_files_by_the_size_of_each_tensor(tmp_path: Path) -> None:
    sparse(tmp_path / "model-1.safetensors", {"a": 5_000_000_000, "b": 1_000_000_000})
    sparse(tmp_path / "model-2.safetensors", {"c": 1_500_000_000})
    sizes = weights_bytes(str(tmp_path))
    assert reported(["a", "b", "c"], sizes, 2.0) == ["5.0 of 7.5 GB", "6.0 of 7.5 GB", "7.5 of 7.5 GB"]
    assert reported(["a", "b", "c"], sizes, 1.0) == ["6.0 of 7.5 GB"], "every two seconds, no more"
    assert reported(["a", "b", "c"], sizes, 0.1) == []


def test_what_has_another_name_in_the_model_counts_an_equal_share_of_the_rest() -> None:
    sizes = {"a": 1_000_000_000, "experts.0": 2_000_000_000, "experts.1": 2_000_000_000, "gate": 1_000_000_000}
    assert reported(["a", "merged", "fused"], sizes, 2.0) == ["1.0 of 6.0 GB", "3.5 of 6.0 GB", "6.0 of 6.0 GB"]
    assert reported(["a"], sizes, 2.0) == ["1.0 of 1.0 GB"], "what the model does not take is not waited for"


def test_a_model_whose_files_are_not_here_has_no_sizes(tmp_path: Path) -> None:
    assert weights_bytes("nobody/no-such-model") == weights_bytes(str(tmp_path)) == {}
    assert reported(["a"], {}, 2.0) == ["0.0 of 0.0 GB"]


def test_loading_a_model_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "EVERY_S", 0.0)
    lines: list[str] = []
    load_model(ModelSource(str(DRAFT), device="cpu"), lines.append)
    parts = [line for line in lines if line.startswith(f"loading {DRAFT}: ")]
    assert len(parts) == len(weights_bytes(str(DRAFT))), "one a tensor"
    assert lines.index(parts[0]) == lines.index(f"loading {DRAFT}") + 1
