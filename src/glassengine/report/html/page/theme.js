// Dark and light: as the system has it, until the button is used; remembered where the browser lets a page remember.
function themes() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const remembered = () => { try { return localStorage.getItem("glass-theme"); } catch { return null; } };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  const known = remembered();
  if (known === "dark" || known === "light") root.dataset.theme = known;
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("glass-theme", root.dataset.theme); } catch { /* not remembered */ }
    show();
  });
  system.addEventListener("change", show);
  show();
}
themes();

// Copies the answer, where the browser lets a page write to the clipboard.
function copies() {
  const button = document.getElementById("copy");
  if (!button || !navigator.clipboard) return;
  button.hidden = false;
  button.addEventListener("click", () => navigator.clipboard.writeText(button.dataset.text).then(() => { button.textContent = "Copied"; }));
}
copies();
