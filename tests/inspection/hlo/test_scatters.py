"""All-reduces of which each device keeps its own part, in texts read by hand and in real ones."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from reports import collective, part, report

import spmd
from spmd import P, inspection
from spmd.inspection.hlo.calls import visits
from spmd.inspection.hlo.ledger import ledger
from spmd.inspection.hlo.text import parse_module
from spmd.inspection.show import words

SUM = "replica_groups={{0,1},{2,3}}, channel_id=1, use_global_device_ids=true, to_apply=%add"

#: Groups are 0, 1 and 2, 3: the second of each is the odd one.
HEAD = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


def program(body, *functions):
    """A program of four devices that sums ``p`` in pairs."""
    lines = "\n".join(f"  {line}" for line in body)
    return HEAD + "\n".join([*functions, f"ENTRY %main (p: f32[8,6]) -> f32[4,6] {{\n{lines}\n}}"])


def sliced(text, **options):
    """What is marked of each all-reduce."""
    module = parse_module(text)
    assert not module.unread
    found = ledger(module, visits(module), {"data": 2, "model": 2}, **({"for_cpu": True} | options))
    return [one.sliced for one in found if one.kind == "all-reduce"]


def straight(*after, start=""):
    """An all-reduce of 8 rows, the start of a part of 4 rows, and what comes after."""
    return program(
        [
            "%p = f32[8,6]{1,0} parameter(0)",
            "%id = u32[] partition-id()",
            "%zero = s32[] constant(0)",
            "%two = u32[] constant(2)",
            "%four = s32[] constant(4)",
            *(start or OWN).splitlines(),
            f"%sum = f32[8,6]{{1,0}} all-reduce(%p), {SUM}",
            *after,
        ]
    )


#: Devices 0, 1, 2, 3 take their parts at 0, 4, 0, 4.
OWN = """\
%odd = u32[] remainder(%id, %two)
%number = s32[] convert(%odd)
%start = s32[] multiply(%number, %four)"""
TABLE = """\
%table = s32[4]{0} constant({0, 4, 0, 4})
%found = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
%start = s32[] reshape(%found)"""
PART = "f32[4,6]{1,0} dynamic-slice(%sum, %start, %zero), dynamic_slice_sizes={4,6}"


@pytest.mark.parametrize(
    "after",
    [
        (f"ROOT %part = {PART}",),
        # Another form of it, and then the part.
        (
            "%flat = f32[8,2,3]{2,1,0} bitcast(%sum)",
            "ROOT %part = f32[4,2,3]{2,1,0} dynamic-slice(%flat, %start, %zero, %zero), "
            "dynamic_slice_sizes={4,2,3}",
        ),
        (
            "%other = f32[6,8]{1,0} transpose(%sum), dimensions={1,0}",
            "%less = bf16[6,8]{1,0} convert(%other)",
            "ROOT %part = bf16[6,4]{1,0} dynamic-slice(%less, %zero, %start), "
            "dynamic_slice_sizes={6,4}",
        ),
        # Two that take the same part.
        (
            f"%part = {PART}",
            "%copy = f32[8,6]{1,0} copy(%sum)",
            f"%again = {PART.replace('%sum', '%copy')}",
            "ROOT %both = f32[4,6]{1,0} add(%part, %again)",
        ),
    ],
)
def test_only_its_own_part(after):
    """A sum of which each device takes the part of its place in the group is marked."""
    assert sliced(straight(*after)) == [(0,)]
    assert sliced(straight(*after, start=TABLE)) == [(0,)]


@pytest.mark.parametrize(
    "after",
    [
        # The whole is used beside the part, or is a result, or nothing uses it.
        (
            f"%part = {PART}",
            "%all = f32[8,6]{1,0} negate(%sum)",
            "ROOT %t = (f32[4,6]{1,0}, f32[8,6]{1,0}) tuple(%part, %all)",
        ),
        (f"%part = {PART}", "ROOT %t = (f32[4,6]{1,0}, f32[8,6]{1,0}) tuple(%part, %sum)"),
        ("ROOT %other = f32[8,6]{1,0} negate(%p)",),
        ("ROOT %part = f32[4,6]{1,0} slice(%sum), slice={[0:4], [0:6]}",),
        # It is an offset of a slice, and not what is sliced.
        (
            "%place = s32[] bitcast(%sum)",
            "ROOT %part = f32[4,6]{1,0} dynamic-slice(%p, %place, %zero), "
            "dynamic_slice_sizes={4,6}",
        ),
        # Rows and columns are other parts.
        (
            f"%part = {PART}",
            "%odd3 = s32[] constant(3)",
            "%column = s32[] multiply(%number, %odd3)",
            "ROOT %t = f32[8,3]{1,0} dynamic-slice(%sum, %zero, %column), "
            "dynamic_slice_sizes={8,3}",
        ),
        # A quarter of the rows: two devices leave half of them to nobody.
        (
            "ROOT %part = f32[2,6]{1,0} dynamic-slice(%sum, %start, %zero), "
            "dynamic_slice_sizes={2,6}",
        ),
    ],
)
def test_more_or_less_than_its_part(after):
    """A sum that is needed as a whole, in other parts or not at all is not marked."""
    assert sliced(straight(*after)) == [()]


@pytest.mark.parametrize(
    "numbers", ["{0, 0, 0, 0}", "{4, 0, 4, 0}", "{0, 4, 4, 0}", "{0, 0, 4, 4}", "{0, 2, 0, 2}"]
)
def test_the_part_of_another(numbers):
    """Where any device takes the part of another one, a reduce-scatter would not do."""
    assert sliced(straight(f"ROOT %part = {PART}", start=TABLE)) == [(0,)]
    start = TABLE.replace("{0, 4, 0, 4}", numbers)
    assert sliced(straight(f"ROOT %part = {PART}", start=start)) == [()]


def test_where_it_starts_is_not_known():
    """What depends on data is not guessed."""
    for start in (
        "%start = s32[] custom-call(%id)",
        OWN.replace("remainder", "xor"),
        "%start = s32[] convert(%more)\n%more = f32[] bitcast(%p)",
    ):
        assert sliced(straight(f"ROOT %part = {PART}", start=start)) == [()]


def test_only_in_programs_for_cpus():
    """Others have a reduce-scatter, and an all-reduce where they mean one."""
    assert sliced(straight(f"ROOT %part = {PART}"), for_cpu=False) == [()]
    assert [one.sliced for one in inspection.collectives(straight(f"ROOT %x = {PART}"), {"a": 4})]


FUSED = """\
%fused (q: f32[8,6], n: u32[], w: f32[4,6]) -> f32[4,6] {
  %q = f32[8,6]{1,0} parameter(0)
  %n = u32[] parameter(1)
  %w = f32[4,6]{1,0} parameter(2)
  %two = u32[] constant(2)
  %odd = u32[] remainder(%n, %two)
  %number = s32[] convert(%odd)
  %four = s32[] constant(4)
  %start = s32[] multiply(%number, %four)
  %zero = s32[] constant(0)
  %part = f32[4,6]{1,0} dynamic-slice(%q, %start, %zero), dynamic_slice_sizes={4,6}
  ROOT %new = f32[4,6]{1,0} subtract(%w, %part)
}
"""
COPIED = """\
%copied (q: f32[8,6]) -> f32[8,6] {
  %q = f32[8,6]{1,0} parameter(0)
  ROOT %r = f32[8,6]{0,1} copy(%q)
}
"""


def fused(*body):
    """An all-reduce whose sum fusions use."""
    return program(
        [
            "%p = f32[8,6]{1,0} parameter(0)",
            "%v = f32[4,6]{1,0} parameter(1)",
            "%id = u32[] partition-id()",
            f"%sum = f32[8,6]{{1,0}} all-reduce(%p), {SUM}",
            *body,
        ],
        FUSED,
        COPIED,
    )


def test_inside_of_fusions():
    """A part that a fusion takes counts, also after a fusion that hands the sum on."""
    use = "ROOT %u = f32[4,6]{1,0} fusion(%sum, %id, %v), kind=kLoop, calls=%fused"
    copy = "%k = f32[8,6]{0,1} fusion(%sum), kind=kLoop, calls=%copied"
    assert sliced(fused(use)) == [(0,)]
    assert sliced(fused(copy, use.replace("%sum", "%k"))) == [(0,)]
    assert sliced(fused(copy, use.replace("%v", "%k"))) == [()]
    # As the weight, too, of which all is needed.
    assert sliced(fused(use.replace("%v", "%sum"))) == [()]


def test_a_fusion_of_several_callers_is_not_read():
    """Where two fusions share a computation, it is not known which part each takes."""
    use = "f32[4,6]{1,0} fusion(%sum, %id, %v), kind=kLoop, calls=%fused"
    both = (f"%u = {use}", f"ROOT %w = {use}")
    assert sliced(fused(*both)) == [()]


def combined(*body):
    """Two sums in one all-reduce, both of 8 rows."""
    return program(
        [
            "%p = f32[8,6]{1,0} parameter(0)",
            "%id = u32[] partition-id()",
            "%zero = s32[] constant(0)",
            TABLE.replace("\n", "\n  "),
            f"%sums = (f32[8,6]{{1,0}}, f32[8,6]{{1,0}}) all-reduce(%p, %p), {SUM}",
            "%first = f32[8,6]{1,0} get-tuple-element(%sums), index=0",
            "%second = f32[8,6]{1,0} get-tuple-element(%sums), index=1",
            *body,
        ]
    )


def test_parts_of_a_combined_one():
    """Of sums that were combined, those are named which are needed in parts."""
    one, other = PART.replace("%sum", "%first"), PART.replace("%sum", "%second")
    whole = "f32[8,6]{1,0} negate(%first)"
    assert sliced(combined(f"%a = {one}", f"ROOT %b = {other}")) == [(0, 1)]
    assert sliced(combined(f"%a = {whole}", f"ROOT %b = {other}")) == [(1,)]
    assert sliced(combined(f"%a = {whole}", f"ROOT %b = {one}")) == [()]


LOOP = """\
%condition (s: (s32[], s32[], f32[8,6], f32[4,6])) -> pred[] {{
  %s = (s32[], s32[], f32[8,6]{{1,0}}, f32[4,6]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %three), direction=LT
}}

%body (t: (s32[], s32[], f32[8,6], f32[4,6])) -> (s32[], s32[], f32[8,6], f32[4,6]) {{
  %t = (s32[], s32[], f32[8,6]{{1,0}}, f32[4,6]{{1,0}}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %start = s32[] get-tuple-element(%t), index=1
  %x = f32[8,6]{{1,0}} get-tuple-element(%t), index=2
  %zero = s32[] constant(0)
  %sum = f32[8,6]{{1,0}} all-reduce(%x), {sum}
  %part = f32[4,6]{{1,0}} dynamic-slice(%sum, %start, %zero), dynamic_slice_sizes={{4,6}}
  ROOT %u = (s32[], s32[], f32[8,6]{{1,0}}, f32[4,6]{{1,0}}) tuple(%next, {start}, {carried}, %part)
}}
"""


@pytest.mark.parametrize(
    ("start", "carried", "wanted"),
    [
        ("%start", "%x", [(0,)]),
        # The start moves, or all of the sum goes on to the next turn.
        ("%next", "%x", [()]),
        ("%start", "%sum", [()]),
    ],
)
def test_inside_of_a_loop(start, carried, wanted):
    """A part starts where the program said before the loop, if the loop keeps that."""
    text = program(
        [
            "%p = f32[8,6]{1,0} parameter(0)",
            "%v = f32[4,6]{1,0} parameter(1)",
            "%id = u32[] partition-id()",
            "%zero = s32[] constant(0)",
            TABLE.replace("\n", "\n  "),
            "%init = (s32[], s32[], f32[8,6]{1,0}, f32[4,6]{1,0}) tuple(%zero, %start, %p, %v)",
            "%w = (s32[], s32[], f32[8,6]{1,0}, f32[4,6]{1,0}) while(%init), "
            "condition=%condition, body=%body",
            "ROOT %r = f32[4,6]{1,0} get-tuple-element(%w), index=3",
        ],
        LOOP.format(sum=SUM, start=start, carried=carried),
    )
    assert sliced(text) == wanted


# What is said


def test_said_once_in_all_that_is_drawn():
    """JSON has the numbers of the operands, and text and page the same sentence."""
    both = (part(8, 8), part(4, 8))
    one = report(
        stand_in=True,
        backend="cpu",
        collectives=(
            collective(sliced=(0,)),
            collective(sliced=(1,), combined=2, parts=both, source=None),
            collective(),
        ),
    )
    sentence = "hardware would reduce-scatter {}: each device keeps its own part of the sum"
    said = [words.scattered(found) for found in one.collectives]
    assert said == [sentence.format("this"), sentence.format("1 of 2"), ""]
    assert [c["sliced"] for c in json.loads(json.dumps(one.to_json()))["collectives"]] == [
        [0], [1], []
    ]  # fmt: skip
    for drawn in (" ".join(str(one).split()), one.to_html()):
        assert all(text in drawn for text in said)
    assert (one.total.wire_bytes, one.collectives[0].kind) == (3 * 24 * 2**20, "all-reduce")


# Real programs


def loss(w, x):
    """Two layers, each with a product into a wider space and one back."""

    def layer(h, ws):
        return jnp.tanh(h @ ws["up"]) @ ws["down"], None

    return (jax.lax.scan(layer, x, w)[0] ** 2).mean()


@pytest.fixture(scope="module")
def reported():
    """What reports the gradient for weights that are split by a spec, on a mesh."""

    def compiled(spec, axes, **options):
        shapes = {"up": (2, 64, 256), "down": (2, 256, 64)}
        w = {name: jax.ShapeDtypeStruct(dims, jnp.float32) for name, dims in shapes.items()}
        x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        specs = {"up": spec, "down": P(spec[0], spec[2], spec[1])}
        f = spmd.pjit(
            jax.grad(loss), in_axis_resources=(specs, P("data")), out_axis_resources=specs
        )
        with spmd.make_mesh(axes):
            return spmd.report(f, w, x, **options)

    return compiled


def gradients(one):
    """Sums over the batch in the backward pass."""
    return [
        c for c in one.collectives
        if (c.kind, c.mesh_axes, c.direction) == ("all-reduce", ("data",), "backward")
    ]  # fmt: skip


@pytest.mark.few(0)
@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 4, "model": 2}, {"model": 2, "data": 4}])
def test_gradients_of_sharded_weights(reported, axes):
    """With weights split over the batch's axis each device keeps its part of every gradient."""
    split = gradients(reported(P(None, "data", None), axes))
    assert sum(c.combined for c in split) == 2
    assert [c.sliced for c in split] == [tuple(range(c.combined)) for c in split]
    # The whole operand of each is the whole weight of a layer, in floats.
    assert sum(c.payload_bytes for c in split) == 2 * 64 * 256 * 4
    whole = gradients(reported(P(None, None, None), axes))
    assert sum(c.combined for c in whole) == 2
    assert [c.sliced for c in whole] == [()] * len(whole)


@pytest.mark.slow
def test_the_time_says_that_it_counts_all(reported):
    """A time for a chip counts such a sum as the all-reduce that it is, and says so."""
    one = reported(P(None, "data", None), {"data": 4}, chip="v5e")
    (said,) = [text for text in one.time.unknown if "reduce-scatter" in text]
    assert said.startswith("an all-reduce that hardware would reduce-scatter: counted whole")
    other = reported(P(None, None, None), {"data": 4}, chip="v5e")
    assert not [text for text in other.time.unknown if "reduce-scatter" in text]


GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # Two gradients of weights over data in one.
        ("cpu-0.12-fsdp_scan", {"all-reduce.12": (0, 1)}),
        # A sequence is split over model after each product; the weights are whole over data.
        (
            "cpu-0.10-megatron_block",
            {"all-reduce.8": (0,), "all-reduce.21": (), "all-reduce.18": (0,)},
        ),
    ],
)
def test_golden_programs(name, wanted):
    """In programs that are kept as text, those are marked that were found by hand."""
    module = parse_module((GOLDENS / f"{name}.hlo.txt").read_text(encoding="utf-8"))
    found = ledger(module, visits(module), {"data": 4, "model": 2}, for_cpu=True)
    assert {one.name: one.sliced for one in found if one.kind == "all-reduce"} == wanted
