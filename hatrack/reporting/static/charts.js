// Charts are drawn by Bokeh when they come near the screen, and again when a choice or the theme changes.
"use strict";
H.canDraw = typeof Bokeh !== "undefined";
H.colours = () => {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["ground", "panel", "ink", "muted", "line", "strong", "new", "reused", "kept", "free"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
};
H.lookColour = (look) => (H.isDark() ? look.dark : look.colour);
H.plain = (text) => new Bokeh.PlainText({ text }); // never read as a formula
H.figure = ({ height = 340, tools = true, x, y, xRange = null, yRange = null, ticks = null, tickNames = null }) => {
  const colours = H.colours(), font = getComputedStyle(document.body).fontFamily;
  const given = { height, sizing_mode: "stretch_width", tools: "box_zoom,reset,save", toolbar_location: tools ? "above" : null, active_drag: null, background_fill_color: null, border_fill_color: null, outline_line_color: null, min_border_right: 12 };
  if (xRange) given.x_range = xRange;
  if (yRange) given.y_range = yRange;
  const figure = Bokeh.Plotting.figure(given);
  figure.toolbar.autohide = true;
  figure.toolbar.logo = null;
  for (const [axes, text] of [[figure.xaxes, x], [figure.yaxes, y]]) for (const axis of axes) axis.setv({
    axis_label: H.plain(text), axis_label_text_color: colours.muted, axis_label_text_font: font, axis_label_text_font_style: "normal", axis_label_text_font_size: "13px", axis_line_color: colours.strong,
    major_label_text_color: colours.muted, major_label_text_font: font, major_label_text_font_size: "12px", major_tick_line_color: null, minor_tick_line_color: null });
  if (ticks) figure.xaxes[0].ticker = new Bokeh.FixedTicker({ ticks });
  if (tickNames) figure.xaxes[0].major_label_overrides = new Map(tickNames.map((text, k) => [k + 1, H.plain(text)]));
  for (const grid of [...figure.xgrids, ...figure.ygrids]) grid.setv({ grid_line_color: colours.line });
  for (const grid of figure.xgrids) grid.grid_line_color = null;
  return figure;
};
H.source = (data) => new Bokeh.ColumnDataSource({ data });
H.hover = (figure, renderers, tooltips, more = {}) => figure.add_tools(new Bokeh.HoverTool({ renderers, tooltips, ...more }));
H.ticksTo = (count) => { const step = Math.max(1, Math.ceil(count / 10)); return Array.from({ length: count }, (_, k) => k + 1).filter((n) => (n - 1) % step === 0); };
H.put = async (plot, figure) => {
  const turn = (plot.turn = (plot.turn || 0) + 1), before = plot.view;
  const holder = H.el("div");
  if (before) plot.style.minHeight = `${plot.offsetHeight}px`;
  plot.replaceChildren(holder);
  if (before) { plot.view = null; try { before.remove(); } catch { /* it is gone already */ } }
  const view = await Bokeh.Plotting.show(figure, holder);
  if (plot.turn !== turn) { try { view.remove(); } catch { /* a later one took its place */ } return; }
  plot.view = view;
  plot.style.minHeight = "";
  plot.dataset.drawn = String(Number(plot.dataset.drawn || 0) + 1);
};
H.legend = (box, methods, chosen, change) => {
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.label : null;
  box.classList.toggle("some", chosen.size > 0);
  box.replaceChildren(...methods.map((method) => {
    const button = H.el("button", { type: "button", "aria-pressed": String(chosen.has(method.label)), "data-label": method.label, title: "Show this method alone, or beside those chosen", onclick: () => {
      if (chosen.has(method.label)) chosen.delete(method.label); else chosen.add(method.label);
      change();
    } });
    const mark = document.querySelector(`.board .entry[data-label="${CSS.escape(method.label)}"] .mark`);
    if (mark) button.append(mark.cloneNode(true));
    button.append(method.label);
    return button;
  }));
  if (focused) [...box.children].find((one) => one.dataset.label === focused)?.focus();
};
H.choice = (box, name, entries, value, change) => {
  const select = H.el("select", { "aria-label": name, onchange: () => change(select.value) }, ...entries.map((entry) => H.el("option", { value: entry.value, text: entry.text })));
  select.value = value;
  box.append(select);
};
// Draw what is near the screen; the rest is drawn when nothing else is to be done, and again when it comes near.
H.near = new IntersectionObserver((entries) => { for (const entry of entries) if (entry.isIntersecting) H.drawOne(entry.target.job); }, { rootMargin: "400px" });
H.drawOne = (job) => { if (job && job.stale) { job.stale = false; job.draw(); } };
H.drawRest = () => (window.requestIdleCallback || setTimeout)(() => {
  const job = H.draws.find((one) => one.stale && one.el.offsetParent);
  if (job) { H.drawOne(job); H.drawRest(); }
});
H.addJob = (el, draw) => { const job = { el, draw, stale: true }; el.job = job; H.draws.push(job); };
H.watchAll = () => { for (const job of H.draws) { job.el.job = job; job.stale ??= true; H.near.observe(job.el); } };
H.redraw = () => { for (const job of H.draws) { job.stale = true; H.near.unobserve(job.el); H.near.observe(job.el); } };
