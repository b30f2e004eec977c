"use strict";
const charts = JSON.parse(document.getElementById("chart-data").textContent);
const darkColours = JSON.parse(document.getElementById("dark-colours").textContent);
const names = [...new Set(charts.flatMap((chart) => Object.keys(chart.choice)))];
const themes = {
  light: { ink: "#1f2328", faint: "#8b949e", grid: "#d7dbe0", panel: "#ffffff" },
  dark: { ink: "#e6e9ed", faint: "#8b949e", grid: "#363c44", panel: "#1d2126" },
};
const darkMode = window.matchMedia("(prefers-color-scheme: dark)");
const settings = {
  displaylogo: false,
  responsive: true,
  modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "pan2d", "resetScale2d"]],
};
let current = charts.find((chart) => chart.time) || charts[0];

function draw(id, figure, theme) {
  let text = JSON.stringify(figure);
  if (theme === themes.dark) {
    for (const [light, dark] of Object.entries(darkColours)) text = text.replaceAll(light, dark);
  }
  const { data, layout } = JSON.parse(text);
  layout.font.color = theme.ink;
  Object.assign(layout.hoverlabel, {
    bgcolor: theme.panel, bordercolor: theme.grid, font: { color: theme.ink },
  });
  for (const axis of [layout.xaxis, layout.yaxis]) {
    Object.assign(axis, { gridcolor: theme.grid, linecolor: theme.ink, zeroline: false });
  }
  layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: theme.faint, activecolor: theme.ink };
  if (document.body.clientWidth < 600) layout.font.size = 11;
  Plotly.react(id, data, layout, settings);
}

function show(theme) {
  theme = theme || (darkMode.matches ? themes.dark : themes.light);
  const { title, time, parts } = current;
  document.getElementById("time-title").textContent = title;
  document.getElementById("time-chart").hidden = !time;
  document.getElementById("nothing").hidden = Boolean(time);
  if (time) draw("time-chart", time, theme);
  document.getElementById("parts").hidden = !parts;
  if (parts) draw("parts-chart", parts, theme);
}

function choose(name, value) {
  const wanted = { ...current.choice, [name]: value };
  const matches = (chart) => names.filter((key) => chart.choice[key] === wanted[key]).length;
  const candidates = charts.filter((chart) => chart.choice[name] === value);
  current = candidates.reduce((best, chart) => (matches(chart) > matches(best) ? chart : best));
  for (const select of document.querySelectorAll("#choosers select")) {
    select.value = current.choice[select.name];
  }
  show();
}

for (const name of names) {
  const values = [...new Set(charts.map((chart) => chart.choice[name]).filter(Boolean))];
  if (values.length < 2) continue;
  const label = document.createElement("label");
  const select = document.createElement("select");
  select.name = name;
  select.append(...values.map((value) => new Option(value, value)));
  select.value = current.choice[name];
  select.addEventListener("change", () => choose(name, select.value));
  label.append(name, select);
  document.getElementById("choosers").append(label);
}
show();
darkMode.addEventListener("change", () => show());
window.addEventListener("beforeprint", () => show(themes.light));
window.addEventListener("afterprint", () => show());
