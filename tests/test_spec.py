"""Parsing: what a user writes, per leaf and as trees, and how far a spec is from it."""

from collections import OrderedDict, namedtuple
import copy
from dataclasses import dataclass
import pickle
from typing import Any

from hypothesis import given, settings, strategies as st
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

import spmd
from spmd import FROM_ARRAY, pjit
from spmd._spec import BATCH, UNSPECIFIED, broadcast_prefix, parse_specs, show_spec
from spmd.errors import Failure
from spmd.partition_spec import REPLICATED, ParsedPartitionSpec, SpecSync

U = P.UNCONSTRAINED
X = np.ones((8, 4), np.float32)


def parsed(spec, **kwargs):
    """A spec as its user gave it."""
    return ParsedPartitionSpec.from_user_input(spec, "spec", **kwargs)


def call_of(f, *args, **kwargs):
    """The record that one call of `f` carries."""
    (eqn,) = jax.make_jaxpr(f)(*args, **kwargs).eqns
    return eqn.params["call"]


def written(resources):
    """What the user wrote for each value."""
    return [r if r is UNSPECIFIED else r.user_spec for r in resources]


# ParsedPartitionSpec


@pytest.mark.parametrize(
    ("spec", "partitions"),
    [
        (None, ()),
        (P(), ()),
        (P(None), ((),)),
        (P("x"), (("x",),)),
        (P(None, "x"), ((), ("x",))),
        (P(("x", "y"), None, "z"), (("x", "y"), (), ("z",))),
        (P(("y", "x")), (("y", "x"),)),
        (P((), "x"), ((), ("x",))),
        (P("x", U), (("x",), U)),
    ],
    ids=str,
)
def test_partitions(spec, partitions):
    """Every dimension becomes a tuple of mesh axes, from major to minor as written."""
    p = parsed(spec, allow_unconstrained=True)
    assert p.partitions == partitions
    assert tuple(p) == partitions
    assert len(p) == len(partitions)
    assert [p[i] for i in range(len(p))] == list(partitions)
    assert p.axes == tuple(a for part in partitions if part is not U for a in part)
    assert p.has_unconstrained == (U in partitions)


def test_fresh_specs_are_in_sync():
    """What was just parsed is what the user wrote."""
    spec = P("x", None)
    assert parsed(spec).sync is SpecSync.IN_SYNC
    assert parsed(spec).user_spec is spec
    assert parsed(None).user_spec is None
    assert str(parsed(spec)) == "P('x', None)"
    assert str(parsed(None)) == "None"


def test_sync_is_ordered():
    """The levels compare from anything goes to untouched."""
    assert SpecSync.OUT_OF_SYNC < SpecSync.DIM_PERMUTE < SpecSync.IN_SYNC
    assert list(SpecSync) == [SpecSync.OUT_OF_SYNC, SpecSync.DIM_PERMUTE, SpecSync.IN_SYNC]


@pytest.mark.parametrize("sync", list(SpecSync))
@pytest.mark.parametrize("wanted", list(SpecSync))
def test_unsynced_user_spec(sync, wanted):
    """The user's spec is given out only to who accepts a spec as far off as this one."""
    p = ParsedPartitionSpec(P("x"), [("y",)], sync=sync)
    if sync >= wanted:
        assert p.unsynced_user_spec(wanted) == P("x")
    else:
        with pytest.raises(AssertionError, match="no longer says what its user wrote"):
            p.unsynced_user_spec(wanted)
    if sync is not SpecSync.IN_SYNC:
        with pytest.raises(AssertionError):
            _ = p.user_spec


def test_spec_out_of_sync_shows_itself():
    """A spec that moved prints what it is, not what its user wrote."""
    p = parsed(P("x")).insert_axis_partitions(0, ("y",))
    assert str(p) == show_spec(p) == "P('y', 'x')"


@pytest.mark.parametrize(
    ("dim", "val", "partitions", "sync"),
    [
        (0, (), ((), ("x",)), SpecSync.DIM_PERMUTE),
        (1, (), (("x",), ()), SpecSync.DIM_PERMUTE),
        (3, (), (("x",), (), (), ()), SpecSync.DIM_PERMUTE),
        (0, BATCH, (BATCH, ("x",)), SpecSync.DIM_PERMUTE),
        (0, U, (U, ("x",)), SpecSync.DIM_PERMUTE),
        (1, ("y",), (("x",), ("y",)), SpecSync.OUT_OF_SYNC),
        (2, ("y", "z"), (("x",), (), ("y", "z")), SpecSync.OUT_OF_SYNC),
    ],
)
def test_insert_axis_partitions(dim, val, partitions, sync):
    """A dimension more is a permutation of dimensions; mesh axes more are out of sync."""
    before = parsed(P("x"))
    after = before.insert_axis_partitions(dim, val)
    assert after.partitions == partitions
    assert after.sync is sync
    assert after.unsynced_user_spec(sync) == P("x")
    assert before == parsed(P("x"))  # the old one is untouched


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([(), ("a",), BATCH])), max_size=4))
@settings(max_examples=50, deadline=None)
def test_insertions_never_come_closer_to_the_user(moves):
    """Any series of insertions keeps dimensions in place and the sync at its lowest so far."""
    spec, parts, sync = parsed(P("x", None)), [("x",), ()], SpecSync.IN_SYNC
    for dim, val in moves:
        spec = spec.insert_axis_partitions(dim, val)
        parts += [()] * (dim - len(parts))
        parts.insert(dim, val)
        sync = min(sync, SpecSync.OUT_OF_SYNC if val == ("a",) else SpecSync.DIM_PERMUTE)
        assert (list(spec.partitions), spec.sync) == (parts, sync)


entries = st.none() | st.sampled_from("abc") | st.permutations("de").map(tuple)


@given(st.lists(entries, max_size=4))
@settings(max_examples=50, deadline=None)
def test_partitions_give_the_spec_back(parts):
    """A spec that is parsed and written again is the same, as JAX canonicalizes it."""
    names = [a for e in parts for a in (e if isinstance(e, tuple) else (e,)) if a]
    spec = P(*parts)
    if len(names) != len(set(names)):
        with pytest.raises(spmd.ShardingError):
            parsed(spec)
    else:
        assert parsed(spec).to_partition_spec() == spec


def test_batch_dimension_is_filled_in():
    """A dimension of vmap is unsharded, or whatever the caller says."""
    p = parsed(P("x")).insert_axis_partitions(0, BATCH)
    assert p.to_partition_spec() == P(None, "x")
    assert p.to_partition_spec(batch=U) == P(U, "x")


def test_equality_and_hash():
    """Equal are equal partitions with equal origins; the sync counts."""
    assert parsed(P("x")) == parsed(P(("x",)))
    assert hash(parsed(P("x"))) == hash(parsed(P(("x",))))
    assert parsed(P("x")) != parsed(P("x", None))
    assert parsed(P("x")) != parsed(P("y"))
    assert parsed(P("x")) != ParsedPartitionSpec(P("x"), [("x",)], sync=SpecSync.OUT_OF_SYNC)
    assert parsed(P("x")) != P("x")
    assert len({parsed(P("x")), parsed(P("x")), parsed(P("y"))}) == 2


def test_replicated():
    """REPLICATED is what None means, for a value of any rank."""
    assert parsed(None) == REPLICATED
    assert REPLICATED.partitions == ()
    assert REPLICATED.axes == ()


@pytest.mark.parametrize("spec", [P("x", "x"), P(("x", "y"), "x"), P(("x", "x"))], ids=str)
def test_axis_twice(spec):
    """No axis stands twice, in one dimension or in two."""
    with pytest.raises(ValueError, match="uses mesh axis 'x' twice in w") as e:
        ParsedPartitionSpec.from_user_input(spec, "w")
    assert type(e.value) is spmd.ShardingError


def test_unconstrained_has_to_be_allowed():
    """UNCONSTRAINED passes only where the caller says so."""
    with pytest.raises(spmd.ShardingError, match="cannot leave a dimension of w unconstrained"):
        ParsedPartitionSpec.from_user_input(P("x", U), "w")
    assert parsed(P("x", U), allow_unconstrained=True).partitions == (("x",), U)


@pytest.mark.parametrize("entry", ["x", ("x",), 3, U, FROM_ARRAY], ids=repr)
def test_no_spec(entry):
    """Only a PartitionSpec and None are specs."""
    with pytest.raises(TypeError, match=r"^PartitionSpec cannot read w\."):
        ParsedPartitionSpec.from_user_input(entry, "w")


# FROM_ARRAY


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_FROM_ARRAY_survives_pickling(protocol):
    """There is one FROM_ARRAY per process, whatever a pickle went through."""
    tree = {"a": [FROM_ARRAY], "b": (FROM_ARRAY, P("x"))}
    back = pickle.loads(pickle.dumps(tree, protocol))
    assert back["a"][0] is back["b"][0] is FROM_ARRAY


def test_FROM_ARRAY_survives_copying():
    """Copies, deep ones too, are the same object."""
    assert copy.copy(FROM_ARRAY) is FROM_ARRAY
    assert copy.deepcopy({"a": [FROM_ARRAY]})["a"][0] is FROM_ARRAY
    assert repr(FROM_ARRAY) == "FROM_ARRAY"


# Trees of specs

Point = namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclass
class State:
    """A registered class whose leaves have names."""

    params: Any
    step: Any


@jax.tree_util.register_pytree_node_class
class Pair:
    """A registered class whose leaves have none."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten(self):
        """As JAX asks for."""
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, _, children):
        """As JAX asks for."""
        return cls(*children)


def broadcast(specs, value):
    """Per leaf of `value` what the user wrote, or the failure."""
    tree = parse_specs(specs, "specs", "test", role="input")
    found = broadcast_prefix(tree.indices(), jax.tree.structure(value), "specs", "v")
    if isinstance(found, Failure):
        return found
    assert len(found) == len(jax.tree.leaves(value))
    return [show_spec(tree.leaves[i]) for i in found]


@pytest.mark.parametrize(
    ("specs", "value", "expected"),
    [
        (P("a"), {"x": 1, "y": [2, (3, 4)]}, ["P('a')"] * 4),
        (None, {"x": 1, "y": 2}, ["None"] * 2),
        ({"x": P("a"), "y": P("b")}, {"y": [1, 2], "x": 3}, ["P('a')", "P('b')", "P('b')"]),
        ({"x": None, "y": P("b")}, {"x": [1, 2], "y": 3}, ["None", "None", "P('b')"]),
        ({"x": P("a"), "y": P("b")}, {"x": 1, "y": None}, ["P('a')"]),
        ({"x": P("a"), "y": None}, {"x": 1, "y": None}, ["P('a')"]),
        ({"x": P("a"), "y": []}, {"x": 1, "y": []}, ["P('a')"]),
        (Point(P("a"), None), Point((1, 2), 3), ["P('a')", "P('a')", "None"]),
        (State(P("a"), P()), State({"w": 1, "b": 2}, 3), ["P('a')", "P('a')", "P()"]),
        (Pair(P("a"), (P("b"), P("c"))), Pair(1, (2, 3)), ["P('a')", "P('b')", "P('c')"]),
        ([P("a"), FROM_ARRAY], [1, [2]], ["P('a')", "FROM_ARRAY"]),
        (
            OrderedDict(b=P("b"), a=P("a")),
            OrderedDict(b=1, a=2),
            ["P('b')", "P('a')"],
        ),
    ],
)
def test_prefix(specs, value, expected):
    """A spec stands for all leaves below it, in dicts, tuples, namedtuples and own classes."""
    assert broadcast(specs, value) == expected


@pytest.mark.parametrize(
    ("specs", "value", "what", "got"),
    [
        ({"x": P()}, {"x": 1, "y": 2}, "specs with v: the keys differ", "no spec for 'y'"),
        ({"x": P(), "z": P()}, {"x": 1}, "specs with v: the keys differ", "'z' with no value"),
        (
            {"x": {"p": (P(),)}},
            {"x": {"p": [1]}},
            "specs['x']['p'] with v['x']['p']: it is not a pytree prefix",
            "v['x']['p'] is a list of 1 element",
        ),
        ((P(), P()), (1, 2, 3), "specs with v: it is not a pytree prefix", "a tuple of 3 elements"),
        ([P()], 1, "specs with v: it is not a pytree prefix", "v is one leaf"),
        (
            Point(P(), [P()]),
            Point(1, 2),
            "specs.y with v.y: it is not a pytree prefix",
            "v.y is one leaf",
        ),
        (
            Point(P(), P()),
            (1, 2),
            "specs with v: it is not a pytree prefix",
            "a tuple of 2 elements",
        ),
        (
            State({"w": P()}, P()),
            State({"w": 1, "b": 2}, 3),
            "specs.params with v.params: the keys differ",
            "no spec for 'b'",
        ),
        (
            Pair(P(), {"k": P()}),
            Pair(1, {"j": 2}),
            "specs[<flat index 1>] with v[<flat index 1>]: the keys differ",
            "no spec for 'j'; 'k' with no value",
        ),
        ({"x": (P(),)}, {"x": None}, "specs['x'] with v['x']: it is not", "v['x'] is None"),
        ({}, 1, "specs with v: it is not a pytree prefix", "v is one leaf"),
        ([[]], [1], "specs[0] with v[0]: it is not a pytree prefix", "v[0] is one leaf"),
    ],
)
def test_no_prefix(specs, value, what, got):
    """Where two trees part, the first place is named by its path."""
    failure = broadcast(specs, value)
    assert isinstance(failure, Failure)
    assert what in failure.what
    assert got in failure.got


keys = st.sampled_from("abc")
trees = st.recursive(
    st.just(0),
    lambda inner: (
        st.dictionaries(keys, inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.none()
    ),
    max_leaves=10,
)


@st.composite
def trees_with_prefix(draw):
    """A tree, a prefix of it with numbered specs, and the number for each leaf of the tree."""
    tree, numbers = draw(trees), iter(range(1000))

    def cut(node):
        if node == 0 or draw(st.integers(0, 3)) == 0:
            n = next(numbers)
            return P(f"ax{n}"), [f"P('ax{n}')"] * len(jax.tree.leaves(node))
        if node is None:
            return (), []
        if isinstance(node, dict):
            done = {k: cut(node[k]) for k in sorted(node)}
            made: Any = {k: spec for k, (spec, _) in done.items()}
        else:
            done = dict(enumerate(map(cut, node)))
            made = type(node)(spec for spec, _ in done.values())
        return made, [e for _, below in done.values() for e in below]

    specs, expected = cut(tree)
    return tree, specs, expected


@given(trees_with_prefix())
@settings(max_examples=100, deadline=None)
def test_every_prefix_is_broadcast(case):
    """Any tree cut off anywhere gives each leaf the spec above it."""
    tree, specs, expected = case
    if _has_none(tree):  # None in a tree of specs is a spec: no such prefix can be cut through it
        return
    assert broadcast(specs, tree) == expected


def _has_none(tree):
    return any(x is None for x in jax.tree.leaves(tree, is_leaf=lambda x: x is None))


@given(trees, trees)
@settings(max_examples=100, deadline=None)
def test_prefixes_are_those_of_jax(a, b):
    """A tree is refused exactly where JAX's own broadcast refuses it."""
    specs = jax.tree.map(lambda _: P(), a)
    if _has_none(a):
        return
    try:
        jax.tree.broadcast(a, b)
    except ValueError:
        assert isinstance(broadcast(specs, b), Failure)
    else:
        assert broadcast(specs, b) == ["P()"] * len(jax.tree.leaves(b))


class Counted(str):
    """A key that counts how often it is compared."""

    __slots__ = ()
    __hash__ = str.__hash__
    comparisons = 0

    def __eq__(self, other):
        Counted.comparisons += 1
        return str.__eq__(self, other)


def test_keys_are_matched_in_one_pass():
    """Finding the specs of many keys takes some comparisons for each, not one for each pair."""
    specs = {Counted(f"k{i}"): i for i in range(300)}
    treedef = jax.tree.structure({Counted(f"k{i}"): 0 for i in range(300)})
    Counted.comparisons = 0
    found = broadcast_prefix(specs, treedef, "specs", "value")
    assert found == [specs[k] for k in sorted(specs)]
    assert Counted.comparisons < 20 * len(specs)


# Specs as pjit takes them


def test_one_spec_for_all_arguments(in_mesh):
    """A single spec stands for every leaf of every argument."""
    f = pjit(lambda x, y: x, P("data"))
    assert written(call_of(f, X, {"a": X, "b": X}).in_axis_resources) == [P("data")] * 3


@pytest.mark.parametrize("kind", [tuple, list])
def test_list_is_a_tuple_at_the_top(in_mesh, kind):
    """One entry per argument, in a tuple or a list."""
    f = pjit(lambda x, y: x, kind([P("data"), {"a": None, "b": P(None, "model")}]))
    call = call_of(f, X, {"a": X, "b": X})
    assert written(call.in_axis_resources) == [P("data"), None, P(None, "model")]


def test_list_is_a_list_below_the_top(in_mesh):
    """Only the top-level list counts as a tuple."""
    f = pjit(lambda x: x, ([P("data"), P()],))
    assert written(call_of(f, [X, X]).in_axis_resources) == [P("data"), P()]
    with pytest.raises(ValueError, match="it is not a pytree prefix"):
        f((X, X))


def test_list_of_results_is_a_list(in_mesh):
    """In out_axis_resources a list matches a list and no tuple."""
    f = pjit(lambda x: [x, x], None, [P("data"), P()])
    assert written(call_of(f, X).out_axis_resources) == [P("data"), P()]
    with pytest.raises(ValueError, match="out_axis_resources is a list of 2 elements"):
        call_of(pjit(lambda x: (x, x), None, [P("data"), P()]), X)


def test_dict_by_parameter(in_mesh):
    """A dict names parameters, those that it leaves out are as if nothing was said."""
    f = pjit(lambda x, y, z: x, {"z": P("data"), "x": None})
    assert written(call_of(f, X, X, z=X).in_axis_resources) == [None, UNSPECIFIED, P("data")]


def test_left_out(in_mesh):
    """Left out and None differ: None is replicated, left out is open."""
    f = pjit(lambda x: x)
    call = call_of(f, X)
    assert (call.in_axis_resources, call.out_axis_resources) == ((UNSPECIFIED,), (UNSPECIFIED,))
    call = call_of(pjit(lambda x: x, None, None), X)
    assert (call.in_axis_resources, call.out_axis_resources) == ((REPLICATED,), (REPLICATED,))


def test_aliases(in_mesh):
    """in_shardings and out_shardings are the same options."""
    f = pjit(lambda x: x, in_shardings=P("data"), out_shardings=P("model"))
    call = call_of(f, X)
    assert written(call.in_axis_resources) == [P("data")]
    assert written(call.out_axis_resources) == [P("model")]


def test_named_sharding(mesh):
    """A NamedSharding brings its mesh and its spec."""
    f = pjit(lambda x: x, NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model")))
    call = call_of(f, X)
    assert call.mesh == mesh
    assert written(call.in_axis_resources) == [P("data")]
    assert written(call.out_axis_resources) == [P(None, "model")]
    assert f(X).sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)


def test_unconstrained_sharding_of_an_input(mesh):
    """P.UNCONSTRAINED is refused in the NamedSharding of an input as in its spec."""
    with pytest.raises(spmd.ShardingError, match="cannot leave a dimension of in_axis_resources"):
        pjit(lambda x: x, NamedSharding(mesh, P(U)))


def test_own_classes(in_mesh):
    """Registered classes and namedtuples work as arguments, results and trees of specs."""

    def update(s):
        return State(Point(s.params.y, s.params.x), s.step)

    f = pjit(
        update,
        (State(Point(P("data"), None), P()),),
        State(Point(None, P("model")), None),
    )
    y = f(State(Point(X, 2 * X), np.int32(3)))
    np.testing.assert_array_equal(y.params.x, 2 * X)
    np.testing.assert_array_equal(y.params.y, X)
    assert y.params.y.sharding.is_equivalent_to(NamedSharding(in_mesh, P("model")), 2)


def test_None_in_an_argument(in_mesh):
    """None among the values is no leaf and takes no spec, whatever stands there."""
    f = pjit(lambda d: d["x"] * 2, ({"x": P("data"), "y": P("model")},))
    np.testing.assert_array_equal(f({"x": X, "y": None}), 2 * X)
