"""Small programs that plans are made of in several tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import spmd
from spmd.inspection.shardy.passes import module_of
from spmd.inspection.timing.chips import CHIPS
from spmd.inspection.timing.torus import Transfer
from spmd.planner.cost.estimate import Estimator, Machine
from spmd.planner.pins import Pinned, Way
from spmd.planner.program.graph import graph_of
from spmd.planner.program.layout import Layout
from spmd.planner.verify import Program


def f32(*dims):
    """The description of an array."""
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def ints(*dims):
    """Of an array of whole numbers."""
    return jax.ShapeDtypeStruct(dims, jnp.int32)


def step(w, x):
    """A gradient step of a layer with a residual."""

    def loss(w):
        return jnp.mean((x + jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


B, D, F = 64, 32, 128
MLP = Program(function=step, args=({"down": f32(F, D), "up": f32(D, F)}, f32(B, D)))


class Sent:
    """Links on which a collective takes a second for each byte that a device sends."""

    def transfer(self, kind, groups, operand, result):
        size = len(groups[0])
        if kind == "all-to-all":
            return Transfer(operand * (1 - 1 / size), frozenset())
        if kind == "collective-permute":
            return Transfer(operand, frozenset())
        return Transfer(
            (1 + (kind == "all-reduce")) * max(operand, result) * (1 - 1 / size), frozenset()
        )

    def lane_name(self, lane):
        return ""


def sending(**sizes):
    """A machine whose exchanges take as many seconds as a device sends bytes, and nothing else."""
    chip = CHIPS["h100"]
    return Machine(chip, Sent(), sizes)


MESH = {"data": 4, "model": 2}
FLAT = {"data": 8, "model": 1}


def tpu(sizes=MESH, **figures):
    """A v5e whose links take a second for each byte."""
    return Machine(dataclasses.replace(CHIPS["v5e"], **figures), Sent(), sizes)


def read(program, **sizes):
    """A program as a plan sees it."""
    mesh = spmd.make_mesh(sizes or {"data": 4, "model": 2})
    return graph_of(module_of(program.lowered(mesh), subject="plan"), subject="plan")


def pins_of(found, layout, sizes, fixed=None, way=None):
    """What a layout says of each operation that plans pin."""
    return Pinned(found, fixed).pins(layout, sizes, way or Way())


def classes(found):
    """The class of a dimension of an argument, by ``name:dimension``."""
    return {f"{name}:{d}": c for c, names in found.classes.items() for name, d in names}


def priced(function, args, orders, *, fixed=None, on=None, **options):
    """A program, and the estimate of a layout whose classes are told by arguments."""
    found = read(Program(function=function, args=args, options=options))
    of = classes(found)
    layout = Layout.of({axis: [of[one] for one in orders.get(axis, ())] for axis in MESH})
    return found, Estimator(found, on or sending(**MESH), fixed)(layout)


def adam(state, grads):
    """The next state of Adam, without corrections."""
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], grads)
    p = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), state["p"], m, v)
    return {"p": p, "m": m, "v": v}


def training(loss, params, *batch):
    """A step of Adam on a loss."""

    def step(state, *batch):
        value, grads = jax.value_and_grad(loss)(state["p"], *batch)
        return adam(state, grads), value

    return Program(function=step, args=({"p": params, "m": params, "v": params}, *batch))


def mlp(rows=64, width=32, hidden=128, layers=1):
    """Layers with a residual, written out, with Adam."""

    def loss(params, x, y):
        for w in params:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return ((x - y) ** 2).mean()

    params = [{"up": f32(width, hidden), "down": f32(hidden, width)} for _ in range(layers)]
    return training(loss, params, f32(rows, width), f32(rows, width))


def _norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale[None, None]


def _layer(x, w):
    h = _norm(x, w["n1"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    x = x + jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", scores, v), w["o"])
    return x + jax.nn.gelu(_norm(x, w["n2"]) @ w["up"]) @ w["down"]


def gpt(batch=16, length=64, width=32, heads=8, hidden=128, words=256, layers=4, scanned=True):
    """A GPT with Adam, of layers that are scanned, or written out one after the other."""

    def loss(params, tokens):
        x = params["embed"][tokens]
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (_layer(x, w), None), x, params["layers"])
        else:
            for w in params["layers"]:
                x = _layer(x, w)
        logits = x @ params["embed"].T
        picked = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    head = width // heads
    one = {
        **dict.fromkeys("qkv", (width, heads, head)),
        "o": (heads, head, width),
        "up": (width, hidden),
        "down": (hidden, width),
        "n1": (width,),
        "n2": (width,),
    }
    stacked = {name: f32(layers, *dims) for name, dims in one.items()}
    apart = [{name: f32(*dims) for name, dims in one.items()} for _ in range(layers)]
    params = {"embed": f32(words, width), "layers": stacked if scanned else apart}
    return training(loss, params, ints(batch, length))


def moe(batch=16, length=32, width=24, hidden=96, experts=8):
    """A block of experts, each of which takes so many words of an example, with Adam."""
    room = 2 * length // experts

    def loss(params, x, y):
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(gates.argmax(-1), experts)
        place = ((jnp.cumsum(chosen, 1) - 1) * chosen).sum(-1).astype(jnp.int32)
        sent = chosen[..., None] * jax.nn.one_hot(place, room)[:, :, None, :]
        inside = jnp.einsum("btec,btd->ebcd", sent, x)
        h = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", inside, params["up"]))
        made = jnp.einsum("ebcf,efd->ebcd", h, params["down"])
        return ((jnp.einsum("btec,ebcd->btd", sent * gates[..., None], made) + x - y) ** 2).mean()

    params = {
        "router": f32(width, experts),
        "up": f32(experts, width, hidden),
        "down": f32(experts, hidden, width),
    }
    return training(loss, params, f32(batch, length, width), f32(batch, length, width))


@functools.cache
def graph_named(name):
    """A program by its name, read once."""
    made = {
        "mlp": mlp,
        "gpt": gpt,
        "moe": moe,
        "unrolled": functools.partial(gpt, scanned=False),
        "elementwise": lambda: Program(
            function=lambda x, y: (jnp.tanh(x) * y, x.sum(0)), args=(f32(64, 256), f32(64, 256))
        ),
        "decoding": decoding,
    }
    return read(made[name]())


def decoding(batch=8, length=128, width=32, heads=4, hidden=128, words=256):
    """One word of each sequence, with what was known of those before; parameters stay."""
    head = width // heads

    def step(params, cache, tokens, position):
        x = params["embed"][tokens]
        q, k, v = jnp.einsum("bd,dnhk->nbhk", x, params["qkv"])
        known = [
            jax.lax.dynamic_update_slice_in_dim(cache[name], one[:, None], position, 1)
            for name, one in (("k", k), ("v", v))
        ]
        scores = jax.nn.softmax(jnp.einsum("bhk,bshk->bhs", q, known[0]))
        x = x + jnp.einsum(
            "bhk,hkd->bd", jnp.einsum("bhs,bshk->bhk", scores, known[1]), params["o"]
        )
        x = x + jnp.tanh(x @ params["up"]) @ params["down"]
        return x @ params["embed"].T, {"k": known[0], "v": known[1]}

    params = {
        "embed": f32(words, width),
        "qkv": f32(width, 3, heads, head),
        "o": f32(heads, head, width),
        "up": f32(width, hidden),
        "down": f32(hidden, width),
    }
    cache = {name: f32(batch, length, heads, head) for name in "kv"}
    return Program(function=step, args=(params, cache, ints(batch), ints()))
