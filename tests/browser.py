"""A real Chromium for tests of pages; every request but that for the page is a failure."""

import contextlib
import os
import shutil

import pytest

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def require_chromium():
    """The path of Chromium; where there is none, the test is skipped, but never in CI."""
    path = shutil.which("chromium")
    if path is None:
        reason = "needs Chromium: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@contextlib.contextmanager
def chromium():
    """Starts the browser."""
    path = require_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS])
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser, file, *, width=1200, height=800, **options):
    """A file in a tab; at the end nothing was requested, logged or thrown in it."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    faults = []

    def answer(route):
        if route.request.url == file.as_uri():
            route.continue_()
        else:
            faults.append(f"requested {route.request.url}")
            route.abort()

    context.route("**/*", answer)
    tab = context.new_page()
    tab.set_default_timeout(60_000)
    tab.on("console", lambda message: faults.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: faults.append(f"thrown: {error}"))
    tab.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    tab.goto(file.as_uri())
    yield tab
    context.close()
    assert not faults, faults


def assert_fits_screens(browser, file):
    """A page is as wide as the window, on small screens and large ones, in light and in dark."""
    for scheme in ("light", "dark"):
        with opened(browser, file, color_scheme=scheme) as tab:
            for width in (320, 400, 700, 900, 1440):
                tab.set_viewport_size({"width": width, "height": 900})
                assert tab.evaluate("document.documentElement.scrollWidth") <= width
