"""Limits on the time of a call: what keeps and breaks them, and the texts to the letter."""

import dataclasses
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
from made import collective, report
import numpy as np
import pytest

import spmd
from spmd import PartitionSpec as P
from spmd.inspection import CHIPS, Cost, Exchange, Source, Time, Unread
from spmd.testing import assert_time

replace = dataclasses.replace


def waits(name, axes, exposed, line=42):
    """An exchange of which a part is waited for."""
    place = line and Source(file="model.py", line=line, column=1, function="loss")
    return Exchange(name=name, mesh_axes=axes, source=place, seconds=2 * exposed, exposed=exposed)


#: 12 ms of products, 2 for memory; 4 ms of waits over data, 1 over model, 1 over a part of data and
#: model together.
TIME = Time(
    chip="v5e",
    seconds=0.020,
    compute=0.012,
    memory=0.002,
    exchanges=(
        waits("a", ("data",), 0.004),
        waits("b", ("model",), 0.001, line=7),
        waits("c", ("data:(2)2", "model"), 0.001, line=None),
    ),
    hardware_flops=10**9,
    hfu=0.5,
    source="compiler",
    model_flops=6 * 10**9,
    mfu=0.4,
)
CHIP_REPORT = {"backend": "tpu", "device_kind": "TPU v5 lite", "stand_in": False}
TIMED = report(collective(), **CHIP_REPORT, time=TIME)


def told(message, error, *args, **kwargs):
    """Checks the class and the whole text of what the assertion raises."""
    with pytest.raises(error) as caught:
        assert_time(*args, **kwargs)
    assert str(caught.value) == textwrap.dedent(message).strip("\n")
    return caught.value


def breaks(the_report=TIMED, **limits):
    """The numbered lines of the failure that limits cause; [] where they hold."""
    try:
        assert assert_time(the_report, **limits) is the_report
    except AssertionError as e:
        lines = [line.partition(". ") for line in str(e).splitlines()]
        return [text for number, _, text in lines if number.isdigit()]
    return []


# Limits


def test_a_limit_on_the_call():
    """A call may take as long as the limit, and no longer."""
    for most in ("20ms", "0.02s", "20_000us", 0.02, np.float64(0.02), "1s", 1):
        assert breaks(max=most) == []
    assert breaks(max="19ms") == ["max, a call: allowed 19ms, found 20.0 ms, 1.00 ms too much"]
    assert breaks(max=0.0199999) == ["max, a call: allowed 20.0 ms, found 20.0 ms, 100 ns too much"]
    assert breaks(max=0) == ["max, a call: allowed 0 s, found 20.0 ms, 20.0 ms too much"]


def test_a_limit_on_waits():
    """On all waits, or on those over an axis: its parts count, and what crosses two, for both."""
    assert breaks(max_exposed="6ms") == []
    assert breaks(max_exposed="5ms") == [
        "max_exposed, all exchanges: allowed 5ms, found 6.00 ms, 1.00 ms too much"
    ]
    assert breaks(max_exposed={"data": "5ms", "model": "2ms"}) == []
    assert breaks(max_exposed={"data": 0.004, "model": "1.5 ms"}) == [
        "max_exposed, exchanges over data: allowed 4.00 ms, found 5.00 ms, 1.00 ms too much",
        "max_exposed, exchanges over model: allowed 1.5 ms, found 2.00 ms, 500 us too much",
    ]
    assert breaks(max_exposed={"data": None, "model": 0}) == [
        "max_exposed, exchanges over model: allowed 0 s, found 2.00 ms, 2.00 ms too much"
    ]


def test_a_limit_on_the_use_of_the_chip():
    """The MFU is at least the limit."""
    for least in (0, 0.4, np.float32(0.25)):
        assert breaks(min_mfu=least) == []
    assert breaks(min_mfu=0.401) == ["min_mfu: at least 0.401, found 0.4"]
    assert breaks(min_mfu=1) == ["min_mfu: at least 1, found 0.4"]


def test_a_message():
    """It has every limit that is broken, what the time goes into, and where the device waits."""
    told(
        """
        `step` breaks 3 limits on its time: mesh data=4, model=2; tpu (TPU v5 lite).
        20.0 ms a call on v5e; MFU 40%, HFU 50%; bound by compute
        1. max, a call: allowed 10ms, found 20.0 ms, 10.0 ms too much
        2. max_exposed, exchanges over data: allowed 1ms, found 5.00 ms, 4.00 ms too much
        3. min_mfu: at least 0.5, found 0.4
             12.0 ms, 60%: compute
             2.00 ms, 10%: memory
             4.00 ms, 20%: exposed over data
             1.00 ms, 5.0%: exposed over model
             1.00 ms, 5.0%: exposed over data:(2)2, model
        The device waits at these lines, longest first:
             4.00 ms, 20%: over data, at model.py:42 (loss)
             1.00 ms, 5.0%: over model, at model.py:7 (loss)
             1.00 ms, 5.0%: over data:(2)2, model, at an unknown line
        """,
        AssertionError,
        TIMED,
        max="10ms",
        max_exposed={"data": "1ms", "model": "1s"},
        min_mfu=0.5,
    )


def test_a_message_of_many_waits():
    """The ten longest are listed; how many there are besides is said."""
    many = tuple(waits(str(i), ("data",), 0.001 + i / 1e6, line=i) for i in range(1, 14))
    one = report(time=replace(TIME, exchanges=many), **CHIP_REPORT)
    with pytest.raises(AssertionError) as caught:
        assert_time(one, max_exposed=0)
    lines = str(caught.value).splitlines()
    assert lines[-1] == "     ... and 3 more"
    assert sum("at model.py:" in line for line in lines) == 10
    assert "at model.py:13 (loss)" in lines[-11]


def test_a_program_that_waits_for_nothing():
    """There is no line of waits, and no limit on them is broken."""
    alone = report(num_devices=1, mesh={}, time=replace(TIME, exchanges=()), **CHIP_REPORT)
    assert breaks(alone, max_exposed=0, max="1s") == []
    told(
        """
        `step` breaks a limit on its time: no mesh; tpu (TPU v5 lite).
        20.0 ms a call on v5e; MFU 40%, HFU 50%; bound by compute
        1. max, a call: allowed 1ms, found 20.0 ms, 19.0 ms too much
             12.0 ms, 60%: compute
             2.00 ms, 10%: memory
        """,
        AssertionError,
        alone,
        max="1ms",
    )


# What is not known


def test_what_is_not_known_keeps_no_limit():
    """Unknown is not once: a loop without a trip count breaks all limits, and so does odd text."""
    loop = "all limits: not known to be kept, a loop runs an unknown number of times"
    in_cost = replace(TIMED, cost=replace(Cost.zeros(), unknown_loops=1))
    in_time = replace(
        TIMED,
        time=replace(
            TIME, unknown=("the loop while.1 runs an unknown number of times: once here",)
        ),
    )
    for one in (in_cost, in_time):
        assert breaks(one, max="1s") == breaks(one, min_mfu=0.1) == [loop]
        assert breaks(one, max_exposed=1) == [loop]
    assert breaks(in_cost, max="1ms")[1:] == breaks(max="1ms")
    assumed = replace(TIMED, time=replace(TIME, unknown=("each mesh axis is taken as a ring",)))
    assert breaks(assumed, max="1s") == []
    unread = replace(in_cost, unread=Unread(lines=2, first="%x = what"))
    (line,) = breaks(unread, max="1s")
    assert line == f"all limits: not known to be kept, {unread.unread}"


def test_no_time():
    """Without a time there is one refusal, with its reason and what to do, and no broken limit."""
    fix = "fix       a mesh of spmd.topology('v5e:4x4', axes), or chip='v5e'"
    told(
        f"""
        assert_time knows no time of `step`.
          got       no time for CPU; give topology= or chip=
          {fix}
        """,
        ValueError,
        report(collective()),
        max="20ms",
        max_exposed={"data": 1},
        min_mfu=0.1,
    )
    told(
        f"""
        assert_time knows no time of `step`.
          got       no time: the figures of NVIDIA L4 are not known; give chip=
          {fix}
        """,
        ValueError,
        report(backend="gpu", device_kind="NVIDIA L4", stand_in=False),
        max="20ms",
    )


def test_no_mfu():
    """A limit on the MFU needs one; a program without products has one, which is 0."""
    why = "the MFU is not known, since the program was compiled elsewhere: give model_flops="
    without = replace(TIME, mfu=None, model_flops=None, unknown=("a ring is assumed", why))
    told(
        f"""
        assert_time knows no MFU of `step`.
          got       {why}
          fix       spmd.report(f, *args, model_flops=...), whose result is then `f`
        """,
        ValueError,
        replace(TIMED, time=without),
        min_mfu=0.1,
    )
    assert breaks(replace(TIMED, time=without), max="20ms") == []
    none = replace(TIMED, time=replace(TIME, mfu=0.0, model_flops=0))
    assert breaks(none, min_mfu=0.1) == ["min_mfu: at least 0.1, found 0"]


# Slips


def test_limits_that_cannot_be_read():
    """All of them are told at once, before anything compiles, each with what to write."""
    told(
        """
        assert_time cannot read max = '20'.
          expected  '20' has no unit: write 20s, 20ms, 20us or 20ns
        assert_time cannot read max_exposed['model'] = '1 lightyear'.
          expected  'lightyear' is no unit of time: write 1s, 1ms, 1us or 1ns
        assert_time cannot read max_exposed['data'] = -1.
          expected  a time is at least 0 and finite, not -1
        assert_time cannot read min_mfu = 40.
          expected  a share from 0 to 1, such as 0.4
        """,
        ValueError,
        "nothing that could be compiled",
        max="20",
        max_exposed={"model": "1 lightyear", "data": -1},
        min_mfu=40,
    )


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"max": "20 msec"}, ValueError),
        ({"max": float("nan")}, ValueError),
        ({"max": b"20ms"}, TypeError),
        ({"max": True}, TypeError),
        ({"max": {"data": "20ms"}}, TypeError),
        ({"max_exposed": ["1ms"]}, TypeError),
        ({"min_mfu": float("nan")}, ValueError),
        ({"min_mfu": "40%"}, TypeError),
        ({"min_mfu": True}, TypeError),
    ],
)
def test_the_class_of_a_slip(limits, error):
    """What has another type is a TypeError; a text or a number that is no limit, a ValueError."""
    with pytest.raises(error, match=r"^assert_time cannot read "):
        assert_time(TIMED, **limits)


def test_no_limit():
    """An assertion without a limit would assert nothing, and says so; so does one that is empty."""
    for limits in ({}, {"max_exposed": {}}, {"max_exposed": {"data": None}}, {"max": None}):
        told(
            """
            assert_time is given no limit, so it would assert nothing.
              expected  max=, max_exposed= or min_mfu=
              fix       spmd.report(f, *args).time, for the time alone
            """,
            ValueError,
            TIMED,
            **limits,
        )


def test_unknown_axes():
    """Every axis that the mesh does not have is told, with the one that was meant."""
    told(
        """
        assert_time knows no mesh axis 'modle' (did you mean 'model'?).
          given     a limit in max_exposed on 'modle'
          expected  an axis of the program's mesh, 'data', 'model'
        assert_time knows no mesh axis 3.
          given     a limit in max_exposed on 3
          expected  an axis of the program's mesh, 'data', 'model'
        """,
        ValueError,
        TIMED,
        max_exposed={"modle": "1ms", 3: "1ms", "data": "1ms"},
    )


def test_a_report_takes_no_arguments():
    """A report has its program and its chip already."""
    for kwargs, got in (({"chip": "v5e"}, "chip="), ({"mesh": 1}, "mesh=")):
        told(
            f"""
            assert_time takes no arguments and no mesh with a Report.
              got       {got}
              fix       give the Report alone, or the function instead of it
            """,
            TypeError,
            TIMED,
            max="1s",
            **kwargs,
        )


# Programs


def _matmul(x, w):
    return x @ w


X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 16), jnp.float32)
#: A chip on which this product takes 32 ms: 64 * 32 * 16 * 2 FLOPs on 8 devices, of which each does
#: an eighth; memory and links take nothing against that.
SLOW = replace(
    CHIPS["v5e"], name="slow", flops=64 * 32 * 16 * 2 / 8 / 0.032, hbm=1e15, link=1e15, hop=0.0
)


def test_a_function(mesh):
    """A function is compiled for the mesh and the chip that are named; its report comes back."""
    f = spmd.pjit(_matmul, in_axis_resources=(P(("data", "model")), None), mesh=mesh)
    found = assert_time(f, X, W, max="32.1ms", min_mfu=0.99, chip=SLOW)
    assert found.time.seconds == pytest.approx(0.032, rel=1e-3)
    with pytest.raises(AssertionError, match=r"1\. max, a call: allowed 31ms, found 32\.0 ms, 1"):
        assert_time(f, X, W, max="31ms", chip=SLOW)
    with pytest.raises(ValueError, match=r"^assert_time knows no time of `_matmul`"):
        assert_time(f, X, W, max="31ms")
    # Of half the FLOPs the user says that they are all that count.
    with pytest.raises(AssertionError, match=r"1\. min_mfu: at least 0.6, found 0.5\n"):
        assert_time(f, X, W, min_mfu=0.6, chip=SLOW, model_flops=64 * 32 * 16)
    with pytest.raises(TypeError, match=r"^report knows no chip 'v5d' \(did you mean 'v5"):
        assert_time(f, X, W, max="1s", chip="v5d")


def test_one_device_beside_a_mesh(in_mesh):
    """A program that was meant for the active mesh and uses one device says nothing about it."""
    with pytest.raises(AssertionError) as caught:
        assert_time(jax.jit(_matmul), X, W, max="1s", chip="v5e")
    assert str(caught.value).startswith(
        "assert_time finds that `_matmul` uses one device.\n  given     mesh data=4, model=2, which"
    )


def test_a_stored_report_needs_no_jax(tmp_path):
    """A file is held to its limits where JAX is not loaded."""
    TIMED.save(tmp_path / "r.json")
    code = (
        "import sys; from spmd.inspection import Report; from spmd.testing import assert_time\n"
        "one = Report.load(sys.argv[1])\n"
        "assert_time(one, max='20ms', max_exposed={'data': '5ms'}, min_mfu=0.4)\n"
        "try: assert_time(one, max='1ms')\n"
        "except AssertionError as e: print(str(e).splitlines()[2])\n"
        "print('jax' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "1. max, a call: allowed 1ms, found 20.0 ms, 19.0 ms too much",
        "False",
    ]
