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
