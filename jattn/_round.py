"""A round: each device's block visits every device along an axis of the mesh, and what it collects there comes home.

Of a function f of a block, which travels, and of what stays, `summed` gives

    for what stays:   the sum over all blocks of f(block, staying)[1]
    for each block:   the sum over all devices of f(block, staying)[0], which travels with the block

The derivative of such a sum is another one, with the tangents of the block in the block. So is its transpose: the
cotangent of what a block collects travels with it, and so does what the block's own cotangent collects. A device holds
one block at a time, forward and backward. A loop over `ppermute` would have JAX keep every block that came by for its
transpose, the whole sequence on each device; so the sum is a primitive.

What a narrower dtype holds travels in that one, and is as wide as it came wherever it is used. Tangents and sums of a
block travel wide: each device adds to them.

Source: Liu et al. 2023, arXiv:2310.01889.
"""

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jattn import _linear


def folded(axis_name, visit, state, block, narrow):
    """`state` after `visit(state, block)` for every device's block, the own one first.

    `narrow` are dtypes that hold the first leaves of the block without rounding: they travel in these.
    """
    state, block = _visited(axis_name, visit, state, block, narrow, lax.axis_size(axis_name) - 1)
    # The last one goes nowhere.
    return visit(state, block)


def _visited(axis_name, visit, state, block, narrow, times):
    """`state` after so many blocks, and the next one."""
    leaves, tree = jax.tree.flatten(block)
    wide = [x.dtype for x in leaves]
    dtypes = list(zip([*narrow, *wide[len(narrow) :]], wide, strict=True))

    def unpacked(parcels):
        return tree.unflatten(_each(_unpacked, parcels, dtypes))

    def step(carry, _):
        state, parcels = carry
        # The next block is under way while this one is used.
        following = [_sent(axis_name, x) for x in parcels]
        return (visit(state, unpacked(parcels)), following), None

    state, parcels = lax.scan(step, (state, _each(_packed, leaves, dtypes)), None, length=times)[0]
    return state, unpacked(parcels)


def _each(f, leaves, dtypes):
    return [f(x, *d) for x, d in zip(leaves, dtypes, strict=True)]


def _packed(x, narrow, wide):
    # As bits, because XLA:CPU would make bfloat16 float32 before it sends it.
    return x if narrow == wide else lax.bitcast_convert_type(x.astype(narrow), np.uint16)


def _unpacked(x, narrow, wide):
    return x if narrow == wide else lax.bitcast_convert_type(x, narrow).astype(wide)


def _sent(axis_name, x):
    """What the device before this one holds."""
    P = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(p, (p + 1) % P) for p in range(P)])


def summed(axis_name, f, block, staying, narrow):
    """The sums of f(block, staying), a pair of lists of floating arrays: what each block collects, what stays gets.

    `f` closes over no tracer. All arrays vary over the axis. `narrow` as in `folded`.
    """
    leaves, tree = jax.tree.flatten((block, staying))
    n = len(jax.tree.leaves(block))
    shapes = []

    def flat(*leaves):
        out = f(*jax.tree.unflatten(tree, leaves))
        shapes[:] = [jax.tree.structure(x) for x in out]
        return jax.tree.leaves(out)

    jaxpr = jax.make_jaxpr(flat)(*leaves)
    of_block, of_staying = shapes
    narrow = (*narrow, *(x.dtype for x in leaves[len(narrow) : n]))
    travelling = n, of_block.num_leaves
    out = _summed_p.bind(*leaves, jaxpr=jaxpr, travelling=travelling, axis_name=axis_name, narrow=narrow)
    return of_block.unflatten(out[: of_block.num_leaves]), of_staying.unflatten(out[of_block.num_leaves :])


def _whole(*args, jaxpr, travelling, axis_name, narrow):
    n, n_out = travelling
    block, staying = list(args[:n]), args[n:]
    sums = [_linear.zeros(aval) for aval in jaxpr.out_avals]

    def visit(sums, block):
        sums = [x + y for x, y in zip(sums, jaxpr_as_fun(jaxpr)(*block, *staying), strict=True)]
        return [*(_sent(axis_name, x) for x in sums[:n_out]), *sums[n_out:]]

    # The block goes home, as its sums do: one step more, outside the loop, would need memory of its own.
    return _visited(axis_name, visit, sums, block, narrow, lax.axis_size(axis_name))[0]


def _abstract(*args, jaxpr, **params):
    return jaxpr.out_avals


def _jvp(primals, tangents, *, jaxpr, travelling, axis_name, narrow):
    n, n_out = travelling
    out = _summed_p.bind(*primals, jaxpr=jaxpr, travelling=travelling, axis_name=axis_name, narrow=narrow)
    moves = [not isinstance(d, ad.Zero) for d in tangents]
    moving = [d for d in tangents if not isinstance(d, ad.Zero)]
    n_moving = sum(moves[:n])

    push = _linear.pushed(jaxpr_as_fun(jaxpr), moves)

    def pushed(block, staying):
        d_out = push([*block[0], *staying[0]], [*block[1], *staying[1]])
        return d_out[:n_out], d_out[n_out:]

    block, staying = (primals[:n], moving[:n_moving]), (primals[n:], moving[n_moving:])
    of_block, of_staying = summed(axis_name, pushed, block, staying, narrow)
    return out, [*of_block, *of_staying]


def _transpose(cts, *args, jaxpr, travelling, axis_name, narrow):
    n, n_out = travelling
    linear = [ad.is_undefined_primal(x) for x in args]
    n_linear = sum(linear[:n])
    known = [None if m else x for x, m in zip(args, linear, strict=True)]
    whole = zip(cts, jaxpr.out_avals, strict=True)
    cts = [_linear.zeros(aval) if isinstance(ct, ad.Zero) else ct for ct, aval in whole]
    like = [aval for aval, m in zip(jaxpr.in_avals, linear, strict=True) if m]
    pull = _linear.pulled(jaxpr_as_fun(jaxpr), linear, like)

    def pulled(block, staying):
        known = [x for x in [*block[0], *staying[0]] if x is not None]
        out = pull(known, [*block[1], *staying[1]])
        return out[:n_linear], out[n_linear:]

    block, staying = (known[:n], cts[:n_out]), (known[n:], cts[n_out:])
    narrow = [d for d, m in zip(narrow, linear[:n], strict=True) if not m]
    of_block, of_staying = summed(axis_name, pulled, block, staying, narrow)
    out = iter([*of_block, *of_staying])
    return [next(out) if m else None for m in linear]


def _batch(args, axes, *, jaxpr, travelling, axis_name, narrow):
    n, n_out = travelling

    def mapped(block, staying):
        out = jax.vmap(jaxpr_as_fun(jaxpr), axes, 0)(*block, *staying)
        return out[:n_out], out[n_out:]

    of_block, of_staying = summed(axis_name, mapped, args[:n], args[n:], narrow)
    return [*of_block, *of_staying], [0] * len(jaxpr.out_avals)


_summed_p = Primitive("summed_over_a_round")
_summed_p.multiple_results = True
# Not of `bind`: see `_visible`.
_summed_p.def_impl(jax.jit(_whole, static_argnames=("jaxpr", "travelling", "axis_name", "narrow")))
_summed_p.def_abstract_eval(_abstract)
batching.primitive_batchers[_summed_p] = _batch
ad.primitive_jvps[_summed_p] = _jvp
ad.primitive_transposes[_summed_p] = _transpose
mlir.register_lowering(_summed_p, mlir.lower_fun(_whole, multiple_results=True))
