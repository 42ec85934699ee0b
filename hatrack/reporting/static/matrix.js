// One large accuracy matrix with a tab per method, and the difference to another method.
"use strict";
H.whole = 10000; // accuracies in the data are whole multiples of 1 / H.whole
H.mean = (values) => { const found = values.filter((v) => v !== null && v !== undefined); return found.length ? found.reduce((a, b) => a + b, 0) / found.length : null; };
H.std = (values) => {
  const found = values.filter((v) => v !== null && v !== undefined), mean = H.mean(found);
  return found.length > 1 ? Math.sqrt(found.reduce((sum, v) => sum + (v - mean) ** 2, 0) / (found.length - 1)) : null;
};
H.meanMatrix = (method) => {
  const chosen = H.seedPlaces(method).map((k) => method.matrices[k]);
  return chosen.length ? chosen[0].map((_, place) => (chosen.some((m) => m[place] === null) ? null : H.mean(chosen.map((m) => m[place])) / H.whole)) : [];
};
// The average after each task, for one seed, over the chosen tasks that were learned; null where a value is missing.
H.averages = (matrix, count) => {
  const [from, to] = H.taskRange(count);
  return Array.from({ length: count }, (_, t) => {
    if (t < from) return null;
    const row = [];
    for (let i = from; i <= Math.min(t, to); i++) row.push(matrix[t * count + i]);
    return row.includes(null) ? null : H.mean(row) / H.whole;
  });
};
H.measures = (method, setting) => {
  const count = setting.tasks.length, [from, to] = H.taskRange(count), places = H.seedPlaces(method);
  const tasks = Array.from({ length: to - from + 1 }, (_, k) => from + k), at = (m, t, i) => m[t * count + i];
  const over = (values) => (values.includes(null) || !values.length ? null : H.mean(values) / H.whole);
  const each = (compute) => H.mean(places.map((k) => compute(method.matrices[k])));
  const lost = (m) => over(tasks.filter((i) => i < count - 1).map((i) => {
    const column = []; for (let t = i; t < count - 1; t++) column.push(at(m, t, i));
    return column.includes(null) || at(m, count - 1, i) === null ? null : Math.max(...column) - at(m, count - 1, i);
  }));
  return {
    seeds: places.length,
    accuracy: each((m) => over(tasks.map((i) => at(m, count - 1, i)))),
    learning: each((m) => over(tasks.map((i) => at(m, i, i)))),
    forgetting: each(lost),
  };
};
H.rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
H.mix = (one, two, share) => { const a = H.rgb(one), b = H.rgb(two); return a.map((v, k) => Math.round(v + share * (b[k] - v))); };
H.inkOn = (rgb) => {
  const [r, g, b] = rgb.map((v) => { const c = v / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
};
H.scaleColour = (share) => {
  const stops = H.isDark() ? ["#1d252d", "#1d4f66", "#2f9aa0", "#c8efd0"] : ["#fbfbe8", "#b5e0c0", "#3a9fb5", "#123f7a"];
  const place = Math.min(0.9999, Math.max(0, share)) * (stops.length - 1), k = Math.floor(place);
  return H.mix(stops[k], stops[k + 1], place - k);
};
H.differenceColour = (share) => {
  const [low, middle, high] = H.isDark() ? ["#ff9455", "#1d252d", "#56b4f0"] : ["#d55e00", "#ffffff", "#0072b2"];
  return H.mix(middle, share < 0 ? low : high, Math.min(1, Math.abs(share)) * 0.85);
};
H.colourCell = (cell, rgb) => { cell.style.background = `rgb(${rgb})`; cell.style.color = H.inkOn(rgb); };

H.setUpMatrix = (view) => {
  const setting = H.data.settings[Number(view.dataset.matrix)], id = `matrix-${view.dataset.matrix}`;
  let chosen = setting.methods[0].label, other = "";
  const draw = () => {
    const shown = setting.methods.filter(H.isShown);
    if (!shown.length) { view.replaceChildren(H.el("p", { text: "No method is chosen." })); return; }
    const method = shown.find((m) => m.label === chosen) || shown[0];
    const focused = view.contains(document.activeElement) ? document.activeElement.dataset.place : null;
    const tabs = H.el("div", { class: "tabs", role: "tablist", "aria-label": "Method of the matrix" }, ...shown.map((m, k) => H.el("button", {
      type: "button", role: "tab", id: `${id}-tab-${k}`, "data-place": `tab-${k}`, "aria-selected": String(m === method), "aria-controls": `${id}-panel`, tabindex: m === method ? "0" : "-1", text: m.label,
      onclick: () => { chosen = m.label; draw(); } })));
    tabs.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const k = (shown.indexOf(method) + step + shown.length) % shown.length;
      chosen = shown[k].label;
      draw();
      document.getElementById(`${id}-tab-${k}`).focus();
    });
    const select = H.el("select", { "aria-label": "Difference to", "data-place": "select", onchange: () => { other = select.value; draw(); } }, H.el("option", { value: "", text: "its own values" }),
      ...shown.filter((m) => m !== method).map((m) => H.el("option", { value: m.label, text: `difference to ${m.label}` })));
    const base = shown.find((m) => m.label === other && m !== method);
    select.value = base ? other : "";
    const place = shown.indexOf(method);
    view.replaceChildren(tabs, H.el("p", { class: "field" }, select),
      H.el("div", { id: `${id}-panel`, class: "scroll", role: "tabpanel", tabindex: "0", "aria-labelledby": `${id}-tab-${place}` }, H.matrixTable(setting, method, base)));
    if (focused) view.querySelector(`[data-place="${focused}"]`)?.focus();
  };
  H.draws.push({ el: view, draw, kinds: ["setting"] });
};
H.matrixTable = (setting, method, base) => {
  const count = setting.tasks.length, [from, to] = H.taskRange(count), tasks = Array.from({ length: to - from + 1 }, (_, k) => from + k);
  const own = H.meanMatrix(method), than = base ? H.meanMatrix(base) : null, factor = setting.percent ? 100 : 1, digits = setting.percent ? 1 : 3;
  const ranked = setting.methods.filter((m) => m.method !== "random"), narrow = tasks.length > 12; // the scale is the same for all methods
  const learned = (ranked.length ? ranked : setting.methods).flatMap(H.meanMatrix).filter((v, k) => v !== null && k % count <= Math.floor((k % (count * count)) / count));
  const low = setting.percent ? Math.min(0.9, Math.floor(10 * Math.min(...learned)) / 10) : Math.min(...learned), high = setting.percent ? 1 : Math.max(...learned);
  const gaps = than ? own.map((v, k) => (v === null || than[k] === null || than[k] === undefined ? null : v - than[k])) : [];
  const widest = Math.max(0.01, ...gaps.filter((v, k) => v !== null && k % count <= Math.floor(k / count)).map(Math.abs));
  const title = base ? `${method.label} minus ${base.label}` : method.label;
  const head = H.el("tr", {}, H.el("td", { text: "after" }), ...tasks.map((i) => H.el("th", { scope: "col", text: narrow ? String(i + 1) : setting.tasks[i], title: setting.tasks[i] })));
  const body = tasks.map((t) => H.el("tr", {}, H.el("th", { scope: "row", text: narrow ? `${t + 1} ${setting.tasks[t]}` : setting.tasks[t], title: setting.tasks[t] }), ...tasks.map((i) => {
    const value = (than ? gaps : own)[t * count + i], cell = H.el("td", {});
    if (value === null || value === undefined || (than && i > t)) { cell.textContent = than && i > t ? "" : "—"; return cell; }
    cell.textContent = (than && value > 0 ? "+" : "") + (factor * value).toFixed(digits).replace("-", "−");
    if (i > t) cell.classList.add("future"); // not learned yet
    else H.colourCell(cell, than ? H.differenceColour(value / widest) : H.scaleColour((value - low) / Math.max(1e-9, high - low)));
    return cell;
  })));
  return H.el("table", { class: narrow ? "matrix narrow" : "matrix" }, H.el("caption", { text: title + (setting.percent ? ", %" : "") }), H.el("thead", {}, head), H.el("tbody", {}, ...body));
};
