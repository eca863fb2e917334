"""Attention over a sequence that several devices share: each holds a part of the queries, the keys and the values.

Inside `jax.shard_map`, `attention` sends keys and values around the ring of devices and folds what arrives into its own
queries' rows (`jattn._blockwise`). Beside its own part, a device holds the one in use and the next one, in any
derivative.

Where the mask is causal, the device with the last part of a sequence has the most to do, and the others wait for it.
`zigzag` gives each device an early and a late stripe instead, and all have the same to do.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _attention, _blockwise, _checks, _dense, _mesh, _rules, _tile

__all__ = ["attention", "unzigzag", "zigzag"]


def attention(
    query,
    key,
    value,
    mask=None,
    bias=None,
    *,
    axis_name,
    zigzag=False,
    scale=None,
    softcap=None,
    sink=None,
    dropout_rate=0.0,
    dropout_rng=None,
    query_positions=None,
    key_positions=None,
    empty="zero",
    block_size=None,
    return_stats=False,
):
    """`jattn.attention` inside `jax.shard_map`, of a sequence that is sharded over the axis `axis_name` of the mesh.

    Each device gives the part of the arrays that it holds, and gets the rows of its own queries, over all keys. Axes: B
    batch, any number of axes, P devices along `axis_name`, T queries and S keys on each of them, so P·T and P·S in all,
    N query heads, K key/value heads, H features of a query or key, D features of a value.

    Device p holds the tokens p·T ... p·T + T - 1 of the sequence, in this order. With `zigzag`, it holds those that
    `ring.zigzag` has put there. A token's place in the sequence is its position, where no positions are given, and what
    lengths, arrays and dropout go by.

    Args:
        query: (*B, T, N, H), floating.
        key: (*B, S, K, H), the dtype of `query`; N is a multiple of K.
        value: (*B, S, K, D), the dtype of `query`.
        mask: a rule from `jattn.masks`, or bool (*B, N, P·T, P·S) with each axis full or 1, P·T or P·S being 1. What a
            rule or an array holds is the same on all devices, other than segment ids, (*B, T) and (*B, S), which are
            sharded as the tokens are.
        bias: a rule from `jattn.biases`, or floating (*B, N, P·T, P·S), likewise.
        axis_name: the mesh axis that the sequence is sharded over, or a tuple of them.
        zigzag: whether tokens are in the order of `ring.zigzag`.
        scale: as in `jattn.attention`.
        softcap: as in `jattn.attention`.
        sink: as in `jattn.attention`.
        dropout_rate: as in `jattn.attention`. Bits are those that one device would make.
        dropout_rng: as in `jattn.attention`, the same key on all devices along `axis_name`.
        query_positions: integers (T,) or (*B, T), those of this device's queries.
        key_positions: integers (S,) or (*B, S), likewise.
        empty: as in `jattn.attention`; "raise" is an error under `checkify`.
        block_size: (queries, keys) of a tile, as in `jattn.attention`.
        return_stats: whether to return `Stats` too.

    Returns:
        (*B, T, N, D) in the dtype of `query`; with `return_stats` a pair of it and `Stats`, each (*B, T, N).

    Raises:
        ValueError: as in `jattn.attention`; there is no axis `axis_name` here, or an array of tokens is the same on all
            devices along it; T or S is odd with `zigzag`; an array mask or bias has both P·T queries and P·S keys.
        TypeError: as in `jattn.attention`; `zigzag` is not a bool.

    Numerics: as in `jattn.attention`. Keys and values travel in their own dtype, their gradients in float32 or wider.

    Source: Liu et al. 2023, arXiv:2310.01889.

    Example:
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> tokens = jax.P(None, "x")
        >>> sharded = jax.shard_map(
        ...     lambda query, key, value: ring.attention(query, key, value, masks.causal(), axis_name="x"),
        ...     mesh=mesh, in_specs=tokens, out_specs=tokens,
        ... )
        >>> x = jax.device_put(jnp.ones((2, 6, 4, 8)), jax.NamedSharding(mesh, tokens))
        >>> sharded(x, x, x).shape
        (2, 6, 4, 8)
    """
    who = "ring.attention"
    P = _size(who, axis_name)
    if not isinstance(zigzag, bool):
        raise TypeError(f"{who}: zigzag must be True or False, got {_shown(zigzag)}.")
    call = _Call(who, heads=True)
    call.arrays(query=query, key=key, value=value)
    T, S = call.sizes["T"], call.sizes["S"]
    call.sizes |= {"P·T": P * T, "P·S": P * S}
    call.sources(mask, bias)
    call.numbers(scale, softcap, sink)
    call.positions(query_positions=query_positions, key_positions=key_positions)
    call.sharded(axis_name)
    for what, letter in (("query_indices", "T"), ("key_indices", "S")):
        call.add(what, _indices(who, axis_name, letter, call.sizes[letter], zigzag), (letter,))
    call.dropout(dropout_rate, dropout_rng)
    blocks = call.method("blockwise", block_size)
    _checks.choice(who, "empty", empty, ("zero", "raise"))
    stats = return_stats or empty == "raise"
    found = call.run(_engine(axis_name, stats), "zero", blocks=blocks)
    if empty == "raise":
        # A row that sees a key has a largest logit, or a NaN.
        _checks.no_empty_rows(who, found[1].max_logit == -jnp.inf)
    return found if return_stats or not stats else found[0]


def zigzag(x, P, axis):
    """The tokens of a sequence, dealt so that P devices have the same to do under a causal mask.

    Of 2 P stripes of the sequence, device p gets stripe p and stripe 2 P - 1 - p.

    Args:
        x: an array.
        P: how many devices.
        axis: the axis of `x` that is the sequence.

    Returns:
        `x` in the order in which `jax.shard_map` shards it over P devices.

    Raises:
        ValueError: the length of the sequence is not a multiple of 2 P.

    Source: Zhu 2024, github.com/zhuzilin/ring-flash-attention.

    Example:
        >>> ring.zigzag(jnp.arange(8), 2, axis=0).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _striped("ring.zigzag", x, P, axis, _order)


def unzigzag(x, P, axis):
    """The tokens that `ring.zigzag` has dealt, in the order of the sequence.

    Args:
        x: an array.
        P: how many devices.
        axis: the axis of `x` that is the sequence.

    Returns:
        `x`, ordered.

    Raises:
        ValueError: as in `ring.zigzag`.

    Example:
        >>> ring.unzigzag(ring.zigzag(jnp.arange(8), 2, axis=0), 2, axis=0).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _striped("ring.unzigzag", x, P, axis, lambda P: np.argsort(_order(P)))


def _order(P):
    return np.stack([np.arange(P), 2 * P - 1 - np.arange(P)], 1).ravel()


def _striped(who, x, P, axis, order):
    _checks.size(who, "P", P, 1)
    x = jnp.asarray(_checks.array(who, "x", x))
    axis = _checks.axis(who, "x", x, axis)
    n = x.shape[axis]
    if n % (2 * P):
        hint = "Pad it at the end, and pass masks.lengths(key=...) with the real length."
        raise ValueError(f"{who}: axis {axis} of x must be a multiple of 2 P = {2 * P} long, got {n}. {hint}")

    def dealt(x):
        stripes = x.reshape(*x.shape[:axis], 2 * P, n // (2 * P), *x.shape[axis + 1 :])
        return stripes[(slice(None),) * axis + (order(P),)].reshape(x.shape)

    return _mesh.placed(dealt, (x,), _mesh.axes(x))


def _size(who, axis_name):
    axes = _names(axis_name)
    try:
        found = len(axes) == len(set(axes)) > 0 and set(axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)
    except TypeError:  # what cannot be hashed is no name
        found = False
    if not found:
        hint = "Call it inside jax.shard_map, with the axis in the mesh."
        raise ValueError(f"{who}: axis_name must be a mesh axis of the call, got {_shown(axis_name)}. {hint}")
    return jax.lax.axis_size(axis_name)


def _shown(x):
    return repr(x) if _checks.known(x) else "a traced array"


def _names(axis_name):
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _indices(who, axis_name, letter, n, zigzag):
    """(n,): the places in the sequence of the tokens of this device."""
    p, P = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    if not zigzag:
        return p * n + jnp.arange(n, dtype=np.int32)
    if n % 2:
        raise ValueError(f"{who}: {letter} must be even with zigzag, got {n}. ring.zigzag makes it so.")
    stripe = jnp.arange(n // 2, dtype=np.int32)
    return jnp.concatenate([p * (n // 2) + stripe, (2 * P - 1 - p) * (n // 2) + stripe])


@functools.cache
def _engine(axis_name, stats):
    def out(args, T, S, blocks):
        x = _tile.inputs(**args)
        dtype = args["query"].dtype
        attend = functools.partial(_blockwise.attend, blocks=blocks, axis_name=axis_name)
        found = _dense.nothing(x, T, dtype) if 0 in (T, S) else attend(x, dtype, stats)
        return found if stats else found[0]

    return out


_GLOBAL = {"T?": "P·T?", "S?": "P·S?"}


class _Call(_attention.Call):
    """A call whose arrays of tokens are parts of a sequence, and whose other arrays are of all of it."""

    def _axes(self, *axes):
        return tuple(_GLOBAL.get(a, a) for a in super()._axes(*axes))

    def _led(self, name, leaf, core, leads):
        led = super()._led(name, leaf, tuple(_GLOBAL.get(a, a) for a in core), leads)
        if "P·T?" in led and 1 not in leaf.shape[-2:]:
            hint = "masks.rule(fn, *arrays) and biases.rule(fn, *arrays) make pairs from what tokens have."
            must = "1 for P·T or for P·S, since no device holds all pairs"
            raise ValueError(f"{self.who}: {name} must have {must}, got {_checks.tupled(leaf.shape)}. {hint}")
        return led

    def sharded(self, axis_name):
        """Asserts that arrays of tokens vary over the axis, where `shard_map` keeps track of that."""
        axes = set(_names(axis_name))
        if not axes <= _varying(jax.lax.axis_index(axis_name)):
            return
        for what, x in self.args.items():
            names = [name for name, _ in x.leaf_axes()] if isinstance(x, _rules.Rule) else [what]
            for name, leaf, letters in zip(names, jax.tree.leaves(x), self.axes[what], strict=True):
                if {"T", "S"} & set(letters) and not axes <= _varying(leaf):
                    must = f"sharded over {axis_name!r}, as the sequence is"
                    hint = "Name the axis in the in_specs of jax.shard_map."
                    raise ValueError(f"{self.who}: {name} must be {must}, got the same on all devices. {hint}")


def _varying(x):
    return jax.typeof(x).manual_axis_type.varying
