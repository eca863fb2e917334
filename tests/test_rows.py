"""Softmax and its family: the edges, the derivatives, the lessons' numbers and what has failed people elsewhere."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from jax.experimental import checkify
from jax.test_util import check_grads

from jattn import _rows
from jattn._rows import entropy, log_softmax, logsumexp, naive_softmax, rows_normalised, softmax

NAN, INF, MAX = np.nan, np.inf, np.finfo(np.float64).max
T, F = True, False
FAMILY = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp}
STATIC = ("axis", "empty")


def array(x, dtype=np.float64):
    return jnp.array(x, dtype)


def normal(*shape, seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=shape))


def same_bits(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_array_equal(x.view(f"u{x.dtype.itemsize}"), y.view(f"u{y.dtype.itemsize}"))


def finite(x):
    """-inf, as lse and logs of nothing are, as 0."""
    return jnp.where(jnp.isneginf(x), 0, x)


def exactly(got, expected):
    """Equal numbers, -0.0 and 0.0 alike."""
    np.testing.assert_array_equal(np.asarray(got), np.broadcast_to(expected, np.shape(got)))


# One row at a time, in float64, by deleting what is not visible.
def by_deletion(row, visible):
    """softmax, log_softmax and logsumexp of a row."""
    row, visible = np.asarray(row, np.float64), np.asarray(visible) & (np.asarray(row) != -INF)
    weights, logs = np.zeros(row.shape), np.full(row.shape, -INF)
    seen = row[visible]
    if not visible.any():
        return weights, logs, -INF
    with np.errstate(over="ignore"):
        below = seen - seen.max()
    total = np.exp(below).sum()
    weights[visible], logs[visible] = np.exp(below) / total, below - np.log(total)
    return weights, logs, seen.max() + np.log(total)


MASKED = normal(5, 7, seed=1), jnp.array(np.random.default_rng(2).random((5, 7)) < 0.6).at[3].set(False)


# Edges


# scores, where, weights
EDGE_CASES = {
    "huge scores do not overflow": ([1e300, 0.0], None, [1.0, 0.0]),
    "scores far below zero do not underflow": ([-1e300, -1e300], None, [0.5, 0.5]),
    "the largest and the lowest number stand in one row": ([MAX, -MAX], None, [1.0, 0.0]),
    "a row may hold the lowest numbers only": ([-MAX, -MAX], None, [0.5, 0.5]),
    "the lowest number is visible beside -inf": ([-MAX, -INF], None, [1.0, 0.0]),
    "-inf weighs 0": ([0.0, -INF, 0.0], None, [0.5, 0.0, 0.5]),
    "one entry has all the weight": ([-3.0], None, [1.0]),
    "everything allowed is -inf": ([-INF, -INF], [T, T], [0.0, 0.0]),
    "everything is -inf and nothing is said about it": ([-INF, -INF], None, [0.0, 0.0]),
    "nothing is allowed": ([1.0, 2.0], [F, F], [0.0, 0.0]),
    "all that is allowed is -inf, the rest is not": ([-INF, 1.0], [T, F], [0.0, 0.0]),
    "nothing is there": ([], None, []),
    "a masked NaN is not read": ([NAN, 1.0], [F, T], [0.0, 1.0]),
    "a masked +inf is not read": ([INF, 1.0], [F, T], [0.0, 1.0]),
    "a masked -inf is not read": ([-INF, 1.0], [F, T], [0.0, 1.0]),
    "a masked huge score is not read": ([MAX, -MAX], [F, T], [0.0, 1.0]),
    "a masked NaN beside nothing visible is not read": ([NAN, -INF], [F, T], [0.0, 0.0]),
    "a visible NaN makes the row NaN": ([NAN, 1.0], None, [NAN, NAN]),
    "a visible +inf makes the row NaN": ([INF, 1.0], None, [NAN, NAN]),
    "a visible +inf beside -MAX makes the row NaN": ([INF, -MAX], None, [NAN, NAN]),
    "two visible +inf make the row NaN": ([INF, INF], None, [NAN, NAN]),
    "the whole row is NaN, what is masked in it too": ([NAN, 1.0, -INF], [T, F, T], [NAN, NAN, NAN]),
    "a scalar mask holds for every entry": ([0.0, 0.0], True, [0.5, 0.5]),
    "a scalar mask hides every entry": ([0.0, NAN], False, [0.0, 0.0]),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("x, where, weights", EDGE_CASES.values(), ids=EDGE_CASES)
def test_edges(x, where, weights, compiled):
    x, where = array(x), None if where is None else jnp.array(where)
    visible = np.broadcast_to(True if where is None else np.asarray(where), x.shape)
    jit = functools.partial(jax.jit, static_argnames=STATIC) if compiled else lambda f: f
    exactly(jit(softmax)(x, where=where), weights)
    spoilt = np.isnan(weights).any()
    _, logs, lse = by_deletion(x, visible) if not spoilt else (None, np.full(x.shape, NAN), NAN)
    assert_close(jit(log_softmax)(x, where=where), logs)
    assert_close(jit(logsumexp)(x, where=where), lse)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3, np.int64(1)])
def test_any_axis_holds_the_rows(axis):
    x = normal(2, 3, 5).at[0, 1, 2].set(-INF)
    where = jnp.array(np.random.default_rng(3).random((2, 3, 5)) < 0.7)
    last = lambda a: jnp.moveaxis(a, int(axis), -1)  # noqa: E731
    same = functools.partial(assert_close, dtype="float64")
    same(last(softmax(x, axis, where)), softmax(last(x), -1, last(where)))
    same(last(log_softmax(x, axis, where)), log_softmax(last(x), -1, last(where)))
    same(logsumexp(x, axis, where), logsumexp(last(x), -1, last(where)))
    same(last(naive_softmax(x, axis)), naive_softmax(last(x)))
    same(entropy(softmax(x, axis), axis), entropy(softmax(last(x))))
    assert rows_normalised(softmax(x, axis), axis=axis) and not rows_normalised(softmax(x, axis), axis=(axis + 1) % 3)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3)])
@pytest.mark.parametrize("where", ["none", "full", "ones"])
def test_an_axis_of_size_0_is_an_axis(shape, where):
    x = jnp.zeros(shape)
    options = {"where": {"none": None, "full": jnp.ones(shape, bool), "ones": jnp.ones([1] * len(shape), bool)}[where]}
    rows = shape[:-1]
    for f, expected in [(softmax, shape), (log_softmax, shape), (logsumexp, rows)]:
        assert f(x, **options).shape == expected
        assert jax.jacrev(f)(x, **options).shape == jax.jacfwd(f)(x, **options).shape == expected + shape
    if shape[-1] == 0:
        exactly(logsumexp(x, **options), -INF)
        exactly(entropy(x), 0.0)
        assert rows_normalised(x) == (0 in rows)
    assert naive_softmax(x).shape == shape


@pytest.mark.parametrize("shape", [(1, 3, 1), (2, 1, 5), (2, 3, 1), (1, 1, 1), ()])
def test_a_mask_spreads_over_its_axes_of_size_1(shape):
    x, where = normal(2, 3, 5), jnp.array(np.random.default_rng(4).random(shape) < 0.5)
    for f in FAMILY.values():
        same_bits(f(x, where=where), f(x, where=jnp.broadcast_to(where, x.shape)))


# Properties


@pytest.mark.parametrize("name", FAMILY)
def test_masking_an_entry_is_deleting_it(name):
    for row, visible, got in zip(*MASKED, FAMILY[name](MASKED[0], where=MASKED[1]), strict=True):
        assert_close(got, by_deletion(row, visible)[list(FAMILY).index(name)])


def test_an_entry_of_minus_inf_is_a_masked_one():
    x, where = MASKED
    for f in FAMILY.values():
        same_bits(f(jnp.where(where, x, -INF)), f(x, where=where))


def test_every_row_sums_to_1_or_to_0():
    x, where = MASKED
    assert_close(softmax(x, where=where).sum(-1), np.where(where.any(-1), 1.0, 0.0))
    assert (softmax(x, where=where) >= 0).all()


@pytest.mark.parametrize("shift", [100.0, -1e6, 1e12])
def test_adding_a_number_to_every_score_changes_no_weight(shift):
    # Small integers, so that the shifted scores are exact.
    x, where = jnp.round(4 * MASKED[0]), MASKED[1]
    assert_close(softmax(x + shift, where=where), softmax(x, where=where))
    assert_close(log_softmax(x + shift, where=where), log_softmax(x, where=where))
    assert_close(logsumexp(x + shift, where=where), logsumexp(x, where=where) + shift)


def test_a_permutation_of_scores_permutes_the_weights():
    x, where = MASKED
    order = np.random.default_rng(5).permutation(x.shape[1])
    assert_close(softmax(x[:, order], where=where[:, order]), softmax(x, where=where)[:, order])
    assert_close(log_softmax(x[:, order], where=where[:, order]), log_softmax(x, where=where)[:, order])
    assert_close(logsumexp(x[:, order], where=where[:, order]), logsumexp(x, where=where))


@pytest.mark.parametrize("name", FAMILY)
def test_vmap_is_a_loop(name):
    row = jax.value_and_grad(lambda x, where: jnp.sin(finite(FAMILY[name](x, -1, where))).sum())
    for axes in [(0, 0), (0, None), (None, 0)]:
        args = [a if axis == 0 else a[0] for a, axis in zip(MASKED, axes, strict=True)]
        loop = [row(*(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True))) for i in range(5)]
        for got, expected in zip(jax.vmap(row, axes)(*args), zip(*loop, strict=True), strict=True):
            assert_close(got, jnp.stack(expected))
    f, (x, where) = FAMILY[name], MASKED
    nested = jax.vmap(jax.vmap(lambda x, where: f(x, where=where)))(x[None], where[None])
    assert_close(nested[0], f(x, where=where))


@pytest.mark.parametrize("name", FAMILY)
def test_jit_is_eager(name):
    f, (x, where) = FAMILY[name], MASKED
    same_bits(jax.jit(f)(x, where=where), f(x, where=where))
    assert_close(jax.jit(jax.jacrev(f))(x, where=where), jax.jacrev(f)(x, where=where))


def test_a_new_mask_is_no_new_program(monkeypatch):
    traces = []
    monkeypatch.setattr(_rows, "_parts", lambda *args, _parts=_rows._parts: traces.append(1) or _parts(*args))
    for where in MASKED[1]:
        softmax(normal(13), where=jnp.resize(where, 13))
    assert len(traces) == 1


# Derivatives


@pytest.mark.parametrize("name", FAMILY)
def test_first_and_second_derivatives_are_those_of_finite_differences(name):
    x, where = MASKED
    # Ties at the peak, too: they have no derivative of their own.
    x = x.at[0, 0].set(0.3).at[1].set(2.0)
    f = jax.jit(lambda x: finite(FAMILY[name](x, where=where)))
    check_grads(f, (x,), order=2, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6)


def test_the_derivative_of_a_log_is_that_of_the_function():
    x = MASKED[0]
    weights = softmax(x)
    assert_close(jax.jacrev(lambda x: logsumexp(x).sum())(x), weights)
    eye = jnp.eye(7)[None]
    jacobian = jax.vmap(jax.jacfwd(log_softmax))(x)
    assert_close(jacobian, jnp.broadcast_to(eye, jacobian.shape) - weights[:, None, :])


def everything(f, x, where):
    """Values and derivatives of first and second order in both modes, of what is visible."""
    g = lambda x: finite(f(x, where=where))  # noqa: E731
    return {
        "value": f(x, where=where),
        "forward": jax.jacfwd(g)(x),
        "reverse": jax.jacrev(g)(x),
        "forward over reverse": jax.hessian(lambda x: jnp.sin(g(x)).sum())(x),
        "reverse over forward": jax.jacrev(lambda x: jax.jvp(g, (x,), (jnp.ones_like(x),))[1])(x),
        "reverse over reverse": jax.grad(lambda x: jnp.cos(jax.grad(lambda x: jnp.sin(g(x)).sum())(x)).sum())(x),
    }


@functools.cache
def compiled_everything(name):
    return jax.jit(functools.partial(everything, FAMILY[name]))


HIDDEN_ROW = jnp.array([0.3, -1.0, 0.7, 0.2]), jnp.array([T, F, T, T])


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e38, -1e38, MAX, 800.0])
@pytest.mark.parametrize("name", FAMILY)
def test_what_is_masked_changes_no_bit_of_any_value_or_derivative(name, garbage):
    x, where = HIDDEN_ROW
    clean = compiled_everything(name)(x, where=where)
    same_bits(compiled_everything(name)(x.at[1].set(garbage), where=where), clean)
    del clean["value"]
    for derivative in clean.values():
        assert np.isfinite(derivative).all()
        exactly(derivative[..., 1], 0.0)


@pytest.mark.parametrize("name", FAMILY)
def test_what_is_masked_changes_no_bit_in_eager_mode(name):
    x, where = HIDDEN_ROW
    f = lambda x: finite(FAMILY[name](x, where=where))  # noqa: E731
    for g in (f, jax.jacfwd(f), jax.jacrev(f)):
        same_bits(g(x.at[1].set(NAN)), g(x))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_cotangent_of_NaN_at_a_masked_entry_is_not_read(name):
    x, where = HIDDEN_ROW
    pull = lambda hidden: jax.vjp(lambda x: FAMILY[name](x, where=where), x)[1](  # noqa: E731
        array([1.0, hidden, 2.0, 3.0])
    )
    same_bits(pull(NAN), pull(0.0))


def test_a_tangent_of_NaN_at_a_masked_entry_is_not_read():
    x, where = HIDDEN_ROW
    for f in FAMILY.values():
        push = lambda hidden, f=f: jax.jvp(  # noqa: E731
            lambda x: f(x, where=where), (x,), (array([1.0, hidden, 2.0, 3.0]),)
        )
        same_bits(push(NAN), push(0.0))


EMPTY = {
    "nothing is allowed": ([1.0, 2.0, 3.0], [F, F, F]),
    "everything is -inf": ([-INF, -INF, -INF], [T, T, T]),
    "one is NaN and masked, the others are -inf": ([NAN, -INF, -INF], [F, T, T]),
}


@pytest.mark.parametrize("x, where", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("name", FAMILY)
def test_every_derivative_through_an_empty_row_is_0(name, x, where):
    derivatives = compiled_everything(name)(array(x), where=jnp.array(where))
    exactly(derivatives.pop("value"), {"softmax": 0.0}.get(name, -INF))
    for derivative in derivatives.values():
        exactly(derivative, 0.0)
    # Nor does a cotangent of NaN reach it, as it comes from a later NaN.
    out, pull = jax.vjp(lambda x: FAMILY[name](x, where=jnp.array(where)), array(x))
    exactly(pull(jnp.full_like(out, NAN))[0], 0.0)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", FAMILY)
def test_a_visible_NaN_is_seen_in_every_derivative_of_its_row_and_in_no_other(name, bad):
    where = jnp.stack([HIDDEN_ROW[1]] * 2)
    f = lambda x: FAMILY[name](x, where=where)  # noqa: E731
    x = jnp.stack([HIDDEN_ROW[0]] * 2)
    clean, spoilt = x, x.at[0, 2].set(bad)
    forward, reverse = jax.jacfwd(f), jax.jacrev(f)
    # [output row, (output entry,) input row, input entry]
    assert np.isnan(forward(spoilt)[0]).all()
    assert np.isnan(reverse(spoilt)[0, ..., 0, where[0]]).all()
    same_bits(forward(spoilt)[1], forward(clean)[1])
    same_bits(reverse(spoilt)[1, ..., 1, :], reverse(clean)[1, ..., 1, :])
    # Pulled back, even a NaN stops at what its row does not see.
    exactly(reverse(spoilt)[..., 1], 0.0)
    exactly(reverse(spoilt)[0, ..., 1, :], 0.0)
    hessian = jax.hessian(lambda x: f(x)[0].sum())(spoilt)
    assert np.isnan(hessian[0, where[0]][:, 0, where[0]]).all()


# The policy for empty rows


ROWS = {
    "a mask": (lambda empty: (normal(2, 3), jnp.array([[T, F, T], [not empty, F, F]]))),
    "a mask of one row": (lambda empty: (normal(2, 3), jnp.array([[not empty, F, F]]))),
    "a scalar mask": (lambda empty: (normal(2, 3), jnp.array(not empty))),
    "-inf": (lambda empty: (normal(2, 3).at[1].set(-INF if empty else 0.0), None)),
    "both": (lambda empty: (normal(2, 3).at[1, 0].set(-INF if empty else 0.0), jnp.array([[T, F, F], [T, F, F]]))),
    "the size": (lambda empty: (jnp.zeros((2, 0)) if empty else jnp.zeros((0, 2)), None)),
    "the size, whatever the mask": (lambda empty: (jnp.zeros((2, 0) if empty else (0, 2)), jnp.zeros((1, 1), bool))),
    "NumPy arrays": (lambda empty: (np.full((2, 3), -INF if empty else 0.0, np.float32), np.array([[T, F, T]]))),
    "bfloat16": (lambda empty: (jnp.full((2, 3), -INF if empty else 0.0, jnp.bfloat16), None)),
}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_empty_raise_raises_at_once_where_visibility_is_known(rows, name):
    f = FAMILY[name]
    x, where = rows(True)
    with pytest.raises(ValueError) as e:
        f(x, where=where, empty="raise")
    assert str(e.value) == (
        f"{name}: a query has no key that it may attend to, and empty='raise'. Pass empty='zero' for zeros."
    )
    with pytest.raises(ValueError, match=f"^{name}: a query has no key"):
        jax.jit(lambda: f(x, where=where, empty="raise"))()
    x, where = rows(False)
    same_bits(f(x, where=where, empty="raise"), f(x, where=where))
    assert_close(jax.jit(lambda: f(x, where=where, empty="raise"))(), f(x, where=where), x.dtype)


@pytest.mark.parametrize("rows", ["a mask", "a mask of one row", "a scalar mask", "the size"])
def test_empty_raise_raises_while_tracing_what_the_mask_or_the_size_has_emptied(rows):
    x, where = ROWS[rows](True)
    with pytest.raises(ValueError, match="^softmax: a query has no key"):
        jax.jit(lambda x: softmax(x, where=where, empty="raise"))(x)
    with pytest.raises(ValueError, match="^softmax: a query has no key"):
        jax.vmap(lambda x: softmax(x, -1, where, empty="raise"))(x[None])


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "vmap"])
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("rows", ["a mask", "-inf", "both"])
def test_empty_raise_is_a_check_where_visibility_is_traced(rows, name, mapped):
    f = functools.partial(FAMILY[name], axis=-1, empty="raise")
    g = jax.vmap(lambda x, where: f(x, where=where)) if mapped else lambda x, where: f(x, where=where)
    checked = jax.jit(checkify.checkify(g))
    for empty in (True, False):
        x, where = ROWS[rows](empty)
        error, _ = checked(x, jnp.ones_like(x, bool) if where is None else where)
        if empty:
            assert f"{name}: a query has no key that it may attend to, and empty='raise'." in str(error.get())
        else:
            error.throw()


def test_empty_raise_without_checkify_is_refused_by_jax():
    with pytest.raises(ValueError, match="checkify"):
        jax.jit(lambda x: softmax(x, empty="raise"))(normal(2, 3))


def test_empty_raise_knows_the_rows_under_grad():
    f = lambda x: softmax(x, empty="raise")[0, 0]  # noqa: E731
    assert jax.grad(f)(normal(2, 3)).shape == (2, 3)
    with pytest.raises(ValueError, match="^softmax: a query has no key"):
        jax.grad(f)(normal(2, 3).at[1].set(-INF))


# Numbers: dtypes, ranges, compilers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_have_the_dtype_of_the_scores_and_its_precision(dtype):
    x, where = MASKED[0].astype(dtype), MASKED[1]
    for name, f in FAMILY.items():
        got = f(x, where=where)
        assert got.dtype == np.dtype(dtype)
        expected = [by_deletion(*row)[list(FAMILY).index(name)] for row in zip(x.astype(float), where, strict=True)]
        assert_close(got, expected, dtype)
        assert jax.eval_shape(jax.jacrev(f), x, where=where).dtype == np.dtype(dtype)
    assert naive_softmax(x).dtype == np.dtype(dtype)
    assert entropy(softmax(x)).dtype == np.dtype("float64" if dtype == "float64" else "float32")


def test_sums_and_logarithms_of_half_precision_are_float32():
    x = jnp.zeros(70_000, np.float16)
    # A float16 sum would end at 65 504, and one that counts in ones at 2 048.
    exactly(logsumexp(x), np.float16(np.log(70_000)))
    exactly(softmax(x), np.float16(1 / 70_000))
    exactly(log_softmax(x), np.float16(-np.log(70_000)))
    # Of 0.5 and 0.25 nothing is rounded, of their shares in float16 much: the entropy of 4096 weights is not 0.
    assert_close(entropy(softmax(jnp.zeros(4096, np.float16))), np.log(4096), "float32")


def test_float32_stays_float32_with_or_without_x64():
    for on in (True, False):
        with jax.enable_x64(on):
            x = jnp.array([0.5, -0.5], np.float32)
            assert {f(x).dtype for f in (*FAMILY.values(), entropy, naive_softmax)} == {np.dtype(np.float32)}
            assert rows_normalised(softmax(x), 1e-6).dtype == bool


def test_numpy_arrays_and_lists_are_arrays():
    same_bits(softmax(np.array([0.5, -0.5])), softmax(array([0.5, -0.5])))
    exactly(softmax([0.0, 0.0], where=[True, False]), [1.0, 0.0])


@pytest.mark.parametrize("n", [3, 1000])
@pytest.mark.parametrize("name", FAMILY)
def test_huge_products_that_the_compiler_may_fuse_give_the_same_under_jit(name, n):
    """C19: XLA computes x * c twice, rounded and unrounded, and nothing is left of the row, or NaN."""
    g = lambda x, c: FAMILY[name](x * c)  # noqa: E731
    unit = lambda x, c: jax.jvp(lambda x: g(x, c), (x,), (jnp.ones_like(x),))  # noqa: E731
    compiled, mapped, pushed = jax.jit(g), jax.jit(jax.vmap(g, (0, None))), jax.jit(unit)
    for c, size in [(0.3, 1e10), (3**-0.5, 1e20), (0.7, 1e35)]:
        x, c = jnp.array(np.random.default_rng(n).random((3, n)) * size, np.float32), np.float32(c)
        expected = FAMILY[name](x * c)
        exactly(compiled(x, c), expected)
        exactly(jax.jit(lambda x, c=c: g(x, c))(x), expected)
        exactly(mapped(x, c), expected)
        exactly(jax.lax.map(lambda x, c=c: g(x, c), x), expected)
        value, tangent = pushed(x, c)
        exactly(value, expected)
        exactly(tangent, c if name == "logsumexp" else 0.0)


@pytest.mark.parametrize("n", [3, 1000])
def test_huge_products_have_the_same_gradients_under_jit(n):
    """C19"""
    ranks = jnp.broadcast_to(jnp.arange(n, dtype=np.float32), (3, n))
    pulled = jax.jit(jax.grad(lambda x, c: (softmax(x * c) * ranks).sum()))
    lse = jax.jit(jax.grad(lambda x, c: logsumexp(x * c).sum()))
    again = jax.jit(jax.grad(jax.checkpoint(lambda x, c: (softmax(x * c) * ranks).sum())))
    curved = jax.jit(jax.hessian(lambda x, c: softmax(x * c)[0]))
    for c, size in [(0.3, 1e10), (3**-0.5, 1e20), (0.7, 1e35)]:
        x, c = jnp.array(np.random.default_rng(n).random((3, n)) * size, np.float32), np.float32(c)
        exactly(pulled(x, c), 0.0)
        exactly(again(x, c), 0.0)
        exactly(curved(x[0, :3], c), 0.0)
        exactly(lse(x, c), jnp.where(x == x.max(1, keepdims=True), c, 0))


@pytest.mark.parametrize("n", [3, 1000])
def test_a_huge_product_that_cannot_be_minus_inf_is_no_easier_to_fuse(n):
    """C19: the compiler knows that a square is visible, and drops what chooses between visible and not."""
    x = jnp.array(np.random.default_rng(n).random((3, n)) * 1e10, np.float32)
    c = np.float32(0.3)
    f = lambda x: softmax(x * x * c)  # noqa: E731
    exactly(jax.jit(f)(x), f(x))
    exactly(jax.jit(f)(x).sum(1), 1.0)


def test_logits_that_differ_by_1_at_a_million_weigh_as_they_should_under_jit():
    """C19, milder: the rounding of the product stays out of the difference."""
    x = jnp.array([3e6, 3e6 + 2, 3e6 + 4], np.float32)
    for c in (np.float32(0.5), np.float32(1 / 3)):
        f = lambda x, c=c: softmax(x * c)  # noqa: E731
        expected = softmax((np.asarray(x) * c).astype(np.float64))
        assert_close(f(x), expected, "float32")
        exactly(jax.jit(f)(x), f(x))


def test_half_precision_products_give_the_same_weights_under_jit():
    x = jnp.array(np.random.default_rng(0).random((3, 300)) * 1e30, jnp.bfloat16)
    f = lambda x: softmax(x * jnp.bfloat16(0.3))  # noqa: E731
    assert_close(jax.jit(f)(x).astype(float).sum(1), np.ones(3), "bfloat16")


# No debug flag trips where every result is finite


@pytest.fixture
def no_nans_no_infs():
    with jax.debug_nans(True), jax.debug_infs(True):
        yield


DEBUG_ROWS = {
    "empty rows": ([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]], [[T, F, T], [F, F, F]]),
    "a huge masked score": ([[1.0, 1.0, 100.0], [1.0, 1.0, 1e30]], [[T, T, F], [T, T, F]]),
    "masked NaN and inf": ([[1.0, 1.0, NAN], [1.0, 1.0, INF]], [[T, T, F], [T, T, F]]),
    "-inf": ([[0.0, -INF, 1.0], [-INF, -INF, -INF]], [[T, T, T], [T, T, T]]),
    "the largest and the lowest number": ([[MAX, -MAX, 0.0], [-MAX, -MAX, -MAX]], [[T, T, T], [T, T, T]]),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("x, where", DEBUG_ROWS.values(), ids=DEBUG_ROWS)
def test_no_debug_flag_trips_over_finite_results(x, where, compiled, no_nans_no_infs):
    """C72, on C06's empty row and C25's rows."""
    x, where = np.array(x), np.array(where)
    some = (where & (x != -INF)).any(1)
    jit = jax.jit if compiled else lambda f: f
    f = jit(lambda x: softmax(x, where=where) ** 2)
    out, pull = jax.vjp(f, x)
    pull(jnp.ones_like(out))
    jax.jvp(f, (x,), (np.ones_like(x),))
    jit(jax.grad(lambda x: entropy(softmax(x, where=where)).sum()))(x)
    lse = jit(lambda x: logsumexp(x, where=where[some]))
    lse(x[some])
    jax.grad(lambda x: lse(x).sum())(x[some])
    # The contract's own -inf, made finite before it can be seen.
    jax.jit(jax.grad(lambda x: finite(logsumexp(x, where=where)).sum()))(x)
    jax.jit(jax.grad(lambda x: finite(log_softmax(x, where=where)).sum()))(x)


def test_the_log_of_finite_weights_trips_no_debug_flag(no_nans_no_infs):
    x = normal(2, 3)
    for f in (log_softmax, logsumexp):
        f(x)
        jax.grad(lambda x, f=f: f(x).sum())(x)
        jax.jit(jax.grad(lambda x, f=f: f(x).sum()))(x)


@pytest.mark.parametrize("name", FAMILY)
def test_checkify_finds_no_NaN_and_no_division_by_zero_on_the_way(name):
    g = jax.grad(lambda x, where: finite(FAMILY[name](x, where=where)).sum())
    checked = jax.jit(checkify.checkify(g, errors=checkify.float_checks))
    for x, where in DEBUG_ROWS.values():
        # A NaN that is handed in is one on the way.
        error, _ = checked(np.nan_to_num(array(x), nan=MAX), jnp.array(where))
        error.throw()


# Lessons, part A


def rounded(got, expected, digits):
    np.testing.assert_array_equal(np.round(np.asarray(got), digits), expected)


def test_a_row_of_scores_becomes_weights_step_by_step():
    # A table shows 1/sqrt(2) as 0.71, and everything computed from it unrounded.
    scores = array([0.5**0.5, 0.0, -1.0])
    rounded(scores, [0.71, 0.0, -1.0], 2)
    rounded(scores - scores.max(), [0.0, -0.71, -1.71], 2)
    exps = jnp.exp(scores - scores.max())
    rounded(exps, [1.0, 0.4931, 0.1814], 4)
    rounded(exps / exps.sum(), [0.5972, 0.2945, 0.1083], 4)
    assert_close(softmax(scores), exps / exps.sum())
    rounded(softmax(array([0.71, 0.0, -1.0])), [0.5979, 0.2940, 0.1081], 4)


# scores, weights, digits
LESSONS = {
    "equal scores share": ([0.0, 0.0], [0.5, 0.5], 12),
    "a lead of ln 2 doubles a weight": ([np.log(2), 0.0], [2 / 3, 1 / 3], 12),
    "a lead of 1": ([1.0, 0.0], [0.731, 0.269], 3),
    "a lead of 1 over root 2": ([0.7071, 0.0], [0.670, 0.330], 3),
    "a thousand twice": ([1000.0, 1000.0], [0.5, 0.5], 12),
    "a thousand and one less": ([1000.0, 999.0], [0.731, 0.269], 3),
    "a masked score": ([0.7, 1.1, 0.2, -INF], [0.3228, 0.4815, 0.1958, 0.0], 4),
}


@pytest.mark.parametrize("scores, weights, digits", LESSONS.values(), ids=LESSONS)
def test_the_lessons_weights(scores, weights, digits):
    rounded(softmax(array(scores)), np.round(weights, digits), digits)


def test_every_row_sums_to_1_and_the_whole_matrix_does_not():
    weights = softmax(normal(2, 2))
    assert (weights > 0).all() and rows_normalised(weights)
    assert_close(weights.sum(), 2.0)


def test_the_naive_form_gives_nan_where_the_stable_one_does_not():
    for scores in ([1000.0, 1000.0], [1000.0, 999.0], [-INF, -INF], [-1000.0, -1000.0]):
        assert np.isnan(naive_softmax(array(scores))).any()
        assert not np.isnan(softmax(array(scores))).any()
    exactly(naive_softmax(array([1000.0, 1000.0])), NAN)
    assert_close(naive_softmax(normal(2, 3)), softmax(normal(2, 3)))
    exactly(softmax(array([1000.0, 999.0])), softmax(array([0.0, -1.0])))


def test_a_masked_score_weighs_exactly_0_and_a_listed_picture_can_be_wrong():
    scores = array([0.7, 1.1, 0.2, -INF])
    rounded(jnp.exp(scores), [2.014, 3.004, 1.221, 0.0], 3)
    rounded(jnp.exp(scores).sum(), 6.239, 3)
    weights = softmax(scores)
    exactly(weights[3], 0.0)
    assert_close(weights.sum(), 1.0)
    # 0.48149 was once rounded to 0.4815 and then to 0.482, so that the weights seemed to sum to 1.001.
    rounded(weights, [0.323, 0.481, 0.196, 0.0], 3)
    np.testing.assert_allclose(weights, [0.323, 0.482, 0.196, 0.0], atol=6e-4)
    assert np.abs(weights - np.array([0.26, 0.41, 0.33, 0.0])).max() > 0.1
    assert_close(logsumexp(scores), np.log(jnp.exp(scores).sum()))


def test_a_large_factor_sharpens_and_a_small_one_flattens():
    scores = array([0.7, 1.1, 0.2, -0.4])
    spread = [entropy(softmax(factor * scores)) for factor in (1e-9, 0.5, 1.0, 2.0, 1e9)]
    assert_close(spread[0], np.log(4))
    assert all(wide > sharp for wide, sharp in itertools.pairwise(spread))
    exactly(softmax(1e9 * scores), [0.0, 1.0, 0.0, 0.0])


def test_the_exercises_row_of_minus_inf_raises():
    with pytest.raises(ValueError, match="empty='raise'"):
        softmax(array([[0.0, 1.0], [-INF, -INF]]), empty="raise")


# Entropy and sums of rows


# weights, entropy
ENTROPIES = {
    "one weight has it all": ([1.0, 0.0, 0.0], 0.0),
    "all weights are equal": ([0.25] * 4, np.log(4)),
    "an empty row": ([0.0, 0.0], 0.0),
    "no weights": ([], 0.0),
    "a weight below all normal numbers": ([1.0, 5e-324], 0.0),
    "a NaN is shown": ([0.5, NAN], NAN),
    "a NaN is shown beside a 0": ([0.0, NAN], NAN),
    "a negative weight is none": ([1.5, -0.5], NAN),
}


@pytest.mark.parametrize("weights, expected", ENTROPIES.values(), ids=ENTROPIES)
def test_entropies(weights, expected):
    assert_close(entropy(array(weights)), expected)
    assert not np.signbit(entropy(array(weights)))
    assert_close(jax.jit(entropy)(array(weights)), expected)


def test_the_derivative_of_the_entropy_is_0_at_a_weight_of_0_and_minus_ln_w_minus_1_elsewhere():
    weights = array([0.0, 0.25, 0.75, -0.0, 5e-324])
    expected = [0.0, -np.log(0.25) - 1, -np.log(0.75) - 1, 0.0, 0.0]
    for slope in (jax.jacfwd(entropy)(weights), jax.jacrev(entropy)(weights)):
        assert_close(slope, expected)
    assert_close(jax.hessian(entropy)(weights), np.diag([0.0, -1 / 0.25, -1 / 0.75, 0.0, 0.0]))
    assert np.isnan(jax.grad(entropy)(array([NAN, 1.0]))[0])


def test_the_entropy_of_a_softmax_has_first_and_second_derivatives():
    x, where = MASKED
    f = lambda x: entropy(softmax(x, where=where))  # noqa: E731
    check_grads(f, (x,), order=2, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6)
    # Small weights, and such as underflow to a subnormal number or to 0.
    hessian = jax.jit(jax.vmap(jax.hessian(lambda x: entropy(softmax(x)))))
    for dtype, end in [(np.float32, 120), (np.float64, 800)]:
        gaps = jnp.arange(end).astype(dtype)
        assert np.isfinite(hessian(jnp.stack([0 * gaps, -gaps], 1))).all()


SUMS = {
    "a half and a half": ([[0.5, 0.5]], True),
    "every row": ([[0.5, 0.5], [1.0, 0.0]], True),
    "one row is short": ([[0.5, 0.5], [0.5, 0.25]], False),
    "the matrix sums to 1 and its rows do not": ([[0.25, 0.25], [0.25, 0.25]], False),
    "a row of zeros": ([[0.5, 0.5], [0.0, 0.0]], False),
    "a NaN": ([[0.5, 0.5], [NAN, 1.0]], False),
    "off by less than tol": ([[0.5, 0.5 + 9e-10], [0.5, 0.5 - 9e-10]], True),
    "off by more than tol": ([[0.5, 0.5 + 2e-9]], False),
    "short by more than tol": ([[0.5, 0.5 - 2e-9]], False),
}


@pytest.mark.parametrize("weights, expected", SUMS.values(), ids=SUMS)
def test_rows_are_normalised_when_each_sums_to_1(weights, expected):
    for f in (rows_normalised, jax.jit(rows_normalised)):
        got = f(array(weights))
        assert got.dtype == bool and got.shape == () and got == expected
    assert rows_normalised(array(weights).T, axis=0) == expected


def test_tol_may_be_any_number():
    weights = jnp.array([0.5, 0.5625], np.float32)
    for tol in (0.0625, np.float64(0.0625), jnp.float32(0.0625), 1):
        assert rows_normalised(weights, tol)
    assert not rows_normalised(weights, 0) and not rows_normalised(weights, jnp.float64(0.06))


def test_half_precision_weights_are_summed_in_float32():
    # In float16 a sum of 2048 and 1 is 2048.
    assert rows_normalised(jnp.full(4096, 2.0**-12, np.float16))
    assert not rows_normalised(jnp.concatenate([jnp.ones(1, np.float16), jnp.full(1, 1e-4, np.float16)]))


# Field reports


def test_the_log_softmax_of_an_empty_row_is_no_NaN():
    """C10"""
    x, mask = array([[0.3725, 0.5344], [0.3423, 0.3423]]), jnp.array([[T, T], [F, F]])
    logs = log_softmax(x, where=mask)
    np.testing.assert_allclose(logs[0], [-0.77737, -0.61547], atol=1e-4)
    exactly(logs[1], -INF)
    gradient = jax.grad(lambda x: log_softmax(x, where=mask)[0].sum())(x)
    assert np.isfinite(gradient).all()
    exactly(gradient[1], 0.0)
    exactly(jax.grad(lambda x: log_softmax(x, where=mask).sum())(x)[1], 0.0)


def test_a_masked_inf_is_harmless_and_a_visible_one_makes_its_row_NaN():
    """C20"""
    x, mask = array([INF, 0.0, 0.0]), jnp.array([F, T, T])
    for jit in (jax.jit, lambda f: f):
        exactly(jit(lambda x: softmax(x, where=mask))(x), [0.0, 0.5, 0.5])
        exactly(jit(jax.grad(lambda x: softmax(x, where=mask).sum()))(x), 0.0)
        exactly(jit(jax.jacrev(lambda x: softmax(x, where=mask)))(x)[:, 0], 0.0)
        for f in FAMILY.values():
            exactly(jit(f)(array([INF, 0.0])), NAN)


@pytest.mark.parametrize("hidden", [100.0, 1e30, INF, NAN])
def test_a_large_masked_score_leaves_gradients_finite(hidden):
    """C25"""
    x, mask = array([1.0, 1.0, hidden]), jnp.array([T, T, F])
    value, gradient = jax.value_and_grad(lambda x: softmax(x, where=mask)[0])(x)
    assert_close(value, 0.5)
    assert_close(gradient, [0.25, -0.25, 0.0])
    value, gradient = jax.value_and_grad(lambda x: jnp.where(mask, log_softmax(x, where=mask), 0).sum())(x)
    assert_close(value, 2 * np.log(0.5))
    exactly(gradient, 0.0)


@pytest.mark.parametrize("name", [*FAMILY, "entropy"])
def test_a_zero_tangent_and_one_of_a_masked_entry_come_out_as_zero(name):
    """C27"""
    mask = jnp.array([F, T, T])
    g = (lambda x, where: entropy(softmax(x, where=where))) if name == "entropy" else FAMILY[name]
    f = lambda x: g(x, where=mask)  # noqa: E731
    for x in (jnp.zeros(3), array([-INF, 0.0, 0.0])):
        for tangent in (jnp.zeros(3), array([1.0, 0.0, 0.0])):
            exactly(jax.jvp(f, (x,), (tangent,))[1], 0.0)
        forward, reverse = jax.jacfwd(f)(x), jax.jacrev(f)(x)
        assert np.isfinite(forward).all()
        assert_close(forward, reverse)


def test_the_entropy_of_a_row_with_weights_of_0_is_finite():
    """C29"""
    hidden = jnp.array([T, T, F])
    assert_close(entropy(softmax(jnp.zeros(3), where=hidden)), 0.693147180559945)
    exactly(entropy(softmax(jnp.zeros(2), where=hidden[1:])), 0.0)
    exactly(entropy(softmax(jnp.array([65504, -65504], np.float16))), 0.0)
    exactly(entropy(softmax(array([0.0, -INF]))), 0.0)
    exactly(entropy(softmax(jnp.zeros(2), where=jnp.array([F, F]))), 0.0)


@pytest.mark.parametrize("again", [False, True], ids=["once", "normalised once more"])
def test_the_entropy_of_a_masked_row_has_a_finite_gradient(again):
    """C30"""
    mask = jnp.array([T, T, F])

    def f(x):
        p = softmax(x, where=mask)
        return entropy(p / p.sum() if again else p)

    value, gradient = jax.value_and_grad(f)(array([0.0, np.log(3), 7.0]))
    np.testing.assert_allclose(value, 0.562335, atol=1e-6)
    np.testing.assert_allclose(gradient, [0.205990, -0.205990, 0.0], atol=1e-6)
    value, gradient = jax.value_and_grad(f)(array([0.0, 0.0, 5.0]))
    assert_close(value, np.log(2))
    assert_close(gradient, [0.0, 0.0, 0.0])
    exactly(gradient[2], 0.0)


def test_a_masked_score_is_no_score_of_0():
    """C41"""
    x = array([0.43, -0.21, 0.99, 0.32, -0.35, 0.04])
    got = softmax(x, where=jnp.array([T, T, T, F, F, F]))
    np.testing.assert_allclose(got, [0.305067, 0.160860, 0.534073, 0.0, 0.0, 0.0], atol=1e-6)


# Errors


ERRORS = {
    "integer scores": (lambda f: f(jnp.array([1, 2])), TypeError, "x must be floating, got int64."),
    "boolean scores": (lambda f: f(jnp.array([True])), TypeError, "x must be floating, got bool."),
    "complex scores": (lambda f: f(jnp.zeros(2, complex)), TypeError, "x must be floating, got complex128."),
    "float8": (
        lambda f: f(jnp.zeros(2, jnp.float8_e4m3fn)), TypeError, "x must be floating, got float8_e4m3fn."
    ),
    "no array": (lambda f: f(None), TypeError, "x must be an array, got NoneType."),
    "axis too large": (
        lambda f: f(jnp.zeros((2, 3)), 2), ValueError, "axis must be one of the 2 axes of x, which is (2, 3), got 2."
    ),
    "axis too small": (
        lambda f: f(jnp.zeros(3), -2), ValueError, "axis must be one of the 1 axes of x, which is (3,), got -2."
    ),
    "no axis at all": (
        lambda f: f(jnp.zeros(())), ValueError, "axis must be one of the 0 axes of x, which is (), got -1."
    ),
    "two axes": (lambda f: f(jnp.zeros((2, 3)), (0, 1)), TypeError, "axis must be an integer, got (0, 1)."),
    "a flag": (lambda f: f(jnp.zeros((2, 3)), True), TypeError, "axis must be an integer, got True."),
}
MASK_ERRORS = {
    "a mask of 0 and 1": (
        jnp.array([[0, 1, 1]]), TypeError,
        "where must be boolean (True = may attend), got int64. Pass where != 0.",
    ),
    "a float mask": (
        jnp.zeros((2, 3), np.float32), TypeError,
        "where must be boolean (True = may attend), got float32. Pass where != 0.",
    ),
    "a mask of lower rank": (
        jnp.ones(3, bool), ValueError,
        "where must be (2, 3), got (3,). Give it the missing axes, each full or 1, as in where[None, :].",
    ),
    "a mask of higher rank": (jnp.ones((1, 2, 3), bool), ValueError, "where must be (2, 3), got (1, 2, 3)."),
    "a mask of another size": (jnp.ones((2, 2), bool), ValueError, "where must be (2, 3), got (2, 2)."),
    "a mask turned": (jnp.ones((3, 2), bool), ValueError, "where must be (2, 3), got (3, 2)."),
}


@pytest.mark.parametrize("name", [*FAMILY, "naive_softmax", "entropy", "rows_normalised"])
@pytest.mark.parametrize("call, kind, message", ERRORS.values(), ids=ERRORS)
def test_what_is_refused_is_named(call, kind, message, name):
    f = FAMILY.get(name) or {"naive_softmax": naive_softmax, "entropy": entropy}.get(
        name, lambda x, axis=-1: rows_normalised(x, axis=axis)
    )
    if name in ("entropy", "rows_normalised"):
        message = message.replace("x must", "weights must").replace("axes of x", "axes of weights")
    with pytest.raises(kind) as e:
        call(f)
    assert str(e.value) == f"{name}: {message}"


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("where, kind, message", MASK_ERRORS.values(), ids=MASK_ERRORS)
def test_what_is_no_mask_is_refused(where, kind, message, name):
    with pytest.raises(kind) as e:
        FAMILY[name](jnp.zeros((2, 3)), where=where)
    assert str(e.value) == f"{name}: {message}"


@pytest.mark.parametrize("name", FAMILY)
def test_an_unknown_policy_is_refused(name):
    with pytest.raises(ValueError) as e:
        FAMILY[name](jnp.zeros(3), empty="uniform")
    assert str(e.value) == f"{name}: empty must be one of 'zero', 'raise', got 'uniform'."
