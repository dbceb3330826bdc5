from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.executor.staging import Field, Layout, Record, Staging, Uploads
from tests.specdec.operators import Operators

CPU = torch.device("cpu")
LAYOUT = Layout(
    (
        Field("a", (3,)),
        Field("nothing", (0,)),
        Field("b", (2, 3), torch.float32),
        Field("c", (3,), torch.int64),
        Field("d", (1,), torch.float64),
    )
)
VALUES = {
    "a": [-1, 2**31 - 1, 0],
    "nothing": [],
    "b": [[0.5, -np.inf, 1e-30], [1, 2, 3]],
    "c": [-(2**63), 2**63 - 1, -1],
    "d": [0.1],
}


def fill(arrays) -> None:
    for name, values in VALUES.items():
        arrays[name][...] = values


def test_every_field_arrives_as_it_was_written_in_one_copy() -> None:
    staging = Staging(LAYOUT, CPU)
    fill(staging.begin())
    with Operators() as operators:
        staging.upload()
    assert operators.names == ["aten.copy_.default"]
    for field in LAYOUT.fields:
        arrived = staging.tensors[field.name]
        assert arrived.dtype == field.dtype
        np.testing.assert_array_equal(arrived.numpy(), np.array(VALUES[field.name], arrived.numpy().dtype))
    assert all(offset % 4 == 0 for offset in LAYOUT.offsets.values())


def test_the_host_fills_one_buffer_while_the_other_is_read() -> None:
    staging = Staging(LAYOUT, CPU)
    buffers = []
    for step in range(4):
        arrays = staging.begin()
        assert staging.begin() is arrays, "the same until it is uploaded"
        arrays["a"][:] = step
        buffers.append(arrays["a"])
        before = staging.tensors["a"].clone()
        assert before.tolist() == [max(0, step - 1)] * 3, "filling does not show on the device"
        staging.upload()
        assert staging.tensors["a"].tolist() == [step] * 3
    assert buffers[0] is buffers[2]
    assert buffers[1] is buffers[3]
    assert not np.shares_memory(buffers[0], buffers[1])
    with pytest.raises(RuntimeError, match="begin comes before upload"):
        staging.upload()


def test_arrays_of_other_shapes_travel_behind_the_fields_in_the_same_copy() -> None:
    staging = Staging(LAYOUT, CPU, num_extra_words=24)
    for size in 5, 5, 3:
        extra = [
            np.arange(size, dtype=np.int32),
            np.zeros((size, 0), np.float32),
            np.arange(2 * size, dtype=np.float64)[::2],
            np.arange(2, dtype=np.int64),
        ]
        fill(staging.begin())
        with Operators() as operators:
            tensors = staging.upload(extra)
        assert operators.names.count("aten.copy_.default") == 1
        for values, tensor in zip(extra, tensors, strict=True):
            assert tensor.is_contiguous()
            np.testing.assert_array_equal(tensor.numpy(), values)
            assert tensor.numpy().dtype == values.dtype
        assert staging.tensors["a"].tolist() == VALUES["a"]
    staging.begin()
    with pytest.raises(ValueError, match="extra must have 24 words at most, got 28"):
        staging.upload([np.zeros(25, np.float32)])


def test_records_come_back_in_order_in_one_copy_each() -> None:
    record = Record(LAYOUT, CPU)
    with Operators() as operators:
        record.tensors["a"].fill_(1)
        record.download()
        record.tensors["a"].fill_(2)
        record.download()
        with pytest.raises(RuntimeError, match="2 records are under way"):
            record.download()
        first = record.collect()["a"]
        second = record.collect()["a"]
    assert operators.names.count("aten.copy_.default") == 2
    assert len(operators.names) == 4
    assert first.tolist() == [1] * 3
    assert second.tolist() == [2] * 3
    with pytest.raises(RuntimeError, match="download comes before collect"):
        record.collect()


def test_buffers_that_are_made_in_inference_mode_are_written_outside_of_it() -> None:
    """Blocks are copied within a pass, and paths of trees moved behind it, by the same buffers."""
    uploads, field = Uploads(torch.device("cpu")), Field("chosen", (2,))
    with torch.inference_mode():
        uploads.send([np.arange(4)])
        record = Record(Layout((field,)), torch.device("cpu"))
    (sent,) = uploads.send([np.array([7, 8])])
    record.tensors["chosen"].copy_(sent)
    record.download()
    assert record.collect()["chosen"].tolist() == [7, 8]


def test_on_a_gpu_only_the_event_of_a_buffer_s_own_copy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking, "or the thread that waits would spin"
            self.copies = 0

        def record(self, stream: str) -> None:
            self.copies += 1
            done.append(f"copied on {stream}")

        def synchronize(self) -> None:
            done.append(f"waited for {self.copies}")

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: zeros(*shape, dtype=options["dtype"]))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    staging, record = Staging(LAYOUT, torch.device("cuda:1")), Record(LAYOUT, torch.device("cuda:1"))
    for _ in range(3):
        staging.begin()
        staging.upload()
    copied = "copied on cuda:1"
    assert done == ["waited for 0", copied, "waited for 0", copied, "waited for 1", copied]
    done.clear()
    record.download()
    record.download()
    record.collect()
    assert done == [copied, copied, "waited for 1"]

    def fail(_event: Event) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(Event, "synchronize", fail)
    for _ in range(3):
        with pytest.raises(torch.AcceleratorError):
            record.collect()
        record.download()
    assert record.num_under_way == 1, "a step that failed on the device holds no buffer"


def test_a_layout_takes_words_alone_and_each_name_once() -> None:
    with pytest.raises(ValueError, match="dtype of 'a' must be int32"):
        Field("a", (1,), torch.bfloat16)
    with pytest.raises(ValueError, match="names of their own"):
        Layout((Field("a", (1,)), Field("a", (2,))))


def test_uploads_that_begin_in_inference_mode_go_on_out_of_it() -> None:
    uploads = Uploads(torch.device("cpu"))
    with torch.inference_mode():
        uploads.send([np.arange(4)])
    (sent,) = uploads.send([np.arange(1, 5)])
    assert sent.tolist() == [1, 2, 3, 4]
