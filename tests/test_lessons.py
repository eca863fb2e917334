"""The facts of the three lessons that jattn is built from, each with its numbers: rows, one head, masks, many heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import normal
from conftest import assert_close

import jattn
from jattn import attend, attention, attention_weights, entropy, masks, naive_softmax, rows_normalised, softmax

INF = np.inf
LN2 = np.log(2)


def array(*numbers):
    return jnp.array(numbers, jnp.float64)


def shown(x, digits):
    """As a lesson prints them."""
    return np.round(np.asarray(x), digits).tolist()


def weights(query, key, mask=None, **options):
    """(T, S): the weights of one head, which `attention_weights` knows as the only one of its batch."""
    mask = mask[None] if isinstance(mask, np.ndarray) else mask
    return attention_weights(query[:, None], key[:, None], mask, **options)[0]


# Rows: softmax


def test_each_query_has_a_row_of_its_own_that_sums_to_1_and_the_matrix_sums_to_their_number():
    scores = array([0.3, -0.2], [2.0, 5.0])
    W = softmax(scores)
    assert_close(W.sum(-1), [1, 1])
    assert_close(W.sum(), 2)
    assert (W > 0).all() and rows_normalised(W)
    assert_close(W[0], softmax(scores[0]))
    assert not np.allclose(W.sum(0), 1)  # along the keys, not along the queries


def test_the_table_from_scores_to_weights():
    scores = array(1 / np.sqrt(2), 0, -1)  # of which the lesson shows two digits
    shifted = scores - scores.max()
    assert shown(scores, 2) == [0.71, 0, -1]
    assert shown(shifted, 2) == [0, -0.71, -1.71]
    assert shown(np.exp(shifted), 4) == [1, 0.4931, 0.1814]
    assert shown(softmax(scores), 4) == [0.5972, 0.2945, 0.1083]
    np.testing.assert_allclose(softmax(array(0.71, 0, -1)), [0.5972, 0.2945, 0.1083], atol=1e-3)


def test_subtracting_the_largest_score_changes_no_weight_and_stops_overflow():
    assert softmax(array(1000, 1000)).tolist() == [0.5, 0.5]
    assert_close(softmax(array(1000, 999)), softmax(array(0, -1)))
    assert np.isnan(naive_softmax(array(1000, 1000))).all() and np.isnan(naive_softmax(array(1000, 999))).all()
    scores = array(0.71, 0, -1)
    assert_close(softmax(scores + 100), softmax(scores))
    assert_close(softmax(scores - scores.max()), naive_softmax(scores))


@pytest.mark.parametrize(
    "scores, expected, digits",
    [
        ([0, 0], [1 / 2, 1 / 2], 15),
        ([LN2, 0], [2 / 3, 1 / 3], 15),
        ([1, 0], [0.731, 0.269], 3),
        ([0.7071, 0], [0.670, 0.330], 3),
    ],
)
def test_the_weights_of_two_scores(scores, expected, digits):
    assert shown(softmax(array(*scores)), digits) == shown(expected, digits)


def test_a_large_factor_sharpens_and_a_small_one_flattens():
    scores = array(0.71, 0, -1)
    assert shown(softmax(100 * scores), 12) == [1, 0, 0]
    np.testing.assert_allclose(softmax(scores / 1000), [1 / 3] * 3, atol=1e-3)
    peaks = [float(softmax(c * scores)[0]) for c in (0.1, 1, 3, 10)]
    assert peaks == sorted(peaks)


MASKED = array(0.7, 1.1, 0.2, -INF)
PRINTED = [0.323, 0.482, 0.196, 0]  # 0.48149 was rounded twice


def test_a_score_of_minus_inf_weighs_exactly_0():
    exps = np.exp(MASKED)
    assert shown(exps, 3) == [2.014, 3.004, 1.221, 0]
    assert shown(exps.sum(), 3) == 6.239
    W = softmax(MASKED)
    assert_close(W, exps / exps.sum())
    np.testing.assert_allclose(W, PRINTED, atol=6e-4)
    assert shown(W, 3) == [0.323, 0.481, 0.196, 0] and W[3] == 0


def test_rounded_weights_need_not_sum_to_1():
    assert round(sum(PRINTED), 3) == 1.001
    assert_close(softmax(MASKED).sum(), 1)
    assert rows_normalised(softmax(MASKED)) and not rows_normalised(array(*PRINTED))


def test_a_picture_with_other_weights_is_wrong():
    W = softmax(MASKED)
    assert np.abs(W - np.array([0.26, 0.41, 0.33, 0])).max() > 0.1


def test_the_four_functions_of_the_exercise():
    assert_close(softmax(array([0, -INF], [1, 1]), axis=-1), [[1, 0], [0.5, 0.5]])
    with pytest.raises(ValueError, match="^softmax: "):
        softmax(array([0, 1], [-INF, -INF]), empty="raise")
    assert_close(naive_softmax(array(LN2, 0)), [2 / 3, 1 / 3])
    assert rows_normalised(array([0.5, 0.5], [0, 1]), tol=1e-9) and not rows_normalised(array([0.5, 0.5], [0.5, 0.51]))
    assert_close(entropy(array([0.5, 0.5, 0], [1, 0, 0])), [LN2, 0])


def test_low_entropy_is_focus():
    scores = array(0.71, 0, -1)
    spread = [float(entropy(softmax(c * scores))) for c in (0, 1, 3, 100)]
    assert spread == sorted(spread, reverse=True)
    assert_close(spread[0], np.log(3))
    assert abs(spread[-1]) < 1e-12


def test_the_weights_of_a_whole_batch_do_not_sum_to_1():
    W = softmax(jnp.asarray(normal(1, 2, 3, 5, 7)))
    assert rows_normalised(W)
    assert_close(W.sum(), 2 * 3 * 5, factor=10)


# One head: scores, weights, mixture


def test_a_head_is_softmax_of_scaled_products_and_a_mask_times_values():
    Q, K, V = normal(1, 3, 4), normal(2, 5, 4), normal(3, 5, 2)
    allowed = np.tri(3, 5, dtype=bool)
    M = np.where(allowed, 0.0, -INF)
    S = Q @ K.T / np.sqrt(4) + M
    A = softmax(jnp.asarray(S), axis=-1)
    assert_close(attend(Q, K, V, allowed), A @ V)
    assert_close(attend(Q, K, V, bias=M), A @ V)
    assert_close(weights(Q, K, allowed), A)
    # Masking comes before softmax: rows sum to 1, which they do not when weights are struck out afterwards.
    assert_close(A.sum(-1), np.ones(3))
    assert (np.where(allowed, softmax(jnp.asarray(Q @ K.T / np.sqrt(4))), 0).sum(-1) < 1).all()
    # Scores are not weights.
    assert (S[allowed] < 0).any() and not np.allclose(S[allowed], A[allowed])


def test_one_query_of_1_0():
    q, K, V = array([1, 0]), array([1, 0], [0, 1]), array([2, 0], [0, 2])
    W, out = weights(q, K), attend(q, K, V)
    assert_close(q @ K.T / np.sqrt(2), [[1 / np.sqrt(2), 0]])
    np.testing.assert_allclose(W, [[0.6697615493266569, 0.3302384506733431]], rtol=0, atol=1e-15)
    np.testing.assert_allclose(out, [[1.3395230986533138, 0.6604769013466862]], rtol=0, atol=1e-15)
    assert attend(q, K, V, masks.causal()).tolist() == [[2, 0]]


def test_one_query_of_root_2():
    q, K, V = array([np.sqrt(2), 0]), array([1, 0], [0, 1]), array([10, 0], [0, 20])
    assert_close(q @ K.T / np.sqrt(2), [[1, 0]])
    assert shown(weights(q, K), 3) == [[0.731, 0.269]]
    np.testing.assert_allclose(attend(q, K, V), [[7.311, 5.379]], atol=5e-4)
    first = np.array([[True, False]])
    assert weights(q, K, first).tolist() == [[1, 0]]
    assert attend(q, K, V, first).tolist() == [[10, 0]]


def mixture(scores, values, mask=None):
    """What one query gets whose scores these are."""
    scores, values = jnp.asarray(scores, jnp.float64), jnp.asarray(values, jnp.float64)
    return attend(jnp.ones((1, 1)), scores[:, None], values, mask)[0]


def test_four_values_mixed_by_the_weights_of_masked_scores():
    values = [[1, 0], [0, 2], [1, 1], [-1, 1]]
    out = mixture([0.7, 1.1, 0.2, 9], values, np.array([[True, True, True, False]]))
    np.testing.assert_allclose(out, [0.519, 1.159], atol=1e-3)
    assert_close(out, softmax(MASKED) @ np.array(values, float))
    assert shown(np.array(PRINTED) @ values, 3) == [0.519, 1.16]  # with rounded weights


def test_weights_of_a_quarter_and_three_quarters():
    assert_close(mixture([0, np.log(3)], [[2, 0], [0, 4]]), [0.5, 3])


def test_all_the_weight_on_one_key_gives_exactly_its_value():
    values = [[0.1, -7], [3, 1 / 3]]
    assert mixture([5, 1], values, np.array([[False, True]])).tolist() == values[1]
    assert mixture([2000, 0], values).tolist() == values[0]


def test_equal_scores_give_the_mean_also_after_adding_100():
    values, allowed = [[2, 6], [8, 0], [99, 99]], np.array([[True, True, False]])
    assert mixture([0.4, 0.4, 7], values, allowed).tolist() == [5, 3]
    assert mixture([100.4, 100.4, 107], values, allowed).tolist() == [5, 3]


def test_the_output_has_the_features_of_the_values_where_the_weights_had_keys():
    B, N, T, H, D = 2, 3, 5, 4, 7
    Q, K, V = normal(1, B, T, N, H), normal(2, B, T, N, H), normal(3, B, T, N, D)
    W = attention_weights(Q, K, masks.causal())
    out = attention(Q, K, V, masks.causal())
    assert W.shape == (B, N, T, T) and out.shape == (B, T, N, D)
    assert_close(np.moveaxis(np.asarray(W @ jnp.moveaxis(V, 2, 1)), 1, 2), out, factor=10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_softmax_is_in_float32_and_the_result_in_the_dtype_of_the_query(dtype):
    Q, K, V = (normal(i, 5, 1, 8).astype(jnp.dtype(dtype)) for i in range(3))
    assert attention_weights(Q, K).dtype == "float32"
    assert attention(Q, K, V).dtype == dtype
    Q, K, V = (x.astype(np.float64) for x in (Q, K, V))
    assert_close(attention_weights(*(x.astype(jnp.dtype(dtype)) for x in (Q, K))), attention_weights(Q, K), "float32")


def test_rotary_positions_turn_queries_and_keys_and_never_values():
    Q, K, V = normal(1, 5, 2, 8), normal(2, 5, 2, 8), normal(3, 5, 2, 8)
    near, far = (jattn.rotary(x, positions) for x, positions in ((Q, np.arange(5)), (Q, np.arange(5) + 40)))
    keys, far_keys = jattn.rotary(K, np.arange(5)), jattn.rotary(K, np.arange(5) + 40)
    # Only distances matter, so moving the whole text changes nothing, while one position more for the queries does.
    assert_close(attention(far, far_keys, V), attention(near, keys, V), factor=100)
    assert not np.allclose(attention(jattn.rotary(Q, np.arange(5) + 1), keys, V), attention(near, keys, V))
    # The values come through as they are, with all the weight on one of them.
    assert_close(attention(near, keys, V, masks.window(0, 0)), V)


def test_the_root_of_the_features_keeps_the_scores_of_independent_features_at_variance_1():
    for H in (16, 256):
        S = normal(1, 200, H) @ normal(2, 200, H).T
        assert abs(S.var() / H - 1) < 0.1
        assert abs((S / np.sqrt(H)).var() - 1) < 0.1
        # Features that are all the same are H times one feature: the assumption is gone, and so is the variance 1.
        S = np.tile(normal(1, 200, 1), H) @ np.tile(normal(2, 200, 1), H).T / np.sqrt(H)
        assert abs(S.var() / H - 1) < 0.3


def test_a_scaled_product_is_no_universal_measure_of_similarity():
    # The same direction, twice as long: other weights. And a key that points elsewhere beats the query itself.
    q, K = array([1, 0]), array([1, 0], [10, 10])
    assert not np.allclose(weights(q, array([1, 0], [0, 1])), weights(2 * q, array([1, 0], [0, 1])))
    assert weights(q, K)[0, 1] > 0.99


def test_every_step_of_one_query_can_be_followed_key_by_key():
    Q, K, V = normal(1, 4, 3), normal(2, 4, 3), normal(3, 4, 2)
    for t in range(4):
        raw = K @ Q[t] / np.sqrt(3)
        after_mask = np.where(np.arange(4) <= t, raw, -INF)
        weight = softmax(jnp.asarray(after_mask))
        assert_close(weight, weights(Q, K, masks.causal())[t])
        assert_close((weight[:, None] * V).sum(0), attend(Q, K, V, masks.causal())[t])


# Masks and policies


def test_a_causal_mask_permits_the_keys_up_to_the_query():
    W = np.asarray(weights(normal(1, 3, 2), normal(2, 3, 2), masks.causal()))
    assert W[0].tolist() == [1, 0, 0]
    np.testing.assert_array_equal(W > 0, np.tri(3, dtype=bool))
    assert_close(W.sum(-1), np.ones(3))


def test_a_mask_states_which_information_is_available():
    Q, K, V = normal(1, 3, 2), normal(2, 3, 2), normal(3, 3, 2)
    out = attend(Q, K, V, masks.causal())
    K[2], V[2] = 100, 1e6  # the future turns out otherwise
    changed = attend(Q, K, V, masks.causal())
    np.testing.assert_array_equal(changed[:2], out[:2])
    assert not np.allclose(changed[2], out[2])


def test_a_head_that_sees_the_future_has_a_loss_that_looks_low():
    T, F = 32, 8
    tokens = np.random.default_rng(0).integers(0, F, T)
    place, value = 5 * np.eye(T), np.eye(F)[tokens]

    def loss(mask):
        # A query at t asks for what stands at t + 1, and what it finds is the prediction.
        found = attend(np.roll(place, 1, axis=1), place, value, mask, scale=1.0)[:-1]
        return -np.log(0.99 * np.asarray(found) + 0.01 / F)[np.arange(T - 1), tokens[1:]].mean()

    assert loss(None) < 0.02
    assert loss(masks.causal(1)) < 0.02  # off by one: the same mistake
    assert loss(masks.causal()) > np.log(F)  # what it has when it generates


def test_a_check_by_derivatives_catches_a_head_that_sees_the_future():
    x = jnp.asarray(normal(1, 5, 3))

    def sees(mask):
        """bool (T, T): which inputs an output has a derivative to."""
        jacobian = jax.jacrev(lambda x: attend(x, x, x, mask))(x)
        return (np.asarray(jacobian) != 0).any((1, 3))

    future = np.triu(np.ones((5, 5), bool), 1)
    assert not sees(masks.causal())[future].any()
    assert sees(None)[future].all()
    assert sees(masks.causal(1))[future].sum() == 4


def test_rows_with_nothing_to_see_have_a_policy_that_is_stated():
    Q, K, V = normal(1, 3, 2), normal(2, 3, 2), normal(3, 3, 2)
    nothing = np.array([[True, True, True], [False, False, False], [True, False, False]])
    out = np.asarray(attend(Q, K, V, nothing, empty="zero"))
    assert not out[1].any() and out[[0, 2]].all()
    for f in (lambda: attend(Q, K, V, nothing, empty="raise"), lambda: softmax(array(-INF, -INF), empty="raise")):
        with pytest.raises(ValueError, match="empty='raise'"):
            f()
    assert softmax(array(-INF, -INF)).tolist() == [0, 0]


def test_empty_lists_and_numbers_that_are_none_have_a_rule_too():
    assert softmax(array()).shape == (0,)
    assert attend(np.ones((3, 2)), np.ones((0, 2)), np.ones((0, 4))).tolist() == [[0] * 4] * 3
    assert np.isnan(softmax(array(0, np.nan))).all() and np.isnan(softmax(array(0, INF))).all()
    assert softmax(array(0, np.nan), where=np.array([True, False])).tolist() == [1, 0]


# Many heads, and what weights do not say


def test_heads_make_their_own_mixtures_and_a_projection_combines_them():
    Q, K, V, project = normal(1, 3, 2, 4), normal(2, 3, 2, 4), normal(3, 3, 2, 4), normal(4, 2, 4, 5)
    combined = jnp.einsum("tnd,ndf->tf", attention(Q, K, V, masks.causal()), project)
    by_head = [attend(Q[:, n], K[:, n], V[:, n], masks.causal()) @ project[n] for n in range(2)]
    assert_close(combined, by_head[0] + by_head[1], factor=10)


def test_averaging_heads_hides_opposite_heads():
    # Two heads that look at opposite keys, and two that look at both.
    K = 1100 * np.eye(2)[:, None]
    opposite = np.array([[[1.0, 0], [0, 1]]])
    both = np.array([[[0.5, 0.5], [0.5, 0.5]]])
    W, W_both = (attention_weights(Q, K)[:, 0] for Q in (opposite, both))
    assert W.tolist() == [[1, 0], [0, 1]] and W_both.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert W.mean(0).tolist() == W_both.mean(0).tolist() == [0.5, 0.5]
    V = np.array([[[1.0]], [[-1.0]]])
    assert attention(opposite, K, V)[0, :, 0].tolist() == [1, -1]
    assert attention(both, K, V)[0, :, 0].tolist() == [0, 0]


def test_a_large_weight_on_a_tiny_value_moves_nothing():
    scores, values = [np.log(99), 0], [[1e-3], [10]]
    W = softmax(array(*scores))
    assert_close(W, [0.99, 0.01])
    moved = np.asarray(W)[:, None] * values
    assert_close(mixture(scores, values), moved.sum(0))
    assert moved[1] > 100 * moved[0]


def test_different_weights_can_give_one_output():
    values = [[0, 4], [1, 4], [2, 4]]
    one, two = [0, -INF, 0], [-INF, 0, -INF]
    assert softmax(array(*one)).tolist() != softmax(array(*two)).tolist()
    allowed = [np.isfinite([scores]) for scores in (one, two)]
    assert mixture([0] * 3, values, allowed[0]).tolist() == mixture([0] * 3, values, allowed[1]).tolist() == [1, 4]
