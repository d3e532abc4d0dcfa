"""The memory plan: against sizes counted by hand, brute force, and the compiler's own total."""

from pathlib import Path
import random
from types import SimpleNamespace

from hardware import EMITTERS, needs_libtpu
import jax
from jax.experimental.layout import Layout, with_layout_constraint
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
import numpy as np
import pytest

import spmd
from spmd.inspection import parse_module
from spmd.inspection.hlo.memory import memory_of

F32 = jnp.float32
N = 128
SIZE = N * N * 4
X = jax.ShapeDtypeStruct((N, N), F32)
SIZES = ("argument", "output", "temp", "alias", "generated_code")
NOTHING = SimpleNamespace(peak_memory_in_bytes=0, **{f"{name}_size_in_bytes": 0 for name in SIZES})


def _compile(f, *args, device=None, **options):
    place = SingleDeviceSharding(device or jax.devices()[0])
    jitted = jax.jit(f, in_shardings=place, out_shardings=place, **options)
    return jitted.lower(*args).compile()


def _memory(compiled, **options):
    text = compiled.as_text()
    return memory_of(
        parse_module(text),
        compiled.memory_analysis(),
        **{"largest": None} | options,
    )


def _hlo(body, *, header="", more=""):
    return f"HloModule m, is_scheduled=true{header}\n\n{more}ENTRY %main () -> () {{\n{body}\n}}\n"


def _buffers(text, **options):
    return memory_of(parse_module(text), NOTHING, **{"largest": None} | options).buffers


def _alive(buffers):
    return {b.name for b in buffers if b.at_peak and b.kind == "temporary"}


def _sizes(buffers):
    return {b.name: b.nbytes for b in buffers}


# Totals


def test_the_peak_is_what_has_to_be_there_at_once():
    """Arguments, outputs outside of them, temporaries and code sum up to the peak."""
    analysis = SimpleNamespace(
        argument_size_in_bytes=1000,
        output_size_in_bytes=300,
        temp_size_in_bytes=70,
        alias_size_in_bytes=200,
        generated_code_size_in_bytes=5,
        peak_memory_in_bytes=1,
    )
    memory = memory_of(parse_module(""), analysis)
    assert memory is not None
    assert (memory.arguments, memory.outputs, memory.temporaries) == (1000, 300, 70)
    assert (memory.aliased, memory.code, memory.peak) == (200, 5, 1000 + 300 - 200 + 70 + 5)
    assert memory.buffers == ()


@pytest.mark.parametrize(
    ("temp", "in_peak", "capacity", "expected"),
    [
        # Fragmentation of 30 is in the first figure twice, and in the second once.
        (700, 1770, None, 670),
        # The second counts arrays in on-chip memory too.
        (600, 1770, None, 600),
        # Accepted is what the device holds, whatever the figures say.
        (700, 1770, 1765, 660),
    ],
)
def test_temporaries_of_a_tpu_program(temp, in_peak, capacity, expected):
    """Of two figures that are never too small the smaller one counts, and no more than there is."""
    analysis = SimpleNamespace(
        argument_size_in_bytes=1000,
        output_size_in_bytes=300,
        temp_size_in_bytes=temp,
        alias_size_in_bytes=200,
        generated_code_size_in_bytes=5,
        peak_memory_in_bytes=in_peak,
    )
    module = parse_module(_hlo("  ROOT %p = f32[8,128]{1,0:T(8,128)} parameter(0)"))
    memory = memory_of(module, analysis, capacity=capacity)
    assert memory is not None
    assert (memory.temporaries, memory.peak) == (expected, 1000 + 300 - 200 + expected + 5)
    assert memory_of(parse_module(""), analysis, capacity=capacity).temporaries == temp


def test_no_analysis_is_no_memory():
    """A backend that tells nothing gives None, not zeros."""
    assert memory_of(parse_module(""), None) is None


# Programs counted by hand


def test_a_chain_of_products():
    """Of four products in a row two intermediates are alive at once; the argument is named."""
    memory = _memory(_compile(lambda a: (((a @ a) @ a) @ a) @ a, X))
    assert (memory.arguments, memory.outputs, memory.temporaries) == (SIZE, SIZE, 2 * SIZE)
    assert memory.peak == 4 * SIZE
    kinds = [(b.kind, str(b.shape), b.nbytes) for b in memory.buffers if b.at_peak]
    array = f"f32[{N},{N}]", SIZE
    # One of the three intermediates lies in the output, which is not made yet.
    assert sorted(kinds) == sorted(
        [("argument", *array), ("output", *array)] + [("temporary", *array)] * 2
    )
    assert [b.op_name for b in memory.buffers if b.kind == "argument"] == ["a"]


def _line_of(marker):
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))


def test_sources_are_the_users_lines():
    """An intermediate is traced to the line, the file and the function that ask for it."""

    def f(a):
        y = jnp.sort(a, axis=0)  # the intermediate
        return (y @ a) @ y

    memory = _memory(_compile(f, X))
    sources = {b.source for b in memory.buffers if b.kind == "temporary" and b.source}
    assert {(s.file, s.function.rpartition(".")[2]) for s in sources} == {(__file__, "f")}
    assert _line_of("the intermediate") in {s.line for s in sources}


def test_stacked_residuals_of_a_scan():
    """The residuals of six iterations are one temporary, alive at the peak, of the body's line."""

    def body(h, w):
        return jnp.tanh(h @ w), None  # the body

    def loss(w, x):
        return jnp.sum(jax.lax.scan(body, x, w)[0])

    memory = _memory(_compile(jax.grad(loss), jax.ShapeDtypeStruct((6, N, N), F32), X))
    stacked = [b for b in memory.buffers if b.kind == "temporary" and b.shape.dims == (6, N, N)]
    assert {b.nbytes for b in stacked} == {6 * SIZE}
    # Forward, h and tanh' of each iteration are stacked; backward they are read again.
    assert sum(b.at_peak for b in stacked) >= 2
    assert _line_of("the body") in {b.source.line for b in stacked if b.source}


def test_donated_state_is_counted_once():
    """An output in a donated argument is no buffer of its own."""
    compiled = _compile(lambda a, b: (a + b @ b, b * 2), X, X, donate_argnums=0)
    memory = _memory(compiled)
    assert memory.aliased == SIZE
    large = [(b.kind, b.op_name) for b in memory.buffers if b.nbytes == SIZE]
    assert [name for kind, name in large if kind == "argument"] == ["a", "b"]
    assert [kind for kind, _ in large].count("output") == 1
    undonated = _compile(lambda a, b: (a + b @ b, b * 2), X, X)
    unread = _buffers(undonated.as_text())
    assert [b.kind for b in unread if b.nbytes == SIZE].count("output") == 2


def test_paths_of_arguments():
    """Arguments have the paths of the call, unless their number is another than the program's."""
    text = _compile(lambda tree: tree["x"] @ tree["y"], {"x": X, "y": X}).as_text()
    own = [b.op_name for b in _buffers(text) if b.kind == "argument"]
    assert own == ["tree['x']", "tree['y']"]
    given = _buffers(text, arg_names=("batch['x']", "batch['y']"))
    assert [b.op_name for b in given if b.kind == "argument"] == ["batch['x']", "batch['y']"]
    wrong = _buffers(text, arg_names=("batch['x']",))
    assert [b.op_name for b in wrong if b.kind == "argument"] == own


def test_the_largest_come_first():
    """No more than asked for, by size."""
    compiled = _compile(lambda a, b: (a @ b, a[0]), X, X)
    assert len(_memory(compiled, largest=2).buffers) == 2
    found = [b.nbytes for b in _memory(compiled).buffers]
    assert found == sorted(found, reverse=True)
    assert found[:3] == [SIZE] * 3


# Against the compiler's total

MESH = {"data": 4, "model": 2}


def _programs():
    def step(p, x):
        g = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p[0]) @ p[1]))(p)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g)

    def scanned(p, x):
        def loss(p):
            return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0])

        return p - 0.1 * jax.grad(loss)(p)

    def attention(q, k, v):
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
        return jnp.sum(jnp.einsum("bhqk,bkhd->bqhd", scores, v))

    def either(p, x):
        return jax.lax.cond(p, lambda x: (x @ x) @ x, lambda x: x, x) @ x

    def looped(x):
        return jax.lax.fori_loop(0, 4, lambda i, h: jnp.tanh(h @ x), x)

    def skipped(x):
        first = x @ x
        return first + (first @ first) @ x

    def turned(x):
        # Rows lie behind each other for one sort, and columns for the other.
        by_row = with_layout_constraint(jnp.sort(x, axis=1), Layout((1, 0)))
        return jnp.sort(by_row, axis=0)[0]

    def s(*dims, dtype=F32):
        return jax.ShapeDtypeStruct(dims, dtype)

    weights, batch = (s(512, 1024), s(1024, 512)), s(128, 512)
    split = P(None, "model"), P("model")
    heads = P("data", None, "model")
    return {
        "data parallel": (step, ((P(), P()), P("data")), (P(), P()), (weights, batch), ()),
        "donated": (step, ((P(), P()), P("data")), (P(), P()), (weights, batch), (0,)),
        "tensor parallel": (step, (split, P("data")), split, (weights, batch), (0,)),
        "fsdp": (
            scanned,
            (P(None, "data"), P("data")),
            P(None, "data"),
            (s(6, 512, 512), s(128, 512)),
            (0,),
        ),
        "attention": (
            jax.grad(attention, argnums=(0, 1, 2)),
            heads,
            heads,
            (s(8, 256, 8, 32),) * 3,
            (),
        ),
        "branch": (either, (P(), P()), P(), (s(dtype=jnp.bool_), s(512, 512)), ()),
        "loop": (looped, P(), P(), (s(512, 512),), ()),
        "gather": (lambda x: jnp.sin(x) @ x, P("data"), P(), (s(512, 512),), ()),
        "sort": (lambda x: jnp.sort(x, axis=0) @ x, P(), P(), (s(512, 512),), ()),
        "skip": (skipped, P(), P(), (s(512, 512),), ()),
        "turn": (turned, P(), P(), (s(512, 512),), ()),
        "retype": (
            lambda x: jnp.sort(jnp.sort(x, axis=1).astype(jnp.int32), axis=0)[0],
            P(),
            P(),
            (s(512, 512),),
            (),
        ),
    }


@pytest.mark.parametrize("name", _programs())
def test_buffers_add_up_to_the_compilers_figures(name):
    """Arguments and outputs are named in full, and temporaries at the peak within a quarter."""
    f, ins, outs, args, donated = _programs()[name]
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), tuple(MESH))
    ins, outs = jax.tree.map(
        lambda p: NamedSharding(mesh, p), (ins, outs), is_leaf=lambda p: isinstance(p, P)
    )
    jitted = jax.jit(f, in_shardings=ins, out_shardings=outs, donate_argnums=donated)
    memory = _memory(jitted.lower(*args).compile(EMITTERS))
    found = dict.fromkeys(("argument", "output", "temporary"), 0)
    for buffer in memory.buffers:
        found[buffer.kind] += buffer.nbytes * buffer.at_peak
    assert found["argument"] == memory.arguments
    # A tuple of results has a table of eight-byte pointers.
    assert found["output"] == pytest.approx(memory.outputs - memory.aliased, abs=64)
    assert memory.temporaries > 0
    assert found["temporary"] == pytest.approx(memory.temporaries, rel=0.25)


# Against brute force


def _straight_line(rng, length):
    """A program of opaque operations, and which arrays each position needs, by brute force."""
    sizes = [rng.randrange(1, 1000) for _ in range(length)]
    reads = [[i for i in range(n) if rng.random() < 0.2] for n in range(length)]
    lines = []
    for n, size in enumerate(sizes):
        operands = ", ".join(f"%c.{i}" for i in reads[n])
        root = "ROOT " * (n == length - 1)
        lines.append(f'  {root}%c.{n} = f32[{size}]{{0}} custom-call({operands}), target="x"')
    needed = [
        {i for i in range(n + 1) if i == n or any(i in reads[m] for m in range(n, length))}
        - {length - 1}
        for n in range(length)
    ]
    return "\n".join(lines), [4 * s for s in sizes], needed


@pytest.mark.parametrize("seed", range(20))
def test_liveness_against_brute_force(seed):
    """On random schedules the arrays at the peak are those that brute force finds."""
    body, sizes, needed = _straight_line(random.Random(seed), 30)
    # Tiles of one element: nothing may hide in the output, which only other backends do.
    body = body.replace("{0}", "{0:T(1)}")
    best = max(needed, key=lambda alive: sum(sizes[i] for i in alive))
    assert _alive(_buffers(_hlo(body))) == {f"c.{i}" for i in best}


# Layouts

TYPES = {
    "f32[10,3]{1,0:T(8,128)}": 16 * 128 * 4,
    "f32[3,10]{0,1:T(8,128)}": 16 * 128 * 4,
    "bf16[10,200]{1,0:T(8,128)(2,1)}": 16 * 256 * 2,
    "f32[5,7,130]{2,1,0:T(8,128)}": 5 * 8 * 256 * 4,
    "f32[300]{0:T(1024)}": 1024 * 4,
    "s32[]{:T(128)}": 128 * 4,
    "pred[]{:T(512)}": 512,
    "f32[1,1]{1,0:T(1,128)}": 128 * 4,
    "s4[8,128]{1,0:T(8,128)(8,1)E(4)}": 8 * 128 // 2,
    "f32[64]{0:T(8,128)}": 8 * 128 * 4,
    "f32[8,128]{1,0:T(8,128)S(1)}": None,
    "u32[]{:S(2)}": None,
    "f32[8,128]{1,0:T(8,128)S(5)}": None,
    "token[]": None,
}


@pytest.mark.parametrize("text", TYPES)
def test_tiles_of_tpu_layouts(text):
    """Arrays take whole tiles; those in on-chip or host memory take nothing of the HBM."""
    body = f"""
  %p = f32[8,128]{{1,0:T(8,128)}} parameter(0)
  %a = {text} custom-call(%p), custom_call_target="x"
  ROOT %r = f32[8,128]{{1,0:T(8,128)}} custom-call(%a), custom_call_target="x" """
    assert _sizes(_buffers(_hlo(body))).get("a") == TYPES[text]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[10,3]{1,0}", 120),
        ("s4[9]{0}", 5),
        ("f32[8]{0:S(1)}", 32),
        ("f32[8]{0:S(5)}", None),
        ("(f32[8]{0}, (s8[3]{0}, token[]))", 32),
    ],
)
def test_other_layouts(text, size):
    """Without tiles an array is as large as its elements; memory of the host does not count."""
    body = f"""
  %a = {text} custom-call(), custom_call_target="x"
  ROOT %r = f32[] custom-call(%a), custom_call_target="x" """
    found = [b.nbytes for b in _buffers(_hlo(body)) if b.name == "a"]
    assert (found or [None])[0] == size


# Opcodes


def test_a_copy_is_read_until_it_is_done():
    """What an asynchronous copy reads stays alive to its end, and its result to its last use."""
    body = """
  %a = f32[100]{0:T(1)} custom-call(), custom_call_target="x"
  %s = (f32[100]{0:T(1)}, f32[100]{0:T(1)}, u32[]{:S(2)}) copy-start(%a)
  %b = f32[30]{0:T(1)} custom-call(), custom_call_target="x"
  %d = f32[100]{0:T(1)} copy-done(%s)
  %e = f32[20]{0:T(1)} custom-call(%d), custom_call_target="x"
  ROOT %r = f32[]{:T(1)} custom-call(%b, %e), custom_call_target="x" """
    assert _alive(_buffers(_hlo(body))) == {"a", "s", "b"}


def test_collectives_that_are_started():
    """A start holds its operand and makes its result, which is awaited; an all-reduce likewise."""
    body = """
  %a = f32[10]{0:T(1)} custom-call(), custom_call_target="x"
  %g = (f32[10]{0:T(1)}, f32[80]{0:T(1)}) all-gather-start(%a), dimensions={0}
  %h = f32[80]{0:T(1)} all-gather-done(%g)
  %i = f32[80]{0:T(1)} all-reduce-start(%h), to_apply=%x
  %j = f32[80]{0:T(1)} all-reduce-done(%i)
  ROOT %r = f32[]{:T(1)} custom-call(%j), custom_call_target="x" """
    found = _buffers(_hlo(body))
    assert _sizes(found) == {"a": 40, "g": 320, "i": 320, "r": 4}
    assert _alive(found) == {"g", "i"}


def test_branches_do_not_add_up():
    """Of two branches the one that needs more decides, on top of what lives around both."""
    more = """%small (p: f32[10]) -> f32[10] {
  %p.1 = f32[10]{0:T(1)} parameter(0)
  %s.1 = f32[50]{0:T(1)} custom-call(%p.1), custom_call_target="x"
  ROOT %s.2 = f32[10]{0:T(1)} custom-call(%s.1), custom_call_target="x"
}

%large (p: f32[10]) -> f32[10] {
  %p.2 = f32[10]{0:T(1)} parameter(0)
  %l.1 = f32[70]{0:T(1)} custom-call(%p.2), custom_call_target="x"
  ROOT %l.2 = f32[10]{0:T(1)} custom-call(%l.1), custom_call_target="x"
}

"""
    branches = "%small, %large"
    for named in (
        f"branch_computations={{{branches}}}",
        f"branch_computations={{{branches[8:]}, %small}}",
    ):
        body = f"""
  %i = s32[]{{:T(1)}} custom-call(), custom_call_target="x"
  %a = f32[10]{{0:T(1)}} custom-call(), custom_call_target="x"
  %k = f32[5]{{0:T(1)}} custom-call(), custom_call_target="x"
  %c = f32[10]{{0:T(1)}} conditional(%i, %a, %a), {named}
  ROOT %r = f32[]{{:T(1)}} custom-call(%c, %k), custom_call_target="x" """
        alive = _alive(_buffers(_hlo(body, more=more)))
        assert {"a", "k", "l.1", "l.2"} <= alive
        assert "s.1" not in alive


def test_a_loop_carries_its_state_in_place():
    """A loop's state is there once; what its body needs comes on top, nested loops included."""
    more = """%inner (t: (f32[40])) -> (f32[40]) {
  %t.1 = (f32[40]{0:T(1)}) parameter(0)
  %x.1 = f32[40]{0:T(1)} get-tuple-element(%t.1), index=0
  %x.2 = f32[7]{0:T(1)} custom-call(%x.1), custom_call_target="x"
  %x.3 = f32[40]{0:T(1)} custom-call(%x.2), custom_call_target="x"
  ROOT %x.4 = (f32[40]{0:T(1)}) tuple(%x.3)
}

%test (t: (f32[40])) -> pred[] {
  %t.2 = (f32[40]{0:T(1)}) parameter(0)
  ROOT %t.3 = pred[]{:T(1)} custom-call(%t.2), custom_call_target="x"
}

%test.1 (t: (f32[40])) -> pred[] {
  %t.4 = (f32[40]{0:T(1)}) parameter(0)
  ROOT %t.5 = pred[]{:T(1)} custom-call(%t.4), custom_call_target="x"
}

%outer (t: (f32[40])) -> (f32[40]) {
  %o.1 = (f32[40]{0:T(1)}) parameter(0)
  %o.2 = f32[3]{0:T(1)} custom-call(), custom_call_target="x"
  %o.3 = (f32[40]{0:T(1)}) while(%o.1), condition=%test, body=%inner
  %o.4 = f32[40]{0:T(1)} get-tuple-element(%o.3), index=0
  %o.5 = f32[1]{0:T(1)} custom-call(%o.2), custom_call_target="x"
  ROOT %o.6 = (f32[40]{0:T(1)}) tuple(%o.4)
}

"""
    body = """
  %a = f32[40]{0:T(1)} custom-call(), custom_call_target="x"
  %b = (f32[40]{0:T(1)}) tuple(%a)
  %c = (f32[40]{0:T(1)}) while(%b), condition=%test.1, body=%outer
  %d = f32[40]{0:T(1)} get-tuple-element(%c), index=0
  ROOT %r = f32[]{:T(1)} custom-call(%d), custom_call_target="x" """
    found = _buffers(_hlo(body, more=more))
    assert _alive(found) == {"a", "o.2", "x.2"}
    assert "x.3" not in _sizes(found)


def test_tuples_of_more_than_five():
    """XLA numbers the elements of long tuples in comments, which hide none of them."""
    names = ", ".join(("/*index=5*/" * (i == 5)) + f"%v.{i}" for i in range(7))
    types = ", ".join(("/*index=5*/" * (i == 5)) + "f32[10]{0:T(1)}" for i in range(7))
    made = "\n".join(
        f'  %v.{i} = f32[10]{{0:T(1)}} custom-call(), custom_call_target="x"' for i in range(7)
    )
    body = f"""{made}
  %t = ({types}) tuple({names})
  %g = f32[10]{{0:T(1)}} get-tuple-element(%t), index=6
  ROOT %r = f32[]{{:T(1)}} custom-call(%g, %v.5), custom_call_target="x" """
    assert _alive(_buffers(_hlo(body))) == {f"v.{i}" for i in range(5, 7)} | {"v.5", "v.6"}


def test_printed_aliases():
    """A result that the program puts into an operand takes no memory of its own."""
    written = "output_to_operand_aliasing={{0}: (0, {})}"
    tpu = '"aliasing_operands":{"lists":[{"indices":["0","2"]}]}'
    body = f"""
  %p = f32[8,128]{{1,0:T(8,128)}} parameter(0)
  %a = f32[100]{{0:T(1)}} custom-call(), custom_call_target="x"
  %b = f32[100]{{0:T(1)}} fusion(%a, %p), kind=kLoop, calls=%x, backend_config={{{tpu}}}
  %c = (f32[100]{{0:T(1)}}, f32[9]{{0:T(1)}}) custom-call(%b), {written}
  %d = f32[100]{{0:T(1)}} get-tuple-element(%c), index=0
  ROOT %r = f32[]{{:T(1)}} custom-call(%d), custom_call_target="x" """
    found = _buffers(_hlo(body))
    assert _sizes(found) == {"p": 4096, "a": 400, "c": 36, "r": 4}
    assert _alive(found) == {"a", "c"}


def test_results_over_operands_that_die():
    """Off TPU an elementwise result lies over an operand that nothing reads later."""
    body = """
  %p = f32[100]{0} parameter(0)
  %a = f32[100]{0} custom-call(%p), custom_call_target="x"
  %b = f32[100]{0} add(%a, %p)
  %c = f32[100]{0} custom-call(%b), custom_call_target="x"
  %d = f32[100]{0} multiply(%c, %b)
  ROOT %r = f32[] custom-call(%b, %d), custom_call_target="x" """
    found = _buffers(_hlo(body))
    # a lies where b does, and d where c does; b and c live together.
    assert sum(b.nbytes for b in found if b.at_peak and b.kind == "temporary") == 800


def test_an_output_is_taken_as_soon_as_an_operand_lies_in_it():
    """Off TPU nothing hides in an output in whose memory an operand of it lies already."""
    body = """
  %p = f32[100]{0} parameter(0)
  %a = f32[100]{0} custom-call(%p), custom_call_target="x"
  %b = f32[100]{0} custom-call(%a), custom_call_target="x"
  %c = f32[100]{0} custom-call(%b), custom_call_target="x"
  ROOT %r = f32[100]{0} add(%a, %c) """
    # a lies where r does, and is still needed: b and c, which live together, lie elsewhere.
    found = _buffers(_hlo(body))
    assert _sizes(found) == {"p": 400, "r": 400, "b": 400, "c": 400}
    assert _alive(found) == {"b", "c"}


@pytest.mark.parametrize(
    ("opcode", "order", "temporaries"),
    [
        ("negate", "1,0", 800),
        ("copy", "1,0", 800),
        ("copy", "0,1", 1600),  # each element is written where another one is still to be read
    ],
)
def test_a_fusion_that_moves_elements_needs_another_place(opcode, order, temporaries):
    """A result lies over the operand of a fusion only where each element stays in its place."""
    more = f"""%inside (q: f32[10,20]) -> f32[10,20] {{
  %q = f32[10,20]{{1,0}} parameter(0)
  ROOT %o = f32[10,20]{{{order}}} {opcode}(%q)
}}

"""
    body = f"""
  %p = f32[] parameter(0)
  %a = f32[10,20]{{1,0}} custom-call(%p), custom_call_target="x"
  %b = f32[10,20]{{{order}}} fusion(%a), kind=kLoop, calls=%inside
  ROOT %r = f32[] custom-call(%b), custom_call_target="x" """
    found = _buffers(_hlo(body, more=more))
    assert sum(b.nbytes for b in found if b.at_peak and b.kind == "temporary") == temporaries


@pytest.mark.parametrize(
    ("before", "temporaries"),
    [
        # Each element of the result needs the same one of the operand.
        ("%s = f32[10,20]{1,0} exponential(%q)", 800),
        # One needs all of a row, which an element that is written already is a part of.
        ("%m = f32[10]{0} reduce(%q), dimensions={1}, to_apply=%add\n"
         "  %s = f32[10,20]{1,0} broadcast(%m), dimensions={0}", 1600),
    ],
)  # fmt: skip
def test_a_fusion_that_sums_an_array_needs_another_place(before, temporaries):
    """A fusion that also maps what it sums, as a softmax does, does not write over its operand."""
    more = f"""%inside (q: f32[10,20]) -> f32[10,20] {{
  %q = f32[10,20]{{1,0}} parameter(0)
  {before}
  ROOT %o = f32[10,20]{{1,0}} subtract(%q, %s)
}}

"""
    body = """
  %p = f32[] parameter(0)
  %a = f32[10,20]{1,0} custom-call(%p), custom_call_target="x"
  %b = f32[10,20]{1,0} fusion(%a), kind=kLoop, calls=%inside
  ROOT %r = f32[] custom-call(%b), custom_call_target="x" """
    found = _buffers(_hlo(body, more=more))
    assert sum(b.nbytes for b in found if b.at_peak and b.kind == "temporary") == temporaries


def test_modules_without_a_program():
    """An empty text, and one without an entry, have no buffers."""
    assert _buffers("") == ()
    assert (
        _buffers("HloModule m\n\n%f (p: f32[1]) -> f32[1] {\n  %p = f32[1] parameter(0)\n}\n") == ()
    )


# TPU


@pytest.mark.few(0)
@needs_libtpu
@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_tpu_program_adds_up(donated):
    """On a described TPU all arrays are named to the byte, and temporaries within a quarter."""
    device = spmd.topology("v5e:2x2").devices.flat[0]
    big = jax.ShapeDtypeStruct((8192, 8192), F32)

    def f(x, y):
        return jax.lax.fori_loop(0, 4, lambda i, h: jnp.tanh(h @ y), x)

    memory = _memory(_compile(f, big, big, device=device, donate_argnums=donated))
    found = dict.fromkeys(("argument", "output", "temporary"), 0)
    for buffer in memory.buffers:
        found[buffer.kind] += buffer.nbytes * buffer.at_peak
    size = 8192 * 8192 * 4
    assert found["argument"] == memory.arguments == 2 * size
    assert found["output"] == memory.outputs - memory.aliased == size * (not donated)
    assert found["temporary"] == pytest.approx(memory.temporaries, rel=0.25)
    assert memory.temporaries >= size // 2
    assert memory.peak == 2 * size + size * (not donated) + memory.temporaries + memory.code
