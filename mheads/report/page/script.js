"use strict";
(() => {
  const root = document.documentElement;

  // Light or dark: as the system says, until the button says otherwise.
  const remember = (store, key, value) => { try { store.setItem(key, value); } catch { /* not allowed here */ } };
  const recall = (store, key) => { try { return store.getItem(key); } catch { return null; } };
  const stores = (() => { try { return [localStorage, sessionStorage]; } catch { return [{}, {}]; } })();
  const chosen = recall(stores[0], "mheads-theme");
  if (chosen) root.dataset.theme = chosen;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    remember(stores[0], "mheads-theme", root.dataset.theme);
  });

  // Grids: the cells of all moments are bytes, row by row; 255 is none.
  const grids = {};
  const load = (name) => {
    const source = document.getElementById("cells-" + name);
    const table = document.getElementById("grid-" + name);
    const found = source ? JSON.parse(source.textContent) : { labels: [""], cells: "" };
    const bytes = Uint8Array.from(atob(found.cells), (c) => c.charCodeAt(0));
    return { table, labels: found.labels, bytes, cells: [...table.querySelectorAll("tbody td")] };
  };
  const show = (grid, moment) => {
    if (grid.labels.length < 2) return;
    grid.cells.forEach((cell, i) => {
      const value = grid.bytes[moment * grid.cells.length + i];
      cell.className = value === 255 ? "empty" : value > 55 ? "hot" : value === 0 ? "none" : "";
      cell.style.setProperty("--v", value === 255 ? 0 : value);
      cell.textContent = value === 255 ? "" : value;
    });
    const moments = grid.table.querySelector(".moment");
    if (moments) moments.textContent = grid.labels[moment];
  };

  let playing = 0;
  for (const player of document.querySelectorAll(".player")) {
    const names = player.dataset.grids.split(" ");
    const slider = player.querySelector("input[type=range]");
    const choice = player.querySelector("select");
    if (!slider && !choice) continue;
    for (const name of names) grids[name] = load(name);
    const own = names.map((name) => grids[name]);
    if (choice) {
      const choose = () => show(own[0], Number(choice.value));
      choice.addEventListener("change", choose);
      choose();
      continue;
    }
    const last = Number(slider.max);
    const output = player.querySelector("output");
    const button = player.querySelector(".play");
    const update = () => {
      const part = Number(slider.value) / last;
      for (const grid of own) show(grid, Math.round(part * (grid.labels.length - 1)));
      const text = own.length === 1 ? own[0].labels[Number(slider.value)] : Math.round(100 * part) + " % of training";
      output.textContent = text;
      slider.setAttribute("aria-valuetext", text);
    };
    let timer = null;
    const stop = () => {
      if (timer === null) return;
      clearInterval(timer);
      timer = null;
      playing -= 1;
      button.setAttribute("aria-pressed", "false");
      button.querySelector("span").textContent = "Play";
    };
    button.addEventListener("click", () => {
      if (timer !== null) return stop();
      if (Number(slider.value) === last) slider.value = 0;
      update();
      playing += 1;
      button.setAttribute("aria-pressed", "true");
      button.querySelector("span").textContent = "Pause";
      timer = setInterval(() => {
        slider.value = Number(slider.value) + 1;
        update();
        if (Number(slider.value) === last) stop();
      }, Math.max(50, Math.min(600, 9000 / last)));
    });
    slider.addEventListener("input", () => { stop(); update(); });
    update();
  }

  // Tables that can be sorted: by numbers where there are some, else by text.
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const key = (row) => row.cells[column].dataset.value;
      const rows = [...table.tBodies[0].rows];
      const numbers = rows.some((row) => key(row) !== undefined);
      const before = head.getAttribute("aria-sort");
      const down = before ? before === "ascending" : numbers;
      const number = (row) => (key(row) === undefined ? NaN : Number(key(row)));
      rows.sort((a, b) => {
        if (!numbers) {
          const order = a.cells[column].textContent.localeCompare(b.cells[column].textContent, undefined, { numeric: true });
          return down ? -order : order;
        }
        const [x, y] = [number(a), number(b)];
        if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y); // what is not known comes last
        return down ? y - x : x - y;
      });
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...rows);
    }));
  }

  // The contents mark where the reader is.
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach((link) => link.removeAttribute("aria-current"));
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("main > section").forEach((section) => seen.observe(section));

  // While the run goes on, the page is loaded again, but not while something plays. All is then as the reader left it:
  // the place, what has the focus, sliders but for those that are at the end, and tables in their order.
  const place = "mheads-place " + location.pathname;
  const used = () => [...document.querySelectorAll("a, button, input, select, summary, [tabindex]")];
  const state = () => JSON.stringify({
    top: scrollY,
    focus: used().indexOf(document.activeElement),
    all: used().map((one) => ({
      value: one.type === "range" && one.value === one.max ? null : one.value,
      left: one.scrollLeft,
      open: one.parentElement.open,
      sort: one.closest(".sortable th")?.getAttribute("aria-sort"),
    })),
  });
  const restore = ({ top, focus, all }) => {
    const now = used();
    if (now.length === all.length) {
      all.forEach(({ value, left, open, sort }, i) => {
        const one = now[i];
        one.scrollLeft = left;
        if (open) one.parentElement.open = true;
        while (sort && one.closest("th").getAttribute("aria-sort") !== sort) one.click();
        if (typeof value === "string" && one.value !== value) {
          one.value = value;
          one.dispatchEvent(new Event(one.type === "range" ? "input" : "change"));
        }
      });
      now[focus]?.focus({ preventScroll: true });
    }
    scrollTo({ top, behavior: "instant" });
  };
  const kept = recall(stores[1], place);
  if (kept !== null) {
    restore(JSON.parse(kept));
    try { stores[1].removeItem(place); } catch { /* not allowed here */ }
  }
  const seconds = Number(document.body.dataset.refresh || 0);
  if (seconds) {
    setInterval(() => {
      if (playing) return;
      remember(stores[1], place, state());
      location.reload();
    }, 1000 * seconds);
  }
})();
