"""Taps run beside the device: what waits for what, the barrier, the end of a process."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
from oracle import put
from own_process import run_alone
import pytest

from spmd import P, host_callback as hcb, pjit

X = np.arange(8, dtype=np.float32)
LIMIT = 30  # seconds after which an event that does not come is a failure


class Gate:
    """A tap that waits until it may go on."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()
        self.seen = []

    def tap(self, v, transforms):
        """Waits at the gate, then keeps what it got."""
        del transforms
        self.entered.set()
        assert self.opened.wait(LIMIT)
        self.seen.append(np.asarray(v).reshape(-1)[0].item())


def tapping(gate):
    """A function of `X` with a tap of the first element."""
    return lambda x: hcb.id_tap(gate.tap, x) * 2


@pytest.mark.parametrize("way", ["one device", "eight devices", "pjit"])
def test_a_slow_tap_blocks_no_program(way, row):
    """While a tap waits, its program and later ones end with their values; order is kept."""
    gate = Gate()
    run = pjit(tapping(gate), P("x"), P("x"), mesh=row) if way == "pjit" else jax.jit(tapping(gate))
    put_x = (lambda x: put(x, row, P("x"))) if way == "eight devices" else np.asarray
    outs = [run(put_x(X + i)) for i in range(20)]
    for i, out in enumerate(outs):
        np.testing.assert_array_equal(np.asarray(out), (X + i) * 2)
    assert gate.entered.wait(LIMIT)
    assert gate.seen == []
    gate.opened.set()
    hcb.barrier_wait()
    assert gate.seen == [*range(20)]


@pytest.mark.parametrize("way", ["one device", "eight devices"])
def test_a_full_queue_pauses_the_program(way, row):
    """A program whose tap has no room waits, ends when there is room, and loses nothing."""
    hcb.configure(max_queue_bytes=3 * X.nbytes)
    gate = Gate()
    run = jax.jit(tapping(gate))
    put_x = (lambda x: put(x, row, P("x"))) if way == "eight devices" else np.asarray
    for i in range(3):
        jax.block_until_ready(run(put_x(X + i)))
    assert gate.entered.wait(LIMIT)
    ended = threading.Event()

    def work():
        jax.block_until_ready([run(put_x(X + i)) for i in range(3, 10)])
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not ended.wait(0.2)  # nothing can end it: the gate is closed
    assert gate.seen == []
    gate.opened.set()
    thread.join(LIMIT)
    assert ended.is_set()
    hcb.barrier_wait()
    assert gate.seen == [*range(10)]


def test_an_operand_larger_than_the_queue():
    """Operands that never fit pass one at a time, and those around them keep their order."""
    hcb.configure(max_queue_bytes=8)
    seen = []

    def program(x):
        hcb.id_tap(lambda v, _: seen.append(("small", float(v))), x[0])
        hcb.id_tap(lambda v, _: seen.append(("large", float(v.sum()))), x)
        return x

    for i in range(3):
        jax.jit(program)(jnp.full(10_000, i, jnp.float32))
    hcb.barrier_wait()
    assert seen == [(k, i * n) for i in range(3) for k, n in (("small", 1), ("large", 10_000))]


def test_temporaries_that_die_while_a_tap_runs():
    """A function and a result that nobody keeps are tapped with their values all the same."""
    gate, count = Gate(), 10
    for i in range(count):
        jax.jit(lambda x: hcb.id_tap(gate.tap, x))(jnp.full(1000, i, jnp.int32))
    gate.opened.set()
    hcb.barrier_wait()
    assert gate.seen == [*range(count)]


def test_barriers_of_several_threads(row):
    """Each of several barriers at a time returns after all that was started before."""
    gate = Gate()
    run = pjit(tapping(gate), P("x"), P("x"), mesh=row)
    for i in range(5):
        run(X + i)
    assert gate.entered.wait(LIMIT)
    found = []

    def work():
        hcb.barrier_wait()
        found.append([*gate.seen])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert found == []
    gate.opened.set()
    for thread in threads:
        thread.join(LIMIT)
    assert found == [[0, 1, 2, 3, 4]] * 4


def test_barrier_covers_all_devices():
    """The barrier waits for taps of programs on each single device."""
    seen = []
    gate = threading.Event()

    def tap(v, transforms, *, device):
        del transforms
        assert gate.wait(LIMIT)
        seen.append((device, float(v)))

    run = jax.jit(lambda x: hcb.id_tap(tap, x, tap_with_device=True))
    for i, device in enumerate(jax.devices()):
        run(jax.device_put(np.float32(i), device))
    gate.set()
    hcb.barrier_wait()
    assert dict(seen) == {d: float(i) for i, d in enumerate(jax.devices())}


def test_stop_and_start_again():
    """Stopping waits for pending taps and ends the threads; the next tap starts them again."""
    seen = []

    def names():
        known = {f"spmd.host_callback {d}" for d in jax.devices()}
        return [t.name for t in threading.enumerate() if t.name in known]

    run = jax.jit(lambda x: hcb.id_tap(lambda v, _: seen.append(float(v)), x))
    for i in range(3):
        for j in range(4):
            run(np.float32(4 * i + j)).block_until_ready()
        assert names()
        hcb.stop_outfeed_receiver()
        assert len(seen) == 4 * i + 4
        assert names() == []
    hcb.stop_outfeed_receiver()
    assert seen == [*map(float, range(12))]


@pytest.mark.slow
def test_barriers_inside_of_taps():
    """Taps of two devices that wait at the barrier at the same time do not wait for each other."""
    script = """
    both = threading.Barrier(2)
    seen = []

    def tap(v, transforms):
        both.wait(20)
        hcb.barrier_wait()
        seen.append(float(v))

    run = jax.jit(lambda x: hcb.id_tap(tap, x))
    for i in range(3):
        for device in jax.devices()[:2]:
            run(jax.device_put(np.float32(i), device))
        hcb.barrier_wait()
    say(sorted(seen))
    """
    assert run_alone(script, limit=40) == ["[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]"]


@pytest.mark.slow
def test_a_tap_that_prints_keeps_its_place():
    """A host function that starts programs with taps of its own runs one at a time, in order."""
    script = """
    import io, time
    seen, stream, inside = [], io.StringIO(), []

    def tap(i, transforms):
        inside.append(i)
        assert len(inside) == 1
        hcb.id_print(i, what="from a tap", output_stream=stream)
        time.sleep(0.02 if i % 2 == 0 else 0)
        seen.append(int(i))
        inside.pop()

    jax.jit(lambda: lax.fori_loop(0, 8, lambda i, x: hcb.id_tap(tap, i, result=x), 1.0))()
    hcb.barrier_wait()
    say(seen)
    hcb.barrier_wait()
    say(stream.getvalue().split("\\n")[:3], stream.getvalue().count("what"))
    """
    first = ["what: from a tap", "0", "what: from a tap"]
    assert run_alone(script) == [str([*range(8)]), f"{first} 8"]


@pytest.mark.slow
def test_devices_do_not_wait_for_one_another():
    """A program with a tap runs on a device while the same program still runs on another."""
    script = """
    ended = threading.Event()

    def wait_for_the_other(v):
        assert ended.wait(20)
        return v

    seen, tapped = [], threading.Event()

    def tap(v, transforms):
        seen.append(float(v))
        tapped.set()

    run = jax.jit(lambda x: hcb.id_tap(tap, later(x)))
    later = lambda x: lax.cond(x > 0, lambda x: jax.pure_callback(wait_for_the_other, x, x),
                               lambda x: x, x)
    first, second = (jax.device_put(np.float32(x), d) for x, d in zip((1, -1), jax.devices()))
    thread = threading.Thread(target=run, args=(first,))
    thread.start()
    run(second).block_until_ready()
    tapped.wait(15)  # a program may end before its tap is called
    say(thread.is_alive())
    ended.set()
    thread.join()
    hcb.barrier_wait()
    say(seen)
    """
    assert run_alone(script) == ["True", "[-1.0, 1.0]"]


@pytest.mark.slow
def test_nothing_starts_at_import():
    """Importing starts no thread and no backend; tracing and lowering call nobody."""
    code = (
        "import threading, spmd.host_callback\n"
        "from jax._src import xla_bridge\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not xla_bridge._backends\n"
    )
    script = f"""
    import subprocess
    done = subprocess.run([sys.executable, "-c", {code!r}], timeout=30)
    say(done.returncode)
    """
    assert run_alone(script) == ["0"]


@pytest.mark.few(0)
@pytest.mark.parametrize("way", ["one device", "eight devices", "pjit", "shard_map"])
def test_pending_taps_at_exit(way):
    """What is pending when the interpreter ends is delivered, in order, and it ends with code 0."""
    script = f"""
    import time

    def tap(i, v, transforms):
        time.sleep(0.01)
        say(i, v.sum())

    def fun(x):
        for i in range(5):
            hcb.id_tap(lambda v, t, i=i: tap(i, v, t), x)
        return x

    {{
        "one device": lambda: jax.jit(fun)(X),
        "eight devices": lambda: jax.jit(fun)(XS),
        "pjit": lambda: pjit(fun, P("x"), P("x"), mesh=mesh)(X),
        "shard_map": lambda: sharded(fun)(XS),
    }}[{way!r}]()
    """
    lines = run_alone(script)
    if way == "shard_map":
        assert sorted(lines) == sorted(f"{i} {float(v)}" for i in range(5) for v in range(8))
    else:
        assert lines == [f"{i} 28.0" for i in range(5)]


@pytest.mark.slow
def test_a_forked_child_is_sane():
    """A child has no pending taps, its barrier returns, and the parent's taps arrive once."""
    script = """
    import warnings
    warnings.simplefilter("ignore")
    gate = threading.Event()
    seen = []

    def tap(v, transforms):
        gate.wait(20)
        seen.append(float(v))

    jax.jit(lambda x: hcb.id_tap(tap, x))(X[1])
    pid = os.fork()
    if not pid:
        hcb.barrier_wait()
        hcb.stop_outfeed_receiver()
        say("child", seen)
        os._exit(0)
    say("exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    gate.set()
    hcb.barrier_wait()
    say("parent", seen)
    """
    assert run_alone(script, limit=40, stderr=None) == ["child []", "exit code 0", "parent [1.0]"]
