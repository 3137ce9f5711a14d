() => {
  // What the page does in the browser: modes, theme, links, the replayed race, the wall, zoom, drops anywhere on the page.
  const find = (selector, root = document) => root.querySelector(selector);
  const body = document.body;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");

  // -- theme: that of the system, until the visitor chooses one
  const applyTheme = () => {
    const chosen = localStorage.getItem("vargen-theme");
    body.classList.toggle("dark", chosen ? chosen === "dark" : prefersDark.matches);
  };
  prefersDark.addEventListener("change", applyTheme);
  applyTheme();

  const vargen = (window.vargen = {
    toggleTheme() {
      localStorage.setItem("vargen-theme", body.classList.contains("dark") ? "light" : "dark");
      applyTheme();
    },
    open(mode) {
      body.dataset.mode = mode;
    },
    // Open a mode and press its start button, once what was filled in has reached the page. Live starts when it is opened.
    start(mode) {
      find(`button[role=tab][data-tab-id=${mode}]`)?.click();
      if (mode !== "live") setTimeout(() => find(`.vg-start.vg-go-${mode}`)?.click(), 80);
    },
    // Start a link's job once its values have reached the page; after five seconds in any case.
    startLinked(mode, tries = 100) {
      if (tries && !find("#linked i")) setTimeout(() => vargen.startLinked(mode, tries - 1), 50);
      else vargen.start(mode);
    },
    // Chips and prompt never name different styles: typed words select a chip, and a chip removes the words of another.
    styles: () => [...document.querySelectorAll("#style input")].map((chip) => chip.value),
    splitStyle(prompt) {
      const style = vargen.styles().find((each) => prompt.endsWith(`, ${each} style`));
      return style ? [prompt.slice(0, -`, ${style} style`.length), style] : [prompt, "any"];
    },
    styleOf: (prompt, chosen) => vargen.styles().find((each) => prompt.toLowerCase().includes(`${each} style`)) ?? chosen,
    withoutStyle(prompt) {
      const named = vargen.styles().find((each) => prompt.toLowerCase().includes(`${each} style`));
      const place = named ? prompt.toLowerCase().indexOf(`${named} style`) : prompt.length;
      return (prompt.slice(0, place).replace(/[,\s]+$/, "") + prompt.slice(place + `${named} style`.length)).trim();
    },
    pressOpen() {
      [...document.querySelectorAll(".vg-start")].find((button) => button.offsetParent)?.click();
    },
    showResult() {
      find("#top").scrollIntoView({ block: "start", behavior: "smooth" });
    },
    push(link) {
      if (link && link !== location.search) history.pushState(null, "", link);
    },
    replace(link) {
      if (link) history.replaceState(null, "", link);
    },
    linkOf: (stage) => find(`${stage} [data-link]`)?.dataset.link || location.search,
    async copyLink(button, link) {
      button.dataset.label ||= button.innerText;
      const done = (text) => {
        button.innerText = text;
        setTimeout(() => (button.innerText = button.dataset.label), 1500);
      };
      try {
        await navigator.clipboard.writeText(new URL(link, location.href).href);
        done("Link copied");
      } catch {
        history.replaceState(null, "", link);
        done("Link is in the address bar");
      }
    },
    download(file) {
      if (!file) return;
      const anchor = document.createElement("a");
      anchor.href = file.url;
      anchor.download = file.orig_name || "";
      anchor.click();
    },
    chosen: null,
    replayAt: null, // seconds at which the race is held, for screenshots
    // The values of a tile for prompt, style, seed and the mark of a seed that is used once; then its job starts.
    takeChosen() {
      const tile = vargen.chosen;
      setTimeout(() => vargen.start(tile.mode), 50);
      vargen.showResult();
      const [prompt, style] = tile.mode === "video" ? [tile.prompt, "any"] : vargen.splitStyle(tile.prompt);
      return [prompt, style, Number(tile.seed), true];
    },
  });
  addEventListener("popstate", () => location.reload());

  // -- the wall: the hidden button hands prompt and seed over
  document.addEventListener("click", (event) => {
    const tile = event.target.closest?.(".vg-tile");
    if (tile) {
      vargen.chosen = tile.dataset;
      find("#choose").click();
    }
    const copy = event.target.closest?.(".vg-copy");
    if (copy) vargen.copyLink(copy, copy.dataset.link);
    const save = event.target.closest?.(".vg-save");
    if (save && !save.closest("#live-stage")) {
      const above = save.parentElement.previousElementSibling;
      vargen.download({ url: save.dataset.file || find("img", above).src, orig_name: save.dataset.name });
    }
    const image = event.target.closest?.("#stage img.vg-image, #live-stage img.vg-image, #track img.vg-image");
    if (image) zoom(image);
  });

  const zoom = (image) => {
    const dialog = document.createElement("dialog");
    dialog.className = "vg-zoom";
    dialog.setAttribute("aria-label", image.alt);
    const large = image.cloneNode();
    const room = 0.92 * Math.min(innerWidth, innerHeight - 40);
    large.style.width = `${Math.max(1, Math.floor(room / image.naturalWidth)) * image.naturalWidth}px`;
    dialog.append(large);
    dialog.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => dialog.remove());
    body.append(dialog);
    dialog.showModal();
  };

  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      vargen.pressOpen();
    }
  });

  // -- a PNG may be dropped anywhere
  const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    body.classList.add("vg-dragging");
  });
  addEventListener("dragleave", (event) => event.relatedTarget || body.classList.remove("vg-dragging"));
  addEventListener(
    "drop",
    (event) => {
      body.classList.remove("vg-dragging");
      const field = find("#drop input[type=file]");
      if (!carriesFiles(event) || !field || event.target.closest?.("#drop, #live-columns")) return;
      event.preventDefault();
      field.files = event.dataTransfer.files;
      field.dispatchEvent(new Event("change", { bubbles: true }));
      vargen.showResult();
    },
    true,
  );

  // -- the race: the finished image is uncovered as fast as the recorded passes committed its tokens
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const replay = (section) => {
    section.dataset.playing = "yes";
    const race = JSON.parse(section.dataset.race);
    const ends = race.lanes.map((lane) => lane.seconds.at(-1));
    const pause = 3 * 1000;
    const cycle = race.slowdown * 1000 * Math.max(...ends) + pause;
    const figures = [...section.querySelectorAll(".vg-lane")];
    const begun = performance.now();
    const show = (figure, lane, seconds) => {
      const passes = lane.seconds.filter((end) => end <= seconds).length;
      const done = passes ? lane.tokens[passes - 1] : 0;
      const finished = passes === lane.tokens.length;
      find(".vg-passes", figure).textContent = passes;
      find(".vg-seconds", figure).textContent = Math.min(seconds, lane.seconds.at(-1)).toFixed(2);
      figure.classList.toggle("vg-finished", finished);
      const [rows, columns] = lane.grid;
      const canvas = find("canvas", figure);
      if (canvas.width !== columns * 16) [canvas.width, canvas.height] = [columns * 16, rows * 16];
      const pen = canvas.getContext("2d");
      const style = getComputedStyle(section);
      pen.fillStyle = style.getPropertyValue("--vg-cover");
      pen.clearRect(0, 0, canvas.width, canvas.height);
      for (let cell = done; cell < rows * columns; cell++) pen.fillRect((cell % columns) * 16, Math.floor(cell / columns) * 16, 16, 16);
      if (finished || !passes) return;
      pen.fillStyle = style.getPropertyValue("--vg-newest"); // tokens of the latest pass
      for (let cell = passes > 1 ? lane.tokens[passes - 2] : 0; cell < done; cell++)
        pen.fillRect((cell % columns) * 16 + 1, Math.floor(cell / columns) * 16 + 1, 14, 14);
    };
    const frame = (now) => {
      if (!section.isConnected) return;
      const running = still.matches ? Infinity : ((now - begun) % cycle) / 1000 / race.slowdown;
      const seconds = vargen.replayAt ?? running;
      if (section.offsetParent) race.lanes.forEach((lane, number) => show(figures[number], lane, seconds));
      section.classList.toggle("vg-done", seconds >= Math.max(...ends));
      if (!still.matches) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  };
  // -- what gradio's buttons cannot say themselves
  const hints = {
    "#download, .vg-save[data-name$=png]": "A PNG file; it carries its prompt, seed and method",
    "#copy-link, .vg-copy": "Who opens the link sees the same prompt and seed generated",
    "#compare": "Generate both in the Race mode, with the same prompt and seed",
    "#more-like-this": "Four images of the next seeds",
    "#reuse": "Take prompt, seed and settings of this image over",
    "#stage figcaption, #track figure p": "A match with the prompt: the more, the better",
    "#live-keep": "Go on from this image",
    "#live-undo": "Back to the image before",
    "#live-restart": "Generate from the prompt alone",
  };
  for (const [mode, summary] of Object.entries(JSON.parse(find(".vg-head").dataset.modes))) hints[`[data-tab-id=${mode}]`] = summary;
  const watch = () => {
    document.querySelectorAll(".vg-replay:not([data-playing])").forEach(replay);
    for (const [selector, hint] of Object.entries(hints))
      for (const button of document.querySelectorAll(selector)) button.title ||= hint;
  };
  new MutationObserver(watch).observe(body, { childList: true, subtree: true });
  watch();
}
