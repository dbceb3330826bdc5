"""The lists of live replicas that Serve pushes to this process.

Serve makes the request router of every handle by itself, from a class that it pickles *by value*, and offers no way to
hand it an object. So the one thing that is shared by a process lives here, in a module that is always imported.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable

Listener = Callable[[frozenset[str]], None]
DeploymentKey = tuple[str, str]
"""Application and deployment name."""


class ReplicaBoard:
    """The newest list of replica ids of each deployment, and who wants to know; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listed: dict[DeploymentKey, frozenset[str]] = {}
        self._listeners: dict[DeploymentKey, list[Listener]] = {}

    def publish(self, key: DeploymentKey, replicas: Iterable[str]) -> None:
        """Take in a complete list; listeners are called on this thread if it is news, and must not block."""
        replica_ids = frozenset(replicas)
        with self._lock:
            if self._listed.get(key) == replica_ids:
                return
            self._listed[key] = replica_ids
            listeners = list(self._listeners.get(key, ()))
        for listener in listeners:
            listener(replica_ids)

    def subscribe(self, key: DeploymentKey, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with the list known so far, if any, and with every later one; returns how to end it."""
        with self._lock:
            self._listeners.setdefault(key, []).append(listener)
            known = self._listed.get(key)
        if known is not None:
            listener(known)
        return functools.partial(self._unsubscribe, key, listener)

    def _unsubscribe(self, key: DeploymentKey, listener: Listener) -> None:
        with self._lock:
            if listener in self._listeners.get(key, ()):
                self._listeners[key].remove(listener)


@functools.cache
def process_board() -> ReplicaBoard:
    """The board of this process."""
    return ReplicaBoard()
