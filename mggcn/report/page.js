// Curves: values under the pointer; drag over a stretch to enlarge it, click twice to see all again.
"use strict";
const WIDTH = 1000; // of every drawing's view box, as in chart.py

function ticks(low, high) {
  const rough = Math.max((high - low) / 6, 1), size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 5, 10].find((factor) => factor * size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return found;
}

function activate(figure) {
  const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg"), said = figure.querySelector("output");
  const [first, last] = figure.dataset.range.split(" ").map(Number);
  const lines = [...svg.querySelectorAll("path[data-y]")].map((path) => ({
    x: path.dataset.x.split(" ").map(Number), y: path.dataset.y.split(" "),
    shown: figure.querySelector(`[data-line="${path.dataset.line}"] b`),
  }));
  const cursor = plot.appendChild(document.createElement("i"));
  cursor.className = "cursor";
  let [low, high] = [first, last], from = null;

  const share = (event) => {
    const box = plot.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
  };
  const percent = (epoch) => `${(100 * (epoch - low)) / (high - low)}%`;

  function show(start, end) {
    [low, high] = [start, end];
    const scale = WIDTH / (last - first);
    svg.setAttribute("viewBox", `${(low - first) * scale} 0 ${(high - low) * scale} ${WIDTH}`);
    plot.querySelectorAll("span.x").forEach((tick) => tick.remove());
    for (const epoch of ticks(low, high)) {
      const tick = plot.appendChild(document.createElement("span"));
      tick.className = "x";
      tick.textContent = epoch;
      tick.style.left = percent(epoch);
    }
  }

  function point(event) {
    const wanted = low + share(event) * (high - low);
    const nearest = (x) => x.reduce((best, at, k) => (Math.abs(at - wanted) < Math.abs(x[best] - wanted) ? k : best), 0);
    const epoch = lines[0].x[nearest(lines[0].x)]; // the one whose values are shown
    for (const { x, y, shown } of lines) {
      const k = nearest(x);
      if (shown) shown.textContent = Math.abs(x[k] - wanted) <= Math.max(1, (high - low) / 20) ? y[k] : "";
    }
    said.textContent = `epoch ${epoch}`;
    cursor.className = from === null ? "cursor" : "cursor chosen";
    const [left, right] = [Math.min(from ?? wanted, wanted), Math.max(from ?? wanted, wanted)];
    cursor.style.left = percent(from === null ? epoch : left);
    cursor.style.width = from === null ? "1px" : `${(100 * (right - left)) / (high - low)}%`;
    cursor.hidden = false;
  }

  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerleave", () => { cursor.hidden = true; from = null; });
  plot.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") from = low + share(event) * (high - low); });
  plot.addEventListener("pointerup", (event) => {
    const end = low + share(event) * (high - low), start = from;
    from = null;
    if (start !== null && Math.abs(end - start) >= Math.max(2, (high - low) / 50)) show(Math.min(start, end), Math.max(start, end));
    point(event);
  });
  plot.addEventListener("dblclick", () => show(first, last));
  cursor.hidden = true;
}

document.querySelectorAll("figure.chart").forEach(activate);
