"""How fast HLO text is read, what a report adds to a compile, and how long pods take to compile."""

from collections.abc import Callable, Iterable, Iterator
import functools
import gc
import importlib.util
import itertools
import re
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmd import P, make_mesh, pjit, report, topology
from spmd.demo import model, train

from . import training

MEBI = 2**20
SIZE = 100 * 10**6
PARSE_SECONDS, PARSE_BYTES, OVERHEAD = 20.0, 2 * 10**9, 0.10


def run(turns: int) -> Iterator[str]:
    """A line for reading 100 MB, one for each step whose report is timed, one for each pod."""
    yield _reading()
    yield from _overheads(turns)
    yield from _pods()


def demo_step(layers=4):
    """The demo's training step, lowered anew."""
    config, adam = model.Config(vocab=72, layers=layers), train.optimizer(100)
    state = jax.eval_shape(functools.partial(train.init_state, adam=adam, config=config), 0)
    tokens = jax.ShapeDtypeStruct((32, config.seq_len + 1), np.int32)
    specs = train.state_specs(adam, config)
    step = pjit(
        lambda state, tokens: train.train_step(state, tokens, adam),
        in_axis_resources=(specs, P("data")),
        out_axis_resources=(specs, None),
        donate_argnums=0,
        mesh=make_mesh({"data": 4, "model": 2}),
    )
    return step.lower(state, tokens)


def large_module(text: str, size: int) -> str:
    """An HLO module of at least `size` characters: a program many times over, in one call graph."""
    start = re.search(r"^(%|ENTRY )", text, re.M).start()
    head, body = text[:start], text[start:].rstrip() + "\n"
    signature = re.search(r"^ENTRY %(\S+) \((.*)\) -> (.*) \{$", body, re.M)
    body = body.replace("ENTRY %", "%")
    parts, calls, written = [head], [], 0
    while written < size:
        copy = len(calls)
        parts.append(re.sub(r"%([\w.\-]+)", rf"%\1.{copy}", body) + "\n")
        written += len(parts[-1])
        calls.append(f"  %c{copy} = {signature[3]} call(), to_apply=%{signature[1]}.{copy}\n")
    parts.append("ENTRY %whole () -> f32[] {\n" + "".join(calls) + "}\n")
    return "".join(parts)


READ = """
import resource, sys, time, types
from spmd.inspection.hlo import calls, cost, ledger, memory, text as reader
text = open(sys.argv[1]).read()
sizes = ("argument", "output", "temp", "alias", "generated_code")
plan = types.SimpleNamespace(
    peak_memory_in_bytes=0, **{f"{name}_size_in_bytes": 0 for name in sizes}
)
start = time.perf_counter()
module = reader.parse_modules(text)[0]
parsed = time.perf_counter()
visited = calls.visits(module)
found = list(ledger.ledger(module, visited, {"data": 4, "model": 2}))
cost.cost_of(module, visited)
memory.memory_of(module, plan)
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(text), len(found), parsed - start, done - start, peak * 1024)
"""


def _reading() -> str:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(large_module(demo_step().compile().as_text(), SIZE))
        file.flush()
        done = subprocess.run(
            [sys.executable, "-c", READ, file.name], capture_output=True, check=True, text=True
        )
    size, found, parse, whole, peak = map(float, done.stdout.split())
    verdict = "ok" if whole <= PARSE_SECONDS and peak <= PARSE_BYTES else "MISSED"
    return (
        f"read {size / 1e6:.0f} MB of HLO: parsed in {parse:.1f} s; ledger of {found:.0f} "
        f"collectives, cost and buffers after {whole:.1f} s, {peak / 1e9:.2f} GB  "
        f"<= {PARSE_SECONDS:.0f} s, 2 GB  {verdict}"
    )


DESCRIBED = "v5e:4x4"
#: Steps whose compiles for a TPU are timed; each takes half a minute.
ON_TPU = ("GPT-2 small, scanned", "GPT-2 small, unrolled")


def _overheads(turns: int) -> Iterator[str]:
    """What a report takes beside trace, lowering and compile, for steps of several sizes."""
    with make_mesh({"data": 4, "model": 2}):
        for name, lowered in {"the demo's step": demo_step, **training.STEPS}.items():
            yield _overhead(f"report of {name}", lowered, turns)
    if importlib.util.find_spec("libtpu"):
        with topology(DESCRIBED, mesh={"data": 4, "model": 4}):
            for name in ON_TPU:
                yield _overhead(f"report of {name}, for {DESCRIBED}", training.STEPS[name], 1)


def _overhead(name: str, lowered: Callable[[], Any], turns: int) -> str:
    walls, cpus = zip(*(_timed(lowered) for _ in range(turns)), strict=True)
    alone, whole = (statistics.median(one.share(both) for one in walls) for both in (False, True))
    busy = (statistics.median(one.share(both) for one in cpus) for both in (False, True))
    verdict = "ok" if alone <= OVERHEAD else "MISSED"
    return (
        f"{name}: {alone:.1%} of {statistics.median(one.compile for one in walls):.1f} s of compile"
        f"  <= 10%  {verdict}"
        f"; with its findings {whole:.1%}; by CPU time {', '.join(f'{one:.1%}' for one in busy)}"
    )


class _Times(NamedTuple):
    """Seconds of trace, lowering and compile, of a report, and of its findings when asked for."""

    compile: float
    report: float
    findings: float

    def share(self, both: bool) -> float:
        """What the report takes of the compile, or `both` it and its findings."""
        return (self.report + self.findings * both) / self.compile


def _timed(lowered: Callable[[], Any]) -> tuple[_Times, _Times]:
    """The times of a step by the clock on the wall, and by the CPU time of this process."""
    jax.clear_caches()
    gc.collect()
    times = [(time.perf_counter(), time.process_time())]

    def done(result: Any) -> Any:
        times.append((time.perf_counter(), time.process_time()))
        return result

    done(done(report(done(lowered().compile()))).findings)
    wall, cpu = zip(*times, strict=True)
    return _spans(wall), _spans(cpu)


def _spans(times: Iterable[float]) -> _Times:
    return _Times(*(b - a for a, b in itertools.pairwise(times)))


PODS = (
    ("v5e:16x16", {"data": 32, "model": 8}),
    ("v5p:8x16x16", {"data": 128, "model": 16}),
    ("v4:16x16x32", {"data": 512, "model": 16}),
)
POD_SECONDS = 60.0


def _pods() -> Iterator[str]:
    if importlib.util.find_spec("libtpu") is None:
        yield "pods: libtpu is not installed"
        return

    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)

    def step(w, x):
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w, x))

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    specs = {"up": P("data", "model"), "down": P("model", "data")}
    args = {"up": shape(8192, 32768), "down": shape(32768, 8192)}, shape(65536, 8192)
    for name, axes in PODS:
        step_on = pjit(step, in_axis_resources=(specs, P("data")), out_axis_resources=specs)
        start = time.perf_counter()
        with topology(name, mesh=axes):
            compiled = step_on.lower(*args).compile()
        middle = time.perf_counter()
        found = report(compiled)
        done = time.perf_counter()
        verdict = "ok" if done - start <= POD_SECONDS else "MISSED"
        yield (
            f"{name} of {found.num_devices:,} devices: compiled in {middle - start:.1f} s, "
            f"{len(found.collectives)} collectives reported in {done - middle:.3f} s  "
            f"<= 60 s  {verdict}"
        )
