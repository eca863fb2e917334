"""A check that only `checkify` runs, and that goes through every transform and through export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jattn._debug_check import debug_check

MESSAGE = "x must be > 0."
GOOD, BAD = jnp.array([1.0, 2.0]), jnp.array([1.0, -2.0])


def doubled(x):
    return jnp.where(debug_check(x > 0, MESSAGE), 2 * x, jnp.nan)


def looped(x):
    def body(state):
        return state[0] + 1, doubled(state[1])

    return jax.lax.while_loop(lambda state: state[0] < 2, body, (0, x))[1] / 2


WAYS = {
    "eager": doubled,
    "jit": jax.jit(doubled),
    "vmap": jax.vmap(doubled),
    "vmap of vmap": lambda x: jax.vmap(jax.vmap(doubled))(x[None])[0],
    "scan": lambda x: jax.lax.scan(lambda carry, x: (carry, doubled(x)), None, x)[1],
    "while_loop": looped,
    "cond": lambda x: jax.lax.cond(x[0] > 0, doubled, lambda x: x, x),
    "checkpoint": jax.checkpoint(doubled),
    "shard_map": jax.shard_map(
        doubled,
        mesh=jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=jax.P("x"),
        out_specs=jax.P("x"),
    ),
    "twice": lambda x: (doubled(x) + doubled(x + 0)) / 2,
}
DERIVED = {
    "the value": lambda f, x: f(x),
    "its gradient": lambda f, x: jax.vjp(f, x)[1](x)[0],
    "its derivative": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "its gradient under jit": lambda f, x: jax.jit(lambda x: jax.vjp(f, x)[1](x)[0])(x),
}


@pytest.mark.parametrize("derived", DERIVED.values(), ids=DERIVED)
@pytest.mark.parametrize("way", WAYS)
def test_checkify_runs_it_wherever_it_stands_and_nothing_else_does(way, derived):
    if way == "while_loop" and derived in (DERIVED["its gradient"], DERIVED["its gradient under jit"]):
        pytest.skip("JAX has no reverse mode through while_loop")
    f = functools.partial(derived, WAYS[way])
    np.testing.assert_allclose(f(GOOD), 2 * GOOD)
    # Elementwise: the other element is as it was.
    assert np.isfinite(f(BAD)[0])
    for x, failed in (GOOD, False), (BAD, True):
        for checked in (checkify.checkify(f), jax.jit(checkify.checkify(f))):
            error, out = checked(x)
            np.testing.assert_array_equal(out, f(x))
            assert (MESSAGE in error.get()) if failed else error.get() is None


def test_it_is_no_effect_and_can_be_exported_with_its_gradient():
    pytest.importorskip("flatbuffers")
    from jax import export

    assert not jax.make_jaxpr(doubled)(GOOD).effects
    loaded = export.deserialize(export.export(jax.jit(doubled))(GOOD).serialize(vjp_order=1))
    np.testing.assert_array_equal(loaded.call(BAD), doubled(BAD))
    np.testing.assert_array_equal(jax.grad(lambda x: loaded.call(x).sum())(GOOD), [2, 2])
