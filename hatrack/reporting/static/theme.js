// Runs in the head: the page says that script works, and takes the reader's theme before anything is drawn.
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
H.setTheme(H.params().get("theme") || H.stored() || "auto");
