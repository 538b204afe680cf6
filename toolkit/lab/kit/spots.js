// Lines of a picture that can be clicked, laid over it. One of them is in the order of the Tab key;
// arrows go to the others.
const SVG = "http://www.w3.org/2000/svg";

function render({ model, el }) {
  const root = document.createElementNS(SVG, "svg");
  root.setAttribute("class", "picture-spots");
  root.setAttribute("role", "group");
  el.appendChild(root);
  let shown = "", lines = [];

  function act(at, key) {
    model.send({ spot: at, second: key.shiftKey || key.key === "Delete" || key.key === "Backspace" });
  }

  function focus(at) {
    const next = lines[(at + lines.length) % lines.length];
    lines.forEach((line) => line.setAttribute("tabindex", line === next ? 0 : -1));
    next.focus();
  }

  function build(spots) {
    const had = lines.indexOf(document.activeElement);
    lines = spots.map(({ name, points }, at) => {
      const line = document.createElementNS(SVG, "path");
      line.setAttribute("d", points.map((part) => `M${part.join("L")}`).join(""));
      line.setAttribute("role", "button");
      line.setAttribute("aria-label", name);
      line.appendChild(document.createElementNS(SVG, "title")).textContent = name;
      line.addEventListener("click", (event) => { focus(at); act(at, event); });
      line.addEventListener("keydown", (event) => {
        const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (by) focus(at + by);
        else if (["Enter", " ", "Delete", "Backspace"].includes(event.key)) act(at, event);
        else return;
        // Neither the page nor the notebook shall take the key as well.
        event.preventDefault();
        event.stopPropagation();
      });
      return line;
    });
    root.replaceChildren(...lines);
    if (had >= 0 && lines.length) focus(Math.min(had, lines.length - 1));
  }

  function take() {
    const spots = model.get("spots"), chosen = model.get("chosen"), [width, height] = model.get("size");
    root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    root.style.maxWidth = `${width}px`;
    root.style.height = `${height}px`;
    root.style.maxHeight = `${(100 * height) / width}vw`;
    root.setAttribute("aria-label", model.get("words"));
    const asked = JSON.stringify(spots);
    if (asked !== shown) build(spots);
    shown = asked;
    const isIn = lines.includes(document.activeElement);
    lines.forEach((line, at) => {
      line.setAttribute("aria-pressed", at === chosen);
      if (!isIn) line.setAttribute("tabindex", at === Math.max(chosen, 0) ? 0 : -1);
    });
  }

  for (const name of ["spots", "chosen", "size", "words"]) model.on(`change:${name}`, take);
  take();
  return () => {
    for (const name of ["spots", "chosen", "size", "words"]) model.off?.(`change:${name}`, take);
  };
}

export default { render };
