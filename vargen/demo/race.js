// The opening race: the finished image is uncovered as fast as the recorded passes committed its tokens.
const section = element.querySelector(".vg-replay");
const still = matchMedia("(prefers-reduced-motion: reduce)");
const race = JSON.parse(section.dataset.race);
const ends = race.lanes.map((lane) => lane.seconds.at(-1));
const cycle = race.slowdown * 1000 * Math.max(...ends) + 3000;
const figures = [...section.querySelectorAll(".vg-lane")];
const begun = performance.now();

const show = (figure, lane, seconds) => {
  const passes = lane.seconds.filter((end) => end <= seconds).length;
  const done = passes ? lane.tokens[passes - 1] : 0;
  const finished = passes === lane.tokens.length;
  figure.querySelector(".vg-passes").textContent = passes;
  figure.querySelector(".vg-seconds").textContent = Math.min(seconds, lane.seconds.at(-1)).toFixed(2);
  figure.classList.toggle("vg-finished", finished);
  const [rows, columns] = lane.grid;
  const canvas = figure.querySelector("canvas");
  if (canvas.width !== columns * 16) [canvas.width, canvas.height] = [columns * 16, rows * 16];
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(section);
  const fill = (cell, inset) =>
    pen.fillRect((cell % columns) * 16 + inset, Math.floor(cell / columns) * 16 + inset, 16 - 2 * inset, 16 - 2 * inset);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = style.getPropertyValue("--vg-cover");
  for (let cell = done; cell < rows * columns; cell++) fill(cell, 0);
  if (finished || !passes) return;
  pen.fillStyle = style.getPropertyValue("--vg-newest"); // tokens of the latest pass
  for (let cell = passes > 1 ? lane.tokens[passes - 2] : 0; cell < done; cell++) fill(cell, 1);
};
const frame = (now) => {
  if (!section.isConnected) return;
  const seconds = still.matches ? Infinity : ((now - begun) % cycle) / 1000 / race.slowdown;
  if (section.offsetParent) race.lanes.forEach((lane, number) => show(figures[number], lane, seconds));
  if (!still.matches) requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
