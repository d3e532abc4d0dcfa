"""Takes the screenshot that the README shows: the page of the demo's step with a slip.

Its first sight is the finding. Run from anywhere, with Debian's chromium installed and the extras
`demo` and `test`:

    python docs/screenshot.py
"""

import os
from pathlib import Path
import shutil
import sys
import tempfile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from playwright.sync_api import sync_playwright

import spmd
from spmd.demo import corpus, train

IMAGE = ROOT / "docs" / "images" / "report.png"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def report() -> spmd.Report:
    """The report of the demo's step with its slip, whose paths are those of the repository."""
    os.chdir(ROOT)
    with spmd.make_mesh({"data": 4, "model": 2}):
        trainer = train.Trainer(corpus.load(), steps=400, seed=0)
        return spmd.report(trainer.slip, trainer.state, trainer.sample_batch())


def shoot(page: Path, image: Path) -> None:
    """Opens a page in Chromium and takes what its first screen shows."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=ARGUMENTS
        )
        tab = browser.new_page(
            viewport={"width": 1280, "height": 1180}, color_scheme="light", device_scale_factor=1
        )
        tab.goto(page.as_uri())
        image.parent.mkdir(exist_ok=True)
        tab.screenshot(path=image)
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        report().save(path)
        shoot(path, IMAGE)
    print(f"{IMAGE.relative_to(ROOT)}: {IMAGE.stat().st_size:,} bytes")
