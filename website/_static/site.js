// Guesses on a lesson's page, without a kernel, and the filter of the table of claims.

import { element, fold } from "./elements.js";

const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

/** Keep a guess in this browser; if it stores nothing, the guess lasts as long as the page. */
function remembered(key, value) {
  const place = `guess ${location.pathname} ${key}`;
  try {
    if (value !== undefined) localStorage.setItem(place, value);
    return localStorage.getItem(place);
  } catch {
    return value ?? null;
  }
}

/** Fold what was measured until the reader has committed a guess. */
function folded(revealed) {
  const feedback = revealed.parentElement;
  const said = element("p", { role: "status" });
  const details = fold("What was measured", said);
  details.className = "reveal";
  feedback.replaceWith(details);
  details.append(feedback);
  return (guess) => {
    const { measured, unit } = revealed.dataset;
    const off = Math.abs(guess - measured) / (Math.abs(measured) || 1);
    said.textContent = `You guessed ${number.format(guess)} ${unit}. The recorded machine measured ${number.format(measured)} ${unit}: your guess is ${number.format(100 * off)} % off.`;
    details.open = true;
  };
}

/** Add the controls of a question. The first guess counts, because the measured value is visible after it. */
function asked(question, reveal) {
  const { guess: key, unit, low, high } = question.dataset;
  const limits = { min: low, max: high, step: "any", value: (Number(low) + Number(high)) / 2 };
  const slider = element("input", { type: "range", "aria-label": "your guess", ...limits });
  const field = element("input", { type: "number", "aria-label": `your guess in ${unit}`, required: true, ...limits });
  const button = element("button", {}, "commit");
  const state = element("span", { role: "status" });
  const form = element("form", { class: "guess" }, slider, field, unit, button, state);
  slider.addEventListener("input", () => (field.value = Number(Number(slider.value).toPrecision(3))));
  field.addEventListener("input", () => (slider.value = field.value));
  const commit = (guess) => {
    field.value = slider.value = guess;
    slider.disabled = field.disabled = button.disabled = true;
    state.textContent = `Your guess: ${number.format(guess)} ${unit}. It is stored in this browser only.`;
    reveal?.(guess);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    commit(Number(remembered(key, field.value)));
  });
  question.lastElementChild.replaceWith(form);
  const before = remembered(key);
  if (before !== null) commit(Number(before));
}

const reveals = new Map(
  [...document.querySelectorAll("[data-revealed]")].map((each) => [each.dataset.revealed, folded(each)]),
);
for (const question of document.querySelectorAll("[data-guess]")) asked(question, reveals.get(question.dataset.guess));

const filter = document.querySelector("form.filter");
if (filter) {
  const rows = [...document.querySelectorAll("#claims tbody tr")];
  const show = () => {
    const words = filter.words.value.toLowerCase().split(/\s+/);
    let count = 0;
    for (const row of rows) {
      const verdicts = [...row.querySelectorAll(".verdict")].map((each) => each.textContent);
      const text = row.textContent.toLowerCase() + row.querySelector("a[href^=claims]").getAttribute("href");
      row.hidden = !words.every((word) => text.includes(word)) || (filter.verdict.value && !verdicts.includes(filter.verdict.value));
      count += !row.hidden;
    }
    filter.querySelector("output").textContent = `${count} of ${rows.length} claims`;
  };
  filter.addEventListener("input", show);
  filter.addEventListener("submit", (event) => event.preventDefault());
  show();
}
