"use strict";

// Draws every panel, redraws on a change of the colour scheme, and lets the reader select a variant.
(() => {
  const { charts, themes } = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const buttons = [...document.querySelectorAll(".legend button")];
  const fadeTargets = [...document.querySelectorAll("[data-variant]:not(button)")];
  let views = [];
  let selected = -1;

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
      spec: { ...panel.view, data: { values: chart.records[panel.records_index] } },
    })),
  );

  const applySelection = (view) => view.signal("selected", selected).runAsync();

  const draw = async () => {
    const oldViews = views;
    const results = await Promise.all(
      panels.map(({ element, spec }) => vegaEmbed(element, structuredClone(spec), options())),
    );
    views = results.map((result) => result.view);
    oldViews.forEach((view) => view.finalize());
    await Promise.all(views.map(applySelection));
    document.documentElement.dataset.drawn = dark.matches ? "dark" : "light";
  };

  const toggleSelection = (variant) => {
    selected = selected === variant ? -1 : variant;
    const isSelected = (element) => Number(element.dataset.variant) === selected;
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(isSelected(button))));
    fadeTargets.forEach((element) => element.classList.toggle("faded", selected !== -1 && !isSelected(element)));
    views.forEach(applySelection);
  };

  buttons.forEach((button) =>
    button.addEventListener("click", () => toggleSelection(Number(button.dataset.variant))),
  );
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && selected !== -1) toggleSelection(selected);
  });
  dark.addEventListener("change", draw);
  draw();
})();
