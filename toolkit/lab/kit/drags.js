// Plots of a picture in which a number is dragged where it is drawn: a handle on its line or column,
// over the picture that follows. The sliders above do the same, by the keyboard too.
const SVG = "http://www.w3.org/2000/svg";

function render({ model, el }) {
  const root = el.appendChild(document.createElementNS(SVG, "svg"));
  root.setAttribute("class", "picture-drags");
  root.setAttribute("aria-hidden", "true");

  function take() {
    const [width, height, shown = height] = model.get("size");
    root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    root.style.maxWidth = `${width}px`;
    root.style.height = `${shown}px`;
    root.style.maxHeight = `${(100 * height) / width}vw`;
    root.replaceChildren(...model.get("places").map(({ name, axis, box, at }, place) => {
      const [left, right, top, bottom] = box, isAcross = axis === "x";
      const handle = document.createElementNS(SVG, "rect");
      const shape = isAcross ? [at - 9, top, 18, bottom - top] : [left, at - 9, right - left, 18];
      ["x", "y", "width", "height"].forEach((side, one) => handle.setAttribute(side, shape[one]));
      handle.style.cursor = isAcross ? "ew-resize" : "ns-resize";
      handle.appendChild(document.createElementNS(SVG, "title")).textContent = `Drag: ${name}`;
      let last = null;
      const send = (event) => {
        const { x, y } = new DOMPoint(event.clientX, event.clientY)
          .matrixTransform(root.getScreenCTM().inverse());
        const share = isAcross ? (x - left) / (right - left) : (bottom - y) / (bottom - top);
        const now = Math.round(500 * Math.min(1, Math.max(0, share))) / 500;
        if (now !== last) model.send({ place, share: (last = now) });
      };
      handle.addEventListener("pointerdown", (event) => {
        handle.setPointerCapture(event.pointerId);
        handle.addEventListener("pointermove", send);
        event.preventDefault();
      });
      handle.addEventListener("pointerup", (event) => {
        handle.removeEventListener("pointermove", send);
        send(event);
        last = null;
        take(); // what moved meanwhile
      });
      return handle;
    }));
  }

  // A handle that is being dragged stays in place, so that the mouse keeps it.
  const retake = () => { if (!root.querySelector("rect:active")) take(); };
  model.on("change:places", retake);
  take();
  return () => model.off?.("change:places", retake);
}

export default { render };
