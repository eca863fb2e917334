"""Engine: one head in linear memory, a fold over tiles.

The online softmax. Reading tile after tile of keys, a row keeps its largest logit so far, `peak`, and the sums of
p = exp(logits - peak) and of p·value. When a tile raises the peak, the sums so far are multiplied by
exp(old peak - new peak), as if they had been taken with the new one all along. After the last tile they are the sums
that a dense row would have had, and no T x S array was made.

The derivative rule. With the peaks fixed, the sums are plain sums over tiles of `_tile.sums`, so their derivative is
the sum of the derivatives of the tiles, each a linear function of the tangents of query, key, value, bias, ...:

    d acc = sum over tiles of  p (dlogits value + dvalue)          d total = sum over tiles of  p dlogits

That is one `custom_jvp` rule. A tile is recomputed where it is needed (`jax.checkpoint`), so nothing of size T x S is
saved. JAX transposes the rule, tile by tile, into the backward pass that FlashAttention writes by hand, and
differentiates it again for second order.

Sources: Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and Staats 2021, arXiv:2112.05682; Dao et al. 2022,
arXiv:2205.14135.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jattn import _online, _plan, _slices, _tile, _visible

_nothing_saved = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)


class Static(NamedTuple):
    """What the program is made for: tiles of (queries, keys), whether Stats are wanted, how the inputs are built."""

    block: tuple[int, int]
    stats: bool
    tree: Any
    floating: tuple[bool, ...]

    def parted(self, leaves):
        """Leaves that have derivatives, and those that have none."""
        return tuple([x for x, f in zip(leaves, self.floating, strict=True) if f == kind] for kind in (True, False))

    def inputs(self, floats, others):
        floats, others = iter(floats), iter(others)
        return jax.tree.unflatten(self.tree, [next(floats if f else others) for f in self.floating])


def attend(x, dtype, stats, block):
    """(T, D) in `dtype`, and Stats or None."""
    leaves, tree = jax.tree.flatten(x)
    # Inside `shard_map`, what is the same on all devices is made to vary here: the sum over devices that its cotangent
    # needs would otherwise stand in a branch that some devices skip, and the others would wait for them.
    leaves = [_visible.like(leaf, leaves) for leaf in leaves]
    x = jax.tree.unflatten(tree, leaves)
    static = Static(block, stats, tree, tuple(bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in leaves))
    sums, rows = _sums(static, *static.parted(leaves))
    return _tile.results(x, rows._replace(alive=rows.alive > 0), sums, dtype)


def _fold(plan, state, visit):
    """`state`, arrays (T, ...), after `visit(part of a tile's queries, i, j)` for every tile of the plan."""

    def body(state, ij):
        start = jnp.asarray(plan.queries.start)[ij[0]]
        leaves, tree = jax.tree.flatten(state)
        wholes, parts = zip(*(_slices.take(x, start, plan.queries.size) for x in leaves), strict=True)
        parts = jax.tree.leaves(visit(jax.tree.unflatten(tree, parts), *ij))
        leaves = [_slices.put(x, part, start) for x, part in zip(wholes, parts, strict=True)]
        return jax.tree.unflatten(tree, leaves), None

    return _scan(plan, body, state)


def _scan(plan, body, state):
    return lax.scan(body, state, (plan.steps[:, 0], plan.steps[:, 1]))[0] if len(plan.steps) else state


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums(static, floats, others):
    """Sums of all keys, and Rows, `alive` as a number."""
    x = static.inputs(floats, others)
    plan = _plan.plan(x, static.block)

    def visit(state, i, j):
        # Slices and bias are taken here and not in the branches, which would carry whole arrays through.
        pairs = _plan.pairs(x, plan, i, j)
        own = _tile.cut(x, pairs)

        def read(kind):
            placed = _plan.placed(pairs, plan, i, j, kind)
            return _online.absorb(state, own, placed, _tile.visible_pairs(own, placed))

        return _plan.visited(plan, plan.kinds, i, j, read, lambda: state)

    state = _fold(plan, _online.start(x, static.stats), visit)
    ties = None if state.ties is None else jnp.maximum(state.ties, 1)
    rows = _tile.rows(x, state.largest, ties, state.alive)
    # Not a constant: under `vmap` it must be mapped as its tangent is.
    sums = _tile.Sums(state.acc, state.total, state.moment, None if ties is None else ties - ties)
    return sums, rows._replace(alive=rows.alive.astype(sums.total.dtype))


# The axes of the tile that query, key and value, the first of the leaves, are cut along.
_CUT = ("queries", "keys", "keys")


def _sums_jvp(static, primals, tangents):
    floats, others = primals
    moves = [not isinstance(d, SymbolicZero) for d in tangents[0]]
    d_cut = [d if m else None for d, m in zip(tangents[0][:3], moves[:3], strict=True)]
    moves[:3] = [False] * 3
    moving, d_moving = ([x for x, m in zip(of, moves, strict=True) if m] for of in (floats, tangents[0]))
    # The inputs of a tile that move with them.
    flags = static.inputs(moves, [False] * len(others))
    fields = [name for name, flag in zip(flags._fields, flags, strict=True) if any(jax.tree.leaves(flag))]
    cut_fields = [name for name, d in zip(flags._fields, d_cut, strict=False) if d is not None]
    sums, rows = _sums(static, floats, others)
    plan = _plan.plan(static.inputs(floats, others), static.block)
    kinds = None if isinstance(plan.kinds, np.ndarray) else plan.kinds

    def zeros(like):
        return _visible.like(jnp.zeros(like.shape, like.dtype), (floats, others, d_cut, d_moving))

    # Whole arrays and indices go in, and the slices are taken inside: only whole arrays are saved.
    @_nothing_saved
    def tile(floats, others, rows, moving, d_moving, d_parts, kinds, i, j):
        pairs = _plan.pairs(static.inputs(floats, others), plan, i, j)
        rows = jax.tree.map(lambda y: pairs.rows(y, 0), rows)

        def own(moving):
            moving = iter(moving)
            mixed = [next(moving) if m else x for x, m in zip(floats, moves, strict=True)]
            return _tile.cut(static.inputs(mixed, others), pairs)

        # The branches see the tile's own numbers, never a whole array, which they would carry through.
        fixed = own(moving)
        _, d_own = jax.jvp(lambda moving: [getattr(own(moving), name) for name in fields], (moving,), (d_moving,))
        d_own = dict(zip((*cut_fields, *fields), (*d_parts, *d_own), strict=True))

        def tangent(kind):
            placed = _plan.placed(pairs, plan, i, j, kind)
            visible = _tile.visible_pairs(fixed, placed)

            def sums(own):
                return _tile.sums(fixed._replace(**own), placed, visible, rows, static.stats)

            return jax.jvp(sums, ({name: getattr(fixed, name) for name in d_own},), (d_own,))[1]

        def none():
            return jax.tree.map(zeros, jax.eval_shape(lambda: tangent(_plan.PARTIAL)))

        return _plan.visited(plan, plan.kinds if kinds is None else kinds, i, j, tangent, none)

    # The tangents of query, key and value are carried along, and read in place: see `_slices`.
    def body(state, ij):
        d_cut, d_sums = state
        d_parts = []
        for n, (d, name) in enumerate(zip(d_cut, _CUT, strict=True)):
            if d is not None:
                axis = getattr(plan, name)
                d_cut[n], part = _slices.take(d, jnp.asarray(axis.start)[ij[name == "keys"]], axis.size)
                d_parts.append(part)
        parts = tile(floats, others, rows, moving, d_moving, d_parts, kinds, *ij)
        start = jnp.asarray(plan.queries.start)[ij[0]]
        return (d_cut, jax.tree.map(lambda x, part: _slices.add(x, part, start), d_sums, parts)), None

    d_cut = [None if d is None else _visible.like(d, (floats, others, d_moving)) for d in d_cut]
    _, d_sums = _scan(plan, body, (d_cut, jax.tree.map(zeros, sums)))
    return (sums, rows), (d_sums, jax.tree.map(jnp.zeros_like, rows))


_sums.defjvp(_sums_jvp, symbolic_zeros=True)
