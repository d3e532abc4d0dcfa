"""Rows of tables before compilation: looked up and added, where devices have parts of both."""

from hardware import require_libtpu
import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd import P, pjit

_COLUMNS = 256
_TABLE = 4096
"""Rows of the table."""


def _words(count):
    """Places of so many words in the table, and a row for each."""
    ids, rows = (16, count // 16), (16, count // 16, _COLUMNS)
    return jax.ShapeDtypeStruct(ids, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.float32)


def _lowered(f, mesh, given, ins, outs):
    with mesh:
        return pjit(f, in_axis_resources=ins, out_axis_resources=outs).lower(*given)


def _added(mesh, words, table, count):
    """The rows of so many words, added to those of a table of zeros."""

    def f(ids, rows):
        return jnp.zeros((_TABLE, _COLUMNS), rows.dtype).at[ids].add(rows)

    return _lowered(f, mesh, _words(count), words, table)


def _looked_up(mesh, words, table, count):
    """The rows of so many words."""
    whole = jax.ShapeDtypeStruct((_TABLE, _COLUMNS), jnp.float32)
    ids, _ = _words(count)
    return _lowered(lambda table, ids: table[ids], mesh, (whole, ids), (table, words), words)


def _sent(found):
    """Each exchange: kind, axes, and bytes on the wire."""
    return sorted((one.kind, one.mesh_axes, one.total_wire_bytes) for one in found.collectives)


def _bytes(rows, columns=_COLUMNS, of=8):
    """Of so many rows, gathered from so many devices."""
    return rows * columns * 4 * (of - 1) // of


_FLAT, _GRID = {"data": 8}, {"data": 4, "model": 2}
_FEW = [("all-gather", ("data",), _bytes(512, 1)), ("all-gather", ("data",), _bytes(512))]
_SUMMED = [("all-reduce", ("data",), 2 * _bytes(_TABLE))]
#: What crosses where words are added: axes, places of words and of the table, how many words.
_ADDED = [
    (_FLAT, P("data"), P("data"), 512, _FEW),
    (_FLAT, P("data"), P("data"), _TABLE, _SUMMED),
    (_FLAT, P("data"), P("data"), 6144, _SUMMED),
    (_FLAT, P("data"), P("data"), 8 * _TABLE, _SUMMED),
    (
        _GRID, P("data"), P("data", "model"), 6144,
        [("all-reduce", ("data",), 2 * _bytes(_TABLE, _COLUMNS // 2, 4))],
    ),
    (
        _GRID, P(("data", "model")), P(("data", "model")), 6144,
        [("all-reduce", ("data", "model"), 2 * _bytes(_TABLE))],
    ),
    # Half of a table is less than these rows, but the whole is more: they are sent.
    (
        _GRID, P("data"), P(("data", "model")), 3072,
        [("all-gather", ("data",), _bytes(3072, each, 4)) for each in (1, _COLUMNS)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("axes", "words", "table", "count", "expected"), _ADDED)
def test_words_are_added_before_they_are_sent_where_they_are_more(
    axes, words, table, count, expected
):
    """Rows that are no fewer than the table's stay, and the tables are summed."""
    lowered = _added(spmd.make_mesh(axes), words, table, count)
    assert _sent(spmd.preview(lowered)) == expected
    assert _sent(spmd.report(lowered)) == expected


@pytest.mark.parametrize("count", [512, 6144])
def test_words_that_replace_rows_are_sent(count):
    """Nothing adds them up: the last one counts, wherever it is."""

    def f(ids, rows):
        return jnp.zeros((_TABLE, _COLUMNS), rows.dtype).at[ids].set(rows)

    lowered = _lowered(f, spmd.make_mesh(_FLAT), _words(count), P("data"), P("data"))
    expected = [("all-gather", ("data",), _bytes(count, each)) for each in (1, _COLUMNS)]
    assert _sent(spmd.preview(lowered)) == expected
    assert _sent(spmd.report(lowered)) == expected


@pytest.mark.parametrize("way", ["add", "max"])
def test_rows_that_are_there_are_gathered_first(way):
    """A table that is no constant is whole before words are added to it."""

    def f(ids, rows, table):
        return getattr(table.at[ids], way)(rows)

    table = jax.ShapeDtypeStruct((_TABLE, _COLUMNS), jnp.float32)
    given = *_words(6144), table
    lowered = _lowered(f, spmd.make_mesh(_FLAT), given, P("data"), P("data"))
    expected = [("all-gather", ("data",), _bytes(_TABLE)), *_SUMMED]
    assert _sent(spmd.preview(lowered)) == expected
    assert _sent(spmd.report(lowered)) == expected


#: The same where words are looked up.
_LOOKED_UP = [
    (
        _FLAT, P("data"), P("data"), 512,
        [("all-gather", ("data",), _bytes(512, 1)), ("all-reduce", ("data",), 2 * _bytes(512))],
    ),
    (_FLAT, P("data"), P("data"), _TABLE, [("all-gather", ("data",), _bytes(_TABLE))]),
    (_FLAT, P("data"), P("data"), 6144, [("all-gather", ("data",), _bytes(_TABLE))]),
    (
        _GRID, P("data"), P(None, "model"), 6144,
        [("all-gather", ("model",), _bytes(6144 // 4, of=2))],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("axes", "words", "table", "count", "expected"), _LOOKED_UP)
def test_words_that_are_looked_up(axes, words, table, count, expected):
    """A table is gathered over the axes of its own rows; of its columns only what was looked up."""
    lowered = _looked_up(spmd.make_mesh(axes), words, table, count)
    assert _sent(spmd.preview(lowered)) == expected
    assert _sent(spmd.report(lowered)) == expected


def test_columns_of_what_was_looked_up_change_places():
    """Where the axis of the columns splits the words, too, an all-to-all is less than a gather."""
    lowered = _looked_up(spmd.make_mesh(_FLAT), P("data"), P(None, "data"), 512)
    expected = [
        ("all-gather", ("data",), _bytes(512, 1)),
        ("all-to-all", ("data",), _bytes(512) // 8),
    ]
    assert _sent(spmd.preview(lowered)) == expected
    assert _sent(spmd.report(lowered)) == expected


#: On slices of TPUs: the kind, and the share of the table's bytes that crosses.
_SLICES = [
    ("v5e:2x4", {"data": 8}, P("data"), P("data"), "reduce-scatter"),
    ("v5e:4x4", {"data": 16}, P("data"), P("data"), "all-reduce"),
    ("v5e:2x4", _GRID, P(("data", "model")), P(("data", "model")), "reduce-scatter"),
    ("v5e:2x4", _GRID, P(("data", "model")), P(("model", "data")), "all-reduce"),
]


def _of_table(lowered, kind):
    """What crosses if the tables are summed."""
    n = lowered.mesh.devices.size
    twice = 2 if kind == "all-reduce" else 1
    return [(kind, tuple(lowered.mesh.axis_names), twice * _bytes(_TABLE, of=n))]


@pytest.mark.parametrize(("topology", "axes", "words", "table", "kind"), _SLICES)
def test_tables_are_scattered_on_tpu(topology, axes, words, table, kind):
    """Where their rows lie in the order of the words' devices, and sums are scattered at all."""
    require_libtpu()
    lowered = _added(spmd.topology(topology, axes), words, table, 6144)
    assert _sent(spmd.preview(lowered)) == _of_table(lowered, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "axes", "words", "table", "kind"), _SLICES)
def test_tables_as_the_compiler_scatters_them(topology, axes, words, table, kind):
    """The prediction and libtpu agree on all of these."""
    require_libtpu()
    lowered = _added(spmd.topology(topology, axes), words, table, 6144)
    assert _sent(spmd.report(lowered)) == _of_table(lowered, kind)


# Many tables

_TABLES, _WORDS, _WIDE = 8, 1024, 16
_ALL, _ROWS = (count * _TABLES * _WIDE * 4 for count in (_TABLE, _WORDS))
"""Bytes of all tables, and of rows that are looked up in them."""


def _looked_up_in_many(mesh, tables, words, rows):
    """Rows of each table, by words of each."""
    given = (
        jax.ShapeDtypeStruct((_TABLES, _TABLE, _WIDE), jnp.float32),
        jax.ShapeDtypeStruct((_WORDS, _TABLES), jnp.int32),
    )
    look_up = jax.vmap(lambda table, ids: table[ids], in_axes=(0, 1), out_axes=1)
    return _lowered(look_up, mesh, given, (tables, words), rows)


def _added_to_many(mesh, tables, words, _):
    """Rows that are added to each table."""
    given = (
        jax.ShapeDtypeStruct((_WORDS, _TABLES), jnp.int32),
        jax.ShapeDtypeStruct((_WORDS, _TABLES, _WIDE), jnp.float32),
    )

    def f(ids, rows):
        return jnp.zeros((_TABLE, _WIDE)).at[ids].add(rows)

    return _lowered(jax.vmap(f, in_axes=(1, 1)), mesh, given, (words, words), tables)


#: What crosses: axes, places of tables (number first), words (table last) and rows.
_MANY = [
    # Words of each table that are split: all tables are sent, and then rows, if they are wanted so.
    (
        _looked_up_in_many, _FLAT, P("data"), P("data"), P("data"),
        [("all-gather", ("data",), _ALL * 7 // 8)],
    ),
    (
        _looked_up_in_many, _FLAT, P("data"), P("data"), P(None, "data"),
        [("all-gather", ("data",), _ALL * 7 // 8), ("all-to-all", ("data",), _ROWS // 8 * 7 // 8)],
    ),
    (
        _looked_up_in_many, _GRID, P("data"), P("data", "model"), P("data", "model"),
        [("all-gather", ("data",), _ALL * 3 // 4)],
    ),
    # Words that are whole, or split by their table, or over other axes: none.
    (_looked_up_in_many, _FLAT, P("data"), P(), P(None, "data"), []),
    (_looked_up_in_many, _FLAT, P("data"), P(None, "data"), P(None, "data"), []),
    (_looked_up_in_many, _GRID, P("data"), P("model"), P("model", "data"), []),
    (_looked_up_in_many, _GRID, P(), P("data", "model"), P("data", "model"), []),
    # Words that are in more parts have their tables sent to them.
    (
        _looked_up_in_many, _GRID, P("model"), P(None, "data"), P(None, "data"),
        [("collective-permute", ("data:part", "model:part"), _ALL // 4)],
    ),
    # What is added is summed as whole tables, or where the words are.
    (
        _added_to_many, _FLAT, P("data"), P("data"), None,
        [("all-reduce", ("data",), 2 * _ALL * 7 // 8)],
    ),
    (
        _added_to_many, _GRID, P("data"), P("data", "model"), None,
        [
            ("all-reduce", ("data",), 2 * (_ALL // 2) * 3 // 4),
            ("collective-permute", ("data:part", "model:part"), _ALL // 4),
        ],
    ),
    (
        _added_to_many, _GRID, P("data"), P(None, "model"), None,
        [("collective-permute", ("data:part", "model:part"), _ALL // 4)],
    ),
    (
        _added_to_many, _GRID, P("data"), P("model", "data"), None,
        [("all-reduce", ("model",), 2 * (_ALL // 4) // 2)],
    ),
    (_added_to_many, _FLAT, P("data"), P(None, "data"), None, []),
]  # fmt: skip


@pytest.mark.parametrize(("build", "axes", "tables", "words", "rows", "expected"), _MANY)
def test_many_tables(build, axes, tables, words, rows, expected):
    """By hand, and as the compiler for CPUs has them."""
    lowered = build(spmd.make_mesh(axes), tables, words, rows)
    assert _sent(spmd.preview(lowered)) == expected
    assert _sent(spmd.report(lowered)) == expected


def test_words_that_a_reshape_makes_are_where_they_were():
    """XLA adds a dimension of size 1 by a reshape, which takes a place along before lookups do."""
    mesh = spmd.make_mesh(_FLAT)
    tables, rows = P("data"), P(None, "data")
    given = (
        jax.ShapeDtypeStruct((_TABLES, _TABLE, _WIDE), jnp.float32),
        jax.ShapeDtypeStruct((_TABLES, _WORDS), jnp.int32),
    )

    def f(tables, ids):
        return jnp.take_along_axis(tables, ids[:, :, None], 1)

    lowered = _lowered(f, mesh, given, (tables, rows), tables)
    found = _sent(spmd.preview(lowered))
    assert ("all-gather", ("data",), _ALL * 7 // 8) in found
    assert found == _sent(spmd.report(lowered))
