"use strict";
// Loads the page again when the server tells of newer facts: at once while the page is not used, else on a button.
(() => {
  const CALM_MS = 20_000;
  const news = document.querySelector(".news");
  const OPEN = `open ${location.pathname}`;
  let touched = -CALM_MS;
  let waiting = 0;
  let source = null;

  // The browser keeps the place on the page; tables that were opened are opened again here.
  const details = [...document.querySelectorAll("details")];
  for (const number of JSON.parse(sessionStorage.getItem(OPEN) ?? "[]")) details[number]?.setAttribute("open", "");

  function reload() {
    sessionStorage.setItem(OPEN, JSON.stringify(details.flatMap((one, number) => (one.open ? [number] : []))));
    location.reload();
  }

  function whenCalm() {
    clearTimeout(waiting);
    const left = CALM_MS - (performance.now() - touched);
    if (left <= 0) reload();
    else waiting = setTimeout(whenCalm, left);
  }

  function tell() {
    source.close();
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Show";
    button.addEventListener("click", reload);
    news.replaceChildren("There are newer facts.", button);
    whenCalm();
  }

  function listen() {
    source = new EventSource(document.body.dataset.events);
    source.addEventListener("open", () => {
      news.replaceChildren();
      document.body.dataset.live = "";
    });
    source.addEventListener("message", tell);
    source.addEventListener("error", () => news.replaceChildren("The server does not answer: these are the facts of the last time."));
  }

  for (const name of ["pointerdown", "pointermove", "keydown", "wheel", "touchstart"]) {
    addEventListener(name, () => (touched = performance.now()), { passive: true });
  }
  // A browser has six connections to a server: a hidden tab keeps none.
  document.addEventListener("visibilitychange", () => {
    source?.close();
    clearTimeout(waiting);
    if (!document.hidden) listen();
  });
  if (!document.hidden) listen();
})();
