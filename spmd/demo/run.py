"""Runs the demo: train, measure, then draw."""

from __future__ import annotations

import json
from pathlib import Path
import time

import jax
from rich.console import Console

import spmd
from spmd.cli.options import CommandError
from spmd.demo import BATCH, Options, corpus, pages, records, render, train
from spmd.inspection import Diff

_PICTURED = "block.up"


def run(options: Options, console: Console) -> records.DemoReport:
    """Train the demo's model, print what the partitioner did, and give it as records.

    Args:
        options: what to run.
        console: where to print.

    Returns:
        The report that was printed.

    Raises:
        CommandError: JAX has fewer devices than asked for, or a file cannot be written.
    """
    text = corpus.load()
    config = train.config_of(text)
    _print_start(options, text, config, console)
    report = _train(options, text, console)
    render.print_report(console, report)
    if options.json:
        _write_json(options, report)
        console.print(f"\nreport written to {options.json}", highlight=False)
    if options.html:
        console.print()
        shown = {"the slip": report.slip, "the difference": report.repair, "the step": report.step}
        for what, path in pages(options.html).items():
            if shown[what] is not None:
                _write_page(path, shown[what])
                # Without a break in the path, so that a terminal makes a link of it.
                console.print(f"page of {what}: {path.absolute()}", soft_wrap=True)
    return report


def _mesh(options: Options) -> spmd.Mesh:
    available = len(jax.devices())
    if available < options.devices:
        raise CommandError(
            f"JAX has already started with {available} devices, and {options.devices} are needed: "
            f"start the demo in a process of its own."
        )
    return spmd.make_mesh(options.mesh)


def _print_start(
    options: Options, text: corpus.Corpus, config: train.model.Config, console: Console
):
    render.print_header(
        console,
        versions=f"spmd {spmd.__version__} on JAX {jax.__version__}",
        mesh=options.mesh,
        devices=options.devices,
        model=(
            f"{config.layers} layers, {train.model.count_parameters(config):,} parameters; "
            f"{len(text.numbers):,} characters of text, {config.vocab} kinds"
        ),
    )


def _train(options: Options, text: corpus.Corpus, console: Console) -> records.DemoReport:
    start = time.perf_counter()
    mesh = _mesh(options)
    with mesh:
        trainer = train.Trainer(text, options.steps, options.seed)
        with console.status("compiling the training step"):
            compiled = trainer.step.lower(trainer.state, trainer.sample_batch()).compile()
        compiled_at = time.perf_counter()
        tokens = BATCH * trainer.config.seq_len
        losses = tuple(
            render.follow(
                trainer.losses(),
                what="training",
                steps=options.steps,
                tokens_per_step=tokens,
                console=console,
            )
        )
        trained_at = time.perf_counter()
        slip = _slip(trainer, console) if options.mesh["data"] > 1 else None
    return records.DemoReport(
        options=options,
        spmd_version=spmd.__version__,
        jax_version=jax.__version__,
        vocab=len(text.characters),
        tokens_per_step=tokens,
        compile_seconds=compiled_at - start,
        train_seconds=trained_at - compiled_at,
        losses=losses,
        parameters=tuple(
            records.parameter_of(name, array) for name, array in _params(trainer).items()
        ),
        picture=records.picture_of(_PICTURED, _params(trainer)[_PICTURED], mesh),
        step=compiled.report(),
        slip=slip,
        verification=_verify(options, text, losses, tokens, console) if options.verify else None,
    )


def _slip(trainer: train.Trainer, console: Console) -> spmd.Report:
    with console.status("compiling the step with a slip"):
        return spmd.report(trainer.slip, trainer.state, trainer.sample_batch())


def _params(trainer: train.Trainer) -> dict[str, jax.Array]:
    # The dict of a pytree comes back sorted; show it in the order of the forward pass.
    params, _ = trainer.state
    return {name: params[name] for name in train.model.param_specs()}


def _verify(
    options: Options,
    text: corpus.Corpus,
    losses: tuple[float, ...],
    tokens: int,
    console: Console,
) -> records.Verification:
    with console.status("compiling the unsharded step"):
        losses_of_one = train.unsharded_losses(text, options.steps, options.seed)
    reference = render.follow(
        losses_of_one,
        what="unsharded",
        steps=options.steps,
        tokens_per_step=tokens,
        console=console,
    )
    return records.compare(losses, tuple(reference))


def _write_page(path: Path, shown: spmd.Report | Diff) -> None:
    try:
        path.write_text(shown.to_html(), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--html {path} cannot be written: {error.strerror}.") from None


def _write_json(options: Options, report: records.DemoReport) -> None:
    assert options.json is not None
    try:
        options.json.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json {options.json} cannot be written: {error.strerror}.") from None
