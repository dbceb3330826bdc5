"""Other functions for those that a layer's forward looks up in its module, for one layer and for a while."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, TracebackType
from typing import Any

from torch import nn


def names_used(module: nn.Module) -> frozenset[str]:
    """Names that a module's forward looks up, in its modelling module or elsewhere."""
    function = inspect.unwrap(type(module).forward)
    return frozenset(function.__code__.co_names) if isinstance(function, FunctionType) else frozenset()


def with_globals(function: FunctionType, replacements: Mapping[str, object]) -> FunctionType:
    """A copy of a function, decorators and all, whose innermost body finds ``replacements`` among its globals.

    Decorators must be of the kind of :func:`functools.wraps`.
    """
    wrapped = function.__dict__.get("__wrapped__")
    namespace, closure = function.__globals__, function.__closure__
    if wrapped is None:
        namespace = {**namespace, **replacements}
    else:
        inner = with_globals(wrapped, replacements)
        closure = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in closure or ())
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an instance's forward is put: accelerate's hooks keep it elsewhere."""

    module: nn.Module
    attribute: str
    forward: Callable[..., Any]


class ScopedFunctions:
    """Puts functions in place of those that some layers look up, and takes them out again: a context manager.

    Each layer gets a copy of its own class's forward that finds other globals, on the instance alone: other models of
    the same class, and other threads that run them, see nothing of it. To be entered by one thread at a time.

    Args:
        replacements: The layers, and by name what each is to find.
    """

    def __init__(self, replacements: Iterable[tuple[nn.Module, Mapping[str, Callable[..., Any]]]]) -> None:
        self._places = [_place(module, functions) for module, functions in replacements]
        self._before: list[object] = []

    def __enter__(self) -> None:
        assert not self._before, "entered twice"
        self._before = [place.module.__dict__.get(place.attribute) for place in self._places]
        for place in self._places:
            place.module.__dict__[place.attribute] = place.forward

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for place, before in zip(self._places, self._before, strict=True):
            if before is None:
                del place.module.__dict__[place.attribute]
            else:
                place.module.__dict__[place.attribute] = before
        self._before = []


def _place(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> _Place:
    forward = type(module).forward
    assert isinstance(forward, FunctionType)
    attribute = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    return _Place(module, attribute, MethodType(with_globals(forward, functions), module))
