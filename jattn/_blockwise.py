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
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jattn import _online, _plan, _tile, _visible

_nothing_saved = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False
)


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
    static = Static(block, stats, tree, tuple(bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in leaves))
    sums, rows = _sums(static, *static.parted(leaves))
    return _tile.results(x, rows._replace(alive=rows.alive > 0), sums, dtype)


def _fold(x, plan, state, visit):
    """`state`, arrays (T, ...), after `visit(part of a tile's queries, i, j, partial)` for every tile of the plan."""

    def visited(state, i, j, partial):
        start = jnp.asarray(plan.queries.start)[i]
        part = jax.tree.map(lambda y: lax.dynamic_slice_in_dim(y, start, plan.queries.size), state)
        part = visit(part, i, j, partial)
        return jax.tree.map(lambda y, new: lax.dynamic_update_slice_in_dim(y, new, start, 0), state, part)

    for tiles, partial in ((plan.full, False), (plan.partial, True)):
        if len(tiles):
            body = functools.partial(lambda state, ij, partial: (visited(state, *ij, partial), None), partial=partial)
            state, _ = lax.scan(body, state, (tiles[:, 0], tiles[:, 1]))
    return state


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums(static, floats, others):
    """Sums of all keys, and Rows, `alive` as a number."""
    x = static.inputs(floats, others)
    plan = _plan.plan(x, static.block)
    poison = _tile.spoils(x.key, x.value)

    def visit(state, i, j, partial):
        def read(state):
            return _online.absorb(state, x, _plan.pairs(x, plan, i, j, partial), poison)

        if plan.needed is None or not partial:
            return read(state)
        return lax.cond(_plan.anywhere(plan.needed[i, j]), read, lambda state: state, state)

    state = _fold(x, plan, _online.start(x, static.stats), visit)
    ties = None if state.ties is None else jnp.maximum(state.ties, 1)
    rows = _tile.rows(x, state.largest, ties, state.alive)
    # The peak of a spoilt row is NaN only now.
    spoilt = jnp.isnan(rows.peak)
    sums = _tile.Sums(
        jnp.where(spoilt[:, None], jnp.nan, state.acc),
        jnp.where(spoilt, jnp.nan, state.total),
        state.moment,
        # Not a constant: under `vmap` it must be mapped as its tangent is.
        None if ties is None else ties - ties,
    )
    return sums, rows._replace(alive=rows.alive.astype(sums.total.dtype))


def _sums_jvp(static, primals, tangents):
    floats, others = primals
    d_floats = tangents[0]
    sums, rows = _sums(static, floats, others)
    plan = _plan.plan(static.inputs(floats, others), static.block)
    moving = [not isinstance(d, SymbolicZero) for d in d_floats]
    d_moving = [d for d, m in zip(d_floats, moving, strict=True) if m]

    def nothing(shape, dtype):
        return _visible.like(jnp.zeros(shape, dtype), (floats, others, d_moving))

    # Whole arrays and indices go in, and the slices are taken inside: only whole arrays are saved.
    @functools.partial(_nothing_saved, static_argnums=(7,))
    def tile(floats, others, rows, d_moving, needed, i, j, partial):
        def tangent(floats, d_moving):
            def sums(moving_floats):
                moving_floats = iter(moving_floats)
                all_floats = [next(moving_floats) if m else y for y, m in zip(floats, moving, strict=True)]
                x = static.inputs(all_floats, others)
                pairs = _plan.pairs(x, plan, i, j, partial)
                return _tile.sums(x, pairs, *_tile.logits(x, pairs), rows, static.stats)

            return jax.jvp(sums, ([y for y, m in zip(floats, moving, strict=True) if m],), (d_moving,))[1]

        if needed is None:
            return tangent(floats, d_moving)
        none = jax.tree.map(lambda y: nothing(y.shape, y.dtype), jax.eval_shape(tangent, floats, d_moving))
        return lax.cond(_plan.anywhere(needed[i, j]), tangent, lambda *_: none, floats, d_moving)

    def visit(part, i, j, partial):
        needed = plan.needed if partial else None
        return jax.tree.map(jnp.add, part, tile(floats, others, rows, d_moving, needed, i, j, partial))

    start = jax.tree.map(lambda y: nothing(y.shape, y.dtype), sums)
    d_sums = _fold(static.inputs(floats, others), plan, start, visit)
    return (sums, rows), (d_sums, jax.tree.map(jnp.zeros_like, rows))


_sums.defjvp(_sums_jvp, symbolic_zeros=True)
