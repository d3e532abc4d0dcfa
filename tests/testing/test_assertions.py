"""Budgets: every option's pass and fail, and the texts of failures to the letter."""
# ruff: noqa: E501 texts are compared as they are printed

import dataclasses
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
from made import collective, report
import numpy as np
import pytest

import spmd
from spmd import PartitionSpec as P, testing
from spmd.inspection import Source
from spmd.inspection.records.names import components, place, stacks
from spmd.testing import assert_collectives

MIB = 2**20

GATHER = collective(
    "all-gather",
    ("model",),
    wire_bytes=MIB // 2,
    executions=6,
    in_loop=True,
    direction="backward",
    source=Source(file="lib/attn.py", line=7, column=3, function="Block.attend"),
    frames=(
        Source(file="/site/jax/lax.py", line=1, column=0, function="dot"),
        Source(file="lib/attn.py", line=7, column=3, function="Block.attend"),
        Source(file="model.py", line=50, column=1, function="loss.<locals>.body"),
    ),
    op_name="jit(step)/transpose(jvp(layer_3))/attention/dot_general",
)
REDUCE = collective()
BOTH_AXES = collective("reduce-scatter", ("data", "model"), source=None, direction="other")
UNKNOWN = collective("collective-permute", ("model",), executions=None, in_loop=True)
ALL = report(REDUCE, GATHER)


def told(message, error, call, *args, **kwargs):
    """Checks the class and the whole text of what `call` raises."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert str(caught.value) == textwrap.dedent(message).strip("\n")
    return caught.value


def breaks(the_report, **limits):
    """The numbered lines of the failure that limits cause, without the rows; [] where they hold."""
    try:
        assert assert_collectives(the_report, **limits) is the_report
    except AssertionError as e:
        return [line.partition(". ")[2] for line in str(e).splitlines() if line[0].isdigit()]
    return []


# What must not occur


def test_none_passes_and_fails():
    """`none` is broken by the kind that it names, and by no other."""
    assert breaks(ALL, none=["all-to-all", "reduce-scatter"]) == []
    assert breaks(ALL, none=["all-to-all", "all-gather"]) == [
        "none, all-gather: allowed 0, found 1"
    ]


def test_none_takes_one_string():
    """A lone kind is one kind, not a list of letters."""
    assert breaks(ALL, none="all-gather") == ["none, all-gather: allowed 0, found 1"]


def test_none_on_an_axis():
    """A kind is forbidden over one axis and allowed over another; a star is every kind."""
    assert breaks(ALL, none=["all-gather@data"]) == []
    assert breaks(ALL, none=["all-gather@model"]) == [
        "none, all-gather over model: allowed 0, found 1"
    ]
    assert breaks(ALL, none=["*@data"]) == ["none, all collectives over data: allowed 0, found 1"]
    assert breaks(ALL, none="*") == ["none, all collectives: allowed 0, found 2"]
    assert breaks(report(), none="*") == []


def test_none_counts_what_may_not_run():
    """A collective in a branch, or in a loop that never runs, is in the program all the same."""
    assert breaks(report(collective(conditional=True)), none=["all-reduce"])
    assert breaks(report(collective(executions=0)), none=["all-reduce"])


def test_only():
    """Everything but what is listed is broken; an empty list allows nothing."""
    assert breaks(ALL, only=["all-gather", "all-reduce"]) == []
    assert breaks(ALL, only=["all-gather", "all-reduce@model"]) == [
        "only: allowed all-gather, all-reduce over model; found 1 of something else"
    ]
    assert breaks(ALL, only=()) == ["only: allowed nothing; found 2 of something else"]


def test_a_kind_that_does_not_exist():
    """A misspelled kind is a ValueError with the right one, before anything is compiled."""
    told(
        """
        assert_collectives knows no collective 'all-gathr' (did you mean 'all-gather'?).
          given     none has 'all-gathr'
          expected  one of all-reduce, all-gather, reduce-scatter, all-to-all, ragged-all-to-all, collective-permute, collective-broadcast, send, recv, or '*' for all of them
          fix       for all collectives over a mesh axis write '*@axis'
        """,
        spmd.OptionError,
        assert_collectives,
        "not even a function",
        none=["all-gathr"],
    )
    misspelled = {"all_reduce@data": 1}
    for limits in ({"only": [*misspelled]}, {"max_bytes": misspelled}, {"max_count": misspelled}):
        with pytest.raises(ValueError, match="did you mean 'all-reduce'"):
            assert_collectives(None, **limits)
    with pytest.raises(ValueError, match=r"within\['loop'\] none has 'all_gather'"):
        assert_collectives(None, within={"loop": {"none": ["all_gather"]}})


# Bytes


@pytest.mark.parametrize("most", [3 * MIB, "3MiB", "3145728", "0.003GiB", 1e9, "16GB"])
def test_max_bytes_holds(most):
    """Wire bytes of all executions at most the limit: half a MiB in each of six runs is 3 MiB."""
    assert breaks(ALL, max_bytes={"model": most}) == []


def test_max_bytes_is_on_the_wire_of_all_executions():
    """One byte less is broken; the text tells limit, sum and difference."""
    assert breaks(ALL, max_bytes={"model": 3 * MIB - 1}) == [
        "max_bytes, all collectives over model: allowed 3,145,727 bytes per device and call, "
        "found 3,145,728 (3.0 MiB), 1 too many"
    ]
    assert breaks(ALL, max_bytes={"model": "3MB"}) == [
        "max_bytes, all collectives over model: allowed 3,000,000 bytes (3MB) per device and call, "
        "found 3,145,728 (3.0 MiB), 145,728 too many"
    ]


def test_max_bytes_on_kinds_axes_both_and_everything():
    """The sum is over what the key names."""
    limits = {"all-gather": 0, "data": 0, "all-reduce@data": 0, "all-reduce@model": 0, "*": 0}
    found = [(t.split(":")[0], t.split("found ")[1]) for t in breaks(ALL, max_bytes=limits)]
    assert found == [
        ("max_bytes, all-gather", "3,145,728 (3.0 MiB), 3,145,728 too many"),
        ("max_bytes, all collectives over data", "1,572,864 (1.5 MiB), 1,572,864 too many"),
        ("max_bytes, all-reduce over data", "1,572,864 (1.5 MiB), 1,572,864 too many"),
        ("max_bytes, all collectives", "4,718,592 (4.5 MiB), 4,718,592 too many"),
    ]
    assert breaks(ALL, max_bytes="4.5MiB") == []
    assert len(breaks(ALL, max_bytes="4.4MiB")) == 1


def test_two_axes_count_for_both():
    """A collective over two axes, or over a part of one, is within the limit of each of them."""
    two = report(BOTH_AXES)
    assert len(breaks(two, max_bytes={"data": 0, "model": 0})) == 2
    part = report(collective(axes=("data:(2)2",)))
    assert len(breaks(part, max_bytes={"data": 0}, none=["*@data"])) == 2
    assert breaks(part, max_bytes={"model": 0}) == []
    nowhere = report(collective(axes=()))
    assert breaks(nowhere, max_bytes={"data": 0, "model": 0}) == []
    assert len(breaks(nowhere, max_bytes=0)) == 1


def test_unknown_executions_break_a_limit():
    """Unknown is not one: a limit that could be broken is, unless it is on something else."""
    some = report(REDUCE, UNKNOWN, GATHER)
    assert breaks(some, max_bytes={"data": "2MiB"}) == []
    assert breaks(some, max_bytes={"model": "1TB"}) == [
        "max_bytes, all collectives over model: allowed 1,000,000,000,000 bytes (1TB) per device "
        "and call, found an unknown number: 1 of 2 in a loop without a known trip count; all others "
        "together 3,145,728 (3.0 MiB)"
    ]
    assert breaks(some, max_bytes={"model": "1MB"}) == [
        "max_bytes, all collectives over model: allowed 1,000,000 bytes (1MB) per device and call, "
        "found at least 3,145,728 (3.0 MiB), 2,145,728 too many"
    ]
    assert breaks(some, max_count={"all-reduce": 1, "collective-permute": 10**9}) == [
        "max_count, collective-permute: allowed 1,000,000,000 runs per call, found an unknown "
        "number: 1 of 1 in a loop without a known trip count; all others together 0"
    ]


def test_unknown_executions_of_nothing_are_nothing():
    """No bytes, however often, are no bytes."""
    silent = dataclasses.replace(UNKNOWN, wire_bytes=0)
    assert breaks(report(silent), max_bytes=0) == []
    assert len(breaks(report(silent), max_count=0)) == 1


@pytest.mark.parametrize("size", ["4 parsecs", -1, "", None, True, float("inf"), [4]])
def test_a_size_that_is_none(size):
    """What is no number of bytes is refused with what was written."""
    with pytest.raises(ValueError, match="assert_collectives cannot read max_bytes = "):
        assert_collectives(ALL, max_bytes={"model": size})


# Runs


def test_max_count_is_on_executions():
    """Six executions at one place are six."""
    assert breaks(ALL, max_count={"all-gather": 6, "*": 7}) == []
    assert breaks(ALL, max_count={"all-gather": 5}) == [
        "max_count, all-gather: allowed 5 runs per call, found 6, 1 too many"
    ]
    assert breaks(ALL, max_count={"data": 0}) == [
        "max_count, all collectives over data: allowed 0 runs per call, found 1, 1 too many"
    ]
    assert breaks(ALL, max_count=1) == [
        "max_count, all collectives: allowed 1 run per call, found 7, 6 too many"
    ]


@pytest.mark.parametrize("count", ["5", -1, 2.5, True, None])
def test_a_count_that_is_none(count):
    """A count is a whole number."""
    with pytest.raises(ValueError, match=r"cannot read max_count = .*\n.*a whole number of runs"):
        assert_collectives(ALL, max_count={"*": count})


# Axes


def test_an_axis_that_the_mesh_does_not_have():
    """All such axes are told at once, with those of the mesh and the nearest name."""
    told(
        """
        assert_collectives knows no mesh axis 'modle' (did you mean 'model'?).
          given     a limit on 'modle'
          expected  an axis of the program's mesh, 'data', 'model'; or a kind of collective
        assert_collectives knows no mesh axis 'x'.
          given     a limit on 'all-gather@x'
          expected  an axis of the program's mesh, 'data', 'model'; or a kind of collective
        """,
        spmd.OptionError,
        assert_collectives,
        ALL,
        max_bytes={"modle": 1},
        within={"loop": {"none": ["all-gather@x"]}},
    )


@pytest.mark.parametrize("option", ["none", "only", "max_bytes", "max_count"])
def test_every_option_knows_the_axes(option):
    """No option takes an axis that is not there for one over which nothing happens."""
    with pytest.raises(ValueError, match="knows no mesh axis 'x'"):
        assert_collectives(ALL, **{option: {"*@x": 1} if option[:3] == "max" else ["*@x"]})


def test_an_axis_without_a_mesh():
    """A program without a mesh has no axes, and a limit on everything still holds."""
    plain = report(mesh={})
    with pytest.raises(ValueError, match="none: the program has no mesh"):
        assert_collectives(plain, max_bytes={"data": 1})
    assert breaks(plain, max_bytes="1MB", none="*") == []


def test_a_misspelled_kind_as_a_limit_is_answered():
    """Where a key could be an axis, the nearest kind is offered as well."""
    with pytest.raises(
        ValueError, match=r"knows no mesh axis 'all_reduce' \(did you mean 'all-red"
    ):
        assert_collectives(ALL, max_count={"all_reduce": 1})


# Places


@pytest.mark.parametrize(
    "where",
    [
        "loop",
        "backward",
        "attn.py",
        "lib/attn.py",
        "attn.py:7",
        "attend",
        "Block.attend",
        "body",
        "layer_3",
        "attention",
        "layer_3/attention",
    ],
)
def test_within_selects(where):
    """Each spelling of a place selects the gather in it and not the reduction outside."""
    assert breaks(ALL, within={where: {"none": "*"}}) == [
        f"within {where!r}: none, all collectives: allowed 0, found 1"
    ]
    assert breaks(ALL, within={where: {"none": ["all-reduce"], "max_count": 6}}) == []


def test_within_takes_every_limit():
    """The four options hold inside of a place, each for that place alone."""
    limits = {"none": "all-gather", "only": (), "max_bytes": {"model": 0}, "max_count": 5}
    assert [
        t.split(":")[1].split(",")[0].strip() for t in breaks(ALL, within={"loop": limits})
    ] == [
        "none",
        "only",
        "max_bytes",
        "max_count",
    ]
    assert breaks(ALL, within={"forward": limits}) == [
        "within 'forward': only: allowed nothing; found 1 of something else"
    ]


def test_a_line_is_that_line_alone():
    """`file:line` does not select another line of the file, nor a longer file name."""
    for where in ("model.py:4", "model.py:50", "odel.py", "el.py:42"):
        with pytest.raises(ValueError, match="finds no collective within"):
            assert_collectives(ALL, within={where: {}})
    assert breaks(ALL, within={"model.py:42": {"max_count": 0}})


def test_files_hold_what_their_own_lines_cause():
    """A file that only calls, farther out, is not the place of what it calls; a function is."""
    assert breaks(ALL, within={"model.py": {"none": ["all-gather"]}}) == []
    assert breaks(ALL, within={"body": {"none": ["all-gather"]}})


@pytest.mark.parametrize("where", ["loop", "forward", "backward", "other"])
def test_places_that_are_always_there_may_be_empty(where):
    """A loop or a direction without collectives is no misspelling."""
    assert breaks(report(), within={where: {"none": "*"}}) == []


def test_a_place_without_collectives():
    """Any other place that selects nothing is refused, with the nearest and all that there are."""
    told(
        """
        assert_collectives finds no collective within 'atention' (did you mean 'attention'?).
          expected  a place where `step` has collectives: 'loop', 'forward', 'backward', 'other', 'attend', 'attention', 'attn.py', 'dot_general', 'layer_3', 'loss', 'mlp', 'model.py', 'step'
          fix       if it is meant to have none, write within={'atention': {..., 'empty_ok': True}}
        """,
        spmd.OptionError,
        assert_collectives,
        ALL,
        within={"atention": {"none": "*"}},
    )
    assert breaks(ALL, within={"norm": {"none": "*", "empty_ok": True}}) == []
    assert breaks(ALL, within={"attention": {"none": "*", "empty_ok": True}})


def test_within_refuses_what_it_does_not_know():
    """Another option, or something that is no dict of dicts, is refused."""
    with pytest.raises(
        ValueError, match=r"knows no option 'max_byte' of within\['loop'\] \(did you"
    ):
        assert_collectives(ALL, within={"loop": {"max_byte": 1}})
    for wrong in (["loop"], {"loop": "all-gather"}, {3: {}}):
        with pytest.raises(TypeError, match="cannot read within"):
            assert_collectives(ALL, within=wrong)


@pytest.mark.parametrize("wrong", [3, {"all-gather": 1}, [3], [("all-gather", "model")]])
def test_none_refuses_what_is_no_list_of_kinds(wrong):
    """Something else than a list of kinds is a TypeError."""
    with pytest.raises(TypeError, match=r"assert_collectives cannot read (.* in )?none"):
        assert_collectives(ALL, none=wrong)


# Texts


def test_all_violations_are_told_at_once():
    """The whole text: each limit with its collectives, heaviest first, then the ledger."""
    the_report = report(
        REDUCE,
        GATHER,
        UNKNOWN,
        collective(axes=(), wire_bytes=10, source=None, op_name="x", conditional=True),
        collective(executions=0, source_is_consumer=True, direction="other"),
    )
    told(
        """
        `step` breaks 3 limits on its collectives (mesh data=4, model=2; tpu (TPU v5 lite)).
        1. none, all-gather: allowed 0, found 1
             all-gather over model: payload 1.0 MiB, wire 512.0 KiB x 6 runs = 3.0 MiB, at lib/attn.py:7 (Block.attend) [backward, in a loop]
        2. max_bytes, all collectives over data: allowed 1,000,000 bytes (1MB) per device and call, found 1,572,864 (1.5 MiB), 572,864 too many
             all-reduce over data: payload 1.0 MiB, wire 1.5 MiB, 1 run, at model.py:42 (loss) [forward]
             all-reduce over data: payload 1.0 MiB, wire 1.5 MiB x 0 runs = 0 B, used at model.py:42 (loss)
        3. within 'loop': only: allowed all-gather; found 1 of something else
             collective-permute over model: payload 1.0 MiB, wire 1.5 MiB x unknown runs, at model.py:42 (loss) [forward, in a loop]
        All collectives of the program, most bytes first:
             collective-permute over model: payload 1.0 MiB, wire 1.5 MiB x unknown runs, at model.py:42 (loss) [forward, in a loop]
             all-gather over model: payload 1.0 MiB, wire 512.0 KiB x 6 runs = 3.0 MiB, at lib/attn.py:7 (Block.attend) [backward, in a loop]
             all-reduce over data: payload 1.0 MiB, wire 1.5 MiB, 1 run, at model.py:42 (loss) [forward]
             all-reduce over 4 devices: payload 1.0 MiB, wire 10 B, 1 run, at an unknown line (x) [forward, in a branch]
             all-reduce over data: payload 1.0 MiB, wire 1.5 MiB x 0 runs = 0 B, used at model.py:42 (loss)
        """,
        AssertionError,
        assert_collectives,
        dataclasses.replace(the_report, backend="tpu", device_kind="TPU v5 lite"),
        none=["all-gather"],
        max_bytes={"data": "1MB"},
        within={"loop": {"only": ["all-gather"]}},
    )


def test_one_violation_and_no_ledger_twice():
    """One limit is in the singular, and a ledger whose rows stand there already is not repeated."""
    told(
        """
        `step` breaks a limit on its collectives (no mesh; cpu).
        1. none, all collectives: allowed 0, found 1
             all-reduce over data: payload 1.0 MiB, wire 1.5 MiB, 1 run, at model.py:42 (loss) [forward]
        """,
        AssertionError,
        assert_collectives,
        report(REDUCE, mesh={}),
        none="*",
    )


def test_long_ledgers_are_cut():
    """Twenty rows are shown of each limit, and of a longer ledger none."""
    with pytest.raises(AssertionError) as caught:
        assert_collectives(report(*[REDUCE] * 25, GATHER), none=["all-reduce"])
    lines = str(caught.value).splitlines()
    assert lines[22:] == [
        "     ... and 5 more",
        "The program has 26 collectives; print(report) lists them.",
    ]


def test_files_below_the_current_folder_are_relative(tmp_path, monkeypatch):
    """A path is shown as a terminal in the current folder opens it; others stay whole."""
    monkeypatch.chdir(tmp_path)
    for file, shown in ((tmp_path / "a" / "m.py", "a/m.py"), ("/else/m.py", "/else/m.py")):
        here = collective(source=Source(file=str(file), line=3, column=0, function=""))
        with pytest.raises(AssertionError) as caught:
            assert_collectives(report(here), none="*")
        assert str(caught.value).splitlines()[2].endswith(f", at {shown}:3 [forward]")


def test_a_report_takes_no_arguments():
    """Arguments beside a ready report would be ignored, so they are refused."""
    told(
        """
        assert_collectives takes no arguments and no mesh with a Report.
          got       2 arguments, y=
          fix       give the Report alone, or the function instead of it
        """,
        spmd.ArgumentError,
        assert_collectives,
        ALL,
        1,
        2,
        y=3,
        max_count=9,
    )
    with pytest.raises(TypeError, match="got       mesh="):
        assert_collectives(ALL, mesh=object(), max_count=9)


# Name stacks


@pytest.mark.parametrize(
    ("op_name", "parts"),
    [
        ("jit(step)/jvp()/dot_general", ("step", "dot_general")),
        ("jit(step)/transpose(jvp(mlp))/vmap(jit(silu))/mul", ("step", "mlp", "silu", "mul")),
        ("pjit(f)/jvp(a/b)/c", ("f", "a", "b", "c")),
        ("params['a/b'][0]", ("params['a/b'][0]",)),
        ("my(scope)/add", ("my(scope)", "add")),
        ("", ()),
    ],
)
def test_components(op_name, parts):
    """Transformations are taken off, and only a slash between parts parts."""
    assert components(op_name) == parts


@pytest.mark.parametrize(
    ("op_name", "stays"),
    [
        (
            "jit(step)/jvp(layer_3)/while/body/closed_call/attention/dot_general",
            "layer_*/attention/dot_general",
        ),
        (
            "jit(step)/transpose(jvp(layer_11))/while/body/eval_jaxpr/attention/dot_general",
            "layer_*/attention/dot_general",
        ),
        ("pjit(step)/cond/branch_1_fun/conv2d_4/exp2", "conv2d_*/exp2"),
        ("jit(f)/checkpoint/rematted_computation/h.12/fc1/add.7", "h.*/fc*/add.*"),
        ("jit(fft)/jit(fft)", "fft"),
        ("params['layer_3']['w1'][0]", "params['layer_*']['w1'][*]"),
        ("x", "x"),
        ("jit(f)", "f"),
        ("", "-"),
    ],
)
def test_place(op_name, stays):
    """What is left is what the user named and the operation, without layers or structure."""
    assert place(op_name) == stays


@pytest.mark.parametrize(
    ("op_name", "names"),
    [
        ("jit(f)/a/add:jit(f)/b/add", ["jit(f)/a/add", "jit(f)/b/add"]),
        (
            "jit(f)/(jvp(a)/add:transpose(jvp(b))/mul)",
            ["jit(f)/jvp(a)/add", "jit(f)/transpose(jvp(b))/mul"],
        ),
        ("jit(f)/(a:b)/c/(d:e)", [f"jit(f)/{x}/c/{y}" for x in "ab" for y in "de"]),
        ("jit(f)/(a:(b:c)/d)", ["jit(f)/a", "jit(f)/b/d", "jit(f)/c/d"]),
        ("p['a:b']", ["p['a:b']"]),
        ("jit(f)/(a)/b", ["jit(f)/(a)/b"]),
        ("", [""]),
    ],
)
def test_stacks_of_combined_collectives(op_name, names):
    """Names that the compiler joined are taken apart, in order; a colon inside a name is kept."""
    assert stacks(collective(op_name=op_name, combined=2)) == names


def test_stacks_of_one_collective():
    """A single exchange has the name that it has."""
    assert stacks(collective(op_name="jit(f)/a:b/add")) == ["jit(f)/a:b/add"]


def test_the_direction_of_one_exchange_is_the_ledgers():
    """Names are asked only where several exchanges are in one: the ledger may know better."""
    one = collective(op_name="jit(f)/transpose(jvp(a))/add", direction="other")
    assert breaks(report(one), within={"backward": {"none": "*"}}) == []
    assert breaks(report(one), within={"other": {"none": "*"}})


def test_within_finds_what_was_combined():
    """A collective is in the place of each exchange that was combined into it."""
    both = report(collective(op_name="jit(f)/(a/add:b/add)", combined=2))
    assert len(breaks(both, within={"b": {"none": "*"}, "a/add": {"max_count": 0}, "f": {}})) == 2
    names = "jit(f)/(jvp(a)/add:transpose(jvp(b))/add)"
    both = report(collective(op_name=names, combined=2, direction="backward"))
    nothing = {"none": "*"}
    assert len(breaks(both, within={"forward": nothing, "backward": nothing})) == 2
    assert breaks(both, within={"other": nothing}) == []


# Programs


def loss(w, x):
    """A layer split by columns, one split by rows, and a sum."""
    with jax.named_scope("mlp"):
        return jnp.sum(jnp.tanh(x @ w[0]) @ w[1])


def scanned(w, x):
    """Four layers whose weights are gathered one by one."""
    return jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, w)[0]


def struct(*shape):
    """An f32 argument without data."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


MEGATRON = (struct(64, 128), struct(128, 64)), struct(32, 64)


def test_a_pjit_function(in_mesh):
    """A Megatron MLP sums once over `model`: its budget holds at that many bytes, and no fewer."""
    specs = (P(None, "model"), P("model")), P("data")
    f = spmd.pjit(lambda w, x: jnp.tanh(x @ w[0]) @ w[1], specs, P("data"))
    # Hand count: f32[8,64] per device, all-reduced in a ring of 2: each sends 2 * (1/2) of it.
    sent = 8 * 64 * 4
    got = assert_collectives(
        f, *MEGATRON, only=["all-reduce@model"], max_bytes={"model": sent}, max_count=1
    )
    assert [one.kind for one in got.collectives] == ["all-reduce"]
    with pytest.raises(AssertionError, match=f"found {sent:,} .*, 1 too many"):
        assert_collectives(f, *MEGATRON, max_bytes={"model": sent - 1})


def test_stages_and_jit(mesh):
    """Lowered and compiled programs, of `jax.jit` too, are held to the same budget."""
    shard = [spmd.NamedSharding(mesh, P(None, "model")), spmd.NamedSharding(mesh, P("model"))]
    f = jax.jit(jax.grad(loss), in_shardings=(tuple(shard), spmd.NamedSharding(mesh, P("data"))))
    lowered = f.lower(*MEGATRON)
    for stage, args in ((lowered, ()), (lowered.compile(), ()), (f, MEGATRON)):
        with pytest.raises(AssertionError, match="none, all-reduce over data: allowed 0, found"):
            assert_collectives(stage, *args, none=["all-reduce@data"])
        assert_collectives(stage, *args, none=["all-to-all"], within={"mlp": {"max_bytes": "1MB"}})


def test_the_mesh_is_handed_on(mesh):
    """`mesh=` is the mesh to compile for; keyword arguments reach the function."""
    f = spmd.pjit(lambda x, *, y: x * y, P("data"), P())
    with pytest.raises(AssertionError, match="none, all collectives over data: allowed 0, found 1"):
        assert_collectives(f, struct(32, 64), y=struct(32, 64), mesh=mesh, none=["*@data"])


ONE_DEVICE = """
    assert_collectives finds that `<lambda>` uses one device, where no limit can be broken.
      given     mesh data=4, model=2, which is active here
      expected  a program for its 8 devices
      got       a program in which no argument and no constraint has a sharding on the mesh
      fix       spmd.pjit(f, specs), jax.jit(f, in_shardings=...) or arguments with shardings; """
ONE_DEVICE += "leave the mesh if one device is meant\n"


def test_a_program_on_one_device_of_an_active_mesh(mesh):
    """Under a mesh, `jax.jit` of bare shapes uses one device: it breaks no limit, so it fails."""
    f, x = jax.jit(lambda x: jnp.sum(x @ x.T)), struct(32, 64)
    alone = assert_collectives(f, x, none=["*"])  # one device is meant
    assert alone.num_devices == 1
    with mesh:
        for given, args in ((f, (x,)), (f.lower(x), ()), (alone, ())):
            told(ONE_DEVICE, AssertionError, assert_collectives, given, *args, none=["*"])
        with pytest.raises(AssertionError, match=r"^assert_golden finds that `<lambda>` uses one"):
            testing.assert_golden(f, "never_written", x, update=True)
        sharded = jax.ShapeDtypeStruct(
            (32, 64), jnp.float32, sharding=spmd.NamedSharding(mesh, P("data"))
        )
        with pytest.raises(AssertionError, match="allowed 0, found"):
            assert_collectives(f, sharded, none=["*"])
    with spmd.make_mesh({"data": 1}):
        assert_collectives(f, x, none=["*"])
    with pytest.raises(spmd.MeshError, match="report cannot match the program with this mesh"):
        assert_collectives(f, x, none=["*"], mesh=mesh)


def test_a_loop_of_a_real_program(in_mesh):
    """Weights that a scan gathers are found in the loop, in the scanned function, four times."""
    f = spmd.pjit(scanned, (P(None, "data"), P("data")), P("data"))
    args = struct(4, 64, 64), struct(32, 64)
    got = assert_collectives(f, *args, within={"scanned": {"only": ["all-gather"]}})
    assert sum(one.executions for one in got.collectives if one.kind == "all-gather") == 4
    with pytest.raises(AssertionError) as caught:
        assert_collectives(f, *args, within={"loop": {"none": ["all-gather"]}})
    assert "within 'loop': none, all-gather: allowed 0, found 1" in str(caught.value)
    assert "x 4 runs = " in str(caught.value)
    assert "test_assertions.py:" in str(caught.value)


def test_an_unknown_trip_count_of_a_real_program(in_mesh):
    """A `while_loop` on data runs an unknown number of times, which a limit on it does not pass."""
    f = spmd.pjit(
        lambda x: jax.lax.while_loop(lambda v: jnp.sum(v) < 1e9, lambda v: v * 2, x),
        P("data"),
        P("data"),
    )
    assert_collectives(f, struct(32, 64), none=["all-gather"], max_bytes={"model": 0})
    with pytest.raises(AssertionError, match="found an unknown number: 1 of 1 in a loop without"):
        assert_collectives(f, struct(32, 64), max_bytes={"data": "1TB"})


# The package


def test_names():
    """The public names are there, listed, and another one is an error that names the module."""
    assert {"assert_collectives", "assert_sharding", "assert_golden"} <= set(dir(testing))
    assert testing.assert_collectives is assert_collectives
    with pytest.raises(AttributeError, match=r"module 'spmd\.testing' has no attribute 'assert_x'"):
        _ = testing.assert_x


@pytest.mark.slow
def test_works_without_pytest():
    """Budgets and goldens are used by other test runners: nothing but the plugin needs pytest."""
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "from spmd.testing import assert_collectives, assert_golden, assert_sharding\n"
        "import spmd.testing as t; assert set(t.__all__) <= set(dir(t))\n"
        "[getattr(t, name) for name in t.__all__]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_budgets_on_stored_reports_load_no_jax():
    """A budget on a report that was stored needs no JAX and no rich."""
    code = (
        "import sys; from spmd.testing import assert_collectives, assert_golden\n"
        "assert not {'jax', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arrays_are_taken(in_mesh):
    """Arguments may be arrays, and nothing is run with them."""
    ran = []

    def f(x):
        jax.debug.callback(lambda: ran.append(1))
        return x * 2

    g = spmd.pjit(f, P("data"), P("data"))
    assert_collectives(g, np.ones((8, 8), np.float32), none="*")
    jax.effects_barrier()
    assert not ran


def test_no_limit_is_no_assertion():
    """Without a limit nothing would be asserted, which is refused; an empty `only` is a limit."""
    with pytest.raises(spmd.OptionError, match="is given no limit, so it would assert nothing"):
        assert_collectives(report(REDUCE))
    assert_collectives(report(REDUCE), within={"loss": {}})  # asserts that there is such a place
    with pytest.raises(AssertionError):
        assert_collectives(report(REDUCE), only=())


def test_within_one_device_nothing_is_exchanged():
    """An exchange over an axis of size 1, which CPU keeps and TPU drops, breaks no limit."""
    alone = report(dataclasses.replace(REDUCE, group_size=1, wire_bytes=0))
    assert_collectives(alone, none=["*"], only=(), max_count=0)
    assert testing.golden_text(alone) == testing.golden_text(report())


def test_axes_with_a_colon_in_their_name():
    """Only the suffix of a part is taken off a name."""
    one = collective(axes=("a:b", "c:(2)2", "d:part"))
    assert one.axis_names == ("a:b", "c", "d")
    with pytest.raises(AssertionError):
        assert_collectives(report(one, mesh={"a:b": 8}), none=["all-reduce@a:b"])
