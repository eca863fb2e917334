"""Matrix products that read visible pairs only.

Attention needs one trilinear form and its three partial sums, over pairs (t, s) with t a query and s a key:

    sum over visible (t, s) of  w[t, s] * x[t, h] * y[s, h]

`scores` leaves out w, `mix` leaves out x, and the transpose of `mix`, which leaves out y, completes the set: the
derivatives of each are the other two, of every order and in both modes.

A plain product is wrong here although w is 0 wherever a pair is not visible, because 0 * NaN is NaN. The forward pass
could be mended with a `where` on its operands. The backward pass could not: there the operand with the NaN in it may
be the cotangent, and nothing that is linear in a cotangent can ask whether it is finite. So the form is a primitive.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_SCORES, _MIX, _SPREAD = "scores", "mix", "spread"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Operands:
    """What operands are rounded to, for products of inputs of `dtype`; sums stay wide.

    bfloat16 inputs are multiplied as they are, and weights and cotangents, which are wide, are rounded to meet them.
    float16 could not hold a cotangent: it has too few exponents.
    """

    dtype: np.dtype

    @property
    def rounded(self):
        return self.dtype == jnp.bfloat16


def scores(query, key, visible, operands):
    """(T, H), (S, H), bool (T, S) or None -> (T, S): query·key where visible and 0 elsewhere.

    NaN where a visible key is not finite.
    """
    return _product(_SCORES, query, key, visible, operands)


def shown(x):
    """x, with NaN for what is not finite, so that no minus infinity passes for a logit that weighs nothing."""
    return x + jax.lax.stop_gradient(x) * 0


def mix(weights, value, visible, operands):
    """(T, S), (S, D), bool (T, S) or None -> (T, D): sums of visible values. `weights` is 0 elsewhere.

    NaN, in one feature or all, where a visible value is not finite.
    """
    return _product(_MIX, weights, value, visible, operands)


def wide(dtype):
    """The dtype of logits, weights and sums for inputs of `dtype`: float32, or float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def precision(dtype):
    """Accelerators round float32 operands unless told not to; what the caller has configured wins."""
    configured = jax.config.values["jax_default_matmul_precision"] is not None
    return None if configured or dtype.itemsize < 4 else jax.lax.Precision.HIGHEST


def _product(spec, x, y, visible, operands):
    visible = () if visible is None else (visible,)
    return _bind(x, y, *visible, spec=spec, levels=(), rounded=operands.rounded)


def _bind(*operands, **params):
    return _product_p.bind(*_varying_alike(*operands), **params)


def _mesh_axes(x):
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def like(x, tree):
    """`x`, varying over the mesh axes that anything in `tree` varies over: what `shard_map` asks of a loop's state."""
    axes = frozenset().union(*map(_mesh_axes, jax.tree.leaves(tree))) - _mesh_axes(x)
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def _varying_alike(*args):
    """Inside `shard_map`, operands of one primitive must vary over the same mesh axes."""
    return [like(x, args) for x in args]


# What the axes of operands and result are called: t a query, s a key, h a feature.
_LETTERS = {_SCORES: ("th", "sh", "ts"), _MIX: ("ts", "sh", "th"), _SPREAD: ("ts", "th", "sh")}


# `levels` are the vmaps that the product went through, outermost first: for each, the axis of every operand that it
# maps, or None. An operand that is not mapped (keys that queries share, one mask for all heads) stays unmapped
# down to XLA, and one that is keeps its axes where they are. The result has all levels in front.
def _named(letters, axes):
    """What each axis of an operand is: a letter or the number of a level, given the axis that each level maps."""
    names = list(letters)
    for level, axis in reversed(list(enumerate(axes))):
        if axis is not None:
            names.insert(axis, level)
    return names


def _arranged(x, names, order):
    """`x` with its named axes in this order, and 1 for those that it lacks."""
    x = x.transpose([names.index(a) for a in order if a in names])
    return jnp.expand_dims(x, [i for i, a in enumerate(order) if a not in names])


def _dot(x, xs, y, ys, out):
    """The sum over axes that `out` lacks, all by names."""
    sizes = dict(zip((*xs, *ys), (*x.shape, *y.shape), strict=True))
    both = [a for a in xs if a in ys]
    batch, summed = [a for a in both if a in out], [a for a in both if a not in out]
    found = batch + [a for names in (xs, ys) for a in names if a not in both]
    # XLA:CPU would copy an operand before it multiplies, features in front, if there were an axis of size 1 too.
    one = [a for a in batch if sizes[a] == 1]
    x, y = (z.squeeze(tuple(names.index(a) for a in one)) for z, names in ((x, xs), (y, ys)))
    xs, ys, batch = ([a for a in names if a not in one] for names in (xs, ys, batch))

    def numbers(axes):
        return [xs.index(a) for a in axes], [ys.index(a) for a in axes]

    product = jax.lax.dot_general(x, y, (numbers(summed), numbers(batch)), precision(x.dtype), wide(x.dtype))
    return product.reshape([sizes[a] for a in found]).transpose([found.index(a) for a in out])


def _turned(x, xs, y, ys, out):
    """The same, with the smaller operand of `_SPREAD` turned first, and a barrier to keep XLA:CPU from undoing it.

    It would contract over the leading axis of the larger one instead, at half the speed.
    """

    def turned(z, names, last):
        order = [*(a for a in names if a not in ("t", last)), last, "t"]
        return jax.lax.optimization_barrier(_arranged(z, names, order)), order

    if x.shape[xs.index("s")] < y.shape[ys.index("h")]:
        return _dot(*turned(x, xs, "s"), y, ys, out)
    return _dot(*turned(y, ys, "h"), x, xs, out)


def _one_query(x, xs, y, ys, out):
    """The same for one query: both operands are read once, in the order in which the larger one lies in memory.

    As a product, XLA:CPU would first copy keys, heads in front.
    """
    order = [*(a for a in ys if a not in ("t", "h")), *(a for a in xs if a not in (*ys, "t", "h")), "h"]
    # Without t, of size 1: one axis more in the middle, and XLA:CPU takes twice as long.
    x, y = (_arranged(z, n, [*order, "t"])[..., 0].astype(wide(z.dtype)) for z, n in ((x, xs), (y, ys)))
    summed = [i for i, a in enumerate(order) if a not in out]
    return _arranged((x * y).sum(summed), [a for a in order if a in out], out)


def _any_bad(x, axis):
    """bool: whether any number is not finite, of an array with many numbers along `axis`."""
    # The exponents say so: XLA:CPU reads integers at twice the speed of numbers whose sum would be NaN.
    whole = np.dtype(f"int{8 * x.dtype.itemsize}")
    inf = np.asarray(np.inf, x.dtype).view(whole)
    exponents = jax.lax.bitcast_convert_type(x, whole) & inf
    return (exponents.max(axis, initial=0) == inf).any()


def _whole(x, y, visible=None, *, spec, levels, rounded, on_cpu=False):
    letters = *_LETTERS[spec][:2], "ts"
    xs, ys, *vs = (_named(letters[i], axes) for i, axes in enumerate(zip(*levels, strict=True) if levels else [()] * 3))
    outer = list(range(len(levels)))
    full, pairs = [*outer, *_LETTERS[spec][2]], [*outer, "t", "s"]
    sizes = dict(zip((*xs, *ys), (*x.shape, *y.shape), strict=True))
    if visible is not None:
        sizes |= dict(zip(vs[0], visible.shape, strict=True))
        visible = _arranged(visible, vs[0], pairs)
    form = _one_query if on_cpu and sizes["t"] == 1 else _turned if spec == _SPREAD else _dot
    short = sizes["t"] < sizes["h"]
    few = short and (visible is not None or form is _one_query)
    as_stored = spec == _SCORES and form is _dot and not short
    if as_stored:
        order = [*(a for a in ys if a not in ("s", "h")), "s", "h"]
        y, ys = _arranged(y, ys, order), order

    def product(y):
        a, b = (z.astype(jnp.bfloat16) for z in (x, y)) if rounded else (x, y)
        if as_stored:
            # XLA:CPU would copy keys with features in front, which takes four times as long.
            # It does so for few queries, whose products are more exact that way.
            b = jax.lax.optimization_barrier(b)
        out = [a for a in full if a in xs or a in ys]
        found = _arranged(form(a, xs, b, ys, out), out, full)
        return jnp.broadcast_to(found, [sizes[a] for a in full])

    def bad():
        found = jnp.isnan((y * 0).sum(ys.index("h")))
        return _arranged(found, [a for a in ys if a != "h"], pairs)

    if spec == _SCORES or visible is None:
        out = product(y if few else shown(y))
        if spec == _SCORES and visible is not None:
            out = jnp.where(visible, out, 0)

        def careful():
            found = bad() if spec == _SCORES else bad().any((-1, -2), keepdims=True)
            found = found if visible is None else found & visible
            return jnp.where(found, jnp.nan, out)

    else:

        # Whatever jax 0.10 makes of an empty array is `like` y, because it forgets what that varies over.
        def seen():
            return like((visible & bad()).any(-1 if spec == _MIX else -2), y)

        def cleaned(found):
            # Before the product, because 0 * NaN is NaN; put back after it, for the rows that do see it.
            return like(jnp.where(found[..., None], jnp.nan, product(jnp.where(jnp.isfinite(y), y, 0))), y)

        if not few:
            # Else XLA:CPU would make weights once for the product, and once for their sum.
            x = jax.lax.optimization_barrier(x)
            nobody = jnp.zeros(jax.eval_shape(seen).shape, bool)
            found = _any_bad(y, ys.index("s" if spec == _MIX else "t"))
            return cleaned(jax.lax.cond(found, seen, lambda: like(nobody, y)))
        out, careful = product(y), lambda: cleaned(seen())
    # For few queries, to look for what is not finite costs as much as the product. But whatever it sums, with weight 0
    # too, shows in it. A sum tells, because XLA:CPU forgets a NaN in a maximum over 4096 numbers or more.
    # Branches are `like` y because jax 0.10 forgets what an empty array varies over.
    return jax.lax.cond(jnp.isnan((out * 0).sum()), lambda: like(careful(), y), lambda: like(out, y)) if few else out


def _abstract(*operands, **params):
    return jax.make_jaxpr(functools.partial(_whole, **params))(*operands).out_avals[0]


def _batch(args, axes, *, levels, **params):
    return _bind(*args, levels=(tuple(axes), *levels), **params), 0


def _jvp(primals, tangents, **params):
    x, y, *visible = primals
    dx, dy, *_ = tangents
    out = _bind(x, y, *visible, **params)
    terms = []
    if not isinstance(dx, ad.Zero):
        terms.append(_bind(dx, y, *visible, **params))
    if not isinstance(dy, ad.Zero):
        terms.append(_bind(x, dy, *visible, **params))
    # JAX asks only where a tangent is not zero: there is a term.
    return out, sum(terms[1:], terms[0])


# With respect to (first, second) operand: the form that remains, and whether the cotangent is its first operand.
_TRANSPOSES = {
    _SCORES: (lambda ct, key: (_MIX, ct, key), lambda ct, query: (_SPREAD, ct, query)),
    _MIX: (lambda ct, value: (_SCORES, ct, value), lambda ct, weights: (_SPREAD, weights, ct)),
    _SPREAD: (lambda ct, value: (_SCORES, value, ct), lambda ct, weights: (_MIX, weights, ct)),
}


def _transpose(ct, x, y, *visible, spec, levels, rounded):
    n = 0 if ad.is_undefined_primal(x) else 1
    undefined, known = (x, y) if n == 0 else (y, x)
    if isinstance(ct, ad.Zero):
        out = ad.Zero(undefined.aval)
    else:
        into, a, b = _TRANSPOSES[spec][n](ct, known)
        # The cotangent has all levels in front.
        inner = tuple((0, m[1 - n], *m[2:]) if a is ct else (m[1 - n], 0, *m[2:]) for m in levels)
        out = _bind(a, b, *visible, spec=into, levels=inner, rounded=rounded)
        own = _named(_LETTERS[spec][n], [m[n] for m in levels])
        names = [*range(len(levels)), *_LETTERS[into][2]]
        out = out.sum([a for a in range(len(levels)) if a not in own])
        out = _arranged(out, [a for a in names if a in own], own)
    return (out, None, *(None for _ in visible)) if n == 0 else (None, out, *(None for _ in visible))


_product_p = Primitive("visible_product")
_jitted = jax.jit(_whole, static_argnames=("spec", "levels", "rounded", "on_cpu"))


# Not of `bind`, which under `jax.disable_jit`, and where `jax_debug_nans` looks for a NaN, would call itself.
@_product_p.def_impl
def _(*operands, **params):
    return _jitted(*operands, on_cpu=jax.default_backend() == "cpu", **params)


_product_p.def_abstract_eval(_abstract)
batching.primitive_batchers[_product_p] = _batch
ad.primitive_jvps[_product_p] = _jvp
ad.primitive_transposes[_product_p] = _transpose
for _platform in (None, "cpu"):
    _lowered = functools.partial(_whole, on_cpu=_platform == "cpu")
    mlir.register_lowering(_product_p, mlir.lower_fun(_lowered, multiple_results=False), platform=_platform)
