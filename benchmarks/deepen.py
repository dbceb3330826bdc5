"""The demo target with a real target's step time: ``python -m benchmarks.deepen --out FOLDER [--step-ms 40]``.

Blocks are added whose output projections are zero: they change nothing of what the model says, to the last bit, but
their matrices are read and multiplied like all others, and they cache keys and values. (Zero output projections: Chen
et al. 2016, "Net2Net", section 2.3.) Text and acceptance are the demo pair's, the step that of a far larger model.
"""

from __future__ import annotations

import argparse
import copy
import logging
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import specdec.demo
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model

DEMO = Path(specdec.demo.__path__[0])
CONTEXT_TOKENS = 128
PROBE_LAYERS = (0, 24)
"""Layers added to measure what one of them costs."""
NUM_STEPS = 30
BLOCK_SIZE = 16

logger = logging.getLogger(__name__)


def deepen(model: PreTrainedModel, num_layers: int, seed: int = 0) -> PreTrainedModel:
    """The same function in more layers; the old ones come first.

    Args:
        model: A Llama model with L layers; it is not changed.
        num_layers: At least L.
        seed: Of the new blocks' random weights, which are drawn as the architecture's initialisation does.

    Returns:
        A float32 model.

    Raises:
        ValueError: ``num_layers`` is less than L.
    """
    num_old = model.config.num_hidden_layers
    if num_layers < num_old:
        raise ValueError(f"num_layers must be at least {num_old}, not {num_layers}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**model.config.to_dict() | {"num_hidden_layers": num_layers})
        deep: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    deep.load_state_dict(model.state_dict(), strict=False)
    deep.generation_config = model.generation_config
    with torch.no_grad():
        for layer in deep.model.layers[num_old:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return deep


class Stepper:
    """Forward passes of one token in bfloat16 through the paged cache.

    Args:
        model: Is put into bfloat16, in place, and is not to be used otherwise after that.
        num_steps: Most passes.
    """

    def __init__(self, model: PreTrainedModel, num_steps: int) -> None:
        length = CONTEXT_TOKENS + num_steps + 1
        loaded = prepare_model(model.to(torch.bfloat16), "deep")
        self._runner = ModelRunner(loaded, num_blocks=-(-length // BLOCK_SIZE) + 1, block_size=BLOCK_SIZE)
        self._sequence = self._runner.new_sequence()
        self._runner.reserve(self._sequence, length)
        self._runner.forward([RowInput(self._sequence, tuple(range(3, 3 + CONTEXT_TOKENS)), 1)])
        self.step_s()

    def step_s(self) -> float:
        """Time of one pass, in seconds."""
        started_s = time.perf_counter()
        self._runner.forward([RowInput(self._sequence, (3,), 1)])
        return time.perf_counter() - started_s


def steps_s(models: Sequence[PreTrainedModel], num_steps: int = NUM_STEPS) -> list[float]:
    """Median step of each model, in seconds, as the machine is now; they take turns."""
    steppers = [Stepper(model, num_steps + 1) for model in models]
    rounds = [[stepper.step_s() for stepper in steppers] for _ in range(num_steps)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def choose_layers(model: PreTrainedModel, wanted_s: float) -> int:
    """Number of layers whose step takes about ``wanted_s`` here: a line through two depths."""
    num_old: int = model.config.num_hidden_layers
    depths = [num_old + more for more in PROBE_LAYERS]
    times = steps_s([deepen(model, depth) for depth in depths])
    for depth, time_s in zip(depths, times, strict=True):
        logger.info("%d layers: %.1f ms a step", depth, 1e3 * time_s)
    per_layer_s = (times[1] - times[0]) / (depths[1] - depths[0])
    if per_layer_s <= 0:
        raise RuntimeError("more layers were not slower: the machine is too busy to measure; give --layers")
    return max(num_old, round(depths[0] + (wanted_s - times[0]) / per_layer_s))


def write_pair(folder: Path, num_layers: int | None, wanted_s: float) -> None:
    """Write the deep target and the demo draft below ``folder``, as ``target`` and ``draft``."""
    demo: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    num_layers = choose_layers(demo, wanted_s) if num_layers is None else num_layers
    deep = deepen(demo, num_layers)
    copy.deepcopy(deep).to(torch.bfloat16).save_pretrained(folder / "target")
    AutoTokenizer.from_pretrained(DEMO / "target").save_pretrained(folder / "target")
    shutil.copytree(DEMO / "draft", folder / "draft", dirs_exist_ok=True)
    size = deep.num_parameters() / 1e6
    logger.info("%d layers, %.0f M parameters: %.1f ms a step in bfloat16", num_layers, size, 1e3 * steps_s([deep])[0])
    flags = f"--target {folder / 'target'} --draft {folder / 'draft'} --target-dtype bfloat16 --draft-dtype bfloat16"
    logger.info("Written. Try: python -m benchmarks.modes --offline %s", flags)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and write the pair."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deepen", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for target/ and draft/, outside the package")
    parser.add_argument("--layers", type=int, help="layers of the deep target; measured where not given")
    parser.add_argument("--step-ms", type=float, default=40.0, help="time of a target step to aim at on this machine")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    options = parser.parse_args(arguments)
    if DEMO.parents[1] in (options.out.resolve(), *options.out.resolve().parents):
        parser.error(f"--out: {options.out} is inside the package's own folder")
    if options.step_ms <= 0 or options.threads < 1:
        parser.error("--step-ms and --threads must be positive")
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    try:
        write_pair(options.out, options.layers, options.step_ms / 1e3)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
