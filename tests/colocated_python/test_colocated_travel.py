"""Functions and classes that are pickled, and what cannot be."""

import copy
import functools
import os
import pickle
import subprocess
import sys
import threading

import cloudpickle
from colocated_tools import put, same, spread
import jax
import numpy as np
import pytest

from spmd import ArgumentError, _pickled
from spmd.colocated_python import _travel, colocated_python, colocated_python_class

LOCK = threading.Lock()
FACTOR = 3


@colocated_python
def found_by_name(x):
    """Stands in its module as what it is."""
    return x


def there_and_back(thing):
    """What a pickled thing becomes, in this process."""
    return pickle.loads(pickle.dumps(thing))


def test_a_decorated_function_travels_by_name():
    """As functions do: what is found under the name is the thing itself."""
    sys.modules.setdefault(__name__, sys.modules[found_by_name.__module__])
    assert there_and_back(found_by_name) is found_by_name


def test_what_was_said_travels_too():
    """A copy checks its arguments, knows its results and its devices, and has caches of its own."""
    spec = jax.ShapeDtypeStruct((8,), np.float32, sharding=spread())
    fun = colocated_python(lambda x: x).specialize(in_specs=((spec,), {}), out_specs_fn=same)
    fun = fun.specialize(devices=spread().mesh)
    for found in (there_and_back(fun), copy.deepcopy(fun)):
        np.testing.assert_array_equal(found(put(np.ones(8))), np.ones(8))
        with pytest.raises(ValueError, match="something else than in_specs"):
            found(put(np.ones(16)))
        said = {"in_specs": ((spec,), {}), "out_specs_fn": same, "devices": jax.devices()}
        for name, value in said.items():
            with pytest.raises(ValueError, match=f"has its {name} already"):
                found.specialize(**{name: value})


def test_a_function_may_refer_to_itself():
    """And to another that refers to it; each is one in the copy, too."""

    def own(x):
        return (fun, other)

    def others(x):
        return fun

    fun, other = colocated_python(own), colocated_python(others)
    found = there_and_back(fun)
    himself, second = found.__wrapped__(None)
    assert himself is found is not fun
    assert second.__wrapped__(None) is found


PROGRAM = """
import pickle, sys
import jax, numpy as np
import spmd.colocated_python

fun, make = pickle.load(open(sys.argv[1], "rb"))
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
x = jax.device_put(np.arange(8, dtype=np.float32), jax.NamedSharding(mesh, jax.P("x")))
print(np.asarray(fun(x)).tolist())
counter = make(10)
print([float(counter.add(x)[0]) for _ in range(2)])
"""


@pytest.mark.slow
def test_another_process_runs_them(tmp_path):
    """A closure over a sharding, and a class, of no module that the other process could import."""
    sharding = spread()

    def scaled(x):
        return jax.device_put(np.asarray(x) * FACTOR, sharding)

    class Counter:
        def __init__(self, start):
            self.count = start

        def add(self, x):
            self.count += 1
            return jax.device_put(np.asarray(x) + self.count, x.sharding)

    fun = colocated_python(scaled).specialize(out_specs_fn=lambda x: x)
    path = tmp_path / "pickled"
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        path.write_bytes(cloudpickle.dumps((fun, colocated_python_class(Counter))))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[3.0 * i for i in range(8)]}\n[11.0, 12.0]\n"


class Holder:
    def __init__(self):
        self.inner = {"key": [1, LOCK]}

    def __call__(self, x):
        return x


def _closure():
    config = {"a": (1, {"b": LOCK})}

    def uses(x):
        return config

    return uses


def _default(x, lock=LOCK):
    return x


def _global(x):
    return [LOCK for _ in range(2)]


def _through(x):
    return _inner(x)


def _inner(x):
    return LOCK


def _method():
    class Counter:
        def add(self, x):
            return x

    return colocated_python_class(Counter)().add.__wrapped__


CASES = {
    "closure": (_closure(), "`config['a'][1]['b']`, which `uses` uses", "lock"),
    "default": (_default, "the default `lock` of `_default`", "lock"),
    "global": (_global, "`LOCK`, which `_global` uses", "lock"),
    "through": (_through, "`LOCK`, which `_inner` uses", "lock"),
    "partial": (functools.partial(same, x=LOCK), "the function.keywords['x']", "lock"),
    "object": (Holder(), "the function.inner['key'][1]", "lock"),
    "bound": (Holder().__call__, "the function.__self__.inner['key'][1]", "lock"),
    "instance": (_method(), "`instance`, which `Counter.add` uses", "_Instance"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_pickled_is_named(name):
    """The smallest thing, and the way to it."""
    fun, given, kind = CASES[name]
    what = "Counter" if name == "instance" else "_thread.lock"
    more = ": what it stands for is on the hosts" * (name == "instance")
    wrapped = colocated_python(fun)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        with pytest.raises(ArgumentError) as caught:
            pickle.dumps(wrapped)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert str(caught.value) == (
        f"colocated_python of `{wrapped._name}` cannot travel to another process.\n"
        f"  given     {given}\n"
        "  expected  what cloudpickle can write\n"
        f"  got       {kind}: cannot pickle '{what}' object{more}\n"
        "  fix       make it where the function runs: inside of the function, or in the "
        "constructor of a colocated class"
    )


def test_what_is_said_may_be_at_fault():
    """An `out_specs_fn` that cannot be pickled is found as well."""
    fun = colocated_python(same).specialize(out_specs_fn=_closure())
    with pytest.raises(ArgumentError, match=r"given     `config\['a'\]\[1\]\['b'\]`, which `uses`"):
        pickle.dumps(fun)


def test_another_version_is_refused():
    """A pickled form of a later version is told to be one."""
    function, (version, form) = colocated_python(lambda x: x).__reduce__()
    with pytest.raises(ArgumentError) as caught:
        function(version + 1, form)
    assert str(caught.value) == (
        "A pickled colocated function cannot be read: another version of spmd wrote it.\n"
        "  expected  version 1\n  got       version 2\n"
        "  fix       read it with the version that wrote it, or pickle the function alone"
    )


def test_a_device_that_is_missing():
    """What was made for more devices than are here says so."""
    for platform in ("cpu", "nowhere"):
        with pytest.raises(ArgumentError) as caught:
            _pickled.find_device("It", platform, 99)
        assert str(caught.value) == (
            f"It cannot run here: a device is missing.\n  expected  {platform}:99\n"
            f"  got       {', '.join(f'cpu:{i}' for i in range(8))}"
        )


def test_without_cloudpickle(monkeypatch):
    """It is needed only here, and the error says so."""
    monkeypatch.setattr(_travel, "cloudpickle", None)
    with pytest.raises(ArgumentError) as caught:
        pickle.dumps(colocated_python(lambda x: x))
    assert str(caught.value) == (
        "colocated_python of `<lambda>` cannot travel to another process: cloudpickle is not "
        "installed.\n  fix       pip install cloudpickle"
    )
