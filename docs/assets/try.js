// The page's own attention: on the visitor's GPU and in WebAssembly, against the definition in float64. See start/browser.md.

const root = document.querySelector("#rapt-try");
const form = root.querySelector("form");
const tables = Object.fromEntries(["adapter", "result"].map((name) => [name, root.querySelector(`table[data-of=${name}]`)]));
const status = root.querySelector("[role=status]");

function rows(table, entries) {
  const row = ([name, ...cells]) => {
    const tr = document.createElement("tr");
    [name, ...cells].forEach((text, at) => {
      const cell = document.createElement(at === 0 ? "th" : "td");
      cell.textContent = text;
      tr.append(cell);
    });
    return tr;
  };
  table.tBodies[0].replaceChildren(...entries.map(row));
  table.hidden = false;
}

/** N(0, 1) from a seed, by Box and Muller. */
function normal(count, seed) {
  let state = seed >>> 0;
  const uniform = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
  return Float32Array.from({ length: count }, () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform()));
}

const bits = new Uint32Array(1);
const number = new Float32Array(bits.buffer);
/** Numbers in the bits of a 16-bit float, to nearest even. */
const encoders = {
  float32: (x) => x,
  bfloat16: (x) => {
    number[0] = x;
    return (bits[0] + 0x7fff + ((bits[0] >>> 16) & 1)) >>> 16;
  },
  float16: (x) => {
    if (x === 0) return 0;
    const sign = x < 0 ? 0x8000 : 0;
    const exponent = Math.max(-14, Math.floor(Math.log2(Math.abs(x))));
    const steps = Math.abs(x) / 2 ** (exponent - 10);
    const rounded = Math.floor(steps) + (steps % 1 > 0.5 || (steps % 1 === 0.5 && Math.floor(steps) % 2 === 1) ? 1 : 0);
    return sign | (rounded + ((exponent + 14) << 10));
  },
};
const decoders = {
  float32: (x) => x,
  bfloat16: (x) => {
    bits[0] = x << 16;
    return number[0];
  },
  float16: (x) => {
    const exponent = (x >> 10) & 31;
    const size = exponent === 0 ? (x & 1023) * 2 ** -24 : (1 + (x & 1023) / 1024) * 2 ** (exponent - 15);
    return x & 0x8000 ? -size : size;
  },
};

function tensor(dtype, shape, seed) {
  const values = normal(shape.reduce((n, size) => n * size, 1), seed);
  return dtype === "float32" ? { data: values, shape } : { data: Uint16Array.from(values, encoders[dtype]), shape, dtype };
}

const exponent = (x) => x.toExponential(2);
const median = (list) => [...list].sort((a, b) => a - b)[Math.floor(list.length / 2)];
const duration = (s) => (s < 1e-3 ? `${(s * 1e6).toFixed(0)} µs` : s < 1 ? `${(s * 1e3).toFixed(2)} ms` : `${s.toFixed(2)} s`);

/** The last queries of each head, which with bottom-right masking see what they see among all. */
function last(q, count) {
  const [heads, len, dim] = q.shape;
  return { ...q, shape: [heads, count, dim], strides: [len * dim, dim, 1], offset: (len - count) * dim };
}

function errors(out, expected, { dtype, heads, len, dim, count }) {
  let [wrong, all, worst] = [0, 0, 0];
  const decode = decoders[dtype];
  for (let h = 0; h < heads; h++) {
    for (let i = 0; i < count; i++) {
      let [of_row, size] = [0, 0];
      for (let d = 0; d < dim; d++) {
        const x = expected[(h * count + i) * dim + d];
        of_row += (decode(out[(h * len + len - count + i) * dim + d]) - x) ** 2;
        size += x ** 2;
      }
      [wrong, all, worst] = [wrong + of_row, all + size, Math.max(worst, Math.sqrt(of_row / size))];
    }
  }
  return [Math.sqrt(wrong / all), worst];
}

/** Runs `once` until a second has passed or it ran ten times; answers the median and how it was timed. */
async function timed(once) {
  const seconds = [];
  let clock = "page";
  const begin = performance.now();
  while (seconds.length < 10 && performance.now() - begin < 1000) {
    const from = performance.now();
    const { timing } = await once();
    clock = timing?.clock ?? clock;
    seconds.push(timing?.seconds ?? (performance.now() - from) * 1e-3);
  }
  return { seconds: median(seconds), runs: seconds.length, clock };
}

async function compute(rapt) {
  const { dtype, len, causal } = Object.fromEntries(new FormData(form));
  const [heads, dim] = [4, 64];
  const size = Number(len);
  const [q, k, v] = [1, 2, 3].map((seed) => tensor(dtype, [heads, size, dim], seed));
  const options = { causal: causal ? "bottom_right" : null };
  const count = Math.min(size, Math.max(16, Math.floor(2 ** 16 / size)));
  status.textContent = "The definition in float64 …";
  await new Promise((done) => setTimeout(done, 20));
  const expected = (await rapt.reference(last(q, count), k, v, options)).out;
  const judged = { dtype, heads, len: size, dim, count };
  const results = [];
  for (const device of ["webgpu", "wasm"]) {
    status.textContent = `${device} …`;
    await new Promise((done) => setTimeout(done, 20));
    try {
      const once = () => rapt.attention(q, k, v, { ...options, device, timing: device === "webgpu" });
      const { out, plan } = await once();
      const [error, worst] = errors(out.data, expected, judged);
      const time = await timed(once);
      results.push({ device, plan, error, worst, time });
    } catch (error) {
      results.push({ device, refused: error.message });
    }
  }
  const of = (read) => results.map((result) => (result.refused ? "refused" : read(result)));
  rows(tables.result, [
    ["", ...results.map(({ device }) => (device === "webgpu" ? "WebGPU" : "WebAssembly"))],
    ["kernel", ...of(({ plan }) => Object.fromEntries(plan.rows).kernel)],
    ["error (relative L2)", ...of(({ error }) => exponent(error))],
    ["error of the worst row", ...of(({ worst }) => exponent(worst))],
    ["time", ...of(({ time }) => `${duration(time.seconds)} (median of ${time.runs}, ${time.clock === "page" ? "the page's clock" : "timestamps"})`)],
    ["speed", ...of(({ plan, time }) => `${(plan.flops / time.seconds / 1e9).toFixed(2)} GFLOP/s`)],
    ["bytes copied", ...of(({ plan }) => plan.bytes_copied.toLocaleString("en"))],
    ["rows checked", ...of(() => `${count * heads} of ${size * heads}`)],
  ]);
  const refused = results.filter(({ refused }) => refused);
  status.textContent = refused.length === 0 ? "Computed." : refused.map(({ device, refused }) => `${device}: ${refused}`).join(" ");
  root.dataset.error = String(results[0].error);
}

async function begin() {
  let rapt;
  try {
    rapt = await import("../web/index.js");
    await rapt.load();
  } catch (error) {
    status.textContent = `This copy of the site is built without the package (cargo xtask web): ${error.message}`;
    return;
  }
  try {
    const { name, vendor, architecture, limits, lacks } = await rapt.adapter();
    rows(tables.adapter, [
      ["adapter", [name, vendor, architecture].filter((text, at, all) => text && all.indexOf(text) === at).join(", ")],
      // Long words, which may be broken before a capital letter.
      ...Object.entries(limits).map(([limit, n]) => [limit.replace(/[A-Z]/g, "\u200b$&"), n.toLocaleString("en")]),
      ["lacks", lacks.join("; ")],
    ]);
  } catch (error) {
    status.textContent = error.message;
  }
  const button = form.querySelector("button");
  button.disabled = false;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    root.dataset.state = "running";
    try {
      await compute(rapt);
    } catch (error) {
      status.textContent = error.message;
    }
    root.dataset.state = "done";
    button.disabled = false;
  });
}

begin();
