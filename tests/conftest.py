"""Settings that every test runs under; they have to stand before anything imports JAX."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("SPMD_TEST_PLATFORM", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# A user's own setting must not change what a test of the default sees.
os.environ.pop("SPMD_IMPLICIT_RESHARD", None)

import jax
import numpy as np
import pytest

import spmd
import spmd.host_callback  # it asks for threads, which has to be before JAX starts


def pytest_addoption(parser):
    """Adds the sizes of two slow tests."""
    parser.addoption(
        "--transformation-cases",
        type=int,
        default=1026,
        help="how many cases the slow test of two transformations draws (default: %(default)s)",
    )
    parser.addoption(
        "--host-programs",
        type=int,
        default=2000,
        help="with how many programs the slow test looks for leaks (default: %(default)s)",
    )


@pytest.fixture
def mesh():
    """The 4x2 mesh `data, model` over 8 devices, not entered."""
    return spmd.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.fixture
def in_mesh(mesh):
    """The same mesh, entered."""
    with mesh:
        yield mesh


@pytest.fixture
def checked_without_optimizer():
    """Every jaxpr that a test makes is type-checked; small programs need no optimizer."""
    flag = "jax_disable_most_optimizations"
    before = jax.config.values[flag]
    jax.config.update(flag, True)
    with jax.enable_checks(True):
        yield
    jax.config.update(flag, before)
