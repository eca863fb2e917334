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
from jax.custom_batching import custom_vmap
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
    """(T, H), (S, H), bool (T, S) or None -> (T, S): query·key where visible and 0 elsewhere."""
    return _product(_SCORES, query, key, visible, operands)


def mix(weights, value, visible, operands):
    """(T, S), (S, D), bool (T, S) or None -> (T, D): sums of visible values. `weights` is 0 elsewhere."""
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


def _rank_2(spec, rounded, x, y, visible=None):
    def dot(spec, *operands):
        narrow = [z.astype(jnp.bfloat16) for z in operands] if rounded else operands
        return jnp.einsum(spec, *narrow, precision=precision(narrow[0].dtype), preferred_element_type=x.dtype)

    if spec == _SCORES:
        out = dot("th,sh->ts", x, y)
        return out if visible is None else jnp.where(visible, out, 0)
    if spec == _MIX:
        product = functools.partial(dot, "ts,sh->th", x)
    else:
        # As a plain product of rows and columns, with the small operand turned. XLA:CPU would contract over the leading
        # axis of the large one instead, at half the speed, and the barrier keeps it from undoing this.
        product = lambda y: dot("ht,ts->hs", jax.lax.optimization_barrier(y.T), x).T  # noqa: E731
    if visible is None:
        return product(y)
    # No maximum of the sizes, which could forget a NaN: see `_tile.peaks`.
    bad = ~jnp.isfinite(y).all(-1)

    def cleaned():
        # Before the product, because 0 * NaN is NaN; put back after it, for the rows that do see it.
        seen = (visible & bad[None, :]).any(1) if spec == _MIX else (visible & bad[:, None]).any(0)
        return jnp.where(seen[:, None], jnp.nan, product(jnp.where(jnp.isfinite(y), y, 0)))

    return jax.lax.cond(anywhere(bad.any()), cleaned, lambda: product(y))


@custom_vmap
def anywhere(flag):
    """Whether it holds for any element of the mapped axes. `lax.cond` on what is mapped would run both branches."""
    return flag


@anywhere.def_vmap
def _(axis_size, in_batched, flag):
    return anywhere(flag.any(0)), False


# `levels` are the vmaps that the product went through, outermost first: for each, which operands are mapped, always
# on their leading axis. An operand that is not mapped (keys shared by a group of queries, one mask for all heads)
# stays unmapped down to XLA.
def _whole(*operands, spec, levels, rounded):
    product = functools.partial(_rank_2, spec, rounded)
    for mapped in reversed(levels):
        product = jax.vmap(product, [0 if m else None for m in mapped])
    return product(*operands)


def _abstract(*operands, **params):
    return jax.make_jaxpr(functools.partial(_whole, **params))(*operands).out_avals[0]


def _batch(args, axes, *, levels, **params):
    mapped = tuple(a is not None for a in axes)
    args = [jnp.moveaxis(x, a, 0) if m else x for x, a, m in zip(args, axes, mapped, strict=True)]
    return _bind(*args, levels=(mapped, *levels), **params), 0


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
    first = ad.is_undefined_primal(x)
    undefined, known = (x, y) if first else (y, x)
    if isinstance(ct, ad.Zero):
        out = ad.Zero(undefined.aval)
    else:
        into, a, b = _TRANSPOSES[spec][0 if first else 1](ct, known)
        ct_first = a is ct
        inner = tuple(
            (True, m[1 if first else 0], *m[2:]) if ct_first else (m[1 if first else 0], True, *m[2:]) for m in levels
        )
        out = _bind(a, b, *visible, spec=into, levels=inner, rounded=rounded)
        unmapped = tuple(i for i, m in enumerate(levels) if not m[0 if first else 1])
        out = out.sum(unmapped) if unmapped else out
    return (out, None, *(None for _ in visible)) if first else (None, out, *(None for _ in visible))


_product_p = Primitive("visible_product")
_product_p.def_impl(jax.jit(_whole, static_argnames=("spec", "levels", "rounded")))
_product_p.def_abstract_eval(_abstract)
batching.primitive_batchers[_product_p] = _batch
ad.primitive_jvps[_product_p] = _jvp
ad.primitive_transposes[_product_p] = _transpose
mlir.register_lowering(_product_p, mlir.lower_fun(_whole, multiple_results=False))
