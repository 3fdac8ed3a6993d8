"use strict";
// The page of a report. All data is in the element #data; nothing is loaded.
const DATA = JSON.parse(document.getElementById("data").textContent);
const REPORTS = DATA.reports;
const COLORS = ["#4e79a7", "#a0cbe8", "#59a14f", "#9ad18b", "#b6992d", "#f1ce63", "#bab0ac", "#79706e", "#e15759", "#b07aa1"];
const chosen = { region: 0, pass: 0 };
const views = [];

/* elements */

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

function draw(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function fill(element, ...children) {
  element.replaceChildren(...children.filter((c) => c !== null && c !== undefined));
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0, value = Math.abs(bytes);
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${bytes < 0 ? "−" : ""}${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

// "/home/me/model.py:92: code" as "model.py:92  code", with all of it on hover.
function line(where) {
  const parts = /^(.*?):(\d+)(?:: (.*))?$/.exec(where || "");
  if (!parts) return make("span", {}, where || "");
  const short = `${parts[1].split(/[\\/]/).pop()}:${parts[2]}`;
  return make("span", { title: where }, `${short}  ${parts[3] || ""}`);
}

/* a table that sorts by its columns */

function table(columns, rows, options = {}) {
  const state = { by: options.by ?? -1, down: options.down ?? true, all: false };
  const head = make("tr"), body = make("tbody"), most = options.most || 200;
  columns.forEach((column, i) => {
    const sort = () => { state.down = state.by === i ? !state.down : column.number === true; state.by = i; show(); };
    head.append(make("th", { class: `${column.number ? "number " : ""}${column.key ? "sortable" : ""}`,
      onclick: column.key ? sort : () => {} }));
  });
  function show() {
    const column = columns[state.by], sorted = [...rows];
    if (column) sorted.sort((a, b) => {
      const [x, y] = [column.key(a), column.key(b)];
      return (x < y ? -1 : x > y ? 1 : 0) * (state.down ? -1 : 1);
    });
    [...head.children].forEach((th, i) => { th.textContent = columns[i].name + (i === state.by ? (state.down ? " ▾" : " ▴") : ""); });
    const shown = state.all ? sorted : sorted.slice(0, most);
    fill(body, ...shown.map((row) => make("tr", {}, ...columns.map((c) =>
      make("td", { class: `${c.number ? "number " : ""}${c.class || ""}` }, c.cell(row))))));
    if (shown.length < sorted.length) body.append(make("tr", {}, make("td", { colspan: columns.length },
      make("button", { onclick: () => { state.all = true; show(); } }, `show all ${sorted.length}`))));
  }
  show();
  return make("table", {}, make("thead", {}, head), body);
}

/* memory */

class Memory {
  constructor(report, most) {
    this.data = report.memory;
    this.most = most;
    this.at = this.data.peak;
    this.only = null;
    this.plotted = make("div", { class: "plot" });
    this.legend = make("div");
    this.buffers = make("div", { class: "scroll" });
    this.title = make("h3");
    const what = this.data.backward ? "a step" : "the forward";
    this.root = make("section", {},
      make("h2", {}, `Memory of ${what}, above weights and their gradients`),
      make("div", { class: "chart" }, this.plotted, this.legend),
      this.title, this.buffers);
  }

  // Stacked from below: each line is the sum of its area and all below it, and hides what is under it.
  plot() {
    const { moments, held, areas } = this.data;
    const sums = [];
    held.forEach((area, i) => sums.push(area.map((bytes, m) => bytes + (i ? sums[i - 1][m] : 0))));
    const order = areas.map((_, i) => areas.length - 1 - i);
    const stepped = uPlot.paths.stepped({ align: 1 });
    const options = {
      width: this.plotted.clientWidth, height: 320, legend: { show: false }, padding: [22, 8, 0, 0],
      scales: { x: { time: false }, y: { range: [0, this.most * 1.04] } },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      axes: [
        { values: () => [], grid: { show: false }, ticks: { show: false }, size: 46 },
        { values: (_, ticks) => ticks.map(size), size: 74, splits: (_, axis, low, high) => this.splits(high),
          grid: { stroke: "#e6eaee", width: 1 } },
      ],
      series: [{}, ...order.map((i) => ({ fill: COLORS[i], stroke: COLORS[i], width: 1, paths: stepped,
        points: { show: false } }))],
      hooks: {
        draw: [(u) => { this.marks(u); this.visits(u); }],
        setCursor: [(u) => this.list(u.cursor.idx ?? this.at)],
      },
    };
    const plot = new uPlot(options, [moments, ...order.map((i) => sums[i])], this.plotted);
    plot.over.addEventListener("click", () => { if (plot.cursor.idx !== null) this.select(plot.cursor.idx); });
    window.addEventListener("resize", () => plot.setSize({ width: this.plotted.clientWidth, height: 320 }));
    this.chart = plot;
    this.select(this.at);
  }

  splits(high) {
    const rough = high / 5, power = 2 ** Math.floor(Math.log2(rough));
    const step = [1, 1.25, 1.5, 2].map((f) => f * power).find((s) => s >= rough) || power * 2;
    return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
  }

  marks(u) {
    const { moments, peak } = this.data, context = u.ctx, ratio = devicePixelRatio;
    const stroke = (index, dash, text) => {
      const x = Math.round(u.valToPos(moments[index], "x", true));
      context.save();
      context.beginPath();
      context.setLineDash(dash);
      context.strokeStyle = "#1d2329";
      context.lineWidth = ratio;
      context.moveTo(x, u.bbox.top - 4 * ratio);
      context.lineTo(x, u.bbox.top + u.bbox.height);
      context.stroke();
      context.fillStyle = "#1d2329";
      context.font = `${12 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
      context.textAlign = x > u.bbox.left + u.bbox.width / 2 ? "right" : "left";
      if (text) context.fillText(text, x + (context.textAlign === "right" ? -6 : 6) * ratio, u.bbox.top - 8 * ratio);
      context.restore();
    };
    stroke(peak, [4 * ratio, 3 * ratio], `peak ${size(this.data.bytes)}`);
    if (this.at !== peak) stroke(this.at, [], "");
  }

  // Two strips below the chart: forward and backward, and the regions of the chain.
  visits(u) {
    const context = u.ctx, ratio = devicePixelRatio, bottom = u.bbox.top + u.bbox.height;
    const left = u.bbox.left, right = left + u.bbox.width;
    const strip = (from, to, row, color, text) => {
      const a = Math.max(left, u.valToPos(from, "x", true)), b = Math.min(right, u.valToPos(to, "x", true));
      if (b <= a) return;
      const top = bottom + (4 + 20 * row) * ratio;
      context.fillStyle = color;
      context.fillRect(a, top, Math.max(1, b - a - 1), 17 * ratio);
      context.fillStyle = "#1d2329";
      if (context.measureText(text).width < b - a - 6 * ratio) context.fillText(text, (a + b) / 2, top + 12.5 * ratio);
    };
    context.save();
    context.font = `${11 * ratio}px system-ui, "DejaVu Sans", sans-serif`;
    context.textAlign = "center";
    const start = this.data.visits.find((v) => v[1] === -1 && v[2] === "backward");
    const turn = start ? start[3] : this.data.end;
    strip(0, turn, 0, "#d7e8f7", "forward");
    if (start) strip(turn, this.data.end, 0, "#f3dfee", "backward");
    for (const [, link, , from, to] of this.data.visits) {
      if (link < 0) continue;
      strip(from, to, 1, link % 2 ? "#e3e8ed" : "#cfd6dd", String(link));
    }
    context.restore();
  }

  select(index) {
    this.at = Math.max(0, Math.min(this.data.moments.length - 1, index));
    this.chart?.redraw(false);
    this.list(this.at);
    this.table();
  }

  list(index) {
    const { areas, held } = this.data;
    const total = held.reduce((sum, area) => sum + area[index], 0);
    const rows = areas.map((name, i) => make("tr", { class: `choice${this.only !== null && this.only !== i ? " off" : ""}`,
      title: "show only these buffers", onclick: () => { this.only = this.only === i ? null : i; this.list(this.at); this.table(); } },
    make("td", {}, make("span", { class: "dot", style: `background:${COLORS[i]}` }), name),
    make("td", { class: "number" }, held[i][index] ? size(held[i][index]) : "")));
    fill(this.legend, make("table", {}, make("tbody", {}, ...rows.reverse(),
      make("tr", {}, make("td", {}, make("b", {}, index === this.data.peak ? "at the peak" : "at this moment")),
        make("td", { class: "number" }, make("b", {}, size(total)))))),
    make("p", { class: "soft" }, "Numbers below the chart count the regions of the chain. Click into the chart to list the buffers of another moment; drag to zoom, double-click to go back."));
  }

  table() {
    const { buffers, holders, texts, moments, end, areas } = this.data, moment = moments[this.at];
    const alive = buffers.filter((b) => b[1] <= moment && moment < b[2] && (this.only === null || holders[b[4]][0] === this.only));
    const holder = (b) => holders[b[4]];
    const columns = [
      { name: "value", key: (b) => holder(b)[1], class: "code", cell: (b) => make("span", { title: areas[holder(b)[0]] },
        make("span", { class: "dot", style: `background:${COLORS[holder(b)[0]]}` }), holder(b)[1]) },
      { name: "bytes", number: true, key: (b) => b[0], cell: (b) => size(b[0]) },
      { name: "held for", key: (b) => areas[holder(b)[0]], cell: (b) => areas[holder(b)[0]] + (holder(b)[4] ? ", recomputed" : "") },
      { name: "shape", class: "code", key: (b) => texts[b[6]], cell: (b) => texts[b[6]] + (holder(b)[2] ? `  ${holder(b)[2]}` : "") },
      { name: "lifetime", key: (b) => b[2] - b[1], number: true, cell: (b) => this.life(b, end, moment) },
      { name: "in chain", number: true, key: (b) => b[3], cell: (b) => (b[3] < 0 ? "" : String(b[3])) },
      { name: "made in", key: (b) => texts[b[5]], cell: (b) => texts[b[5]] },
      { name: "your line", class: "line", key: (b) => holder(b)[3], cell: (b) => line(holder(b)[3]) },
    ];
    const where = this.at === this.data.peak ? "the peak" : `moment ${moment} of ${end}`;
    const only = this.only === null ? "" : `, ${areas[this.only]} only`;
    this.title.textContent = `Buffers held at ${where}${only}: ${alive.length}, ${size(alive.reduce((s, b) => s + b[0], 0))}`;
    fill(this.buffers, table(columns, alive, { by: 1 }));
  }

  life(buffer, end, moment) {
    const share = (x) => `${(100 * x) / end}%`;
    return make("div", { class: "life", title: `from moment ${buffer[1]} to ${buffer[2]} of ${end}` },
      make("i", { style: `left:${share(buffer[1])};width:${share(buffer[2] - buffer[1])};background:${COLORS[this.data.holders[buffer[4]][0]]}` }),
      make("b", { style: `left:${share(moment)}` }));
  }
}

/* regions */

function triangle(keys) {
  const side = 132, scale = side / keys.length;
  const svg = draw("svg", { width: side, height: side, viewBox: `0 0 ${side} ${side}` },
    draw("rect", { width: side, height: side, fill: "#eef1f4" }));
  for (const [start, stop, first, last] of keys.chunks) {
    const box = { y: start * scale, height: (stop - start) * scale, stroke: "#fff", "stroke-width": keys.chunks.length > 40 ? 0 : 0.6 };
    for (const [from, to, fill] of [[first, Math.min(last, start), "#59a14f"], [start, stop, "#9ad18b"], [Math.max(first, stop), last, "#59a14f"]]) {
      if (to > from) svg.append(draw("rect", { ...box, x: from * scale, width: (to - from) * scale, fill }));
    }
  }
  const text = `queries ↓, keys →. Light: a chunk's own keys; dark: other keys that it reads; grey: pruned.`;
  return make("figure", { title: text }, svg, make("div", {}, `${(100 * keys.read).toFixed(0)} % of blocks read, keys ${keys.reach}`),
    make("div", {}, keys.proof));
}

function sweep(data, index) {
  const columns = [
    { name: "role", key: (b) => b[0], cell: (b) => b[0] },
    { name: "value", class: "code", key: (b) => b[1], cell: (b) => b[1] },
    { name: "pattern", class: "code", key: (b) => b[2], cell: (b) => b[2] + (b[4] ? `  overwritten by ${b[4]}` : "") },
    { name: "bytes", number: true, key: (b) => b[3], cell: (b) => size(b[3]) },
    { name: "your line", class: "line", key: (b) => b[5], cell: (b) => line(b[5]) },
  ];
  const rate = data.efficiency === null ? "" : `, matrix products at ${(100 * data.efficiency).toFixed(0)} % of the device's rate`;
  return make("div", { class: `sweep ${data.direction}` },
    make("div", {},
      make("b", {}, `sweep ${index + 1}, ${data.direction} ${data.direction === "ascending" ? "↑" : "↓"}`),
      ` ${data.count} chunks of ${data.chunk} tokens, ${data.ops} operations${rate}`,
      ...data.kernels.map((k) => make("p", { class: "soft" }, `attention kernel: ${k}`)),
      table(columns, data.bindings)),
    data.keys ? triangle(data.keys) : make("span"));
}

function refusal(region, data) {
  return make("div", { class: "refusal" },
    make("b", {}, `${region.name} ×${region.times} runs unchunked: `), `${data.reason}.`,
    make("p", {}, make("b", {}, "What to do: "), `${data.remedy}.`),
    make("p", { class: "soft" }, `${data.op}${data.cost ? `; its largest value takes ${size(data.cost)} at full length` : ""}  `, line(data.where)));
}

function listing(rows) {
  const body = make("tbody"), patterns = rows.some((row) => row[1]);
  let before = null;
  for (const [text, pattern, where] of rows) {
    const opens = where !== before;
    const row = make("tr", { class: opens && where ? "opens" : "" }, make("td", { title: text, class: text.startsWith("inputs: ") ? "inputs" : "" }, text),
      patterns ? make("td", { class: "pattern" }, pattern) : null, make("td", { class: "line" }, opens ? line(where) : ""));
    row.dataset.where = where;
    before = where;
    body.append(row);
  }
  const light = (where) => { for (const row of body.children) row.classList.toggle("same", where !== "" && row.dataset.where === where); };
  body.addEventListener("mouseover", (e) => light(e.target.closest("tr")?.dataset.where ?? ""));
  body.addEventListener("mouseleave", () => light(""));
  const head = make("tr", {}, ...["code", "pattern", "your line"].filter((name) => patterns || name !== "pattern").map((name) => make("th", {}, name)));
  return make("table", {}, make("thead", {}, head), body);
}

function values(rows) {
  return table([
    { name: "value", key: (v) => v[0], cell: (v) => v[0] },
    { name: "pattern", class: "pattern", key: (v) => v[1], cell: (v) => v[1] },
    { name: "role", key: (v) => v[2], cell: (v) => v[2] },
    { name: "full length", number: true, key: (v) => v[3], cell: (v) => (v[3] ? size(v[3]) : "") },
    { name: "reads (reach)", key: (v) => v[4], cell: (v) => v[4] },
    { name: "your line", class: "line", key: (v) => v[5], cell: (v) => line(v[5]) },
  ], rows, { most: 2000 });
}

class Regions {
  constructor(report) {
    this.report = report;
    this.chain = make("div", { class: "chips" });
    this.detail = make("section");
    this.steps = make("section");
    this.root = [make("section", {}, make("h2", {}, "Chain of regions"), this.chain), this.detail, this.steps];
  }

  get region() { return this.report.regions[Math.min(chosen.region, this.report.regions.length - 1)]; }

  show() {
    const runs = [];
    for (const index of this.report.chain) {
      if (runs.length && runs[runs.length - 1][0] === index) runs[runs.length - 1][1] += 1;
      else runs.push([index, 1]);
    }
    const chips = runs.flatMap(([index, count], i) => {
      const region = this.report.regions[index], sweeps = region.schedules.map((s) => s.sweeps.length).filter(Boolean);
      const number = sweeps.length ? `, ${sweeps.join(" + ")} sweep${sweeps.join() === "1" ? "" : "s"}` : region.refusal ? ", unchunked" : "";
      const text = `${region.name}${count > 1 ? ` ×${count}` : ""}${number}`;
      const state = `${region === this.region ? "chosen" : ""} ${region.refusal ? "refused" : ""}`;
      const button = make("button", { class: state, onclick: () => choose(index, chosen.pass) }, text);
      return i ? [make("span", { class: "arrow" }, "→"), button] : [button];
    });
    fill(this.chain, ...chips);
    this.showDetail();
    this.showSteps();
  }

  showDetail() {
    const region = this.region, again = region.recomputable ? ", recomputed in the backward" : "";
    const parts = region.schedules.flatMap((s) => [
      make("h3", {}, `${s.title}: ${s.sweeps.length} sweep${s.sweeps.length === 1 ? "" : "s"}`,
        make("span", { class: "soft" }, `  ${size(s.streamed)} streamed, ${size(s.whole)} unchunked`)),
      ...s.sweeps.map(sweep),
      ...s.wide.map(([name, bytes, where]) => make("p", { class: "more" }, `too wide: ${name} takes ${size(bytes)} at full length  `, line(where))),
    ]);
    const lines = region.lines.slice(0, 1).concat(region.lines.length > 1 ? region.lines.slice(-1) : []);
    fill(this.detail, make("h2", {}, `${region.name} ×${region.times}${again}`),
      make("p", { class: "soft code" }, ...lines.flatMap((where, i) => (i ? ["  …  ", line(where)] : [line(where)]))),
      region.refusal ? refusal(region, region.refusal) : null,
      region.batch ? make("p", {}, `Runs for ${region.batch}; sizes are those of one turn.`) : null,
      ...region.conditions.map((c) => make("p", {}, `Checked in every call: ${c}; where it fails, the region is compiled again without it.`)),
      ...parts);
  }

  showSteps() {
    const passes = this.region.passes, index = Math.min(chosen.pass, passes.length - 1), pass = passes[index];
    const nav = passes.map((p, i) => make("button", { class: i === index ? "chosen" : "", onclick: () => choose(chosen.region, i) }, `${i + 1}  ${p.title}`));
    fill(this.steps, make("h2", {}, `Passes of ${this.region.name}`),
      make("div", { class: "steps" }, make("nav", {}, ...nav),
        make("div", {}, make("p", { class: "soft" }, pass.text),
          make("div", { class: "listing" }, pass.values ? values(pass.values) : listing(pass.code)))));
  }
}

/* the page */

function summary(report, name) {
  const refused = report.regions.filter((r) => r.refusal);
  const [, streamed, total] = /(\d+) of (\d+) regions streamed/.exec(report.headline[0]) || [null, "?", "?"];
  const facts = [["predicted peak", report.memory ? size(report.memory.bytes) : "unknown"],
    ["tokens", report.tokens.join(" and ") || "none"], ["regions streamed", `${streamed} of ${total}`]];
  return make("section", {}, name ? make("h2", {}, name) : null,
    make("div", { class: "facts" }, ...facts.map(([label, value]) => make("div", {}, make("span", {}, label), make("b", { class: "big" }, value)))),
    ...report.headline.slice(1).map((text) => make("p", { class: "soft" }, text)),
    ...refused.map((r) => refusal(r, r.refusal)),
    ...report.notes.map((text) => make("p", { class: "more" }, text)));
}

// What the areas hold at both peaks.
function difference([a, b], names) {
  if (!a.memory || !b.memory) return null;
  const rows = a.memory.areas.map((name, i) => [name, i, a.memory.held[i][a.memory.peak], b.memory.held[i][b.memory.peak]]);
  const total = ["at the peak", -1, a.memory.bytes, b.memory.bytes];
  const cell = (row) => { const by = row[3] - row[2]; return make("span", { class: by > 0 ? "more" : by < 0 ? "less" : "soft" }, by > 0 ? `+${size(by)}` : by ? size(by) : "="); };
  return make("section", { class: "narrow" }, make("h2", {}, "Peak, side by side"), table([
    { name: "held for", cell: (r) => make("span", {}, make("span", { class: "dot", style: `background:${r[1] < 0 ? "transparent" : COLORS[r[1]]}` }), r[0]) },
    { name: names[0], number: true, cell: (r) => size(r[2]) },
    { name: names[1], number: true, cell: (r) => size(r[3]) },
    { name: "difference", number: true, cell },
  ], [...rows.filter((r) => r[2] || r[3]).reverse(), total]));
}

function choose(region, pass) {
  const regions = Math.max(...REPORTS.map((r) => r.regions.length));
  chosen.region = Math.max(0, Math.min(regions - 1, region));
  const passes = Math.max(...views.map((v) => v.regions.region.passes.length));
  chosen.pass = Math.max(0, Math.min(passes - 1, pass));
  views.forEach((v) => v.regions.show());
}

const KEYS = {
  ArrowRight: () => choose(chosen.region, chosen.pass + 1),
  ArrowLeft: () => choose(chosen.region, chosen.pass - 1),
  "]": () => choose(chosen.region + 1, chosen.pass),
  "[": () => choose(chosen.region - 1, chosen.pass),
  ".": () => views.forEach((v) => v.memory?.select(v.memory.at + 1)),
  ",": () => views.forEach((v) => v.memory?.select(v.memory.at - 1)),
  p: () => views.forEach((v) => v.memory?.select(v.memory.data.peak)),
};

function start() {
  const two = REPORTS.length > 1, most = Math.max(1, ...REPORTS.map((r) => (r.memory ? r.memory.bytes : 0)));
  const keys = [["← →", "pass"], ["[ ]", "region"], [", .", "moment"], ["p", "peak"]];
  const columns = make("div", { class: `columns${two ? " two" : ""}` });
  const page = document.getElementById("page");
  page.append(make("header", {}, make("h1", {}, "streambp report"), make("span", { class: "soft" }, DATA.title),
    make("span", { class: "keys" }, ...keys.flatMap(([key, what]) => [make("kbd", {}, key), ` ${what}   `]))));
  if (two) page.append(make("div", { class: "columns" }, difference(REPORTS, DATA.names) || ""));
  page.append(columns);
  REPORTS.forEach((report, i) => {
    const memory = report.memory ? new Memory(report, most) : null, regions = new Regions(report);
    views.push({ memory, regions });
    columns.append(make("div", { class: "report" }, summary(report, two ? DATA.names[i] : ""), memory ? memory.root : "", ...regions.root));
    memory?.plot();
  });
  const layer = REPORTS[0].regions.findIndex((r) => r.times === Math.max(...REPORTS[0].regions.map((s) => s.times)));
  choose(layer, 0);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    KEYS[event.key]();
    event.preventDefault();
  });
}

start();
