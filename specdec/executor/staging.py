"""How a step's input reaches the device, and its result the host: one buffer and one copy each way.

A buffer is int32 words. A layout gives each named field a fixed place in it, so that the host writes numpy arrays, the
device reads tensors, and no field is sent by itself. Buffers are allocated once, pinned where the device is a GPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD_BYTES = 4
_ALIGNMENT = 4
"""In words: kernels load up to 16 bytes at once."""
_NUMPY_TYPES: Mapping[torch.dtype, type[np.generic]] = {
    torch.int32: np.int32,
    torch.float32: np.float32,
    torch.int64: np.int64,
    torch.float64: np.float64,
}

_TORCH_TYPES = {np.dtype(of_numpy): of_torch for of_torch, of_numpy in _NUMPY_TYPES.items()}

Arrays = Mapping[str, NDArray[Any]]
"""The fields of a layout in a buffer on the host, by name."""
Tensors = Mapping[str, Tensor]
"""The same on the device."""


def _aligned(num_words: int) -> int:
    return -(-num_words // _ALIGNMENT) * _ALIGNMENT


_Shapes = list[tuple[np.dtype[Any], tuple[int, ...]]]
"""Types and shapes of arrays."""


def _places(shapes: _Shapes, start: int) -> Iterator[tuple[int, int, np.dtype[Any], tuple[int, ...]]]:
    """First and last word of arrays that lie behind one another, with their types and shapes."""
    for dtype, shape in shapes:
        num_words = math.prod(shape) * dtype.itemsize // WORD_BYTES
        yield start, start + num_words, dtype, shape
        start += _aligned(num_words)


def num_words_of(arrays: Sequence[NDArray[Any]]) -> int:
    """Words that arrays take behind a layout's fields."""
    return sum([_aligned(values.nbytes // WORD_BYTES) for values in arrays])


@dataclass(frozen=True, slots=True)
class Field:
    """A named array in a buffer.

    Attributes:
        name: Its name.
        shape: Its shape; a dimension may be 0.
        dtype: int32, float32, int64 or float64.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32

    def __post_init__(self) -> None:
        if self.dtype not in _NUMPY_TYPES:
            raise ValueError(f"dtype of {self.name!r} must be int32, float32, int64 or float64, got {self.dtype}")

    @property
    def words_per_item(self) -> int:
        """int32 words of an item: 1 or 2."""
        return self.dtype.itemsize // WORD_BYTES

    @property
    def num_words(self) -> int:
        """int32 words of the whole field."""
        return math.prod(self.shape) * self.words_per_item


@dataclass(frozen=True)
class Layout:
    """Where each field lies in a buffer of int32 words.

    Attributes:
        fields: In the buffer's order, with names of their own.
    """

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"fields must have names of their own, got {names}")

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """The first word of each field, a multiple of 4."""
        offsets, end = {}, 0
        for field in self.fields:
            offsets[field.name] = end
            end += _aligned(field.num_words)
        return offsets

    @cached_property
    def num_words(self) -> int:
        """Words of a buffer."""
        return sum(_aligned(field.num_words) for field in self.fields)

    def arrays(self, buffer: NDArray[np.int32]) -> Arrays:
        """Views of the fields.

        Args:
            buffer: int32 [num_words], contiguous.
        """
        return {
            field.name: buffer[at : at + field.num_words].view(_NUMPY_TYPES[field.dtype]).reshape(field.shape)
            for field, at in zip(self.fields, self.offsets.values(), strict=True)
        }

    def tensors(self, buffer: Tensor) -> Tensors:
        """Views of the fields.

        Args:
            buffer: int32 [num_words], contiguous.
        """
        return {
            field.name: buffer[at : at + field.num_words].view(field.dtype).view(field.shape)
            for field, at in zip(self.fields, self.offsets.values(), strict=True)
        }


class _HostBuffer:
    """A buffer of the host that copies to or from the device read or write.

    Args:
        layout: What is in it.
        device: Where it is copied to or from. Memory is pinned for a GPU; elsewhere copies are done when they return.
        num_extra_words: Words behind the layout's.
    """

    def __init__(self, layout: Layout, device: torch.device, num_extra_words: int = 0) -> None:
        is_gpu = device.type == "cuda"
        self.words = torch.zeros(layout.num_words + num_extra_words, dtype=torch.int32, pin_memory=is_gpu)
        self.in_numpy = self.words.numpy()
        self.arrays = layout.arrays(self.in_numpy)
        self._extra: tuple[_Shapes, list[NDArray[Any]]] = [], []
        # A blocking event puts the thread that waits to sleep, where others keep a core and the driver's lock busy.
        self._event = torch.cuda.Event(blocking=True) if is_gpu else None  # type: ignore[no-untyped-call]
        self._device = device

    def extra(self, shapes: _Shapes, start: int) -> list[NDArray[Any]]:
        """Views of arrays that lie behind one another from word ``start`` on, which is always the same."""
        if self._extra[0] != shapes:
            words = self.in_numpy
            self._extra = (
                shapes,
                [words[at:to].view(dtype).reshape(shape) for at, to, dtype, shape in _places(shapes, start)],
            )
        return self._extra[1]

    def mark(self) -> None:
        """Note that the newest copy is in the device's queue."""
        if self._event is not None:
            # Copies are in the stream of their own device, whichever is the current one.
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait until that copy is done; returns at once where there was none."""
        if self._event is not None:
            self._event.synchronize()


def _copy(to: Tensor, of: Tensor, num_words: int | None) -> None:
    """Put a copy of the first words, or of all, in the device's queue."""
    if num_words is not None:
        to, of = to[:num_words], of[:num_words]
    to.copy_(of, non_blocking=True)


class Staging:
    """The input of steps: the host fills one buffer of a ring while the device may still read the one before.

    The tensors stay where they are, so that a captured graph can read them. Arrays whose shapes change from step to
    step travel behind them in the same copy. Used by one thread, and on one stream.

    Args:
        layout: What a step's input is.
        device: Where it goes.
        depth: Buffers of the ring.
        num_extra_words: Room for arrays behind the layout's fields.

    Attributes:
        layout: What a step's input is.
        num_extra_words: Room for arrays behind the layout's fields.
        words: All of it on the device.
        tensors: The fields on the device, as the newest upload has left them.
    """

    @torch.inference_mode(False)  # what is made in that mode could not be written outside of it
    def __init__(self, layout: Layout, device: torch.device, depth: int = 2, num_extra_words: int = 0) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.layout, self.num_extra_words = layout, num_extra_words
        self.words = torch.zeros(layout.num_words + num_extra_words, dtype=torch.int32, device=device)
        self.tensors = layout.tensors(self.words)
        self._free = deque(_HostBuffer(layout, device, num_extra_words) for _ in range(depth))
        self._filling: _HostBuffer | None = None
        self._extra_shapes: _Shapes = []
        self._extra: list[Tensor] = []
        self._extra_end = layout.num_words

    def begin(self) -> Arrays:
        """The next buffer's fields, to be filled. They hold what they held ``depth`` uploads ago.

        Waits only where the upload from this buffer is not done.
        """
        if self._filling is None:
            self._filling = self._free.popleft()
            self._filling.wait()
        return self._filling.arrays

    def upload(self, extra: Sequence[NDArray[Any]] = ()) -> list[Tensor]:
        """Put one copy of the filled buffer in the device's queue.

        Args:
            extra: Arrays of int32, float32, int64 or float64 that go along; see :func:`num_words_of`.

        Returns:
            These on the device, until the next upload.

        Raises:
            RuntimeError: :meth:`begin` has not been called.
            ValueError: there is no room for ``extra``.
        """
        buffer = self._filling
        if buffer is None:
            raise RuntimeError("begin comes before upload")
        end = self.layout.num_words
        shapes = [(values.dtype, values.shape) for values in extra]
        if shapes != self._extra_shapes:  # steps that decode have the shapes of the step before
            num_words = num_words_of(extra)
            if num_words > self.num_extra_words:
                raise ValueError(f"extra must have {self.num_extra_words} words at most, got {num_words}")
            self._extra_shapes, self._extra_end = shapes, end + num_words
            self._extra = [
                self.words[at:to].view(_TORCH_TYPES[dtype]).view(shape) for at, to, dtype, shape in _places(shapes, end)
            ]
        for to, values in zip(buffer.extra(shapes, end), extra, strict=True):
            to[...] = values
        _copy(self.words, buffer.words, self._extra_end if self.num_extra_words else None)
        buffer.mark()
        self._filling = None
        self._free.append(buffer)
        return self._extra


class Uploads:
    """Brings arrays of any shapes to the device in one copy, from pinned memory that grows by doubling.

    Args:
        device: Where they go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.staging: Staging | None = None

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Arrays of int32, float32, int64 or float64 on the device, until the next ones are."""
        num_words = num_words_of(arrays)
        if self.staging is None or self.staging.num_extra_words < num_words:
            size = 1 << max(0, num_words - 1).bit_length()
            self.staging = Staging(Layout(()), self._device, num_extra_words=size)
        self.staging.begin()
        return self.staging.upload(arrays)


class Downloads:
    """Brings tensors of any shapes to the host in one copy, for which the thread sleeps. Memory grows by doubling.

    Args:
        device: Where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._record: Record | None = None

    def bring(self, tensors: Sequence[Tensor]) -> list[NDArray[np.float64]]:
        """Wait for tensors.

        Args:
            tensors: Whose numbers float64 holds: ids, flags, float32.

        Returns:
            Each as float64, in its shape.
        """
        sizes = [tensor.numel() for tensor in tensors]
        size = sum(sizes)
        if self._record is None or self._record.layout.num_words < 2 * size:
            field = Field("values", (1 << size.bit_length(),), torch.float64)
            self._record = Record(Layout((field,)), self._device, depth=1)
        record = self._record
        torch.cat([tensor.double().view(-1) for tensor in tensors], out=record.tensors["values"][:size])
        record.download(2 * size)
        parts = np.split(record.collect()["values"][:size].copy(), np.cumsum(sizes)[:-1])
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class Record:
    """The results of steps: the device writes one buffer, which comes back in one copy.

    Used by one thread, and on one stream.

    Args:
        layout: What a step's result is.
        device: Where it is written.
        depth: Steps whose result may be under way at once.

    Attributes:
        layout: What a step's result is.
        tensors: The fields on the device, for the step to write.
    """

    @torch.inference_mode(False)  # what is made in that mode could not be written outside of it
    def __init__(self, layout: Layout, device: torch.device, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.layout = layout
        self._words = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        self.tensors = layout.tensors(self._words)
        self._free = deque(_HostBuffer(layout, device) for _ in range(depth))
        self._under_way: deque[_HostBuffer] = deque()

    @property
    def num_under_way(self) -> int:
        """Downloads that have not been collected."""
        return len(self._under_way)

    def download(self, num_words: int | None = None) -> None:
        """Put one copy of the record in the device's queue, behind what writes it.

        Args:
            num_words: How many of the first words are copied; by default all of them.

        Raises:
            RuntimeError: ``depth`` downloads have not been collected.
        """
        if not self._free:
            raise RuntimeError(f"collect comes first: {len(self._under_way)} records are under way")
        buffer = self._free[0]
        _copy(buffer.words, self._words, num_words)
        buffer.mark()
        self._under_way.append(self._free.popleft())

    def collect(self) -> Arrays:
        """The oldest record under way, once it is here. The thread sleeps until then.

        The arrays are overwritten by the download after ``depth - 1`` others.

        Raises:
            RuntimeError: none is under way.
        """
        if not self._under_way:
            raise RuntimeError("download comes before collect")
        buffer = self._under_way.popleft()
        self._free.append(buffer)  # also where its step has failed on the device
        buffer.wait()
        return buffer.arrays
