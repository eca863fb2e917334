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

from jattn import _rules


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


class Plan(NamedTuple):
    """The tiles to visit, as int32 (n, 2): of `full` ones all pairs are visible, of `partial` ones some may be.

    `needed` is None, or bool (query tiles, key tiles): which of the partial ones hold a visible pair, at run time.
    """

    queries: Axis
    keys: Axis
    full: np.ndarray
    partial: np.ndarray
    needed: Any


def plan(x, block):
    """The plan of one head's `_tile.Inputs`, for tiles of (queries, keys)."""
    queries, keys = axis(x.query.shape[0], block[0]), axis(x.key.shape[0], block[1])
    shape = len(queries.start), len(keys.start)
    # Pairs of an earlier tile, in the last tile along an axis, are hidden by a mask.
    every = (queries.first == queries.start)[:, None] & (keys.first == keys.start)[None, :]
    some, needed = np.True_, None
    if x.mask is not None:
        all_tiles = tiles(queries, keys, x.query_positions, x.key_positions)
        some, must = x.mask.bounds(all_tiles, static=True)
        every = every & must
        known = x.mask.bounds(all_tiles)[0]
        needed = jnp.broadcast_to(known, shape) if isinstance(known, jax.Array) else None
    if x.bias is not None:
        # It may be -inf anywhere.
        every = every & False
    some, every = np.broadcast_to(some, shape), np.broadcast_to(every, shape)
    return Plan(queries, keys, _listed(some & every), _listed(some & ~every), needed)


def _listed(which):
    return np.argwhere(which).astype(np.int32)


def pairs(x, plan, i, j, partial):
    """The pairs of tile (i, j), which of a partial tile may belong to an earlier one."""
    rows, q = _slices(plan.queries, i)
    columns, k = _slices(plan.keys, j)
    placed = _rules.tile(
        q,
        k,
        None if x.query_positions is None else rows(x.query_positions, 0),
        None if x.key_positions is None else columns(x.key_positions, 0),
        rows,
        columns,
    )
    if not partial:
        return placed
    inside = placed.query_indices >= jnp.asarray(plan.queries.first)[i]
    return placed._replace(inside=inside & (placed.key_indices >= jnp.asarray(plan.keys.first)[j]))


def _slices(axis, i):
    """What picks tile i of an array along `axis`, and the indices in it."""
    start = jnp.asarray(axis.start)[i]

    def pick(x, along):
        return x if x.shape[along] == 1 else lax.dynamic_slice_in_dim(x, start, axis.size, along)

    return pick, start + jnp.arange(axis.size, dtype=np.int32)


@custom_vmap
def anywhere(needed):
    """Whether any element of the mapped axes needs the tile.

    `lax.cond` under `vmap` becomes a select, and skips nothing, as soon as its predicate is mapped. This answers for
    the whole mapped axis at once and stays unmapped.
    """
    return needed


@anywhere.def_vmap
def _(axis_size, in_batched, needed):
    return anywhere(needed.any(0)), False
