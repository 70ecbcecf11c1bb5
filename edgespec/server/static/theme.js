// Dark or light: as the reader chose, else as the system is.

const dark = matchMedia("(prefers-color-scheme: dark)"), button = document.getElementById("theme");

function show() {
  const chosen = localStorage.getItem("chosen-theme") ?? "";
  document.documentElement.dataset.theme = chosen;
  button.setAttribute("aria-pressed", (chosen || (dark.matches ? "dark" : "light")) === "dark");
}

function change() {
  const name = button.getAttribute("aria-pressed") === "true" ? "light" : "dark";
  if ((name === "dark") === dark.matches) localStorage.removeItem("chosen-theme");  // the system's choice again
  else localStorage.setItem("chosen-theme", name);
  show();
}

dark.addEventListener("change", show);
button.addEventListener("click", change);
show();
