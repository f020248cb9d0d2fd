// The package in headless Chromium on SwiftShader, a GPU that is computed on the processor: the conformance suite on arrays and in buffers,
// stores of 16 bits by atomic operations, errors of WebGPU, and the page of the documentation with a picture.
// WEB_PACKAGE, WEB_SUITE: as of node.test.mjs; WEB_CHROMIUM: the browser; WEB_SITE: the built documentation; WEB_PICTURES: a folder.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";
import { after, before, test } from "node:test";
import { chromium } from "playwright-core";

const { WEB_PACKAGE, WEB_SUITE, WEB_CHROMIUM, WEB_SITE, WEB_PICTURES, RAPT_WHOLE } = process.env;
const whole = RAPT_WHOLE === "1";
const FLAGS = [
  "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--no-sandbox", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
];
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm", ".css": "text/css", ".svg": "image/svg+xml" };
const ROOTS = { package: WEB_PACKAGE, tests: import.meta.dirname, site: WEB_SITE };

async function answer(request, response) {
  const path = normalize(new URL(request.url, "http://localhost").pathname);
  const [, root, ...rest] = path.split("/");
  const file = path === "/suite.wasm" ? WEB_SUITE : ROOTS[root] && join(ROOTS[root], ...rest);
  try {
    const bytes = await readFile(file);
    response.writeHead(200, { "content-type": TYPES[extname(file)] ?? "application/octet-stream" }).end(bytes);
  } catch {
    response.writeHead(404).end();
  }
}

let server, browser, page, address;
const said = [];
const kernels = new Set();
before(async () => {
  server = createServer(answer).listen(0, "127.0.0.1");
  await new Promise((done) => server.once("listening", done));
  address = `http://127.0.0.1:${server.address().port}`;
  browser = await chromium.launch({ executablePath: WEB_CHROMIUM, headless: true, args: FLAGS });
  page = await browser.newPage();
  page.on("console", (message) => said.push(`${message.type()}: ${message.text()}`));
  page.on("pageerror", (error) => said.push(`error: ${error.message}`));
  await page.goto(`${address}/tests/page.html`);
  await page.waitForFunction(() => window.isReady, undefined, { timeout: 20_000 });
});
after(async () => {
  await browser?.close();
  server?.close();
});

test("the adapter is SwiftShader, without what the kernels could use", async () => {
  const report = await page.evaluate(() => window.rapt.adapter());
  console.log(JSON.stringify(report));
  assert.match(`${report.name} ${report.vendor} ${report.architecture}`.toLowerCase(), /swiftshader/);
  assert.ok(report.limits.maxStorageBuffersPerShaderStage >= 9);
  assert.ok(report.lacks[0].startsWith("16-bit stores"));
});

// float32, float16, bfloat16. SwiftShader takes seconds to compile a kernel, of which each dtype of tensors, masks and outputs has its own.
const F32 = 0b001, HALVES = 0b110, ALL = 0b111;
const [FIXED, FEW_QUERIES] = [0b01, 0b10];
for (const [what, device, ...numbers] of [
  ["arrays of the host", "webgpu", 0x7a97, whole ? 200 : 6, ALL, whole ? FIXED | FEW_QUERIES : 0],
  ["GPUBuffers with offsets and bands", "buffers", 0x6e6e, whole ? 400 : 8, ALL, FEW_QUERIES],
  ["the stride zoo and exploits in GPUBuffers", "buffers", 0x5eed, 0, whole ? ALL : F32, FIXED],
  ["16-bit numbers beside others' bytes", "buffers", 0x16b, whole ? 200 : 4, HALVES, 0],
]) {
  test(`the conformance suite: ${what}`, async () => {
    const ran = await page.evaluate(([device, numbers]) => window.suite(device, ...numbers), [device, numbers]);
    console.log(`${what}: ${ran.seconds.toFixed(1)} s, ${ran.calls} calls, ${ran.copied} bytes copied, kernels ${JSON.stringify(ran.kernels)}; ${ran.said}`);
    assert.match(ran.said, /^conforms: /);
    assert.ok(!ran.said.includes("unsupported"), "all that is asked is served");
    assert.ok(Object.keys(ran.kernels).length > 0 && ran.calls > 0);
    for (const kernel of Object.keys(ran.kernels)) kernels.add(kernel);
    assert.equal(ran.copied === 0, device === "buffers");
  });
}

test("decode and forward were among the kernels", () => assert.ok(kernels.has("decode") && kernels.has("forward")));

test("float64 is refused, and never computed as something else", async () => {
  const error = await page.evaluate(async () => {
    const q = { data: new Float64Array(8), shape: [2, 4] };
    return window.rapt.attention(q, q, q, { device: "webgpu" }).then(() => null, ({ name, code, message }) => ({ name, code, message }));
  });
  assert.deepEqual([error.name, error.code], ["RaptError", "UnsupportedError"]);
  assert.match(error.message, /float64/);
});

test("GPUBuffers that cannot be bound, and devices that lack what is needed, are refused by name", async () => {
  const errors = await page.evaluate(async () => {
    const device = await window.gpu();
    const { rapt } = window;
    const buffer = (size, usage) => device.createBuffer({ size, usage });
    const of = (data, offset = 0) => ({ data, shape: [2, 4], dtype: "float32", offset });
    const [q, out] = [of(buffer(64, 0x80)), of(buffer(64, 0x80))];
    const said = (promise) => promise.then(() => "was served", ({ code, message }) => `${code}: ${message}`);
    const bare = await (await navigator.gpu.requestAdapter()).requestDevice();
    const array = { data: new Float32Array(8), shape: [2, 4] };
    return {
      usage: await said(rapt.attention(of(buffer(64, 0x8)), q, q, { device })),
      shared: await said(rapt.attention(q, q, q, { device, out: of(q.data, 8) })),
      outside: await said(rapt.attention(q, of(q.data, 9), q, { device, out })),
      kinds: await said(rapt.attention(q, array, q, { device })),
      device: await said(rapt.attention(q, q, q)),
      dtype: await said(rapt.attention({ ...q, dtype: undefined }, q, q, { device })),
      bare: bare.limits.maxStorageBuffersPerShaderStage < 9 ? await said(rapt.attention(array, array, array, { device: bare })) : "DeviceError: storage buffers",
    };
  });
  assert.match(errors.usage, /^UnsupportedError: a buffer of q without usage STORAGE/);
  assert.match(errors.shared, /^UnsupportedError: out in the buffer of q/);
  assert.match(errors.outside, /^LayoutError: k .* reaches bytes 0\.\.32/);
  assert.match(errors.kinds, /^KindError: k is a Float32Array, q is a GPUBuffer/);
  assert.match(errors.device, /^OptionError: device = null; allowed: the GPUDevice/);
  assert.match(errors.dtype, /^UnsupportedDtypeError: q is a GPUBuffer/);
  assert.match(errors.bare, /^DeviceError: .*storage buffers/);
});

test("a lost device is an error of its own, and the page's GPU opens anew", async () => {
  const [lost, again] = await page.evaluate(async () => {
    const device = await (await navigator.gpu.requestAdapter()).requestDevice({ requiredLimits: { maxStorageBuffersPerShaderStage: 9 } });
    const q = { data: new Float32Array(8).fill(1), shape: [2, 4] };
    await window.rapt.attention(q, q, q, { device });
    device.destroy();
    await device.lost;
    const error = await window.rapt.attention(q, q, q, { device }).then(() => "was served", ({ code, message }) => `${code}: ${message}`);
    return [error, Array.from((await window.rapt.attention(q, q, q, { device: "webgpu" })).out.data)];
  });
  assert.match(lost, /^DeviceError: webgpu failed: the device is lost/);
  assert.deepEqual(again, Array(8).fill(1));
});

test("runs are timed", async () => {
  const { timing, plan } = await page.evaluate(async () => {
    const q = { data: new Float32Array(4 * 64 * 64).fill(0.5), shape: [4, 64, 64] };
    const { timing, plan } = await window.rapt.attention(q, q, q, { device: "webgpu", timing: true });
    return { timing, plan };
  });
  console.log(JSON.stringify(timing));
  assert.ok(timing.seconds > 0 && timing.seconds < 60);
  assert.equal(plan.kernel, "forward");
});

test("the page of the documentation computes on this GPU and shows its error", { skip: WEB_SITE === undefined && "the documentation is not built" }, async () => {
  await page.setViewportSize({ width: 1280, height: 1500 });
  await page.goto(`${address}/site/start/browser.html`);
  await page.click("#rapt-try button");
  await page.waitForSelector("#rapt-try[data-state=done]", { timeout: 120_000 });
  const shown = await page.$eval("#rapt-try", (element) => ({ text: element.innerText, ...element.dataset }));
  await page.locator("#rapt-try").scrollIntoViewIfNeeded();
  await page.screenshot({ path: join(WEB_PICTURES, "browser-page.png") });
  assert.match(shown.text.toLowerCase(), /swiftshader/);
  assert.match(shown.text, /forward float32 on wgsl\s+forward float32 on simd128/);
  assert.ok(Number(shown.error) > 0 && Number(shown.error) < 1e-6, `error ${shown.error}`);
  await page.setViewportSize({ width: 420, height: 1500 });
  await page.locator("#rapt-try").scrollIntoViewIfNeeded();
  await page.screenshot({ path: join(WEB_PICTURES, "browser-page-phone.png") });
});

test("the console has no error", () => {
  // The theme of the documentation asks a server how many stars its repository has, and the browser for an icon.
  const is_ours = (line) => line.startsWith("error") && !line.includes("Failed to load resource");
  assert.deepEqual(said.filter(is_ours), []);
});
