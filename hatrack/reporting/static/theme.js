// Runs in the head: the page says that script works, and takes the reader's theme before anything is drawn. Paper gets all that is folded.
"use strict";
const H = { draws: [], listeners: [] };
document.documentElement.classList.add("js");
H.params = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
H.stored = () => { try { return localStorage.getItem("hatrack-theme"); } catch { return null; } };
H.setTheme = (name) => {
  const root = document.documentElement;
  if (name === "dark" || name === "light") root.dataset.theme = name; else delete root.dataset.theme;
};
H.isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
H.nameTheme = () => {
  for (const button of document.querySelectorAll("#theme")) {
    button.textContent = H.isDark() ? "☀ Light" : "☾ Dark";
    button.setAttribute("aria-label", `Change to the ${H.isDark() ? "light" : "dark"} theme`);
  }
};
H.nextTheme = () => {
  const next = H.isDark() ? "light" : "dark";
  try { localStorage.setItem("hatrack-theme", next); } catch { /* a page from a file may have no storage */ }
  return next;
};
H.setTheme(H.params().get("theme") || H.stored() || "auto");
addEventListener("beforeprint", () => { for (const shut of document.querySelectorAll("details:not([open])")) { shut.open = true; shut.dataset.printed = ""; } });
addEventListener("afterprint", () => { for (const shut of document.querySelectorAll("details[data-printed]")) { shut.open = false; delete shut.dataset.printed; } });
