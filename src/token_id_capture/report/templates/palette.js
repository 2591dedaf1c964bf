// Colours of tokens: fixed limits, so that pages can be compared.

const UNLIKELY = Math.log(0.01);
const LIMITS = [0.9, 0.5, 0.2, 0.05, 0.01].map(Math.log);

/** 0 for context, else 1 (likely) to 6. */
function shadeOf(logProb) {
  if (Number.isNaN(logProb)) return 0;
  let shade = 1;
  while (shade <= LIMITS.length && logProb < LIMITS[shade - 1]) shade++;
  return shade;
}

/** The colours of the style sheet as they are now, light or dark. */
function currentPalette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return {
    shades: ["--context", "--p1", "--p2", "--p3", "--p4", "--p5", "--p6"].map(colour),
    ink: colour("--ink"),
    second: colour("--second"),
    surface: colour("--surface"),
    focus: colour("--orange"),
    line: colour("--line"),
  };
}

/** Size a canvas for the screen's resolution; returns a context in CSS pixels. */
function prepareCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
