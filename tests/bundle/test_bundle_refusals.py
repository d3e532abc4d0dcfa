"""What cannot be in a file is refused when it is saved, with its name and what to do instead."""

import collections
import functools
import math

from bundles import Box, same_bits
from hardware import needs_libtpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import P, bundle, host_callback, pjit

X = np.arange(8, dtype=np.float32)


def refused(f, path, *args, **options):
    """The message of the refusal to save a function, and that there is no file."""
    with spmd.make_mesh({"x": 8}):
        compiled = pjit(f, **options).lower(*args).compile()
    with pytest.raises(spmd.BundleError) as error:
        compiled.save(path)
    assert not list(path.parent.iterdir())
    return str(error.value)


def tapped(x):
    """A function with a tap of ours."""
    return host_callback.id_tap(lambda *_, **__: None, x) + 1


def printed(x):
    """A function that prints."""
    jax.debug.print("{}", x.sum())
    return x + 1


def called(x):
    """A function without an effect that JAX knows of, which still calls Python."""
    return jax.pure_callback(lambda a: np.asarray(a), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def called_in_order(x):
    """An ordered callback inside of a loop."""

    def body(_, y):
        shape = jax.ShapeDtypeStruct((), np.float32)
        return y + jax.experimental.io_callback(lambda a: a, shape, y.sum(), ordered=True)

    return jax.lax.fori_loop(0, 2, body, x)


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (tapped, "host_tap"),
        (printed, "debug_"),
        (called, "pure_callback"),
        (called_in_order, "io_callback"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_programs_that_call_back(f, name, tmp_path):
    """Taps, prints and callbacks are named with their lines, however deep they are."""
    lines = refused(f, tmp_path / "f", X, in_axis_resources=P()).splitlines()
    assert lines[0] == (
        f"pjit of `{f.__name__}` cannot be saved: it calls into the process that compiled it."
    )
    assert lines[1] == "  expected  a program without taps, prints and callbacks"
    assert lines[2].startswith(f"  got       {name}")
    assert f"{__file__}:" in lines[2]
    assert lines[3] == "  fix       compile it without them, such as behind a static argument"


def test_mutable_references(tmp_path):
    """A reference that is an argument is named, and so is one that the function closes over."""
    ref = jax.new_ref(jnp.zeros(8))

    def add(r, x):
        r[...] = r[...] + x
        return x

    assert refused(add, tmp_path / "f", ref, X) == (
        "pjit of `add` cannot be saved: argument r is a mutable reference.\n"
        "  fix       pass the array, and return what it becomes"
    )

    def close(x):
        ref[...] = ref[...] + x
        return x

    message = refused(close, tmp_path / "f", X)
    assert "cannot be saved: argument closed-over value 0 is a mutable reference" in message


def test_static_arguments_that_are_not_plain(tmp_path):
    """A function as a static argument has no written form; a plain value has one."""
    message = refused(lambda f, x: f(x), tmp_path / "f", jnp.sin, X, static_argnums=0)
    assert message.startswith(
        "pjit of `<lambda>` cannot be saved: something that belongs to it has no written form.\n"
        "  expected  static arguments of plain values, dtypes of JAX, meshes with named axes\n"
        "  got       PjitFunction: "
    )


NAN = (
    "pjit of `<lambda>` cannot be saved: a static argument or a value beside leaves is NaN, which "
    "is not equal to itself, so no call of the loaded program would match.\n"
    "  expected  values that are equal to what is read back\n"
    "  got       float: nan\n"
    "  fix       pass it as an array, or None in its place"
)


@pytest.mark.parametrize("value", [math.nan, (1, (math.nan, 2))])
def test_static_arguments_that_are_nan(value, tmp_path):
    """NaN has a written form, and is refused with the reason: it is never what was given."""
    path = tmp_path / "f"
    assert refused(lambda s, x: x, path, value, X, static_argnums=0) == NAN
    with spmd.make_mesh({"x": 8}):
        pjit(lambda s, x: x, static_argnums=0).lower(math.inf, X).compile().save(path)
    np.testing.assert_array_equal(spmd.load(path)(math.inf, X), X)


def test_nan_beside_leaves(tmp_path):
    """NaN in what a node holds beside its leaves is refused for the same reason."""
    box = Box(X, math.nan)
    assert refused(lambda b: b.inside, tmp_path / "f", box) == NAN


@pytest.mark.slow
@needs_libtpu
def test_devices_that_are_only_described(tmp_path):
    """A program for a described topology has no devices to run on, here or where it is loaded."""
    with spmd.topology("v5e:2x2", {"data": 4}):
        compiled = pjit(lambda x: x + 1).lower(X).compile()
    with pytest.raises(spmd.BundleError) as error:
        compiled.save(tmp_path / "f")
    assert str(error.value) == (
        "pjit of `<lambda>` cannot be saved: it does not run on devices of this process alone.\n"
        "  expected  a mesh of devices of this process\n"
        "  got       mesh data=4, whose devices are only described\n"
        "  fix       compile and save it where the devices are"
    )
    assert not list(tmp_path.iterdir())


def test_classes_that_no_other_process_can_find(tmp_path):
    """A class of a function's body cannot be found by its name."""
    local = collections.namedtuple("local", "a")
    local.__qualname__ = "test.<locals>.local"
    message = refused(lambda x: local(x), tmp_path / "f", X)
    assert message == (
        "pjit of `<lambda>` cannot be saved: its arguments or results hold "
        f"{__name__}.test.<locals>.local, which cannot be found by its name.\n"
        "  expected  tuples, lists, dicts, named tuples and registered classes of a module, with "
        "plain values beside their leaves"
    )


def test_functions_beside_leaves(tmp_path):
    """A node that holds a function is named with what it holds."""
    message = refused(lambda p: p(), tmp_path / "f", jax.tree_util.Partial(jnp.sin, X))
    assert "its arguments or results hold jax.tree_util.Partial, which holds a " in message
    assert message.splitlines()[0].endswith(" beside its leaves.")


def test_a_loaded_program_is_not_saved_again(tmp_path):
    """XLA writes no complete code of a program that it has read: the file is to be copied."""
    with spmd.make_mesh({"x": 8}):
        pjit(lambda x: x + 1).lower(X).compile().save(tmp_path / "f")
    with pytest.raises(spmd.BundleError) as error:
        spmd.load(tmp_path / "f").save(tmp_path / "g")
    assert str(error.value) == (
        "pjit of `<lambda>` cannot be saved: it was loaded from a file.\n  fix       copy that file"
    )


@pytest.fixture
def compilation_cache(tmp_path):
    """JAX keeps each program in a folder."""
    flags = {
        "jax_compilation_cache_dir": str(tmp_path / "cache"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in flags}
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    for name, value in flags.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def _scanned(x):
    return jax.lax.scan(lambda h, row: (jnp.tanh(h + row), h.sum()), x[0], x)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.tanh(x) + 1,
        lambda x: jnp.tanh(x @ x.T).sum(0),
        lambda x: jnp.sort(x, axis=1),
        lambda x: jnp.fft.fft(x * 2, axis=1).real,
        lambda x: jnp.argmax(x, axis=1),
        _scanned,
    ],
    ids=["elements", "product", "sort", "fft", "argmax", "scan"],
)
def test_programs_of_the_compilation_cache(f, tmp_path, compilation_cache):
    """What JAX has from its cache would load and fail when it runs: it is refused, with a way."""
    mesh = spmd.make_mesh({"x": 8})
    x = np.linspace(-1, 1, 512, dtype=np.float32).reshape(16, 32)
    f.__name__ = "f"

    def compiled():
        jax.clear_caches()
        return pjit(f, in_axis_resources=P("x"), mesh=mesh).lower(x).compile()

    first = compiled()
    first.save(tmp_path / "first")
    assert same_bits(spmd.load(tmp_path / "first")(x), first(x))
    with pytest.raises(spmd.BundleError) as error:
        compiled().save(tmp_path / "second")
    assert str(error.value) == (
        "pjit of `f` cannot be saved: JAX took it from its persistent compilation cache, "
        "and XLA writes no complete code of such a program.\n"
        "  expected  a program that was compiled in this process\n"
        "  fix       save it in a process with JAX_ENABLE_COMPILATION_CACHE=0"
    )


def test_programs_without_functions_of_their_own(tmp_path):
    """A program that only calls a library has no code to lose, and is saved."""
    mesh = spmd.make_mesh({"x": 1}, devices=jax.devices()[:1])
    a = np.eye(8, dtype=np.float32) * 2
    pjit(lambda x: x @ x, mesh=mesh).lower(a).compile().save(tmp_path / "f")
    np.testing.assert_array_equal(spmd.load(tmp_path / "f")(a), a @ a)


def test_a_file_that_cannot_be_written(tmp_path):
    """The old file stays where the new one cannot be put, and nothing else is left."""
    with spmd.make_mesh({"x": 8}):
        compiled = pjit(lambda x: x + 1).lower(X).compile()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        compiled.save(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    compiled.save(tmp_path / "f")
    compiled.save(tmp_path / "f")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "folder"]


def test_partial_functions_keep_their_name(tmp_path):
    """A program of a `functools.partial` calls itself as its compiled form does."""
    with spmd.make_mesh({"x": 8}):
        compiled = pjit(functools.partial(jnp.add, X)).lower(X).compile()
    compiled.save(tmp_path / "f")
    assert repr(spmd.load(tmp_path / "f")) == repr(compiled)


def test_a_sort_that_has_run(tmp_path):
    """XLA cannot write a sort once it has run; the error says to save before."""
    with spmd.make_mesh({"x": 8}):
        compiled = pjit(lambda x: jnp.sort(x)).lower(X).compile()
    compiled.save(tmp_path / "before")
    jax.block_until_ready(compiled(X))  # the call comes back before the sort has run
    with pytest.raises(spmd.BundleError) as error:
        compiled.save(tmp_path / "after")
    lines = str(error.value).splitlines()
    assert lines[0].endswith("cannot be saved: the runtime gives no written form of its code.")
    assert "is not serializable" in lines[1]
    assert lines[2] == "  fix       save it before its first call"
    np.testing.assert_array_equal(spmd.load(tmp_path / "before")(X), X)


@pytest.mark.parametrize(
    ("make", "got", "fix"),
    [
        (
            lambda f: f.lower(X),
            "Lowered of jax.jit",
            "spmd.pjit in the place of jax.jit, which takes the same options",
        ),
        (
            lambda f: f.lower(X).compile(),
            "Compiled of jax.jit",
            "spmd.pjit in the place of jax.jit, which takes the same options",
        ),
        (
            lambda f: "step.spmd",
            "str: 'step.spmd'",
            "bundle.save(compiled, path): the program comes first",
        ),
    ],
    ids=["lowered", "compiled", "path"],
)
def test_what_spmd_did_not_compile(make, got, fix, tmp_path):
    """A program of `jax.jit`, or the path in the first place, is answered with what to write."""
    with pytest.raises(spmd.ArgumentError) as error:
        bundle.save(make(jax.jit(jnp.sin)), tmp_path / "x")
    assert str(error.value) == (
        "bundle is made of what spmd.pjit compiled, and of nothing else.\n"
        "  expected  spmd.pjit(f, ...).lower(*args).compile()\n"
        f"  got       {got}\n"
        f"  fix       {fix}"
    )
    assert not list(tmp_path.iterdir())
