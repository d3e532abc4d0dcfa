"""Writes the HLO texts of this folder: ``python tests/inspection/goldens/write.py cpu`` (or tpu).

Which texts come out depends on the JAX that runs it; the files say which one made them. It does not
write the ledgers beside them: whoever makes a new text has to check what it must say.
"""

import os
from pathlib import Path
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import programs

HERE = Path(__file__).parent
# By backend and JAX: programs of `programs.py`, and reshards of an array of 24 x 40 floats.
NAMED = {
    "cpu-0.10": ["moe_dispatch", "megatron_block", "swapped_axes", "until_the_data_say_so"],
    "cpu-0.12": ["fsdp_scan", "swapped_axes", "either_branch", "gathered_argument"],
    "tpu-0.10": [
        "data_parallel_mlp",
        "psum_scatter",
        "swapped_axes",
        "counted_loops",
        "kernel_with_metadata",
    ],
    "tpu-0.12": [
        "fsdp_scan",
        "windowed_einsum",
        "ragged_exchange",
        "branches_in_a_loop",
        "kernel_with_metadata",
    ],
}
TWO, THREE = {"data": 4, "model": 2}, {"a": 2, "b": 2, "c": 2}
RESHARDS = {
    "regroup": (TWO, P(("data", "model")), P("model")),
    "from_model": (TWO, P("model"), P()),
    "from_part": (TWO, P(("data", "model")), P("model", "data")),
    "from_two_of_three": (THREE, P(("c", "a")), P()),
}


def _reshard(target, sizes, before, after):
    mesh = Mesh(target.mesh.devices.reshape(tuple(sizes.values())), tuple(sizes))
    target = programs.Target(backend=target.backend, mesh=mesh)
    return target.jit(jnp.sin, before, after, programs.array(24, 40)).compile()


def _named(target, name):
    build, _, options = programs.PROGRAMS[name]
    return build(target)[0].compile(options or None)


def _neutral(text):
    """The text without this machine's paths and without most of the backend's own notes."""
    ours = re.escape(programs.__file__)
    text = re.sub(rf'(?m)^(\d+) "{ours}"$', r'\1 "/home/user/model.py"', text)
    text = re.sub(r'(?m)^(\d+) "(?!/home/user/).*"(?=\n(?:\d+ ".*\n)*\nFunction)', _train, text)
    kept = "known_trip_count|async_collective_fusion_config"
    return re.sub(rf"(?m), backend_config=(?!.*(?:{kept})).*$", "", text)


def _train(found):
    return f'{found[1]} "/home/user/train.py"'


def main(backend):
    """Writes the texts of one backend."""
    target = programs.cpu_target() if backend == "cpu" else programs.tpu_target()
    made = f"{backend}-{'.'.join(jax.__version__.split('.')[:2])}"
    compiled = {name: _named(target, name) for name in NAMED.get(made, ())}
    compiled |= {name: _reshard(target, *how) for name, how in RESHARDS.items()}
    for name, program in compiled.items():
        text = f"// {backend}, JAX {jax.__version__}\n{_neutral(program.as_text())}"
        assert len(text) < 60_000, (name, len(text))
        (HERE / f"{made}-{name}.hlo.txt").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
