"""How attention has failed people elsewhere: sixty public reports, and more of each kind, on every engine.

A test is named by what must hold; its docstring has the number of the report and its threads. `CASES`, at the end, says
which tests keep each report from happening here. Further calls of each kind are in these tests too, and under `FAULTS`
and `TAKEN_FOR`, beside the formula that goes wrong; of mistakes that must be refused, in test_errors.py.

    a row that sees nothing                 C01 C03 C04 C06 C10 C32 C47
    no NaN on the way to a number           C27 C30 C72
    what is hidden is read                  C07 C23 C25 C41
    a mask is dropped for another           C09 C45 C48
    a mask of another type or sense         C02 C38 C39
    shapes and types that do not fit        C42 C44 C70 C75
    a number stands for minus infinity      C12 C14 C15 C62
    logits too large for their type         C17 C19 C20
    one softmax forward, another backward   C22 C64
    statistics                              C29 C33 C34 C36
    scale, softcap and bias in order        C65 C67
    the gradient of a bias                  C68
    where a query is                        C50 C60
    a cache, and decoding                   C51 C53 C54
    sizes that divide nothing, or are 0     C55 C92
    windows, and 0 for None                 C56 C58
    heads and features                      C74 C77
    transforms and derivatives              C78 C80 C81
    programs and memory that grow           C83 C84
    dropout                                 C86 C87 C89
    the same bits again                     C90
"""

import functools
import importlib
import itertools
import math
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from battery import made, normal
from conftest import TOLERANCE, assert_close

import jattn
from jattn import Cache, attend, attention, attention_weights, biases, cached_attention, masks

NAN, INF = np.nan, np.inf
LN2, LN3, LN4 = np.log([2, 3, 4])
NO_KEY = "a query has no key that it may attend to, and empty='raise'"


@pytest.fixture(params=["eager", "jit"])
def run(request):
    return (lambda f: f) if request.param == "eager" else jax.jit


def column(*numbers, dtype=np.float64):
    """(S, 1): a number for each key."""
    return np.array(numbers, dtype)[:, None]


@pytest.fixture
def means(run, engine):
    """Of queries that like all keys equally: the mean of the values that each one sees; statistics if asked for."""

    def means(value, mask=None, bias=None, *, T=None, dtype=np.float64, **options):
        T, S = len(value) if T is None else T, len(value)
        f = run(lambda *x: attend(*x, mask, bias, **options, **engine))
        out = f(np.zeros((T, 1), dtype), np.zeros((S, 1), dtype), column(*value, dtype=dtype))
        return (out[0][:, 0], out[1]) if options.get("return_stats") else out[:, 0]

    return means


@pytest.fixture
def means_of_heads(run, engine):
    """The same of `attention`: value (*B, S, K) -> (*B, T, N)."""

    def means_of_heads(value, mask=None, bias=None, *, T=None, N=None, **options):
        *B, S, K = value.shape
        query, key = np.zeros((*B, S if T is None else T, N or K, 1)), np.zeros((*B, S, K, 1))
        out = run(lambda *x: attention(*x, mask, bias, **options, **engine))(query, key, value[..., None])
        return (out[0][..., 0], out[1]) if options.get("return_stats") else out[..., 0]

    return means_of_heads


@pytest.fixture
def weights_of(run, engine):
    """Of one query and the keys that have these logits: its weights and its statistics."""

    def weights_of(logits, mask=None, bias=None, dtype=np.float64, **options):
        key = np.array(logits).astype(dtype)[:, None]
        f = run(lambda *x: attend(*x, mask, bias, return_stats=True, **options, **engine))
        out, stats = f(np.ones((1, 1), dtype), key, np.eye(len(key), dtype=dtype))
        return out[0], jax.tree.map(lambda x: x[0], stats)

    return weights_of


@pytest.fixture
def graded(run):
    """Makes of f a function that returns f(*args) and the gradient of its sum, about which both modes have agreed."""

    def graded(f):
        @run
        def reverse(*args):
            out, pull = jax.vjp(f, *args)
            return out, pull(jnp.ones_like(out))

        # Compiling it operation by operation would take its time, and shows nothing that jit does not.
        push = jax.jit(lambda args, tangents: jax.jvp(f, args, tangents)[1])

        def both(*args):
            tangents = tuple(normal(i, *x.shape, dtype=x.dtype) for i, x in enumerate(args))
            out, gradient = reverse(*args)
            if run is jax.jit:
                pushed, slope = np.asarray(push(args, tangents), np.float64), along(gradient, tangents)
                size = max(1.0, np.abs(pushed).sum(), abs(slope))
                assert abs(pushed.sum() - slope) <= 10 * TOLERANCE[str(out.dtype)] * size
            return np.asarray(out), [np.asarray(x) for x in gradient]

        return both

    return graded


def along(gradient, direction):
    return sum(np.vdot(*(np.asarray(x, np.float64) for x in pair)) for pair in zip(gradient, direction, strict=True))


def assert_slope(gradient, exact, args, step=1e-6):
    """`gradient` is that of the sum of `exact`, a function in NumPy, in a direction that favours no argument."""
    direction = [normal(i, *np.shape(x)) for i, x in enumerate(args)]
    plus, minus = (
        exact(*(x + sign * step * d for x, d in zip(args, direction, strict=True))).sum() for sign in (1, -1)
    )
    np.testing.assert_allclose(along(gradient, direction), (plus - minus) / (2 * step), rtol=1e-6, atol=1e-7)


def leaves_close(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, factor=10)


def same_bits(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        exactly(x, y)


def exactly(got, expected):
    """The same shape and the same numbers, NaN for NaN."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)


# Rows that see nothing


STAIRS = {
    "the last of six queries": (6, 10, [5], np.float64, [1, 1.5, 2, 2.5, 3, 0]),
    "two of four queries, on three keys": (4, 3, [0, 2], np.float32, [0, 1.5, 0, 2]),
}


@pytest.mark.parametrize("T, S, empty, dtype, expected", STAIRS.values(), ids=STAIRS)
def test_a_query_that_sees_nothing_gets_zeros_and_the_others_their_means(T, S, empty, dtype, expected, graded, engine):
    """C01 pytorch/pytorch#103749"""
    mask = reference.mask(T, S, causal=0)
    mask[empty] = False
    value = np.arange(1, S + 1, dtype=dtype)[:, None]
    zeros = np.zeros((T, 1), dtype), np.zeros((S, 1), dtype)
    out, (dq, dk, dv) = graded(lambda *x: attend(*x, mask, **engine))(*zeros, value)
    assert_close(out[:, 0], expected, dtype)
    assert_close(dv[:, 0], (mask / np.maximum(mask.sum(1, keepdims=True), 1)).sum(0), dtype)
    assert not dq.any() and not dk.any()


def test_no_policy_changes_a_row_that_sees_something(run, engine):
    """C01 pytorch/pytorch#103749"""
    mask = reference.mask(6, 10, causal=0)
    mask[5] = False
    args = normal(1, 6, 2), normal(2, 10, 2), normal(3, 10, 1)

    def f(rows, empty):
        return run(lambda q, k, v: attend(q, k, v, mask[rows], empty=empty, **engine))(args[0][rows], *args[1:])

    same_bits(f(slice(5), "zero"), f(slice(5), "raise"))
    assert_close(f(slice(6), "zero")[:5], f(slice(5), "raise"))
    with pytest.raises(ValueError, match=NO_KEY):
        f(slice(6), "raise")


FORMS = {
    "rules": masks.window(1, 0) & masks.lengths(key=np.array([4, 2])),
    "one array": np.stack([reference.mask(4, 4, window=(1, 0), key_length=n) for n in (4, 2)])[:, None],
}


@pytest.mark.parametrize("mask", FORMS.values(), ids=FORMS)
def test_a_loss_over_good_rows_has_the_gradient_of_the_good_rows(mask, graded, engine):
    """C03 pytorch/pytorch#41508"""
    zeros, value = np.zeros((2, 4, 1, 1)), np.tile(column(1.0, 2, 4, 8)[:, None], (2, 1, 1, 1))
    f = functools.partial(attention, mask=mask, **engine)
    out, (dq, dk, dv) = graded(lambda *x: f(*x)[:, :2])(zeros, zeros, value)
    assert_close(out[..., 0, 0], [[1, 1.5], [1, 1.5]])
    assert_close(f(zeros, zeros, value)[..., 0, 0], [[1, 1.5, 3, 6], [1, 1.5, 2, 0]])
    assert_close(dv[..., 0, 0], [[1.5, 0.5, 0, 0]] * 2)
    assert np.isfinite(dq).all() and np.isfinite(dk).all() and not dq[1, 3].any()


@pytest.mark.parametrize(
    "T, window, lengths, rows",
    [(4, (1, 0), [4, 2], slice(2)), (4, (1, 0), [4, 2], slice(None)), (5, (1, 1), [3, 0], slice(None))],
    ids=["a loss over good rows", "a loss over all rows", "a sequence of nothing"],
)
def test_a_row_that_sees_nothing_passes_back_exactly_zero(T, window, lengths, rows, graded, engine):
    """C03 pytorch/pytorch#41508"""
    args = normal(1, 2, T, 1, 3), normal(2, 2, T, 1, 3), normal(3, 2, T, 1, 2)
    mask = masks.window(*window) & masks.lengths(key=np.array(lengths))
    dense = np.stack([reference.mask(T, T, window=window, key_length=n) for n in lengths])[:, None]
    out, gradient = graded(lambda *x: attention(*x, mask, **engine)[:, rows])(*args)
    exact = lambda *x: reference.attention(*x, dense).out[:, rows]  # noqa: E731
    assert_close(out, exact(*args), factor=10)
    assert_slope(gradient, exact, args)
    dq, dk, dv = map(np.asarray, gradient)
    sees, seen = np.asarray(dense.any(-1))[:, 0], np.asarray(dense.any(-2))[:, 0]
    assert not dq[~sees].any()
    assert not dk[~seen].any() and not dv[~seen].any()


OFF = np.array([0, -INF, 0, 0])[None, :, None, None]
SWITCHES = {
    "one of three heads": (np.array([True, True, False])[None, :, None, None], None, 3, [2, 2, 0]),
    "one of a group, by a bias": (None, OFF, 2, [2, 0, 2, 2]),
    "all": (np.zeros((1, 3, 1, 1), bool), None, 3, [0, 0, 0]),
}


@pytest.mark.parametrize("mask, bias, K, expected", SWITCHES.values(), ids=SWITCHES)
def test_a_head_that_is_switched_off_gives_zeros_and_has_no_weights(mask, bias, K, expected, means_of_heads, run):
    """C04 pytorch/pytorch#160064"""
    N, value = len(expected), np.tile(np.arange(5.0)[None, :, None], (1, 1, K))
    out = means_of_heads(value, mask, bias, N=N)
    assert_close(out, np.broadcast_to(np.array(expected, float), (1, 5, N)))
    weights = run(lambda q, k: attention_weights(q, k, mask, bias))(np.zeros((1, 5, N, 1)), np.zeros((1, 5, K, 1)))
    on = np.array(expected)[None, :, None, None] / 2
    assert_close(weights, np.broadcast_to(on * 0.2, (1, N, 5, 5)))
    exactly(means_of_heads(value, mask, bias, N=N), out)


NO_FIRST_KEY = np.array([[False, True, True]])
COMBINED = {
    "a rule and an array": (masks.causal() & NO_FIRST_KEY, None),
    "one array": (reference.mask(3, 3, causal=0) & NO_FIRST_KEY, None),
    "two rules": (masks.causal() & ~masks.lengths(key=1), None),
    "a rule and a bias of -inf": (masks.causal(), np.array([[-INF, 0.0, 0.0]])),
}


@pytest.mark.parametrize("mask, bias", COMBINED.values(), ids=COMBINED)
def test_two_masks_can_leave_a_query_nothing_and_it_is_not_the_mean(mask, bias, means):
    """C06 microsoft/onnxruntime#28904 + onnx/onnx#8068"""
    out, stats = means([10, 20, 40], mask, bias, return_stats=True)
    assert_close(out, [0, 20, 30])
    assert_close(stats.lse, [-INF, 0, LN2])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_large_negative_bias_hides_nothing(dtype, means):
    """C06 microsoft/onnxruntime#28904 + onnx/onnx#8068"""
    bias = np.array([[-1e30, 0, 0]]).astype(jnp.dtype(dtype))
    out, stats = means([10, 20, 40], masks.causal(), bias, dtype=jnp.dtype(dtype), return_stats=True)
    assert_close(out, [10, 20, 30], dtype)
    np.testing.assert_allclose(stats.lse, [-1e30, 0, LN2], rtol=1e-2, atol=1e-6)


def test_a_row_with_no_visible_key_has_no_log_weights_and_no_gradient(run, engine):
    """C10 allenai/allennlp#890"""
    mask = np.array([[True, True], [False, False]])
    args = np.zeros((2, 1)), np.zeros((2, 1)), np.eye(2)

    def log_weights(x):
        _, stats = attend(*args, mask, x, return_stats=True, **engine)
        return jnp.stack([x[0, 0] - stats.lse[0], x[0, 1] - stats.lse[0], stats.lse[1]])

    f = run(lambda x: (log_weights(x), jax.jacrev(log_weights)(x)))
    reported = np.array([[0.3725, 0.5344], [0.3423, 0.3423]])
    np.testing.assert_allclose(f(reported)[0], [-0.77737, -0.61547, -INF], atol=1e-4)
    for x in (reported, np.array([[-800.0, 0], [NAN, INF]])):
        out, slopes = f(x)
        p = np.exp(x[0]) / np.exp(x[0]).sum()
        assert_close(out[2], -INF)
        assert_close(slopes[:, 0], [[1 - p[0], -p[1]], [-p[0], 1 - p[1]], [0, 0]])
        assert not np.asarray(slopes[:, 1]).any()


@pytest.mark.parametrize("T, S, expected", [(5, 2, [0, 0, 0, 1, 1.5]), (4, 3, [0, 1, 1.5, 2]), (3, 1, [0, 0, 1])])
def test_the_lse_of_a_row_that_sees_nothing_is_minus_inf(T, S, expected, means, means_of_heads):
    """C32 pytorch/pytorch#134650, flashinfer-ai/flashinfer#4452"""
    out, stats = means(range(1, S + 1), masks.causal(offset=S - T), T=T, return_stats=True)
    counts = np.maximum(np.arange(T) + 1 + S - T, 0)
    with np.errstate(divide="ignore"):
        lse = np.log(counts)
    assert_close(out, expected)
    assert_close(stats.lse, lse)
    assert_close(stats.max_logit, np.where(counts > 0, 0, -INF))
    _, stats = means_of_heads(np.ones((2, S, 1)), masks.causal(offset=S - T), T=T, N=3, return_stats=True)
    assert_close(stats.lse, np.broadcast_to(lse[:, None], (2, T, 3)))


@pytest.mark.parametrize("lengths, expected", [([0, 4], [0, 3.75]), ([3, 0, 1], [7 / 3, 0, 1]), ([0, 0], [0, 0])])
def test_a_sequence_of_length_0_gives_zeros_and_takes_no_gradient(lengths, expected, graded, engine):
    """C47 pytorch/pytorch#81077"""
    B, mask = len(lengths), masks.lengths(key=np.array(lengths))
    value = np.tile(column(1.0, 2, 4, 8)[:, None], (B, 1, 1, 1))
    zeros = np.zeros((B, 1, 1, 1)), np.zeros((B, 4, 1, 1))
    out, gradient = graded(lambda *x: attention(*x, mask, **engine))(*zeros, value)
    assert_close(out[:, 0, 0, 0], expected)
    seen = np.arange(4) < np.array(lengths)[:, None]
    assert_close(gradient[2][..., 0, 0], seen / np.maximum(seen.sum(1, keepdims=True), 1))
    for b, n in enumerate(lengths):
        assert all(np.isfinite(x[b]).all() and (n > 0 or not x[b].any()) for x in gradient)


RULES = {
    "no mask": lambda T, S: None,
    "an array": lambda T, S: np.ones((1, 1, T, S), bool),
    "causal": lambda T, S: masks.causal(),
    "a window": lambda T, S: masks.window(1, 0),
}
NOTHING = [
    *(pytest.param({"S": 0}, rule, id=f"no keys, {name}") for name, rule in RULES.items()),
    *(pytest.param({"T": 0}, rule, id=f"no queries, {name}") for name, rule in RULES.items()),
    pytest.param({"T": 0, "S": 0}, RULES["an array"], id="no queries and no keys, an array"),
    pytest.param({"B": 0}, RULES["no mask"], id="no batch, no mask"),
    pytest.param({"B": 0}, RULES["causal"], id="no batch, causal"),
    pytest.param({"D": 0}, RULES["no mask"], id="no value features, no mask"),
    pytest.param({"D": 0}, RULES["a window"], id="no value features, a window"),
]


@pytest.mark.parametrize("sizes, rule", NOTHING)
def test_an_axis_may_be_empty(sizes, rule, run, engine):
    """C92 Dao-AILab/flash-attention#2470, #2568; pytorch/pytorch#141218"""
    B, T, S, D = ({"B": 2, "T": 3, "S": 3, "D": 1} | sizes).values()
    args = np.ones((B, T, 2, 2)), np.ones((B, S, 1, 2)), np.ones((B, S, 1, D))

    @run
    def f(*args):
        out, pull, stats = jax.vjp(
            lambda *x: attention(*x, rule(T, S), return_stats=True, **engine), *args, has_aux=True
        )
        return out, stats, pull(jnp.ones_like(out))

    out, stats, gradient = f(*args)
    assert out.shape == (B, T, 2, D) and all(x.shape == (B, T, 2) for x in stats)
    assert [x.shape for x in gradient] == [x.shape for x in args]
    assert all(np.isfinite(x).all() for x in (out, *gradient))
    if S == 0:
        same_bits((out, *stats), [np.zeros_like(out), *(np.full((B, T, 2), x) for x in (-INF, -INF, 0))])
    if S == 0 or T == 0:
        assert not any(np.asarray(x).any() for x in gradient)


# What is hidden is not read


def test_a_mask_that_hides_nothing_is_no_mask(graded, engine):
    """C07 onnx/onnx#8068 (reference code part)"""
    args = normal(1, 3, 2), normal(2, 4, 2), normal(3, 4, 2)
    plain = graded(lambda *x: attend(*x, **engine))(*args)
    leaves_close(graded(lambda *x: attend(*x, np.ones((3, 4), bool), **engine))(*args), plain)
    args = normal(1, 2, 3, 4, 2), normal(2, 2, 5, 2, 2), normal(3, 2, 5, 2, 1)
    plain = graded(lambda *x: attention(*x, **engine))(*args)
    leaves_close(graded(lambda *x: attention(*x, np.ones((1, 1, 1, 1), bool), **engine))(*args), plain)


GARBAGE = [NAN, INF, -INF, 1e38]


@pytest.mark.parametrize("spoilt", [("key",), ("value",), ("key", "value")], ids=str)
def test_garbage_in_a_hidden_key_or_value_changes_nothing(spoilt, run, engine):
    """C23 pytorch/pytorch#101967"""
    x, mask = np.arange(8, dtype=np.float32).reshape(2, 4), np.array([[True, False]] * 2)

    @run
    def f(*args):
        out, pull = jax.vjp(lambda *x: attend(*x, mask, return_stats=True, **engine), *args)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    clean = f(x, x, x)
    (out, _), (_, dk, dv) = clean
    exactly(out, x[[0, 0]])
    assert not np.asarray(dk)[1].any() and not np.asarray(dv)[1].any()
    for bad in GARBAGE:
        key, value = x.copy(), x.copy()
        for name in spoilt:
            {"key": key, "value": value}[name][1] = bad
        same_bits(f(x, key, value), clean)


def test_garbage_in_another_document_changes_nothing(run, engine):
    """C23 pytorch/pytorch#101967"""
    ids = np.array([0, 0, 1, 1, 1])
    x = normal(1, 1, 5, 1, 3).astype(np.float16)

    @run
    def f(x):
        first = lambda x: attention(x, x, x, masks.segments(ids), **engine)[:, :2].sum()  # noqa: E731
        out, gradient = jax.value_and_grad(first)(x)
        # The other document sees itself, and shows it.
        return out, gradient[:, :2]

    clean = f(x)
    assert np.isfinite(clean[1]).all() and np.asarray(clean[1]).all()
    for bad in GARBAGE[:3]:
        spoilt = x.copy()
        spoilt[:, 2:] = bad
        same_bits(f(spoilt), clean)


def test_a_huge_hidden_logit_leaves_gradients_finite(run, engine):
    """C25 jax-ml/jax#17117"""
    mask, one = np.array([[True, True, False]]), np.ones((1, 1))

    # A weight, and the sum of the logarithms of both.
    def f(key):
        out, stats = attend(one, key, np.eye(3), mask, return_stats=True, **engine)
        return jnp.stack([out[0, 0], key[:2].sum() - 2 * stats.lse[0]])

    g = run(lambda key: (f(key), jax.jacrev(f)(key), jax.jacfwd(f)(key)))
    for hidden in (100, 1e30, 1e300, INF, -INF, NAN):
        out, *slopes = g(column(1, 1, hidden))
        assert_close(out, [0.5, -2 * LN2])
        for slope in slopes:
            exactly(slope[..., 0], [[0.25, -0.25, 0], [0, 0, 0]])


@pytest.mark.parametrize("mask", [[False, True, True], [True, True, False, False, True], [False, True]], ids=str)
def test_a_zero_tangent_and_one_of_a_hidden_key_come_out_as_zero(mask, run, engine):
    """C27 google-deepmind/optax#1762"""
    mask = np.array([mask])
    S = mask.size

    def f(key):
        out, stats = attend(np.ones((1, 1)), key, np.eye(S), mask, return_stats=True, **engine)
        return jnp.concatenate([out[0], *stats])

    key, hidden = np.zeros((S, 1)), ~mask.T * 3.0
    push = run(lambda tangent: jax.jvp(f, (key,), (tangent,)))
    for tangent in (np.zeros((S, 1)), hidden):
        out, pushed = push(tangent)
        assert np.isfinite(out).all()
        exactly(pushed, np.zeros(S + 3))
    forward, reverse = jax.jit(lambda key: (jax.jacfwd(f)(key), jax.jacrev(f)(key)))(key)
    assert_close(forward, reverse)
    assert np.asarray(forward)[:, mask[0]].any() and not np.asarray(forward)[:, ~mask[0]].any()


# Logits at the ends of the range


# dtype, logits, hidden keys in front of them, weights, lse
LOW = {
    "below -5e4": (np.float32, [-100000, -99999, -99998], 0, [0.09003, 0.24473, 0.66524], -99997.5924),
    "and behind hidden keys": (np.float32, [-1e5, -99999, -99998], 17, [0.09003, 0.24473, 0.66524], -99997.5924),
    "-1e9": (np.float32, [-1e9, -1e9], 0, [0.5, 0.5], -1e9),
    "-1e30": (np.float32, [-1e30, -1e30], 0, [0.5, 0.5], -1e30),
    "-1e38, behind hidden keys": (np.float32, [-1e38, -1e38], 17, [0.5, 0.5], -1e38),
    "-1e38 in bfloat16, beside -3e38": (jnp.bfloat16, [-1e38, -3e38, -1e38], 0, [0.5, 0, 0.5], -1e38),
    "-1e300, behind hidden keys": (np.float64, [-1e300] * 3, 5, [1 / 3] * 3, -1e300),
    "-65504 in float16": (np.float16, [-65504, -65472], 0, [0, 1], -65472),
    "-12345": (np.float64, [-12345, -12346], 0, [0.731059, 0.268941], -12344.686738),
}


@pytest.mark.parametrize("dtype, logits, hidden, expected, lse", LOW.values(), ids=LOW)
def test_no_logit_is_so_low_that_it_counts_as_hidden(dtype, logits, hidden, expected, lse, weights_of):
    """C12 flashinfer-ai/flashinfer#4267, #4450"""
    mask = np.array([[False] * hidden + [True] * len(logits)])
    weights, stats = weights_of([0.0] * hidden + logits, mask if hidden else None, dtype=dtype)
    weights = np.asarray(weights, np.float64)
    np.testing.assert_allclose(weights[hidden:], expected, atol=1e-5 + TOLERANCE[str(np.dtype(dtype))])
    assert not weights[:hidden].any()
    np.testing.assert_allclose(stats.lse, lse, atol=0.01, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6)


NARROW = {
    "causal": (masks.causal(), [1, 1.5, 7 / 3]),
    "causal without the first key": (masks.causal() & NO_FIRST_KEY, [0, 2, 3]),
    "all": (np.ones((3, 3), bool), [7 / 3] * 3),
    "a window": (masks.window(0, 1), [1.5, 3, 4]),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mask, expected", NARROW.values(), ids=NARROW)
def test_half_precision_takes_any_mask(mask, expected, dtype, means):
    """C14 google/flax#982 (#1527)"""
    out = means([1, 2, 4], mask, dtype=jnp.dtype(dtype))
    assert out.dtype == dtype
    assert_close(out, expected, dtype)


@pytest.mark.parametrize(
    "dtype, bias_dtype",
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float16")],
)
def test_the_lowest_finite_bias_weighs_next_to_nothing_and_twice_it_hides(dtype, bias_dtype, run, engine):
    """C15 huggingface/transformers#27114, NVIDIA-NeMo/Automodel#2658"""
    dtype, bias_dtype = jnp.dtype(dtype), jnp.dtype(bias_dtype)
    args = normal(1, 5, 4, dtype=dtype), normal(2, 5, 4, dtype=dtype), np.eye(5, dtype=dtype)
    low = np.where(np.arange(5) < 3, jnp.finfo(bias_dtype).min, 0).astype(bias_dtype)[None, :]
    f = run(lambda *x: attend(*x[:3], masks.causal(), x[3], **engine))
    weights = np.asarray(f(*args, low), np.float64)
    assert_close(weights.sum(1), np.ones(5), dtype)
    exactly(weights[[0, 3]], np.eye(5)[[0, 3]])
    assert (weights[4, :3] < 1e-6).all()
    with np.errstate(over="ignore"):
        hidden = np.asarray(f(*args, low + low), np.float64)
    assert not hidden[:3].any()
    assert_close(hidden[3:], weights[3:], dtype)


def test_a_visible_logit_that_overflows_to_minus_inf_weighs_0(weights_of):
    """C15 huggingface/transformers#27114, NVIDIA-NeMo/Automodel#2658"""
    low = np.float32(np.finfo(np.float32).min)
    weights, _ = weights_of([low, 0, 0], None, np.array([[low, low, 0]], np.float32), np.float32)
    exactly(weights, [0, 0, 1])
    weights, stats = weights_of([low, low], None, np.array([[low, low]], np.float32), np.float32)
    assert np.isnan(weights).all() and np.isnan(stats.lse)


# dtype, query and key, the last feature of the second key, scale, weights
PRODUCTS = {
    "float16, logits of 32768": ("float16", 64, 63.875, None, [0.73106, 0.26894]),
    "float16, logits of 80000": ("float16", 100, 99.875, None, [0.82671, 0.17329]),
    "bfloat16, logits of 32768": ("bfloat16", 64, 63.75, None, [0.88080, 0.11920]),
    "float16, a scale that is no power of two": ("float16", 200, 199.875, 0.03, [0.67918, 0.32082]),
    "bfloat16, products beyond float32": ("bfloat16", 1e19, 1e19, 2.0**-12, [0.5, 0.5]),
}


@pytest.mark.parametrize("dtype, x, last, scale, expected", PRODUCTS.values(), ids=PRODUCTS)
def test_half_precision_products_are_scaled_before_they_overflow(dtype, x, last, scale, expected, graded, engine):
    """C17 pytorch/pytorch#119131, ultralytics/ultralytics#24990, philipturner/metal-flash-attention#8"""
    dtype = jnp.dtype(dtype)
    query, key = np.full((1, 64), x).astype(dtype), np.full((2, 64), x).astype(dtype)
    key[1, -1] = last
    first = graded(lambda *x: attend(*x, scale=scale, **engine)[:, 0])
    weight, (dq, dk, dv) = first(query, key, np.eye(2, dtype=dtype))
    assert_close(weight, expected[:1], dtype)
    slope = (scale or 1 / 8) * np.prod(expected)
    q, k = query.astype(np.float64), key.astype(np.float64)
    assert_close(dq, slope * (k[:1] - k[1:]), dtype)
    assert_close(dk, np.concatenate([slope * q, -slope * q]), dtype)
    assert_close(dv[:, 0], expected, dtype)


FUSED = {
    "the default scale": {},
    "a scale": {"scale": 0.3},
    "a softcap": {"softcap": 3e21},
    "a bias": {"bias": normal(3, 1, 3, dtype=np.float32)},
    "a mask and a scale": {"mask": np.array([[True, True, True]]), "scale": 0.3},
    "everything": {"softcap": 7e20, "bias": normal(3, 1, 3, dtype=np.float32), "scale": 0.7, "sink": -3.0},
}


@pytest.mark.parametrize("options", FUSED.values(), ids=FUSED)
def test_logits_beyond_2_to_the_31_give_under_jit_what_they_give_without(options, run, engine):
    """C19 jax-ml/jax#37234, #38609; openxla/xla#44738; pytorch/pytorch#100775; SlopDotCash/asi#2886"""
    bias = options.get("bias")
    scalars = {name: np.float32(options[name]) for name in ("scale", "softcap", "sink") if name in options}

    def f(query, key, value, scalars):
        return attend(query, key, value, options.get("mask"), bias, return_stats=True, **scalars, **engine)

    @run
    def values_and_gradients(*args):
        out, pull, stats = jax.vjp(lambda *x: f(*x, scalars), *args, has_aux=True)
        return out, stats, pull(jnp.array([[3.0, -1.0, 2.0]], np.float32))

    # There the compiler knew the scalars. Here it does not.
    values = run(f)
    for c in (1e5, 3.3e7, 1e10):
        query = np.full((1, 3), c, np.float32)
        key = (query * np.array([[1.0], [0.9], [0.5]], np.float32)).astype(np.float32)
        value = np.eye(3, dtype=np.float32)
        out, stats, (dq, dk, dv) = values_and_gradients(query, key, value)
        exactly(out, [[1, 0, 0]])
        # Under jit they may differ by an ulp, where XLA fuses a softcap's product with what it is added to.
        assert_close(stats.lse, stats.max_logit, "float32")
        assert_close(stats.entropy, [0], "float32")
        assert not np.asarray(dq).any() and not np.asarray(dk).any()
        exactly(dv, [[3, -1, 2], [0, 0, 0], [0, 0, 0]])
        again, more = values(query, key, value, scalars)
        exactly(again, out)
        assert_close(more.lse, stats.lse, "float32")


MILDER = {
    "scale 1": (1.0, [1e6, 999999], {}),
    "scale 0.1": (10.0, [1e6, 999999], {"scale": 0.1}),
    "a bias": (1.0, [1e6, 1e6], {"bias": np.array([[0.0, -1.0]], np.float32)}),
    "a sink": (1.0, [1e6, 999999], {"sink": -1e6}),
}


@pytest.mark.parametrize("query, logits, options", MILDER.values(), ids=MILDER)
def test_logits_of_a_million_that_differ_by_1_weigh_as_they_should(query, logits, options, run, engine):
    """C19 jax-ml/jax#37234, #38609; openxla/xla#44738; pytorch/pytorch#100775; SlopDotCash/asi#2886"""
    f = run(lambda *x: attend(*x, **options, **engine))
    out = f(np.full((1, 1), query, np.float32), column(*logits, dtype=np.float32), np.eye(2, dtype=np.float32))
    np.testing.assert_allclose(out[0], [0.731059, 0.268941], atol=5e-2)


@pytest.mark.parametrize("T", [1, 5])
def test_a_large_product_of_one_feature_is_no_residual_below_its_peak(T, run, engine):
    """C19 jax-ml/jax#37234, #38609; openxla/xla#44738; pytorch/pytorch#100775; SlopDotCash/asi#2886"""
    # A product over one feature is no sum, and the compiler may fuse it with the subtraction of the peak.
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, T, 3, 1)), rng.normal(size=(2, 1, 3, 1))
    f = run(lambda *x: attention(*x, scale=0.3, return_stats=True, **engine))
    for c in (1.0, 1e12, 1e30):
        out, stats = f(query * c, key, np.ones((2, 1, 3, 2)))
        exactly(out, np.ones((2, T, 3, 2)))
        exactly(stats.entropy, np.zeros((2, T, 3)))
        exactly(stats.lse, stats.max_logit)


def test_a_hidden_inf_weighs_0_and_a_visible_one_makes_its_row_nan(weights_of, graded, run, engine):
    """C20 jax-ml/jax#21495, pytorch/pytorch#6864, FluxML/NNlib.jl#206"""
    mask, bias = np.array([[False, True, True]]), np.array([[INF, 0.0, 0.0]])
    weights, _ = weights_of([0, 0, 0], mask, bias)
    exactly(weights, [0, 0.5, 0.5])
    args = np.ones((1, 1)), np.zeros((3, 1)), np.eye(3), bias
    _, gradient = graded(lambda *x: attend(*x[:3], mask, x[3], **engine)[:, 1])(*args)
    assert all(np.isfinite(x).all() for x in gradient)
    assert_close(gradient[3], [[0, 0.25, -0.25]])
    for logits, source in (([0, 0, 0], bias), ([INF, 0, 0], None), ([0, 0, -1], bias[:, ::-1])):
        weights, stats = weights_of(logits, None, source)
        assert np.isnan(weights).all() and all(np.isnan(x) for x in stats)
    # One row's inf is no other row's.
    bias = np.array([[0.0, INF], [0.0, LN3]])
    out = run(lambda *x: attend(*x, None, bias, **engine))(np.zeros((2, 1)), np.zeros((2, 1)), np.eye(2))
    assert np.isnan(out[0]).all()
    assert_close(out[1], [0.25, 0.75])


def test_softmax_agrees_about_inf(run):
    """C20 jax-ml/jax#21495, pytorch/pytorch#6864, FluxML/NNlib.jl#206"""
    x, where = np.array([INF, 0.0, 0.0]), np.array([False, True, True])
    f = run(lambda x: (jattn.softmax(x, where=where), jax.grad(lambda x: jattn.softmax(x, where=where)[1])(x)))
    assert_close(f(x), [[0, 0.5, 0.5], [0, 0.25, -0.25]])
    assert np.isnan(run(jattn.softmax)(x)).all()


PEAKS = {"bfloat16": ("bfloat16", 8, 200), "float16": ("float16", 5, 37), "few keys": ("bfloat16", 3, 5)}


@pytest.mark.parametrize("dtype, T, S", PEAKS.values(), ids=PEAKS)
def test_logits_of_thousands_have_the_same_peak_forward_and_backward(dtype, T, S, graded, engine):
    """C22 marin-community/marin#8217 (review thread)"""
    dtype = jnp.dtype(dtype)
    key = (30 * normal(1, S, 16)).astype(dtype)
    query, value = key[:T], np.ones((S, 2), dtype)
    exact = reference.attend(query, key, value)
    assert (exact.max_logit > 1e3).all() and (exact.max_logit < 1e4).all()
    out, (dq, dk, dv) = graded(lambda *x: attend(*x, **engine))(query, key, value)
    exactly(out, np.ones((T, 2)))
    np.testing.assert_allclose(np.asarray(dv, np.float64).sum(0), [T, T], rtol=1e-2)
    size = np.abs(np.asarray(key, np.float64)).max()
    assert np.abs(np.asarray(dq, np.float64)).max() < 1e-2 * size
    assert np.abs(np.asarray(dk, np.float64)).max() < 1e-2 * size
    assert_close(dv, np.tile(exact.weights.sum(0)[:, None], 2), dtype)


NO_MASK, CAUSAL = None, masks.causal()


@pytest.mark.parametrize(
    "S, mask",
    [(1, CAUSAL), (64, NO_MASK), (100, np.ones((100, 100), bool)), (100, CAUSAL), (192, CAUSAL), (704, NO_MASK)],
    ids=["1, causal", "64", "100, an array", "100, causal", "192, causal", "704"],
)
def test_equal_logits_far_from_0_weigh_the_same_forward_and_backward(S, mask, run, engine):
    """C64 pytorch/pytorch#196678, huggingface/trl#7181"""
    query, key = np.zeros((S, 64), np.float32), np.zeros((S, 64), np.float32)
    query[:, 0] = 1
    value = normal(S, S, 3, dtype=np.float32)
    weights = np.tri(S) / (1 + np.arange(S)[:, None]) if mask is CAUSAL else np.full((S, S), 1 / S)

    @run
    def f(*args):
        out, pull, stats = jax.vjp(lambda *x: attend(*x, mask, return_stats=True, **engine), *args, has_aux=True)
        return out, stats.lse, pull(jnp.ones_like(out))

    for logit in (-120.0, 120.0, -1e4):
        key[:, 0] = 8 * logit
        out, lse, (dq, dk, dv) = f(query, key, value)
        assert_close(out, weights @ value, "float32")
        np.testing.assert_allclose(lse, logit + np.log((weights > 0).sum(1)), rtol=1e-6)
        # Equal keys: whatever the weights, moving the query changes nothing.
        np.testing.assert_allclose(dq, np.zeros((S, 64)), atol=1e-5 * abs(logit))
        assert np.isfinite(dk).all()
        assert_close(dv, np.tile(weights.sum(0)[:, None], 3), "float32", factor=3)


# Statistics and weights


ENTROPIES = {
    "one of three keys is hidden": ([0, 0, 5], [True, True, False], None, np.float64, LN2),
    "one of two": ([0, 0], [True, False], None, np.float64, 0),
    "a weight that underflows": ([65504, -65504], None, None, np.float16, 0),
    "a bias of -inf": ([0, 0], None, [[0, -INF]], np.float64, 0),
    "a sequence of nothing": ([0, 0], [False, False], None, np.float64, 0),
    "weights of 0 beside equal ones": ([0, -1e4, 0, 0, -800], None, None, np.float32, LN3),
    "half precision": ([2, 2, -300, 2, 2], None, None, jnp.bfloat16, LN4),
}


@pytest.mark.parametrize("logits, mask, bias, dtype, expected", ENTROPIES.values(), ids=ENTROPIES)
def test_a_weight_of_0_adds_nothing_to_the_entropy(logits, mask, bias, dtype, expected, weights_of):
    """C29 pytorch/pytorch#40553, tensorflow/probability#241, huggingface/trl#7221, pyro-ppl/numpyro#2276"""
    mask, bias = (None if x is None else np.array(x).reshape(1, -1) for x in (mask, bias))
    _, stats = weights_of(logits, mask, bias, dtype)
    assert_close(stats.entropy, expected, "float32" if dtype != np.float64 else dtype)


# logits, the last of them hidden; entropy; gradient
FOCUS = [
    ([0, LN3, 7], 0.562335, [0.205990, -0.205990, 0]),
    ([0, 0, 5], LN2, [0, 0, 0]),
    ([1, 1 + LN3, NAN], 0.562335, [0.205990, -0.205990, 0]),
    ([0, -800, 3], 0, [0, 0, 0]),
]


def test_the_entropy_of_a_row_with_a_hidden_key_has_a_finite_gradient(graded, engine):
    """C30 huggingface/trl#7252 (review) + jax-ml/jax#17070"""
    mask, one = np.array([[True, True, False]]), np.ones((1, 1))

    def by_statistics(key):
        return attend(one, key, np.eye(3), mask, return_stats=True, **engine)[1].entropy

    def by_weights(key):
        weights = attention_weights(one[:, None], key[:, None], mask[None])
        return jattn.entropy(weights / weights.sum(-1, keepdims=True))

    for f in map(graded, (by_statistics, by_weights)):
        for logits, entropy, slope in FOCUS:
            out, (dk,) = f(column(*logits))
            np.testing.assert_allclose(np.ravel(out), [entropy], atol=1e-6)
            np.testing.assert_allclose(dk[:, 0], slope, atol=1e-6)


def test_lse_is_in_nats_and_has_everything_in_it(weights_of, means_of_heads):
    """C33 pytorch/pytorch#181645, flashinfer#2114, meta-pytorch/attention-gym#37"""
    for logits, dtype, wide in (
        ([0, 0, 0, 0], np.float64, "float64"),
        ([0, LN3], np.float64, "float64"),
        ([0, LN3], jnp.bfloat16, "float32"),
        ([0, 0, 0, 0], np.float16, "float32"),
    ):
        _, stats = weights_of(logits, dtype=dtype)
        assert stats.lse.dtype == wide
        np.testing.assert_allclose(stats.lse, 1.386294, atol=1e-6 if dtype == np.float64 else 5e-3)
    _, stats = weights_of([0, 2 * LN3], scale=0.5)
    assert_close(stats.lse, LN4)
    _, stats = weights_of([0, LN3], None, np.array([[1.0, 1.0]]))
    assert_close(stats.lse, LN4 + 1)
    _, stats = weights_of([10, 0], softcap=5.0)
    assert_close(stats.lse, np.log(np.exp(5 * np.tanh(2)) + 1))
    _, stats = weights_of([0, LN3], sink=LN4)
    assert_close(stats.lse, np.log(8))
    _, stats = means_of_heads(np.ones((2, 4, 1)), T=3, N=2, return_stats=True)
    assert_close(stats.lse, np.full((2, 3, 2), LN4))


def test_gradients_flow_through_every_statistic(run, engine):
    """C34 Dao-AILab/flash-attention#141, #889, #1137; SHI-Labs/NATTEN#299"""

    def f(*args):
        out, stats = attend(*args, return_stats=True, **engine)
        return jnp.concatenate([out[:, 0], *stats, out[:, 0] + 2 * stats.lse])

    # out, lse, max_logit, entropy, out + 2 lse, by hand. The weights are 1/4 and 3/4.
    values = [8, LN4, LN3, LN4 - 0.75 * LN3, 8 + 2 * LN4]
    slopes = (
        [[0.75 * LN3], [0.75 * LN3], [LN3], [-0.1875 * LN3**2], [2.25 * LN3]],
        [[-0.75, 0.75], [0.25, 0.75], [0, 1], [0.1875 * LN3, -0.1875 * LN3], [-0.25, 2.25]],
        [[0.25, 0.75], [0, 0], [0, 0], [0, 0], [0.25, 0.75]],
    )
    jacobians = run(lambda *x: (f(*x), jax.jacrev(f, (0, 1, 2))(*x), jax.jacfwd(f, (0, 1, 2))(*x)))
    out, *both = jacobians(np.ones((1, 1)), column(0, LN3), column(5, 9))
    assert_close(out, values)
    for jacobian in both:
        for got, expected in zip(jacobian, slopes, strict=True):
            assert_close(got[..., 0], expected)


def test_weights_and_statistics_are_those_before_dropout(run, engine):
    """C36 pytorch/pytorch#27968, #33360; facebookresearch/fairseq#351"""
    one = np.ones((1, 1))
    f = lambda rng: attend(one, one, one, dropout_rate=0.1, dropout_rng=rng, return_stats=True, **engine)  # noqa: E731
    out, stats = run(jax.vmap(f))(jax.random.split(jax.random.key(0), 200))
    values, counts = np.unique(np.round(out, 6), return_counts=True)
    assert_close(values, [0, 1.111111])
    assert counts[0] < 50
    same_bits(stats, (np.ones((200, 1)), np.ones((200, 1)), np.zeros((200, 1))))
    exactly(attention_weights(one[:, None], one[:, None]), one[None])
    query, key, value = normal(1, 3, 2), normal(2, 5, 2), normal(3, 5, 1)
    options = dict(dropout_rng=jax.random.key(1), return_stats=True, **engine)
    f = run(lambda rate: attend(query, key, value, dropout_rate=rate, **options)[1])
    for before, after in zip(f(0.0), f(0.5), strict=True):
        assert_close(before, after)


# What is a mask and what is a bias


INTEGERS = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
PAIRS = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 0]])


def test_integers_are_refused_and_the_same_numbers_as_floats_are_not(run, engine):
    """C02 patrick-kidger/equinox#274"""
    f = lambda x, mask: run(lambda x: attend(x, x, x, mask, **engine))(x)  # noqa: E731
    for dtype in (np.int32, np.int64, np.uint8, np.bool_):
        with pytest.raises(TypeError, match=f"^attend: query must be floating, got {np.dtype(dtype)}"):
            f(INTEGERS.astype(dtype), PAIRS > 0)
    for dtype in (np.int32, np.uint8, np.float32):
        with pytest.raises(TypeError, match=f"^attend: mask must be boolean .*, got {np.dtype(dtype)}"):
            f(INTEGERS.astype(np.float64), PAIRS.astype(dtype))
    out = f(INTEGERS.astype(np.float64), PAIRS > 0)
    np.testing.assert_allclose(out, [[3.999908, 4.999908, 5.999908], [4, 5, 6], [0, 0, 0]], atol=1e-6)
    x = INTEGERS[:, None].astype(np.float64)
    weights = attention_weights(x, x, (PAIRS > 0)[None])[0]
    np.testing.assert_allclose(weights[0, :2], [3.0667e-5, 0.99996933], atol=1e-8)
    np.testing.assert_allclose(weights[1, 0], 5.21e-12, rtol=1e-2)


CONFUSED = {
    "a float mask": (dict(mask=np.array([[1.0, 0.0]])), "mask must be boolean .* float64.*bias"),
    "a float mask that is traced": (dict(mask=jnp.array([[1.0, 0.0]])), "mask must be boolean .* float64.*bias"),
    "an integer mask": (dict(mask=np.array([[1, 0]])), "mask must be boolean .* int64"),
    "a float mask with a bias": (dict(mask=np.zeros((1, 2)), bias=np.zeros((1, 2))), "mask must be boolean"),
    "a bool bias": (dict(bias=np.array([[True, False]])), "bias must be floating, got bool.*mask"),
    "an integer bias": (dict(bias=np.array([[0, -1]])), "bias must be floating, got int64"),
    "a mask rule for a bias": (dict(bias=masks.causal()), "bias must be a rule from jattn.biases"),
    "a bias rule for a mask": (dict(mask=biases.alibi(np.float64(1))), "mask must be a rule from jattn.masks"),
}


@pytest.mark.parametrize("sources, message", CONFUSED.values(), ids=CONFUSED)
def test_what_is_no_mask_or_no_bias_is_refused_by_name(sources, message, run, engine):
    """C38 pytorch/pytorch#103963, #21518; huggingface/diffusers#14342; transformers#41443"""
    query, key, value = np.zeros((1, 1)), np.zeros((2, 1)), column(0.0, 1.0)
    with pytest.raises(TypeError, match=f"^attend: {message}"):
        run(lambda *x: attend(*x, **sources, **engine))(query, key, value)
    many = {name: x[None, None] if hasattr(x, "shape") else x for name, x in sources.items()}
    with pytest.raises(TypeError, match=f"^attention: {message}"):
        run(lambda *x: attention(*x, **many, **engine))(*(x[None, :, None] for x in (query, key, value)))


def test_rules_refuse_what_is_no_mask_or_no_bias(run, means):
    """C38 pytorch/pytorch#103963, #21518; huggingface/diffusers#14342; transformers#41443"""
    with pytest.raises(TypeError, match="mask must be boolean"):
        masks.array(np.array([[1.0, 0.0]]))
    with pytest.raises(TypeError, match="bias must be floating"):
        biases.array(np.array([[True, False]]))
    with pytest.raises(TypeError, match="boolean"):
        means([0, 1], masks.rule(lambda q, k: (k <= q).astype(np.float32)))
    with pytest.raises(TypeError, match="float"):
        means([0, 1], None, biases.rule(lambda q, k: k <= q))
    assert_close(means([0, 1], np.array([[1.0, 0.0]]) != 0, T=1), [0])


CONVENTION = {
    "a lower triangle": (np.tri(3, dtype=bool), [1, 1.5, 7 / 3]),
    "its complement": (~np.tri(3, dtype=bool), [3, 4, 0]),
    "causal": (masks.causal(), [1, 1.5, 7 / 3]),
    "not causal": (~masks.causal(), [3, 4, 0]),
    "two real keys": (masks.lengths(key=2), [1.5] * 3),
    "not the two real keys": (~masks.lengths(key=2), [4] * 3),
    "segments": (masks.segments(np.array([0, 1, 0])), [2.5, 2, 2.5]),
    "a rule": (masks.rule(lambda q, k: k == 2), [4] * 3),
}


@pytest.mark.parametrize("mask, expected", CONVENTION.values(), ids=CONVENTION)
def test_true_means_may_attend(mask, expected, means):
    """C39 pytorch/pytorch#170415, rasbt/LLMs-from-scratch#1061, NVIDIA/TransformerEngine#614,
    InseeFrLab/torchTextClassifiers#92"""
    assert_close(means([1, 2, 4], mask), expected)


def test_a_hidden_key_is_not_one_with_a_logit_of_0(weights_of, run):
    """C41 georg-wolflein/good-features#1"""
    logits, mask = [0.43, -0.21, 0.99, 0.32, -0.35, 0.04], np.arange(6)[None] < 3
    expected = [0.305067, 0.160860, 0.534073, 0, 0, 0]
    one, key = np.ones((1, 1)), column(*logits)
    for weights in (
        weights_of(logits, mask)[0],
        weights_of([0] * 6, mask, np.array([logits]))[0],
        run(lambda q, k: attention_weights(q[:, None], k[:, None], mask[None]))(one, key)[0, 0],
        run(lambda x: jattn.softmax(x, where=mask[0]))(np.array(logits)),
    ):
        np.testing.assert_allclose(weights, expected, atol=1e-6)
        assert not np.asarray(weights)[3:].any()
    exactly(weights_of([-2, -3], np.array([[True, False]]))[0], [1, 0])


PADDING = np.array([[True, True, False], [True, False, False]])
PADDING_FORMS = {
    "an array of full rank": PADDING[:, None, None, :],
    "lengths": masks.lengths(key=np.array([2, 1])),
    "the same for every query": np.broadcast_to(PADDING[:, None, None, :], (2, 1, 2, 3)),
}


@pytest.mark.parametrize("mask", PADDING_FORMS.values(), ids=PADDING_FORMS)
def test_a_padding_mask_of_full_rank_is_one(mask, means_of_heads):
    """C42 idiap/fast-transformers#101, keras-team/keras#21483, huggingface/candle#1920"""
    out = means_of_heads(np.tile(column(2, 4, 60), (2, 1, 1)), mask, T=2)
    assert_close(out[..., 0], [[3, 3], [2, 2]])


@pytest.mark.parametrize(
    "B, T, S, shape", [(2, 2, 3, (2, 3)), (2, 2, 2, (2, 2)), (3, 1, 5, (3, 5)), (2, 2, 2, (2, 2, 2))]
)
def test_a_mask_of_another_rank_is_refused_with_what_to_write(B, T, S, shape, run, engine):
    """C42 idiap/fast-transformers#101, keras-team/keras#21483, huggingface/candle#1920"""
    args = np.zeros((B, T, 1, 1)), np.zeros((B, S, 1, 1)), np.ones((B, S, 1, 1))
    with pytest.raises(ValueError) as e:
        run(lambda *x: attention(*x, np.ones(shape, bool), **engine))(*args)
    message = str(e.value)
    assert message.startswith(f"attention: mask must be (*B, N, T, S) = ({B}, 1, {T}, {S}), got {shape}.")
    assert "mask[:, None, None, :]" in message


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 2, 4), (2, 3, 5), ()], ids=str)
def test_a_bias_of_another_rank_is_refused(shape, run, engine):
    """C42 idiap/fast-transformers#101, keras-team/keras#21483, huggingface/candle#1920"""
    args = np.zeros((2, 3, 2, 1)), np.zeros((2, 5, 2, 1)), np.ones((2, 5, 2, 1))
    with pytest.raises(ValueError, match="^attention: bias must be "):
        run(lambda *x: attention(*x, None, np.zeros(shape), **engine))(*args)


# One head: query (3, 8), key (5, 8), value (5, 2).
MISMATCHES = {
    "a longer value": (dict(value=(6, 2)), "value", "(6, 2)", "5"),
    "a shorter value": (dict(value=(4, 2)), "value", "(4, 2)", "5"),
    "fewer features in a key": (dict(key=(5, 7)), "key", "(5, 7)", "8"),
    "a narrower mask": (dict(mask=(3, 4)), "mask", "(3, 4)", "(3, 5)"),
    "a transposed mask": (dict(mask=(5, 3)), "mask", "(5, 3)", "(3, 5)"),
    "a narrower bias": (dict(bias=(1, 4)), "bias", "(1, 4)", "(3, 5)"),
    "a vector for a query": (dict(query=(8,)), "query", "(8,)", "(T, H)"),
    "a batch": (dict(query=(1, 3, 8)), "query", "(1, 3, 8)", "(T, H)"),
}


@pytest.mark.parametrize("shapes, what, got, must", MISMATCHES.values(), ids=MISMATCHES)
def test_lengths_that_disagree_are_refused_with_their_shapes(shapes, what, got, must, run, engine):
    """C44 pytorch/pytorch#193728, #64888"""
    shapes = dict(query=(3, 8), key=(5, 8), value=(5, 2)) | shapes
    args = {name: np.ones(shape, bool if name == "mask" else float) for name, shape in shapes.items()}
    with pytest.raises(ValueError) as e:
        run(lambda args: attend(**args, **engine))(args)
    message = str(e.value)
    assert message.startswith(f"attend: {what} must be ") and f", got {got}." in message and must in message


BATCHES = {
    "one query for four keys": (1, 4, 4),
    "four queries for one key": (4, 1, 1),
    "another batch of values": (4, 4, 1),
    "two and three": (2, 3, 3),
}


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_batches_that_disagree_are_refused(batches, run, engine):
    """C44 pytorch/pytorch#193728, #64888"""
    args = (np.ones((B, n, 1, 2)) for B, n in zip(batches, (3, 5, 5), strict=True))
    what = "value" if batches[0] == batches[1] else "key"
    with pytest.raises(ValueError, match=rf"^attention: {what} must be \(\*B, S, K, .\) = \({batches[0]}, 5, 1, "):
        run(lambda *x: attention(*x, **engine))(*args)


def test_a_bias_of_one_number_a_query_changes_no_weight(run, engine):
    """C44 pytorch/pytorch#193728, #64888"""
    args = normal(1, 3, 8), normal(2, 5, 8), normal(3, 5, 2)
    f = run(lambda bias: attend(*args, None, bias, return_stats=True, **engine))
    constant = normal(4, 3, 1)
    (out, stats), (plain, plain_stats) = f(constant), f(np.zeros((3, 1)))
    assert_close(out, plain, factor=10)
    assert_close(stats.lse, plain_stats.lse + constant[:, 0], factor=10)


# Several masks at once


@pytest.mark.parametrize(
    "T, S, offset, keys, expected",
    [
        (7, 7, 0, [0, 1, 1, 0, 0, 1, 0], [0, 2, 2.5, 2.5, 2.5, 11 / 3, 11 / 3]),
        (3, 5, 2, [0, 0, 0, 1, 1], [0, 4, 4.5]),
    ],
)
def test_causal_and_a_mask_of_keys_are_both_obeyed(T, S, offset, keys, expected, means):
    """C09 microsoft/onnxruntime#14363"""
    keys, value = np.array([keys]) > 0, range(1, S + 1)
    dense = reference.mask(T, S, causal=offset) & keys
    for mask in (masks.causal(offset) & keys, keys & masks.causal(offset), dense, masks.array(dense)):
        assert_close(means(value, mask, T=T), expected)
    assert_close(means(value, masks.causal(offset), np.where(keys, 0, -INF), T=T), expected)


FULL = normal(9, 8, 8) > -0.7
FULL[3] = False
SOURCES = {
    "causal": (masks.causal(), reference.mask(8, 8, causal=0)),
    "window": (masks.window(2, None), reference.mask(8, 8, window=(2, None))),
    "array": (FULL, FULL),
    "lengths": (masks.lengths(key=6), reference.mask(8, 8, key_length=6)),
    "segments": (
        masks.segments(np.arange(8) // 4),
        reference.mask(8, 8, query_ids=np.arange(8) // 4),
    ),
}
SUBSETS = list(itertools.chain(*(itertools.combinations(SOURCES, n) for n in range(len(SOURCES) + 1))))


@functools.cache
def _of_one_array(engine):
    return jax.jit(lambda mask, *args: _gradient(mask, dict(engine), *args))


def _gradient(mask, engine, *args):
    return jax.grad(lambda *x: (attend(*x[:3], mask, x[3], **engine) ** 2).sum(), (0, 1, 2, 3))(*args)


@pytest.mark.parametrize("chosen", SUBSETS, ids=" & ".join)
def test_no_mask_source_is_dropped_for_another(chosen, engine):
    """C45 keras#23040/#22910 review, xformers#103, jax-ml/jax#32300 (#32357), enpasos/jax2onnx#217, maxtext#878"""
    args = normal(1, 8, 2), normal(2, 8, 2), normal(3, 8, 1), normal(4, 8, 8)
    rules, arrays = zip((None, np.ones((8, 8), bool)), *(SOURCES[name] for name in chosen), strict=True)
    mask = functools.reduce(lambda a, b: a & b, rules[1:]) if chosen else None
    dense = np.logical_and.reduce(arrays)
    # Compiling 32 programs takes its time, and their gradients far longer.
    run = jax.jit if len(chosen) % 2 else lambda f: f
    exact = reference.attend(*args[:3], dense, args[3]).out
    assert_close(run(lambda *x: attend(*x[:3], mask, x[3], **engine))(*args), exact, factor=10)
    if len(chosen) in (2, 3):
        return
    gradient = jax.jit(lambda *x: _gradient(mask, engine, *x))(*args)
    leaves_close(gradient, _of_one_array(tuple(engine.items()))(dense, *args))
    dq, dk, dv, db = map(np.asarray, gradient)
    assert not db[~dense].any() and not dq[~dense.any(1)].any()
    assert not dk[~dense.any(0)].any() and not dv[~dense.any(0)].any()


PACKED = np.array([1, 1, 2, 2, 0, 0])
PACKS = {
    "0 is padding": (PACKED, 0, [2, 2, 7, 7, 0, 0]),
    "-1 is padding": (PACKED - (PACKED == 0), -1, [2, 2, 7, 7, 0, 0]),
    "0 is a segment like any other": (PACKED, None, [2, 2, 7, 7, 150, 150]),
    "-1 is a segment like any other": (PACKED - (PACKED == 0), None, [2, 2, 7, 7, 150, 150]),
    "padding in front": (np.array([0, 5, 5, 5, 7, 7]), 0, [0, 17 / 3, 17 / 3, 17 / 3, 150, 150]),
}


@pytest.mark.parametrize("ids, padding, expected", PACKS.values(), ids=PACKS)
def test_padding_that_is_declared_sees_nothing_and_is_seen_by_nothing(ids, padding, expected, means):
    """C48 AI-Hypercomputer/maxtext#4908 (review)"""
    value = np.array([1.0, 3, 5, 9, 100, 200])
    out, stats = means(value, masks.segments(ids, padding=padding), return_stats=True)
    assert_close(out, expected)
    seen = reference.mask(6, 6, query_ids=ids, padding=padding)
    np.testing.assert_array_equal(np.isneginf(stats.lse), ~seen.any(1))
    if padding is not None:
        # A row of padding is empty whatever it holds, and no other row reads it.
        value[ids == padding] = NAN
        exactly(means(value, masks.segments(ids, padding=padding)), out)


# Positions


ALIGNED = {
    "top left, T < S": (2, [1, 2, 4, 8, 16], masks.causal(), [1, 1.5]),
    "top left, T > S": (5, [1, 2], masks.causal(), [1, 1.5, 1.5, 1.5, 1.5]),
    "bottom right, T < S": (2, [1, 2, 4, 8, 16], masks.causal(offset=3), [3.75, 6.2]),
    "bottom right, T > S": (5, [1, 2], masks.causal(offset=-3), [0, 0, 0, 1, 1.5]),
    "bottom right, an array for an offset": (5, [1, 2], masks.causal(np.int32(-3)), [0, 0, 0, 1, 1.5]),
    "one later": (3, [1, 2, 4], masks.causal(1), [1.5, 7 / 3, 7 / 3]),
}


@pytest.mark.parametrize("T, value, mask, expected", ALIGNED.values(), ids=ALIGNED)
def test_causal_is_top_left_and_an_offset_moves_it(T, value, mask, expected, means):
    """C50 Dao-AILab/flash-attention#282, #517, #1778; ml-explore/mlx#2835; pytorch/pytorch#103082;
    NVIDIA/cutlass#2336"""
    assert_close(means(value, mask, T=T), expected)


def test_decoding_one_token_at_a_time_is_the_full_causal_forward(means, run, engine):
    """C51 google/flax#5591 (PR #5592)"""
    written = [1.0, 2, 4, 8]
    full = [1, 1.5, 7 / 3, 3.75]
    assert_close(means(written, masks.causal()), full)

    @run
    def step(value, position):
        options = dict(query_positions=position, **engine)
        return attend(np.zeros((1, 1)), np.zeros((4, 1)), value, masks.causal(), **options)[0, 0]

    for i in range(4):
        value = np.where(np.arange(4) <= i, written, NAN)  # what has not been written yet
        assert_close(step(value[:, None], np.array([i])), full[i])
        assert_close(means(value, masks.causal(offset=np.int32(i)), T=1), full[i : i + 1])
        assert_close(means(value, masks.lengths(key=np.int32(i + 1)), T=1), full[i : i + 1])
    # Nothing is aligned silently: a query is at position 0 unless it says otherwise.
    assert_close(means(written, masks.causal(), T=1), [1])


def test_decoding_with_heads_features_and_a_batch_is_the_full_causal_forward(run, engine):
    """C51 google/flax#5591 (PR #5592)"""
    query, key, value = normal(1, 2, 5, 4, 3), normal(2, 2, 5, 2, 3), normal(3, 2, 5, 2, 2)
    full = attention(query, key, value, masks.causal(), **engine)
    step = run(
        lambda query, key, value, positions: attention(
            query, key, value, masks.causal(), query_positions=positions, **engine
        )
    )
    # The sequences of the batch are not at the same place.
    for i, j in zip(range(5), (3, 0, 4, 1, 2), strict=True):
        key_now, value_now = key.copy(), value.copy()
        for b, n in enumerate((i, j)):
            key_now[b, n + 1 :] = value_now[b, n + 1 :] = NAN
        out = step(np.stack([query[0, [i]], query[1, [j]]]), key_now, value_now, np.array([[i], [j]]))
        assert_close(out[:, 0], np.stack([full[0, i], full[1, j]]), factor=10)


@functools.partial(jax.jit, static_argnames="method")
def means_of_a_cache(value, cache, new_lengths=None, *, method):
    """The mean of the values (T,) that each new token sees, and the cache with them."""
    x = np.zeros((len(value), 1, 1), value.dtype)
    mask = masks.window(cache.capacity, 0) if cache.rolling else masks.causal()
    out, cache = cached_attention(x, x, value[:, None, None], cache, mask, new_lengths=new_lengths, method=method)
    return out[:, 0, 0], cache


def appended(method, cache, value, sizes):
    """Those means, `value` in chunks of these sizes; and the cache at the end."""
    found = []
    for chunk in np.split(value, np.cumsum(sizes)[:-1]):
        out, cache = means_of_a_cache(chunk, cache, method=method)
        found.append(out)
    return np.concatenate(found), cache


METHODS = pytest.mark.parametrize("method", ["dense", "blockwise"])


@METHODS
@pytest.mark.parametrize("rolling", [False, True])
def test_decoding_with_a_cache_is_the_full_causal_forward(method, rolling):
    """C51 google/flax#5591 (PR #5592)"""
    written, full = np.array([1.0, 2, 4, 8]), [1, 1.5, 7 / 3, 3.75]
    cache = Cache.create(4, 1, 1, dtype=np.float64, rolling=rolling)
    # What has not been written is read by nobody.
    cache = cache._replace(key=cache.key + NAN, value=cache.value + NAN)
    for sizes in ([1, 1, 1, 1], [3, 1], [4]):
        assert_close(appended(method, cache, written, sizes)[0], full)


@METHODS
@pytest.mark.parametrize("rolling", [False, True])
def test_tokens_appended_to_a_cache_see_all_of_it(method, rolling):
    """C53 gittensor-ai-lab/sparkinfer#3, onnx/onnx#7297, jingyaogong/minimind#631"""
    value = 2.0 ** np.arange(5)
    for sizes in ([3, 2], [3, 1, 1], [2, 3]):
        cache = Cache.create(8, 1, 1, dtype=np.float64, rolling=rolling)
        assert_close(appended(method, cache, value, sizes)[0], [1, 1.5, 7 / 3, 3.75, 6.2])


@METHODS
def test_writing_past_the_capacity_changes_nothing_and_shows(method):
    """C54 karpathy/nanochat#627; google/flax#3571"""
    for sizes in ([3, 2], [4, 1], [1, 1, 3]):
        *before, last = sizes
        value = 2.0 ** np.arange(sum(sizes))
        _, cache = appended(method, Cache.create(4, 1, 1, dtype=np.float64), value[:-last], before)
        # The length is traced: it is not known that there is no room.
        out, after = means_of_a_cache(value[-last:], cache, method=method)
        assert np.isnan(out).all()
        np.testing.assert_array_equal(after.value, cache.value)
        assert np.isnan(means_of_a_cache(value[:1], after, method=method)[0]).all()
        with pytest.raises(ValueError, match="must be at most capacity = 4, got 5. Make a larger cache"):
            x = np.zeros((last, 1, 1))
            cached_attention(x, x, x, cache)


@METHODS
def test_a_cache_may_count_its_tokens_in_integers_of_any_kind(method):
    """C54 karpathy/nanochat#627; google/flax#3571"""
    _, cache = appended(method, Cache.create(4, 1, 1), np.array([1, 2], np.float32), [2])
    for kind in (np.int8, np.int32, np.int64, np.uint32):
        new = np.array(1, kind)
        out, after = means_of_a_cache(np.array([4, 8], np.float32), cache, new, method=method)
        assert_close(out, [7 / 3, 0], "float32")
        assert after.lengths.dtype == np.int32 and after.lengths == 3


@pytest.mark.parametrize("past, tokens", [(3, 2), (0, 4), (2, 3)])
def test_tokens_appended_to_a_past_see_all_of_it(past, tokens, means):
    """C53 gittensor-ai-lab/sparkinfer#3, onnx/onnx#7297, jingyaogong/minimind#631"""
    S = past + tokens
    value = 2.0 ** np.arange(S)
    full = (2.0 ** (np.arange(S) + 1) - 1) / (np.arange(S) + 1)
    positions = past + np.arange(tokens)
    assert_close(means(value, masks.causal(), T=tokens, query_positions=positions), full[past:])
    assert_close(means(value, masks.causal(offset=past), T=tokens), full[past:])
    steps = [means(value, masks.causal(), T=1, query_positions=positions[[i]])[0] for i in range(tokens)]
    assert_close(steps, full[past:])


def test_positions_may_be_integers_of_any_kind(run, engine):
    """C54 karpathy/nanochat#627; google/flax#3571"""
    args = np.zeros((1, 1), np.float32), np.zeros((4, 1), np.float32), column(1, 2, 4, 8, dtype=np.float32)
    step = run(lambda p: attend(*args, masks.causal(), query_positions=jnp.reshape(p, (1,)), **engine)[0, 0])
    for kind in (int, np.int8, np.int32, np.int64, np.uint32):
        assert_close([step(kind(p)) for p in (0, 2)], [1, 7 / 3], "float32")
    for offset in (2, np.int32(2), jnp.int64(2)):
        out = run(lambda *x, offset=offset: attend(*x, masks.causal(offset), **engine))(*args)
        assert_close(out[0, 0], 7 / 3, "float32")


ODD = [(1, 1), (9, 9), (12, 12), (63, 65), (192, 192), (1001, 503), (1, 4092), (129, 1), (7, 131)]


@pytest.mark.parametrize("T, S", ODD)
def test_no_length_needs_to_divide_anything(T, S, run, engine):
    """C55 jax-ml/jax#27224, #23819; thu-ml/SageAttention#377; 66RING/tiny-flash-attention#12"""
    args = np.zeros((T, 1)), np.zeros((S, 1)), np.arange(S, dtype=np.float64)[:, None]

    @run
    def f(*args):
        plain, pull = jax.vjp(lambda *x: attend(*x, **engine), *args)
        return plain, pull(jnp.ones_like(plain)), attend(*args, masks.causal(), **engine)

    first = f(*args)
    plain, (dq, dk, dv), causal = first
    assert_close(plain[:, 0], np.full(T, (S - 1) / 2))
    assert_close(causal[:, 0], np.minimum(np.arange(T), S - 1) / 2)
    assert_close(dv[:, 0], np.full(S, T / S))
    assert not np.asarray(dq).any() and not np.asarray(dk).any()
    same_bits(f(*args), first)


WINDOWS = {
    "itself and one before": (masks.window(1, 0), [1, 1.5, 3, 6, 12]),
    "itself and two before": (masks.window(2, 0), [1, 1.5, 7 / 3, 14 / 3, 28 / 3]),
    "itself": (masks.window(0, 0), [1, 2, 4, 8, 16]),
    "causal, and one before": (masks.causal() & masks.window(1, None), [1, 1.5, 3, 6, 12]),
    "one on each side": (masks.window(1, 1), [1.5, 7 / 3, 14 / 3, 28 / 3, 12]),
    "two after": (masks.window(0, 2), [7 / 3, 14 / 3, 28 / 3, 12, 16]),
    "one before, from an array": (masks.window(np.int32(1), np.int32(0)), [1, 1.5, 3, 6, 12]),
}


@pytest.mark.parametrize("mask, expected", WINDOWS.values(), ids=WINDOWS)
def test_a_window_counts_the_keys_beside_the_query_itself(mask, expected, means):
    """C56 huggingface/transformers#39408, #29623; vllm#3385; microsoft/onnxruntime#25927; zml/zml#763"""
    assert_close(means([1, 2, 4, 8, 16], mask), expected)


def test_a_window_counts_positions_wherever_they_are_stored(means):
    """C56 huggingface/transformers#39408, #29623; vllm#3385; microsoft/onnxruntime#25927; zml/zml#763"""
    positions = dict(query_positions=np.array([7, 4]), key_positions=np.array([5, 9, 6, 7, 3]))
    assert_close(means([1, 2, 4, 8, 16], masks.window(1, 0), T=2, **positions), [6, 16])


ZEROS = {
    "(0, 0)": (0, 0, [1, 2, 4]),
    "(0, None)": (0, None, [7 / 3, 3, 4]),
    "(None, 0)": (None, 0, [1, 1.5, 7 / 3]),
    "(None, None)": (None, None, [7 / 3] * 3),
    "zeros in arrays": (np.int32(0), np.int32(0), [1, 2, 4]),
}


@pytest.mark.parametrize("left, right, expected", ZEROS.values(), ids=ZEROS)
def test_a_window_of_0_is_a_size_and_none_is_no_bound(left, right, expected, means):
    """C58 Dao-AILab/flash-attention#2574, onnx/onnx#8006 (review), FA#2251"""
    assert_close(means([1, 2, 4], masks.window(left, right)), expected)


def test_zero_is_a_number_wherever_it_has_a_meaning(means, weights_of):
    """C58 Dao-AILab/flash-attention#2574, onnx/onnx#8006 (review), FA#2251"""
    for left, right in ((-1, 0), (0, -1), (-1, -1), (None, -2), (np.int32(-1), 0)):
        with pytest.raises(ValueError, match="masks.window: (left|right) must be >= 0, got -"):
            masks.window(left, right)
    weights, stats = weights_of([5, 0, -3], scale=0.0)
    assert_close(weights, [1 / 3] * 3)
    assert_close(stats.lse, LN3)
    assert_close(means([1, 2, 4], masks.lengths(key=0)), [0, 0, 0])
    assert_close(means([1, 2, 4], masks.prefix(0)), [0, 0, 0])
    assert_close(weights_of([5, 0], sink=0.0, scale=0.0)[0], [1 / 3] * 2)


@pytest.mark.parametrize("told", ["a row of the array", "alibi", "a table"])
def test_a_bias_of_positions_is_the_same_when_decoding(told, run, engine):
    """C60 keras-team/keras-hub#2861 (#2862, #2977), huggingface/candle#899"""
    slopes, table = np.array([0.5, 0.125]), normal(5, 2, 7)
    query, key, value = normal(1, 1, 6, 2, 3), normal(2, 1, 6, 2, 3), normal(3, 1, 6, 2, 2)
    dense = {
        "a row of the array": [reference.alibi(6, 6, m) for m in slopes],
        "alibi": [reference.alibi(6, 6, m) for m in slopes],
        "a table": [reference.relative(6, 6, row) for row in table],
    }[told]
    dense = np.stack(dense)[None]
    exact = reference.attention(query, key, value, reference.mask(6, 6, causal=0), dense).out
    rules = {"alibi": biases.alibi(slopes), "a table": biases.relative(table)}
    assert_close(attention(query, key, value, masks.causal(), rules.get(told, dense), **engine), exact, factor=10)

    @run
    def step(query, row, position):
        bias = rules.get(told, row)
        return attention(query, key, value, masks.causal(), bias, query_positions=position, **engine)

    for t in range(6):
        out = step(query[:, [t]], dense[:, :, [t]], np.array([t]))
        assert_close(out, exact[:, [t]], factor=10)


def test_a_bias_of_one_number_a_head_says_nothing_about_positions(run, engine):
    """C60 keras-team/keras-hub#2861 (#2862, #2977), huggingface/candle#899"""
    args = normal(1, 1, 1, 2, 3), normal(2, 1, 6, 2, 3), normal(3, 1, 6, 2, 2)
    f = run(lambda bias: attention(*args, masks.causal(3), bias, **engine))
    assert_close(f(normal(4, 1, 2, 1, 1)), f(np.zeros((1, 2, 1, 1))), factor=10)


LONELY = {"one": [700], "the first": [0], "the last": [999], "two": [3, 700]}


def test_keys_far_apart_or_alone_are_all_that_is_seen(run, engine):
    """C62 Dao-AILab/flash-attention#1930, pytorch/pytorch#127055 (#130014), flashinfer#4451"""
    query, key, value = normal(1, 3, 4), normal(2, 1000, 4), normal(3, 1000, 2)
    cotangent = normal(4, 3, 2)

    @run
    def f(mask):
        g = functools.partial(attend, mask=mask, return_stats=True, **engine)
        out, pull, stats = jax.vjp(g, query, key, value, has_aux=True)
        return out, stats, pull(cotangent)

    for seen in LONELY.values():
        mask = np.zeros((1, 1000), bool)
        mask[0, seen] = True
        out, stats, gradient = f(mask)
        dq, dk, dv = map(np.asarray, gradient)
        exact = reference.attend(query, key, value, mask)
        assert_close(out, exact.out)
        assert_close(stats.lse, exact.lse)
        assert_close(dv[seen], exact.weights[:, seen].T @ cotangent)
        assert not np.delete(dv, seen, 0).any() and not np.delete(dk, seen, 0).any()
        if len(seen) == 1:
            exactly(out, np.tile(value[seen], (3, 1)))
            assert_close(dq, np.zeros((3, 4)))
            assert_close(dk, np.zeros((1000, 4)))


# Scale, softcap, bias


def test_the_softcap_comes_before_the_mask_and_the_bias(weights_of):
    """C65 onnx/onnx#7865, Dao-AILab/flash-attention#1025"""
    hidden = np.array([[True, False]])
    exactly(weights_of([0, 0], hidden, softcap=1.0)[0], [1, 0])
    exactly(weights_of([0, 0], None, np.array([[0, -INF]]), softcap=1.0)[0], [1, 0])
    weights, stats = weights_of([10, 0], softcap=5.0)
    np.testing.assert_allclose(weights, [0.991999, 0.008001], atol=1e-6)
    np.testing.assert_allclose(stats.max_logit, 4.820138, atol=1e-6)
    _, stats = weights_of([10, 0], None, np.array([[3.0, 0.0]]), softcap=5.0)
    np.testing.assert_allclose(stats.max_logit, 7.820138, atol=1e-6)
    _, stats = weights_of([-20, -30], scale=0.5, softcap=5.0)
    np.testing.assert_allclose(stats.max_logit, -4.820138, atol=1e-6)


@pytest.mark.parametrize("softcap", [0, 0.0, -1.0, -0.0, NAN, INF, np.float32(0), jnp.float64(-2.0)])
def test_a_softcap_that_is_no_bound_is_refused(softcap, weights_of, run, engine):
    """C65 onnx/onnx#7865, Dao-AILab/flash-attention#1025"""
    with pytest.raises(ValueError, match="^attend: softcap must be finite and > 0, got .*None"):
        weights_of([1, 0], softcap=softcap)
    if run is jax.jit:  # where it is known only when the program runs, nothing looks like a result
        f = run(lambda softcap: attend(np.ones((2, 1)), np.ones((3, 1)), np.ones((3, 1)), softcap=softcap, **engine))
        assert np.isnan(f(softcap)).all()


@pytest.mark.parametrize("logit", [1e30, -1e30, 1e9])
def test_a_softcap_keeps_the_gradients_of_huge_logits_finite(logit, graded, engine):
    """C65 onnx/onnx#7865, Dao-AILab/flash-attention#1025"""
    args = np.ones((1, 1), np.float32), column(logit, logit, 0, dtype=np.float32), np.eye(3, dtype=np.float32)
    out, (dq, dk, _) = graded(lambda *x: attend(*x, softcap=50.0, **engine)[:, 2])(*args)
    weight = 1 / (1 + 2 * np.exp(50 * np.sign(logit)))
    assert_close(out, [weight], "float32")
    assert np.isfinite(dq).all() and np.isfinite(dk).all() and not dk[:2].any()
    assert_close(dk[2], [weight * (1 - weight)], "float32")


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"scale": 0.01}], ids=str)
def test_a_bias_is_added_after_the_scale(options, run, engine):
    """C67 tenstorrent/tt-metal#42891, #56406"""
    f = run(lambda *x: attend(*x, **options, **engine))
    zeros = np.zeros((1, 64)), np.zeros((2, 64))
    weights = f(*zeros, np.eye(2), None, np.array([[-10.0, 0.0]]))[0]
    np.testing.assert_allclose(weights, [4.5398e-5, 0.9999546], rtol=1e-4)
    weights = f(*zeros, np.eye(2), None, np.array([[0.0, LN3]]))[0]
    assert_close(weights, [0.25, 0.75])


BIAS_SHAPES = {
    (1, 1, 1, 2): [-3, 3],
    (1, 2, 2, 2): [-0.75, 0.75],
    (3, 1, 1, 2): [-1, 1],
    (3, 2, 2, 2): [-0.25, 0.25],
    (1, 1, 2, 1): [0],
    (1, 1, 1, 1): [0],
    (3, 1, 2, 2): [-0.5, 0.5],
}


@pytest.mark.parametrize("shape, expected", BIAS_SHAPES.items(), ids=str)
def test_the_gradient_of_a_bias_is_summed_over_what_it_is_spread_over(shape, expected, graded, engine):
    """C68 jax-ml/jax#27184, #30593; facebookresearch/xformers#636, #783"""
    zeros, value = np.zeros((3, 2, 2, 1)), np.tile(column(0.0, 1.0)[:, None], (3, 1, 2, 1))
    _, (gradient,) = graded(lambda bias: attention(zeros, zeros, value, None, bias, **engine))(np.zeros(shape))
    assert_close(gradient, np.broadcast_to(np.array(expected, float), shape))


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (1, 4, 1, 5), (2, 1, 3, 1), (1, 1, 3, 5)], ids=str)
def test_the_gradient_of_a_bias_is_right_with_a_mask_and_grouped_heads(shape, graded, engine):
    """C68 jax-ml/jax#27184, #30593; facebookresearch/xformers#636, #783"""
    args = normal(1, 2, 3, 4, 2), normal(2, 2, 5, 2, 2), normal(3, 2, 5, 2, 1)
    mask, bias = np.broadcast_to(normal(4, 1, 1, 3, 5) > -0.5, (1, 1, 3, 5)).copy(), normal(5, *shape)
    mask[..., 1] = False
    mask[:, :, 2] = False
    _, gradient = graded(lambda *x: attention(*x[:3], mask, x[3], **engine) ** 2)(*args, bias)
    assert_slope(gradient, lambda *x: reference.attention(*x[:3], mask, x[3]).out ** 2, (*args, bias))
    hidden = np.broadcast_to(~mask, np.broadcast_shapes(mask.shape, shape))
    spread = tuple(i for i, n in enumerate(shape) if n == 1)
    assert not gradient[3][hidden.all(spread, keepdims=True).reshape(shape)].any()


@pytest.mark.parametrize("dtypes", list(itertools.product(("float32", "bfloat16", "float16"), repeat=3)), ids="-".join)
def test_dtypes_that_differ_are_refused_with_a_mask_and_without(dtypes, run, engine):
    """C70 pytorch/pytorch#99012, #161936; trl#1460"""
    args = np.zeros((1, 1)), np.zeros((2, 1)), column(1, 3)
    args = [x.astype(jnp.dtype(dtype)) for x, dtype in zip(args, dtypes, strict=True)]
    for mask in (None, np.ones((1, 2), bool)):
        f = run(lambda *x, mask=mask: attend(*x, mask, **engine))
        if len(set(dtypes)) > 1:
            message = f"^attend: query, key and value must share one floating dtype, got {', '.join(dtypes)}"
            with pytest.raises(TypeError, match=message):
                f(*args)
        else:
            out = f(*args)
            assert out.dtype == dtypes[0]
            assert_close(out, [[2]], dtypes[0])


@pytest.mark.parametrize(
    "dtype, bias_dtype",
    [("float16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float64"), ("float64", "float16")],
)
def test_a_bias_may_have_any_floating_dtype(dtype, bias_dtype, means):
    """C70 pytorch/pytorch#99012, #161936; trl#1460"""
    bias = np.array([[0, 2, 0]]).astype(jnp.dtype(bias_dtype))
    for mask, expected in ((None, (4 + 6 * np.e**2) / (2 + np.e**2)), (np.array([[True, False, True]]), 2)):
        out = means([1, 6, 3], mask, bias, dtype=jnp.dtype(dtype), T=1)
        assert out.dtype == dtype
        assert_close(out, [expected], dtype)


# Heads


GROUPS = {
    "6 on 2": (6, [10, 20], [10, 10, 10, 20, 20, 20]),
    "4 on 2": (4, [10, 20], [10, 10, 20, 20]),
    "8 on 1": (8, [10], [10] * 8),
    "3 on 3": (3, [10, 20, 30], [10, 20, 30]),
}


@pytest.mark.parametrize("N, value, expected", GROUPS.values(), ids=GROUPS)
def test_neighbouring_query_heads_share_a_key_value_head(N, value, expected, means_of_heads, run, engine):
    """C74 onnx/onnx#7274, HazyResearch/HipKittens#22, PSAL-POSTECH/ONNXim#34"""
    K = len(value)
    out = means_of_heads(np.tile(np.array(value, float), (1, 3, 1)), T=2, N=N)
    assert_close(out, np.broadcast_to(np.array(expected, float), (1, 2, N)))
    # With everything that a head may have of its own.
    query, key, value = normal(1, 2, 3, N, 2), normal(2, 2, 5, K, 2), normal(3, 2, 5, K, 1)
    mask, bias, sink = normal(4, 1, N, 3, 5) > -1, normal(5, 1, N, 1, 5), normal(6, N)
    out = run(lambda *x: attention(*x, mask, bias, sink=sink, **engine))(query, key, value)
    repeated = (np.repeat(x, N // K, axis=2) for x in (key, value))
    assert_close(out, reference.attention(query, *repeated, mask, bias, sink=sink).out, factor=10)


@pytest.mark.parametrize("N, K", [(3, 2), (33, 2), (2, 4), (4, 0), (1, 2), (7, 3)])
def test_heads_that_do_not_divide_are_refused_with_both_numbers(N, K, run, engine):
    """C75 fla-org/flash-linear-attention#1029"""
    message = f"^attention: N = {N} query heads is not a multiple of K = {K} key/value heads"
    with pytest.raises(ValueError, match=message):
        run(lambda *x: attention(*x, **engine))(np.ones((1, 2, N, 1)), np.ones((1, 3, K, 1)), np.ones((1, 3, K, 1)))


@pytest.mark.parametrize("H, D", [(4, 2), (4, 1), (4, 7), (1, 5)])
def test_values_may_have_other_features_than_keys(H, D, run, engine):
    """C77 pytorch/pytorch#176767 (transformers#44554)"""
    value = normal(D, 8, D)
    out = run(lambda *x: attend(*x, **engine))(np.zeros((8, H)), np.zeros((8, H)), value)
    assert_close(out, np.tile(value.mean(0), (8, 1)))


def test_values_of_grouped_heads_may_have_other_features_than_keys(run, engine):
    """C77 pytorch/pytorch#176767 (transformers#44554)"""
    args = np.zeros((2, 3, 4, 5)), np.zeros((2, 8, 2, 5)), normal(1, 2, 8, 2, 7)
    out = run(lambda *x: attention(*x, **engine))(*args)
    assert_close(out, np.broadcast_to(np.repeat(args[2].mean(1), 2, axis=1)[:, None], (2, 3, 4, 7)))


# Transforms


MAPPED = {
    "mask and bias are shared": (0, 0, 0, None, None),
    "mask and bias are mapped": (0, 0, 0, 0, 0),
    "only the query is mapped": (0, None, None, None, None),
    "only the bias is mapped": (None, None, None, None, 0),
}


def _heads(i):
    mask = normal([i, 4], 2, 1, 1, 5) > -0.7
    return (
        normal([i, 1], 2, 4, 4, 8),
        normal([i, 2], 2, 5, 2, 8),
        normal([i, 3], 2, 5, 2, 8),
        mask,
        normal([i, 5], 1, 1, 4, 5),
    )


@functools.cache
def _of_heads(engine):
    def f(query, key, value, mask, bias):
        def loss(query, key, value, bias):
            out = attention(query, key, value, mask, bias, **dict(engine))
            return (out**2).sum(), out

        (_, out), gradient = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(query, key, value, bias)
        return out, gradient

    return f, jax.jit(f)


@pytest.mark.parametrize("axes", MAPPED.values(), ids=MAPPED)
def test_vmap_is_a_loop_whatever_is_mapped(axes, run, engine):
    """C78 jax-ml/jax#36702, #34920, #23401; pytorch/pytorch#151558, #161310"""
    f, one = _of_heads(tuple(engine.items()))
    each = [_heads(i) for i in range(3)]
    args = [np.stack(x) if a == 0 else x[0] for x, a in zip(zip(*each, strict=True), axes, strict=True)]
    got = run(jax.vmap(f, in_axes=axes))(*args)
    loop = [one(*(x[i] if a == 0 else x for x, a in zip(args, axes, strict=True))) for i in range(3)]
    leaves_close(got, jax.tree.map(lambda *each: np.stack(each), *loop))


def test_vmap_of_vmap_is_a_loop_in_a_loop(run, engine):
    """C78 jax-ml/jax#36702, #34920, #23401; pytorch/pytorch#151558, #161310"""
    f, one = _of_heads(tuple(engine.items()))
    query = np.stack([_heads(i)[0] for i in range(6)]).reshape(2, 3, 2, 4, 4, 8)
    _, key, value, mask, bias = (np.stack(x) for x in zip(*map(_heads, range(3)), strict=True))
    inner = jax.vmap(f, in_axes=(0, None, 0, 0, None))
    got = run(jax.vmap(inner, in_axes=(0, 0, None, None, None)))(query, key[:2], value, mask, bias[0])
    for i, j in itertools.product(range(2), range(3)):
        expected = one(query[i, j], key[i], value[j], mask[j], bias[0])
        leaves_close(jax.tree.map(lambda x, i=i, j=j: x[i, j], got), expected)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _two_keys(engine, hidden=False):
    """A query q, keys -1 and 1 with values 0 and 1: out(q) = sigmoid(2 q). A hidden key holds NaN."""
    key, value = column(-1.0, 1.0), column(0.0, 1.0)
    mask = None
    if hidden:
        key, value, mask = np.append(key, [[NAN]], 0), np.append(value, [[NAN]], 0), np.array([[True, True, False]])
    return lambda q: attend(jnp.reshape(q, (1, 1)), key, value, mask, **engine)[0, 0]


def test_forward_mode_is_there_and_right(run, engine):
    """C80 facebookresearch/xformers#552; pytorch/pytorch#154226, #165530; flash-attention#1672; NATTEN#224"""
    f = _two_keys(engine)
    value, moved = column(0.0, 1.0), column(0.0, 1.0)  # it is the second key that moves

    @run
    def pushed(q):
        g = lambda key: attend(jnp.reshape(q, (1, 1)), key, value, **engine)[0, 0]  # noqa: E731
        out, linear = jax.linearize(f, q)
        return (
            out,
            jax.jvp(f, (q,), (1.0,))[1],
            linear(1.0),
            jax.jvp(g, (column(-1.0, 1.0),), (moved,))[1],
            jax.jvp(jax.grad(f), (q,), (1.0,))[1],
        )

    for q in (0.0, 1.0, -0.65):
        s = _sigmoid(2 * q)
        assert_close(pushed(q), [s, 2 * s * (1 - s), 2 * s * (1 - s), q * s * (1 - s), 4 * s * (1 - s) * (1 - 2 * s)])
    assert_close(pushed(0.0)[:2], [0.5, 0.5])
    np.testing.assert_allclose(pushed(1.0)[3], 0.104994, atol=1e-6)


@pytest.mark.parametrize("hidden", [False, True], ids=["two keys", "a hidden NaN"])
def test_second_and_third_derivatives_are_there_and_right(hidden, run, engine):
    """C81 pytorch/pytorch#116350, #117974; learnables/learn2learn#429; diffusers#5678"""
    f = _two_keys(engine, hidden)

    @run
    def twice(q):
        return jax.grad(jax.grad(f))(q), jax.jvp(jax.grad(f), (q,), (1.0,))[1]

    @jax.jit
    def others(q):
        pushed = lambda q: jax.jvp(f, (q,), (1.0,))[1]  # noqa: E731
        return jax.grad(f)(q), jax.grad(pushed)(q), jax.hessian(f)(q), jax.grad(jax.grad(jax.grad(f)))(q)

    for q in (LN3 / 2, 0.0, 0.4):
        s = _sigmoid(2 * q)
        second, third = 4 * s * (1 - s) * (1 - 2 * s), 8 * s * (1 - s) * (1 - 6 * s * (1 - s))
        assert_close(twice(q), [second, second], factor=10)
        assert_close(others(q), [2 * s * (1 - s), second, second, third], factor=10)
    assert_close([others(LN3 / 2)[0], twice(LN3 / 2)[0]], [0.375, -0.375])
    assert_close([twice(0.0)[0], others(0.0)[3]], [0, -1])


@METHODS
def test_a_decode_loop_with_a_cache_traces_once(method):
    """C83 tenstorrent/tt-forge-onnx#422, cactus-compute/needle#44 (motivation), keras-hub#780"""
    traces = 0
    query, key, value = normal(1, 20, 1, 2, 4), normal(2, 20, 1, 1, 4), normal(3, 20, 1, 1, 2)

    @jax.jit
    def step(query, key, value, cache, scale, softcap, sink):
        nonlocal traces
        traces += 1
        return cached_attention(query, key, value, cache, scale=scale, softcap=softcap, sink=sink, method=method)

    cache = Cache.create(64, 1, 4, 2, dtype=np.float64)
    for i in range(20):
        scale, softcap, sink = 0.1 + i, 1.0 + i, normal([i, 6], 2)
        out, cache = step(query[i], key[i], value[i], cache, scale, softcap, sink)
        past = key[: i + 1, 0], value[: i + 1, 0]
        assert_close(out, reference.attention(query[i], *past, scale=scale, softcap=softcap, sink=sink).out, factor=10)
    assert traces == 1


PACKED_IDS = np.arange(8192) // 1000
LONG = {
    "causal, window and segments": (
        lambda n: masks.causal(offset=4096) & masks.window(2000, 0) & masks.segments(PACKED_IDS[4096:], PACKED_IDS),
        {},
    ),
    "a prefix, lengths and slopes": (
        lambda n: (masks.causal() | masks.prefix(n)) & masks.lengths(key=n),
        {"bias": biases.alibi(8)},
    ),
    "no mask, and dropout": (lambda n: None, {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}),
}


@pytest.mark.parametrize("rule, options", LONG.values(), ids=LONG)
def test_long_sequences_make_no_square_array_and_repeat_no_key(rule, options):
    """C84 NVIDIA/TransformerEngine#2700; xlite-dev/ffpa-attn#301; AminRezaei0x443/memory-efficient-attention#2"""
    T, S, N, K, D = 4096, 8192, 8, 1, 64
    mask = rule(jnp.int32(5000))
    shapes = (T, N, D), (S, K, D), (S, K, D)
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    f = lambda *x: attention(*x, mask, **options).sum()  # noqa: E731
    for g in (f, jax.grad(f, (0, 1, 2))):
        found = {x.shape for _, x in made(jax.make_jaxpr(g)(*args))}
        assert max(map(math.prod, found)) < T * S
        assert not [shape for shape in found if {N, S, D} <= set(shape)]
    # A mask that is an array is the only one.
    square = np.ones((1, T, S), bool)
    found = {x.shape for _, x in made(jax.make_jaxpr(lambda *x: attention(*x, square))(*args))}
    assert max(map(math.prod, found)) <= T * S


@pytest.mark.parametrize("dropout", [False, True])
def test_a_decode_loop_over_a_fixed_capacity_traces_once(dropout, engine):
    """C83 tenstorrent/tt-forge-onnx#422, cactus-compute/needle#44 (motivation), keras-hub#780"""
    n, traces = 64, 0
    query, key, value = normal(1, 20, 1, 1, 2, 4), normal(2, 1, n, 1, 4), normal(3, 1, n, 1, 2)

    @jax.jit
    def step(query, key, value, length, position, scale, softcap, sink, rng):
        nonlocal traces
        traces += 1
        return attention(
            query,
            key,
            value,
            masks.causal() & masks.lengths(key=length),
            biases.alibi(sink),
            query_positions=position,
            scale=scale,
            softcap=softcap,
            sink=sink,
            dropout_rate=0.1 if dropout else 0.0,
            dropout_rng=rng,
            **engine,
        )

    for i in range(20):
        scale, softcap, sink, rng = 0.1 + i, 1.0 + i, normal([i, 6], 2), jax.random.key(i)
        out = step(query[i], key, value, np.array([i + 1]), np.array([i]), scale, softcap, sink, rng)
        assert np.isfinite(out).all()
        if not dropout:
            bias = np.stack([reference.alibi(1, n, m, [i]) for m in sink])
            seen = reference.mask(1, n, causal=0, key_length=i + 1, query_positions=[i])
            exact = reference.attention(query[i], key, value, seen, bias, scale=scale, softcap=softcap, sink=sink)
            assert_close(out, exact.out, factor=10)
    assert traces == 1


# Dropout and determinism


def test_dropout_is_off_at_rate_0_and_refuses_to_be_on_without_a_key(run, engine):
    """C86 pytorch/pytorch#124464, #99293; timm#1978; equinox#287"""
    args = normal(1, 3, 4), normal(2, 5, 4), normal(3, 5, 2)
    f = lambda **options: run(lambda *x: attend(*x, masks.causal(1), **options, **engine))(*args)  # noqa: E731
    for rng in (None, jax.random.key(0), jax.random.key(1)):
        same_bits(f(dropout_rate=0.0, dropout_rng=rng), f())
    assert (np.asarray(f(dropout_rate=0.5, dropout_rng=jax.random.key(0))) != np.asarray(f())).any()
    for rate in (0.5, 1.0, np.float32(0.1)):
        with pytest.raises(ValueError, match="^attend: dropout_rng must be a random key, got None"):
            f(dropout_rate=rate)
    for rate in (-0.1, 1.1, NAN):
        with pytest.raises(ValueError, match="^attend: dropout_rate must be a number"):
            f(dropout_rate=rate, dropout_rng=jax.random.key(0))


@pytest.mark.parametrize("S", [4, 5])
def test_dropout_scales_what_it_keeps_by_1_over_what_it_keeps(S, run, engine):
    """C87 NVIDIA/apex#816, rasbt/LLMs-from-scratch#431"""
    args = np.zeros((1, 1)), np.zeros((S, 1)), np.eye(S)
    rngs = jax.random.split(jax.random.key(S), 600)

    @run
    def weights_and_gradient(rate, rngs):
        def one(rng):
            out, pull = jax.vjp(lambda *x: attend(*x, dropout_rate=rate, dropout_rng=rng, **engine), *args)
            return out[0], pull(jnp.ones((1, S)))

        return jax.vmap(one)(rngs)

    for rate in (0.0, 0.1, 0.5, 0.9, 1.0):
        weights, gradient = weights_and_gradient(rate, rngs)
        kept = 1 / S / (1 - rate) if rate < 1 else 0.0
        assert_close(weights, np.where(np.asarray(weights) > 0, kept, 0), factor=10)
        deviation = kept * np.sqrt(rate * (1 - rate) / 600)
        assert (abs(weights.mean(0) - (1 / S if rate < 1 else 0)) <= 4 * deviation + 1e-12).all()
        assert_close(gradient[2], np.broadcast_to(np.asarray(weights)[..., None], (600, S, S)), factor=10)
        assert all(np.isfinite(x).all() for x in gradient)
        if rate == 0:
            assert_close(weights, np.full((600, S), 1 / S))
        if rate == 1:
            assert not any(np.asarray(x).any() for x in gradient)


@pytest.mark.parametrize("B, N, K", [((4,), 3, 3), ((2, 2), 4, 2), ((), 8, 1)], ids=str)
def test_every_batch_element_and_head_drops_its_own_pairs(B, N, K, run, engine):
    """C89 google/flax#4973, equinox#181, TransformerEngine#227, NVIDIA/Fuser#3123"""
    S, heads = 16, math.prod(B) * N
    query, key, value = np.zeros((*B, S, N, 1)), np.zeros((*B, S, K, 1)), np.eye(S)[:, None]
    value = np.broadcast_to(value, (*B, S, K, S))
    f = run(lambda rng: attention(query, key, value, dropout_rate=0.5, dropout_rng=rng, **engine))
    kept = np.moveaxis(np.asarray(f(jax.random.key(0))), -2, -3).reshape(heads, S * S) > 0
    correlation = np.corrcoef(kept) - np.eye(heads)
    assert abs(correlation).max() < 0.3  # 256 pairs: almost five standard deviations
    # Nor do neighbouring queries and keys share their pattern.
    grid = kept.reshape(heads, S, S)
    for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[..., 1:], grid[..., :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.1


def test_dropout_under_vmap_is_a_loop_over_its_keys(run, engine):
    """C89 google/flax#4973, equinox#181, TransformerEngine#227, NVIDIA/Fuser#3123"""
    args = normal(1, 2, 3, 4, 2), normal(2, 2, 5, 2, 2), normal(3, 2, 5, 2, 1)
    rngs = jax.random.split(jax.random.key(1), 3)
    f = lambda rng: attention(*args, masks.causal(2), dropout_rate=0.4, dropout_rng=rng, **engine)  # noqa: E731
    got = np.asarray(run(jax.vmap(f))(rngs))
    assert_close(got, np.stack([f(rng) for rng in rngs]), factor=10)
    assert (got[0] != got[1]).any() and (got[1] != got[2]).any()


def test_dropout_on_two_devices_is_dropout_on_one(engine):
    """C89 google/flax#4973, equinox#181, TransformerEngine#227, NVIDIA/Fuser#3123"""
    code = f"""
        import conftest
        import jax, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from battery import made, normal
        from jattn import attention, masks

        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        args = normal(1, 4, 6, 4, 2), normal(2, 4, 6, 2, 2), normal(3, 4, 6, 2, 3)
        f = jax.jit(lambda *x: attention(
            *x, masks.causal(), dropout_rate=0.5, dropout_rng=jax.random.key(3), **{engine!r}
        ))
        plain = np.asarray(f(*args))
        for spec in (P("x"), P(None, "x"), P(None, None, "x")):
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
            np.testing.assert_allclose(f(*placed), plain, atol=1e-12)
        print("the same")
    """
    here = os.path.dirname(os.path.abspath(__file__))
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([os.path.dirname(here), here]),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.stdout.split() == ["the", "same"], ran.stderr[-3000:]


REPEATED = {
    "causal": (129, 129, masks.causal(), {}, "float32"),
    "a window, and dropout": (37, 131, masks.window(40, 7), {"dropout_rate": 0.3, "dropout_rng": 2}, "float32"),
    "segments, in bfloat16": (65, 65, masks.segments(np.arange(65) // 9), {"softcap": 5.0}, "bfloat16"),
}


@pytest.mark.parametrize("T, S, mask, options, dtype", REPEATED.values(), ids=REPEATED)
def test_the_same_call_gives_the_same_bits_every_time(T, S, mask, options, dtype, engine):
    """C90 Dao-AILab/flash-attention#414, #429, #2244; xformers#624"""
    args = normal(1, 1, T, 4, 8), normal(2, 1, S, 2, 8), normal(3, 1, S, 2, 8), normal(4, 1, 4, 1, S)
    args = [x.astype(jnp.dtype(dtype)) for x in args]
    options = {what: jax.random.key(x) if what == "dropout_rng" else x for what, x in options.items()}

    def f(*args):
        out, pull = jax.vjp(lambda *x: attention(*x[:3], mask, x[3], **options, **engine), *args)
        return out, pull(jnp.ones_like(out))

    for g, times in ((jax.jit(f), 30), (f, 3)):
        first = g(*args)
        for _ in range(times - 1):
            same_bits(g(*args), first)


# Debug flags


NO_NANS = {
    "a row that two masks have emptied": ([10, 20, 40], masks.causal() & NO_FIRST_KEY, None),
    "a huge hidden logit": ([1, 1, 1e30], np.array([[True, True, False]]), None),
    "a bias of -inf": ([1, 2, 3], masks.causal(), np.array([[-INF, 0.0, 0.0]])),
    "a huge logit that some see": ([1e30, 2, 3], ~masks.causal(), None),
}


@pytest.mark.parametrize("keys, mask, bias", NO_NANS.values(), ids=NO_NANS)
def test_no_nan_is_made_on_the_way_to_a_finite_result(keys, mask, bias, run, engine):
    """C72 (same mechanism as C71B; jax#17117/#17070)"""
    args = np.ones((3, 1)), column(*keys), column(10, 20, 40)

    def f(*args):
        out, stats = attend(*args, mask, bias, return_stats=True, **engine)
        return out.sum() + stats.entropy.sum()

    with jax.debug_nans(True):
        results = run(jax.value_and_grad(f, (0, 1, 2)))(*args), run(lambda *x: jax.jvp(f, x, x))(*args)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))


# The faults themselves, as formulas


# A fault is how attention is computed where a report goes wrong: (out, lse, entropy) of one head, or the first two. It
# is put beside jattn on calls of its kind, and goes wrong there: were it right, the call would be no instance.


def softmaxed(logits, value, visible, peak=None, fill=-INF):
    """Softmax as textbooks have it: `fill` for what is hidden, the row's maximum for a peak if none is given."""
    logits = np.where(visible, logits, fill)
    peak = logits.max(1, keepdims=True) if peak is None else peak
    exp = np.exp(logits - peak)
    total = exp.sum(1, keepdims=True)
    weights = exp / total
    return weights @ value, np.log(total[:, 0]) + np.ravel(peak), -np.nansum(weights * np.log(weights), 1)


def scored(query, key, bias, scale, softcap):
    logits = scale * (query @ key.T)
    return (logits if softcap is None else softcap * np.tanh(logits / softcap)) + bias


def plainly(change):
    """A fault that is a change to the call, softmax being right: `change` returns what it changes, by name."""

    def fault(**call):
        call |= change(**call)
        found = reference.attend(**call)
        return found.out, found.lse, found.entropy

    return fault


def textbook(**options):
    """A fault of the softmax alone; options may be functions of the logits."""

    def fault(query, key, value, mask, bias, scale, softcap=None, sink=None):
        logits = scored(query, key, bias, scale, softcap)
        return softmaxed(logits, value, mask, **{name: x(logits) if callable(x) else x for name, x in options.items()})

    return fault


def by_product(query, key, value, mask, bias, scale, softcap=None, sink=None):
    logits = scored(query, key, bias, scale, softcap) + (1 - mask) * -INF
    return softmaxed(logits, value, np.ones_like(mask))


def multiplied(query, key, value, mask, bias, scale, softcap=None, sink=None):
    logits = scored(query, key, bias, scale, softcap) * mask
    return softmaxed(logits, value, np.ones_like(mask))


def capped_last(query, key, value, mask, bias, scale, softcap=None, sink=None):
    logits = np.where(mask, scored(query, key, bias, scale, None), -INF)
    return softmaxed(softcap * np.tanh(logits / softcap), value, np.ones_like(mask))


def online(query, key, value, mask, bias, scale, softcap=None, sink=None):
    """Over tiles of three keys, from a peak of minus infinity: exp(-inf - -inf) is NaN where a first tile is hidden."""
    T = len(query)
    peak, total, acc = np.full(T, -INF), np.zeros(T), np.zeros((T, value.shape[1]))
    for first in range(0, len(key), 3):
        tile = slice(first, first + 3)
        logits = np.where(mask[:, tile], scored(query, key[tile], bias[:, tile], scale, softcap), -INF)
        new = np.maximum(peak, logits.max(1))
        exp, kept = np.exp(logits - new[:, None]), np.exp(peak - new)
        total, acc, peak = total * kept + exp.sum(1), acc * kept[:, None] + exp @ value[tile], new
    return acc / total[:, None], peak + np.log(total)


def padded(query, key, value, mask, bias, scale, softcap=None, sink=None):
    """To a length that tiles divide, with keys whose logit is 0."""
    more = 16 - len(key)
    key, value, bias = (np.pad(x, p) for x, p in ((key, ((0, more), (0, 0))), (value, ((0, more), (0, 0))),
                                                  (bias, ((0, 0), (0, more)))))  # fmt: skip
    return softmaxed(scored(query, key, bias, scale, softcap), value, np.pad(mask, ((0, 0), (0, more)), mode="edge"))


def to_base_2(query, key, value, mask, bias, scale, softcap=None, sink=None):
    found = reference.attend(query, key, value, mask, bias, scale=scale, softcap=softcap, sink=sink)
    return found.out, found.lse / LN2, found.entropy


def p_log_p(query, key, value, mask, bias, scale, softcap=None, sink=None):
    found = reference.attend(query, key, value, mask, bias, scale=scale, softcap=softcap, sink=sink)
    return found.out, found.lse, -(found.weights * np.log(found.weights)).sum(1)


FAULTS = {
    "a finite number hides": textbook(fill=-1e9),
    "minus infinity hides, and a row may hold nothing else": textbook(),
    "hidden values are multiplied by 0": textbook(),
    "a mask becomes a bias by a product": by_product,
    "a mask is multiplied": multiplied,
    "a mask is added": plainly(lambda mask, bias, **_: {"mask": None, "bias": bias + mask}),
    "True means hidden": plainly(lambda mask, **_: {"mask": ~mask}),
    "a bias takes the place of a mask": plainly(lambda **_: {"mask": None}),
    "a mask takes the place of a bias": plainly(lambda **_: {"bias": None}),
    "the peak is one of hidden logits": textbook(peak=lambda x: x.max(1, keepdims=True)),
    "there is no peak": textbook(peak=0.0),
    "the peak starts at -5e4": textbook(peak=lambda x: np.maximum(x.max(1, keepdims=True), -5e4)),
    "tiles start from a peak of minus infinity": online,
    "keys that fill a tile have a logit of 0": padded,
    "0 is no number": plainly(lambda scale, query, **_: {"scale": scale or query.shape[1] ** -0.5}),
    "the scale shrinks the bias": plainly(lambda bias, scale, **_: {"bias": bias * scale}),
    "the softcap comes last": capped_last,
    "the softcap is forgotten": plainly(lambda **_: {"softcap": None}),
    "the sink is forgotten": plainly(lambda **_: {"sink": None}),
    "lse is in bits": to_base_2,
    "0 log 0 is NaN": p_log_p,
}


def call_of(mask=None, bias=0.0, scale=0.6, empty=(), hidden=(), far=1.0, **others):
    """A call with T = 5, S = 11: keys are `far`, `empty` queries see nothing, and nothing sees `hidden` keys."""
    mask = normal(4, 5, 11) > -0.5 if mask is None else np.broadcast_to(mask, (5, 11)).copy()
    mask[list(empty)] = False
    mask[:, list(hidden)] = False
    call = {"query": normal(1, 5, 3), "key": normal(2, 11, 3) * far, "value": normal(3, 11, 2), "mask": mask}
    return call | {"bias": np.broadcast_to(bias, (5, 11)), "scale": scale} | others


def spoilt(call, **garbage):
    """The call, with garbage in the keys and values that nothing sees."""
    hidden = ~call["mask"].any(0)
    return call | {what: np.where(hidden[:, None], x, call[what]) for what, x in garbage.items()}


def keys(*seen):
    return np.isin(np.arange(11), seen)


def equal(logit):
    """A query and keys whose logits are all the same, with the scale 0.6."""
    return {"query": np.full((5, 3), 0.5), "key": np.full((11, 3), logit / 0.9)}


ALL = np.ones((5, 11), bool)
SOME = normal(5, 5, 11)
STEEP = np.where(np.arange(11) % 3 == 1, -INF, SOME)
CAPPED = {"softcap": 2.5, "sink": 0.4}
# Each fault, and calls that it gets wrong.
INSTANCES = {
    "a finite number hides": {
        "two rows see nothing": call_of(empty=[1, 4]),
        "no row sees anything": call_of(empty=range(5)),
        "all that is seen is below it": call_of(keys(0, 5), **equal(-1e10)),
    },
    "minus infinity hides, and a row may hold nothing else": {
        "one row": call_of(empty=[2]),
        "a row by its bias": call_of(bias=np.where(np.arange(5)[:, None] == 3, -INF, SOME)),
        "a row by both": call_of(keys(1, 4, 7), bias=STEEP),
    },
    "hidden values are multiplied by 0": {
        "NaN": spoilt(call_of(hidden=[4]), value=NAN),
        "inf beside NaN": spoilt(call_of(hidden=[0, 10], bias=SOME), key=NAN, value=INF),
        "-inf, and a row that sees nothing": spoilt(call_of(hidden=[7], empty=[0]), key=-INF, value=-INF),
    },
    "a mask becomes a bias by a product": {
        "all keys": call_of(ALL),
        "some keys": call_of(),
        "a bias": call_of(bias=SOME),
    },
    "a mask is multiplied": {"some keys": call_of(), "one key": call_of(keys(8)), "with a bias": call_of(bias=SOME)},
    "a mask is added": {"some keys": call_of(), "the last key": call_of(keys(10)), "with a bias": call_of(bias=SOME)},
    "True means hidden": {"some keys": call_of(), "the first key": call_of(keys(0)), "all keys": call_of(ALL)},
    "a bias takes the place of a mask": {"floats": call_of(bias=SOME), "some of them -inf": call_of(bias=STEEP)},
    "a mask takes the place of a bias": {"floats": call_of(bias=SOME), "some of them -inf": call_of(bias=STEEP)},
    "the peak is one of hidden logits": {
        "1e200": spoilt(call_of(hidden=[0, 6]), key=1e200),
        "1e5": spoilt(call_of(hidden=[10]), key=1e5),
    },
    "there is no peak": {"logits of 1e4": call_of(far=1e4), "logits of -800": call_of(**equal(-800))},
    "the peak starts at -5e4": {
        "logits of -1e7": call_of(keys(2, 3, 9), **equal(-1e7)),
        "logits of -1e30": call_of(**equal(-1e30)),
    },
    "tiles start from a peak of minus infinity": {
        "the last key": call_of(keys(10)),
        "two keys of the third tile": call_of(keys(6, 8), bias=SOME),
        "behind a bias of -inf": call_of(ALL, bias=np.where(np.arange(11) < 4, -INF, SOME)),
    },
    "keys that fill a tile have a logit of 0": {"low logits": call_of(ALL, **equal(-120)), "any logits": call_of(ALL)},
    "0 is no number": {"a scale of 0": call_of(scale=0.0), "and a bias": call_of(scale=0.0, bias=SOME)},
    "the scale shrinks the bias": {"a bias": call_of(bias=SOME), "a negative scale": call_of(scale=-2.0, bias=STEEP)},
    "the softcap comes last": {
        "it shows what is hidden": call_of(softcap=2.5, sink=-40.0),
        "it caps the bias": call_of(ALL, bias=9 * SOME, softcap=2.5, sink=-40.0),
    },
    "the softcap is forgotten": {"a softcap": call_of(far=5.0, **CAPPED), "and a bias": call_of(bias=STEEP, **CAPPED)},
    "the sink is forgotten": {"a sink": call_of(**CAPPED), "an empty row": call_of(empty=[0], **CAPPED)},
    "lse is in bits": {"plain": call_of(), "with everything": call_of(bias=SOME, empty=[3], **CAPPED)},
    "0 log 0 is NaN": {"hidden keys": call_of(keys(0, 1)), "weights that underflow": call_of(ALL, far=1e4)},
}


@functools.cache
def _of_one_head(method, options):
    """What it gives, and the gradient of a function of output and lse in all arrays but the mask."""
    how = {"method": method} | ({"block_size": (4, 3)} if method == "blockwise" else {})

    def f(args, mask):
        query, key, value, bias, *rest = args
        given = how | dict(zip(options, rest, strict=True))
        out, stats = attend(query, key, value, mask, bias, return_stats=True, **given)
        return jnp.where(jnp.isfinite(stats.lse), (out**2).sum(1) + stats.lse, 0).sum(), (out, stats)

    return jax.jit(jax.value_and_grad(f, has_aux=True))


@METHODS
@pytest.mark.parametrize(
    "fault, call", [pytest.param(f, c, id=f"{f}: {i}") for f, calls in INSTANCES.items() for i, c in calls.items()]
)
def test_no_fault_that_others_have_is_here(fault, call, method):
    exact = reference.attend(**call)
    # From the weights, the sink's too: huge logits leave lse - logit no digits.
    shares = np.column_stack([exact.weights, np.maximum(1 - exact.weights.sum(1), 0)])
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(1)
    mask = call["mask"]
    args = [x for what, x in call.items() if what != "mask"]
    options = tuple(call)[5:]
    (_, (out, stats)), gradient = _of_one_head(method, options)(args, mask)
    assert_close(out, exact.out, factor=10)
    assert_close(stats.lse, exact.lse, factor=10)
    assert_close(stats.entropy, entropy, factor=10)
    with np.errstate(all="ignore"), pytest.raises(AssertionError):
        for got, expected in zip(FAULTS[fault](**call), (exact.out, exact.lse, entropy), strict=False):
            assert_close(got, expected, factor=10)

    seen = mask & (call["bias"] > -INF)
    dq, dk, dv, db = map(np.asarray, gradient[:4])
    assert all(np.isfinite(x).all() for x in gradient)
    assert not dq[~seen.any(1)].any() and not dk[~seen.any(0)].any() and not dv[~seen.any(0)].any()
    assert not db[~seen].any()

    # Finite differences tell a slope where numbers are no larger than those of a normal distribution.
    def exactly(query, key, value, bias, *rest):
        found = reference.attend(query, key, value, mask, bias, **dict(zip(options, rest, strict=True)))
        return np.where(np.isfinite(found.lse), (found.out**2).sum(1) + found.lse, 0)

    hidden = np.where(np.isfinite(call["bias"]), 0, call["bias"])
    if all(np.abs(call[what]).max() < 20 for what in ("query", "key", "value")):
        args[3] = np.where(np.isfinite(call["bias"]), call["bias"], 0)
        assert_slope(gradient, lambda q, k, v, b, *rest: exactly(q, k, v, b + hidden, *rest), args)


# The faults of positions: what the mask is, and what it is taken for.

IDS = np.array([1, 1, 2, 2, 2, 0, 0, 3, 3, 3, 3])
# Rules of T = 5 queries, the last tokens of S = 11, at positions 6 ... 10. A size of 99 is no bound.
ANY = {"causal": 99, "window": (99, 99), "key_length": 11, "query_ids": np.zeros(5, int), "key_ids": np.zeros(11, int)}
PACKED_TOKENS = {"query_ids": IDS[6:], "key_ids": IDS, "padding": 0}
TAKEN_FOR = {
    "decoding, from position 0": ({"causal": 0}, {"causal": -6}),
    "decoding, one position late": ({"causal": 0, "window": (2, 99)}, {"causal": -1, "window": (2, 99)}),
    "a window that counts the query": ({"causal": 0, "window": (3, 99)}, {"causal": 0, "window": (2, 99)}),
    "a window that counts one more": ({"window": (1, 2)}, {"window": (2, 3)}),
    "a window of 0 for no window": ({"window": (0, 0)}, {}),
    "0 to the right for no bound": ({"window": (4, 0)}, {"window": (4, 99)}),
    "a length of 0 for no length": ({"key_length": 0}, {}),
    "a length that counts its end": ({"key_length": 8, "causal": 0}, {"key_length": 9, "causal": 0}),
    "a length without causal": ({"key_length": 9, "causal": 0}, {"key_length": 9}),
    "causal without a window": ({"causal": -1, "window": (4, 99)}, {"causal": -1}),
    "a window without segments": (PACKED_TOKENS | {"window": (3, 1)}, {"window": (3, 1)}),
    "segments without causal": (PACKED_TOKENS | {"causal": 0}, PACKED_TOKENS),
    "padding that sees padding": (PACKED_TOKENS, PACKED_TOKENS | {"padding": -1}),
    "segments that padding ends": (PACKED_TOKENS | {"causal": 0, "padding": 3}, PACKED_TOKENS | {"causal": 0}),
}


@functools.cache
def _of_rules(method, cached):
    """All numbers traced, so that one program does for all."""

    def mask(causal, window, key_length, query_ids, key_ids, padding=-1):
        segments = masks.segments(query_ids, key_ids, padding=padding)
        return masks.causal(causal) & masks.window(*window) & masks.lengths(key=key_length) & segments

    def at_once(query, key, value, rules):
        return attend(query, key, value, mask(**rules), query_positions=np.arange(6, 11), method=method)

    def by_cache(query, key, value, rules):
        cache = Cache.create(11, 1, 3, 2, dtype=np.float64)
        for new in (slice(6), slice(6, 11)):
            q = query if new.start else jnp.zeros((6, 3))
            ids = rules["query_ids"] if new.start else jnp.zeros(6, int)
            x = (y[:, None] for y in (q, key[new], value[new]))
            out, cache = cached_attention(*x, cache, mask(**rules | {"query_ids": ids}), method=method)
        return out[:, 0]

    return jax.jit(by_cache if cached else at_once)


@METHODS
@pytest.mark.parametrize("cached", [False, True], ids=["at once", "by a cache"])
@pytest.mark.parametrize("rules, fault", TAKEN_FOR.values(), ids=TAKEN_FOR)
def test_a_mask_is_not_taken_for_another(rules, fault, cached, method):
    args = normal(1, 5, 3), normal(2, 11, 3), normal(3, 11, 2)
    exact, wrong = (
        reference.attend(*args, reference.mask(5, 11, query_positions=range(6, 11), **ANY | {"padding": -1} | x)).out
        for x in (rules, fault)
    )
    rules = jax.tree.map(np.asarray, ANY | {"padding": -1} | rules)
    assert_close(_of_rules(method, cached)(*args, rules), exact, factor=10)
    with pytest.raises(AssertionError):
        assert_close(wrong, exact, factor=10)


# The reports, and what keeps them from happening here


CASES = {
    "C01": [
        "test_a_query_that_sees_nothing_gets_zeros_and_the_others_their_means",
        "test_no_policy_changes_a_row_that_sees_something",
    ],
    "C02": ["test_integers_are_refused_and_the_same_numbers_as_floats_are_not"],
    "C03": [
        "test_a_loss_over_good_rows_has_the_gradient_of_the_good_rows",
        "test_a_row_that_sees_nothing_passes_back_exactly_zero",
    ],
    "C04": ["test_a_head_that_is_switched_off_gives_zeros_and_has_no_weights"],
    "C06": [
        "test_two_masks_can_leave_a_query_nothing_and_it_is_not_the_mean",
        "test_a_large_negative_bias_hides_nothing",
    ],
    "C07": ["test_a_mask_that_hides_nothing_is_no_mask"],
    "C09": ["test_causal_and_a_mask_of_keys_are_both_obeyed"],
    "C10": [
        "test_a_row_with_no_visible_key_has_no_log_weights_and_no_gradient",
        "test_rows.py::test_the_log_softmax_of_an_empty_row_is_no_NaN",
    ],
    "C12": ["test_no_logit_is_so_low_that_it_counts_as_hidden"],
    "C14": ["test_half_precision_takes_any_mask"],
    "C15": [
        "test_the_lowest_finite_bias_weighs_next_to_nothing_and_twice_it_hides",
        "test_a_visible_logit_that_overflows_to_minus_inf_weighs_0",
    ],
    "C17": ["test_half_precision_products_are_scaled_before_they_overflow"],
    "C19": [
        "test_logits_beyond_2_to_the_31_give_under_jit_what_they_give_without",
        "test_logits_of_a_million_that_differ_by_1_weigh_as_they_should",
        "test_a_large_product_of_one_feature_is_no_residual_below_its_peak",
        "test_rows.py::test_huge_products_that_the_compiler_may_fuse_give_the_same_under_jit",
        "test_rows.py::test_huge_products_have_the_same_gradients_under_jit",
        "test_rows.py::test_a_huge_product_that_cannot_be_minus_inf_is_no_easier_to_fuse",
        "test_rows.py::test_logits_that_differ_by_1_at_a_million_weigh_as_they_should_under_jit",
    ],
    "C20": [
        "test_a_hidden_inf_weighs_0_and_a_visible_one_makes_its_row_nan",
        "test_softmax_agrees_about_inf",
        "test_rows.py::test_a_masked_inf_is_harmless_and_a_visible_one_makes_its_row_NaN",
    ],
    "C22": ["test_logits_of_thousands_have_the_same_peak_forward_and_backward"],
    "C23": [
        "test_garbage_in_a_hidden_key_or_value_changes_nothing",
        "test_garbage_in_another_document_changes_nothing",
    ],
    "C25": [
        "test_a_huge_hidden_logit_leaves_gradients_finite",
        "test_rows.py::test_a_large_masked_score_leaves_gradients_finite",
    ],
    "C27": [
        "test_a_zero_tangent_and_one_of_a_hidden_key_come_out_as_zero",
        "test_rows.py::test_a_zero_tangent_and_one_of_a_masked_entry_come_out_as_zero",
    ],
    "C29": [
        "test_a_weight_of_0_adds_nothing_to_the_entropy",
        "test_rows.py::test_the_entropy_of_a_row_with_weights_of_0_is_finite",
    ],
    "C30": [
        "test_the_entropy_of_a_row_with_a_hidden_key_has_a_finite_gradient",
        "test_rows.py::test_the_entropy_of_a_masked_row_has_a_finite_gradient",
    ],
    "C32": ["test_the_lse_of_a_row_that_sees_nothing_is_minus_inf"],
    "C33": ["test_lse_is_in_nats_and_has_everything_in_it"],
    "C34": ["test_gradients_flow_through_every_statistic"],
    "C36": ["test_weights_and_statistics_are_those_before_dropout"],
    "C38": [
        "test_what_is_no_mask_or_no_bias_is_refused_by_name",
        "test_rules_refuse_what_is_no_mask_or_no_bias",
    ],
    "C39": ["test_true_means_may_attend"],
    "C41": [
        "test_a_hidden_key_is_not_one_with_a_logit_of_0",
        "test_rows.py::test_a_masked_score_is_no_score_of_0",
    ],
    "C42": [
        "test_a_padding_mask_of_full_rank_is_one",
        "test_a_mask_of_another_rank_is_refused_with_what_to_write",
        "test_a_bias_of_another_rank_is_refused",
    ],
    "C44": [
        "test_lengths_that_disagree_are_refused_with_their_shapes",
        "test_batches_that_disagree_are_refused",
        "test_a_bias_of_one_number_a_query_changes_no_weight",
    ],
    "C45": ["test_no_mask_source_is_dropped_for_another"],
    "C47": ["test_a_sequence_of_length_0_gives_zeros_and_takes_no_gradient"],
    "C48": ["test_padding_that_is_declared_sees_nothing_and_is_seen_by_nothing"],
    "C50": ["test_causal_is_top_left_and_an_offset_moves_it"],
    "C51": [
        "test_decoding_one_token_at_a_time_is_the_full_causal_forward",
        "test_decoding_with_heads_features_and_a_batch_is_the_full_causal_forward",
        "test_decoding_with_a_cache_is_the_full_causal_forward",
    ],
    "C53": [
        "test_tokens_appended_to_a_past_see_all_of_it",
        "test_tokens_appended_to_a_cache_see_all_of_it",
    ],
    "C54": [
        "test_positions_may_be_integers_of_any_kind",
        "test_writing_past_the_capacity_changes_nothing_and_shows",
        "test_a_cache_may_count_its_tokens_in_integers_of_any_kind",
    ],
    "C55": ["test_no_length_needs_to_divide_anything"],
    "C56": [
        "test_a_window_counts_the_keys_beside_the_query_itself",
        "test_a_window_counts_positions_wherever_they_are_stored",
    ],
    "C58": [
        "test_a_window_of_0_is_a_size_and_none_is_no_bound",
        "test_zero_is_a_number_wherever_it_has_a_meaning",
    ],
    "C60": [
        "test_a_bias_of_positions_is_the_same_when_decoding",
        "test_a_bias_of_one_number_a_head_says_nothing_about_positions",
    ],
    "C62": ["test_keys_far_apart_or_alone_are_all_that_is_seen"],
    "C64": ["test_equal_logits_far_from_0_weigh_the_same_forward_and_backward"],
    "C65": [
        "test_the_softcap_comes_before_the_mask_and_the_bias",
        "test_a_softcap_that_is_no_bound_is_refused",
        "test_a_softcap_keeps_the_gradients_of_huge_logits_finite",
    ],
    "C67": ["test_a_bias_is_added_after_the_scale"],
    "C68": [
        "test_the_gradient_of_a_bias_is_summed_over_what_it_is_spread_over",
        "test_the_gradient_of_a_bias_is_right_with_a_mask_and_grouped_heads",
    ],
    "C70": [
        "test_dtypes_that_differ_are_refused_with_a_mask_and_without",
        "test_a_bias_may_have_any_floating_dtype",
    ],
    "C72": [
        "test_no_nan_is_made_on_the_way_to_a_finite_result",
        "test_rows.py::test_no_debug_flag_trips_over_finite_results",
    ],
    "C74": ["test_neighbouring_query_heads_share_a_key_value_head"],
    "C75": ["test_heads_that_do_not_divide_are_refused_with_both_numbers"],
    "C77": [
        "test_values_may_have_other_features_than_keys",
        "test_values_of_grouped_heads_may_have_other_features_than_keys",
    ],
    "C78": [
        "test_vmap_is_a_loop_whatever_is_mapped",
        "test_vmap_of_vmap_is_a_loop_in_a_loop",
    ],
    "C80": ["test_forward_mode_is_there_and_right"],
    "C81": ["test_second_and_third_derivatives_are_there_and_right"],
    "C83": [
        "test_a_decode_loop_over_a_fixed_capacity_traces_once",
        "test_a_decode_loop_with_a_cache_traces_once",
    ],
    "C84": ["test_long_sequences_make_no_square_array_and_repeat_no_key"],
    "C86": ["test_dropout_is_off_at_rate_0_and_refuses_to_be_on_without_a_key"],
    "C87": ["test_dropout_scales_what_it_keeps_by_1_over_what_it_keeps"],
    "C89": [
        "test_every_batch_element_and_head_drops_its_own_pairs",
        "test_dropout_under_vmap_is_a_loop_over_its_keys",
        "test_dropout_on_two_devices_is_dropout_on_one",
    ],
    "C90": ["test_the_same_call_gives_the_same_bits_every_time"],
    "C92": ["test_an_axis_may_be_empty"],
}

SIXTY = (
    "C01 C02 C03 C04 C06 C07 C09 C10 C12 C14 C15 C17 C19 C20 C22 C23 C25 C27 C29 C30 C32 C33 C34 C36 C38 C39 C41 C42 "
    "C44 C45 C47 C48 C50 C51 C53 C54 C55 C56 C58 C60 C62 C64 C65 C67 C68 C70 C72 C74 C75 C77 C78 C80 C81 C83 C84 C86 "
    "C87 C89 C90 C92"
).split()


def test_every_report_is_of_one_kind():
    assert sorted(word for word in __doc__.split() if re.fullmatch(r"C\d\d", word)) == SIXTY


def test_every_report_has_its_tests():
    assert CASES.keys() == set(SIXTY) and len(SIXTY) == 60
    assert all(CASES.values())


def test_every_test_that_is_listed_is_there_and_says_which_report_it_is_of():
    for report, names in CASES.items():
        for name in names:
            *module, name = name.split("::")
            found = importlib.import_module(module[0].removesuffix(".py")) if module else sys.modules[__name__]
            assert report in (getattr(found, name).__doc__ or "").split()[0], (report, name)


def test_every_test_of_a_report_is_listed():
    written = {name: x.__doc__.split()[0] for name, x in globals().items() if name.startswith("test_") and x.__doc__}
    assert written == {name: report for report, names in CASES.items() for name in names if "::" not in name}
