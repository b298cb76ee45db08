// Views and what is fetched for them: samples always, requests while they are looked at.

import { Failure } from "./api.js";
import { byId } from "./dom.js";
import { Playground } from "./playground.js";
import { PromiseView } from "./promise.js";
import { RequestsView } from "./requests.js";
import { SampleLog } from "./samples.js";

const VIEWS = ["promise", "playground", "requests"];
const PERIOD = 2000;

const log = new SampleLog();
const promise = new PromiseView();
const requests = new RequestsView();
const playground = new Playground();

function currentView() {
  const view = location.hash.slice(1);
  return VIEWS.includes(view) ? view : VIEWS[0];
}

function showView() {
  const current = currentView();
  for (const view of VIEWS) {
    const isCurrent = view === current;
    const tab = byId(`tab-${view}`);
    tab.setAttribute("aria-selected", String(isCurrent));
    tab.tabIndex = isCurrent ? 0 : -1;
    byId(`view-${view}`).hidden = !isCurrent;
  }
  document.body.dataset.view = current;
  document.title = `${byId(`tab-${current}`).textContent} · jaxserve`;
  if (current === "requests") requests.refresh();
  if (current === "playground") playground.shown();
}

function goTo(view) {
  location.hash = view;
}

/** Tabs as assistive technology expects them: one stop, arrows between. */
function wireTabs() {
  for (const [i, view] of VIEWS.entries()) {
    const tab = byId(`tab-${view}`);
    tab.addEventListener("click", () => goTo(view));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: VIEWS.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const other = VIEWS[(to + VIEWS.length) % VIEWS.length];
      goTo(other);
      byId(`tab-${other}`).focus();
    });
  }
  addEventListener("hashchange", showView);
}

function sayStatus(state, words) {
  const status = byId("status");
  if (status.dataset.state === state && status.textContent === words) return;
  status.dataset.state = state;
  status.textContent = words;
}

async function refresh() {
  try {
    await log.refresh();
    byId("model").textContent = log.model;
    sayStatus(log.unavailable ? "waiting" : "ready", log.unavailable ?? "ready");
    promise.update(log);
    if (currentView() === "requests") await requests.refresh();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    sayStatus("away", error.status === 401 ? "needs an API key" : error.status ? error.message : "not reachable");
  }
}

async function keepFresh() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resolve) => setTimeout(resolve, PERIOD));
  }
}

wireTabs();
showView();
keepFresh();
