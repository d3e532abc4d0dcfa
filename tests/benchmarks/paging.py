"""How long a page takes to load and to answer, in a real Chromium."""

from collections.abc import Iterator, Mapping
from pathlib import Path
import shutil
import statistics
import tempfile
from typing import Any

from spmd.inspection import Argument, Split

from ..browser import chromium, opened
from ..inspection.reports import many
from .paired import seconds

COUNTS = (200, 2000)
MESH = {"data": 16, "model": 16}

#: From when the browser takes an event of the user to the end of the frame that shows its effect.
#: What the page does on it is done by then: frames come after the handlers of an event.
_WATCH = """([type, selector]) => {
  window.taken = new Promise(done => {
    const seen = event => {
      if (!event.target.closest(selector)) return;
      document.removeEventListener(type, seen, true);
      requestAnimationFrame(() => {
        const after = new MessageChannel();
        after.port1.onmessage = () => done((performance.now() - event.timeStamp) / 1000);
        after.port2.postMessage(null);
      });
    };
    document.addEventListener(type, seen, true);
  });
}"""
_LOAD = "() => performance.getEntriesByType('navigation')[0].loadEventEnd / 1000"

#: By name: the event, where it comes to, and what the user does.
ACTIONS: Mapping[str, tuple[str, str, Any]] = {
    "a sort": ("click", "#rows th", lambda tab: tab.click("#rows th:first-child button")),
    "a filter": (
        "input",
        "#filter-kind",
        lambda tab: tab.select_option("#filter-kind", "all-gather"),
    ),
    "a keystroke": ("keydown", "#filter-text", lambda tab: tab.press("#filter-text", "1")),
    "a hover on the mesh": (
        "pointerover",
        ".device",
        lambda tab: tab.hover(".device[data-i='37']"),
    ),
}
HEADER = f"{'':<44} {'median':>10}  quartiles"


def run(turns: int) -> Iterator[str]:
    """A line for the browser, and for each number of collectives each thing that a user does."""
    if shutil.which("chromium") is None:
        yield "page: chromium is not installed"
        return
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        yield f"Chromium {browser.version}"
        for count in COUNTS:
            file = Path(folder) / f"{count}.html"
            _report(count).save(file)
            name = f"{count:,} collectives, {file.stat().st_size / 1e6:.1f} MB"
            times = [_turn(browser, file) for _ in range(turns)]
            for action in times[0]:
                yield _line(f"{name}: {action}", [one[action] for one in times])


def _report(count: int) -> Any:
    """Collectives on a mesh of 256 devices, and an argument that is split over all of them."""
    splits = tuple(Split.of(4096, (axis,), MESH) for axis in MESH)
    weight = Argument(
        path="w",
        dtype="bf16",
        shape=(4096, 4096),
        sharding="P('data', 'model')",
        splits=splits,
        nbytes=2 * 256 * 256,
    )
    devices = tuple(range(256))
    return many(count, mesh=MESH, num_devices=256, device_ids=devices, arguments=(weight,))


def _turn(browser: Any, file: Path) -> dict[str, float]:
    """Seconds by what the user does, all of it once in a new tab."""
    with opened(browser, file) as tab:
        found = {"load": tab.evaluate(_LOAD)}
        for name, (event, selector, act) in ACTIONS.items():
            tab.evaluate(_WATCH, [event, selector])
            act(tab)
            found[name] = tab.evaluate("() => window.taken")
    return found


def _line(name: str, times: list[float]) -> str:
    middle = f"{name:<44} {seconds(statistics.median(times)):>10}"
    if len(times) < 2:
        return middle
    low, _, high = statistics.quantiles(times, n=4)
    return f"{middle}  {seconds(low)} - {seconds(high)}"
