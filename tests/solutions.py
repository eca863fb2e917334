"""Answers to the exercises of the lessons: for each one that is right, and many that are wrong, with what is said.

Do the lessons first.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jattn

SOLUTIONS = {}

# (exercise, answer, what the checker must say of it)
WRONG = []


def solves(name):
    return lambda answer: SOLUTIONS.setdefault(name, answer)


def wrong(name, *said):
    """`said`: parts of the message, in order."""
    return lambda answer: WRONG.append((name, answer, said))


# 1. Rows


@solves("softmax")
def softmax(x, axis=-1):
    peak = x.max(axis, keepdims=True)
    if (peak == -jnp.inf).any():
        raise ValueError("a row is -inf throughout")
    exps = jnp.exp(x - peak)
    return exps / exps.sum(axis, keepdims=True)


@wrong("softmax", "nothing is there yet", "hint('softmax')")
def softmax_stub(x, axis=-1): ...


@wrong("softmax", "nothing is there yet")
def softmax_raises_not_implemented(x, axis=-1):
    raise NotImplementedError


@wrong("softmax", "One row", "x = [0.71, 0, -1]", "type: must be an array of floating numbers, got list")
def softmax_list(x, axis=-1):
    return softmax(x, axis).tolist()


@wrong("softmax", "One row", "type: must be an array of floating numbers, got bool")
def softmax_bool(x, axis=-1):
    return softmax(x, axis) > 0.5


@wrong("softmax", "One row", "shape: must be (3,), got (1, 3)")
def softmax_extra_axis(x, axis=-1):
    return softmax(x, axis)[None]


@wrong("softmax", "Random rows, along the last axis", "of shape (3, 5)", "15 of 15 numbers are wrong")
def softmax_over_the_whole_batch(x, axis=-1):
    exps = jnp.exp(x - x.max())
    return exps / exps.sum()


@wrong("softmax", "along axis 0", "axis = 0", "value: ")
def softmax_always_last_axis(x, axis=-1):
    return softmax(x)


@wrong("softmax", "along axis 1 of 3", "shape: must be (2, 3, 5), got (2, 5, 3)")
def softmax_axis_not_moved_back(x, axis=-1):
    return softmax(jnp.moveaxis(x, axis, -1)) if x.ndim == 3 else softmax(x, axis)


@wrong("softmax", "exp overflows", "x = [1000, 999]", "value: must be [0.7311, 0.2689], got [nan, nan]")
def softmax_no_peak(x, axis=-1):
    return jnp.exp(x) / jnp.exp(x).sum(axis, keepdims=True)


@wrong("softmax", "A row far below another", "value: must be [[0.7311, 0.2689], [0.7311, 0.2689]]", "nan")
def softmax_one_peak_for_all_rows(x, axis=-1):
    exps = jnp.exp(x - x.max())
    return exps / exps.sum(axis, keepdims=True)


@wrong("softmax", "A score of -inf", "x = [0.7, 1.1, 0.2, -inf]", "nan")
def softmax_nan_on_minus_inf(x, axis=-1):
    return softmax(x - 0 * x, axis)


@wrong("softmax", "-inf alone", "must raise ValueError (no entry of a row may be seen), got [[0.2689, 0.7311], [nan,")
def softmax_empty_row_nan(x, axis=-1):
    exps = jnp.exp(x - x.max(axis, keepdims=True))
    return exps / exps.sum(axis, keepdims=True)


@wrong("softmax", "-inf alone", "must raise ValueError", "got [[0.2689, 0.7311], [0.5, 0.5]]")
def softmax_finite_fill(x, axis=-1):
    return softmax(jnp.maximum(x, -1e30), axis)


@wrong("softmax", "-inf alone", "must raise ValueError", "but it raised KeyError: 'no'")
def softmax_wrong_error(x, axis=-1):
    try:
        return softmax(x, axis)
    except ValueError:
        raise KeyError("no") from None


@wrong("softmax", "-inf alone", "type: must be a result, got None. Is a `return` missing")
def softmax_forgets_return(x, axis=-1):
    try:
        return softmax(x, axis)
    except ValueError:
        return None


wrong("softmax", "must be a function, got ArrayImpl. Pass the function itself: check('softmax', softmax).")(
    jnp.ones(3),
)


@solves("naive_softmax")
def naive_softmax(x):
    return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)


@wrong("naive_softmax", "nothing done about it", "x = [1000, 1000]", "value: must be [nan, nan], got [0.5, 0.5]")
def naive_softmax_not_naive(x):
    return softmax(x)


@wrong("naive_softmax", "Random rows", "value: ")
def naive_softmax_over_the_whole_batch(x):
    return jnp.exp(x) / jnp.exp(x).sum()


@wrong("naive_softmax", "Random rows", "it raised", "broadcast")
def naive_softmax_no_keepdims(x):
    return jnp.exp(x) / jnp.exp(x).sum(-1)


@wrong("naive_softmax", "One row", "value: must be [0.6667, 0.3333], got [1, 0]")
def naive_softmax_no_exp(x):
    return x / x.sum(-1, keepdims=True)


@solves("rows_normalised")
def rows_normalised(weights, tol=1e-9):
    return bool((jnp.abs(weights.sum(-1) - 1) <= tol).all())


@wrong("rows_normalised", "Two rows", "shape: must be (), got (2,)")
def rows_normalised_each(weights, tol=1e-9):
    return jnp.abs(weights.sum(-1) - 1) <= tol


@wrong("rows_normalised", "Two rows", "type: must be True or False, got float")
def rows_normalised_number(weights, tol=1e-9):
    return jnp.abs(weights.sum(-1) - 1).max()


@wrong("rows_normalised", "sums to 0.5", "value: must be False, got True")
def rows_normalised_one_sided(weights, tol=1e-9):
    return bool((weights.sum(-1) - 1 <= tol).all())


@wrong("rows_normalised", "Two rows", "value: must be True, got False")
def rows_normalised_columns(weights, tol=1e-9):
    return rows_normalised(weights.T, tol)


@wrong("rows_normalised", "Two rows", "value: must be True, got False")
def rows_normalised_whole_matrix(weights, tol=1e-9):
    return bool(jnp.abs(weights.sum() - 1) <= tol)


@wrong("rows_normalised", "on average", "value: must be False, got True")
def rows_normalised_mean(weights, tol=1e-9):
    sums = weights.sum(-1)
    return bool(jnp.abs(sums.mean() - 1) <= tol) and not bool((sums == 0).any()) and bool((sums > 0.4).all())


@wrong("rows_normalised", "A NaN", "value: must be False, got True")
def rows_normalised_nan_passes(weights, tol=1e-9):
    return not (jnp.abs(weights.sum(-1) - 1) > tol).any()


@wrong("rows_normalised", "A wide tolerance", "tol = 0.25", "value: must be True, got False")
def rows_normalised_own_tolerance(weights, tol=1e-9):
    return rows_normalised(weights)


@solves("entropy")
def entropy(weights):
    return -(weights * jnp.log(jnp.where(weights > 0, weights, 1))).sum(-1)


@wrong("entropy", "All the weight on one entry", "weights = [1, 0, 0]", "value: must be 0, got nan")
def entropy_nan_at_0(weights):
    return -(weights * jnp.log(weights)).sum(-1)


@wrong("entropy", "Two equal weights", "value: must be 0.6931, got 1.")
def entropy_in_bits(weights):
    return entropy(weights) / jnp.log(2)


@wrong("entropy", "Two equal weights", "value: must be 0.6931, got -0.6931.")
def entropy_sign(weights):
    return -entropy(weights)


@wrong("entropy", "Two rows", "shape: must be (2,), got ()")
def entropy_of_the_whole_batch(weights):
    return entropy(weights).sum()


@wrong("entropy", "Random rows with weights of 0", "shape: must be (3,), got (5,)")
def entropy_wrong_axis(weights):
    return -(weights * jnp.log(jnp.where(weights > 0, weights, 1))).sum(0) if weights.ndim == 2 else entropy(weights)


# 2. One head


@solves("attend")
def attend(query, key, value, mask):
    scores = query @ key.T / jnp.sqrt(query.shape[-1])
    weights = softmax(jnp.where(mask, scores, -jnp.inf))
    return weights @ jnp.where(mask.any(0)[:, None], value, 0)


@wrong("attend", "Two keys", "query = [[1, 0]]", "value: must be [[1.34, 0.6605]], got [[1.462, 0.5379]]")
def attend_scale_forgotten(query, key, value, mask):
    return attend(query * jnp.sqrt(query.shape[-1]), key, value, mask)


@wrong("attend", "Two keys", "value: must be [[1.34, 0.6605]], got [[1.245, 0.7551]]")
def attend_scale_without_root(query, key, value, mask):
    return attend(query / jnp.sqrt(query.shape[-1]), key, value, mask)


@wrong("attend", "3 queries, 5 keys", "shape: must be (3, 2), got (3, 5)")
def attend_returns_weights(query, key, value, mask):
    return softmax(query @ key.T / jnp.sqrt(query.shape[-1])) if len(key) == 5 else attend(query, key, value, mask)


@wrong("attend", "Two keys", "value: must be [[1.34, 0.6605]], got [[2, 2]]")
def attend_normalises_over_queries(query, key, value, mask):
    return softmax(query @ key.T / jnp.sqrt(query.shape[-1]), axis=0) @ value


@wrong("attend", "Keys that are hidden", "value: ")
def attend_ignores_the_mask(query, key, value, mask):
    return attend(query, key, value, jnp.ones_like(mask))


@wrong("attend", "Keys that are hidden", "value: ")
def attend_mask_after_softmax(query, key, value, mask):
    return jnp.where(mask, softmax(query @ key.T / jnp.sqrt(query.shape[-1])), 0) @ value


@wrong("attend", "Two keys", "value: must be [[1.34, 0.6605]], got [[nan, nan]]")
def attend_inverted_mask(query, key, value, mask):
    scores = jnp.where(mask, -jnp.inf, query @ key.T / jnp.sqrt(query.shape[-1]))
    return naive_softmax(scores) @ value


@wrong("attend", "exp overflows", "nan")
def attend_naive(query, key, value, mask):
    return naive_softmax(jnp.where(mask, query @ key.T / jnp.sqrt(query.shape[-1]), -jnp.inf)) @ value


@wrong("attend", "A hidden key with a NaN value", "value: must be [[2, 0]], got [[nan, 0]]")
def attend_reads_hidden_values(query, key, value, mask):
    return softmax(jnp.where(mask, query @ key.T / jnp.sqrt(query.shape[-1]), -jnp.inf)) @ value


@wrong("attend", "may see no key", "must raise ValueError (a query may see no key), got [[1, 0], [0.5, 0.5]]")
def attend_mean_of_all_values(query, key, value, mask):
    scores = jnp.where(mask, query @ key.T / jnp.sqrt(query.shape[-1]), -1e30)
    return softmax(scores) @ jnp.where(jnp.isnan(value), 0, value)


@solves("aim")
def aim(key, target):
    return 1e4 * key[target]


@wrong("aim", "Two keys", "value: the weight of key 0 must be above 0.99, got 0.6698.")
def aim_too_short(key, target):
    return key[target]


@wrong("aim", "the other one", "target = 1", "must be above 0.99, got 0.")
def aim_always_at_the_first(key, target):
    return 1e4 * key[0]


@wrong("aim", "Keys close together", "must be above 0.99, got")
def aim_not_long_enough(key, target):
    return 100 * key[target]


@wrong("aim", "Two keys", "shape: must be (2,), got (1, 2)")
def aim_keeps_an_axis(key, target):
    return 1e4 * key[target : target + 1]


# 3. Masks


@solves("causal_mask")
def causal_mask(T, S):
    return jnp.arange(S) <= jnp.arange(T)[:, None]


@wrong("causal_mask", "3 queries, 3 keys", "value: ", "got [[True, True, True]")
def causal_mask_transposed(T, S):
    return jnp.arange(S) >= jnp.arange(T)[:, None]


@wrong("causal_mask", "3 queries, 3 keys", "value: ", "got [[False, False, False]")
def causal_mask_not_itself(T, S):
    return jnp.arange(S) < jnp.arange(T)[:, None]


@wrong("causal_mask", "3 queries, 3 keys", "type: must be an array of bool, got float")
def causal_mask_of_numbers(T, S):
    return jnp.tri(T, S)


@wrong("causal_mask", "Fewer queries than keys", "T = 2", "S = 5", "value: ", "got [[True, True, True, True, False]")
def causal_mask_aligned_at_the_end(T, S):
    return jnp.arange(S) <= jnp.arange(T)[:, None] + S - T


@wrong("causal_mask", "Fewer queries than keys", "shape: must be (2, 5), got (2, 2)")
def causal_mask_square(T, S):
    return causal_mask(T, T)


@solves("padding_mask")
def padding_mask(lengths, S):
    return jnp.arange(S) < lengths[:, None, None, None]


@wrong("padding_mask", "Lengths 3 and 1 of 4", "lengths = [3, 1]", "shape: must be (2, 1, 1, 4), got (2, 4)")
def padding_mask_without_axes(lengths, S):
    return jnp.arange(S) < lengths[:, None]


@wrong("padding_mask", "Lengths 3 and 1 of 4", "value: must be [[[[True, True, True, False]]]", "got [[[[False")
def padding_mask_inverted(lengths, S):
    return ~padding_mask(lengths, S)


@wrong("padding_mask", "Lengths 3 and 1 of 4", "got [[[[True, True, True, True]]]")
def padding_mask_one_too_many(lengths, S):
    return padding_mask(lengths + 1, S)


@wrong("padding_mask", "Lengths 3 and 1 of 4", "type: must be an array of bool, got int")
def padding_mask_of_numbers(lengths, S):
    return padding_mask(lengths, S).astype(int)


@solves("masked_softmax")
def masked_softmax(x, where):
    peak = jax.lax.stop_gradient(jnp.where(where, x, -jnp.inf).max(-1, keepdims=True))
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    exps = jnp.where(where, jnp.exp(jnp.where(where, x - peak, 0)), 0)
    total = exps.sum(-1, keepdims=True)
    return exps / jnp.where(total == 0, 1, total)


@wrong("masked_softmax", "Some hidden", "value: ")
def masked_softmax_afterwards(x, where):
    return jnp.where(where, softmax(x), 0)


@wrong("masked_softmax", "A hidden score far above the visible ones", "got [[nan, nan, nan]]")
def masked_softmax_peak_of_hidden(x, where):
    exps = jnp.where(where, jnp.exp(x - x.max(-1, keepdims=True)), 0)
    return exps / exps.sum(-1, keepdims=True)


@wrong("masked_softmax", "A hidden NaN", "nan")
def masked_softmax_times_the_mask(x, where):
    peak = jax.lax.stop_gradient(jnp.where(where, x, -1e30).max(-1, keepdims=True))
    exps = jnp.exp(jnp.where(x > peak, 0, x - peak)) * where.astype(x.dtype)
    total = exps.sum(-1, keepdims=True)
    return exps / jnp.where(total == 0, 1, total)


@wrong("masked_softmax", "A row with nothing visible: zeros", "value: ", "[nan, nan, nan]")
def masked_softmax_empty_row_nan(x, where):
    return jax.nn.softmax(jnp.where(where, x, -jnp.inf))


@wrong("masked_softmax", "A row with nothing visible: zeros", "value: ", "[0.3333, 0.3333, 0.3333]")
def masked_softmax_empty_row_uniform(x, where):
    return jax.nn.softmax(jnp.where(where, x, -1e30))


@wrong("masked_softmax", "Its gradient", "value: ", "[nan, nan, nan]")
def masked_softmax_adds_the_mask(x, where):
    weights = jax.nn.softmax(x + jnp.where(where, 0, -jnp.inf))
    return jnp.where(where.any(-1, keepdims=True), weights, 0)


@wrong("masked_softmax", "Its gradient", "value: ")
def masked_softmax_holds_the_total(x, where):
    return jax.lax.stop_gradient(masked_softmax(x, where)) * (1 + x - jax.lax.stop_gradient(x))


@wrong("masked_softmax", "Its gradient", "it raised TracerArrayConversionError")
def masked_softmax_in_numpy(x, where):
    x, where = np.asarray(x), np.asarray(where)
    return np.asarray(masked_softmax(jnp.asarray(x), jnp.asarray(where)))


# 4. Heads


@solves("grouped_heads")
def grouped_heads(query, key, value):
    (T, N, H), K = query.shape, key.shape[1]
    group = jax.vmap(jattn.attend, in_axes=(1, None, None), out_axes=1)
    return jax.vmap(group, in_axes=1, out_axes=1)(query.reshape(T, K, N // K, H), key, value).reshape(T, N, -1)


@wrong("grouped_heads", "3 heads that share all keys", "it raised ValueError", "vmap")
def grouped_heads_ungrouped(query, key, value):
    return jax.vmap(jattn.attend, in_axes=1, out_axes=1)(query, key, value)


@wrong("grouped_heads", "6 query heads, 2 key heads", "value: ")
def grouped_heads_in_turns(query, key, value):
    heads = jnp.arange(query.shape[1]) % key.shape[1]  # n % K and not n // G
    return jax.vmap(jattn.attend, in_axes=1, out_axes=1)(query, key[:, heads], value[:, heads])


@wrong("grouped_heads", "One head", "shape: must be (3, 1, 2), got (1, 3, 2)")
def grouped_heads_axis_not_moved_back(query, key, value):
    return grouped_heads(query, key, value).swapaxes(0, 1)


@wrong("grouped_heads", "2 heads with keys of their own", "value: ")
def grouped_heads_one_softmax_for_all(query, key, value):
    scores = jnp.einsum("tnh,skh->tnsk", query, key) / jnp.sqrt(query.shape[-1])
    scores = jnp.where(jnp.eye(query.shape[1], key.shape[1], dtype=bool)[:, None], scores, -1e9)
    weights = jax.nn.softmax(scores, (1, 2, 3))
    return jnp.einsum("tnsk,skd->tnd", weights, value)


@wrong("grouped_heads", "6 query heads, 2 key heads", "shape: must be (3, 6, 7), got (3, 2, 3, 7)")
def grouped_heads_not_joined(query, key, value):
    out = grouped_heads(query, key, value)
    return out.reshape(3, 2, 3, 7) if out.shape == (3, 6, 7) else out


@solves("other_weights")
def other_weights(weights, value):
    S, D = value.shape
    directions = jnp.linalg.svd(jnp.concatenate([value, jnp.ones((S, 1))], 1).T)[2][D + 1 :]
    moves = []
    for d in (*directions, *-directions):
        steps = jnp.where(d < -1e-6, weights / -jnp.where(d < -1e-6, d, -1), jnp.inf)
        moves.append(steps.min() * d)
    return weights + max(moves, key=lambda move: float(jnp.abs(move).sum()))


@wrong("other_weights", "at least 0.02 of the weight must be moved, got 0.")
def other_weights_the_same(weights, value):
    return weights


@wrong("other_weights", "value: the output must stay [0.5], got [0.625]")
def other_weights_reversed(weights, value):
    return weights[::-1]


@wrong("other_weights", "value: no weight may be negative or NaN, got [-")
def other_weights_too_far(weights, value):
    return weights + 2 * (other_weights(weights, value) - weights)


@wrong("other_weights", "value: the weights must sum to 1, got [0.5, 0.5, 1], which sum to 2.")
def other_weights_doubled(weights, value):
    return 2 * weights


@wrong("other_weights", "The third value", "shape: must be (3,), got (1,)")
def other_weights_outputs(weights, value):
    return weights @ value


# 5. Long sequences


@solves("absorb_chunk")
def absorb_chunk(peak, total, acc, logits, value):
    new = jnp.maximum(peak, logits.max())
    shift = jnp.where(new == -jnp.inf, 0, new)
    fade, p = jnp.exp(peak - shift), jnp.exp(logits - shift)
    return new, total * fade + p.sum(), acc * fade + p @ value


@wrong("absorb_chunk", "nothing is there yet")
def absorb_chunk_stub(peak, total, acc, logits, value): ...


@wrong("absorb_chunk", "the peak in the second", "value: ")
def absorb_chunk_no_fade(peak, total, acc, logits, value):
    new = jnp.maximum(peak, logits.max())
    p = jnp.exp(logits - new)
    return new, total + p.sum(), acc + p @ value


@wrong("absorb_chunk", "the peak in the second", "value: ")
def absorb_chunk_only_the_total_fades(peak, total, acc, logits, value):
    new, total, _ = absorb_chunk(peak, total, acc, logits, value)
    return new, total, acc + jnp.exp(logits - new) @ value


@wrong("absorb_chunk", "exp overflows", "logits = [[1000, 999], [1001, 1000]]", "got [nan, nan]")
def absorb_chunk_no_peak(peak, total, acc, logits, value):
    return peak, total + jnp.exp(logits).sum(), acc + jnp.exp(logits) @ value


@wrong("absorb_chunk", "A first chunk in which everything is masked", "got [nan, nan]")
def absorb_chunk_minus_inf_less_minus_inf(peak, total, acc, logits, value):
    new = jnp.maximum(peak, logits.max())
    fade, p = jnp.exp(peak - new), jnp.exp(logits - new)
    return new, total * fade + p.sum(), acc * fade + p @ value


@wrong("absorb_chunk", "One chunk", "it raised TypeError: an answer must be a tuple of three: peak, total, acc.")
def absorb_chunk_one_number(peak, total, acc, logits, value):
    return absorb_chunk(peak, total, acc, logits, value)[1]


@solves("merge_parts")
def merge_parts(outs, lses):
    seen = lses > -jnp.inf
    peak = lses.max(0)
    weights = jnp.where(seen, jnp.exp(lses - jnp.where(peak == -jnp.inf, 0, peak)), 0)
    total = weights.sum(0)
    mixed = (weights[..., None] * jnp.where(seen[..., None], outs, 0)).sum(0)
    return mixed / jnp.where(total == 0, 1, total)[:, None]


@wrong("merge_parts", "Random parts", "value: ")
def merge_parts_mean(outs, lses):
    return outs.mean(0)


@wrong("merge_parts", "Two parts with as much in each", "value: must be [[1, 2]], got [[nan, nan]]")
def merge_parts_by_lse(outs, lses):
    return (lses[..., None] * outs).sum(0) / lses.sum(0)[:, None]


@wrong("merge_parts", "Large lses", "value: must be [[1.538]], got [[nan]]")
def merge_parts_no_peak(outs, lses):
    return (jnp.exp(lses)[..., None] * outs).sum(0) / jnp.exp(lses).sum(0)[:, None]


@wrong("merge_parts", "and holds NaN", "value: must be [[1]], got [[nan]]")
def merge_parts_reads_what_saw_nothing(outs, lses):
    return (jax.nn.softmax(lses, 0)[..., None] * outs).sum(0)


@wrong("merge_parts", "Nothing seen by any part", "value: must be [[2], [0]], got [[2], [nan]]")
def merge_parts_empty_row_nan(outs, lses):
    return (jax.nn.softmax(lses, 0)[..., None] * jnp.where(lses[..., None] > -jnp.inf, outs, 0)).sum(0)


@wrong("merge_parts", "Two parts with as much in each", "shape: must be (1, 2), got (2, 1, 2)")
def merge_parts_not_summed(outs, lses):
    return jax.nn.softmax(lses, 0)[..., None] * outs


# 6. In a pipeline


@solves("decode")
def decode(query, keys, values, length):
    return jattn.attend(query[None], keys, values, jattn.masks.lengths(key=length))[0]


@wrong("decode", "nothing is there yet")
def decode_stub(query, keys, values, length): ...


@wrong("decode", "All slots written", "it raised IndexError", "slice")
def decode_cuts(query, keys, values, length):
    return jattn.attend(query[None], keys[:length], values[:length])[0]


@wrong("decode", "All slots written", "it raised", "traced")
def decode_asks_for_the_length(query, keys, values, length):
    return decode(query, keys, values, jnp.array(int(length)))


@wrong("decode", "3 of 5 slots written", "value: ")
def decode_reads_all(query, keys, values, length):
    return jattn.attend(query[None], keys, values)[0]


@wrong("decode", "All slots written", "value: ")
def decode_one_too_few(query, keys, values, length):
    return decode(query, keys, values, length - 1)


@wrong("decode", "3 of 5 slots written", "value: ")
def decode_zero_logits(query, keys, values, length):
    logits = jnp.where(jnp.arange(len(keys)) < length, keys @ query / 2, 0)
    return jax.nn.softmax(logits) @ values


@wrong("decode", "NaN in the other slots", "value: ", "got [nan, nan, nan]")
def decode_reads_values(query, keys, values, length):
    logits = jnp.where(jnp.arange(len(keys)) < length, keys @ query / 2, -jnp.inf)
    return jax.nn.softmax(logits) @ values


@wrong("decode", "All slots written", "shape: must be (3,), got (1, 3)")
def decode_keeps_an_axis(query, keys, values, length):
    return decode(query, keys, values, length)[None]


@solves("hessian_vector")
def hessian_vector(f, x, v):
    return jax.jvp(jax.grad(f), (x,), (v,))[1]


@wrong("hessian_vector", "along one axis", "type: must be an array of floating numbers, got tuple")
def hessian_vector_pair(f, x, v):
    return jax.jvp(jax.grad(f), (x,), (v,))


@wrong("hessian_vector", "along one axis", "shape: must be (3,), got ()")
def hessian_vector_first_derivative(f, x, v):
    return jax.jvp(f, (x,), (v,))[1]


@wrong("hessian_vector", "along one axis", "shape: must be (3,), got (3, 3)")
def hessian_vector_not_multiplied(f, x, v):
    return jax.hessian(f)(x)


@wrong("hessian_vector", "along one axis", "value: ")
def hessian_vector_gradient_times(f, x, v):
    return jax.grad(f)(x) * v


@wrong("hessian_vector", "along one axis", "value: ")
def hessian_vector_a_whole_step(f, x, v):
    return jax.grad(f)(x + v) - jax.grad(f)(x)


# 7. Many devices


@solves("ring_bytes")
def ring_bytes(T, P, K, H, D, size):
    return (P - 1) * (T // P) * K * (H + D) * size


@wrong("ring_bytes", "nothing is there yet")
def ring_bytes_stub(T, P, K, H, D, size): ...


@wrong("ring_bytes", "Two devices", "T = 8", "value: must be 64, got 128.")
def ring_bytes_home_again(T, P, K, H, D, size):
    return T * K * (H + D) * size


@wrong("ring_bytes", "Values with other features than keys", "value: must be 640, got 512.")
def ring_bytes_values_as_keys(T, P, K, H, D, size):
    return ring_bytes(T, P, K, H, H, size)


@wrong("ring_bytes", "Two devices", "value: must be 64, got 32.")
def ring_bytes_keys_alone(T, P, K, H, D, size):
    return ring_bytes(T, P, K, H, 0, size)


@wrong("ring_bytes", "Values with other features than keys", "value: must be 640, got 320.")
def ring_bytes_one_step(T, P, K, H, D, size):
    return T // P * K * (H + D) * size if P > 1 else 0


@wrong("ring_bytes", "Two devices", "type: must be an integer, got float")
def ring_bytes_float(T, P, K, H, D, size):
    return (P - 1) * T / P * K * (H + D) * size
