"""What mask rules and bias rules share: named numbers and arrays, and the pairs (query, key) they are asked about."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _checks


class Pairs(NamedTuple):
    """A tile of queries x keys: where they are stored, (t, 1) and (1, s), and their positions, likewise.

    `rows(x, axis)` and `columns(x, axis)` pick this tile's part of an array that is stored along queries or keys; an
    axis of size 1 holds for all of them and stays. `inside` is None, or bool (t, s): the pairs that belong to the tile.
    In a `full` tile every pair is known to be visible.
    """

    query_indices: Any
    key_indices: Any
    query_positions: Any
    key_positions: Any
    rows: Callable
    columns: Callable
    inside: Any = None
    full: bool = False

    @property
    def shape(self):
        return (self.query_indices.shape[0], self.key_indices.shape[1])


def all_pairs(T, S, query_positions=None, key_positions=None):
    """Every query with every key."""
    whole = lambda x, axis: x  # noqa: E731 (a picker is a value)
    return tile(jnp.arange(T), jnp.arange(S), query_positions, key_positions, whole, whole)


def some_rows(rows, S, query_positions=None, key_positions=None):
    """The queries stored at `rows`, (R,), with every key."""
    pick = picker(rows)
    query_positions = None if query_positions is None else pick(query_positions, 0)
    return tile(rows, jnp.arange(S), query_positions, key_positions, pick, lambda x, axis: x)


def at_positions(who, query_positions, key_positions):
    """Queries and keys that are stored at their positions."""
    rows = picker(query_positions, f"{who}: query_positions must be within 0 ... T - 1")
    columns = picker(key_positions, f"{who}: key_positions must be within 0 ... S - 1")
    return tile(query_positions, key_positions, None, None, rows, columns)


def picker(indices, must=""):
    """What picks the entries at `indices` along an axis, as `Pairs.rows` does."""

    def pick(x, axis):
        n = x.shape[axis]
        # An axis of size 1 holds for every query or key, and so it does for these.
        if n == 1:
            return x
        if must and _checks.known(indices):
            got = np.asarray(indices)
            if got.size and not (0 <= got.min() and got.max() < n):
                raise ValueError(f"{must} = {n - 1}, got {got.tolist()}.")
        return jnp.take(x, indices, axis=axis, mode="clip")

    return pick


def tile(queries, keys, query_positions, key_positions, rows, columns):
    """The pairs of queries and keys stored at these indices, at their indices where no positions are given."""
    queries, keys = (jnp.asarray(x, np.int32) for x in (queries, keys))
    query_positions = queries if query_positions is None else query_positions
    key_positions = keys if key_positions is None else key_positions
    return Pairs(queries[:, None], keys[None, :], query_positions[:, None], key_positions[None, :], rows, columns)


OPAQUE = np.True_, np.False_


def _opaque(tiles, **fields):
    return OPAQUE


class Kind(NamedTuple):
    """What all rules made by one constructor have in common.

    `tile(pairs, **fields)` is the rule. `axes` are pairs (field, its axes where it is an array), as `_checks.shape`
    takes them: T and S are the call's own, any other letter is the array's. In `attention` others may lead them.
    `bounds(tiles, **fields)` says of tiles, `_plan.Tiles`, whether any pair may be visible and whether all must be.
    """

    name: str
    tile: Callable
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    bounds: Callable = _opaque


class Rule:
    """A function of positions with named numbers, which are static, and arrays, which are pytree leaves."""

    # `array & rule` would otherwise make an array of rules.
    __array_ufunc__ = None

    def __init__(self, kind, fields):
        self.kind = kind
        self.fields = fields
        self.leaf_names = tuple(name for name, x in fields.items() if isinstance(x, Rule) or is_array(x))

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_with_keys(cls, cls._flatten_with_keys, cls._unflatten, cls._flatten)

    def _flatten(self):
        # A leaf keeps its place here, so that fields keep their order.
        static = tuple((name, None if name in self.leaf_names else x) for name, x in self.fields.items())
        return tuple(self.fields[name] for name in self.leaf_names), (self.kind, self.leaf_names, static)

    def _flatten_with_keys(self):
        leaves, aux = self._flatten()
        return tuple(zip(map(jax.tree_util.GetAttrKey, self.leaf_names), leaves, strict=True)), aux

    # Leaves may be anything here (axis numbers, None, placeholders of a transform): nothing is looked at.
    @classmethod
    def _unflatten(cls, aux, leaves):
        rule = object.__new__(cls)
        rule.kind, rule.leaf_names, static = aux
        rule.fields = dict(static) | dict(zip(rule.leaf_names, leaves, strict=True))
        return rule

    def __bool__(self):
        raise TypeError(f"{self!r} has no truth value. Combine masks with &, | and ~, not with and, or and not.")

    def __repr__(self):
        shown = ", ".join(f"{name}={_shown(x)}" for name, x in self.fields.items() if x is not None)
        return f"{self.kind.name}({shown})"

    def tile(self, pairs):
        return self.kind.tile(pairs, **self.fields)

    def bounds(self, tiles, static=False):
        """Whether any pair of each tile may be visible, and whether all must be. NumPy where both are known.

        With `static`, what depends on arrays is taken for opaque, and the answer is always NumPy.
        """
        found = self.kind.bounds(tiles, **self.fields)
        return OPAQUE if static and any(isinstance(x, jax.Array) for x in found) else found

    def __call__(self, query_positions, key_positions):
        """The rule's tile, (t, s), for queries and keys that are stored at their positions.

        Args:
            query_positions: (t,), integers, in any order.
            key_positions: (s,), integers, likewise.

        Raises:
            ValueError: an array in the rule is led by batch or head axes, or stores nothing at one of the positions.
                (Where these are traced, the nearest place that it has stands in.)
        """
        who = repr(self)
        query_positions = _checks.integral(who, "query_positions", query_positions)
        key_positions = _checks.integral(who, "key_positions", key_positions)
        _checks.rank(who, "query_positions", query_positions, ("t",))
        _checks.rank(who, "key_positions", key_positions, ("s",))
        self._not_led(who)
        pairs = at_positions(who, query_positions, key_positions)
        return jnp.broadcast_to(self.tile(pairs), pairs.shape)

    def dense(self, T, S):
        """The whole rule, (T, S), for T queries and S keys at positions 0, 1, 2, ..."""
        self._not_led("dense", T=T, S=S)
        return jnp.broadcast_to(self.tile(all_pairs(T, S)), (T, S))

    def _not_led(self, who, **sizes):
        for leaf, (what, axes) in zip(jax.tree.leaves(self), self.leaf_axes(), strict=True):
            hint = "Map batch and head axes with jax.vmap." * (leaf.ndim > len(axes))
            _checks.shape(who, what, leaf, axes, sizes, hint=hint)

    def leaf_axes(self):
        """(argument name, core axes) of each leaf, in the order of `jax.tree.leaves`."""
        out = []
        for name in self.leaf_names:
            x = self.fields[name]
            own = [(f"{self.kind.name}({name}=...)", dict(self.kind.axes).get(name, ()))]
            out += x.leaf_axes() if isinstance(x, Rule) else own
        return out


def _shown(x):
    if is_array(x):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return getattr(x, "__name__", None) or repr(x)


def is_array(x):
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def is_int(x):
    return isinstance(x, int) and not isinstance(x, bool)


def integer(who, what, x, *, at_least=None, optional=False):
    """A Python int, which stays one and is static, or an array of integers, which becomes a leaf, int32."""
    if optional and x is None:
        return None
    static = is_int(x)
    if not static and not (is_array(x) and jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"{who}: {what} must be an int or an array of integers, got {_described(x)}.")
    if _checks.known(x):
        # NumPy, because inside a jit jnp makes tracers, of constants too.
        low, high = np.min(np.asarray(x), initial=0), np.max(np.asarray(x), initial=0)
        if at_least is not None and low < at_least:
            raise ValueError(f"{who}: {what} must be >= {at_least}, got {low}.{' Pass None for no bound.' * optional}")
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"{who}: {what} must fit in 32 bits, got {high or low}.")
    return x if static else x.astype(np.int32)


def _described(x):
    return str(x.dtype) if is_array(x) else repr(x)


def function(who, what, fn):
    """A caller's function: static, part of the program."""
    if not callable(fn):
        raise TypeError(f"{who}: {what} must be a function, got {type(fn).__name__}.")
    try:
        hash(fn)
    except TypeError:
        hint = "Pass the arrays that it holds as arrays of a rule."
        raise TypeError(f"{who}: {what} must be hashable, got {type(fn).__name__}. {hint}") from None
    return fn


def fits(who, out, pairs, dtypes, must, hint=""):
    """The tile `out` of a caller's function, if it has one of the dtypes and the shape of `pairs`."""
    if not is_array(out) or not jnp.issubdtype(out.dtype, dtypes):
        raise TypeError(f"{who} must return {must}, got {_described(out)}.{' ' + hint if hint else ''}")
    fitting = out.ndim == 2 and all(n in (1, full) for n, full in zip(out.shape, pairs.shape, strict=True))
    if not fitting:
        must = f"(t, s) = {_checks.tupled(pairs.shape)}, each axis full or 1"
        raise ValueError(f"{who} must return {must}, got {_checks.tupled(out.shape)}.")
    return out


def arrays_with_axes(who, arrays, ranks):
    """The fields and the axes of the arrays of `rule(fn, *arrays, ranks=...)`."""
    sizes = isinstance(ranks, tuple | list) and all(isinstance(r, int) and r >= 0 for r in ranks)
    if not sizes or len(ranks) not in (0, len(arrays)):
        raise ValueError(f"{who}: ranks must be one int >= 0 for each of {len(arrays)} arrays, got {ranks!r}.")
    fields = {f"array{i}": _checks.array(who, f"array{i}", x) for i, x in enumerate(arrays)}
    axes = tuple((name, ("...",) * r) for name, r in zip(fields, ranks or (0,) * len(arrays), strict=True))
    for name, own in axes:
        _checks.rank(who, name, fields[name], ("*B", *own), at_least=True)
    return fields, axes
