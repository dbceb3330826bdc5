"""Layers count as they are done, so that a layer that blocks is told from a step that is long."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from specdec.engine.drafter import ModelDrafter
from specdec.engine.target import ModelTarget
from specdec.executor import runner as runner_module
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.executor.snapshot_runner import SnapshotRunner
from specdec.kernels.progress import StepProgress
from specdec.models.loading import LoadedModel, prepare_model
from specdec.sampling.pipeline import Sampler
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


class Gpu:
    """A device that does what is launched when it is told to; its time is the number of what it has done."""

    device = torch.device("cuda")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_launched, self.num_done, self.is_capturing, self.is_lost = 0, 0, False, False
        gpu = self

        class Event:
            def record(self, _stream: object) -> None:
                assert not gpu.is_capturing
                gpu.num_launched += 1
                self.number = gpu.num_launched

            def query(self) -> bool:
                if gpu.is_lost:
                    raise torch.AcceleratorError("CUDA error: device-side assert triggered")
                return self.number <= gpu.num_done

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        self.progress = StepProgress(lambda: float(self.num_done))

    def launch(self, num_layers: int) -> None:
        for _ in range(num_layers):
            self.progress.advance(self.device)

    @property
    def seen(self) -> tuple[int, float]:
        return self.progress.num_layers, self.progress.newest_s


def test_what_is_launched_and_not_done_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.launch(4)
    assert gpu.seen == (0, 0.0)
    for gpu.num_done in (1, 3):
        assert gpu.seen == (gpu.num_done, float(gpu.num_done))
    gpu.launch(2)
    assert gpu.seen == (3, 3.0), "it hangs, and more is launched"
    gpu.num_done = 6
    assert gpu.seen == (6, 6.0)
    gpu.launch(1000)
    gpu.num_done = 1005
    assert gpu.seen == (1005, 1005.0), "of many launches the newest are kept"
    gpu.launch(1)
    gpu.is_lost = True
    assert gpu.seen == (1005, 1005.0), "the step's own thread ends with the error"


def test_what_is_captured_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.is_capturing = True
    gpu.launch(4)
    gpu.is_capturing = False
    gpu.launch(1)
    gpu.num_done = 1
    assert gpu.seen == (1, 1.0)


def test_a_recorded_step_counts_once_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that hangs: nothing of it is told until its end, so that its beginning is what time is taken from."""
    runner = runner_of(prepare_model(make_model("llama"), "mine"))
    runner.record_graphs(ExecutorLimits(max_rows=2, max_tokens=16, max_length=32))
    gpu = Gpu(monkeypatch)
    runner.progress = gpu.progress
    runner.loaded = replace(runner.loaded, device=gpu.device)
    for num_steps in (1, 2):
        read(runner, 5)
        assert gpu.seen == (num_steps - 1, num_steps - 1.0)
        gpu.num_done += 1
        assert gpu.seen == (num_steps, float(num_steps))
