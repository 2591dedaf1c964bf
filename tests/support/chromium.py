"""The system's Chromium, without a window and without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, async_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def find_chromium() -> str:
    """Its path; without one the test fails in continuous integration, and is skipped elsewhere."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found:
        return found
    missing = "no Chromium here: install it (apt-get install chromium), or name it in CHROMIUM"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


# Contrast of at least 4.5 to 1, as WCAG 2.2 asks for at level AA (success criterion 1.4.3).
WEAK_TEXT = """() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const weak = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest("svg, script")) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) weak.push(element.outerHTML.slice(0, 80));
  }
  return weak;
}"""


@asynccontextmanager
async def running_chromium() -> AsyncIterator[Browser]:
    executable = find_chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        yield browser
        await browser.close()


class Watched:
    """A page, with all that it complained of and all that it asked for besides its own file."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    async def open(self, path: Path) -> None:
        self.requests.clear()
        await self.page.goto(path.as_uri())
        assert self.requests == [path.as_uri()]
