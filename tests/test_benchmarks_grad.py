"""The gradient of a pjit-ed loss takes no more memory and traffic than that of a jit-ed one."""

import itertools

from benchmarks.differentiating import CHECKPOINTS, TWO_AXES, WAYS, Case, compare
import pytest

import spmd
from spmd.demo import model

TINY = model.Config(vocab=72, seq_len=16, layers=2, d_model=32, heads=4, d_ff=64)
#: Way, place of the checkpoint, whether blocks are calls too. Without a rule for dead code the
#: first two of these fail; the others are slow only because there are many.
QUICK = (
    ("two programs", "off", False),
    ("eager", "pjit", False),
    ("eager", "layers", True),
)
SOAKS = (pytest.mark.slow, pytest.mark.soak)
SLOW = sorted({*itertools.product(WAYS, CHECKPOINTS, (False, True))} - {*QUICK})


@pytest.mark.parametrize(
    ("way", "checkpoint", "nested"),
    [*QUICK, *(pytest.param(*case, marks=SOAKS) for case in SLOW)],
)
def test_bytes_of_a_gradient(way, checkpoint, nested):
    """Peak, wire and residual bytes per device are at most those through `jax.jit`."""
    mesh = spmd.make_mesh(TWO_AXES)
    found = compare(way, Case(config=TINY, mesh=mesh, checkpoint=checkpoint, nested=nested))
    assert found.peer.peak > 0
    assert found.peer.wire > 0
    assert all(ratio <= 1 for ratio in found.ratios.values()), found
