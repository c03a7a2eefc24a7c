// The live page: asks for the figures once a second, keeps two minutes of them, and shows rates.
// Whatever comes from outside is set as text, never as markup.
"use strict";
const POLL_MS = 1000, KEPT = 120, WINDOW = 10, AT_ONCE = 1;
const colours = JSON.parse(document.getElementById("colours").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const at = (id) => document.getElementById(id);
const kept = []; // pictures, the oldest first

// --- words ---

const DASH = "\u2013";
const scaled = (value, steps) => {
  const [unit, size] = steps.find(([, size]) => Math.abs(value) >= size) || steps.at(-1);
  const number = value / size;
  return `${number >= 100 ? number.toFixed(0) : +number.toPrecision(3)} ${unit}`;
};
const bytes = (value) => scaled(value,
  [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]]);
const rate = (value) => `${bytes(value)}/s`;
const wait = (ns) => ns === null ? DASH : scaled(ns, [["s", 1e9], ["ms", 1e6], ["us", 1e3]]);
const percent = (part, whole) => whole > 0 ? `${(100 * part / whole).toFixed(1)} %` : DASH;
const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });
const many = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;
const time = (s) => s < 120 ? `${s.toFixed(0)} s` : s < 7200 ? `${(s / 60).toFixed(0)} min`
  : `${(s / 3600).toFixed(1)} h`;

// --- figures ---

const sum = (values) => values.reduce((whole, value) => whole + value, 0);
const named = (picture, name) => picture.namespaces.find((space) => space.name === name);

// What is counted of a namespace, as one flat object of numbers that only grow.
function counters(space) {
  const { stats, slot_bytes: slot } = space, { outcomes, prefetch } = stats;
  const demanded = sum(Object.values(outcomes));
  return {
    ...outcomes, demanded, issued: prefetch.issued, useful: prefetch.useful,
    ended_late: prefetch.late, wasted: prefetch.wasted, pollution: prefetch.pollution,
    demand_read: (stats.pages_read - stats.pages_prefetched) * slot,
    prefetch_read: stats.pages_prefetched * slot, read: stats.bytes_read,
    written: stats.bytes_written, put: stats.store_writes.payload_bytes,
    handed: (demanded - stats.failed - stats.expired) * space.page_bytes,
    hints: stats.hints_dropped,
  };
}

// How much each grew between two pictures of one daemon, and in how many seconds. A namespace that
// was not there before shows no growth yet.
function growth(space, before, now) {
  const old = before && named(before, space.name);
  const last = counters(space), first = old ? counters(old) : last;
  const seconds = before ? Math.max((now.taken_ns - before.taken_ns) / 1e9, 1e-9) : 0;
  const grown = (name) => last[name] - first[name];
  return { seconds, per: (name) => seconds ? grown(name) / seconds : 0, grown };
}

function grownWaits(space, before) {
  const old = before && named(before, space.name);
  const waits = space.stats.waits, was = old ? old.stats.waits : null;
  return {
    counts: waits.counts.map((row, layer) =>
      row.map((value, bucket) => was ? value - was.counts[layer][bucket] : 0)),
    sums: waits.sums_ns.map((value, layer) => was ? value - was.sums_ns[layer] : 0),
  };
}

// The bucket's upper bound below which this share of the waits lies.
function percentile(rows, bounds, share) {
  const totals = bounds.map((_, bucket) => sum(rows.map((row) => row[bucket])));
  totals.push(sum(rows.map((row) => row.at(-1))));
  const waited = totals.slice(AT_ONCE), whole = sum(waited);
  let sofar = 0;
  for (const [place, value] of waited.entries()) {
    sofar += value;
    if (whole && sofar >= share * whole) return bounds[place + AT_ONCE] ?? bounds.at(-1);
  }
  return null;
}

// --- showing ---

const put = (id, text) => { at(id).textContent = text; };
function cells(row) {
  const line = document.createElement("tr");
  for (const [place, value] of row.entries()) {
    const [text, small, bad] = Array.isArray(value) ? value : [value, ""];
    const cell = document.createElement(place ? "td" : "th");
    cell.textContent = text;
    if (bad) cell.className = "bad";
    if (small) cell.appendChild(document.createElement("small")).textContent = small;
    line.appendChild(cell);
  }
  return line;
}

function showState(now) {
  const { healthy, ready, reasons, notes } = now.verdict;
  const state = ready ? "ready" : healthy ? "not ready" : "unhealthy";
  put("state", state.toUpperCase());
  at("state").dataset.state = state;
  put("who", `prefetchd ${now.version}, process ${now.process}, up ${time(now.uptime_s)}`);
  const of_daemon = now.namespaces.flatMap((space) =>
    space.stats.notes.map((note) => `${space.name}: ${note}`));
  const lines = [...reasons, ...notes, ...of_daemon];
  at("notes").hidden = lines.length === 0;
  at("notes").firstElementChild.replaceChildren(...lines.map((text, place) => {
    const item = document.createElement("li");
    item.textContent = text;
    if (place < reasons.length) item.className = "reason";
    return item;
  }));
}

function showFlow(now, before) {
  const spaces = now.namespaces, grown = spaces.map((space) => growth(space, before, now));
  const whole = (name) => sum(grown.map((one) => one.per(name)));
  const slots = (field) => sum(spaces.map((space) => space.stats[field] * space.slot_bytes));
  const blocks = (field) => sum(spaces.map((space) => space.stats.store_writes[field]));
  const ops = sum(spaces.map((space) => space.stats.ops_in_flight));
  put("read", rate(whole("read")));
  put("read-parts", `(demand ${rate(whole("demand_read"))}, prefetch ${rate(whole("prefetch_read"))})`);
  put("written", rate(whole("written")));
  put("put", rate(whole("put")));
  put("handed", rate(whole("handed")));
  put("store", `${count(blocks("blocks_used"))} of ${count(blocks("blocks_max"))} blocks, ` +
    `${many(ops, "operation")} in flight`);
  put("staging", `${bytes(slots("slots_used"))} of ${bytes(slots("slots"))}, ` +
    `${bytes(slots("slots_pinned"))} held`);
  put("engines", `${many(sum(spaces.map((s) => s.use.clients)), "client")}, ` +
    `${many(sum(spaces.map((s) => s.use.tickets)), "ticket")} held`);
  at("store-bar").style.width = percent(blocks("blocks_used"), blocks("blocks_max"));
  at("staging-bar").style.width = percent(slots("slots_used"), slots("slots"));
  const demanded = sum(grown.map((one) => one.grown("demanded")));
  const well = sum(grown.map((one) => one.grown("retained") + one.grown("timely")));
  const share = demanded ? `${percent(well, demanded)} of the demanded pages were here in time`
    : "no page was demanded";
  put("headline", spaces.length === 0 ? "No namespace is open."
    : `${rate(whole("handed"))} to engines, ${rate(whole("read"))} from NVMe; ${share}.`);
}

function showSpaces(now, before) {
  at("spaces").replaceChildren(...now.namespaces.map((space) => {
    const { stats, use } = space, grown = growth(space, before, now);
    const waits = grownWaits(space, before), bounds = stats.waits.bounds_ns;
    const bad = stats.paths.filter((p) => p.reading !== "healthy" || p.writing !== "healthy");
    const paths = bad.length ? bad.map((p) => `${p.path}: ${p.reading}/${p.writing}`).join(", ")
      : `${stats.paths.length} healthy`;
    const stalled = (share) => wait(percentile(waits.counts, bounds, share));
    return cells([space.name, use.clients, [use.tickets, `${use.waiting} waiting`],
      [percent(stats.slots_used, stats.slots), `${percent(stats.slots_pinned, stats.slots)} held`],
      percent(stats.store_writes.blocks_used, stats.store_writes.blocks_max),
      [stats.ops_in_flight, `${stats.ops_queued} queued`],
      [rate(grown.per("read")), `${rate(grown.per("written"))} written`],
      count(grown.per("demanded")),
      percent(grown.grown("retained") + grown.grown("timely"), grown.grown("demanded")),
      [stalled(0.5), `P99 ${stalled(0.99)}`],
      [paths, "", bad.length > 0 || space.fault !== ""]]);
  }));
}

function showPredictors(now, before) {
  at("predictors").replaceChildren(...now.namespaces.map((space) => {
    const grown = growth(space, before, now).grown, whole = counters(space);
    const both = (of) => [of(grown), of((name) => whole[name])];
    const share = (part, all) => both((get) => percent(part(get), all(get)));
    const brought = (get) => get("timely") + get("late"), issued = (get) => get("issued");
    return cells([space.name, space.stats.predictor,
      both((get) => count(get("issued"))),
      share(brought, (get) => brought(get) + get("miss")),
      share((get) => get("useful"), issued), share((get) => get("ended_late"), issued),
      share((get) => get("wasted"), issued), both((get) => count(get("pollution"))),
      both((get) => count(get("hints")))]);
  }));
}

// --- plots ---

function times() {
  const last = kept.at(-1).taken_ns;
  return kept.slice(1).map((picture) => (picture.taken_ns - last) / 1e9);
}
const pairs = () => kept.slice(1).map((now, place) => [kept[place], now]);

@painting

const theme = () => colours[dark.matches ? "dark" : "light"];
function plot(id, data, layout) {
  Plotly.react(id, paint(data, theme()), paint(complete(layout), theme()),
    { responsive: true, displayModeBar: false });
}

function showRates() {
  const lines = [["read by demand", "demand_read", "@miss"], ["prefetched", "prefetch_read",
    "@timely"], ["handed over", "handed", "@run0"], ["written", "written", "@none"]];
  const data = lines.map(([name, field, color]) => ({
    name, x: times(), y: pairs().map(([before, now]) =>
      sum(now.namespaces.map((space) => growth(space, before, now).per(field))) / 2 ** 20),
    mode: "lines", line: { color, width: 2 }, hovertemplate: "%{y:.3~g} MiB/s",
  }));
  plot("rates", data, { height: 250, hovermode: "x unified",
    xaxis: { title: { text: "seconds ago" }, range: [Math.min(-20, times()[0]), 0] },
    yaxis: { rangemode: "tozero", tickformat: "~g", ticksuffix: " MiB/s" } });
}

function heat(id, z, y, title, unit) {
  const scale = [[0, theme()["@shade"]], [0.5, theme()["@late"]], [1, theme()["@miss"]]];
  const most = Math.max(...z.flat().filter(Number.isFinite), 0) || 1; // all zero is no middle
  plot(id, [{ type: "heatmap", x: times(), y, z, colorscale: scale, zmin: 0, zmax: most, xgap: 0,
    ygap: 1,
    colorbar: { thickness: 10, len: 0.9, outlinewidth: 0, title: { text: unit, side: "right" } },
    hovertemplate: `%{y}, %{x:.0f} s: %{z:.3s} ${unit}<extra></extra>` }], { height: 330,
    xaxis: { title: { text: "seconds ago" }, range: [Math.min(-20, times()[0]), 0] },
    yaxis: { title: { text: title }, type: typeof y[0] === "string" ? "category" : "linear" } });
}

function showStalls() {
  const names = kept.at(-1).namespaces.map((space) => space.name), chosen = at("chosen");
  if (names.join() !== [...chosen.options].map((option) => option.value).join()) {
    const was = chosen.value;
    chosen.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(was)) chosen.value = was;
  }
  const space = named(kept.at(-1), chosen.value);
  if (!space) return;
  const bounds = space.stats.waits.bounds_ns;
  const parts = pairs().map(([before, now]) => {
    const here = named(now, chosen.value);
    const seconds = Math.max((now.taken_ns - before.taken_ns) / 1e9, 1e-9);
    return here ? { ...grownWaits(here, before), seconds } : null;
  });
  const layers = Array.from({ length: space.layers }, (_, layer) => layer);
  heat("layers", layers.map((layer) => parts.map((part) =>
    part && part.sums[layer] / 1e6 / part.seconds)), layers, "layer", "page-ms/s");
  const labels = [...bounds.slice(AT_ONCE).map((ns) => `\u2264 ${wait(ns)}`), `> ${wait(bounds.at(-1))}`];
  heat("buckets", labels.map((_, bucket) => parts.map((part) =>
    part && sum(part.counts.map((row) => row[bucket + AT_ONCE])) / part.seconds)), labels,
    "waited", "pages/s");
}

function show() {
  const now = kept.at(-1), before = kept[Math.max(0, kept.length - 1 - WINDOW)];
  const from = before === now ? null : before;
  showState(now);
  showFlow(now, from);
  showSpaces(now, from);
  showPredictors(now, from);
  if (kept.length > 1) {
    showRates();
    showStalls();
  }
}

async function poll() {
  try {
    const signal = AbortSignal.timeout(5000);
    const answer = await fetch("figures.json", { cache: "no-store", signal });
    if (!answer.ok) throw new Error(`the daemon answers ${answer.status}`);
    const picture = await answer.json();
    if (kept.length && kept.at(-1).process !== picture.process) kept.length = 0;
    kept.push(picture);
    if (kept.length > KEPT + 1) kept.shift();
    if (!document.hidden || kept.length < 3) show();
    document.body.dataset.state = "live";
    document.body.dataset.pictures = kept.length;
  } catch (error) {
    put("state", "AWAY");
    at("state").dataset.state = "away";
    put("headline", `No figures come: ${error.message}.`);
    document.body.dataset.state = "away";
  }
  setTimeout(poll, POLL_MS);
}

dark.addEventListener("change", () => kept.length && show());
at("chosen").addEventListener("change", showStalls);
poll();
