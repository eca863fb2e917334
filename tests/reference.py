"""Attention as the contract says it, in float64 NumPy, one query at a time. Imports neither jattn nor jax."""

from typing import Any, NamedTuple

import numpy as np


class Result(NamedTuple):
    """Of one head (T, D), (T, S), and (T,) the rest; of `attention` (*B, T, N, D), (*B, N, T, S), and (*B, T, N)."""

    out: Any
    weights: Any
    lse: Any
    max_logit: Any
    entropy: Any


def attend(query, key, value, mask=None, bias=None, *, scale=None, softcap=None, sink=None, keep=None):
    """One head: (T, H), (S, H), (S, D), bool (T, S), float (T, S).

    `keep` is what dropout multiplies each weight by, (T, S), on its way to the output.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (T, H), S, D = query.shape, len(key), value.shape[1]
    mask = np.broadcast_to(True if mask is None else mask, (T, S))
    bias = np.broadcast_to(np.asarray(0.0 if bias is None else bias, np.float64), (T, S))
    keep = np.broadcast_to(np.asarray(1.0 if keep is None else keep, np.float64), (T, S))
    scale = 1 / np.sqrt(H) if scale is None else float(scale)
    sink = -np.inf if sink is None else float(sink)

    result = Result(np.zeros((T, D)), np.zeros((T, S)), np.full(T, sink), np.full(T, -np.inf), np.zeros(T))
    for t in range(T):
        # A NaN bias is seen.
        seen = mask[t] & ~np.isneginf(bias[t])
        if not seen.any():
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            logits = scale * (key[seen] @ query[t])
            if softcap is not None:
                logits = float(softcap) * np.tanh(logits / float(softcap))
            logits = logits + bias[t, seen]
        max_logit = logits.max()
        peak = np.maximum(max_logit, sink)
        if not all(np.isfinite(x).all() for x in (query[t], key[seen], value[seen], max_logit, peak)):
            for x in result:
                x[t] = np.nan
            continue
        # The sink is one more key, with nothing to give.
        exps = np.exp(np.append(logits, sink) - peak)
        lse = peak + np.log(exps.sum())
        weights = exps / exps.sum()
        some = weights > 0
        result.weights[t, seen] = weights[:-1]
        result.out[t] = (weights[:-1] * keep[t, seen]) @ value[seen]
        result.lse[t] = lse
        result.max_logit[t] = max_logit
        result.entropy[t] = weights[some] @ (lse - np.append(logits, sink)[some])
    return result


def attention(query, key, value, mask=None, bias=None, *, scale=None, softcap=None, sink=None, keep=None):
    """(*B, T, N, H), (*B, S, K, H), (*B, S, K, D); mask, bias and keep broadcast to (*B, N, T, S); sink (N,)."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (*B, T, N, _), (S, K), D = query.shape, key.shape[-3:-1], value.shape[-1]
    mask = np.broadcast_to(True if mask is None else mask, (*B, N, T, S))
    bias = np.broadcast_to(0.0 if bias is None else bias, (*B, N, T, S))
    keep = np.broadcast_to(1.0 if keep is None else keep, (*B, N, T, S))

    out, rows = np.zeros((*B, T, N, D)), (np.zeros((*B, T, N)) for _ in range(3))
    result = Result(out, np.zeros((*B, N, T, S)), *rows)
    for b in np.ndindex(*B):
        for n in range(N):
            k = n // (N // K)
            head = attend(
                query[b][:, n],
                key[b][:, k],
                value[b][:, k],
                mask[b][n],
                bias[b][n],
                scale=scale,
                softcap=softcap,
                sink=None if sink is None else sink[n],
                keep=keep[b][n],
            )
            result.weights[b][n] = head.weights
            for name in ("out", "lse", "max_logit", "entropy"):
                getattr(result, name)[b][:, n] = getattr(head, name)
    return result


def _pairs(T, S, query_positions, key_positions):
    """Where each query and key is stored, and where it is."""
    for i, j in np.ndindex(T, S):
        q = i if query_positions is None else query_positions[i]
        k = j if key_positions is None else key_positions[j]
        yield (i, j), q, k


def mask(
    T,
    S,
    *,
    causal=None,
    window=(None, None),
    prefix=None,
    key_length=None,
    query_length=None,
    query_ids=None,
    key_ids=None,
    padding=None,
    query_positions=None,
    key_positions=None,
):
    """bool (T, S), pair by pair: all that is given must hold. `causal` is an offset, `window` a pair (left, right)."""
    left, right = window
    key_ids = query_ids if key_ids is None else key_ids
    out = np.zeros((T, S), bool)
    for (i, j), q, k in _pairs(T, S, query_positions, key_positions):
        out[i, j] = (
            (causal is None or k <= q + causal)
            and (left is None or q - k <= left)
            and (right is None or k - q <= right)
            and (prefix is None or k < prefix)
            # What follows goes by where tokens are stored.
            and (key_length is None or j < key_length)
            and (query_length is None or i < query_length)
            and (query_ids is None or query_ids[i] == key_ids[j] != padding)
        )
    return out


def alibi(T, S, slope, query_positions=None, key_positions=None):
    """float (T, S), of one head: minus the slope times the distance."""
    out = np.zeros((T, S))
    for pair, q, k in _pairs(T, S, query_positions, key_positions):
        out[pair] = -slope * abs(q - k)
    return out


def relative(T, S, table, query_positions=None, key_positions=None):
    """float (T, S), of one head: a number for each of the distances -R ... R, and the ends for those beyond."""
    R = len(table) // 2
    out = np.zeros((T, S))
    for pair, q, k in _pairs(T, S, query_positions, key_positions):
        out[pair] = table[R + min(max(k - q, -R), R)]
    return out
