"""Strict JAX for every test, the engines that the battery runs against, and one tolerance table."""

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

# Whatever these refuse is a decision that the code forgot to write down.
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The tests draw the same cases each time; `make fuzz` draws others, many.
settings.register_profile(
    "few",
    max_examples=8,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)
settings.register_profile("fuzz", settings.get_profile("few"), max_examples=400, derandomize=False)
settings.load_profile("few")

# Keyword arguments of `attend` and `attention`. Another engine is another line; the whole battery then runs on it.
ENGINES = {
    "dense": {"method": "dense"},
    "blockwise": {"method": "blockwise", "block_size": (4, 3)},
}

# Relative to the largest number of the expected result.
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}


def pytest_addoption(parser):
    parser.addoption("--everything", action="store_true", help="run every case on every engine, and the slow tests")
    parser.addoption("--share", type=int, default=1, help="run every test, but of its cases one in so many")


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--everything"):
        left_out = "eleven in twelve blockwise cases, the lessons and the counts of lesson 7, and SmolLM2 (make models)"
        terminalreporter.write_line(f"Left out without --everything: {left_out}.")
    if (share := config.getoption("--share")) > 1:
        terminalreporter.write_line(f"Of the cases of each test one in {share} ran (--share).")


def pytest_runtest_teardown(item):
    # A compiled program is some mappings of memory, of which Linux gives a process 65,530. Without more, LLVM crashes.
    try:
        with open("/proc/self/maps", "rb") as maps:
            many = sum(1 for _ in maps) > 30_000
    except OSError:
        return
    if many:
        jax.clear_caches()


def pytest_collection_modifyitems(config, items):
    left_out = set()
    for of_one in _cases(items, lambda engine: True):
        left_out |= {item for i, item in enumerate(of_one) if i % config.getoption("--share")}
    # Blockwise programs take seconds to compile, and cases beside each other share them: on that engine each test runs
    # its first case and a twelfth of the others, unless all are asked for. So are slow tests.
    if not config.getoption("--everything"):
        for of_one in _cases(items, lambda engine: engine == "blockwise"):
            left_out |= set(of_one[max(1, len(of_one) // 12) :])
        left_out |= {item for item in items if item.get_closest_marker("slow")}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _cases(items, wanted):
    """The cases of each test with parameters, on each engine that is wanted."""
    cases = {}
    for item in items:
        if hasattr(item, "callspec") and wanted(engine := item.callspec.params.get("engine")):
            cases.setdefault((item.function, engine), []).append(item)
    return cases.values()


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]


def assert_close(got, expected, dtype="float64", factor=1.0):
    """NaN and infinities in the same places, finite numbers within the dtype's tolerance of the result's size."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    assert np.isfinite(got[finite]).all()
    size = max(1.0, np.abs(expected[finite]).max(initial=0.0))
    atol = factor * TOLERANCE[str(np.dtype(dtype))] * size
    np.testing.assert_allclose(got[finite], expected[finite], rtol=0, atol=atol)
