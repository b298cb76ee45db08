// Numbers and times for people.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const hundredths = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });

export const NOTHING = "–";

/** 12,345 or 12.3 or 1.23: three digits that matter. */
export function number(value) {
  if (value === null || value === undefined) return NOTHING;
  const size = Math.abs(value);
  return (size >= 100 ? whole : size >= 10 ? tenths : hundredths).format(value);
}

export function count(value) {
  return value === null || value === undefined ? NOTHING : whole.format(value);
}

/** Seconds, as milliseconds up to ten seconds. */
export function milliseconds(value) {
  if (value === null || value === undefined) return NOTHING;
  return value < 10 ? `${number(value * 1000)} ms` : `${number(value)} s`;
}

export function percent(share) {
  return share > 0 && share < 0.0005 ? "< 0.1%" : `${tenths.format(share * 100)}%`;
}

/** How long something has lasted. */
export function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(seconds) {
  return seconds < 3 ? "now" : `${duration(seconds)} ago`;
}

/** A token as it can be seen: spaces and line breaks have signs. */
export function visible(token) {
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}
