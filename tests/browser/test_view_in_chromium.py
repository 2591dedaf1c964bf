"""What a person sees of ``tokcap view`` while rollouts run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from support.chromium import running_chromium
from support.reported import Rollout, write_rollouts
from support.viewing import running
from token_id_capture.store import TokenCaptureStore


@contextlib.asynccontextmanager
async def watching(database: Path) -> AsyncIterator[Page]:
    """A page that follows a database; it must not complain of anything."""
    complaints: list[str] = []
    with running(database) as server:
        async with running_chromium() as browser:
            page = await browser.new_page(viewport={"width": 1400, "height": 900})
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            await page.goto(f"{server.base}?key={server.key}")
            await expect(page.locator(".live")).to_have_text("live")
            yield page
    assert complaints == []


@pytest.mark.asyncio
async def test_a_page_follows_what_is_stored_and_stays_where_it_is_read(tmp_path: Path) -> None:
    database = tmp_path / "captures.db"
    await write_rollouts(database)
    async with TokenCaptureStore(database) as store, watching(database) as page:
        await expect(page.locator(".tiles li").first).to_contain_text("2")
        rollout = Rollout(store, "running")
        for number in range(12):
            await rollout.call(text=f"answer {number}")
        row = page.locator('.list .row[data-id="running"]')
        await expect(row).to_contain_text("12 calls")
        await row.click()
        await expect(page.locator("article.call")).to_have_count(12)
        await page.locator('.outline .row[data-call="5"]').click()
        place = "document.querySelector('#call-5').getBoundingClientRect().top"
        await page.wait_for_timeout(200)  # a jump settles
        before = await page.evaluate(place)
        await rollout.call(text="the thirteenth")
        await expect(page.locator("article.call")).to_have_count(13)
        await expect(row).to_contain_text("13 calls")
        assert abs(await page.evaluate(place) - before) < 3
        # Search and filters ask the server.
        await page.get_by_label("Part of a rollout's id or group").fill("mask")
        await expect(page.locator(".list .row b")).to_have_text(["masked"])
        await page.get_by_role("listbox", name="Rollouts").focus()  # Escape would also clear the field
        await page.keyboard.press("]")
        await expect(page.locator("h1:visible")).to_have_text("masked masked")
        await page.keyboard.press("o")
        await expect(page.locator(".tiles")).to_be_visible()
