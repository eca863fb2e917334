"""The exercises of the lessons: `check` says the first thing that is wrong with an answer, `hint` helps a step further.

An answer is tried on the cases of its exercise, one after another, each with inputs of its own: plain, random and
adversarial ones, the same in every run. Its result must have the type, then the shape, then the values of the
reference, which is NumPy in float64 and shares no code with jattn. Another exercise is another row of EXERCISES.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INF, NAN = np.inf, np.nan
TOLERANCE = 1e-5  # relative to the largest expected number, or to 1: answers may compute in float32


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an answer. NumPy arrays among its arguments are given as JAX arrays."""

    name: str  # what is special about it, as it stands in the message
    args: tuple
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Where something made of the answer is compared and not its result: answer -> function of the same arguments, as
    # its gradient is, and the float64 reference of that.
    made: Callable | None = None
    reference: Callable | None = None


@dataclasses.dataclass(frozen=True)
class Exercise:
    """What is right, what is tried, and what helps."""

    reference: Callable  # of float64 arrays; where it raises, so must the answer
    cases: tuple[Case, ...]
    hints: tuple[str, ...]
    # Where more than one result is right: (result, *args, **options) -> what is wrong with its values, or "".
    judge: Callable | None = None


def check(name, answer):
    """Prints that an answer is correct, or the first thing that is wrong with it."""
    exercise = _exercise("check", name)
    print(f"{name}: {fault(name, answer) or f'correct, on all {len(exercise.cases)} inputs.'}")


def hint(name):
    """Prints the next hint for an exercise. After the last one it begins again."""
    hints = _exercise("hint", name).hints
    given = _GIVEN.get(name, 0) % len(hints)
    _GIVEN[name] = given + 1
    print(f"{name}, hint {given + 1} of {len(hints)}: {hints[given]}")


_GIVEN: dict[str, int] = {}


def fault(name, answer):
    """The first thing that is wrong with an answer, "" if nothing is."""
    exercise = _exercise("check", name)
    if not callable(answer):
        return f"must be a function, got {type(answer).__name__}. Pass the function itself: check({name!r}, {name})."
    for number, case in enumerate(exercise.cases):
        wrong = _fault(exercise, case, answer)
        if wrong is _NOTHING and number == 0:
            return f"nothing is there yet. Write it, run its cell, then this one. hint({name!r}) helps."
        if wrong is _NOTHING:
            wrong = "type: must be a result, got None. Is a `return` missing on one of the ways through?"
        if wrong:
            return f"not yet. {case.name}:\n{_shown_arguments(exercise, case)}  {wrong}"
    return ""


_NOTHING = "nothing"


def _exercise(who, name):
    if name not in EXERCISES:
        raise ValueError(f"{who}: name must be one of {', '.join(EXERCISES)}, got {name!r}.")
    return EXERCISES[name]


def _fault(exercise, case, answer):
    """What is wrong in one case: with an error, with the type, with the shape, with the values; or ""."""
    args = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in case.args]
    exact = [np.asarray(x, np.float64) if _is_floating(x) else np.asarray(x) if _is_array(x) else x for x in args]
    reference = case.reference or exercise.reference
    try:
        with np.errstate(all="ignore"):
            expected, error = reference(*exact, **case.options), None
    except ValueError as raised:
        expected, error = None, raised

    try:
        got = (case.made(answer) if case.made else answer)(*args, **case.options)
    except NotImplementedError:
        return _NOTHING
    except Exception as raised:
        if error is not None and isinstance(raised, ValueError):
            return ""
        must = f"must raise ValueError ({error}), but it" if error else "it"
        return f"{must} raised {type(raised).__name__}: {str(raised).partition(chr(10))[0]}"
    if got is None or got is ...:
        return _NOTHING
    if error is not None:
        return f"must raise ValueError ({error}), got {_shown(got)}."

    expected = np.asarray(expected)
    if wrong := _type_fault(got, expected):
        return f"type: must be {wrong}."
    got = np.asarray(got)
    if got.shape != expected.shape:
        return f"shape: must be {expected.shape}, got {got.shape}."
    if exercise.judge and not case.made:
        wrong = exercise.judge(got, *exact, **case.options)
        return wrong and f"value: {wrong}"
    return _value_fault(got, expected)


def _is_array(x):
    return isinstance(x, np.ndarray | np.generic | jax.Array)


def _is_floating(x):
    return _is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)


# By the kind of the expected result: its numbers as an array and as one, and what counts as such in Python and JAX.
_KINDS = {
    "b": ("an array of bool", "True or False", bool, np.bool_),
    "i": ("an array of integers", "an integer", int, np.integer),
    "f": ("an array of floating numbers", "a floating number", float, np.floating),
}


def _type_fault(got, expected):
    many, one, scalar, dtype = _KINDS[expected.dtype.kind]
    what = many if expected.ndim else one
    if not _is_array(got):
        return "" if type(got) is scalar and expected.ndim == 0 else f"{what}, got {type(got).__name__}"
    return "" if jnp.issubdtype(got.dtype, dtype) else f"{what}, got {got.dtype}"


def _value_fault(got, expected):
    got, expected = (x if x.dtype.kind == "b" else np.asarray(x, np.float64) for x in (got, expected))
    finite = expected[np.isfinite(expected)] if expected.dtype.kind == "f" else np.zeros(0)
    size = max(1.0, np.abs(finite).max(initial=0.0))
    right = np.isclose(got, expected, rtol=0, atol=TOLERANCE * size, equal_nan=True)
    if right.all():
        return ""
    if got.size <= 12:
        return f"value: must be {_shown(expected)}, got {_shown(got)}."
    first = tuple(map(int, np.argwhere(~right)[0]))
    some = f"{int((~right).sum())} of {got.size} numbers are wrong, the first of them"
    return f"value: {some} at {list(first)}, which must be {_shown(expected[first])}, got {_shown(got[first])}."


def _shown_arguments(exercise, case):
    bound = inspect.signature(exercise.reference).bind(*case.args, **case.options)
    return "".join(f"  {name} = {_shown(x)}\n" for name, x in bound.arguments.items())


def _shown(x):
    """An array on one line, four digits a number; a large one by its first numbers and its shape."""
    if not _is_array(x):
        return repr(x)
    x = np.asarray(x)
    if x.size > 12:
        return f"[{', '.join(map(_digits, x.ravel()[:4]))}, ...] of shape {x.shape}"
    return _line(x)


def _line(x):
    return f"[{', '.join(map(_line, x))}]" if x.ndim else _digits(x)


def _digits(x):
    return f"{x + 0:.4g}" if x.dtype.kind == "f" else str(x)  # + 0: a zero without its sign


# Inputs and references


def _array(*numbers):
    return np.array(numbers, np.float64)


def _normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def _softmax(x, axis=-1):
    x = np.moveaxis(x, axis, -1)
    out = np.zeros(x.shape)
    for row in np.ndindex(x.shape[:-1]):
        if (x[row] == -INF).all():
            raise ValueError("no entry of a row may be seen")
        exps = np.exp(x[row] - x[row].max())
        out[row] = exps / exps.sum()
    return np.moveaxis(out, -1, axis)


def _naive_softmax(x):
    exps = np.exp(x)
    return exps / exps.sum(-1, keepdims=True)


def _rows_normalised(weights, tol=1e-9):
    return bool((np.abs(weights.sum(-1) - 1) <= tol).all())


def _entropy(weights):
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


def _attend(query, key, value, mask):
    out = np.zeros((len(query), value.shape[1]))
    for t, seen in enumerate(mask):
        if not seen.any():
            raise ValueError("a query may see no key")
        out[t] = _softmax(key[seen] @ query[t] / np.sqrt(query.shape[1])) @ value[seen]
    return out


def _aim(key, target):
    return 1e4 * key[target]


def _aimed(query, key, target):
    weight = _softmax(key @ query / np.sqrt(key.shape[1]))[target]
    return "" if weight > 0.99 else f"the weight of key {target} must be above 0.99, got {weight:.4g}."


def _unit(key):
    return key / np.linalg.norm(key, axis=-1, keepdims=True)


def _causal_mask(T, S):
    return np.array([[s <= t for s in range(S)] for t in range(T)])


def _padding_mask(lengths, S):
    return np.array([[[[s < length for s in range(S)]]] for length in lengths])


def _masked_softmax(x, where):
    out = np.zeros(x.shape)
    for row in np.ndindex(x.shape[:-1]):
        if where[row].any():
            out[row][where[row]] = _softmax(x[row][where[row]])
    return out


_COTANGENT = _normal(11, 2, 3)


def _pulled_back(answer):
    """The gradient of a sum of an answer's weights, each times a number of its own."""
    return jax.grad(lambda x, where: (answer(x, where) * jnp.asarray(_COTANGENT, x.dtype)).sum())


def _masked_softmax_gradient(x, where):
    weights = _masked_softmax(x, where)
    return weights * (_COTANGENT - (weights * _COTANGENT).sum(-1, keepdims=True))


def _grouped_heads(query, key, value):
    (T, N, _), (S, K, _) = query.shape, key.shape
    heads = [n // (N // K) for n in range(N)]
    seen = np.ones((T, S), bool)
    return np.stack([_attend(query[:, n], key[:, k], value[:, k], seen) for n, k in enumerate(heads)], 1)


def _other_weights(weights, value):
    return weights


def _has_the_same_output(got, weights, value):
    got = np.asarray(got, np.float64)
    if not (got >= -TOLERANCE).all():
        return f"no weight may be negative or NaN, got {_shown(got)}."
    if abs(got.sum() - 1) > TOLERANCE:
        return f"the weights must sum to 1, got {_shown(got)}, which sum to {got.sum():.4g}."
    out, found = weights @ value, got @ value
    if (abs(found - out) > TOLERANCE * max(1.0, np.abs(value).max())).any():
        return f"the output must stay {_shown(out)}, got {_shown(found)}."
    moved = abs(got - weights).sum() / 2
    return "" if moved >= 0.02 else f"at least 0.02 of the weight must be moved, got {moved:.2g}."


def _folded(absorb):
    """What comes of logits (chunks, s) and values (chunks, s, D) that an answer absorbs chunk by chunk: (D,)."""

    def fold(logits, value):
        state = -jnp.inf, jnp.zeros(()), jnp.zeros(value.shape[-1])
        for chunk in zip(logits, value, strict=True):
            state = absorb(*state, *chunk)
            if state is None or state is ...:
                return state
            if not isinstance(state, tuple) or len(state) != 3:
                raise TypeError("an answer must be a tuple of three: peak, total, acc.")
        return state[2] / state[1]

    return fold


def _mixed(logits, value):
    return _softmax(logits.ravel()) @ value.reshape(-1, value.shape[-1])


def _chunks(name, logits):
    return Case(name, (logits, _normal(30, *logits.shape, 2)), made=_folded)


def _merge_parts(outs, lses):
    out = np.zeros(outs.shape[1:])
    for t, seen in enumerate((lses > -INF).T):
        if seen.any():
            out[t] = _softmax(lses[seen, t]) @ outs[seen, t]
    return out


def _decode(query, keys, values, length):
    seen = slice(0, int(length))
    return _attend(query[None], keys[seen], values[seen], np.ones((1, int(length)), bool))[0]


def _slots(seed, written, unwritten, D=3, garbage=0.0):
    """A query, and keys and values of which some are written."""
    keys, values = _normal(seed, written + unwritten, 4), _normal(seed + 1, written + unwritten, D)
    keys[written:], values[written:] = garbage, garbage
    return _normal(seed + 2, 4), keys, values, np.array(written)


_KEYS = _normal(50, 7, 3)


def _of_lse(answer):
    """An answer, asked about the lse of keys of this module."""
    return lambda x, v: answer(lambda x: jax.nn.logsumexp(jnp.asarray(_KEYS, x.dtype) @ x), x, v)


def _hessian_vector(x, v):
    weights = _softmax(_KEYS @ x)
    apart = _KEYS - weights @ _KEYS
    return apart.T @ (weights * (apart @ v))


def _ring_bytes(T, P, K, H, D, size):
    parts = [T // P * K * (H + D) * size] * P
    return sum(parts[1:])  # each part passes through this device but the next one's, which is there already


# The exercises

EXERCISES = {
    # 1. Rows
    "softmax": Exercise(
        _softmax,
        (
            Case("One row", (_array(0.71, 0, -1),)),
            Case("Random rows, along the last axis", (_normal(1, 3, 5),)),
            Case("Random rows, along axis 0", (_normal(2, 3, 5),), {"axis": 0}),
            Case("Random rows, along axis 1 of 3", (_normal(3, 2, 3, 5),), {"axis": 1}),
            Case("Scores whose exp overflows", (_array(1000, 999),)),
            Case("Scores whose exp is 0", (_array(-1000, -1001),)),
            Case("A row far below another", (_array([1000, 999], [-1000, -1001]),)),
            Case("A score of -inf", (_array(0.7, 1.1, 0.2, -INF),)),
            Case("A score of -inf beside a huge one", (_array(1000, -INF),)),
            Case("A row of -inf alone, beside a good one", (_array([0, 1], [-INF, -INF]),)),
        ),
        (
            "Subtract something from every score of a row before exp. Which number makes exp at most 1?",
            "Give max and sum the axis, and keepdims=True, so that each row meets its own peak and its own sum.",
            "A row of -inf has no finite peak. Look for such rows before you compute, and raise ValueError.",
        ),
    ),
    "naive_softmax": Exercise(
        _naive_softmax,
        (
            Case("One row", (_array(np.log(2), 0),)),
            Case("Random rows", (_normal(1, 3, 5),)),
            Case("Scores whose exp overflows, and nothing done about it", (_array(1000, 1000),)),
        ),
        (
            "exp of every score, divided by the sum of its own row.",
            "The sum goes along the last axis; keepdims=True lets it divide its row.",
            "It must fail where exp overflows: inf / inf is nan. Leave it so.",
        ),
    ),
    "rows_normalised": Exercise(
        _rows_normalised,
        (
            Case("Two rows that sum to 1", (_array([0.5, 0.5], [0, 1]),)),
            Case("One row", (_array(0.25, 0.75),)),
            Case("A row that sums to 1.01", (_array([0.5, 0.5], [0.5, 0.51]),)),
            Case("A row that sums to 0.5", (_array([0.5, 0.5], [0.25, 0.25]),)),
            Case("Columns that sum to 1 where rows do not", (_array([1, 1], [0, 0]),)),
            Case("A matrix that sums to 1 where rows do not", (_array([0.25, 0.25], [0.25, 0.25]),)),
            Case("Rows whose sums are 1 on average", (_array([0.75, 0.75], [0.25, 0.25]),)),
            Case("A NaN", (_array([0.5, 0.5], [NAN, 1]),)),
            Case("A wide tolerance", (_array([0.5, 0.5], [0.5, 0.375]),), {"tol": 0.25}),
            Case("Random rows in a batch", (_softmax(_normal(4, 2, 3, 5)),), {"tol": 1e-5}),
        ),
        (
            "Sum each row, along the last axis. How far is each sum from 1?",
            "Both sides count: take the absolute difference, and compare it with tol.",
            "Every row must pass: .all(). A NaN is not within any tolerance, and `<=` knows that.",
        ),
    ),
    "entropy": Exercise(
        _entropy,
        (
            Case("Two equal weights", (_array(0.5, 0.5),)),
            Case("Two rows", (_array([0.5, 0.5], [0.25, 0.75]),)),
            Case("All the weight on one entry", (_array(1, 0, 0),)),
            Case("Random rows in a batch", (_softmax(_normal(5, 2, 3, 5)),)),
            Case("Random rows with weights of 0", (_softmax(_normal(6, 3, 5) + _array(0, -INF, 0, 0, -INF)),)),
        ),
        (
            "-sum(w ln w) along the last axis, with the natural logarithm.",
            "0 ln 0 counts as 0, but log(0) is -inf and 0 * -inf is nan.",
            "jnp.where(w > 0, w, 1) gives the logarithm a 1 in place of every 0, and ln 1 = 0.",
        ),
    ),
    # 2. One head
    "attend": Exercise(
        _attend,
        (
            Case("Two keys", (_array([1, 0]), np.eye(2), 2 * np.eye(2), np.ones((1, 2), bool))),
            Case("3 queries, 5 keys", (_normal(1, 3, 4), _normal(2, 5, 4), _normal(3, 5, 2), np.ones((3, 5), bool))),
            Case("Keys that are hidden", (_normal(4, 3, 4), _normal(5, 5, 4), _normal(6, 5, 2), np.tri(3, 5) > 0)),
            Case(
                "Scores whose exp overflows",
                (1e4 * _array([1, 0], [0, 1]), np.eye(2), 2 * np.eye(2), np.ones((2, 2), bool)),
            ),
            Case(
                "A hidden key with a NaN value",
                (_array([1, 0]), np.eye(2), _array([2, 0], [NAN, 2]), _array([1, 0]) > 0),
            ),
            Case(
                "A query that may see no key",
                (np.eye(2), np.eye(2), np.eye(2), _array([1, 0], [0, 0]) > 0),
            ),
        ),
        (
            "Scores first: every query times every key, divided by the root of the number of features.",
            "The mask comes before softmax: where it is False the score becomes -inf. Then softmax of each row.",
            "The output is weights @ value. But 0 * nan is nan: a value that no query sees must be put out of the way.",
            "For one hidden value: jnp.where(mask.any(0)[:, None], value, 0). A row of the mask without True raises.",
        ),
    ),
    "aim": Exercise(
        _aim,
        (
            Case("Two keys", (np.eye(2), 0)),
            Case("Two keys, the other one", (np.eye(2), 1)),
            Case("Random keys", (_unit(_normal(7, 5, 3)), 3)),
            Case("Keys close together", (_unit(_array([1, 0], [1, 0.2], [1, 0.4])), 1)),
        ),
        (
            "Of all directions, which one has the largest product with a key of length 1?",
            "A direction decides which key wins. By how much it wins is decided by the length of the query.",
            "Keys close together need a long query: try 10_000 times the key.",
        ),
        judge=_aimed,
    ),
    # 3. Masks
    "causal_mask": Exercise(
        _causal_mask,
        (
            Case("3 queries, 3 keys", (3, 3)),
            Case("One query, one key", (1, 1)),
            Case("Fewer queries than keys", (2, 5)),
            Case("More queries than keys", (5, 2)),
        ),
        (
            "Query t may see key s if s <= t: itself included, so that no row is empty.",
            "jnp.arange(T)[:, None] is a column of query positions, jnp.arange(S) a row of key positions: compare.",
        ),
    ),
    "padding_mask": Exercise(
        _padding_mask,
        (
            Case("Lengths 3 and 1 of 4", (np.array([3, 1]), 4)),
            Case("A full sequence and an empty one", (np.array([5, 0, 2]), 5)),
        ),
        (
            "Key s of a sequence is real if s < its length.",
            "The mask must have the axes (B, N, T, S), each full or 1. It is the same for all heads and queries.",
            "lengths[:, None, None, None] has the four axes; compare jnp.arange(S) with it.",
        ),
    ),
    "masked_softmax": Exercise(
        _masked_softmax,
        (
            Case("All visible", (_normal(8, 2, 3), np.ones((2, 3), bool))),
            Case("Some hidden", (_normal(9, 2, 3), _array([1, 0, 1], [0, 1, 0]) > 0)),
            Case("Scores whose exp overflows", (_array([1000, 999, 0]), _array([1, 1, 0]) > 0)),
            Case("A hidden score far above the visible ones", (_array([1000, -1000, -1001]), _array([0, 1, 1]) > 0)),
            Case("A row with nothing visible: zeros", (_normal(10, 2, 3), _array([1, 1, 0], [0, 0, 0]) > 0)),
            Case(
                "Its gradient, beside a row with nothing visible",
                (_normal(10, 2, 3), _array([1, 1, 0], [0, 0, 0]) > 0),
                made=_pulled_back,
                reference=_masked_softmax_gradient,
            ),
            Case("A hidden NaN", (_array([0, NAN, 1]), _array([1, 0, 1]) > 0)),
        ),
        (
            "Put -inf where nothing may be seen, take the peak of each row, subtract, exp, and divide by the sum.",
            "An empty row has peak -inf and sum 0. Put a 0 in place of such a peak and a 1 in place of such a sum.",
            "A sum lets everything through: x + (-inf) is nan where x is, and so is its gradient in an empty row.",
            "jnp.where(where, x, -jnp.inf), before all else that is done to x, lets nothing hidden through either way.",
        ),
    ),
    # 4. Heads
    "grouped_heads": Exercise(
        _grouped_heads,
        (
            Case("One head", (_normal(20, 3, 1, 4), _normal(21, 5, 1, 4), _normal(22, 5, 1, 2))),
            Case("2 heads with keys of their own", (_normal(20, 3, 2, 4), _normal(21, 5, 2, 4), _normal(22, 5, 2, 3))),
            Case("3 heads that share all keys", (_normal(20, 2, 3, 4), _normal(21, 5, 1, 4), _normal(22, 5, 1, 7))),
            Case("6 query heads, 2 key heads", (_normal(20, 3, 6, 4), _normal(21, 5, 2, 4), _normal(22, 5, 2, 7))),
            Case("As many queries as heads", (_normal(20, 4, 4, 4), _normal(21, 4, 2, 4), _normal(22, 4, 2, 4))),
        ),
        (
            "Split the axis of query heads into groups: query.reshape(T, K, N // K, H).",
            "Within a group only the query is mapped: jax.vmap(attend, in_axes=(1, None, None), out_axes=1).",
            "Map that over the K groups: axis 1 of all three goes in, axis 1 comes out. Then join K and G again.",
        ),
    ),
    "other_weights": Exercise(
        _other_weights,
        (
            Case("The third value is the mean", (_array(0.25, 0.25, 0.5), _array([1], [0], [0.5]))),
            Case("4 keys, 1 feature", (_array(0.4, 0.3, 0.2, 0.1), _array([1], [-1], [3], [0]))),
            Case("Random: 6 keys, 2 features", (_softmax(_normal(23, 6)), _normal(24, 6, 2))),
            Case("Large values", (_softmax(_normal(25, 8)), 1e3 * _normal(26, 8, 3))),
        ),
        (
            "Add something to the weights that sums to 0, and that the values turn into 0.",
            "So you need a direction d with d @ value = 0 and d.sum() = 0: D + 1 equations, S > D + 1 unknowns.",
            "jnp.linalg.svd(jnp.c_[value, jnp.ones(S)].T)[2][-1] is such a direction.",
            "Go along it as far as all weights stay at 0 or above: the smallest of weights / -d where d < 0.",
        ),
        judge=_has_the_same_output,
    ),
    # 5. Long sequences
    "absorb_chunk": Exercise(
        _mixed,
        (
            _chunks("One chunk", _array([1, 3, 2])),
            _chunks("Two chunks, the peak in the first", _array([5, 1], [2, 3])),
            _chunks("Two chunks, the peak in the second", _array([2, 3], [5, 1])),
            _chunks("Random chunks", 3 * _normal(31, 5, 7)),
            _chunks("Logits whose exp overflows", _array([1000, 999], [1001, 1000])),
            _chunks("Logits whose exp is 0", _array([-1000, -1001], [-999, -1000])),
            _chunks("A chunk in which everything is masked", _array([1, 2], [-INF, -INF])),
            _chunks("A first chunk in which everything is masked", _array([-INF, -INF], [1, 2])),
        ),
        (
            "The new peak is the larger of the old one and the largest logit of the chunk.",
            "The old sums fade by exp(old peak - new peak); the chunk adds exp(logits - new peak), and that @ value.",
            "Before the first key that is seen, peak is -inf, and -inf - -inf is nan. For such a new peak subtract 0.",
        ),
    ),
    "merge_parts": Exercise(
        _merge_parts,
        (
            Case("Two parts with as much in each", (_array([[2, 0]], [[0, 4]]), np.zeros((2, 1)))),
            Case("Random parts", (_normal(32, 3, 5, 2), _normal(33, 3, 5))),
            Case("Large lses", (_array([[1]], [[3]]), _array([1000], [999]))),
            Case("A part that has seen nothing", (_array([[1]], [[3]]), _array([0.5], [-INF]))),
            Case("A part that has seen nothing and holds NaN", (_array([[1]], [[NAN]]), _array([0.5], [-INF]))),
            Case("Nothing seen by any part", (_array([[1], [2]], [[3], [4]]), _array([0, -INF], [0, -INF]))),
        ),
        (
            "Each part counts by exp(lse): divided by their sum, that is a softmax over the parts, axis 0.",
            "Subtract the largest lse of a query first; where all are -inf, subtract 0.",
            "0 * nan is nan: put a 0 in place of the outs of parts that have seen nothing.",
            "A query without anything has the sum 0: divide by 1 there.",
        ),
    ),
    # 6. In a pipeline
    "decode": Exercise(
        _decode,
        (
            Case("All slots written", _slots(40, 5, 0), made=jax.jit),
            Case("3 of 5 slots written, zeros in the others", _slots(41, 3, 2), made=jax.jit),
            Case("One slot written", _slots(42, 1, 4), made=jax.jit),
            Case("Huge numbers in the other slots", _slots(43, 4, 3, garbage=1e30), made=jax.jit),
            Case("NaN in the other slots", _slots(44, 4, 3, garbage=NAN), made=jax.jit),
        ),
        (
            "A length without a value cannot cut an array. A mask can: jnp.arange(C) < length.",
            "jattn has that mask: masks.lengths(key=length). attend wants queries (T, H): query[None], then [0].",
            "By hand: -inf before softmax hides a weight, but 0 * nan is nan. jnp.where hides the values too.",
        ),
    ),
    "hessian_vector": Exercise(
        _hessian_vector,
        (
            Case("The lse of 7 keys, along one axis", (_array(0.1, -0.2, 0.3), _array(1, 0, 0)), made=_of_lse),
            Case("Along a random direction", (_normal(51, 3), _normal(52, 3)), made=_of_lse),
            Case("Along no direction", (_normal(51, 3), np.zeros(3)), made=_of_lse),
            Case("Where one key has all the weight", (100 * _normal(51, 3), _normal(52, 3)), made=_of_lse),
        ),
        (
            "The gradient is a function from (n,) to (n,). The Hessian times v is how it moves as x moves along v.",
            "jax.jvp(function, (x,), (v,)) gives a pair: the function at x, and how it moves along v.",
        ),
    ),
    # 7. Many devices
    "ring_bytes": Exercise(
        _ring_bytes,
        (
            Case("Two devices", (8, 2, 1, 4, 4, 2)),
            Case("Values with other features than keys", (12, 3, 2, 4, 6, 4)),
            Case("Eight devices", (1024, 8, 2, 64, 64, 2)),
            Case("One device", (16, 1, 2, 4, 4, 2)),
            Case("A token for each device", (5, 5, 1, 3, 2, 4)),
        ),
        (
            "A device has keys (T / P, K, H) and values (T / P, K, D). How many bytes is that?",
            "In each step it sends as much as it has. After how many steps has its own part been everywhere else?",
            "Not P: the part need not come home. T // P is an integer, T / P a float.",
        ),
    ),
}
