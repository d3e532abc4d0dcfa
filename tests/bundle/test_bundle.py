"""`Compiled.save` and `spmd.load`: what comes back is the program that was saved."""

import concurrent.futures
import dataclasses
import os
import stat

from bundles import State, everything, everything_args, same_bits
import jax
import jax.numpy as jnp
import numpy as np
from oracle import counted, put
import pytest

import spmd
from spmd import NamedSharding, P, pjit

X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope="module")
def mesh():
    """Devices in an order of their own, on three axes."""
    devices = np.array(jax.devices())[[3, 1, 0, 2, 7, 6, 4, 5]]
    return spmd.Mesh(devices.reshape(2, 2, 2), ("a", "b", "c"))


@pytest.fixture(scope="module")
def saved(mesh, tmp_path_factory):
    """A program with every kind of argument, compiled here, and its file."""
    f = pjit(
        everything,
        in_axis_resources={"state": P("b"), "pair": P(("a", "c")), "small": P()},
        static_argnums=6,
        donate_argnums=0,
        mesh=mesh,
    )
    args, kwargs = everything_args()
    compiled = f.lower(*args, **kwargs).compile()
    path = tmp_path_factory.mktemp("bundle") / "everything.spmd"
    compiled.save(path)
    return compiled, path


@pytest.fixture(scope="module")
def loaded(saved):
    """The same program from its file."""
    return spmd.load(saved[1])


def run(compiled):
    """Calls with fresh arguments, since the first is donated."""
    args, kwargs = everything_args()
    return compiled(*args, **kwargs)


def test_loading_and_calling_do_no_work(saved):
    """Neither the load nor the calls trace, lower or compile."""
    again, work = counted(spmd.load, saved[1])
    assert work == spmd.Counts()
    _, work = counted(run, again)
    assert work == spmd.Counts()


def test_results_are_the_same_to_the_bit(saved, loaded):
    """Values, structure, dtypes, weak types and shardings of the results are those of before."""
    for _ in range(3):
        assert same_bits(run(saved[0]), run(loaded))


def test_everything_that_a_program_says_of_itself(saved, loaded):
    """Names, trees, types, shardings, specs and donation are those of the program saved."""
    compiled = saved[0]
    assert type(loaded) is spmd.Compiled
    properties = """name mesh in_tree out_tree in_avals in_shardings out_shardings in_specs
        out_specs out_info donate_argnums args_info input_shardings output_shardings
        input_formats output_formats"""
    for name in properties.split():
        got, expected = getattr(loaded, name), getattr(compiled, name)
        assert jax.tree.structure(got) == jax.tree.structure(expected), name
        assert jax.tree.leaves(got) == jax.tree.leaves(expected), name
    assert repr(loaded) == repr(compiled) == "<spmd.Compiled of `everything`>"
    assert loaded.memory_analysis().temp_size_in_bytes == (
        compiled.memory_analysis().temp_size_in_bytes
    )
    assert loaded.cost_analysis() == compiled.cost_analysis()
    assert jax.tree.leaves(loaded.jax_stage.input_shardings) == jax.tree.leaves(
        compiled.jax_stage.input_shardings
    )


def test_the_report_is_the_same(saved, loaded):
    """Collectives with their source lines, cost, memory and moved arguments come back."""
    report = loaded.report()
    assert report == saved[0].report()
    assert report.collectives
    assert report.collectives[0].source.file.endswith("bundles.py")


def test_the_report_knows_which_arguments_move(mesh, tmp_path):
    """An argument that lay elsewhere when the program was lowered is in the report of both."""
    f = pjit(lambda x: x + 1, in_axis_resources=P("a"), mesh=mesh)
    compiled = f.lower(put(X, mesh, P(None, "b"))).compile()
    compiled.save(tmp_path / "f")
    report = spmd.load(tmp_path / "f").report()
    assert [r.argument for r in report.reshards] == ["x"]
    whole = compiled.report()
    assert dataclasses.replace(report, findings=whole.findings) == whole
    # How values are split inside is known from what was lowered, which the file does not have.
    assert [one.kind for one in whole.findings] == ["moved-argument", *["unused-axis"] * 2]
    assert report.findings == whole.findings[:1]


def test_donated_arguments_are_gone(mesh, tmp_path):
    """A loaded program takes the buffers that are donated to it, and says so of the second use."""
    f = pjit(
        lambda x, y: x + y,
        in_axis_resources=P("a"),
        out_axis_resources=P("a"),
        donate_argnums=0,
        mesh=mesh,
    )
    compiled = f.lower(X, X).compile()
    compiled.save(tmp_path / "f")
    g = spmd.load(tmp_path / "f")
    x, y = put(X, mesh, P("a")), put(X, mesh, P("a"))
    np.testing.assert_array_equal(g(x, y), X + X)
    assert x.is_deleted()
    assert not y.is_deleted()
    with pytest.raises(spmd.DonatedArrayError, match="cannot use argument x: its buffers are gone"):
        g(x, y)


def wrong_calls():
    """Calls that a compiled program refuses, each in a way of its own."""
    args, kwargs = everything_args()
    yield args[:5], kwargs
    yield (*args[:6], 4), kwargs
    yield (*args[:6], 3.0), kwargs
    yield args, {}
    yield (State(X, X[0], label="second"), *args[1:]), kwargs
    yield (State(X[:4], X[0], label="first"), *args[1:]), kwargs
    yield (*args[:2], jax.random.key_data(args[2]), *args[3:]), kwargs
    yield (*args[:4], np.ones((3,), np.float32), *args[5:]), {"bias": "text"}
    yield args, {"bias": 0.5, "bais": 1}
    placed = jax.device_put(X, jax.devices()[1])
    yield (State(placed, X[0], label="first"), *args[1:]), kwargs


@pytest.mark.parametrize("number", range(10))
def test_wrong_calls_get_the_same_errors(saved, loaded, number):
    """What the compiled program refuses the loaded one refuses with the same class and words."""
    args, kwargs = list(wrong_calls())[number]
    with pytest.raises(spmd.SpmdError) as expected:
        saved[0](*args, **kwargs)
    with pytest.raises(type(expected.value)) as got:
        loaded(*args, **kwargs)
    assert str(got.value) == str(expected.value)


def test_calls_inside_of_a_trace_are_refused(loaded):
    """A loaded program cannot be transformed, as a compiled one cannot."""
    args, kwargs = everything_args()
    with pytest.raises(spmd.ArgumentError, match="was compiled ahead of time"):
        jax.jit(lambda b: loaded(*args, bias=b))(kwargs["bias"])


def test_a_repeated_call_runs_in_cpp(mesh, tmp_path, monkeypatch):
    """From the second call on, no Python of ours runs: the dispatcher repeats it by itself."""
    pjit(lambda x: x + 1, in_axis_resources=P("a"), mesh=mesh).lower(X).compile().save(
        tmp_path / "f"
    )
    f = spmd.load(tmp_path / "f")
    x = put(X, mesh, P("a"))
    first = f(x)
    monkeypatch.setattr("spmd.stages.jtu.tree_unflatten", None)
    assert same_bits(f(x), first)


def test_on_other_devices(mesh, tmp_path):
    """`mesh` puts the program onto devices of the same kind, each in the place of another."""
    f = pjit(lambda x: jnp.cumsum(x.T, axis=0), in_axis_resources=P("a", "b"), mesh=mesh)
    f.lower(X).compile().save(tmp_path / "f")
    other = spmd.Mesh(mesh.devices.ravel()[::-1].reshape(2, 2, 2), mesh.axis_names)
    g = spmd.load(tmp_path / "f", mesh=other)
    assert g.mesh == other
    out = g(put(X, other, P("a", "b")))
    np.testing.assert_array_equal(out, np.cumsum(X.T, axis=0))
    assert out.sharding.mesh == other
    with pytest.raises(spmd.ShardingError, match="was compiled for another sharding"):
        g(put(X, mesh, P("a", "b")))


def test_where_a_file_is_written(tmp_path, mesh):
    """A link leads to the new file, and an error names the file that was asked for."""
    compiled = pjit(lambda x: x + 1, in_axis_resources=P("a"), mesh=mesh).lower(X).compile()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    compiled.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    np.testing.assert_array_equal(spmd.load(tmp_path / "file")(X), X + 1)
    missing = tmp_path / "nowhere" / "file"
    with pytest.raises(FileNotFoundError) as error:
        compiled.save(missing)
    assert error.value.filename == str(missing)
    assert not [*tmp_path.glob(".*")]


def test_what_is_there_already(tmp_path, mesh):
    """A new file can be read by those who could read the old one; a named pipe stays one."""
    compiled = pjit(lambda x: x + 1, in_axis_resources=P("a"), mesh=mesh).lower(X).compile()
    compiled.save(tmp_path / "file")
    (tmp_path / "file").chmod(0o600)
    compiled.save(tmp_path / "file")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600

    os.mkfifo(tmp_path / "pipe")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        read = pool.submit((tmp_path / "pipe").read_bytes)
        compiled.save(tmp_path / "pipe")
        assert read.result() == (tmp_path / "file").read_bytes()
    assert (tmp_path / "pipe").is_fifo()


def test_on_a_part_of_the_devices(tmp_path):
    """A program of two devices loads on those of their numbers, or on the two that are given."""
    two = spmd.Mesh(np.array(jax.devices()[2:4]), ("x",))
    f = pjit(lambda x: x * 2, in_axis_resources=P("x"), out_axis_resources=P("x"), mesh=two)
    f.lower(X).compile().save(tmp_path / "f")
    for mesh in (None, spmd.Mesh(np.array(jax.devices()[6:]), ("x",))):
        out = spmd.load(tmp_path / "f", mesh=mesh)(X)
        np.testing.assert_array_equal(out, X * 2)
        assert out.devices() == {*(mesh or two).devices.flat}


def test_one_device_without_a_mesh(tmp_path):
    """A program whose mesh only an argument says comes back on the device of that argument."""
    x = jax.device_put(X, jax.devices()[5])
    compiled = pjit(lambda x, y: x @ y).lower(x, X).compile()
    compiled.save(tmp_path / "f")
    f = spmd.load(tmp_path / "f")
    assert same_bits(f(x, X), compiled(x, X))
    assert f(x, X).devices() == {jax.devices()[5]}


def test_explicit_axes(tmp_path):
    """Results on a mesh with Explicit axes have it in their type again."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    compiled = pjit(lambda x: x + 1, in_axis_resources=P("d"), mesh=mesh).lower(X).compile()
    compiled.save(tmp_path / "f")
    out = spmd.load(tmp_path / "f")(X)
    assert same_bits(out, compiled(X))
    assert jax.typeof(out) == jax.typeof(compiled(X))


def test_shardings_that_no_spec_says(mesh, tmp_path):
    """A result whose tiles follow no axis of the mesh comes back where it was."""
    halves = spmd.Mesh(np.array(jax.devices()), ("x",))
    f = pjit(lambda x: x.reshape(2, 32), in_axis_resources=P("x"), mesh=halves)
    compiled = f.lower(X).compile()
    compiled.save(tmp_path / "f")
    out = spmd.load(tmp_path / "f")(X)
    np.testing.assert_array_equal(out, X.reshape(2, 32))
    assert out.sharding.is_equivalent_to(compiled(X).sharding, 2)


def test_memory_kinds(tmp_path):
    """An argument in the memory of the host is wanted there again."""
    mesh = spmd.Mesh(np.array(jax.devices()), ("x",))
    kinds = [m.kind for m in jax.devices()[0].addressable_memories()]
    for kind in kinds:
        there = NamedSharding(mesh._plain, P("x"), memory_kind=kind)
        compiled = pjit(lambda x: x.sum(), in_axis_resources=there).lower(X).compile()
        compiled.save(tmp_path / kind)
        f = spmd.load(tmp_path / kind)
        assert f.in_shardings == compiled.in_shardings
        assert float(f(jax.device_put(X, there))) == X.sum()
