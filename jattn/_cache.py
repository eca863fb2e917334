"""A cache of keys and values, for decoding: what was written stays, and a call reads it together with its own tokens.

Each sequence has its own length, the number of its tokens so far, so token i of it is at position i. A cache that
rolls is a ring: its newest token takes the slot of its oldest.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jattn import _attention, _checks, _plan, _rules, masks
from jattn._debug_check import debug_check

_CAUSAL = masks.causal()


class Cache(NamedTuple):
    """Keys and values of the tokens so far: a pytree to carry through a loop. Made by `Cache.create`.

    To drop the last n tokens of each sequence, as a rejected draft, lower its length:
    `cache._replace(lengths=cache.lengths - n)`. A rolling cache has then lost the n tokens that they took the slots of.

    Attributes:
        key: (*B, capacity, K, H).
        value: (*B, capacity, K, D).
        lengths: (*B,) int32: how many tokens each sequence has had. capacity + 1 where there were too many: that
            sequence gives NaN from then on.
        positions: None, or (*B, capacity) int32 of a rolling cache: of the token in each slot, -1 where there is none.

    Example:
        >>> cache = Cache.create(8, 1, 2, rolling=True)
        >>> cache.capacity, cache.rolling, cache.next_positions(3).tolist()
        (8, True, [0, 1, 2])
    """

    key: Any
    value: Any
    lengths: Any
    positions: Any = None

    @staticmethod
    def create(capacity, K, H, D=None, *, batch=(), dtype=jnp.float32, rolling=False):
        """An empty cache.

        Args:
            capacity: how many tokens of a sequence it holds.
            K: key/value heads.
            H: features of a key.
            D: features of a value, H if None.
            batch: the sizes of the batch axes, a tuple.
            dtype: that of the queries, keys and values to come, floating.
            rolling: whether a new token takes the slot of the oldest one where none is free. It is for masks that look
                back `capacity` positions at most, such as `masks.window(capacity, 0)`.

        Returns:
            A `Cache`.

        Raises:
            ValueError: a size is no int, or too small.
            TypeError: `dtype` is not floating (16 bits or more), `batch` is no tuple, or `rolling` no bool.

        Example:
            >>> Cache.create(8, 2, 4, batch=(3,)).key.shape
            (3, 8, 2, 4)
        """
        who = "Cache.create"
        D = H if D is None else D
        for what, size, least in (("capacity", capacity, 1), ("K", K, 1), ("H", H, 1), ("D", D, 0)):
            _checks.size(who, what, size, least)
        if not isinstance(batch, tuple | list):
            raise TypeError(f"{who}: batch must be a tuple of ints, got {batch!r}.")
        for i, size in enumerate(batch):
            _checks.size(who, f"batch[{i}]", size, 0)
        _checks.floating(who, "dtype", np.zeros((), dtype))
        if not isinstance(rolling, bool):
            raise TypeError(f"{who}: rolling must be True or False, got {rolling!r}.")
        empty = jnp.zeros((*batch, capacity, K, H), dtype), jnp.zeros((*batch, capacity, K, D), dtype)
        positions = jnp.full((*batch, capacity), -1, np.int32) if rolling else None
        return Cache(*empty, jnp.zeros(batch, np.int32), positions)

    @property
    def capacity(self):
        """How many tokens of a sequence it holds."""
        return self.key.shape[-3]

    @property
    def rolling(self):
        """Whether it is a ring."""
        return self.positions is not None

    def next_positions(self, T):
        """(*B, T): the positions that the next T tokens will have, for `rotary`."""
        return self.lengths[..., None] + jnp.arange(T, dtype=np.int32).reshape(*(1 for _ in self.lengths.shape), T)


# So that a program that takes a cache can be exported.
export.register_namedtuple_serialization(Cache, serialized_name="jattn.Cache")


def cached_attention(
    query,
    key,
    value,
    cache,
    mask: Any = _CAUSAL,
    bias=None,
    *,
    new_lengths=None,
    scale=None,
    softcap=None,
    sink=None,
    dropout_rate=0.0,
    dropout_rng=None,
    empty="zero",
    method="auto",
    block_size=None,
    return_stats=False,
):
    """Appends keys and values to a cache, then attends to all that it holds.

    Token by token, in chunks or in one call, the outputs are those of `attention` on the whole sequence. Axes: B batch,
    any number of axes, T new tokens, N query heads, K key/value heads, H features of a query or key, D features of a
    value, S keys that can be seen: the cache's slots, S = capacity, and of a rolling cache the slots as they were
    before, then the new tokens, S = capacity + T.

    Args:
        query: (*B, T, N, H), floating.
        key: (*B, T, K, H), the dtype of `query`; N is a multiple of K. With rotary positions, turned by
            `rotary(key, cache.next_positions(T))`, as the queries are.
        value: (*B, T, K, D), the dtype of `query`.
        cache: a `Cache` of that dtype. B, K, H and D are its own.
        mask: a rule from `jattn.masks`, or bool (*B, N, T, S) with each axis full or 1. Positions are those in the
            sequence, also in a rolling cache; arrays and lengths go by where keys are stored. None: all that is
            written may be seen.
        bias: a rule from `jattn.biases`, or floating (*B, N, T, S) with each axis full or 1, in nats.
        new_lengths: integers (*B,): how many of the T tokens of each sequence are real, all if None. The others are
            padding at the end: they are not written, nothing sees them, and their rows are empty.
        scale: as in `attention`.
        softcap: as in `attention`.
        sink: as in `attention`.
        dropout_rate: as in `attention`.
        dropout_rng: as in `attention`. Bits go by the query's place among the T: give each call a key of its own.
        empty: as in `attention`. Padding does not count for "raise".
        method: as in `attention`. "blockwise" does not read tiles of slots that no sequence has written.
        block_size: as in `attention`.
        return_stats: whether to return `Stats` too.

    Returns:
        (out, cache): (*B, T, N, D) in the dtype of `query`, and the cache with the new tokens; with `return_stats`
        ((out, Stats), cache). A sequence that would get longer than the capacity gives NaN, in this call and in all
        later ones, and nothing of it is written.

    Raises:
        ValueError: as in `attention`; a sequence is known to get longer than the capacity (where that is not known
            before the program runs, a `checkify.debug_check` fails); or the cache rolls, and the mask is known to look
            back further than its capacity.
        TypeError: as in `attention`, or `cache` is no `Cache` or has another dtype.

    Numerics: as in `attention`.

    Source: Shazeer 2019, section 3, arXiv:1911.02150; rolling, Jiang et al. 2023, section 2, arXiv:2310.06825.

    Example:
        >>> step = jax.jit(cached_attention, donate_argnames="cache")  # writes in place
        >>> cache = Cache.create(8, K=1, H=2)
        >>> for token in jnp.eye(2)[:, None, None]:
        ...     turned = rotary(token, cache.next_positions(1))
        ...     out, cache = step(turned, turned, token, cache)
        >>> out.shape, cache.lengths.item()
        ((1, 1, 2), 2)
    """
    return cached_as("cached_attention", query, key, value, cache, mask, bias, new_lengths=new_lengths, scale=scale,
                     softcap=softcap, sink=sink, dropout_rate=dropout_rate, dropout_rng=dropout_rng, empty=empty,
                     method=method, block_size=block_size, return_stats=return_stats)  # fmt: skip


def cached_as(who, query, key, value, cache, mask, bias, *, new_lengths=None, **options):
    """`cached_attention`, called `who` in errors."""
    query, key, value, cache, new = _checked(who, query, key, value, cache, mask, new_lengths)
    if cache.rolling:
        keys, values, key_positions, there, cache = _slots_then_new(cache, key, value, new)
    # After the slots are read, so that the new tokens can be written in place.
    appended, spoilt = _append(who, cache, key, value, new)
    if not cache.rolling:
        keys, values, key_positions, there = appended.key, appended.value, None, masks.lengths(key=appended.lengths)
    if new_lengths is not None:
        there = there & masks.lengths(query=new)
    positions = {"query_positions": cache.next_positions(query.shape[-3]), "key_positions": key_positions}
    out = _attention.attend_as(who, True, query, keys, values, mask, bias, there=there, **positions, **options)
    return _shown(out, spoilt), appended


_AXES = {
    "query": ("*B", "T", "N", "H"),
    "key": ("*B", "T", "K", "H"),
    "value": ("*B", "T", "K", "D"),
    "cache.key": ("*B", "capacity", "K", "H"),
    "cache.value": ("*B", "capacity", "K", "D"),
    "cache.lengths": ("*B",),
    "cache.positions": ("*B", "capacity"),
    "new_lengths": ("*B",),
}


def _checked(who, query, key, value, cache, mask, new_lengths):
    """The arguments as arrays, and new_lengths T where it is None."""
    if not isinstance(cache, Cache):
        raise TypeError(f"{who}: cache must be a Cache, got {type(cache).__name__}. Make one with Cache.create.")
    arrays = {"query": query, "key": key, "value": value, "cache.key": cache.key, "cache.value": cache.value}
    arrays = _checks.one_floating_dtype(who, **arrays)
    integers = {"cache.lengths": cache.lengths, "cache.positions": cache.positions, "new_lengths": new_lengths}
    arrays |= {what: _checks.integral(who, what, x) for what, x in integers.items() if x is not None}
    for what in ("cache.key", "query"):
        _checks.rank(who, what, arrays[what], _AXES[what], at_least=True)
    *B, capacity, K, H = cache.key.shape
    T, N = arrays["query"].shape[-3:-1]
    sizes = {"B": tuple(B), "capacity": capacity, "T": T, "N": N, "K": K, "H": H, "D": cache.value.shape[-1]}
    for what, x in arrays.items():
        hint = "B, K, H and D are those of the cache." if what in ("query", "key", "value") else ""
        _checks.shape(who, what, x, _AXES[what], sizes, hint=hint)

    cache = cache._replace(lengths=arrays["cache.lengths"], positions=arrays.get("cache.positions"))
    if cache.rolling and isinstance(mask, masks.Mask) and _looks_past(mask, capacity, T):
        raise ValueError(
            f"{who}: mask must look back at most capacity = {capacity} positions, for a rolling cache, got {mask!r}. "
            f"Pass mask & masks.window({capacity}, None), or a cache that does not roll."
        )
    new_lengths = arrays.get("new_lengths")
    # What is not known is at least 0.
    before, added = (_known_or_0(x) for x in (cache.lengths, T if new_lengths is None else new_lengths))
    after = before + added
    bound = "" if _checks.known(cache.lengths, new_lengths) else "at least "
    _all(who, before >= 0, "cache.lengths must be at least 0", before.tolist())
    _all(who, (added >= 0) & (added <= T), f"new_lengths must be within 0 ... T = {T}", added.tolist())
    got = f"{bound}{after.tolist()}. Make a larger cache, or one that rolls"
    _all(who, after <= _longest(cache), _fits(cache), got)
    new = jnp.full(B, T, np.int32) if new_lengths is None else jnp.asarray(new_lengths)
    return arrays["query"], arrays["key"], arrays["value"], cache, new


def _known_or_0(x):
    return np.asarray(x if _checks.known(x) else 0, np.int64)


def _all(who, valid, must, got):
    if not valid.all():
        raise ValueError(f"{who}: {must}, got {got}.")


def _fits(cache):
    return f"the lengths after the call must be at most {'' if cache.rolling else 'capacity = '}{_longest(cache)}"


@jax.jit
def _slots_then_new(cache, key, value, new):
    """Of a ring and the tokens to come: keys, values, positions, a mask of those that are there; and the ring."""
    old, own, length = cache.positions, cache.next_positions(key.shape[-3]), cache.lengths[..., None]
    # What was dropped from the end has a position too, until something takes its slot.
    there = jnp.concatenate([(old >= 0) & (old < length), own < length + new[..., None]], -1)
    keys, values = (jnp.concatenate(x, -3) for x in ((cache.key, key), (cache.value, value)))
    # XLA:CPU would join them in every product, which takes five times as long, and copy the ring to write on it.
    keys, values, *slots = jax.lax.optimization_barrier((keys, values, cache.key, cache.value))
    cache = cache._replace(key=slots[0], value=slots[1])
    return keys, values, jnp.concatenate([old, own], -1), masks.array(there[..., None, :]), cache


@functools.partial(jax.jit, static_argnums=0)
def _append(who, cache, key, value, new):
    """The cache with the first `new` tokens of each sequence, and bool (*B,): where that could not be done."""
    B, T = cache.lengths.shape, key.shape[-3]
    spoilt = (new < 0) | (new > T) | (cache.lengths < 0) | (new > _longest(cache) - cache.lengths)
    spoilt = ~debug_check(~spoilt, f"{who}: new_lengths must be within 0 ... T = {T}, and {_fits(cache)}.")
    new = jnp.where(spoilt, 0, new)
    written = _written
    for _ in B:
        # Mapped, so that GSPMD sees that each device has its own part of a batch.
        written = jax.vmap(written)
    old, tokens = (cache.key, cache.value, cache.positions), (key, value, cache.next_positions(T))
    key, value, positions = (
        None if x is None else written(x, t, cache.lengths, new) for x, t in zip(old, tokens, strict=True)
    )
    return Cache(key, value, jnp.where(spoilt, _longest(cache) + 1, cache.lengths + new), positions), spoilt


def _longest(cache):
    """The largest length; one more says that there were too many tokens. Positions are int32."""
    return 2**31 - 2 if cache.rolling else cache.capacity


def _written(x, tokens, length, new):
    """x (capacity, ...), a ring, with the first `new` of tokens (T, ...) put in from `length` on."""
    capacity, T = x.shape[0], tokens.shape[0]
    which = jnp.arange(min(T, capacity), dtype=np.int32)
    if T > capacity:
        # Only the last ones stay.
        which = jnp.maximum(new - capacity, 0) + which
        tokens = tokens[which]
    slots = (length + which) % capacity
    # What is not written is put back: all slots are different and exist, as derivatives and `checkify` want it.
    kept = (which < new).reshape(-1, *(1 for _ in x.shape[1:]))
    tokens = jnp.where(kept, tokens, x.at[slots].get(mode="promise_in_bounds"))
    return x.at[slots].set(tokens, mode="promise_in_bounds", unique_indices=True)


@jax.jit
def _shown(tree, spoilt):
    """`tree`, of arrays (*B, ...), NaN where `spoilt`, (*B,), in value and derivative."""
    factor = jnp.where(spoilt, np.nan, 1)

    def shown(x):
        return x * factor.reshape(*spoilt.shape, *(1 for _ in x.shape[spoilt.ndim :])).astype(x.dtype)

    return jax.tree.map(shown, tree)


def _looks_past(mask, capacity, T):
    """Whether the mask is known to show some query a key more than `capacity` positions before it.

    Its bounds say so of single pairs, as far as it is made of numbers. It changes at these numbers only, so that some
    distances and key positions beside each of them stand for all.
    """
    near = {n + d for n in _numbers(mask) for d in (-1, 1) if abs(n) < _FAR}
    distances = {capacity + 1, _FAR} | {abs(n) for n in near if abs(n) > capacity}
    keys = {0, _FAR} | {n for n in near if n > 0}
    key, query = np.array([(k, k + d) for k, d in itertools.product(keys, distances)], np.int32).T[..., None]
    one = _plan.axis(1, 1)
    # Of keys that are stored no more there is no place to tell.
    places = _plan.Extremes(np.int32(0), np.int32(0)), _plan.Extremes(np.int32(0), np.int32(capacity + T - 1))
    pairs = _plan.Tiles(one, one, *places, _plan.Extremes(query, query), _plan.Extremes(key, key))
    return bool(np.any(_only_numbers(mask).bounds(pairs, static=True)[1]))


# A position beyond all that a mask has numbers for; twice as far is an int32.
_FAR = 2**29


def _is_number(x):
    return _rules.is_int(x) or (
        _rules.is_array(x) and x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer) and _checks.known(x)
    )


def _numbers(mask):
    for x in mask.fields.values():
        if isinstance(x, masks.Mask):
            yield from _numbers(x)
        elif _is_number(x):
            yield int(x)


def _only_numbers(mask):
    """The mask with NumPy's numbers for arrays that are known to be one, and for others with what has no bounds."""
    leaves, structure = jax.tree.flatten(mask)
    of = [
        np.asarray(x) if _is_number(x) else jnp.zeros((1,) * len(core), np.int32)
        for x, (_, core) in zip(leaves, mask.leaf_axes(), strict=True)
    ]
    return jax.tree.unflatten(structure, of)
