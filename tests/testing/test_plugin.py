"""The pytest plugin, run as its users run it, and the goldens of this repository."""

import importlib.metadata
from pathlib import Path
import subprocess
import sys

import jax
import jax.numpy as jnp
import made
import pytest

import spmd
from spmd import PartitionSpec as P
from spmd.testing import _goldens, assert_golden, plugin

pytest_plugins = ["pytester"]

#: What the tests of the inner runs are made of; `collective` and `report` need no JAX.
HELPERS = Path(made.__file__).read_text()

STEP = """
    from made import collective, report
    def test_step(spmd_golden):
        spmd_golden(report(collective(executions={runs})))
"""


@pytest.fixture
def inner(pytester, monkeypatch):
    """Runs pytest in a folder of its own; keyword arguments are test files."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    # Files of one size that are written in one second would share their bytecode.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (pytester.path / "made.py").write_text(HELPERS)

    def run(*args, in_process=True, **files):
        if files:
            pytester.makepyfile(**files)
        run = pytester.runpytest_inprocess if in_process else pytester.runpytest_subprocess
        # An inner run would import hypothesis anew, which takes seconds.
        return run("-p", "no:cacheprovider", "-p", "no:hypothesispytest", *args)

    return run


def files(pytester):
    """Paths of all goldens, relative."""
    return sorted(str(p.relative_to(pytester.path)) for p in pytester.path.rglob("*.ledger"))


# Cost of having it installed


def test_import_is_light():
    """Loading the plugin loads pytest and three small files: no JAX, NumPy or rich."""
    code = (
        "import sys, pytest; before = set(sys.modules)\n"
        "import spmd.testing.plugin\n"
        "print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert {m for m in loaded if m.partition(".")[0] in ("jax", "jaxlib", "numpy", "rich")} == set()
    assert {m for m in loaded if m.startswith("spmd")} == {
        "spmd",
        "spmd.testing",
        "spmd.testing.plugin",
    }


def test_runs_without_goldens_load_nothing(inner):
    """A whole run of a project that has spmd installed and no goldens imports none of it."""
    done = inner(
        *("-p", "no:jaxtyping"),  # which comes with Equinox, and loads NumPy
        in_process=False,
        test_a="""
        import sys
        def test_nothing():
            assert "spmd.testing.plugin" in sys.modules  # by its entry point
            for name in ("jax", "numpy", "rich", "spmd._api", "spmd.testing._goldens"):
                assert name not in sys.modules
        """,
    )
    done.assert_outcomes(passed=1)
    assert "spmd goldens" not in done.stdout.str()


def test_entry_point():
    """Pytest finds the plugin by the entry point of the distribution, under the name `spmd`."""
    (entry,) = importlib.metadata.entry_points(group="pytest11", name="spmd")
    assert entry.load() is plugin


def test_help(inner):
    """The option is in `--help`, and gone with `-p no:spmd`."""
    inner("--help").stdout.fnmatch_lines(["spmd:", "*--spmd-update*write the goldens of*"])
    assert "--spmd-update" not in inner("-p", "no:spmd", "--help").stdout.str()
    assert "Compares the collectives" in inner("--fixtures").stdout.str()


# Writing and comparing


def test_missing_update_equal_differs(inner, pytester):
    """Without a file the test fails; `--spmd-update` writes it; then it holds, until it differs."""
    done = inner(test_a=STEP.format(runs=1))
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "E * `step` has no golden goldens/test_a/test_step.ledger.",
            "E * it would hold:",
            "E *   + all-reduce over data: *payload 1.0 MiB, 1 run, forward, at mlp/dot_general",
            "E * Write it with pytest --spmd-update, and commit it.",
        ]
    )
    assert files(pytester) == []

    done = inner("--spmd-update")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["*= spmd goldens updated =*", "goldens/test_a/test_step.ledger"])
    assert files(pytester) == ["goldens/test_a/test_step.ledger"]

    for args in ((), ("--spmd-update",)):
        done = inner(*args)
        done.assert_outcomes(passed=1)
        assert "goldens updated" not in done.stdout.str()

    done = inner(test_a=STEP.format(runs=3))
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "E * `step` does not exchange what its golden goldens/test_a/test_step.ledger says.",
            "E * only now:",
            "E *   + all-reduce over data: *payload 1.0 MiB, 3 runs, forward, at mlp/dot_general",
            "E * only in the golden:",
            "E *   - all-reduce over data: *payload 1.0 MiB, 1 run, forward, at mlp/dot_general",
            "E * payload of all rows, per device: golden 1.0 MiB, now 3.0 MiB",
            "E * If this is meant: pytest --spmd-update, and review the file.",
        ]
    )


def test_failures_show_the_test_and_nothing_inside(inner):
    """What pytest shows of a failure is the user's line and the message, no frame of ours."""
    done = inner(
        test_a="""
        import jax, numpy as np, pytest
        from made import collective, report
        from spmd import testing, P
        def test_budget():
            testing.assert_collectives(report(collective()), max_bytes={"data": "1MB"})
        def test_typo():
            testing.assert_collectives(report(collective()), none=["all_gather"])
        def test_axis():
            testing.assert_collectives(report(collective()), max_count={"x": 1})
        def test_place():
            testing.assert_collectives(report(collective()), within={"x": {}})
        def test_arguments():
            testing.assert_collectives(report(collective()), 1)
        def test_sharding():
            testing.assert_sharding(np.ones(3), P("data"))
        def test_spec():
            testing.assert_sharding(np.ones(3), "data")
        def test_tracer():
            jax.make_jaxpr(lambda x: testing.assert_sharding(x, P()))(1.0)
        def test_golden(spmd_golden):
            spmd_golden(report(collective()))
        """,
    )
    done.assert_outcomes(failed=9)
    text = done.stdout.str()
    assert "spmd/testing" not in text
    assert "test_a.py:5: AssertionError" in text
    assert "E       AssertionError: `step` breaks a limit on its collectives" in text
    assert "E       1. max_bytes, all collectives over data: allowed 1,000,000 bytes (1MB)" in text


def test_files_of_classes_parameters_and_names(inner, pytester):
    """Test file, class, parameters and name make the file, so that no two tests share one."""
    inner(
        "--spmd-update",
        test_a="""
        import pytest
        from made import collective, report
        class TestA:
            def test_x(self, spmd_golden):
                spmd_golden(report(collective(executions=1)))
        @pytest.mark.parametrize("n", [2, "a/b", "a:b", "n" * 300])
        def test_x(n, spmd_golden):
            spmd_golden(report(collective(dims=(len(str(n)), 7))))
            spmd_golden(report(), name="more")
        """,
        test_b="""
        from made import collective, report
        def test_x(spmd_golden):
            assert spmd_golden(report(name="given")).name == "given"
        """,
    ).assert_outcomes(passed=6)
    got = files(pytester)
    assert len(got) == 10
    assert {
        "goldens/test_a/TestA.test_x.ledger",
        "goldens/test_a/test_x[2].ledger",
        "goldens/test_a/test_x[2].more.ledger",
        "goldens/test_b/test_x.ledger",
    } <= set(got)
    assert max(map(len, got)) < 170
    inner().assert_outcomes(passed=6)


def test_two_goldens_in_one_test(inner):
    """A second golden without a name of its own is an error, not a file written twice."""
    done = inner(
        "--spmd-update",
        test_a="""
        from made import report
        def test_x(spmd_golden):
            spmd_golden(report())
            spmd_golden(report(name="other"))
        """,
    )
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["E *spmd_golden is called twice in one test for one file."])


def test_assert_golden_follows_the_option(inner, pytester):
    """The function that the fixture calls is updated by the option too, beside its caller."""
    test = """
        from made import report
        from spmd.testing import assert_golden
        def test_x():
            assert_golden(report(), "step")
    """
    inner(test_a=test).assert_outcomes(failed=1)
    inner("--spmd-update").assert_outcomes(passed=1)
    assert files(pytester) == ["goldens/step.ledger"]
    inner().assert_outcomes(passed=1)


# In CI, in several processes, inside of another run


def test_update_in_ci(inner, pytester, monkeypatch):
    """In CI the option counts only where it stands on the command line."""
    monkeypatch.setenv("CI", "true")
    inner("--spmd-update", test_a=STEP.format(runs=1)).assert_outcomes(passed=1)
    pytester.makeini("[pytest]\naddopts = --spmd-update")
    done = inner(test_a=STEP.format(runs=2))
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: --spmd-update comes from addopts or PYTEST_ADDOPTS*"])
    assert " | 1 run | " in next(pytester.path.rglob("*.ledger")).read_text()
    for off in ("", "0", "false"):
        monkeypatch.setenv("CI", off)
        inner().assert_outcomes(passed=1)
    assert " | 2 runs | " in next(pytester.path.rglob("*.ledger")).read_text()


@pytest.mark.slow
def test_xdist(inner, pytester, monkeypatch):
    """Several processes write several goldens, in CI too; the summary lists all of them, once."""
    monkeypatch.setenv("CI", "true")
    tests = """
        import pytest
        from made import collective, report
        @pytest.mark.parametrize("n", range(4))
        def test_x(n, spmd_golden):
            spmd_golden(report(collective(executions=n)))
            spmd_golden(report(), name="same")
    """
    done = inner("-n", "2", "--spmd-update", in_process=False, test_a=tests)
    done.assert_outcomes(passed=4)
    names = [f"goldens/test_a/test_x[{n}]{more}.ledger" for n in range(4) for more in ("", ".same")]
    listed = [line for line in done.stdout.lines if line.endswith(".ledger")]
    assert listed == sorted(names) == files(pytester)


@pytest.mark.slow
def test_conflicts_between_processes(inner):
    """Two tests in two processes that write one file differently fail the run, which names it."""
    test = """
        import time
        from made import report
        from spmd.testing import assert_golden
        def test_x():
            time.sleep(0.5)  # so that the other worker takes the other file
            assert_golden(report(name=__name__), "shared")
            assert_golden(report(), "equal")
    """
    args = "-n", "2", "--dist", "loadfile", "--spmd-update"
    done = inner(*args, in_process=False, test_a=test, test_b=test)
    done.assert_outcomes(passed=2)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(
        ["*= spmd goldens that two tests write differently =*", "goldens/shared.ledger", "*passed*"]
    )


def test_without_xdist(inner):
    """The plugin works where pytest-xdist is not there."""
    inner("-p", "no:xdist", "--spmd-update", test_a=STEP.format(runs=1)).assert_outcomes(passed=1)


def test_runs_inside_of_a_run(inner):
    """An inner run that updates does not make this one update, nor the other way round."""
    before = list(_goldens.sessions)
    inner("--spmd-update", test_a=STEP.format(runs=1)).assert_outcomes(passed=1)
    assert _goldens.sessions == before
    _goldens.sessions.append(_goldens.Session(update=True))
    try:
        inner(test_a=STEP.format(runs=2)).assert_outcomes(failed=1)
    finally:
        _goldens.sessions.pop()


# Goldens of this repository


def train(w, x):
    """One step of a data-parallel MLP with two layers of names."""

    def loss(w):
        y = x
        for i, v in enumerate(w):
            with jax.named_scope(f"layer_{i}"):
                y = jnp.tanh(y @ v)
        return jnp.sum(y)

    return jax.tree.map(lambda a, g: a - g, w, jax.grad(loss)(w))


ARGS = (
    [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3,
    jax.ShapeDtypeStruct((32, 64), jnp.float32),
)


def test_a_real_program(in_mesh):
    """The golden in this repository holds on every release of JAX that is tested.

    Hand count: the gradient of each of three f32[64,64] weights is summed over `data`, 16384 bytes
    each, whether or not the compiler combines them.
    """
    f = spmd.pjit(train, (None, P("data")), None)
    got = assert_golden(f, "train", *ARGS)
    held = Path(__file__).parent / "goldens" / "train.ledger"
    rows = [line for line in held.read_text().splitlines() if not line.startswith("#")]
    assert sum(int(row.split(" | x")[1].split(" |")[0]) for row in rows) == 3
    assert all(
        row.startswith("all-reduce | data | f32[64,64] -> f32[64,64] | 16384 B") for row in rows
    )
    assert sum(one.payload_bytes for one in got.collectives) == 3 * 16384


def test_a_real_program_that_changed(in_mesh):
    """Weights that are split now are gathered and no longer summed: the golden tells both."""
    f = spmd.pjit(train, (P("data"), P("data")), P("data"))
    with pytest.raises(AssertionError) as caught:
        assert_golden(f, "train", *ARGS, update=False)
    assert "\n  + all-gather over data: " in str(caught.value)


def test_the_fixture(in_mesh, spmd_golden):
    """The fixture finds the file of this test, and compares a second one by its name."""
    f = spmd.pjit(train, (None, P("data")), None)
    assert spmd_golden(f, *ARGS).name == "train"
    spmd_golden(f, *ARGS, name="again")
