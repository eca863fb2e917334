"""Random combinations of everything that a call may hold, against the reference; `make fuzz` tries many more.

A `Case` is a program: sizes, rules, options, engine, transforms. Compiling it takes seconds and running it none, so
that each is run on several draws of its arrays, all of which are traced. What is static is part of the case.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from jattn import Cache, attend, attention, attention_weights, biases, cached_attention, masks

# As many as there are kinds of values.
DRAWS = 8
NAN, INF = np.nan, np.inf
RESULTS = "out", "lse", "max_logit", "entropy"


class Case(NamedTuple):
    """`mask` and `bias` are trees of tuples (kind, *parameters). A parameter is static, or the axes that lead an
    array, one flag each: full or 1. `vary` says which arguments `level` maps, and along which axis.
    """

    call: str
    B: tuple
    T: int
    S: int
    N: int
    K: int
    H: int
    D: int
    dtype: str
    mask: Any
    bias: Any
    bias_dtype: str
    rows: bool
    scale: Any
    softcap: Any
    sink: bool
    rate: float
    positions: str
    engine: tuple
    stats: bool
    empty: str
    level: Any
    vary: tuple
    jit: bool
    checkpoint: bool
    inside: Any
    derivative: Any
    chunks: tuple
    rolling: bool
    known: bool
    seed: int


# Rules, each said twice. `lead` shapes an array of a case; `at` gives it axes to meet (*B, N, T, S).


def _lead(flags, c, core, heads_alone=False):
    axes = (c.N,) if heads_alone and len(flags) == 1 else (*c.B, c.N)
    return tuple(n if full else 1 for n, full in zip(axes, flags, strict=False)) + core


def _at(x, c, core=0, heads_alone=False):
    """An array or number, its `core` axes last and its leading ones in front."""
    x = np.asarray(x)
    lead, own = x.shape[: x.ndim - core], x.shape[x.ndim - core :]
    if lead and not (heads_alone and len(lead) == 1) and len(lead) == len(c.B):
        lead += (1,)
    return x.reshape(*lead, *(1,) * (2 - core), *own)


class Pairs(NamedTuple):
    """Positions and indices, of queries (..., T, 1) and keys (..., 1, S)."""

    q: Any
    k: Any
    i: Any
    j: Any


def _even(q, k):
    return (q + 2 * k) % 3 != 0


def _near(q, k, far):
    return abs(q - k) <= far


def _integer(low, high):
    return lambda c, rng, core: rng.integers(low, high + 1, core, dtype=np.int32)


def _mostly(c, rng, shape):
    return rng.random(shape) < 0.7


def _ids(c, rng, shape):
    ids = rng.integers(0, 4, shape)
    return np.sort(ids, axis=-1) if c.seed % 2 else ids


def _bounded(x, most, c):
    return np.True_ if most is None else x <= _at(most, c)


def _of_one(q, k, padding, c):
    return (q == k) & (True if padding is None else q != _at(padding, c))


# kind -> (how its parameters are drawn where they are arrays, their core axes, jattn's rule, what it means)
MASKS = {
    "causal": ([_integer(-5, 6)], [""], masks.causal, lambda p, c, a: p.k <= p.q + _at(a, c)),
    "window": (
        [_integer(0, 12), _integer(0, 5)],
        ["", ""],
        masks.window,
        lambda p, c, left, right: _bounded(p.q - p.k, left, c) & _bounded(p.k - p.q, right, c),
    ),
    "lengths": (
        [_integer(0, 41), _integer(0, 41)],
        ["", ""],
        masks.lengths,
        lambda p, c, key, query: _bounded(p.j + 1, key, c) & _bounded(p.i + 1, query, c),
    ),
    "prefix": ([_integer(0, 12)], [""], masks.prefix, lambda p, c, n: p.k < _at(n, c)),
    "segments": (
        [_ids, _ids, _integer(0, 3)],
        ["T", "S", ""],
        masks.segments,
        lambda p, c, q, k, padding: _of_one(np.swapaxes(_at(q, c, 1), -1, -2), _at(k, c, 1), padding, c),
    ),
    "array": ([_mostly], ["TS"], masks.array, lambda p, c, x: _at(x, c, 2)),
    "rule": ([], [], lambda: masks.rule(_even), lambda p, c: _even(p.q, p.k)),
    "far": ([_integer(0, 9)], [""], lambda far: masks.rule(_near, far), lambda p, c, far: _near(p.q, p.k, _at(far, c))),
}


def _normal(c, rng, shape):
    return rng.normal(size=shape)


def _holes(c, rng, shape):
    return np.where(rng.random(shape) < 0.3, -INF, rng.normal(size=shape))


def _wave(q, k, a):
    return a * jnp.sin((q - k).astype(a.dtype))


BIASES = {
    "array": ([_normal], ["TS"], biases.array, lambda p, c, x: _at(x, c, 2, True)),
    "holes": ([_holes], ["TS"], biases.array, lambda p, c, x: _at(x, c, 2, True)),
    "alibi": (
        [lambda c, rng, shape: rng.random(shape)],
        [""],
        biases.alibi,
        lambda p, c, x: -_at(x, c, 0, True) * abs(p.q - p.k),
    ),
    "relative": (
        [_normal],
        ["L"],
        biases.relative,
        lambda p, c, x: _table(_at(x, c, 1, True), 3 + np.clip(p.k - p.q, -3, 3)),
    ),
    "rule": (
        [_normal],
        [""],
        lambda a: biases.rule(_wave, a),
        lambda p, c, x: _at(x, c, 0, True) * np.sin(p.q - p.k),
    ),
}


def _table(x, index):
    shape = np.broadcast_shapes(x.shape[:-2], index.shape[:-2])
    x = np.broadcast_to(x, (*shape, 1, x.shape[-1]))
    index = np.broadcast_to(index, (*shape, *index.shape[-2:]))
    return np.take_along_axis(x, index.reshape(*shape, 1, index.shape[-2] * index.shape[-1]), -1).reshape(index.shape)


def _core(letters, c, rng):
    sizes = {"T": c.T, "S": c.S, "L": 7}
    if letters == "TS":
        return tuple(1 if rng.random() < 0.2 else sizes[a] for a in letters)
    return tuple(sizes[a] for a in letters)


def filled(node, c, rng, kinds, shape_rng):
    """The tree with arrays where a case says what leads them."""
    if node is None:
        return None
    kind, *own = node
    if kind in "&|~":
        return (kind, *(filled(x, c, rng, kinds, shape_rng) for x in own))
    draws, cores, _, _ = kinds[kind]
    out = []
    for x, draw, core in zip(own, draws, cores, strict=True):
        if isinstance(x, tuple):
            x = draw(c, rng, _lead(x, c, _core(core, c, shape_rng), kinds is BIASES))
            x = x.astype(c.bias_dtype) if kinds is BIASES else x
        out.append(x)
    return (kind, *out)


def rule(node, kinds):
    if node is None:
        return None
    kind, *own = node
    if kind == "&":
        return rule(own[0], kinds) & rule(own[1], kinds)
    if kind == "|":
        return rule(own[0], kinds) | rule(own[1], kinds)
    if kind == "~":
        return ~rule(own[0], kinds)
    return kinds[kind][2](*own)


def dense(node, p, c, kinds):
    if node is None:
        return np.True_ if kinds is MASKS else np.float64(0)
    kind, *own = node
    if kind in "&|~":
        own = [dense(x, p, c, kinds) for x in own]
        return ~own[0] if kind == "~" else own[0] & own[1] if kind == "&" else own[0] | own[1]
    if kinds is BIASES:
        own = [np.asarray(x, np.float64) for x in own]
    return kinds[kind][3](p, c, *own)


# What a case is drawn from

# Hessian-vector products, forward over reverse and reverse over reverse.
SECOND = "hvp", "grad of grad"


def _flags(draw, c_rank, heads_alone=False):
    ranks = [0, 1, c_rank + 1] if heads_alone else [0, c_rank, c_rank + 1]
    return tuple(draw(st.booleans()) or draw(st.booleans()) for _ in range(draw(st.sampled_from(ranks))))


_SIZE = st.one_of(st.sampled_from([1, 3, 5, 7, 11, 13, 17]), st.integers(0, 40), st.sampled_from([0, 1, 2, 33, 37]))


@st.composite
def mask_trees(draw, rank, stored, depth=2):
    kind = draw(st.sampled_from([*MASKS, "&", "|", "~", "&"] if depth else [*MASKS]))
    if kind in "&|~":
        return (kind, *(draw(mask_trees(rank, stored, depth - 1)) for _ in range(1 if kind == "~" else 2)))
    if not stored and kind in ("lengths", "segments", "array"):
        kind = "causal"
    array = lambda: _flags(draw, rank)  # noqa: E731
    number = lambda low, high: draw(st.integers(low, high)) if draw(st.booleans()) else array()  # noqa: E731
    optional = lambda low, high: None if draw(st.integers(0, 3)) == 0 else number(low, high)  # noqa: E731
    parameters = {
        "causal": lambda: [number(-5, 6)],
        "window": lambda: [optional(0, 12), optional(0, 5)],
        "lengths": lambda: [optional(0, 41), optional(0, 41)],
        "prefix": lambda: [number(0, 12)],
        "rule": lambda: [],
        "far": lambda: [array()],
        "array": lambda: [array()],
        "segments": lambda: [(), (), None if draw(st.booleans()) else number(0, 3)],
    }[kind]()
    if kind == "segments":
        lead = draw(st.sampled_from([(), (True,) * rank]))
        parameters[:2] = lead, lead
    return (kind, *parameters)


@st.composite
def cases(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    call = pick("attention", "attention", "attention", "attention", "attend", "weights", "cached")
    B = pick((), (), (2,), (3,), (2,), (1,), (2, 3), (0,)) if call != "attend" else pick((), (2,), (3,))
    K, G = (1, 1) if call == "attend" else (pick(1, 2, 3), pick(1, 1, 2, 3))
    T, S = draw(_SIZE), draw(_SIZE)
    while np.prod(B) * K * G * T > 400:
        T //= 2
    chunks, rolling = (), False
    level = pick(None, None, "vmap", "vmap", "scan", "map") if B and call != "cached" else None
    if call == "attend" and B:
        level = level or "vmap"
    if call == "cached":
        chunks, rolling = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))), pick(False, True)
        T, S = sum(chunks), sum(chunks) + pick(0, 0, 3)
    stored = not rolling
    mask = None if pick(*range(5)) == 0 else draw(mask_trees(len(B), stored))
    bias = pick(None, None, *BIASES)
    if bias in ("array", "holes") and rolling:
        bias = None
    bias = bias and (bias, _flags(draw, len(B), True))
    dtype = pick("float64", "float64", "float32", "bfloat16", "float16")
    tiles = (pick(1, 2, 3, 5, 8, 16, 64), pick(1, 2, 3, 5, 8, 16, 64))
    derivative = pick(None, None, "vjp", "vjp", "jvp", "hvp", "grad of grad") if call != "weights" else None
    engine = pick((), (("method", "dense"),), (("method", "blockwise"), ("block_size", tiles)))
    derivative = "vjp" if derivative in SECOND and dtype != "float64" else derivative
    rate = pick(0.0, 0.0, 0.0, 0.4, 1.0, 0.9) if call != "weights" and not rolling else 0.0
    return Case(
        call=call,
        B=B,
        T=T,
        S=S,
        N=K * G,
        K=K,
        H=pick(1, 2, 3, 5, 8),
        D=pick(1, 2, 3, 7, 0),
        dtype=dtype,
        mask=mask,
        bias=bias,
        bias_dtype=pick(dtype, "float32"),
        rows=call == "weights" and pick(False, True),
        scale=pick(None, None, "traced", 0.7, -1.5, 0.0),
        softcap=pick(None, None, None, "traced", 1.3),
        sink=pick(False, False, True),
        rate=rate,
        positions=pick("own", "own", "shuffled", "far", "per batch") if call != "cached" else "own",
        engine=engine,
        stats=pick(True, True, False),
        empty=pick("zero", "zero", "zero", "raise"),
        level=level,
        vary=tuple(draw(st.lists(st.integers(-1, 3), min_size=12, max_size=12))),
        jit=pick(True, True, True, False),
        checkpoint=pick(False, False, True),
        # A while_loop has forward mode alone.
        inside=pick(None, None, None, "cond", "while" if derivative in (None, "jvp") else "cond"),
        derivative=derivative,
        chunks=chunks,
        rolling=rolling,
        known=pick(False, False, False, False, True),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


# One draw of a case's arrays


VALUES = ("normal", "normal", "huge", "tiny", "equal", "bad", "unseen bad", "large values")
# Where products of three of them and their derivatives stay numbers; float16 has few.
LARGE = {"float64": 1e40, "float32": 1e9, "bfloat16": 1e9, "float16": 60.0}
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}
TINY = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}


class Data(NamedTuple):
    """`args` have derivatives; `others` have none. `dense` are what they mean, for the reference: see `meant`."""

    args: dict
    others: dict
    mask: Any
    bias: Any
    kind: str
    new: tuple


def data(c, draw):
    rng = np.random.default_rng([c.seed, draw])
    shapes = np.random.default_rng(c.seed)
    kind = VALUES[(c.seed + draw) % len(VALUES)] if draw else "normal"
    kind = "normal" if c.derivative in SECOND else kind
    tokens = c.T if c.call == "cached" else c.S
    shapes_of = {"query": (*c.B, c.T, c.N, c.H), "key": (*c.B, tokens, c.K, c.H), "value": (*c.B, tokens, c.K, c.D)}
    args = {name: rng.normal(size=shape) for name, shape in shapes_of.items()}
    large = LARGE[c.dtype]
    if kind == "huge":
        args["query"] *= large ** rng.random()
        args["key"] *= large ** rng.random()
    elif kind == "tiny":
        args = {name: x / large ** rng.random() for name, x in args.items()}
    elif kind == "equal":
        args["key"] = np.broadcast_to(args["key"][..., :1, :, :], args["key"].shape).copy()
    elif kind == "large values":
        args["value"] *= large ** rng.random()
    elif kind == "bad":
        for x in args.values():
            at = rng.random(x.shape) < 1.5 / max(x.size, 1)
            x[at] = rng.choice([NAN, INF, -INF], size=at.sum())
    args = {name: x.astype(jnp.dtype(c.dtype)) for name, x in args.items()}
    mask, bias = filled(c.mask, c, rng, MASKS, shapes), filled(c.bias, c, rng, BIASES, shapes)
    if c.sink:
        args["sink"] = rng.normal(size=c.N)
        if c.derivative not in SECOND:
            # Which is no sink.
            args["sink"][rng.random(c.N) < 0.2] = -INF
    if c.scale == "traced":
        args["scale"] = np.asarray(rng.normal())
    if c.softcap == "traced":
        args["softcap"] = np.asarray(1 + rng.random())
    if kind == "bad" and c.bias and c.bias[0] in ("array", "holes"):
        leaf: Any = bias[1]
        leaf[rng.random(leaf.shape) < 0.5 / max(leaf.size, 1)] = rng.choice([NAN, INF])
    others = {}
    if c.rows:
        others["rows"] = rng.integers(0, max(c.T, 1), 3 * (c.T > 0)).astype(np.int32)
    if c.rate:
        others["rng"] = np.asarray([c.seed, draw], np.uint32)
    if c.positions != "own":
        lead = c.B if c.positions == "per batch" else ()
        for name, n in (("query_positions", c.T), ("key_positions", c.S)):
            x = rng.integers(-3, max(n, 1) + 3, (*lead, n)) if c.positions != "shuffled" else rng.permutation(n)
            others[name] = (x + (2**28 if c.positions == "far" else 0)).astype(np.int32)
    new = tuple(rng.integers(0, n + 1, c.B) if draw % 2 else np.full(c.B, n) for n in c.chunks)
    x = Data(args, others, mask, bias, kind, new)
    if kind == "unseen bad":
        poison(c, x, rng)
    return x


def pairs(c, x):
    """The pairs of a case, and what is there at all, (*B, 1, T, S)."""
    i, j = np.arange(c.T), np.arange(c.S)
    q, k = x.others.get("query_positions", i), x.others.get("key_positions", j)
    there = np.ones((1, 1), bool)
    if c.call == "cached":
        before, q, there, i = np.zeros(c.B, int), [], [], []
        for n, new in zip(c.chunks, x.new, strict=True):
            own = np.arange(n)
            q.append(before[..., None] + own)
            i.append(own)
            after = before + new
            seen = (own < new[..., None])[..., None] & (j < after[..., None, None])
            if c.rolling:
                seen = seen & (j >= (before - _capacity(c))[..., None, None])
            there.append(seen)
            before = after
        q, i = np.concatenate(q, -1), np.concatenate(i)
        there = np.concatenate(there, -2)[..., None, :, :]
    place = lambda x: x[..., None, :, None]  # noqa: E731
    p = Pairs(place(q), k[..., None, None, :], i[:, None], j[None, :])
    return p, there


def _capacity(c):
    return 1 + c.seed % 9 if c.rolling else c.S


def seen(c, x):
    p, there = pairs(c, x)
    full = (*c.B, c.N, c.T, c.S)
    mask = np.broadcast_to(dense(x.mask, p, c, MASKS) & there, full)
    if c.rolling:
        mask = mask & (p.q - p.k <= _capacity(c))
    return mask, np.broadcast_to(dense(x.bias, p, c, BIASES), full)


def poison(c, x, rng):
    """Puts what is no number wherever nobody looks."""
    mask, bias = seen(c, x)
    visible = mask & ~np.isneginf(bias)
    bad = rng.choice([NAN, INF, -INF])
    x.args["query"][~np.moveaxis(visible.any(-1), -2, -1)] = bad
    groups = visible.reshape(*c.B, c.K, c.N // c.K, c.T, c.S)
    unread = ~np.moveaxis(groups.any((-3, -2)), -2, -1)
    if c.call != "cached":
        x.args["key"][unread] = bad
        x.args["value"][unread] = bad
    if c.bias and c.bias[0] == "array" and x.bias[1].shape == mask.shape:
        x.bias[1][~mask] = bad


# What the reference makes of it


def slots(c, x):
    """Keys and values as the reference reads them, and of a cache, where each token went, (*B, T), S for nowhere."""
    key, value = (np.asarray(x.args[name], np.float64) for name in ("key", "value"))
    if c.call != "cached":
        return key, value, None
    p, _ = pairs(c, x)
    at = p.q[..., 0, :, 0]
    real = np.concatenate([np.arange(n) < new[..., None] for n, new in zip(c.chunks, x.new, strict=True)], -1)
    at = np.where(real, at, c.S)
    out = []
    for tokens in (key, value):
        # What was never written is garbage, and one slot more takes what is padding.
        slot = np.full((*c.B, c.S + 1, *tokens.shape[-2:]), NAN)
        for b in np.ndindex(*c.B):
            slot[b][at[b]] = tokens[b]
        out.append(slot[..., : c.S, :, :])
    return (*out, at)


class Head(NamedTuple):
    inputs: dict
    result: Any
    error: Any
    reach: Any


def wide(dtype):
    return "float64" if dtype == "float64" else "float32"


def kept(c, x):
    """What dropout multiplies each weight by."""
    if not c.rate:
        return 1.0
    p, _ = pairs(c, x)
    words, i, j = x.others["rng"], p.i[:, 0], p.j[0]
    # `attend` uses its random key as it is. What an outer level maps is all of one key.
    if c.call == "attend":
        return reference.kept(words, c.rate, i, j)
    inner = (1,) * bool(c.level) + c.B[bool(c.level) :]
    keep = reference.kept(words, c.rate, i, j, heads=int(np.prod(inner)) * c.N)
    return keep.reshape(*inner, c.N, c.T, c.S)


def heads(c, x):
    """For each (b, n): the reference's inputs, result, and relative error of a weight in each row."""
    mask, bias = seen(c, x)
    key, value, _ = slots(c, x)
    query = np.asarray(x.args["query"], np.float64)
    number = lambda v: None if v is None else np.float64(np.asarray(v).astype(wide(c.dtype)))  # noqa: E731
    scale = x.args.get("scale", c.scale)
    scale = 1 / np.sqrt(c.H) if scale is None else number(scale)
    softcap = number(x.args.get("softcap", c.softcap))
    # jattn rounds a bias to the width of its logits.
    bias = bias.astype(wide(c.dtype)).astype(np.float64)
    eps = EPS[wide(c.dtype)]
    keep = np.broadcast_to(kept(c, x), (*c.B, c.N, c.T, c.S))
    out = {}
    for b in np.ndindex(*c.B):
        for n in range(c.N):
            g = n // (c.N // c.K)
            sink = number(x.args["sink"][n]) if c.sink and x.args["sink"][n] != -INF else None
            own = dict(query=query[b][:, n], key=key[b][:, g], value=value[b][:, g], mask=mask[b][n], bias=bias[b][n],
                       scale=scale, softcap=softcap, sink=sink, keep=keep[b][n])  # fmt: skip
            result = reference.attend(**own)
            visible = own["mask"] & ~np.isneginf(own["bias"])
            q, k = (np.where(np.isfinite(own[name]), own[name], 0) for name in ("query", "key"))
            size = np.abs(scale) * np.abs(q) @ np.abs(k).T
            if softcap is not None:
                size = np.minimum(size, 2 * softcap)
            added = np.where(visible & np.isfinite(own["bias"]), np.abs(own["bias"]), 0)
            size = np.where(visible, size + added, 0).max(1, initial=0)
            size = size + abs(sink or 0) + 1
            own_rounding = 3 * EPS["bfloat16"] if c.dtype == "bfloat16" else 0
            # These make a bias in the dtype of their arrays.
            rounded = {"alibi": EPS[wide(c.bias_dtype)], "rule": EPS[c.bias_dtype]}.get(c.bias and c.bias[0], 0)
            own_rounding += 4 * rounded * added.max(initial=0)
            v = np.where(np.isfinite(own["value"]), own["value"], 0)
            weights = np.where(np.isnan(result.weights), 0, result.weights)
            reach = (weights * own["keep"]) @ np.abs(v)
            out[b, n] = Head(own, result, 20 * eps * size + own_rounding, reach)
    return out


def expected(c, x, of):
    """Results and how wrong each may be, in the layout of `attention`."""
    out = {"out": np.zeros((*c.B, c.T, c.N, c.D))} | {name: np.zeros((*c.B, c.T, c.N)) for name in RESULTS[1:]}
    wrong = {name: np.zeros_like(y) for name, y in out.items()}
    for (b, n), head in of.items():
        for name in RESULTS:
            out[name][b][:, n] = getattr(head.result, name)
        wrong["out"][b][:, n] = (head.error[:, None] + 2 * EPS[c.dtype]) * head.reach + 2 * TINY[c.dtype]
        entropy = np.where(np.isfinite(head.result.entropy), head.result.entropy, 0)
        wrong["lse"][b][:, n] = wrong["max_logit"][b][:, n] = head.error
        wrong["entropy"][b][:, n] = 2 * head.error * (1 + entropy)
    return out, wrong


def pulled(c, x, of, cotangent, *, bad_rows=True):
    """What the reference passes back to `args` and to the bias' arrays, and how wrong each number may be."""
    names = [*x.args] + (["bias"] if x.bias else [])
    shapes = {name: (*np.shape(x.args[name]), 2) for name in x.args} | {"bias": (*c.B, c.N, c.T, c.S, 2)}
    total = {name: np.zeros(shapes[name]) for name in names}
    _, _, at = slots(c, x)
    if at is not None:
        for name in ("key", "value"):
            total[name] = np.zeros((*c.B, c.S, *shapes[name][-3:]))
    for (b, n), head in of.items():
        g = n // (c.N // c.K)
        own = reference.Cotangent(*(np.asarray(cotangent[name][b][:, n], np.float64) for name in RESULTS))
        inputs = dict(head.inputs)
        bad = np.isnan(head.result.lse)
        if not bad_rows:
            inputs["mask"] = inputs["mask"] & ~bad[:, None]
            own = reference.Cotangent(*(np.where(bad.reshape(-1, *(1,) * (y.ndim - 1)), 0, y) for y in own))
        found = reference.gradients(**inputs, cotangent=own, error=head.error, eps=EPS[wide(c.dtype)])
        for name in names:
            pair = np.stack(found.get(name, (0.0, 0.0)), -1)
            if name == "query":
                total[name][b][:, n] += pair
            elif name in ("key", "value"):
                total[name][b][:, g] += pair
            elif name == "bias":
                total[name][b][n] += pair
            elif name == "sink":
                total[name][n] += pair if inputs["sink"] is not None else 0
            else:
                total[name] += pair
    if at is not None:
        for name in ("key", "value"):
            padded = np.concatenate([total[name], np.zeros_like(total[name][..., :1, :, :, :])], -4)
            total[name] = np.take_along_axis(padded, at[..., None, None, None], -4)
    if "bias" in total:
        p, _ = pairs(c, x)
        total["bias"] = of_leaf(c, x, p, total["bias"])
    return {name: (y[..., 0], y[..., 1]) for name, y in total.items()}


def of_leaf(c, x, p, d_bias):
    """The gradient of a bias' one array: its dense form is linear in it."""
    kind, leaf = x.bias
    lead = leaf.shape[: leaf.ndim - len(BIASES[kind][1][0])]
    signed = lambda f: np.stack([d_bias[..., 0] * f, d_bias[..., 1] * np.abs(f)], -1)  # noqa: E731
    if kind == "relative":
        index = np.broadcast_to(3 + np.clip(p.k - p.q, -3, 3), d_bias.shape[:-1])
        parts = [np.where((index == n)[..., None], d_bias, 0) for n in range(leaf.shape[-1])]
        parts = np.stack([_summed(part, c, (*lead, 1, 1)) for part in parts], -2)
        return parts.reshape(*leaf.shape, 2)
    factor = {"alibi": lambda: -abs(p.q - p.k), "rule": lambda: np.sin(p.q - p.k)}.get(kind, lambda: 1.0)()
    core = leaf.shape[len(lead) :] or (1, 1)
    return _summed(signed(factor), c, (*lead, *core)).reshape(*leaf.shape, 2)


def _summed(y, c, shape):
    """(*B, N, T, S, 2) summed to an array of this shape, which is led by nothing, (N,) or (*B, N)."""
    shape = (1,) * (len(c.B) + 3 - len(shape)) + tuple(shape)
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    return y.sum(axes, keepdims=True)


# What jattn makes of it


def split(c, x, has_batch, n):
    """The part of an array that one step of the outer level gets, and the axis along which it is mapped."""
    x = np.asarray(x)
    if not has_batch:
        return x, None
    if x.shape[0] == 1 != c.B[0]:
        return x[0], None
    axis = 0 if c.level in ("scan", "map") else c.vary[n % len(c.vary)] % x.ndim
    return np.moveaxis(x, 0, axis), axis


def program(c, x):
    """A function of leaves, its leaves, the axis along which the outer level maps each, and how to name them."""
    mask, bias = rule(x.mask, MASKS), rule(x.bias, BIASES)
    args = {**x.args, **x.others, "mask": mask, "bias": bias, "new": x.new}
    if c.call == "attend":
        for name in ("query", "key", "value"):
            args[name] = args[name][..., 0, :]
        if c.sink:
            args["sink"] = args["sink"][0]
    axes = []
    leaves, tree = jax.tree.flatten(args)
    if c.level:
        names = []
        for path, leaf in jax.tree.leaves_with_path(args):
            name = path[0].key
            if name in ("mask", "bias"):
                names.append(name)
            elif name in ("query", "key", "value") or (name.endswith("positions") and leaf.ndim > 1):
                names.append("batch")
            else:
                names.append("")
        rules = {"mask": mask, "bias": bias}
        led = {name: iter(_lead_axes(r)) for name, r in rules.items() if r is not None}
        new_leaves = []
        for n, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
            has = name == "batch"
            if name in led:
                lead = next(led[name])
                has = lead >= len(c.B) if name == "mask" else lead > len(c.B)
            leaf, axis = split(c, leaf, has, n)
            new_leaves.append(leaf)
            axes.append(axis)
        leaves = new_leaves
    return leaves, axes, tree


def _lead_axes(r):
    """How many axes lead each array of a rule."""
    return [leaf.ndim - len(core) for leaf, (_, core) in zip(jax.tree.leaves(r), r.leaf_axes(), strict=True)]


def call(c, args):
    args = dict(args)
    mask, bias, new, words = (args.pop(name, None) for name in ("mask", "bias", "new", "rng"))
    if c.call == "attend" and c.mask is not None:
        mask = _one_head(mask)
    if c.call == "attend" and c.bias is not None:
        bias = _one_head(bias)
    options = dict(args)
    query, key, value = (options.pop(name) for name in ("query", "key", "value"))
    options |= {name: v for name, v in (("scale", c.scale), ("softcap", c.softcap)) if isinstance(v, float)}
    if _asked(c):
        options["empty"] = "raise"
    if c.call == "weights":
        return attention_weights(query, key, mask, bias, **options)
    if c.rate:
        options |= {"dropout_rate": c.rate, "dropout_rng": jax.random.wrap_key_data(words, impl="threefry2x32")}
    options |= dict(c.engine) | {"return_stats": c.stats}
    if c.call != "cached":
        f = attend if c.call == "attend" else attention
        out = f(query, key, value, mask, bias, **options)
        return _named(out, c.stats)
    return _cached(c, query, key, value, mask, bias, new, options)


def _named(out, stats):
    return {"out": out[0]} | out[1]._asdict() if stats else {"out": out}


def _one_head(r):
    """A rule without the head axis that may lead its arrays."""
    leaves = [x.reshape(x.shape[n:]) for x, n in zip(jax.tree.leaves(r), _lead_axes(r), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(r), leaves)


def _cached(c, query, key, value, mask, bias, new, options):
    capacity = _capacity(c)
    cache = Cache.create(capacity, c.K, c.H, c.D, batch=c.B, dtype=query.dtype, rolling=c.rolling)
    cache = cache._replace(key=cache.key * NAN, value=cache.value * NAN)
    parts, start = [], 0
    for n, lengths in zip(c.chunks, new, strict=True):
        stop = start + n
        tokens = [y[..., start:stop, :, :] for y in (query, key, value)]
        own, own_bias = _rule_rows(mask, start, stop), _rule_rows(bias, start, stop)
        if c.rolling:
            look = masks.window(capacity, None)
            own = look if own is None else own & look
        out, cache = cached_attention(*tokens, cache, own, own_bias, new_lengths=lengths, **options)
        parts.append(_named(out, c.stats))
        start = stop
    return {name: jnp.concatenate([part[name] for part in parts], len(c.B)) for name in parts[0]}


def _rule_rows(r, start, stop):
    if r is None:
        return None
    leaves = []
    for leaf, n, (_, core) in zip(jax.tree.leaves(r), _lead_axes(r), r.leaf_axes(), strict=True):
        if core[:1] == ("T",) or (core[:1] == ("T?",) and leaf.shape[n] > 1):
            leaf = jax.lax.slice_in_dim(jnp.asarray(leaf), start, stop, axis=n)
        leaves.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(r), leaves)


def inside(c, f, leaves):
    """`f(leaves)`, in a branch that is taken or in a loop that runs once."""
    if c.inside is None:
        return f(leaves)
    nothing = lambda leaves: jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(f, leaves))  # noqa: E731
    if c.inside == "while":
        return jax.lax.while_loop(lambda y: y[0] < 1, lambda y: (y[0] + 1, f(leaves)), (0, nothing(leaves)))[1]
    # As a number that the compiler does not know.
    taken = jax.lax.optimization_barrier(jnp.asarray(True))
    return jax.lax.cond(taken, f, nothing, leaves)


class Program:
    """A case as functions of leaves, each compiled once."""

    def __init__(self, c, x):
        self.c = c
        leaves, axes, tree = program(c, x)
        self.tree, self.axes = tree, axes
        names = [path[0].key for path, _ in jax.tree.leaves_with_path(jax.tree.unflatten(tree, leaves))]
        self.moves = [np.issubdtype(y.dtype, np.inexact) or y.dtype == jnp.bfloat16 for y in map(np.asarray, leaves)]
        self.names = names

    def leaves(self, x):
        leaves, _, _ = program(self.c, x)
        return [jnp.asarray(y) for y, m in zip(leaves, self.moves, strict=True) if m], [
            y for y, m in zip(leaves, self.moves, strict=True) if not m
        ]

    def f(self, floats, others):
        c = self.c
        floats, others = iter(floats), iter(others)
        leaves = [next(floats if m else others) for m in self.moves]

        def one(leaves):
            return inside(c, lambda leaves: call(c, jax.tree.unflatten(self.tree, leaves)), leaves)

        one = jax.checkpoint(one) if c.checkpoint else one
        if c.level == "vmap":
            # What nothing maps is the same for all.
            return jax.vmap(one, (self.axes,))(leaves)
        if c.level in ("scan", "map"):
            mapped = [jnp.asarray(y) for y, a in zip(leaves, self.axes, strict=True) if a is not None]
            fixed = [y for y, a in zip(leaves, self.axes, strict=True) if a is None]

            def body(mapped):
                m, f = iter(mapped), iter(fixed)
                return one([next(f if a is None else m) for a in self.axes])

            if c.level == "map":
                return jax.lax.map(body, mapped)
            return jax.lax.scan(lambda carry, y: (carry, body(y)), 0, mapped)[1]
        return one(leaves)

    def run(self, floats, others, tangents=None, cotangents=None):
        f = lambda floats: self.f(floats, others)  # noqa: E731
        derivative = self.c.derivative
        if derivative is None:
            return f(floats), None
        if derivative == "jvp":
            return jax.jvp(f, (floats,), (tangents,))
        pull = lambda floats: jax.vjp(f, floats)[1](cotangents)[0]  # noqa: E731
        out = f(floats)
        if derivative == "vjp":
            return out, pull(floats)
        if derivative == "hvp":
            return out, jax.jvp(pull, (floats,), (tangents,))[1]
        pushed = lambda floats: sum((g * t).sum().astype(float) for g, t in zip(pull(floats), tangents, strict=True))  # noqa: E731
        return out, jax.grad(pushed)(floats)


def close(got, want, wrong, dtype, what):
    """Each number within its own bound; NaN and infinities in the same places."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, what
    # A number near the largest of a dtype may round to infinity.
    largest = {"float64": 1e300, "float32": 1e37, "bfloat16": 1e37, "float16": 3e4}[str(np.dtype(dtype))]
    with np.errstate(invalid="ignore", over="ignore"):
        beyond = np.isfinite(want) & (np.abs(want) + np.broadcast_to(wrong, want.shape) > largest)
        finite = np.isfinite(want) & ~beyond
        same = np.where(finite, np.abs(got - want) <= wrong, beyond | (got == want) | (np.isnan(got) & np.isnan(want)))
    if not same.all():
        at = tuple(np.argwhere(~same)[0])
        wrong = np.broadcast_to(wrong, want.shape)
        where, many = f"{what}{list(map(int, at))}", f"{(~same).sum()} of {same.size}"
        raise AssertionError(f"{where}: got {got[at]}, expected {want[at]} within {wrong[at]}; {many}")


def with_heads(c, out):
    """Results of `attend` in the layout of `attention`."""
    if c.call != "attend":
        return out
    return {name: np.asarray(y)[..., None, :] if name == "out" else np.asarray(y)[..., None] for name, y in out.items()}


def one_draw(c, p, x, compiled, rng):
    of = heads(c, x)
    floats, others = p.leaves(x)
    if c.call == "weights":
        got, _ = compiled(floats, others)
        want = np.zeros((*c.B, c.N, c.T, c.S))
        wrong = np.zeros_like(want)
        for (b, n), head in of.items():
            # Values are no part of it.
            inputs = head.inputs | {"value": np.zeros_like(head.inputs["value"])}
            want[b][n] = reference.attend(**inputs).weights
            wrong[b][n] = np.nan_to_num(want[b][n]) * head.error[:, None] + 2 * TINY[wide(c.dtype)]
        if c.rows:
            want, wrong = want[..., x.others["rows"], :], wrong[..., x.others["rows"], :]
        return close(got, want, wrong, wide(c.dtype), "weights")

    want, wrong = expected(c, x, of)
    results = RESULTS if c.stats else RESULTS[:1]
    cotangent = {name: np.zeros_like(want[name]) for name in RESULTS}
    for name in results:
        dtype = jnp.dtype(c.dtype if name == "out" else wide(c.dtype))
        cotangent[name] = rng.normal(size=want[name].shape).astype(dtype)
    given = {name: cotangent[name] for name in results}
    if c.call == "attend":
        given = {name: y[..., 0, :] if name == "out" else y[..., 0] for name, y in given.items()}
    given = jax.tree.map(jnp.asarray, given)
    tangents = [jnp.asarray(rng.normal(size=y.shape).astype(y.dtype)) for y in floats]
    got, derived = compiled(floats, others, tangents, given)
    got = with_heads(c, got)
    for name in results:
        dtype = c.dtype if name == "out" else wide(c.dtype)
        assert got[name].dtype == jnp.dtype(dtype), name
        close(got[name], want[name], wrong[name], dtype, name)
    if c.derivative == "vjp":
        pull = pulled(c, x, of, cotangent)
        for name, y, (value, bound) in merged(c, p, derived, pull):
            dtype = str(y.dtype)
            bound = bound + 4 * EPS[dtype] * np.abs(np.nan_to_num(value)) + 4 * TINY[dtype]
            if c.rate and np.isnan(value).any():
                # Whether a dropped pair of a bad row passes NaN or 0 to the value is nobody's business.
                value = np.where(np.isnan(value), np.asarray(y, np.float64), value)
            close(y, value, bound, dtype, f"gradient of {name}")
    elif c.derivative == "jvp":
        derived = with_heads(c, derived)
        bad = np.isnan(want["lse"])
        if c.D and not c.rate:
            assert np.isnan(np.asarray(derived["out"], np.float64)[bad]).all(), "tangent of a bad row"
        left = 0.0
        for name in results:
            rows = np.asarray(derived[name], np.float64)
            assert np.isfinite(rows[~bad]).all() or c.dtype == "float16", f"tangent of {name}"
            left += (rows[~bad] * np.asarray(cotangent[name], np.float64)[~bad]).sum()
        pull = pulled(c, x, of, cotangent, bad_rows=False)
        right = bound = 0.0
        for name, t in tangents_of(c, p, tangents):
            value, error = (y.reshape(t.shape) for y in pull[name])
            right += (value * t).sum()
            bound += ((error + 4 * EPS[c.dtype] * np.abs(value) + TINY[c.dtype]) * np.abs(t)).sum()
        pushed = (np.nan_to_num(np.asarray(derived[name], np.float64)) for name in results)
        bound += 16 * EPS[c.dtype] * sum(np.abs(y).sum() for y in pushed)
        if np.isfinite(left) and bound < 1e300:
            assert abs(left - right) <= bound, ("forward mode", left, right, bound)
    elif c.derivative in SECOND:
        second_order(c, p, x, derived, tangents, cotangent)


def unmapped(c, p, n, y):
    """A gradient or tangent of leaf n in the layout of the case: its mapped axis in front."""
    y = np.asarray(y)
    return y if not c.level or p.axes[n] is None else np.moveaxis(y, p.axes[n], 0)


def _numbers_of_floats(p):
    return [n for n, m in enumerate(p.moves) if m]


def merged(c, p, derived, pull):
    for n, y in zip(_numbers_of_floats(p), derived, strict=True):
        name = p.names[n]
        value, bound = pull[name]
        y = unmapped(c, p, n, y)
        yield name, y, (np.reshape(value, y.shape), np.reshape(bound, y.shape))


def tangents_of(c, p, tangents):
    for n, t in zip(_numbers_of_floats(p), tangents, strict=True):
        t = np.asarray(unmapped(c, p, n, t), np.float64)
        yield p.names[n], t


def second_order(c, p, x, derived, tangents, cotangent):
    """The derivative of the gradient, against a difference of the reference's gradients."""
    step, sides = 1e-6, []
    for sign in (1, -1):
        moved = dict(x.args)
        bias = x.bias
        for name, t in tangents_of(c, p, tangents):
            if name == "bias":
                bias = (x.bias[0], (x.bias[1].astype(np.float64) + sign * step * t.reshape(x.bias[1].shape)))
            else:
                moved[name] = moved[name] + sign * step * t.reshape(np.shape(moved[name]))
        y = x._replace(args=moved, bias=bias)
        sides.append(pulled(c, y, heads(c, y), cotangent))
    for name, got, (plus, _) in merged(c, p, derived, sides[0]):
        slope = (plus - sides[1][name][0].reshape(plus.shape)) / (2 * step)
        bound = 1e-5 * max(1, np.abs(slope).max(initial=0), np.abs(plus).max(initial=0))
        if str(got.dtype) == "float32":
            bound = 1e-4 * max(1, np.abs(slope).max(initial=0))
        close(got, slope, bound, got.dtype, f"second derivative of {name}")


def refuses(c, x):
    """Whether a call whose arrays are all known must raise for a row that sees nothing."""
    return _asked(c) and not seen(c, x)[0].any(-1).all()


def _asked(c):
    # Inside another transform the arrays are not known.
    plain = c.level is None and c.inside is None and not c.checkpoint
    return c.empty == "raise" and c.known and plain and c.bias is None and c.call != "cached"


def check(c):
    first = data(c, 0)
    p = Program(c, first)
    if c.known:
        # Arrays that the program holds: all is known while tracing, and planned then.
        floats, others = p.leaves(first)
        run = lambda floats_, others_, *rest: p.run(floats_, others, *rest)  # noqa: E731
        compiled = jax.jit(run) if c.jit else run
        if refuses(c, first):
            with pytest.raises(ValueError, match="a query has no key that it may attend to"):
                p.f(floats, others)
            return
        return one_draw(c, p, first, compiled, np.random.default_rng(c.seed))
    compiled = jax.jit(p.run) if c.jit else p.run
    for draw in range(DRAWS):
        x = data(c, draw)
        one_draw(c, p, x, compiled, np.random.default_rng([c.seed, draw, 1]))
    if c.jit:
        assert compiled._cache_size() == 1, "new values are traced again"


@given(cases())
def test_any_combination_is_the_reference(case):
    check(case)
