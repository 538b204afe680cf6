// What the theme leaves out for readers who use a keyboard or a screen reader.
addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) {
    caption.setAttribute("aria-level", "2");
  }
  for (const code of document.querySelectorAll("pre")) {
    if (code.scrollWidth > code.clientWidth) code.tabIndex = 0;
  }
});
