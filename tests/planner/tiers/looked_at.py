"""A search as it stands before it previews or compiles."""

import dataclasses
import types

from planned_programs import MLP, classes

from spmd.inspection.timing.chips import CHIPS
from spmd.planner.cost.estimate import Estimate, Estimator
from spmd.planner.program.layout import Layout
from spmd.planner.search.descent import Candidate
from spmd.planner.tiers.looking import Looking


def looking_at(pod, top, data, model):
    """A search whose only layout splits rows, widths and hidden widths, of which `top` compile."""
    found = MLP.graph(pod)
    of = classes(found)
    letters = {"b": of["x:0"], "d": of["x:1"], "f": of["w['up']:1"]}
    layout = Layout.of({"data": [*map(letters.get, data)], "model": [*map(letters.get, model)]})
    cost = Estimate(compute=1.0, memory=0.0, exchange=0.0, hidden=0.0, peak=1.0)
    looking = Looking(program=MLP, chip=CHIPS["v5e"], top=top, named=max(1, top - 1), seeds=False)
    looking.estimators[pod] = Estimator(found, looking.machine(pod))
    looking.estimated = lambda one, layout, way: one.estimate  # which is made up
    looking.choices = [looking.choice("found", Candidate(layout, cost, 1.0), found, pod)]
    return looking


def as_compiled(one, seconds, peak=None):
    """A layout as a compiler might return it, which takes so long, and so many bytes if it says."""
    time = types.SimpleNamespace(seconds=seconds)
    memory = None if peak is None else types.SimpleNamespace(peak=peak)
    return dataclasses.replace(one, report=types.SimpleNamespace(time=time, memory=memory))
