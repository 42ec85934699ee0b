// What the reader chose. It is kept in the address, so that a link shows the same.
"use strict";
H.data = JSON.parse(document.getElementById("data").textContent);
H.el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick" || name === "onchange") node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
};
H.few = 3; // settings that are shown at once at first
H.defaults = () => ({
  settings: H.data.settings.map((_, k) => k).filter((k) => H.data.settings.length <= H.few || k === 0),
  hide: [], option: "", seeds: null, tasks: "", sort: "", columns: [], theme: H.stored() || "auto",
});
H.readTasks = (text) => { const found = /^\s*(\d+)\s*(?:[-–]\s*(\d+))?\s*$/.exec(text); return found && [Number(found[1]), Number(found[2] || found[1])]; };
// What is wrong with a choice of tasks; nothing is wrong with an empty one.
H.taskProblem = (text) => {
  const most = Math.max(1, ...H.data.settings.map((setting) => setting.tasks.length)), found = H.readTasks(text);
  if (!text.trim()) return "";
  if (!found) return `“${text.trim().slice(0, 20)}” is no choice of tasks: write 3, or 1-${most}`;
  if (found[0] < 1 || Math.max(...found) > most) return `there are tasks 1 to ${most}`;
  return found[0] > found[1] ? `the first comes first: ${found[1]}-${found[0]}` : "";
};
H.readState = () => {
  const state = H.defaults(), found = H.params();
  const numbers = (name) => found.getAll(name).flatMap((text) => text.split(",")).filter(Boolean).map(Number).filter(Number.isInteger);
  if (found.has("settings")) state.settings = numbers("settings").map((k) => k - 1).filter((k) => H.data.settings[k]);
  if (found.has("seeds")) state.seeds = numbers("seeds");
  state.hide = found.getAll("hide");
  state.columns = found.getAll("columns");
  for (const name of ["option", "tasks", "sort", "theme"]) if (found.has(name)) state[name] = found.get(name);
  H.wrongTasks = H.taskProblem(state.tasks) ? state.tasks : "";
  if (H.wrongTasks) state.tasks = "";
  return state;
};
H.state = H.readState();
H.saveState = () => {
  const first = H.defaults(), found = new URLSearchParams();
  if (String(H.state.settings) !== String(first.settings)) found.set("settings", H.state.settings.map((k) => k + 1).join(","));
  if (H.state.seeds) found.set("seeds", H.state.seeds.join(","));
  for (const label of H.state.hide) found.append("hide", label);
  for (const kind of H.state.columns) found.append("columns", kind);
  for (const name of ["option", "tasks", "sort"]) if (H.state[name]) found.set(name, H.state[name]);
  if (H.state.theme !== "auto") found.set("theme", H.state.theme);
  history.replaceState(null, "", String(found) ? `#${found}` : location.pathname + location.search);
};
H.update = (changes) => {
  Object.assign(H.state, changes);
  H.saveState();
  for (const listener of H.listeners) listener(changes);
};
H.onChange = (listener) => H.listeners.push(listener);

// The tasks that are averaged, from and to, counted from 0.
H.taskRange = (count) => {
  const [from, to] = H.readTasks(H.state.tasks) || [1, count];
  return [Math.min(from, count) - 1, Math.min(to, count) - 1];
};
H.isShown = (method) => {
  if (H.state.hide.includes(method.label)) return false;
  const at = H.state.option.indexOf("=");
  if (at < 0) return true;
  const name = H.state.option.slice(0, at), value = H.state.option.slice(at + 1);
  return !H.optionNames(method.method).includes(name) || (method.options[name] ?? "default") === value;
};
H.optionNames = (name) => {
  const all = H.data.settings.flatMap((setting) => setting.methods).filter((method) => method.method === name);
  return [...new Set(all.flatMap((method) => Object.keys(method.options)))];
};
H.seedPlaces = (method) => method.seeds.map((_, k) => k).filter((k) => !H.state.seeds || H.state.seeds.includes(method.seeds[k]));
H.shownSettings = () => H.state.settings.filter((k) => H.data.settings[k]);
