"use strict";
// Keeps the table of runs up to date. All text goes in as text, never as markup.
(() => {
  const body = document.querySelector("tbody");
  const filter = document.getElementById("filter");
  const news = document.querySelector(".news");
  const CLASSES = ["n", "r", "r", "r", "w", "n"];
  const TONES = { done: "n good", failed: "n bad" };
  const rows = new Map([...body.rows].map((row) => [row.querySelector("a")?.getAttribute("href") ?? row.cells[0].textContent, row]));
  let version = document.body.dataset.version;
  let source = null;

  function show(row) {
    row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase());
  }

  function make(name, link) {
    const row = document.createElement("tr");
    const head = row.appendChild(document.createElement("th"));
    head.scope = "row";
    const text = link ? head.appendChild(document.createElement("a")) : head;
    // The server made it: run/, and the run's path.
    if (link) text.href = new URL(link, location.href);
    text.textContent = name;
    for (const name of CLASSES) row.appendChild(document.createElement("td")).className = name;
    body.insertBefore(row, [...body.rows].find((other) => other.cells[0].textContent > name) ?? null);
    rows.set(link || name, row);
    return row;
  }

  function update(one) {
    const row = rows.get(one.link || one.run) ?? make(one.run, one.link);
    [one.state, one.step, one.reward, one.interrupted, one.last, one.time].forEach((text, number) => {
      if (row.cells[number + 1].textContent !== text) row.cells[number + 1].textContent = text;
    });
    row.cells[1].className = TONES[one.tone] ?? "n";
    show(row);
  }

  function listen() {
    source = new EventSource(`events?since=${encodeURIComponent(version)}`);
    source.addEventListener("open", () => {
      news.textContent = "";
      document.body.dataset.live = "";
    });
    source.addEventListener("message", (event) => {
      version = event.lastEventId;
      const { rows: changed, summary } = JSON.parse(event.data);
      changed.forEach(update);
      document.getElementById("summary").textContent = summary;
    });
    source.addEventListener("error", () => (news.textContent = "The server does not answer: this is as of the last time it did."));
  }

  filter.addEventListener("input", () => rows.forEach(show));
  // A browser has six connections to a server: a hidden tab keeps none.
  document.addEventListener("visibilitychange", () => {
    source?.close();
    if (!document.hidden) listen();
  });
  if (!document.hidden) listen();
})();
