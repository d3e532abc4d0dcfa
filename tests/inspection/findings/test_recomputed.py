"""The finding on what a compiler makes again, for want of memory: `recomputed`."""

from hardware import needs_libtpu
import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd import P
from spmd.inspection import parse_module
from spmd.inspection.findings.recomputed import recomputations
from spmd.inspection.hlo.calls import visits

WIDE = "f32[1024,1024]{1,0}"
TEXT = f"""HloModule jit_f

%fused (p: f32[1024,1024], w: f32[1024,1024]) -> f32[1024,1024] {{
  %p = {WIDE} parameter(0)
  %w = {WIDE} parameter(1)
  ROOT %dot.1 = {WIDE} dot(%p, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {{
  %a = {WIDE} parameter(0)
  %fusion.1 = {WIDE} fusion(%a, %a), kind=kOutput, calls=%fused
  %later = {WIDE} add(%fusion.1, %a)
  %again = {WIDE} NAMED
  ROOT %end = {WIDE} multiply(%later, %again)
}}
"""
FUSED = "fusion(%a, %a), kind=kOutput, calls=%fused"
DOT = "dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
ONE = 2 * 1024**3


def found(name, what, text=TEXT):
    """The findings of a program whose last but one line has this name and does this."""
    module = parse_module(text.replace("%again", f"%{name}").replace("NAMED", what))
    return [*recomputations([(module, visits(module))])]


@pytest.mark.parametrize("name", ["fusion.1.remat", "fusion.1.remat2", "fusion.1.remat.3"])
@pytest.mark.parametrize(("what", "flops"), [(FUSED, ONE), (DOT, ONE), ("add(%a, %a)", 0)])
def test_what_is_made_again(name, what, flops):
    """By the name that XLA gives it; the FLOPs are those of a product, fused or by itself."""
    (one,) = found(name, what)
    assert (one.kind, one.flops, one.source) == ("recomputed", flops, None)
    assert one.subject.startswith("the compiler makes a value again")
    assert one.facts == ("4.0 MiB are made twice instead of kept",)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("fusion.2", FUSED),
        ("remat.2", FUSED),  # what JAX calls a checkpoint
        ("fusion.rematted", FUSED),
        ("fusion.1.remat", "bitcast(%a)"),
    ],
)
def test_what_is_not(name, what):
    """Other names, and what only says where a value is."""
    assert found(name, what) == []


def test_small_values_have_no_finding():
    """What takes no memory to speak of is not worth a line."""
    assert found("fusion.1.remat", FUSED, TEXT.replace("1024", "64")) == []


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("rows", "expected"),
    [pytest.param(2**16, [], marks=pytest.mark.soak), (2**18, ["recomputed"])],
)
def test_a_program_that_does_not_fit_otherwise(rows, expected):
    """Six hidden values of 4 GiB, on a chip of 15.75: some are made again; of 1 GiB none."""

    def loss(weights, x):
        for up, down in weights:
            x = jnp.tanh(x @ up) @ down
        return jnp.sum(x)

    def array(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    mesh = spmd.topology("v5e:2x2", {"data": 4})
    weights = [(array(1024, 8192), array(8192, 1024))] * 6
    step = spmd.pjit(jax.grad(loss), (P(), P("data")), P(), mesh=mesh)
    report = spmd.report(step.lower(weights, array(4 * rows, 1024)).compile())
    found = [one for one in report.findings if one.kind == "recomputed"]
    assert [one.kind for one in found] == expected
    for one in found:
        assert one.source.file == __file__
        assert one.flops > 0
        assert one.subject in str(report)
