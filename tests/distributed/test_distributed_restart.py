"""A run that loses a process goes on from its last Orbax checkpoint, on another mesh too."""

import numpy as np
import pytest
from runs import START, launch

TRAIN = """
import signal
from jax.experimental import multihost_utils
import orbax.checkpoint as ocp

steps, victim = 12, int(sys.argv[1])
mesh = spmd.make_mesh(dict(zip(("data", "model"), map(int, sys.argv[2].split("x")))))
rng = np.random.default_rng(0)
X, W = rng.standard_normal((64, 8), np.float32), rng.standard_normal((8, 4), np.float32)
Y = X @ W
specs = {"w": P(None, "model"), "m": P(None, "model")}

def loss_of(w, x, y):
    return ((x @ w - y) ** 2).mean()

@pjit_here
def step(state, x, y):
    loss, grad = jax.value_and_grad(loss_of)(state["w"], x, y)
    m = 0.9 * state["m"] + grad
    return {"w": state["w"] - 0.1 * m, "m": m}, loss

place = lambda v, spec: jax.make_array_from_callback(
    v.shape, jax.NamedSharding(mesh, spec), lambda index: v[index])
x, y = place(X, P("data")), place(Y, P("data"))
state = {k: place(np.zeros_like(W), s) for k, s in specs.items()}

manager = ocp.CheckpointManager(os.environ["CHECKPOINTS"])
first = 0
if (last := manager.latest_step()) is not None:
    like = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), state)
    state = manager.restore(last, args=ocp.args.StandardRestore(like))
    first = last + 1
    say("restored", last)
for i in range(first, steps):
    if i == 7 and victim >= 0:
        multihost_utils.sync_global_devices("all have told the row before")
        if me == victim:
            os.kill(os.getpid(), signal.SIGKILL)
    state, loss = step(state, x, y)
    say(i, float(loss))
    if i % 3 == 2:
        manager.save(i, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
manager.close()
"""


def curve():
    """The losses of the same training in NumPy."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((64, 8), np.float32), rng.standard_normal((8, 4), np.float32)
    y, own, m, losses = x @ w, np.zeros_like(w), np.zeros_like(w), []
    for _ in range(12):
        error = x @ own - y
        losses.append((error**2).mean())
        m = 0.9 * m + 2 * x.T @ error / error.size
        own = own - 0.1 * m
    return losses


@pytest.mark.few(0)
@pytest.mark.parametrize(("processes", "devices", "mesh"), [(2, 4, "2x4"), (4, 2, "4x2")])
def test_restart(tmp_path, processes, devices, mesh):
    """One of two processes is killed in training; the restart continues the same loss curve."""
    head = (
        START.replace("initialize()", "initialize(lost_timeout=3)")
        + """
pjit_here = lambda f: pjit(f, in_axis_resources=(specs, P("data"), P("data")),
                           out_axis_resources=(specs, None), mesh=mesh)
"""
    )
    env = {"CHECKPOINTS": str(tmp_path / "checkpoints")}
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()

    def train(where, victim, shape, *sizes):
        return launch(where, TRAIN, *sizes, head=head, env=env, arguments=(victim, shape))

    killed = train(first, 1, "4x2", 2, 4)
    assert killed.code == 128 + 9, killed.err
    assert "This run has lost process 1 of 2" in killed.err
    again = train(second, -1, mesh, processes, devices)
    assert again.code == 0, again.err
    want = curve()
    for process in range(processes):
        restored, *rows = again.said[process].splitlines()
        assert restored == "restored 5"
        got = dict(map(float, row.split()) for row in rows)
        assert [*got] == [6, 7, 8, 9, 10, 11]
        np.testing.assert_allclose([*got.values()], want[6:], rtol=1e-4)
    before = dict(map(float, row.split()) for row in killed.said[0].splitlines())
    np.testing.assert_allclose([*before.values()], want[: len(before)], rtol=1e-4)
    assert len(before) == 7
