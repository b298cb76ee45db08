// Light, dark, or what the system says. Not a module: it runs before the first paint.
"use strict";

const THEMES = ["auto", "light", "dark"];

function storedTheme() {
  try {
    const stored = localStorage.getItem("jaxserve-theme");
    return THEMES.includes(stored) ? stored : "auto";
  } catch {
    return "auto"; // a browser may forbid storage
  }
}

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("jaxserve-theme", theme);
  } catch {
    // it holds until the page is loaded again
  }
}

applyTheme(storedTheme());

document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("theme");
  const say = () => {
    const { theme } = document.documentElement.dataset;
    button.textContent = theme[0].toUpperCase() + theme.slice(1);
    button.setAttribute("aria-label", `Theme: ${theme}`);
  };
  button.addEventListener("click", () => {
    const next = (THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length;
    applyTheme(THEMES[next]);
    say();
  });
  say();
});
