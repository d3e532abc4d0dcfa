"""What one process can do, several can: the same programs, each process with its part."""

import pytest
from runs import passed

RUNS = [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)]
SLOW = [pytest.param(2, 4, marks=pytest.mark.slow), RUNS[1]]


@pytest.mark.parametrize(("processes", "devices"), RUNS)
def test_pjit(tmp_path, processes, devices):
    """Values, gradients, batches, loops, constraints and donation are those of NumPy."""
    passed(
        tmp_path,
        """
        rng = np.random.default_rng(0)
        X, W = (rng.standard_normal(s).astype(np.float32) for s in ((8, 6), (6, 4)))
        x = d.host_local_to_global(part(X), mesh, P("data"))
        w = d.host_local_to_global(W, mesh, P(None))
        same = lambda got, want: np.testing.assert_allclose(whole(got), want, rtol=1e-4, atol=1e-5)

        layer = pjit(
            lambda x, w: jnp.tanh(x @ w),
            in_axis_resources=(P("data"), P(None, "model")),
            out_axis_resources=P("data", "model"),
            mesh=mesh,
        )
        for _ in range(3):
            same(layer(x, w), np.tanh(X @ W))
        assert layer(x, w).sharding.spec == P("data", "model")
        assert not layer(x, w).is_fully_addressable

        grad = jax.grad(lambda w: layer(x, w).sum())(w)
        same(grad, X.T @ (1 - np.tanh(X @ W) ** 2))
        assert grad.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(None, "model")), 2)

        ws = d.host_local_to_global(np.stack([W, 2 * W]), mesh, P(None))
        same(jax.vmap(layer, (None, 0))(x, ws), np.tanh(np.stack([X @ W, 2 * X @ W])))

        def steps(x, w):
            step = lambda c, _: (spmd.with_sharding_constraint(c * 2 + 1, P("data", None)), None)
            return jax.checkpoint(lambda c: lax.scan(step, c, None, length=3)[0] @ w)(x)

        looped = pjit(steps, in_axis_resources=(P("data"), None), mesh=mesh)
        same(looped(x, w), (8 * X + 7) @ W)
        same(jax.jit(jax.grad(lambda x: looped(x, w).sum()))(x), np.full_like(X, 8) * W.sum(1))

        gone = d.host_local_to_global(part(X), mesh, P("data"))
        give = pjit(lambda x: x + 1, in_axis_resources=P("data"), out_axis_resources=P("data"),
                    donate_argnums=0, mesh=mesh)
        same(give(gone), X + 1)
        assert gone.is_deleted()
        try:
            give(gone)
        except spmd.DonatedArrayError:
            pass
        else:
            raise AssertionError("a donated array was taken")

        moved = pjit(lambda x: x * 2, in_axis_resources=P(None, "model"), mesh=mesh)
        same(moved(x), 2 * X)
        """,
        processes,
        devices,
    )


@pytest.mark.few(0)
@pytest.mark.parametrize(("processes", "devices"), SLOW)
def test_local_semantics(tmp_path, processes, devices):
    """Under local semantics host arrays are parts, results too; sizes are those of the part."""
    passed(
        tmp_path,
        """
        X = np.arange(64, dtype=np.float32).reshape(8, 8)
        double = pjit(lambda x, s: (x * s, x.sum()), in_axis_resources=(P("data"), None),
                      out_axis_resources=(P("data"), None),
                      positional_semantics="local", mesh=mesh)
        for _ in range(2):
            y, total = double(part(X), np.float32(2))
            np.testing.assert_array_equal(y, part(2 * X))
            assert y.is_fully_addressable and float(total) == X.sum()
        try:
            double(part(X)[:1], np.float32(2))
        except spmd.ShardingError as error:
            rows = len(mesh.local_mesh.devices)
            want = f"dimension 0 to be divisible by {rows}" if rows > 1 else ""
            assert want and want in str(error), error
        else:
            assert len(mesh.local_mesh.devices) == 1
        """,
        processes,
        devices,
    )


@pytest.mark.few(0)
@pytest.mark.parametrize(("processes", "devices"), SLOW)
def test_pmap(tmp_path, processes, devices):
    """Each process passes its rows and gets its rows; collectives and indices count over all."""
    passed(
        tmp_path,
        """
        X = np.arange(8, dtype=np.float32)
        x, own = part(X), part(np.arange(8))
        share = pmap(lambda x, w: (x / lax.psum(x, "i") * w, lax.axis_index("i")), "i",
                     in_axes=(0, None))
        for _ in range(3):
            y, index = share(x, np.float32(2))
            np.testing.assert_allclose(y, part(2 * X / 28), rtol=1e-6)
            np.testing.assert_array_equal(index, own)
        assert y.is_fully_addressable and share._cache_size == 1
        z, _ = share(y, np.float32(1))
        np.testing.assert_allclose(z, part(X / 28), rtol=1e-6)
        assert spmd.shard_at(y, 1).devices() == {jax.local_devices()[1]}
        np.testing.assert_array_equal(pmap(lambda: lax.axis_index("i"), "i", axis_size=8)(), own)
        assert float(pmap(lambda x: lax.psum(x, "i"), "i", out_axes=None)(x)) == 28
        grad = pmap(jax.grad(lambda x: lax.psum(x**2, "i")), "i")(x)
        np.testing.assert_allclose(grad, part(16 * X), rtol=1e-6)
        if count == 2:
            both = pmap(lambda x: pmap(lambda y: lax.psum(y, ("i", "j")), "j")(x), "i")
            np.testing.assert_array_equal(both(x.reshape(2, 2)), np.full((2, 2), 28, np.float32))
        try:
            share(np.ones(5), 1.0)
        except spmd.MeshError as error:
            assert f"needs {5 * count} devices" in str(error), error
        else:
            raise AssertionError("too many elements")
        """,
        processes,
        devices,
    )


@pytest.mark.few(0)
@pytest.mark.parametrize(("processes", "devices"), RUNS)
def test_many_in_flight(tmp_path, processes, devices):
    """A loop that waits for nothing ends, however it calls: 33 in flight at once never do."""
    passed(
        tmp_path,
        """
        x = d.host_local_to_global(part(np.ones(8, np.float32)), mesh, P("data"))
        mean = pjit(lambda x: x * 0.5 + x.mean() * 0.5, in_axis_resources=P("data"),
                    out_axis_resources=P("data"), mesh=mesh)
        moves = pjit(lambda x: x - x.sum() + 8, in_axis_resources=P("model"),
                     out_axis_resources=P("data"), mesh=mesh)
        compiled = mean.lower(x).compile()
        chain = x
        for i in range(150):
            chain = (mean, compiled, moves)[i % 3](chain)
        np.testing.assert_allclose(whole(chain), 1)

        free = [mean(x) for _ in range(100)]
        np.testing.assert_allclose(whole(free[-1]), 1)

        # Meshes over some devices of every process, and over all of them, one after another.
        columns = np.array(jax.devices()).reshape(count, -1).T
        meshes = [spmd.make_mesh({"all": len(c)}, devices=c)
                  for c in [*columns, columns.T.ravel()]]
        step = lambda mesh: pjit(lambda x: x / x.sum(), in_axis_resources=P("all"),
                                 out_axis_resources=P("all"), mesh=mesh)
        steps = [step(m) for m in meshes]
        values = [d.host_local_to_global(np.ones(m.size // count), m, P("all")) for m in meshes]
        for _ in range(40):
            values = [step(v) for step, v in zip(steps, values)]
        for value in values:
            np.testing.assert_allclose(whole(value), 1 / value.size, rtol=1e-6)

        summed = pmap(lambda x: lax.pmean(x, "i"), "i")
        value = np.ones((jax.local_device_count(), 2), np.float32)
        for _ in range(100):
            value = summed(value)
        np.testing.assert_allclose(whole(value), 1)
        """,
        processes,
        devices,
    )


@pytest.mark.few(0)
@pytest.mark.parametrize(("processes", "devices"), RUNS)
def test_host_callbacks(tmp_path, processes, devices):
    """A process gets the taps of its own devices, in order; a call gets its own shards."""
    passed(
        tmp_path,
        """
        from spmd import host_callback as hcb
        X = np.arange(8, dtype=np.float32)
        x = d.host_local_to_global(part(X), mesh, P(("data", "model")))
        seen = []

        def see(v, _, *, shard):
            seen.append((shard.device.id, float(v[0])))

        @jax.jit
        def taps(x):
            for i in range(3):
                hcb.id_tap(see, x + 10 * i, per_shard=True)
            return x * 2

        np.testing.assert_array_equal(whole(taps(x)), 2 * X)
        hcb.barrier_wait()
        own = [dev.id for dev in jax.local_devices()]
        for row, dev in enumerate(own):
            value = float(part(X)[row])
            assert [v for i, v in seen if i == dev] == [value, value + 10, value + 20], seen
        assert {i for i, _ in seen} == {*own}

        ask = lambda v, *, shard: v * 10
        shape = jax.ShapeDtypeStruct((1,), np.float32)
        f = jax.jit(lambda x: hcb.call(ask, x, result_shape=shape, per_shard=True))
        np.testing.assert_array_equal(whole(f(x)), 10 * X[:, None])  # stacked by device

        told = []
        g = pmap(lambda x: hcb.id_tap(lambda v, _: told.append(float(v)), x) + 1)
        np.testing.assert_array_equal(g(part(X)), part(X) + 1)
        hcb.barrier_wait()
        assert sorted(told) == [*map(float, part(X))], told
        """,
        processes,
        devices,
    )


@pytest.mark.few(0)
@pytest.mark.parametrize(("processes", "devices"), SLOW)
def test_reports(tmp_path, processes, devices):
    """The report of a program says the same in every process, and what a hand count says."""
    said = passed(
        tmp_path,
        """
        f = pjit(lambda x, w: x @ w, in_axis_resources=(P("data", "model"), P("model")),
                 out_axis_resources=P("data"), mesh=mesh)
        x = d.host_local_to_global(part(np.ones((8, 6), np.float32)), mesh, P("data"))
        w = d.host_local_to_global(np.ones((6, 4), np.float32), mesh, P(None))
        report = spmd.report(f, x, w)
        (row,) = [c for c in report.collectives if c.kind == "all-reduce"]
        say(row.kind, row.mesh_axes, row.payload_bytes)
        """,
        processes,
        devices,
    )
    # Each device has a product f32[2,4], which is summed over the axis model.
    assert said == ["all-reduce ('model',) 32"] * processes
