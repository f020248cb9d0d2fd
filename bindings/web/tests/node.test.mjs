// The package in Node, on its CPU kernels: what it answers, what it refuses and how, and the conformance suite.
// WEB_PACKAGE: the package's folder; WEB_MODULE: which of its modules; WEB_SUITE: suite.wasm; WEB_PAGES: docs.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { pathToFileURL } from "node:url";
import { Harness } from "./harness.mjs";

const rapt = await import(pathToFileURL(`${process.env.WEB_PACKAGE}/index.js`));
const { RaptError, attention, attentionSync, explain, reference } = rapt;
const { WEB_MODULE = "rapt-simd128.wasm" } = process.env;
const isa = WEB_MODULE.includes("simd128") ? "simd128" : "scalar";
// What this engine takes by itself is the module with vectors.
if (isa === "scalar") await rapt.load(await readFile(`${process.env.WEB_PACKAGE}/${WEB_MODULE}`));

const count = (shape) => shape.reduce((n, size) => n * size, 1);
// Numbers of a small generator, exact in float16 and bfloat16: eighths from -2 to 2.
function numbers(n, seed) {
  let state = seed;
  return Array.from({ length: n }, () => ((state = (state * 1103515245 + 12345) % 2 ** 31) % 33 - 16) / 8);
}
const halves = { float16: (x) => halfOf(x), bfloat16: (x) => new Uint32Array(new Float32Array([x]).buffer)[0] >>> 16 };
function halfOf(x) {
  if (x === 0) return 0;
  const exponent = Math.floor(Math.log2(Math.abs(x)));
  return (x < 0 ? 0x8000 : 0) | ((exponent + 15) << 10) | ((Math.abs(x) / 2 ** exponent - 1) * 1024);
}
function tensor(shape, seed, dtype = "float32") {
  const values = numbers(count(shape), seed);
  switch (dtype) {
    case "float32": return { data: Float32Array.from(values), shape };
    case "float64": return { data: Float64Array.from(values), shape };
    default: return { data: Uint16Array.from(values, halves[dtype]), shape, dtype };
  }
}
function decode({ data, dtype }) {
  if (dtype === "bfloat16") return Array.from(data, (bits) => new Float32Array(new Uint32Array([bits << 16]).buffer)[0]);
  if (dtype !== "float16" || data.constructor.name === "Float16Array") return Array.from(data);
  return Array.from(data, (bits) => {
    const [sign, exponent, rest] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
    return sign * (exponent === 0 ? rest * 2 ** -24 : (1 + rest / 1024) * 2 ** (exponent - 15));
  });
}
function relative(got, expected) {
  let [wrong, all] = [0, 0];
  expected.forEach((x, at) => ((wrong += (got[at] - x) ** 2), (all += x ** 2)));
  return Math.sqrt(wrong / (all || 1));
}
const most = { float64: 1e-15, float32: 1e-6, float16: 2 ** -11, bfloat16: 2 ** -8 };

for (const dtype of ["float32", "float64", "float16", "bfloat16"]) {
  test(`${dtype} is the definition's`, async () => {
    const [q, k, v] = [tensor([2, 4, 5, 16], 1, dtype), tensor([2, 2, 7, 16], 2, dtype), tensor([2, 2, 7, 8], 3, dtype)];
    const options = { causal: "bottom_right", softcap: 3, return_lse: true };
    const { out, lse, plan } = await attention(q, k, v, options);
    const expected = await reference(q, k, v, options);
    assert.deepEqual([out.shape, out.strides, out.dtype], [[2, 4, 5, 8], [160, 40, 8, 1], dtype]);
    assert.deepEqual([lse.shape, lse.dtype], [[2, 4, 5], dtype === "float64" ? "float64" : "float32"]);
    assert.ok(relative(decode(out), expected.out) < most[dtype]);
    assert.ok(relative(lse.data, expected.lse) < most[dtype === "float64" ? dtype : "float32"]);
    const size = { float64: 8, float32: 4 }[dtype] ?? 2;
    assert.equal(plan.bytes_copied, size * (640 + 448 + 224 + 320) + (dtype === "float64" ? 8 : 4) * 40);
    assert.ok(plan.rows.some(([name, text]) => name === "why" && text.includes("copied to WebAssembly's memory and back")));
    assert.equal(out.data.constructor, q.data.constructor);
    assert.deepEqual(decode(attentionSync(q, k, v, options).out), decode(out));
  });
}

test("strides, offsets, layouts and an output among other numbers", async () => {
  // [batch, len, heads, dim] in memory, backwards along len.
  const memory = { data: Float32Array.from(numbers(2 * 5 * 3 * 8 + 3, 9)), shape: [2, 3, 5, 8], strides: [120, 8, -24, 1], offset: 3 + 96 };
  const plain = { data: new Float32Array(240), shape: [2, 3, 5, 8] };
  for (let b = 0; b < 2; b++) for (let h = 0; h < 3; h++) for (let i = 0; i < 5; i++) for (let d = 0; d < 8; d++) {
    plain.data[((b * 3 + h) * 5 + i) * 8 + d] = memory.data[99 + b * 120 + h * 8 - i * 24 + d];
  }
  const expected = (await attention(plain, plain, plain)).out.data;
  assert.deepEqual((await attention(memory, memory, memory)).out.data, expected);
  const swapped = (of) => ({ ...of, shape: [2, 5, 3, 8], strides: [of.strides[0], of.strides[2], of.strides[1], of.strides[3]] });
  const bshd = await attention(swapped(memory), swapped(memory), swapped(memory), { layout: "bshd" });
  assert.deepEqual(bshd.out.shape, [2, 5, 3, 8]);
  assert.equal(bshd.out.data[8], expected[40]);
  const out = { data: new Float32Array(600).fill(7), shape: [2, 3, 5, 8], strides: [300, 100, 10, 1], offset: 20 };
  const given = await attention(memory, memory, memory, { out });
  assert.equal(given.out.data, out.data);
  const touched = new Set();
  expected.forEach((x, n) => {
    const at = 20 + Math.floor(n / 120) * 300 + (Math.floor(n / 40) % 3) * 100 + (Math.floor(n / 8) % 5) * 10 + (n % 8);
    assert.equal(out.data[at], x);
    touched.add(at);
  });
  out.data.forEach((x, at) => assert.ok(touched.has(at) || x === 7, `element ${at} is nobody's`));
});

test("a mask of bytes, sinks and slopes are the definition's", async () => {
  const [q, k, v] = [tensor([4, 6, 8], 4), tensor([2, 9, 8], 5), tensor([2, 9, 8], 6)];
  const options = {
    mask: { data: Uint8Array.from(numbers(54, 7), (x) => (x > 0 ? 1 : 0)), dtype: "bool", shape: [6, 9] },
    sinks: tensor([4], 8), alibi_slopes: tensor([4], 9), window: [4, null], scale: 0.3,
  };
  const { out } = await attention(q, k, v, options);
  assert.ok(relative(out.data, (await reference(q, k, v, options)).out) < 1e-6);
});

const q = tensor([1, 2, 3, 4], 1);
const refusals = [
  ["DtypeMismatchError", { k: tensor([1, 2, 3, 4], 1, "float64") }, {}, /k has dtype float64, q has float32/, /Float32Array\.from\(k\.data\)/],
  ["DtypeMismatchError", { k: { ...q, dtype: "float16" } }, {}, /k is a Float32Array, which holds float32, and its dtype says "float16"/, /dtype: "float32"/],
  ["UnsupportedDtypeError", { q: { data: new Uint16Array(24), shape: [1, 2, 3, 4] } }, {}, /q is a Uint16Array, which does not tell its dtype/, /dtype: "float16"` or `dtype: "bfloat16"/],
  ["UnsupportedDtypeError", { q: { data: new Int32Array(24), shape: [1, 2, 3, 4] }, k: { data: new Int32Array(24), shape: [1, 2, 3, 4] }, v: { data: new Int32Array(24), shape: [1, 2, 3, 4] } }, {}, /q has dtype int32, which is not served there/, /Float32Array\.from\(q\.data\)/],
  ["UnsupportedDtypeError", { q: { ...q, dtype: "half" } }, {}, /q has dtype "half"; there are float64, /, /dtype: "float32"/],
  ["ShapeError", { k: { ...q, shape: [1, 2, 3, 2] } }, {}, /k has head_dim 2, q has 4/, /padding/],
  ["ShapeError", { k: { ...q, shape: [1, 2, 2.5, 4] } }, {}, /shape of k is \[1, 2, 2\.5, 4\]/, /^$/],
  ["LayoutError", { k: { ...q, shape: [1, 2, 4, 4] }, v: { ...q, shape: [1, 2, 4, 4] } }, {}, /k of shape \[1, 2, 4, 4\].*reaches bytes 0\.\.128/, /inside its own data/],
  ["LayoutError", {}, { out: q }, /out shares memory with q/, /array of its own/],
  ["LayoutError", {}, { out: { data: new Float32Array(24), shape: [1, 2, 3, 4], strides: [24, 0, 4, 1] } }, /from two places/, /new q\.data\.constructor\(24\)/],
  ["KindError", { v: { data: [1, 2], shape: [2] } }, {}, /data of v is \[1, 2\]/, /Float32Array/],
  ["KindError", { v: null }, {}, /v is null/, /data, shape/],
  ["OptionError", {}, { is_causal: true }, /there is no option "is_causal"/, /^$/],
  ["OptionError", {}, { causal: "bottom-right" }, /causal = "bottom-right"; allowed: .*"bottom_right"/, /^$/],
  ["OptionError", {}, { scale: NaN }, /scale = NaN; allowed: any finite number/, /^$/],
  ["OptionError", {}, { softcap: 0 }, /softcap = 0/, /^$/],
  ["OptionError", {}, { window: [1, -1] }, /window = \[1, -1\]/, /^$/],
  ["OptionError", {}, { layout: "sbhd" }, /layout = "sbhd"/, /^$/],
  ["OptionError", {}, { return_lse: 1 }, /return_lse = 1/, /^$/],
  ["OptionError", {}, { device: "cuda" }, /device = "cuda"; allowed: "wasm", "webgpu", a GPUDevice/, /^$/],
  ["ShapeError", {}, { mask: { data: new Uint8Array(4), dtype: "bool", shape: [4] } }, /mask of shape \[4\] does not broadcast to \[1, 2, 3, 3\]/, /\[1, 2, 3, 3\]/],
  ["UnsupportedDtypeError", {}, { mask: { data: new Uint8Array(3), shape: [3] } }, /mask is a Uint8Array, which does not tell its dtype/, /dtype: "bool"/],
  ["ShapeError", {}, { sinks: tensor([3], 1) }, /sinks has shape \[3\], expected \[2\]/, /one number per head/],
  ["DeviceError", {}, { device: "webgpu" }, /webgpu is not available: .*navigator\.gpu/, /device: "wasm"/],
];
for (const [code, tensors, options, message, hint] of refusals) {
  test(`${code}: ${message}`, async () => {
    const { q: of_q, k, v } = { q, k: q, v: q, ...tensors };
    const error = await attention(of_q, k, v, options).then(() => assert.fail("was served"), (error) => error);
    assert.ok(error instanceof RaptError, error.stack);
    assert.equal(error.code, code, error.message);
    assert.match(error.message, message);
    assert.match(error.hint, hint);
    assert.ok(error.hint === "" || error.message.endsWith(`. Mend: ${error.hint}`));
  });
}

test("a plan is told without a run", async () => {
  const { kernel, rows, flops } = await explain(q, q, q);
  assert.deepEqual([kernel, flops], ["decode", 2 * 3 * 3 * 2 * 8]);
  assert.equal(Object.fromEntries(rows).kernel, `decode float32 on ${isa}`);
});

test("nothing is kept of a call: memory does not grow", async () => {
  const [a, b] = [tensor([1, 8, 64, 64], 1), tensor([1, 8, 64, 64], 2)];
  for (let n = 0; n < 3; n++) attentionSync(a, b, b, { return_lse: true });
  const before = process.memoryUsage.rss();
  for (let n = 0; n < 300; n++) attentionSync(a, b, b, { return_lse: true });
  assert.ok(process.memoryUsage.rss() - before < 64e6, "300 calls copy 157 MB");
});

// Blocks of the guide that open with ```js alone, each a whole program.
const pages = await readFile(`${process.env.WEB_PAGES}/start/browser.md`, "utf8");
const programs = [...pages.matchAll(/^```js\n([^]*?)^```$/gm)].map(([, program]) => program);
test("the guide has programs", () => assert.ok(programs.length >= 3));
for (const [at, program] of programs.entries()) {
  test(`program ${at + 1} of the guide`, async (context) => {
    context.mock.method(console, "assert", (is) => assert.ok(is));
    const address = pathToFileURL(`${process.env.WEB_PACKAGE}/index.js`);
    await import(`data:text/javascript,${encodeURIComponent(program.replaceAll('"rapt-attention"', `"${address}"`))}`);
  });
}

test("the conformance suite", async () => {
  const harness = new Harness(rapt);
  const compiled = await WebAssembly.compile(await readFile(process.env.WEB_SUITE));
  const whole = process.env.RAPT_WHOLE === "1";
  const said = harness.runSync(compiled, 0, 0x7a97, whole ? 400 : 40, 0b1111, 0b11);
  console.log(`${harness.calls} calls, ${harness.copied} bytes copied, kernels ${JSON.stringify(harness.kernels)}; ${said}`);
  assert.match(said, /^conforms: /);
  assert.ok(!said.includes("unsupported"), "all that is asked is served");
  assert.ok(harness.kernels.forward > 0 && harness.kernels.decode > 0 && harness.kernels.empty > 0);
});
