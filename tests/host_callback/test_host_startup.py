"""What the import sets for XLA, which reads it once, and what is said where it comes too late."""

import os

import jax
from own_process import HEAD, run_alone
import pytest

#: XLA copies the loops of some `shard_map` there, unless one of its passes is left out.
COPIES = jax.__version_info__ >= (0, 11)
DEVICES = "--xla_force_host_platform_device_count=8"
PASS = "nullary-function-wrap-inliner"
LATE = HEAD.replace(
    "import spmd.host_callback",
    "import warnings\n"
    "warnings.showwarning = lambda message, *_, **__: print(message, flush=True)\n"
    "import jax; jax.devices()\n"
    "import spmd.host_callback",
)
#: The operand of the body is not needed: XLA sees a function of the token alone.
COUNT_TAPS = """
    seen = []

    def body(x):
        count = lambda i, c: hcb.id_tap(lambda v, t: seen.append(int(v)), i, result=c)
        return x + lax.fori_loop(0, 3, count, 0)

    jax.jit(jax.grad(lambda x: sharded(body)(x).sum()))(X)
    hcb.barrier_wait()
    say(sorted(seen))
    """


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "set_to"),
    [
        (DEVICES, f"{DEVICES} --xla_disable_hlo_passes={PASS}"),
        (
            f"--xla_disable_hlo_passes=dot-merger {DEVICES}",
            f"--xla_disable_hlo_passes={PASS},dot-merger {DEVICES}",
        ),
        (
            f"{DEVICES} --xla_disable_hlo_passes=dot-merger,{PASS}",
            f"{DEVICES} --xla_disable_hlo_passes=dot-merger,{PASS}",
        ),
    ],
    ids=["one flag", "other passes", "said already"],
)
def test_a_wrong_pass_is_left_out(given, set_to):
    """What the user disables stays disabled, and each tap of a loop arrives once per device."""
    script = COUNT_TAPS + "say(os.environ['XLA_FLAGS'])"
    taps, flags = run_alone(script, XLA_FLAGS=given)
    assert taps == str([i for i in range(3) for _ in range(8)])
    assert flags == (set_to if COPIES else given)


@pytest.mark.slow
def test_import_after_jax_has_started():
    """Where loops would be copied it is said, at lowering, what to do; nothing is changed then."""
    script = COUNT_TAPS + "say(os.environ['XLA_FLAGS'], 'NPROC' in os.environ)"
    *said, taps, state = run_alone(script, head=LATE, XLA_FLAGS=DEVICES)
    assert state == f"{DEVICES} False"
    if COPIES:
        assert said == [
            "spmd.host_callback was imported after JAX had started. From JAX 0.11 on, XLA then "
            "copies the loops of a shard_map whose operands nobody needs, and each tap in them "
            "arrives many times: import spmd.host_callback before the first array, or set "
            f"XLA_FLAGS=--xla_disable_hlo_passes={PASS}"
        ]
    else:
        assert (said, taps) == ([], str([i for i in range(3) for _ in range(8)]))


@pytest.mark.few(0)
@pytest.mark.parametrize("given", [None, "5"])
def test_threads_for_programs_of_host_functions(given):
    """There are threads for two more programs per device, or as many as the user says."""
    env = {} if given is None else {"NPROC": given}
    wanted = str((os.cpu_count() or 1) + 16) if given is None else given
    assert run_alone("say(os.environ['NPROC'])", **env) == [wanted]
