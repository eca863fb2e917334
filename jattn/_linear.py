"""Derivatives in some of a function's arguments, as the rules of primitives need them."""

import jax
import jax.numpy as jnp
from jax import lax


def pushed(f, moves):
    """The tangents of f(*args), a list, as a function of (args, tangents): those of the args that move."""

    def push(args, tangents):
        def of_moving(*moving):
            moving = iter(moving)
            return f(*(next(moving) if m else x for x, m in zip(args, moves, strict=True)))

        return jax.jvp(of_moving, [x for x, m in zip(args, moves, strict=True) if m], list(tangents))[1]

    return push


def pulled(f, linear, avals):
    """The cotangents of the args that f is linear in, of these avals, as a function of (the other args, cotangents)."""

    def pull(args, cotangents):
        def of_linear(*own):
            others, own = iter(args), iter(own)
            return f(*(next(own if m else others) for m in linear))

        return list(jax.linear_transpose(of_linear, *map(zeros, avals))(list(cotangents)))

    return pull


def zeros(aval):
    x, axes = jnp.zeros(aval.shape, aval.dtype), tuple(aval.manual_axis_type.varying)
    return lax.pcast(x, axes, to="varying") if axes else x
