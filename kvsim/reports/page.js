"use strict";

function sortBy(table, column, head) {
  const up = head.getAttribute("aria-sort") === "descending" || head.getAttribute("aria-sort") === "none";
  const key = (row) => {
    const text = row.cells[column].dataset.value;
    if (text === undefined) return null;
    const value = Number(text);
    return row.cells[column].classList.contains("number") && !Number.isNaN(value) ? value : text;
  };
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = x < y ? -1 : x > y ? 1 : 0;
    return up ? order : -order;
  });
  table.tBodies[0].append(...rows);
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
}

// Brings all columns of a table into sight: set closer where they do not fit and, if that is not enough, rows as cards.
function fit(table) {
  table.classList.remove("dense", "cards");
  for (const way of ["dense", "cards"]) {
    if (table.offsetWidth <= table.parentElement.clientWidth) return;
    table.classList.add(way);
  }
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.firstElementChild.addEventListener("click", () => sortBy(table, column, head));
    for (const row of table.tBodies[0].rows) row.cells[column].dataset.head = head.textContent;
  });
  let width = null;
  new ResizeObserver(() => {
    if (table.parentElement.offsetWidth !== width) fit(table);
    width = table.parentElement.offsetWidth;
  }).observe(table.parentElement);
}

function colours() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const free = dark ? [52, 56, 62] : [255, 255, 255];
  const table = [free];
  for (let i = 0; i < 255; i++) {
    // Successive sequences lie far apart on the circle of hues.
    const hue = (i * 137.508) % 360, light = dark ? 0.6 : 0.52, chroma = 0.62 * Math.min(light, 1 - light);
    const channel = (n) => {
      const k = (n + hue / 30) % 12;
      return Math.round(255 * (light - chroma * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
    };
    table.push([channel(0), channel(8), channel(4)]);
  }
  return table;
}

function snapshotStrip(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const frames = Uint8Array.from(atob(data.frames), (letter) => letter.charCodeAt(0));
  const canvas = figure.querySelector("canvas"), slider = figure.querySelector("input");
  const output = figure.querySelector("output"), play = figure.querySelector(".play");
  const width = Math.min(data.columns, data.cells), height = Math.ceil(data.cells / width);
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  let timer = null;
  const draw = () => {
    const table = colours(), image = context.createImageData(width, height), at = Number(slider.value);
    for (let cell = 0; cell < data.cells; cell++) {
      image.data.set([...table[frames[at * data.cells + cell]], 255], 4 * cell);
    }
    context.putImageData(image, 0, 0);
    output.textContent = [data.times[at].toPrecision(4) + " s", ...data.said.slice(at, at + 1)].join("; ");
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "▶";
  };
  slider.addEventListener("input", draw);
  play.addEventListener("click", () => {
    if (timer !== null) return stop();
    if (Number(slider.value) === data.times.length - 1) slider.value = 0;
    play.textContent = "❚❚";
    timer = setInterval(() => {
      slider.value = Number(slider.value) + 1;
      draw();
      if (Number(slider.value) >= data.times.length - 1) stop();
    }, 80);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  slider.value = Math.floor(data.times.length / 2);
  draw();
}

document.querySelectorAll(".strip").forEach(snapshotStrip);
