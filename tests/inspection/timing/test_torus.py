"""Times of exchanges on a torus, against counts by hand and a simulation link by link."""

import itertools

import pytest

from spmd.inspection.timing.chips import CHIPS, chip_of
from spmd.inspection.timing.torus import Torus

MB = 10**6
WIDTH = 1e9  # bytes a second, so that a megabyte takes a millisecond


def torus(*sizes, ring=False, cores=1):
    """A torus whose messages take no time but for their bytes."""
    all_sizes = (*sizes, cores) if cores > 1 else sizes
    return Torus(
        sizes=all_sizes,
        rings=(ring,) * len(sizes) + (False,) * (cores > 1),
        widths=(WIDTH,) * len(sizes) + (6 * WIDTH,) * (cores > 1),
        places=tuple(itertools.product(*map(range, all_sizes))),
        hop=0.0,
    )


def rows(*sizes, along):
    """Groups along one dimension."""
    numbers = {place: i for i, place in enumerate(itertools.product(*map(range, sizes)))}
    groups = {}
    for place, number in numbers.items():
        groups.setdefault(place[:along] + place[along + 1 :], []).append(number)
    return tuple(map(tuple, groups.values()))


def test_a_ring_sends_both_ways_and_a_line_one():
    """Gathering 16 MB over 16 chips: 15 MB over two links, or over one."""
    groups = rows(16, along=0)
    for ring, milliseconds in ((True, 7.5), (False, 15.0)):
        found = torus(16, ring=ring).transfer("all-gather", groups, MB, 16 * MB)
        assert found.seconds == pytest.approx(milliseconds / 1e3)
        assert found.lanes == {(0, 1), (0, -1)}


@pytest.mark.parametrize(
    ("kind", "sizes", "milliseconds"),
    [
        ("all-reduce", (16 * MB, 16 * MB), 15.0),
        ("reduce-scatter", (16 * MB, MB), 7.5),
        ("all-to-all", (16 * MB, 16 * MB), 32.0),
        ("recv", (MB, MB), 0.0),
    ],
)
def test_each_kind_has_its_share(kind, sizes, milliseconds):
    """An all-reduce is a scatter and a gather; an all-to-all crosses the middle of the ring.

    Of an all-to-all, half of 16 devices send half of their 16 MB to the other half: 64 MB each
    way, over two links.
    """
    found = torus(16, ring=True).transfer(kind, rows(16, along=0), *sizes)
    assert found.seconds == pytest.approx(milliseconds / 1e3)


def test_dimensions_of_a_group_add_up():
    """A group of a whole 4x4 torus gathers over four links a chip."""
    found = torus(4, 4, ring=True).transfer("all-gather", (tuple(range(16)),), MB, 16 * MB)
    assert found.seconds == pytest.approx(15e-3 / 4)
    assert {lane[0] for lane in found.lanes} == {0, 1}


def test_groups_of_one_line_share_it():
    """Every second chip of a ring of 8: two groups on each link. Halves have their own links."""
    strided = ((0, 2, 4, 6), (1, 3, 5, 7))
    found = torus(8, ring=True).transfer("all-gather", strided, MB, 4 * MB)
    assert found.seconds == pytest.approx(3e-3 / 2 * 2)
    halves = ((0, 1, 2, 3), (4, 5, 6, 7))
    found = torus(8, ring=True).transfer("all-gather", halves, MB, 4 * MB)
    assert found.seconds == pytest.approx(3e-3)


def test_devices_of_one_chip_share_its_links():
    """On chips of two devices, groups of first and of second devices use the same links."""
    groups = rows(4, 2, along=0)
    assert groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    found = torus(4, cores=2).transfer("all-gather", groups, MB, 4 * MB)
    assert found.seconds == pytest.approx(3e-3 * 2)
    pairs = rows(4, 2, along=1)
    assert torus(4, cores=2).transfer("all-gather", pairs, MB, 2 * MB).seconds == pytest.approx(
        1e-3 / 6
    )


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("shift", [1, 2, 3, 5, -1])
def test_a_permute_is_as_slow_as_its_busiest_link(ring, shift):
    """Every chip of 8 sends a megabyte by `shift`: counted link by link."""
    pairs = tuple((i, (i + shift) % 8) for i in range(8))
    loads = dict.fromkeys(itertools.product(range(8), (1, -1)), 0)
    for source, target in pairs:
        ahead, back = (target - source) % 8, (source - target) % 8
        steps = min(ahead, back) if ring else abs(target - source)
        way = (1 if ahead <= back else -1) if ring else (1 if target > source else -1)
        for k in range(steps):
            loads[(source + way * k) % 8, way] += 1
    found = torus(8, ring=ring).transfer("collective-permute", pairs, MB, MB)
    assert found.seconds == pytest.approx(max(loads.values()) / 1e3)
    assert found.lanes == {(0, way) for (_, way), load in loads.items() if load}


def test_hops_take_a_microsecond_each():
    """The farthest of 16 chips on a ring is 8 away."""
    one = Torus(
        sizes=(16,),
        rings=(True,),
        widths=(WIDTH,),
        places=tuple((i,) for i in range(16)),
        hop=CHIPS["v5e"].hop,
    )
    assert one.transfer("all-gather", rows(16, along=0), 0, 0).seconds == pytest.approx(8e-6)
    assert one.transfer("collective-permute", ((0, 3),), 0, 0).seconds == pytest.approx(3e-6)


def test_clocks_are_those_that_google_names():
    """Peak over cells of the matrix units, in GHz, as issue J lists them."""
    clocks = {name: round(chip.clock / 1e9, 2) for name, chip in CHIPS.items() if chip.multipliers}
    assert clocks == {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}


def test_a_device_names_its_chip():
    """By JAX's name of the device; a CPU has no figures."""
    assert chip_of("TPU v5 lite") is CHIPS["v5e"]
    assert chip_of("TPU7x") is CHIPS["tpu7x"]
    assert chip_of("cpu") is None
