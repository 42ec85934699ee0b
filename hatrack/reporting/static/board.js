// The bar of filters and the leaderboard: sorting, columns, rows that open, copies for papers.
"use strict";
H.pop = (title, entries, isOn, set) => {
  const all = (on) => { set(entries.map((entry) => entry.value), on); box.querySelectorAll("input").forEach((input) => { input.checked = on; }); };
  const box = H.el("div", {},
    entries.length > 2 ? H.el("div", { class: "both" }, H.el("button", { type: "button", text: "All", onclick: () => all(true) }), H.el("button", { type: "button", text: "None", onclick: () => all(false) })) : null,
    ...entries.map((entry) => {
      const input = H.el("input", { type: "checkbox", onchange: () => set([entry.value], input.checked) });
      input.checked = isOn(entry.value);
      return H.el("label", {}, input, H.el("span", { text: entry.text }));
    }));
  return H.el("details", { class: "pop" }, H.el("summary", { text: title }), box);
};
H.toggled = (list, values, on) => on ? [...new Set([...list, ...values])] : list.filter((value) => !values.includes(value));
H.buildBar = () => {
  const settings = H.data.settings, methods = settings.flatMap((setting) => setting.methods);
  const labels = [...new Set(methods.map((method) => method.label))], seeds = [...new Set(settings.flatMap((s) => s.seeds))].sort((a, b) => a - b);
  const names = [...new Set(methods.map((method) => method.method))];
  const options = names.flatMap((name) => H.optionNames(name).flatMap((option) =>
    [...new Set(methods.filter((m) => m.method === name).map((m) => m.options[option] ?? "default"))].map((value) => `${option}=${value}`)));
  const bar = document.getElementById("bar"), parts = [];
  if (settings.length > 1) parts.push(H.pop("Settings", settings.map((s, k) => ({ value: k, text: s.title })), (k) => H.state.settings.includes(k),
    (values, on) => H.update({ settings: H.toggled(H.state.settings, values, on).sort((a, b) => a - b) })));
  if (labels.length > 1) parts.push(H.pop("Methods", labels.map((label) => ({ value: label, text: label })), (label) => !H.state.hide.includes(label),
    (values, on) => H.update({ hide: H.toggled(H.state.hide, values, !on) })));
  if (options.length) {
    const select = H.el("select", { "aria-label": "Options of methods", onchange: () => H.update({ option: select.value }) }, H.el("option", { value: "", text: "Any option" }),
      ...[...new Set(options)].map((text) => H.el("option", { value: text, text: text.replace("=", " = ") })));
    select.value = H.state.option;
    parts.push(select);
  }
  if (seeds.length > 1) parts.push(H.pop("Seeds", seeds.map((seed) => ({ value: seed, text: `seed ${seed}` })), (seed) => !H.state.seeds || H.state.seeds.includes(seed),
    (values, on) => { const now = H.toggled(H.state.seeds || seeds, values, on); H.update({ seeds: now.length === seeds.length ? null : now }); }));
  if (settings.some((s) => s.tasks.length > 1)) {
    const said = H.el("span", { class: "wrong", id: "tasks-wrong", role: "alert" });
    const judge = () => { said.textContent = H.taskProblem(input.value); input.setAttribute("aria-invalid", String(said.textContent !== "")); return said.textContent === ""; };
    const input = H.el("input", { type: "text", id: "tasks", placeholder: "all", "aria-label": "Tasks that are averaged, such as 1-5", "aria-describedby": "tasks-wrong", onchange: () => { if (judge()) H.update({ tasks: input.value.trim() }); } });
    input.value = H.wrongTasks || H.state.tasks;
    judge();
    parts.push(H.el("span", { class: "field" }, H.el("span", { text: "Tasks", "aria-hidden": "true" }), input, said));
  }
  const theme = H.el("button", { type: "button", id: "theme", onclick: () => H.update({ theme: H.nextTheme() }) });
  const reset = H.el("button", { type: "button", text: "Reset", onclick: () => { const theme = H.state.theme; H.wrongTasks = ""; H.update({ ...H.defaults(), theme }); H.buildBar(); } });
  const wide = !matchMedia("(max-width: 640px)").matches;
  const inner = H.el("div", { class: "bar-inner" }, ...parts, H.el("span", { class: "fill" }), reset, theme);
  bar.replaceChildren(H.el("details", { class: "filters", open: wide }, H.el("summary", { text: "Filters and theme" }), inner));
  H.nameTheme();
};
document.addEventListener("click", (event) => { for (const pop of document.querySelectorAll(".pop[open]")) if (!pop.contains(event.target)) pop.open = false; });
document.addEventListener("keydown", (event) => {
  const pop = event.key === "Escape" && document.querySelector(".pop[open]");
  if (pop) { pop.open = false; pop.querySelector("summary").focus(); }
});

H.setUpBoard = (section) => {
  const table = section.querySelector(".board"), heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, place) => {
    const link = head.querySelector("a"), text = head.textContent;
    const button = H.el("button", { type: "button", text, title: link ? "Sort; the meaning is explained at the end of the page" : "Sort", onclick: () => {
      const key = head.dataset.key, down = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : !(key === "label" || "lower" in head.dataset);
      H.update({ sort: `${key}:${down ? "down" : "up"}` });
    } });
    head.replaceChildren(button);
    head.dataset.place = place;
  });
  for (const entry of table.querySelectorAll(".entry")) {
    const detail = entry.nextElementSibling, cell = entry.cells[0], place = entry.classList.contains("ahead") ? "best" : entry.classList.contains("tied") ? "tied" : "";
    detail.classList.add("shut");
    detail.querySelector("details").open = true;
    const button = H.el("button", { type: "button", class: "open-row", "aria-expanded": "false", "aria-label": `${entry.dataset.label}: seeds, command and records`, onclick: () => {
      detail.classList.toggle("shut");
      button.setAttribute("aria-expanded", String(!detail.classList.contains("shut")));
    } });
    cell.prepend(button);
    if (place) cell.append(H.el("span", { class: "badge", text: place }));
    entry.addEventListener("click", (event) => { if (!event.target.closest("button, a") && !String(getSelection())) button.click(); });
  }
  for (const button of section.querySelectorAll("[data-columns]")) button.addEventListener("click", () =>
    H.update({ columns: H.toggled(H.state.columns, [button.dataset.columns], !H.state.columns.includes(button.dataset.columns)) }));
  for (const button of section.querySelectorAll("[data-copy]")) button.addEventListener("click", () => H.copy(H.asText(table, button.dataset.copy), section.querySelector(".said"), `Copied as ${button.dataset.copy}`));
  for (const button of section.querySelectorAll("[data-copy-text]")) button.addEventListener("click", () => H.copy(button.parentElement.querySelector("code").textContent, section.querySelector(".said"), "Copied"));
};
H.applyBoard = (section) => {
  const table = section.querySelector(".board"), setting = H.data.settings[Number(section.dataset.setting)];
  for (const kind of ["measures", "costs"]) table.classList.toggle(`show-${kind}`, H.state.columns.includes(kind));
  for (const button of section.querySelectorAll("[data-columns]")) button.setAttribute("aria-pressed", String(H.state.columns.includes(button.dataset.columns)));
  const [key, way] = H.state.sort.split(":"), head = [...table.tHead.rows[0].cells].find((one) => one.dataset.key === key);
  for (const one of table.tHead.rows[0].cells) one.removeAttribute("aria-sort");
  H.recount(table, setting);
  if (head) { head.setAttribute("aria-sort", way === "down" ? "descending" : "ascending"); H.sortRows(table, Number(head.dataset.place), way === "down"); }
  else if (!H.state.sort) H.sortRows(table, 2, true);
  for (const row of section.querySelectorAll("tr[data-label]")) row.hidden = !H.isShown(setting.methods.find((m) => m.label === row.dataset.label) || { label: "" });
};
H.sortRows = (table, place, down) => {
  const value = (row) => { const cell = row.cells[place], text = cell.dataset.value; return place === 0 ? row.dataset.label : text === "" || text === undefined ? null : Number(text); };
  for (const body of table.tBodies) {
    const rows = [...body.querySelectorAll(":scope > .entry")].map((row) => [row, row.nextElementSibling]);
    rows.sort(([a], [b]) => {
      const one = value(a), two = value(b);
      if (one === null || two === null) return (one === null) - (two === null);
      const order = typeof one === "string" ? one.localeCompare(two) : one - two;
      return down ? -order : order;
    });
    for (const pair of rows) body.append(...pair);
  }
};
// With some seeds or tasks only, three measures are computed again; the others keep the values of all seeds, and are pale.
H.recount = (table, setting) => {
  const some = H.state.seeds !== null || H.state.tasks !== "";
  if (!some && !table.classList.contains("some")) return;
  table.classList.toggle("some", some);
  const place = Object.fromEntries([...table.tHead.rows[0].cells].map((head, k) => [head.dataset.key, k]));
  for (const entry of table.querySelectorAll(".entry")) {
    const method = setting.methods.find((m) => m.label === entry.dataset.label), found = H.measures(method, setting);
    [...entry.cells].forEach((cell, k) => {
      if (k === 0) return;
      cell.dataset.first ??= cell.innerHTML;
      cell.dataset.all ??= cell.dataset.value;
      const key = Object.keys(place).find((name) => place[name] === k);
      cell.classList.toggle("stale", some && !(key in found));
      if (!some) { cell.innerHTML = cell.dataset.first; cell.dataset.value = cell.dataset.all; } // our own markup, kept from above
      else if (key in found) { cell.textContent = found[key] === null ? "—" : H.shownValue(key, found[key], setting); cell.dataset.value = found[key] ?? ""; }
    });
  }
};
H.shownValue = (key, value, setting) => (key === "seeds" ? String(value) : key === "forgetting" || !setting.percent ? value.toFixed(3) : (100 * value).toFixed(1)).replace("-", "−");

H.asText = (table, form) => {
  const seen = (row) => [...row.cells].filter((cell) => cell.getClientRects().length || cell.dataset.kind === "first" || cell.scope === "row");
  const words = (cell) => { const copy = cell.cloneNode(true); for (const extra of copy.querySelectorAll(".badge, .open-row")) extra.remove(); return copy.textContent.replace(/\s+/g, " ").trim(); };
  const rows = [table.tHead.rows[0], ...table.querySelectorAll(".entry:not([hidden])")].map((row) => seen(row).map(words));
  if (form === "CSV") return rows.map((row) => row.map((text) => `"${(/^[=+@-]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`).join(",")).join("\n");
  if (form === "Markdown") return rows.map((row, k) => `| ${row.map((text) => text.replace(/([|\\`<])/g, "\\$1")).join(" | ")} |` + (k ? "" : `\n|${row.map((_, n) => (n ? " ---: |" : " --- |")).join("")}`)).join("\n");
  const tex = { "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", $: "\\$", "#": "\\#", _: "\\_", "{": "\\{", "}": "\\}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "−": "$-$" };
  const line = (row) => `${row.map((text) => text.replace(/[\\&%$#_{}~^±−]/g, (letter) => tex[letter])).join(" & ")} \\\\`;
  return [`\\begin{tabular}{l${"r".repeat(rows[0].length - 1)}}`, "\\toprule", line(rows[0]), "\\midrule", ...rows.slice(1).map(line), "\\bottomrule", "\\end{tabular}"].join("\n");
};
H.copy = async (text, status, said) => {
  H.copied = text;
  try { await navigator.clipboard.writeText(text); } catch {
    const area = H.el("textarea", { class: "visually-hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  status.textContent = said;
  setTimeout(() => { status.textContent = ""; }, 2500);
};
