"""The programs that the planner is measured by, and the layouts that experts give them."""

import functools
import itertools
import math
import re
import zlib

from benchmarks.plans import compiled
from benchmarks.plans.cases import CASES, built
from benchmarks.plans.experts import BOTH, FSDP, MEGATRON
from benchmarks.plans.logical import spec_of
from benchmarks.plans.others import OTHERS
from hardware import needs_libtpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import P

NAMES = [*CASES]
#: All of them, of which the nightly run takes what is not among the first two, or three.
FEW, SOME = (
    [*NAMES[:n], *(pytest.param(name, marks=pytest.mark.soak) for name in NAMES[n:])]
    for n in (2, 3)
)
#: Of the axes ``data`` and ``model``, for 8 devices.
MESHES = ((8, 1), (4, 2), (2, 4))


@pytest.fixture(autouse=True)
def _promoting():
    """Libraries mix types; users do not run under the strict promotion of the test suite."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def small(name):
    """A case of small sizes."""
    return built(name, small=True)


@functools.cache
def arguments(name):
    """Values for the arguments of a small case: as many words as it has, and small numbers."""

    def value(path, leaf):
        text = jax.tree_util.keystr(path)
        random = np.random.default_rng(zlib.crc32(text.encode()))
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return random.integers(0, 8, leaf.shape).astype(leaf.dtype)
        drawn = np.asarray(0.1 * random.standard_normal(leaf.shape), leaf.dtype)
        # What Adam knows of squares is not below 0.
        return abs(drawn) if re.search(r"\bnu\b", text) else drawn

    return jax.tree_util.tree_map_with_path(value, small(name).args)


@functools.cache
def unsharded(name):
    """What the bare step gives on one device."""
    return jax.jit(small(name).step)(*arguments(name))


def experts_of(name):
    """Names of a case's experts."""
    return [one.name for one in small(name).experts]


def pairs():
    """Every case with each of its experts; the nightly run takes what an expert is not new in."""
    known = set()
    for name in NAMES:
        for expert in reversed(experts_of(name)):
            is_known = expert in known
            known.add(expert)
            yield pytest.param(name, expert, marks=[pytest.mark.soak] * is_known)


def mesh_sizes(shape):
    """By axis."""
    return {str(axis): size for axis, size in zip(BOTH, shape, strict=True)}


def described(*shape):
    """Of as many devices as that takes."""
    return spmd.topology(f"cpu:{math.prod(shape)}", mesh_sizes(shape))


def mesh_of(*shape):
    """Of the eight devices."""
    return spmd.make_mesh(mesh_sizes(shape))


def test_a_table_says_where_the_dimensions_of_an_array_lie():
    """The first dimension that wants an axis gets it; one that it does not divide stays whole."""
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


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_lowered_and_says_nothing_of_layouts(name):
    """What a planner gets has no constraint; with an expert's table there are some."""
    case, mesh = small(name), mesh_of(4, 2)
    bare = spmd.pjit(case.step, mesh=mesh, **case.options).lower(*case.args).as_text()
    assert "sharding_constraint" not in bare
    assert "sharding_constraint" in compiled.lowered(case, case.experts[-1], mesh).as_text()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_layouts_divide(name):
    """Each array of a case, as large as it is, is divided by each expert on each mesh."""
    case = built(name)
    for expert, sizes in itertools.product(case.experts, map(mesh_sizes, (*MESHES, (4, 4)))):
        kept = expert.on(sizes)
        for of, leaf in zip(jax.tree.leaves(case.dims), jax.tree.leaves(case.args), strict=True):
            spec = kept.spec(leaf, of)
            entries = [one if isinstance(one, tuple) else (one,) for one in spec if one]
            named = [*itertools.chain(*entries)]
            assert len(named) == len({*named}), spec
            shape = jax.sharding.NamedSharding(described(*sizes.values()), spec).shard_shape(
                leaf.shape
            )
            assert math.prod(shape) * math.prod(sizes[a] for a in named) == math.prod(leaf.shape)


@pytest.mark.few(0)
@pytest.mark.parametrize(("name", "expert"), [*pairs()])
def test_the_step_of_an_expert_equals_the_unsharded_one(name, expert):
    """Constraints and specs change where numbers lie, and none of them."""
    case = small(name)
    own = next(one for one in case.experts if one.name == expert)
    step = compiled.step_of(case, own, mesh_of(4, 2))
    _assert_close(step(*arguments(name)), unsharded(name))


def _assert_close(found, wanted):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in OTHERS if name not in ("eight bits", "sampling")]
)
def test_a_step_makes_what_it_takes(name):
    """The next state of a program that no figure was found from is like the one before."""
    step, (state, *batch) = OTHERS[name]()
    following, loss = jax.eval_shape(step, state, *batch)
    assert jax.tree.structure(following) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(following), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert loss.shape == ()


@pytest.mark.slow
def test_words_that_are_drawn():
    """One for each text, and the caches that they are in."""
    step, args = OTHERS["sampling"]()
    caches, words = jax.eval_shape(step, *args)
    shapes = jax.tree.map(lambda one: (one.shape, one.dtype), (caches, words))
    assert shapes == jax.tree.map(lambda one: (one.shape, one.dtype), (args[0], args[2]))


@pytest.mark.slow
def test_scores_of_weights_in_eight_bits():
    """Of the last word of each text, with all weights of products in int8 but the words'."""
    step, args = OTHERS["eight bits"]()
    scores = jax.eval_shape(step, *args)
    assert (scores.shape, scores.dtype) == ((16, 32_000), jax.numpy.bfloat16)
    packed = [one.size for one in jax.tree.leaves(args) if one.dtype == jax.numpy.int8]
    assert sum(packed) == 16 * 12 * 4096**2


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_case_is_lowered_for_a_tpu(name):
    """Each expert's step with its real sizes, on each mesh that it differs on."""
    case = built(name)
    for expert in case.experts:
        for sizes in compiled.shapes(case, expert, "v5e:4x4"):
            mesh = spmd.topology("v5e:4x4", sizes)
            assert compiled.lowered(case, expert, mesh).as_text(), expert.name


@needs_libtpu
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_planned_for_a_tpu(name):
    """With its real sizes, by predictions alone: other rules hold than on CPUs."""
    case = built(name)
    plan = spmd.plan(
        case.step, *case.args, topology="v5e:4x4", axes=("data", "model"), top=0, cache=False,
        progress=False, **case.options,
    )  # fmt: skip
    assert plan.tried > 100
    # What Shardy was not asked of comes later: it may seem faster, since exchanges can only add.
    asked = [one.predicted for one in plan.candidates if one.told is not None]
    assert 2 <= len(asked) < len(plan.candidates)
    assert 0 < plan.predicted == min(asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_the_planned_step_equals_the_unsharded_one(name):
    """A plan changes where numbers lie, and none of them."""
    case = small(name)
    plan = spmd.plan(
        case.step, *case.args, mesh=mesh_of(4, 2), top=1, seeds=False, cache=False, progress=False,
        **case.options,
    )  # fmt: skip
    step = spmd.pjit(case.step, plan=plan, **case.options)
    _assert_close(step(*arguments(name)), unsharded(name))
