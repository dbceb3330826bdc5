"""The deep pair: another time, the same function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.deepen import DEMO, deepen, main, steps_s

Capture = pytest.CaptureFixture[str]
IDS = torch.tensor([[5, 300, 41, 7, 2000, 12, 9, 77]])


@pytest.fixture(scope="module")
def demo() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    main(["--out", str(folder), "--layers", "15"])
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_equal_to_the_last_bit(written: Path, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        pair = [AutoModelForCausalLM.from_pretrained(folder / "target", dtype=dtype) for folder in (DEMO, written)]
        assert torch.equal(*(model(IDS).logits for model in pair))


def test_the_new_layers_are_there_to_be_computed(demo: torch.nn.Module) -> None:
    """Random everywhere but where they write to the residual stream; made anew, they are the same."""
    num_old = demo.config.num_hidden_layers
    deep, again = deepen(demo, num_old + 2), deepen(demo, num_old + 2)
    for layer in deep.model.layers[num_old:]:
        for name, parameter in layer.named_parameters():
            is_output = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            assert bool(parameter.any()) != is_output, name
            assert parameter.ndim == 1 or is_output or float(parameter.detach().std()) > 0.01, name
    assert all(torch.equal(a, b) for a, b in zip(deep.parameters(), again.parameters(), strict=True))
    assert len(deep.model.layers) == deep.config.num_hidden_layers == num_old + 2


def test_fewer_layers_are_refused(demo: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match="num_layers must be at least"):
        deepen(demo, demo.config.num_hidden_layers - 1)


def test_steps_are_timed_in_turns(demo: torch.nn.Module) -> None:
    times = steps_s([deepen(demo, demo.config.num_hidden_layers)], num_steps=2)
    assert len(times) == 1
    assert times[0] > 0


def test_the_pair_is_written_and_loads(written: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(written / "target")
    assert target.config.num_hidden_layers == 15
    assert target.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(written / "target").chat_template
    assert (written / "draft" / "model.safetensors").exists()


BAD_FLAGS = [(["--layers", "3"], "num_layers must be at least"), (["--step-ms", "0"], "must be positive")]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags_are_one_line(tmp_path: Path, capsys: Capture, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), *flags])
    assert message in capsys.readouterr().err


def test_nothing_is_written_into_the_package(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(DEMO / "deep")])
    assert "inside the package" in capsys.readouterr().err
