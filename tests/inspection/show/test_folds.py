"""Paths as few rows: each row stands for exactly the arrays that it names."""

import itertools

from hypothesis import given, settings, strategies as st
import pytest

from spmd.inspection.show.folds import folded, parts_of


def rows(paths):
    """Rows of paths by what they look like: the longest spelling, and how many arrays."""
    found = folded([*paths.items()], lambda one: one[0], lambda one: one[1])
    return {row.spellings[0]: len(row.items) for row in found}


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("x", ["x"]),
        ("state['a.b'][0].mu", ["state", "['a.b']", "[0]", ".mu"]),
        ("w[\"it's\"]['[x]']", ["w", '["it\'s"]', "['[x]']"]),
        ("x[<flat index 2>]", ["x", "[<flat index 2>]"]),
        ("", [""]),
        ("odd.['", ["odd.['"]),
    ],
)
def test_steps_of_a_path(path, parts):
    """Brackets, attributes and names are steps, whatever stands in quotes."""
    assert [*parts_of(path)] == parts


def test_what_is_alike_as_a_whole_is_its_beginning():
    """All below a name is the name; a single array keeps its whole path."""
    assert rows({"s['a']['x']": 1, "s['a']['y'][0]": 1, "s['b']": 2, "t['c']['d']": 3}) == {
        "s['a']": 2, "s['b']": 1, "t['c']['d']": 1,
    }  # fmt: skip
    assert rows({"s['a']": 1, "s['b']": 1}) == {"s": 2}


def test_what_differs_in_one_step():
    """Names, attributes and numbers that differ in one step are listed there."""
    layers = {f"p[{i}]['{k}']": k in "qk" for i in range(12) for k in "qkv"}
    assert rows(layers) == {"p[0 to 11]['q', 'k']": 24, "p[0 to 11]['v']": 12}
    assert rows({"o.mu['w']": 1, "o.nu['w']": 1, "o.mu['b']": 2, "o.nu['b']": 2}) == {
        "o.{mu, nu}['w']": 2, "o.{mu, nu}['b']": 2,
    }  # fmt: skip
    assert rows({"p[0]": 1, "p[1]": 2, "p[2]": 1}) == {"p[0, 2]": 2, "p[1]": 1}


def test_parameters_and_their_moments():
    """Trees that lie in different depths, and begin and end alike, are one row."""
    state = {f"s{at}['{k}']": k for at in ("['p']", "['o'].mu", "['o'].nu") for k in "wb"}
    assert rows(state) == {
        "s{['p'], ['o'].mu, ['o'].nu}['w']": 3, "s{['p'], ['o'].mu, ['o'].nu}['b']": 3,
    }  # fmt: skip


def test_shorter_spellings():
    """Where there is little room, the first are named and the others counted."""
    (row,) = folded(
        [*((f"p['{k}']", 1) for k in "abcde")] + [("p['f']", 2)],
        lambda one: one[0], lambda one: one[1],
    )[:1]  # fmt: skip
    assert row.spellings == [
        "p['a', 'b', 'c', 'd', 'e']", "p['a', 'b', 'c', 2 more]", "p['a', 'b', 3 more]",
        "p['a', 4 more]",
    ]  # fmt: skip
    state = [(f"s{at}['{k}']", k) for at in ("['p']", "['o'].mu") for k in "wb"]
    (row, _) = folded(state, lambda one: one[0], lambda one: one[1])
    assert row.spellings == ["s{['p'], ['o'].mu}['w']", "s{['p'], 1 more}['w']", "s...['w']"]


def test_one_path_twice():
    """Arrays that share a path are all there."""
    found = folded([("x", 1), ("x", 2), ("x['y']", 1)], lambda one: one[0], lambda one: one[1])
    assert sum(len(row.items) for row in found) == 3


steps = st.sampled_from(["['a']", "['b']", "[0]", "[1]", "[2]", ".mu"])
paths = st.lists(steps, max_size=4).map(lambda found: ("r", *found))


def begins(path, with_this):
    """Whether a path is below another, or is it."""
    return path[: len(with_this)] == with_this


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.dictionaries(paths, st.sampled_from([0, 1]), max_size=12))
def test_rows_are_exact(given_paths):
    """Every array is in one row, and what a row names is what it holds, and no other."""
    # In a tree no array is above another one.
    trees = [p for p in given_paths if not any(p != q and begins(q, p) for q in given_paths)]
    items = [("".join(path), given_paths[path]) for path in trees]
    found = folded(items, lambda one: one[0], lambda one: one[1])
    assert sorted(one for row in found for one in row.items) == sorted(items)
    for row in found:
        assert len({look for _, look in row.items}) == 1
        named = [parts_of("".join(steps)) for steps in itertools.product(*row.parts)]
        below = {"".join(p) for p in trees for name in named if begins(p, name)}
        assert {path for path, _ in row.items} == below
    order = [items.index(row.items[0]) for row in found]
    assert order == sorted(order)
