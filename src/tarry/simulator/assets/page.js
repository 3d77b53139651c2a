"use strict";

// Draws every panel, redraws on a change of the colour scheme, and lets the reader select a variant.
(() => {
  const { charts, themes } = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const buttons = [...document.querySelectorAll(".legend button")];
  const fadeTargets = [...document.querySelectorAll("[data-variant]:not(button)")];
  let views = [];
  let picked = -1;

  // `ast` makes Vega interpret expressions: the content security policy forbids eval.
  const options = () => ({
    actions: false,
    ast: true,
    config: dark.matches ? themes.dark : themes.light,
    defaultStyle: false,
    mode: "vega-lite",
    renderer: "svg",
    tooltip: { disableDefaultStyle: true },
  });

  const panels = charts.flatMap((chart, number) =>
    chart.panels.map((panel, index) => ({
      element: document.getElementById(`view-${number}-${index}`),
      spec: { ...panel.view, data: { values: chart.records[panel.records] } },
    })),
  );

  const applyPick = (view) => view.signal("picked", picked).runAsync();

  const draw = async () => {
    const old = views;
    const results = await Promise.all(
      panels.map(({ element, spec }) => vegaEmbed(element, structuredClone(spec), options())),
    );
    views = results.map((result) => result.view);
    old.forEach((view) => view.finalize());
    await Promise.all(views.map(applyPick));
    document.documentElement.dataset.drawn = dark.matches ? "dark" : "light";
  };

  const pick = (variant) => {
    picked = picked === variant ? -1 : variant;
    const isPicked = (element) => Number(element.dataset.variant) === picked;
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(isPicked(button))));
    fadeTargets.forEach((element) => element.classList.toggle("faded", picked !== -1 && !isPicked(element)));
    views.forEach(applyPick);
  };

  buttons.forEach((button) =>
    button.addEventListener("click", () => pick(Number(button.dataset.variant))),
  );
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && picked !== -1) pick(picked);
  });
  dark.addEventListener("change", draw);
  draw();
})();
