"""`check`: processes that are about to run different programs say so instead of hanging."""

import re

import pytest
from runs import START, launch, passed

import spmd
from spmd import _dispatch, distributed

HEAD = (
    START
    + """
x = d.host_local_to_global(part(np.arange(8.0)), mesh, P("data"))

def told(fun, *args):
    try:
        jax.block_until_ready(fun(*args))
    except spmd.DivergenceError as error:
        say(error)
    else:
        say("equal")

def f(x): return x + 1
def g(x): return x + 2
def here(x): return x + me
on = lambda fun, **options: pjit(fun, in_axis_resources=P("data"), mesh=mesh, **options)

d.check()
"""
)

MORE = (
    "  fix       make what the function depends on equal in all processes: "
    "spmd.distributed.assert_equal_across_processes finds what is not\n"
)
SAME = "  expected  the same functions, shapes, specs and mesh in all of them, in the same order\n"


TOLD = """\
equal
equal
equal
pjit of `g` was not called by all processes.
  got       pjit of `g` in process 0
            pjit of `f` in process 1
  fix       make the same calls in the same order in every process
pjit of `here` is not the same program in every process.
SAME
  got       process 0, at program.py:
              operation { lambda ; a:f32[8]. let b:f32[8] = add a 0.0:f32[] in (b,) }
            process 1, at program.py:
              operation { lambda ; a:f32[8]. let b:f32[8] = add a 1.0:f32[] in (b,) }
MORE
pjit of `f` is not the same program in every process.
SAME
  got       process 0, at program.py:
              result 0: P()
            process 1, at program.py:
              result 0: P('data')
MORE
pjit of `f` is not the same program in every process.
SAME
  got       process 0, at program.py:
              argument x: f32[8,2] P('data')
            process 1, at program.py:
              argument x: f32[8,3] P('data')
MORE
pjit of `f` is not the same program in every process.
SAME
  got       process 0, at program.py:
              mesh data=4, model=2
            process 1, at program.py:
              mesh model=2, data=4
MORE
process_allgather was not called by all processes.
  got       process_allgather in process 0
            pjit of `f` in process 1
  fix       make the same calls in the same order in every process
pmap of `here` is not the same program in every process.
SAME
  got       process 0, at program.py:
              operation e:f32[] = add d 0.0:f32[]
            process 1, at program.py:
              operation e:f32[] = add d 1.0:f32[]
MORE
pjit of `f` was not called by all processes.
  got       pjit of `f` in process 0
            pjit of `g` in process 1
  fix       make the same calls in the same order in every process
equal
equal"""


@pytest.mark.slow
def test_divergence(tmp_path):
    """Other functions, operations, specs, shapes, meshes and kinds of calls show both sides."""
    said = passed(
        tmp_path,
        """
        same = on(f)
        for _ in range(3):
            told(same, x)
        told(on(f if me else g), x)
        told(on(here), x)
        told(on(f, out_axis_resources=P("data") if me else P()), x)
        told(on(f), d.host_local_to_global(np.zeros((4, 2 + me)), mesh, P("data")))
        other = spmd.make_mesh({"model": 2, "data": 4}) if me else mesh
        told(pjit(f, out_axis_resources=P(), mesh=other), np.zeros(4))
        told(on(f) if me else d.process_allgather, x if me else 3)
        told(pmap(here), np.zeros(4))
        compiled = on(f).lower(x).compile()
        told(on(g).lower(x).compile() if me else compiled, x)
        told(same, x)
        # One process alone has nobody to compare with.
        alone = spmd.make_mesh({"x": 4}, devices=jax.local_devices())
        if me:
            told(pjit(f, mesh=alone), np.zeros(4))
        told(same, x)
        """,
        head=HEAD,
    )
    shown = re.sub(r", at .*program\.py:\d+:\d+ \(told\):", ", at program.py:", said[0])
    assert shown == TOLD.replace("SAME\n", SAME).replace("MORE\n", MORE)
    # Process 1 says the same of what differs, each time after the function that it has called.
    assert said[1].count("in process 0") == said[0].count("in process 0") == 3


@pytest.mark.slow
def test_one_call_more(tmp_path):
    """A process that waits for one that has ended is told so."""
    said = passed(
        tmp_path,
        """
        told(on(f), x)
        if me:
            told(on(f), x)
        """,
        head=HEAD,
    )
    assert said == [
        "equal",
        "equal\n"
        "pjit of `f` has waited for process 0 in vain.\n"
        "  expected  the same call in that process within 300 s\n"
        "  got       it has ended\n"
        "  fix       look at what that process did instead",
    ]


@pytest.mark.slow
def test_one_of_four(tmp_path):
    """Of four processes the one that differs is shown against process 0, in all of them."""
    said = passed(
        tmp_path,
        """
        told(on(lambda x: x + int(me == 2)), x)
        told(on(f), x)
        """,
        4,
        2,
        head=HEAD,
    )
    assert len({*said}) == 1
    assert [w for w in said[0].split("\n") if "process " in w] == [
        line for line in said[0].split("\n") if line.strip().startswith(("got", "process 2"))
    ]


@pytest.mark.slow
def test_who_does_not_come(tmp_path):
    """A process that raises instead of calling ends the wait of the others, which say why."""
    run = launch(
        tmp_path,
        """
        told(on(f), x)
        if me:
            raise KeyError("batch 7")
        told(on(f), x)
        say("went on")
        """,
        head=HEAD.replace("initialize()", "initialize(lost_timeout=3)"),
        options=("--grace", "5"),
    )
    assert run.code == 1
    assert run.said == ["equal", "equal"]
    assert "spmd: This run has lost process 1 of 2.\n" in run.err
    assert "  got       it raised KeyError: 'batch 7'\n" in run.err


def test_switching():
    """The check is off by default, and switched off again; one process compares with nobody."""
    assert _dispatch.announce is None
    double = spmd.pjit(lambda x: x * 2, mesh=spmd.make_mesh({"x": 8}))
    assert float(double(1.0)) == 2
    distributed.check()
    try:
        assert _dispatch.announce is not None
        assert [float(double(1.0)) for _ in range(3)] == [2] * 3
    finally:
        distributed.check(False)
    assert _dispatch.announce is None
    assert float(double(1.0)) == 2
