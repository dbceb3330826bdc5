"""A model's layers compiled by Inductor, whole but for the cache's writes and attention.

Each layer becomes a few fragments around these two, which all layers and all numbers of tokens share. What the
fragments cost to enter does not matter where a step is recorded as a graph. Linear layers that read the same input are
one product there; see :mod:`specdec.executor.merged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from specdec.executor.merged import merge, share_products, unmerge
from specdec.executor.paged_cache import PagedCache
from specdec.kernels.attention import ATTENTION_NAME, paged_attention
from specdec.models.hidden import layers_of


class LayerIndex:
    """A layer's number as its modules hold it: equal to the number, but nothing that compiled code depends on.

    A plain number would be a constant of the code, which each layer would then be compiled for anew.

    Args:
        index: The number.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def __index__(self) -> int:
        return self._index

    def __hash__(self) -> int:
        return hash(self._index)

    def __eq__(self, other: object) -> bool:
        return self._index == other


class CompiledLayers:
    """The layers of a model, compiled on first use.

    Args:
        model: With its layers in one ``ModuleList``.
        backend: As ``torch.compile`` takes it.
        dependent_launches: Have Inductor launch each kernel while the one before it still runs.

    Raises:
        ValueError: the layers are not found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: str | Callable[..., Any] = "inductor",
        dependent_launches: bool = False,
    ) -> None:
        from torch._dynamo import lookup_backend  # a large part of torch

        self._layers = layers_of(model)
        self._numbered: list[tuple[Any, int]] = []
        _leave_out()
        self._merged = merge(self._layers)
        compiler = share_products(lookup_backend(backend))
        if dependent_launches:
            compiler = _with_dependent_launches(compiler)
        for layer in self._layers:
            for module in layer.modules():
                index = getattr(module, "layer_idx", None)
                if isinstance(index, int):
                    self._numbered.append((module, index))
                    self._numbered[-1][0].layer_idx = LayerIndex(index)
            layer.compile(dynamic=True, backend=compiler)

    def undo(self) -> None:
        """Let the layers run operator by operator again."""
        for layer in self._layers:
            layer._compiled_call_impl = None
        for module, index in self._numbered:
            module.layer_idx = index
        unmerge(self._merged)
        self._merged = []

    @contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Within, nothing more is compiled: what would need it runs operator by operator."""
        with torch.compiler.set_stance("eager_on_recompile"):
            yield

    @contextmanager
    def not_used(self) -> Iterator[None]:
        """Within, the layers run operator by operator."""
        with torch.compiler.set_stance("force_eager"):
            yield


def _with_dependent_launches(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """What ``TORCHINDUCTOR_ENABLE_PDL`` does, for one model's layers."""
    from torch._inductor import config

    def compile_dependent(*arguments: Any, **options: Any) -> Any:
        with config.patch({"triton.enable_pdl": True}):
            return compiler(*arguments, **options)

    return compile_dependent


@cache
def _leave_out() -> None:
    """Keep the cache's writes and attention out of what is compiled, in the whole process.

    Done only where something is compiled, since it loads a large part of torch.
    """
    leave_out: Any = torch.compiler.disable
    PagedCache.update = leave_out(PagedCache.update)  # type: ignore[method-assign]
    AttentionInterface.register(ATTENTION_NAME, leave_out(paged_attention))
