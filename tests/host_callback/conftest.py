"""What tests of host callbacks share."""

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
    """Eight devices in a row; of GPUs as many as there are."""
    return mesh_of({"x": jax.device_count()})
