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

_WHO = "cached_attention"
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
            TypeError: `dtype` is not floating (16 bits or more).

        Example:
            >>> Cache.create(8, 2, 4, batch=(3,)).key.shape
            (3, 8, 2, 4)
        """
        who = "Cache.create"
        D = H if D is None else D
        batch = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        sizes = {"capacity": (capacity, 1), "K": (K, 1), "H": (H, 1), "D": (D, 0)}
        for what, (size, least) in (sizes | {f"batch[{i}]": (n, 0) for i, n in enumerate(batch)}).items():
            _checks.size(who, what, size, least)
        _checks.floating(who, "dtype", np.zeros((), dtype))
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
    cache, T, new = _checked(query, key, value, cache, mask, new_lengths)
    appended, spoilt = _append(cache, key, value, T if new is None else new)
    keys, values, key_positions, there = _seen(cache, appended, key, value, new)
    out = _attention.attend_as(
        _WHO, True, query, keys, values, mask, bias, there=there, scale=scale, softcap=softcap, sink=sink,
        dropout_rate=dropout_rate, dropout_rng=dropout_rng, query_positions=cache.next_positions(T),
        key_positions=key_positions, empty=empty, method=method, block_size=block_size, return_stats=return_stats,
    )  # fmt: skip
    return _shown(out, spoilt), appended


def _checked(query, key, value, cache, mask, new_lengths):
    """The cache, T, and new_lengths as an array or None."""
    if not isinstance(cache, Cache):
        raise TypeError(f"{_WHO}: cache must be a Cache, got {type(cache).__name__}. Make one with Cache.create.")
    arrays = {"query": query, "key": key, "value": value, "cache.key": cache.key, "cache.value": cache.value}
    arrays = _checks.one_floating_dtype(_WHO, **arrays)
    own = {"cache.key": ("*B", "capacity", "K", "H"), "cache.value": ("*B", "capacity", "K", "D")}
    _checks.rank(_WHO, "cache.key", cache.key, own["cache.key"], at_least=True)
    _checks.rank(_WHO, "query", arrays["query"], ("*B", "T", "N", "H"), at_least=True)
    *B, capacity, K, H = cache.key.shape
    T, N = arrays["query"].shape[-3:-1]
    sizes = {"B": tuple(B), "capacity": capacity, "T": T, "N": N, "K": K, "H": H, "D": cache.value.shape[-1]}
    axes = own | {"query": ("*B", "T", "N", "H"), "key": ("*B", "T", "K", "H"), "value": ("*B", "T", "K", "D")}
    hint = "B, K, H and D are those of the cache."
    for what, x in arrays.items():
        _checks.shape(_WHO, what, x, axes[what], sizes, hint="" if what in own else hint)
    for what, axes in (("lengths", ("*B",)), ("positions", ("*B", "capacity"))):
        if (x := getattr(cache, what)) is not None:
            cache = cache._replace(**{what: _checks.integral(_WHO, f"cache.{what}", x)})
            _checks.shape(_WHO, f"cache.{what}", x, axes, sizes)
    if cache.rolling and isinstance(mask, masks.Mask) and _looks_past(mask, capacity, T):
        raise ValueError(
            f"{_WHO}: mask must look back at most capacity = {capacity} positions, for a rolling cache, got {mask!r}. "
            f"Pass mask & masks.window({capacity}, None), or a cache that does not roll."
        )
    if new_lengths is not None:
        new_lengths = _checks.integral(_WHO, "new_lengths", new_lengths)
        _checks.shape(_WHO, "new_lengths", new_lengths, ("*B",), sizes)
    # What is not known is at least 0.
    before, new = (_known_or_0(x) for x in (cache.lengths, T if new_lengths is None else new_lengths))
    after = before + new
    _all(before >= 0, "cache.lengths must be at least 0", before.tolist())
    _all((new >= 0) & (new <= T), f"new_lengths must be within 0 ... T = {T}", new.tolist())
    bound = "" if _checks.known(cache.lengths, new_lengths) else "at least "
    _all(after <= _longest(cache), _fits(cache), f"{bound}{after.tolist()}. Make a larger cache, or one that rolls")
    return cache, T, new_lengths


def _known_or_0(x):
    return np.asarray(x if _checks.known(x) else 0, np.int64)


def _all(valid, must, got):
    if not valid.all():
        raise ValueError(f"{_WHO}: {must}, got {got}.")


def _fits(cache):
    return f"the lengths after the call must be at most {'' if cache.rolling else 'capacity = '}{_longest(cache)}"


@jax.jit
def _append(cache, key, value, new):
    """The cache with the first `new` tokens of each sequence, and bool (*B,): where that could not be done."""
    B, T = cache.lengths.shape, key.shape[-3]
    new = jnp.broadcast_to(jnp.asarray(new, np.int32), B)
    spoilt = (new < 0) | (new > T) | (cache.lengths < 0) | (new > _longest(cache) - cache.lengths)
    spoilt = ~debug_check(~spoilt, f"{_WHO}: new_lengths must be within 0 ... T = {T}, and {_fits(cache)}.")
    new = jnp.where(spoilt, 0, new)
    write = functools.partial(_written, lengths=cache.lengths, new=new)
    positions = write(cache.positions, cache.next_positions(T)) if cache.rolling else None
    lengths = jnp.where(spoilt, _longest(cache) + 1, cache.lengths + new)
    return Cache(write(cache.key, key), write(cache.value, value), lengths, positions), spoilt


def _longest(cache):
    """The largest length; one more says that there were too many tokens. Positions are int32."""
    return 2**31 - 2 if cache.rolling else cache.capacity


def _written(x, tokens, lengths, new):
    """x (*B, capacity, ...), rings, with the last of the first `new` of tokens (*B, T, ...) put in."""
    *B, capacity = x.shape[: lengths.ndim + 1]
    T = tokens.shape[lengths.ndim]
    W = min(T, capacity)
    each = tuple(np.ogrid[tuple(slice(n) for n in (*B, 1))])[:-1]
    which = jnp.arange(W, dtype=np.int32).reshape(*(1 for _ in B), W)
    if T > capacity:
        which = jnp.maximum(new - W, 0)[..., None] + which
        tokens = tokens[(*each, which)]
    slots = (*each, (lengths[..., None] + which) % capacity)
    # What is not written is put back: all slots are different and exist, as derivatives and `checkify` want it.
    kept = (which < new[..., None]).reshape(*B, W, *(1 for _ in x.shape[len(B) + 1 :]))
    tokens = jnp.where(kept, tokens, x.at[slots].get(mode="promise_in_bounds"))
    return x.at[slots].set(tokens, mode="promise_in_bounds", unique_indices=True)


def _seen(cache, appended, key, value, new):
    """The keys and values that the new tokens may see, their positions, and a mask of those that are there."""
    if not cache.rolling:
        return appended.key, appended.value, None, masks.lengths(key=appended.lengths, query=new)
    # What the new tokens roll over may be seen by the first of them.
    new_or_all = jnp.full_like(cache.lengths, key.shape[-3]) if new is None else new
    keys, values, there, positions = _before_and_new(cache, key, value, new_or_all)
    return keys, values, positions, masks.array(there[..., None, :]) & masks.lengths(query=new)


@jax.jit
def _before_and_new(cache, key, value, new):
    """Keys and values, which of them are there, (*B, S), and their positions: the slots, then the new tokens."""
    old, own, length = cache.positions, cache.next_positions(key.shape[-3]), cache.lengths[..., None]
    # What was dropped from the end has a position too, until something takes its slot.
    there = jnp.concatenate([(old >= 0) & (old < length), own < length + new[..., None]], -1)
    keys, values = (jnp.concatenate(x, -3) for x in ((cache.key, key), (cache.value, value)))
    # XLA:CPU would join them again and again, inside products, which takes five times as long.
    keys, values = jax.lax.optimization_barrier((keys, values))
    return keys, values, there, jnp.concatenate([old, own], -1)


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
    beside = {n + d for n in _numbers(mask) for d in (-1, 0, 1)}
    distances = {capacity + 1, 2**30} | {n for n in map(abs, beside) if n > capacity}
    keys = {0, 2**30} | {n for n in beside if n > 0}
    key, query = np.array([(k, k + d) for k, d in itertools.product(keys, distances)], np.int64).T[..., None]
    one = _plan.axis(1, 1)
    places = _plan.Extremes(np.int64(0), np.int64(0)), _plan.Extremes(np.int64(0), np.int64(capacity + T - 1))
    pairs = _plan.Tiles(one, one, *places, _plan.Extremes(query, query), _plan.Extremes(key, key))
    return bool(np.any(_numbers_only(mask).bounds(pairs, static=True)[1]))


def _numbers(mask):
    for x in mask.fields.values():
        if isinstance(x, masks.Mask):
            yield from _numbers(x)
        elif _rules.is_int(x) or (_rules.is_array(x) and x.ndim == 0 and _checks.known(x)):
            yield int(x)


def _numbers_only(mask):
    """The mask with NumPy's numbers where an array is known to be one; elsewhere with JAX's, which have no bounds."""
    leaves, structure = jax.tree.flatten(mask)
    of = [
        np.asarray(x) if x.ndim == 0 and _checks.known(x) else jnp.zeros((1,) * len(core), x.dtype)
        for x, (_, core) in zip(leaves, mask.leaf_axes(), strict=True)
    ]
    return jax.tree.unflatten(structure, of)
