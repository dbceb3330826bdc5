"""Which cache blocks hold which tokens: allocation, sharing, rollback and prefix reuse. Numbers only, no tensors.

Layers that attend to all positions, and layers with each length of sliding window, are a group each, with blocks of
their own (vLLM's hybrid KV cache manager does the same). A window group gives back the blocks that its window has
passed, so that its share of a long sequence stays bounded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from specdec.cache.recurrent.slots import SequenceState
from specdec.core.tokens import TokenBuffer, TokenSequence, as_array

LOOKAHEAD_TOKENS = 64
"""How far a sequence of a model with windows can be cut back for sure, by default: more than a draft has tokens."""
_BLOCKS_HASHED_AT_ONCE = 32


@dataclass(slots=True, eq=False)
class CachedSequence:
    """What a model has cached of one sequence. Changed by its :class:`BlockPool` and its runner only.

    Attributes:
        tokens: The tokens whose keys and values are cached, from position 0 on.
        tables: Of each group of layers its blocks in the order of the positions. May reach beyond ``tokens`` where
            room was reserved. A block that the group's window has passed stands as the group's ``null_block``.
        salt: Only sequences with the same salt share prefixes; None keeps this one out of prefix reuse.
        block_digests: Chained digests of its first full, verified blocks.
        state: What recurrent layers keep of it; None where the model has none, or none is held.
        num_sent: Leading entries of its tables that the device has; those behind them have changed since, or are new.
        room: Length up to which it has blocks that it reserved.
        may_share_tail: Whether a fork may use the block that is begun, too.
    """

    tokens: TokenBuffer = field(default_factory=TokenBuffer)
    tables: tuple[list[int], ...] = field(default_factory=lambda: ([],))
    salt: bytes | None = b""
    block_digests: list[bytes] = field(default_factory=list)
    state: SequenceState | None = None
    num_sent: int = 0
    room: int = 0
    may_share_tail: bool = False

    def __len__(self) -> int:
        return len(self.tokens.array)


class BlockGroup:
    """The blocks of all layers that attend alike, counted by reference; see :class:`BlockPool`.

    Args:
        num_blocks: Blocks, at least 1.
        window: Positions that a query reads, its own among them; None for all.

    Attributes:
        null_block: Stands in tables for blocks that the window has passed: the one beyond the others, which also takes
            what padding writes.
        version: Number of changes to which digests are found.
    """

    def __init__(self, num_blocks: int, window: int | None = None) -> None:
        self.num_blocks = self.null_block = num_blocks
        self.window = window
        self._num_users = [0] * num_blocks
        self._empty = [*reversed(range(num_blocks))]
        self._reusable: OrderedDict[int, bytes] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self.version = 0
        self._copies: list[tuple[int, int]] = []
        self._was_used = bytearray(num_blocks)
        self._uncleared: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks nobody uses, those kept only for prefix reuse included."""
        return len(self._empty) + len(self._reusable)

    @property
    def num_in_use(self) -> int:
        """Blocks some sequence holds."""
        return self.num_blocks - self.num_free

    @property
    def num_reusable(self) -> int:
        """Blocks kept only for prefix reuse."""
        return len(self._reusable)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._block_of

    def first_read(self, length: int) -> int:
        """First position that the query at position ``length`` reads."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def is_tail_shared(self, table: list[int], length: int, block_size: int) -> bool:
        """Whether position ``length`` lies in a block that is begun and has other users."""
        tail, offset = divmod(length, block_size)
        return bool(offset) and self._num_users[table[tail]] > 1

    def own_tail(self, table: list[int], length: int, block_size: int) -> bool:
        """Make the block that is begun, if one is, writable by its sequence alone; whether it is another one now."""
        tail, offset = divmod(length, block_size)
        if not offset:
            return False
        if self._num_users[table[tail]] == 1:
            # Its only user is about to change it: what it was kept for is no longer in it.
            self._forget(table[tail])
            return False
        copy = self._take()
        self._copies.append((table[tail], copy))
        self._uncleared.discard(copy)  # the copy overwrites all of it
        self._release(table[tail])
        table[tail] = copy
        return True

    def grow(self, table: list[int], num_blocks: int) -> None:
        """Take blocks until the table has ``num_blocks``."""
        while len(table) < num_blocks:
            table.append(self._take())

    def cut(self, table: list[int], num_blocks: int) -> None:
        """Give back all but the first ``num_blocks`` blocks."""
        # Deepest first: a prefix must outlive what continues it in the order of eviction.
        for block in reversed(table[num_blocks:]):
            if block != self.null_block:
                self._release(block)
        del table[num_blocks:]

    def pass_by(self, table: list[int], num_blocks: int) -> None:
        """Give back the first ``num_blocks`` blocks, which the window has passed."""
        for i in range(min(num_blocks, len(table)) - 1, -1, -1):
            if table[i] == self.null_block:
                break
            self._release(table[i])
            table[i] = self.null_block

    def share(self, blocks: Sequence[int]) -> list[int]:
        """The same blocks with one user more each."""
        for block in blocks:
            if block != self.null_block:
                self._num_users[block] += 1
        return list(blocks)

    def publish(self, block: int, digest: bytes) -> None:
        """Let a full block be found by its digest; of equal content that is cached twice the first one is found."""
        if block != self.null_block and digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
            self.version += 1

    def num_reusable_of(self, digests: Iterable[bytes]) -> int:
        """Count the blocks with these digests that nobody uses."""
        return sum(self._block_of.get(digest) in self._reusable for digest in digests)

    def reuse(self, digests: Sequence[bytes], first: int) -> list[int]:
        """A table for blocks with these digests; those before number ``first`` are passed already."""
        blocks = [self._block_of[digest] for digest in digests[first:]]
        for block in blocks:
            self._reusable.pop(block, None)
            self._num_users[block] += 1
        return [self.null_block] * first + blocks

    def num_freed(self, tables: Iterable[list[int]]) -> int:
        """Blocks that would be free if nobody held these tables any more."""
        held = Counter(block for table in tables for block in table if block != self.null_block)
        return sum(count == self._num_users[block] for block, count in held.items())

    def num_other_users(self, block: int, tables: Iterable[list[int]]) -> int:
        """Users of a block beside one that asks and these."""
        return self._num_users[block] - sum(table.count(block) for table in tables) - 1

    def prepare(self, copy: Callable[[list[tuple[int, int]]], None], clear: Callable[[list[int]], None]) -> None:
        """Bring the contents of blocks up to date, which comes before anything is written.

        Blocks that still hold what an earlier owner left are cleared: attention multiplies masked positions too, so a
        new owner must not find a value there that is not finite. Blocks that nobody has held before are zero already.

        If ``copy`` or ``clear`` raises, its blocks are still to be done: the next call repeats it.

        Args:
            copy: Copies blocks (source, destination), of which no destination is a source or another's destination.
                It may be called several times, each time with what the copies before have made.
            clear: Zeroes blocks, after all copies.
        """
        while self._copies:
            wave = self._next_copies()
            copy(wave)
            del self._copies[: len(wave)]
        if self._uncleared:
            clear(sorted(self._uncleared))
            self._uncleared.clear()

    def _next_copies(self) -> list[tuple[int, int]]:
        """The first copies that may be done in any order, and repeated after some of them are done."""
        read: set[int] = set()
        written: set[int] = set()
        for number, (source, destination) in enumerate(self._copies):
            if source in written or destination in written or destination in read:
                return self._copies[:number]
            read.add(source)
            written.add(destination)
        return list(self._copies)

    def _take(self) -> int:
        """A block for one user: an empty one, else the reusable one that was released first."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, digest = self._reusable.popitem(last=False)
            del self._block_of[digest], self._digest_of[block]
            self.version += 1
        self._num_users[block] = 1
        if self._was_used[block]:
            self._uncleared.add(block)
        self._was_used[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._num_users[block] -= 1
        if self._num_users[block]:
            return
        digest = self._digest_of.get(block)
        if digest is not None:
            self._reusable[block] = digest
        else:
            self._empty.append(block)

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self.version += 1


class BlockPool:
    """A fixed number of blocks of ``block_size`` positions each for every group of layers, counted by reference.

    Forks share blocks; whoever first writes into a shared block gets a copy of it (:meth:`reserve` decides, the owner
    of the tensors carries it out in :meth:`BlockGroup.prepare`). Verified full blocks can be kept for prefix reuse
    after their last user is gone; they count as free and are taken again, least recently used first.

    Args:
        num_blocks: Blocks for the layers that attend to all positions, at least 1; for all layers without ``windows``.
        block_size: Positions per block, at least 1.
        windows: Blocks for the layers with each length of sliding window.
        has_full_layers: False where every layer has a window; ``num_blocks`` then counts for nothing.
        lookahead_tokens: How far a sequence can be cut back for sure from its greatest length. Window groups keep what
            that takes.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        windows: dict[int, int] | None = None,
        has_full_layers: bool = True,
        lookahead_tokens: int = LOOKAHEAD_TOKENS,
    ) -> None:
        counts = [(None, num_blocks), *(windows or {}).items()]
        self.groups = tuple(
            BlockGroup(count, window) for window, count in counts if window is not None or has_full_layers
        )
        if block_size < 1 or min(group.num_blocks for group in self.groups) < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {counts} and {block_size}")
        self.block_size = block_size
        self._windowed = [i for i, group in enumerate(self.groups) if group.window is not None]
        self._lookahead = lookahead_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(group.num_blocks for group in self.groups)

    @property
    def num_free(self) -> int:
        """Blocks nobody uses, those kept only for prefix reuse included."""
        return sum(group.num_free for group in self.groups)

    @property
    def num_in_use(self) -> int:
        """Blocks some sequence holds."""
        return sum(group.num_in_use for group in self.groups)

    @property
    def num_reusable(self) -> int:
        """Blocks kept only for prefix reuse."""
        return sum(group.num_reusable for group in self.groups)

    @property
    def usage(self) -> float:
        """Part of the blocks in use, in [0, 1], in the group that is fullest."""
        return max(group.num_in_use / group.num_blocks for group in self.groups)

    @property
    def version(self) -> int:
        """Number of changes to what :meth:`find_prefix` finds."""
        return sum(group.version for group in self.groups)

    @property
    def max_rollback(self) -> int | None:
        """Most tokens that can be taken back for sure; None: any number."""
        return self._lookahead if self._windowed else None

    def new_sequence(self, salt: bytes | None = b"") -> CachedSequence:
        """An empty sequence."""
        return CachedSequence(tables=tuple([] for _ in self.groups), salt=salt)

    def blocks_for(self, length: int) -> int:
        """Number of blocks that ``length`` positions take in a group."""
        return -(-length // self.block_size)

    def reserve(self, sequence: CachedSequence, length: int, num_step_tokens: int | None = None) -> bool:
        """Make room for ``length`` positions in all, writable from the sequence's end on.

        Args:
            sequence: Gets the room.
            length: Positions, those that are cached included.
            num_step_tokens: Tokens of the next step. Window groups get room for these alone, so that this is called
                before every step; None gives them room for all.

        Returns:
            False where the free blocks do not suffice: then nothing is changed, but that blocks are given back which
            windows have passed.
        """
        if length <= sequence.room and not sequence.may_share_tail and not self._windowed:
            return True
        self._pass_by(sequence)
        past = len(sequence.tokens)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            needed = max(0, self._num_blocks(group, past, length, num_step_tokens) - len(table))
            needed += length > past and group.is_tail_shared(table, past, self.block_size)
            if needed and group.num_free < needed:
                return False
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if length > past and group.own_tail(table, past, self.block_size):
                sequence.num_sent = min(sequence.num_sent, past // self.block_size)
            group.grow(table, self._num_blocks(group, past, length, num_step_tokens))
        if length > past:
            sequence.room, sequence.may_share_tail = self.block_size * min(map(len, sequence.tables)), False
        return True

    def reserve_all(self, sequences: Sequence[CachedSequence], lengths: Sequence[int]) -> bool:
        """Make room for so many positions of each of some sequences whose begun blocks are their own.

        Returns:
            False where the free blocks do not suffice for all: then none gets any. False, too, where a fork may use a
            block that is begun.
        """
        short = [one for one in zip(sequences, lengths, strict=True) if one[1] > one[0].room or self._windowed]
        if any(sequence.may_share_tail for sequence in sequences):
            return False
        for i, group in enumerate(self.groups):
            needed = [self.blocks_for(length) - len(sequence.tables[i]) for sequence, length in short]
            if sum([number for number in needed if number > 0]) > group.num_free:
                return False
        # Windows are passed one by one, as blocks are taken: the order says which others are kept for reuse.
        return all(self.reserve(*one) for one in short)

    def may_fit(self, length: int, found: Sequence[bytes], others: Sequence[CachedSequence]) -> bool:
        """Check whether a new sequence could have room after :meth:`free` of ``others``. Takes nothing.

        Args:
            length: Positions that it wants.
            found: Digests of the blocks that it would reuse.
            others: Whose room it may take.

        Returns:
            False if there is too little room for sure, in the group without a window.
        """
        group = self.groups[0]
        if group.window is not None:
            return True
        num_missing = self.blocks_for(length) - len(found) - sum(len(other.tables[0]) for other in others)
        # What it reuses counts as free until it does.
        return num_missing <= group.num_free and num_missing <= group.num_free - group.num_reusable_of(found)

    def fits(
        self,
        sequence: CachedSequence,
        length: int,
        others: Iterable[CachedSequence],
        num_step_tokens: int | None = None,
    ) -> bool:
        """Whether :meth:`reserve` would make this room after :meth:`free` of ``others``."""
        self._pass_by(sequence)
        past, others = len(sequence.tokens), list(others)
        for i, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            held = [other.tables[i] for other in others]
            tail, offset = divmod(past, self.block_size)
            copies_tail = bool(offset) and length > past and group.num_other_users(table[tail], held) > 0
            num_missing = max(0, self._num_blocks(group, past, length, num_step_tokens) - len(table))
            if num_missing + copies_tail > group.num_free + group.num_freed(held):
                return False
        return True

    def is_reserved(self, sequence: CachedSequence, length: int) -> bool:
        """Whether positions from the sequence's end up to ``length`` can be written: the room is there, and its own."""
        if length > sequence.room or not sequence.may_share_tail:
            return length <= sequence.room
        past, tables = len(sequence), zip(self.groups, sequence.tables, strict=True)
        return not any(group.is_tail_shared(table, past, self.block_size) for group, table in tables)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget all tokens from position ``length`` on, and free the blocks this leaves unused, reserved ones too.

        A sequence is cut to 0 where a window group no longer has what the query at ``length`` reads: look at its length
        afterwards.
        """
        num_tokens, size = len(sequence.tokens.array), self.block_size
        if not 0 <= length <= num_tokens:
            raise ValueError(f"length must be in [0, {num_tokens}], got {length}")
        if self._windowed and not self._reaches_back(sequence, length):
            length = 0
        # A block that was full and verified is reserved again before it is written: see ``own_tail``.
        num_blocks = -(-length // size)
        room = length if length < len(sequence.block_digests) * size else num_blocks * size
        if length < num_tokens:
            sequence.tokens.truncate(length)
            del sequence.block_digests[length // size :]
        if sequence.num_sent > num_blocks:
            sequence.num_sent = num_blocks
        if sequence.room > room:
            sequence.room = room
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if len(table) > num_blocks:
                group.cut(table, num_blocks)

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A second sequence with the same tokens, sharing all their blocks; reserved room is not shared."""
        num_blocks = self.blocks_for(len(sequence.tokens))
        sequence.may_share_tail = True
        tables = tuple(
            group.share(table[:num_blocks]) for group, table in zip(self.groups, sequence.tables, strict=True)
        )
        return CachedSequence(
            sequence.tokens.copy(), tables, sequence.salt, list(sequence.block_digests), may_share_tail=True
        )

    def free(self, sequence: CachedSequence) -> None:
        """Give all blocks back; the sequence is empty afterwards and may be filled anew."""
        self.truncate(sequence, 0)

    def keep_prefix(self, sequence: CachedSequence, verified_length: int) -> None:
        """Offer the full blocks of the first ``verified_length`` tokens, whose state is final, for reuse."""
        digests = sequence.block_digests
        num_known = len(digests)
        num_blocks = min(verified_length, len(sequence)) // self.block_size
        if num_blocks <= num_known or sequence.salt is None:
            return
        self.extend_digests(digests, sequence.salt, sequence.tokens.array, num_blocks)
        for index in range(num_known, num_blocks):
            for group, table in zip(self.groups, sequence.tables, strict=True):
                group.publish(table[index], digests[index])

    def find_prefix(
        self,
        digests: list[bytes],
        salt: bytes,
        tokens: TokenSequence,
        num_blocks: int,
        ends: Container[bytes] | None = None,
        num_known: int = 0,
    ) -> int:
        """How many of the first ``num_blocks`` blocks of ``tokens`` can be reused. Takes none of them.

        A group without a window must have all of these blocks, a window group those that the next query reads.

        Args:
            digests: Chained digests of the first blocks, as many as are known. Grows as far as this looks.
            salt: Of the sequence that looks.
            tokens: At least ``num_blocks`` blocks of them.
            num_blocks: Where to stop.
            ends: Digests of the blocks that a prefix may end with; None for any.
            num_known: Blocks that an earlier call has found. If the last of them is still there, the search goes on
                behind it, where neither windows nor ``ends`` say otherwise; those before it are evicted after it.
        """
        tokens, num_found = as_array(tokens), 0
        if num_known and ends is None and not self._windowed and digests[num_known - 1] in self.groups[0]:
            num_found = num_known
        runs = dict.fromkeys(self.groups, 0)  # of each group the first block of its run up to the one looked at
        for index in range(num_found, num_blocks):
            if index == len(digests):
                self.extend_digests(digests, salt, tokens, min(num_blocks, index + _BLOCKS_HASHED_AT_ONCE))
            digest = digests[index]
            for group in runs:
                if digest in group:
                    continue
                if group.window is None:
                    return num_found
                runs[group] = index + 1
            if (ends is None or digest in ends) and all(
                group.window is None or first <= self._first_read(group, index + 1) for group, first in runs.items()
            ):
                num_found = index + 1
        return num_found

    def reuse_prefix(
        self,
        sequence: CachedSequence,
        tokens: TokenSequence,
        digests: list[bytes] | None = None,
        ends: Container[bytes] | None = None,
    ) -> int:
        """Fill an empty sequence with the longest kept prefix of ``tokens``, in full blocks.

        At least one token is left over, since its logits are wanted.

        Args:
            sequence: Holds nothing.
            tokens: What it will hold.
            digests: Of the first blocks of ``tokens``, where some are known.
            ends: Digests of the blocks that it may end with; None for any.

        Returns:
            Number of tokens now cached.
        """
        if sequence.tokens or any(sequence.tables):
            raise ValueError("the sequence must be empty")
        if sequence.salt is None:
            return 0
        tokens, digests = as_array(tokens), [] if digests is None else digests
        num_blocks = self.find_prefix(digests, sequence.salt, tokens, (len(tokens) - 1) // self.block_size, ends)
        sequence.tables = tuple(
            group.reuse(digests[:num_blocks], self._first_read(group, num_blocks)) for group in self.groups
        )
        sequence.block_digests.extend(digests[:num_blocks])
        sequence.tokens.extend(tokens[: num_blocks * self.block_size])
        return len(sequence.tokens)

    def extend_digests(self, digests: list[bytes], salt: bytes, tokens: TokenSequence, num_blocks: int) -> None:
        """Add chained digests until there is one for each of the first ``num_blocks`` blocks of ``tokens``."""
        first, tokens = len(digests), as_array(tokens)
        digest = digests[-1] if first else blake2b(salt, digest_size=16).digest()
        for start in range(first * self.block_size, num_blocks * self.block_size, self.block_size):
            digest = blake2b(digest + tokens[start : start + self.block_size].tobytes(), digest_size=16).digest()
            digests.append(digest)

    def _first_read(self, group: BlockGroup, num_blocks: int) -> int:
        """First block that a group's query reads at the position after ``num_blocks`` blocks."""
        return group.first_read(num_blocks * self.block_size) // self.block_size

    def _num_blocks(self, group: BlockGroup, past: int, length: int, num_step_tokens: int | None) -> int:
        """Blocks of a group's table that room up to ``length`` takes."""
        if group.window is not None and num_step_tokens is not None:
            length = min(length, past + num_step_tokens)
        return self.blocks_for(length)

    def _pass_by(self, sequence: CachedSequence) -> None:
        """Give back what window groups will not read again, also after the sequence was cut back a little."""
        for i in self._windowed:
            first = self.groups[i].first_read(max(0, len(sequence.tokens) - self._lookahead))
            self.groups[i].pass_by(sequence.tables[i], first // self.block_size)

    def _reaches_back(self, sequence: CachedSequence, length: int) -> bool:
        """Whether every group has what the query at ``length`` reads."""
        for i in self._windowed:
            group, table = self.groups[i], sequence.tables[i]
            first = group.first_read(length) // self.block_size
            if first < self.blocks_for(length) and table[first] == group.null_block:
                return False
        return True
