"""Assertions for your own tests: which inputs of a function may reach which of its outputs, whole models included.

A probe is a set of outputs and a set of inputs that must not reach them. It is tried by derivatives at `x`, in each
mode that the function has: cotangents on all its outputs, tangents on all its inputs, random ones. And it is tried by
values: NaN, infinities, the largest numbers and other numbers in all its inputs must leave its outputs the same, to the
bit.

The probe of an output t has all inputs that t may not see, and all outputs that may see no more than t does: under a
causal mask, all inputs after t and all outputs up to t. So it shows whatever crosses t. With one for each different row
of the mask every pair is tried. Fewer cannot do it: what an output must not get from an input is lost in what others
may.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _checks, masks

__all__ = ["assert_causal", "assert_visible"]

# So many probes are all made; of more, so many are chosen.
_ALL, _CHOSEN = 64, 16


def assert_causal(fn, x, axis=0):
    """Asserts that no output of a function depends on inputs after it, and that outputs do depend on inputs.

    Up to T = 64 every pair of positions is tried. From there on 16 positions are: the first, the last two, the last of
    each eighth, and random ones, the same in every run. Then input s is seen to reach output t if one of the 16, p, has
    t <= p < s; what reaches from one position to the next only there or here can escape, so try a short sequence too.
    For each position that is tried, the function runs some ten times, compiled.

    Args:
        fn: a function of `x` alone that `jax.jit` can compile; close over parameters. It returns floating arrays in
            any pytree, each with T positions on `axis`. A mode of differentiation that JAX does not have for it is left
            out: forward for a `jax.custom_vjp`, reverse for a `jax.lax.while_loop`.
        x: arrays in any pytree, each with T positions on `axis`. Floating arrays are tried with derivatives and with
            values. Integers, such as token ids, and booleans have no derivatives and are tried with others between the
            least and the greatest of their array; if all are the same, with one beside it.
        axis: where the positions are, in each array of `x` and `fn(x)`; 1 for (B, T, F), where 0 would test whether
            sequences reach each other.

    Raises:
        AssertionError: a derivative of an output to a later input is not exactly 0, or other values there change the
            output. The message names the first such output and its first such input, the size, and what showed it. Or
            nothing put into `x` changes an output, although an earlier output changes, or no output changes. (The first
            outputs may be constant: a model that shifts its inputs sees nothing there. To see something is enough.)
        ValueError: a shape disagrees with the above, or `fn(x)` has a NaN, which hides what it depends on.
        TypeError: `fn` is not a function, or an array has another dtype or is traced.
        Exception: JAX's own, for a function that has neither mode.

    Example:
        >>> x = jnp.array([[1.0], [2.0], [4.0], [8.0]])
        >>> testing.assert_causal(lambda x: jnp.cumsum(x, 0), x)
        >>> testing.assert_causal(lambda x: x - x.mean(0), x)
        Traceback (most recent call last):
            ...
        AssertionError: assert_causal: output 0 must not depend on input 1, got a derivative of 0.25 (reverse mode).
    """
    who = "assert_causal"
    # NaN and infinities are put there on purpose.
    with jax.debug_nans(False), jax.debug_infs(False):
        tried = _Tried(who, fn, x, axis, ("T", "T"))
        positions = np.arange(tried.inputs.T)
        tried.assert_apart(_Probe(positions <= t, positions > t) for t in _chosen(positions))
        changes = tried.changes()
        must = np.logical_or.accumulate(changes) if changes.any() else ~changes
        tried.assert_depend(must, changes, "If it may see none, say so in the mask of assert_visible.")


def assert_visible(fn, x, mask, axis=0):
    """Asserts that outputs of a function depend on inputs that they may see, and on no others.

    Where the mask has up to 64 different rows, every pair of positions is tried. Where it has more, 16 of these are:
    the first, the last two, the last of each eighth, and random ones, the same in every run. The row of an output is
    tried on all outputs that may see no more. For each row that is tried, the function runs some ten times, compiled.

    Axes: T_out positions of the output, T_in of the input.

    Args:
        fn: as in `assert_causal`, with T_out positions on `axis`.
        x: as in `assert_causal`, with T_in positions on `axis`.
        mask: a rule from `jattn.masks`, with outputs for queries and inputs for keys, or bool (T_out, T_in) with either
            axis 1; True = the output may depend on the input. It is made whole, T_out x T_in. Of several layers it is
            what all of them together let through: two of `window(1, 0)` see as far as `window(2, 0)`.
        axis: as in `assert_causal`.

    Raises:
        AssertionError: as in `assert_causal`, for the inputs that an output may not see; or an output may see inputs,
            and nothing put into `x` changes it.
        ValueError: as in `assert_causal`, or the mask has another shape.
        TypeError: as in `assert_causal`, or the mask is not boolean.

    Example:
        >>> x = jnp.arange(8.0)
        >>> halves = lambda x: x.reshape(4, 2).sum(1)
        >>> testing.assert_visible(halves, x, masks.rule(lambda out, into: into // 2 == out))
        >>> testing.assert_visible(halves, x, masks.causal())
        Traceback (most recent call last):
            ...
        AssertionError: assert_visible: output 0 must not depend on input 1, got a derivative of 1 (reverse mode).
    """
    who = "assert_visible"
    with jax.debug_nans(False), jax.debug_infs(False):
        tried = _Tried(who, fn, x, axis, ("T_out", "T_in"))
        visible = _dense(who, mask, tried.outputs.T, tried.inputs.T)
        _, rows = np.unique(np.packbits(visible, axis=1), axis=0, return_index=True)
        apart = ((np.asarray(~(visible & ~visible[t]).any(1)), ~visible[t]) for t in _chosen(np.sort(rows)))
        tried.assert_apart(_Probe(*both) for both in apart)
        tried.assert_depend(visible.any(1), tried.changes(), "If it may see none, say so in the mask.")


def _dense(who, mask, T_out, T_in):
    """`mask` as a NumPy array, bool (T_out, T_in)."""
    if isinstance(mask, masks.Mask):
        mask._not_led(who, T=T_out, S=T_in)
        mask = mask.dense(T_out, T_in)
    elif callable(mask):
        raise TypeError(f"{who}: mask must be a rule or an array, got a function. Pass masks.rule(fn).")
    else:
        mask = _checks.boolean(who, "mask", mask, "For a 0/1 mask pass `mask != 0`.")
        _checks.shape(who, "mask", mask, ("T_out?", "T_in?"), {"T_out": T_out, "T_in": T_in})
    _known(who, "mask", mask)
    return np.broadcast_to(np.asarray(mask), (T_out, T_in))


def _known(who, what, arrays):
    if not _checks.known(arrays):
        raise TypeError(f"{who}: {what} must have values, got traced arrays. Call {who} outside of jit, vmap and grad.")


def _chosen(rows):
    """Which of `rows` are tried."""
    n = len(rows)
    if n <= _ALL:
        return rows
    some = {0, n - 2, *(n * k // 8 - 1 for k in range(1, 9))}
    others = np.setdiff1d(np.arange(n), list(some))
    return rows[np.sort([*some, *np.random.default_rng(0).choice(others, _CHOSEN - len(some), replace=False)])]


class _Probe(NamedTuple):
    """None of `inputs`, bool (T_in,), may reach any of `outputs`, bool (T_out,)."""

    outputs: np.ndarray
    inputs: np.ndarray


class _Tried:
    """A function at one `x`, compiled, and the ways to see which inputs reach which outputs."""

    def __init__(self, who, fn, x, axis, letters):
        if not callable(fn):
            raise TypeError(f"{who}: fn must be a function, got {type(fn).__name__}.")
        any_kind = {"floating": jnp.floating, "integer": jnp.integer, "boolean": np.bool_}
        inputs = _leaves(who, "x", x, axis, any_kind, letters[1])
        structure = jax.tree.structure(x)
        jitted = jax.jit(lambda leaves: fn(structure.unflatten(leaves)))
        out = jax.eval_shape(jitted, inputs.arrays)
        T_out = inputs.T if letters[0] == letters[1] else None
        outputs = _leaves(who, "fn(x)", out, axis, {"floating": jnp.floating}, letters[0], T_out, _OTHER_LENGTH)

        def leaves_of_fn(leaves):
            return tuple(jax.tree.leaves(jitted(leaves)))

        self.who, self.inputs = who, inputs
        rng = np.random.default_rng(0)
        self.by_values = _by_values(who, leaves_of_fn, inputs, outputs, rng)
        self.by_derivatives = _by_derivatives(leaves_of_fn, inputs, outputs, rng)
        self.outputs = outputs

    def assert_apart(self, probes):
        """No inputs of a probe reach its outputs."""
        probes = [probe for probe in probes if probe.inputs.any()]
        for way in self.by_derivatives + self.by_values:
            found = way.first(probes)
            if found:
                output, input, got = found
                raise AssertionError(f"{self.who}: output {output} must not depend on input {input}, got {got}.")

    def changes(self):
        """Which outputs change with something put into all of `x`: bool (T_out,)."""
        everywhere = np.ones(self.inputs.T, bool)
        return np.any([way.reach(everywhere) != 0 for way in self.by_values], 0)

    def assert_depend(self, outputs, changes, hint):
        """These outputs, bool (T_out,), are among those that change."""
        constant = outputs & ~changes
        if constant.any():
            must = f"output {constant.argmax()} must depend on some input that it may see"
            raise AssertionError(f"{self.who}: {must}, got the same whatever was put there. {hint}")


_OTHER_LENGTH = "For another length pass a mask to assert_visible."


# Two ways to see that an input reaches an output. `reach` gives a size for each position, 0 where nothing comes.
# `first` gives the first output that a probe's inputs reach, the first input that does, and what came; or None.


class _ByValues(NamedTuple):
    """`reach(inputs)` is how much outputs change with something put into `inputs`."""

    put: str
    reach: Callable

    def first(self, probes):
        found = _first_forwards(self.reach, probes)
        if found:
            output, input, size = found
            came = "NaN" if np.isnan(size) else f"a change of {size:.3g}"
            hint = ". A weight of 0 does not hide it: 0 * NaN is NaN" if came == self.put else ""
            return output, input, f"{came} with {self.put} put there{hint}"


class _ByDerivatives(NamedTuple):
    """`reach(sources, numbers)` is what `numbers`, a tangent or a cotangent, at `sources` become at targets."""

    mode: str
    reach: Callable
    sources: "_Leaves"
    numbers: tuple

    def first(self, probes):
        first = _first_backwards if self.mode == "reverse" else _first_forwards
        found = first(lambda sources: self.reach(sources, self.numbers), probes)
        if found:
            output, input, _ = found
            size = self._entry(output, input) if self.mode == "reverse" else self._entry(input, output)
            return output, input, f"a derivative of {size:.3g} ({self.mode} mode)"

    def _entry(self, source, target):
        """The derivative between two positions, for the first feature of the source that has one."""
        at = np.arange(self.sources.T) == source

        def reached(low, high, numbers):
            return self.reach(at, self.sources.at_features(low, high, numbers))[target]

        k = _least(self.sources.features, lambda k: reached(0, k, self.numbers) != 0)
        return reached(k - 1, k, tuple(map(jnp.ones_like, self.numbers)))


def _first_forwards(reach, probes):
    """(output, input, size) by a `reach` from inputs to outputs."""
    found = []
    for outputs, inputs in probes:
        for output in np.flatnonzero(outputs & (reach(inputs) != 0))[:1]:
            needed = _least_of(inputs, lambda some, output=output: reach(some)[output] != 0)
            found.append((output, np.flatnonzero(needed)[-1], reach(needed)[output]))
    return min(found, default=None)


def _first_backwards(reach, probes):
    """(output, input, size) by a `reach` from outputs to inputs."""
    found = []
    for outputs, inputs in probes:
        reaches = lambda some, inputs=inputs: (reach(some)[inputs] != 0).any()  # noqa: E731
        if reaches(outputs):
            output = np.flatnonzero(_least_of(outputs, reaches))[-1]
            sizes = reach(np.arange(len(outputs)) == output)
            # What several outputs have and none has alone is a rounding error. If it is more, values will show it.
            found += [(output, input, sizes[input]) for input in np.flatnonzero(inputs & (sizes != 0))[:1]]
    return min(found, default=None)


def _least_of(positions, shows):
    """The first few of `positions`, bool (T,), as few as `shows` needs."""
    count = np.cumsum(positions)
    return positions & (count <= _least(count[-1], lambda k: shows(positions & (count <= k))))


def _least(n, shows):
    """The least k > 0 for which `shows(k)`, given that it holds for n."""
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle, high)
    return high


def _by_values(who, fn, inputs, outputs, rng):
    x = inputs.arrays
    # One program for all values: another one might round differently.
    put = jax.jit(lambda x, positions, values: fn(inputs.where(positions, values, x)))
    changes = jax.jit(lambda new, old: outputs.largest(map(_change, new, old)))
    old = put(x, np.zeros(inputs.T, bool), x)
    _known(who, "x and what fn closes over", old)
    bad = np.isnan(_of_all(outputs.largest(old)))
    if bad.any():
        hint = "It would hide what the output depends on."
        raise ValueError(f"{who}: fn(x) must have no NaN, got one in output {bad.argmax()}. {hint}")

    def way(name, values):
        return _ByValues(name, lambda positions: _of_all(changes(put(x, positions, values), old)))

    named = {name: tuple(map(fill, x)) for name, fill in _PUT.items()} if any(map(_is_floating, x)) else {}
    others = [tuple(_other(x, rng) for x in x) for _ in range(2)]
    return [way(*put) for put in named.items()] + [way("other numbers", values) for values in others]


def _change(new, old):
    """0 only where nothing has changed."""
    size = new - old
    size = jnp.where(size == 0, jnp.finfo(size.dtype).tiny, size)
    return jnp.where(new == old, jnp.zeros_like(size), size)


def _filled(number):
    return lambda x: jnp.full_like(x, number(x.dtype)) if _is_floating(x) else x


_PUT = {
    "NaN": _filled(lambda dtype: np.nan),
    "inf": _filled(lambda dtype: np.inf),
    "-inf": _filled(lambda dtype: -np.inf),
    "the largest number": _filled(lambda dtype: jnp.finfo(dtype).max),
    "minus the largest number": _filled(lambda dtype: jnp.finfo(dtype).min),
}


def _other(x, rng):
    """Others than the numbers of `x`: for integers within their range, all of which are token ids if they are."""
    if _is_floating(x):
        return jnp.asarray(rng.normal(size=x.shape), x.dtype)
    now = np.asarray(x, np.int64)
    low, high = (0, 1) if x.dtype == np.bool_ else (now.min(), now.max())
    if low == high:
        low, high = (low - 1, high) if low > 0 else (low, high + 1)
    n = high - low + 1
    return jnp.asarray(low + (now - low + rng.integers(1, n, x.shape)) % n, x.dtype)


def _by_derivatives(fn, inputs, outputs, rng):
    x = inputs.arrays
    floating = [i for i, array in enumerate(x) if _is_floating(array)]
    if not floating:
        return []
    floats = _Leaves(tuple(x[i] for i in floating), tuple(inputs.axes[i] for i in floating))

    def of_floats(x):
        """The function of the floating leaves of `x`, and these."""

        def function(values):
            values = dict(zip(floating, values, strict=True))
            return fn(tuple(values.get(i, array) for i, array in enumerate(x)))

        return function, tuple(x[i] for i in floating)

    def pull(x, positions, numbers):
        _, back = jax.vjp(*of_floats(x))
        return floats.largest(*back(outputs.where(positions, numbers, _zeros(numbers))))

    def push(x, positions, numbers):
        function, at = of_floats(x)
        _, out = jax.jvp(function, (at,), (floats.where(positions, numbers, _zeros(numbers)),))
        return outputs.largest(out)

    def way(mode, program, sources):
        numbers = tuple(_random(array, rng) for array in sources.arrays)
        compiled = jax.jit(program).lower(x, np.ones(sources.T, bool), numbers).compile()
        return _ByDerivatives(mode, lambda *to: _of_all(compiled(x, *to)), sources, numbers)

    found, lacking = [], []
    for mode in (("reverse", pull, outputs), ("forward", push, floats)):
        try:
            found.append(way(*mode))
        except (TypeError, ValueError, NotImplementedError) as error:
            # `fn` itself was traced before: it is this mode that it has not.
            lacking.append(error)
    if not found:
        raise lacking[0]
    return found


def _zeros(arrays):
    return tuple(map(jnp.zeros_like, arrays))


def _random(x, rng):
    """Numbers of 1 to 2 and either sign, so random that what they are multiplied with hardly ever adds up to 0."""
    numbers = 2 * rng.random(x.shape, np.float32) - 1
    return jnp.asarray(numbers + np.copysign(1, numbers), x.dtype)


def _is_floating(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


class _Leaves(NamedTuple):
    """The leaves of a pytree, or their shapes and dtypes, with T positions on an axis of each."""

    arrays: tuple
    axes: tuple

    @property
    def T(self):
        return self.arrays[0].shape[self.axes[0]]

    @property
    def features(self):
        """How many numbers there are at a position, in all leaves."""
        return sum(x.size for x in self.arrays) // self.T

    def at_features(self, low, high, these):
        """The arrays `these` at features `low` up to `high` of each position, and 0 elsewhere."""
        out = []
        for x, axis in zip(these, self.axes, strict=True):
            n = np.arange(x.size // self.T).reshape(np.delete(x.shape, axis))
            out.append(jnp.where(np.expand_dims((low <= n) & (n < high), axis), x, jnp.zeros_like(x)))
            low, high = low - n.size, high - n.size
        return tuple(out)

    def where(self, positions, these, others):
        """The arrays `these` at `positions`, bool (T,), and `others` elsewhere."""
        at = (jnp.expand_dims(positions, _but(axis, x)) for x, axis in zip(these, self.axes, strict=True))
        return tuple(jnp.where(here, x, other) for here, x, other in zip(at, these, others, strict=True))

    def largest(self, arrays):
        """The largest absolute number at each position, (T,), of each of the arrays; NaN where there is one."""
        return [_largest(x, _but(axis, x)) for x, axis in zip(arrays, self.axes, strict=True)]


def _but(axis, x):
    return tuple(i for i in range(x.ndim) if i != axis)


def _largest(x, axes):
    # XLA:CPU leaves NaN out of a maximum.
    bad = jnp.isnan(x)
    size = jnp.where(bad, jnp.zeros_like(x), jnp.abs(x)).max(axes)
    return jnp.where(bad.any(axes), jnp.full_like(size, jnp.nan), size)


def _of_all(largest):
    return np.max([np.asarray(x, np.float64) for x in largest], 0)


def _leaves(who, what, tree, axis, kinds, letter, T=None, hint=""):
    """The leaves of `tree`, checked. T is that of the first where none is given."""
    arrays, axes = [], []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = what + jax.tree_util.keystr(path)
        if not isinstance(x, jax.ShapeDtypeStruct):
            x = jnp.asarray(_checks.array(who, name, x))
        if not any(jnp.issubdtype(x.dtype, kind) for kind in kinds.values()):
            raise TypeError(f"{who}: {name} must be {' or '.join(kinds)}, got {x.dtype}.")
        own, shape = _checks.axis(who, name, x, axis), _checks.tupled(x.shape)
        if T is None:
            T, hint = x.shape[own], ""
        if x.shape[own] != T:
            must = f"{letter} = {T} positions on axis {axis}"
            raise ValueError(f"{who}: {name} must have {must}, got {shape}.{' ' + hint if hint else ''}")
        if x.size == 0:
            raise ValueError(f"{who}: {name} must hold numbers, got {shape}.")
        arrays.append(x)
        axes.append(own)
    if not arrays:
        raise ValueError(f"{who}: {what} must hold an array, got {tree!r}.")
    return _Leaves(tuple(arrays), tuple(axes))
