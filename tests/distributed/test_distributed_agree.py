"""Values of all processes: gathered, broadcast and compared, in one process and in several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import passed

import spmd
from spmd import distributed


def test_one_process():
    """In one process a gathered value is stacked alone, a broadcast one is the same, all agree."""
    tree = {"a": np.arange(3), "b": (2.5, jnp.ones((2, 2)))}
    gathered = distributed.process_allgather(tree)
    assert jax.tree.map(np.shape, gathered) == {"a": (1, 3), "b": ((1,), (1, 2, 2))}
    np.testing.assert_array_equal(gathered["a"], [[0, 1, 2]])
    tiled = distributed.process_allgather(tree, tiled=True)
    assert jax.tree.map(np.shape, tiled) == {"a": (3,), "b": ((1,), (2, 2))}
    same = distributed.broadcast_one_to_all(tree)
    assert jax.tree.map(np.shape, same) == {"a": (3,), "b": ((), (2, 2))}
    np.testing.assert_array_equal(same["a"], [0, 1, 2])
    distributed.assert_equal_across_processes(tree)


@pytest.mark.parametrize(
    "name", ["process_allgather", "broadcast_one_to_all", "assert_equal_across_processes"]
)
def test_what_is_no_array(name):
    """Every leaf that is no array is named, and a tracer is."""
    fun = getattr(distributed, name)
    with pytest.raises(spmd.ArgumentError) as e:
        fun({"a": 1, "b": "text", "c": [None, object]})
    assert str(e.value) == (
        f"{name} cannot take tree['b']: it is no array.\n"
        "  expected  arrays, numbers, None, and containers of them\n"
        "  got       str: 'text'\n"
        f"{name} cannot take tree['c'][1]: it is no array.\n"
        "  expected  arrays, numbers, None, and containers of them\n"
        "  got       type: <class 'object'>"
    )
    with pytest.raises(spmd.ArgumentError) as e:
        jax.jit(lambda x: fun([x]))(1.0)
    assert str(e.value) == (
        f"{name} cannot take tree[0]: it has no value yet.\n"
        "  expected  arrays outside of any transformation\n"
        "  got       a tracer"
    )


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys(impl):
    """Random keys stay what they are, one or many; they can be compared, too."""
    one = jax.random.key(7, impl=impl)
    tree = {"one": one, "many": jax.random.split(one, (2, 3))}
    data = jax.tree.map(jax.random.key_data, tree)

    def check(found, wanted):
        assert [k.dtype for k in jax.tree.leaves(found)] == [one.dtype] * 2
        jax.tree.map(
            np.testing.assert_array_equal, jax.tree.map(jax.random.key_data, found), wanted
        )

    stacked = jax.tree.map(lambda x: x[None], data)
    check(distributed.process_allgather(tree), stacked)
    check(distributed.process_allgather(tree, tiled=True), stacked | {"many": data["many"]})
    check(distributed.broadcast_one_to_all(tree), data)
    distributed.assert_equal_across_processes(tree)


@pytest.mark.slow
def test_values_of_two_processes(tmp_path):
    """Gathered and broadcast values are exact, bit by bit, for every dtype and 64-bit widths."""
    passed(
        tmp_path,
        """
        import ml_dtypes
        values = {
            "f64": np.float64(1 / 3) + me,
            "i64": np.array([[2**62 + me]]),
            "bf16": np.array([1.5, -0.0, np.nan], ml_dtypes.bfloat16),
            "fp8": np.array([0.5 + me], ml_dtypes.float8_e4m3fn),
            "bool": np.array([True, me == 1]),
            "complex": np.complex128(1j * me),
            "empty": np.zeros((0, 3)),
            "jax": jnp.full((2,), me, jnp.int8),
            "number": 7 + me,
        }
        found = d.process_allgather(values)
        for name, value in values.items():
            got, own = found[name], np.asarray(value)
            assert got.shape == (2, *own.shape) and got.dtype == own.dtype, name
            assert got[me].tobytes() == own.tobytes(), name
        assert found["f64"].tolist() == [1 / 3, 1 / 3 + 1]
        assert found["i64"].ravel().tolist() == [2**62, 2**62 + 1]
        tiled = d.process_allgather(values, tiled=True)
        assert tiled["bool"].tolist() == [True, False, True, True]
        assert tiled["i64"].shape == (2, 1) and tiled["number"].tolist() == [7, 8]
        assert d.process_allgather({}) == {}

        other = d.broadcast_one_to_all(values, is_source=me == 1)
        zero = d.broadcast_one_to_all({"x": np.float32(-0.0), "n": None})
        assert np.signbit(zero["x"]) and zero["n"] is None
        for name, got in other.items():
            assert got.dtype == np.asarray(values[name]).dtype, name
        assert (other["number"], float(other["f64"])) == (8, 1 / 3 + 1)
        assert np.isnan(other["bf16"][2]) and np.signbit(other["bf16"][1])

        keys = jax.random.split(jax.random.key(me), 3)
        every = [jax.random.key_data(jax.random.split(jax.random.key(i), 3)) for i in (0, 1)]
        got = d.process_allgather(keys)
        np.testing.assert_array_equal(jax.random.key_data(got), np.stack(every))
        got = d.process_allgather(keys, tiled=True)
        np.testing.assert_array_equal(jax.random.key_data(got), np.concatenate(every))
        got = d.broadcast_one_to_all(keys, is_source=me == 1)
        np.testing.assert_array_equal(jax.random.key_data(got), every[1])
        split = jax.jit(lambda: jax.random.split(jax.random.key(3), 8),
                        out_shardings=jax.NamedSharding(mesh, P("data")))()
        got = d.process_allgather(split, tiled=True)
        want = jax.random.key_data(jax.random.split(jax.random.key(3), 8))
        np.testing.assert_array_equal(jax.random.key_data(got), want)

        x = d.host_local_to_global(part(np.arange(8.0)), mesh, P("data"))
        np.testing.assert_array_equal(d.process_allgather(x, tiled=True), np.arange(8.0))
        for call, text in (
            (lambda: d.process_allgather({"x": x}),
             "process_allgather cannot stack tree['x']: it is a global array, of which each "
             "process holds a part."),
            (lambda: d.broadcast_one_to_all([x]),
             "broadcast_one_to_all cannot send tree[0]: it is a global array, which every process "
             "has already."),
        ):
            try:
                call()
            except spmd.OptionError as error:
                assert str(error).splitlines()[0] == text, error
            else:
                raise AssertionError(text)
        """,
    )


TOLD = """\
nothing
assert_equal_across_processes finds different values of tree['b'].
  got       float32[] 0. in process 0
            float32[] 1. in process 1
assert_equal_across_processes (the weights) finds different values of tree['w'].
  got       int64[100] of sha256 96bdba67 in process 0
            int64[100] of sha256 95257ce5 in process 1
assert_equal_across_processes finds something else at tree['w'] in some processes.
  expected  the same structure, shapes and dtypes in every process
  got       float64[2] in process 0
            float64[3] in process 1
assert_equal_across_processes finds something else at tree['u'] in some processes.
  expected  the same structure, shapes and dtypes in every process
  got       int64[] in process 0
            nothing in process 1
assert_equal_across_processes finds something else at tree in some processes.
  expected  the same structure, shapes and dtypes in every process
  got       float64[] in process 0
            float32[] in process 1
process_allgather finds something else at tree[0] in some processes.
  expected  the same structure, shapes and dtypes in every process
  got       float64[2] in process 0
            float64[3] in process 1
broadcast_one_to_all needs exactly one source.
  expected  is_source=True in one process, False in all others
  got       True in processes 0, 1
broadcast_one_to_all needs exactly one source.
  expected  is_source=True in one process, False in all others
  got       False in all
assert_equal_across_processes finds different values of tree.
  got       key<fry>[] [0, 0] in process 0
            key<fry>[] [0, 1] in process 1
assert_equal_across_processes finds different values of tree['x'][0:2].
  got       float32[2] [1., 2.] in process 0
            float32[2] [1., 3.] in process 1
nothing
nothing
process_allgather was not called by all processes.
  got       process_allgather in process 0
            assert_equal_across_processes in process 1
  fix       make the same calls in the same order in every process"""


@pytest.mark.slow
def test_differences_are_named_in_all_processes(tmp_path):
    """The first differing path is told with both sides, everywhere; then the run goes on."""
    said = passed(
        tmp_path,
        """
        def told(fun, *args, **kwargs):
            try:
                fun(*args, **kwargs)
            except spmd.DivergenceError as error:
                say(error)
            else:
                say("nothing")

        equal = d.assert_equal_across_processes
        told(equal, {"a": 1, "b": np.arange(100)})
        told(equal, {"a": 1, "b": np.float32(me), "c": me})
        told(equal, {"w": np.arange(100) + me}, "the weights")
        told(equal, {"w": np.zeros(2 + me)})
        told(equal, {"w": 1, "v" if me else "u": 2})
        told(equal, np.float32(1) if me else np.float64(1))
        told(d.process_allgather, [np.zeros(2 + me)])
        told(d.broadcast_one_to_all, 1, is_source=True)
        told(d.broadcast_one_to_all, 1, is_source=False)
        keys = jax.random.key(me)
        told(equal, keys)
        copies = d.host_local_to_global(np.float32([1, 2 + me]), mesh, P())
        told(equal, {"x": copies})
        told(equal, {"x": d.host_local_to_global(part(np.arange(8.0)), mesh, P("data"))})
        told(equal, 3)
        told(equal if me else d.process_allgather, 1)
        """,
    )
    assert said[0] == TOLD
    last = "{} was not called by all processes"
    here, there = last.format("process_allgather"), last.format("assert_equal_across_processes")
    assert said[1] == TOLD.replace(here, there)
