"""A walk over tiles of queries x keys: folds and sums of what functions of a tile's parts give.

An array may lie along queries, along keys, along both or along neither; its cut says so, and a tile has its own part
of it. Of functions f of parts, one for each kind of tile, and the arrays that they are parts of,

    folded:   the state, arrays along queries, after f(state's part, parts) has taken the place of each part in turn
    summed:   arrays with f(parts) added to the part of each tile

The derivative of a sum is another one, along the same walk, and so is its transpose: what f reads a part of gets its
cotangent added to that part, in place. Nothing of a step is kept for it. A loop of JAX's own would keep something of
each, would add whole arrays of zeros with one part filled in, and could not end where traced tiles do; so both are
primitives, and a function is chosen for a tile when all maps and derivatives have been taken of it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jattn import _linear

QUERIES, KEYS = 0, 1
# The cut of an array (T, ...).
ROWS = ((0, QUERIES),)


class Grid(NamedTuple):
    """Tiles of `sizes` over axes of `lengths`, each of (queries, keys)."""

    lengths: tuple[int, int]
    sizes: tuple[int, int]

    def start(self, along, tile):
        """Where a tile starts. The last one may start early: no length needs to divide a tile."""
        size = self.sizes[along]
        return jnp.minimum(tile * size, self.lengths[along] - size)

    def part(self, x, cut, ij):
        for axis, along in cut:
            x = lax.dynamic_slice_in_dim(x, self.start(along, ij[along]), self.sizes[along], axis)
        return x

    def replaced(self, x, part, cut, ij):
        starts = [np.int32(0)] * x.ndim
        for axis, along in cut:
            starts[axis] = self.start(along, ij[along])
        return lax.dynamic_update_slice(x, part, starts)

    def aval(self, x, cut, sizes):
        shape = list(x.shape)
        for axis, along in cut:
            shape[axis] = sizes[along]
        return x.update(shape=tuple(shape))


class Steps(NamedTuple):
    """The walk: int32 (n, 3) of query tile, key tile and which function; of them the first `count`, all if None."""

    rows: Any
    count: Any = None


def cut(axes, shape):
    """Of an array with these axes, as `_rules.Kind` names them, or none: which of its axes lie along what."""
    named = enumerate(zip(axes, shape, strict=False))
    return tuple((i, "TS".index(a[0])) for i, (a, n) in named if a in ("T", "S") or (a in ("T?", "S?") and n != 1))


def folded(grid, steps, functions, state, arrays, cuts, quick):
    """`state`, arrays (T, ...), after each step's function(i, j, *parts of the state, *parts of the arrays).

    `quick` has for each function None, or what is tried first on a CPU, which gives bool (t,) besides: whether a row
    of its result is right. The others are the function's.
    """
    cuts = (ROWS,) * len(state) + cuts
    return _bound(_folded_p, grid, steps, functions, [*state, *arrays], cuts, len(state), quick=quick)


def summed(grid, steps, functions, arrays, cuts):
    """Arrays (T, ...): the sums over steps of function(i, j, *parts of the arrays), floating arrays."""
    return _bound(_summed_p, grid, steps, functions, arrays, cuts, None)


def _bound(primitive, grid, steps, functions, arrays, cuts, n, **others):
    steps = [jnp.asarray(x) for x in steps if x is not None]
    ij, avals = [jax.typeof(steps[0]).update(shape=())] * 2, _part_avals(arrays, cuts, grid)
    jaxprs, others = _jaxprs(functions, ij, avals), {what: _jaxprs(fs, ij, avals) for what, fs in others.items()}
    out_cuts = (ROWS,) * (len(jaxprs[0].out_avals) if n is None else n)
    params = {"grid": grid, "jaxprs": jaxprs, "cuts": cuts, "out_cuts": out_cuts, **others}
    return primitive.bind(*steps, *arrays, n_steps=len(steps), **params)


def _jaxprs(functions, ij, avals):
    return tuple(f and jax.make_jaxpr(f)(*ij, *avals) for f in functions)


def _part_avals(arrays, cuts, grid):
    return [grid.aval(jax.typeof(x), c, grid.sizes) for x, c in zip(arrays, cuts, strict=True)]


def _run(steps, functions, outs, args, grid, cuts, out_cuts):
    """`outs` after each step's function(i, j, own, cut) has replaced their parts.

    own() gives the parts of the outs, cut() those of the args.
    """
    rows, *count = steps
    if not len(rows):
        return outs

    def body(n, outs):
        i, j, which = rows[n]

        # Parts are cut in the branch: what goes into one is copied.
        def parts(xs, cuts):
            return [grid.part(x, c, (i, j)) for x, c in zip(xs, cuts, strict=True)]

        own, cut = functools.partial(parts, outs, out_cuts), functools.partial(parts, args, cuts)
        found = lax.switch(which, [functools.partial(f, i, j, own, cut) for f in functions])
        return [grid.replaced(x, part, c, (i, j)) for x, part, c in zip(outs, found, out_cuts, strict=True)]

    return lax.fori_loop(0, count[0] if count else len(rows), body, outs)


def _fold(*operands, grid, jaxprs, cuts, out_cuts, n_steps, quick):
    n = n_steps + len(out_cuts)

    def visit(jaxpr, quick, i, j, own, cut):
        def careful():
            return jaxpr_as_fun(jaxpr)(i, j, *own(), *cut())

        def quickly():
            *found, sure = jaxpr_as_fun(quick)(i, j, *own(), *cut())
            mended = lax.cond(sure.all(), lambda: [_linear.zeros(x) for x in jaxpr.out_avals], careful)
            rows = [sure.reshape(sure.shape + (1,) * (x.ndim - sure.ndim)) for x in found]
            return [jnp.where(row, x, y) for row, x, y in zip(rows, found, mended, strict=True)]

        return careful() if quick is None else lax.platform_dependent(cpu=quickly, default=careful)

    functions = [functools.partial(visit, f, q) for f, q in zip(jaxprs, quick, strict=True)]
    steps, state, args = operands[:n_steps], list(operands[n_steps:n]), operands[n:]
    return _run(steps, functions, state, args, grid, cuts[len(out_cuts) :], out_cuts)


def _sum(*operands, grid, jaxprs, cuts, out_cuts, n_steps):
    def added(jaxpr, i, j, own, cut):
        return [x + y for x, y in zip(own(), jaxpr_as_fun(jaxpr)(i, j, *cut()), strict=True)]

    zeros = [_linear.zeros(grid.aval(x, c, grid.lengths)) for x, c in zip(jaxprs[0].out_avals, out_cuts, strict=True)]
    steps, args = operands[:n_steps], operands[n_steps:]
    return _run(steps, [functools.partial(added, f) for f in jaxprs], zeros, args, grid, cuts, out_cuts)


def _abstract(*_, grid, jaxprs, out_cuts, **params):
    return [grid.aval(x, c, grid.lengths) for x, c in zip(jaxprs[0].out_avals, out_cuts, strict=True)]


def _shifted(cuts, axes):
    """The cuts of arrays that got a mapped axis, or None."""
    return tuple(
        c if b is None else tuple((axis + (b <= axis), along) for axis, along in c)
        for c, b in zip(cuts, axes, strict=True)
    )


def _at_front(x, axis, n):
    return jnp.broadcast_to(x, (n, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)


def _batch(primitive, operands, axes, *, grid, jaxprs, cuts, out_cuts, n_steps, **others):
    assert all(a is None for a in axes[:n_steps]), "the walk is the same for all that is mapped"
    args, axes, n = list(operands[n_steps:]), list(axes[n_steps:]), len(out_cuts)
    if primitive is _folded_p:
        size = next(x.shape[a] for x, a in zip(args, axes, strict=True) if a is not None)
        args[:n] = [_at_front(x, a, size) for x, a in zip(args[:n], axes[:n], strict=True)]
        axes[:n] = [0] * n
    cuts, out_cuts = _shifted(cuts, axes), _shifted(out_cuts, [0] * n)
    ij, avals = jaxprs[0].in_avals[:2], _part_avals(args, cuts, grid)

    def mapped(jaxprs):
        functions = [f and jax.vmap(jaxpr_as_fun(f), (None, None, *axes), 0) for f in jaxprs]
        return _jaxprs(functions, ij, avals)

    params = {"grid": grid, "cuts": cuts, "out_cuts": out_cuts, "n_steps": n_steps}
    params |= {what: mapped(fs) for what, fs in {"jaxprs": jaxprs, **others}.items()}
    return primitive.bind(*operands[:n_steps], *args, **params), [0] * n


def _jvp(primals, tangents, *, grid, jaxprs, cuts, out_cuts, n_steps):
    params = {"grid": grid, "out_cuts": out_cuts, "n_steps": n_steps}
    out = _summed_p.bind(*primals, jaxprs=jaxprs, cuts=cuts, **params)
    steps, args, tangents = primals[:n_steps], primals[n_steps:], tangents[n_steps:]
    moves = [not isinstance(d, ad.Zero) for d in tangents]

    def pushed(jaxpr):
        push = _linear.pushed(jaxpr_as_fun(jaxpr), [False, False, *moves])
        n = 2 + len(args)
        return lambda *parts: push(parts[:n], parts[n:])

    ij, avals = jaxprs[0].in_avals[:2], jaxprs[0].in_avals[2:]
    d_avals = [a for a, m in zip(avals, moves, strict=True) if m]
    d_jaxprs = _jaxprs([pushed(f) for f in jaxprs], ij, [*avals, *d_avals])
    cuts += tuple(c for c, m in zip(cuts, moves, strict=True) if m)
    moving = [d for d, m in zip(tangents, moves, strict=True) if m]
    return out, _summed_p.bind(*steps, *args, *moving, jaxprs=d_jaxprs, cuts=cuts, **params)


def _transpose(cts, *operands, grid, jaxprs, cuts, out_cuts, n_steps):
    steps, args = operands[:n_steps], operands[n_steps:]
    linear = [ad.is_undefined_primal(x) for x in args]
    ij, avals = jaxprs[0].in_avals[:2], jaxprs[0].in_avals[2:]
    like = [a for a, m in zip(avals, linear, strict=True) if m]

    def pulled(jaxpr):
        pull = _linear.pulled(jaxpr_as_fun(jaxpr), [False, False, *linear], like)
        n = 2 + len(args) - len(like)
        return lambda *parts: pull(parts[:n], parts[n:])

    wholes = [_linear.zeros(ct.aval) if isinstance(ct, ad.Zero) else ct for ct in cts]
    known = [a for a, m in zip(avals, linear, strict=True) if not m]
    ct_jaxprs = _jaxprs([pulled(f) for f in jaxprs], ij, [*known, *jaxprs[0].out_avals])
    own_cuts = tuple(c for c, m in zip(cuts, linear, strict=True) if not m) + out_cuts
    of_linear = tuple(c for c, m in zip(cuts, linear, strict=True) if m)
    operands = *steps, *(x for x, m in zip(args, linear, strict=True) if not m), *wholes
    params = {"grid": grid, "jaxprs": ct_jaxprs, "cuts": own_cuts, "out_cuts": of_linear, "n_steps": n_steps}
    out = iter(_summed_p.bind(*operands, **params))
    return [None] * n_steps + [next(out) if m else None for m in linear]


def _primitive(name, run, *options):
    p = Primitive(name)
    p.multiple_results = True
    # Not of `bind`: see `_visible`.
    p.def_impl(jax.jit(run, static_argnames=("grid", "jaxprs", "cuts", "out_cuts", "n_steps", *options)))
    p.def_abstract_eval(_abstract)
    batching.primitive_batchers[p] = functools.partial(_batch, p)
    mlir.register_lowering(p, mlir.lower_fun(run, multiple_results=True))
    return p


_folded_p, _summed_p = _primitive("folded_over_tiles", _fold, "quick"), _primitive("summed_over_tiles", _sum)
ad.primitive_jvps[_summed_p] = _jvp
ad.primitive_transposes[_summed_p] = _transpose
