"""Fields that a request has and that have no effect: counted, and logged once each."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain

from deployments.http.errors import ApiError
from deployments.http.observer import Observer
from deployments.http.schemas.fields import Body, ignored_fields
from deployments.http.service import UnknownFields

_logger = logging.getLogger("ray.serve")

_MOST_NAMED = 32
"""Of one body."""
_MOST_CHARACTERS = 64
_MOST_LOGGED = 256
"""Different unknown names that are logged: clients could send any number of them. They are counted as ``other``."""


class IgnoredFields:
    """What this API was sent in vain.

    Args:
        unknown: What becomes of fields that nobody knows: ``ignore`` or ``refuse``.
        observer: Counts every ignored field.
    """

    def __init__(self, unknown: UnknownFields, observer: Observer) -> None:
        self._unknown = unknown
        self._observer = observer
        self._seen: set[str] = set()

    def note(self, body: Body, others: Iterable[str] = ()) -> None:
        """Count and log the ignored fields of a body, each once.

        Args:
            body: It.
            others: Known fields of it that have no effect here.

        Raises:
            ApiError: One is unknown, and such are refused.
        """
        names: dict[str, bool] = {}
        for field, is_known in chain(((name, True) for name in others), ignored_fields(body)):
            name = field[:_MOST_CHARACTERS]
            if not is_known and self._unknown == "refuse":
                raise ApiError(400, f"unknown field {name!r}", param=name, code="unknown_parameter")
            names[name] = is_known
            if len(names) == _MOST_NAMED:
                break
        for name, is_known in names.items():
            self._count(name, is_known)

    def _count(self, name: str, is_known: bool) -> None:
        if name not in self._seen and (is_known or len(self._seen) < _MOST_LOGGED):
            self._seen.add(name)
            _logger.info("requests have the field %r, which has no effect here", name)
        self._observer.ignored_field(name if is_known else "other")
