"""The GPU script: tried out without one, and run where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

SMALL = ("--batches", "1,3", "--num-speculative-tokens", "0,2", "--context", "20", "--repeats", "3")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "skipped: torch finds no GPU here\n"


def test_tried_out_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert gpu.main(["--device", "cpu", "--shapes", "tiny", *SMALL, "--json", str(path)]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    kinds = [tuple(cell.strip() for cell in row[:3]) for row in rows[1:]]
    target = [("target", str(batch), str(length)) for batch in (1, 3) for length in (0, 2)]
    assert sorted(kinds) == sorted([*target, ("draft", "1", "-"), ("draft", "3", "-")])
    figures = json.loads(path.read_text())
    floor_s = figures["weights_bytes"]["target"] / figures["bandwidth_bytes_per_s"]
    assert figures["floor_s"]["target"] == pytest.approx(floor_s)


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_embedding_of_the_input_alone_is_not_read_whole(is_tied: bool) -> None:
    fields = gpu.SHAPES["tiny"]["target"] | {"tie_word_embeddings": is_tied}
    loaded = gpu.make_model(fields, torch.device("cpu"), torch.float32)
    layers = sum(p.nbytes for name, p in loaded.model.named_parameters() if "embed_tokens" not in name)
    buffers = sum(buffer.nbytes for buffer in loaded.model.buffers())
    # Tied, the one matrix of 256 rows of 64 floats is read whole as the output's.
    assert gpu.read_bytes(loaded) == layers + buffers + (256 * 64 * 4 if is_tied else 0)
