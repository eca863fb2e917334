"""Which tiles of T x S hold a visible pair, which are full, and which need the mask.

A rule answers for a tile with sound bounds: may any pair be visible, must all be. Where the rule is made of Python
numbers the answers are NumPy's, at trace time, and a tile without a visible pair is no part of the program. Where they
depend on arrays, a tile is skipped at run time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from jattn import _rules, _walk


class Axis(NamedTuple):
    """Tiles of `size` along `length`: where each starts, and the first index that no earlier tile has.

    A last tile that would stick out starts earlier instead, so that no length needs to divide a tile.
    """

    length: int
    size: int
    first: np.ndarray
    start: np.ndarray


def axis(length, size):
    """The tiles along an axis; none if it is empty."""
    size = min(size, length)
    first = np.arange(0, length, max(size, 1), dtype=np.int32)
    return Axis(length, size, first, np.minimum(first, length - size))


class Extremes(NamedTuple):
    """The least and the greatest of some numbers in each tile, (query tiles, 1) or (1, key tiles)."""

    least: Any
    greatest: Any


class Tiles(NamedTuple):
    """All tiles, as the bounds of a rule see them."""

    queries: Axis
    keys: Axis
    query_indices: Extremes
    key_indices: Extremes
    query_positions: Extremes
    key_positions: Extremes

    def of_queries(self, x):
        """Extremes of x (T,)."""
        return Extremes(*(y[:, None] for y in _extremes(x, self.queries)))

    def of_keys(self, x):
        """Extremes of x (S,)."""
        return Extremes(*(y[None, :] for y in _extremes(x, self.keys)))

    def reduced(self, x, reduction):
        """(query tiles, key tiles), each full or 1: a reduction of x, bool (T, S), each axis full or 1."""
        if x.shape[0] != 1:
            x = reduction(_tiled(x, self.queries), 1)
        return x if x.shape[1] == 1 else reduction(_tiled(x.T, self.keys), 1).T


def _tiled(x, axis):
    """(tiles, size, ...): what each tile along `axis` holds of x (length, ...)."""
    return jnp.take(x, axis.start[:, None] + np.arange(axis.size, dtype=np.int32)[None, :], axis=0)


def _extremes(x, axis):
    tiled = _tiled(x, axis)
    return Extremes(tiled.min(1), tiled.max(1))


def tiles(queries, keys, query_positions=None, key_positions=None, query_indices=None, key_indices=None):
    """Tiles over two axes."""

    def extremes(axis, indices, positions):
        stored = Extremes(axis.start, axis.start + axis.size - 1) if indices is None else _extremes(indices, axis)
        return stored, stored if positions is None else _extremes(positions, axis)

    q = [Extremes(*(y[:, None] for y in e)) for e in extremes(queries, query_indices, query_positions)]
    k = [Extremes(*(y[None, :] for y in e)) for e in extremes(keys, key_indices, key_positions)]
    return Tiles(queries, keys, q[0], k[0], q[1], k[1])


# What a tile is: no pair is visible, some may be, all are.
EMPTY, PARTIAL, FULL = 0, 1, 2


class Plan(NamedTuple):
    """The tiles to visit, as int32 (n, 2), in the order of their queries, and what each tile is.

    `kinds` is int32 (query tiles, key tiles), NumPy where it is known at trace time. Then no empty tile is visited.
    `full` says whether any tile may be.
    """

    queries: Axis
    keys: Axis
    steps: np.ndarray
    kinds: Any
    full: bool


# To visit a tile costs as much time as this many pairs. For window(255, 0) at T = S = 16384, 8 heads, H = 64, tiles of
# 512 x 512, 512 x 256 and 256 x 256 took 16, 18 and 20 ms for a million pairs each (2 cores, AVX-512, jax 0.12).
VISIT = 32768


def cheapest(x, blocks):
    """Of these sizes of tiles, (queries, keys) each, that with which one head's `_tile.Inputs` cost the least."""

    def cost(block):
        all_tiles = _tiles(x, block)
        return _may_hold(x, all_tiles).sum() * (all_tiles.queries.size * all_tiles.keys.size + VISIT)

    return min(blocks, key=cost)


def _tiles(x, block):
    queries, keys = axis(x.query.shape[0], block[0]), axis(x.key.shape[0], block[1])
    return tiles(queries, keys, x.query_positions, x.key_positions, x.query_indices, x.key_indices)


def _may_hold(x, all_tiles):
    """bool (query tiles, key tiles), NumPy: whether a tile may hold a visible pair, for all that is known of a mask."""
    every = np.ones((len(all_tiles.queries.first), len(all_tiles.keys.first)), bool)
    return every if x.mask is None else every & x.mask.bounds(all_tiles, static=True)[0]


def plan(x, block):
    """The plan of one head's `_tile.Inputs`, for tiles of (queries, keys)."""
    all_tiles = _tiles(x, block)
    queries, keys, known = all_tiles.queries, all_tiles.keys, _may_hold(x, all_tiles)
    # Pairs of an earlier tile, in the last tile along an axis, are hidden by a mask.
    every = (queries.first == queries.start)[:, None] & (keys.first == keys.start)[None, :]
    some = np.ones_like(every)
    if x.mask is not None:
        some, must = x.mask.bounds(all_tiles)
        every = every & must
    if x.bias is not None:
        # It may be -inf anywhere.
        every = np.zeros_like(known)
    full = not isinstance(every, np.ndarray) or bool(every.any())
    some, every = some & known, some & known & every
    xp = jnp if isinstance(every, jax.Array) else np
    kinds = xp.where(every, np.int32(FULL), xp.where(some, np.int32(PARTIAL), np.int32(EMPTY)))
    return Plan(queries, keys, np.argwhere(known).astype(np.int32), kinds, full)


def _grid(plan):
    return _walk.Grid((plan.queries.length, plan.keys.length), (plan.queries.size, plan.keys.size))


def walk(plan):
    """The plan's grid, the steps of a walk over the tiles that are not empty, and the kinds of these."""
    grid = _grid(plan)
    i, j = plan.steps.T
    if isinstance(plan.kinds, np.ndarray):
        kinds = plan.kinds[i, j]
        met = np.unique(kinds).tolist() or [PARTIAL]
        return grid, _walk.Steps(np.stack([i, j, np.searchsorted(met, kinds)], 1).astype(np.int32)), met
    kinds = common_kind(plan.kinds)[i, j]
    rows = jnp.stack([i, j, jnp.maximum(kinds - PARTIAL, 0)], 1)
    some = kinds != EMPTY
    steps = _walk.Steps(rows[jnp.argsort(~some, stable=True)], some.sum(dtype=np.int32))
    return grid, steps, [PARTIAL, FULL] if plan.full else [PARTIAL]


def pairs(x, plan, i, j, kind):
    """The pairs of tile (i, j), of a kind: those of a full one are all visible, a partial one's may be another's.

    `x` is the tile's own part of the inputs.
    """
    whole = lambda x, axis: x  # noqa: E731 (a picker is a value)
    grid = _grid(plan)
    # The places along both axes that the tile holds.
    rows, columns = (
        grid.start(along, tile) + jnp.arange(grid.sizes[along], dtype=np.int32)
        for along, tile in ((_walk.QUERIES, i), (_walk.KEYS, j))
    )
    q = rows if x.query_indices is None else x.query_indices
    k = columns if x.key_indices is None else x.key_indices
    pairs = _rules.tile(q, k, x.query_positions, x.key_positions, whole, whole)
    if kind == FULL:
        return pairs._replace(full=True)
    own = rows >= i * plan.queries.size, columns >= j * plan.keys.size
    return pairs._replace(inside=own[0][:, None] & own[1][None, :])


@custom_vmap
def common_kind(kind):
    """What tiles are for all elements of the mapped axes together: a walk goes to the same tiles for all of them."""
    return kind


@common_kind.def_vmap
def _(axis_size, in_batched, kind):
    # Of a mapped axis of size 0 any answer will do.
    least, most = kind.min(0, initial=FULL), kind.max(0, initial=EMPTY)
    return common_kind(jnp.where(least == most, least, PARTIAL)), False
