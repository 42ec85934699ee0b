// A page that a server gives renews itself: runs that go on at every answer, everything else when a record is new.
"use strict";
H.seconds = 2;
H.drawRunning = (running) => {
  if (!H.canDraw) return;
  for (const plot of document.querySelectorAll("[data-running]")) {
    const run = running.find((one) => one.name === plot.dataset.running), points = (run?.curve || []).map((point, k) => [k + 1, point[0], point[2]]).filter((point) => point[2] !== null);
    if (!points.length) continue;
    const colours = H.colours(), chart = H.figure({ height: 170, tools: false, x: "epochs", y: "validation, %" });
    const source = () => H.source({ x: points.map((p) => p[0]), y: points.map((p) => 100 * p[2]), task: points.map((p) => p[1]) });
    chart.line({ field: "x" }, { field: "y" }, { source: source(), line_color: colours.new, line_width: 2 });
    H.hover(chart, [chart.scatter({ field: "x" }, { field: "y" }, { source: source(), size: 4, fill_color: colours.new, line_color: null })], [["task", "@task"], ["epoch", "@x"], ["accuracy", "@y{0.0}"]]);
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
