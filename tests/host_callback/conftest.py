"""What tests of host callbacks share, and which of them the default run leaves to the slow one."""

import jax
from oracle import mesh_of
import pytest

from spmd import host_callback as hcb


@pytest.fixture(autouse=True)
def _clear():
    """Leaves no pending call, no error and no setting behind, for this library and for JAX."""
    yield
    hcb.configure()
    hcb.barrier_wait()
    jax.effects_barrier()


@pytest.fixture
def row():
    """Eight devices in a row."""
    return mesh_of({"x": 8})


#: These run each of their programs eagerly, under `jit` and under `pjit`; by default under `jit`.
THREE_WAYS = {
    "test_derivatives_see_primal_values",
    "test_dtypes",
    "test_program_order",
    "test_random_programs",
    "test_tangents_and_cotangents",
    "test_vmap",
}
#: Each takes seconds, and shows in more cases what a short test shows in one.
LONG = {
    "test_300_programs",
    "test_eager_calls_share_programs",
    "test_elements_of_batched_values",
    "test_environment_is_checked",
    "test_large",
    "test_queue_by_environment",
    "test_two_hundred_taps_of_independent_values",
    "test_unusual_exceptions",
    "test_values_are_those_without_taps",
}


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """Marks them slow."""
    for item in items:
        name, _, case = item.name.partition("[")
        if name in LONG or (name in THREE_WAYS and case.rstrip("]").split("-")[-1] != "jit"):
            item.add_marker(pytest.mark.slow)
