"""Decoding through a cache is attention over the whole sequence, and what is not in it is never read."""

import functools
import itertools
import os
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from battery import STATS, Sizes, inputs, made, normal
from conftest import assert_close
from jax.experimental import checkify
from jax.test_util import check_grads

from jattn import Cache, _cache, attention, biases, cached_attention, masks, rotary

NAN, INF = np.nan, np.inf
B, S, N, K, H, D = 2, 7, 4, 2, 3, 2
CAPACITY = 11
SIZES = Sizes((B,), S, S, N, K, H, D)
Q, P = np.arange(S)[:, None], np.arange(S)[None, :]


def empty(capacity=CAPACITY, dtype=np.float64, *, batch=(B,), **options):
    return Cache.create(capacity, K, H, D, batch=batch, dtype=dtype, **options)


def garbage(cache):
    """The cache with NaN in every slot that holds nothing."""
    held = (np.arange(cache.capacity, dtype=np.int32)[None] < cache.lengths[:, None])[..., None, None]
    return cache._replace(key=jnp.where(held, cache.key, NAN), value=jnp.where(held, cache.value, NAN))


@functools.partial(jax.jit, static_argnames="how")
def step(query, key, value, cache, mask, bias, new_lengths, options, how=()):
    return cached_attention(query, key, value, cache, mask, bias, new_lengths=new_lengths, **options, **dict(how))


def of_rows(x, rows):
    """Of x (B or 1, N or 1, S, ...) the rows (B, T) of each sequence."""
    return np.stack([np.broadcast_to(x, (B, *x.shape[1:]))[b][:, rows[b]] for b in range(B)])


def wide(x, other):
    """x (..., S), as wide as the cache: what stands beyond the sequence."""
    return np.concatenate([x, np.full((*x.shape[:-1], CAPACITY - S), other, x.dtype)], -1)


class Case(NamedTuple):
    """`told` says of rows (B, T) which mask and bias such a chunk gets; `mask` and `bias` are what they mean."""

    told: Any
    mask: Any
    bias: Any = 0.0
    options: dict = {}


ARRAY = np.random.default_rng(1).random((B, N, S, S)) < 0.6
BIAS = normal(2, B, N, S, S)
IDS = np.random.default_rng(3).integers(0, 2, (B, S))
LENGTHS = np.array([6, 3])
SLOPES = normal(4, N)
TABLE = normal(5, N, 5)
WINDOWS = np.array([[0, 1, 2, 5]])
FAR = np.array([2, 4], np.int32)


def near(q, k, far):
    return abs(q - k) < far


def even(q, k):
    return (q + k) % 3 != 1


def wave(q, k, a):
    return a * jnp.sin((q - k).astype(a.dtype))


def per_sequence(x):
    return x[:, None, None, None]


ALIBI = -SLOPES[:, None, None] * abs(Q - P)
RELATIVE = TABLE[np.arange(N)[:, None, None], 2 + np.clip(P - Q, -2, 2)]
CAUSAL = P <= Q

# What stands for "as wide as the cache" is wide in `told` only.
CASES = {
    "causal and alibi, with statistics": Case(lambda rows: (masks.causal(), biases.alibi(SLOPES)), CAUSAL, ALIBI),
    "a mask array, a bias array and a sink": Case(
        lambda rows: (
            masks.causal() & of_rows(wide(ARRAY, True), rows),
            of_rows(wide(BIAS, NAN), rows),
        ),
        CAUSAL & ARRAY,
        BIAS,
        {"sink": normal(6, N)},
    ),
    "a window and a relative table": Case(
        lambda rows: (masks.causal() & masks.window(2, None), biases.relative(TABLE)), CAUSAL & (Q - P <= 2), RELATIVE
    ),
    "lengths of each sequence, a softcap": Case(
        lambda rows: (masks.causal() & masks.lengths(key=LENGTHS), None),
        CAUSAL & (P < per_sequence(LENGTHS)),
        options={"softcap": 0.7},
    ),
    "a length, a scale and a rule for a bias": Case(
        lambda rows: (masks.causal() & masks.lengths(key=5), biases.rule(wave, SLOPES)),
        CAUSAL & (P < 5),
        SLOPES[:, None, None] * np.sin(Q - P),
        {"scale": 1.3},
    ),
    "segments": Case(
        lambda rows: (
            masks.causal() & masks.segments(np.take_along_axis(IDS, rows, 1), wide(IDS, 0)),
            None,
        ),
        CAUSAL & (IDS[:, None, :, None] == IDS[:, None, None, :]),
    ),
    "the first two and a window": Case(
        lambda rows: (masks.causal() & (masks.prefix(2) | masks.window(1, 0)), None),
        CAUSAL & ((P < 2) | (Q - P <= 1)),
    ),
    "all but a window": Case(
        lambda rows: (masks.causal() & ~masks.window(1, 0), None), CAUSAL & (Q - P > 1)
    ),
    "a rule of positions": Case(
        lambda rows: (masks.causal() & masks.rule(even), None), CAUSAL & even(Q, P)
    ),
    "a rule with an array": Case(
        lambda rows: (masks.causal() & masks.rule(near, FAR), None), CAUSAL & near(Q, P, per_sequence(FAR))
    ),
    "a window of each head": Case(
        lambda rows: (masks.window(WINDOWS, 0), None), CAUSAL & (Q - P <= WINDOWS[0][:, None, None])
    ),
}  # fmt: skip

# How many tokens each sequence gets in each call, and T.
SCHEDULES = {
    "token by token": (1, [[1, 1]] * S),
    "in chunks, each sequence at its own place": (3, [[3, 1], [0, 3], [2, 0], [2, 3]]),
}


def decoded(case, schedule, cache, dtype=np.float64, engine=(), arrays=None):
    """(out, Stats) of the whole sequence, and the cache; what is padding holds NaN, and its rows are seen empty."""
    T, plan = schedule
    query, key, value = inputs(SIZES, dtype=dtype) if arrays is None else arrays
    how = tuple((engine or {}).items()) + (("return_stats", True),)
    out, stats = np.full((B, S, N, D), NAN), [np.full((B, S, N), NAN) for _ in STATS]
    done = np.zeros(B, int)
    for new in np.array(plan):
        rows, real = done[:, None] + np.arange(T), np.arange(T) < new[:, None]
        stored = np.minimum(rows, S - 1)
        chunk = [np.where(real[..., None, None], x[np.arange(B)[:, None], stored], NAN).astype(dtype)
                 for x in (query, key, value)]  # fmt: skip
        mask, bias = case.told(stored)
        new_lengths = None if real.all() else new
        (got, found), cache = step(*chunk, cache, mask, bias, new_lengths, case.options, how)
        assert got.dtype == dtype
        assert not np.asarray(got)[~real].any() and not np.asarray(found.entropy)[~real].any()
        for b in range(B):
            out[b, rows[b, real[b]]] = got[b, real[b]]
            for whole, part in zip(stats, found, strict=True):
                whole[b, rows[b, real[b]]] = part[b, real[b]]
        done += new
        np.testing.assert_array_equal(cache.lengths, done)
    assert (done == S).all()
    return (out, *stats), cache


def expected(case, dtype=np.float64):
    mask, bias = (np.broadcast_to(x, (B, N, S, S)) for x in (case.mask, case.bias))
    found = reference.attention(*inputs(SIZES, dtype=dtype), mask, bias, **case.options)
    return (found.out, *(getattr(found, name) for name in STATS))


# Outputs


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_decoding_is_attention_over_the_whole_sequence(name, schedule, engine):
    got, _ = decoded(CASES[name], schedule, garbage(empty(dtype=np.float32)), np.float32, engine)
    for x, y in zip(got, expected(CASES[name], np.float32), strict=True):
        assert_close(x, y, "float32", factor=0.5)  # 1e-6


@pytest.mark.parametrize("chunks", [(S,), (0, 5, 2)], ids=str)
def test_chunks_of_any_size_are_the_whole_sequence(chunks, engine):
    case = CASES["a mask array, a bias array and a sink"]
    cache, outs, start = garbage(empty()), [], 0
    for T in chunks:
        rows = np.broadcast_to(start + np.arange(T), (B, T))
        mask, bias = case.told(rows)
        chunk = [x[:, start : start + T] for x in inputs(SIZES)]
        out, cache = step(*chunk, cache, mask, bias, None, case.options, tuple(engine.items()))
        outs.append(out)
        start += T
    assert_close(np.concatenate(outs, 1), expected(case)[0])


def test_no_mask_sees_all_that_is_written(engine):
    query, key, value = inputs(SIZES)
    cache = garbage(empty())
    written = np.zeros((B, 1, 1, S), bool)
    for new in ([3, 1], [2, 3]):
        done = np.asarray(cache.lengths)
        chunk = [np.stack([x[b, done[b] : done[b] + 3] for b in range(B)]) for x in (query, key, value)]
        out, cache = step(*chunk, cache, None, None, np.array(new), {}, tuple(engine.items()))
        written |= (P < np.asarray(cache.lengths)[:, None, None])[:, None]
        whole = reference.attention(query, key, value, written).out
        for b in range(B):
            assert_close(out[b, : new[b]], whole[b, done[b] : done[b] + new[b]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_what_it_is(dtype):
    case = CASES["causal and alibi, with statistics"]
    got, cache = decoded(case, SCHEDULES["token by token"], empty(dtype=dtype), np.dtype(dtype))
    for x, y in zip(got, expected(case, np.dtype(dtype)), strict=True):
        assert_close(x, y, dtype)
    assert cache.key.dtype == cache.value.dtype == dtype and cache.lengths.dtype == np.int32


def test_rotary_turns_new_tokens_by_their_positions_in_the_sequence():
    query, key, value = (normal(i, B, 5, n, 4) for i, n in enumerate((N, K, K)))
    cache = Cache.create(6, K, 4, batch=(B,), dtype=np.float64)._replace(lengths=jnp.array([0, 1], np.int32))
    # The second sequence begins with a token of zeros.
    first = jnp.zeros_like(cache.key)
    cache = cache._replace(key=first, value=first)
    outs = []
    for t in range(5):
        positions = cache.next_positions(1)
        np.testing.assert_array_equal(positions, [[t], [t + 1]])
        turned = [rotary(x[:, t : t + 1], positions) for x in (query, key)]
        out, cache = step(*turned, value[:, t : t + 1], cache, masks.causal(), None, None, {})
        outs.append(out)
    for b in range(B):
        zeros = np.zeros((b, K, 4))
        turned = [np.asarray(rotary(jnp.asarray(x[b]), np.arange(5) + b)) for x in (query, key)]
        keys, values = np.concatenate([zeros, turned[1]]), np.concatenate([zeros, value[b]])
        seen = np.arange(5 + b) <= np.arange(5)[:, None] + b
        assert_close(np.concatenate(outs, 1)[b], reference.attention(turned[0], keys, values, seen).out)
    assert Cache.create(4, 1, 1).next_positions(3).tolist() == [0, 1, 2]
    assert Cache.create(4, 1, 1, batch=(2, 1)).next_positions(3).shape == (2, 1, 3)


def test_dropout_drops_the_pairs_that_attention_drops():
    options = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(3), "method": "dense"}
    query, key, value = inputs(SIZES)
    got, _ = cached_attention(query, key, value, empty(), **options)
    assert_close(got, attention(query, key, value, masks.causal(), **options))
    assert np.abs(got - reference.attention(query, key, value, CAUSAL).out).max() > 0.1


# A cache that rolls

ROLLING = {
    "a window of the capacity": Case(lambda rows: (masks.window(4, 0), None), CAUSAL & (Q - P <= 4)),
    "a window, alibi and a sink": Case(
        lambda rows: (masks.causal() & masks.window(3, None), biases.alibi(SLOPES)),
        CAUSAL & (Q - P <= 3),
        ALIBI,
        {"sink": normal(6, N)},
    ),
    "a window of each head and a relative table": Case(
        lambda rows: (masks.window(np.array([[0, 1, 2, 4]]), 0), biases.relative(TABLE)),
        CAUSAL & (Q - P <= np.array([0, 1, 2, 4])[:, None, None]),
        RELATIVE,
    ),
    "a rule and a softcap": Case(
        lambda rows: (masks.causal() & masks.rule(near, np.array([2, 5], np.int32)), None),
        CAUSAL & near(Q, P, per_sequence(np.array([2, 5]))),
        options={"softcap": 0.7},
    ),
    "not what is near": Case(
        lambda rows: (masks.window(3, 0) & ~masks.window(0, None), None), CAUSAL & (Q - P <= 3) & (Q > P)
    ),
}
ROLLS = SCHEDULES | {"in chunks longer than the cache": (6, [[6, 5], [1, 2]])}


@pytest.mark.parametrize("schedule", ROLLS.values(), ids=ROLLS)
@pytest.mark.parametrize("name", ROLLING)
def test_a_rolling_cache_is_attention_over_the_whole_sequence(name, schedule, engine):
    cache = garbage(empty(4, np.float32, rolling=True))
    got, cache = decoded(ROLLING[name], schedule, cache, np.float32, engine)
    for x, y in zip(got, expected(ROLLING[name], np.float32), strict=True):
        assert_close(x, y, "float32", factor=0.5)  # 1e-6
    # What it holds: the last four tokens, each where its position has its slot.
    _, key, value = inputs(SIZES, dtype=np.float32)
    slots = np.array([4, 5, 6, 3])
    np.testing.assert_array_equal(cache.positions, np.broadcast_to(slots, (B, 4)))
    np.testing.assert_array_equal(cache.key, key[:, slots])
    np.testing.assert_array_equal(cache.value, value[:, slots])


def test_no_mask_sees_all_that_a_rolling_cache_holds():
    query, key, value = inputs(SIZES)
    cache = empty(4, rolling=True)
    _, cache = step(query[:, :5], key[:, :5], value[:, :5], cache, None, None, None, {})
    out, _ = step(query[:, 5:], key[:, 5:], value[:, 5:], cache, None, None, None, {})
    assert_close(out, reference.attention(query[:, 5:], key[:, 1:], value[:, 1:]).out)


def test_arrays_over_a_rolling_cache_are_for_its_slots_and_then_the_new_tokens():
    query, key, value = inputs(SIZES)
    _, cache = step(query[:, :5], key[:, :5], value[:, :5], empty(4, rolling=True), None, None, None, {})
    np.testing.assert_array_equal(cache.positions, [[4, 1, 2, 3]] * B)
    mask, bias = np.random.default_rng(1).random((B, N, 2, 6)) < 0.5, normal(2, B, N, 2, 6)
    out, _ = step(query[:, 5:], key[:, 5:], value[:, 5:], cache, mask, bias, None, {})
    order = [4, 1, 2, 3, 5, 6]
    assert_close(out, reference.attention(query[:, 5:], key[:, order], value[:, order], mask, bias).out)


def _numbered_masks():
    """Masks of numbers below 12, and their negations and combinations."""
    simple = [masks.causal(), masks.causal(-3), masks.causal(jnp.int32(-8)), masks.prefix(0), masks.prefix(2)]
    simple += [masks.window(None, 0), masks.window(5, 0), masks.window(3, 1), masks.window(7, None)]
    simple += [masks.window(np.int32(6), 0)]
    simple += [~mask for mask in simple]
    yield from simple
    for a, b in itertools.combinations(simple, 2):
        yield a & b
        yield a | b
    for n in range(1, 12):
        yield masks.prefix(n) & ~masks.prefix(n - 1)
        yield masks.window(n, 0) & ~masks.window(n - 1, 0)


def test_a_mask_that_is_known_to_look_back_further_than_the_capacity_is_refused():
    far = (np.arange(64)[:, None] - np.arange(64)[None, :]) > 4
    refused = 0
    for mask in _numbered_masks():
        looks_past = bool((np.asarray(mask.dense(64, 64)) & far).any())
        assert _cache._looks_past(mask, 4, 2) == looks_past, mask
        refused += looks_past
    assert refused > 100


NOT_KNOWN = {
    "a window of each head": lambda: masks.window(np.array([[9] * N]), 0),
    "a rule": lambda: masks.causal() & masks.rule(near, np.int32(9)),
    "an array": lambda: masks.causal() & np.ones((B, N, 1, 1), bool),
    "segments": lambda: masks.causal() & masks.segments(np.zeros((B, 1), int), np.zeros((B, 5), int)),
    "lengths": lambda: masks.causal() & masks.lengths(key=4),
    "an array alone": lambda: np.ones((B, N, 1, 5), bool),
    "no mask": lambda: None,
    "a rule with a random key": lambda: masks.rule(lambda q, k, rng: abs(q - k) < 9, jax.random.key(0)),
    "a rule with a NaN": lambda: masks.rule(lambda q, k, x: abs(q - k) < 9, np.float32(NAN)),
}


@pytest.mark.parametrize("mask", NOT_KNOWN.values(), ids=NOT_KNOWN)
def test_a_mask_of_which_that_is_not_known_is_taken(mask):
    out, _ = cached_attention(*(x[:, :1] for x in inputs(SIZES)), empty(4, rolling=True), mask())
    assert np.isfinite(out).all()


def test_a_window_that_is_traced_is_taken_and_one_that_is_not_is_refused_while_tracing():
    chunk = [x[:, :1] for x in inputs(SIZES)]
    f = lambda n: cached_attention(*chunk, empty(4, rolling=True), masks.window(n, 0))[0]  # noqa: E731
    assert np.isfinite(jax.jit(f)(9)).all()
    with pytest.raises(ValueError, match="look back at most capacity = 4"):
        jax.jit(lambda: f(np.int32(9)))()


# What is not there


@functools.partial(jax.jit, static_argnames="how")
def _pulled(cache, chunk, new_lengths, how):
    mask = masks.window(4, 0) if cache.rolling else masks.causal()

    def f(chunk, key, value):
        return step(*chunk, cache._replace(key=key, value=value), mask, None, new_lengths, {}, how)

    found, pull, after = jax.vjp(f, chunk, cache.key, cache.value, has_aux=True)
    return found, after, pull(jax.tree.map(jnp.ones_like, found))


def pulled(engine, cache, chunk, *new_lengths):
    """Of a call with statistics: what it gives, the cache after it, and the gradients of its sum to chunk and cache."""
    return _pulled(cache, chunk, jnp.array(new_lengths, np.int32), (("return_stats", True), *engine.items()))


CHUNK = [jnp.asarray(x[:, 3:6]) for x in inputs(SIZES)]


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def partly(rolling, *lengths):
    """A cache with these lengths, and zeros where nothing is written."""
    cache = empty(4, rolling=True) if rolling else empty()
    held = np.arange(cache.capacity) < np.array(lengths)[:, None]
    key, value = (normal(i, *x.shape) * held[..., None, None] for i, x in enumerate((cache.key, cache.value)))
    positions = jnp.array(np.where(held, np.arange(4), -1), np.int32) if rolling else None
    return Cache(jnp.array(key), jnp.array(value), jnp.array(lengths, np.int32), positions)


RINGS = pytest.mark.parametrize("rolling", [False, True], ids=["fixed", "rolling"])


@RINGS
def test_unwritten_slots_are_never_read(rolling, engine):
    cache = partly(rolling, 3, 1)
    clean, dirty = (pulled(engine, c, CHUNK, 3, 2) for c in (cache, garbage(cache)))
    same_bits([clean[0], clean[2]], [dirty[0], dirty[2]])
    assert np.isfinite(clean[0][0]).all() and np.isfinite(dirty[1].key[0, :4]).all()
    # Only the first token of the second sequence was there to have a gradient.
    of_key = np.asarray(dirty[2][1])
    assert of_key[1, 0].all() and not of_key[1, 1:].any()


@RINGS
def test_padding_is_never_read_or_written(rolling, engine):
    cache, new = partly(rolling, 3, 1), np.array([1, 0])
    real = (np.arange(3) < new[:, None])[..., None, None]
    clean, dirty = (pulled(engine, cache, c, *new) for c in (CHUNK, [jnp.where(real, x, NAN) for x in CHUNK]))
    same_bits(clean, dirty)
    (out, stats), after, (of_chunk, of_key, _) = dirty
    assert np.asarray(out)[0, 0].all() and not np.where(real, 0, out).any()
    assert (np.where(real[..., 0], -INF, stats.lse) == -INF).all()
    assert (np.where(real[..., 0], -INF, stats.max_logit) == -INF).all()
    assert not any(np.where(real, 0, x).any() for x in of_chunk)
    assert not np.asarray(of_key)[1].any()
    # The second sequence got nothing.
    same_bits([x[1] for x in jax.tree.leaves(after)], [x[1] for x in jax.tree.leaves(cache)])
    assert after.lengths.tolist() == [4, 1]


def test_a_padded_row_has_the_sink_alone():
    sink = normal(6, N)
    (_, stats), _ = step(
        *(x[:, :2] for x in inputs(SIZES)), empty(), masks.causal(), None, np.array([1, 0]), {"sink": sink},
        (("return_stats", True),),
    )  # fmt: skip
    assert_close(stats.lse[1], np.broadcast_to(sink, (2, N)))


def test_padding_is_no_empty_row_and_a_query_that_sees_nothing_is_one():
    chunk, new = [x[:, :3] for x in inputs(SIZES)], np.array([3, 0], np.int32)
    how = (("empty", "raise"),)
    must = "cached_attention: a query has no key that it may attend to, and empty='raise'."
    message = f"{must} Pass empty='zero' for zeros."
    assert np.isfinite(cached_attention(*chunk, empty(), empty="raise", new_lengths=new)[0]).all()
    with pytest.raises(ValueError) as error:
        cached_attention(*chunk, empty(), masks.causal(-1), empty="raise", new_lengths=new)
    assert str(error.value) == message
    checked = checkify.checkify(functools.partial(step, how=how))
    assert checked(*chunk, empty(), masks.causal(), None, new, {})[0].get() is None
    assert message in checked(*chunk, empty(), masks.causal(np.int32(-1)), None, new, {})[0].get()


def test_tiles_of_slots_that_no_sequence_has_written_are_skipped():
    read = set()

    def note(query_positions, key_positions):
        jax.debug.callback(lambda k: read.update(np.ravel(k).tolist()), key_positions)
        return key_positions >= 0

    cache = empty(12)._replace(lengths=jnp.array([3, 1], np.int32))
    how = (("method", "blockwise"), ("block_size", (1, 3)))
    step(*(x[:, :1] for x in inputs(SIZES)), cache, masks.rule(note), None, None, {}, how)
    jax.effects_barrier()
    assert read == set(range(6))


# Too many tokens


# The lengths of two sequences, and how many tokens they get: something is wrong with the second.
TOO_MANY = {
    "too many": ([3, 9], [3, 3]),
    "more than there are": ([3, 5], [1, 4]),
    "fewer than none": ([3, 5], [2, -1]),
    "after a negative length": ([3, -2], [3, 2]),
    "none, after too many": ([3, 12], [1, 0]),
}


@pytest.mark.parametrize("lengths, new", TOO_MANY.values(), ids=TOO_MANY)
def test_a_sequence_that_is_too_long_is_nan_from_then_on_and_nothing_of_it_is_written(lengths, new, engine):
    cache = partly(False, *lengths)
    found, after, (of_chunk, *of_cache) = pulled(engine, cache, CHUNK, *new)
    assert all(np.isnan(x[1]).all() for x in jax.tree.leaves(found))
    assert after.lengths.tolist() == [3 + new[0], CAPACITY + 1]
    same_bits([x[1] for x in (after.key, after.value)], [x[1] for x in (cache.key, cache.value)])
    # Never a quiet zero where a query sees anything.
    real = max(new[1], 0) if lengths[1] >= 0 else 0
    assert np.isnan(of_chunk[0][1, :real]).all()
    # The other sequence has what it has beside one that is fine.
    fine = pulled(engine, cache._replace(lengths=jnp.array([3, 0], np.int32)), CHUNK, new[0], 1)
    for x, y in zip(*map(jax.tree.leaves, ((found, after, (of_chunk, *of_cache)), fine)), strict=True):
        assert_close(x[0], y[0])
    # Later calls.
    found, later, _ = pulled(engine, after, CHUNK, 1, 0)
    assert all(np.isnan(x[1]).all() and not np.isnan(x[0]).any() for x in jax.tree.leaves(found))
    assert later.lengths.tolist() == [4 + new[0], CAPACITY + 1]


def test_a_full_cache_is_not_too_long():
    found, after, _ = pulled({"method": "dense"}, partly(False, 3, 11), CHUNK, 3, 0)
    assert after.lengths.tolist() == [6, 11] and not np.isnan(found[0]).any()


def test_a_rolling_cache_ends_where_positions_do():
    end = 2**31 - 2
    cache = partly(True, 3, 4)
    positions = jnp.array([[0, 1, 2, -1], [end - 4 + i for i in (2, 3, 0, 1)]], np.int32)
    cache = cache._replace(lengths=jnp.array([3, end - 1], np.int32), positions=positions)
    for new, last in ((1, 1), end), ((1, 2), end + 1), ((1, -1), end + 1):
        found, after, _ = pulled({"method": "dense"}, cache, CHUNK, *new)
        assert after.lengths.tolist() == [4, last]
        assert np.isnan(np.asarray(found[0])[1, 0]).all() == (last > end) and np.isfinite(found[0][0]).all()


def test_too_many_tokens_are_an_error_under_checkify():
    chunk = [x[:, :3] for x in inputs(SIZES)]
    checked = jax.jit(checkify.checkify(lambda *args: step(*args)))
    for rolling, most in (False, "capacity = 11"), (True, "2147483646"):
        cache = partly(rolling, 3, 1)
        mask = masks.window(4, 0)
        assert checked(*chunk, cache, mask, None, np.array([3, 3]), {})[0].get() is None
        text = checked(*chunk, cache, mask, None, np.array([3, 4]), {})[0].get()
        must = "new_lengths must be within 0 ... T = 3, and the lengths after the call must be at most"
        assert f"cached_attention: {must} {most}." in text
    error, _ = checked(*chunk, partly(False, 3, 9), masks.causal(), None, None, {})
    assert "at most capacity = 11." in error.get()


# Transforms


@RINGS
def test_gradients_through_cached_chunks_are_those_of_the_whole_sequence(rolling, engine):
    mask = masks.causal() & masks.window(3, 0)
    cotangent = normal(9, B, S, N, D)

    def through(query, key, value, slopes, cuts=(0, 3, 7)):
        cache, outs = garbage(empty(4, rolling=True) if rolling else empty()), []
        for i, j in itertools.pairwise(cuts):
            chunk = (x[:, i:j] for x in (query, key, value))
            out, cache = step(*chunk, cache, mask, biases.alibi(slopes), None, {}, tuple(engine.items()))
            outs.append(out)
        return jnp.concatenate(outs, 1)

    def whole(query, key, value, slopes):
        return attention(query, key, value, mask, biases.alibi(slopes), method="dense")

    args = (*map(jnp.asarray, inputs(SIZES)), jnp.asarray(SLOPES))
    loss = lambda f: lambda *args: jnp.vdot(f(*args), cotangent)  # noqa: E731
    got, want = (jax.jit(jax.grad(loss(f), (0, 1, 2, 3)))(*args) for f in (through, whole))
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, factor=10)


def test_first_and_second_derivatives_are_those_of_finite_differences():
    def f(query, key, value):
        def body(cache, token):
            out, cache = cached_attention(*(x[None] for x in token), cache, masks.window(2, 0))
            return cache, out[0]

        cache = Cache.create(2, 1, 1, dtype=np.float64, rolling=True)
        return jax.lax.scan(body, cache, (query, key, value))[1]

    args = normal(1, 4, 2, 1), normal(2, 4, 1, 1), normal(3, 4, 1, 1)
    check_grads(jax.jit(f), args, order=2, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6)


@RINGS
def test_scan_while_loop_and_eager_calls_are_one_loop_and_checkify_finds_nothing(rolling):
    query, key, value = map(jnp.asarray, inputs(SIZES))
    cache = empty(4, rolling=True) if rolling else empty()
    tokens = [jnp.moveaxis(x, 1, 0)[:, :, None] for x in (query, key, value)]

    def body(cache, token):
        out, cache = cached_attention(*token, cache, masks.window(3, 0))
        return cache, out[..., 0, :, :]

    def scanned(cache, tokens):
        return jax.lax.scan(jax.checkpoint(body), cache, tokens)

    def looped(cache, tokens):
        def one(state):
            i, cache, outs = state
            cache, out = body(cache, [x[i] for x in tokens])
            return i + 1, cache, outs.at[i].set(out)

        return jax.lax.while_loop(lambda state: state[0] < S, one, (0, cache, jnp.zeros((S, B, N, D))))[1:]

    eager, outs = cache, []
    for token in zip(*tokens, strict=True):
        eager, out = body(eager, token)
        outs.append(out)
    eager = eager, jnp.stack(outs)
    assert_close(jnp.moveaxis(eager[1], 0, 1), reference.attention(query, key, value, CAUSAL & (Q - P <= 3)).out)
    # JAX cannot look for indices that are out of bounds in a scatter that is mapped.
    errors = checkify.user_checks | checkify.float_checks
    for f in (scanned, looped):
        error, got = checkify.checkify(jax.jit(f), errors=errors)(cache, tokens)
        assert error.get() is None
        assert jax.tree.structure(got) == jax.tree.structure(eager)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(eager), strict=True):
            assert_close(x, y)
    one, token = jax.tree.map(lambda x: x[0], (cache, [x[0] for x in tokens]))
    error, _ = checkify.checkify(jax.jit(body), errors=checkify.all_checks)(one, token)
    assert error.get() is None


def test_debug_flags_find_nothing():
    with jax.debug_nans(True), jax.debug_infs(True):
        for cache in (partly(False, 3, 1), partly(True, 3, 1)):
            chunk = [jnp.asarray(x[:, 3:6]) for x in inputs(SIZES)]
            loss = lambda *x: step(*x, masks.window(2, 0), None, np.array([3, 1]), {})[0].sum()  # noqa: E731
            jax.block_until_ready((loss(*chunk, cache), jax.jit(jax.grad(loss, (0, 1, 2)))(*chunk, cache)))


@RINGS
def test_vmap_over_a_cache_is_a_batch(rolling):
    chunk = [jnp.asarray(x[:, 3:6]) for x in inputs(SIZES)]
    cache, new = partly(rolling, 3, 1), np.array([3, 2])
    mask = masks.window(4, 0)
    want = step(*chunk, cache, mask, None, new, {})
    for axis in (0, -1):
        moved = jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), (chunk, cache))  # noqa: B023
        f = jax.vmap(lambda chunk, cache, new: step(*chunk, cache, mask, None, new, {}), in_axes=(axis, axis, 0))
        got = f(*moved, new)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_close(x, y)
    # One prompt for two caches.
    got = jax.vmap(lambda cache: step(*(x[0] for x in chunk), cache, mask, None, None, {})[0])(cache)
    twice = [jnp.stack([x[0], x[0]]) for x in chunk]
    assert_close(got, step(*twice, cache, mask, None, None, {})[0])


def test_two_batch_axes_are_one_of_their_product():
    chunk = [jnp.asarray(x[:, 3:6]) for x in inputs(SIZES)]
    split = functools.partial(jax.tree.map, lambda x: x.reshape(1, 2, *x.shape[1:]))
    for rolling in (False, True):
        cache, new = partly(rolling, 3, 1), np.array([3, 2])
        want = step(*chunk, cache, masks.window(4, 0), None, new, {})
        got = step(*split(chunk), split(cache), masks.window(4, 0), None, new[None], {})
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(split(want)), strict=True):
            assert_close(x, y)


@pytest.mark.parametrize("T", [1, 2])
def test_a_decode_loop_traces_once_and_writes_in_place(T, engine):
    traces = 0

    @functools.partial(jax.jit, donate_argnums=0)
    def one(cache, chunk, scale, softcap, sink, slopes, window, rng):
        nonlocal traces
        traces += 1
        rule = masks.causal() & masks.window(window, None)
        how = {"scale": scale, "softcap": softcap, "sink": sink, "dropout_rate": 0.1, "dropout_rng": rng}
        return cached_attention(*chunk, cache, rule, biases.alibi(slopes), **how, **engine)

    cache = empty(64, batch=())
    for i in range(5):
        chunk = [jnp.asarray(x) for x in inputs(SIZES._replace(B=(), T=T, S=T), i)]
        held = cache.key
        _, cache = one(cache, chunk, 0.1 + i, 1.0 + i, normal(i, N), normal(i, N), np.int32(i), jax.random.key(i))
        assert held.is_deleted()
    assert traces == 1 and cache.lengths == 5 * T


@RINGS
def test_a_donated_cache_is_written_in_place(rolling):
    cache = jax.eval_shape(lambda: Cache.create(4096, 1, 64, dtype=np.float32, rolling=rolling))
    chunk = [jax.ShapeDtypeStruct((1, 1, 64), np.float32)] * 3
    appended = lambda cache, *chunk: cached_attention(*chunk, cache, masks.window(4096, 0))[1]  # noqa: E731
    memory = jax.jit(appended, donate_argnums=0).lower(cache, *chunk).compile().memory_analysis()
    held = 2 * 4096 * 64 * 4
    # Whatever the attention needs: it is not asked for.
    assert memory.alias_size_in_bytes >= held and memory.temp_size_in_bytes < held / 8


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint32])
def test_lengths_may_be_integers_of_any_kind(kind):
    cache, chunk = partly(False, 3, 1), [x[:, 3:5] for x in inputs(SIZES)]
    want = step(*chunk, cache, masks.causal(), None, np.array([2, 1]), {})
    other = cache._replace(lengths=cache.lengths.astype(kind))
    got = step(*chunk, other, masks.causal(), None, np.array([2, 1], kind), {})
    same_bits(got, want)
    assert got[1].lengths.dtype == np.int32


@RINGS
def test_keys_and_values_are_not_repeated_for_the_heads_that_share_them(rolling, engine):
    capacity, N, H = 61, 8, 16
    cache = Cache.create(capacity, 2, H, batch=(B,), dtype=np.float64, rolling=rolling)
    chunk = [normal(i, B, 1, n, H) for i, n in enumerate((N, 2, 2))]

    def f(*chunk):
        return cached_attention(*chunk, cache, masks.window(capacity, 0), **engine)

    found = [x.size for _, x in made(jax.make_jaxpr(f)(*chunk))]
    # The largest is the cache, or the ring with the new token.
    assert B * capacity * 2 * H <= max(found) <= B * (capacity + 1) * 2 * H


def test_dropping_the_last_tokens_is_not_having_had_them():
    mask = masks.causal() & masks.window(3, 0)
    query, key, value = inputs(SIZES)
    for cache in (empty(), empty(6, rolling=True)):
        _, kept = step(*(x[:, :4] for x in (query, key, value)), cache, mask, None, None, {})
        # Three more, of which none stays, and others in their place.
        _, rejected = step(*(-x[:, 4:7] for x in (query, key, value)), kept, mask, None, None, {})
        rejected = rejected._replace(lengths=rejected.lengths - 3)
        want, _ = step(*(x[:, 4:] for x in (query, key, value)), kept, mask, None, None, {})
        got, _ = step(*(x[:, 4:] for x in (query, key, value)), rejected, mask, None, None, {})
        assert_close(got, want)


@RINGS
def test_a_decode_step_can_be_exported_and_runs_after_reloading(rolling):
    pytest.importorskip("flatbuffers")
    from jax import export

    # With statistics and its gradient, or as it is.
    how = (("return_stats", rolling),)
    f = jax.jit(lambda query, *args: step(query, *args, masks.window(4, 0), None, None, {}, how))
    args = (*(x[:, :1] for x in CHUNK), partly(rolling, 3, 1))
    loaded = export.deserialize(export.export(f)(*args).serialize(vjp_order=int(rolling)))
    got, want = loaded.call(*args), f(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(x, y)
    if rolling:
        loss = lambda f: lambda query: sum(x.sum() for x in jax.tree.leaves(f(query, *args[1:])[0]))  # noqa: E731
        assert_close(jax.grad(loss(loaded.call))(args[0]), jax.grad(loss(f))(args[0]))


def test_a_cache_may_be_sharded_over_its_batch_and_heads():
    code = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        import conftest
        from battery import Sizes, inputs
        from conftest import assert_close
        from jattn import Cache, cached_attention, masks

        query, key, value = map(jnp.asarray, inputs(Sizes((2,), 3, 3, 4, 2, 3, 2)))
        automatic, explicit = ((kind,) * 2 for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit))
        for kinds, rolling in ((automatic, False), (automatic, True), (explicit, True)):
            mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=kinds)
            cache = Cache.create(8, 2, 3, 2, batch=(2,), dtype=np.float64, rolling=rolling)
            cache = cache._replace(lengths=cache.lengths + jnp.array([0, 2], np.int32))
            f = lambda query, key, value, cache: cached_attention(query, key, value, cache, masks.window(8, 0))
            want = f(query, key, value, cache)
            x, lengths = P("b", None, "h"), P("b")
            specs = Cache(x, x, lengths, lengths if rolling else None)
            mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(x, x, x, specs), out_specs=(x, specs)))
            placed = [jax.device_put(y, NamedSharding(mesh, x)) for y in (query, key, value)]
            placed.append(jax.tree.map(lambda y, s: jax.device_put(y, NamedSharding(mesh, s)), cache, specs))
            compiled = jax.jit(f).lower(*placed).compile()
            assert "all-gather" not in compiled.as_text() and "all-to-all" not in compiled.as_text()
            for got in (mapped(*placed), compiled(*placed)):
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                    assert_close(a, b)
        print("done")
    """
    here = os.path.dirname(os.path.abspath(__file__))
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([os.path.dirname(here), here]), "JAX_PLATFORMS": "cpu"}
        | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.stdout == "done\n", run.stderr


# Errors, other than those of test_errors.py


def call(*rules, query=(2, 3, 4, 3), key=(2, 3, 2, 3), value=(2, 3, 2, 2), cache=None, dtype=np.float64, **options):
    """A call with T = 3, but for what is named."""
    arrays = (jnp.zeros(shape, dtype) for shape in (query, key, value))
    return cached_attention(*arrays, empty() if cache is None else cache, *rules, **options)


def traced(**options):
    """One to which the lengths of the cache are not known."""
    cache = options.pop("cache", empty())
    return jax.jit(lambda cache: call(cache=cache, **options))(cache)


TOO_LONG = Cache(jnp.zeros((2, 11, 2, 3)), jnp.zeros((2, 11, 2, 2)), np.array([3, 12]))
OF_CACHE = "B, K, H and D are those of the cache."
LARGER = "Make a larger cache, or one that rolls."
MISUSES = {
    "a capacity of 0": (
        lambda: Cache.create(0, K, H), ValueError, "Cache.create: capacity must be an int >= 1, got 0."
    ),
    "a capacity that is no int": (
        lambda: Cache.create(8.0, K, H), ValueError, "Cache.create: capacity must be an int >= 1, got 8.0."
    ),
    "a traced capacity": (
        lambda: jax.jit(lambda n: Cache.create(n, K, H).lengths)(8),
        ValueError,
        "Cache.create: capacity must be an int >= 1, got a traced array.",
    ),
    "no heads": (lambda: Cache.create(8, 0, H), ValueError, "Cache.create: K must be an int >= 1, got 0."),
    "heads that are true": (
        lambda: Cache.create(8, True, H), ValueError, "Cache.create: K must be an int >= 1, got True."
    ),
    "no features": (lambda: Cache.create(8, K, 0), ValueError, "Cache.create: H must be an int >= 1, got 0."),
    "fewer features of a value than none": (
        lambda: Cache.create(8, K, H, -1), ValueError, "Cache.create: D must be an int >= 0, got -1."
    ),
    "a batch that is no tuple": (
        lambda: Cache.create(8, K, H, batch=2), TypeError, "Cache.create: batch must be a tuple of ints, got 2."
    ),
    "a negative batch": (
        lambda: Cache.create(8, K, H, batch=(2, -1)), ValueError, "Cache.create: batch[1] must be an int >= 0, got -1."
    ),
    "a cache of integers": (
        lambda: Cache.create(8, K, H, dtype=np.int32), TypeError, "Cache.create: dtype must be floating, got int32."
    ),
    "a cache of float8": (
        lambda: Cache.create(8, K, H, dtype=jnp.float8_e4m3fn),
        TypeError,
        "Cache.create: dtype must be floating, got float8_e4m3fn.",
    ),
    "rolling that is no bool": (
        lambda: Cache.create(8, K, H, rolling=4), TypeError, "Cache.create: rolling must be True or False, got 4."
    ),
    "another dtype than that of the cache": (
        lambda: call(dtype=np.float32),
        TypeError,
        "cached_attention: query, key, value, cache.key and cache.value must share one floating dtype, got float32, "
        "float32, float32, float64, float64.",
    ),
    "another H": (
        lambda: call(query=(2, 3, 4, 5)),
        ValueError,
        f"cached_attention: query must be (*B, T, N, H) = (2, 3, 4, 3), got (2, 3, 4, 5). {OF_CACHE}",
    ),
    "another batch": (
        lambda: call(query=(3, 3, 4, 3)),
        ValueError,
        f"cached_attention: query must be (*B, T, N, H) = (2, 3, 4, 3), got (3, 3, 4, 3). {OF_CACHE}",
    ),
    "another T of keys": (
        lambda: call(key=(2, 2, 2, 3)),
        ValueError,
        f"cached_attention: key must be (*B, T, K, H) = (2, 3, 2, 3), got (2, 2, 2, 3). {OF_CACHE}",
    ),
    "another K": (
        lambda: call(key=(2, 3, 4, 3), value=(2, 3, 4, 2)),
        ValueError,
        f"cached_attention: key must be (*B, T, K, H) = (2, 3, 2, 3), got (2, 3, 4, 3). {OF_CACHE}",
    ),
    "another D": (
        lambda: call(value=(2, 3, 2, 3)),
        ValueError,
        f"cached_attention: value must be (*B, T, K, D) = (2, 3, 2, 2), got (2, 3, 2, 3). {OF_CACHE}",
    ),
    "a cache without heads": (
        lambda: call(cache=empty()._replace(key=jnp.zeros((11, 3)))),
        ValueError,
        "cached_attention: cache.key must be (*B, capacity, K, H), got (11, 3).",
    ),
    "a cache with values of another capacity": (
        lambda: call(cache=empty()._replace(value=jnp.zeros((2, 9, 2, 2)))),
        ValueError,
        "cached_attention: cache.value must be (*B, capacity, K, D) = (2, 11, 2, 2), got (2, 9, 2, 2).",
    ),
    "a cache with one length for all": (
        lambda: call(cache=empty()._replace(lengths=jnp.int32(3))),
        ValueError,
        "cached_attention: cache.lengths must be (*B,) = (2,), got ().",
    ),
    "a cache with lengths that are floats": (
        lambda: call(cache=empty()._replace(lengths=jnp.zeros(2))),
        TypeError,
        "cached_attention: cache.lengths must be integers, got float64.",
    ),
    "a cache with too few positions": (
        lambda: call(masks.window(4, 0), cache=empty(4, rolling=True)._replace(positions=jnp.zeros((2, 3), int))),
        ValueError,
        "cached_attention: cache.positions must be (*B, capacity) = (2, 4), got (2, 3).",
    ),
    "a negative length": (
        lambda: call(cache=empty()._replace(lengths=jnp.array([3, -1]))),
        ValueError,
        "cached_attention: cache.lengths must be at least 0, got [3, -1].",
    ),
    "fewer new tokens than none": (
        lambda: traced(new_lengths=[-1, 3]),
        ValueError,
        "cached_attention: new_lengths must be within 0 ... T = 3, got [-1, 3].",
    ),
    "too many tokens": (
        lambda: call(cache=empty()._replace(lengths=jnp.array([8, 9]))),
        ValueError,
        f"cached_attention: the lengths after the call must be at most capacity = 11, got [11, 12]. {LARGER}",
    ),
    "too many tokens of a sequence": (
        lambda: call(cache=empty()._replace(lengths=jnp.array([8, 9])), new_lengths=[0, 3]),
        ValueError,
        f"cached_attention: the lengths after the call must be at most capacity = 11, got [8, 12]. {LARGER}",
    ),
    "a sequence that had too many": (
        lambda: jax.jit(lambda n: call(cache=TOO_LONG, new_lengths=n))(np.ones(2, int)),
        ValueError,
        f"cached_attention: the lengths after the call must be at most capacity = 11, got at least [3, 12]. {LARGER}",
    ),
    "more tokens than any cache of the capacity holds": (
        lambda: traced(cache=empty(2)),
        ValueError,
        f"cached_attention: the lengths after the call must be at most capacity = 2, got at least 3. {LARGER}",
    ),
    "an unbounded mask of a rolling cache": (
        lambda: traced(cache=empty(4, rolling=True)),
        ValueError,
        "cached_attention: mask must look back at most capacity = 4 positions, for a rolling cache, got "
        "causal(offset=0). Pass mask & masks.window(4, None), or a cache that does not roll.",
    ),
    "a window that is larger than a rolling cache": (
        lambda: call(masks.window(5, 0), cache=empty(4, rolling=True)),
        ValueError,
        "cached_attention: mask must look back at most capacity = 4 positions, for a rolling cache, got "
        "window(left=5, right=0). Pass mask & masks.window(4, None), or a cache that does not roll.",
    ),
    "a mask as wide as the chunk": (
        lambda: call(np.ones((2, 4, 3, 3), bool)),
        ValueError,
        "cached_attention: mask must be (*B, N, T, S) = (2, 4, 3, 11), got (2, 4, 3, 3).",
    ),
    "a bias as wide as a rolling cache without the chunk": (
        lambda: call(masks.window(4, 0), np.ones((2, 4, 3, 4)), cache=empty(4, rolling=True)),
        ValueError,
        "cached_attention: bias must be (*B, N, T, S) = (2, 4, 3, 7), got (2, 4, 3, 4).",
    ),
    "ids of the new keys alone": (
        lambda: call(masks.segments(np.zeros((2, 3), int))),
        ValueError,
        "cached_attention: segments(key_ids=...) must be (*B, S) = (2, 11), got (2, 3).",
    ),
}  # fmt: skip


@pytest.mark.parametrize("misuse, kind, message", MISUSES.values(), ids=MISUSES)
def test_a_misuse_is_named(misuse, kind, message):
    with pytest.raises(kind) as error:
        misuse()
    assert str(error.value) == message
