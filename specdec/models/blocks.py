"""Which cache blocks hold which tokens: allocation, sharing, rollback and prefix reuse. Numbers only, no tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from specdec.models.recurrent.slots import SequenceState
from specdec.tokens import TokenArray, TokenBuffer, TokenSequence, as_array


@dataclass(slots=True, eq=False)
class CachedSequence:
    """What a model has cached of one sequence. Changed by its :class:`BlockPool` and its runner only.

    Attributes:
        tokens: The tokens whose keys and values are cached, from position 0 on.
        block_ids: Blocks in the order of the positions; may reach beyond ``tokens`` where room was reserved.
        salt: Only sequences with the same salt share prefixes; None keeps this one out of prefix reuse.
        block_digests: Chained digests of its first full, verified blocks.
        state: What recurrent layers keep of it; None where the model has none, or none is held.
    """

    tokens: TokenBuffer = field(default_factory=TokenBuffer)
    block_ids: list[int] = field(default_factory=list)
    salt: bytes | None = b""
    block_digests: list[bytes] = field(default_factory=list)
    state: SequenceState | None = None

    def __len__(self) -> int:
        return len(self.tokens)


class BlockPool:
    """A fixed number of blocks of ``block_size`` positions each, counted by reference.

    Forks share blocks; whoever first writes into a shared block gets a copy of it (:meth:`reserve` decides, the owner
    of the tensors copies what :meth:`take_copies` names). Verified full blocks can be kept for prefix reuse after
    their last user is gone; they count as free and are taken again, least recently used first.

    Args:
        num_blocks: Blocks in the pool, at least 1.
        block_size: Positions per block, at least 1.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_users = [0] * num_blocks
        self._is_empty = np.ones(num_blocks, dtype=np.int8)
        self._num_empty = num_blocks
        self._reusable: OrderedDict[int, bytes] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._copies: list[tuple[int, int]] = []
        self._was_used = bytearray(num_blocks)
        self._uncleared: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks nobody uses, those kept only for prefix reuse included."""
        return self._num_empty + len(self._reusable)

    @property
    def num_in_use(self) -> int:
        """Blocks some sequence holds."""
        return self.num_blocks - self.num_free

    @property
    def num_reusable(self) -> int:
        """Blocks kept only for prefix reuse."""
        return len(self._reusable)

    def blocks_for(self, length: int) -> int:
        """Number of blocks that ``length`` positions take."""
        return -(-length // self.block_size)

    def reserve(self, sequence: CachedSequence, length: int) -> bool:
        """Make room for ``length`` positions in all, writable from the sequence's end on.

        All or nothing: False, with nothing changed, where the free blocks do not suffice.
        """
        blocks = sequence.block_ids
        num_missing = max(0, self.blocks_for(length) - len(blocks))
        tail, offset = divmod(len(sequence.tokens), self.block_size)
        writes_into_tail = bool(offset) and length > len(sequence.tokens)
        copies_tail = writes_into_tail and self._num_users[blocks[tail]] > 1
        if num_missing + (1 if copies_tail else 0) > self.num_free:
            return False
        if copies_tail:
            self._copy_on_write(blocks, tail)
        elif writes_into_tail:
            # Its only user is about to change it: what it was kept for is no longer in it.
            self._forget(blocks[tail])
        for _ in range(num_missing):
            blocks.append(self._take(blocks[-1] if blocks else None))
        return True

    def fits(self, sequence: CachedSequence, length: int, others: Iterable[CachedSequence]) -> bool:
        """Whether :meth:`reserve` would make this room after :meth:`free` of ``others``."""
        held = Counter(block for other in others for block in other.block_ids)
        num_freed = sum(count == self._num_users[block] for block, count in held.items())
        blocks = sequence.block_ids
        tail, offset = divmod(len(sequence.tokens), self.block_size)
        copies_tail = bool(offset) and length > len(sequence.tokens)
        copies_tail = copies_tail and self._num_users[blocks[tail]] - held[blocks[tail]] > 1
        num_missing = max(0, self.blocks_for(length) - len(blocks))
        return num_missing + (1 if copies_tail else 0) <= self.num_free + num_freed

    def is_reserved(self, sequence: CachedSequence, length: int) -> bool:
        """Whether positions from the sequence's end up to ``length`` can be written: the room is there, and its own."""
        if len(sequence.block_ids) * self.block_size < length:
            return False
        tail, offset = divmod(len(sequence.tokens), self.block_size)
        return not offset or self._num_users[sequence.block_ids[tail]] == 1

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget all tokens from position ``length`` on, and free the blocks this leaves unused, reserved ones too."""
        if not 0 <= length <= len(sequence.tokens):
            raise ValueError(f"length must be in [0, {len(sequence.tokens)}], got {length}")
        sequence.tokens.truncate(length)
        del sequence.block_digests[length // self.block_size :]
        num_kept = self.blocks_for(length)
        if len(sequence.block_ids) > num_kept:
            # Deepest first: a prefix must outlive what continues it in the order of eviction.
            for block in reversed(sequence.block_ids[num_kept:]):
                self._release(block)
            del sequence.block_ids[num_kept:]

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A second sequence with the same tokens, sharing all their blocks; reserved room is not shared."""
        block_ids = sequence.block_ids[: self.blocks_for(len(sequence.tokens))]
        for block in block_ids:
            self._num_users[block] += 1
        return CachedSequence(sequence.tokens.copy(), block_ids, sequence.salt, list(sequence.block_digests))

    def free(self, sequence: CachedSequence) -> None:
        """Give all blocks back; the sequence is empty afterwards and may be filled anew."""
        self.truncate(sequence, 0)

    def take_copies(self) -> list[list[tuple[int, int]]]:
        """Block copies (source, destination) to carry out before anything is written, in waves.

        In a wave, read all sources before writing any destination; the waves in turn.
        """
        if not self._copies:
            return []
        waves: list[list[tuple[int, int]]] = [[]]
        written: set[int] = set()
        for source, destination in self._copies:
            if source in written or destination in written:
                waves.append([])
                written = set()
            waves[-1].append((source, destination))
            written.add(destination)
        self._copies.clear()
        return waves

    def take_uncleared(self) -> list[int]:
        """Blocks that still hold what an earlier owner left, to be zeroed after the copies and before any write.

        Attention multiplies masked positions too, so a new owner must not find a value there that is not finite.
        Blocks that nobody has held before are zero already.
        """
        blocks = sorted(self._uncleared)
        self._uncleared.clear()
        return blocks

    def keep_prefix(self, sequence: CachedSequence, verified_length: int) -> None:
        """Offer the full blocks of the first ``verified_length`` tokens, whose state is final, for reuse."""
        if sequence.salt is None:
            return
        digests = sequence.block_digests
        for index in range(len(digests), min(verified_length, len(sequence.tokens)) // self.block_size):
            digest = self._digest(digests, sequence.salt, sequence.tokens.array, index)
            digests.append(digest)
            # Equal content may be cached twice; the first stays the one that is found.
            if digest not in self._block_of:
                self._block_of[digest] = sequence.block_ids[index]
                self._digest_of[sequence.block_ids[index]] = digest

    def find_prefix(self, digests: list[bytes], salt: bytes, tokens: TokenSequence, num_blocks: int) -> int:
        """How many of the first ``num_blocks`` blocks of ``tokens`` are kept for reuse. Takes none of them.

        Args:
            digests: Chained digests of the first blocks, as many as are known. Grows as far as this looks.
            salt: Of the sequence that looks.
            tokens: At least ``num_blocks`` blocks of them.
            num_blocks: Where to stop.
        """
        tokens = as_array(tokens)
        for index in range(num_blocks):
            self.extend_digests(digests, salt, tokens, index + 1)
            if digests[index] not in self._block_of:
                return index
        return num_blocks

    def reuse_prefix(self, sequence: CachedSequence, tokens: TokenSequence, digests: list[bytes] | None = None) -> int:
        """Fill an empty sequence with the longest kept prefix of ``tokens``, in full blocks.

        At least one token is left over, since its logits are wanted.

        Args:
            sequence: Holds nothing.
            tokens: What it will hold.
            digests: Of the first blocks of ``tokens``, where some are known.

        Returns:
            Number of tokens now cached.
        """
        if sequence.tokens or sequence.block_ids:
            raise ValueError("the sequence must be empty")
        if sequence.salt is None:
            return 0
        tokens, digests = as_array(tokens), [] if digests is None else digests
        num_blocks = self.find_prefix(digests, sequence.salt, tokens, (len(tokens) - 1) // self.block_size)
        for digest in digests[:num_blocks]:
            block = self._block_of[digest]
            self._reusable.pop(block, None)
            self._num_users[block] += 1
            sequence.block_ids.append(block)
        sequence.block_digests.extend(digests[:num_blocks])
        sequence.tokens.extend(tokens[: num_blocks * self.block_size])
        return len(sequence.tokens)

    def extend_digests(self, digests: list[bytes], salt: bytes, tokens: TokenSequence, num_blocks: int) -> None:
        """Add chained digests until there is one for each of the first ``num_blocks`` blocks of ``tokens``."""
        tokens = as_array(tokens)
        for index in range(len(digests), num_blocks):
            digests.append(self._digest(digests, salt, tokens, index))

    def _digest(self, parents: list[bytes], salt: bytes, tokens: TokenArray, index: int) -> bytes:
        """Digest of block ``index`` and, through its parent's, of all before it."""
        parent = parents[index - 1] if index else blake2b(salt, digest_size=16).digest()
        content = tokens[index * self.block_size : (index + 1) * self.block_size]
        return blake2b(parent + content.tobytes(), digest_size=16).digest()

    def _copy_on_write(self, blocks: list[int], index: int) -> None:
        copy = self._take(blocks[index - 1] if index else None)
        self._copies.append((blocks[index], copy))
        self._uncleared.discard(copy)  # the copy overwrites all of it
        self._release(blocks[index])
        blocks[index] = copy

    def _take(self, previous: int | None) -> int:
        """A block for one user: the one after ``previous`` if it can be had, since runs are read without gathering."""
        if not self._num_empty:
            block, digest = self._reusable.popitem(last=False)
            del self._block_of[digest], self._digest_of[block]
        else:
            block = 0 if previous is None else previous + 1
            if previous is None or block == self.num_blocks or not self._is_empty[block]:
                block = self._roomiest_block()
            self._is_empty[block] = 0
            self._num_empty -= 1
        self._num_users[block] = 1
        if self._was_used[block]:
            self._uncleared.add(block)
        self._was_used[block] = 1
        return block

    def _roomiest_block(self) -> int:
        """The middle of the longest run of empty blocks (its start, if that is the pool's start)."""
        edges = np.flatnonzero(np.diff(self._is_empty, prepend=0, append=0))
        starts, ends = edges[::2], edges[1::2]
        longest = int(np.argmax(ends - starts))
        start, end = int(starts[longest]), int(ends[longest])
        return start if start == 0 else (start + end) // 2

    def _release(self, block: int) -> None:
        self._num_users[block] -= 1
        if self._num_users[block]:
            return
        digest = self._digest_of.get(block)
        if digest is not None:
            self._reusable[block] = digest
        else:
            self._is_empty[block] = 1
            self._num_empty += 1

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
