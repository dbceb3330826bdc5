"""Which operators of torch some code dispatches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.kernels.attention import address


class Operators(TorchDispatchMode):
    """Their names in order, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


WAITS_OR_COPIES = frozenset(
    f"aten.{name}"
    for name in (
        "_local_scalar_dense.default",  # .item(), int(), if
        "lift_fresh.default",  # a tensor made of host data
        "scalar_tensor.default",
        "_to_copy.default",  # .to()
        "copy_.default",
        "_copy_from.default",
        "index.Tensor",  # a list as an index is host data, a mask waits for how many there are
        "nonzero.default",
        "masked_select.default",
        "equal.default",
    )
)
"""Operators that wait for the device, or may bring data from the host or another device."""


class DeviceOnly(TorchDispatchMode):
    """Fails on each of them. On ``meta`` no operator can hide what it does: a copy to the CPU from there is seen.

    Args:
        staged: What may be copied to; several of them in a tuple.
        allows_indices: Whether a tensor may be indexed by another, which is not told from a list.

    Attributes:
        num_uploads: Copies to ``staged``.
    """

    def __init__(self, staged: Tensor | tuple[Tensor, ...] = (), allows_indices: bool = False) -> None:
        super().__init__()
        staged = staged if isinstance(staged, tuple) else (staged,)
        self._staged, self._allows_indices = {address(one) for one in staged}, allows_indices
        self.num_uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        is_copy = name == "aten.copy_.default"
        if is_copy and args[0].device == args[1].device == torch.device("meta"):
            pass  # from one place of the device to another
        elif is_copy and address(args[0]) in self._staged:
            self.num_uploads += 1
        elif name == "aten._to_copy.default" and kwargs.get("device", args[0].device) == args[0].device:
            pass  # of another type
        elif name == "aten.index.Tensor" and self._allows_indices:
            pass
        elif name in WAITS_OR_COPIES:
            raise AssertionError(f"{func} waits for the device or copies")
        return func(*args, **kwargs)
