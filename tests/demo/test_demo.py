"""The main job: its text, its model, its training, and what it reports."""

import argparse
import functools
import io
import json
import math
import os
from pathlib import Path
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import spmd
from spmd import Report
from spmd.cli import options
from spmd.cli.demo import add_command, options_from
from spmd.cli.options import CommandError
from spmd.demo import Options, corpus, model, records, render, run, train
from spmd.inspection import Cost, Picture, Pictures, Shard

CONFIG = model.Config(vocab=62)
MESH = {"data": 4, "model": 2}


@pytest.fixture(name="text", scope="module")
def _text():
    return corpus.load()


# Text


def test_the_text_is_english_and_long_enough(text):
    """At least 300 KB of plain text ship with the package, and begin where Genesis does."""
    start = "".join(text.characters[i] for i in text.numbers[:54])
    assert start == "In the beginning God created the heaven and the earth."
    assert len(text.numbers) >= 300_000
    assert text.numbers.dtype == np.int32


def test_batches_are_pieces_of_the_text_and_follow_the_seed(text):
    """Each row is a piece of the text; a seed gives the same batches, another seed others."""
    first, again = text.batches(1, 4, 16), text.batches(1, 4, 16)
    batch = next(first)
    whole = text.numbers.tobytes()
    assert batch.shape == (4, 17)
    assert all(row.tobytes() in whole for row in batch)
    np.testing.assert_array_equal(batch, next(again))
    np.testing.assert_array_equal(next(first), next(again))
    assert not np.array_equal(batch, next(text.batches(2, 4, 16)))


# Model


@pytest.fixture(name="params", scope="module")
def _params():
    return model.init(jax.random.key(0), CONFIG)


@pytest.mark.slow
def test_the_model_is_as_large_as_promised(params):
    """Four layers and at least 0.8 million parameters, counted from the arrays."""
    assert CONFIG.layers == 4
    assert params["block.up"].shape[0] == 4
    assert sum(p.size for p in params.values()) == model.count_parameters(CONFIG) >= 800_000


def test_every_parameter_has_a_spec():
    """Specs and parameters have the same names, and no spec is longer than its array."""
    params = jax.eval_shape(lambda key: model.init(key, CONFIG), jax.random.key(0))
    specs = model.param_specs()
    assert specs.keys() == params.keys()
    assert all(len(specs[name]) <= params[name].ndim for name in specs)


def _plain(x):
    return x


@pytest.mark.slow
def test_no_character_sees_the_next(params):
    """Changing one character leaves the scores of every place before it as they were."""
    tokens = np.arange(32, dtype=np.int32)[None] % 62
    changed = tokens.copy()
    changed[0, 20] = 61
    a = model.logits(params, jnp.array(tokens), _plain)
    b = model.logits(params, jnp.array(changed), _plain)
    np.testing.assert_allclose(a[0, :20], b[0, :20], atol=1e-6)
    assert float(jnp.abs(a[0, 20:] - b[0, 20:]).max()) > 1e-3


@pytest.mark.slow
def test_the_first_loss_is_that_of_guessing(params):
    """An untrained model knows nothing: its loss is ln(vocabulary)."""
    tokens = np.random.default_rng(0).integers(0, 62, (8, 33), dtype=np.int32)
    loss = model.loss(params, jnp.array(tokens), _plain)
    assert float(loss) == pytest.approx(math.log(62), abs=0.05)


def _equations(jaxpr, name):
    return [equation for equation in jaxpr.eqns if equation.primitive.name == name]


@pytest.mark.slow
def test_blocks_are_scanned_and_constrained(params, mesh):
    """The forward pass is one scan of 4 iterations with a sharding constraint in its body."""
    with mesh:
        jaxpr = jax.make_jaxpr(model.loss)(params, jnp.zeros((8, 33), jnp.int32)).jaxpr
    (scan,) = _equations(jaxpr, "scan")
    assert scan.params["length"] == 4
    body = getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"])
    (constraint,) = _equations(body, "sharding_constraint")
    assert constraint.invars[0].aval.shape == (8, 32, 128)


# Training


@pytest.fixture(name="trained", scope="module")
def _trained(text):
    """A trainer after 4 steps, its losses, its first state, and its mesh."""
    mesh = spmd.make_mesh(MESH)
    with mesh, jax.numpy_dtype_promotion("standard"):
        trainer = train.Trainer(text, steps=4, seed=3)
        first = trainer.state
        losses = tuple(trainer.losses())
    return trainer, losses, first, mesh


@pytest.mark.slow
def test_sharded_and_unsharded_training_agree(trained, text):
    """The loss curve on the mesh is that of plain `jax.jit` on one device."""
    _, losses, _, _ = trained
    with jax.numpy_dtype_promotion("standard"):
        reference = tuple(train.unsharded_losses(text, steps=4, seed=3))
    assert len(losses) == 4
    np.testing.assert_allclose(losses, reference, atol=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_state_is_donated(trained):
    """A step takes over the memory of the state that it was given."""
    _, _, first, _ = trained
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))


@pytest.mark.slow
def test_state_lies_as_its_specs_say(trained):
    """Parameters and both Adam moments have the shard shapes that the specs give on 4 x 2."""
    trainer, _, _, _ = trained
    params, moments = trainer.state
    halves = {
        "block.qkv": (4, 128, 4, 3, 16),
        "block.out": (4, 4, 16, 128),
        "block.up": (4, 128, 256),
        "block.down": (4, 256, 128),
    }
    seen = dict.fromkeys(params, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path((params, moments)):
        name = next((k.key for k in path if isinstance(k, jax.tree_util.DictKey)), None)
        if name is not None:
            seen[name] += 1
            wanted = halves.get(name, leaf.shape)
            assert leaf.addressable_shards[0].data.shape == wanted, path
    assert set(seen.values()) == {3}


# Report


@pytest.fixture(name="report", scope="module")
def _report(tmp_path_factory):
    """The report of two steps, and what was printed."""
    out = io.StringIO()
    with jax.numpy_dtype_promotion("standard"):
        page = tmp_path_factory.mktemp("demo") / "a page.html"
        report = run.run(Options(mesh=MESH, steps=2, html=page), Console(file=out, width=80))
    return report, out.getvalue()


@pytest.mark.slow
def test_parameters_are_reported_as_they_lie(report):
    """Specs are the model's own, and bytes are four for each element, halved where split."""
    rows = {row.name: row for row in report[0].parameters}
    assert list(rows) == list(model.param_specs())
    assert {name: row.spec for name, row in rows.items()} == {
        name: records.show_spec(spec) for name, spec in model.param_specs().items()
    }
    assert (rows["block.up"].bytes_total, rows["block.up"].bytes_per_device) == (1 << 20, 1 << 19)
    assert (rows["embed"].bytes_total, rows["embed"].bytes_per_device) == (62 * 512, 62 * 512)


@pytest.mark.slow
def test_the_picture_says_which_device_holds_what(report):
    """Device 2i + j holds the columns of half j of block.up, whatever its row i."""
    ((name, picture),) = report[0].picture.pictures.items()
    found = report[0].to_json()["picture"]
    assert found["parameter"]["name"] == name == "block.up"
    for placement in found["placements"]:
        i, j = placement["coordinate"]
        assert placement["device"] == jax.devices()[2 * i + j].id
        assert placement["index"] == ((0, 4), (0, 128), (256 * j, 256 * (j + 1)))
    assert len(found["placements"]) == 8
    assert [shard.devices for shard in picture.shards] == [(0, 2, 4, 6), (1, 3, 5, 7)]


@pytest.mark.slow
def test_collectives_equal_a_hand_count(report):
    """Gradients are summed over data, and four activations a layer over model, as in Megatron.

    Over data go all gradients of a device and the loss. Over model goes, in each of 4 layers, one
    f32[8,32,128] after attention and one after the MLP, forward and backward; then the norm of
    the clipped gradients, whose four split parameters give four numbers.
    """
    totals = report[0].step.totals("kind", "axis")
    assert set(totals) == {("all-reduce", ("data",)), ("all-reduce", ("model",))}
    gradients = sum(row.bytes_per_device for row in report[0].parameters)
    assert totals["all-reduce", ("data",)].payload_bytes == gradients + 4
    assert totals["all-reduce", ("model",)].executions == 4 * 4 + 1
    assert totals["all-reduce", ("model",)].payload_bytes == 4 * 4 * 8 * 32 * 128 * 4 + 4 * 4


@pytest.mark.slow
def test_flops_equal_a_hand_count(report):
    """Three matrix products per weight, forward and backward, and those of the attention.

    A device has 8 sequences of 32 tokens and half of each block's weights; the head is whole.
    """
    tokens, layers, heads = 8 * 32, 4, 8 // 2
    weights = layers * (128 * 3 * heads * 16 + heads * 16 * 128 + 2 * 128 * 512 // 2) + 128 * 62
    scores = layers * 2 * (8 * heads * 32 * 32 * 16)
    # The gradient of the embedding is a scatter, without products.
    assert report[0].step.cost.flops == 3 * 2 * (tokens * weights + scores)


@pytest.mark.slow
def test_every_exchange_of_a_block_has_its_line(report):
    """What Megatron exchanges comes from the two lines that end in a product over the heads."""
    found = {one.source.function for one in report[0].step.collectives if one.in_loop}
    assert found == {"_attention", "_mlp"}


@pytest.mark.slow
def test_memory_is_that_of_the_state_and_the_temporaries(report):
    """Arguments are parameters, two moments, two counters and a batch; outputs reuse the state."""
    memory = report[0].step.memory
    state = 3 * sum(row.bytes_per_device for row in report[0].parameters) + 2 * 4
    assert memory.arguments == state + 8 * 33 * 4
    assert memory.aliased == state
    assert memory.peak == memory.arguments + memory.outputs - state + memory.temporaries


@pytest.mark.slow
def test_the_report_is_json(report):
    """The JSON form survives a round trip and says the losses and the totals."""
    data = json.loads(json.dumps(report[0].to_json()))
    assert data["schema"] == 2
    assert Report.from_json(data["step"]) == report[0].step
    assert data["losses"] == list(report[0].losses)
    assert data["final_loss"] == report[0].final_loss == sum(data["losses"]) / 2
    assert Report.from_json(data["slip"]) == report[0].slip
    assert data["options"]["mesh"] == MESH
    assert data["peak_bytes_per_device"] == report[0].step.memory.peak


@pytest.mark.slow
def test_the_slip_is_found(report):
    """With a batch that nothing splits each of 4 devices computes all of it: the finding says so.

    Then no gradient is exchanged over data, and activations over model are four times as large.
    """
    report, out = report
    (found,) = report.slip.findings
    assert (found.kind, found.subject) == (
        "unsharded-batch",
        "the 32 rows of tokens are on every device",
    )
    assert report.slip.cost.flops == 4 * report.step.cost.flops
    assert found.flops == 3 * report.step.cost.flops
    assert found.fix == "P('data') for tokens in in_axis_resources"
    assert set(report.slip.totals("axis")) == {("model",)}
    assert report.slip.total.payload_bytes == 4 * 4 * 32 * 32 * 128 * 4 + 4 * 4
    assert report.step.findings == ()
    shown = out.partition("\nA slip, found\n")[2]
    assert "    the 32 rows of tokens are on every device;\n" in shown
    assert "      fix  P('data') for tokens in in_axis_resources\n" in shown
    assert "    slip -> trained\n" in shown
    assert "FLOPs        2.6 GFLOP  641.3 MFLOP  -1.9 GFLOP (-75.0%)" in shown


@pytest.mark.slow
def test_the_fix_of_the_slip_repairs_it(trained, report):
    """With the spec that the fix says, and no constraint, the exchanges are those of the step."""
    trainer, _, _, mesh = trained
    with mesh, jax.numpy_dtype_promotion("standard"):
        given = trainer.state, trainer.sample_batch()
        specs = jax.tree.map(lambda x: x.sharding.spec, trainer.state)
        step = functools.partial(train.train_step, adam=train.optimizer(2), constrain=_plain)
        repaired = spmd.pjit(
            step,
            in_axis_resources=(specs, spmd.P("data")),
            out_axis_resources=(specs, spmd.P()),
            donate_argnums=(0,),
        )
        fixed = spmd.report(repaired, *given)
    assert fixed.findings == ()
    assert fixed.totals("kind", "axis") == report[0].step.totals("kind", "axis")
    assert fixed.cost.flops == report[0].step.cost.flops


@pytest.mark.slow
def test_the_page_of_the_step_is_written(report):
    """The pages are those of the reports, and the last lines say where they are, unbroken."""
    report, out = report
    page = report.options.html
    assert page.read_text(encoding="utf-8") == report.step.to_html()
    others = [page.with_name(f"a page-{what}.html") for what in ("slip", "difference")]
    assert [path.read_text(encoding="utf-8") for path in others] == [
        report.slip.to_html(),
        report.repair.to_html(),
    ]
    assert out.splitlines()[-3:] == [
        f"page of the slip: {others[0]}",
        f"page of the difference: {others[1]}",
        f"page of the step: {page}",
    ]
    assert "return jax.nn.gelu(x @ up) @ down" in page.read_text(encoding="utf-8")
    assert report.to_json()["options"]["html"] == str(page)


def test_a_page_that_nobody_asked_for_stops_nothing(tmp_path, monkeypatch):
    """Where the default page cannot be written there is none; one that is asked for is an error."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    monkeypatch.chdir(tmp_path)
    assert options_from(parser.parse_args(["demo"])).html == Path("spmd-demo.html")
    Path("spmd-demo-slip.html").mkdir()
    assert options_from(parser.parse_args(["demo"])).html is None
    Path("spmd-demo-slip.html").rmdir()
    Path("spmd-demo.html").mkdir()
    assert options_from(parser.parse_args(["demo"])).html is None
    with pytest.raises(CommandError, match=r"--html spmd-demo\.html cannot be written"):
        options_from(parser.parse_args(["demo", "--html", "spmd-demo.html"]))


def test_the_devices_of_the_machine(monkeypatch, capsys):
    """With `--real` the mesh is of what JAX finds, and nothing asks for virtual devices."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    real = options_from(parser.parse_args(["demo", "--real"]))
    assert (real.devices, real.mesh, real.real) == (8, {"data": 4, "model": 2}, True)
    assert run._devices(real) == "8 cpu"
    assert run._devices(options_from(parser.parse_args(["demo"]))) == "8 virtual CPU devices"
    with pytest.raises(CommandError) as caught:
        options_from(parser.parse_args(["demo", "--real", "--mesh", "data=16"]))
    assert str(caught.value) == (
        "--mesh data=16 needs 16 devices, but there are 8: make the mesh smaller."
    )
    with pytest.raises(SystemExit):
        parser.parse_args(["demo", "--real", "--devices", "4"])
    assert "argument --devices: not allowed with argument --real" in capsys.readouterr().err
    asked = []
    monkeypatch.setattr(options, "set_device_count", asked.append)
    monkeypatch.setattr(run, "run", lambda *_: SimpleNamespace(verification=None))
    for args in (["demo", "--real"], ["demo"]):
        given = parser.parse_args(args)
        assert given.command(given) == 0
    assert asked == [8]


@pytest.mark.slow
def test_output_in_a_pipe_is_plain(report):
    """What is not a terminal gets no control characters, no long lines and no trailing blanks."""
    lines = report[1].split("\n")
    assert all(line.isprintable() for line in lines)
    assert all(len(line) <= 80 or line.startswith("page of ") for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert any(line.startswith("training 2/2  loss ") for line in lines)


def _example() -> records.DemoReport:
    """A report with figures made up for drawing."""
    up = records.Parameter(
        name="up",
        dtype="float32",
        shape=(4, 8),
        spec="P(None, 'model')",
        bytes_total=128,
        bytes_per_device=64,
    )
    whole = records.Parameter(
        name="norm", dtype="float32", shape=(1024,), spec="P()", bytes_total=4096,
        bytes_per_device=4096,
    )  # fmt: skip
    return records.DemoReport(
        options=Options(mesh={"data": 2, "model": 2}, devices=4, steps=4),
        spmd_version="1",
        jax_version="2",
        vocab=62,
        tokens_per_step=100,
        compile_seconds=1.5,
        train_seconds=2.0,
        losses=(4.0, 3.0, 2.0, 1.0),
        parameters=(up, whole),
        picture=Pictures(
            pictures={
                "up": Picture(
                    shape=(4, 8),
                    dtype="f32",
                    itemsize=4,
                    sharding="P(None, 'model')",
                    mesh={"data": 2, "model": 2},
                    platform="cpu",
                    shards=(
                        Shard(index=((0, 4), (0, 4)), devices=(0, 2)),
                        Shard(index=((0, 4), (4, 8)), devices=(1, 3)),
                    ),
                )
            }
        ),
        step=Report(
            name="train_step",
            backend="cpu",
            device_kind="cpu",
            stand_in=True,
            mesh={"data": 2, "model": 2},
            num_devices=4,
            versions={"jax": "2"},
            collectives=(),
            cost=Cost(flops=10**6, hbm_bytes=10**6),
            memory=None,
        ),
        verification=records.Verification(largest_difference=2.5e-6, step=3),
    )


GOLDEN = """
Loss
  █▆▃▁
  4.000 at the first step, 2.500 over the last ones; chance is ln(62) = 4.127
  1.5 s to compile, 2.0 s for 4 steps, 200 tokens/s

Parameters
  name   shape   PartitionSpec        whole   per device
  ──────────────────────────────────────────────────────
  up     4,8     P(None, 'model')     128 B         64 B
  norm   1024    P()                4.0 KiB      4.0 KiB

  all    1,056                      4.1 KiB      4.1 KiB

One parameter on the mesh
  up
  f32[4,8] as P(None, 'model') on mesh data=2, model=2
  2 shards of f32[4,4] (64 B), each on 2 devices
  +-----+-----------+-----------+
  |     |    0:4    |    4:8    |
  +-----+-----------+-----------+
  | 0:4 |  cpu 0,2  |  cpu 1,3  |
  +-----+-----------+-----------+

One step, compiled
  train_step on cpu; mesh data=2, model=2 of 4 devices
  no time for CPU; give topology= or chip=
  CPU stand-in: another backend fuses and combines differently
  jax 2

  Collectives, by bytes on the wire
    no collectives: the devices exchange nothing while the program runs

  Communication and computation, per device and call
    FLOPs       1.0 MFLOP
    HBM bytes   976.6 KiB
    wire bytes        0 B

Verification
  trained unsharded on one device, the loss curve is the same:
  largest difference 2.5e-06 at step 3, allowed 1e-03
"""


def _draw(report, encoding="utf-8", **options) -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    render.print_report(Console(file=out, **options), report)
    out.flush()
    return out.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [80, 120])
def test_drawing_is_the_same_at_any_width(width):
    """The drawing equals the golden text, at 80 columns and at 120."""
    assert _draw(_example(), width=width, highlight=False) == GOLDEN


def test_drawing_without_unicode():
    """An ASCII terminal gets ASCII."""
    text = _draw(_example(), encoding="ascii", width=80)
    assert "|     |    0:4    |    4:8    |" in text
    assert "| 0:4 |  cpu 0,2  |  cpu 1,3  |" in text


def test_drawing_in_colour_has_the_same_text():
    """Colour adds styles, and lines in place of the signs that a log gets around a picture."""
    coloured = _draw(_example(), width=80, force_terminal=True, color_system="truecolor")
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert "\x1b[" in coloured
    lines = str.maketrans("┌┬┐├┼┤└┴┘─│", "+++++++++-|")
    assert stripped.translate(lines) == GOLDEN.translate(lines)
    assert "  └─────┴───────────┴───────────┘\n" in stripped


def test_curves_that_differ_are_said_to():
    """The largest difference and its step are found, and one above the tolerance fails."""
    found = records.compare((4.0, 3.0, 2.0), (4.0, 3.5, 2.25))
    assert (found.largest_difference, found.step, found.passed) == (0.5, 2, False)
    assert records.compare((1.0,), (1.0005,)).passed


# The whole


def _demo(*args: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-m", "spmd", "demo", *args],
        capture_output=True,
        text=True,
        env=env,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.soak
def test_the_demo_learns_and_agrees_with_the_unsharded_run(tmp_path):
    """`spmd demo --verify` goes from ln(vocabulary) below 2.2, equals the unsharded run to 1e-3."""
    files = ("--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"))
    done = _demo("--verify", *files)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["losses"][0] == pytest.approx(math.log(data["vocab"]), abs=0.1)
    assert data["final_loss"] < 2.2
    assert data["verification"]["largest_difference"] <= 1e-3
    assert "the loss curve is the same" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        pytest.param(("--mesh", "model=2,data=2"), marks=pytest.mark.soak),
        pytest.param(("--mesh", "data=8"), marks=pytest.mark.soak),
        pytest.param(("--mesh", "model=8"), marks=pytest.mark.soak),
        pytest.param(("--mesh", "data=2,model=8", "--devices", "16"), marks=pytest.mark.soak),
        pytest.param(("--devices", "1"), marks=pytest.mark.soak),
        pytest.param(("--devices", "4", "--seed", "7"), marks=pytest.mark.soak),
    ],
)
def test_the_demo_on_other_meshes(args, tmp_path):
    """Every mesh that is accepted trains as one device does; the slip costs where data is split."""
    done = _demo(*args, "--steps", "8", "--verify", "--html", str(tmp_path / "r.html"))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "the loss curve is the same" in done.stdout
    with_data = args[-1] != "model=8" and args != ("--devices", "1")
    assert ("fix  P('data') for tokens in in_axis_resources" in done.stdout) is with_data
    assert (tmp_path / "r-slip.html").exists() is with_data
