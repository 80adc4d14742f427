"use strict";
document.documentElement.classList.add("js");

// The theme of the system, until the reader asks for the other one.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const say = () => {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    say();
  });
  system.addEventListener("change", say);
  button.hidden = false;
  say();
})();
