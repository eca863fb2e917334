"""Mask rules: which key positions a query position may attend to. True = may attend.

Rules are small pytrees. Python numbers in them are static, part of the program; arrays are leaves, which may be
traced, batched and mapped. They combine with `&`, `|` and `~`, with each other and with boolean arrays.

In `attention` the axes of a leaf may be led by nothing, by (*B) or by (*B, N), each of these full or 1.
`causal`, `window`, `prefix` and `rule` see positions. `lengths`, `segments` and `array` see where a token is stored.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _checks, _rules
from jattn._rules import Kind, Rule

__all__ = ["Mask", "array", "causal", "lengths", "prefix", "rule", "segments", "window"]


class Mask(Rule):
    """A rule that says which keys a query may attend to. Made by the functions of this module."""

    def __and__(self, other):
        return Mask(_AND, {"left": self, "right": _operand("&", other)})

    def __or__(self, other):
        return Mask(_OR, {"left": self, "right": _operand("|", other)})

    def __rand__(self, other):
        return _operand("&", other) & self

    def __ror__(self, other):
        return _operand("|", other) | self

    def __invert__(self):
        return Mask(_NOT, {"mask": self})

    def bounds(self, tiles, static=False):
        parts = [x.bounds(tiles, static) for x in self.fields.values() if isinstance(x, Mask)]
        if self.kind == _NOT:
            some, every = parts[0]
            return ~every, ~some
        if not parts:
            return super().bounds(tiles, static)
        (some, every), (some_, every_) = parts
        return (some & some_, every & every_) if self.kind == _AND else (some | some_, every | every_)

    def draw(self, T=None, S=None):
        """The mask as text, one line a query, ■ = may attend. Sizes default to a few positions, 32 at most."""
        unknown = f"{self!r}      # no values to draw"
        # Transforms fill rules with placeholders, and print them in their errors.
        leaves = jax.tree.leaves(self, is_leaf=lambda x: x is None)
        if not all(map(_rules.is_array, leaves)) or not _checks.known(leaves):
            return unknown
        axes = [axes for _, axes in self.leaf_axes()]
        if any(x.ndim != len(own) for x, own in zip(leaves, axes, strict=True)):
            return f"{self!r}      # led by batch or head axes: no single drawing"
        T, S = (self._interesting(axis) if n is None else n for axis, n in (("T", T), ("S", S)))
        with jax.ensure_compile_time_eval():
            tile = self(jnp.arange(T), jnp.arange(S))
        if not _checks.known(tile):
            return unknown
        lines = (" ".join("■" if visible else "·" for visible in row) for row in np.asarray(tile))
        return "\n".join([f"{self!r}      # ■ = may attend, on the first positions", *lines])

    __str__ = draw

    def _interesting(self, axis):
        """How many positions show what the rule does: its arrays' own, else two past its largest number, 4 to 16."""
        pairs = zip(jax.tree.leaves(self), self.leaf_axes(), strict=True)
        sizes = [(a, n) for x, (_, axes) in pairs for a, n in zip(axes, x.shape, strict=True)]
        stored = [n for a, n in sizes if a == axis or (a == f"{axis}?" and n != 1)]
        return min([32, *stored]) if stored else min(16, 2 + max([2, *self._numbers()]))

    def _numbers(self):
        for x in self.fields.values():
            if isinstance(x, Mask):
                yield from x._numbers()
            elif isinstance(x, int) or (_rules.is_array(x) and x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)):
                yield abs(int(x))

    def __repr__(self):
        if self.kind in (_AND, _OR):
            return f"({self.fields['left']!r} {self.kind.name} {self.fields['right']!r})"
        return f"~{self.fields['mask']!r}" if self.kind == _NOT else super().__repr__()


def _operand(sign, x):
    if isinstance(x, Mask):
        return x
    if _rules.is_array(x):
        return array(x)
    raise TypeError(f"mask {sign} x: x must be a rule from jattn.masks or a boolean array, got {type(x).__name__}.")


# By name, so that a rule can be pickled.
def _and(pairs, left, right):
    return left.tile(pairs) & right.tile(pairs)


def _or(pairs, left, right):
    return left.tile(pairs) | right.tile(pairs)


def _not(pairs, mask):
    return ~mask.tile(pairs)


_AND, _OR, _NOT = Kind("&", _and), Kind("|", _or), Kind("~", _not)


def causal(offset: Any = 0):
    """Keys at or before the query's position.

    With fewer queries than keys this is top-left aligned; `causal(offset=S - T)` is bottom-right.

    Args:
        offset: added to the query's position. An int, or integers () as an array.

    Example:
        >>> print(masks.causal())
        causal(offset=0)      # ■ = may attend, on the first positions
        ■ · · ·
        ■ ■ · ·
        ■ ■ ■ ·
        ■ ■ ■ ■
    """
    return Mask(_CAUSAL, {"offset": _rules.integer("masks.causal", "offset", offset)})


# Positions first: their difference is small, and a size may be as large as an int32.
def _causal(pairs, offset):
    return pairs.key_positions - pairs.query_positions <= offset


def _causal_bounds(tiles, offset):
    q, k = tiles.query_positions, tiles.key_positions
    return k.least - q.greatest <= offset, k.greatest - q.least <= offset


_CAUSAL = Kind("causal", _causal, (("offset", ()),), _causal_bounds)


def window(left, right):
    """Keys at most `left` positions before and `right` positions after the query: left + 1 + right keys.

    Args:
        left: positions; 0 is a size, None is no bound. An int, or integers () as an array.
        right: likewise.

    Raises:
        ValueError: a negative size.

    Example:
        >>> print(masks.window(1, 0))
        window(left=1, right=0)      # ■ = may attend, on the first positions
        ■ · · ·
        ■ ■ · ·
        · ■ ■ ·
        · · ■ ■
    """
    left = _rules.integer("masks.window", "left", left, at_least=0, optional=True)
    right = _rules.integer("masks.window", "right", right, at_least=0, optional=True)
    return Mask(_WINDOW, {"left": left, "right": right})


def _window(pairs, left, right):
    visible = np.ones((1, 1), np.bool_)
    if left is not None:
        visible = visible & (pairs.query_positions - pairs.key_positions <= left)
    if right is not None:
        visible = visible & (pairs.key_positions - pairs.query_positions <= right)
    return visible


def _window_bounds(tiles, left, right):
    q, k = tiles.query_positions, tiles.key_positions
    some, every = np.True_, np.True_
    if left is not None:
        some, every = some & (q.least - k.greatest <= left), every & (q.greatest - k.least <= left)
    if right is not None:
        some, every = some & (k.least - q.greatest <= right), every & (k.greatest - q.least <= right)
    return some, every


_WINDOW = Kind("window", _window, (("left", ()), ("right", ())), _window_bounds)


def lengths(key=None, query=None):
    """The first `key` keys, for the first `query` queries: padding at the end of a sequence.

    Args:
        key: how many stored keys are real, None for all. An int, or integers () as an array, led by (*B) in
            `attention`.
        query: how many stored queries are real, likewise. The others are empty rows.

    Raises:
        ValueError: a negative length.

    Example:
        >>> print(masks.lengths(key=2, query=3).draw(4, 4))
        lengths(key=2, query=3)      # ■ = may attend, on the first positions
        ■ ■ · ·
        ■ ■ · ·
        ■ ■ · ·
        · · · ·
    """
    key = _rules.integer("masks.lengths", "key", key, at_least=0, optional=True)
    query = _rules.integer("masks.lengths", "query", query, at_least=0, optional=True)
    return Mask(_LENGTHS, {"key": key, "query": query})


def _lengths(pairs, key, query):
    visible = np.ones((1, 1), np.bool_)
    if key is not None:
        visible = visible & (pairs.key_indices < key)
    if query is not None:
        visible = visible & (pairs.query_indices < query)
    return visible


def _lengths_bounds(tiles, key, query):
    some, every = np.True_, np.True_
    for indices, length in ((tiles.key_indices, key), (tiles.query_indices, query)):
        if length is not None:
            some, every = some & (indices.least < length), every & (indices.greatest < length)
    return some, every


_LENGTHS = Kind("lengths", _lengths, (("key", ()), ("query", ())), _lengths_bounds)


def segments(query_ids, key_ids=None, padding=None):
    """Keys of the query's own segment: several documents packed in one sequence.

    Args:
        query_ids: integers (T,), led by (*B) in `attention`: the segment of each stored query.
        key_ids: integers (S,), likewise; None where queries and keys are the same tokens.
        padding: an id whose tokens see nothing and are seen by nothing, None if there is none. An int, or integers ()
            as an array.

    Example:
        >>> print(masks.segments(jnp.array([1, 1, 2, 0]), padding=0))
        segments(query_ids=int32[4], key_ids=int32[4], padding=0)      # ■ = may attend, on the first positions
        ■ ■ · ·
        ■ ■ · ·
        · · ■ ·
        · · · ·
    """
    query_ids = _checks.integral("masks.segments", "query_ids", query_ids)
    key_ids = query_ids if key_ids is None else _checks.integral("masks.segments", "key_ids", key_ids)
    _checks.rank("masks.segments", "query_ids", query_ids, ("*B", "T"), at_least=True)
    _checks.rank("masks.segments", "key_ids", key_ids, ("*B", "S"), at_least=True)
    padding = _rules.integer("masks.segments", "padding", padding, optional=True)
    return Mask(_SEGMENTS, {"query_ids": query_ids, "key_ids": key_ids, "padding": padding})


def _segments(pairs, query_ids, key_ids, padding):
    query_ids, key_ids = pairs.rows(query_ids, 0)[:, None], pairs.columns(key_ids, 0)[None, :]
    visible = query_ids == key_ids
    return visible if padding is None else visible & (query_ids != padding)


def _segments_bounds(tiles, query_ids, key_ids, padding):
    q, k = tiles.of_queries(query_ids), tiles.of_keys(key_ids)
    some = (q.least <= k.greatest) & (k.least <= q.greatest)
    every = (q.least == q.greatest) & (k.least == k.greatest) & (q.least == k.least)
    if padding is not None:
        # A tile of padding alone sees nothing; one with some padding in it may.
        alone = (q.least == padding) & (q.greatest == padding)
        some, every = some & ~alone, every & ~alone
    return some, every


_SEGMENTS = Kind("segments", _segments, (("query_ids", ("T",)), ("key_ids", ("S",)), ("padding", ())), _segments_bounds)


def prefix(length):
    """Keys at positions below `length`, for every query. `causal() | prefix(n)` is a prefix language model.

    Args:
        length: positions. An int, or integers () as an array.

    Example:
        >>> print(masks.causal() | masks.prefix(2))
        (causal(offset=0) | prefix(length=2))      # ■ = may attend, on the first positions
        ■ ■ · ·
        ■ ■ · ·
        ■ ■ ■ ·
        ■ ■ ■ ■
    """
    return Mask(_PREFIX, {"length": _rules.integer("masks.prefix", "length", length, at_least=0)})


def _prefix(pairs, length):
    return pairs.key_positions < length


def _prefix_bounds(tiles, length):
    k = tiles.key_positions
    return k.least < length, k.greatest < length


_PREFIX = Kind("prefix", _prefix, (("length", ()),), _prefix_bounds)


def array(mask):
    """A mask given as an array, to be combined with rules.

    Args:
        mask: bool (T, S), each axis full or 1, led by (*B) or (*B, N) in `attention`. Of a padding mask (B, S) pass
            `masks.array(mask[:, None])`, or `masks.lengths(key=...)`.

    Raises:
        TypeError: `mask` is not boolean.

    Example:
        >>> print(masks.array(jnp.array([[True, False, True]])) & masks.causal())
        (array(mask=bool[1,3]) & causal(offset=0))      # ■ = may attend, on the first positions
        ■ · ·
        ■ · ·
        ■ · ■
        ■ · ■
    """
    mask = _checks.boolean("masks.array", "mask", mask, NOT_BOOLEAN)
    _checks.rank("masks.array", "mask", mask, ("*B", "T", "S"), at_least=True)
    return Mask(_ARRAY, {"mask": mask})


NOT_BOOLEAN = "Scores that are added go in `bias`; for a 0/1 mask pass `mask != 0`."


def _array(pairs, mask):
    return pairs.columns(pairs.rows(mask, 0), 1)


def _array_bounds(tiles, mask):
    return tiles.reduced(mask, jnp.any), tiles.reduced(mask, jnp.all)


_ARRAY = Kind("array", _array, (("mask", ("T?", "S?")),), _array_bounds)


def rule(fn, *arrays, ranks=()):
    """A mask computed by a function of positions.

    Args:
        fn: `fn(query_positions, key_positions, *arrays)` on integers (t, 1) and (1, s), to return bool (t, s), each
            axis full or 1. Static, by identity: give the same function again and nothing is traced again.
        *arrays: what `fn` needs of arrays; they may be traced and mapped, which nothing that `fn` closes over can.
        ranks: the rank of each array, for one head; 0 for all if left out. Axes in front of them lead.

    Raises:
        TypeError: `fn` is no function, cannot be hashed, or returns no boolean array.
        ValueError: `fn` returns another shape, or `ranks` are not those of the arrays.

    Example:
        >>> print(masks.rule(lambda query, key: (query - key) % 2 == 0))
        rule(fn=<lambda>)      # ■ = may attend, on the first positions
        ■ · ■ ·
        · ■ · ■
        ■ · ■ ·
        · ■ · ■
    """
    fn = _rules.function("masks.rule", "fn", fn)
    fields, axes = _rules.arrays_with_axes("masks.rule", arrays, ranks)
    return Mask(Kind("rule", _rule, axes), {"fn": fn} | fields)


def _rule(pairs, fn, **arrays):
    out = fn(pairs.query_positions, pairs.key_positions, *arrays.values())
    return _rules.fits("masks.rule: fn", out, pairs, np.bool_, "a boolean array (True = may attend)")
