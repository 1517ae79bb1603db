// The page of a run: charts, what a click on a cell shows, the filter of events. Text of others becomes text nodes, never markup.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const live = Boolean(byId("live"));
  const COLOURS = 8;

  function element(name, text = "", attributes = {}) {
    const made = document.createElement(name);
    made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  // ---- charts ----

  const drawn = new Map(); // id -> {plot, shape}
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colourOf = (line) => css(typeof line.colour === "string" ? line.colour : line.colour < 0 ? "--ink" : `--s${line.colour % COLOURS}`);

  function number(value) {
    if (value == null) return "";
    const size = Math.abs(value);
    for (const [unit, one] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (size >= one) return `${Number((value / one).toPrecision(3))} ${unit}`;
    return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
  }

  function options(chart, width) {
    const axis = { stroke: css("--quiet"), grid: { stroke: css("--rule"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const series = chart.lines.map((line) => ({
      label: line.name,
      stroke: colourOf(line),
      width: line.colour < 0 ? 2.5 : 1.6,
      dash: line.colour >= COLOURS ? [6, 4] : undefined,
      spanGaps: true,
      points: { show: line.x.length < 3 },
      value: (_, value) => number(value),
    }));
    return {
      width,
      height: 220,
      legend: { markers: { width: 0, fill: (plot, i) => plot.series[i].stroke(plot, i) } },
      cursor: { points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: chart.log ? { distr: 3 } : {} },
      axes: [
        { ...axis, size: 30, values: (_, values) => values.map(number) },
        { ...axis, size: 52, values: (_, values) => values.map(number) },
      ],
      series: [{ label: chart.unit, value: (_, value) => number(value) }, ...series],
    };
  }

  const joined = (chart) => uPlot.join(chart.lines.map((line) => [line.x, line.y]));

  function draw(charts) {
    const place = byId("charts");
    if (!charts.length) return;
    if (!drawn.size) place.replaceChildren();
    for (const chart of charts) {
      const shape = JSON.stringify(chart.lines.map((line) => [line.name, line.colour, line.x.length < 3]));
      const known = drawn.get(chart.id);
      if (known && known.shape === shape) {
        known.chart = chart;
        known.plot.setData(joined(chart));
        continue;
      }
      const box = known ? known.box : element("div", "", { "data-chart": chart.id });
      if (known) known.plot.destroy();
      else place.append(box);
      box.replaceChildren(element("h3", chart.title));
      const plot = new uPlot(options(chart, box.clientWidth || 440), joined(chart), box);
      drawn.set(chart.id, { plot, shape, box, chart });
      if (!known) sizes.observe(box);
    }
  }

  const sizes = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const known = drawn.get(target.dataset.chart);
      if (known && contentRect.width > 0 && Math.abs(known.plot.width - contentRect.width) > 1) {
        requestAnimationFrame(() => known.plot.setSize({ width: contentRect.width, height: 220 }));
      }
    }
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    const charts = [...drawn.values()].map((known) => known.chart);
    for (const known of drawn.values()) known.shape = ""; // its colours are others now
    draw(charts);
  });

  // ---- a click on a cell ----

  const kept = byId("rounds-data") ? JSON.parse(byId("rounds-data").textContent) : null;

  async function roundOf(id) {
    if (kept) return kept[id];
    const answer = await fetch(`/rounds/${id}`);
    return answer.ok ? answer.json() : null;
  }

  function table(head, rows, chosen) {
    const made = element("table");
    const line = element("tr");
    line.append(...head.map((text) => element("th", text)));
    made.append(line);
    for (const row of rows) {
      const cells = element("tr");
      if (row[0] === chosen) cells.className = "chosen";
      cells.append(...row.map((text) => element("td", String(text))));
      made.append(cells);
    }
    return made;
  }

  async function show(id, peer) {
    const round = await roundOf(id);
    if (!round) return;
    const dialog = byId("details");
    const close = element("button", "Close", { type: "button", class: "close" });
    close.addEventListener("click", () => dialog.close());
    const facts = element("dl");
    for (const [name, value] of round.facts) if (value) facts.append(element("dt", name), element("dd", value));
    const peers = Object.entries(round.peers).map(([name, one]) => [name, one.verdict, one.norm, one.weight, one.staleness || ""]);
    const parts = [close, element("h2", round.title, { id: "details-title" }), facts];
    parts.push(table(["peer", "verdict", "norm", "weight", "stale"], peers, peer));
    const one = round.peers[peer];
    if (one && one.fragments.length > 1) {
      const more = element("details");
      more.append(element("summary", `${peer}, each of its ${one.fragments.length} fragments`));
      more.append(table(["fragment", "verdict", "norm", "weight", "stale"], one.fragments));
      parts.push(more);
    }
    dialog.replaceChildren(...parts);
    if (!dialog.open) dialog.showModal();
  }

  const grid = byId("grid");
  grid.addEventListener("click", (event) => {
    const cell = event.target.closest("button[data-round]");
    if (cell) show(cell.dataset.round, cell.dataset.peer);
  });
  grid.addEventListener("keydown", (event) => {
    const cell = event.target.closest("button[data-round]");
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] || [];
    if (!cell || down === undefined) return;
    const row = cell.closest("tr").parentElement.rows[cell.closest("tr").sectionRowIndex + down];
    const next = row && row.cells[cell.parentElement.cellIndex + right];
    if (next && next.firstElementChild instanceof HTMLButtonElement) {
      event.preventDefault();
      next.firstElementChild.focus();
    }
  });
  byId("details").addEventListener("click", (event) => {
    if (event.target === event.currentTarget) event.currentTarget.close();
  });

  // ---- events ----

  const shownEvents = () => [...document.querySelectorAll(".events li")].filter((line) => !line.hidden);

  function filter() {
    const words = byId("filter").value.toLowerCase();
    const tone = byId("tone").value;
    for (const line of document.querySelectorAll(".events li")) {
      line.hidden = !(line.textContent.toLowerCase().includes(words) && (!tone || line.dataset.tone === tone));
    }
    byId("matches").textContent = words || tone ? `${shownEvents().length} shown` : "";
  }

  // A text that a spreadsheet would take for a formula gets an apostrophe before it.
  function field(text) {
    const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return `"${safe.replaceAll('"', '""')}"`;
  }

  function csv() {
    const rows = shownEvents().map((line) => [
      line.querySelector("time").textContent, line.dataset.kind, line.dataset.peer, line.dataset.tone, line.querySelector("span").textContent,
    ]);
    return [["utc", "kind", "member", "tone", "text"], ...rows].map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
  }

  byId("filter").addEventListener("input", filter);
  byId("tone").addEventListener("change", filter);
  byId("csv").addEventListener("click", () => {
    const link = element("a", "", { download: "events.csv" });
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });

  // ---- following the run ----

  function toNewest() {
    grid.scrollLeft = grid.scrollWidth;
  }

  if (live) {
    const state = byId("live");
    const body = document.body;
    body.addEventListener("htmx:sseMessage", (event) => {
      if (event.detail.type === "charts") draw(JSON.parse(event.detail.data));
      if (event.detail.type === "events") filter();
    });
    let atEnd = true;
    body.addEventListener("htmx:sseBeforeMessage", (event) => {
      if (event.detail.type === "rounds") atEnd = grid.scrollLeft + grid.clientWidth >= grid.scrollWidth - 4;
    });
    body.addEventListener("htmx:sseMessage", (event) => {
      if (event.detail.type === "rounds" && atEnd) toNewest();
    });
    body.addEventListener("htmx:sseOpen", () => { state.textContent = "live"; state.classList.remove("lost"); });
    body.addEventListener("htmx:sseError", () => { state.textContent = "the page's process does not answer"; state.classList.add("lost"); });
    body.addEventListener("htmx:configRequest", (event) => {
      event.detail.headers["X-CSRF-Token"] = document.querySelector("meta[name=csrf]").content;
    });
  }
  draw(JSON.parse(byId("charts-data").textContent));
  toNewest();
})();
