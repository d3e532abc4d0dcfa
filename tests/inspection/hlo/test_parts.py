"""What was combined into one collective is divided among the lines that it comes from."""

import dataclasses
import inspect
from pathlib import Path

from hypothesis import HealthCheck, given, settings, strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np
import pytest
from reports import SMALL, collective, part, report, reports

import spmd
from spmd import inspection
from spmd.inspection.hlo.parts import divided
from spmd.inspection.records.names import module
from spmd.inspection.records.sums import KEYS, by_line, shares, spread
from spmd.inspection.show.page import view as page_view

AXES = {"data": 4, "model": 2}


# A program, counted by hand


def attention(w, x):
    """Two products."""
    h = jnp.tanh(x @ w["q"])  # here: q
    return x + h @ w["o"]  # here: o


def mlp(w, x):
    """Two products and a sum."""
    h = jnp.tanh(x @ w["up"] + w["bias"][None])  # here: up
    return x + h @ w["down"]  # here: down


def loss(w, x):
    """Two layers in scopes with numbers."""
    with jax.named_scope("layers_0"), jax.named_scope("attention"):
        x = attention(w, x)
    with jax.named_scope("layers_1"), jax.named_scope("mlp"):
        x = mlp(w, x)
    return jnp.sum(x * x)  # here: sum


#: Floats of each weight's gradient, by the line that makes it.
D, H = 8, 24
FLOATS = {"q": D * D, "o": D * D, "up": D * H + H, "down": H * D, "sum": 1}
WEIGHTS = {"q": (D, D), "o": (D, D), "up": (D, H), "bias": (H,), "down": (H, D)}


def _struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture(name="step", scope="module")
def _step():
    """The report of a data-parallel step: all gradients and the loss are summed over data."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), tuple(AXES))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    f = jax.jit(jax.value_and_grad(loss), in_shardings=(whole, rows), out_shardings=whole)
    weights = {name: _struct(*shape) for name, shape in WEIGHTS.items()}
    return spmd.report(f, weights, _struct(16, D))


def _marker(line):
    """What stands behind ``# here:`` on a line of this file."""
    file, number = line.rsplit(":", 1)
    assert Path(file).resolve() == Path(__file__).resolve()
    return Path(file).read_text().splitlines()[int(number) - 1].partition("# here: ")[2]


def test_each_line_has_the_bytes_of_its_own_gradients(step):
    """The gradients of five weights and a loss are charged to their five lines, by their shapes."""
    (one,) = step.collectives
    assert (one.combined, len(one.parts)) == (6, 6)
    found = {_marker(line): total for line, total in step.totals("line").items()}
    assert {name: total.payload_bytes for name, total in found.items()} == {
        name: 4 * floats for name, floats in FLOATS.items()
    }
    # In groups of 4 an all-reduce sends one and a half times of its payload.
    assert {name: total.wire_bytes for name, total in found.items()} == {
        name: 6 * floats for name, floats in FLOATS.items()
    }


def test_modules_are_the_scopes_without_their_numbers(step):
    """Sums by module are those of the scopes around the lines."""
    attention, mlp = FLOATS["q"] + FLOATS["o"], FLOATS["up"] + FLOATS["down"]
    assert {name: total.wire_bytes for name, total in step.totals("module").items()} == {
        "layers_*/attention": 6 * attention,
        "layers_*/mlp": 6 * mlp,
        "": 6,
    }


def test_halves_of_a_gradient_are_told_apart(step):
    """The sum of the loss is forward, the gradients are backward, in one collective."""
    sums = {name: total.wire_bytes for name, total in step.totals("direction").items()}
    assert sums == {"backward": 6 * (sum(FLOATS.values()) - 1), "forward": 6}


def test_it_stays_one_collective(step):
    """Sums over everything count one place that runs once, whatever else they are by."""
    (total,) = step.totals("kind").values()
    assert total == step.total
    assert (total.sites, total.executions) == (1, 1)
    assert all(total.sites == total.executions == 1 for total in step.totals("line").values())


def test_a_budget_on_a_line_counts_what_the_line_sends(step):
    """A limit within a function or a scope is held against the parts that are in it."""
    inside = {
        "attention": 6 * (FLOATS["q"] + FLOATS["o"]),
        "mlp": 6 * (FLOATS["up"] + FLOATS["down"]),
    }
    for name, sent in inside.items():
        spmd.testing.assert_collectives(step, within={name: {"max_bytes": sent}})
        with pytest.raises(AssertionError, match=f"found {sent:,} "):
            spmd.testing.assert_collectives(step, within={name: {"max_bytes": sent - 1}})
    line = inspect.getsourcelines(attention)[1] + 2
    within = {f"test_parts.py:{line}": {"max_bytes": 6 * FLOATS["q"] - 1}}
    with pytest.raises(AssertionError, match=rf"wire 384 B, 1 run, at \S+:{line} \(attention\)"):
        spmd.testing.assert_collectives(step, within=within)


def test_the_page_divides_it(step):
    """The source view, the modules and the details of the page have the bytes of the parts."""
    view = page_view.view(step)
    (file,) = [file for file in view["files"] if file["path"].endswith("test_parts.py")]
    texts = {line["text"].partition("# here: ")[2]: line for p in file["parts"] for line in p}
    assert {name: texts[name]["wire"] for name in FLOATS} == {
        name: inspection.show_bytes(6 * floats) for name, floats in FLOATS.items()
    }
    (row,) = view["rows"]
    assert row["name"] == "5 lines"
    assert {_marker(place) for place in row["places"].splitlines()} == set(FLOATS)
    assert [one["name"] for one in view["modules"]] == [
        "layers_*/mlp",
        "layers_*/attention",
        "no module",
    ]
    assert len(view["data"]["details"][0]["parts"]) == 5
    assert view["lost"] == ""


def test_text_lists_the_lines(step):
    """Below the row stand the lines that it is for, the most bytes first."""
    text = str(step)
    start = text.index("combined from 6")
    below = [line.split()[:4] for line in text[start:].splitlines()[1:6]]
    sizes = sorted(((6 * floats, name) for name, floats in FLOATS.items()), reverse=True)
    assert [" ".join(words[:2]) for words in below] == [
        inspection.show_bytes(size) for size, _ in sizes
    ]


def test_the_diff_has_modules(step):
    """Two reports differ by module in what a module sends more."""
    difference = spmd.diff(step, report(mesh=AXES, collectives=()))
    sums = {delta.module: (delta.a.wire_bytes, delta.b.wire_bytes) for delta in difference.modules}
    assert sums["layers_*/mlp"] == (6 * (FLOATS["up"] + FLOATS["down"]), 0)
    assert "layers_*/mlp" in str(difference)
    assert "layers_*/mlp" in difference.to_html()
    assert difference.to_json()["modules"][0]["module"] == "layers_*/mlp"


def test_a_dense_layer_of_flax_is_told_apart_by_its_module():
    """Two layers of one line of Flax have their own sums by module, numbers of layers folded."""
    flax = pytest.importorskip("flax.linen")

    class Mlp(flax.Module):
        @flax.compact
        def __call__(self, x):
            for name, size in (("wi", H), ("wo", D)):
                x = flax.Dense(size, use_bias=False, name=name)(x)
            return x

    class Model(flax.Module):
        @flax.compact
        def __call__(self, x):
            for i in range(2):
                x = Mlp(name=f"layers_{i}")(x)
            return x

    model = Model()
    weights = jax.eval_shape(model.init, jax.random.key(0), _struct(16, D))
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), tuple(AXES))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    gradient = jax.grad(lambda w, x: jnp.sum(model.apply(w, x)))
    f = jax.jit(gradient, in_shardings=(whole, rows), out_shardings=whole)
    found = spmd.report(f, weights, _struct(16, D))
    assert {name: total.wire_bytes for name, total in found.totals("module").items()} == {
        "Model/layers_*/wi": 2 * 6 * D * H,
        "Model/layers_*/wo": 2 * 6 * D * H,
    }
    assert len([line for line in found.totals("line") if line]) == 1


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(step)/transpose(jvp(T5))/encoder/layers_3/mlp/wo/dot_general",
         "T5/encoder/layers_*/mlp/wo"),
        ("pjit(step)/jvp(Model)/h.12/ln2/while/body/closed_call/fc1/add", "Model/h.*/ln2/fc1"),
        ("jit(f)/transpose(jvp(M))/rematted_computation/mlp/checkpoint(wo)/mul", "M/mlp/wo"),
        ("jit(f)/jvp(jit(_take))/gather", ""),
        ("jit(f)/layer/bsd,dhte->tbshe/dot_general", "layer"),
        ("jit(f)/layer/jit(silu)/mul", "layer"),
        ("jit(f)/shard_map/psum", ""),
        ("params['layers_0']['wo']", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_modules(op_name, expected):
    """A module is the scopes: no transformation, no called function, no operation, no number."""
    assert module(op_name) == expected


# Sums


@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**12), min_size=1, max_size=9))
def test_shares_add_up(total, weights):
    """Integer shares add up to the whole, none is negative, and each is its weight's to one."""
    found = divided(total, weights)
    assert sum(found) == total
    for share, weight in zip(found, weights, strict=True):
        assert share >= 0
        assert not sum(weights) or abs(share - total * weight / sum(weights)) <= 1 + total / 2**50


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a machine under load
@given(reports, st.sampled_from([*KEYS]))
def test_sums_by_anything_are_the_whole(one, key):
    """Whatever collectives are summed by, the bytes are those of all parts together."""
    sums = inspection.totals(one.collectives, key).values()
    for name in ("payload_bytes", "wire_bytes"):
        whole = sum(
            (c.executions or 0) * sum(getattr(p, name) for p in (c.parts or (c,)))
            for c in one.collectives
        )
        assert sum(getattr(total, name) for total in sums) == whole


def test_a_share_is_a_collective_of_its_parts():
    """A share has the shapes, bytes, place and name of the parts that are in it, and no others."""
    one = SMALL.collectives[1]
    lost, known = shares(one, KEYS["line"]).values()
    assert (known.wire_bytes, known.payload_bytes, known.combined) == (12 * 2**20, 8 * 2**20, 1)
    assert (str(known.source), known.op_name) == (str(one.parts[1].source), one.parts[1].op_name)
    assert known.shapes == one.parts[1].shapes
    assert known.frames == one.parts[1].frames
    assert (lost.source, lost.wire_bytes) == (None, 12 * 2**20)
    assert [share.source for share in by_line(collective())] == [
        collective().source.__class__(
            file=collective().source.file, line=42, column=3, function="block"
        )
    ]


def test_operations_of_one_line_are_one_share():
    """Two operations in one line differ in their columns only: that is one line."""
    left, right = part(8), part(8)
    right = dataclasses.replace(right, source=dataclasses.replace(right.source, column=30))
    one = collective(combined=3, parts=(left, right, part(8, line=50)))
    assert [share.wire_bytes for share in by_line(one)] == [24 * 2**20, 12 * 2**20]
    assert spread(one) == "2 lines"


@pytest.mark.parametrize("first", ["forward", "backward"])
def test_one_backward_part_makes_all_of_a_share_backward(first):
    """A line with parts of both passes is of the backward one, whichever stands first."""
    last = {"forward": "backward", "backward": "forward"}[first]
    one = collective(combined=2, parts=(part(8, direction=first), part(8, direction=last)))
    assert [share.direction for share in by_line(one)] == ["backward"]


# Texts by hand: what a part is found by

HEAD = """\
HloModule m, num_partitions=8

FileNames
1 "model.py"

FunctionNames
1 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=11 end_line=11 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
3 {file_name_id=1 function_name_id=1 line=13 end_line=13 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=1}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
GROUPS = "channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true"


def _parts(body):
    (one,) = inspection.collectives(HEAD + body, AXES)
    for name in ("payload_bytes", "wire_bytes"):
        assert sum(getattr(part, name) for part in one.parts) == getattr(one, name)
    return [
        (str(part.shapes.operands[0]), part.wire_bytes, part.source and part.source.line,
         part.source_is_consumer, part.op_name)
        for part in one.parts
    ]  # fmt: skip


SEVERAL_RESULTS = f"""
%both (p: f32[8]) -> (f32[8], f32[4]) {{
  %p = f32[8]{{0}} parameter(0)
  %eight = f32[8]{{0}} negate(%p), metadata={{op_name="jit(f)/a/neg" stack_frame_id=1}}
  %four = f32[4]{{0}} slice(%p), slice={{[0:4]}}, \
metadata={{op_name="jit(f)/b/slice" stack_frame_id=2}}
  ROOT %two = (f32[8]{{0}}, f32[4]{{0}}) tuple(%eight, %four)
}}

ENTRY %main (a: f32[8]) -> f32[4] {{
  %a = f32[8]{{0}} parameter(0), metadata={{op_name="a"}}
  %fused = (f32[8]{{0}}, f32[4]{{0}}) fusion(%a), kind=kLoop, calls=%both, \
metadata={{op_name="jit(f)/a/neg" stack_frame_id=1}}
  %one = f32[8]{{0}} get-tuple-element(%fused), index=0, \
metadata={{op_name="jit(f)/a/neg" stack_frame_id=1}}
  %two.1 = f32[4]{{0}} get-tuple-element(%fused), index=1, \
metadata={{op_name="jit(f)/a/neg" stack_frame_id=1}}
  %copied = f32[4]{{0}} copy(%two.1)
  %all = (f32[8]{{0}}, f32[4]{{0}}) all-reduce(%one, %copied), {GROUPS}, to_apply=%add, \
metadata={{op_name="jit(f)/a/neg" stack_frame_id=1}}
  ROOT %out = f32[4]{{0}} get-tuple-element(%all), index=1
}}
"""


def test_an_operation_of_several_results_is_looked_into():
    """What a fusion makes beside its named result has the line inside of the fusion."""
    assert _parts(SEVERAL_RESULTS) == [
        ("f32[8]", 48, 11, False, "jit(f)/a/neg"),
        ("f32[4]", 24, 12, False, "jit(f)/b/slice"),
    ]


OUT_OF_A_LOOP = f"""
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{{0}} get-tuple-element(%p), index=1
  %made = f32[8]{{0}} sine(%x), metadata={{op_name="jit(f)/while/body/sin" stack_frame_id=2}}
  ROOT %next = (s32[], f32[8]{{0}}) tuple(%i, %made)
}}

%test (p: (s32[], f32[8])) -> pred[] {{
  %p = (s32[], f32[8]{{0}}) parameter(0)
  ROOT %no = pred[] constant(false)
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0), metadata={{op_name="a"}}
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{{0}}) tuple(%zero, %a)
  %loop = (s32[], f32[8]{{0}}) while(%start), condition=%test, body=%body, \
metadata={{op_name="jit(f)/while" stack_frame_id=1}}
  %last = f32[8]{{0}} get-tuple-element(%loop), index=1
  %other = f32[8]{{0}} negate(%last), metadata={{op_name="jit(f)/neg" stack_frame_id=3}}
  %all = (f32[8]{{0}}, f32[8]{{0}}) all-reduce(%last, %other), {GROUPS}, to_apply=%add
  ROOT %out = f32[8]{{0}} get-tuple-element(%all), index=1
}}
"""


def test_what_a_loop_made_has_its_line_in_the_loop():
    """A part that comes out of a loop is followed into its body."""
    assert _parts(OUT_OF_A_LOOP) == [
        ("f32[8]", 48, 12, False, "jit(f)/while/body/sin"),
        ("f32[8]", 48, 13, False, "jit(f)/neg"),
    ]


ARGUMENTS = f"""
ENTRY %main (a: f32[8], b: f32[1], c: f32[1]) -> f32[4] {{
  %a = f32[8]{{0}} parameter(0), metadata={{op_name="w['a']"}}
  %b = f32[1]{{0}} parameter(1), metadata={{op_name="w['b']"}}
  %c = f32[1]{{0}} parameter(2), metadata={{op_name="w['c']"}}
  %started = ((f32[8]{{0}}, f32[1]{{0}}, f32[1]{{0}}), (f32[32]{{0}}, f32[4]{{0}}, f32[4]{{0}})) \
all-gather-start(%a, %b, %c), {GROUPS}, dimensions={{0}}
  %all = (f32[32]{{0}}, f32[4]{{0}}, f32[4]{{0}}) all-gather-done(%started)
  %one = f32[32]{{0}} get-tuple-element(%all), index=0
  %two = f32[4]{{0}} get-tuple-element(%all), index=1
  %three = f32[4]{{0}} get-tuple-element(%all), index=2
  %use = f32[32]{{0}} negate(%one), metadata={{op_name="jit(f)/jvp()/neg" stack_frame_id=2}}
  %used = f32[4]{{0}} cosine(%two), metadata={{op_name="jit(f)/jvp()/cos" stack_frame_id=3}}
  ROOT %out = (f32[32]{{0}}, f32[4]{{0}}, f32[4]{{0}}) tuple(%use, %used, %three)
}}
"""


def test_arguments_have_the_lines_that_use_them():
    """What nothing makes is named, and has the line of its consumer; what nothing uses, none."""
    assert _parts(ARGUMENTS) == [
        ("f32[8]", 96, 12, True, "w['a']"),
        ("f32[1]", 12, 13, True, "w['b']"),
        ("f32[1]", 12, None, False, "w['c']"),
    ]


PADDED_ARGUMENTS = f"""
ENTRY %main (a: f32[2], b: f32[2]) -> (f32[8], f32[8]) {{
  %a = f32[2]{{0}} parameter(0), metadata={{op_name="w['a']"}}
  %b = f32[2]{{0}} parameter(1), metadata={{op_name="w['b']"}}
  %zeros = f32[8]{{0}} constant({{0, 0, 0, 0, 0, 0, 0, 0}})
  %at = s32[] constant(0), metadata={{op_name="jit(f)/at" stack_frame_id=1}}
  %wide.a = f32[8]{{0}} dynamic-update-slice(%zeros, %a, %at)
  %wide.b = f32[8]{{0}} dynamic-update-slice(%zeros, %b, %at)
  %all = (f32[8]{{0}}, f32[8]{{0}}) all-reduce(%wide.a, %wide.b), {GROUPS}, to_apply=%add
  %one = f32[8]{{0}} get-tuple-element(%all), index=0
  %two = f32[8]{{0}} get-tuple-element(%all), index=1
  %use = f32[8]{{0}} negate(%one), metadata={{op_name="jit(f)/jvp()/neg" stack_frame_id=2}}
  %used = f32[8]{{0}} cosine(%two), metadata={{op_name="jit(f)/jvp()/cos" stack_frame_id=3}}
  ROOT %out = (f32[8]{{0}}, f32[8]{{0}}) tuple(%use, %used)
}}
"""


def test_gathers_written_as_sums_have_the_lines_that_use_them():
    """An argument that is padded and summed is an argument still, whatever says where it goes."""
    assert _parts(PADDED_ARGUMENTS) == [
        ("f32[8]", 48, 12, True, "w['a']"),
        ("f32[8]", 48, 13, True, "w['b']"),
    ]


CARRIED = f"""
%body (p: (f32[8], f32[4])) -> (f32[8], f32[4]) {{
  %p = (f32[8]{{0}}, f32[4]{{0}}) parameter(0)
  %x = f32[8]{{0}} get-tuple-element(%p), index=0
  %y = f32[4]{{0}} get-tuple-element(%p), index=1
  %all = (f32[8]{{0}}, f32[4]{{0}}) all-reduce(%x, %y), {GROUPS}, to_apply=%add
  %old = f32[8]{{0}} get-tuple-element(%all), index=0
  %new = f32[8]{{0}} sine(%old), metadata={{op_name="jit(f)/while/body/sin" stack_frame_id=2}}
  ROOT %next = (f32[8]{{0}}, f32[4]{{0}}) tuple(%new, %y)
}}

%test (p: (f32[8], f32[4])) -> pred[] {{
  %p = (f32[8]{{0}}, f32[4]{{0}}) parameter(0)
  ROOT %no = pred[] constant(false)
}}

ENTRY %main (a: f32[8], b: f32[4]) -> (f32[8], f32[4]) {{
  %a = f32[8]{{0}} parameter(0), metadata={{op_name="a"}}
  %b = f32[4]{{0}} parameter(1), metadata={{op_name="b"}}
  %before = f32[4]{{0}} negate(%b), metadata={{op_name="jit(f)/neg" stack_frame_id=3}}
  %start = (f32[8]{{0}}, f32[4]{{0}}) tuple(%a, %before)
  ROOT %loop = (f32[8]{{0}}, f32[4]{{0}}) while(%start), condition=%test, body=%body
}}
"""


def test_what_a_loop_carries_is_what_the_last_turn_made():
    """A part that a loop hands on is of the turn before, or of what goes into the loop."""
    assert _parts(CARRIED) == [
        ("f32[8]", 48, 12, False, "jit(f)/while/body/sin"),
        ("f32[4]", 24, 13, False, "jit(f)/neg"),
    ]


def test_what_has_no_line_is_said():
    """A part that nothing tells of is in sums, text and page, as what has no line."""
    (one,) = inspection.collectives(HEAD + ARGUMENTS, AXES)
    found = report(mesh=AXES, collectives=(one,))
    assert {str(line): total.wire_bytes for line, total in found.totals("line").items()} == {
        "model.py:12": 96, "model.py:13": 12, "None": 12,
    }  # fmt: skip
    text = str(found)
    assert "12 B  no line  f32[1] -> f32[4]" in text
    assert "no line         12 B" in text
    assert page_view.view(found)["lost"] == "12 B"
    assert "12 B have no line" in found.to_html()


WRITTEN = f"""
ENTRY %main (a: f32[8], b: f32[4]) -> f32[4] {{
  %a = f32[8]{{0}} parameter(0), metadata={{op_name="a"}}
  %b = f32[4]{{0}} parameter(1), metadata={{op_name="b"}}
  %all = (f32[8]{{0}}, f32[4]{{0}}) all-reduce(%a, %b), {GROUPS}, to_apply=%add, \
metadata={{op_name="jit(f)/shard_map/psum_invariant" stack_frame_id=1}}
  ROOT %out = f32[4]{{0}} get-tuple-element(%all), index=1
}}
"""


def test_a_psum_of_arguments_keeps_its_own_line():
    """Where nothing else tells, all parts of an exchange that was written have the kept line."""
    assert [(size, line) for _, size, line, *_ in _parts(WRITTEN)] == [(48, 11), (24, 11)]


def test_a_written_exchange_is_within_its_own_line():
    """A limit within the line of a psum holds, also where its parts come from other lines."""
    text = SEVERAL_RESULTS.replace(
        'to_apply=%add, metadata={op_name="jit(f)/a/neg" stack_frame_id=1}',
        'to_apply=%add, metadata={op_name="jit(f)/shard_map/psum" stack_frame_id=3}',
    )
    assert text != SEVERAL_RESULTS
    found = report(mesh=AXES, collectives=inspection.collectives(HEAD + text, AXES))
    within = {"model.py:13": {"max_bytes": 71}}
    with pytest.raises(AssertionError, match="found 72 "):
        spmd.testing.assert_collectives(found, within=within)
    spmd.testing.assert_collectives(found, within={"model.py:12": {"max_bytes": 24}})


def test_goldens_have_the_place_of_each_part():
    """Each array of a combined exchange is a row of its own place."""
    from spmd.testing._goldens import rows_of

    one = collective(
        combined=2,
        op_name="jit(step)/transpose(jvp(a))/mul",
        parts=(
            part(8, op_name="jit(step)/transpose(jvp(a))/mul"),
            part(4, op_name="jit(step)/jvp(b_3)/mul", direction="forward"),
        ),
        shapes=inspection.Shapes(*[tuple(part(n).shapes.operands[0] for n in (8, 4))] * 2),
    )
    rows = {(row.shapes, row.place, row.direction) for row in rows_of(report(collectives=(one,)))}
    assert rows == {
        ("f32[8] -> f32[8]", "a/mul", "backward"), ("f32[4] -> f32[4]", "b_*/mul", "forward"),
    }  # fmt: skip
