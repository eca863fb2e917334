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


class Cotangent(NamedTuple):
    """Of one head, what is passed back to each result: (T, D), and (T,) the rest."""

    out: Any
    lse: Any
    max_logit: Any
    entropy: Any


def gradients(query, key, value, mask, bias, cotangent, *, scale, softcap=None, sink=None, keep=1.0, error, eps):
    """What one head passes back, by name, and for each number how wrong rounding may make it.

    `error` (T,) is how wrong, relatively, a weight of each row may be, or what is made of it. Logits closer than `eps`
    tie. A row that is NaN passes NaN to all that it sees.
    """
    T, S = len(query), len(key)
    seen = mask & ~np.isneginf(bias)
    result = attend(query, key, value, mask, bias, scale=scale, softcap=softcap, sink=sink)
    bad = np.isnan(result.lse)[:, None]
    # A row that is not NaN sees nothing but finite numbers.
    query, key, value, bias = (np.where(np.isfinite(x), x, 0) for x in (query, key, value, bias))
    p = np.where(bad, 0, result.weights)
    lse, entropy = (np.where(np.isfinite(x), x, 0)[:, None] for x in (result.lse, result.entropy))
    largest = np.where(np.isfinite(result.max_logit), result.max_logit, 0)[:, None]
    query = np.where(bad, 0, query)
    products = query @ key.T
    capped, slope = scale * products, np.ones((T, S))
    if softcap is not None:
        u = capped / softcap
        capped, slope = softcap * np.tanh(u), 1 / np.cosh(np.clip(u, -300, 300)) ** 2
    logits = capped + bias
    g, g_lse, g_max, g_entropy = (x if x.ndim == 2 else x[:, None] for x in cotangent)

    terms = np.abs(scale) * np.abs(query) @ np.abs(key).T
    terms = np.minimum(terms, np.inf if softcap is None else 2 * softcap) + np.abs(bias)
    tied = seen & ~bad & (np.abs(logits - largest) <= 4 * eps * terms)
    share = tied / np.maximum(tied.sum(1, keepdims=True), 1)

    def passed(pull, weight, logit, tie):
        return weight * (pull + g_lse - g_entropy * (logit - lse + entropy)) + g_max * tie

    with np.errstate(under="ignore"):
        reach, size = keep * (g @ value.T), keep * (np.abs(g) @ np.abs(value).T)
        mean, mean_size = ((p * x).sum(1, keepdims=True) for x in (reach, size))
        d_logits = passed(reach - mean, p, np.where(p > 0, logits, 0), share)
        tiny = np.finfo(np.float32).tiny if eps > 1e-10 else np.finfo(np.float64).tiny

        def sized(own, weight, logit, tie):
            own = own + mean_size + np.abs(g_lse) + np.abs(g_entropy) * (np.abs(logit - lse) + entropy + 1)
            return error[:, None] * (weight * own + np.abs(g_max) * tie) + tiny

        wrong = np.where(seen, sized(size, p, np.where(p > 0, logits, 0), share), 0)
        weights = p * keep
        weights_wrong = error[:, None] * weights + tiny * seen

    d_logits = np.where(bad & seen, np.nan, d_logits)
    weights = np.where(bad & seen, np.nan, weights)
    flat = d_logits * slope
    out = {
        "query": (scale * flat @ key, np.abs(scale) * wrong @ np.abs(key)),
        "key": (scale * flat.T @ query, np.abs(scale) * wrong.T @ np.abs(query)),
        "value": (weights.T @ g, weights_wrong.T @ np.abs(g)),
        "bias": (d_logits, wrong),
        "scale": ((flat * products).sum(), (wrong * (np.abs(query) @ np.abs(key).T)).sum()),
    }
    if softcap is not None:
        out["softcap"] = (d_logits * (np.tanh(u) - u * slope)).sum(), (wrong * (1 + np.abs(u))).sum()
    if sink is not None:
        weight = np.where(np.isneginf(result.lse) | bad[:, 0], 0, np.exp(sink - lse[:, 0]))[:, None]
        d_sink = passed(-mean, weight, sink, 0)
        out["sink"] = np.where(bad, np.nan, d_sink).sum(), sized(0, weight, sink, 0).sum()
    return out


def kept(words, rate, queries, keys, heads=None):
    """What dropout multiplies each weight by, (T, S), or (heads, T, S): threefry, as its authors have it, 20 rounds.

    A head's key is the block of the call's key that counts the head; a pair's bits are the first word of the block
    that counts its two indices. The rate is rounded to float32, and a pair is kept if its 24 bits reach it.
    """
    words = [np.reshape(w, (1, 1)) for w in words]
    if heads is not None:
        words = _threefry(*words, np.zeros((heads, 1, 1)), np.arange(heads)[:, None, None])
    bits, _ = _threefry(*words, np.reshape(queries, (-1, 1)), np.reshape(keys, (1, -1)))
    uniform = (bits >> np.uint32(8)).astype(np.float64) * 2.0**-24
    return np.where(uniform >= np.float32(rate), 1 / (1 - rate) if rate < 1 else 0, 0)


def _threefry(a, b, x, y):
    """Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", threefry 2x32."""
    a, b, x, y = np.broadcast_arrays(*(np.asarray(z).astype(np.uint32) for z in (a, b, x, y)))
    schedule = a, b, a ^ b ^ np.uint32(0x1BD11BDA)
    x, y = x + a, y + b
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            y = (y << np.uint32(turn) | y >> np.uint32(32 - turn)) ^ x
        x, y = x + schedule[(i + 1) % 3], y + schedule[(i + 2) % 3] + np.uint32(i + 1)
    return x, y
