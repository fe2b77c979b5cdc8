"""Leaves that the user has as one array and stages have in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.runtime.executor import copy_of, own_settings

Index = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Spread:
    """One leaf: `home` is where it lies between steps. Part n stands at `positions[n]` among the leaves of the stages, begins at
    `begins[n]` along `dimension`, and lies as `shardings[n]`. `direct`: the parts are the very blocks of the array, in order.
    """

    shape: tuple[int, ...]
    dimension: int
    home: NamedSharding
    positions: tuple[int, ...]
    begins: tuple[int, ...]
    shardings: tuple[NamedSharding, ...]
    direct: bool

    @property
    def mesh(self) -> Mesh:
        """The mesh of the whole leaf."""
        assert isinstance(self.home.mesh, Mesh)
        return self.home.mesh

    def split(self, leaf: jax.Array, fresh: bool) -> list[jax.Array]:
        """The parts of a leaf that lies at home: where that is direct, the same memory, else memory of their own if they are to be `fresh`,
        as parts must be that are given up.
        """
        if not self.direct:
            whole = [((0,) * len(self.shape), leaf)]
            return [relaid(whole, self._shape(n), s, self._begin(n), fresh) for n, s in enumerate(self.shardings)]
        each = len(self.shardings[0].device_set)
        found: list[jax.Array] = []
        for n, sharding in enumerate(self.shardings):
            blocks = [leaf.addressable_data(k) for k in range(n * each, (n + 1) * each)]
            found.append(jax.make_array_from_single_device_arrays(self._shape(n), sharding, blocks))
        return found

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The leaf at home, of its parts."""
        if not self.direct:
            return relaid([(self._begin(n), part) for n, part in enumerate(parts)], self.shape, self.home, (0,) * len(self.shape))
        each = len(self.shardings[0].device_set)
        return jax.make_array_from_single_device_arrays(self.shape, self.home, [x for part in parts for x in _data(part, each)])

    def _begin(self, n: int) -> tuple[int, ...]:
        return tuple(self.begins[n] if d == self.dimension else 0 for d in range(len(self.shape)))

    def _shape(self, n: int) -> tuple[int, ...]:
        ends = (*self.begins[1:], self.shape[self.dimension])
        return tuple(ends[n] - self.begins[n] if d == self.dimension else size for d, size in enumerate(self.shape))


def relaid(
    sources: Sequence[tuple[tuple[int, ...], jax.Array]],
    shape: tuple[int, ...],
    sharding: NamedSharding,
    begin: tuple[int, ...],
    fresh: bool = False,
) -> jax.Array:
    """An array of this shape and sharding whose first element stands at `begin`, of others that begin elsewhere in one whole.

    Blocks that lie where they are needed are taken as they are, or copied to be `fresh`.
    """
    blocks = [block for start, array in sources for block in _blocks(start, array)]
    found = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        wanted = tuple((b + i.start, b + i.stop) for b, i in zip(begin, _plain(index, shape), strict=True))
        with _on(device):
            block = _block(wanted, device, blocks)
            found.append(copy_of(block) if fresh and any(block is b.data for b in blocks) else block)
    return jax.make_array_from_single_device_arrays(shape, sharding, found)


def _on(device: Any) -> AbstractContextManager[None]:
    """Ops of one device run under a mesh of that device: JAX refuses them under one of others, as the caller's may be."""
    return own_settings(Mesh(np.array([device]), ("device",)))


def _data(array: jax.Array, count: int) -> list[jax.Array]:
    """What each of so many devices has of an array. (`addressable_data` gives a replicated one's first, whatever is asked for.)"""
    if count > 1 and array.is_fully_replicated:
        return [shard.data for shard in array.addressable_shards]
    return [array.addressable_data(k) for k in range(count)]


@dataclass(frozen=True, eq=False)
class _Block:
    """What one device has: from where to where it reaches in each dimension."""

    index: Index
    device: Any
    data: Any


def _blocks(start: tuple[int, ...], array: jax.Array) -> Iterator[_Block]:
    """What each device has of an array. (A shard's own index is one of the integers behind it where the array has keys.)"""
    where = array.sharding.devices_indices_map(array.shape)
    for shard in array.addressable_shards:
        index = tuple((s + i.start, s + i.stop) for s, i in zip(start, _plain(where[shard.device], array.shape), strict=True))
        yield _Block(index, shard.device, shard.data)


def _plain(index: Sequence[slice] | None, shape: Sequence[int]) -> list[slice]:
    """Slices with numbers for both ends."""
    return [slice(*i.indices(n)) for i, n in zip(index or (), shape, strict=True)]


def _block(wanted: Index, device: Any, blocks: Sequence[_Block]) -> Any:
    """The block that a device wants, of those that there are; its own first."""
    for block in blocks:
        if block.index == wanted and block.device == device:
            return block.data
    pieces: dict[Index, _Block] = {}
    for block in blocks:
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, block.index, strict=True))
        if all(a < b for a, b in common) and (common not in pieces or block.device == device):
            pieces[common] = block
    if not pieces:  # an empty leaf: every block of it is as good
        return jax.device_put(blocks[0].data, device).reshape([b - a for a, b in wanted])
    return _assembled({index: _moved(block, index, device) for index, block in pieces.items()})


def _moved(block: _Block, index: Index, device: Any) -> Any:
    """A part of a block on another device."""
    inside = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(index, block.index, strict=True))
    with _on(block.device):
        return jax.device_put(block.data if index == block.index else block.data[inside], device)


def _assembled(pieces: Mapping[Index, Any]) -> Any:
    """Pieces that fill a block, joined: along the first dimension in which a cut goes through none of them."""
    if len(pieces) == 1:
        return next(iter(pieces.values()))
    for d in range(len(next(iter(pieces)))):
        rows: list[dict[Index, Any]] = []
        reached = -1
        for index in sorted(pieces, key=lambda index: index[d]):
            if index[d][0] >= reached:
                rows.append({})
            rows[-1][index] = pieces[index]
            reached = max(reached, index[d][1])
        if len(rows) > 1:
            return jnp.concatenate([_assembled(row) for row in rows], d)
    raise AssertionError(f"blocks {sorted(pieces)} do not fill one")
