"""The programs that the planner is measured by, and the layouts that experts give them."""

import functools
import math
import zlib

from benchmarks.plans import compiled
from benchmarks.plans.cases import CASES, built
from benchmarks.plans.experts import BOTH, FSDP, MEGATRON
from benchmarks.plans.logical import spec_of
from hardware import require_libtpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import P

NAMES = [*CASES]
#: Of the axes ``data`` and ``model``, for 8 devices.
MESHES = ((8, 1), (4, 2), (2, 4))


@functools.cache
def small(name):
    """A case of small sizes."""
    return built(name, small=True)


@functools.cache
def arguments(name):
    """Values for the arguments of a small case: as many words as it has, and small numbers."""

    def value(path, leaf):
        random = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return random.integers(0, 8, leaf.shape).astype(leaf.dtype)
        drawn = np.asarray(0.1 * random.standard_normal(leaf.shape), leaf.dtype)
        # What Adam knows of squares is not below 0.
        return abs(drawn) if ".nu" in jax.tree_util.keystr(path) else drawn

    def positive(path, leaf):
        return abs(leaf) if "'nu'" in jax.tree_util.keystr(path) else leaf

    args = jax.tree_util.tree_map_with_path(value, small(name).args)
    return jax.tree_util.tree_map_with_path(positive, args)


@functools.cache
def unsharded(name):
    """What the bare step gives on one device."""
    return jax.jit(small(name).step)(*arguments(name))


def experts_of(name):
    """Names of a case's experts."""
    return [one.name for one in small(name).experts]


def mesh_of(data, model):
    """Of the eight devices."""
    return spmd.make_mesh({"data": data, "model": model})


def test_a_table_says_where_the_dimensions_of_an_array_lie():
    """The first dimension that wants an axis gets it, and one that it does not divide stays whole."""
    sizes = {"data": 4, "model": 2}
    table = {"batch": BOTH, "embed": "data", "heads": "model"}
    leaf = jax.ShapeDtypeStruct((8, 12, 6), jnp.float32)
    assert spec_of(leaf, "batch length embed", table, sizes) == P(("data", "model"), None, None)
    assert spec_of(leaf, "length embed heads", table, sizes) == P(None, "data", "model")
    assert spec_of(leaf, "length heads embed", table, sizes) == P(None, "model", None)
    odd = jax.ShapeDtypeStruct((12, 5), jnp.float32)
    assert spec_of(odd, "batch heads", table, sizes) == P("data", None)


def test_megatron_and_fsdp_are_what_their_papers_say():
    """Columns of the first product and rows of the second are split, or every weight once."""
    step = small("GPT-2 small")
    dims = step.dims[0]["params"]["layers"]
    params = step.args[0]["params"]["layers"]
    found = MEGATRON.on({"data": 4, "model": 2}).specs(params, dims)
    assert (found["up"], found["down"]) == (P(None, None, "model"), P(None, "model", None))
    assert (found["q"], found["o"]) == (P(None, None, "model", None), P(None, "model", None, None))
    assert found["up_bias"] == P(None, "model")
    assert found["down_bias"] == found["norm1"] == P(None, None)
    found = FSDP.on({"data": 8, "model": 1}).specs(params, dims)
    assert (found["up"], found["down"]) == (P(None, BOTH, None), P(None, None, BOTH))


@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_lowered_and_its_layouts_divide(name):
    """Each expert's step can be lowered for a mesh, where it writes a constraint or more."""
    case = small(name)
    for expert in case.experts:
        text = compiled.lowered(case, expert, mesh_of(4, 2)).as_text()
        assert "sharding_constraint" in text, expert.name


@pytest.mark.parametrize("name", NAMES)
def test_the_bare_step_has_no_constraint(name):
    """What a planner gets says nothing of where anything lies."""
    case = small(name)
    lowered = spmd.pjit(case.step, mesh=mesh_of(4, 2), **case.options).lower(*case.args)
    assert "sharding_constraint" not in lowered.as_text()
