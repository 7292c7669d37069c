// The front end of `pfedla report` and `pfedla watch`. Data comes from the page or, live, from the server; Plotly draws.
// Text reaches the page through textContent alone, and figures through `plain`, which leaves Plotly no markup to read.

const $ = (id) => document.getElementById(id);
const embedded = $("data");
const live = !embedded;

// Okabe and Ito's colours, which people with any colour vision tell apart; marks and dashes differ, too.
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C"];
const DARK_COLOURS = ["#4BA3DB", "#E69F00", "#12B886", "#F2803A", "#E09CC4", "#8ED1F7", "#B0B0B0"];
const SHADES = ["#E69F00", "#ECB53F", "#F2CB7A", "#F8E1B5"]; // of the second colour
const MARKS = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const MEASURES = { mean: "personalized model", prior: "told the class prior", after: "after local training", worst: "worst client" };
const AXES = { round: "rounds", bytes: "bytes", seconds: "seconds" };

const state = {
  runs: [], details: {}, chosen: new Set(), seen: new Set(), run: null, measure: "mean", axis: "round",
  layer: null, frame: null, client: 0, timer: null, printing: false,
};

// ---- text and elements

function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value; else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Text as Plotly shall show it: what it would take for markup is written as entities. */
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
/** A name as a category of an axis: never a number, never a property of an object. */
const category = (name, i) => `\u200b${i}\u200b${plain(name)}`;
const narrow = () => window.innerWidth < 760;

const finite = (x) => typeof x === "number" && Number.isFinite(x);
const shown = (x, percent) => (!finite(x) ? "–" : percent ? (100 * x).toFixed(2) : String(Number(x.toPrecision(4))));
const megabytes = (x) => (finite(x) ? (x / 1e6).toLocaleString("en", { maximumFractionDigits: 1 }) : "–");
const seconds = (x) => (finite(x) ? x.toLocaleString("en", { maximumFractionDigits: x < 100 ? 1 : 0 }) : "–");
const share = (x) => `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)} %`;
const mean = (list) => (list.length ? list.reduce((a, b) => a + b, 0) / list.length : NaN);
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function spread(list) {
  if (list.length < 2) return 0;
  const centre = mean(list);
  return Math.sqrt(list.reduce((sum, x) => sum + (x - centre) ** 2, 0) / (list.length - 1));
}

// ---- figures

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = () => !state.printing && matchMedia("(prefers-color-scheme: dark)").matches;
const colour = (i) => (dark() ? DARK_COLOURS : COLOURS)[i % COLOURS.length];
/** The figure's own colours: in print those of the light page. */
const paint = (name, light) => (state.printing ? light : css(name));

const scale = () => [[0, paint("--low", "#f3f6f8")], [0.5, paint("--middle", "#5aa5d6")], [1, paint("--high", "#08306b")]];

function axis(title, more = {}) {
  return {
    title: { text: plain(title), font: { size: 12 } }, gridcolor: paint("--line", "#d5dde3"), zeroline: false,
    linecolor: paint("--line", "#d5dde3"), automargin: true, tickfont: { size: 11 }, ...more,
  };
}

function draw(id, traces, layout, label) {
  const place = $(id);
  place.classList.remove("empty");
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", label);
  const whole = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: paint("--ink", "#1d2731") },
    margin: { l: 56, r: 12, t: 10, b: 54 }, height: 380, dragmode: narrow() ? false : "zoom", uirevision: `${state.run}`,
    hoverlabel: { bgcolor: paint("--card", "#f5f7f9"), bordercolor: paint("--line", "#d5dde3"), font: { color: paint("--ink", "#1d2731") }, align: "left" },
    ...layout,
  };
  const how = { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false };
  Plotly.react(place, traces, whole, how);
}

function clear(id, note = "") {
  Plotly.purge($(id));
  $(id).replaceChildren();
  $(id).classList.add("empty");
  $(id).removeAttribute("role");
  $(id).removeAttribute("aria-label");
  if ($(`${id}-note`)) $(`${id}-note`).textContent = note;
}

/** An axis with a name at every place, or at some of them where they would not fit. */
function names(title, list, { most = 18, every = 1, ...more } = {}) {
  const cats = list.map(category);
  const places = cats.map((_, i) => i).filter((i) => i % every === 0);
  return axis(title, {
    type: "category", categoryorder: "array", categoryarray: cats, showgrid: false, tickmode: "array",
    tickvals: places.map((i) => cats[i]), ticktext: places.map((i) => plain(short(list[i], most))), ...more,
  });
}

function heat(z, rows, columns, { bar, top, hover, custom, cells, low = 0 }) {
  return {
    type: "heatmap", z, x: columns.map(category), y: rows.map(category), zmin: low, zmax: top, colorscale: scale(), xgap: rows.length > 40 ? 0 : 1,
    ygap: rows.length > 40 ? 0 : 1, hoverongaps: false, customdata: custom, hovertemplate: `${hover}<extra></extra>`,
    ...(cells ? { text: z.map((row) => row.map((x) => (x ? String(x) : ""))), texttemplate: "%{text}", textfont: { size: 10 } } : {}),
    colorbar: { title: { text: bar, side: "right", font: { size: 11 } }, thickness: 10, outlinewidth: 0, tickfont: { size: 10 }, len: 0.9 },
  };
}

const pairs = (rows, columns) => rows.map((row) => columns.map((column) => [plain(row), plain(column)]));
const sides = () => (narrow() ? 10 : 18);

// ---- many runs

const chosenRuns = () => state.runs.filter((run) => state.chosen.has(run.id) && run.evaluated);

/** The chosen runs by label; those with another headline than the first cannot be laid over it. */
function groups() {
  const list = chosenRuns();
  const headline = list.length ? list[0].headline : null;
  const found = new Map();
  for (const run of list.filter((one) => one.headline === headline)) {
    if (!found.has(run.label)) found.set(run.label, []);
    found.get(run.label).push(run);
  }
  return { headline, found, left: list.filter((one) => one.headline !== headline) };
}

/** A method has the same colour as long as the page is open, whatever is chosen beside it. */
const place = (label) => [...new Set(state.runs.map((run) => run.label))].indexOf(label);

function figures(runs) {
  const of = (key) => runs.map((run) => run.last[key]).filter(finite);
  const average = (key) => (of(key).length === runs.length ? mean(of(key)) : NaN);
  return {
    whole: runs.every((run) => run.state === "done"), seeds: runs.length, mean: average("mean"), seedSpread: of("mean").length > 1 ? spread(of("mean")) : NaN, std: average("std"),
    prior: average("prior"), worst: average("worst"), after: average("after"), down: average("down"), up: average("up"), seconds: average("seconds"),
  };
}

/** Rows that may win, by their figures over the seeds that all of them have; unfinished ones stand beside them. */
function rivalsOf(found) {
  const all = [...found].map(([label, runs]) => ({ label, runs, whole: runs.every((run) => run.state === "done") }));
  const some = all.some((row) => row.whole) ? all.filter((row) => row.whole) : all;
  const seeds = some.map(({ runs }) => new Set(runs.map((run) => run.seed)));
  const shared = ({ runs }) => runs.filter((run) => seeds.every((one) => one.has(run.seed)));
  return some.filter((row) => shared(row).length).map((row) => ({ label: row.label, first: row.runs[0], ...figures(shared(row)) }));
}

/** The labels of those that are best; none where all are equal. */
function best(rivals, key, higher, traffic = false) {
  const able = rivals.filter((row) => finite(row[key]) && (!traffic || row[key] > 0));
  const values = able.map((row) => row[key]);
  if (new Set(values).size < 2) return [];
  const most = higher ? Math.max(...values) : Math.min(...values);
  return able.filter((row) => row[key] === most).map((row) => row.label);
}

function drawCards() {
  const { found } = groups();
  const cards = [];
  const card = (name, value, more) => cards.push(el("div", { className: "card" }, el("div", { className: "name", textContent: name }),
    el("div", { className: "value", textContent: value }), el("div", { className: "more", textContent: more })));
  const states = {};
  for (const run of state.runs) states[run.state] = (states[run.state] || 0) + 1;
  const rows = [...found].map(([label, runs]) => ({ label, first: runs[0], ...figures(runs) }));
  if (rows.length) {
    const { headline, percent, higher, clients } = rows[0].first;
    const unit = percent ? " %" : "";
    const rivals = rivalsOf(found);
    const by = (key, up) => rivals.filter((row) => finite(row[key])).sort((a, b) => (up ? b[key] - a[key] : a[key] - b[key]))[0];
    const first = by("mean", higher);
    if (first) {
      const band = finite(first.seedSpread) ? ` ± ${shown(first.seedSpread, percent)} over ${first.seeds} seeds` : "";
      card(rivals.length > 1 ? `Best mean ${headline}` : `Mean ${headline}`, shown(first.mean, percent) + unit, first.label + band);
    }
    const worst = by("worst", higher);
    if (worst) card(rivals.length > 1 ? "Best for the worst client" : "The worst client", shown(worst.worst, percent) + unit, worst.label);
    const after = by("after", higher);
    if (after) card("After local training", shown(after.after, percent) + unit, after.label);
    const lean = by("down", false) && rivals.filter((row) => row.down + row.up > 0).sort((a, b) => a.down + a.up - b.down - b.up)[0];
    if (lean) card(rivals.length > 1 ? "Least traffic*" : "Traffic", `${megabytes(lean.down + lean.up)} MB`, `${lean.label}: ${megabytes(lean.down)} down, ${megabytes(lean.up)} up`);
    const sizes = new Set(rows.map((row) => row.first.clients));
    const data = new Set(rows.map((row) => row.first.dataset));
    card("Federation", sizes.size > 1 ? "several" : plural(clients, "client"), data.size > 1 ? plural(data.size, "data set") : [...data][0]);
  }
  $("cards-note").textContent = rows.length > 1 ? "Figures are those after the final round, of complete runs where there are any, over the seeds that all of these have. * Of the methods that communicate at all." : "";
  card("Runs", String(state.runs.length), Object.entries(states).map(([name, count]) => `${count} ${name}`).join(", "));
  $("cards").replaceChildren(...cards);
}

function drawRuns() {
  const focus = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.run : null;
  const head = el("tr", {}, ...["show", "run", "state", "method", "seed", "round", "headline", "worst", "MB down", "MB up", "seconds"]
    .map((name, i) => el("th", { textContent: name, scope: "col", className: i < 4 ? "words" : "" })));
  const rows = state.runs.map((run) => {
    const box = el("input", { type: "checkbox", checked: state.chosen.has(run.id), disabled: !run.evaluated, "aria-label": `Show ${run.name}` });
    box.dataset.run = run.id;
    box.addEventListener("change", () => {
      if (box.checked) state.chosen.add(run.id); else state.chosen.delete(run.id);
      drawMany();
    });
    const unit = run.percent ? " %" : "";
    const cell = (text, className = "") => el("td", { textContent: text, className, title: text });
    const mark = el("td", { className: "words" }, el("span", { className: `state ${run.state}`, textContent: run.state, title: run.error || run.state }));
    if (run.error) mark.append(` ${short(run.error, 60)}`);
    return el("tr", {}, el("td", { className: "words" }, box), cell(run.name, "name"), mark, cell(run.algorithm, "words"), cell(String(run.seed)),
      cell(`${run.round} / ${run.rounds}`), cell(finite(run.last.mean) ? `${run.headline} ${shown(run.last.mean, run.percent)}${unit}` : "–"),
      cell(shown(run.last.worst, run.percent)), cell(megabytes(run.last.down)), cell(megabytes(run.last.up)), cell(seconds(run.last.seconds)));
  });
  $("runs").replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
  if (focus) document.querySelector(`[data-run="${focus}"]`)?.focus();
}

/** Mean and spread over seeds at every round that all of them evaluated. */
function merged(runs, measure, along) {
  const rounds = [...new Set(runs.flatMap((run) => run.curve.round))].sort((a, b) => a - b);
  const line = { x: [], y: [], low: [], high: [], text: [] };
  for (const round of rounds) {
    const points = runs.map((run) => [run, run.curve.round.indexOf(round)]).filter(([run, i]) => i >= 0 && finite(run.curve[measure][i]));
    if (points.length < runs.length) continue; // a line of other seeds than before would jump
    const values = points.map(([run, i]) => run.curve[measure][i]);
    const factor = runs[0].percent ? 100 : 1;
    const [centre, band] = [mean(values) * factor, spread(values) * factor];
    const at = (run, i) => (along === "round" ? round : along === "seconds" ? run.curve.seconds[i] : (run.curve.down[i] + run.curve.up[i]) / 1e6);
    line.x.push(mean(points.map(([run, i]) => at(run, i))));
    line.y.push(centre);
    line.low.push(centre - band);
    line.high.push(centre + band);
    line.text.push([round, values.length > 1 ? ` ± ${Number(band.toPrecision(2))}, ${values.length} seeds` : ""]);
  }
  return line;
}

function drawCurves() {
  const { headline, found, left } = groups();
  if (!found.size) return clear("curves", "Nothing is chosen that has been evaluated yet.");
  const percent = [...found.values()][0][0].percent;
  const [traces, bands] = [[], []];
  let most = 1;
  for (const [label, runs] of found) {
    const i = place(label);
    const line = merged(runs, state.measure, state.axis);
    most = Math.max(most, runs.length);
    if (runs.length > 1) {
      bands.push({ x: [...line.x, ...[...line.x].reverse()], y: [...line.high, ...[...line.low].reverse()], fill: "toself", mode: "lines",
        fillcolor: `${colour(i)}2b`, line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: String(i) });
    }
    traces.push({ x: line.x, y: line.y, name: plain(short(label, narrow() ? 26 : 60)), mode: "lines+markers", legendgroup: String(i),
      line: { color: colour(i), width: 2, dash: DASHES[Math.floor(i / COLOURS.length) % DASHES.length] },
      marker: { symbol: MARKS[i % MARKS.length], size: line.x.length > 80 ? 3 : 6, color: colour(i) }, customdata: line.text,
      hovertemplate: `%{fullData.name}<br>round %{customdata[0]}: %{y:.4~g}${percent ? " %" : ""}%{customdata[1]}<extra></extra>` });
  }
  const titles = { round: "round", bytes: "MB down and up, all clients together", seconds: "seconds" };
  const what = `${headline}, ${MEASURES[state.measure]}`;
  draw("curves", [...bands, ...traces], { height: narrow() ? 400 : 440, uirevision: state.axis + state.measure,
    xaxis: axis(titles[state.axis]), yaxis: axis(narrow() ? headline + (percent ? " %" : "") : what + (percent ? ", %" : "")),
    legend: { orientation: "h", y: narrow() ? -0.22 : -0.16, yanchor: "top", font: { size: 12 } } }, `${what}, over ${AXES[state.axis]}, a line for each method`);
  const notes = [];
  if (most > 1) notes.push("Lines are means over seeds, bands one standard deviation above and below.");
  if ([...found.values()].flat().some((run) => run.evaluated > run.curve.round.length)) notes.push("Of many evaluated rounds some are shown, evenly spread.");
  if (left.length) notes.push(`${plural(left.length, "run")} with another headline cannot be laid over these.`);
  $("curves-note").textContent = notes.join(" ");
}

// ---- the table to copy

const COLUMNS = [["mean", "mean"], ["seedSpread", "± seeds"], ["std", "± clients"], ["prior", "class prior"], ["worst", "worst client"], ["after", "after training"],
  ["down", "MB down"], ["up", "MB up"], ["seconds", "seconds"]];

function tableRows() {
  const { headline, found } = groups();
  const rows = [...found].map(([label, runs]) => ({ label, percent: runs[0].percent, higher: runs[0].higher, ...figures(runs) }));
  const columns = COLUMNS.filter(([key]) => !["seedSpread", "prior"].includes(key) || rows.some((row) => finite(row[key])));
  const form = (key, row) => (["down", "up"].includes(key) ? megabytes(row[key]) : key === "seconds" ? seconds(row[key]) : shown(row[key], row.percent));
  const higher = !rows.length || rows[0].higher;
  const rivals = rivalsOf(found);
  const winners = { mean: best(rivals, "mean", higher), prior: best(rivals, "prior", higher), worst: best(rivals, "worst", higher), after: best(rivals, "after", higher),
    down: best(rivals, "down", false, true), up: best(rivals, "up", false, true) };
  const unit = rows.length && rows[0].percent ? " %" : "";
  const heads = ["method", "seeds", ...columns.map(([key, name]) => (key === "mean" ? `${headline}${unit}` : name))];
  const label = (row) => (row.whole ? row.label : `${row.label} (unfinished)`);
  const cells = rows.map((row) => [label(row), String(row.seeds), ...columns.map(([key]) => form(key, row))]);
  const bold = rows.map((row) => [false, false, ...columns.map(([key]) => key in winners && winners[key].includes(row.label))]);
  const raw = rows.map((row) => [label(row), row.seeds, ...columns.map(([key]) => (finite(row[key]) ? row[key] : ""))]);
  return { heads, cells, bold, raw, keys: ["method", "seeds", ...columns.map(([key]) => (key === "mean" ? headline : key))] };
}

function drawTable() {
  const { heads, cells, bold } = tableRows();
  $("prior-note").hidden = !heads.includes("class prior");
  const head = el("tr", {}, ...heads.map((name, i) => el("th", { textContent: name, scope: "col", className: i ? "" : "words" })));
  const rows = cells.map((row, r) => el("tr", {}, ...row.map((text, i) => el("td", { textContent: text, title: text, className: i ? (bold[r][i] ? "best" : "") : "name" }))));
  $("table").replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
}

const FORMS = {
  markdown({ heads, cells, bold }) {
    const escape = (text) => text.replace(/([\\|`*_<>[\]])/g, "\\$1").replace(/\s+/g, " ");
    const line = (row) => `| ${row.join(" | ")} |\n`;
    return line(heads.map(escape)) + line(heads.map((_, i) => (i ? "---:" : "---")))
      + cells.map((row, r) => line(row.map((text, i) => (bold[r][i] ? `**${escape(text)}**` : escape(text))))).join("");
  },
  csv({ keys, raw }) {
    // A cell that begins with = + - @ would be a formula to a spreadsheet.
    const quote = (value) => (typeof value === "number" ? String(value) : `"${value.replace(/^(?=[=+\-@\t\r])/, "'").replace(/"/g, '""')}"`);
    return [keys, ...raw].map((row) => `${row.map(quote).join(",")}\r\n`).join("");
  },
  latex({ heads, cells, bold }) {
    const special = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "–": "--" };
    const escape = (text) => text.replace(/[\\~^±–]|[&%$#_{}]/g, (sign) => special[sign] || `\\${sign}`).replace(/\s+/g, " ");
    const line = (row) => `  ${row.join(" & ")} \\\\\n`;
    return `\\begin{tabular}{l${"r".repeat(heads.length - 1)}}\n  \\hline\n${line(heads.map(escape))}  \\hline\n`
      + cells.map((row, r) => line(row.map((text, i) => (bold[r][i] ? `\\textbf{${escape(text)}}` : escape(text))))).join("")
      + "  \\hline\n\\end{tabular}\n";
  },
  command() { return `${$("command").textContent}\n`; },
};

async function copy(kind) {
  const text = FORMS[kind](tableRows());
  $("copy-text").value = text;
  $("copy-text").hidden = false;
  try {
    await navigator.clipboard.writeText(text);
    $("copied").textContent = "Copied.";
  } catch {
    $("copy-text").focus();
    $("copy-text").select();
    $("copied").textContent = "Press Ctrl+C to copy what is selected below.";
  }
}

// ---- one run

const current = () => state.runs.find((run) => run.id === state.run);
const detail = () => state.details[state.run] || {};

function drawClients() {
  const { clients } = detail();
  if (!clients) return clear("clients", "Nobody has been evaluated yet.");
  const run = current();
  const factor = run.percent ? 100 : 1;
  const unit = run.percent ? " %" : "";
  const scaled = (list) => list.map((x) => (finite(x) ? x * factor : null));
  const [before, after] = [scaled(clients.before), scaled(clients.after)];
  const many = clients.name.length > 40;
  const custom = clients.name.map((name, i) => [plain(name), clients.samples[i] ? ` (${clients.samples[i][0]} training${clients.samples[i][1] ? `, ${clients.samples[i][1]} ${plain(run.scored_on)}` : ""} samples)` : ""]);
  const cats = clients.name.map(category);
  const rank = cats.map((_, i) => i + 1);
  const kind = (values, name, symbol, tint) => ({ ...(many ? { x: rank, y: values } : { x: values, y: cats }), name, mode: "markers", customdata: custom,
    marker: { symbol, size: many ? 5 : 9, color: tint, line: { width: 1.5, color: tint } },
    hovertemplate: `%{customdata[0]}%{customdata[1]}<br>${name}: %{${many ? "y" : "x"}:.4~g}${unit}<extra></extra>` });
  const links = { x: [], y: [], mode: "lines", line: { color: paint("--line", "#d5dde3"), width: 2 }, hoverinfo: "skip", showlegend: false };
  cats.forEach((cat, i) => {
    const ends = [before[i], after[i]];
    links.x.push(...(many ? [rank[i], rank[i], null] : [...ends, null]));
    links.y.push(...(many ? [...ends, null] : [cat, cat, null]));
  });
  const worst = many ? clients.name.slice(0, 5) : [];
  const label = `${run.headline}${run.percent ? ", %" : ""}`;
  draw("clients", [links, kind(after, "after local training", "circle-open", colour(1)), kind(before, "personalized model", "circle", colour(0))], {
    height: many ? 400 : Math.max(220, 90 + 22 * cats.length), legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    margin: { l: 56, r: 12, t: 36, b: 54 },
    ...(many ? { xaxis: axis("clients, the worst first", { showgrid: false }), yaxis: axis(label) }
      : { xaxis: axis(label), yaxis: names("", clients.name, { most: narrow() ? 16 : 32, autorange: "reversed", showgrid: true }) }),
    annotations: worst.map((name, i) => ({ x: rank[i], y: before[i], text: plain(short(name, 24)), showarrow: true, arrowhead: 0, arrowcolor: paint("--faint", "#55636f"),
      ax: 60 + 14 * i, ay: run.higher ? 64 - 15 * i : -64 + 15 * i, xanchor: "left", font: { size: 11 } })),
  }, `${run.headline} of every client, sorted`);
  const notes = [`After round ${clients.round}. The worst: ${clients.name.slice(0, 3).map((name, i) => `${short(name, 40)} (${shown(clients.before[i], run.percent)}${unit})`).join(", ")}.`];
  if (clients.name.length + clients.silent < clients.of) notes.push(`${clients.name.length} of ${clients.of} clients are shown: the worst 20, and others evenly spread.`);
  if (clients.silent) notes.push(`${plural(clients.silent, "client")} without a score.`);
  const few = clients.samples.filter((pair) => pair && pair[1] > 0 && pair[1] < 10).length;
  if (few) notes.push(`${plural(few, "client")} with fewer than 10 ${run.scored_on} samples: their scores are coarse.`);
  $("clients-note").textContent = notes.join(" ");
}

function drawHoldings() {
  const { holdings } = detail();
  if (!holdings) return clear("holdings", "The record of this run does not say who holds what.");
  const every = Math.ceil(holdings.clients.length / (narrow() ? 24 : 40));
  const notes = [];
  if (holdings.classes) {
    const wide = holdings.clients.length <= 30 && holdings.classes.length <= 12 && !narrow();
    const top = Math.max(1, ...holdings.counts.flat());
    draw("holdings", [heat(holdings.counts, holdings.clients, holdings.classes, { bar: "training samples", top, cells: wide,
      custom: pairs(holdings.clients, holdings.classes), hover: "%{customdata[0]}<br>%{customdata[1]}: %{z} training samples" })], {
      height: Math.min(900, Math.max(260, 110 + 20 * Math.ceil(holdings.clients.length / every))),
      xaxis: names("", holdings.classes, { most: sides(), every: Math.ceil(holdings.classes.length / (narrow() ? 12 : 40)), tickangle: -40 }),
      yaxis: names("", holdings.clients, { most: narrow() ? 12 : 28, every, autorange: "reversed" }) }, "Training samples of each client and class");
    if (holdings.classes.length < holdings.of_classes) notes.push(`The ${holdings.classes.length} largest of ${holdings.of_classes} classes are shown.`);
  } else {
    draw("holdings", [{ type: "bar", x: holdings.train, y: holdings.clients.map(category), orientation: "h", marker: { color: colour(0) },
      hovertemplate: "%{x} training samples<extra></extra>" }], { height: Math.min(900, 110 + 20 * holdings.clients.length), xaxis: axis("training samples"),
      yaxis: names("", holdings.clients, { most: narrow() ? 12 : 28, every, autorange: "reversed" }) }, "Training samples of each client");
  }
  if (holdings.clients.length < holdings.of) notes.push(`${holdings.clients.length} of ${holdings.of} clients are shown, evenly spread.`);
  $("holdings-note").textContent = notes.join(" ");
}

function drawBytes() {
  const { bytes } = detail();
  if (!bytes) return clear("bytes", "Bytes by layer are known once the run is complete or has written a checkpoint.");
  const layers = [...bytes.layers, "values and headers"];
  const cats = layers.map(category);
  const bars = (way, name, i) => ({ type: "bar", orientation: "h", name, x: [...bytes[way], bytes.beside[way]].map((x) => x / 1e6), y: cats,
    marker: { color: colour(i), pattern: { shape: i ? "/" : "", fgcolor: colour(i), bgcolor: "rgba(0,0,0,0)" }, line: { color: colour(i), width: 1 } },
    hovertemplate: `${name}: %{x:,.4~g} MB<extra></extra>` });
  const total = (way) => bytes[way].reduce((a, b) => a + b, 0);
  draw("bytes", [bars("down", "down", 0), bars("up", "up", 3)], { barmode: "group", height: Math.min(1400, 110 + 34 * layers.length), xaxis: axis("MB, all clients together"),
    yaxis: names("", layers, { most: narrow() ? 14 : 40, autorange: "reversed" }), legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, margin: { l: 56, r: 12, t: 36, b: 54 } },
  "Bytes down and up of each layer");
  $("bytes-note").textContent = `In all rounds up to ${bytes.round}: ${megabytes(total("down"))} MB of layers down, ${megabytes(total("up"))} MB up, as they were sent. Directions are seen from the clients.`;
}

// ---- weights

/** The matrix of a round and a layer, rows of plain numbers; made once and kept. */
function matrix(weights, frame, layer) {
  if (!weights.decoded) {
    const raw = atob(weights.values);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
    weights.decoded = new Uint16Array(bytes.buffer);
  }
  const [n, layers] = [weights.clients.length, weights.layers.length];
  const start = (frame * layers + layer) * n * n;
  return Array.from({ length: n }, (_, i) => Array.from(weights.decoded.subarray(start + i * n, start + (i + 1) * n), (x) => x / 65535));
}

/** The largest weight on another client in any round: the colours then mean the same in all of them. */
function largest(weights, layer) {
  weights.largest ||= {};
  if (!(layer in weights.largest)) {
    let top = 0;
    for (let frame = 0; frame < weights.rounds.length; frame += 1) {
      matrix(weights, frame, layer).forEach((row, i) => row.forEach((x, j) => { if (i !== j && x > top) top = x; }));
    }
    weights.largest[layer] = top || 1;
  }
  return weights.largest[layer];
}

/** The layer to begin with: the one whose weights agree most with the data, or else the last. */
function telling(weights) {
  const agreement = (weights.agreement || []).at(-1) || [];
  const known = agreement.map((x, i) => [x, i]).filter(([x]) => finite(x)).sort((a, b) => b[0] - a[0]);
  return known.length ? known[0][1] : weights.layers.length - 1;
}

function outlines(found) {
  if (!found) return [];
  const shapes = [];
  for (let start = 0; start < found.length;) {
    let end = start;
    while (end + 1 < found.length && found[end + 1] === found[start]) end += 1;
    shapes.push({ type: "rect", xref: "x", yref: "y", x0: start - 0.5, x1: end + 0.5, y0: start - 0.5, y1: end + 0.5, line: { color: colour(1), width: 2 } });
    start = end + 1;
  }
  return shapes.length > new Set(found).size ? [] : shapes; // groups that do not lie together cannot be outlined
}

function square(id, z, weights, options, label) {
  const list = weights.clients;
  const every = Math.ceil(list.length / (narrow() ? 12 : 20));
  const size = Math.min(560, Math.max(250, $(id).clientWidth - 40));
  const bare = z.map((row, i) => row.map((x, j) => (i === j ? null : x)));
  draw(id, [heat(bare, list, list, { custom: pairs(list, list), ...options })], {
    height: size, shapes: outlines(weights.groups), plot_bgcolor: paint("--gap", "#dde3e8"), margin: { l: 40, r: 8, t: 8, b: 40 },
    xaxis: names("", list, { most: sides(), every, tickangle: -60, tickfont: { size: 10 }, showgrid: false }),
    yaxis: names("", list, { most: sides(), every, autorange: "reversed", tickfont: { size: 10 }, showgrid: false }) }, label);
}

function drawWeights() {
  const { weights, unfinished } = detail();
  $("weights-part").hidden = !weights;
  if (!weights) return stop();
  if (state.layer === null || state.layer >= weights.layers.length) state.layer = telling(weights);
  state.client = Math.min(state.client, weights.clients.length - 1);
  const last = weights.rounds.length - 1;
  const frame = state.frame === null ? last : Math.min(state.frame, last);
  const options = (id, list, chosen) => {
    if ($(id).options.length !== list.length || [...$(id).options].some((option, i) => option.textContent !== list[i])) {
      $(id).replaceChildren(...list.map((name, i) => el("option", { value: String(i), textContent: name })));
    }
    $(id).value = String(chosen);
  };
  options("layer", weights.layers, state.layer);
  options("client", weights.clients, state.client);
  $("frame").max = String(last);
  $("frame").value = String(frame);
  $("at-round").textContent = String(weights.rounds[frame]);
  $("frame").setAttribute("aria-valuetext", `round ${weights.rounds[frame]}`);

  const layer = weights.layers[state.layer];
  const z = matrix(weights, frame, state.layer);
  square("weights", z, weights, { bar: "weight", top: largest(weights, state.layer), hover: "%{customdata[0]} learns from<br>%{customdata[1]}: %{z:.4f}" },
    `Weights of ${layer} after round ${weights.rounds[frame]}`);
  const notes = [`${layer}, round ${weights.rounds[frame]}: a row shows whom a client learns from. The weight on oneself, ${weights.own[frame][state.layer].toFixed(2)} on average, is left grey.`];
  if (outlines(weights.groups).length) notes.push("Hidden groups are outlined; nobody told the server.");
  if (weights.clients.length < weights.of_clients) notes.push(`${weights.clients.length} of ${weights.of_clients} clients are shown, evenly spread.`);
  if (weights.rounds.length < weights.of_rounds) notes.push(`${weights.rounds.length} of ${weights.of_rounds} recorded rounds are shown, evenly spread.`);
  if (unfinished) notes.push("As of the run's latest checkpoint.");
  $("weights-note").textContent = notes.join(" ");
  if (weights.similarity) {
    const r = weights.agreement[frame][state.layer];
    if (!$("similarity").data || $("similarity").dataset.of !== drawing()) {
      square("similarity", weights.similarity, weights, { bar: "cosine", top: 1, hover: "%{customdata[0]} and<br>%{customdata[1]}: %{z:.3f}" }, "Cosine similarity of the clients' label distributions");
      $("similarity").dataset.of = drawing();
    }
    $("similarity-note").textContent = `Cosine of the clients' class frequencies. Correlation with the learned weights of this layer and round, between different clients: ${finite(r) ? r.toFixed(2) : "none, one of them is constant"}.`;
  } else clear("similarity", "The record of this run does not say who holds which classes.");
  drawPicked(weights, frame);
}

const drawing = () => `${state.run} ${dark()} ${narrow()} ${state.printing} ${(current() || {}).version}`;

function drawPicked(weights, frame) {
  const me = state.client;
  const layers = weights.layers.map(category);
  const rows = weights.layers.map((_, l) => matrix(weights, frame, l)[me]);
  const orders = rows.map((row) => row.map((x, j) => [x, j]).filter(([, j]) => j !== me).sort((a, b) => b[0] - a[0]));
  const part = (name, values, texts, tint, ink) => ({ type: "bar", orientation: "h", name, x: values, y: layers, text: texts, textposition: "inside",
    insidetextanchor: "middle", marker: { color: tint, line: { color: paint("--ground", "#fff"), width: 1.5 } }, constraintext: "none", insidetextfont: { size: 11, color: ink }, textangle: 0,
    cliponaxis: true, customdata: texts, hovertemplate: `%{customdata}: %{x:.3f}<extra></extra>` });
  const room = narrow() ? 0.2 : 0.09;
  const words = (j, x) => plain(`${short(weights.clients[j], narrow() ? 9 : 16)} ${share(x)}`);
  const traces = [part("itself", rows.map((row) => row[me]), rows.map((row) => `itself ${share(row[me])}`), colour(0), dark() ? "#10171d" : "#ffffff")];
  const most = Math.min(4, weights.clients.length - 1);
  for (let k = 0; k < most; k += 1) {
    traces.push(part(["most from another", "second", "third", "fourth"][k], orders.map((order) => order[k][0]), orders.map((order) => words(order[k][1], order[k][0])),
      SHADES[k], "#10171d"));
  }
  const rest = orders.map((order) => order.slice(most).reduce((sum, [x]) => sum + x, 0));
  if (weights.clients.length - 1 > most) traces.push(part("all others", rest, rest.map((x) => `others ${share(x)}`), paint("--gap", "#dde3e8"), paint("--ink", "#1d2731")));
  for (const trace of traces) trace.text = trace.text.map((text, i) => (trace.x[i] < room ? "" : text));
  draw("picked", traces, { barmode: "stack", height: Math.min(1600, 90 + 34 * layers.length), xaxis: axis("weight", { range: [0, 1] }), bargap: 0.25,
    yaxis: names("", weights.layers, { most: narrow() ? 12 : 36, autorange: "reversed" }), legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" },
    showlegend: !narrow(), margin: { l: 56, r: 12, t: narrow() ? 8 : 36, b: 54 } }, `Whose layers ${weights.clients[me]} uses`);
  const parts = orders.map((order, l) => `${weights.layers[l]}: ${order.slice(0, 3).map(([x, j]) => `${weights.clients[j]} ${share(x)}`).join(", ")}`);
  $("picked-note").textContent = `${weights.clients[me]} after round ${weights.rounds[frame]}, beside itself it learns most from: ${short(parts.join("; "), 700)}.`;
}

function drawOverTime() {
  const { weights, retained } = detail();
  $("retained-part").hidden = !retained;
  if (weights) {
    const list = spreadLayers(weights.layers.length);
    const lines = (values) => list.map((l, i) => ({ x: weights.rounds, y: values.map((row) => row[l]), name: plain(short(weights.layers[l], 24)), mode: "lines+markers",
      line: { color: colour(i), width: 2, dash: DASHES[Math.floor(i / COLOURS.length) % DASHES.length] },
      marker: { symbol: MARKS[i % MARKS.length], size: weights.rounds.length > 60 ? 3 : 6 }, hovertemplate: "%{fullData.name}, round %{x}: %{y:.3f}<extra></extra>" }));
    const layout = (title, range) => ({ height: 330, xaxis: axis("round"), yaxis: axis(title, range), legend: { orientation: "h", y: -0.24, yanchor: "top", font: { size: 11 } } });
    draw("own", lines(weights.own), layout("own weight", { range: [0, 1.02] }), "Mean weight on oneself, by layer, over the rounds");
    $("agreement-part").hidden = !weights.agreement;
    if (weights.agreement) draw("agreement", lines(weights.agreement), layout("correlation", { range: [-1.05, 1.05] }), "Correlation of weights and similarity, by layer, over the rounds");
  }
  if (retained) {
    const z = retained.share;
    const rounds = retained.rounds.map(String);
    const every = Math.ceil(rounds.length / (narrow() ? 6 : 16));
    draw("retained", [heat(z, retained.layers, rounds, { bar: "share of clients", top: 1, custom: pairs(retained.layers, rounds), hover: "%{customdata[0]}, round %{customdata[1]}: %{z:.0%} of the clients" })],
      { height: Math.min(1400, 120 + 26 * retained.layers.length), xaxis: names("round", rounds, { every, tickangle: 0 }),
        yaxis: names("", retained.layers, { most: narrow() ? 12 : 36, autorange: "reversed" }) }, "Share of clients at whom a layer stays, over the rounds");
    $("retained-note").textContent = `A client's retained layers change in ${Math.round(100 * retained.changes)} % of the steps from one record to the next.`;
  }
}

/** Of many layers, those that are drawn as lines: a figure can hold some twenty. */
function spreadLayers(count) {
  const most = Math.min(count, 20);
  return [...new Set(Array.from({ length: most }, (_, i) => (most === 1 ? 0 : Math.round((i * (count - 1)) / (most - 1)))))];
}

function drawRepeat() {
  const { command, config } = detail();
  $("command").textContent = command || "";
  $("config").textContent = config || "";
}

// ---- everything

function drawMany() {
  drawCards();
  drawRuns();
  drawCurves();
  drawTable();
}

function drawOne() {
  const run = current();
  $("run").replaceChildren(...state.runs.map((one) => el("option", { value: one.id, textContent: `${one.name} (${one.state})` })));
  $("run").value = state.run;
  const found = detail();
  const about = run ? [`${run.algorithm} on ${run.dataset || "unknown data"}, seed ${run.seed}: ${run.state}, round ${run.round} of ${run.rounds}.`] : [];
  if (run?.error) about.push(run.error);
  if (found.error) about.push(`Its details cannot be read: ${found.error}`);
  $("run-note").textContent = about.join(" ");
  for (const step of [drawClients, drawHoldings, drawWeights, drawOverTime, drawBytes, drawRepeat]) step();
}

function drawAll() {
  const first = state.runs[0];
  $("about").textContent = first ? `${plural(state.runs.length, "run")}${live ? ", live" : ""}. ${[...new Set(state.runs.map((run) => run.dataset).filter(Boolean))].slice(0, 5).join(", ")}` : "There is no run here yet.";
  drawMany();
  drawOne();
}

function take(runs) {
  for (const run of runs) {
    if (!state.seen.has(run.id) && run.evaluated) {
      state.seen.add(run.id);
      state.chosen.add(run.id);
    }
  }
  state.runs = runs;
  if (!current()) state.run = (runs.find((run) => /pfedla/.test(run.algorithm) && run.evaluated) || runs[0] || {}).id || null;
}

function stop() {
  clearInterval(state.timer);
  state.timer = null;
  $("play").setAttribute("aria-pressed", "false");
  $("play").textContent = "Play";
}

function play() {
  if (state.timer) return stop();
  const { weights } = detail();
  const last = weights.rounds.length - 1;
  if (state.frame === null || state.frame >= last) state.frame = 0;
  $("play").setAttribute("aria-pressed", "true");
  $("play").textContent = "Pause";
  drawWeights();
  state.timer = setInterval(() => {
    state.frame += 1;
    if (state.frame >= last) {
      state.frame = null;
      stop();
    }
    drawWeights();
  }, 450);
}

function radios(id, choices, key, redraw) {
  for (const [value, text] of Object.entries(choices)) {
    const input = el("input", { type: "radio", name: id, value, checked: state[key] === value });
    input.addEventListener("change", () => { state[key] = value; redraw(); });
    $(id).append(el("label", {}, input, text));
  }
}

function listen() {
  radios("measure", MEASURES, "measure", drawCurves);
  radios("against", AXES, "axis", drawCurves);
  $("tick-all").addEventListener("click", () => { state.chosen = new Set(state.runs.map((run) => run.id)); drawMany(); });
  $("tick-none").addEventListener("click", () => { state.chosen.clear(); drawMany(); });
  $("run").addEventListener("change", async () => {
    stop();
    Object.assign(state, { run: $("run").value, layer: null, frame: null, client: 0 });
    if (live) await fetchDetail(true);
    drawOne();
  });
  $("layer").addEventListener("change", () => { state.layer = Number($("layer").value); drawWeights(); });
  $("client").addEventListener("change", () => { state.client = Number($("client").value); drawWeights(); });
  $("frame").addEventListener("input", () => {
    stop();
    const frame = Number($("frame").value);
    state.frame = frame === Number($("frame").max) ? null : frame; // the last one follows a run as it goes on
    drawWeights();
  });
  $("play").addEventListener("click", play);
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button.dataset.copy));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = narrow();
  window.addEventListener("resize", () => {
    if (width !== narrow()) { width = narrow(); drawAll(); }
  });
  for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
    window.addEventListener(event, () => { state.printing = printing; drawAll(); });
  }
}

// ---- live

let tag = "";
const versions = {};

async function fetchDetail(force = false) {
  const run = current();
  if (!run || (!force && versions[run.id] === run.version)) return;
  const answer = await fetch(`/runs/${run.id}`);
  if (!answer.ok) return;
  state.details[run.id] = await answer.json();
  versions[run.id] = run.version;
}

async function poll() {
  try {
    const answer = await fetch("/runs", { headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") || "";
      take((await answer.json()).runs);
      await fetchDetail();
      drawAll();
    }
    $("status").textContent = "";
  } catch {
    $("status").textContent = "The server does not answer. Is pfedla watch still running?";
  }
  setTimeout(poll, 1000);
}

async function start() {
  listen();
  if (live) {
    $("foot").textContent = "pfedla watch: read-only, from this machine alone.";
    return poll();
  }
  const data = JSON.parse(embedded.textContent);
  take(data.runs);
  state.details = data.details;
  $("foot").textContent = `pfedla ${data.version}. This page is one file and needs no network.`;
  drawAll();
}

start();
