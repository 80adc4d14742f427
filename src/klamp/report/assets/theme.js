"use strict";
document.documentElement.classList.add("js");

// The theme: what the system asks for, until someone asks for the other one.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const remembered = (() => {
    try {
      return localStorage.getItem("klamp-theme");
    } catch {
      return null;
    }
  })();
  if (remembered === "dark" || remembered === "light") root.dataset.theme = remembered;

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const say = () => {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("klamp-theme", root.dataset.theme);
    } catch {
      // A file may have no storage; the theme then lasts as long as the page.
    }
    say();
  });
  system.addEventListener("change", say);
  button.hidden = false;
  say();
})();

