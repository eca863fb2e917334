"""Random combinations for the row functions and `merge`, against float64 NumPy; `make fuzz` tries many more."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz import EPS, INF, NAN, TINY, close, wide

from jattn import entropy, log_softmax, logsumexp, merge, naive_softmax, rows_normalised, softmax

DRAWS = 4
SIZE = st.one_of(st.sampled_from([1, 2, 3, 5, 7, 11]), st.integers(0, 33))
DTYPES = "float64", "float64", "float32", "bfloat16", "float16"


class Case(NamedTuple):
    """`where` is None or one flag an axis, full or 1, () for a scalar. `mapped` is the axis of x that is mapped by
    `level`, and says whether that of `where` is.
    """

    f: str
    shape: tuple
    axis: int
    dtype: str
    where: Any
    level: Any
    mapped: int
    where_mapped: bool
    derivative: Any
    checkpoint: bool
    jit: bool
    seed: int


FAMILY = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp, "entropy": entropy}
# Of these a row is one number.
NUMBERS = "logsumexp", "entropy"


@st.composite
def cases(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    f = pick(*FAMILY, "softmax")
    shape = tuple(draw(st.lists(SIZE, min_size=1, max_size=3)))
    while np.prod(shape) > 600:
        shape = tuple(max(n // 2, 1) for n in shape)
    where = pick(None, (), tuple(draw(st.booleans()) or draw(st.booleans()) for _ in shape)) if f != "entropy" else None
    dtype = pick(*DTYPES)
    derivative = pick(None, "vjp", "vjp", "jvp", "hvp", "grad of grad")
    if dtype != "float64" and derivative in ("hvp", "grad of grad"):
        derivative = "vjp"
    # A row has more than one axis where another one is mapped.
    level = pick(None, "vmap", "map") if len(shape) > 1 else None
    return Case(
        f=f,
        shape=shape,
        axis=draw(st.integers(-len(shape) + bool(level), len(shape) - 1 - bool(level))),
        dtype=dtype,
        where=where,
        level=level,
        mapped=draw(st.integers(0, len(shape) - 1)),
        where_mapped=draw(st.booleans()),
        derivative=derivative,
        checkpoint=draw(st.booleans()),
        jit=pick(True, True, False),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def data(c, draw):
    """x (*shape) and `where`, which broadcasts to it or is None, with a mapped axis in front where one is mapped."""
    rng = np.random.default_rng([c.seed, draw])
    if c.f == "entropy":
        x = rng.dirichlet(np.ones(4), c.shape)[..., 0] * (rng.random(c.shape) < 0.8)
    else:
        kinds = "normal", "huge", "holes", "bad", "equal", "lowest", "unseen bad"
        kind = "normal" if c.derivative in ("hvp", "grad of grad") else kinds[(c.seed + draw) % len(kinds)]
        x = rng.normal(size=c.shape)
        if kind == "huge":
            x = x * {"float16": 100.0}.get(c.dtype, 1e6) ** rng.random()
        elif kind == "holes":
            x = np.where(rng.random(c.shape) < 0.5, -INF, x)
        elif kind == "bad":
            x = np.where(rng.random(c.shape) < 1.5 / max(x.size, 1), rng.choice([NAN, INF]), x)
        elif kind == "equal":
            x = np.zeros(c.shape) + x[(0,) * x.ndim] if x.size else x
        elif kind == "lowest":
            lowest = float(jnp.finfo(c.dtype).min)
            x = np.where(rng.random(c.shape) < 0.7, lowest, x)
    with np.errstate(over="ignore"):
        x = x.astype(jnp.dtype(c.dtype))
    if c.where is None:
        return x, None
    shape = tuple(n if full else 1 for n, full in zip(c.shape, c.where, strict=True)) if c.where else ()
    if c.level and c.where and not c.where_mapped:
        shape = tuple(1 if i == c.mapped else n for i, n in enumerate(shape))
    where = np.asarray(rng.random(shape) < 0.7)
    if c.f != "entropy" and kind == "unseen bad":
        x[~np.broadcast_to(where, c.shape)] = rng.choice([NAN, INF, -INF])
    return x, where


# What the reference makes of one row: its result, and what it passes back of a cotangent.


def _logs(x):
    with np.errstate(over="ignore"):
        below = x - x.max()
        return below - np.log(np.exp(below).sum())


def row(f, x, visible, ct):
    """Of one row in float64: result, gradient; and for each a size that its rounding is relative to."""
    n, seen = len(x), visible & ~np.isneginf(x)
    if f == "entropy":
        some = x > 0
        logs = np.log(np.where(some, x, 1))
        return -(x * logs).sum(), np.where(some, -ct * (logs + 1), 0), 1 + n, np.abs(ct) * (1 + np.abs(logs))
    nothing = {"softmax": np.zeros(n), "log_softmax": np.full(n, -INF), "logsumexp": -INF}[f]
    if not seen.any():
        return nothing, np.zeros(n), 0, np.zeros(n)
    if not np.isfinite(x[seen]).all():
        return nothing * NAN, np.where(seen, NAN, 0.0), 0, np.zeros(n)
    logs = np.full(n, -INF)
    logs[seen] = _logs(x[seen])
    w = np.exp(logs)
    # No weight is left of larger ones.
    size = np.where(seen, 1 + np.minimum(np.abs(np.where(seen, logs, 0)), 1e30), 0)
    if f == "logsumexp":
        lse = x[seen].max() - logs[seen].max()
        return lse, ct * w, 1 + min(abs(lse), 1e30), np.abs(ct) * size * w
    if f == "log_softmax":
        total = np.where(seen, ct, 0).sum()
        most = np.where(seen, np.abs(ct), 0).sum()
        return logs, np.where(seen, ct - w * total, 0), size, np.where(seen, np.abs(ct) + size * w * most, 0)
    pulled, most = (w * ct).sum(), (w * np.abs(ct)).sum()
    return w, w * (ct - pulled), size * w, size * w * (np.abs(ct) + most)


def expected(c, x, where, ct):
    """Result, gradient and their sizes, in the layout of x; a result without rows lacks its axis."""
    last = lambda y: np.moveaxis(y, _axis(c), -1)  # noqa: E731
    x = np.asarray(x, np.float64)
    visible = np.broadcast_to(True if where is None else where, x.shape)
    single = c.f in NUMBERS
    ct = np.asarray(ct, np.float64)
    ct = np.broadcast_to(ct[..., None], last(x).shape) if single else last(ct)
    shape = last(x).shape
    out, size = (np.zeros(shape[:-1] if single else shape) for _ in range(2))
    gradient, wrong = np.zeros(shape), np.zeros(shape)
    for at in np.ndindex(shape[:-1]):
        own = ct[at][0] if single and shape[-1] else ct[at]
        if not shape[-1]:
            out[at] = {"logsumexp": -INF, "entropy": 0.0}.get(c.f, 0.0)
            continue
        out[at], gradient[at], size[at], wrong[at] = row(c.f, last(x)[at], last(visible)[at], own)
    back = lambda y: np.moveaxis(y, -1, _axis(c))  # noqa: E731
    return (out, size) if single else (back(out), back(size)), (back(gradient), back(wrong))


def _axis(c):
    """The axis of rows in x, given that of what is left once one axis is mapped."""
    if not c.level:
        return c.axis % len(c.shape)
    axis = c.axis % (len(c.shape) - 1)
    return axis + (axis >= c.mapped)


def program(c):
    f = FAMILY[c.f]

    def one(x, where):
        return f(x, c.axis) if c.f == "entropy" else f(x, c.axis, where)

    one = jax.checkpoint(one) if c.checkpoint else one
    at = c.mapped if c.where else None

    def looped(x, where):
        front = jnp.moveaxis(x, c.mapped, 0)
        if not c.where:
            return jax.lax.map(lambda x: one(x, where), front)
        where = jnp.broadcast_to(jnp.moveaxis(where, c.mapped, 0), (front.shape[0], *where.shape[: c.mapped],
                                                                       *where.shape[c.mapped + 1 :]))  # fmt: skip
        return jax.lax.map(lambda both: one(*both), (front, where))

    def vectorised(x, where):
        if c.where and where.shape[c.mapped] == 1 != x.shape[c.mapped]:
            return jax.vmap(one, (c.mapped, None))(x, where.squeeze(c.mapped))
        return jax.vmap(one, (c.mapped, at))(x, where)

    whole = {None: one, "map": looped, "vmap": vectorised}[c.level]

    def run(x, where, tangent, ct):
        g = lambda x: whole(x, where)  # noqa: E731
        pull = lambda x: jax.vjp(g, x)[1](ct)[0]  # noqa: E731
        out = g(x)
        if c.derivative is None:
            return out, None
        if c.derivative == "jvp":
            return jax.jvp(g, (x,), (tangent,))
        if c.derivative == "vjp":
            return out, pull(x)
        if c.derivative == "hvp":
            return out, jax.jvp(pull, (x,), (tangent,))[1]
        return out, jax.grad(lambda x: (pull(x) * tangent).sum())(x)

    return jax.jit(run) if c.jit else run


def in_front(c, y):
    """A result of the reference with its mapped axis in front, as `jax.vmap` returns it."""
    if not c.level:
        return y
    single = c.f in NUMBERS
    return np.moveaxis(y, c.mapped - (single and _axis(c) < c.mapped), 0)


def check(c):
    run = program(c)
    single = c.f in NUMBERS
    kind = wide(c.dtype) if c.f == "entropy" else c.dtype
    for draw in range(DRAWS):
        x, where = data(c, draw)
        rng = np.random.default_rng([c.seed, draw, 1])
        shape = tuple(n for i, n in enumerate(c.shape) if not (single and i == _axis(c)))
        ct = rng.normal(size=shape).astype(jnp.dtype(kind))
        tangent = rng.normal(size=c.shape).astype(x.dtype)
        (want, size), (gradient, wrong) = expected(c, x, where, ct)
        out, derived = run(jnp.asarray(x), where, tangent, jnp.asarray(in_front(c, ct)))
        assert out.dtype == jnp.dtype(kind), out.dtype
        # Rounded sums of many numbers, and the rounding of what is returned.
        eps = 8 * EPS[wide(c.dtype)]
        bound = eps * size + 2 * EPS[kind] * np.abs(np.nan_to_num(want, posinf=0, neginf=0)) + 2 * TINY[kind]
        close(out, in_front(c, want), in_front(c, bound), kind, c.f)
        bound = (eps + 4 * EPS[c.dtype]) * wrong + 4 * TINY[c.dtype]
        if c.derivative == "vjp":
            close(derived, gradient, bound, c.dtype, f"gradient of {c.f}")
        elif c.derivative == "jvp":
            bad = np.isnan(in_front(c, want))
            assert np.isnan(np.asarray(derived, np.float64)[bad]).all(), "tangent of a bad row"
            ok = np.where(bad, 0, np.nan_to_num(np.asarray(derived, np.float64)))
            finite = np.isfinite(gradient)
            left = (ok * np.where(bad, 0, np.asarray(in_front(c, ct), np.float64))).sum()
            right = (np.where(finite, gradient, 0) * tangent.astype(np.float64)).sum()
            error = (bound * np.abs(tangent.astype(np.float64))).sum() + EPS[kind] * np.abs(ok * in_front(c, ct)).sum()
            assert abs(left - right) <= error, ("forward mode", left, right, error)
        elif c.derivative is not None:
            step = 1e-6
            sides = [expected(c, x + sign * step * tangent, where, ct)[1][0] for sign in (1, -1)]
            slope = (sides[0] - sides[1]) / (2 * step)
            # The third derivative of an entropy grows with 1/w^2: differences are no measure beside 0.
            good = np.ones(c.shape, bool) if c.f != "entropy" else (x > 1e-3)
            scale = max(1.0, np.abs(slope[good]).max(initial=0))
            close(np.where(good, derived, 0), np.where(good, slope, 0), 1e-5 * scale, c.dtype, "second derivative")
    if c.jit:
        assert run._cache_size() == 1, "new values are traced again"


@given(cases())
def test_any_rows_are_the_reference(case):
    check(case)


@given(cases())
def test_rows_of_weights_are_normalised_where_they_see_something(case):
    c = case._replace(f="softmax", level=None, axis=case.axis % len(case.shape))
    x, where = data(c, 0)
    x = np.where(np.isfinite(x), x, 0).astype(x.dtype)
    weights = softmax(x, c.axis, where)
    tol = 1e-9 if c.dtype == "float64" else 1e-5 if c.dtype == "float32" else 0.2
    alive = np.broadcast_to(True if where is None else where, c.shape).any(c.axis)
    assert bool(rows_normalised(weights, tol, c.axis)) == bool(alive.all())
    with np.errstate(over="ignore"):
        exps = np.exp(np.asarray(x, np.float64))
    if c.dtype in ("float64", "float32") and np.abs(x).max(initial=0) < 50:
        naive = exps / exps.sum(c.axis, keepdims=True) if x.size else exps
        close(naive_softmax(x, c.axis), naive, 1e3 * EPS[c.dtype] * naive, c.dtype, "naive_softmax")


# merge


class Parts(NamedTuple):
    n: int
    shape: tuple
    D: int
    dtype: str
    lse_dtype: str
    stacked: bool
    mapped: bool
    derivative: Any
    jit: bool
    seed: int


@st.composite
def parts(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 0]), max_size=3)))
    dtype = pick(*DTYPES)
    return Parts(
        n=draw(st.integers(1, 5)),
        shape=shape,
        D=pick(1, 2, 3, 0),
        dtype=dtype,
        lse_dtype=wide(pick(dtype, dtype, "float64")),
        stacked=draw(st.booleans()),
        mapped=draw(st.booleans()) and bool(shape),
        derivative=pick(None, "vjp", "jvp", "vjp"),
        jit=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def part_data(c, draw):
    rng = np.random.default_rng([c.seed, draw])
    outs, lses = rng.normal(size=(c.n, *c.shape, c.D)), rng.normal(size=(c.n, *c.shape))
    kind = ("normal", "empty", "garbage", "bad", "huge", "far apart")[draw]
    if kind in ("empty", "garbage"):
        empty = rng.random(lses.shape) < 0.5
        lses[empty], outs[empty] = -INF, 0 if kind == "empty" else rng.choice([NAN, INF, 1e300])
    elif kind == "bad":
        lses[rng.random(lses.shape) < 0.2] = rng.choice([NAN, INF])
        outs[rng.random(outs.shape) < 0.1] = NAN
    elif kind == "huge":
        lses *= 1e30
    elif kind == "far apart":
        lses *= 300
    with np.errstate(over="ignore"):
        return outs.astype(jnp.dtype(c.dtype)), lses.astype(c.lse_dtype)


def merged(outs, lses, ct, ct_lse):
    """(out, lse) of the whole, what it passes back to parts, and to the lses of parts, in float64."""
    outs, lses, ct, ct_lse = (np.asarray(x, np.float64) for x in (outs, lses, ct, ct_lse))
    out, lse = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -INF)
    d_outs, d_lses = np.zeros(outs.shape), np.zeros(lses.shape)
    for at in np.ndindex(lse.shape):
        every = (slice(None), *at)
        seen = ~np.isneginf(lses[every])
        if not seen.any():
            continue
        own = np.where(seen[:, None], outs[every], 0)
        if not np.isfinite(lses[every][seen]).all():
            out[at], lse[at] = NAN, NAN
            d_outs[every][seen], d_lses[every][seen] = NAN, NAN
            continue
        logs = _logs(lses[every][seen])
        w = np.zeros(len(seen))
        w[seen] = np.exp(logs)
        lse[at] = lses[every][seen].max() - logs.max()
        with np.errstate(invalid="ignore"):
            out[at] = w @ own
            d_outs[every] = w[:, None] * ct[at]
            d_lses[every] = np.where(seen, w * ((own - out[at]) @ ct[at] + ct_lse[at]), 0)
    return out, lse, d_outs, d_lses


@given(parts())
def test_any_parts_merge_as_the_reference_does(case):
    c = case

    def f(outs, lses):
        if c.mapped:
            # Of the axes behind the parts, the first is mapped.
            g = merge if c.stacked else lambda outs, lses: merge(list(outs), tuple(lses))
            return jax.vmap(g, (1, 1))(outs, lses)
        return merge(outs, lses) if c.stacked else merge(list(outs), tuple(lses))

    def run(outs, lses, ct, tangents):
        if c.derivative == "vjp":
            got, pull = jax.vjp(f, outs, lses)
            return got, pull(ct)
        return jax.jvp(f, (outs, lses), tangents) if c.derivative else (f(outs, lses), None)

    run = jax.jit(run) if c.jit else run
    eps = 8 * min(EPS[wide(c.dtype)], EPS[c.lse_dtype])
    for draw in range(6):
        outs, lses = part_data(c, draw)
        rng = np.random.default_rng([c.seed, draw, 1])
        ct = rng.normal(size=outs.shape[1:]).astype(outs.dtype), rng.normal(size=lses.shape[1:]).astype(lses.dtype)
        tangents = tuple(rng.normal(size=x.shape).astype(x.dtype) for x in (outs, lses))
        (out, lse), derived = run(*map(jnp.asarray, (outs, lses)), jax.tree.map(jnp.asarray, ct), tangents)
        assert out.dtype == outs.dtype and lse.dtype == lses.dtype
        want_out, want_lse, d_outs, d_lses = merged(outs, lses, *ct)
        seen = ~np.isneginf(lses)[..., None] & np.isfinite(outs)
        most = np.where(seen, np.abs(outs.astype(np.float64)), 0).max(0, initial=0)
        size = 1 + np.where(np.isfinite(lses), np.abs(lses), 0).max(0, initial=0).astype(np.float64)
        near = lambda x, dtype: 4 * EPS[dtype] * np.abs(np.nan_to_num(x, posinf=0, neginf=0)) + TINY[dtype]  # noqa: E731
        close(out, want_out, eps * size[..., None] * most + near(want_out, c.dtype), c.dtype, "out")
        close(lse, want_lse, eps * size + near(want_lse, c.lse_dtype), c.lse_dtype, "lse")
        rows = np.isnan(want_lse)
        if c.derivative == "vjp":
            of_out, of_lse = (np.abs(x.astype(np.float64)) for x in ct)
            bound = eps * size[..., None] * of_out + near(d_outs, c.dtype)
            close(derived[0], d_outs, bound, c.dtype, "gradient of outs")
            bound = eps * size * (2 * most.max(-1, initial=0) * of_out.sum(-1) + of_lse) + near(d_lses, c.lse_dtype)
            close(derived[1], d_lses, bound, c.lse_dtype, "gradient of lses")
        elif c.derivative == "jvp":
            pushed = [np.asarray(x, np.float64) for x in derived]
            assert np.isnan(pushed[1][rows]).all() and np.isnan(pushed[0][rows]).all(), "tangent of a bad row"
            # Of the other rows, those whose outs are numbers.
            sound = ~rows & np.isfinite(want_out).all(-1)
            assert np.isfinite(pushed[0][sound]).all() and np.isfinite(pushed[1][sound]).all(), "tangent"
            left = (np.where(sound[..., None], pushed[0], 0) * ct[0].astype(np.float64)).sum()
            left += (np.where(sound, pushed[1], 0) * ct[1].astype(np.float64)).sum()
            right = (np.where(sound[None, ..., None], d_outs, 0) * tangents[0].astype(np.float64)).sum()
            right += (np.where(sound[None], d_lses, 0) * tangents[1].astype(np.float64)).sum()
            scale = size.max(initial=0) * (1 + most.max(initial=0)) * (outs.size + lses.size + 1)
            assert abs(left - right) <= 16 * (eps + EPS[c.dtype]) * scale, ("forward mode", left, right)
