"""Layers count as they are done, so that a layer that blocks is told from a step that is long."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from specdec.core.types import StepProgress
from specdec.engine.drafter import ModelDrafter
from specdec.engine.target import ModelTarget
from specdec.executor import runner as runner_module
from specdec.executor.runner import ModelRunner, RowInput
from specdec.executor.snapshot_runner import SnapshotRunner
from specdec.kernels.attention import AttentionContext, GroupStep, StepBounds, paged_attention
from specdec.kernels.segmented import ReferenceAttention
from specdec.models.loading import LoadedModel, prepare_model
from specdec.sampling.pipeline import Sampler
from tests.specdec.kernels.steps import spread_step
from tests.specdec.models.families import VOCAB_SIZE, make_model
from tests.specdec.models.recurrent_families import make_recurrent


def runner_of(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, num_blocks=16)


def read(runner: ModelRunner, num_tokens: int) -> None:
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, num_tokens)
    runner.forward([RowInput(sequence, [3] * num_tokens, 1)])


@pytest.mark.parametrize(
    ("make", "num_layers"),
    [(lambda: make_model("llama"), 4), (lambda: make_recurrent("lfm2"), 3), (lambda: make_model("gpt_oss"), 4)],
)
def test_every_attention_layer_convolution_and_scan_counts(make: Callable[[], nn.Module], num_layers: int) -> None:
    runner = runner_of(prepare_model(make(), "mine"))
    for num_steps in (1, 2):
        read(runner, 5)
        assert runner.progress.num_layers == num_steps * num_layers


def test_a_model_whose_layers_are_its_own_counts_what_is_read() -> None:
    runner = SnapshotRunner(prepare_model(make_recurrent("rwkv"), "mine"), num_blocks=16)
    for num_pieces in (1, 2):
        read(runner, 5)
        assert runner.progress.num_layers == num_pieces


def test_a_layer_that_blocks_stops_the_clock_and_layers_that_advance_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the newest layer, seen from another thread while a step runs."""
    loaded = prepare_model(make_model("llama"), "mine")
    seconds = iter(range(1000))
    monkeypatch.setattr(runner_module, "StepProgress", lambda: StepProgress(lambda: float(next(seconds))))
    runner = runner_of(loaded)
    sampler = Sampler(VOCAB_SIZE)
    room = {"max_model_len": 64, "max_num_batched_tokens": 64}
    backends = [kind(runner, sampler, **room) for kind in (ModelTarget, ModelDrafter)]
    arrived, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def wait(*_: object) -> None:
        arrived.release()
        assert go_on.acquire(timeout=60)

    for layer in loaded.model.model.layers:
        layer.register_forward_pre_hook(wait)
    thread = threading.Thread(target=torch.inference_mode()(lambda: read(runner, 5)))
    thread.start()
    seen = []
    for _ in loaded.model.model.layers:
        assert arrived.acquire(timeout=60)
        seen.append([backend.last_progress() for backend in backends])  # nothing goes on while a layer blocks
        seen.append([backend.last_progress() for backend in backends])
        go_on.release()
    thread.join(60)
    assert seen == [[float(n)] * 2 for n in range(4) for _ in range(2)]
    assert backends[0].last_progress() == 4.0


@pytest.mark.xfail(strict=True, reason="part 17 item 7: a layer counts when it is launched, not when it is done")
def test_a_layer_that_is_launched_and_not_done_is_no_progress() -> None:
    """Nothing on the meta device is ever computed."""
    progress = StepProgress()
    query, pool = (torch.empty(shape, device="meta") for shape in ((1, 2, 3, 8), (2, 4, 2, 8)))

    class Launched(ReferenceAttention):
        def attend(self, queries: torch.Tensor, *_: object) -> torch.Tensor:
            return torch.empty_like(queries)

    context = AttentionContext(Launched, progress=progress)
    step = spread_step([[0]], [0], [0], [3], 3).to(torch.device("meta"))
    context.begin([GroupStep(step, step.place, 4)], StepBounds(4, 3, 1, 4))
    paged_attention(nn.Module(), query, pool, pool, sliding_window=None, attention_context=context)
    assert progress.num_layers == 0
