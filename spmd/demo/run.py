"""Runs the demo: train, measure, then draw."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
import time

import jax
from rich.console import Console

import spmd
from spmd.cli.options import CommandError
from spmd.demo import BATCH, Options, corpus, pages, records, render, train
from spmd.inspection import Pictures
from spmd.inspection.compile.visualize import picture_of

_PICTURED = "block.up"


def run(options: Options, console: Console) -> records.DemoReport:
    """Train the demo's model, print what the partitioner did, and give it as records.

    JAX with fewer devices than asked for, or a file that cannot be written, is a `CommandError`.
    """
    text = corpus.load()
    config = train.config_of(text)
    versions = f"[bold]spmd {spmd.__version__} on JAX {jax.__version__}[/]"
    mesh = ", ".join(f"{name}={size}" for name, size in options.mesh.items())
    console.print(f"{versions}: mesh {mesh} of {_devices(options)}")
    console.print(
        f"{config.layers} layers, {train.model.count_parameters(config):,} parameters; "
        f"{len(text.numbers):,} characters of text, {config.vocab} kinds"
    )
    # Of two runs that are compared each product is one of f32, which GPUs and TPUs round otherwise.
    exact = jax.default_matmul_precision("highest") if options.verify else contextlib.nullcontext()
    with exact:
        report = _train(options, text, console)
    render.print_report(console, report)
    if options.json:
        _write(options.json, "--json", json.dumps(report.to_json(), indent=1) + "\n")
        console.print(f"\nreport written to {options.json}", highlight=False)
    if options.html:
        console.print()
        shown = {"the slip": report.slip, "the difference": report.repair, "the step": report.step}
        for what, path in pages(options.html).items():
            if (record := shown[what]) is not None:
                _write(path, "--html", record.to_html())
                # Without a break in the path, so that a terminal makes a link of it.
                console.print(f"page of {what}: {path.absolute()}", soft_wrap=True)
    return report


def _devices(options: Options) -> str:
    if not options.real:
        return f"{options.devices} virtual CPU devices"
    return f"{options.devices} {jax.devices()[0].device_kind}"


def _mesh(options: Options) -> spmd.Mesh:
    available = len(jax.devices())
    if available < options.devices:
        raise CommandError(
            f"JAX has already started with {available} devices, and {options.devices} are needed: "
            f"start the demo in a process of its own."
        )
    return spmd.make_mesh(options.mesh)


def _train(options: Options, text: corpus.Corpus, console: Console) -> records.DemoReport:
    start = time.perf_counter()
    with _mesh(options):
        trainer = train.Trainer(text, options.steps, options.seed)
        with console.status("compiling the training step"):
            compiled = trainer.step.lower(trainer.state, trainer.sample_batch()).compile()
        compiled_at = time.perf_counter()
        tokens = BATCH * trainer.config.seq_len
        follow = functools.partial(
            render.follow, steps=options.steps, tokens_per_step=tokens, console=console
        )
        losses = tuple(follow(trainer.losses(), what="training"))
        trained_at = time.perf_counter()
        slip = verification = None
        if options.mesh["data"] > 1:
            with console.status("compiling the step with a slip"):
                slip = spmd.report(trainer.slip, trainer.state, trainer.sample_batch())
    if options.verify:
        with console.status("compiling the unsharded step"):
            losses_of_one = train.unsharded_losses(text, options.steps, options.seed)
        verification = records.compare(losses, tuple(follow(losses_of_one, what="unsharded")))
    params, _ = trainer.state
    return records.DemoReport(
        options=options,
        spmd_version=spmd.__version__,
        jax_version=jax.__version__,
        vocab=len(text.characters),
        tokens_per_step=tokens,
        compile_seconds=compiled_at - start,
        train_seconds=trained_at - compiled_at,
        losses=losses,
        # The dict of a pytree comes back sorted; show it in the order of the forward pass.
        parameters=tuple(records.parameter_of(n, params[n]) for n in train.model.param_specs()),
        picture=Pictures(pictures={_PICTURED: picture_of(params[_PICTURED], None)}),
        step=compiled.report(),
        slip=slip,
        verification=verification,
    )


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{option} {path} cannot be written: {error.strerror}.") from None
