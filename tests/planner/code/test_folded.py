"""Specs as text: what it evaluates to is a prefix that says the same, in as few specs as can be."""

import collections
import dataclasses
from typing import NamedTuple

from hypothesis import given, settings, strategies as st
import jax
import optax
import pytest

from spmd import P
from spmd._spec import parse_specs
from spmd.planner.code.folded import HELPER, folded


class Pair(NamedTuple):
    first: object
    second: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: object
    moments: object
    kind: str = dataclasses.field(default="adam", metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Hidden:
    """A node whose keys nobody knows."""

    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


def is_spec(x):
    """Whether something is a spec, and no container."""
    return isinstance(x, P)


def trimmed(spec):
    """The entries of a spec up to the last one that says something."""
    entries = [
        entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry for entry in spec
    ]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def fewest(tree):
    """How many specs a prefix has at least; what has no leaves has one that says nothing."""
    specs = {trimmed(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_spec)}
    if len(specs) < 2:
        return len(specs)
    return sum(map(fewest, jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)))


def evaluated(found, **names):
    """What a text says, with what it imports and what it calls."""
    space = {"P": P, "jax": jax, **names}
    exec(HELPER + "\n".join(found.imports), space)
    return eval(found.text, space)


keys = st.sampled_from(["w", "w1", "up's", 'a "quoted" key', "ünicode", "", "count"])
leaves = st.sampled_from([
    *(P(), P(None), P("data"), P("data", None), P(("data",)), P(None, "model"), P("model", "data")),
    *(P(("data", "model")), P("a 'quoted' axis"), P(None, None)),
])  # fmt: skip


def containers(inner):
    """Nodes of all kinds around others."""
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(st.integers(-2, 2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(State, inner, inner),
        st.builds(Hidden, inner, inner),
        st.none(),
    )


trees = st.recursive(leaves, containers, max_leaves=12)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(trees)
def test_a_folded_text_says_the_same(tree):
    """Evaluated, it is a prefix that gives each leaf its spec; named parts are of the value."""
    value = jax.tree.map(lambda spec: 0.0, tree, is_leaf=is_spec)
    found = folded(tree, "value")
    prefix = evaluated(found, value=value)
    parsed = parse_specs(prefix, "in_axis_resources", "pjit", role="input")
    at = parsed.broadcast(jax.tree.structure(value), "value")
    got = [trimmed(parsed.leaves[i].to_partition_spec()) for i in at]
    assert got == [trimmed(spec) for spec in jax.tree.leaves(tree, is_leaf=is_spec)]
    assert found.text.count("P(") == fewest(tree)


@settings(max_examples=50, deadline=None)
@given(st.lists(trees, min_size=1, max_size=3))
def test_a_folded_text_of_arguments_says_the_same(trees):
    """A text for several arguments is one spec for all, or has an entry for each of them."""
    values = jax.tree.map(lambda spec: 0.0, trees, is_leaf=is_spec)
    names = [*"abc"[: len(trees)]]
    found = folded(tuple(trees), names)
    prefix = evaluated(found, **dict(zip(names, values, strict=True)))
    if not isinstance(prefix, tuple):
        assert fewest(trees) <= 1
        prefix = (prefix,) * len(trees)
    for entry, tree, value in zip(prefix, trees, values, strict=True):
        parsed = parse_specs(entry, "in_axis_resources", "pjit", role="input")
        at = parsed.broadcast(jax.tree.structure(value), "value")
        got = [trimmed(parsed.leaves[i].to_partition_spec()) for i in at]
        assert got == [trimmed(spec) for spec in jax.tree.leaves(tree, is_leaf=is_spec)]


W = {"down": P("model", None), "up": P(None, "model")}

TEXTS = {
    "one for all": (({"a": P(), "b": P(None)}, P()), ("w", "x"), "P()"),
    "one of one": (({"a": P("data"), "b": P()},), ("w",), '({"a": P("data"), "b": P()},)'),
    "a result": (
        {"w": W, "loss": P()},
        "out",
        '{"loss": P(), "w": {"down": P("model"), "up": P(None, "model")}}',
    ),
    "nothing": (({}, None), ("a", "b"), "None"),
    "several axes": ((P(("data", "model")), P()), ("a", "b"), '(P(("data", "model")), P())'),
    "moments": (
        optax.ScaleByAdamState(count=P(), mu=W, nu={"up": P("data"), "down": P("data", None)}),
        "state",
        "ScaleByAdamState(\n"
        "    count=P(),\n"
        '    mu={"down": P("model"), "up": P(None, "model")},\n'
        '    nu=P("data"),\n'
        ")",
    ),
    "no literal": (
        ({"state": State(W, {"up": P("data"), "down": P("data")})}, P()),
        ("train", "x"),
        "(\n"
        "    {\n"
        '        "state": specs_like(train["state"], {\n'
        '            ".params[\'down\']": P("model"),\n'
        '            ".params[\'up\']": P(None, "model"),\n'
        '            ".moments": P("data"),\n'
        "        }),\n"
        "    },\n"
        "    P(),\n"
        ")",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_folded_texts(name):
    """Texts as they are."""
    tree, names, expected = TEXTS[name]
    assert folded(tree, names).text == expected


def test_what_a_text_imports():
    """A named tuple comes from where users know it, once; one that is nowhere to find is built."""
    moments = optax.ScaleByAdamState(count=P(), mu=P("data"), nu=P())
    assert folded((moments, moments), ("a", "b")).imports == ("from optax import ScaleByAdamState",)

    class Local(NamedTuple):
        a: object
        b: object

    found = folded(Local(P(), P("data")), "value")
    assert found.imports == ()
    assert found.needs_helper
    assert found.text == 'specs_like(value, {".a": P(), ".b": P("data")})'
