"""What replicas do while they start, where the launcher and ``/health`` can read it.

A replica whose constructor runs answers no call. So it leaves a line in Ray's key-value store, on whatever node it is,
and takes it away when it has started or failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

NO_DRAFTS = "no drafts: "
"""Before the reason, in the line of a draft model that cannot be loaded."""
_NAMESPACE = "specdec"
_MOST_AGE_S = 600.0
"""What is older is of a replica that was killed while it started, or says nothing any more."""


@contextmanager
def startup(application: str, deployment: str, replica: str) -> Iterator[Callable[[str], None]]:
    """Around a replica's start.

    Args:
        application: Serve's name of the application.
        deployment: Serve's name of the deployment.
        replica: Serve's id of the replica.

    Yields:
        A function that is given what the replica does now, in a line.
    """
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

    key = f"{application}:{deployment}:{replica}"

    def report(line: str) -> None:
        with suppress(Exception):  # nobody's start fails because nobody can be told of it
            _internal_kv_put(key, f"{time.time()} {line}", namespace=_NAMESPACE)

    try:
        yield report
    finally:
        with suppress(Exception):
            _internal_kv_del(key, namespace=_NAMESPACE)


def starting(application: str) -> dict[str, str]:
    """What the replicas of an application that start do now, by deployment; of several the newest line.

    Raises:
        Exception: Ray's, where its head does not answer.
    """
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list

    newest: dict[str, tuple[float, str]] = {}
    for key in _internal_kv_list(f"{application}:", namespace=_NAMESPACE):
        value = _internal_kv_get(key, namespace=_NAMESPACE)
        if value is None:  # it has started by now
            continue
        said_s, _, line = value.decode().partition(" ")
        if time.time() - float(said_s) > _MOST_AGE_S:
            _internal_kv_del(key, namespace=_NAMESPACE)
            continue
        deployment = key.decode().split(":")[1]
        newest[deployment] = max(newest.get(deployment, (0.0, "")), (float(said_s), line))
    return {deployment: line for deployment, (_, line) in newest.items()}
