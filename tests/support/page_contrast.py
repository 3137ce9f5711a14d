"""A script that returns the visible texts of a page whose contrast is below WCAG AA, with their colors."""

LOW_CONTRAST = """
const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n.slice(0, 3), 1] : n; };
const over = (top, below) => [0, 1, 2].map((k) => top[k] * top[3] + below[k] * (1 - top[3])).concat(1);
const light = (color) => {
  const [r, g, b] = color.slice(0, 3).map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const background = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const color = parse(getComputedStyle(at).backgroundColor);
    layers.push(color);
    if (color[3] === 1) break;
  }
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
};
const low = {}, walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
  if (!text || !element.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
  if (element.closest('svg, script, style, :disabled, .toast-wrap') || !element.getClientRects().length) continue;
  const style = getComputedStyle(element), below = background(element), ink = over(parse(style.color), below);
  const [high, deep] = [light(ink), light(below)].sort((a, b) => b - a), size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  const ratio = (high + 0.05) / (deep + 0.05);
  if (ratio < (large ? 3 : 4.5)) low[text.slice(0, 40)] = ratio.toFixed(2) + ' ' + style.color + ' on ' + below;
}
return low;
"""
