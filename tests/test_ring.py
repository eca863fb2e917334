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
from battery import normal

from jattn import attention, biases, masks, ring

HERE = os.path.dirname(os.path.abspath(__file__))


def process(*calls, first="", devices=8):
    """A process of its own that makes these calls of ring_devices, one after another, and says that it has."""
    code = f"{first}\nimport ring_devices as r\n" + "".join(f"r.{call}\nprint('done')\n" for call in calls)
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


def passes(*calls):
    ran = process(*calls)
    try:
        stdout, stderr = ran.communicate(timeout=300)
    finally:
        ran.kill()
        ran.wait()
    assert ran.returncode == 0 and stdout.split() == ["done"] * len(calls), stderr[-3000:]


def test_every_option_at_once_is_as_on_one_device():
    passes("everything_agrees(2, 4, 8, dtype='float32')")


def test_forward_mode_and_second_order_are_as_on_one_device():
    passes("derivatives_agree(2)")


def test_zigzag_positions_and_arrays_are_as_on_one_device():
    passes("positions_agree(4)", "arrays_agree(2)", "zigzag_keeps_shardings(4)")


def test_bad_tokens_and_empty_rows_stay_where_they_are_seen():
    passes("bad_tokens_stay_where_they_are_seen(4)", "empty_rows_raise_under_checkify(2)")


def test_a_device_holds_and_reads_no_more_than_it_needs():
    passes(
        "invisible_blocks_are_skipped_and_a_zigzag_is_balanced(4)",
        "the_next_block_is_sent_before_this_one_is_used(4)",
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


# Misuse, on a mesh of one device


TOKENS = jax.P(None, "x")


def sharded(query=(2, 4, 4, 3), in_specs=TOKENS, **options):
    """A call over one device."""
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
    f = functools.partial(ring.attention, **{"axis_name": "x"} | options)
    args = normal(1, *query), normal(2, 2, 4, 2, 3), normal(3, 2, 4, 2, 5)
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=TOKENS)(*args)


def test_one_device_is_a_ring():
    assert sharded().shape == (2, 4, 4, 5)


MISUSE = {
    "no such axis": (
        {"axis_name": "y"},
        "axis_name must be a mesh axis of the call, got 'y'. Call it inside jax.shard_map",
    ),
    "keys on all devices": (
        {"in_specs": (TOKENS, jax.P(), TOKENS)},
        "key must be sharded over 'x', as the sequence is, got the same on all devices.",
    ),
    "positions of all devices": (
        {"query_positions": np.arange(4)},
        "query_positions must be sharded over 'x', as the sequence is, got the same on all devices.",
    ),
    "segments of all devices": (
        {"mask": masks.segments(np.arange(4))},
        "segments(query_ids=...) must be sharded over 'x', as the sequence is, got the same on all devices.",
    ),
    "positions of another length": ({"key_positions": np.arange(3)}, "key_positions must be (S,) = (4,), got (3,)."),
    "a mask of all pairs": (
        {"mask": np.ones((2, 1, 4, 4), bool)},
        "have 1 for P·T or for P·S, since no device holds all pairs, got (2, 1, 4, 4).",
    ),
    "a bias of all pairs": (
        {"bias": biases.array(np.ones((4, 4)))},
        "since no device holds all pairs, got (4, 4). masks.rule(fn, *arrays) and biases.rule(fn",
    ),
    "a mask of another length": (
        {"mask": np.ones((2, 1, 1, 5), bool)},
        "mask must be (*B, N, P·T, P·S) = (2, 4, 4, 4), got (2, 1, 1, 5).",
    ),
    "an odd number of queries in a zigzag": (
        {"query": (2, 3, 4, 3), "zigzag": True},
        "T must be even with zigzag, got 3. ring.zigzag makes it so.",
    ),
    "an unknown policy": ({"empty": "mean"}, "empty must be one of 'zero', 'raise', got 'mean'."),
}


@pytest.mark.parametrize("case", MISUSE)
def test_a_misuse_is_named(case):
    options, message = MISUSE[case]
    with pytest.raises(ValueError) as error:
        sharded(**options)
    assert "ring.attention: " in str(error.value) and message in str(error.value)


def test_outside_shard_map_there_is_no_axis():
    x = jnp.ones((4, 1, 2))
    with pytest.raises(ValueError, match="ring.attention: axis_name must be a mesh axis of the call, got 'x'"):
        ring.attention(x, x, x, axis_name="x")


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(
        ValueError, match="ring.zigzag: axis 1 of x must be a multiple of 2 P = 8 long, got 12. Pad it at"
    ):
        ring.zigzag(np.zeros((2, 12)), 4, axis=1)


def test_without_checks_it_is_the_same():
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
    args = normal(1, 4, 4, 3), normal(2, 4, 2, 3), normal(3, 4, 2, 5)
    f = lambda *x: ring.attention(*x, masks.causal(), axis_name="x")  # noqa: E731
    got = jax.shard_map(f, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False)(*args)
    np.testing.assert_allclose(got, attention(*args, masks.causal()), atol=1e-12)
