"""What a run of the demo found, before anyone draws it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from jax import Array

import spmd
from spmd import Report
from spmd._spec import show_spec
from spmd.demo import Options
from spmd.inspection import Diff, Pictures

TOLERANCE = 1e-3
_TAIL = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter as it lies on the mesh.

    Attributes:
        name: its name in the model.
        dtype: element type.
        shape: global shape.
        spec: its PartitionSpec as one writes it.
        bytes_total: size of the whole.
        bytes_per_device: size of what one device holds.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: str
    bytes_total: int
    bytes_per_device: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The loss curve against that of the same training unsharded.

    Attributes:
        largest_difference: over all steps, in nats.
        step: where it is, counted from one.
    """

    largest_difference: float
    step: int

    @property
    def passed(self) -> bool:
        """Whether the curves are the same up to `TOLERANCE`."""
        return self.largest_difference <= TOLERANCE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Everything that a run of the demo found.

    Attributes:
        options: what was asked.
        spmd_version: version of this package.
        jax_version: version of JAX.
        vocab: number of different characters.
        tokens_per_step: characters predicted in a step.
        compile_seconds: from the first trace to a program that can run.
        train_seconds: all steps together.
        losses: of every step, in nats per character.
        parameters: all of them, in the model's order.
        picture: of one of them, under its name.
        step: the report of the compiled training step.
        verification: with ``--verify``.
        slip: the report of the step with a slip, which is compiled and never run; None where the
            mesh has one device along data, and nothing is lost by it.
    """

    options: Options
    spmd_version: str
    jax_version: str
    vocab: int
    tokens_per_step: int
    compile_seconds: float
    train_seconds: float
    losses: tuple[float, ...]
    parameters: tuple[Parameter, ...]
    picture: Pictures
    step: Report
    verification: Verification | None
    slip: Report | None = None

    @property
    def repair(self) -> Diff | None:
        """What the step that was trained does differently from the one with the slip."""
        if self.slip is None:
            return None
        return dataclasses.replace(spmd.diff(self.slip, self.step), names=("slip", "trained"))

    @property
    def final_loss(self) -> float:
        """Mean loss of the last steps, since one batch alone is noisy."""
        tail = self.losses[-_TAIL:]
        return sum(tail) / len(tail)

    @property
    def tokens_per_second(self) -> float:
        """Characters predicted in a second of training, compilation not counted."""
        return self.tokens_per_step * len(self.losses) / self.train_seconds

    def to_json(self) -> dict[str, Any]:
        """The report in types that JSON knows."""
        options = dataclasses.asdict(self.options)
        for file in ("json", "html"):
            options[file] = None if options[file] is None else str(options[file])
        return {
            "schema": 2,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "options": options,
            "parameters": [*map(dataclasses.asdict, self.parameters)],
            "picture": self._placements(),
            "step": self.step.to_json(),
            "verification": self.verification and dataclasses.asdict(self.verification),
            "slip": self.slip and self.slip.to_json(),
            "first_loss": self.losses[0],
            "final_loss": self.final_loss,
            "uniform_loss": math.log(self.vocab),
            "tokens_per_second": self.tokens_per_second,
            "peak_bytes_per_device": self.step.memory and self.step.memory.peak,
        }

    def _placements(self) -> dict[str, Any]:
        """The pictured parameter, and the part of each device by its place on the mesh."""
        ((name, picture),) = self.picture.pictures.items()
        index = {device: shard.index for shard in picture.shards for device in shard.devices}
        places = itertools.product(*map(range, picture.mesh.values()))
        return {
            "parameter": next(dataclasses.asdict(p) for p in self.parameters if p.name == name),
            "placements": [
                {"device": device, "coordinate": place, "index": index[device]}
                for place, device in zip(places, self.step.device_ids, strict=True)
            ],
        }


def parameter_of(name: str, array: Array) -> Parameter:
    """One sharded array, described from the array itself."""
    sharding: Any = array.sharding
    return Parameter(
        name=name,
        dtype=array.dtype.name,
        shape=array.shape,
        spec=show_spec(sharding.spec),
        bytes_total=array.nbytes,
        bytes_per_device=math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize,
    )


def compare(losses: tuple[float, ...], reference: tuple[float, ...]) -> Verification:
    """Find where two loss curves of equal length differ most."""
    differences = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    largest = max(differences)
    return Verification(largest_difference=largest, step=differences.index(largest) + 1)
