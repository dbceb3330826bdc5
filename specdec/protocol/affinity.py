"""Where a sequence should go: where its prefix is probably cached, unless that worker holds too many already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from zlib import crc32

from specdec.core.log import TokenLog

BLOCK_TOKENS = 32
"""Prefixes are told apart at each multiple of this. Workers' cache blocks may have another size."""
MOST_BLOCKS = 1 << 16
"""That many of a worker are remembered. Whether it still has them only it knows: a wrong guess costs time alone."""
MOST_COMPARED = 1 << 10
"""So many blocks of a sequence are looked at, its first: a longer prompt goes where these are."""
ROUTER_BLOCKS = (8, 1)
"""By so many first blocks of a prompt its router is chosen: by as many as it has of these."""
LEAST_SHARE = 0.5
"""Less of a prompt than this is not worth a worker that is not the least loaded."""


def block_digests(log: TokenLog, salt: str) -> list[int]:
    """A digest of each prefix of whole blocks, the shortest first; prefixes are shared only under the same salt."""
    count = min(len(log) // BLOCK_TOKENS, MOST_COMPARED)
    digests = log.prompt.block_digests(BLOCK_TOKENS, MOST_COMPARED)[:count]  # once for all samples of a prompt
    digests += [log.mark(BLOCK_TOKENS * number).digest for number in range(len(digests) + 1, count + 1)]
    own = hash(salt)
    return [digest ^ own for digest in digests]


class CachedPrefixes:
    """Prefixes that a worker has read, as far as its router knows; those used longest ago are forgotten first.

    Args:
        most_blocks: That are remembered.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._newest: tuple[int, int] | None = None

    def add(self, digests: Sequence[int]) -> None:
        """A sequence with these prefixes was given to the worker."""
        newest = (len(digests), digests[-1]) if digests else None
        if newest == self._newest:  # the samples of a prompt end one after the other
            return
        self._newest = newest
        for digest in reversed(digests):  # of a prefix its end is forgotten first: without its beginning it is no use
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)

    def num_cached(self, digests: Sequence[int]) -> int:
        """How many of these blocks, from the first on, were given to it before."""
        count = 0
        while count < len(digests) and digests[count] in self._blocks:
            count += 1
        return count


def choose(loads: Mapping[str, int], num_cached: Mapping[str, int], num_blocks: int, slack: int) -> str:
    """The worker with most of a prompt among those that hold at most ``slack`` sequences more than the least loaded.

    One that has less than half of the prompt has nothing of it, for this. Of several with as much the least loaded is
    chosen, and of these the first by name.

    Args:
        loads: Sequences by worker; at least one worker.
        num_cached: Blocks of the prompt by worker.
        num_blocks: Of the prompt.
        slack: Below 0 nobody looks at what is cached.
    """
    if slack < 0:
        return min(loads, key=lambda name: (loads[name], name))
    most, least_cached = min(loads.values()) + slack, max(1, LEAST_SHARE * num_blocks)
    able = [name for name, load in loads.items() if load <= most]
    worth = {name: count if (count := num_cached.get(name, 0)) >= least_cached else 0 for name in able}
    return min(able, key=lambda name: (-worth[name], loads[name], name))


def choose_router(loads: Mapping[str, int], log: TokenLog, salt: str, seq: str, slack: int) -> str:
    """The router for a sequence: the same for prompts that begin alike, as it knows what it gave its workers to read.

    All ingresses choose alike. A router with over ``slack`` sequences more of an ingress than another is left out.

    Args:
        loads: Sequences of this ingress by router; at least one router.
        log: The sequence's.
        salt: Prefixes are shared only under the same.
        seq: Its name, by which a prompt is placed that has not even a block.
        slack: At least 0.
    """
    if len(loads) == 1:
        return next(iter(loads))
    lengths = (BLOCK_TOKENS * count for count in ROUTER_BLOCKS)
    key = next((str(log.mark(length).digest) for length in lengths if length <= len(log)), seq)
    most = min(loads.values()) + slack
    able = [name for name, load in loads.items() if load <= most]
    return max(able, key=lambda name: (crc32(f"{salt}/{key}/{name}".encode()), name))
