"""The steps in which XLA places a value otherwise, against the programs that it makes."""

import random

import jax
from jax import lax
from jax.extend.mlir import ir
import jax.numpy as jnp
import pytest

import spmd
from spmd import P, pjit
from spmd.inspection.shardy import passes, reshards

GRID = (("d", 4), ("m", 2))
CUBE = (("d", 2), ("m", 2), ("k", 2))


def _axes(text):
    """``dm,-`` for a dimension that is split over d and then m, and one that is whole."""
    return tuple(tuple(one.strip("-")) for one in text.split(","))


def _between(before, after, sizes):
    found = reshards.between(_axes(before), _axes(after), sizes)
    return [",".join("".join(axes) or "-" for axes in one) for one in found]


@pytest.mark.parametrize(
    ("before", "after", "sizes", "expected"),
    [
        # One exchange, or none: slices, gathers, devices that change places.
        ("-,-", "d,m", GRID, []),
        ("dm,-", "d,-", GRID, []),
        ("d,m", "-,-", GRID, []),
        ("d,k", "m,k", CUBE, []),
        # Parts of one dimension become parts of another.
        ("d,-", "-,d", GRID, []),
        ("d,-", "-,m", CUBE, ["-,d"]),
        ("dm,-", "d,m", GRID, []),
        # As many devices are to have the same: there is no way from 4 parts to 2 of another.
        ("d,-", "-,m", GRID, ["-,-"]),
        ("m,-", "-,d", GRID, ["-,-"]),
        ("dm,-", "-,d", GRID, ["-,-"]),
        ("d,m", "-,dmk", CUBE, ["-,-"]),
        # Fewer are to have it: they slice what nothing splits, and then move.
        ("-,m", "dm,-", GRID, ["d,m"]),
        ("-,d", "dm,-", GRID, ["m,d", "md,-"]),
        ("d,-,-", "-,d,m", GRID, ["d,m,-", "d,-,m"]),
        # More are: a dimension with so many parts is made whole first.
        ("d,m", "-,d", GRID, ["d,-"]),
        ("m,d", "d,-", GRID, ["-,d"]),
        # Dimensions change their numbers of parts around.
        ("d,m,-", "m,-,d", GRID, ["-,m,d"]),
        # The minor parts of 2 x 3 are three: XLA takes them apart in the other order, or aborts.
        ("dm,-", "m,d", (("d", 2), ("m", 3)), []),
        # What stays in as many parts does; what was gathered is sliced in its order.
        ("dk,-,m", "-,m,d", CUBE, ["-,-,m", "-,d,m"]),
        ("dmk,-,-", "d,m,k", CUBE, ["d,-,-"]),
    ],
)  # fmt: skip
def test_steps(before, after, sizes, expected):
    """By hand, as they were found in compiled programs."""
    assert _between(before, after, sizes) == expected


def test_parts_of_axes():
    """An axis whose parts go different ways is named by its parts."""
    before, after = (("d",), ()), ((), ("d:(1)2",))
    assert reshards.between(before, after, (("d", 4),)) == (((), ()),)
    before, after = (("d:(1)2",), ()), ((), ("d:(2)2",))
    assert reshards.between(before, after, (("d", 4),)) == (((), ("d:(1)2",)),)


def _specs(names, rank, rng):
    """A random place of an array."""
    axes = rng.sample(names, rng.randint(0, len(names)))
    found = [[] for _ in range(rank)]
    for axis in axes:
        rng.choice(found).append(axis)
    return P(*(tuple(one) or None for one in found))


def _compared(seed, sizes):
    rng = random.Random(seed)
    rank = rng.choice([2, 2, 3])
    shape = (64, 32, 16)[:rank]
    before, after = (_specs([*sizes], rank, rng) for _ in "ba")

    def f(x):
        return jnp.cos(spmd.with_sharding_constraint(jnp.sin(x), after))

    with spmd.make_mesh(sizes):
        lowered = pjit(f, in_axis_resources=before, out_axis_resources=after).lower(
            jax.ShapeDtypeStruct(shape, jnp.float32)
        )
    told, made = spmd.preview(lowered), spmd.report(lowered)
    return (before, after), told.total.wire_bytes, made.total.wire_bytes


@pytest.mark.parametrize("seed", range(12))
def test_random_places(seed):
    """Whatever the two places are, a preview tells the bytes that the compiled program sends."""
    sizes = {"d": 4, "m": 2} if seed % 2 else {"d": 2, "m": 2, "k": 2}
    places, told, made = _compared(seed, sizes)
    assert told == made, places


@pytest.mark.few(0)
@pytest.mark.parametrize("seed", range(100, 112))
def test_many_random_places(seed):
    """The same for more of them."""
    for n in range(10):
        sizes = {"d": 4, "m": 2} if n % 2 else {"d": 2, "m": 2, "k": 2}
        places, told, made = _compared(10 * seed + n, sizes)
        assert told == made, places


GRIDDED = [
    # Operands that are together stay so, and what they give is moved; one alone moves before.
    (lambda a, b: a * b, P("d"), P("d"), P()),
    (lambda a, b: a * b, P("d"), P("d"), P(None, "m")),
    (lambda a, b: a * b, P("d"), P(None, "m"), P()),
    (lambda a, b: a * b, P("d"), P(), P("d")),
    (lambda a, b: a * b + b, P("d"), P("m"), P("d")),
    (lambda a, b: lax.select(a > 0, a, b), P("d"), P("d"), P(None, "m")),
    # XLA replaces this one before it partitions; the passes know nothing of it.
    (lambda a, b: jnp.square(a), P("d"), P("d"), P(None, "m")),
]


@pytest.mark.parametrize(("f", "one", "other", "out"), GRIDDED)
def test_operations_on_each_element(f, one, other, out):
    """XLA does them where their results are, or where all of their operands are."""
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)

    def g(a, b):
        return jnp.sin(spmd.with_sharding_constraint(f(a, b), out))

    with spmd.make_mesh({"d": 4, "m": 2}):
        lowered = pjit(g, in_axis_resources=(one, other), out_axis_resources=out).lower(x, x)
    told, made = spmd.preview(lowered), spmd.report(lowered)
    assert told.total.wire_bytes == made.total.wire_bytes


#: A `shard_map` whose body says nothing, and asks once for a place.
MANUAL = """
sdy.mesh @mesh = <["d"=4, "m"=2]>
func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %y = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"d"}, {}]>]
      out_shardings=[<@mesh, [{"d"}, {}]>] manual_axes={"d"} (%a: tensor<2x8xf32>) {
    %b = sdy.reshard %a <@mesh, [{}, {}]> : tensor<2x8xf32>
    sdy.return %b : tensor<2x8xf32>
  } : (tensor<8x8xf32>) -> tensor<8x8xf32>
  return %y : tensor<8x8xf32>
}
"""


@pytest.mark.parametrize("place", ["d", "m"])
def test_axes_that_a_shard_map_has_taken(place):
    """Shardy's propagation may split values inside over them: that is left as it is."""
    context = jax.jit(lambda: 0).lower().compiler_ir("stablehlo").context
    with context:
        module = ir.Module.parse(MANUAL)
        operations = passes.all_in(module.operation)
        (one,) = (each for each in operations if each.name == "sdy.reshard")
        wanted = passes.sharding_text(((), (place,)), "mesh")
        one.attributes["sharding"] = ir.Attribute.parse(wanted)
        reshards.replace(module.operation, operations)
        found = [each.name for each in passes.all_in(module.operation)]
    assert found.count("sdy.reshard") == 1
