"""From imports done to an executable that is ready: a bundle, against `jax.jit` and its cache.

Each measurement is a process of its own, in which one of the two becomes ready and runs once:
``python -m tests.benchmarks.bundling ours|peer PROGRAM FOLDER``. Its clock starts when its imports
are done: the peer has to find shardings and types of its arguments before it can lower, a bundle
has them. A second clock, ``types given``, starts after that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
import functools
import json
import os
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
from jax.sharding import NamedSharding
import numpy as np
import optax

import spmd
from spmd import P, load
from spmd.demo import model, train

from .paired import Result

TARGET = 0.25
_LAYERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training step.

    Attributes:
        init: Gives parameters and optimizer state.
        specs: Their specs.
        loss: Of parameters, tokens and a constraint on the residual stream.
    """

    init: Callable[[Any], Any]
    specs: Any
    loss: Callable[..., Any]

    def step(self, state: Any, tokens: Any, constrain: Callable) -> Any:
        """One step of Adam."""
        params, moments = state
        value, gradients = jax.value_and_grad(self.loss)(params, tokens, constrain)
        updates, moments = ADAM.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value


CONFIG = model.Config(vocab=72)
ADAM = train.optimizer(100)
TOKENS = jax.ShapeDtypeStruct((32, CONFIG.seq_len + 1), np.int32)


def _demo() -> Training:
    """The demo's step: 4 layers in a scan."""
    init = functools.partial(train.init_state, adam=ADAM, config=CONFIG)
    return Training(init=init, specs=train.state_specs(ADAM, CONFIG), loss=model.loss)


def _unrolled() -> Training:
    """A GPT whose 12 layers stand one after the other, each with parameters of its own."""
    one = model.Config(vocab=72, layers=1)
    specs = {n: s for n, s in model.param_specs().items() if not n.startswith("block.")}
    block = {n: s for n, s in model.param_specs().items() if n.startswith("block.")}
    layer = {n.removeprefix("block."): P(*s[1:]) for n, s in block.items()}
    all_specs = {**specs, "blocks": [layer] * _LAYERS}

    def init(seed: Any) -> Any:
        keys = jax.random.split(jax.random.key(seed), _LAYERS)
        drawn = [model.init(key, one) for key in keys]
        blocks = [{n: p[f"block.{n}"][0] for n in layer} for p in drawn]
        params = {**{n: drawn[0][n] for n in specs}, "blocks": blocks}
        return params, ADAM.init(params)

    def loss(params: Any, tokens: Any, constrain: Callable) -> Any:
        x = jax.numpy.take(params["embed"], tokens[:, :-1], axis=0) + params["position"][None]
        for p in params["blocks"]:
            x = model._block(x, p, constrain)
        scores = jax.nn.log_softmax(model._rms_norm(x, params["norm"]) @ params["head"])
        return -jax.numpy.mean(jax.numpy.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    moments = optax.tree_utils.tree_map_params(
        ADAM,
        lambda _, spec: spec,
        jax.eval_shape(lambda s: init(s)[1], 0),
        all_specs,
        transform_non_params=lambda _: P(),
    )
    return Training(init=init, specs=(all_specs, moments), loss=loss)


PROGRAMS = {"the demo's step": _demo, "a GPT of 12 unrolled layers": _unrolled}


# In a process of its own


def _mesh() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def _ours_saved(training: Training, path: Path) -> None:
    mesh = _mesh()
    step = spmd.pjit(
        functools.partial(training.step, constrain=model.shard_residual),
        in_axis_resources=(training.specs, P("data")),
        out_axis_resources=(training.specs, P()),
        donate_argnums=0,
        mesh=mesh,
    )
    state = jax.eval_shape(training.init, 0)
    step.lower(state, TOKENS).compile().save(path)


def _peer_step(training: Training, state: Any) -> Any:
    mesh = _mesh()
    placed = jax.tree.map(
        lambda s: NamedSharding(mesh, s), training.specs, is_leaf=lambda s: isinstance(s, P)
    )
    residual = NamedSharding(mesh, P("data", None, None))
    step = jax.jit(
        functools.partial(
            training.step, constrain=lambda x: jax.lax.with_sharding_constraint(x, residual)
        ),
        in_shardings=(placed, NamedSharding(mesh, P("data"))),
        out_shardings=(placed, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return step.lower(state, TOKENS).compile()


def _measure(who: str, program: str, path: Path) -> dict[str, float]:
    """Seconds to an executable that is ready, and to the first result."""
    start = given = time.perf_counter()
    if who == "ours":
        compiled = load(path)
    else:
        training = PROGRAMS[program]()
        state = jax.eval_shape(training.init, 0)
        given = time.perf_counter()
        compiled = _peer_step(training, state)
    ready = time.perf_counter()
    args, _ = compiled.in_avals
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), args)
    called = time.perf_counter()
    jax.block_until_ready(compiled(*zeros))
    result = ready - start + time.perf_counter() - called
    return {"ready": ready - start, "types given": ready - given, "first result": result}


def main(who: str, program: str, folder: str) -> None:
    """Saves a program for both, or measures one of them and prints its times as JSON."""
    path = Path(folder) / "program.spmd"
    if who == "save":
        _ours_saved(PROGRAMS[program](), path)
        return
    jax.config.update("jax_compilation_cache_dir", str(Path(folder) / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    print(json.dumps(_measure(who, program, path)))


# In the process that compares


def run(turns: int) -> Iterator[Result]:
    """Time until each program is ready, and to its first result."""
    for program in PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            _process("save", program, folder)
            _process("peer", program, folder)  # fills its cache
            times: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
            for turn in range(turns):
                for who in ("ours", "peer") if turn % 2 else ("peer", "ours"):
                    times[who].append(json.loads(_process(who, program, folder)))
        for what, target in (("ready", TARGET), ("types given", None), ("first result", None)):
            ours, peer = ([t[what] for t in times[who]] for who in ("ours", "peer"))
            yield Result(
                name=f"{program}: {what}",
                ours=statistics.median(ours),
                peer=statistics.median(peer),
                ratios=[a / b for a, b in zip(ours, peer, strict=True)],
                target=target,
            )


def _process(who: str, program: str, folder: str) -> str:
    command = [sys.executable, "-m", "tests.benchmarks.bundling", who, program, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
