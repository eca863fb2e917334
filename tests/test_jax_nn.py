"""dot_product_attention: what jax.nn's says, and where jattn promises more, that."""

import contextlib
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from jattn import masks
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
    "no B, with a mask and a bias of rank 3": ({"lead": ()}, {"mask": drawn(N, T, S), "bias": normal(3, N, T, S)}),
    "no B, with a mask and a bias of rank 4": ({"lead": ()}, {"mask": drawn(1, N, T, S), "bias": normal(3, 1, 1, T, S)}),
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


def call(name, dtype):
    """Arguments of both functions, its arrays apart, and bool (B, T, N) or (T, N): which queries see a key."""
    sizes, options = AGREEMENTS[name]
    args = dict(zip(("query", "key", "value"), inputs(**sizes, dtype=jnp.dtype(dtype)), strict=True))
    args |= {what: jnp.asarray(x) for what, x in options.items() if what == "bias"}
    options = {what: x for what, x in options.items() if what != "bias"}
    query, key = args["query"], args["key"]
    *lead, T, N, _ = query.shape
    visible = seen((*(lead or (1,)), N, T, key.shape[-3]), **{k: x for k, x in options.items() if k != "scale"})
    return args, options, np.moveaxis(visible.any(-1), 1, 2).reshape(*lead, T, N)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", AGREEMENTS)
def test_agrees_with_jax_nn_wherever_a_query_sees_a_key(name, dtype):
    args, options, alive = call(name, dtype)
    out, residual = dot_product_attention(**args, **options, return_residual=True)
    with as_jax_nn_is_written():
        theirs = jax.nn.dot_product_attention(**args, **options, return_residual=True)
    their_out, their_residual = (np.asarray(x, np.float64) for x in theirs)
    assert out.dtype == args["query"].dtype
    assert_close(out, np.where(alive[..., None], their_out, 0), dtype)
    assert_close(residual, np.where(alive, their_residual, -INF), dtype)


DERIVATIVES = {
    "arrays alone": "bfloat16",
    "one key/value head": "float32",
    "causal, T > S": "float32",
    "a window, T > S": "float32",
    "lengths of queries": "float32",
    "lengths of keys": "float32",
    "a full mask": "float32",
    "a bias of heads and queries": "float32",
    "a bias of rank 1": "float32",
    "a narrower bias": "float32",
    "a bias that hides keys": "float32",
    "no B, with a mask and a bias of rank 3": "bfloat16",
    "no B, with lengths": "float32",
    "everything at once": "float32",
}


@pytest.mark.parametrize("name, dtype", DERIVATIVES.items())
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
