"""The look of the report: style sheet, script and colours, for light and dark.

Decides how things look. Refuses to know what is shown. Nothing here is loaded from anywhere, and
the page's content security policy forbids it to try.
"""

from __future__ import annotations

# Okabe and Ito's colours, which most kinds of colour blindness can tell apart, darkened for white
# paper and lightened for a dark one; controls are greys, told apart by their dashes.
COLOURS: dict[str, dict[str, str]] = {
    "light": {
        "@page": "#ffffff",
        "@ink": "#1c2530",
        "@muted": "#5c6875",
        "@grid": "#e4e8ed",
        "@shade": "#eef1f5",
        "@resident": "#46525f",
        "@none": "#87919c",
        "@cold": "#b3bbc4",
        "@oracle": "#8f7440",
        "@run0": "#0072b2",
        "@run1": "#d55e00",
        "@run2": "#009e73",
        "@run3": "#c15c96",
        "@run4": "#c98a00",
        "@run5": "#3fa2d9",
        "@retained": "#ced6df",
        "@timely": "#2a9d8f",
        "@late": "#e0a72e",
        "@miss": "#b3405a",
        "@wasted": "#8b7f9b",
    },
    "dark": {
        "@page": "#151b22",
        "@ink": "#e6eaef",
        "@muted": "#97a3af",
        "@grid": "#2a333d",
        "@shade": "#1f2730",
        "@resident": "#dfe4ea",
        "@none": "#98a3af",
        "@cold": "#626e7a",
        "@oracle": "#c9ab70",
        "@run0": "#4ea5e6",
        "@run1": "#f28c4f",
        "@run2": "#2fc59a",
        "@run3": "#e297c4",
        "@run4": "#efb944",
        "@run5": "#9bd6f7",
        "@retained": "#3b4753",
        "@timely": "#3fb8a8",
        "@late": "#ebb94f",
        "@miss": "#e0667f",
        "@wasted": "#a497b5",
    },
}

STYLE = """
:root { color-scheme: light dark; --page:#f5f7f9; --card:#fff; --ink:#1c2530; --muted:#5c6875;
  --line:#dfe4ea; --accent:#0072b2; --good:#00734f; --warn:#8a5a00; --warn-back:#fff6e0;
  --win:#eaf3fa; }
@media (prefers-color-scheme: dark) { :root { --page:#0e1318; --card:#151b22; --ink:#e6eaef;
  --muted:#97a3af; --line:#2a333d; --accent:#4ea5e6; --good:#2fc59a; --warn:#efb944;
  --warn-back:#2a2415; --win:#182635; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 36px 24px 64px; }
header .over { color: var(--muted); font-size: 13px; margin: 0 0 6px; }
h1 { font-size: 27px; line-height: 1.25; font-weight: 650; letter-spacing: -.01em; margin: 0 0 14px;
  max-width: 44em; text-wrap: balance; }
h2 { font-size: 17px; font-weight: 650; margin: 0 0 2px; }
p { margin: 0 0 10px; }
.what, .reading { color: var(--muted); max-width: 62em; }
.reading { font-size: 13.5px; margin-bottom: 6px; max-width: 78em; }
.badge { display: inline-block; font-size: 11.5px; font-weight: 650; letter-spacing: .05em;
  padding: 1px 8px; border-radius: 4px; border: 1px solid currentColor; color: var(--warn); }
.badge.MEASURED { color: var(--good); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px;
  margin: 22px 0; }
.card, section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.card { padding: 13px 16px; }
.card b { display: block; font-size: 25px; font-weight: 620; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.card span { color: var(--muted); font-size: 13px; display: block; line-height: 1.4; }
section { padding: 18px 20px; margin: 14px 0; min-width: 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; margin: 14px 0; }
.pair section { margin: 0; }
@media (max-width: 940px) { .pair { grid-template-columns: 1fr; } }
.plot { width: 100%; }
.scroll { overflow-x: auto; margin-top: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 9px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
thead th { color: var(--muted); font-weight: 550; font-size: 12.5px; vertical-align: bottom;
  line-height: 1.3; }
thead th[title] { text-decoration: underline dotted var(--line); text-underline-offset: 3px; }
th:first-child, td:first-child { text-align: left; }
tbody th { font-weight: 500; }
tbody tr:last-child > * { border-bottom: 0; }
tr.control > * { color: var(--muted); }
tr.best > * { background: var(--win); font-weight: 650; }
th small { display: block; font-weight: 400; font-size: 12.5px; color: var(--muted);
  white-space: normal; min-width: 250px; }
th.best, td.best { background: var(--win); font-weight: 650; }
thead th.best { color: var(--ink); }
code { font: 0.92em ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.key { display: inline-block; width: 22px; margin-right: 9px; vertical-align: middle;
  border-top: 3px solid; }
.bar { display: block; height: 4px; margin-top: 3px; background: var(--line); min-width: 34px; }
.bar i { display: block; height: 4px; background: var(--accent); }
.control .bar i { background: var(--muted); }
.slack { fill: var(--good); vertical-align: bottom; } .slack .late { fill: var(--warn); }
.part { font-size: 21px; margin: 34px 0 10px; } .part small { color: var(--muted); }
.notes { background: var(--warn-back); padding: 12px 20px; }
.notes ul { margin: 0; padding: 0; list-style: none; }
.notes li { margin: 5px 0; overflow-wrap: anywhere; }
.notes .badge { margin-right: 6px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 5px 20px; margin: 10px 0 0; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
dl.words { grid-template-columns: minmax(130px, 190px) 1fr; max-width: 80em; }
dl.words dt { color: var(--ink); font-weight: 600; }
dl.settings { grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); column-gap: 36px; }
dl.settings div { display: grid; grid-template-columns: 120px 1fr; }
footer { color: var(--muted); font-size: 13px; margin-top: 24px; }
a { color: var(--accent); }
@media print { body { background: #fff; } section, .card { break-inside: avoid; } }
"""

PAINTING = """
  // Only what sits under a colour's name is looked up, so that no run's name can be taken for one.
  function paint(value, theme, key) {
    if (Array.isArray(value)) return value.map((item) => paint(item, theme, key));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, paint(v, theme, k)]));
    }
    return typeof value === "string" && /color$/.test(key || "") && value in theme
      ? theme[value] : value;
  }

  function axis(given) {
    return Object.assign({ gridcolor: "@grid", linecolor: "@grid", zerolinecolor: "@grid",
      tickcolor: "@grid", automargin: true, ticks: "", zeroline: false,
      title: {} }, given, { title: Object.assign({ standoff: 12,
      font: { size: 12.5, color: "@muted" } }, given.title) });
  }

  function complete(layout) {
    const whole = Object.assign({}, layout);
    for (const name of Object.keys(layout).filter((k) => /^[xy]axis/.test(k))) {
      whole[name] = axis(layout[name]);
    }
    return Object.assign({
      paper_bgcolor: "@page", plot_bgcolor: "@page", margin: { l: 8, r: 36, t: 34, b: 8 },
      modebar: { orientation: "v", bgcolor: "@page", color: "@grid", activecolor: "@muted" },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: "@ink" },
      hoverlabel: { bgcolor: "@page", bordercolor: "@grid", font: { color: "@ink" } },
      hovermode: "closest",
    }, whole, { legend: Object.assign({ orientation: "h", x: 0, xanchor: "left", y: 1.02,
      yanchor: "bottom" }, layout.legend) });
  }
"""
"""Functions for plots: colours by their names here, axes and layouts completed."""

SCRIPT = (
    """
(function () {
  "use strict";
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures"), colours = read("colours");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
"""
    + PAINTING
    + """
  function draw() {
    const theme = colours[dark.matches ? "dark" : "light"];
    for (const figure of figures) {
      Plotly.react(figure.name, paint(figure.data, theme), paint(complete(figure.layout), theme),
        { responsive: true, displaylogo: false,
          modeBarButtons: [["toImage", "resetScale2d"]] });
    }
    for (const key of document.querySelectorAll(".key")) {
      key.style.borderTopColor = theme[key.dataset.colour] || "";
    }
  }
  dark.addEventListener("change", draw);
  draw();
})();
"""
)

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="figures">{figures}</script>
<script type="application/json" id="colours">{colours}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""
