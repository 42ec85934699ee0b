// Puts everything together.
"use strict";
H.apply = () => {
  H.setTheme(H.state.theme);
  document.documentElement.classList.toggle("dark", H.isDark());
  const shown = H.shownSettings();
  for (const section of document.querySelectorAll("section.setting")) section.hidden = !shown.includes(Number(section.dataset.setting));
  const beside = document.getElementById("beside");
  if (beside) {
    beside.hidden = shown.length < 2;
    const common = shown.map((k) => H.data.settings[k].common), names = [...new Set(common.flatMap(Object.keys))];
    document.getElementById("differ").textContent = names.filter((name) => new Set(common.map((one) => one[name])).size > 1).join(", ");
    for (const row of beside.querySelectorAll("tr[data-setting]")) row.hidden = !shown.includes(Number(row.dataset.setting)) || H.state.hide.includes(row.dataset.label);
  }
  for (const section of document.querySelectorAll("section.setting:not([hidden])")) H.applyBoard(section);
  for (const cell of document.querySelectorAll(".reuse td[data-share]")) H.colourCell(cell, H.scaleColour(Number(cell.dataset.share) / 100));
  H.nameTheme();
};
H.start = () => {
  H.draws = [];
  H.state = H.readState();
  if (H.data.settings.length) H.buildBar();
  for (const section of document.querySelectorAll("section.setting")) H.setUpBoard(section);
  for (const view of document.querySelectorAll("[data-matrix]")) H.setUpMatrix(view);
  H.setUpCharts(document);
  H.apply();
  H.watchAll();
  H.drawRest();
  H.drawRunning(H.data.running);
};
H.onChange(() => { H.apply(); H.redraw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { H.apply(); H.redraw(); });
addEventListener("hashchange", () => { if (location.hash.includes("=")) { H.state = H.readState(); H.buildBar(); H.apply(); H.redraw(); } });
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]'), target = link && document.getElementById(link.getAttribute("href").slice(1));
  if (target) { event.preventDefault(); target.closest("details")?.setAttribute("open", ""); target.scrollIntoView(); target.tabIndex = -1; target.focus({ preventScroll: true }); } // the address keeps the choice
});
H.start();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
if (window.HATRACK_LIVE) H.poll();
