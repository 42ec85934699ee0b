// The charts of the page, by the names in data-chart.
"use strict";
H.panels = {};
H.percentAxis = (setting, text) => (setting.percent ? `${text}, %` : text);

H.panels.scatter = (figure, plot) => {
  const setting = H.data.settings[Number(figure.dataset.setting)], factor = setting.percent ? 100 : 1;
  return () => {
    const shown = setting.methods.filter((m) => H.isShown(m) && m.method !== "random" && H.seedPlaces(m).length);
    const rows = shown.map((m) => ({ method: m, ...H.measures(m, setting) })).filter((row) => row.accuracy !== null && row.forgetting !== null);
    const chart = H.figure({ height: 355, tools: false, x: H.percentAxis(setting, "forgetting").replace("%", "points"), y: H.percentAxis(setting, `average ${setting.score}`) });
    const most = Math.max(1, ...rows.map((row) => row.method.point.parameters[0] || 0)), marks = [], many = 14;
    for (const row of rows) {
      const { method } = row, size = (rows.length > many ? 0.6 : 1) * (9 + 17 * Math.sqrt((method.point.parameters[0] || 0) / most)), colour = H.lookColour(method.look);
      marks.push(chart.scatter({ field: "x" }, { field: "y" }, { source: H.source({ x: [factor * row.forgetting], y: [factor * row.accuracy], name: [method.label], parameters: [method.point.parameters[0]], seeds: [row.seeds] }),
        size, marker: method.look.marker || "circle", fill_color: colour, fill_alpha: method.look.marker ? 0.75 : 0, line_color: colour, line_width: method.look.marker ? 1 : 2 }));
    }
    const down = H.labelPlaces(rows.map((r) => [r.forgetting, r.accuracy])), named = rows.filter((_, k) => rows.length <= many || Math.abs(down[k]) < 22); // far from its mark a name says nothing
    const labels = chart.text({ field: "x" }, { field: "y" }, { field: "t" }, { source: H.source({ x: named.map((r) => factor * r.forgetting), y: named.map((r) => factor * r.accuracy), t: named.map((r) => (r.method.name.length > 24 ? `${r.method.name.slice(0, 23)}…` : r.method.name)), down: named.map((r) => down[rows.indexOf(r)]) }),
      x_offset: 15, y_offset: { field: "down" }, text_baseline: "middle", text_font_size: "12px", text_color: H.colours().muted, text_font: getComputedStyle(document.body).fontFamily });
    labels.name = "labels";
    H.pad(chart, rows.map((r) => factor * r.forgetting), rows.map((r) => factor * r.accuracy));
    H.hover(chart, marks, [["method", "@name"], [setting.score, setting.percent ? "@y{0.0}" : "@y{0.000}"], ["forgetting", setting.percent ? "@x{0.0}" : "@x{0.000}"], ["parameters", "@parameters{0,0}"], ["seeds", "@seeds"]]);
    return H.put(plot, chart);
  };
};
// Labels of marks that are close to each other stand above each other.
H.labelPlaces = (points) => {
  const span = (k) => Math.max(1e-9, Math.max(...points.map((p) => p[k])) - Math.min(...points.map((p) => p[k])));
  const width = Math.max(span(0), 0.01), height = Math.max(span(1), 0.01), placed = [], result = points.map(() => 0);
  for (const k of points.map((_, k) => k).sort((a, b) => points[b][1] - points[a][1])) {
    let y = -points[k][1] / height;
    for (const other of placed) if (Math.abs(points[k][0] - other.x) / width < 0.25 && y < other.y + 0.065) y = other.y + 0.065;
    placed.push({ x: points[k][0], y });
    placed.sort((a, b) => a.y - b.y);
    result[k] = (y + points[k][1] / height) * 230;
  }
  return result;
};
H.pad = (chart, xs, ys) => {
  const range = (values, least) => { const low = Math.min(...values), high = Math.max(...values), gap = Math.max(least, high - low); return [low - 0.1 * gap, high + 0.1 * gap]; };
  if (!xs.length) return;
  const [left, right] = range(xs, 1), [low, high] = range(ys, 1);
  chart.x_range = new Bokeh.Range1d({ start: left, end: right + 0.16 * (right - left) });
  chart.y_range = new Bokeh.Range1d({ start: low, end: high });
};

// Lines of several methods: means over the chosen seeds, with a band for those chosen in the legend.
H.lines = (chart, entries, chosen, factor) => {
  const colours = H.colours(), marks = [];
  for (const { method, label, values, dash, setting } of entries) {
    const on = !chosen.size || chosen.has(method.label), colour = on ? H.lookColour(method.look) : colours.strong;
    const places = values.length ? values[0].map((_, t) => t).filter((t) => values.every((v) => v[t] !== null)) : [];
    if (!places.length) continue;
    const mean = places.map((t) => factor * H.mean(values.map((v) => v[t]))), std = places.map((t) => factor * (H.std(values.map((v) => v[t])) || 0)), x = places.map((t) => t + 1);
    const data = { x, y: mean, low: mean.map((m, k) => m - std[k]), high: mean.map((m, k) => m + std[k]), std, name: x.map(() => label), setting: x.map(() => setting || ""), seeds: x.map(() => values.length) };
    const alpha = on ? 1 : 0.28; // every glyph has a source of its own: pointing at a mark must not change the line
    if (chosen.has(method.label) || (entries.length <= 3 && on)) chart.varea({ field: "x" }, { field: "low" }, { field: "high" }, { source: H.source(data), fill_color: colour, fill_alpha: 0.16 });
    chart.line({ field: "x" }, { field: "y" }, { source: H.source(data), line_color: colour, line_width: chosen.has(method.label) ? 3 : 2, line_alpha: alpha, line_dash: dash || method.look.dash });
    marks.push(chart.scatter({ field: "x" }, { field: "y" }, { source: H.source(data), size: places.length > 30 ? 4 : 7, marker: method.look.marker || "circle", fill_color: colour, line_color: colour, fill_alpha: method.look.marker ? alpha : 0.01, line_alpha: method.look.marker ? alpha : 0.01 }));
  }
  return marks;
};
H.panels.progress = (figure, plot) => {
  const setting = H.data.settings[Number(figure.dataset.setting)], chosen = new Set(), legend = figure.querySelector("[data-legend]"), controls = figure.querySelector("[data-controls]");
  let what = "accuracy";
  const hasRatio = setting.methods.some((m) => !m.reference && m.ratio.some((v) => v !== null));
  const draw = () => {
    const shown = setting.methods.filter((m) => H.isShown(m) && H.seedPlaces(m).length), count = setting.tasks.length, factor = what === "ratio" || !setting.percent ? 1 : 100;
    for (const label of chosen) if (!shown.some((m) => m.label === label)) chosen.delete(label);
    H.legend(legend, shown, chosen, draw);
    controls.replaceChildren();
    if (hasRatio) H.choice(controls, "What is drawn", [{ value: "accuracy", text: `average ${setting.score}` }, { value: "ratio", text: "forgetting ratio (all seeds)" }], what, (value) => { what = value; draw(); });
    const chart = H.figure({ height: 400, x: "tasks learned", y: what === "ratio" ? "forgetting ratio" : H.percentAxis(setting, `average ${setting.score}`), ticks: H.ticksTo(count) });
    const series = (m) => (what === "ratio" ? [m.ratio.map((v) => (v === null ? null : v / H.whole))] : H.seedPlaces(m).map((k) => H.averages(m.matrices[k], count)));
    const marks = H.lines(chart, shown.map((method) => ({ method, label: method.label, values: series(method) })), chosen, factor);
    H.hover(chart, marks, [["method", "@name"], ["tasks learned", "@x"], [what === "ratio" ? "ratio" : setting.score, what === "ratio" ? "@y{0.000}" : setting.percent ? "@y{0.0} ± @std{0.0}" : "@y{0.000} ± @std{0.000}"], ["seeds", "@seeds"]]);
    return H.put(plot, chart);
  };
  return draw;
};
H.panels.beside = (figure, plot) => {
  const chosen = new Set(), legend = figure.querySelector("[data-legend]"), dashes = ["solid", "dashed", "dotted", "dotdash"];
  const draw = () => {
    const settings = H.shownSettings().map((k) => H.data.settings[k]).slice(0, 8), shown = settings.flatMap((s) => s.methods.filter((m) => H.isShown(m) && !m.reference).map((m) => [s, m]));
    const first = shown.map(([, m]) => m).filter((m, k, all) => all.findIndex((other) => other.label === m.label) === k);
    H.legend(legend, first, chosen, draw);
    const lines = { solid: "━━", dashed: "╍╍", dotted: "┉┉", dotdash: "━·━" };
    figure.querySelector("[data-controls]").replaceChildren(...settings.map((s, k) => H.el("span", { class: "key" }, H.el("b", { "aria-hidden": "true", text: lines[dashes[k % dashes.length]] }), s.title)));
    const count = Math.max(1, ...settings.map((s) => s.tasks.length));
    const chart = H.figure({ height: 380, x: "tasks learned", y: "average score, %", ticks: H.ticksTo(count) });
    const marks = H.lines(chart, shown.map(([s, method]) => ({ method, label: method.label, setting: s.title, dash: dashes[settings.indexOf(s) % dashes.length], values: H.seedPlaces(method).map((k) => H.averages(method.matrices[k], s.tasks.length)) })), chosen, 100);
    H.hover(chart, marks, [["setting", "@setting"], ["method", "@name"], ["tasks learned", "@x"], ["score", "@y{0.0} ± @std{0.0}"], ["seeds", "@seeds"]]);
    return H.put(plot, chart);
  };
  return draw;
};
H.panels.capacity = (figure, plot) => {
  const setting = H.data.settings[Number(figure.dataset.setting)], controls = figure.querySelector("[data-controls]"), having = setting.methods.filter((m) => m.capacity);
  let label = having[0]?.label, layer = 0;
  const draw = () => {
    const shown = having.filter(H.isShown);
    controls.replaceChildren();
    if (!shown.length) { plot.replaceChildren(H.el("p", { text: "No chosen method has masks." })); plot.view = null; return null; }
    const method = shown.find((m) => m.label === label) || shown[0], layers = method.capacity.layers;
    if (!layers[layer]) layer = 0;
    H.choice(controls, "Method", shown.map((m) => ({ value: m.label, text: m.label })), method.label, (value) => { label = value; draw(); });
    H.choice(controls, "Layer", layers.map((one, k) => ({ value: String(k), text: one.name })), String(layer), (value) => { layer = Number(value); draw(); });
    const colours = H.colours(), { used, own } = layers[layer], share = (v) => (100 * v) / H.whole;
    const fresh = used.map((v, t) => share(v - (t ? used[t - 1] : 0))), reused = own.map((v, t) => share(v) - fresh[t]), kept = used.map((v, t) => share(v) - fresh[t] - reused[t]);
    const names = ["new", "reused", "kept", "free"], said = { new: "new with this task", reused: "reused by this task", kept: "of other tasks", free: "free" };
    for (const name of names) controls.append(H.el("span", { class: "key" }, H.el("i", { style: `background:${colours[name]}` }), said[name]));
    const chart = H.figure({ height: 300, x: "tasks learned", y: "weights, %", ticks: H.ticksTo(used.length), yRange: new Bokeh.Range1d({ start: 0, end: 100 }) });
    const parts = { new: fresh, reused, kept, free: used.map((v) => 100 - share(v)) }, x = used.map((_, t) => t + 1), marks = [];
    const single = x.length === 1, wide = single ? [0.7, 1.3] : x, twice = (list) => (single ? [list[0], list[0]] : list);
    let low = x.map(() => 0);
    for (const name of names) {
      const high = low.map((v, k) => v + parts[name][k]);
      chart.varea({ field: "x" }, { field: "low" }, { field: "high" }, { source: H.source({ x: wide, low: twice(low), high: twice(high) }), fill_color: colours[name], fill_alpha: 1 });
      low = high;
    }
    const top = () => H.source({ x, y: used.map(share), task: setting.tasks, fresh, reused, kept, free: parts.free });
    chart.line({ field: "x" }, { field: "y" }, { source: top(), line_color: colours.ink, line_width: 1.5 });
    marks.push(chart.scatter({ field: "x" }, { field: "y" }, { source: top(), size: 7, fill_color: colours.ink, line_color: colours.ink }));
    H.hover(chart, marks, [["task", "@task"], ["new", "@fresh{0.0} %"], ["reused", "@reused{0.0} %"], ["of other tasks", "@kept{0.0} %"], ["free", "@free{0.0} %"]], { mode: "vline" });
    return H.put(plot, chart);
  };
  return draw;
};
H.panels.curves = (figure, plot) => {
  const setting = H.data.settings[Number(figure.dataset.setting)], controls = figure.querySelector("[data-controls]"), having = setting.methods.filter((m) => m.watched || m.curves.some((c) => c.length));
  let label = having[0]?.label, what = "validation";
  const draw = () => {
    const shown = having.filter(H.isShown), factor = setting.percent ? 100 : 1;
    controls.replaceChildren();
    if (!shown.length) { plot.replaceChildren(H.el("p", { text: "No chosen method has curves." })); plot.view = null; return null; }
    const method = shown.find((m) => m.label === label) || shown[0], marks = [], colours = H.colours();
    H.choice(controls, "Method", shown.map((m) => ({ value: m.label, text: m.label })), method.label, (value) => { label = value; draw(); });
    if (method.watched) H.choice(controls, "What is drawn", [{ value: "validation", text: "validation data, every seed" }, { value: "watched", text: "test data of every task after each epoch" }], what, (value) => { what = value; draw(); });
    if (method.watched && what === "watched") return H.put(plot, H.watchedChart(setting, method, factor));
    const chart = H.figure({ height: 320, x: "epochs of all tasks", y: H.percentAxis(setting, `validation ${setting.score}`) });
    const places = H.seedPlaces(method).filter((k) => method.curves[k].length);
    for (const fit of method.curves[places[0]] || []) chart.add_layout(new Bokeh.Span({ location: fit[1] + 0.5, dimension: "height", line_color: colours.line, line_width: 1 }));
    for (const k of places) {
      const xs = [], ys = [], tasks = [];
      for (const [task, start, step, values] of method.curves[k]) {
        values.forEach((v, n) => { xs.push(start + n * step + 1); ys.push(v === null ? NaN : (factor * v) / H.whole); tasks.push(setting.tasks[task] ?? ""); });
        xs.push(start + values.length * step + 0.5); ys.push(NaN); tasks.push("");
      }
      const source = () => H.source({ x: xs, y: ys, task: tasks, seed: xs.map(() => method.seeds[k]) }), few = xs.length < 400;
      const line = chart.line({ field: "x" }, { field: "y" }, { source: source(), line_color: H.lookColour(method.look), line_alpha: places.length > 1 ? 0.6 : 1, line_width: 1.6 });
      marks.push(few ? chart.scatter({ field: "x" }, { field: "y" }, { source: source(), size: 4, fill_color: H.lookColour(method.look), line_color: null, fill_alpha: 0.6 }) : line);
    }
    H.hover(chart, marks, [["seed", "@seed"], ["task", "@task"], ["epoch", "@x{0}"], [setting.score, setting.percent ? "@y{0.0}" : "@y{0.000}"]]);
    return H.put(plot, chart);
  };
  return draw;
};
// A line per task, pale until the task is being learned.
H.watchedChart = (setting, method, factor) => {
  const { lines, step, seed } = method.watched, count = Math.max(1, lines.length - 1), marks = [];
  const chart = H.figure({ height: 320, x: `epochs of all tasks${seed ? `, ${seed}` : ""}`, y: H.percentAxis(setting, `${setting.score} on test data`) });
  for (const [task, start, values] of lines) {
    const colour = `rgb(${H.mix(H.isDark() ? "#3fcb9b" : "#123f7a", H.isDark() ? "#e2b93b" : "#c2519a", task / count)})`, x = values.map((_, n) => n * step + 1), y = values.map((v) => (v === null ? NaN : (factor * v) / H.whole));
    chart.line(x.filter((n) => n <= start + 1), y.slice(0, x.filter((n) => n <= start + 1).length), { line_color: colour, line_alpha: 0.3 });
    const from = x.findIndex((n) => n > start), late = { x: x.slice(from), y: y.slice(from), task: x.slice(from).map(() => setting.tasks[task] ?? "") };
    marks.push(chart.line({ field: "x" }, { field: "y" }, { source: H.source(late), line_color: colour, line_width: 2 }));
  }
  H.hover(chart, marks, [["task", "@task"], ["epoch", "@x{0}"], [setting.score, setting.percent ? "@y{0.0}" : "@y{0.000}"]]);
  return chart;
};
H.panels.sweep = (figure, plot) => {
  const sweep = H.data.sweeps[Number(figure.dataset.setting)], controls = figure.querySelector("[data-controls]"), axes = Object.keys(sweep.axes);
  let place = sweep.rows.some((row) => row.values[0][0] !== null) ? 0 : 1;
  const draw = () => {
    const colours = H.isDark() ? ["#569ad9", "#ff8a59", "#38c791", "#f29bcb", "#e3c53c", "#abaeff"] : ["#0c8fc8", "#e3720f", "#05795c", "#c94692", "#94571b", "#4e3db1"], values = sweep.axes[axes[0]], factor = sweep.measures[place].percent ? 100 : 1;
    controls.replaceChildren();
    H.choice(controls, "Measure", sweep.measures.map((m, k) => ({ value: String(k), text: m.title })), String(place), (value) => { place = Number(value); draw(); });
    const chart = H.figure({ height: 320, x: axes[0], y: sweep.measures[place].title + (factor === 100 ? ", %" : ""), ticks: values.map((_, k) => k + 1), tickNames: values });
    const groups = new Map(), marks = [];
    for (const row of sweep.rows) { const key = row.point.slice(1).join(", "); groups.set(key, [...(groups.get(key) || []), row]); }
    let k = 0;
    for (const [key, rows] of groups) {
      const good = rows.filter((row) => row.values[place][0] !== null), colour = colours[k++ % colours.length];
      const y = good.map((row) => factor * row.values[place][0]), std = good.map((row) => factor * (row.values[place][1] || 0)), x = good.map((row) => values.indexOf(row.point[0]) + 1);
      const rest = axes.slice(1).map((name, n) => `${name} = ${good[0]?.point[n + 1]}`).join(", ");
      const source = () => H.source({ x, y, low: y.map((v, n) => v - std[n]), high: y.map((v, n) => v + std[n]), std, value: good.map((row) => row.point[0]), rest: x.map(() => rest || "—"), seeds: good.map((row) => row.seeds) });
      chart.segment({ field: "x" }, { field: "low" }, { field: "x" }, { field: "high" }, { source: source(), line_color: colour, line_alpha: 0.6 });
      chart.line({ field: "x" }, { field: "y" }, { source: source(), line_color: colour, line_width: 2 });
      marks.push(chart.scatter({ field: "x" }, { field: "y" }, { source: source(), size: 8, fill_color: colour, line_color: colour }));
      if (key) controls.append(H.el("span", { class: "key" }, H.el("i", { style: `background:${colour}` }), rest));
    }
    H.hover(chart, marks, [[axes[0], "@value"], ["others", "@rest"], ["mean", factor === 100 ? "@y{0.0} ± @std{0.0}" : "@y{0.000} ± @std{0.000}"], ["seeds", "@seeds"]]);
    return H.put(plot, chart);
  };
  return draw;
};
H.setUpCharts = (root) => {
  for (const figure of root.querySelectorAll("figure.chart")) {
    const plot = figure.querySelector(".plot");
    if (H.canDraw) H.addJob(figure, H.panels[figure.dataset.chart](figure, plot)); else figure.hidden = true;
  }
};
