"""The main job: a character transformer trained with `spmd.pjit`, and what that cost.

Nothing here imports JAX before the number of devices is set; `spmd.demo.run` does.
"""
