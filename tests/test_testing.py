"""assert_causal and assert_visible: real leaks are named, clean models raise no alarm, and promises about cost hold."""

import functools

import glassllm
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ENGINES

from jattn import __main__ as demo
from jattn import attend, attention, masks, testing

NAN = "NaN with NaN put there. A weight of 0 does not hide it: 0 * NaN is NaN."


def normal(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def leak(assertion, *args, **options):
    """What the assertion says, after who says it."""
    with pytest.raises(AssertionError) as error:
        assertion(*args, **options)
    who, _, message = str(error.value).partition(": ")
    assert who == assertion.__name__
    return message


def dependence(output, input, got):
    return f"output {output} must not depend on input {input}, got {got}"


# Real leaks. Each function is (T, F) -> (T, F) with T = 6.

x6 = normal(6, 3)
CAUSAL = np.tri(6, dtype=bool)


def mask_off_by_one(x):
    return x + attend(x, x, x, masks.causal(offset=1))


def mask_after_softmax(x):
    weights = jnp.where(CAUSAL, jax.nn.softmax(x @ x.T), np.float32(0))
    return weights @ x


def normalised_over_time(x):
    return (x - x.mean(0, keepdims=True)) / (x.std(0, keepdims=True) + np.float32(1e-3))


def cache_offset_forgotten(x):
    """Two chunks of three tokens, the second with the first in its cache: its keys say that they are at 0, 1, 2."""
    first = attend(x[:3], x[:3], x[:3], masks.causal())
    positions = {"query_positions": jnp.arange(3, 6), "key_positions": jnp.array([0, 1, 2, 0, 1, 2])}
    return jnp.concatenate([first, attend(x[3:], x, x, masks.causal(), **positions)])


def convolution_around_the_token(x):
    return jnp.stack([jnp.convolve(column, jnp.array([1, 2, 3], x.dtype), mode="same") for column in x.T], 1)


def positions_reversed(x):
    positions = jnp.arange(6)[::-1]
    return attend(x, x, x, masks.causal(), query_positions=positions, key_positions=positions)


def read_backwards(x):
    return jax.lax.scan(lambda state, now: (state + now,) * 2, jnp.zeros_like(x[0]), x, reverse=True)[1]


LEAKS = {
    "the mask is off by one": (mask_off_by_one, 0, 1),
    "the mask comes after the softmax": (mask_after_softmax, 0, 1),
    "a normalisation over time": (normalised_over_time, 0, 1),
    "the offset of a cache is forgotten": (cache_offset_forgotten, 3, 4),
    "a convolution around the token": (convolution_around_the_token, 0, 1),
    "the mean over time": (lambda x: x + x.mean(0, keepdims=True), 0, 1),
    "positions are reversed": (positions_reversed, 0, 1),
    "a recurrence that runs backwards": (read_backwards, 0, 1),
    "a shift that wraps around": (lambda x: jnp.roll(x, 1, 0), 0, 5),
}


def first_by_differences(fn, x):
    """The first output that a step of a later input changes, and that input."""
    pairs = []
    for input in range(len(x)):
        step = np.zeros(x.shape, np.float32)
        step[input] = 0.5
        changed = np.any(np.asarray(fn(x + step)) != np.asarray(fn(x)), axis=1)
        pairs += [(output, input) for output in np.flatnonzero(changed[:input])]
    return min(pairs)


@pytest.mark.parametrize(("fn", "output", "input"), LEAKS.values(), ids=LEAKS)
def test_a_real_leak_is_named(fn, output, input):
    assert first_by_differences(fn, x6) == (output, input)
    message = leak(testing.assert_causal, fn, x6)
    assert message.startswith(dependence(output, input, "a derivative of "))
    assert message.endswith(" (reverse mode).")


# What is real sees what is real, and padding sees itself, too: its query is its own.
PADDED = masks.lengths(key=4) | masks.window(0, 0)


def test_a_padding_mask_on_the_wrong_axis_is_named():
    message = leak(testing.assert_visible, lambda x: attend(x, x, x, masks.lengths(query=4)), x6, PADDED)
    assert message.startswith(dependence(0, 4, "a derivative of "))


def test_the_same_padding_mask_on_the_right_axis_is_clean():
    testing.assert_visible(lambda x: attend(x, x, x, masks.lengths(key=4)), x6, PADDED)


def test_the_mask_of_another_library_that_multiplies_by_zero_is_named():
    fn = lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True)  # noqa: E731
    message = leak(testing.assert_causal, fn, normal(1, 6, 2, 3), axis=1)
    assert message == dependence(0, 1, NAN)


# Clean models.


def transformer(x, params, **how):
    """(B, T, F): two layers with residuals, norms, two heads and an MLP."""

    def normed(x):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + jnp.asarray(1e-5, x.dtype))

    for w in params:
        query, key, value = (jnp.einsum("btf,fnh->btnh", normed(x), w[name]) for name in ("q", "k", "v"))
        x = x + attention(query, key, value, masks.causal(), **how).reshape(x.shape)
        x = x + jax.nn.relu(normed(x) @ w["up"]) @ w["down"]
    return x


def params(dtype):
    shapes = {"q": (4, 2, 2), "k": (4, 2, 2), "v": (4, 2, 2), "up": (4, 8), "down": (8, 4)}
    return [{name: normal(*shape, dtype=dtype, seed=i) for name, shape in shapes.items()} for i in (1, 2)]


@pytest.mark.parametrize(
    ("engine", "dtype"), [("dense", np.float32), ("dense", jnp.bfloat16), ("blockwise", np.float32)]
)
def test_a_clean_transformer_raises_no_alarm(engine, dtype):
    fn = functools.partial(transformer, params=params(dtype), **ENGINES[engine])
    testing.assert_causal(fn, normal(2, 7, 4, dtype=dtype), axis=1)


def test_a_leak_in_bfloat16_is_named():
    leaky = lambda x: x + x.mean(1, keepdims=True)  # noqa: E731
    message = leak(testing.assert_causal, leaky, normal(2, 8, 4, dtype=jnp.bfloat16), axis=-2)
    assert message == dependence(0, 1, "a derivative of 0.125 (reverse mode).")


@functools.cache
def real_decoder():
    model, tokenizer = glassllm.load_pretrained("en")
    weights = {name: jnp.asarray(tensor.data) for name, tensor in model.named_parameters().items()}
    return weights, jnp.array(tokenizer.encode(demo.SENTENCE)), model.cfg


class Embedded:
    """An embedding that has been looked up, in the place of one that is to be."""

    def __init__(self, x, table):
        self.x, self.T = x, table.T

    def __getitem__(self, ids):
        return self.x


def test_a_real_decoder_of_token_ids_raises_no_alarm():
    weights, ids, config = real_decoder()
    # Its queries, keys and values, too: the output is a pytree.
    testing.assert_causal(lambda ids: demo.decoder(weights, ids, config), ids)


def test_a_real_decoder_of_embeddings_raises_no_alarm():
    weights, ids, config = real_decoder()
    table = weights["E"]
    fn = lambda x: demo.decoder(weights | {"E": Embedded(x, table)}, ids, config)[0]  # noqa: E731
    testing.assert_causal(fn, table[ids])


CLEAN = {
    "a sum so far": lambda x: jnp.cumsum(x, 0),
    "a shift": lambda x: jnp.concatenate([jnp.zeros_like(x[:2]), x[:-2]]),
    "units that are dead": lambda x: jax.nn.relu(x - 100),
    "units that are dead, NaN too": lambda x: jnp.where(x > 100, x, jnp.zeros_like(x)),
    "steps": lambda x: jnp.sign(x),
    "jitted": jax.jit(lambda x: x * 2),
    "minus infinity at the start": lambda x: jnp.where(jnp.arange(6)[:, None] < 2, -jnp.inf, x),
}


@pytest.mark.parametrize("fn", CLEAN.values(), ids=CLEAN)
def test_a_clean_function_raises_no_alarm(fn):
    testing.assert_causal(fn, x6)


# What is found, exactly.


def mixed(matrix):
    """A linear function that reads only what has weight, and what its derivatives are."""
    columns = [[(s, w) for s, w in enumerate(row) if w] for row in matrix]
    return lambda x: jnp.stack([sum((x[s] * x.dtype.type(w) for s, w in row), jnp.zeros_like(x[0])) for row in columns])


@pytest.mark.parametrize("leaks", [[(0, 1)], [(3, 4)], [(0, 4), (2, 3)], [(1, 4), (1, 3), (2, 3)]], ids=str)
def test_the_first_pair_is_named_with_its_derivative(leaks):
    matrix = np.tri(5)
    for i, (output, input) in enumerate(leaks):
        matrix[output, input] = -0.125 * (i + 1)
    output, input = min(leaks)
    message = leak(testing.assert_causal, mixed(matrix), normal(5))
    assert message == dependence(output, input, f"a derivative of {abs(matrix[output, input])} (reverse mode).")


@pytest.mark.parametrize("hidden", [(2, 0), (0, 6), (3, 3)], ids=str)
def test_any_mask_is_held_to_pair_by_pair(hidden):
    rng = np.random.default_rng(3)
    mask = rng.random((4, 7)) < 0.5
    mask[hidden] = True
    matrix = np.where(mask, 0.5, 0)
    testing.assert_visible(mixed(matrix), normal(7), mask)
    mask[hidden] = False
    message = leak(testing.assert_visible, mixed(matrix), normal(7), mask)
    assert message == dependence(*hidden, "a derivative of 0.5 (reverse mode).")


def test_the_first_pair_is_named_where_rows_of_the_mask_do_not_nest():
    mask = np.array([[1, 1, 1, 0, 1], [1, 0, 1, 0, 1], [1, 1, 1, 0, 1]]) == 1
    matrix = np.where(mask, 1.0, 0)
    # Row 0 is tried first, and shows the third output. The second one comes before.
    matrix[2, 3] = matrix[1, 1] = 2
    assert leak(testing.assert_visible, mixed(matrix), normal(5), mask) == dependence(
        1, 1, "a derivative of 2 (reverse mode)."
    )


def test_features_and_leaves_do_not_cancel():
    # Of two features that are read with opposite signs the sum is no leak's derivative: each is.
    both = lambda x: {"a": x.at[:-1, 0].add(x[1:, 1]), "b": (x.at[:-1, 0].add(-x[1:, 1]),)}  # noqa: E731
    message = leak(testing.assert_causal, both, x6)
    assert message == dependence(0, 1, "a derivative of 1 (reverse mode).")


# How it is found.


@jax.custom_vjp
def own_reverse_mode(x):
    return x


own_reverse_mode.defvjp(lambda x: (x, None), lambda _, g: (g + jnp.roll(g, 1, 0) * 0.25,))


def no_reverse_mode(x):
    """The sum of the token and the next, by a loop that JAX cannot run backwards."""
    both = x + jnp.roll(x, -1, 0).at[-1].set(0)
    return jax.lax.while_loop(lambda state: state[0] < 1, lambda state: (state[0] + 1, both), (0, x))[1]


def next_is(condition):
    """The token, or twice the token where the next one is so: no derivative shows it."""
    return lambda x: x.at[:-1].set(jnp.where(condition(x[1:]), 2 * x[:-1], x[:-1]))


FOUND = {
    "a derivative rule that leaks": (own_reverse_mode, "a derivative of 0.25 (reverse mode)."),
    "no reverse mode": (no_reverse_mode, "a derivative of 1 (forward mode)."),
    "a weight of zero": (lambda x: x + 0 * x.sum(0, keepdims=True), NAN),
    "is it NaN": (next_is(jnp.isnan), "a change of 1 with NaN put there."),
    "is it inf": (next_is(lambda x: x == jnp.inf), "a change of 1 with inf put there."),
    "is it -inf": (next_is(lambda x: x == -jnp.inf), "a change of 1 with -inf put there."),
    "is it huge": (next_is(lambda x: (x > 1e30) & (x < jnp.inf)), "a change of 1 with the largest number put there."),
    "is it as low": (
        next_is(lambda x: (x < -1e30) & (x > -jnp.inf)),
        "a change of 1 with minus the largest number put there.",
    ),
    "is it another": (next_is(lambda x: (x != 1) & (abs(x) < 1e30)), "a change of 1 with other numbers put there."),
}


@pytest.mark.parametrize(("fn", "got"), FOUND.values(), ids=FOUND)
def test_it_says_what_showed_it(fn, got):
    assert leak(testing.assert_causal, fn, jnp.ones((5, 2))) == dependence(0, 1, got)


def test_a_nan_among_many_numbers_is_seen():
    # XLA:CPU leaves it out of a maximum of so many.
    fn = lambda x: x.at[:, :, :1].add(0 * x[:, :, :1].sum(1, keepdims=True))  # noqa: E731
    assert leak(testing.assert_causal, fn, jnp.ones((2, 64, 64)), axis=1) == dependence(0, 1, NAN)


def test_a_derivative_that_is_nan_is_a_leak():
    # The root of 0 turns a cotangent of 0 into NaN.
    assert leak(testing.assert_causal, lambda x: jnp.sqrt(abs(x)), jnp.array([1.0, 1.0, 0.0])) == dependence(
        0, 2, "a derivative of nan (reverse mode)."
    )


def test_a_rounding_error_of_a_sum_is_no_derivative():
    # One minus the other is 0 for each output, and not for their sum.
    @jax.custom_vjp
    def fn(x):
        return x

    def back(_, g):
        total = jnp.cumsum(g)[-1] - jnp.cumsum(g[::-1])[-1]
        return (g.at[-1].add(jnp.where(jnp.sum(g != 0) > 1, total + np.float32(1e-9), 0)),)

    fn.defvjp(lambda x: (x, None), back)
    testing.assert_causal(fn, normal(9))


# Token ids, and other arrays without derivatives.

TABLE = normal(7, 3)
IDS = jnp.array([2, 5, 5, 3, 2, 4])


def embedded(ids):
    return TABLE[ids]


def test_token_ids_are_tried_with_others():
    testing.assert_causal(lambda ids: jnp.cumsum(embedded(ids), 0), IDS)
    message = leak(testing.assert_causal, lambda ids: embedded(ids) + embedded(ids).mean(0, keepdims=True), IDS)
    assert message.startswith(dependence(0, 1, "a change of "))
    assert message.endswith(" with other numbers put there.")


@pytest.mark.parametrize("ids", [IDS, jnp.full(6, 6), jnp.zeros(6, np.uint8)], ids=["some", "all the last", "all 0"])
def test_other_token_ids_are_within_the_range_of_those_there(ids):
    seen = []

    def fn(ids):
        jax.debug.callback(lambda ids: seen.append(np.asarray(ids)), ids)
        return embedded(ids)

    testing.assert_causal(fn, ids)
    low, high = (min(ids), max(ids)) if len(set(ids.tolist())) > 1 else (5, 6) if ids[0] else (0, 1)
    assert min(map(np.min, seen)) == low and max(map(np.max, seen)) == high
    # Every one was another one.
    assert np.all([np.any([at[i] != ids[i] for at in seen]) for i in range(6)])


def test_flags_are_turned():
    x = {"flags": jnp.array([[True, False, True, True]]), "x": jnp.ones((2, 4), np.float32)}
    flags = lambda x: x["flags"].astype(np.float32)  # noqa: E731
    testing.assert_causal(lambda x: x["x"] + jnp.cumsum(flags(x), 1), x, axis=1)
    message = leak(testing.assert_causal, lambda x: x["x"] + flags(x).sum(), x, axis=1)
    assert message.startswith(dependence(0, 1, "a change of "))


def test_every_leaf_is_tried():
    x = {"query": normal(6, 3, seed=1), "key": normal(6, 3, seed=2), "value": normal(6, 2, seed=3)}
    fn = lambda mask: lambda x: attend(x["query"], x["key"], x["value"], mask, return_stats=True)  # noqa: E731
    testing.assert_visible(fn(masks.window(2, 0)), x, masks.window(2, 0))
    for name in ("query", "key", "value"):
        message = leak(testing.assert_causal, lambda x, name=name: x["query"] + x[name].sum(), x)
        assert message.startswith(dependence(0, 1, "a derivative of "))


# Outputs must depend on inputs.

CONSTANT = "output {} must depend on some input that it may see, got the same whatever was put there. {}"
IN_VISIBLE = "If it may see none, say so in the mask of assert_visible."
IN_MASK = "If it may see none, say so in the mask."


def test_a_constant_is_named():
    assert leak(testing.assert_causal, jnp.ones_like, x6) == CONSTANT.format(0, IN_VISIBLE)
    assert leak(testing.assert_visible, jnp.ones_like, x6, masks.causal()) == CONSTANT.format(0, IN_MASK)


@pytest.mark.parametrize("output", [1, 5])
def test_an_output_that_ignores_all_is_named(output):
    message = leak(testing.assert_causal, lambda x: x.at[output].set(0), x6)
    assert message == CONSTANT.format(output, IN_VISIBLE)


def test_an_output_that_may_see_nothing_is_to_be_constant():
    shift = lambda x: jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])  # noqa: E731
    testing.assert_visible(shift, x6, masks.causal(offset=-1))
    assert leak(testing.assert_visible, shift, x6, masks.causal()) == CONSTANT.format(0, IN_MASK)
    message = leak(testing.assert_visible, lambda x: x, x6, masks.causal(offset=-1))
    assert message == dependence(0, 0, "a derivative of 1 (reverse mode).")
    testing.assert_visible(jnp.zeros_like, x6, jnp.zeros((6, 1), bool))


# Long sequences.


def add_at(output, input):
    return lambda x: x.at[output].add(x[input])


def test_a_leak_of_any_pair_is_found_up_to_64():
    # The last pair, and one in the middle, on the longest sequence of which all is tried.
    for pair in ((62, 63), (40, 41)):
        message = leak(testing.assert_causal, add_at(*pair), normal(64))
        assert message == dependence(*pair, "a derivative of 1 (reverse mode).")


def test_the_positions_that_are_tried_are_those_of_the_docstring():
    for T in (65, 100, 4096):
        chosen = set(testing._chosen(np.arange(T)).tolist())
        assert len(chosen) == 16
        assert chosen >= {0, T - 2, T - 1} | {T * k // 8 - 1 for k in range(1, 9)}
        others = chosen - {0, T - 2, T - 1} - {T * k // 8 - 1 for k in range(1, 9)}
        assert min(np.diff(sorted(others))) != max(np.diff(sorted(others)))


@pytest.mark.parametrize("pair", [(0, 1), (511, 512), (1022, 1023), (100, 900)], ids=str)
def test_a_leak_across_a_position_that_is_tried_is_found(pair):
    assert leak(testing.assert_causal, add_at(*pair), normal(1024)) == dependence(
        *pair, "a derivative of 1 (reverse mode)."
    )


def test_a_mask_of_few_different_rows_is_tried_whole():
    mask = np.ones((300, 300), bool)
    mask[177, 203] = False
    message = leak(testing.assert_visible, lambda x: x + x.sum(), normal(300), mask)
    assert message == dependence(177, 203, "a derivative of 1 (reverse mode).")


def test_a_row_is_tried_on_all_outputs_that_may_see_no_more():
    ids = np.repeat([1, 2, 3], 100)
    mask = masks.segments(jnp.asarray(ids))
    mean = lambda x: jnp.stack([x[ids == i].mean() for i in (1, 2, 3)])[ids - 1]  # noqa: E731
    testing.assert_visible(mean, normal(300), mask)
    message = leak(testing.assert_visible, lambda x: mean(x).at[177].add(x[203]), normal(300), mask)
    assert message == dependence(177, 203, "a derivative of 1 (reverse mode).")


def test_the_number_of_calls_does_not_grow_with_the_length():
    def calls(T):
        count = []

        def fn(x):
            jax.debug.callback(lambda: count.append(1))
            return x

        testing.assert_causal(fn, normal(T))
        jax.effects_barrier()
        return len(count)

    assert calls(65) == calls(4096) <= 16 * 10


# Around it.


def test_debug_flags_are_left_as_they_are():
    with jax.debug_nans(True), jax.debug_infs(True):
        testing.assert_causal(lambda x: jnp.cumsum(x, 0), x6)
        testing.assert_visible(lambda x: jnp.cumsum(x, 0), x6, masks.causal())
        with pytest.raises(FloatingPointError):
            jnp.zeros(2) / 0


def test_the_same_call_says_the_same():
    assert leak(testing.assert_causal, mask_after_softmax, x6) == leak(testing.assert_causal, mask_after_softmax, x6)


def test_a_callable_that_cannot_be_hashed_is_a_function():
    class Model:
        def __hash__(self):
            raise TypeError("unhashable")

        def __call__(self, x):
            return x

    testing.assert_causal(Model(), x6)


def test_a_function_without_derivatives_gets_the_error_of_jax():
    fn = lambda x: jax.pure_callback(lambda x: x, x, x)  # noqa: E731
    with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
        testing.assert_causal(fn, x6)


def traced(x):
    jax.jit(lambda x: testing.assert_causal(lambda x: x, x))(x)


def closes_over_traced(x):
    jax.jit(lambda w: testing.assert_causal(lambda x: x * w, x))(x[0, 0])


def traced_mask(x):
    jax.vmap(lambda length: testing.assert_visible(lambda x: x, x, masks.lengths(key=length)))(jnp.arange(2))


causal, visible = testing.assert_causal, testing.assert_visible
OUTSIDE = "must have values, got traced arrays. Call assert_{} outside of jit, vmap and grad."

MISUSES = {
    "the arguments are swapped": (
        lambda: causal(x6, lambda x: x),
        TypeError,
        "assert_causal: fn must be a function, got ArrayImpl.",
    ),
    "an axis that is not there": (
        lambda: causal(lambda x: x, x6, axis=2),
        ValueError,
        "assert_causal: axis must be one of the 2 axes of x, which is (6, 3), got 2.",
    ),
    "an axis that is no integer": (
        lambda: causal(lambda x: x, x6, axis="T"),
        TypeError,
        "assert_causal: axis must be an integer, got 'T'.",
    ),
    "nothing": (
        lambda: causal(lambda x: x, {}),
        ValueError,
        "assert_causal: x must hold an array, got {}.",
    ),
    "no positions": (
        lambda: causal(lambda x: x, x6[:0]),
        ValueError,
        "assert_causal: x must hold numbers, got (0, 3).",
    ),
    "complex numbers": (
        lambda: causal(lambda x: x, {"a": x6.astype(np.complex64)}),
        TypeError,
        "assert_causal: x['a'] must be floating or integer or boolean, got complex64.",
    ),
    "words": (
        lambda: causal(lambda x: x, [x6, "a"]),
        TypeError,
        "assert_causal: x[1] must be an array, got str.",
    ),
    "inputs of different lengths": (
        lambda: causal(lambda x: x["a"], {"a": x6, "b": x6[:5]}),
        ValueError,
        "assert_causal: x['b'] must have T = 6 positions on axis 0, got (5, 3).",
    ),
    "inputs of different lengths, any mask": (
        lambda: visible(lambda x: x["a"], {"a": x6, "b": x6[:5]}, masks.causal()),
        ValueError,
        "assert_visible: x['b'] must have T_in = 6 positions on axis 0, got (5, 3).",
    ),
    "an output of another length": (
        lambda: causal(lambda x: x[1:], x6),
        ValueError,
        "assert_causal: fn(x) must have T = 6 positions on axis 0, got (5, 3). For another length pass a mask to "
        "assert_visible.",
    ),
    "outputs of different lengths": (
        lambda: visible(lambda x: (x, x[1:]), x6, masks.causal()),
        ValueError,
        "assert_visible: fn(x)[1] must have T_out = 6 positions on axis 0, got (5, 3).",
    ),
    "an output without the axis": (
        lambda: causal(lambda x: (x, x.sum()), x6),
        ValueError,
        "assert_causal: axis must be one of the 0 axes of fn(x)[1], which is (), got 0.",
    ),
    "an integer output": (
        lambda: causal(lambda x: x.argmax(1), x6),
        TypeError,
        "assert_causal: fn(x) must be floating, got int64.",
    ),
    "no output": (
        lambda: causal(lambda x: None, x6),
        ValueError,
        "assert_causal: fn(x) must hold an array, got None.",
    ),
    "a NaN in the output": (
        lambda: causal(lambda x: x.at[4, 1].set(jnp.nan), x6),
        ValueError,
        "assert_causal: fn(x) must have no NaN, got one in output 4. It would hide what the output depends on.",
    ),
    "a mask of another shape": (
        lambda: visible(lambda x: x[1:], x6, np.ones((6, 5), bool)),
        ValueError,
        "assert_visible: mask must be (T_out, T_in) = (5, 6), got (6, 5).",
    ),
    "a mask of numbers": (
        lambda: visible(lambda x: x, x6, np.tri(6)),
        TypeError,
        "assert_visible: mask must be boolean (True = may attend), got float64. For a 0/1 mask pass `mask != 0`.",
    ),
    "a mask that is a function": (
        lambda: visible(lambda x: x, x6, lambda t, s: s <= t),
        TypeError,
        "assert_visible: mask must be a rule or an array, got a function. Pass masks.rule(fn).",
    ),
    "a rule of another length": (
        lambda: visible(lambda x: x, x6, masks.segments(jnp.arange(5))),
        ValueError,
        "assert_visible: segments(query_ids=...) must be (T,) = (6,), got (5,).",
    ),
    "inside of jit": (
        lambda: traced(x6),
        TypeError,
        f"assert_causal: x and what fn closes over {OUTSIDE.format('causal')}",
    ),
    "a function that closes over what is traced": (
        lambda: closes_over_traced(x6),
        TypeError,
        f"assert_causal: x and what fn closes over {OUTSIDE.format('causal')}",
    ),
    "a mask inside of vmap": (lambda: traced_mask(x6), TypeError, f"assert_visible: mask {OUTSIDE.format('visible')}"),
}


@pytest.mark.parametrize(("misuse", "kind", "message"), MISUSES.values(), ids=MISUSES)
def test_a_misuse_is_named(misuse, kind, message):
    with pytest.raises(kind) as error:
        misuse()
    assert str(error.value) == message
