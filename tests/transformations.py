"""The sampler of `test_transformations.py`: functions, meshes, specs and two transformations.

A `Case` is plain data, so that a failure that shrank can be pasted as a regression. `build` makes
of it a `Program`: the sharded function and the plain one, both under the same transformations, and
where the specs of the case say that each argument, gradient and result has to lie.
"""

from collections.abc import Callable, Mapping
import dataclasses
from dataclasses import dataclass
import functools
import itertools
import math
import warnings

from hypothesis import strategies as st
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, counted

import spmd
from spmd import P

# A place that no spec declares.
ANY = "any"

# Functions
#
# Each takes `at`, which constrains a matrix to the spec that was drawn or does nothing, and
# returns the function. Every dimension is `n`, which each axis of the mesh divides.


def _dot(at):
    return lambda x, w: jnp.tanh(at(x @ w))


def _reduce(at):
    def fun(tree):
        x, b = tree["x"], tree["b"]
        centred = at(x - x.mean(axis=1, keepdims=True))
        return {"sum": (centred * centred).sum(axis=0) * b, "max": x.max() + b.sum()}

    return fun


def _gather(at):
    return lambda x, index, unused: at(x[index]) * jnp.sin(x[::-1])


def _scan(at):
    def fun(x, w):
        def step(carry, row):
            carry = at(jnp.tanh(carry + row[None, :]))
            return carry, carry.sum(axis=0) * row

        return jax.lax.scan(step, x, w)

    return fun


def _cond(at):
    def fun(x, n):
        y = jax.lax.cond(n > 1, lambda x: at(x * x), jnp.sin, x)
        return y.T, jax.lax.cond(n > 0, jnp.sum, lambda x: x[0, 0], x)

    return fun


def _custom_jvp(at):
    @jax.custom_jvp
    def bent(x):
        return x * x * x

    # Not the derivative of the cube: a rule that is passed over shows.
    bent.defjvp(lambda p, t: (bent(*p), 5 * p[0] * t[0]))
    return lambda x, w: bent(at(x * w)) + x


def _custom_vjp(at):
    @jax.custom_vjp
    def twisted(x, w):
        return at(jnp.sin(x) @ w)

    def forward(x, w):
        return at(jnp.sin(x) @ w), (jnp.cos(x), w)

    twisted.defvjp(forward, lambda res, ct: (3 * at(res[0] * (ct @ res[1].T)), ct * res[1]))
    return lambda x, w: twisted(x, w) * x


def _forward(at):
    # An argument as a result, one that is used twice, a constant, integers.
    def fun(x, k):
        return x, at(x @ x.T), jnp.ones(x.shape[0], x.dtype), k * 2

    return fun


def _shuffle(at):
    def fun(x, w):
        y = jnp.concatenate([x, w[::-1]], axis=0)[1 : 1 + x.shape[0]]
        y = at(jnp.cumsum(y, axis=1))
        # No dynamic_update_slice: JAX 0.10.2 partitions its gradient wrongly, under jax.jit too.
        return jnp.roll(y, 1, axis=0).T.reshape(-1)

    return fun


def _attend(at):
    @jax.checkpoint
    def scores(x, w):
        return checkpoint_name(at(jax.nn.softmax(x @ w.T, axis=-1)), "scores")

    return lambda x, w: (checkpoint_name(scores(x, w) @ w, "mixed"), {"n": None, "x": x.sum(1)})


def _nested(at):
    def fun(x, w):
        inner = jax.jit(lambda x: jnp.sin(at(x)) * w)
        return inner(x) + inner(inner(x))

    return fun


def _linear(at):
    return lambda x, w: at(jnp.einsum("ij,k->ikj", x, w).sum(axis=1)) + x.T * 2


def _half(at):
    return lambda x, w: at(jnp.tanh(x) * 2 + w[None, :])


def _complex(at):
    def fun(z, x):
        y = at(z * jnp.conj(z.T)) + jnp.exp(1j * z)
        return y, y.real * x

    return fun


@dataclass(frozen=True)
class Function:
    """One entry of the table of functions.

    Attributes:
        make: Called with `at`, returns the function.
        args: The arguments: pytrees of ``"f2"``, that is, kind and rank.
        forward: Whether it has a forward derivative.
        real: Whether all its values are real.
        tolerance: Relative and absolute.
    """

    make: Callable
    args: tuple
    forward: bool = True
    real: bool = True
    tolerance: float = 1e-4


FUNCTIONS = {
    "dot": Function(_dot, ("f2", "f2")),
    "reduce": Function(_reduce, ({"x": "f2", "b": "f1"},)),
    "gather": Function(_gather, ("f2", "i1", "f1")),
    "scan": Function(_scan, ("f2", "f2")),
    "cond": Function(_cond, ("f2", "i0")),
    "custom_jvp": Function(_custom_jvp, ("f2", "f2")),
    "custom_vjp": Function(_custom_vjp, ("f2", "f2"), forward=False),
    "forward": Function(_forward, ("f2", "i2")),
    "shuffle": Function(_shuffle, ("f2", "f2")),
    "attend": Function(_attend, ("f2", "f2")),
    "nested": Function(_nested, ("f2", "f2")),
    "linear": Function(_linear, ("f2", "f1")),
    "half": Function(_half, ("h2", "h1"), tolerance=0.06),
    "complex": Function(_complex, ("c2", "f2"), real=False),
}
KINDS = {"f": np.float32, "i": np.int32, "h": jnp.bfloat16, "c": np.complex64}


# Transformations


@dataclass(frozen=True)
class T:
    """One transformation. Lists are dealt to values in turn; axes count modulo the rank plus one.

    Attributes:
        name: One of `TRANSFORMATIONS`.
        in_axes: Where mapped arguments have their new dimension, or None.
        out_axes: Likewise for results.
        size: Size of the new dimension.
        spmd_axis: The mesh axis over which it is split.
        pick: Which arguments to differentiate, as the bits of a number.
        policy: What `checkpoint` saves.
        flag: Which branch a cond takes; whether an outer pjit declares specs.
    """

    name: str
    in_axes: tuple = (0,)
    out_axes: tuple = (0,)
    size: int = 2
    spmd_axis: str | None = None
    pick: int = 1
    policy: str | None = None
    flag: bool = True

    def __repr__(self):
        default = T(self.name)
        said = [
            f", {f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        ]
        return f"T({self.name!r}{''.join(said)})"

    def _repr_pretty_(self, printer, cycle):
        del cycle
        printer.text(repr(self))  # Hypothesis would print every field


@dataclass(frozen=True)
class Case:
    """``outer(inner(pjit(function)))`` on a mesh.

    Attributes:
        function: One of `FUNCTIONS`.
        outer: The outer transformation.
        inner: The inner one.
        mesh: Axes and their sizes.
        devices: Numbers of the devices in the order of the mesh.
        ins: A spec per flat argument, dealt in turn; None: the option is left out.
        outs: Likewise for results.
        at: The spec of the constraint inside.
        kinds: How arguments are passed: ``"host"``, ``"loose"`` (on a device, not committed),
            ``"placed"`` as the spec says, or ``"elsewhere"`` on the mesh; dealt in turn.
        donate: Whether the first argument is donated.
        keep_unused: The option of that name.
        seed: Of the values.
    """

    function: str
    outer: T
    inner: T = dataclasses.field(default_factory=lambda: T("identity"))
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"a": 4, "b": 2})
    devices: tuple = tuple(range(8))
    ins: tuple | None = (P(),)
    outs: tuple | None = (P(),)
    at: P = dataclasses.field(default_factory=P)
    kinds: tuple = ("host",)
    donate: bool = False
    keep_unused: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Program:
    """A function of flat arguments under some transformations, sharded and plain.

    Attributes:
        fun: The sharded function.
        plain: The same function, transformed alike, on one device.
        args: NumPy arrays.
        specs: Per argument the spec that it, its tangent and its gradient are declared to have.
        outs: Per result the spec that it is declared to have.
        staged: Whether the call is a part of a larger program already.
        traces: How many functions there are to trace.
    """

    fun: Callable
    plain: Callable
    args: tuple
    specs: tuple
    outs: tuple
    staged: bool = False
    traces: int = 1

    @functools.cached_property
    def avals(self):
        """Shapes and dtypes of the results."""
        return jax.eval_shape(self.plain, *self.args)

    @functools.cached_property
    def reach(self):
        """Per result, which arguments it depends on."""
        jaxpr = jax.make_jaxpr(self.plain)(*self.args)
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        count = len(self.avals)
        return [
            partial_eval.dce_jaxpr(jaxpr, [i == j for i in range(count)])[1] for j in range(count)
        ]

    def with_fun(self, wrap, **changes):
        """The program with both functions wrapped."""
        return dataclasses.replace(self, fun=wrap(self.fun), plain=wrap(self.plain), **changes)


def inexact(values):
    """Positions of the values that can be differentiated."""
    return [i for i, v in enumerate(values) if jnp.issubdtype(v.dtype, jnp.inexact)]


def _dense(args, where, tangents):
    """Tangents of all arguments: integers have one of type float0."""
    full = [np.zeros(np.shape(a), jax.dtypes.float0) for a in args]
    for i, t in zip(where, tangents, strict=True):
        full[i] = t
    return tuple(full)


def _like(values, seed):
    """Random values of the shapes and dtypes of `values`."""
    rng = np.random.default_rng(seed)
    return tuple(_random(rng, v.shape, v.dtype) for v in values)


def _random(rng, shape, dtype):
    if dtype == np.complex64:
        return (rng.uniform(-1, 1, shape) + 1j * rng.uniform(-1, 1, shape)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(rng.uniform(-1, 1, shape)).astype(dtype)
    return np.asarray(rng.integers(0, 3, shape)).astype(dtype)


def _pick(values, chosen):
    return tuple(values[i] for i in chosen)


def _derived(p):
    """Specs of the tangents of all results, and of the gradients of all arguments.

    What nothing reaches is a zero, which is made by JAX and lies where JAX puts it.
    """
    ins, outs = inexact(p.args), inexact(p.avals)
    tangents = [p.outs[j] if any(p.reach[j][i] for i in ins) else ANY for j in outs]
    grads = [p.specs[i] if any(p.reach[j][i] for j in outs) else ANY for i in ins]
    return ins, outs, tuple(tangents), tuple(grads)


@jax.jit
def weigh(values):
    """One number that depends on every entry of every value that can be differentiated."""
    total = jnp.zeros((), jnp.float32)
    for v in _pick(values, inexact(values)):
        w = np.cos(np.arange(v.size)).astype(v.real.dtype).reshape(v.shape)
        part = (v.real * w).sum() + ((v.imag * w).sum() * 2 if jnp.iscomplexobj(v) else 0)
        total += part.astype(jnp.float32)
    return total


def _loss(f):
    return lambda *args: weigh(f(*args))


def _identity(p, t, mesh):
    return p


def _jit(p, t, mesh):
    return p.with_fun(jax.jit, staged=True)


def _pjit(p, t, mesh):
    n = max(mesh.size, 2)

    def rolled(spec, value):
        if spec is ANY or any(s % n for s in value.shape):
            return P()
        entries = (*spec, *(None,) * (value.ndim - len(spec)))
        return P(*(None if e is P.UNCONSTRAINED else e for e in (*entries[1:], *entries[:1])))

    if not t.flag:
        fun = spmd.pjit(p.fun, mesh=mesh)
        # Arguments of the outer function stay where they are, and so do their gradients.
        specs = (ANY,) * len(p.args)
        return dataclasses.replace(p, fun=fun, specs=specs, staged=True, traces=p.traces + 1)
    ins = tuple(map(rolled, p.specs, p.args))
    outs = tuple(map(rolled, p.outs, p.avals))
    fun = spmd.pjit(p.fun, in_axis_resources=ins, out_axis_resources=outs, mesh=mesh)
    return dataclasses.replace(p, fun=fun, specs=ins, outs=outs, staged=False, traces=p.traces + 1)


def _axes(axes, values):
    """Per value the position of its new dimension, or None."""
    turn = itertools.cycle(axes)
    return tuple(None if (a := next(turn)) is None else a % (v.ndim + 1) for v in values)


def _grown(args, axes, size):
    """The arguments with a new dimension: the value, and variants of it."""
    rng = np.random.default_rng(size)

    def grow(value, axis):
        if axis is None:
            return value
        others = [_random(rng, value.shape, value.dtype) for _ in range(size - 1)]
        return np.stack([value, *others], axis=axis)

    return tuple(map(grow, args, axes))


def _shifted(spec, axis, value, t, staged):
    """The spec with a new dimension, which the partitioner splits as it likes in a program."""
    if spec is ANY or axis is None:
        return spec
    if staged and t.spmd_axis is None:
        return ANY
    entries = [*spec, *(None,) * (value.ndim - len(spec))]
    return P(*entries[:axis], t.spmd_axis, *entries[axis:])


def _vmap(p, t, mesh):
    in_axes, out_axes = _axes(t.in_axes, p.args), _axes(t.out_axes, p.avals)
    out_axes = tuple(a or 0 for a in out_axes)
    mapped = [i for i, a in enumerate(in_axes) if a is not None]
    specs = map(lambda s, a, v: _shifted(s, a, v, t, p.staged), p.specs, in_axes, p.args)
    outs = [
        _shifted(s, a, v, t, p.staged) if any(p.reach[j][i] for i in mapped) else ANY
        for j, (s, a, v) in enumerate(zip(p.outs, out_axes, p.avals, strict=True))
    ]
    args = _grown(p.args, in_axes, t.size)
    options = {"in_axes": in_axes, "out_axes": out_axes, "axis_size": t.size}

    def wrap(f, **more):
        return jax.vmap(f, **options, **more)

    return dataclasses.replace(
        p,
        fun=wrap(p.fun, spmd_axis_name=t.spmd_axis),
        plain=wrap(p.plain),
        args=args,
        specs=tuple(specs),
        outs=tuple(outs),
    )


def _jvp(p, t, mesh):
    ins, outs, tangents, _ = _derived(p)
    n = len(p.args)

    def wrap(f):
        def fun(*args):
            y, dot = jax.jvp(f, args[:n], _dense(args[:n], ins, args[n:]))
            return *y, *_pick(dot, outs)

        return fun

    return p.with_fun(
        wrap,
        args=(*p.args, *_like(_pick(p.args, ins), 1)),
        specs=(*p.specs, *_pick(p.specs, ins)),
        outs=(*p.outs, *tangents),
    )


def _linearize(p, t, mesh):
    ins, outs, tangents, _ = _derived(p)
    n = len(p.args)

    def wrap(f):
        def fun(*args):
            y, push = jax.linearize(f, *args[:n])
            dots = [_pick(push(*_dense(args[:n], ins, args[n:])), outs) for _ in range(2)]
            return *y, *dots[0], *dots[1]

        return fun

    return p.with_fun(
        wrap,
        args=(*p.args, *_like(_pick(p.args, ins), 1)),
        specs=(*p.specs, *_pick(p.specs, ins)),
        outs=(*p.outs, *tangents, *tangents),
    )


def _vjp(p, t, mesh):
    ins, outs, _, grads = _derived(p)
    n = len(p.args)

    def wrap(f):
        def fun(*args):
            y, pull = jax.vjp(f, *args[:n])
            return *y, *_pick(pull(_dense(y, outs, args[n:])), ins)

        return fun

    return p.with_fun(
        wrap,
        args=(*p.args, *_like(_pick(p.avals, outs), 2)),
        specs=(*p.specs, *_pick(p.outs, outs)),
        outs=(*p.outs, *grads),
    )


def _linear_transpose(p, t, mesh):
    ins, outs, _, grads = _derived(p)
    n = len(p.args)

    def wrap(f):
        def fun(*args):
            def linear(*tangents):
                dot = jax.jvp(f, args[:n], _dense(args[:n], ins, tangents))[1]
                return _pick(dot, outs)

            pull = jax.linear_transpose(linear, *_pick(args, ins))
            return tuple(pull(tuple(args[n:])))

        return fun

    return p.with_fun(
        wrap,
        args=(*p.args, *_like(_pick(p.avals, outs), 2)),
        specs=(*p.specs, *_pick(p.outs, outs)),
        outs=grads,
    )


def _chosen(t, ins):
    some = tuple(k for k in range(len(ins)) if t.pick >> k & 1)
    return some or (0,)


def _grad(p, t, mesh):
    ins, _, _, grads = _derived(p)
    chosen = _chosen(t, ins)
    argnums = _pick(ins, chosen)
    return p.with_fun(lambda f: jax.grad(_loss(f), argnums=argnums), outs=_pick(grads, chosen))


def _value_and_grad(p, t, mesh):
    ins, _, _, grads = _derived(p)
    chosen = _chosen(t, ins)
    argnums = _pick(ins, chosen)

    def wrap(f):
        def loss(*args):
            y = f(*args)
            return weigh(y), y

        def fun(*args):
            (value, y), g = jax.value_and_grad(loss, argnums=argnums, has_aux=True)(*args)
            return value, *y, *g

        return fun

    return p.with_fun(wrap, outs=(ANY, *p.outs, *_pick(grads, chosen)))


def _jacobian(jacobian, p, t):
    ins, outs = inexact(p.args), inexact(p.avals)
    argnum = ins[t.pick % len(ins)]

    def wrap(f):
        return jacobian(lambda *args: _pick(f(*args), outs), argnums=argnum)

    return p.with_fun(wrap, outs=(ANY,) * len(outs))


def _jacfwd(p, t, mesh):
    return _jacobian(jax.jacfwd, p, t)


def _jacrev(p, t, mesh):
    return _jacobian(jax.jacrev, p, t)


def _hessian(p, t, mesh):
    ins = inexact(p.args)
    argnum = ins[t.pick % len(ins)]
    return p.with_fun(
        lambda f: lambda *args: (jax.hessian(_loss(f), argnums=argnum)(*args),), outs=(ANY,)
    )


POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "scores": jax.checkpoint_policies.save_only_these_names("scores"),
    "all but mixed": jax.checkpoint_policies.save_anything_except_these_names("mixed"),
}


def _checkpoint(p, t, mesh):
    policy = POLICIES[t.policy] if t.policy else None
    return p.with_fun(lambda f: jax.checkpoint(f, policy=policy))


def _looped(p, t):
    """Which arguments a loop runs over, and a function that puts one step's together."""
    axes = _axes(t.in_axes, p.args)
    mapped = [i for i, a in enumerate(axes) if a is not None]

    def merge(args, step):
        args = list(args)
        for i, v in zip(mapped, step, strict=True):
            args[i] = v
        return args

    args = _grown(p.args, [None if a is None else 0 for a in axes], t.size)
    changes = {"args": args, "specs": (ANY,) * len(args), "staged": True}
    return mapped, merge, changes


def _scan_around(p, t, mesh):
    mapped, merge, changes = _looped(p, t)
    total = inexact(p.avals)[0]
    start = np.zeros(p.avals[total].shape, p.avals[total].dtype)

    def wrap(f):
        def fun(*args):
            def step(carry, xs):
                y = f(*merge(args, xs))
                return carry + y[total], y

            carry, ys = jax.lax.scan(step, start, _pick(args, mapped), length=t.size)
            return carry, *ys

        return fun

    return p.with_fun(wrap, outs=(ANY,) * (len(p.avals) + 1), **changes)


def _map(p, t, mesh):
    mapped, merge, changes = _looped(p, t)
    if not mapped:
        return _scan_around(p, t, mesh)

    def wrap(f):
        def fun(*args):
            return jax.lax.map(lambda xs: f(*merge(args, xs)), _pick(args, mapped))

        return fun

    return p.with_fun(wrap, outs=(ANY,) * len(p.avals), **changes)


def _cond_around(p, t, mesh):
    avals = p.avals

    def other(*args):
        return tuple(jnp.ones(a.shape, a.dtype) for a in avals)

    def wrap(f):
        return lambda flag, *args: jax.lax.cond(flag, f, other, *args)

    return p.with_fun(
        wrap,
        args=(np.bool_(t.flag), *p.args),
        specs=(ANY,) * (len(p.args) + 1),
        outs=(ANY,) * len(avals),
        staged=True,
    )


def _twice(p, t, mesh):
    # One function, one trace; each argument is used by two calls.
    def wrap(f):
        return lambda *args: jax.tree.map(lambda a, b: a * b, f(*args), f(*args))

    return p.with_fun(wrap)


def _make_jaxpr(p, t, mesh):
    def wrap(f):
        return lambda *args: tuple(jaxpr_as_fun(jax.make_jaxpr(f)(*args))(*args))

    return p.with_fun(wrap)


TRANSFORMATIONS = {
    "identity": _identity,
    "jit": _jit,
    "pjit": _pjit,
    "vmap": _vmap,
    "jvp": _jvp,
    "linearize": _linearize,
    "vjp": _vjp,
    "linear_transpose": _linear_transpose,
    "grad": _grad,
    "value_and_grad": _value_and_grad,
    "jacfwd": _jacfwd,
    "jacrev": _jacrev,
    "hessian": _hessian,
    "checkpoint": _checkpoint,
    "scan": _scan_around,
    "map": _map,
    "cond": _cond_around,
    "twice": _twice,
    "make_jaxpr": _make_jaxpr,
}
_FORWARD = {"jvp", "linearize", "linear_transpose", "jacfwd"}
_REVERSE = {"grad", "value_and_grad", "vjp", "jacrev"}
_JACOBIANS = {"jacfwd", "jacrev", "hessian"}
_CLEAR = ("identity", "vmap", "jvp", "vjp", "grad")
# Those that call the function once and keep nothing for later.
_DONATING = {"identity", "jit", "pjit", "vmap", "jvp", "vjp", "grad", "value_and_grad"}


# Programs


def mesh_of_case(case):
    """The mesh of a case."""
    devices = np.array(jax.devices())[list(case.devices)]
    return spmd.Mesh(devices.reshape(tuple(case.mesh.values())), tuple(case.mesh))


def _deal(given, values):
    """One spec per value, without the entries that its rank has no place for."""
    if given is None:
        return (ANY,) * len(values)
    turn = itertools.cycle(given)
    return tuple(P(*tuple(next(turn))[: v.ndim]) for v in values)


def _base(case, mesh, bodies):
    """The function of a case without any transformation; `bodies` counts its traces."""
    function = FUNCTIONS[case.function]
    leaves, treedef = jax.tree.flatten(function.args)
    n = max(mesh.size, 2)
    rng = np.random.default_rng(case.seed)
    args = tuple(_random(rng, (n,) * int(leaf[1]), KINDS[leaf[0]]) for leaf in leaves)
    plain = function.make(lambda x: x)
    out = jax.eval_shape(plain, *treedef.unflatten(args))
    avals, out_tree = jax.tree.flatten(out)
    specs, outs = _deal(case.ins, args), _deal(case.outs, avals)
    body = function.make(lambda x: spmd.with_sharding_constraint(x, case.at))

    def counting(*args):
        bodies.append(args)
        return body(*args)

    options = {"keep_unused": case.keep_unused, "mesh": mesh}
    if case.ins is not None:
        options["in_axis_resources"] = treedef.unflatten(specs)
    if case.outs is not None:
        options["out_axis_resources"] = out_tree.unflatten(outs)
    if case.donate:
        options["donate_argnums"] = 0

    def flat(f):
        return lambda *args: tuple(jax.tree.leaves(f(*treedef.unflatten(args))))

    return Program(flat(spmd.pjit(counting, **options)), flat(plain), args, specs, outs)


def build(case, mesh, bodies):
    """The program of a case, and a list that grows with every trace of its function."""
    p = _base(case, mesh, bodies)
    for t in (case.inner, case.outer):
        p = TRANSFORMATIONS[t.name](p, t, mesh)
    return p


def place(case, program, mesh):
    """The arguments, as the case passes them."""
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    turn = itertools.cycle(case.kinds)

    def one(value, spec):
        kind = next(turn)
        if kind == "host":
            return value
        if kind == "loose":
            return jnp.asarray(value)
        spec = P() if spec is ANY or P.UNCONSTRAINED in spec else spec
        if kind == "elsewhere":
            spec = P() if any(spec) else P(*mesh.axis_names[:1])
        if not _divides(spec, value.shape, mesh):
            spec = P()
        return jax.device_put(value, jax.sharding.NamedSharding(plain, spec))

    return [one(v, s) for v, s in zip(program.args, program.specs, strict=True)]


def _divides(spec, shape, mesh):
    if len(spec) > len(shape):
        return False
    sizes = [math.prod(mesh.shape[a] for a in _names(e)) for e in spec]
    return not any(s % k for s, k in zip(shape, sizes, strict=False))


def _names(entry):
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


# What must hold


def check(case):
    """Asserts all that must hold of a case.

    Values are those of the plain function; what has a declared spec lies so, on each device; the
    body is traced once; a second call traces, lowers and compiles nothing.
    """
    mesh, bodies = mesh_of_case(case), []
    program = build(case, mesh, bodies)
    want = jax.jit(program.plain)(*program.args)
    with warnings.catch_warnings():
        if case.donate:
            warnings.filterwarnings("ignore", ".*donat")
        got, first = counted(program.fun, *place(case, program, mesh))
        jax.block_until_ready(got)
        again, second = counted(program.fun, *place(case, program, mesh))
    tolerance = FUNCTIONS[case.function].tolerance
    assert len(got) == len(want) == len(program.outs)
    for results in (got, again):
        for value, plain, spec in zip(results, want, program.outs, strict=True):
            assert_declared(value, np.asarray(plain), spec, mesh, tolerance)
    assert len(bodies) == 1
    assert first.traces == program.traces
    assert second == spmd.Counts()


def assert_declared(value, want, spec, mesh, tolerance):
    """Asserts values and dtype, and where a spec is declared the block of each device."""
    assert value.dtype == want.dtype
    dtype = np.complex64 if np.iscomplexobj(want) else np.float32
    want = want.astype(dtype)
    scale = {"rtol": tolerance, "atol": tolerance * max(1.0, np.abs(want).max(initial=0))}
    if spec is ANY or P.UNCONSTRAINED in spec:
        np.testing.assert_allclose(np.asarray(value).astype(dtype), want, **scale)
    else:
        assert_sharded(value, want, spec, mesh, **scale)


# Strategies

# XLA (0.12) aborts the process when it moves between splits of a mesh such as 3x2.
SHAPES = ((4, 2), (8,), (2, 2, 2), (2, 1, 4), (2, 2), (2, 4), (1, 5), (3,), (1,), (1, 1, 2))


def possible(function, outer, inner):
    """Whether JAX can apply these transformations to the plain function."""
    f = FUNCTIONS[function]
    names = {outer, inner}
    if not f.real and names & (_JACOBIANS | {"linear_transpose"}):
        return False
    if outer in _JACOBIANS and inner in _JACOBIANS and function not in ("dot", "custom_jvp"):
        return False  # a tensor of six dimensions takes long to compile
    if f.forward:
        return True
    if inner in _FORWARD or outer == "linear_transpose" or "hessian" in names:
        return False
    return outer not in _FORWARD or inner in _REVERSE


@st.composite
def transformations(draw, name, axes):
    """A transformation; an axis that it splits a new dimension over is taken out of `axes`."""
    t = T(name)
    if name in ("vmap", "scan", "map"):
        axis = st.sampled_from([2, 1, 0, 3, None])
        in_axes = tuple(draw(st.lists(axis, min_size=1, max_size=3)))
        out_axes = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
        size = draw(st.integers(1, 3))
        t = dataclasses.replace(t, in_axes=in_axes, out_axes=out_axes, size=size)
        if name == "vmap" and axes and draw(st.sampled_from([True, True, False])):
            largest = sorted(axes, key=lambda name: (-axes[name][1], name))
            taken = axes.pop(draw(st.sampled_from(largest)))
            at = draw(st.sampled_from([1, 2]))
            t = dataclasses.replace(t, spmd_axis=taken[0], size=at * taken[1])
    elif name in ("grad", "value_and_grad", *_JACOBIANS):
        t = dataclasses.replace(t, pick=draw(st.integers(1, 3)))
    elif name == "checkpoint":
        t = dataclasses.replace(t, policy=draw(st.sampled_from([None, *POLICIES])))
    elif name in ("cond", "pjit"):
        t = dataclasses.replace(t, flag=draw(st.booleans()))
    return t


@st.composite
def _dealt(draw, axes):
    """Specs of matrices in which most axes have a dimension."""
    entries = ((), ())
    for axis in draw(st.permutations(axes)):
        at = draw(st.sampled_from([0, 1, 1, 0, None]))
        entries = tuple((*e, axis) if at == i else e for i, e in enumerate(entries))
    return P(*(e or None for e in entries))


def _unconstrained(spec, where):
    entries = [P.UNCONSTRAINED if i in where else e for i, e in enumerate(spec)]
    return P(*entries)


@st.composite
def cases(draw, outer):
    """Cases with the outer transformation of that name."""
    pairs = [
        (f, inner) for f in FUNCTIONS for inner in TRANSFORMATIONS if possible(f, outer, inner)
    ]
    # Half of the cases have one that keeps most specs declared, so that a wrong one shows.
    clear = [(f, inner) for f, inner in pairs if inner in _CLEAR]
    pairs = draw(st.sampled_from([clear, pairs]))
    function, inner = draw(st.sampled_from(pairs))
    shape = draw(st.sampled_from(SHAPES))
    order = draw(st.just(None) | st.permutations(range(8)))
    devices = tuple(range(8) if order is None else order)[: math.prod(shape)]
    mesh = dict(zip("abc", shape, strict=False))
    axes = {name: (name, size) for name, size in mesh.items()}
    steps = [draw(transformations(name, axes)) for name in (outer, inner)]
    matrix = _dealt(sorted(axes))
    ins, outs = (
        None if draw(st.integers(0, 3)) == 3 else (draw(matrix), draw(matrix)) for _ in range(2)
    )
    if outs is not None and draw(st.integers(0, 4)) == 4:
        free = draw(st.sets(st.integers(0, 1), min_size=1))
        outs = tuple(_unconstrained(s, free) for s in outs)
    donating = {outer, inner} <= _DONATING and draw(st.integers(0, 3)) == 3
    kind = st.sampled_from(["host", "placed", "elsewhere", "loose"])
    return Case(
        function=function,
        outer=steps[0],
        inner=steps[1],
        mesh=mesh,
        devices=devices,
        ins=ins,
        outs=outs,
        at=draw(matrix),
        kinds=tuple(draw(st.lists(kind, min_size=1, max_size=2))),
        donate=donating,
        keep_unused=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )
