() => {
  // The editor of the Live mode: cells of the image are painted, and sent with the image that they are painted on.
  const find = (selector, root = document) => root.querySelector(selector);
  const stage = () => find("#live-stage img");
  const state = { source: "", shown: "", cells: new Set(), covering: false, applied: false };
  let pointer = null; // cell coordinates of the pointer over the image
  let painting = false;
  const coarse = matchMedia("(pointer: coarse)").matches;
  let brushing = !coarse; // a finger first scrolls; a mouse paints at once
  const base = new Image();
  base.addEventListener("load", () => draw());

  const size = () => {
    const { side, rows, columns } = find("#live-easel canvas").dataset;
    return { side: Number(side), rows: Number(rows), columns: Number(columns) };
  };
  const message = () => {
    if (!state.source) return "";
    const { rows, columns } = size();
    const cells = state.cells.size ? Array.from({ length: rows * columns }, (_, k) => Number(state.cells.has(k))).join("") : "";
    return JSON.stringify({ image: state.source, cells });
  };
  const changed = () => {
    const editor = find("#live-columns");
    editor.classList.toggle("vg-edited", Boolean(state.source));
    editor.classList.toggle("vg-painted", state.cells.size > 0);
    draw();
  };
  const show = (image) => {
    state.covering = true;
    state.shown = image;
    base.src = image;
  };

  const draw = () => {
    const canvas = find("#live-easel canvas");
    if (!canvas || !canvas.offsetWidth) return;
    const { rows, columns } = size();
    const cell = Math.max(8, Math.round((canvas.offsetWidth * devicePixelRatio) / columns));
    if (canvas.width !== cell * columns) [canvas.width, canvas.height] = [cell * columns, cell * rows];
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, canvas.width, canvas.height);
    if (state.covering) pen.drawImage(base, 0, 0, canvas.width, canvas.height);
    const has = (row, column) => row >= 0 && column >= 0 && row < rows && column < columns && state.cells.has(row * columns + column);
    pen.fillStyle = "rgb(79 70 229 / .45)";
    const edges = new Path2D();
    for (const place of state.cells) {
      const [row, column] = [Math.floor(place / columns), place % columns];
      const [x, y] = [column * cell, row * cell];
      if (!state.applied) pen.fillRect(x, y, cell, cell);
      const sides = [
        [row - 1, column, x, y, x + cell, y], [row + 1, column, x, y + cell, x + cell, y + cell],
        [row, column - 1, x, y, x, y + cell], [row, column + 1, x + cell, y, x + cell, y + cell],
      ];
      for (const [r, c, ...line] of sides) {
        if (has(r, c)) continue;
        edges.moveTo(line[0], line[1]);
        edges.lineTo(line[2], line[3]);
      }
    }
    for (const [color, dash] of [["#fff", []], ["#4338ca", [6, 6]]]) {
      pen.strokeStyle = color;
      pen.lineWidth = 2;
      pen.setLineDash(dash);
      pen.stroke(edges);
    }
    if (!pointer || !brushing) return;
    pen.setLineDash([]);
    for (const [color, grow] of [["#fff", 2], ["#4338ca", 0]]) {
      pen.strokeStyle = color;
      pen.beginPath();
      pen.arc(pointer.x * cell, pointer.y * cell, (radius() + 0.5) * cell + grow, 0, 7);
      pen.stroke();
    }
  };

  const radius = () => Number(find(".vg-brush input").value);
  const locate = (event) => {
    const box = event.target.getBoundingClientRect();
    const { rows, columns } = size();
    return { x: ((event.clientX - box.left) / box.width) * columns, y: ((event.clientY - box.top) / box.height) * rows };
  };
  // The cell under the pointer, and those whose center the brush covers.
  const mark = ({ x, y }) => {
    const { rows, columns } = size();
    const reach = radius();
    for (let row = 0; row < rows; row++)
      for (let column = 0; column < columns; column++) {
        const under = Math.floor(x) === column && Math.floor(y) === row;
        if (under || Math.hypot(column + 0.5 - x, row + 0.5 - y) <= reach + 0.25) state.cells.add(row * columns + column);
      }
  };
  const stroke = (from, to) => {
    const steps = Math.max(1, Math.ceil(4 * Math.hypot(to.x - from.x, to.y - from.y)));
    for (let step = 0; step <= steps; step++)
      mark({ x: from.x + ((to.x - from.x) * step) / steps, y: from.y + ((to.y - from.y) * step) / steps });
  };

  const on = {
    pointerdown(event) {
      if (event.button || !state.shown) return;
      if (!state.source || !state.cells.size) state.source = state.shown;
      event.target.setPointerCapture(event.pointerId);
      painting = true;
      state.applied = false;
      pointer = locate(event);
      stroke(pointer, pointer);
      changed();
    },
    pointermove(event) {
      const here = locate(event);
      if (painting) stroke(pointer, here);
      pointer = here;
      draw();
    },
    pointerup() {
      if (!painting) return;
      painting = false;
      find("#live-painted").click();
    },
    pointerleave() {
      pointer = null;
      draw();
    },
  };
  on.pointercancel = on.pointerup;

  // An image of the visitor's: cropped to the square in its middle, on white, of the model's size.
  const open = async (file) => {
    const { side } = size();
    const drawn = document.createElement("canvas");
    drawn.width = drawn.height = side;
    const pen = drawn.getContext("2d");
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, side, side);
    try {
      const image = await createImageBitmap(file);
      const cut = Math.min(image.width, image.height);
      pen.imageSmoothingQuality = "high";
      pen.drawImage(image, (image.width - cut) / 2, (image.height - cut) / 2, cut, cut, 0, 0, side, side);
    } catch {
      find("#live-note .vg-note").innerText = "This file is not an image that the browser can read.";
      return;
    }
    Object.assign(state, { source: drawn.toDataURL("image/png"), cells: new Set(), applied: false });
    show(state.source);
    find("#live-note .vg-note").innerText = "Your image: paint over a part of it, or press More like this.";
    changed();
  };

  window.vargen.brush = {
    read: message,
    keep() {
      Object.assign(state, { source: state.shown, cells: new Set() });
      changed();
    },
    undo() {
      state.cells = new Set();
      show(state.source);
      changed();
    },
    vary() {
      if (!state.source || state.cells.size) state.source = state.shown;
      state.cells = new Set();
      changed();
    },
    restart() {
      Object.assign(state, { source: "", cells: new Set() });
      changed();
    },
    choose() {
      find("#live-file input").click();
    },
    download() {
      if (state.shown) window.vargen.download({ url: state.shown, orig_name: "vargen-live.png" });
    },
  };

  document.addEventListener("click", (event) => event.target.closest?.("#live-stage .vg-save") && window.vargen.brush.download());
  document.addEventListener("change", (event) => {
    if (event.target.matches?.("#live-file input") && event.target.files.length) open(event.target.files[0]);
  });
  document.addEventListener("click", (event) => {
    if (!event.target.closest?.(".vg-brush button")) return;
    brushing = !brushing;
    watch();
  });
  addEventListener("resize", draw);
  addEventListener("drop", (event) => {
    const file = event.dataTransfer?.files[0];
    if (!file || !event.target.closest?.("#live-columns")) return;
    event.preventDefault();
    open(file);
  });

  // The page draws its tabs when they are opened, and the image again for each preview.
  const follow = () => {
    const image = stage();
    if (!image) return;
    state.covering = false;
    if (image.src.startsWith("data:image/png")) {
      state.shown = image.src;
      state.applied = !painting;
    }
    changed();
  };
  const watch = () => {
    const [canvas, board, button] = [find("#live-easel canvas"), find("#live-stage"), find(".vg-brush button")];
    if (!canvas || !board || !button) return;
    if (!canvas.dataset.watched) {
      canvas.dataset.watched = "yes";
      for (const [kind, handle] of Object.entries(on)) canvas.addEventListener(kind, handle);
      new ResizeObserver(draw).observe(canvas);
    }
    if (!board.dataset.watched) {
      board.dataset.watched = "yes";
      new MutationObserver(follow).observe(board, { childList: true, subtree: true, attributes: true, attributeFilter: ["src"] });
      follow();
    }
    if (button.ariaPressed !== String(brushing)) {
      button.ariaPressed = String(brushing);
      canvas.classList.toggle("vg-brushing", brushing);
    }
    canvas.classList.toggle("vg-brushing", brushing);
  };
  new MutationObserver(watch).observe(document.body, { childList: true, subtree: true });
  watch();
}
