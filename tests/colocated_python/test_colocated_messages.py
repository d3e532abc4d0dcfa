"""What is refused, in the words in which it is: `specialize`, arguments, results, devices."""

from colocated_tools import put, same, spread
import jax
from jax.sharding import SingleDeviceSharding
import numpy as np
import pytest

from spmd import ArgumentError, DonatedArrayError, OptionError, P, ShardingError
from spmd.colocated_python import barrier, colocated_python, colocated_python_class

ONES = np.ones(8, np.float32)


def step(x, batch=None):
    """Returns its first argument."""
    return x


STEP = colocated_python(step)


def struct(shape=(8,), dtype=np.float32, sharding=None):
    """A spec of an array, by default spread over all devices."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or spread())


def refused(error, fun, *args, **kwargs):
    """The text of the error that a call raises."""
    with pytest.raises(error) as caught:
        fun(*args, **kwargs)
    return str(caught.value)


# specialize


def test_specialize_composes():
    """Each specialization adds to a copy; together they are what one call says."""
    calls = []

    def specs(*args, **kwargs):
        calls.append((args, kwargs))
        return args[0]

    x = put(ONES)
    one = STEP.specialize(in_specs=((struct(),), {}))
    two = one.specialize(out_specs_fn=specs)
    three = two.specialize(devices=jax.devices())
    assert len({STEP, one, two, three}) == 4
    np.testing.assert_array_equal(three(x), ONES)
    np.testing.assert_array_equal(one(x), ONES)
    np.testing.assert_array_equal(STEP(put(np.ones(16))), np.ones(16))
    assert calls == [((struct(),), {})]


@pytest.mark.parametrize("name", ["in_specs", "out_specs_fn", "devices"])
def test_specialized_twice(name):
    """Nothing can be said twice."""
    given = {"in_specs": ((struct(),), {}), "out_specs_fn": same, "devices": jax.devices()}
    once = STEP.specialize(**{name: given[name]})
    assert refused(OptionError, once.specialize, **{name: given[name]}) == (
        f"colocated_python of `step` has its {name} already.\n"
        f"  given     specialize({name}=...), twice\n"
        "  fix       specialize the function that does not have it yet"
    )


def test_out_specs_fn_runs_once_per_kind_of_arguments():
    """It runs where the call is made, however many calls of one kind and threads there are."""
    seen = []
    fun = STEP.specialize(out_specs_fn=lambda x: seen.append(x) or x)
    for _ in range(3):
        fun(put(ONES))
    fun(put(np.ones(16)))
    assert seen == [struct(), struct((16,))]


def test_in_specs_that_are_no_call():
    """`in_specs` are the arguments of a call, each with shape, dtype and sharding."""
    assert refused(OptionError, STEP.specialize, in_specs=(struct(),)) == (
        "colocated_python of `step` cannot use these in_specs.\n"
        "  expected  (args, kwargs): a tuple with a tuple and a dict\n"
        f"  got       {f'tuple: {(struct(),)!r}'[:100]}"
    )
    bare = jax.ShapeDtypeStruct((8,), np.float32)
    text = refused(OptionError, STEP.specialize, in_specs=((), {"batch": {"x": bare}}))
    assert text == (
        "colocated_python of `step` cannot use what in_specs says of argument batch['x'].\n"
        "  expected  a jax.ShapeDtypeStruct with a sharding\n"
        "  got       ShapeDtypeStruct: ShapeDtypeStruct(shape=(8,), dtype=float32)"
    )


def test_devices_that_are_none():
    """`devices` are devices."""
    assert refused(OptionError, STEP.specialize, devices=[0, 1]) == (
        "colocated_python of `step` cannot run on these devices.\n"
        "  expected  at least one jax.Device, or a mesh\n"
        "  got       list: [0, 1]"
    )
    assert "got       list: []" in refused(OptionError, STEP.specialize, devices=[])


def test_wrapping_what_is_no_function():
    """Only a function can be wrapped, and only a class."""
    assert refused(ArgumentError, colocated_python, 3) == (
        "colocated_python cannot wrap this.\n  expected  a function\n  got       int: 3"
    )
    assert refused(ArgumentError, colocated_python_class, 3) == (
        "colocated_python_class cannot wrap this.\n  expected  a class\n  got       int: 3"
    )


# Arguments


def test_arguments_that_are_no_arrays():
    """Every one is named, with what it is."""
    text = refused(ValueError, STEP, np.ones(2), batch={"x": 1.0})
    assert text == (
        "colocated_python of `step` cannot take argument x.\n"
        "  expected  a jax.Array\n"
        "  got       ndarray: array([1., 1.])\n"
        "  fix       put it on the devices with jax.device_put(value, sharding)\n"
        "colocated_python of `step` cannot take argument batch['x'].\n"
        "  expected  a jax.Array\n"
        "  got       float: 1.0\n"
        "  fix       put it on the devices with jax.device_put(value, sharding)"
    )


def test_a_spec_is_no_argument():
    """What only looks like an array is refused after a call with such an array, too."""
    x = put(ONES)
    STEP(x)
    text = refused(ShardingError, STEP, struct(sharding=x.sharding))
    assert text.startswith("colocated_python of `step` cannot take argument x.\n")


def test_a_call_inside_of_a_program():
    """Under jit the error says what to use there."""
    text = refused(ShardingError, jax.jit(lambda x: STEP(x)), put(ONES))
    assert (
        "  fix       call it outside of jit, grad and vmap, or use spmd.host_callback.call" in text
    )


def test_arguments_on_several_device_lists():
    """Arguments elsewhere than the first are named, with both lists; the order counts."""
    reverse = jax.sharding.Mesh(np.array(jax.devices()[:2][::-1]), ("x",))
    other = put(np.ones(2), jax.sharding.NamedSharding(reverse, P("x")))
    assert refused(ShardingError, STEP, put(np.ones(2), spread(2)), [other]) == (
        "colocated_python of `step` cannot take argument batch[0]: it is on other devices.\n"
        "  expected  devices 0, 1 (cpu)\n"
        "  got       devices 1, 0 (cpu)\n"
        "  fix       say which devices: f.specialize(devices=...) takes them in any order"
    )


def test_arguments_on_other_devices_than_specialized():
    """Arguments have to be on the devices that were said."""
    fun = STEP.specialize(devices=jax.devices()[:4])
    assert "expected  devices 0, 1, 2, 3 (cpu)\n  got       devices 0, 1 (cpu)" in refused(
        ShardingError, fun, put(ONES, spread(2))
    )


def test_no_arguments_and_no_devices():
    """Nothing says where such a function runs; specialized, it does."""
    done = []
    fun = colocated_python(lambda: done.append(1))
    assert refused(ValueError, fun) == (
        "colocated_python of `<lambda>` has no arguments to tell its devices.\n"
        "  expected  arrays as arguments, or devices\n"
        "  fix       specialize it: f.specialize(devices=...)"
    )
    placed = fun.specialize(devices=jax.devices())
    assert placed() is None
    assert placed() is None
    barrier()
    assert done == [1, 1]


def test_results_of_a_function_without_arguments():
    """Its results have to be on the devices that were said."""
    fun = colocated_python(lambda: put(ONES))
    np.testing.assert_array_equal(fun.specialize(devices=spread().mesh)(), ONES)
    with pytest.raises(ShardingError, match="devices 0, 1 "):
        fun.specialize(devices=jax.devices()[:2])()


@pytest.mark.parametrize(
    ("args", "verb", "expected", "got"),
    [
        (lambda: put(np.ones(16)), "x", "f32[8] ", "f32[16] "),
        (lambda: jax.device_put(np.ones(8, np.int32), spread()), "x", "f32[8] ", "i32[8] "),
        (lambda: put(ONES, spread(8, P())), "x", "spec=P('x',)", "spec=P()"),
        (lambda: put(ONES, spread(4)), "x", "Mesh('x': 8,", "Mesh('x': 4,"),
    ],
    ids=["shape", "dtype", "sharding", "devices"],
)
def test_a_call_that_does_not_match_in_specs(args, verb, expected, got):
    """The argument is named, with what was said of it and what it is."""
    fun = STEP.specialize(in_specs=((struct(),), {}))
    fun(put(ONES))
    first, second, third = refused(ShardingError, fun, args()).splitlines()
    assert first == (
        f"colocated_python of `step` was called with something else than in_specs as "
        f"argument {verb}."
    )
    assert second.startswith("  expected  ")
    assert expected in second
    assert third.startswith("  got       ")
    assert got in third


def test_a_call_with_another_tree():
    """So is a call with other arguments at all."""
    fun = STEP.specialize(in_specs=((struct(),), {}))
    assert refused(ShardingError, fun, put(ONES), put(ONES)) == (
        "colocated_python of `step` was called with another tree than its in_specs.\n"
        "  expected  PyTreeDef(((*,), {}))\n"
        "  got       PyTreeDef(((*, *), {}))"
    )


def test_an_equivalent_sharding_matches():
    """A sharding that puts the same parts on the same devices is no mismatch."""
    x = put(ONES, spread(8, P("x")))
    fun = STEP.specialize(in_specs=((struct(sharding=spread(8, P(("x",)))),), {}))
    np.testing.assert_array_equal(fun(x), ONES)
    replicated = put(ONES, spread(8, P(None)))
    fun = STEP.specialize(in_specs=((struct(sharding=spread(8, P())),), {}))
    np.testing.assert_array_equal(fun(replicated), ONES)


def test_a_donated_argument():
    """An argument whose buffers are gone is named."""
    x = put(ONES)
    STEP(x)
    barrier()
    x.delete()
    assert refused(DonatedArrayError, STEP, x) == (
        "colocated_python of `step` cannot use argument x: its buffers are gone.\n"
        "  expected  an array that was not donated to an earlier call and not deleted"
    )


# Results


@pytest.mark.parametrize("stated", [False, True], ids=["first call", "specialized"])
def test_results_that_are_no_arrays(stated):
    """The path of each is named; in a call that is over the error is a ValueError."""

    def count(x):
        return {"n": 3, "x": x}

    fun = colocated_python(count)
    text = (
        "colocated_python of `count` cannot return result['n'].\n"
        "  expected  a jax.Array\n"
        "  got       int: 3\n"
        "  fix       put it on the devices with jax.device_put(value, sharding)"
    )
    if stated:
        fun = fun.specialize(out_specs_fn=lambda x: {"n": x, "x": x})
        y = fun(put(ONES))["x"]
        assert refused(jax.errors.JaxRuntimeError, y.block_until_ready) == f"UNKNOWN: {text}"
    else:
        assert refused(ValueError, fun, put(ONES)) == text


def test_results_on_other_devices():
    """So is the path of a result elsewhere."""
    there = SingleDeviceSharding(jax.devices()[3])
    fun = colocated_python(lambda x: [x, jax.device_put(np.asarray(x), there)])
    assert refused(ValueError, fun, put(ONES, spread(2))) == (
        "colocated_python of `<lambda>` cannot return result[1]: it is on other devices.\n"
        "  expected  devices 0, 1 (cpu)\n"
        "  got       devices 3 (cpu)"
    )


@pytest.mark.parametrize(
    ("first", "second", "expected", "got"),
    [
        (ONES, np.ones(16, np.float32), "f32[8] ", "f32[16] "),
        (ONES, np.ones(8, np.int32), "f32[8] ", "i32[8] "),
    ],
    ids=["shape", "dtype"],
)
def test_a_later_result_that_does_not_match(first, second, expected, got):
    """What the first call returned is what later ones have to return."""
    results = [jax.device_put(values, spread()) for values in (first, second)]
    fun = colocated_python(lambda x: (results.pop(0),))
    fun(put(ONES))
    (y,) = fun(put(ONES))
    prefix = "UNKNOWN: colocated_python of `<lambda>` returned something else than it is known to "
    assert refused(jax.errors.JaxRuntimeError, y.block_until_ready) == (
        f"{prefix}return as result[0].\n"
        f"  expected  {expected}{spread()}\n"
        f"  got       {got}{spread()}"
    )


def test_a_later_result_of_another_tree():
    """The tree is part of it, and so is whether there is a result at all."""
    results = [put(ONES), None]
    fun = colocated_python(lambda x: results.pop(0))
    fun(put(ONES))
    text = refused(jax.errors.JaxRuntimeError, fun(put(ONES)).block_until_ready)
    assert text == (
        "UNKNOWN: colocated_python of `<lambda>` returned another tree than it is known to "
        "return.\n"
        "  expected  PyTreeDef(*)\n"
        "  got       PyTreeDef(None)"
    )


def test_what_out_specs_fn_says():
    """It has to say all of every result, on the devices of the arguments."""
    bare = jax.ShapeDtypeStruct((8,), np.float32)
    fun = STEP.specialize(out_specs_fn=lambda x: [bare])
    assert refused(OptionError, fun, put(ONES)) == (
        "colocated_python of `step` cannot use what out_specs_fn says of result[0].\n"
        "  expected  a jax.ShapeDtypeStruct with a sharding\n"
        "  got       ShapeDtypeStruct: ShapeDtypeStruct(shape=(8,), dtype=float32)"
    )
    fun = STEP.specialize(out_specs_fn=lambda x: struct(sharding=spread(2)))
    assert refused(ShardingError, fun, put(ONES)) == (
        "colocated_python of `step` cannot use the spec of result: it is on other devices.\n"
        "  expected  devices 0, 1, 2, 3, 4, 5, 6, 7 (cpu)\n"
        "  got       devices 0, 1 (cpu)"
    )


def test_an_out_specs_fn_that_raises():
    """Its error is the caller's, and nothing is kept of it."""
    says = [RuntimeError("not yet"), None]

    def specs(x):
        if error := says.pop(0):
            raise error
        return x

    fun = STEP.specialize(out_specs_fn=specs)
    assert refused(RuntimeError, fun, put(ONES)) == "not yet"
    np.testing.assert_array_equal(fun(put(ONES)), ONES)
