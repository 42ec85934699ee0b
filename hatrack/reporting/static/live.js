// A page that a server gives renews itself: runs that go on at every answer, everything else when a record is new.
"use strict";
H.seconds = 2;
// The points of a curve, with a gap after every task, and the epochs at which tasks ended.
H.liveCurve = (curve) => {
  const points = [], ends = [];
  let before = 0, last = null;
  for (const [task, epoch, accuracy] of curve) {
    if (last && task !== last[0]) { before += last[1]; ends.push(before); points.push({ x: before + 0.5, y: NaN, task: "", epoch: "" }); }
    points.push({ x: before + epoch, y: accuracy === null ? NaN : 100 * accuracy, task: task > 0 ? task : "pretraining", epoch });
    last = [task, epoch];
  }
  return { points, ends };
};
H.drawRunning = (running) => {
  if (!H.canDraw) return;
  for (const plot of document.querySelectorAll("[data-running]")) {
    const run = running.find((one) => one.name === plot.dataset.running), { points, ends } = H.liveCurve(run?.curve || []);
    if (!points.some((point) => Number.isFinite(point.y))) continue;
    const colours = H.colours(), colour = run.look ? H.lookColour(run.look) : colours.new, chart = H.figure({ height: 170, tools: false, x: "epochs of all tasks", y: "validation, %" });
    const source = () => H.source(Object.fromEntries(["x", "y", "task", "epoch"].map((name) => [name, points.map((point) => point[name])])));
    for (const end of ends) chart.add_layout(new Bokeh.Span({ location: end + 0.5, dimension: "height", line_color: colours.strong, line_width: 1, line_dash: "dotted" }));
    chart.line({ field: "x" }, { field: "y" }, { source: source(), line_color: colour, line_width: 2 });
    H.hover(chart, [chart.scatter({ field: "x" }, { field: "y" }, { source: source(), size: 4, fill_color: colour, line_color: null })], [["task", "@task"], ["epoch of the task", "@epoch"], ["accuracy", "@y{0.0}"]]);
    H.put(plot, chart);
  }
};
H.showRunning = (news) => {
  const section = document.getElementById("running");
  section.hidden = !news.running.length;
  if (news.running_html === H.lastRunning) return;
  H.lastRunning = news.running_html;
  document.getElementById("running-cards").innerHTML = news.running_html; // rendered and escaped by the page's own templates
  H.drawRunning(news.running);
};
H.renew = async () => {
  const text = await (await fetch(location.pathname, { cache: "no-store" })).text();
  const fresh = new DOMParser().parseFromString(text, "text/html"), data = fresh.getElementById("data");
  if (!data) return;
  const top = scrollY;
  H.data = JSON.parse(data.textContent);
  document.querySelector("header.top").replaceWith(fresh.querySelector("header.top"));
  document.getElementById("main").replaceWith(fresh.getElementById("main"));
  H.lastRunning = null;
  H.start();
  scrollTo(0, top);
};
H.poll = async () => {
  try {
    const news = await (await fetch("data.json", { cache: "no-store" })).json();
    if (news.digest !== H.data.digest) await H.renew();
    H.showRunning(news);
    document.documentElement.dataset.connection = "on";
  } catch { document.documentElement.dataset.connection = "off"; }
  setTimeout(H.poll, 1000 * H.seconds);
};
