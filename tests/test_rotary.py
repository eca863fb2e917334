"""Rotary positions: what they promise about products, and the numbers, against complex multiplication."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from jax.test_util import check_grads

from jattn._rotary import rotary

B, T, N, H = 2, 5, 3, 8
LAYOUTS = pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])


def normal(*shape, seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=shape))


def by_complex_numbers(x, positions, base=10_000.0, interleaved=False):
    """One token at a time, in float64: a pair of features is one complex number, a turn is one product."""
    x, positions = np.asarray(x, np.float64), np.broadcast_to(positions, np.shape(x)[:-2])
    out, n = np.empty_like(x), x.shape[-1] // 2
    speeds = np.array([base ** (-2 * i / x.shape[-1]) for i in range(n)])
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, n), slice(n, None))
    for token in np.ndindex(positions.shape):
        turned = (x[token][:, first] + 1j * x[token][:, second]) * np.exp(1j * int(positions[token]) * speeds)
        out[token][:, first], out[token][:, second] = turned.real, turned.imag
    return out


POSITIONS = {
    "one row for all batches": np.arange(T),
    "out of order, negative and twice": np.array([7, -3, 0, 7, 100]),
    "for each batch its own": np.array([np.arange(T), np.arange(T) + 9]),
    "a batch axis of 1": np.arange(T)[None],
    "int64 and NumPy": np.arange(T, dtype=np.int64),
    "unsigned": np.arange(T, dtype=np.uint8),
}


@LAYOUTS
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("base", [10_000.0, 500_000, 2.0])
def test_a_turn_is_a_product_of_complex_numbers(positions, interleaved, base):
    x = normal(B, T, N, H)
    got = rotary(x, positions, base=base, interleaved=interleaved)
    expected = by_complex_numbers(x, positions, base, interleaved)
    assert got.dtype == x.dtype
    assert_close(got, expected)
    compiled = jax.jit(lambda x, p: rotary(x, p, base=base, interleaved=interleaved))
    assert_close(compiled(x, positions), expected)


def test_batches_are_any_number_of_axes_each_full_or_1():
    x = normal(2, 3, T, N, H)
    positions = np.arange(3 * T).reshape(1, 3, T)
    assert_close(rotary(x, positions), by_complex_numbers(x, positions))
    assert_close(rotary(x[0, 0], np.arange(T)), by_complex_numbers(x[0, 0], np.arange(T)))


@LAYOUTS
def test_a_pair_turns_from_its_first_feature_to_its_second(interleaved):
    # A quarter of a turn, to the precision of an integer position: 11 radians are 7 quarters and 0.004.
    x = jnp.zeros((1, 1, 4)).at[0, 0, 0].set(1.0)
    second = 1 if interleaved else 2
    got = rotary(x, np.array([11]), interleaved=interleaved)[0, 0]
    assert_close(got[jnp.array([0, second])], [np.cos(11), np.sin(11)])
    assert got[second] < -0.99
    others = rotary(jnp.ones((1, 1, 4)), np.array([1]), base=100.0, interleaved=interleaved)[0, 0]
    slow = [2, 3] if interleaved else [1, 3]
    assert_close(others[jnp.array(slow)], [np.cos(0.1) - np.sin(0.1), np.cos(0.1) + np.sin(0.1)])


@LAYOUTS
def test_products_depend_on_the_difference_of_positions_alone(interleaved):
    query, key = normal(T, N, H), normal(T, N, H, seed=1)
    positions = np.array([0, 3, 4, 11, 50])

    def products(shift):
        turned = [rotary(x, positions + shift, interleaved=interleaved) for x in (query, key)]
        return jnp.einsum("tnh,snh->nts", *turned)

    for shift in (1, -7, 100_000):
        assert_close(products(shift), products(0), factor=1e2)
    assert np.abs(products(0) - jnp.einsum("tnh,snh->nts", query, key)).max() > 0.1


@LAYOUTS
def test_the_norm_of_each_pair_stays(interleaved):
    x = normal(T, N, H)
    pairs = lambda x: x.reshape(T, N, H // 2, 2) if interleaved else x.reshape(T, N, 2, H // 2)  # noqa: E731
    norms = lambda x: jnp.linalg.norm(pairs(x), axis=-1 if interleaved else -2)  # noqa: E731
    assert_close(norms(rotary(x, np.arange(T) + 3, interleaved=interleaved)), norms(x))


@LAYOUTS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_position_0_is_the_identity(interleaved, dtype):
    x = normal(T, N, H).astype(dtype)
    np.testing.assert_array_equal(rotary(x, np.zeros(T, int), interleaved=interleaved), x)


@LAYOUTS
def test_turning_back_undoes_a_turn(interleaved):
    x = normal(T, N, H)
    there = rotary(x, np.arange(T), interleaved=interleaved)
    assert_close(rotary(there, -np.arange(T), interleaved=interleaved), x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_result_has_the_dtype_of_x_and_its_precision(dtype):
    x, positions = normal(T, N, H).astype(dtype), np.arange(T)
    got = rotary(x, positions)
    assert got.dtype == x.dtype
    assert_close(got, by_complex_numbers(x, positions), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_turns_by_angles_in_float32(dtype):
    x, positions = normal(T, N, H).astype(dtype), np.arange(T) + 5_001
    assert_close(rotary(x, positions), by_complex_numbers(x, positions), dtype)


@pytest.mark.parametrize("position", [1_000, 100_000, 2**23])
def test_far_positions_are_as_good_as_the_angle_in_float32(position):
    x, positions = normal(1, N, 128).astype(np.float32), np.array([position])
    error = np.abs(np.asarray(rotary(x, positions), np.float64) - by_complex_numbers(x, positions))
    # An angle off by d moves a pair by d times its norm.
    norm = np.linalg.norm(x.reshape(1, N, 2, 64), axis=-2)
    angle = position * 10_000.0 ** (-np.arange(64) / 64)
    assert (error.reshape(1, N, 2, 64) <= norm[:, :, None] * (angle * 2.0**-23 + 1e-6)).all()
    wide = rotary(x.astype(np.float64), positions)
    assert_close(wide, by_complex_numbers(x, positions), factor=position / 100)


# Transforms


@LAYOUTS
def test_first_and_second_derivatives_are_those_of_finite_differences(interleaved):
    f = jax.jit(lambda x, base: rotary(x, np.arange(3), base=base, interleaved=interleaved))
    check_grads(f, (normal(3, 2, 4), jnp.float64(20.0)), order=2, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6)


@LAYOUTS
def test_the_gradient_turns_back(interleaved):
    x, cotangent = normal(T, N, H), normal(T, N, H, seed=1)
    pulled = jax.vjp(lambda x: rotary(x, np.arange(T), interleaved=interleaved), x)[1](cotangent)[0]
    assert_close(pulled, rotary(cotangent, -np.arange(T), interleaved=interleaved))


def test_vmap_is_a_loop_over_tokens_positions_or_bases():
    x, positions, bases = normal(B, T, N, H), np.array([np.arange(T), np.arange(T) + 9]), jnp.array([100.0, 1e4])
    f = lambda x, positions, base: rotary(x, positions, base=base)  # noqa: E731
    for axes in [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)]:
        args = [a if axis == 0 else a[0] for a, axis in zip((x, positions, bases), axes, strict=True)]
        loop = [f(*(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True))) for i in range(B)]
        assert_close(jax.vmap(f, axes)(*args), jnp.stack(loop))
    assert_close(rotary(x, positions), jax.vmap(rotary)(x, positions))


def test_a_new_base_or_position_is_no_new_program():
    traces = []

    @jax.jit
    def f(x, positions, base):
        traces.append(1)
        return rotary(x, positions, base=base)

    for i in range(3):
        f(normal(T, N, H), np.arange(T) + i, 100.0 + i)
    assert len(traces) == 1


@pytest.mark.parametrize("base", [20, 20.0, np.float64(20), jnp.float32(20), jnp.int32(20)], ids=repr)
def test_base_may_be_any_number(base):
    x = normal(T, N, H).astype(np.float32)
    got = rotary(x, np.arange(T), base=base)
    assert got.dtype == np.float32
    assert_close(got, by_complex_numbers(x, np.arange(T), 20), "float32")
    assert_close(jax.jit(lambda base: rotary(x, np.arange(T), base=base))(base), got, "float32")


@pytest.mark.parametrize("shape", [(0, N, H), (T, 0, H), (0, T, N, H), (T, N, 0), (T, N, 2)])
def test_any_size_may_be_0_and_H_may_be_2(shape):
    x = normal(*shape)
    positions = np.arange(shape[-3])
    assert_close(rotary(x, positions), by_complex_numbers(x, positions))


def test_float32_stays_float32_with_or_without_x64():
    for on in (True, False):
        with jax.enable_x64(on):
            assert rotary(jnp.ones((T, N, H), np.float32), np.arange(T)).dtype == np.float32


def test_a_NaN_stays_in_its_pair():
    got = rotary(normal(T, N, H).at[2, 1, 0].set(np.nan), np.arange(T))
    assert np.argwhere(np.isnan(got)).tolist() == [[2, 1, 0], [2, 1, H // 2]]


# Errors

X = jnp.ones((B, T, N, H))
ERRORS = {
    "integer features": (
        lambda: rotary(jnp.ones((T, N, H), int), np.arange(T)), TypeError, "x must be floating, got int64."
    ),
    "no head axis": (lambda: rotary(X[0, 0], np.arange(T)), ValueError, "x must be (*B, T, N, H), got (3, 8)."),
    "H is odd": (lambda: rotary(X[..., :7], np.arange(T)), ValueError, "H must be even, got 7."),
    "float positions": (
        lambda: rotary(X, jnp.arange(T, dtype=np.float32)), TypeError, "positions must be integers, got float32."
    ),
    "boolean positions": (
        lambda: rotary(X, np.ones(T, bool)), TypeError, "positions must be integers, got bool."
    ),
    "too few positions": (lambda: rotary(X, np.arange(4)), ValueError, "positions must be (T,) = (5,), got (4,)."),
    "one position for all tokens": (
        lambda: rotary(X, np.zeros(1, int)), ValueError, "positions must be (T,) = (5,), got (1,)."
    ),
    "one position for each batch": (
        lambda: rotary(X, np.zeros((B, 1), int)), ValueError, "positions must be (*B, T) = (2, 5), got (2, 1)."
    ),
    "a position alone": (
        lambda: rotary(X, 3), ValueError, "positions must be (*B, T) = (2, 5), got ()."
    ),
    "batches that are not those of x": (
        lambda: rotary(X, np.zeros((3, T), int)), ValueError, "positions must be (*B, T) = (2, 5), got (3, 5)."
    ),
    "batches that x has not": (
        lambda: rotary(X[0], np.zeros((1, T), int)), ValueError, "positions must be (*B, T) = (5,), got (1, 5)."
    ),
    "a base for each head": (
        lambda: rotary(X, np.arange(T), base=jnp.ones(N)), ValueError, "base must be (), got (3,)."
    ),
    "a base that is no number": (
        lambda: rotary(X, np.arange(T), base=jnp.array(True)), TypeError, "base must be a number, got bool."
    ),
}


@pytest.mark.parametrize("call, kind, message", ERRORS.values(), ids=ERRORS)
def test_what_is_refused_is_named(call, kind, message):
    with pytest.raises(kind) as e:
        call()
    assert str(e.value) == f"rotary: {message}"
