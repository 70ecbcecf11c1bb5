"""The server's page with an answer and the tree of a pass."""

import shutil
from pathlib import Path

from benchmarks.serving import served
from edgespec.errors import MissingPackage
from edgespec.machine.files import write_whole
from edgespec.model import Model


def photograph(model: Model, name: str, question: str, out: Path) -> None:
    """
    Raises:
        MissingPackage: there is no Chromium to show the page.
    """
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise MissingPackage("chromium", "", "the picture of the page")
    with served(model, name) as port, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800}, device_scale_factor=1)
        page.goto(f"http://127.0.0.1:{port}/")
        page.click("summary")
        page.fill("#max_tokens", "96")
        page.click("summary")
        page.fill("#prompt", question)
        page.keyboard.press("Enter")
        page.wait_for_selector("#notice:has-text('done')", timeout=300_000)
        page.focus("#strip")
        page.keyboard.press("Home")
        found = list[float]()  # a pass with many kept tokens and many branches
        for _ in range(page.locator("#strip i").count()):
            box = page.locator("#tree svg").bounding_box()
            found.append(page.locator("#tree g.kept").count() * (box["height"] if box else 0))
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Home")
        for _ in range(found.index(max(found))):
            page.keyboard.press("ArrowRight")
        write_whole(out, page.screenshot())
        browser.close()
