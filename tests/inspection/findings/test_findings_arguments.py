"""Arguments that are whole are named by the subtree that they fill."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax
import pytest

import spmd
from spmd import pjit
from spmd.inspection import Argument, Split
from spmd.inspection.findings.values import whole_arguments

MESH = {"data": 4, "model": 2}
GATHERED = "; if it has to be whole in a computation, a split argument is gathered where it is used"


def argument(path, shape, axes=()):
    """An argument of a program, split over some mesh axes in its first dimension."""
    parts = int(np.prod([MESH[name] for name in axes], dtype=int))
    first = Split(axes=tuple(axes), parts=parts, block=-(-shape[0] // parts)) if shape else None
    rest = [Split(axes=(), parts=1, block=n) for n in shape[1:]]
    return Argument(
        path=path,
        dtype="f32",
        shape=shape,
        sharding="",
        splits=(first, *rest) if first else (),
        nbytes=4 * int(np.prod(shape)) // parts,
    )


def said(*arguments, mesh=MESH):
    """Subject, bytes and fix of each finding; the fix without its end."""
    found = [*whole_arguments(arguments, mesh)]
    assert all(one.fix.endswith(GATHERED) for one in found)
    return [(one.subject, one.nbytes, one.fix.removesuffix(GATHERED)) for one in found]


BIG = (1024, 1024)
MIB4 = 4 << 20


def test_optimizer_state():
    """All of an optimizer's state is one finding, with the subtree, its leaves and their sum."""
    adam = optax.adamw(1e-3)
    params = {"w": jnp.ones((256, 1024)), "v": jnp.ones((512, 1024)), "b": jnp.ones(8)}
    state = (jax.ShapeDtypeStruct((8,), jnp.float32), jax.eval_shape(adam.init, params))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), (*MESH,))
    step = pjit(lambda state, x: jax.tree.map(lambda a: a + 1, state), mesh=mesh)
    report = spmd.report(step, state, jax.ShapeDtypeStruct((8,), jnp.float32))
    (one,) = [one for one in report.findings if one.kind == "replicated-argument"]
    assert one.subject == "the 4 large leaves of state[1][0] are whole on every device"
    assert one.nbytes == 2 * 4 * (256 * 1024 + 512 * 1024)
    assert one.facts == (
        "state[1][0].mu['v']: f32[512,1024]",
        "state[1][0].nu['v']: f32[512,1024]",
        "state[1][0].mu['w']: f32[256,1024]",
        "state[1][0].nu['w']: f32[256,1024]",
    )
    # The state counts its steps, and a number cannot be split.
    assert one.fix == "split each of these leaves as P('data')" + GATHERED


def test_no_large_leaf_of_a_subtree_is_split():
    """A subtree is named only as far up as no large leaf in it is split."""
    assert said(
        argument("s.params['w']", BIG, ["data"]),
        argument("s.mu['w']", BIG),
        argument("s.mu['v']", BIG),
        argument("s.nu['w']", BIG, ["data"]),
        argument("s.nu['v']", (512, 1024)),
    ) == [
        (
            "the 2 large leaves of s.mu are whole on every device",
            2 * MIB4,
            "split all of s.mu as P('data')",
        ),
        ("s.nu['v'] is whole on every device", MIB4 // 2, "split s.nu['v'] as P(None, 'data')"),
    ]


def test_a_leaf_that_is_small_where_it_is_split_is_large():
    """A leaf counts by its whole size, so a split one of which a device has little is no part."""
    parts = [argument("s['w']", (512, 1024), ["data", "model"]), argument("s['v']", BIG)]
    assert [subject for subject, *_ in said(*parts)] == ["s['v'] is whole on every device"]
    small = [argument("s['w']", (8, 8), ["data"]), argument("s['v']", BIG), argument("s['u']", BIG)]
    assert said(*small) == [
        (
            "the 2 large leaves of s are whole on every device",
            2 * MIB4,
            "split each of these leaves as P('data')",
        )
    ]


def test_arguments_of_their_own():
    """A whole argument stays one, and so does a leaf alone in its tree, however deep."""
    assert [subject for subject, *_ in said(argument("x", BIG), argument("b['x'][0].y", BIG))] == [
        "x is whole on every device",
        "b['x'][0].y is whole on every device",
    ]


@pytest.mark.parametrize(
    ("shapes", "fix"),
    [
        ([(1026, 1024), (1028, 1024)], "split all of p as P('model')"),
        ([(1023, 1024), (1025, 1024)], "split all of p as P(None, 'data')"),
        (
            [(1023, 1024), (1024, 1023)],
            "a spec for each of these leaves: split p[0] as P(None, 'data')",
        ),
        ([(4, 1024, 1024), (1 << 20,), ()], "split each of these leaves as P('data')"),
        (
            [(1023, 1025), (1023, 1027)],
            "a spec for each of these leaves: split p[1] padded to a multiple of a mesh axis",
        ),
    ],
)
def test_specs_of_subtrees(shapes, fix):
    """One spec for all of a subtree if there is one, else for its large leaves, else by leaf."""
    found = said(*(argument(f"p[{i}]", shape) for i, shape in enumerate(shapes)))
    assert [fix for *_, fix in found] == [fix]


def test_many():
    """Five subtrees have findings of their own; those after them are summed up in one."""
    leaves = [argument(f"p{i}", (1024, 1024 - 8 * i)) for i in range(9)]
    found = said(*leaves)
    assert [subject for subject, *_ in found[:5]] == [
        f"p{i} is whole on every device" for i in range(5)
    ]
    assert found[5:] == [
        (
            "4 more large arguments are whole on every device",
            sum(a.nbytes for a in leaves[5:]),
            "split p5 as P('data')",
        )
    ]
    assert said(*leaves[:6])[5][0] == "p5 is whole on every device"


@pytest.mark.parametrize("key", ["'a.b[0]'", '"it\'s"', r"'\'['", "3"])
def test_keys(key):
    """Keys are told apart whatever characters are in them."""
    paths = [f"p[{key}].w", f"p[{key}].v", "p['other'].w"]
    axes = [(), (), ["data"]]
    found = said(*(argument(path, BIG, a) for path, a in zip(paths, axes, strict=True)))
    assert [subject for subject, *_ in found] == [
        f"the 2 large leaves of p[{key}] are whole on every device"
    ]


def test_other_paths():
    """What is not written as JAX writes paths is one key."""
    found = said(argument("p[q", BIG), argument("p[r", BIG))
    assert [subject for subject, *_ in found] == [f"p[{c} is whole on every device" for c in "qr"]
    assert said(argument("x", BIG), mesh={"data": 1, "model": 1}) == []
