// Copies the answer, where the browser lets a page write to the clipboard.
function copies() {
  const button = document.getElementById("copy");
  if (!button || !navigator.clipboard) return;
  button.hidden = false;
  button.addEventListener("click", () => navigator.clipboard.writeText(button.dataset.text).then(() => { button.textContent = "Copied"; }));
}
copies();
