"""Reports: one self-contained, escaped file that sorts, plays and fits a phone in a real browser."""

import io
import json
import re
import shutil

import numpy as np
import pytest
from rich.console import Console

import kvsim
from kvsim.advice.recommend.search import SearchBudget
from kvsim.cli.console import draw_report
from kvsim.reports.comparison_plots import latency_ranges
from kvsim.reports.formats import half_width, interval_of, number, share, size
from kvsim.reports.page import html as html_of
from kvsim.reports.report import Cell, Column, Report, Section, SnapshotStrip, Table, report_of
from kvsim.simulation.snapshots import FILE, Frame, Snapshots, load_snapshots
from policies.presets import PRESETS
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


@pytest.fixture(scope="module")
def all_policies_page(results, tmp_path_factory):
    """As wide as a page of all policies can be, without the time that running and drawing them would take."""
    folder = tmp_path_factory.mktemp("all")
    saved = json.loads((results / "comparison.json").read_text())
    saved["policies"] = [
        saved["policies"][i % len(POLICIES)]
        | {"policy": preset.name}
        | {key: dict.fromkeys(("p50", "p95", "p99"), 1.234 * i) for key in ("ttft_s", "tpot_s", "e2e_s")}
        for i, preset in enumerate(PRESETS, 1)
    ]
    (folder / "comparison.json").write_text(json.dumps(saved))
    for name in ("scenario.toml", "comparison.png"):
        shutil.copy(results / name, folder)
    return kvsim.report(folder)


@pytest.fixture(scope="module")
def replications_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replications")
    kvsim.compare(kvsim.load_scenario("chat", workload__requests=40), POLICIES, replications=2).save(folder)
    return kvsim.report(folder)


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
    table = Table(evil, [Column(evil, 0, str, evil)], [(evil,)], evil)
    section = Section(evil, [evil], [table], [evil], (), [SnapshotStrip(snapshots)], [(evil, evil)])
    html = html_of(Report(evil, [evil], [evil], [evil], [section], [evil], evil))
    assert "<img src=x" not in html
    assert html.count("</script>") == 2
    assert "&lt;img src=x" in html


@pytest.mark.parametrize(
    ("value", "show", "cell"),
    [
        (1234.5, number, Cell("1,234", 1234.5)),
        (0.123456, number, Cell("0.123", 0.123456)),
        (0.5, share, Cell("50.0%", 0.5)),
        (None, number, Cell("–")),
        (float("nan"), number, Cell("–")),
        ("Paged", str, Cell("Paged", "paged")),
        (True, str, Cell("True", "true")),
        (interval_of({"value": 0.00525, "low": 0.004, "high": 0.0065}), half_width(1e3), Cell("5.2 ±1.2", 0.00525)),
        (interval_of({"x": 5.25, "x_low": 5.0, "x_high": 5.5}, "x"), half_width(), Cell("5.25 ±0.25", 5.25)),
        (interval_of({"value": 5.25, "low": None, "high": 6.5}), half_width(), Cell("5.25", 5.25)),
        (interval_of({"value": None}), half_width(), Cell("–")),
    ],
)
def test_a_cell_has_what_is_shown_and_the_value_to_sort_by(value, show, cell):
    assert Column("", 0, show).cell((value,)) == cell


@pytest.mark.parametrize(
    ("value", "printed"),
    [(0, "0 B"), (1_500, "1.5 kB"), (77_300_000, "77.3 MB"), (1.41e9, "1.41 GB"), (3.321e12, "3.32 TB")],
)
def test_sizes_are_in_the_unit_that_fits(value, printed):
    assert size(value) == printed


def printed_at(width, *tables):
    on = Console(file=io.StringIO(), width=width)
    draw_report(on, Report(sections=[Section(tables=tables)]))
    return on.file.getvalue().splitlines()


def test_tables_of_the_same_rows_stand_side_by_side_and_are_cut_to_the_console():
    rows = [{"who": "a", "one": 1, "two": 2.5}, {"who": "b", "one": 10, "two": None}]
    who, one, two = Column("who", "who"), Column("one thing", "one"), Column("two", "two", number)
    tables = [Table("x", [who, one], rows), Table("y", [who, two], rows, "a note")]
    assert printed_at(80, *tables) == [
        "who  one thing  two",
        "a            1  2.5",
        "b           10    –",
        "a note",
        "",
    ]
    cut = printed_at(10, *tables)
    assert [line.split() for line in cut] == [
        ["one"], ["who", "thing"], ["a", "1"], ["b", "10"], ["who", "two"], ["a", "2.5"], ["b", "–"], ["a", "note"], [],
    ]  # fmt: skip


def test_what_names_several_rows_is_said_once_and_long_tables_are_cut():
    columns = [Column("point", 0), Column("policy", 1), Column("value", 2)]
    rows = [(1, "paged", 5), (1, "ring", 6), (2, "paged", 5)]
    lines = printed_at(80, Table("", columns, rows, keys=2, at_most=2, all_in="all.csv"))
    assert [line.split() for line in lines] == [
        ["point", "policy", "value"],
        ["1", "paged", "5"],
        ["ring", "6"],
        ["and", "1", "more", "rows,", "see", "all.csv"],
        [],
    ]


def test_a_notebook_shows_the_report_of_a_result():
    found = kvsim.compare(kvsim.load("chat", workload__requests=5), ["paged"], snapshots=False)
    html = report_of(found)._repr_html_()
    assert "KV-cache policies on chat" in html
    assert "TTFT P95" in html
    assert "<script" not in html


def covered(figure):
    """Whether a legend of a figure lies over what is drawn."""
    figure.canvas.draw()
    legends = [*figure.legends, *filter(None, (axis.get_legend() for axis in figure.axes))]
    assert legends
    return any(legend.get_window_extent().overlaps(axis.bbox) for legend in legends for axis in figure.axes)


@pytest.mark.slow
def test_no_legend_covers_a_line(results, sweep_result, recommended):
    runs = json.loads((results / "comparison.json").read_text())["policies"]
    figures = [latency_ranges(runs), sweep_result.plot(), recommended.plot()]
    assert [covered(figure) for figure in figures] == [False, False, False]
    figures[0].legends[0].remove()
    figures[0].axes[0].legend(["P50"])
    assert covered(figures[0]), "the control"


@pytest.mark.slow
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
    frames = tuple(Frame(float(i), np.arange(10_000, dtype=np.int16) % 300 - 1) for i in range(200))
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


@pytest.mark.slow
def test_snapshots_of_earlier_versions_are_shown(results, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(results, folder)
    (folder / FILE).rename(folder / "films.npz")
    assert kvsim.report(folder).read_text(encoding="utf-8").count('class="strip"') == len(POLICIES)


@pytest.mark.slow
def test_the_command(results, tmp_path):
    done = command("report", str(results), "--out", str(tmp_path / "deep" / "page.html"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "page.html" in done.stdout
    assert (tmp_path / "deep" / "page.html").stat().st_size > 50_000
    done = command("report", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "no such results" in done.stderr


@pytest.fixture(scope="module")
def sweep_result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    file = {
        "name": "little",
        "scenario": "chat",
        "policies": ["paged", "contiguous", "oracle"],
        "replications": 2,
        "axes": {"cache.cells": [256, 2048], "workload.requests": [40]},
    }
    return kvsim.sweep(file, out=folder / "little.sqlite", workers=1)


@pytest.fixture(scope="module")
def sweep_page(sweep_result):
    sweep_result.save()
    return kvsim.report(sweep_result.store)


@pytest.mark.slow
def test_a_report_of_a_sweep(sweep_page):
    html = sweep_page.read_text(encoding="utf-8")
    printed = json.loads((sweep_page.parent / "little.json").read_text())
    assert printed["conclusion"] in html
    assert printed["failed"] > 0
    for part in ("cache.cells", "Failures", "exceeds cache.cells", "paged", "&#34;cache.cells&#34; = ["):
        assert part in html


@pytest.fixture(scope="module")
def recommended():
    few = SearchBudget(8, 2, 3, 2, 2, 1, fewest=30)
    return kvsim.recommend("chat", slo="ttft_p95<300ms", engine="llamacpp", requests=40, workers=1, budget=few)


@pytest.fixture(scope="module")
def recommendation_page(recommended, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recommendation")
    recommended.save(folder)
    return kvsim.report(folder)


@pytest.mark.slow
def test_a_report_of_a_recommendation(recommendation_page):
    html = recommendation_page.read_text(encoding="utf-8")
    printed = json.loads((recommendation_page.parent / "recommendation.json").read_text())
    for part in ("ttft_p95&lt;300ms", "llama-server --ctx-size", "that were ruled out", "Scenario for place 1"):
        assert part in html
    assert html.count("<tr>") > printed["searched"]["tried"]


@pytest.mark.slow
def test_a_report_of_a_comparison_over_replications(replications_page):
    html = replications_page.read_text(encoding="utf-8")
    assert "Over replications" in html
    assert "--policy oracle --replications 2" in html
    assert html.count("data:image/png") >= 3


@pytest.mark.slow
def test_a_comparison_saved_without_pictures_is_drawn_for_its_page(page, tmp_path):
    heard = []
    found = kvsim.compare(kvsim.load("chat", workload__requests=60), POLICIES, snapshots=False, detail="rows")
    found.save(tmp_path, plots=False)
    html = kvsim.report(tmp_path, progress=heard.append).read_text(encoding="utf-8")
    for part in ("data:image/png", 'type="range"', "The cells over time"):
        assert html.count(part) == page.read_text(encoding="utf-8").count(part) > 0
    assert heard == sorted(heard)
    assert heard[-1] == 1
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        ("scenario.toml", "seed = ", "seed = 1", "repeated with this version, the runs have other results"),
        ("comparison.json", '"policy": "paged"', '"policy": "mine"', "no policy called &#39;mine&#39;"),
    ],
)
def test_a_comparison_that_cannot_be_repeated_is_not_drawn_over_time(results, tmp_path, file, old, new, why):
    for name in ("scenario.toml", "comparison.json"):
        shutil.copy(results / name, tmp_path)
    text = (tmp_path / file).read_text(encoding="utf-8")
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
    html = kvsim.report(tmp_path).read_text(encoding="utf-8")
    assert f"Not drawn over time: {why}" in html
    assert html.count("data:image/png") == 1


@pytest.mark.slow
def test_what_was_saved_without_pictures_is_drawn_for_its_page(recommended, tmp_path):
    sweep = {"name": "slots", "scenario": "chat", "policies": ["paged", "ring"], "axes": {"server.slots": [2, 4]}}
    found = kvsim.sweep(sweep, requests=20, out=tmp_path / "sweep.sqlite", workers=1)
    found.save(plots=False)
    recommended.save(tmp_path / "answer", plots=False)
    assert not list(tmp_path.rglob("*.png"))
    for folder in (tmp_path, tmp_path / "answer"):
        assert kvsim.report(folder).read_text(encoding="utf-8").count("data:image/png") == 1


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


@pytest.mark.slow
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


PAGES = ["page", "all_policies_page", "replications_page", "sweep_page", "recommendation_page"]
OUT_OF_SIGHT = """
const found = [];
for (const table of document.querySelectorAll("table")) {
  const box = table.parentElement, edge = box.getBoundingClientRect();
  if (box.scrollWidth > box.clientWidth) found.push(["scrolls", box.scrollWidth, box.clientWidth]);
  for (const cell of table.querySelectorAll("th, td")) {
    const at = cell.getBoundingClientRect();
    if (cell.textContent === "") continue;
    const shown = at.width > 0 && cell.scrollWidth <= cell.clientWidth + 1;
    if (!shown || at.left < edge.left - 1 || at.right > edge.right + 1) found.push([cell.textContent, at.right]);
  }
}
return found;
"""
"""What of the tables a reader would have to scroll sideways for, or is cut off."""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("of", PAGES)
def test_every_column_of_every_table_is_in_sight(browser, request, of, width):
    look(browser, request.getfixturevalue(of), width)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(OUT_OF_SIGHT) == []


@needs_browser
def test_a_column_out_of_sight_is_found(browser, all_policies_page):
    """The control: without what makes them fit, tables scroll on a phone."""
    look(browser, all_policies_page, 390)
    browser.execute_script("for (const t of document.querySelectorAll('table')) t.classList.remove('dense', 'cards')")
    assert browser.execute_script(OUT_OF_SIGHT) != []


def cards(browser):
    """The titles of the tables whose rows are cards."""
    script = "return [...document.querySelectorAll('.cards')].map(t => t.closest('figure').firstElementChild.innerText)"
    return set(browser.execute_script(script))


@needs_browser
def test_latencies_stay_tables_on_a_phone(browser, all_policies_page):
    look(browser, all_policies_page, 390)
    assert cards(browser) == {"How the cache was used", "What the policies did"}
    look(browser, all_policies_page, 1280)
    assert cards(browser) == set()


@needs_browser
def test_cards_name_their_values_and_can_be_sorted(browser, all_policies_page):
    look(browser, all_policies_page, 390)
    head, first = browser.execute_script(
        """const table = document.querySelector(".cards"), cell = () => table.tBodies[0].rows[0].cells[1];
           table.tHead.rows[0].cells[1].firstElementChild.click();
           return [getComputedStyle(cell(), "::before").content, Number(cell().dataset.value)];"""
    )
    rest = browser.execute_script(
        "return [...document.querySelector('.cards').tBodies[0].rows].map(r => Number(r.cells[1].dataset.value))"
    )
    assert head == '"cells used"'
    assert first == min(rest)
    assert rest == sorted(rest)


@needs_browser
def test_a_page_that_is_turned_fits_again(browser, all_policies_page):
    look(browser, all_policies_page, 1280)
    for width in (390, 1280):
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        assert browser.execute_script(OUT_OF_SIGHT) == []
        assert bool(cards(browser)) is (width == 390)


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


@pytest.mark.slow
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


@pytest.mark.slow
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
