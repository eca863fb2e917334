"""The one place that words an error: who, what must hold, in axis letters with this call's sizes, what came."""

import inspect
import itertools
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify

from jattn._debug_check import debug_check


def tupled(sizes):
    """(2, 3) as a reader writes a shape: "(2, 3)", "(2,)", "()"."""
    sizes = tuple(sizes)
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def expand(axes, sizes):
    """("*B", "T?", "D") with {"B": (2, 3), "T": 5} -> [2, 3, 5 or 1, anything], as chex writes it."""
    out = []
    for axis in axes:
        letter = axis.rstrip("?")
        for n in sizes["B"] if letter == "*B" else [sizes.get(letter)]:
            out.append({n, 1} if axis.endswith("?") and n is not None else n)
    return out


def shape(who, what, x, axes, sizes, *, hint=""):
    """Asserts that `x` has these axes.

    Args:
        who: the public function that was called.
        what: the name of its argument.
        x: an array.
        axes: letters, with "*B" for the batch axes, and a "?" behind those that may also be 1: `("*B?", "T", "H")`.
        sizes: letter -> size; "B" -> tuple of sizes. A letter that is not there may have any size.
        hint: a sentence that says what to pass instead.

    Raises:
        ValueError: the shape is another one.
    """
    try:
        chex.assert_shape(x, expand(axes, sizes))
    except AssertionError:
        letters = tupled(axis.rstrip("?") for axis in axes)
        numbers = tupled(letter if n is None else n for letter, n in _full(axes, sizes))
        must = letters if letters == numbers else f"{letters} = {numbers}"
        raise _error(ValueError, who, what, must, tupled(np.shape(x)), hint) from None


def _full(axes, sizes):
    letters = [axis.rstrip("?") for axis in axes]
    return [(letter, n) for letter in letters for n in (sizes["B"] if letter == "*B" else [sizes.get(letter)])]


def _error(kind, who, what, must, got, hint=""):
    return kind(f"{who}: {what} must be {must}, got {got}.{' ' + hint if hint else ''}")


def rank(who, what, x, axes, *, at_least=False, hint=""):
    """Asserts that `x` has as many axes as `axes` names; with `at_least`, "*B" in it stands for any number."""
    n = len(axes) - ("*B" in axes)
    try:
        if at_least:
            chex.assert_rank(x, set(range(n, max(n, np.ndim(x)) + 1)))
        else:
            chex.assert_rank(x, n)
    except AssertionError:
        raise _error(ValueError, who, what, tupled(axes), tupled(np.shape(x)), hint) from None


def array(who, what, x, must="an array") -> Any:
    """`x` as an array. NumPy arrays, lists and numbers become NumPy's, so that their values are known while tracing."""
    if isinstance(x, jax.Array):
        return x
    if hasattr(x, "__jax_array__"):
        return jnp.asarray(x)
    own = isinstance(x, np.ndarray | np.generic)
    try:
        out = np.asarray(x)
        # Objects, texts, dates and numbers of more than 64 bits: JAX has none.
        if out.dtype.char in "OUSMmgG":
            raise TypeError
    except (TypeError, ValueError, RuntimeError):
        # Other libraries' arrays raise what they like.
        raise _error(TypeError, who, what, must, f"one of {x.dtype}" if own else type(x).__name__) from None
    return out if own else out.astype(jax.dtypes.canonicalize_dtype(out.dtype))


def floating(who, what, x, hint=""):
    """`x` as an array of a floating dtype of 16 bits or more."""
    x = array(who, what, x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise _error(TypeError, who, what, "floating", x.dtype, hint)
    return x


def dtype(x):
    """The dtype that JAX gives the array `x`: without x64, NumPy's float64 is float32."""
    return jax.dtypes.canonicalize_dtype(x.dtype) if x.dtype == np.float64 else x.dtype


def one_floating_dtype(who, **arrays):
    """`arrays`, by name, as arrays that share one floating dtype."""
    arrays = {what: array(who, what, x) for what, x in arrays.items()}
    dtypes = [str(dtype(x)) for x in arrays.values()]
    if len(set(dtypes)) > 1:
        names = " and ".join(", ".join(arrays).rsplit(", ", 1))
        raise TypeError(f"{who}: {names} must share one floating dtype, got {', '.join(dtypes)}.")
    return {what: floating(who, what, x) for what, x in arrays.items()}


def heads(who, query, sizes):
    """Asserts that heads of N queries group over K keys and values, and have features; `query` is whose H it is.

    Warns where there are more heads than tokens, and more than any model has: most likely the two are swapped.
    """
    if sizes["H"] == 0:
        raise ValueError(f"{who}: H must be at least 1, got query {tupled(query.shape)}.")
    T, S, N, K = (sizes.get(letter, 0) for letter in "TSNK")
    axes = "Arrays are (*B, T, N, H): of (*B, N, T, H) swap these axes, jnp.swapaxes(x, -3, -2)."
    if K == 0 or N % K:
        # Numbers of heads divide each other, and here those of tokens do.
        hint = " " + axes if S > 1 and T % S == 0 else ""
        raise ValueError(f"{who}: N = {N} query heads is not a multiple of K = {K} key/value heads.{hint}")
    if 0 < max(T, S) < N and N > 256:
        _warn(f"{who}: N = {N} query heads for T = {T} queries and S = {S} keys. {axes}")


def number(who, what, x):
    """`x` as a floating array, float64 where it was a Python number."""
    if isinstance(x, int | float) and not isinstance(x, bool):
        return np.float64(x)
    x = array(who, what, x, "a number")
    if not jnp.issubdtype(x.dtype, jnp.floating) and not jnp.issubdtype(x.dtype, jnp.integer):
        raise _error(TypeError, who, what, "a number", x.dtype)
    return x


def integral(who, what, x):
    """`x` as an int32 array."""
    x = array(who, what, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise _error(TypeError, who, what, "integers", x.dtype)
    if known(x) and x.size:
        # NumPy, because inside a jit jnp makes tracers, of constants too.
        low, high = np.asarray(x).min(), np.asarray(x).max()
        if low < -(2**31) or high >= 2**31:
            raise _error(ValueError, who, what, "within 32 bits", high if high >= 2**31 else low)
    return x.astype(np.int32)


def boolean(who, what, x, hint=""):
    """`x` as a boolean array."""
    x = array(who, what, x)
    if x.dtype != np.bool_:
        raise _error(TypeError, who, what, "boolean (True = may attend)", x.dtype, hint)
    return x


def axis(who, what, x, axis):
    """`axis` of the array `x`, counted from the front."""
    n = np.ndim(x)
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise _error(TypeError, who, "axis", "an integer", repr(axis))
    if not -n <= axis < n:
        raise _error(ValueError, who, "axis", f"one of the {n} axes of {what}, which is {tupled(np.shape(x))}", axis)
    return int(axis) % n


def choice(who, what, x, options):
    """`x`, one of `options`, which are None and texts."""
    # Of an array it could not be said whether it is equal to one of them.
    if not isinstance(x, str | None) or x not in options:
        raise _error(ValueError, who, what, f"one of {', '.join(map(repr, options))}", repr(x))
    return x


def flag(who, what, x):
    """`x`, True or False."""
    if not isinstance(x, bool | np.bool_):
        got = f"{x.dtype}{tupled(x.shape)}" if isinstance(x, jax.Array | np.ndarray) else repr(x)
        raise _error(TypeError, who, what, "True or False", got)
    return bool(x)


def options(who, options, function, but=()):
    """Asserts that `options` are parameters of `function` that have a default, other than those in `but`."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.default is not p.empty and p.name not in but]
    for name in options:
        if name not in names:
            raise TypeError(f"{who}: {name!r} is no option. There are {', '.join(names)}.")


def no_mask(who, what, x):
    """Warns where `x`, added to logits, holds 0 and 1 alone: most likely a mask. Looked at where that costs little."""
    if known(x) and 0 < x.size <= 2**16:
        ones = np.asarray(x) == 1
        if ones.any() and not ones.all() and np.all(ones | (np.asarray(x) == 0)):
            _warn(f"{who}: {what} holds 0 and 1 alone, and is added to logits. For a mask pass mask={what} != 0.")


def not_inverted(who, what, x):
    """Warns where `x`, True = may attend, is the inverse of a causal mask. Looked at where that costs little."""
    T = max(x.shape[-2:], default=0)
    # A few positions are an example, such as that of what True means.
    if known(x) and x.shape[-2:] == (T, T) and T >= 8 and 0 < x.size <= 2**16:
        if np.all(np.asarray(x) != np.tri(T, dtype=np.bool_)):
            _warn(f"{who}: {what} shows a query the keys after it alone. True = may attend: pass ~{what}.")


def _warn(text):
    """Warns at the caller of the public function, however deep in here."""
    frames = (frame.frame.f_globals.get("__name__", "") for frame in inspect.stack(0))
    depth = sum(1 for _ in itertools.takewhile(lambda name: name.partition(".")[0] == "jattn", frames))
    warnings.warn(text, stacklevel=depth + 1)


def random_key(who, what, x, hint=""):
    """`x`, one random key, as an array of words, uint32."""
    must = "a random key, from jax.random.key"
    x = array(who, what, x, must)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        shape(who, what, x, (), {}, hint=hint)
        x = jax.random.key_data(x)
    if x.dtype != np.uint32 or x.ndim != 1:
        raise _error(TypeError, who, what, must, f"{x.dtype}{tupled(x.shape)}")
    return x


def size(who, what, x, at_least):
    """Asserts that `x` is an int of at least `at_least`."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < at_least:
        raise _error(ValueError, who, what, f"an int >= {at_least}", repr(x) if known(x) else "a traced array")


def zero(x):
    """Whether `x` is known to be 0."""
    # NumPy's, because inside a jit jnp makes tracers, of what is known too.
    return known(x) and np.ndim(x) == 0 and np.asarray(x) == 0


def known(*trees):
    """Whether every array in `trees` has a value now, not only once the program runs."""
    return not any(isinstance(x, Tracer) for x in jax.tree.leaves(trees))


def empty_row(who):
    """What the policy `empty="raise"` says."""
    return f"{who}: a query has no key that it may attend to, and empty='raise'. Pass empty='zero' for zeros."


def no_empty_rows(who, empty):
    """The policy `empty="raise"`: now where `empty`, bool of any shape, is known, under checkify where it is traced."""
    message = empty_row(who)
    if known(empty):
        if np.any(empty):
            raise ValueError(message)
    else:
        checkify.check(~jnp.any(empty), message)


def valid(who, what, x, holds, must, hint=""):
    """`x`, a number that `holds`: now where it is known, as a NaN and a `debug_check` where it is traced."""
    if known(x):
        # NumPy, because inside a jit jnp makes tracers, of constants too.
        now = np.asarray(x)
        if not holds(now):
            raise _error(ValueError, who, what, must, str(x), hint)
        return x
    return jnp.where(debug_check(holds(x), f"{who}: {what} must be {must}."), x, jnp.nan)


def tokens(who, what, x, axis, n):
    """`x`, one text for each of the `n` places on `axis`, as a list."""
    texts = list(x) if hasattr(x, "__iter__") and not isinstance(x, str) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise _error(TypeError, who, what, "a list of texts", repr(x))
    if len(texts) != n:
        raise _error(ValueError, who, what, f"({axis},) = ({n},)", f"({len(texts)},)", "One text for each position.")
    return texts
