"""Settings that every test runs under; they have to stand before anything imports JAX."""

import collections
import gc
import os

from hardware import xla_flags

os.environ["JAX_PLATFORMS"] = os.environ.get("SPMD_TEST_PLATFORM", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = xla_flags()
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# A user's own setting must not change what a test of the default sees.
os.environ.pop("SPMD_IMPLICIT_RESHARD", None)
os.environ["SPMD_PLAN_CACHE"] = ""  # nor plans that a session before this one kept

import jax
import numpy as np
import pytest

import spmd
import spmd.host_callback  # it asks for threads, which has to be before JAX starts

gc.disable()  # until all tests are collected: they stay as long as the process


THIRDS = ("first", "second", "third")


def _is_apart(item):
    """Whether a slow test is one of many cases, or soaks."""
    return any(map(item.get_closest_marker, ("few", "soak")))


def pytest_addoption(parser):
    """Adds the sizes of two slow tests, and which third of the cases of others runs."""
    parser.addoption(
        "--third",
        choices=THIRDS,
        help="of the cases that the mark `few` makes slow every third one; the two ends of the "
        "range of JAX take one third each in .ci/run, and the rest in .ci/nightly (default: all)",
    )
    parser.addoption(
        "--alone",
        action="append",
        default=[],
        metavar="PATH",
        help="below it --third keeps all slow tests of one case: no other end runs them",
    )
    parser.addoption(
        "--transformation-cases",
        type=int,
        default=1026,
        help="how many cases the slow test of two transformations draws (default: %(default)s)",
    )
    parser.addoption(
        "--host-programs",
        type=int,
        default=2000,
        help="with how many programs the slow test looks for leaks (default: %(default)s)",
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config, items):
    """Marks the cases of a test as slow that its mark `few` leaves out, spread evenly.

    Of its slow cases ``--third`` keeps every third one, or all if it says ``shared=False``. A test
    of one case runs at the end that has the first third. Of other slow tests the first third has
    every third one, and the second the rest; below a path that is ``--alone`` each third has all.
    """
    third = config.getoption("--third")
    others = set()
    if third:
        alone = [config.rootpath / path for path in config.getoption("--alone")]
        plain = [
            one
            for one in items
            if one.get_closest_marker("slow")
            and not _is_apart(one)
            and not any(one.path.is_relative_to(path) for path in alone)
        ]
        kept = {"first": plain[::3], "second": {*plain} - {*plain[::3]}, "third": ()}[third]
        others.update({*plain}.difference(kept))
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("few"):
            cases[item.parent, item.originalname].append(item)
    for of_one in cases.values():
        few = of_one[0].get_closest_marker("few")
        (count,) = few.args
        fast = [item for item in of_one if not any(map(item.get_closest_marker, ("slow", "soak")))]
        kept = {fast[i * len(fast) // count] for i in range(count)}
        left_out = [item for item in of_one if item not in kept]
        for item in left_out:
            item.add_marker("slow")
        if third and few.kwargs.get("shared", True):
            others.update({*left_out} - {*left_out[THIRDS.index(third) :: len(THIRDS)]})
    if others:
        config.hook.pytest_deselected(items=[item for item in items if item in others])
        items[:] = [item for item in items if item not in others]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """Has the garbage collector pass over JAX and the tests: it would walk them at each pass."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def mesh():
    """The 4x2 mesh `data, model` over 8 devices, not entered."""
    return spmd.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.fixture
def in_mesh(mesh):
    """The same mesh, entered."""
    with mesh:
        yield mesh


@pytest.fixture
def checked_without_optimizer():
    """Every jaxpr that a test makes is type-checked; small programs need no optimizer."""
    flag = "jax_disable_most_optimizations"
    before = jax.config.values[flag]
    jax.config.update(flag, True)
    with jax.enable_checks(True):
        yield
    jax.config.update(flag, before)
