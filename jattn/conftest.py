"""The examples in docstrings see the public names, `jax`, `jnp` and `np`, and run with JAX's own settings, as a user's
session does, whatever the tests have made stricter. Not part of the wheel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn


@pytest.fixture(autouse=True)
def as_a_user_sees_it(doctest_namespace):
    doctest_namespace.update(jax=jax, jnp=jnp, np=np, jattn=jattn)
    doctest_namespace.update({name: getattr(jattn, name) for name in jattn.__all__})
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
