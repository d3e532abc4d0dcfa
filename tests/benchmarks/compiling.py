"""Trace, lower and compile the demo's training step, against `jax.jit` with the same shardings."""

from collections.abc import Iterator
import functools

import jax
from jax.sharding import NamedSharding
import numpy as np

import spmd
from spmd import P
from spmd.demo import model, train

from .paired import Result, compare


def run(turns: int) -> Iterator[Result]:
    """The one comparison of compile times."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    config, adam = model.Config(vocab=72), train.optimizer(100)
    state = jax.eval_shape(functools.partial(train.init_state, adam=adam, config=config), 0)
    tokens = jax.ShapeDtypeStruct((32, config.seq_len + 1), np.int32)
    specs = train.state_specs(adam, config)
    residual = NamedSharding(mesh, P("data", None, None))

    def ours(_: int) -> None:
        jax.clear_caches()
        step = spmd.pjit(
            lambda state, tokens: train.train_step(state, tokens, adam),
            in_axis_resources=(specs, P("data")),
            out_axis_resources=(specs, None),
            donate_argnums=0,
            mesh=mesh,
        )
        step.lower(state, tokens).compile()

    placed = jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P)
    )

    def constrain(x):
        return jax.lax.with_sharding_constraint(x, residual)

    def peer(_: int) -> None:
        jax.clear_caches()
        step = jax.jit(
            lambda state, tokens: train.train_step(state, tokens, adam, constrain),
            in_shardings=(placed, NamedSharding(mesh, P("data"))),
            out_shardings=(placed, NamedSharding(mesh, P())),
            donate_argnums=0,
        )
        step.lower(state, tokens).compile()

    yield compare(
        "trace + lower + compile of the demo's step", ours, peer, target=1.10, turns=turns
    )
