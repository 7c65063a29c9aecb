"""`python -m tests.browser --page URL`: a teacher's way through the page in Chromium, by clicks, then by keys alone.

The page is that of `make demo` or `make simulated`. Needs `pip install playwright`, a Chromium on this machine and, to
examine the pages with axe, its axe.min.js (`npm install axe-core`).
"""

from __future__ import annotations

import csv
import io
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

SAMPLES: Final = Path(__file__).parents[1] / "samples"
NAMES: Final = ("right", "half", "injection")
ENDED_MS: Final = 900_000
DESKTOP: Final = {"width": 1200, "height": 900}
LOOKS: Final[dict[str, dict[str, Any]]] = {
    "light": {"color_scheme": "light", "viewport": DESKTOP},
    "dark": {"color_scheme": "dark", "viewport": DESKTOP},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}


def main(
    page: Annotated[str, typer.Option(help="Address of the page.")] = "http://127.0.0.1:8090",
    pictures: Annotated[Path, typer.Option(help="Folder for the screenshots.")] = Path("pictures"),
    chromium: Annotated[str, typer.Option(help="The browser's program.")] = "/usr/bin/chromium",
    axe: Annotated[Path | None, typer.Option(help="axe.min.js.")] = None,
) -> None:
    pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        addresses = {"home": "/", "models": "/models"}
        for kind in (Mouse, Keyboard):
            addresses |= walked(browser, page, pictures, kind)
        for name, options in LOOKS.items():
            context = browser.new_context(base_url=page, **options)
            look(context, name, addresses, pictures, axe.read_text("utf-8") if axe else "")
            context.close()
        browser.close()
    print(f"upload, progress, result, correction and export work, by clicks and by keys; pictures in {pictures}")


class Hand(ABC):
    """How a person uses a page."""

    def __init__(self, tab: Page) -> None:
        self.tab = tab

    @abstractmethod
    def reach(self, place: Locator) -> None: ...

    @abstractmethod
    def press(self, place: Locator) -> None:
        """A link or a button."""

    def write(self, place: Locator, text: str) -> None:
        self.reach(place)
        self.tab.keyboard.press("Control+A")
        self.tab.keyboard.type(text)


class Mouse(Hand):
    def reach(self, place: Locator) -> None:
        place.click()

    press = reach


class Keyboard(Hand):
    def reach(self, place: Locator) -> None:
        for _ in range(200):
            if place.evaluate("element => element === document.activeElement"):
                return
            self.tab.keyboard.press("Tab")
        raise AssertionError(f"the Tab key does not reach {place}")

    def press(self, place: Locator) -> None:
        self.reach(place)
        self.tab.keyboard.press("Enter")


def walked(browser: Browser, page: str, pictures: Path, kind: type[Hand]) -> dict[str, str]:
    """Upload, progress, result, correction, export. Returns the addresses of the batch and of a result."""
    context = browser.new_context(base_url=page, **LOOKS["light"])
    tab = context.new_page()
    faults: list[str] = []
    tab.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: faults.append(str(error)))
    hand = kind(tab)
    batch = upload(hand)
    progress = tab.locator("#rows")
    expect(progress).to_contain_text("running", timeout=60_000)
    expect(progress).to_contain_text("qwen on", timeout=ENDED_MS)
    tab.screenshot(path=pictures / "progress.png")
    expect(tab.locator("#summary")).to_have_text(f"{len(NAMES)} of {len(NAMES)} notebooks ended", timeout=ENDED_MS)
    expect(progress.locator("tr", has_text="injection.ipynb")).to_contain_text("review")
    hand.press(tab.get_by_role("link", name="injection.ipynb"))
    expect(tab.locator(".note").filter(has_text="addresses the models")).not_to_have_count(0)
    result = tab.url
    correct(hand)
    hand.press(tab.get_by_role("link", name="Page for the student"))
    expect(tab.get_by_text("mean: 2.5 of 3")).to_be_visible()
    student = tab.url
    tab.goto(batch)
    export(hand)
    context.close()
    assert not faults, faults
    return {"batch": batch, "result": result, "student": student}


def upload(hand: Hand) -> str:
    tab = hand.tab
    tab.goto("/")
    hand.reach(tab.get_by_label("Assignment"))
    if isinstance(hand, Mouse):
        tab.keyboard.press("Escape")  # closes the list of assignments, of which there is one
    tab.get_by_label("Assignment").select_option("sample")
    with tab.expect_file_chooser() as chooser:
        hand.press(tab.get_by_label("Notebooks, or a zip file"))
    chooser.value.set_files([SAMPLES / f"{name}.ipynb" for name in NAMES])
    hand.press(tab.get_by_role("button", name="Grade"))
    tab.wait_for_url("**/batches/*")
    return str(tab.url)


def correct(hand: Hand) -> None:
    tab = hand.tab
    section = tab.locator("section", has=tab.get_by_role("button", name="Correct mean"))
    hand.write(section.get_by_label("Points"), "2.5")
    hand.write(section.get_by_label("Reason"), "by hand")
    hand.press(section.get_by_role("button"))
    expect(tab.get_by_role("heading", name="mean: 2.5 of 3")).to_be_visible()
    expect(tab.get_by_text("by hand")).to_be_visible()


def export(hand: Hand) -> None:
    table = downloaded(hand.tab, lambda: hand.press(hand.tab.get_by_role("link", name="Table (CSV)"))).decode()
    rows = list(csv.DictReader(io.StringIO(table)))
    assert {row["notebook"]: row["mean"] for row in rows}["injection.ipynb"] == "2.5"
    assert [row["state"] for row in rows] == ["done"] * len(NAMES)
    pages = downloaded(hand.tab, lambda: hand.press(hand.tab.get_by_role("link", name="Pages for the students")))
    with zipfile.ZipFile(io.BytesIO(pages)) as archive:
        assert sorted(archive.namelist()) == sorted(f"{name}.html" for name in NAMES)
        assert "mean: 2.5 of 3" in archive.read("injection.html").decode()


def downloaded(tab: Page, click: Callable[[], None]) -> bytes:
    with tab.expect_download() as download:
        click()
    return Path(download.value.path()).read_bytes()


def look(context: BrowserContext, name: str, addresses: dict[str, str], pictures: Path, axe: str) -> None:
    """A picture of each page, none of which is wider than the screen or has a serious finding of axe."""
    tab = context.new_page()
    for what, address in addresses.items():
        tab.goto(address)
        tab.screenshot(path=pictures / f"{what}-{name}.png", full_page=True)
        wide = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{what} is {wide} pixels wider than the {name} screen"
        if axe:
            tab.evaluate(axe)
            found = tab.evaluate(
                "axe.run().then(result => result.violations.map(one => [one.id, one.impact, one.help]))"
            )
            print(f"axe: {what}, {name}: {found or 'no findings'}")
            assert not any(impact in ("serious", "critical") for _, impact, _ in found), found


if __name__ == "__main__":
    typer.run(main)
