"""Lines of Python behind instructions: tables as XLA prints them, programs with marked lines."""

import functools
import os
from pathlib import Path
import subprocess
import sys
import sysconfig

from hardware import require_libtpu
import jax
from jax import lax
import jax.numpy as jnp
import optax
import programs
import pytest

import spmd
from spmd import P
from spmd.inspection import Source
from spmd.inspection.hlo import text as hlo_text
from spmd.inspection.records.names import direction_of, is_library, user_source

# Tables


def _module(tables, metadata="stack_frame_id=1", op="all-reduce(%x), to_apply=%add"):
    return hlo_text.parse_module(
        f"HloModule m\n\n{tables}\n"
        "ENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
        f"  ROOT %r = f32[8]{{0}} {op}, metadata={{{metadata}}}\n}}\n"
    )


def _frames(tables, metadata="stack_frame_id=1"):
    module = _module(tables, metadata)
    return hlo_text.frames_of(module.computations["main"].root, module)


# A chain of train -> loss -> layer, and a second outermost frame, as XLA numbers them.
TABLES = """\
FileNames
1 "/home/me/layer.py"
2 "/home/me/train.py"

FunctionNames
1 "layer"
2 "Trainer.loss.<locals>.inner"
3 "<module>"

FileLocations
1 {file_name_id=2 function_name_id=3 line=70 end_line=70 column=0 end_column=9}
2 {file_name_id=2 function_name_id=2 line=40 end_line=44 column=8 end_column=9}
3 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=11 end_column=30}
4 {file_name_id=1 function_name_id=1 line=8 end_line=8 column=4 end_column=30}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=1}

"""
LAYER = Source(file="/home/me/layer.py", line=7, column=12, function="layer")
INNER = Source(file="/home/me/train.py", line=40, column=9, function="Trainer.loss.<locals>.inner")
TOP = Source(file="/home/me/train.py", line=70, column=1, function="<module>")


@pytest.mark.parametrize(
    ("number", "frames"),
    [
        (1, (TOP,)),
        (2, (INNER, TOP)),
        (3, (LAYER, INNER, TOP)),
        (4, (Source(file="/home/me/layer.py", line=8, column=5, function="layer"),)),
        (0, ()),
        (99, ()),
    ],
)
def test_frames_lead_from_the_innermost_to_the_outermost(number, frames):
    """The number printed for a caller is one too high; a frame that is not there has no frames."""
    assert _frames(TABLES, f"stack_frame_id={number}") == frames


def test_callers_printed_by_their_own_number():
    """A text whose outermost frame has caller 0 is read as it stands."""
    plain = TABLES
    for caller in (1, 2, 3):
        plain = plain.replace(f"parent_frame_id={caller}}}", f"parent_frame_id={caller - 1}}}")
    assert _frames(plain, "stack_frame_id=3") == (LAYER, INNER, TOP)


def test_callers_behind_their_callees():
    """Frames in any order are followed."""
    rows = "1 {file_location_id=3 parent_frame_id=3}\n2 {file_location_id=1 parent_frame_id=1}\n"
    tables = TABLES[: TABLES.index("StackFrames")] + f"StackFrames\n{rows}"
    assert _frames(tables) == (LAYER, TOP)


def test_frames_that_call_each_other_end():
    """A table with a circle gives each of its frames once."""
    rows = (
        "1 {file_location_id=1 parent_frame_id=3}\n2 {file_location_id=2 parent_frame_id=2}\n"
        "3 {file_location_id=3 parent_frame_id=1}\n"
    )
    tables = TABLES[: TABLES.index("StackFrames")] + f"StackFrames\n{rows}"
    assert _frames(tables) == (TOP, INNER)


@pytest.mark.parametrize("missing", ["FileNames", "FunctionNames", "FileLocations", "StackFrames"])
def test_a_missing_table_is_no_crash(missing):
    """Without one of the tables there are frames with less in them, or none."""
    tables = "\n\n".join(t for t in TABLES.split("\n\n") if not t.startswith(missing))
    frames = _frames(tables, "stack_frame_id=3")
    if missing in ("FileLocations", "StackFrames"):
        assert frames == ()
    elif missing == "FunctionNames":
        assert [str(frame) for frame in frames] == list(map(str, (LAYER, INNER, TOP)))
        assert {frame.function for frame in frames} == {""}
    else:
        assert [frame.line for frame in frames] == [7, 40, 70]


@pytest.mark.parametrize(
    ("written", "file"),
    [
        (r"/tmp/m\303\251thode/\346\250\241.py", "/tmp/méthode/模.py"),
        ("/tmp/méthode.py", "/tmp/méthode.py"),
        (r"/tmp/a \"quoted\" \'name\'.py", "/tmp/a \"quoted\" 'name'.py"),
        (r"C:\\new\\train.py", r"C:\new\train.py"),
        (r"/tmp/tab\there\nline.py", "/tmp/tab\there\nline.py"),
        (r"/tmp/not utf \377.py", "/tmp/not utf \ufffd.py"),
        ("<ipython-input-3-0a1b2c>", "<ipython-input-3-0a1b2c>"),
        ("ENTRY %x (a: f32[]) -> f32[] {", "ENTRY %x (a: f32[]) -> f32[] {"),
    ],
)
def test_names_come_back_as_python_knows_them(written, file):
    """Escapes, letters of any script and texts that look like HLO are read as the file's name."""
    (*_, top) = _frames(TABLES.replace("/home/me/train.py", written), "stack_frame_id=3")
    assert top == Source(file=file, line=70, column=1, function="<module>")


@pytest.mark.parametrize("name", ["a (b: c) -> d {", "}", "<lambda>", "ENTRY", "1 {x}"])
def test_tables_are_no_computations(name):
    """Whatever a function or a file is called, the module's computations are those it has."""
    module = _module(TABLES.replace("<module>", name))
    assert [*module.computations] == ["main"]
    (frame,) = hlo_text.frames_of(module.computations["main"].root, module)
    assert frame.function == name


def test_each_of_several_modules_has_its_own_tables():
    """Frame numbers count in each module anew."""
    text = f"HloModule a\n\n{TABLES}ENTRY %e () -> f32[] {{\n  ROOT %x = f32[] constant(0)\n}}\n\n"
    a, b = hlo_text.parse_modules(
        text + text.replace("HloModule a", "HloModule b").replace("70", "71")
    )
    assert (a.name, b.name) == ("a", "b")
    assert (a.frames[1][0].line, b.frames[1][0].line) == (70, 71)
    assert hlo_text.parse_modules("") == ()


def test_the_older_spelling():
    """Texts with a file and a line in the metadata give one frame."""
    metadata = (
        r'op_name="f" source_file="/tmp/m\303\251 \"a\".py" source_line=12 source_end_line=14'
    )
    assert _frames("", metadata) == (Source(file='/tmp/mé "a".py', line=12, column=0, function=""),)
    assert _frames("", 'op_name="f" source_line=12') == ()
    assert _frames("", 'op_name="f" source_file="/tmp/a.py"') == ()


# Libraries


STDLIB = sysconfig.get_path("stdlib")


@pytest.mark.parametrize(
    "file",
    [
        optax.__file__,
        jax.__file__,
        functools.__file__,
        spmd.__file__,
        f"{STDLIB}/concurrent/futures/thread.py",
        "/elsewhere/venv/lib/python3.12/site-packages/flax/linen/module.py",
        "/usr/lib/python3/dist-packages/torch/nn.py",
        "/opt/conda/lib/python3.10/contextlib.py",
        r"C:\Users\me\venv\Lib\site-packages\optax\_src\base.py",
        "<frozen runpy>",
    ],
)
def test_libraries(file):
    """Python, installed packages and spmd are libraries, on this machine and on others."""
    assert is_library(file)


@pytest.mark.parametrize(
    "file",
    [
        __file__,
        "/home/me/.venv/projects/train.py",
        "/home/me/site-packages-of-mine/train.py",
        "/home/me/jax/optax/train.py",
        "/home/me/lib/models/train.py",
        "<ipython-input-3-0a1b2c>",
        "/tmp/ipykernel_4711/1234567.py",
        "<stdin>",
        "<string>",
        "train.py",
        "",
        "/home/me/spmd_of_mine/model.py",
    ],
)
def test_users(file):
    """Scripts, notebooks and folders that only look like an environment are the user's."""
    assert not is_library(file)


def test_the_demo_is_a_users():
    """The demo's model is user code, wherever the package lies; the rest of it is a library."""
    package = Path(spmd.__file__).parent
    assert not is_library(str(package / "demo" / "model.py"))
    assert is_library(str(package / "stages.py"))
    assert is_library(str(package / "inspection" / "compile" / "report.py"))


def _source_in(*files):
    frames = [Source(file=file, line=n, column=0, function="") for n, file in enumerate(files, 1)]
    return user_source(frames)


def test_the_innermost_frame_outside_of_libraries_is_the_users():
    """Library frames below the user's line are passed over, and those above do not matter."""
    found = _source_in(optax.__file__, functools.__file__, "/home/me/a.py", "/b.py", jax.__file__)
    assert (found.file, found.line) == ("/home/me/a.py", 3)
    assert _source_in(optax.__file__, jax.__file__).line == 1
    assert _source_in() is None


# Directions


@pytest.mark.parametrize(
    ("op_name", "direction"),
    [
        ("jit(step)/jvp(loss)/dot_general", "forward"),
        ("jit(step)/jvp()/while/body/closed_call/dot_general", "forward"),
        ("jit(step)/transpose(jvp())/while/body/eval_jaxpr/dot_general", "backward"),
        ("jit(step)/vmap(jvp(vmap(transpose(jvp()))))/dot_general", "backward"),
        ("jit(f)/transpose(jvp(jvp()))/checkpoint/rematted_computation/sin", "backward"),
        ("jit(step)/add", "other"),
        ("jit(step)/transpose", "other"),
        ("jit(my_transpose)/jit(jvp)/dot_general", "other"),
        ("jit(step)/the_jvp(x)/dot_general", "other"),
        # What XLA joins where it combines.
        ("pjit(f)/(reduce_sum:reduce_sum:transpose(jvp(btd,vd->btv))/dot_general)", "backward"),
        ("pjit(f)/(reduce_sum:jvp()/reduce_sum)", "forward"),
        ("", "other"),
    ],
)
def test_direction_of_a_name_stack(op_name, direction):
    """Transformations tell the direction; functions and primitives of the same name do not."""
    assert direction_of(op_name) == direction


@jax.custom_vjp
def _custom(x):
    return jnp.sin(x @ x)


_custom.defvjp(lambda x: (_custom(x), x), lambda x, g: (g @ jnp.cos(x @ x),))


def _layers(x, layer):
    return lax.scan(layer, x, jnp.broadcast_to(x, (3, 8, 8)))[0].sum()


def _layer(c, w):
    return jnp.sin(c @ w), None


def _square(x):
    return jnp.sin(x @ x).sum()


# By name: the program, and the directions in which its matrix products lie.
DIRECTIONS = {
    "no gradient": (_square, {"other"}),
    "transpose": (lambda x: x.T @ x, {"other"}),
    "jvp": (lambda x: jax.jvp(_square, (x,), (x,))[1], {"forward"}),
    "grad": (jax.grad(_square), {"forward", "backward"}),
    "vjp": (lambda x: jax.vjp(_square, x)[1](x[0, 0]), {"forward", "backward"}),
    "custom": (jax.value_and_grad(lambda x: _custom(x).sum()), {"forward", "backward"}),
    "grad of vmap": (
        jax.grad(lambda x: jax.vmap(lambda row: jnp.sin(row @ x))(x).sum()),
        {"forward", "backward"},
    ),
    "vmap of grad": (
        lambda x: jax.vmap(jax.grad(_square))(jnp.stack([x, x + 1])),
        {"forward", "backward"},
    ),
    "scan": (jax.grad(lambda x: _layers(x, _layer)), {"forward", "backward"}),
    "remat": (jax.grad(lambda x: _layers(x, jax.checkpoint(_layer))), {"forward", "backward"}),
    "inner jit": (jax.grad(lambda x: jax.jit(_square)(x)), {"forward", "backward"}),
    "pjit": (jax.grad(spmd.pjit(_square)), {"forward", "backward"}),
    "grad in pjit": (spmd.pjit(jax.grad(_square)), {"forward", "backward"}),
    "scan within": (
        lambda x: jax.grad(_square)(lax.fori_loop(0, 3, lambda _, y: jnp.sin(y @ y), x)),
        {"other", "forward", "backward"},
    ),
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_direction_of_what_jax_writes(name):
    """The matrix products of a program lie in the directions that its Python says."""
    f, wanted = DIRECTIONS[name]
    text = jax.jit(f).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile().as_text()
    module = hlo_text.parse_module(text)
    products = [
        one for c in module.computations.values() for one in c.instructions if one.opcode == "dot"
    ]
    assert {direction_of(one.op_name) for one in products} == wanted


# Programs


def _step(mesh):
    """A step of training, each of whose exchanges comes from a line of its own."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

    def loss(w, x):
        hidden = jnp.tanh(x @ w)  # here: product
        # The partitioner gives what it gathers the line of what made it, which is the one above.
        whole = spmd.with_sharding_constraint(hidden, P())
        return jnp.sum(whole**2)

    def step(w, x):
        gradient = jax.grad(loss)(w, x)
        updates, _ = optimizer.update(gradient, optimizer.init(w), w)  # here: clip
        return optax.apply_updates(w, updates)

    specs = {
        "in_axis_resources": (P(None, "model"), P("data")),
        "out_axis_resources": P(None, "model"),
    }
    return spmd.pjit(step, mesh=mesh, **specs)


def _place(source):
    text = Path(__file__).read_text().splitlines()[source.line - 1]
    assert text[source.column - 1] != " ", "the column is where an expression starts"
    return source.file, text.partition("# here: ")[2], source.function.rpartition(".")[2]


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_exchanges_name_the_marked_lines(backend):
    """Each exchange of a step names the user's line, also where optax lies in between."""
    if backend == "tpu":
        require_libtpu()
    target = programs.tpu_target() if backend == "tpu" else programs.cpu_target()
    args = programs.array(256, 512), programs.array(64, 256)
    found = spmd.report(_step(target.mesh), *args).collectives
    places = {(c.kind, *_place(c.source), c.direction) for c in found}
    assert places >= {
        ("all-gather", __file__, "product", "loss", "forward"),
        ("all-reduce", __file__, "product", "loss", "backward"),
        ("all-reduce", __file__, "clip", "step", "other"),
    }
    assert {marker for _, _, marker, _, _ in places} == {"product", "clip"}
    # The frames of a line within optax start in optax, and lead through the user's.
    (clip,) = [c for c in found if _place(c.source)[1] == "clip"]
    assert "site-packages" in clip.frames[0].file
    assert clip.source in clip.frames


def _elsewhere(weights, x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, weights)  # here: another program


def _two_loops(weights, x):
    def layer(c, w):
        return jnp.tanh(c @ spmd.with_sharding_constraint(w, P(None, None))), c

    x, outs = lax.scan(layer, x, weights)  # here: first loop
    return outs, lax.scan(layer, x, weights)  # here: second loop


def test_what_loops_take_apart_has_the_line_of_the_loop():
    """JAX traces that part of a loop once in a process: its lines are those of another program.

    Both loops of the function have one name stack.
    """
    mesh = programs.cpu_target().mesh
    args = programs.array(6, 512, 512), programs.array(64, 512)
    specs = {"in_axis_resources": (P(None, "data"), P("data")), "mesh": mesh}
    # Traced before, whether or not another test has done so.
    spmd.pjit(_elsewhere, **specs).lower(*args)
    lowered = spmd.pjit(_two_loops, **specs).lower(*args)
    found = spmd.report(lowered.compile())
    assert {(c.kind, c.in_loop, _place(c.source)[1]) for c in found.collectives} == {
        ("all-gather", True, "first loop"),
        ("all-gather", True, "second loop"),
    }
    lines = {_place(b.source)[1] for b in found.memory.buffers if b.source}
    assert "another program" not in lines
    made = _elsewhere.__code__.co_firstlineno + 1
    with pytest.raises(spmd.ReportError, match=f"knows no array that test_source.py:{made} makes"):
        lowered.why(f"test_source.py:{made}")
    start = _two_loops.__code__.co_firstlineno
    assert {v.name for v in lowered.why(f"test_source.py:{start + 4}").values} >= {
        "dynamic_slice",
        "dynamic_update_slice",
    }


@pytest.fixture(name="short_locations")
def _short_locations():
    name = "jax_include_full_tracebacks_in_locations"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("short_locations")
def test_without_full_stacks_there_is_the_line_alone():
    """With JAX's short locations, the frame is the one that JAX writes."""
    lowered = jax.jit(lambda x: jnp.sin(x)).lower(programs.array(8))  # here: short
    module = hlo_text.parse_module(lowered.compile().as_text())
    sine = next(
        one for c in module.computations.values() for one in c.instructions if one.opcode == "sine"
    )
    (frame,) = hlo_text.frames_of(sine, module)
    assert _place(frame)[:2] == (__file__, "short")


# JAX's persistent cache

CACHED = """
import sys, warnings
import jax, jax.numpy as jnp, numpy as np, spmd
import moved
from spmd import P

mesh = spmd.make_mesh({"data": 8})
x = jax.device_put(np.ones((64, 32), np.float32), jax.NamedSharding(mesh, P("data")))

def say(report):
    warnings.simplefilter("error")
    try:
        print(report().collectives[0].source.line)
    except UserWarning as e:
        print(str(e).partition(".")[0])

say(lambda: spmd.report(jax.jit(moved.model), x))
say(lambda: spmd.report(spmd.pjit(moved.model, P("data"), mesh=mesh), x))
say(lambda: spmd.report(jax.jit(moved.model).trace(x)))
plain = jax.jit(lambda x: moved.model(x) + 1)
for called in (plain, spmd.pjit(lambda x: moved.model(x) + 2, P("data"), mesh=mesh)):
    called(x)
    say(lambda: spmd.report(called, x))
    say(lambda: spmd.report(called.lower(x)))
say(lambda: called.lower(x).compile().report())
"""


@pytest.mark.slow
def test_lines_that_have_moved_since_a_program_was_cached(tmp_path):
    """JAX's persistent cache knows no lines: a report compiles for its own, or says so."""
    model = "import jax.numpy as jnp\n{}def model(x):\n    return jnp.tanh(x).sum()\n"
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    printed = []
    for blank in ("", "\n" * 40):
        (tmp_path / "moved.py").write_text(model.format(blank))
        done = subprocess.run(
            [sys.executable, "-c", CACHED],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout.splitlines())
    told = "report: the lines are those of another version of the source"
    assert printed == [["3"] * 8, ["43"] * 3 + [told] * 5]
