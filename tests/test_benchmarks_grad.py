"""The gradient of a pjit-ed loss takes no more memory and traffic than that of a jit-ed one."""

import itertools

from benchmarks.differentiating import CHECKPOINTS, TWO_AXES, WAYS, Case, compare
import pytest

import spmd
from spmd.demo import model

TINY = model.Config(vocab=72, seq_len=16, layers=2, d_model=32, heads=4, d_ff=64)
#: Way, place of the checkpoint, whether blocks are calls too. Without a rule for dead code the
#: second fails; the others soak only because there are many.
SOME = [("eager", "layers", True), ("eager", "pjit", False)]
MANY = sorted({*itertools.product(WAYS, CHECKPOINTS, (False, True))}.difference(SOME))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "checkpoint", "nested"),
    [*SOME, *(pytest.param(*case, marks=pytest.mark.soak) for case in MANY)],
)
def test_bytes_of_a_gradient(way, checkpoint, nested):
    """Peak, wire and residual bytes per device are at most those through `jax.jit`."""
    mesh = spmd.make_mesh(TWO_AXES)
    found = compare(way, Case(config=TINY, mesh=mesh, checkpoint=checkpoint, nested=nested))
    assert found.peer.peak > 0
    assert found.peer.wire > 0
    assert all(ratio <= 1 for ratio in found.ratios.values()), found
