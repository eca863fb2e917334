"""Attention over several devices: the ring, zigzag, all-to-all, sharded caches, and shardings that stay.

Flags of XLA are read once, so what needs eight devices runs in processes of its own, from tests/ring_devices.py.
"""

import functools
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring_reports
from battery import normal
from test_field_reports import SIXTY

from jattn import attention, biases, masks, ring

HERE = os.path.dirname(os.path.abspath(__file__))


def process(*calls, first="", devices=8, module="ring_devices"):
    """A process of its own that makes these calls of a module, one after another, and says that it has."""
    code = f"{first}\nimport {module} as r\n" + "".join(f"r.{call}\nprint('done')\n" for call in calls)
    path = os.pathsep.join([os.path.dirname(HERE), HERE])
    # LLVM optimizes nothing, because these programs take longer to compile than to run.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def passes(*calls, **module):
    ran = process(*calls, **module)
    try:
        stdout, stderr = ran.communicate(timeout=300)
    finally:
        ran.kill()
        ran.wait()
    assert ran.returncode == 0 and stdout.split() == ["done"] * len(calls), stderr[-3000:]


def test_every_option_at_once_is_as_on_one_device():
    passes("everything_agrees(2, 4, 8)")


def test_forward_mode_and_second_order_are_as_on_one_device():
    passes("derivatives_agree(2)")


def test_zigzag_positions_and_arrays_are_as_on_one_device():
    passes("positions_agree(4, 'float64', 10)", "positions_agree(8, 'float32', 0.5)")
    passes("arrays_agree(2)", "zigzag_keeps_shardings(4)")


def test_bad_tokens_and_empty_rows_stay_where_they_are_seen():
    passes("bad_tokens_stay_where_they_are_seen(4)", "empty_rows_raise_under_checkify(2)")


def test_a_device_holds_and_reads_no_more_than_it_needs():
    passes(
        "invisible_blocks_are_skipped_and_a_zigzag_is_balanced(4)",
        "blocks_are_sent_in_time_and_no_further_than_they_are_used(4)",
        "memory_is_that_of_a_part(8)",
    )


def test_heads_for_tokens_and_a_sharded_cache_are_as_on_one_device():
    passes("all_to_all_agrees(2)", "a_sharded_cache_agrees(4)")


def test_shardings_of_batch_and_heads_stay():
    passes("shardings_of_batch_and_heads_stay(4)")


def test_two_processes_are_as_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # Before anything else of JAX.
    joined = "import jax; jax.distributed.initialize({!r}, num_processes=2, process_id={})"
    ran = [process("two_processes_agree()", first=joined.format(address, rank), devices=2) for rank in (0, 1)]
    try:
        found = [one.communicate(timeout=120) for one in ran]
    finally:
        # What one waits for, the other may never do.
        for one in ran:
            one.kill()
            one.wait()
    # Gloo says something first.
    assert all(stdout.endswith("done\n") for stdout, _ in found), "\n".join(stderr[-2000:] for _, stderr in found)


# Field reports, as in tests/test_field_reports.py

REPORTED = {
    "one_head_is_as_reported": 4,
    "masks_are_as_reported": 4,
    "zeros_are_sizes": 4,
    "tails_that_divide_nothing_are_as_reported": 2,
    "half_precision_is_as_reported": 4,
    "derivatives_are_as_reported": 2,
    "softcaps_are_as_reported": 2,
    "gradients_of_a_bias_are_as_reported": 2,
    "heads_are_as_reported": 2,
    "vmap_is_a_loop": 2,
    "tokens_after_a_past_are_as_reported": 2,
    "dropout_is_as_reported": 2,
    "an_axis_may_be_empty": 2,
}
# What needs no test of its own, or cannot be on a ring.
ELSEWHERE = {
    "C02": "MISUSES: integers are refused",
    "C10": "a function of rows, which no ring has; the lse of an empty row is C32",
    "C36": "everything_agrees: with dropout, statistics are the reference's without; there are no weights",
    "C38": "MISUSES: a mask of floats and a bias that is a mask are refused",
    "C44": "MISUSES: shapes that disagree are refused",
    "C51": "one query cannot be shared; a_sharded_cache_agrees decodes over devices",
    "C72": "test_no_nan_is_made_on_the_way_to_a_finite_result",
    "C75": "MISUSES: heads that do not divide are refused",
    "C84": "memory_is_that_of_a_part",
    "C86": "MISUSES: dropout without a key is refused",
}


def test_no_report_is_left_out():
    met = {report for name in REPORTED for report in getattr(ring_reports, name).__doc__.split()}
    assert met | ELSEWHERE.keys() == set(SIXTY) and not met & ELSEWHERE.keys()


def test_a_ring_is_as_reported():
    passes(*(f"{name}({n})" for name, n in REPORTED.items()), module="ring_reports")


# On a mesh of one device


TOKENS, ALL = jax.P(None, "x"), jax.P()


def around(*args, check_vma=True, **options):
    """A call over one device."""
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
    f = functools.partial(ring.attention, axis_name="x", **options)
    return jax.shard_map(f, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS, check_vma=check_vma)(*args)


def inputs():
    return normal(1, 2, 4, 4, 3), normal(2, 2, 4, 2, 3), normal(3, 2, 4, 2, 5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_device_is_a_ring(check_vma):
    got = around(*inputs(), mask=masks.causal(), check_vma=check_vma)
    np.testing.assert_allclose(got, attention(*inputs(), masks.causal()), atol=1e-12)


def test_no_nan_is_made_on_the_way_to_a_finite_result():
    seen = masks.causal() & masks.array(np.arange(4)[None] > 0)
    query, key, value = inputs()

    # What a caller hid, NaN, goes from one jitted function to the next unless all is one.
    @jax.jit
    def pulled(*args):
        out, pull = jax.vjp(lambda *x: around(*x, mask=seen), *args)
        return out, pull(jnp.ones_like(out))

    with jax.debug_nans(True):
        out, gradient = pulled(query, np.where(np.arange(4)[:, None, None] > 0, key, np.nan), value)
    assert not out[:, 0].any() and all(np.isfinite(x).all() for x in gradient)


# Misuse: for each the exception and its exact words, on four devices that nothing needs: all is said while tracing.


def sharded(
    query=(2, 8, 4, 3), key=(2, 12, 2, 3), value=(2, 12, 2, 5), dtypes=(np.float32,) * 3, specs=(TOKENS,) * 3, **options
):  # fmt: skip
    """A call with B = 2, P·T = 8, P·S = 12, N = 4, K = 2, H = 3, D = 5 on P = 4 devices, but for what is named.

    An option that is an array and a spec, a pair, is traced, and sharded so.
    """
    mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arrays = [jnp.zeros(shape, dtype) for shape, dtype in zip((query, key, value), dtypes, strict=True)]
    given = {name: x for name, x in options.items() if isinstance(x, tuple) and any(isinstance(y, jax.P) for y in x)}

    def f(query, key, value, *rest):
        named = {"axis_name": "x"} | options | dict(zip(given, rest, strict=True))
        return ring.attention(query, key, value, **named)

    specs = *specs, *(spec for _, spec in given.values())
    whole = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return jax.eval_shape(whole, *arrays, *(jnp.asarray(x) for x, _ in given.values()))


def bools(*shape):
    return np.ones(shape, bool)


NO_AXIS = "ring.attention: axis_name must be a mesh axis of the call, got {}. "
NO_AXIS += "Call it inside jax.shard_map, with the axis in the mesh."
NOT_SHARDED = "ring.attention: {} must be sharded over 'x', as the sequence is, got the same on all devices. "
NOT_SHARDED += "Name the axis in the in_specs of jax.shard_map."
ALL_PAIRS = "ring.attention: {} must have 1 for P·T or for P·S, since no device holds all pairs, got {}. "
ALL_PAIRS += "masks.rule(fn, *arrays) and biases.rule(fn, *arrays) make pairs from what tokens have."
NO_KEY = "ring.attention: dropout_rng must be a random key, got None with dropout_rate {}."
NOT_BOOLEAN = "Scores that are added go in `bias`; for a 0/1 mask pass `mask != 0`."
PADDING = "For a [B, S] padding mask pass mask[:, None, None, :] or masks.lengths(key=...)."
PAD = "Pad it at the end, and pass masks.lengths(key=...) with the real length."
X = np.zeros((4, 1, 2))

MISUSES = {
    # The axis
    "outside shard_map": (lambda: ring.attention(X, X, X, axis_name="x"), ValueError, NO_AXIS.format("'x'")),
    "no such axis": (lambda: sharded(axis_name="z"), ValueError, NO_AXIS.format("'z'")),
    "one of two axes": (lambda: sharded(axis_name=("x", "z")), ValueError, NO_AXIS.format("('x', 'z')")),
    "an axis twice": (lambda: sharded(axis_name=("x", "x")), ValueError, NO_AXIS.format("('x', 'x')")),
    "no axes": (lambda: sharded(axis_name=()), ValueError, NO_AXIS.format("()")),
    "a list of axes": (lambda: sharded(axis_name=["x"]), ValueError, NO_AXIS.format("['x']")),
    "None": (lambda: sharded(axis_name=None), ValueError, NO_AXIS.format("None")),
    "an axis of an array": (lambda: sharded(axis_name=1), ValueError, NO_AXIS.format("1")),
    "a traced axis": (lambda: sharded(axis_name=(0, ALL)), ValueError, NO_AXIS.format("a traced array")),
    "an axis of vmap": (
        lambda: jax.vmap(lambda x: ring.attention(x, x, x, axis_name="v"), axis_name="v")(X[None]),
        ValueError,
        NO_AXIS.format("'v'"),
    ),
    # What is sharded
    "queries on all devices": (
        lambda: sharded(query=(2, 2, 4, 3), specs=(ALL, TOKENS, TOKENS)),
        ValueError,
        NOT_SHARDED.format("query"),
    ),
    "keys on all devices": (
        lambda: sharded(key=(2, 3, 2, 3), specs=(TOKENS, ALL, TOKENS)),
        ValueError,
        NOT_SHARDED.format("key"),
    ),
    "values over another axis": (
        lambda: sharded(value=(2, 6, 2, 5), specs=(TOKENS, TOKENS, jax.P(None, "y"))),
        ValueError,
        NOT_SHARDED.format("value"),
    ),
    "keys of another length": (
        lambda: sharded(value=(2, 8, 2, 5)),
        ValueError,
        "ring.attention: value must be (*B, S, K, D) = (2, 3, 2, 5), got (2, 2, 2, 5).",
    ),
    "a batch that is sharded for queries alone": (
        lambda: sharded(specs=(jax.P("y", "x"), TOKENS, TOKENS)),
        ValueError,
        "ring.attention: key must be (*B, S, K, H) = (1, 3, 2, 3), got (2, 3, 2, 3).",
    ),
    "no heads": (
        lambda: sharded(query=(8, 3), specs=(jax.P("x"), TOKENS, TOKENS)),
        ValueError,
        "ring.attention: query must be (*B, T, N, H), got (2, 3).",
    ),
    "heads that do not divide": (
        lambda: sharded(query=(2, 8, 3, 3)),
        ValueError,
        "ring.attention: N = 3 query heads is not a multiple of K = 2 key/value heads.",
    ),
    "heads that are sharded for keys alone": (
        lambda: sharded(query=(2, 8, 1, 3), key=(2, 12, 2, 3)),
        ValueError,
        "ring.attention: N = 1 query heads is not a multiple of K = 2 key/value heads.",
    ),
    "no features": (
        lambda: sharded(query=(2, 8, 4, 0), key=(2, 12, 2, 0)),
        ValueError,
        "ring.attention: H must be at least 1, got query (2, 2, 4, 0).",
    ),
    # Positions
    "positions of all queries": (
        lambda: sharded(query_positions=np.arange(8)),
        ValueError,
        "ring.attention: query_positions must be (T,) = (2,), got (8,).",
    ),
    "the same positions on all devices": (
        lambda: sharded(query_positions=np.arange(2)),
        ValueError,
        NOT_SHARDED.format("query_positions"),
    ),
    "positions of queries for keys": (
        lambda: sharded(key_positions=(np.arange(8), jax.P("x"))),
        ValueError,
        "ring.attention: key_positions must be (S,) = (3,), got (2,).",
    ),
    "positions of another batch": (
        lambda: sharded(key_positions=(np.zeros((3, 12), np.int32), TOKENS)),
        ValueError,
        "ring.attention: key_positions must be (*B, S) = (2, 3), got (3, 3).",
    ),
    "positions that are floats": (
        lambda: sharded(key_positions=(np.zeros(12), jax.P("x"))),
        TypeError,
        "ring.attention: key_positions must be integers, got float64.",
    ),
    # Masks and biases
    "a mask of this device's keys": (
        lambda: sharded(mask=bools(2, 1, 1, 3)),
        ValueError,
        "ring.attention: mask must be (*B, N, P·T, P·S) = (2, 4, 8, 12), got (2, 1, 1, 3).",
    ),
    "a mask that is sharded": (
        lambda: sharded(mask=(bools(2, 1, 1, 12), jax.P(None, None, None, "x"))),
        ValueError,
        "ring.attention: mask must be (*B, N, P·T, P·S) = (2, 4, 8, 12), got (2, 1, 1, 3).",
    ),
    "a mask of all pairs": (
        lambda: sharded(mask=bools(2, 1, 8, 12)),
        ValueError,
        ALL_PAIRS.format("array(mask=...)", "(2, 1, 8, 12)"),
    ),
    "a [B, S] mask": (
        lambda: sharded(mask=bools(2, 12)),
        ValueError,
        f"ring.attention: mask must be (*B, N, P·T, P·S) = (2, 4, 8, 12), got (2, 12). {PADDING}",
    ),
    "a mask of floats": (
        lambda: sharded(mask=np.ones((2, 1, 1, 12))),
        TypeError,
        f"ring.attention: mask must be boolean (True = may attend), got float64. {NOT_BOOLEAN}",
    ),
    "a mask that was not made": (
        lambda: sharded(mask=masks.causal),
        TypeError,
        "ring.attention: mask must be a rule or an array, got a function. Call it: jattn.masks.causal(...).",
    ),
    "a bias of all pairs": (
        lambda: sharded(bias=np.zeros((1, 4, 8, 12))),
        ValueError,
        ALL_PAIRS.format("array(bias=...)", "(1, 4, 8, 12)"),
    ),
    "a bias of all pairs, as a rule": (
        lambda: sharded(bias=biases.array(np.zeros((4, 8, 12)))),
        ValueError,
        ALL_PAIRS.format("array(bias=...)", "(4, 8, 12)"),
    ),
    "a bias of this device's queries": (
        lambda: sharded(bias=np.zeros((1, 4, 2, 1))),
        ValueError,
        "ring.attention: bias must be (*B, N, P·T, P·S) = (2, 4, 8, 12), got (1, 4, 2, 1).",
    ),
    "a bias that is a mask": (
        lambda: sharded(bias=bools(1, 4, 8, 1)),
        TypeError,
        "ring.attention: bias must be floating, got bool. A boolean mask goes in `mask`.",
    ),
    "slopes of other heads": (
        lambda: sharded(bias=biases.alibi(np.ones(3))),
        ValueError,
        "ring.attention: alibi(slopes=...) must be (N,) = (4,), got (3,).",
    ),
    "segments that are the same on all devices": (
        lambda: sharded(mask=masks.segments(np.arange(2), np.arange(3))),
        ValueError,
        NOT_SHARDED.format("segments(query_ids=...)"),
    ),
    "segments of all tokens": (
        lambda: sharded(mask=masks.segments(np.zeros((2, 8), int), np.zeros((2, 12), int))),
        ValueError,
        "ring.attention: segments(query_ids=...) must be (*B, T) = (2, 2), got (2, 8).",
    ),
    "segments of queries for keys": (
        lambda: sharded(mask=masks.segments(np.zeros((2, 2), int))),
        ValueError,
        "ring.attention: segments(key_ids=...) must be (*B, S) = (2, 3), got (2, 2).",
    ),
    "lengths of another batch": (
        lambda: sharded(mask=masks.lengths(key=np.array([1, 2, 3]))),
        ValueError,
        "ring.attention: lengths(key=...) must be (*B,) = (2,), got (3,).",
    ),
    "a rule that returns another shape": (
        lambda: sharded(mask=masks.rule(lambda q, k: jnp.zeros((8, 12), bool))),
        ValueError,
        "masks.rule: fn must return (t, s) = (2, 3), each axis full or 1, got (8, 12).",
    ),
    # Dtypes
    "a mix of dtypes": (
        lambda: sharded(dtypes=(np.float32, np.float32, jnp.bfloat16)),
        TypeError,
        "ring.attention: query, key and value must share one floating dtype, got float32, float32, bfloat16.",
    ),
    "integers": (
        lambda: sharded(dtypes=(np.int32,) * 3),
        TypeError,
        "ring.attention: query must be floating, got int32.",
    ),
    # Options
    "an odd number of queries in a zigzag": (
        lambda: sharded(query=(2, 12, 4, 3), zigzag=True),
        ValueError,
        "ring.attention: T must be even with zigzag, got 3. ring.zigzag makes it so.",
    ),
    "an odd number of keys in a zigzag": (
        lambda: sharded(zigzag=True),
        ValueError,
        "ring.attention: S must be even with zigzag, got 3. ring.zigzag makes it so.",
    ),
    "a zigzag that is a word": (
        lambda: sharded(zigzag="no"),
        TypeError,
        "ring.attention: zigzag must be True or False, got 'no'.",
    ),
    "a zigzag that is traced": (
        lambda: sharded(zigzag=(True, ALL)),
        TypeError,
        "ring.attention: zigzag must be True or False, got a traced array.",
    ),
    "a method": (
        lambda: sharded(method="dense"),
        TypeError,
        "attention() got an unexpected keyword argument 'method'",
    ),
    "an unknown policy": (
        lambda: sharded(empty="mean"),
        ValueError,
        "ring.attention: empty must be one of 'zero', 'raise', got 'mean'.",
    ),
    "one number for tiles": (
        lambda: sharded(block_size=4),
        ValueError,
        "ring.attention: block_size must be two positive ints, (queries, keys), got 4.",
    ),
    "dropout without a key": (lambda: sharded(dropout_rate=0.1), ValueError, NO_KEY.format(0.1)),
    "dropout with a key for each device": (
        lambda: sharded(dropout_rate=0.1, dropout_rng=jax.random.split(jax.random.key(0), 4)),
        ValueError,
        "ring.attention: dropout_rng must be (), got (4,). Pass one key; it is split over batch and heads.",
    ),
    "a rate in percent": (
        lambda: sharded(dropout_rate=10.0, dropout_rng=jax.random.key(0)),
        ValueError,
        "ring.attention: dropout_rate must be a number in [0, 1], got 10.0.",
    ),
    "no softcap": (
        lambda: sharded(softcap=0.0),
        ValueError,
        "ring.attention: softcap must be finite and > 0, got 0.0. Pass None for no softcap.",
    ),
    "a sink of key heads": (
        lambda: sharded(sink=np.zeros(2)),
        ValueError,
        "ring.attention: sink must be (N,) = (4,), got (2,).",
    ),
    "a scale for each head": (
        lambda: sharded(scale=np.ones(4)),
        ValueError,
        "ring.attention: scale must be (), got (4,).",
    ),
    # Dealing
    "a length that does not divide": (
        lambda: ring.zigzag(np.zeros((2, 12)), 4, axis=1),
        ValueError,
        f"ring.zigzag: axis 1 of x must be a multiple of 2 P = 8 long, got 12. {PAD}",
    ),
    "a length that does not divide, on the way back": (
        lambda: ring.unzigzag(np.zeros((2, 12)), 4, axis=1),
        ValueError,
        f"ring.unzigzag: axis 1 of x must be a multiple of 2 P = 8 long, got 12. {PAD}",
    ),
    "no devices": (lambda: ring.zigzag(X, 0, axis=0), ValueError, "ring.zigzag: P must be an int >= 1, got 0."),
    "a float of devices": (
        lambda: ring.zigzag(X, 2.0, axis=0),
        ValueError,
        "ring.zigzag: P must be an int >= 1, got 2.0.",
    ),
    "devices that are traced": (
        lambda: jax.eval_shape(lambda P: ring.zigzag(X, P, axis=0), 2),
        ValueError,
        "ring.zigzag: P must be an int >= 1, got a traced array.",
    ),
    "an axis that is not there": (
        lambda: ring.unzigzag(X, 2, axis=3),
        ValueError,
        "ring.unzigzag: axis must be one of the 3 axes of x, which is (4, 1, 2), got 3.",
    ),
    "no axis": (lambda: ring.zigzag(X, 2, axis=None), TypeError, "ring.zigzag: axis must be an integer, got None."),
    "what is no array": (
        lambda: ring.zigzag("tokens", 2, axis=0),
        TypeError,
        "ring.zigzag: x must be an array, got str.",
    ),
}


@pytest.mark.parametrize("call, kind, text", MISUSES.values(), ids=MISUSES)
def test_a_misuse_is_named(call, kind, text):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == text


def test_what_is_no_misuse_is_refused_nowhere():
    """The call that every row of the table spoils; and over both axes of the mesh."""
    assert sharded().shape == (2, 8, 4, 5)
    both = jax.P(None, ("x", "y"))
    longer = {"key": (2, 16, 2, 3), "value": (2, 16, 2, 5)}
    assert sharded(**longer, specs=(both,) * 3, axis_name=("x", "y")).shape == (2, 8, 4, 5)
