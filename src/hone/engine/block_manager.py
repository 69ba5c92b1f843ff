"""Allocation of KV blocks, and the prefix cache, through which sequences reuse blocks.

A *full* block is published under a key, which `_key` makes: the chain id of the block before it,
its token ids, and start and hash of the contents that have a token in it. Every published block
gets a chain id that is never used again, so a chain id stands for exactly one prefix of ids and
contents under one set of weights: the lookup is a walk down a trie and cannot collide. The root of
the trie is replaced at every change of weights, so that a key of older weights can never match.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count

from hone.engine.sequence import Sequence
from hone.engine.snapshots import Snapshots
from hone.model_input import ContentKey

__all__ = ["BlockManager"]

Key = tuple[int, tuple[int, ...], tuple[ContentKey, ...]] | tuple[int, tuple[int, ...]]
"""Key of a block; a block without contents, as every block of a text, has only the first two
parts."""


class BlockManager:
    """Free list, reference counts and prefix cache of `num_blocks` blocks.

    A block is in one of three places: in the tables of `refs > 0` sequences; *idle*, unreferenced
    but still holding a published prefix, evicted least recently used first; or free.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        snapshots: Snapshots | None = None,
    ) -> None:
        """With `snapshots`, of a model with recurrent layers, a prefix is reused only up to a block
        whose end has one."""
        self.num_blocks = num_blocks
        self.snapshots = snapshots
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._chain_ids = count()
        self.clear()

    def clear(self) -> None:
        """Free all blocks and forget their contents."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * self.num_blocks
        self._keys: list[Key | None] = [None] * self.num_blocks
        self._published: dict[Key, tuple[int, int]] = {}  # -> block, its chain id
        self._root = next(self._chain_ids)
        if self.snapshots is not None:
            self.snapshots.clear()

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of blocks in the tables of sequences, 0 to 1."""
        return 1.0 - self.num_available / self.num_blocks

    def invalidate_prefixes(self) -> None:
        """Remove all published blocks from the prefix cache, since their weights or their memory
        are gone.

        Running sequences keep their blocks; blocks that they publish later are below the old root
        and can never match.
        """
        self._root = next(self._chain_ids)
        if self.snapshots is not None:
            self.snapshots.clear()

    def allocate(self, sequence: Sequence, *, reserve: int) -> bool:
        """Give a waiting sequence blocks for all its tokens, reusing cached ones.

        Leaves at least one token to compute. Changes nothing and returns False when fewer than
        `reserve` blocks would remain.
        """
        assert not sequence.block_table, f"{sequence.block_table=}"
        blocks, chain, num_matched = self._match(sequence)
        num_new = -(-len(sequence.token_ids) // self.block_size) - len(blocks)
        num_idle = sum(self._refs[block] == 0 for block in blocks)
        if self.num_available - num_idle - num_new < reserve:
            return False
        for block in blocks:
            self._refs[block] += 1
            self._idle.pop(block, None)
        sequence.num_computed = len(blocks) * self.block_size
        sequence.num_published = len(blocks)
        sequence.num_matched = num_matched * self.block_size
        sequence.chain = chain
        sequence.block_table = blocks + [self._take() for _ in range(num_new)]
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Allocate blocks for all tokens of a sequence; returns False when none is left."""
        while sequence.num_tokens > len(sequence.block_table) * self.block_size:
            if not self.num_available:
                return False
            sequence.block_table.append(self._take())
        return True

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Publish the full blocks within the first `num_tokens` tokens for later sequences.

        The caller warrants that these are written before any sequence admitted from now on reads
        them: in an earlier step, or by the same forward, which writes before it attends.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        while (end := (sequence.num_published + 1) * size) <= num_tokens:
            key = self._key(sequence, sequence.chain, end - size)
            found = self._published.get(key)
            if found is None:
                block = sequence.block_table[sequence.num_published]
                found = self._published[key] = block, next(self._chain_ids)
                self._keys[block] = key
            sequence.chain = found[1]
            sequence.num_published += 1

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's blocks; published ones can be reused until they are evicted."""
        for block in reversed(sequence.block_table):  # so that eviction begins at the end of chains
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None
        sequence.block_table = []
        sequence.num_computed = sequence.num_published = 0

    def _key(self, sequence: Sequence, chain: int, start: int) -> Key:
        """The key of the block of a sequence that begins at token `start`, below `chain`."""
        end = start + self.block_size
        ids = tuple(sequence.token_ids[start:end])
        if sequence.request.model_input.contents:
            contents = sequence.request.model_input.key_of(start, end)
            return (chain, ids, contents) if contents else (chain, ids)
        return chain, ids

    def _match(self, sequence: Sequence) -> tuple[list[int], int, int]:
        """The longest published prefix that leaves at least one token to compute and can be reused:
        its blocks and chain id; and the number of blocks of the longest one that is published."""
        blocks: list[int] = []
        chains = [self._root]
        if self.enable_prefix_caching:
            for start in range(0, len(sequence.token_ids) - self.block_size, self.block_size):
                found = self._published.get(self._key(sequence, chains[-1], start))
                if found is None:
                    break
                blocks.append(found[0])
                chains.append(found[1])
        num_matched = len(blocks)
        if self.snapshots is not None:
            while blocks and chains[-1] not in self.snapshots:
                blocks.pop()
                chains.pop()
        return blocks, chains[-1], num_matched

    def _take(self) -> int:
        """Allocate a block with one reference; evicts the least recently used idle block if none is
        free."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            key = self._keys[block]
            assert key is not None, f"{block=}"
            del self._published[key]
            self._keys[block] = None
        self._refs[block] = 1
        return block
