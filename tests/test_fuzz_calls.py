"""Random steps of a cache, calls of the kernel, and masks for `jattn.testing`; `make fuzz` tries many more."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuzz import INF, NAN, close

from jattn import Cache, _cudnn, attend, attention, biases, cached_attention, masks, testing


def picker(draw):
    return lambda *values: draw(st.sampled_from(values))


# A cache: what is appended, dropped from the end, and too much, step by step.


class Cached(NamedTuple):
    """`mask` is a kind and its number. A step is (dropped, new), each an int for each sequence."""

    B: tuple
    T: int
    capacity: int
    K: int
    G: int
    H: int
    D: int
    dtype: str
    rolling: bool
    mask: tuple
    sink: bool
    lengths_given: bool
    engine: tuple
    steps: tuple
    seed: int


@st.composite
def caches(draw):
    pick = picker(draw)
    B, T, rolling, capacity = pick((), (2,), (3,), (2, 1)), pick(1, 1, 2, 3, 5), draw(st.booleans()), pick(1, 3, 5, 8)
    kinds = [("none", 0), ("window", draw(st.integers(0, capacity))), ("array", 0), ("traced window", 0)]
    one = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(int(np.prod(B))))  # noqa: E731
    lengths_given = draw(st.booleans())
    new = lambda: one(0, T) if draw(st.integers(0, 9)) else one(-1, T + 1)  # noqa: E731
    steps = tuple((one(0, 2), new() if lengths_given else one(T, T)) for _ in range(draw(st.integers(1, 6))))
    return Cached(
        B=B,
        T=T,
        capacity=capacity,
        K=pick(1, 2),
        G=pick(1, 2),
        H=pick(1, 2, 3),
        D=pick(1, 2),
        dtype=pick("float64", "float32"),
        rolling=rolling,
        mask=pick(*kinds, *([] if rolling else [("causal", 0), ("causal", 1), ("not causal", 0)])),
        sink=draw(st.booleans()),
        lengths_given=lengths_given,
        engine=pick((), (("method", "dense"),), (("method", "blockwise"), ("block_size", (2, 3)))),
        steps=steps,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


class Sequence:
    """One sequence of a cache as a list of slots, (position, key, value) each."""

    def __init__(self, c):
        self.slots, self.length, self.spoilt = [None] * c.capacity, 0, False

    def step(self, c, dropped, new, key, value):
        """Keys, values, positions and who is there at all, for the step's queries; then the tokens are written."""
        longest = 10**9 if c.rolling else c.capacity
        self.length -= min(dropped, self.length) * (not self.spoilt)
        self.spoilt |= not 0 <= new <= c.T or self.length + new > longest
        if self.spoilt:
            return None
        there = [slot if slot and slot[0] < self.length else None for slot in self.slots]
        own = [(self.length + i, key[i], value[i]) if i < new else None for i in range(c.T)]
        for token in filter(None, own):
            self.slots[token[0] % c.capacity] = token
        if c.rolling:
            there += own
        else:
            there = [slot if slot and slot[0] < self.length + new else None for slot in self.slots]
        before, self.length = self.length, self.length + new
        nothing = (0, np.full((c.K, c.H), NAN), np.full((c.K, c.D), NAN))
        positions, keys, values = zip(*(slot or nothing for slot in there), strict=True)
        stored = np.array([slot is not None for slot in there])
        real = np.arange(c.T) < new
        return np.array(keys), np.array(values), np.array(positions), stored & real[:, None], before + np.arange(c.T)


def seen(c, array, left, q, k):
    """bool (N, T, S): what the mask of a case shows at these positions."""
    kind, number = c.mask
    ahead = k[None, :] - q[:, None]
    if kind == "array":
        return array
    by = {"none": ahead <= INF, "causal": ahead <= number, "not causal": ahead > 0}
    return by.get(kind, (-ahead <= (left if kind == "traced window" else number)) & (ahead <= 0))[None]


def rule(c, array, left):
    kind, number = c.mask
    by = {
        "none": lambda: None,
        "array": lambda: array,
        "window": lambda: masks.window(number, 0),
        "traced window": lambda: masks.window(left, 0),
        "causal": lambda: masks.causal(number),
        "not causal": lambda: ~masks.causal(),
    }
    return by[kind]()


# One takes seconds.
@settings(max_examples=max(8, settings().max_examples // 4))
@given(caches())
def test_any_steps_of_a_cache_are_attention_to_what_it_holds(case):
    c = case
    N, S = c.K * c.G, c.capacity + c.T * c.rolling

    def step(query, key, value, cache, array, left, sink, dropped, new):
        cache = cache._replace(lengths=cache.lengths - dropped)
        options = dict(c.engine) | {"sink": sink if c.sink else None, "new_lengths": new if c.lengths_given else None}
        return cached_attention(query, key, value, cache, rule(c, array, left), return_stats=True, **options)

    step = jax.jit(step, donate_argnums=3)
    cache = Cache.create(c.capacity, c.K, c.H, c.D, batch=c.B, dtype=c.dtype, rolling=c.rolling)
    cache = cache._replace(key=cache.key * NAN, value=cache.value * NAN)
    sequences = [Sequence(c) for _ in np.ndindex(*c.B)]
    rng = np.random.default_rng(c.seed)
    for dropped, new in c.steps:
        normal = lambda *shape: rng.normal(size=shape).astype(c.dtype)  # noqa: E731
        query, key, value = normal(*c.B, c.T, N, c.H), normal(*c.B, c.T, c.K, c.H), normal(*c.B, c.T, c.K, c.D)
        array, left, sink = rng.random((*c.B, N, c.T, S)) < 0.7, np.int32(rng.integers(0, c.capacity + 1)), normal(N)
        # What is not there cannot be dropped.
        dropped = [0 if s.spoilt else min(n, s.length) for s, n in zip(sequences, dropped, strict=True)]
        as_batch = lambda x: np.asarray(x, np.int32).reshape(c.B)  # noqa: E731
        (out, stats), cache = step(query, key, value, cache, array, left, sink, as_batch(dropped), as_batch(new))
        for at, s, n, gone in zip(np.ndindex(*c.B), sequences, new, dropped, strict=True):
            held = s.step(c, gone, n, key[at], value[at])
            if held is None:
                assert np.isnan(out[at]).all() and np.isnan(stats.lse[at]).all(), "too many tokens make no NaN"
                continue
            keys, values, positions, there, own = held
            mask = seen(c, array[at], left, own, positions) & there
            want = reference.attention(query[at], keys, values, mask, sink=sink if c.sink else None)
            tol = 1e-12 if c.dtype == "float64" else 2e-5
            close(out[at], want.out, tol, c.dtype, "out")
            close(stats.lse[at], want.lse, tol, c.dtype, "lse")
        longest = 2**31 - 2 if c.rolling else c.capacity
        lengths = [longest + 1 if s.spoilt else s.length for s in sequences]
        np.testing.assert_array_equal(np.ravel(cache.lengths), lengths)
    assert step._cache_size() == 1, "a step is traced again"


# The kernel: a call is refused by name, or it is one that the kernel can answer.


class Kernel(NamedTuple):
    heads: bool
    platform: str
    dtype: str
    B: tuple
    T: int
    S: int
    K: int
    G: int
    H: int
    D: int
    mask: str
    scale: str
    empty: str
    options: tuple


KERNEL_MASKS = {
    "none": lambda c: None,
    "causal": lambda c: masks.causal(),
    "causal by an array": lambda c: masks.causal(jnp.zeros((), np.int32)),
    "causal by an offset": lambda c: masks.causal(1),
    "window": lambda c: masks.window(None, 0),
    "both": lambda c: masks.causal() & masks.causal(),
    "array": lambda c: np.ones((*(1 for _ in c.B), 1, 1, 1) if c.heads else (1, 1), bool),
}
KERNEL_OPTIONS = {
    "a bias": lambda c: {"bias": biases.alibi(jnp.float32(1))},
    "a softcap": lambda c: {"softcap": 3.0},
    "a sink": lambda c: {"sink": np.zeros(c.K * c.G if c.heads else (), np.float32)},
    "positions": lambda c: {"query_positions": np.arange(c.T), "key_positions": np.arange(c.S)},
    "tiles": lambda c: {"block_size": (2, 2)},
    "dropout": lambda c: {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
    "statistics": lambda c: {"return_stats": True},
}
# What has no effect is no reason to refuse.
HARMLESS = {
    "no dropout": lambda c: {"dropout_rate": 0.0, "dropout_rng": jax.random.key(0)},
    "no statistics": lambda c: {"return_stats": False},
}


@st.composite
def kernel_calls(draw):
    pick = picker(draw)
    heads = draw(st.booleans())
    H = pick(8, 16, 16, 64, 128, 12, 136, 1)
    return Kernel(
        heads=heads,
        platform=pick("gpu", "gpu", "gpu", "gpu", "gpu", "cpu", "tpu"),
        dtype=pick("bfloat16", "bfloat16", "bfloat16", "float16", "float16", "float32", "float64"),
        B=pick((), (2,), (2, 3), (2,), (0,), (2, 0)) if heads else (),
        T=pick(5, 5, 5, 5, 1, 0),
        S=pick(5, 5, 5, 5, 1, 0),
        K=pick(1, 2) if heads else 1,
        G=pick(1, 2) if heads else 1,
        H=H,
        D=pick(H, H, H, H, 8),
        mask=pick("none", "none", "causal", "causal", *KERNEL_MASKS),
        scale=pick("none", "number", "array", "traced") if draw(st.booleans()) else "none",
        empty=pick("zero", "zero", "raise"),
        options=tuple(draw(st.sets(st.sampled_from([*KERNEL_OPTIONS, *HARMLESS]), max_size=pick(0, 0, 2)))),
    )


@given(kernel_calls())
def test_any_call_of_the_kernel_is_one_that_it_can_answer_or_is_refused_by_name(case):
    c = case
    reached = []

    def kernel(exact, scale, causal, query, key, value):
        reached.append((scale, causal))
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)

    shapes = (*c.B, c.T, c.K * c.G, c.H), (*c.B, c.S, c.K, c.H), (*c.B, c.S, c.K, c.D)
    arrays = [np.ones(shape if c.heads else (shape[0], shape[-1]), jnp.dtype(c.dtype)) for shape in shapes]
    options = {}
    for name in c.options:
        options |= (KERNEL_OPTIONS | HARMLESS)[name](c)
    scale = {"none": None, "number": 0.5, "array": jnp.float32(0.5), "traced": 0.5}[c.scale]

    def call(scale):
        f = attention if c.heads else attend
        return f(*arrays, KERNEL_MASKS[c.mask](c), scale=scale, empty=c.empty, method="cudnn", **options)

    known = c.scale != "traced"
    can = (
        c.platform == "gpu"
        and c.dtype in ("float16", "bfloat16")
        and c.H == c.D
        and c.H % 8 == 0
        and c.H <= 128
        and 0 not in (*c.B, c.T, c.S)
        and set(c.options) <= set(HARMLESS)
        and known
        and (c.mask == "none" or (c.mask == "causal" and c.T == c.S))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: c.platform)
        patch.setattr(_cudnn, "attend", kernel)
        if can:
            out = call(scale)
            assert out.shape == (*arrays[0].shape[:-1], c.D) and out.dtype == arrays[0].dtype
            assert reached == [(1 / np.sqrt(c.H) if scale is None else 0.5, c.mask == "causal")]
        else:
            with pytest.raises(ValueError, match=r"^atten(d|tion): method='cudnn' needs .*, got .*blockwise'"):
                jax.eval_shape(call, scale) if c.scale == "traced" else call(scale)
            assert not reached


# jattn.testing: no false alarm, and every leak by name.


class Leak(NamedTuple):
    mask: np.ndarray
    features: tuple
    kind: str
    leak: str
    dtype: str
    seed: int


@st.composite
def leaks(draw):
    pick = picker(draw)
    T_out, T_in = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = pick("sums", "curves", "attention")
    if kind == "attention":
        T_in = T_out
    mask = np.tri(T_out, T_in, pick(-1, 0, 1), bool) if draw(st.booleans()) else rng.random((T_out, T_in)) < 0.6
    mask[rng.integers(T_out), rng.integers(T_in)] = True
    features = (2,) if kind == "attention" else pick((), (1,), (2,))
    leak = pick("derivative", "value", "step")
    return Leak(mask, features, kind, leak, pick("float64", "float32", "bfloat16"), seed)


def reads(c):
    """Which inputs each output reads: attention that sees something reads its query too."""
    return c.mask | (np.eye(len(c.mask), dtype=bool) & c.mask.any(1)[:, None]) if c.kind == "attention" else c.mask


def reader(c, also=None):
    """A function of x (T_in, ...) with these reads, and one pair more."""
    matrix = np.where(c.mask, np.random.default_rng(c.seed).uniform(0.5, 2, c.mask.shape), 0)

    def one(x, t):
        if c.kind == "curves":
            terms = [jnp.sin(x[s] * x.dtype.type(matrix[t, s])) for s in np.flatnonzero(c.mask[t])]
        else:
            terms = [x[s] * x.dtype.type(matrix[t, s]) for s in np.flatnonzero(c.mask[t])]
        return sum(terms, jnp.zeros_like(x[0]))

    def read(x):
        if c.kind == "attention":
            # A key moves nothing where it is the only one; its value does.
            out = attend(x, x, jnp.sin(x) + x, c.mask, method="dense")
        else:
            out = jnp.stack([one(x, t) for t in range(len(c.mask))])
        if also is None:
            return out
        t, s = also
        more = {"derivative": lambda x: x, "value": lambda x: x * 0, "step": jnp.sign}[c.leak](x[s])
        return out.at[t].add(more)

    return read


# Each compiles a dozen programs.
@settings(max_examples=max(3, settings().max_examples // 8))
@given(leaks())
def test_no_mask_raises_a_false_alarm_and_every_leak_is_named(case):
    c = case
    rng = np.random.default_rng(c.seed)
    x = jnp.asarray(rng.normal(size=(c.mask.shape[1], *c.features)).astype(c.dtype))
    clean = reader(c)
    mask = reads(c)
    testing.assert_visible(clean, x, mask)
    square = mask.shape[0] == mask.shape[1]
    # Once an output has seen something, all that follow are to.
    if square and not np.triu(mask, 1).any() and (np.logical_or.accumulate(mask.any(1)) == mask.any(1)).all():
        testing.assert_causal(clean, x)
    hidden = np.argwhere(~mask)
    if len(hidden):
        t, s = map(int, hidden[rng.integers(len(hidden))])
        with pytest.raises(AssertionError, match=f"assert_visible: output {t} must not depend on input {s}, got"):
            testing.assert_visible(reader(c, (t, s)), x, mask)
        if s > t and square:
            with pytest.raises(AssertionError, match=r"assert_causal: output \d must not depend on input \d"):
                testing.assert_causal(reader(c, (t, s)), x)
    # What is read, and not said to be.
    t, s = map(int, (read := np.argwhere(mask))[rng.integers(len(read))])
    said = mask.copy()
    said[t, s] = False
    with pytest.raises(AssertionError, match=f"assert_visible: output {t} must not depend on input {s}, got"):
        testing.assert_visible(clean, x, said)
