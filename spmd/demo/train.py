"""The demo's training step, its state, and the loop that runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import functools
import itertools
from typing import Any

import jax
from jax import Array
import numpy as np
import optax

from spmd import PartitionSpec as P, pjit
from spmd.demo import BATCH, HEADS, model
from spmd.demo.corpus import Corpus, load

State = tuple[Any, Any]  # parameters and optimizer state, two pytrees
STEPS = 400


def config_of(corpus: Corpus) -> model.Config:
    """The model's shape for a text."""
    return model.Config(vocab=len(corpus.characters), heads=HEADS)


def optimizer(steps: int) -> optax.GradientTransformation:
    """Adam with clipped gradients, a short warm-up and a cosine decay over ``steps``."""
    warmup = min(30, steps // 4)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup, max(steps, warmup + 1), 1.5e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99))


def state_specs(adam: optax.GradientTransformation, config: model.Config) -> tuple[Any, Any]:
    """PartitionSpecs of parameters and optimizer state: a moment lies as its parameter does."""
    specs = model.param_specs()
    shapes = jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))
    moments = optax.tree_utils.tree_map_params(
        adam,
        lambda _, spec: spec,
        jax.eval_shape(adam.init, shapes),
        specs,
        transform_non_params=lambda _: P(),
    )
    return specs, moments


def init_state(seed: Any, adam: optax.GradientTransformation, config: model.Config) -> State:
    """Draw the parameters and start the optimizer."""
    params = model.init(jax.random.key(seed), config)
    return params, adam.init(params)


def train_step(
    state: State,
    tokens: Array,
    adam: optax.GradientTransformation,
    constrain: model.Constrain = model.shard_residual,
) -> tuple[State, Array]:
    """One step of training: the next state, and the loss before the step."""
    params, moments = state
    loss, gradients = jax.value_and_grad(model.loss)(params, tokens, constrain)
    updates, moments = adam.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


@functools.partial(pjit, donate_argnums=(0,))
def step(state: State, tokens: Array) -> tuple[State, Array]:
    """One step of training that says nothing of where anything lies: for ``spmd plan``."""
    return train_step(state, tokens, optimizer(STEPS), _unconstrained)


def example() -> tuple[State, Any]:
    """What `step` is called with, as shapes."""
    config = config_of(load())
    init = functools.partial(init_state, adam=optimizer(STEPS), config=config)
    tokens = jax.ShapeDtypeStruct((BATCH, config.seq_len + 1), np.int32)
    return jax.eval_shape(init, np.uint32(0)), tokens


class Trainer:
    """Training partitioned over the current mesh with `spmd.pjit`.

    Attributes:
        steps: that it takes, and that the learning rate is planned for.
        step: the partitioned training step; it donates its state.
        slip: the same step with a slip that is easily made: nothing says that the devices along
            data share the batch. Each of them computes all of it.
        state: parameters and optimizer state, sharded.
    """

    def __init__(self, corpus: Corpus, steps: int, seed: int):
        self.config = config_of(corpus)
        adam = optimizer(steps)
        specs = state_specs(adam, self.config)
        self.batches = corpus.batches(seed, BATCH, self.config.seq_len)
        self.steps = steps
        self.step = _partitioned(functools.partial(train_step, adam=adam), specs, P("data"))
        self.slip = _partitioned(
            functools.partial(train_step, adam=adam, constrain=_unconstrained), specs, P()
        )
        # Born sharded: no device ever holds the whole state.
        init = functools.partial(init_state, adam=adam, config=self.config)
        self.state = pjit(init, in_axis_resources=None, out_axis_resources=specs)(np.uint32(seed))

    def sample_batch(self) -> np.ndarray:
        """A batch of the right shape, for compiling."""
        return np.zeros((BATCH, self.config.seq_len + 1), dtype=np.int32)

    def losses(self) -> Iterator[float]:
        """Train, giving the loss of each step."""
        for tokens in itertools.islice(self.batches, self.steps):
            self.state, loss = self.step(self.state, tokens)
            # Waiting here keeps one program in flight: many at once can starve the few cores that
            # all virtual devices share, and deadlock in a collective.
            yield float(loss)


def _unconstrained(x: Array) -> Array:
    return x


def _partitioned(step: Any, specs: tuple[Any, Any], batch: P) -> Any:
    return pjit(
        step,
        in_axis_resources=(specs, batch),
        out_axis_resources=(specs, P()),
        donate_argnums=(0,),
    )


def unsharded_losses(corpus: Corpus, steps: int, seed: int) -> Iterator[float]:
    """The same training by plain `jax.jit` on one device, without a mesh or a constraint.

    It is compiled before this returns, so that whoever times the losses times the steps.
    """
    config, adam = config_of(corpus), optimizer(steps)
    batches = list(itertools.islice(corpus.batches(seed, BATCH, config.seq_len), steps))
    state = jax.jit(functools.partial(init_state, adam=adam, config=config))(np.uint32(seed))
    step = functools.partial(train_step, adam=adam, constrain=_unconstrained)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batches[0]).compile()
    return _unsharded_steps(compiled, state, batches)


def _unsharded_steps(step: Any, state: State, batches: Iterable[np.ndarray]) -> Iterator[float]:
    for tokens in batches:
        state, loss = step(state, tokens)
        yield float(loss)
