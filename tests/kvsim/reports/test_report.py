"""Reports: one self-contained, escaped file that sorts, plays and fits a phone in a real browser."""

import json
import re
import shutil

import numpy as np
import pytest

import kvsim
from kvsim.advice.recommend import SearchBudget
from kvsim.reports.page import Page, Section, SnapshotStrip, Table, number, share, words
from kvsim.simulation.snapshots import FILE, Snapshots, load_snapshots
from tests.worlds import command

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver, not here")

POLICIES = ("contiguous", "paged", "oracle")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    kvsim.compare(kvsim.load("chat", workload__requests=60), POLICIES).save(folder)
    return folder


@pytest.fixture(scope="module")
def page(results):
    return kvsim.report(results)


@pytest.mark.slow
def test_a_report_is_self_contained(page):
    html = page.read_text(encoding="utf-8")
    addresses = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'\s>)]+)""", html)
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    assert "http" not in html.replace("http-equiv", "")
    assert "default-src 'none'" in html


@pytest.mark.slow
def test_a_report_states_the_question_and_how_to_reproduce_it(page, results):
    html = page.read_text(encoding="utf-8")
    for part in ("60 requests", "chat", *POLICIES, "Scenario", "numpy", kvsim.__version__):
        assert part in html
    assert "kvsim compare scenario.toml --policy contiguous --policy paged --policy oracle" in html
    printed = json.loads((results / "comparison.json").read_text())
    for run in printed["policies"]:
        assert f"{1e3 * run['e2e_s']['p95']:.3g}" in html.replace(",", "") or run["e2e_s"]["p95"] >= 1


def test_text_of_users_is_escaped():
    evil = "</script><img src=x onerror=alert(1)>"
    snapshots = Snapshots(evil, np.zeros(1), np.zeros((1, 4), dtype=np.uint8), 1)
    table = Table(evil, [evil], [[words(evil)]], evil)
    html = Page(
        evil, [evil], [evil], [Section(evil, [evil], [table], (), [SnapshotStrip(snapshots)], [(evil, evil)])], evil
    ).html()
    assert "<img src=x" not in html
    assert html.count("</script>") == 2
    assert "&lt;img src=x" in html


def test_cells_of_tables_are_sorted_by_value():
    assert number(1234.5).text == "1,234"
    assert number(0.123456).text == "0.123"
    assert number(None).value is None
    assert number(float("nan")).text == "–"
    assert (share(0.5).text, share(0.5).value) == ("50.0%", 0.5)
    assert words("Paged").value == "paged"


def test_snapshots_are_complete_and_small(results):
    kept = load_snapshots(results / FILE)
    assert [snapshots.policy for snapshots in kept] == list(POLICIES)
    for snapshots in kept:
        assert snapshots.cells.shape == (len(snapshots.times_s), 2048)
        assert len(snapshots.times_s) <= 80
        assert (np.diff(snapshots.times_s) > 0).all()
        assert (snapshots.cells > 0).any()
        assert (snapshots.cells[0] == 0).any()


def test_snapshots_of_many_cells_show_some_of_them():
    frames = tuple((float(i), np.arange(10_000, dtype=np.int16) % 300 - 1) for i in range(200))
    snapshots = Snapshots.of("paged", frames)
    assert snapshots.every == 3
    assert snapshots.cells.shape == (80, 3334)
    assert snapshots.times_s[0] == 0
    assert snapshots.times_s[-1] == 199
    assert snapshots.cells[0, 0] == 0
    assert snapshots.cells.max() == 249


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda folder: (folder / "comparison.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "comparison.json").write_text("[]"), "a JSON object is expected"),
        (lambda folder: (folder / "comparison.json").write_text('{"policies": []}'), "not what kvsim compare writes"),
        (lambda folder: (folder / "comparison.json").write_text('{"policies": [{"policy": 3}]}'), "not what kvsim"),
        (lambda folder: (folder / "comparison.json").write_bytes(b"\xff\xfe"), "not UTF-8"),
        (lambda folder: (folder / "comparison.json").unlink(), "no results in it"),
        (lambda folder: (folder / "scenario.toml").unlink(), "scenario.toml: cannot be read: No such file"),
        (lambda folder: (folder / FILE).write_bytes(b"PK\x03\x04 no"), "not the snapshots"),
        (lambda folder: np.savez((folder / FILE).open("wb"), policies=np.array(["a"])), "not the snapshots"),
    ],
)
def test_damaged_results_are_refused_in_a_line(results, tmp_path, spoil, what):
    folder = tmp_path / "results"
    shutil.copytree(results, folder)
    (folder / "report.html").unlink(missing_ok=True)
    spoil(folder)
    with pytest.raises(kvsim.UserError) as fault:
        kvsim.report(folder)
    assert what in str(fault.value)
    assert len(str(fault.value).splitlines()) == 1
    assert not (folder / "report.html").exists()


def test_snapshots_of_earlier_versions_are_shown(results, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(results, folder)
    (folder / FILE).rename(folder / "films.npz")
    assert kvsim.report(folder).read_text(encoding="utf-8").count('class="strip"') == len(POLICIES)


def test_the_command(results, tmp_path):
    done = command("report", str(results), "--out", str(tmp_path / "deep" / "page.html"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "page.html" in done.stdout
    assert (tmp_path / "deep" / "page.html").stat().st_size > 50_000
    done = command("report", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "no such results" in done.stderr


@pytest.fixture(scope="module")
def sweep_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    file = {
        "name": "little",
        "scenario": "chat",
        "policies": ["paged", "contiguous", "oracle"],
        "replications": 2,
        "axes": {"cache.cells": [256, 2048], "workload.requests": [40]},
    }
    kvsim.sweep(file, out=folder / "little.sqlite", workers=1).save()
    return kvsim.report(folder / "little.sqlite")


def test_a_report_of_a_sweep(sweep_page):
    html = sweep_page.read_text(encoding="utf-8")
    printed = json.loads((sweep_page.parent / "little.json").read_text())
    assert printed["conclusion"] in html
    assert printed["failed"] > 0
    for part in ("cache.cells", "Failures", "exceeds cache.cells", "paged", "&#34;cache.cells&#34; = ["):
        assert part in html


@pytest.fixture(scope="module")
def recommendation_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recommendation")
    few = SearchBudget(8, 2, 3, 2, 2, 1, fewest=30)
    kvsim.recommend("chat", slo="ttft_p95<300ms", engine="llamacpp", requests=40, workers=1, budget=few).save(folder)
    return kvsim.report(folder)


@pytest.mark.slow
def test_a_report_of_a_recommendation(recommendation_page):
    html = recommendation_page.read_text(encoding="utf-8")
    printed = json.loads((recommendation_page.parent / "recommendation.json").read_text())
    for part in ("ttft_p95&lt;300ms", "llama-server --ctx-size", "Settings that were ruled out", "Scenario of place 1"):
        assert part in html
    assert html.count("<tr>") > printed["searched"]["tried"]


@pytest.mark.slow
def test_a_report_of_a_comparison_over_replications(tmp_path):
    scenario = kvsim.load("chat", workload__requests=40)
    comparison = kvsim.compare(scenario, ["paged", "oracle"], replications=2)
    comparison.save(tmp_path)
    html = kvsim.report(tmp_path).read_text(encoding="utf-8")
    assert "Over replications" in html
    assert "--policy oracle --replications 2" in html
    assert html.count("data:image/png") >= 3


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def look(browser, page, width=1200, *, dark=False):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.get(page.as_uri())
    return browser


def column(browser, n):
    script = (
        "return [...document.querySelectorAll('table')[0].tBodies[0].rows].map(r => r.cells[arguments[0]].innerText)"
    )
    return browser.execute_script(script, n)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_reports_no_error_and_the_page_fits(browser, page, width, dark):
    look(browser, page, width, dark=dark)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert float(browser.execute_script("return parseFloat(getComputedStyle(document.body).fontSize)")) >= 15
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    ink = browser.execute_script("return getComputedStyle(document.body).color")
    bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (background, ink)]
    assert (bright[0] < bright[1]) is dark
    assert abs(bright[0] - bright[1]) > 450


@needs_browser
@pytest.mark.parametrize("of", ["sweep_page", "recommendation_page"])
def test_other_pages_in_the_browser(browser, request, of):
    look(browser, request.getfixturevalue(of), 390)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


@needs_browser
def test_tables_sort_both_ways(browser, page):
    look(browser, page)
    heads = browser.find_elements("css selector", "table:first-of-type th button")[:4]
    heads[0].click()
    assert column(browser, 0) == sorted(POLICIES)
    heads[0].click()
    assert column(browser, 0) == sorted(POLICIES, reverse=True)
    heads[3].click()
    speeds = [float(text.replace(",", "")) for text in column(browser, 3)]
    assert speeds == sorted(speeds)
    assert browser.find_elements("css selector", "th")[3].get_attribute("aria-sort") == "ascending"


@needs_browser
def test_the_slider_moves_the_snapshots(browser, page):
    look(browser, page)
    pixels = "return document.querySelectorAll('canvas')[0].toDataURL()"
    move = """const s = document.querySelectorAll('.strip input')[0]; s.value = arguments[0];
              s.dispatchEvent(new Event('input')); return document.querySelector('.strip output').textContent"""
    first = browser.execute_script(move, 0)
    empty = browser.execute_script(pixels)
    last = browser.execute_script(move, 40)
    assert float(last.split()[0]) > float(first.split()[0])
    assert browser.execute_script(pixels) != empty
    assert browser.get_log("browser") == []


@needs_browser
def test_the_snapshots_play(browser, page):
    from selenium.webdriver.support.ui import WebDriverWait

    look(browser, page)
    value = "return Number(document.querySelectorAll('.strip input')[0].value)"
    browser.execute_script("document.querySelectorAll('.strip input')[0].value = 0")
    browser.find_elements("css selector", ".play")[0].click()
    WebDriverWait(browser, 10).until(lambda b: b.execute_script(value) >= 3)
    browser.find_elements("css selector", ".play")[0].click()
    assert browser.find_elements("css selector", ".play")[0].text == "▶"
