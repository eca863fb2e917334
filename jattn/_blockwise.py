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

In a ring of devices, `axis_name`, each holds a block of the keys. A round (`_round`) brings every block past every
device, and with it its part of all of the above: the state is that of all blocks, and so are the sums.

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

from jattn import _online, _plan, _round, _rules, _slices, _tile, _visible

_nothing_saved = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)


class Static(NamedTuple):
    """What the program is made for: tiles of (queries, keys), whether Stats are wanted, a ring's axis of the mesh.

    And how the inputs are built: whether each leaf has derivatives; of those that have and of the others, whether each
    is stored along the keys, and so travels in a ring.
    """

    block: tuple[int, int]
    stats: bool
    axis_name: Any
    tree: Any
    floating: tuple[bool, ...]
    of_keys: Any

    def inputs(self, floats, others):
        x = jax.tree.unflatten(self.tree, _joined(floats, others, self.floating))
        return x if self.axis_name is None else _stored_here(x)

    def parted(self, floats, others):
        """Floats and others that are stored along the keys; and those that are not."""
        parts = [_parted(x, flags) for x, flags in zip((floats, others), self.of_keys, strict=True)]
        return [x for x, _ in parts], [x for _, x in parts]

    def joined(self, of_keys, rest):
        """All floats, and all others."""
        return [_joined(x, y, flags) for x, y, flags in zip(of_keys, rest, self.of_keys, strict=True)]


def _parted(xs, flags):
    return tuple(tuple(x for x, flag in zip(xs, flags, strict=True) if flag == kind) for kind in (True, False))


def _joined(xs, ys, flags):
    xs, ys = iter(xs), iter(ys)
    return [next(xs if flag else ys) for flag in flags]


def _along_keys(x):
    """Inputs of bools: whether a leaf holds something for each key that there is."""

    def of_rule(rule):
        if rule is None:
            return None
        return jax.tree.unflatten(jax.tree.structure(rule), ["S" in axes for _, axes in rule.leaf_axes()])

    own = ("key", "value", "key_positions", "key_indices")
    fields = {what: jax.tree.map(lambda _, what=what: what in own, y) for what, y in x._asdict().items()}
    return x._replace(**fields | {what: of_rule(getattr(x, what)) for what in ("mask", "bias")})


def _stored_here(x):
    """Inputs with the part of each array rule, (1, S) or (T, 1) of all devices, that these queries and keys have."""
    picks = {"T?": _rules.picker(x.query_indices), "S?": _rules.picker(x.key_indices)}

    def cut(rule):
        if rule is None:
            return None
        leaves, tree = jax.tree.flatten(rule)
        for n, (_, axes) in enumerate(rule.leaf_axes()):
            for along, axis in enumerate(axes):
                leaves[n] = picks[axis](leaves[n], along) if axis in picks else leaves[n]
        return jax.tree.unflatten(tree, leaves)

    return x._replace(mask=cut(x.mask), bias=cut(x.bias))


def attend(x, dtype, stats, block, axis_name=None):
    """(T, D) in `dtype`, and Stats or None. With `axis_name`, `x.key` is one block of a ring."""
    leaves, tree = jax.tree.flatten(x)
    of_keys = jax.tree.leaves(_along_keys(x))
    # Inside `shard_map`, what is the same on all devices is made to vary here: the sum over devices that its cotangent
    # needs would otherwise stand in a branch that some devices skip, and the others would wait for them.
    leaves = [_visible.like(leaf, leaves) for leaf in leaves]
    x = jax.tree.unflatten(tree, leaves)
    floating = tuple(bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in leaves)
    static = Static(block, stats, axis_name, tree, floating, _parted(of_keys, floating))
    sums, rows = _sums(static, *_parted(leaves, floating))
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
    state = _online.start(x, static.stats)
    if static.axis_name is None:
        state = _absorbed(static, state, x)
    else:
        of_keys, rest = static.parted(floats, others)

        def visit(state, of_keys):
            return _absorbed(static, state, static.inputs(*static.joined(of_keys, rest)))

        state = _round.folded(static.axis_name, visit, state, of_keys, _narrow(x))
    ties = None if state.ties is None else jnp.maximum(state.ties, 1)
    rows = _tile.rows(x, state.largest, ties, state.alive)
    # Not a constant: under `vmap` it must be mapped as its tangent is.
    sums = _tile.Sums(state.acc, state.total, state.moment, None if ties is None else ties - ties)
    return sums, rows._replace(alive=rows.alive.astype(sums.total.dtype))


def _narrow(x):
    """The dtypes that keys and values came in: the first leaves of what travels in a ring."""
    return (x.operands.dtype,) * 2


def _absorbed(static, state, x):
    """`state` after all keys of x."""
    plan = _plan.plan(x, static.block)

    def visit(state, i, j):
        # Slices and bias are taken here and not in the branches, which would carry whole arrays through.
        pairs = _plan.pairs(x, plan, i, j)
        own = _tile.cut(x, pairs)

        def read(kind):
            placed = _plan.placed(pairs, plan, i, j, kind)
            return _online.absorb(state, own, placed, _tile.visible_pairs(own, placed))

        return _plan.visited(plan, plan.kinds, i, j, read, lambda: state)

    return _fold(plan, state, visit)


# The axes of the tile that query, key and value, the first of the leaves, are cut along.
_CUT = ("queries", "keys", "keys")


def _sums_jvp(static, primals, tangents):
    floats, others = primals
    moves = [not isinstance(d, SymbolicZero) for d in tangents[0]]
    d_cut = [d if m else None for d, m in zip(tangents[0][:3], moves[:3], strict=True)]
    d_moving = [d for d, m in zip(tangents[0][3:], moves[3:], strict=True) if m]
    sums, rows = _sums(static, floats, others)
    d_cut = [None if d is None else _visible.like(d, (floats, others, d_moving)) for d in d_cut]
    of_keys, rest = static.parted(floats, others)

    def d_sums(of_keys, rest):
        (of_keys, d_keys), (rest, rows, d_query, d_moving) = of_keys, rest
        floats, others = static.joined(of_keys, rest)
        return [], jax.tree.leaves(_d_sums(static, moves, floats, others, sums, rows, [d_query, *d_keys], d_moving))

    block, staying = (of_keys, d_cut[1:]), (rest, rows, d_cut[0], d_moving)
    if static.axis_name is None:
        _, found = d_sums(block, staying)
    else:
        _, found = _round.summed(static.axis_name, d_sums, block, staying, _narrow(static.inputs(floats, others)))
    return (sums, rows), (jax.tree.unflatten(jax.tree.structure(sums), found), jax.tree.map(jnp.zeros_like, rows))


def _d_sums(static, moves, floats, others, like, rows, d_cut, d_moving):
    """The derivative of the sums, which are as large as `like`, over the keys in floats and others."""
    moves = [False, False, False, *moves[3:]]
    moving = [x for x, m in zip(floats, moves, strict=True) if m]
    # The inputs of a tile that move with them.
    flags = jax.tree.unflatten(static.tree, _joined(moves, [False] * len(others), static.floating))
    fields = [name for name, flag in zip(flags._fields, flags, strict=True) if any(jax.tree.leaves(flag))]
    cut_fields = [name for name, d in zip(flags._fields, d_cut, strict=False) if d is not None]
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

    return _scan(plan, body, (d_cut, jax.tree.map(zeros, like)))[1]


_sums.defjvp(_sums_jvp, symbolic_zeros=True)
