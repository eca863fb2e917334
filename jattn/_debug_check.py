"""`checkify.debug_check`, for programs that are exported too.

JAX's own is an effect, and a program with one cannot be serialised. This one is a function that gives back what it was
given, and holds JAX's own as a program that only `checkify` runs: it enters what a primitive calls its `call_jaxpr`.
"""

import jax
from jax.experimental import checkify
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def debug_check(valid, message):
    """`valid`, bool of any shape; under `checkify` an error with `message` where any of it is False."""

    def check(valid):
        checkify.debug_check(valid.all(), message)
        return valid

    return _p.bind(valid, call_jaxpr=jax.make_jaxpr(check)(valid), message=message)[0]


class _DebugCheck(Primitive):
    multiple_results = True

    def bind(self, *args, subfuns=(), **params):
        # What `checkify` made of `call_jaxpr`: it takes and returns errors too.
        return subfuns[0].call_wrapped(*args) if subfuns else super().bind(*args, **params)


def _same(valid, **params):
    return [valid]


def _batch(args, axes, *, message, **params):
    return [debug_check(args[0], message)], axes


_p = _DebugCheck("debug_check")
_p.def_impl(_same)
_p.def_abstract_eval(_same)
batching.primitive_batchers[_p] = _batch
mlir.register_lowering(_p, lambda context, valid, **params: [valid])
