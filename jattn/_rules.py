"""What mask rules and bias rules share: named numbers and arrays, and the pairs (query, key) they are asked about."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _checks


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """A tile of queries x keys: where they are stored, (t, 1) and (1, s), and their positions, likewise.

    `rows(x, axis)` and `columns(x, axis)` pick this tile's part of an array that is stored along queries or keys.
    """

    query_indices: Any
    key_indices: Any
    query_positions: Any
    key_positions: Any
    rows: Callable
    columns: Callable

    @property
    def shape(self):
        return (self.query_indices.shape[0], self.key_indices.shape[1])


def all_pairs(T, S, query_positions=None, key_positions=None):
    """Every query with every key."""
    return _pairs(jnp.arange(T), jnp.arange(S), query_positions, key_positions, lambda x, axis: x, lambda x, axis: x)


def some_rows(rows, S, query_positions=None, key_positions=None):
    """The queries stored at `rows`, (R,), with every key."""
    if query_positions is not None:
        query_positions = _picked(rows)(query_positions, 0)
    return _pairs(rows, jnp.arange(S), query_positions, key_positions, _picked(rows), lambda x, axis: x)


def at_positions(query_positions, key_positions):
    """Queries and keys that are stored at their positions."""
    return _pairs(query_positions, key_positions, None, None, _picked(query_positions), _picked(key_positions))


def _picked(indices):
    # An axis of size 1 holds for every query or key, and so it does for these.
    def pick(x, axis):
        return x if x.shape[axis] == 1 else jnp.take(x, indices, axis=axis, mode="clip")

    return pick


def _pairs(queries, keys, query_positions, key_positions, rows, columns):
    queries, keys = (x.astype(np.int32) for x in (queries, keys))
    query_positions = queries if query_positions is None else query_positions
    key_positions = keys if key_positions is None else key_positions
    return Pairs(queries[:, None], keys[None, :], query_positions[:, None], key_positions[None, :], rows, columns)


class Kind(NamedTuple):
    """What all rules made by one constructor have in common.

    `tile(pairs, **fields)` is the rule. `axes` are pairs (field, its axes where it is an array), as `_checks.shape`
    takes them: T and S are the call's own, any other letter is the array's. In `attention` others may lead them.
    """

    name: str
    tile: Callable
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Rule:
    """A function of positions with named numbers, which are static, and arrays, which are pytree leaves."""

    # `array & rule` would otherwise make an array of rules.
    __array_ufunc__ = None

    def __init__(self, kind, fields):
        self.kind = kind
        self.fields = fields
        self.leaf_names = tuple(name for name, x in fields.items() if isinstance(x, Rule | jax.Array | np.ndarray))

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_with_keys(cls, cls._flatten_with_keys, cls._unflatten, cls._flatten)

    def _flatten(self):
        static = tuple((name, x) for name, x in self.fields.items() if name not in self.leaf_names)
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

    def __call__(self, query_positions, key_positions):
        """The rule's tile, (t, s), for queries and keys that are stored at their positions.

        Args:
            query_positions: (t,), integers.
            key_positions: (s,), integers.
        """
        positions = {"query_positions": query_positions, "key_positions": key_positions}
        positions = {what: _checks.integral(self.kind.name, what, x) for what, x in positions.items()}
        for what, x in positions.items():
            _checks.rank(self.kind.name, what, x, ("n",))
        pairs = at_positions(**positions)
        return jnp.broadcast_to(self.tile(pairs), pairs.shape)

    def dense(self, T, S):
        """The whole rule, (T, S), for T queries and S keys at positions 0, 1, 2, ..."""
        for leaf, (what, axes) in zip(jax.tree.leaves(self), self.leaf_axes(), strict=True):
            _checks.shape("dense", what, leaf, axes, {"T": T, "S": S})
        return jnp.broadcast_to(self.tile(all_pairs(T, S)), (T, S))

    def leaf_axes(self):
        """(argument name, core axes) of each leaf, in the order of `jax.tree.leaves`."""
        out = []
        for name in self.leaf_names:
            x = self.fields[name]
            own = [(f"{self.kind.name}({name}=...)", dict(self.kind.axes).get(name, ()))]
            out += x.leaf_axes() if isinstance(x, Rule) else own
        return out


def _shown(x):
    if isinstance(x, jax.Array | np.ndarray):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return getattr(x, "__name__", None) or repr(x)


def is_array(x):
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def integer(who, what, x, *, at_least=None, optional=False):
    """A Python int, which stays one and is static, or an array of integers, which becomes a leaf."""
    if x is None and optional:
        return None
    if isinstance(x, int) and not isinstance(x, bool):
        low = x
    elif is_array(x) and jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(np.int32) if isinstance(x, jax.Array) else np.asarray(x, np.int32)
        low = np.min(x, initial=0) if _checks.known(x) else 0
    else:
        raise TypeError(f"{who}: {what} must be an int or an array of integers, got {_described(x)}.")
    if at_least is not None and low < at_least:
        raise ValueError(f"{who}: {what} must be >= {at_least}, got {low}.{' Pass None for no bound.' * optional}")
    return x


def _described(x):
    return str(x.dtype) if is_array(x) else repr(x)


def fits(who, out, pairs, dtypes, must):
    """The tile `out` of a caller's function, if it has one of the dtypes and the shape of `pairs`."""
    if not is_array(out) or not jnp.issubdtype(out.dtype, dtypes):
        raise TypeError(f"{who}: fn must return {must}, got {_described(out)}.")
    fitting = out.ndim == 2 and all(n in (1, full) for n, full in zip(out.shape, pairs.shape, strict=True))
    if not fitting:
        must = f"(t, s) = {_checks.tupled(pairs.shape)}, each axis full or 1"
        raise ValueError(f"{who}: fn must return {must}, got {_checks.tupled(out.shape)}.")
    return out


def arrays_with_axes(who, arrays, ranks):
    """The fields and the axes of the arrays of `rule(fn, *arrays, ranks=...)`."""
    ranks = tuple(ranks) if ranks else (0,) * len(arrays)
    if len(ranks) != len(arrays) or not all(isinstance(r, int) and r >= 0 for r in ranks):
        raise ValueError(f"{who}: ranks must be one int >= 0 for each of {len(arrays)} arrays, got {ranks}.")
    arrays = [_checks.array(who, f"array {i}", x) for i, x in enumerate(arrays)]
    fields = {f"array{i}": np.asarray(x) if isinstance(x, np.generic) else x for i, x in enumerate(arrays)}
    for (name, x), r in zip(fields.items(), ranks, strict=True):
        if x.ndim < r:
            raise ValueError(f"{who}: {name} must have its rank {r} or more axes, got {_checks.tupled(x.shape)}.")
    return fields, tuple((name, ("...",) * r) for name, r in zip(fields, ranks, strict=True))

