"""dot_product_attention: what jax.nn's says, and where jattn promises more, that."""

import contextlib
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from conftest import assert_close

from jattn.interop.jax_nn import dot_product_attention

NAN, INF = np.nan, np.inf
B, T, S, N, K, H = 2, 5, 7, 6, 3, 4


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def inputs(lead=(B,), T=T, S=S, N=N, K=K, dtype=np.float32):
    """query, key, value; `lead` is () for the layout without B."""
    shapes = (*lead, T, N, H), (*lead, S, K, H), (*lead, S, K, H)
    return tuple(normal(seed, *shape).astype(dtype) for seed, shape in enumerate(shapes))


@contextlib.contextmanager
def as_jax_nn_is_written():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def jax_nn(*args, **options):
    with as_jax_nn_is_written():
        return jax.nn.dot_product_attention(*args, **options)


BOTH = dot_product_attention, jax_nn


def seen(shape, mask=True, is_causal=False, query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None):
    """bool (B, N, T, S): what jax.nn's documentation says that a query may attend to."""
    T, S = shape[-2:]
    query, key = np.arange(T)[:, None], np.arange(S)
    out = np.broadcast_to(mask, shape).copy()
    if is_causal:
        out &= key <= query
    if local_window_size is not None:
        left, right = np.broadcast_to(local_window_size, 2)
        out &= (query - left <= key) & (key <= query + right)
    if query_seq_lengths is not None:
        out &= query < query_seq_lengths[:, None, None, None]
    if key_value_seq_lengths is not None:
        out &= key < key_value_seq_lengths[:, None, None, None]
    return out


def drawn(*shape):
    """A mask with holes. Nothing is seen by its first query, where it tells queries and keys apart."""
    mask = np.random.default_rng(len(shape)).random(shape) < 0.6
    if mask.ndim > 1 and mask.shape[-1] > 1 and mask.shape[-2] > 1:
        mask[..., 0, :] = False
    return mask


def int32(*values):
    return np.array(values, np.int32)


def with_holes(bias):
    return np.where(drawn(*bias.shape[:-2], 1, bias.shape[-1]), bias, -INF)


# What `inputs` gets, and what both functions get.
AGREEMENTS = {
    "arrays alone": ({}, {}),
    "as many heads of keys as of queries": ({"N": 3}, {}),
    "one key/value head": ({"K": 1}, {}),
    "one query": ({"T": 1}, {"is_causal": True}),
    "causal, T < S": ({}, {"is_causal": True}),
    "causal, T > S": ({"T": 11}, {"is_causal": True}),
    "a window, T < S": ({}, {"local_window_size": (1, 2)}),
    "a window, T > S": ({"T": 11}, {"local_window_size": (2, 1)}),
    "a window of one size": ({}, {"local_window_size": 2}),
    "a window of the token alone": ({}, {"local_window_size": 0}),
    "a causal window": ({}, {"local_window_size": (1, 3), "is_causal": True}),
    "lengths of queries": ({}, {"query_seq_lengths": int32(2, 5)}),
    "lengths of keys": ({}, {"key_value_seq_lengths": int32(4, 0)}),
    "lengths beyond the arrays": ({}, {"query_seq_lengths": int32(0, 9), "key_value_seq_lengths": int32(9, 3)}),
    "a full mask": ({}, {"mask": drawn(B, N, T, S)}),
    "a mask of padding": ({}, {"mask": drawn(B, 1, 1, S)}),
    "a mask of queries": ({}, {"mask": drawn(B, 1, T, 1)}),
    "a mask of heads": ({}, {"mask": drawn(1, N, 1, 1)}),
    "a mask of rank 3": ({}, {"mask": drawn(N, T, S)}),
    "a mask of rank 3, one for all heads": ({}, {"mask": drawn(1, T, S)}),
    "a mask of rank 2": ({}, {"mask": drawn(T, S)}),
    "a mask of rank 1": ({}, {"mask": drawn(S)}),
    "a mask of rank 0": ({}, {"mask": np.array(True)}),
    "a full bias": ({}, {"bias": normal(3, B, N, T, S)}),
    "a bias of keys": ({}, {"bias": normal(3, B, 1, 1, S)}),
    "a bias of heads and queries": ({}, {"bias": normal(3, 1, N, T, 1)}),
    "a bias of rank 3": ({}, {"bias": normal(3, N, T, S)}),
    "a bias of rank 2": ({}, {"bias": normal(3, T, S)}),
    "a bias of rank 1": ({}, {"bias": normal(3, S)}),
    "a wider bias": ({}, {"bias": normal(3, N, T, S, dtype=np.float64)}),
    "a narrower bias": ({}, {"bias": normal(3, N, T, S).astype(jnp.bfloat16)}),
    "a bias that hides keys": ({}, {"bias": with_holes(normal(3, B, N, T, S))}),
    "a scale": ({}, {"scale": 0.3}),
    "a scale of a whole number": ({}, {"scale": 2}),
    "a scale in an array": ({}, {"scale": np.float32(-0.3)}),
    "no B": ({"lead": ()}, {}),
    "no B, mask and bias of rank 3": ({"lead": ()}, {"mask": drawn(N, T, S), "bias": normal(3, N, T, S)}),
    "no B, mask and bias of rank 4": ({"lead": ()}, {"mask": drawn(1, N, T, S), "bias": normal(3, 1, 1, 1, S)}),
    "no B, with lengths": ({"lead": ()}, {"query_seq_lengths": int32(3), "key_value_seq_lengths": int32(5)}),
    "everything at once": (
        {"T": 11},
        {
            "mask": drawn(B, N, 11, S),
            "bias": normal(3, N, 11, 1),
            "scale": 0.7,
            "is_causal": True,
            "local_window_size": (3, 0),
            "query_seq_lengths": int32(9, 7),
            "key_value_seq_lengths": int32(6, 7),
        },
    ),
}


def call(name, dtype="float32"):
    """Arguments of both functions, its arrays apart, and bool (B, T, N) or (T, N): which queries see a key."""
    sizes, options = AGREEMENTS[name]
    args = dict(zip(("query", "key", "value"), inputs(**sizes, dtype=jnp.dtype(dtype)), strict=True))
    args |= {what: jnp.asarray(x) for what, x in options.items() if what == "bias"}
    options = {what: x for what, x in options.items() if what != "bias"}
    *lead, T, N, _ = args["query"].shape
    rules = {what: x for what, x in options.items() if what != "scale"}
    visible = seen((*(lead or (1,)), N, T, args["key"].shape[-3]), **rules)
    return args, options, np.moveaxis(visible.any(-1), 1, 2).reshape(*lead, T, N)


@pytest.mark.parametrize("name", AGREEMENTS)
def test_agrees_with_jax_nn_wherever_a_query_sees_a_key(name):
    args, options, alive = call(name)
    with as_jax_nn_is_written():
        theirs = np.asarray(jax.nn.dot_product_attention(**args, **options))
    assert_close(dot_product_attention(**args, **options), np.where(alive[..., None], theirs, 0), "float32")


# XLA takes its time for these.
SOME = (
    "one key/value head",
    "a window, T > S",
    "lengths of keys",
    "a narrower bias",
    "a bias that hides keys",
    "no B, mask and bias of rank 3",
    "everything at once",
)


@pytest.mark.parametrize("name, dtype", [(n, "bfloat16") for n in SOME] + [(n, "float32") for n in SOME[-2:]])
def test_residuals_and_bfloat16_agree_with_jax_nn_too(name, dtype):
    args, options, alive = call(name, dtype)
    out, residual = dot_product_attention(**args, **options, return_residual=True)
    with as_jax_nn_is_written():
        theirs = jax.nn.dot_product_attention(**args, **options, return_residual=True)
    their_out, their_residual = (np.asarray(x, np.float64) for x in theirs)
    assert out.dtype == dtype
    assert_close(out, np.where(alive[..., None], their_out, 0), dtype)
    assert_close(residual, np.where(alive, their_residual, -INF), dtype)


@pytest.mark.parametrize("name, dtype", [*((n, "float32") for n in SOME), (SOME[-1], "bfloat16")])
def test_gradients_agree_with_jax_nn_too(name, dtype):
    args, options, alive = call(name, dtype)
    cotangent = normal(7, *args["query"].shape).astype(dtype)

    def gradient(f, cotangent):
        return jax.jit(lambda args: jax.vjp(lambda args: f(**args, **options), args)[1](cotangent)[0])(args)

    got = gradient(dot_product_attention, cotangent)
    # A query that sees nothing gives jax.nn's keys and values a derivative, and jattn's none.
    with as_jax_nn_is_written():
        theirs = gradient(jax.nn.dot_product_attention, np.where(alive[..., None], cotangent, 0))
    for what, x in args.items():
        assert got[what].dtype == x.dtype
        rounded = "bfloat16" if "bfloat16" in (dtype, str(x.dtype)) else "float32"
        assert_close(got[what], theirs[what], rounded, factor=5)


def test_one_sequence_may_leave_out_B_in_each_array_for_itself():
    query, key, value = inputs(lead=(1,))
    out, residual = dot_product_attention(query, key, value, return_residual=True)
    for q, k, v in [(query[0], key, value), (query, key[0], value), (query[0], key, value[0])]:
        got, got_residual = dot_product_attention(q, k, v, return_residual=True)
        np.testing.assert_array_equal(got, np.reshape(out, q.shape))
        np.testing.assert_array_equal(got_residual, np.reshape(residual, q.shape[:-1]))


def test_has_the_signature_of_jax_nn():
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert ours == theirs


def test_every_argument_that_jax_nn_documents_is_compared():
    args = inspect.getdoc(jax.nn.dot_product_attention).partition("\nArgs:\n")[2].partition("\nReturns:\n")[0]
    compared = {what for _, options in AGREEMENTS.values() for what in options}
    # The last two have tests of their own.
    compared |= {"query", "key", "value", "return_residual", "implementation"}
    assert set(re.findall(r"^  (\w+):", args, re.MULTILINE)) == compared


def test_the_example_that_jax_nn_documents():
    """Of ten tokens, token 6 sees 3 to 8 through a window of (3, 2)."""
    x = np.zeros((10, 1, 10), np.float32)
    options = {"local_window_size": (3, 2)}
    got, theirs = (f(x, x, np.eye(10, dtype=np.float32)[:, None], **options)[6, 0] for f in BOTH)
    np.testing.assert_array_equal(np.flatnonzero(got), [3, 4, 5, 6, 7, 8])
    assert_close(got, theirs, "float32")


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_bias_and_mask_may_be_given_by_position_and_the_implementation_by_name(implementation):
    args = *inputs(), normal(3, B, N, T, S), drawn(B, 1, 1, S) | (np.arange(S) == 0)
    options = {"scale": 0.5, "is_causal": True, "implementation": implementation, "return_residual": True}
    (out, residual), (their_out, their_residual) = (f(*args, **options) for f in BOTH)
    assert_close(out, their_out, "float32")
    assert_close(residual, their_residual, "float32")


def test_implementation_xla_is_what_none_is_on_a_processor_and_cudnn_refuses_what_it_cannot_do():
    args = inputs()
    np.testing.assert_array_equal(dot_product_attention(*args, implementation="xla"), dot_product_attention(*args))
    with pytest.raises(ValueError, match="'cudnn'"):
        dot_product_attention(*args, implementation="cudnn")


# Transforms


def test_traced_options_are_what_concrete_ones_are():
    args = inputs()
    traced = {
        "mask": drawn(B, 1, 1, S),
        "scale": np.float32(0.3),
        "query_seq_lengths": int32(2, 5),
        "key_value_seq_lengths": int32(6, 3),
        "local_window_size": (np.int32(2), np.int32(1)),
    }
    f = functools.partial(dot_product_attention, is_causal=True)
    sizes = {"local_window_size": (2, 1)}
    assert_close(jax.jit(lambda traced: f(*args, **traced))(traced), f(*args, **traced | sizes), "float32")


def test_vmap_is_a_loop():
    query, key, value = normal(1, 3, B, T, N, H), normal(2, B, S, K, H), normal(3, 3, B, S, K, H)
    mask, lengths = drawn(3, T, S), np.array([[1, 7], [5, 0], [2, 2]], np.int32)

    def f(query, value, mask, lengths):
        return dot_product_attention(query, key, value, mask=mask, key_value_seq_lengths=lengths, return_residual=True)

    mapped = jax.vmap(f)(query, value, mask, lengths)
    looped = [f(*args) for args in zip(query, value, mask, lengths, strict=True)]
    for got, expected in zip(mapped, zip(*looped, strict=True), strict=True):
        assert_close(got, np.stack(expected), "float32")


# Where jattn promises more


def outputs_and_gradients(**options):
    """(query, key, value, bias) -> out, residual, and what ones in place of both pull back."""

    @jax.jit
    def f(*args):
        def call(*args):
            return dot_product_attention(*args, **options, return_residual=True)

        out, pull = jax.vjp(call, *args)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    return f


def test_a_query_that_sees_nothing_gets_zeros_and_passes_back_zero():
    query, key, value = inputs()
    mask = np.arange(T)[:, None] != 2
    (out, residual), gradients = outputs_and_gradients(mask=mask)(query, key, value)
    assert (out[:, 2] == 0).all() and (out[:, 1] != 0).all()
    assert np.isneginf(residual[:, 2]).all() and np.isfinite(residual[:, 1]).all()
    assert (gradients[0][:, 2] == 0).all()
    others = np.delete(query, 2, 1)
    for got, expected in zip(gradients[1:], outputs_and_gradients()(others, key, value)[1][1:], strict=True):
        assert_close(got, expected, "float32")
    with as_jax_nn_is_written():
        theirs = jax.nn.dot_product_attention(query, key, value, mask=mask)
    assert_close(theirs[:, 2], np.repeat(value.mean(1), N // K, 1), "float32")


HIDDEN = {
    "by lengths": {"query_seq_lengths": int32(2, 5), "key_value_seq_lengths": int32(4, 0)},
    "by a causal window": {"is_causal": True, "local_window_size": 2},
    "by a mask and a bias": {"mask": drawn(B, 1, T, 1), "bias": with_holes(np.zeros((1, 1, 1, S), np.float32))},
}


@pytest.mark.parametrize("options", HIDDEN.values(), ids=HIDDEN)
def test_what_is_not_seen_is_never_read(options):
    options = dict(options)
    bias = options.pop("bias", np.zeros((1, 1, 1, S), np.float32))
    visible = seen((B, N, T, S), **options) & (bias > -INF)
    no_query, no_key = ~visible.any((1, 3)), ~visible.any((1, 2))
    assert no_query.any() or no_key.any()
    query, key, value = inputs()
    f = outputs_and_gradients(**options)
    clean = f(query, key, value, bias)
    dirty = f(
        np.where(no_query[:, :, None, None], NAN, query).astype(np.float32),
        np.where(no_key[:, :, None, None], NAN, key).astype(np.float32),
        np.where(no_key[:, :, None, None], -INF, value).astype(np.float32),
        bias,
    )
    for got, expected in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        assert not np.isnan(expected).any()
        np.testing.assert_array_equal(got, expected)


def test_a_nan_that_is_seen_spoils_the_whole_row():
    query, key, value = inputs()
    value[0, 2, 1, 0] = NAN
    out, residual = dot_product_attention(query, key, value, is_causal=True, return_residual=True)
    spoilt = np.zeros((B, T, N), bool)
    spoilt[0, 2:, 2:4] = True
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(spoilt[..., None], out.shape))
    np.testing.assert_array_equal(np.isnan(residual), spoilt)


def reference(query, key, value):
    """Weights (B, T, N, S), output and residual, in NumPy and float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    logits = np.einsum("btnh,bsnh->btns", query, np.repeat(key, N // K, 2)) / np.sqrt(H)
    weights = scipy.special.softmax(logits, -1)
    out = np.einsum("btns,bsnd->btnd", weights, np.repeat(value, N // K, 2))
    return weights, out, scipy.special.logsumexp(logits, -1)


@pytest.mark.parametrize("dtype, wide", [("float64", "float64"), ("float16", "float32"), ("bfloat16", "float32")])
def test_the_residual_is_never_rounded_and_float64_stays_float64(dtype, wide):
    args = inputs(dtype=jnp.dtype(dtype))
    out, residual = dot_product_attention(*args, return_residual=True)
    _, expected, lse = reference(*args)
    assert (out.dtype, residual.dtype) == (dtype, wide)
    assert_close(out, expected, dtype, factor=10)
    assert_close(residual, lse, wide, factor=10)


def test_the_residual_has_derivatives():
    query, key, value = inputs()

    def total(query, f):
        return f(query, key, value, return_residual=True)[1].sum()

    weights, _, _ = reference(query, key, value)
    expected = np.einsum("btns,bsnh->btnh", weights, np.repeat(key, N // K, 2)) / np.sqrt(H)
    assert_close(jax.grad(total)(query, dot_product_attention), expected, "float32", factor=10)
    with as_jax_nn_is_written():
        assert (jax.grad(total)(query, jax.nn.dot_product_attention) == 0).all()


def test_values_may_have_other_features_than_keys():
    query, key, value = inputs()
    got = dot_product_attention(query, key, value[..., :3])
    assert_close(got, dot_product_attention(query, key, value)[..., :3], "float32")


def test_lengths_may_be_any_integers():
    def f(lengths):
        return dot_product_attention(*inputs(), query_seq_lengths=lengths, key_value_seq_lengths=lengths)

    for lengths in (np.array([2, 4]), np.array([2, 4], np.uint8), [2, 4]):
        np.testing.assert_array_equal(f(lengths), f(int32(2, 4)))


# Errors, other than those of test_errors.py: what is changed in a call, what is raised

ERRORS = {
    "a query of rank 2": (
        lambda q, k, v: {"query": q[0, 0]},
        ValueError,
        "query must be (B, T, N, H), got (6, 4).",
    ),
    "a query of rank 5": (
        lambda q, k, v: {"query": q[None]},
        ValueError,
        "query must be (B, T, N, H), got (1, 2, 5, 6, 4).",
    ),
    "one sequence of keys for two of queries": (
        lambda q, k, v: {"key": k[0]},
        ValueError,
        "key must be (B, S, K, H) = (2, S, K, 4), got (7, 3, 4).",
    ),
    "a mask with the heads of the keys": (
        lambda q, k, v: {"mask": np.ones((K, T, S), bool)},
        ValueError,
        "mask must be (N, T, S) = (6, 5, 7), got (3, 5, 7).",
    ),
    "a mask that is larger than the logits": (
        lambda q, k, v: {"query": q[:, :1], "mask": np.ones((1, 1, T, S), bool)},
        ValueError,
        "mask must be (B, N, T, S) = (2, 6, 1, 7), got (1, 1, 5, 7).",
    ),
    "a mask of rank 5": (
        lambda q, k, v: {"mask": np.ones((1, 1, 1, T, S), bool)},
        ValueError,
        "mask must be (B, N, T, S) = (2, 6, 5, 7), got (1, 1, 1, 5, 7).",
    ),
    "a length for all": (
        lambda q, k, v: {"query_seq_lengths": 3},
        ValueError,
        "query_seq_lengths must be (B,) = (2,), got ().",
    ),
    "float lengths": (
        lambda q, k, v: {"key_value_seq_lengths": np.ones(B)},
        TypeError,
        "key_value_seq_lengths must be integers, got float64.",
    ),
    "a negative length": (
        lambda q, k, v: {"key_value_seq_lengths": int32(3, -1)},
        ValueError,
        "key_value_seq_lengths must be >= 0, got -1.",
    ),
    "a negative window": (
        lambda q, k, v: {"local_window_size": (-1, 3)},
        ValueError,
        "local_window_size must be >= 0, got -1.",
    ),
    "a window of three sizes": (
        lambda q, k, v: {"local_window_size": (1, 2, 3)},
        ValueError,
        "local_window_size must be an int or (left, right), got (1, 2, 3).",
    ),
    "a window per sequence": (
        lambda q, k, v: {"local_window_size": (int32(1, 2), 0)},
        ValueError,
        "local_window_size must be (), got (2,).",
    ),
    "a fractional window": (
        lambda q, k, v: {"local_window_size": 1.5},
        TypeError,
        "local_window_size must be an int or an array of integers, got 1.5.",
    ),
}


@pytest.mark.parametrize("changes, kind, text", ERRORS.values(), ids=ERRORS)
def test_errors_say_who_what_must_hold_and_what_came(changes, kind, text):
    args = inputs()
    with pytest.raises(kind, match=f"^{re.escape('dot_product_attention: ' + text)}$"):
        dot_product_attention(**dict(zip(("query", "key", "value"), args, strict=True)) | changes(*args))
