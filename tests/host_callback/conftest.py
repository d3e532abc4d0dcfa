"""Which of the many ways to run one program the default run leaves to the slow one."""

import pytest

#: These run each of their programs eagerly, under `jit` and under `pjit`; by default under `jit`.
THREE_WAYS = {
    "test_derivatives_see_primal_values",
    "test_dtypes",
    "test_program_order",
    "test_random_programs",
    "test_tangents_and_cotangents",
    "test_vmap",
}
LONG = {"test_300_programs", "test_two_hundred_taps_of_independent_values"}


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """Marks them slow."""
    for item in items:
        name, _, case = item.name.partition("[")
        if name in LONG or (name in THREE_WAYS and case.rstrip("]").split("-")[-1] != "jit"):
            item.add_marker(pytest.mark.slow)
