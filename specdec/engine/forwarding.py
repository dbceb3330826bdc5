"""Backends that leave everything to another: what stands around a backend says only what it adds."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.protocol.backends import DraftBackend, DraftJob, Proposal, TargetBackend, Verification, VerifyJob


class ForwardingTarget:
    """A :class:`specdec.protocol.backends.TargetBackend` over another one."""

    def __init__(self, inner: TargetBackend) -> None:
        self._inner = inner

    @property
    def max_model_len(self) -> int:
        """Of the inner backend."""
        return self._inner.max_model_len

    def gauges(self) -> dict[str, float]:
        """What the inner backend holds now."""
        return self._inner.gauges()

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        """The inner backend's step."""
        return self._inner.verify(jobs)

    def release(self, key: str) -> None:
        """Free everything held for a sequence."""
        self._inner.release(key)


class ForwardingDrafter:
    """A :class:`specdec.protocol.backends.DraftBackend` over another one."""

    def __init__(self, inner: DraftBackend) -> None:
        self._inner = inner

    @property
    def max_model_len(self) -> int:
        """Of the inner backend."""
        return self._inner.max_model_len

    def gauges(self) -> dict[str, float]:
        """What the inner backend holds now."""
        return self._inner.gauges()

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """The inner backend's step."""
        return self._inner.propose(jobs)

    def rest(self) -> None:
        """A step found nothing to draft."""
        self._inner.rest()

    def rename(self, key: str, new_key: str) -> None:
        """What is held for a branch is its sequence's from now on."""
        self._inner.rename(key, new_key)

    def release(self, key: str) -> None:
        """Free everything held for a sequence or branch."""
        self._inner.release(key)
