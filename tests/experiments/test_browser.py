"""The page in a real browser, from a file: no errors, tables that sort, no overlap, wide and narrow, light and dark."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra 'report')")
pytest.importorskip("selenium", reason="selenium is not installed (the extra 'test')")

from selenium import webdriver

from pbfl_flwr.experiments import report, results

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
MISSING = [name for name, found in (("Chromium", BROWSER), ("chromedriver", DRIVER)) if not found]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed"),
]

QUIET = ("headless", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
         "disable-component-update", "disable-sync")  # fmt: skip

# Texts of a drawing that leave it, or that cover each other by more than a pixel; shapes are matplotlib's concern.
COLLISIONS = """
const found = [];
const overlap = (one, other) => Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1
  && Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 1;
const within = (box, frame) => box.left > frame.left - 1 && box.right < frame.right + 1
  && box.top > frame.top - 1 && box.bottom < frame.bottom + 1;
for (const svg of document.querySelectorAll("figure svg")) {
  const name = svg.getAttribute("aria-labelledby");
  const texts = Array.from(svg.querySelectorAll("text"), (text) => [text.textContent, text.getBoundingClientRect()]);
  texts.forEach(([said, box], at) => {
    if (!within(box, svg.getBoundingClientRect())) found.push(`${name}: '${said}' leaves the picture`);
    for (const [other, second] of texts.slice(at + 1))
      if (overlap(box, second)) found.push(`${name}: '${said}' covers '${other}'`);
  });
}
const figures = Array.from(document.querySelectorAll("figure"), (figure) => figure.getBoundingClientRect());
figures.forEach((box, at) => {
  if (box.right > innerWidth + 1) found.push(`figure ${at} leaves the page`);
  if (figures.slice(at + 1).abbreviate((other) => overlap(box, other))) found.push(`figure ${at} is covered`);
});
return found;
"""
FONT_SIZES = """
return Array.from(document.querySelectorAll("figure svg"), (svg) => {
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const sizes = Array.from(svg.querySelectorAll("text"), (text) => parseFloat(getComputedStyle(text).fontSize));
  return scale * Math.min(...sizes);
});
"""
COLUMN = (
    "return Array.from(arguments[0].tBodies[0].rows, (row) => row.cells[arguments[1]].textContent.trim())"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    assert BROWSER is not None
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*QUIET, f"user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(f"--{flag}")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses root otherwise
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(three_runs: list[Path], plane_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    report.write(results.load([*three_runs, plane_run]), out)
    return out


def look(browser: Any, page: Path, width: int = 1600, scheme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get(page.as_uri())


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)", WCAG 2."""
    shares = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_overlaps_or_leaves_the_page(browser: Any, page: Path, width: int, scheme: str) -> None:
    look(browser, page, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(COLLISIONS) == []
    assert min(browser.execute_script(FONT_SIZES)) >= 9  # CSS pixels: tick labels on a phone
    assert browser.get_log("browser") == []
    body, text = (
        browser.execute_script(f"return getComputedStyle(document.{place}")
        for place in ("body).backgroundColor", 'querySelector("figure svg text")).fill')
    )
    low, high = sorted((luminance(body), luminance(text)))
    assert (luminance(body) < 0.1) == (scheme == "dark")
    assert (high + 0.05) / (low + 0.05) >= 7


def test_tables_sort_by_click_and_by_key(browser: Any, page: Path) -> None:
    look(browser, page)
    table = browser.find_element("css selector", "#clients table")
    heads = table.find_elements("css selector", "thead th")
    samples = next(at for at, head in enumerate(heads) if head.text.startswith("training samples"))
    before = browser.execute_script(COLUMN, table, samples)
    assert [head.get_attribute("aria-sort") for head in heads] == ["none"] * len(heads)
    button = heads[samples].find_element("tag name", "button")
    button.click()
    assert browser.execute_script(COLUMN, table, samples) == sorted(before, key=int)
    assert heads[samples].get_attribute("aria-sort") == "ascending"
    button.send_keys("\ue007")  # Enter
    assert browser.execute_script(COLUMN, table, samples) == sorted(before, key=int, reverse=True)
    assert heads[samples].get_attribute("aria-sort") == "descending"
    heads[0].find_element("tag name", "button").click()
    assert heads[samples].get_attribute("aria-sort") == "none"
    assert browser.execute_script(COLUMN, table, 0) == ["0", "1", "2", "3"]
    costs = browser.find_element("xpath", "//h2[text()='Cost per round']/..//table")
    costs.find_elements("css selector", "thead button")[1].click()
    scale = {"B": 1, "kB": 1e3, "MB": 1e6}
    bytes_ = [
        float(text.split()[0]) * scale[text.split()[1]] for text in browser.execute_script(COLUMN, costs, 1)
    ]
    assert bytes_ == sorted(bytes_)
    assert len(set(bytes_)) > 1


def test_what_clients_say_is_not_run(browser: Any, hostile_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    report.write(results.load([hostile_run]), out)
    look(browser, out)
    assert browser.execute_script("return window.hurt === undefined")
    assert browser.get_log("browser") == []
    # Nor would it be if some of it got through: the page's policy knows its own script only.
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hurt = 1'; document.body.append(s)"
    )
    assert browser.execute_script("return window.hurt === undefined")
