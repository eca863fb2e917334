"""Parts of arrays along one axis, read and added to in place.

`take` and `add` are each other's transpose. So where a loop reads parts of an array, its transpose adds to parts of
one. JAX's own slices would have it add an array of zeros with one part filled in, whole, at every step; and under
`vmap` they become gathers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jattn import _visible


def take(x, start, size, axis=0):
    """x itself, and its entries start ... start + size - 1 along `axis`. A loop that carries x hands it on."""
    return _take_p.bind(x, start, size=size, axis=axis)


def add(x, part, start, axis=0):
    """x with `part` added to its entries from `start` on."""
    x, part = _visible.like(x, part), _visible.like(part, x)
    return _add_p.bind(x, part, start, axis=axis)


def put(x, part, start, axis=0):
    """x with `part` in place of its entries from `start` on. Without a derivative."""
    return _put_p.bind(_visible.like(x, part), _visible.like(part, x), start, axis=axis)


def _taken(x, start, *, size, axis):
    return x, lax.dynamic_slice_in_dim(x, start, size, axis)


def _added(x, part, start, *, axis):
    old = lax.dynamic_slice_in_dim(x, start, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(x, old + part, start, axis)


def _replaced(x, part, start, *, axis):
    return lax.dynamic_update_slice_in_dim(x, part, start, axis)


def _abstract(f):
    def abstract(*operands, **params):
        out = jax.make_jaxpr(functools.partial(f, **params))(*operands).out_avals
        return out if f is _taken else out[0]

    return abstract


def _at_front(x, axis, n):
    return jnp.broadcast_to(x, (n, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)


def _take_batch(args, axes, *, size, axis):
    x, start = args
    bx, bs = axes
    assert bs is None, "tiles start at the same place for all that is mapped"
    return _take_p.bind(x, start, size=size, axis=axis + (bx <= axis)), (bx, bx)


def _two_batch(into, args, axes, *, axis):
    x, part, start = args
    assert axes[2] is None, "tiles start at the same place for all that is mapped"
    n = next(y.shape[a] for y, a in zip(args, axes, strict=True) if a is not None)
    x, part = (_at_front(y, a, n) for y, a in zip((x, part), axes[:2], strict=True))
    return into(x, part, start, axis + 1), 0


def _take_jvp(primals, tangents, *, size, axis):
    (x, start), (dx, _) = primals, tangents
    return take(x, start, size, axis), take(dx, start, size, axis)


def _add_jvp(primals, tangents, *, axis):
    (x, part, start), (dx, d_part, _) = primals, tangents
    out = add(x, part, start, axis)
    if isinstance(d_part, ad.Zero):
        return out, dx
    dx = jnp.zeros_like(x) if isinstance(dx, ad.Zero) else dx
    return out, add(dx, d_part, start, axis)


def _take_transpose(cts, x, start, *, size, axis):
    whole, part = cts
    if isinstance(part, ad.Zero):
        return whole, None
    if isinstance(whole, ad.Zero):
        whole = jnp.zeros(x.aval.shape, x.aval.dtype)
    return add(whole, part, start, axis), None


def _add_transpose(ct, x, part, start, *, axis):
    if isinstance(ct, ad.Zero):
        return tuple(ad.Zero(y.aval) if ad.is_undefined_primal(y) else None for y in (x, part)) + (None,)
    linear = [ad.is_undefined_primal(y) for y in (x, part)]
    whole, of_part = take(ct, start, (part.aval if linear[1] else part).shape[axis], axis)
    return whole if linear[0] else None, of_part if linear[1] else None, None


def _primitive(name, f, batch, **derivatives):
    p = Primitive(name)
    p.multiple_results = f is _taken
    p.def_impl(jax.jit(f, static_argnames=("size", "axis") if f is _taken else ("axis",)))
    p.def_abstract_eval(_abstract(f))
    batching.primitive_batchers[p] = batch
    if derivatives:
        ad.primitive_jvps[p] = derivatives["jvp"]
        ad.primitive_transposes[p] = derivatives["transpose"]
    mlir.register_lowering(p, mlir.lower_fun(f, multiple_results=p.multiple_results))
    return p


_take_p = _primitive("take_part", _taken, _take_batch, jvp=_take_jvp, transpose=_take_transpose)
_add_p = _primitive("add_part", _added, functools.partial(_two_batch, add), jvp=_add_jvp, transpose=_add_transpose)
_put_p = _primitive("put_part", _replaced, functools.partial(_two_batch, put))
