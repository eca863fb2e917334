"""Which tiles of T x S hold a visible pair, which are full, and which need the mask.

A rule answers for a tile with sound bounds: may any pair be visible, must all be. Where the rule is made of Python
numbers the answers are NumPy's, at trace time, and a tile without a visible pair is no part of the program. Where they
depend on arrays, a tile is skipped at run time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jattn import _rules, _slices


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
    return tiled.min(1), tiled.max(1)


def tiles(queries, keys, query_positions=None, key_positions=None):
    """Tiles over two axes."""
    stored = [Extremes(a.start, a.start + a.size - 1) for a in (queries, keys)]
    placed = [
        s if x is None else Extremes(*_extremes(x, a))
        for s, x, a in zip(stored, (query_positions, key_positions), (queries, keys), strict=True)
    ]
    q, k = (Extremes(*(x[:, None] for x in e)) for e in (stored[0], placed[0])), (
        Extremes(*(x[None, :] for x in e)) for e in (stored[1], placed[1])
    )
    (q_stored, q_placed), (k_stored, k_placed) = q, k
    return Tiles(queries, keys, q_stored, k_stored, q_placed, k_placed)


# What a tile is: no pair is visible, some may be, all are.
EMPTY, PARTIAL, FULL = 0, 1, 2


class Plan(NamedTuple):
    """The tiles to visit, as int32 (n, 2), in the order of their queries, and what each tile is.

    `kinds` is int32 (query tiles, key tiles), NumPy where it is known at trace time. Then no empty tile is visited.
    """

    queries: Axis
    keys: Axis
    steps: np.ndarray
    kinds: Any


def plan(x, block):
    """The plan of one head's `_tile.Inputs`, for tiles of (queries, keys)."""
    queries, keys = axis(x.query.shape[0], block[0]), axis(x.key.shape[0], block[1])
    # Pairs of an earlier tile, in the last tile along an axis, are hidden by a mask.
    every = (queries.first == queries.start)[:, None] & (keys.first == keys.start)[None, :]
    some = known = np.ones_like(every)
    if x.mask is not None:
        all_tiles = tiles(queries, keys, x.query_positions, x.key_positions)
        some, must = x.mask.bounds(all_tiles)
        every = every & must
        known = known & x.mask.bounds(all_tiles, static=True)[0]
    if x.bias is not None:
        # It may be -inf anywhere.
        every = every & False
    some, every = some & known, some & known & every
    xp = jnp if isinstance(every, jax.Array) else np
    kinds = xp.where(every, np.int32(FULL), xp.where(some, np.int32(PARTIAL), np.int32(EMPTY)))
    return Plan(queries, keys, np.argwhere(known).astype(np.int32), kinds)


def pairs(x, plan, i, j):
    """The pairs of tile (i, j)."""
    rows, q = _cutter(plan.queries, i)
    columns, k = _cutter(plan.keys, j)
    query_positions = None if x.query_positions is None else rows(x.query_positions, 0)
    key_positions = None if x.key_positions is None else columns(x.key_positions, 0)
    return _rules.tile(q, k, query_positions, key_positions, rows, columns)


def placed(pairs, plan, i, j, kind):
    """The pairs of tile (i, j), of a kind: those of a full one are all visible, a partial one's may be another's."""
    if kind == FULL:
        return pairs._replace(full=True)
    inside = pairs.query_indices >= jnp.asarray(plan.queries.first)[i]
    return pairs._replace(inside=inside & (pairs.key_indices >= jnp.asarray(plan.keys.first)[j]))


def _cutter(axis, i):
    """What picks tile i of an array along `axis`, and the indices in it."""
    start = jnp.asarray(axis.start)[i]

    def pick(x, along):
        return x if x.shape[along] == 1 else _slices.take(x, start, axis.size, along)[1]

    return pick, start + jnp.arange(axis.size, dtype=np.int32)


def visited(plan, kinds, i, j, read, skip):
    """The pairs of tile (i, j), of a kind: all of a full one are visible, a partial one may hold another's."""
    if isinstance(kinds, np.ndarray):
        found = np.unique(kinds[plan.steps[:, 0], plan.steps[:, 1]])
        if len(found) == 1:
            return read(int(found[0]))
        return lax.cond(jnp.asarray(kinds == FULL)[i, j], lambda: read(FULL), lambda: read(PARTIAL))
    kind = common_kind(kinds[i, j])
    return lax.switch(kind, [skip, lambda: read(PARTIAL), lambda: read(FULL)])


@custom_vmap
def common_kind(kind):
    """What a tile is for all elements of the mapped axes together.

    `lax.switch` under `vmap` becomes a select, and skips nothing, as soon as its index is mapped. This answers for the
    whole mapped axis at once and stays unmapped.
    """
    return kind


@common_kind.def_vmap
def _(axis_size, in_batched, kind):
    # Of a mapped axis of size 0 any answer will do.
    least, most = kind.min(0, initial=FULL), kind.max(0, initial=EMPTY)
    return common_kind(jnp.where(least == most, least, PARTIAL)), False
