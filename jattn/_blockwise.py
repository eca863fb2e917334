"""Engine: one head in linear memory, a fold over tiles.

The online softmax. Reading tile after tile of keys, a row keeps its largest logit so far, `peak`, and the sums of
p = exp(logits - peak) and of p·value. When a tile raises the peak, the sums so far are multiplied by
exp(old peak - new peak), as if they had been taken with the new one all along. After the last tile they are the sums
that a dense row would have had, and no T x S array was made. Any other shift than the peak would do, as long as nothing
overflows; a tile that hides nothing is tried with one that is known before its logits are (`_online.quick`).

The derivative rule. With the peaks fixed, the sums are plain sums over tiles of `_tile.sums`, so their derivative is
the sum of the derivatives of the tiles, each a linear function of the tangents of query, key, value, bias, ...:

    d acc = sum over tiles of  p (dlogits value + dvalue)          d total = sum over tiles of  p dlogits

That is one rule. A tile is recomputed where it is needed, so nothing of size T x S is saved. JAX transposes the rule,
tile by tile (`_walk`), into the backward pass that FlashAttention writes by hand, and differentiates it again for
second order.

In a ring of devices, `axis_name`, each holds a block of the keys. A round (`_round`) brings every block past every
device, and with it its part of all of the above: the state is that of all blocks, and so are the sums.

Sources: Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and Staats 2021, arXiv:2112.05682; Dao et al. 2022,
arXiv:2205.14135.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jattn import _linear, _online, _plan, _round, _rules, _tile, _visible, _walk


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

    @property
    def rows(self):
        """How Rows are built."""
        return jax.tree.structure(_tile.Rows(1, 1, 1 if self.stats else None, 1, 1, 1))

    @property
    def narrow(self):
        """The dtypes that keys and values came in: the first leaves of what travels in a ring."""
        return (self.tree.unflatten([None] * self.tree.num_leaves).operands.dtype,) * 2

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


# What the arrays of `_tile.Inputs` are stored along, the others are along neither queries nor keys.
_AXES = {"query": ("T", "H"), "key": ("S", "H"), "value": ("S", "D"), "query_positions": ("T",),
         "key_positions": ("S",), "query_indices": ("T",), "key_indices": ("S",)}  # fmt: skip


def _axes(x):
    """The axes of each leaf of Inputs, as `_rules.Kind` names them."""
    axes = []
    for what, y in x._asdict().items():
        rule = isinstance(y, _rules.Rule)
        axes += [own for _, own in y.leaf_axes()] if rule else [_AXES.get(what, ())] * len(jax.tree.leaves(y))
    return axes


def _cuts(x):
    """How each leaf of Inputs is cut into the parts of tiles."""
    return tuple(_walk.cut(axes, y.shape) for axes, y in zip(_axes(x), jax.tree.leaves(x), strict=True))


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


def attend(x, dtype, stats, blocks, axis_name=None):
    """(T, D) in `dtype`, and Stats or None, with tiles of the best of some sizes (queries, keys).

    With `axis_name`, `x.key` is one block of a ring.
    """
    leaves, tree = jax.tree.flatten(x)
    of_keys = ["S" in axes for axes in _axes(x)]
    # Inside `shard_map`, what is the same on all devices is made to vary here: the sum over devices that its cotangent
    # needs would otherwise stand in a branch that some devices skip, and the others would wait for them.
    leaves = [_visible.like(leaf, leaves) for leaf in leaves]
    x = jax.tree.unflatten(tree, leaves)
    floating = tuple(bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in leaves)
    static = Static(_plan.cheapest(x, blocks), stats, axis_name, tree, floating, _parted(of_keys, floating))
    sums, rows = _sums(static, leaves)
    return _tile.results(x, rows._replace(alive=rows.alive > 0), sums, dtype)


def _sums(static, leaves):
    """Sums of all keys, and Rows, `alive` as a number, of Inputs that are alike varying over the mesh."""
    jaxpr = jax.make_jaxpr(functools.partial(_found, static))(*leaves)
    out, n = _sums_p.bind(*leaves, static=static, jaxpr=jaxpr, levels=()), static.rows.num_leaves
    acc, total, *rest = out[:-n]
    return _tile.Sums(acc, total, *(rest or (None, None))), static.rows.unflatten(out[-n:])


def _found(static, *leaves):
    floats, others = _parted(leaves, static.floating)
    x = static.inputs(floats, others)
    state = _online.start(x, static.stats)
    if static.axis_name is None:
        state = _absorbed(static, state, x)
    else:
        of_keys, rest = static.parted(floats, others)

        def visit(state, of_keys):
            return _absorbed(static, state, static.inputs(*static.joined(of_keys, rest)))

        state = _round.folded(static.axis_name, visit, state, of_keys, static.narrow)
    if _may_be_quick(static, x):
        state = _online.settled(state)
    ties = None if state.ties is None else jnp.maximum(state.ties, 1)
    rows = _tile.rows(x, state.largest, ties, state.alive)
    sums = _tile.Sums(state.acc, state.total, state.moment, None if ties is None else ties - ties)
    rows = rows._replace(alive=rows.alive.astype(sums.total.dtype), total=_tile.total(x, rows, sums.total))
    return jax.tree.leaves((sums, rows))


def _absorbed(static, state, x):
    """`state` after all keys of x."""
    plan = _plan.plan(x, static.block)
    (whole, tree), (leaves, of_x) = jax.tree.flatten(state), jax.tree.flatten(x)

    def own(kind, i, j, parts):
        state, x = tree.unflatten(parts[: len(whole)]), of_x.unflatten(parts[len(whole) :])
        pairs = _plan.pairs(x, plan, i, j, kind)
        return state, _tile.cut(x, pairs), pairs

    def visit(kind, i, j, *parts):
        state, x, pairs = own(kind, i, j, parts)
        return jax.tree.leaves(_online.absorb(state, x, pairs, _tile.visible_pairs(x, pairs)))

    def quick(i, j, *parts):
        return jax.tree.leaves(_online.quick(*own(_plan.FULL, i, j, parts)))

    grid, steps, kinds = _plan.walk(plan)
    visits = [functools.partial(visit, kind) for kind in kinds]
    quicks = [quick if kind == _plan.FULL and _may_be_quick(static, x) else None for kind in kinds]
    return tree.unflatten(_walk.folded(grid, steps, visits, whole, leaves, _cuts(x), quicks))


def _may_be_quick(static, x):
    """Whether a full tile may go the quick way: sums of p are all that is asked for, and p is only multiplied."""
    sums = not static.stats and x.words is None and not x.operands.rounded
    # Of few queries XLA:CPU would add the keys less exactly so.
    many = x.query.shape[0] >= x.query.shape[1]
    return _tile.AS_ONE and sums and many and _tile.plain(x._replace(sink=None), None)


def _jvp(primals, tangents, *, static, jaxpr, levels):
    out = _sums_p.bind(*primals, static=static, jaxpr=jaxpr, levels=levels)
    moves = [not isinstance(d, ad.Zero) for d in tangents]
    moving = [d for d, m in zip(tangents, moves, strict=True) if m]
    n_rows = static.rows.num_leaves
    pushed = functools.partial(_pushed, static, _parted(moves, static.floating)[0])
    for axes in levels:
        pushed = jax.vmap(pushed, (axes, 0, tuple(a for a, m in zip(axes, moves, strict=True) if m)))
    d_sums = pushed(tuple(primals), out[-n_rows:], tuple(moving))
    return out, [*d_sums, *(ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out[-n_rows:])]


def _pushed(static, moves, leaves, rows, moving):
    """The derivative of the sums, a list, given Rows and the tangents of the floats that move."""
    floats, others = _parted(leaves, static.floating)
    moving = [_visible.like(d, (leaves, moving)) for d in moving]
    of_keys, rest = static.parted(floats, others)
    travel = [flag for flag, m in zip(static.of_keys[0], moves, strict=True) if m]
    d_keys, d_rest = _parted(moving, travel)

    def d_sums(of_keys, rest):
        (of_keys, d_keys), (rest, rows, d_rest) = of_keys, rest
        floats, others = static.joined(of_keys, rest)
        return [], _d_sums(static, moves, floats, others, rows, _joined(d_keys, d_rest, travel))

    block, staying = (of_keys, d_keys), (rest, rows, d_rest)
    if static.axis_name is None:
        return d_sums(block, staying)[1]
    return _round.summed(static.axis_name, d_sums, block, staying, static.narrow)[1]


def _d_sums(static, moves, floats, others, rows, moving):
    """The derivative of the sums over the keys in floats and others."""
    flags = _joined(moves, [False] * len(others), static.floating)

    # Parts are cut of what is stored here, and so are those of the tangents.
    def stored(*floats):
        leaves = jax.tree.leaves(static.inputs(floats, others))
        return [leaf for leaf, m in zip(leaves, flags, strict=True) if m]

    d_leaves = _linear.pushed(stored, moves)(floats, moving)
    x = static.inputs(floats, others)
    leaves, tree = jax.tree.flatten(x)
    plan = _plan.plan(x, static.block)

    def tangent(kind, i, j, *parts):
        n, m = len(leaves), len(leaves) + len(rows)
        pairs = _plan.pairs(tree.unflatten(parts[:n]), plan, i, j, kind)
        found = static.rows.unflatten(parts[n:m])

        def sums(*leaves):
            x = _tile.cut(tree.unflatten(leaves), pairs)
            return jax.tree.leaves(_tile.sums(x, pairs, _tile.visible_pairs(x, pairs), found, static.stats))

        return _linear.pushed(sums, flags)(parts[:n], parts[m:])

    cuts = _cuts(x)
    cuts = cuts + (_walk.ROWS,) * len(rows) + tuple(c for c, m in zip(cuts, flags, strict=True) if m)
    arrays = [*leaves, *rows, *d_leaves]
    grid, steps, kinds = _plan.walk(plan)
    return _walk.summed(grid, steps, [functools.partial(tangent, kind) for kind in kinds], arrays, cuts)


def _batch(operands, axes, *, static, jaxpr, levels):
    jaxpr = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), axes, 0))(*operands)
    out = _sums_p.bind(*operands, static=static, jaxpr=jaxpr, levels=(*levels, axes))
    return out, [0] * len(out)


def _whole(*leaves, static, jaxpr, levels):
    return jaxpr_as_fun(jaxpr)(*leaves)


# A primitive and not a `custom_jvp`, whose rule jax 0.10 forgets in second derivatives of a scan. `levels` are the
# vmaps that it went through, the innermost first: for each, the axis of every leaf that it maps, or None.
_sums_p = Primitive("sums_over_keys")
_sums_p.multiple_results = True
# Not of `bind`: see `_visible`.
_sums_p.def_impl(jax.jit(_whole, static_argnames=("static", "jaxpr", "levels")))
_sums_p.def_abstract_eval(lambda *_, jaxpr, **params: jaxpr.out_avals)
batching.primitive_batchers[_sums_p] = _batch
ad.primitive_jvps[_sums_p] = _jvp
mlir.register_lowering(_sums_p, mlir.lower_fun(_whole, multiple_results=True))
