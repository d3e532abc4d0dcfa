"""The reader of HLO text."""

import jax
import jax.numpy as jnp
import pytest

from spmd.inspection.hlo import text as hlo_text

MODULE = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, \
num_partitions=8

FileNames
1 "/home/user/all-reduce(train.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main.1_spmd (param: f32[8]) -> (f32[8], s32[]) {
  %param = f32[8]{0} parameter(0), sharding={devices=[8]<=[8]}
  %all-reduce.1 = f32[8]{0:T(128)} all-reduce(%param), channel_id=1, \
replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}, \
to_apply=%add, metadata={op_name="jit(step)/all-gather(x), to_apply=%other" stack_frame_id=1}
  ROOT %tuple = (f32[8]{0:T(8,128)(2,1)}, /*index=1*/s32[]) tuple(%all-reduce.1, %param)
}
"""


@pytest.fixture(name="module")
def _module():
    return hlo_text.parse_module(MODULE)


def test_module_header_and_computations(module):
    """The name, the counts and every computation are read, and the tables are not taken for any."""
    assert (module.name, module.entry) == ("jit_step", "main.1_spmd")
    assert (module.num_replicas, module.num_partitions) == (1, 8)
    assert list(module.computations) == ["add", "main.1_spmd"]


def test_instructions_are_cut_at_the_opcode(module):
    """Layouts and tuple types with parentheses and blanks do not hide the opcode."""
    entry = module.computations["main.1_spmd"].instructions
    assert [(i.name, i.opcode) for i in entry] == [
        ("param", "parameter"),
        ("all-reduce.1", "all-reduce"),
        ("tuple", "tuple"),
    ]
    assert entry[2].operand_names == ("all-reduce.1", "param")
    assert [str(s) for s in hlo_text.parse_shapes(entry[2].type)] == ["f32[8]", "s32[]"]


def test_operands_behind_a_comment_are_operands():
    """Every fifth operand of a long list has its index before it, with no blank in between."""
    for types in ("", "f32[2]{0} "):
        names = [f"%x.{i}" for i in range(12)]
        names = [f"/*index={i}*/" * (i % 5 == 0 < i) + types + n for i, n in enumerate(names)]
        root = f"  ROOT %t = (f32[2]{{0}}) tuple({', '.join(names)})"
        text = f"HloModule m\n\nENTRY %e () -> () {{\n{root}\n}}"
        one = hlo_text.parse_module(text).computations["e"].instructions[0]
        assert one.operand_names == tuple(f"x.{i}" for i in range(12))


def test_names_without_percent_signs():
    """XLA's short texts give the same operands; literals are none in either spelling."""
    text = """HloModule m

ENTRY %e (%x.1: f32[2], %y: f32[2]) -> (f32[2], pred[]) {
  %x.1 = f32[2]{0} parameter(0)
  %y = f32[2]{0} parameter(1)
  %sum-1 = f32[2]{0} add(%x.1, /*index=1*/%y)
  %yes = pred[] constant(true)
  %id = u32[] partition-id()
  ROOT %t = (f32[2]{0}, pred[]) tuple(%sum-1, %yes)
}"""
    names = [
        [one.operand_names for one in hlo_text.parse_module(t).computations["e"].instructions]
        for t in (text, text.replace("%", ""))
    ]
    assert names[0] == [(), (), ("x.1", "y"), (), (), ("sum-1", "yes")]
    assert names[1] == names[0]


def test_op_names_are_not_escaped():
    """Quotes and letters outside of ASCII come back as the user wrote them."""
    text = """HloModule m

ENTRY %e () -> f32[] {
  ROOT %p = f32[] parameter(0), metadata={op_name="batch[\\'x\\']/\\303\\251t\\303\\251"}
}"""
    one = hlo_text.parse_module(text).computations["e"].instructions[0]
    assert one.op_name == "batch['x']/été"


def test_attributes_end_at_their_own_comma(module):
    """An attribute's value keeps commas inside brackets, and that of a mesh with a device order."""
    reduce = module.computations["main.1_spmd"].instructions[1]
    assert reduce.attribute("channel_id") == "1"
    assert reduce.attribute("replica_groups") == (
        "mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}"
    )
    assert reduce.attribute("dimensions") is None


def test_names_inside_strings_are_no_callees(module):
    """An op name may hold anything without adding a call."""
    reduce = module.computations["main.1_spmd"].instructions[1]
    assert reduce.callees() == {"to_apply": ("add",)}
    assert reduce.op_name == "jit(step)/all-gather(x), to_apply=%other"


@pytest.mark.parametrize("text", ["", "\n", "HloModule empty\n"])
def test_a_module_without_computations_is_empty(text):
    """No text is too short to read."""
    module = hlo_text.parse_module(text)
    assert (module.entry, module.computations, module.num_partitions) == ("", {}, 1)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("f32[4,8]{1,0}", 128),
        ("bf16[3]", 6),
        ("pred[]", 1),
        ("s4[3]", 2),
        ("c128[2]", 32),
        ("f8e4m3fn[5]", 5),
        ("f32[<=8,2]", 64),
        ("f32[0,7]", 0),
    ],
)
def test_bytes_of_a_shape(text, nbytes):
    """Sizes follow the element type, packed below a byte, and a dynamic dimension's bound."""
    (shape,) = hlo_text.parse_shapes(text)
    assert shape.nbytes == nbytes


DTYPES = (
    *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"),
)


@pytest.mark.parametrize("name", DTYPES)
def test_every_jax_dtype_has_the_size_that_numpy_gives_it(name):
    """No element type that JAX can hold is missing, or of another size than its array's."""
    with jax.enable_x64(True):
        struct = jax.ShapeDtypeStruct((3,), getattr(jnp, name))
        text = jax.jit(lambda x: x).lower(struct).as_text("hlo")
    module = hlo_text.parse_module(text)
    (parameter,) = (
        i for i in module.computations[module.entry].instructions if i.opcode == "parameter"
    )
    (shape,) = hlo_text.parse_shapes(parameter.type)
    assert shape.nbytes == 3 * struct.dtype.itemsize


def test_tuple_elements_are_one_level_deep():
    """The type of a start splits into operand, result and contexts."""
    text = "((f32[4]{0}, f32[2]{0:T(8,128)}), /*index=1*/f32[8]{0}, u32[])"
    assert hlo_text.tuple_elements(text) == (
        "(f32[4]{0}, f32[2]{0:T(8,128)})",
        "f32[8]{0}",
        "u32[]",
    )
    assert hlo_text.tuple_elements("f32[4]{0}") == ("f32[4]{0}",)


LOOPS = """\
HloModule loops

ENTRY %e (t: s32[]) -> s32[] {
  %w = s32[] while(%t), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"12"}}
  %v = s32[] while(%t), condition=%c, body=%b
}
"""


def test_trip_count_is_read_where_it_is_printed():
    """A while loop says how often it runs, or nothing."""
    known, unknown = hlo_text.parse_module(LOOPS).computations["e"].instructions
    assert (known.trip_count, unknown.trip_count) == (12, None)
    assert known.callees() == {"condition": ("c",), "body": ("b",)}


# Where a line ends, and what is not understood

KERNEL = """\
HloModule kernels, frontend_attributes={about={
}}

%double (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %kernel = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"a":"}} \\"{[(",
"stack_frame_id=9":"op_name=, (it's"
},op_name="mine",nested={
{
}
}}, metadata={op_name="jit(f)/pallas_call" stack_frame_id=2}, backend_config="{"
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %named = f32[8]{0} all-reduce(%x), replica_groups=mesh['a
}b'=8] {'a
}b'}, to_apply=%add
  ROOT %call = f32[8]{0} call(%named), to_apply=%double
}
"""


def test_an_instruction_ends_where_its_brackets_and_strings_do():
    """Lines of a kernel's metadata, and of an axis' name, belong to the instruction before."""
    module = hlo_text.parse_module(KERNEL)
    assert module.unread == ()
    kernel = module.computations["double"].root
    assert (kernel.name, kernel.op_name, kernel.frame_id) == ("kernel", "jit(f)/pallas_call", 2)
    assert kernel.attribute("backend_config") == '"{"'
    names = [one.name for one in module.computations["main"].instructions]
    assert names == ["x", "named", "call"]
    groups = module.computations["main"].instructions[1].attribute("replica_groups")
    assert groups == "mesh['a\n}b'=8] {'a\n}b'}"


BROKEN = """\
HloModule broken
a line of no table

FileNames
1 "a.py"
and one behind a table

%inner (p: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  a line of no instruction
  ROOT %open = f32[] custom-call(%p), frontend_attributes={never={closed}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  // a comment says nothing
  %y = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={}, attribute={ "open
 "which ends in no later line
  ROOT %z = f32[8]{0} all-gather(%y), channel_id=2
}
}
"""


def test_lines_that_are_not_understood_are_kept():
    """What is not read is told, in order, and takes nothing of what follows with it."""
    module = hlo_text.parse_module(BROKEN)
    lines = [line.strip() for line in BROKEN.splitlines()]
    before, after = ("a line", "and one"), ("%y", '"which')
    assert [line.strip() for line in module.unread] == [
        *(line for line in lines if line.startswith(before)),
        "the end of a computation",  # which a bracket took that nothing else closes
        *(line for line in lines if line.startswith(after)),
        "}",
    ]
    names = {c.name: [i.name for i in c.instructions] for c in module.computations.values()}
    assert names == {"inner": ["p", "open"], "main": ["x", "y", "z"]}


def test_a_text_that_stops_early_says_so():
    """A computation without its end is read as far as it goes; no module at all is all unread."""
    cut = BROKEN.rpartition("}\n}")[0]
    (module,) = hlo_text.parse_modules("// a comment\n" + cut)
    assert module.unread[-1] == "the end of a computation"
    assert [one.name for one in module.computations["main"].instructions] == ["x", "y", "z"]
    assert hlo_text.parse_modules("no module\nat all")[0].unread == ("no module", "at all")


@pytest.mark.parametrize("count", [1, 3])
def test_lines_of_metadata_take_linear_time(count, monkeypatch):
    """However many lines an instruction has, and whether it ends, each is seen once or twice."""
    looked = []
    real = hlo_text._COMPUTATION

    class Counting:
        def match(self, line):
            looked.append(line)
            return real.match(line)

    rows = "\n".join(f'"k{i}":"v"' for i in range(1000 * count))
    head = "HloModule m\n\nENTRY %e () -> f32[] {\n  ROOT %c = f32[] constant(0), x={\n"
    monkeypatch.setattr(hlo_text, "_COMPUTATION", Counting())
    assert hlo_text.parse_module(f"{head}{rows}\n}}\n}}\n").unread == ()
    assert len(looked) <= 1000 * count + 10
    del looked[:]
    assert len(hlo_text.parse_module(f"{head}{rows}\n}}\n").unread) == 1
    assert len(looked) <= 1000 * count + 10
