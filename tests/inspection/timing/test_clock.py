"""The walk through a scheduled program, against sums by hand on small programs."""

import dataclasses

import pytest

from spmd.inspection.hlo.calls import visits
from spmd.inspection.hlo.text import parse_module
from spmd.inspection.timing.chips import CHIPS
from spmd.inspection.timing.clock import time_of
from spmd.inspection.timing.torus import torus_of

# A cycle takes a microsecond; memories are so fast that only cycles count, unless a test says so.
CHIP = dataclasses.replace(CHIPS["v5e"], flops=2e6, multipliers=1, hbm=1e15, vmem=1e18, link=1e9)

PRODUCT = """\
%product (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %dot = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
# Four chips in a line; each permute sends a megabyte over a link of 1 GB/s: a millisecond.
SENT = "f32[250000]{0}"
PAIRS = "source_target_pairs={{0,1},{1,2},{2,3}}"


def fused(name, cycles, operands="%p, %p"):
    """A product of so many cycles."""
    return (
        f"  {name} = f32[8,8]{{1,0}} fusion({operands}), kind=kOutput, calls=%product, "
        f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}\n'
    )


def started(name, operand="%x"):
    """The start of a permute."""
    return (
        f"  {name} = ({SENT}, {SENT}, u32[], u32[]) collective-permute-start({operand}), "
        f"channel_id=1, {PAIRS}\n"
    )


def ended(name, start):
    """What waits for it."""
    return f"  {name} = {SENT} collective-permute-done({start})\n"


def timed(body, computations="", chip=CHIP):
    """The time of a program of two arguments, a matrix %p and a megabyte %x."""
    text = (
        "HloModule m, is_scheduled=true, num_partitions=4\n\n"
        f"{PRODUCT}\n{computations}\n"
        f"ENTRY %main (p: f32[8,8], x: f32[250000]) -> f32[8,8] {{\n"
        "  %p = f32[8,8]{1,0} parameter(0)\n"
        f"  %x = {SENT} parameter(1)\n{body}"
        "  ROOT %end = f32[8,8]{1,0} bitcast(%p)\n}\n"
    )
    module = parse_module(text)
    assert not module.unread
    places = tuple((i,) for i in range(4))
    torus = torus_of((4,), (False,), chip.link, 0.0, 0.0, places)
    return time_of(module, visits(module), {"data": 4}, chip, torus)


def test_a_core_runs_one_instruction_after_the_other():
    """Cycles add up, and the products' FLOPs are counted."""
    found = timed(fused("%a", 300) + fused("%b", 700))
    assert found.seconds == found.compute == pytest.approx(1e-3)
    assert found.hardware_flops == 2 * 2 * 8**3
    assert found.hfu == pytest.approx(2 * 2 * 8**3 / (2e6 * 1e-3))
    assert (found.bound, found.source, found.unknown) == ("compute", "compiler", ())


@pytest.mark.parametrize(("cycles", "waited"), [(200, 0.8), (1500, 0.0)])
def test_work_hides_an_exchange(cycles, waited):
    """A permute of 1 ms beside work of 0.2 ms is waited for; beside 1.5 ms it is not."""
    found = timed(started("%s") + fused("%a", cycles) + ended("%d", "%s"))
    assert found.seconds == pytest.approx(max(cycles / 1e6, 1e-3))
    assert found.exchange == pytest.approx(1e-3)
    assert sum(one.seconds for one in found.exposed) == pytest.approx(waited / 1e3)
    assert all(one.mesh_axes == ("data",) for one in found.exposed)


def test_exchanges_on_the_same_links_take_turns():
    """Two permutes in one direction take 2 ms, all of which is waited for."""
    both = started("%s") + started("%t") + ended("%d", "%s") + ended("%e", "%t")
    found = timed(both)
    assert found.seconds == pytest.approx(2e-3)
    assert found.bound == "exchange"
    back = (
        both.replace("%t = ", "%t = ", 1)
        .replace(PAIRS, "@", 1)
        .replace(PAIRS, "source_target_pairs={{1,0},{2,1},{3,2}}", 1)
    )
    assert timed(back.replace("@", PAIRS)).seconds == pytest.approx(1e-3)


def test_a_collective_without_a_start_stops_the_core():
    """An all-reduce of a megabyte over a line of 4: a scatter and a gather of 3/4 of it."""
    add = (
        "%add (l: f32[], r: f32[]) -> f32[] {\n  %l = f32[] parameter(0)\n"
        "  %r = f32[] parameter(1)\n  ROOT %s = f32[] add(%l, %r)\n}\n"
    )
    body = (
        f"  %all = {SENT} all-reduce(%x), channel_id=1, replica_groups=[1,4]<=[4], "
        "use_global_device_ids=true, to_apply=%add\n"
    )
    found = timed(fused("%a", 500) + body, add)
    assert found.seconds == pytest.approx(2e-3)
    assert [one.seconds for one in found.exposed] == [pytest.approx(1.5e-3)]


def loop(body, trips):
    """A loop, as TPU prints it: the trip count is a constant of its condition."""
    state = f"(s32[], f32[8,8]{{1,0}}, {SENT})"
    return (
        f"%body (b: {state}) -> {state} {{\n  %b = {state} parameter(0)\n"
        "  %i = s32[] get-tuple-element(%b), index=0\n"
        "  %p = f32[8,8]{1,0} get-tuple-element(%b), index=1\n"
        f"  %x = {SENT} get-tuple-element(%b), index=2\n"
        f"  %one = s32[] constant(1)\n  %next = s32[] add(%i, %one)\n{body}"
        f"  ROOT %t = {state} tuple(%next, %p, %x)\n}}\n\n"
        f"%condition (c: {state}) -> pred[] {{\n  %c = {state} parameter(0)\n"
        "  %j = s32[] get-tuple-element(%c), index=0\n"
        f"  %n = s32[] constant({trips})\n"
        "  ROOT %less = pred[] compare(%j, %n), direction=LT\n}\n",
        f"  %zero = s32[] constant(0)\n  %init = {state} tuple(%zero, %p, %x)\n"
        f"  %w = {state} while(%init), condition=%condition, body=%body\n",
    )


@pytest.mark.parametrize("trips", [0, 1, 2, 3, 100])
def test_a_loop_takes_as_long_as_its_iterations(trips):
    """Each iteration computes 0.4 ms and waits 0.6 ms for its permute."""
    computations, body = loop(started("%s") + fused("%a", 400) + ended("%d", "%s"), trips)
    found = timed(body, computations)
    assert found.seconds == pytest.approx(trips * 1e-3)
    assert found.compute == pytest.approx(trips * 0.4e-3)
    assert found.exchange == pytest.approx(trips * 1e-3)
    assert sum(one.seconds for one in found.exposed) == pytest.approx(trips * 0.6e-3)


def test_what_began_before_a_loop_ends_in_it():
    """A permute of 1 ms beside a loop of 100 times 0.1 ms is not waited for."""
    computations, body = loop(fused("%a", 100), 100)
    found = timed(started("%s") + body + ended("%d", "%s"), computations)
    assert found.seconds == pytest.approx(10e-3)
    assert found.exposed == ()


def test_a_copy_between_memories_runs_beside_the_core():
    """A megabyte at 2 GB/s takes 0.5 ms, of which 0.2 ms are hidden."""
    slow = dataclasses.replace(CHIP, hbm=2e9)
    copy = f"  %s = ({SENT}, {SENT}, u32[]) copy-start(%x)\n"
    found = timed(copy + fused("%a", 200) + f"  %d = {SENT} copy-done(%s)\n", chip=slow)
    assert found.seconds == pytest.approx(0.5e-3)
    assert (found.compute, found.memory) == (pytest.approx(0.2e-3), pytest.approx(0.3e-3))


def test_work_without_products_takes_what_memory_takes_at_most():
    """Where the compiler's cycles say more than reading and writing needs, bytes decide."""
    slow = dataclasses.replace(CHIP, hbm=10e9 / 0.83, vmem=1e15)
    body = (
        f"  %n = {SENT} negate(%x), backend_config="
        '{"window_config":{"estimated_cycles":"CYCLES"}}\n'
    )
    # A megabyte is read and one written, at 10 GB/s.
    assert timed(body.replace("CYCLES", "5000"), chip=slow).memory == pytest.approx(0.2e-3)
    assert timed(body.replace("CYCLES", "100"), chip=slow).compute == pytest.approx(0.1e-3)


def test_a_kernel_without_figures_is_named():
    """Of a custom call, the author's figures count; without them a sentence says so."""
    call = '  %k = f32[8,8]{1,0} custom-call(%p), custom_call_target="tpu_custom_call"'
    found = timed(f"{call}\n{fused('%after', 1)}")
    assert found.unknown == (
        "the kernel k (tpu_custom_call) has no cost_estimate: counted as only what it moves",
    )
    config = ', backend_config={"cost_estimate":{"flops":1000,"bytes_accessed":8}}\n'
    found = timed(f"{call}{config}{fused('%after', 500)}")
    assert found.unknown == ()
    # Half of the peak, which is 2e6 a second; and 0.5 ms of cycles after it.
    assert found.seconds == pytest.approx(1.5e-3)
    assert found.hardware_flops == 1000 + 2 * 8**3


def test_the_longer_branch_counts():
    """Of two branches, one of which has 0.2 ms of work and the other 0.9."""
    branches = "".join(
        f"%{name} (q: f32[8,8]) -> f32[8,8] {{\n  %p = f32[8,8]{{1,0}} parameter(0)\n"
        f"{fused('%a', cycles)}  ROOT %r = f32[8,8]{{1,0}} bitcast(%a)\n}}\n\n"
        for name, cycles in (("short", 200), ("long", 900))
    )
    body = (
        "  %which = s32[] constant(0)\n"
        "  %c = f32[8,8]{1,0} conditional(%which, %p, %p), branch_computations={%long, %short}\n"
    )
    assert timed(body, branches).seconds == pytest.approx(0.9e-3)


def test_attention_is_known_by_its_name():
    """Splash attention of 4 by 4 blocks under a causal mask computes 10 of 16 of them."""
    call = (
        "  %blocks = s8[1,4,4]{2,1,0} constant({...})\n"
        "  %q = bf16[2,64,16]{2,1,0} constant({...})\n"
        "  %k = (bf16[2,64,16]{2,1,0}, f32[2,64]{1,0}) custom-call(%blocks, %q, %q, %q), "
        'custom_call_target="tpu_custom_call", '
        'metadata={op_name="jit(f)/splash_mha_fwd_residuals/pallas_call"}\n'
    )
    found = timed(f"{call}{fused('%after', 500)}")
    # Queries with keys and weights with values: two products of 2 x 64 x 64 x 16.
    flops = 2 * 2 * (2 * 64 * 64 * 16) * 10 // 16
    assert found.hardware_flops == flops + 2 * 8**3
    assert found.seconds == pytest.approx(flops / 1e6 + 0.5e-3)
    assert "attention with a causal mask" in found.unknown[0]


def test_a_program_without_cycles_is_predicted():
    """Without the compiler's cycles, products take the peak and the rest the main memory."""
    slow = dataclasses.replace(CHIP, hbm=1e10 / 0.83, flops=1e6)
    body = (
        f"  %n = {SENT} negate(%x)\n"
        "  %d = f32[8,8]{1,0} fusion(%p, %p), kind=kOutput, calls=%product\n"
    )
    found = timed(body, chip=slow)
    assert found.source == "predicted"
    # A megabyte read and one written at 10 GB/s; 1,024 FLOPs of a million in a second.
    assert found.memory == pytest.approx(0.2e-3)
    assert found.compute == pytest.approx(1.024e-3)
    assert found.unknown[0].startswith("products are taken at the peak")


def test_a_layer_is_one_iteration_of_the_longest_loop():
    """The lanes are those of a loop that takes half of the time; else of the whole program."""
    found = timed(fused("%a", 300) + started("%s") + fused("%b", 300) + ended("%d", "%s"))
    core = [one for one in found.layer if one.lane == "core"]
    assert [one.kind for one in core] == ["compute", "compute", "exposed"]
    assert core[-1].seconds == pytest.approx(0.7e-3)
    assert core[-1].mesh_axes == ("data",)
    sent = [one for one in found.layer if one.kind == "exchange"]
    assert {one.lane for one in sent} == {"x+"}
    assert [one.start for one in sent] == [pytest.approx(0.3e-3)]


@pytest.mark.parametrize(
    ("start", "seconds"),
    [
        # A copy of a megabyte, at 1 GB/s.
        (f"copy-start(%x)|({SENT}, {SENT}, u32[])", 1e-3),
        # A slice of a tenth of it.
        (f"slice-start(%x)|(({SENT}), f32[25000]{{0}}, s32[])", 1e-4),
        # An update of a tenth.
        (
            "dynamic-update-slice-start(%x, %u, %i)|"
            f"(({SENT}, f32[25000]{{0}}, s32[]), {SENT}, u32[])",
            1e-4,
        ),
        # The same to the host, at 0.1 GB/s.
        (
            "dynamic-update-slice-start(%x, %u, %i)|"
            "((f32[250000]{0:S(5)}, f32[25000]{0}, s32[]), f32[250000]{0:S(5)}, u32[])",
            1e-3,
        ),
    ],
)
def test_copies_beside_the_core_move_what_is_new(start, seconds):
    """What ends a copy waits as long as its bytes take: those of a slice, and not of the whole."""
    chip = dataclasses.replace(CHIP, hbm=1e9, host=1e8)
    call, kind = start.split("|")
    opcode = call.partition("-start")[0]
    body = (
        "  %u = f32[25000]{0} constant({...})\n  %i = s32[] constant(0)\n"
        f"  %s = {kind} {call}\n  %d = {SENT} {opcode}-done(%s)\n{fused('%after', 1)}"
    )
    assert timed(body, chip=chip).memory == pytest.approx(seconds)


SIDE = 2048


def product(with_work, side=SIDE):
    """A product of square matrices, by itself or with a tanh of it in the same fusion."""
    kind = f"f32[{side},{side}]{{1,0}}"
    end = "  ROOT %t = {k} tanh(%dot)\n" if with_work else "  ROOT %t = {k} bitcast(%dot)\n"
    return (
        f"%large (a: {kind}) -> {kind} {{\n  %a = {kind} parameter(0)\n"
        f"  %dot = {kind} dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n"
        + end.format(k=kind)
        + "}\n",
        f"  %m = {kind} constant({{...}})\n"
        f"  %f = {kind} fusion(%m), kind=kOutput, calls=%large, "
        'backend_config={"estimated_cycles":"70000"}\n',
    )


@pytest.mark.parametrize(
    ("with_work", "side", "figures", "seconds"),
    [
        # The compiler's cycles, at 1 MHz, hold for a product by itself.
        (False, SIDE, {}, 70e-3),
        # One with other work takes nine tenths of a peak of 2e12.
        (True, SIDE, {}, 2 * SIDE**3 / 0.9 / 2e12),
        # Or another share, which those by themselves do not have.
        (True, SIDE, {"product_share": 0.7}, 2 * SIDE**3 / 0.7 / 2e12),
        (False, SIDE, {"product_share": 0.7}, 70e-3),
        # A small one takes its cycles all the same.
        (True, 512, {}, 70e-3),
        # A clock that is not kept makes both longer.
        (False, SIDE, {"sustained": 0.8}, 70e-3 / 0.8),
        (True, SIDE, {"sustained": 0.8}, 2 * SIDE**3 / 0.9 / 2e12 / 0.8),
    ],
)
def test_cycles_of_products_hold_where_nothing_is_fused_into_them(
    with_work, side, figures, seconds
):
    """Other work in the fusion of a large product makes its cycles too many."""
    computations, body = product(with_work, side)
    chip = dataclasses.replace(CHIP, flops=2e12, multipliers=10**6, **figures)
    assert timed(body, computations, chip).compute == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("types", "share"),
    [(("s8", "s8"), 0.5), (("s8", "u8"), 0.5), (("s8", "bf16"), 1), (("f32", "f32"), 1)],
)
def test_products_of_element_types_that_are_twice_as_fast(types, share):
    """Both operands have to be of such a type. FLOPs are counted all the same, and HFU by time."""
    computations, body = product(with_work=True)
    kinds = [f"{name}[{SIDE},{SIDE}]{{1,0}}" for name in types]
    operands = "".join(f"  %x{i} = {one} convert(%a)\n" for i, one in enumerate(kinds))
    computations = computations.replace("  %dot", f"{operands}  %dot", 1)
    computations = computations.replace("dot(%a, %a)", "dot(%x0, %x1)")
    chip = dataclasses.replace(CHIP, flops=2e12, multipliers=10**6, doubled=("s8", "u8"))
    found = timed(body, computations, chip)
    assert found.compute == pytest.approx(share * 2 * SIDE**3 / 0.9 / 2e12)
    assert found.hardware_flops == 2 * SIDE**3
    assert found.hfu == pytest.approx(share * 2 * SIDE**3 / 2e12 / found.seconds)


@pytest.mark.parametrize(
    ("asked", "passes"),
    [
        ("operand_precision={highest,highest}", 6),
        ("operand_precision={highest,default}", 3),
        ("operand_precision={high,high}", 3),
        ("algorithm=dot_bf16_bf16_f32_x6", 6),
        ('metadata={op_name="operand_precision={highest,highest}"}', 1),
    ],
)
def test_products_of_a_precision_that_is_asked_for(asked, passes):
    """A TPU makes several of bf16 of one of float32; FLOPs are counted once."""
    computations, body = product(with_work=True)
    computations = computations.replace(
        "rhs_contracting_dims={0}", f"rhs_contracting_dims={{0}}, {asked}"
    )
    chip = dataclasses.replace(CHIP, flops=2e12, multipliers=10**6)
    found = timed(body, computations, chip)
    assert found.compute == pytest.approx(passes * 2 * SIDE**3 / 0.9 / 2e12)
    assert found.hardware_flops == 2 * SIDE**3


def test_memory_that_a_fusion_allocates_is_no_product():
    """A TPU's compiler allocates one in a fusion that writes a product's result into a stack."""
    computations, body = product(with_work=True)
    own = '{\n  %room = bf16[4,4]{1,0} custom-call(), custom_call_target="AllocateBuffer"\n'
    chip = dataclasses.replace(CHIP, flops=2e12, multipliers=10**6)
    found = timed(body, computations.replace("{\n", own, 1), chip)
    assert found.compute == pytest.approx(2 * SIDE**3 / 0.9 / 2e12)


def test_a_large_product_takes_what_its_bytes_take_where_that_is_longer():
    """Two matrices of 16 MiB at 0.83 of 1 GB/s, since FLOPs and bytes go on side by side."""
    computations, body = product(with_work=True)
    chip = dataclasses.replace(CHIP, flops=2e12, multipliers=10**6, hbm=1e9)
    found = timed(body, computations, chip)
    assert found.memory == pytest.approx(2 * 4 * SIDE**2 / 0.83e9)
    assert found.bound == "memory"


def test_flops_are_those_of_the_branch_that_is_taken():
    """Of two branches with products the longer one counts, in FLOPs as in time."""
    kind = "f32[8,8]{1,0}"

    def branch(name, count):
        return (
            f"%{name} (b: {kind}) -> {kind} {{\n  %b0 = {kind} parameter(0)\n"
            + "".join(fused(f"%b{i + 1}", 100, f"%b{i}, %b{i}") for i in range(count))
            + f"  ROOT %end = {kind} bitcast(%b{count})\n}}\n\n"
        )

    body = (
        f"  %which = pred[] constant(true)\n  %c = {kind} conditional(%which, %p, %p), "
        "true_computation=%short, false_computation=%long\n"
    )
    found = timed(body, branch("short", 1) + branch("long", 2))
    assert found.seconds == pytest.approx(200e-6)
    assert found.hardware_flops == 2 * 2 * 8**3
