"use strict";
// Draws what scripts/report/payload.py makes. Text of a run goes into the page as text, never as HTML.
const COLOURS = ["#3b82d0", "#e8811a", "#2f9e54", "#c94f4f", "#8a63c7", "#9a6a4f", "#d46ab0", "#7a8288", "#a8a12a", "#22a7b5"];
const ROWS = 50;
const source = document.getElementById("data");
let data = JSON.parse(source.textContent);
const state = { hidden: new Set(), run: null, search: "", column: "weight", descending: true, rows: ROWS };

const byId = (id) => document.getElementById(id);
function make(tag, text, properties = {}) {
  const element = document.createElement(tag);
  if (text !== null && text !== undefined) element.textContent = text;
  return Object.assign(element, properties);
}
const colour = (i) => COLOURS[i % COLOURS.length];
const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Each panel: its title, what it shows (a key of `meanings`), how to read its lines, the traces of a run, its y axis.
const line = (x, y, name, i, more = {}) => ({
  x, y, name, type: "scatter", mode: "lines", line: { color: colour(i), width: 1.6, ...more.line }, ...more.trace,
});
const series = (name, style = {}) => (run, i) => [line(run.steps, run.series[name], run.label, i, style)];
const SMOOTHED = 10;
function meanOfLast(values) {
  return values.map((_, at) => {
    const known = values.slice(Math.max(0, at - SMOOTHED + 1), at + 1).filter((v) => v !== null);
    return known.length ? known.reduce((a, b) => a + b) / known.length : null;
  });
}
const faint = { trace: { opacity: 0.25, hoverinfo: "skip" }, line: { width: 1 } };
const dotted = { line: { dash: "dot" } };
const PANELS = [
  { id: "accuracy", title: "Accuracy", meaning: "held out", lines: "bars: one standard error; dashed: evaluated beside the run; dotted: each of several held-out sets", percent: true, traces: (run, i) => {
    const [x, y, array] = [0, 1, 2].map((at) => run.validations.map((v) => v[at]));
    const error_y = { type: "data", array, thickness: 1, width: 0, visible: array.some((v) => v !== null) };
    return [line(x, y, run.label, i, { trace: { mode: "lines+markers", error_y } }), beside(run, i), ...each(run, i)];
  } },
  { id: "reward", title: "Reward", meaning: "reward", lines: `bold: mean of the last ${SMOOTHED} steps`, traces: (run, i) => [
    line(run.steps, run.series.reward, run.label, i, faint),
    line(run.steps, meanOfLast(run.series.reward), run.label, i) ] },
  { id: "ess_ratio", title: "ESS ratio", meaning: "ess", level: "ess_ratio", range: [0, 1.05], traces: series("ess_ratio") },
  { id: "kl", title: "KL", meaning: "kl", level: "kl", log: true, traces: series("kl") },
  { id: "grad_norm", title: "Gradient norm", meaning: "grad", log: true, traces: series("grad_norm") },
  { id: "equal_groups", title: "Groups without a signal", meaning: "equal groups", percent: true, range: [0, 1.02], traces: series("equal_groups") },
  { id: "lag", title: "Lag", meaning: "lag", lines: "band: least to largest; dotted: the bound k", traces: (run, i) => [
    line(run.steps, run.series.lag_min, `${run.label}, least`, i, { line: { width: 0 } }),
    line(run.steps, run.series.lag_max, `${run.label}, largest`, i, { line: { width: 0.7 }, trace: { fill: "tonexty", fillcolor: `${colour(i)}33` } }),
    line(run.steps, run.series.lag_mean, `${run.label}, mean`, i),
    line(run.steps, run.steps.map(() => run.lag), `${run.label}, bound`, i, dotted) ] },
  { id: "idle", title: "Idle", meaning: "idle %", lines: "dotted: samplers", percent: true, range: [0, 1.02], traces: (run, i) => [
    line(run.steps, run.series.trainer_idle_share, `${run.label}, trainer`, i),
    line(run.steps, run.series.sampler_idle_share, `${run.label}, samplers`, i, dotted) ] },
  { id: "tokens_per_s", title: "Tokens per second", meaning: "tok/s", traces: series("tokens_per_s") },
];

// Of the run's models, by `vcpo evaluate --follow`.
function beside(run, i) {
  const [x, y] = [0, 1].map((at) => run.evaluations.map((e) => e[at]));
  return line(x, y, `${run.label}, beside`, i, { line: { dash: "dash" }, trace: { mode: "lines+markers" } });
}

// The held-out accuracy of each of several data sources, beside their mean.
function each(run, i) {
  return Object.entries(run.validations_of_each).map(([source, points]) =>
    line(points.map((p) => p[0]), points.map((p) => p[1]), `${run.label}, ${source}`, i, dotted));
}

// As scripts/report/figure.py limits a logarithmic axis: rounding errors below the bulk are left out.
function logRange(traces, level) {
  const values = traces.flatMap((t) => t.y).filter((v) => v > 0).sort((a, b) => a - b);
  if (!values.length) return undefined;
  const largest = values[values.length - 1];
  const bottom = Math.max(values[Math.floor(values.length / 20)], largest / 1e4);
  return [Math.floor(Math.log10(bottom)), Math.ceil(Math.log10(Math.max(largest, level || 0) * 1.01))];
}

function draw(panel) {
  const all = data.runs.flatMap((run, i) => (state.hidden.has(run.folder) ? [] : panel.traces(run, i)));
  const traces = all.filter((trace) => trace.y.some((value) => value !== null));
  const level = panel.level && data.levels[panel.level];
  const axis = { gridcolor: token("--line"), zerolinecolor: token("--line"), linecolor: token("--line"), automargin: true };
  const y = { ...axis };
  if (panel.percent) y.tickformat = ".0%";
  if (panel.range) y.range = panel.range;
  if (panel.log) {
    const range = logRange(traces, level);
    Object.assign(y, { type: "log", range, exponentformat: "power", dtick: range && range[1] - range[0] > 1 ? 1 : "D2" });
  }
  const layout = {
    xaxis: { ...axis, title: { text: "optimizer step", standoff: 6 }, rangemode: "tozero" }, yaxis: y,
    margin: { l: 50, r: 12, t: 8, b: 40 }, showlegend: false, hovermode: "x unified", uirevision: "kept",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: token("--text"), size: 12 },
    hoverlabel: { bgcolor: token("--ground"), bordercolor: token("--line"), font: { color: token("--text") } },
    shapes: [], annotations: [],
  };
  if (level) {
    layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: level, y1: level, line: { color: token("--warn"), dash: "dash", width: 1 } });
    layout.annotations.push({ xref: "paper", x: 1, xanchor: "right", y: panel.log ? Math.log10(level) : level, yanchor: "bottom",
      text: "alarm", showarrow: false, font: { color: token("--warn"), size: 11 } });
  }
  Plotly.react(byId(`plot-${panel.id}`), traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
}
const drawAll = () => PANELS.forEach(draw);

function fillTable(table, rows) {
  table.replaceChildren(...rows.map((cells, r) => {
    const row = make("tr");
    row.append(...cells.map((cell) => make(r ? "td" : "th", cell)));
    return row;
  }));
}

function fillChips() {
  const chips = data.runs.map((run, i) => {
    const label = make("label"), box = make("input", null, { type: "checkbox", checked: !state.hidden.has(run.folder) });
    box.addEventListener("change", () => {
      state.hidden[box.checked ? "delete" : "add"](run.folder);
      drawAll();
    });
    const swatch = make("span", null, { className: "swatch" });
    swatch.style.background = colour(i);
    label.append(box, swatch, run.label + (run.finished ? "" : ` (step ${run.steps.at(-1) || 0} of ${run.planned})`));
    return label;
  });
  byId("chips").replaceChildren(...chips);
}

function fillWarnings() {
  byId("warnings").replaceChildren(...data.runs.flatMap((run) => run.warnings.map((text) => make("li", `${run.label}: ${text}`))));
  byId("warnings-section").hidden = !byId("warnings").childElementCount;
}

function fillLags() {
  const rows = data.runs.flatMap((run) => run.of_lags.map((row) => [run.label, ...row]));
  byId("lags-section").hidden = !rows.length;
  fillTable(byId("lags"), [["", "lag", "mean reward", "mean weight", "of the responses", "of the gradient"], ...rows]);
}

function fillSettings() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.settings)))];
  fillTable(byId("settings"), [["", ...data.runs.map((run) => run.label)],
    ...names.map((name) => [name, ...data.runs.map((run) => run.settings[name] || "")])]);
  for (const row of byId("settings").rows) {
    const cells = [...row.cells].slice(1);
    if (new Set(cells.map((cell) => cell.textContent)).size > 1) cells.forEach((cell) => cell.classList.add("differs"));
  }
  byId("details").replaceChildren(...data.runs.flatMap((run) => {
    const details = make("details");
    details.append(make("summary", `All settings of ${run.label}`), make("pre", run.config));
    const parts = [make("h3", run.label), make("p", `${run.method}: ${run.description}. Folder: ${run.folder}`)];
    parts.push(run.command ? make("pre", run.command) : make("p", "The command was not recorded.", { className: "note" }));
    return [...parts, details];
  }));
}

const COLUMNS = ["weight", "log_weight", "reward", "lag", "step", "group", "prompt", "response"];
function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return a < b ? -1 : 1;
}

function fillSamples() {
  const runs = data.runs.filter((run) => run.samples);
  byId("samples-section").hidden = !runs.length;
  if (!runs.length) return;
  const run = runs.find((r) => r.folder === state.run) || runs[0];
  byId("samples-run").replaceChildren(...runs.map((r) => make("option", r.label, { value: r.folder, selected: r === run })));
  const wanted = state.search.toLowerCase();
  const rows = run.samples.rows.filter((row) => [row.prompt, row.response].some((t) => String(t).toLowerCase().includes(wanted)));
  rows.sort((a, b) => (state.descending ? -1 : 1) * compare(a[state.column], b[state.column]));
  const heads = COLUMNS.map((name) => {
    const head = make("th", name, { tabIndex: 0 });
    if (name === state.column) head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
    const sort = () => {
      state.descending = name === state.column ? !state.descending : true;
      state.column = name;
      fillSamples();
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    return head;
  });
  const top = make("tr");
  top.append(...heads);
  byId("samples").tHead.replaceChildren(top);
  byId("samples").tBodies[0].replaceChildren(...rows.slice(0, state.rows).map(sampleRow));
  byId("samples-count").textContent = `${Math.min(state.rows, rows.length)} of ${rows.length} rows; the page has ${run.samples.rows.length} of the ${run.samples.of} recorded samples: the newest, and those of the largest weight`;
  byId("samples-more").hidden = rows.length <= state.rows;
}

function sampleRow(row) {
  const cells = COLUMNS.map((name) => {
    const value = row[name];
    if (name !== "prompt" && name !== "response") {
      return make("td", typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : value ?? "-");
    }
    const cell = make("td", null, { className: "text" }), text = make("div", value);
    text.addEventListener("click", () => text.classList.toggle("open"));
    cell.append(text);
    return cell;
  });
  const line = make("tr");
  line.append(...cells);
  return line;
}

function show() {
  byId("title").textContent = document.title = data.title;
  byId("outcome").textContent = data.outcome;
  fillTable(byId("results"), data.table);
  byId("note").textContent = data.note;
  for (const fill of [fillChips, fillWarnings, fillLags, fillSettings, fillSamples, drawAll]) fill();
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = dark ? "Light" : "Dark";
}

async function follow() {
  for (let tag = null; ; await new Promise((later) => setTimeout(later, 2000))) {
    try {
      const answer = await fetch("data.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        data = await answer.json();
        show();
      }
      byId("live").textContent = `followed live, last looked at ${new Date().toLocaleTimeString()}`;
    } catch (error) {
      byId("live").textContent = "the server of this page has ended; what it last sent is shown";
    }
  }
}

for (const panel of PANELS) {
  const box = make("div", null, { className: "panel" });
  box.append(make("h3", panel.title), make("div", null, { className: "plot", id: `plot-${panel.id}` }));
  box.append(make("p", [data.meanings[panel.meaning], panel.lines].filter(Boolean).join("; "), { className: "note" }));
  byId("panels").append(box);
}
byId("theme").addEventListener("click", () => { setTheme(document.documentElement.dataset.theme !== "dark"); drawAll(); });
byId("samples-run").addEventListener("change", (event) => { state.run = event.target.value; fillSamples(); });
byId("samples-search").addEventListener("input", (event) => { state.search = event.target.value; state.rows = ROWS; fillSamples(); });
byId("samples-more").addEventListener("click", () => { state.rows += ROWS; fillSamples(); });
setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
show();
if (source.dataset.live === "true") {
  byId("live").hidden = false;
  follow();
}
